// Tells a proxy, a browser or a trace where a request's time went. Copy this
// file beside your server; it needs nothing but Node 16 or later.
//
//   const stages = require("./stages");
//   app.use(stages.middleware());                       // Express, Connect; or http.createServer(stages.wrap(handler))
//   ...
//   const features = await stages.stage("preprocess", () => decode(audio));
//   const text = await stages.stage("forward", { batch: 1, seq: features.length }, () => model.run(features));
//
// The names that weir understands: queue, preprocess, h2d, forward (or encode, prefill, decode), d2h, postprocess. The
// parameters: batch, seq, tokens, audio (seconds), bytes, n, sync. The stages go into the header Server-Timing; an
// answer whose head is sent before its body (a stream) gets them as a trailer, if it is chunked and the client sent
// "TE: trailers", else those up to there.
"use strict";
const { AsyncLocalStorage } = require("async_hooks");

const storage = new AsyncLocalStorage();
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/;
const MOST = 64; // stages of one request
let on = !/^(off|0|false)$/i.test(process.env.WEIR_STAGES || "");

const now = () => Number(process.hrtime.bigint()) / 1e6; // ms

class Record {
  constructor() {
    this.began = now();
    this.stages = [];
  }

  add(name, ms, parameters) {
    if (this.stages.length < MOST) this.stages.push(metric(name, ms, parameters));
  }

  value(total) {
    return (total ? [...this.stages, metric("total", now() - this.began)] : this.stages).join(", ");
  }
}

function metric(name, ms, parameters = {}) {
  let text = `${name};dur=${Math.max(0, ms).toFixed(3)}`;
  for (const [key, value] of Object.entries(parameters)) {
    const n = Number(value);
    if (Number.isFinite(n)) text += `;${key}=${Number.isInteger(n) ? n : n.toFixed(3)}`;
  }
  return text;
}

function check(...tokens) {
  for (const t of tokens) if (!TOKEN.test(t)) throw new TypeError(`${JSON.stringify(t)} cannot stand in a header`);
}

// Runs f as one stage, and returns what it returns: a value or a promise. f
// gets the parameters, to complete them. Inner stages are taken off outer ones.
function stage(name, parameters, f) {
  if (typeof parameters === "function") [parameters, f] = [{}, parameters];
  check(name, ...Object.keys(parameters));
  const context = storage.getStore();
  if (!on || !context) return f(parameters);
  const own = { record: context.record, inner: 0, outer: context };
  const began = now();
  const end = () => {
    const took = now() - began;
    context.inner += took;
    own.record.add(name, took - own.inner, parameters);
  };
  let result;
  try {
    result = storage.run(own, () => f(parameters));
  } catch (error) {
    end();
    throw error;
  }
  if (result && typeof result.then === "function") {
    return result.then(
      (value) => (end(), value),
      (error) => {
        end();
        throw error;
      },
    );
  }
  end();
  return result;
}

// Adds a stage that was timed elsewhere, in ms.
function add(name, ms, parameters = {}) {
  check(name, ...Object.keys(parameters));
  const context = storage.getStore();
  if (on && context) context.record.add(name, ms, parameters);
}

function begin(request, response, next) {
  const record = new Record();
  const { writeHead, end } = response;
  let ending = false;
  let trailer = false;
  response.writeHead = function (...args) {
    const head = args.find((a) => a && typeof a === "object");
    const sized = response.hasHeader("content-length") || (head && Object.keys(head).some((k) => k.toLowerCase() === "content-length"));
    trailer = !ending && !sized && /\btrailers\b/i.test(request.headers.te || "") && request.httpVersion === "1.1";
    if (trailer) {
      response.setHeader("Trailer", "Server-Timing");
    } else {
      const value = record.value(ending);
      if (value) response.setHeader("Server-Timing", value);
    }
    return writeHead.apply(this, args);
  };
  response.end = function (...args) {
    ending = true;
    if (trailer) response.addTrailers({ "Server-Timing": record.value(true) });
    return end.apply(this, args);
  };
  return storage.run({ record, inner: 0 }, next);
}

// For Express and Connect.
function middleware() {
  return (request, response, next) => (on ? begin(request, response, next) : next());
}

// For http.createServer.
function wrap(handler) {
  return (request, response) => (on ? begin(request, response, () => handler(request, response)) : handler(request, response));
}

function configure(options) {
  if (options.on !== undefined) on = Boolean(options.on);
}

module.exports = { stage, add, middleware, wrap, configure };
