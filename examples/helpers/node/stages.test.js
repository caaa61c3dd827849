"use strict";
const test = require("node:test");
const assert = require("node:assert");
const http = require("node:http");
const stages = require("./stages");

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// One request to a handler: the header, the trailer and the body of its answer.
async function ask(handler, headers = {}) {
  const server = http.createServer(stages.wrap(handler)).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  try {
    return await new Promise((done, fail) => {
      http
        .get({ port: server.address().port, host: "127.0.0.1", headers, agent: false }, (answer) => {
          let body = "";
          answer.on("data", (part) => (body += part));
          answer.on("end", () => done({ body, header: parse(answer.headers["server-timing"]), trailer: parse(answer.trailers["server-timing"]) }));
        })
        .on("error", fail);
    });
  } finally {
    server.close();
  }
}

function parse(value = "") {
  const out = {};
  for (const one of value.split(", ").filter(Boolean)) {
    const [name, ...parameters] = one.split(";");
    (out[name] ||= []).push(Object.fromEntries(parameters.map((p) => [p.split("=")[0], Number(p.split("=")[1])])));
  }
  return out;
}

test("a whole answer tells all in its header", async () => {
  const { body, header } = await ask(async (request, response) => {
    const x = stages.stage("preprocess", () => 3);
    const text = await stages.stage("forward", { batch: 2 }, async (told) => {
      await sleep(20);
      told.tokens = 5;
      return "x".repeat(x);
    });
    response.end(text);
  });
  assert.equal(body, "xxx");
  assert.deepEqual(Object.keys(header), ["preprocess", "forward", "total"]);
  assert.equal(header.forward[0].batch, 2);
  assert.equal(header.forward[0].tokens, 5);
  assert.ok(header.forward[0].dur >= 19, JSON.stringify(header));
});

async function stream(request, response) {
  response.write("a");
  await stages.stage("forward", () => sleep(5));
  response.end("b");
}

test("a stream tells all in a trailer if the client takes them", async () => {
  const { body, header, trailer } = await ask(stream, { TE: "trailers" });
  assert.equal(body, "ab");
  assert.deepEqual(Object.keys(header), []);
  assert.deepEqual(Object.keys(trailer), ["forward", "total"]);
});

test("and what is known at its beginning if not", async () => {
  const { body, trailer } = await ask(stream);
  assert.equal(body, "ab");
  assert.deepEqual(trailer, {});
});

test("inner stages are taken off outer ones", async () => {
  const { header } = await ask(async (request, response) => {
    await stages.stage("preprocess", async () => {
      await stages.stage("queue", () => sleep(40));
    });
    response.end();
  });
  assert.ok(header.preprocess[0].dur < 30, JSON.stringify(header));
  assert.ok(header.queue[0].dur >= 39);
});

test("an exception is told and passed on", async () => {
  const { header } = await ask(async (request, response) => {
    await assert.rejects(stages.stage("forward", async () => { throw new Error("no"); }), /no/);
    assert.throws(() => stages.stage("decode", () => { throw new Error("no"); }), /no/);
    response.end();
  });
  assert.deepEqual(Object.keys(header), ["forward", "decode", "total"]);
});

test("requests at once do not mix", async () => {
  const server = http.createServer(stages.wrap(async (request, response) => {
    const n = Number(request.url.slice(1));
    await stages.stage("forward", { seq: n }, () => sleep(n % 7));
    response.end();
  })).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  await Promise.all(Array.from({ length: 50 }, (_, n) => new Promise((done, fail) => {
    http.get(`http://127.0.0.1:${server.address().port}/${n + 1}`, (answer) => {
      answer.resume();
      const told = parse(answer.headers["server-timing"]);
      answer.on("end", () => (told.forward.length === 1 && told.forward[0].seq === n + 1 ? done() : fail(new Error(JSON.stringify(told)))));
    }).on("error", fail);
  })));
  server.close();
});

test("names that would break the header are refused", () => {
  assert.throws(() => stages.stage("a;b", () => 1), /cannot stand in a header/);
  assert.throws(() => stages.stage("a", { "b c": 1 }, () => 1), /cannot stand in a header/);
});

test("off does nothing", async () => {
  stages.configure({ on: false });
  const { header } = await ask(async (request, response) => response.end(String(await stages.stage("forward", () => 1))));
  stages.configure({ on: true });
  assert.deepEqual(header, {});
});
