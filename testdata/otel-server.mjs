// A server that makes its own OpenTelemetry spans, as Node's SDK does: the
// port is printed, POST /asr answers, and each request has a SERVER span with
// preprocess and forward below it.
//
//   node otel-server.mjs http|proto|grpc http://127.0.0.1:4318 FOLDER-WITH-NODE_MODULES
import http from "node:http";
import { createRequire } from "node:module";

const [, , transport, endpoint, modules] = process.argv;
const require = createRequire(modules + "/");
const { BatchSpanProcessor } = require("@opentelemetry/sdk-trace-base");
const { NodeTracerProvider } = require("@opentelemetry/sdk-trace-node");
const { resourceFromAttributes } = require("@opentelemetry/resources");
const { W3CTraceContextPropagator } = require("@opentelemetry/core");
const api = require("@opentelemetry/api");
const { OTLPTraceExporter } = require("@opentelemetry/exporter-trace-otlp-" + transport);

const url = transport === "grpc" ? endpoint : endpoint + "/v1/traces";
const provider = new NodeTracerProvider({
  resource: resourceFromAttributes({ "service.name": "asr-server" }),
  spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter({ url }), { scheduledDelayMillis: 200 })],
});
provider.register({ propagator: new W3CTraceContextPropagator() });
const tracer = api.trace.getTracer("asr-server");
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function work(name, ms, attributes) {
  await tracer.startActiveSpan(name, { attributes }, async (span) => {
    await sleep(ms);
    span.end();
  });
}

const server = http.createServer((request, response) => {
  const parent = api.propagation.extract(api.context.active(), request.headers);
  api.context.with(parent, () =>
    tracer.startActiveSpan("POST /asr", { kind: api.SpanKind.SERVER }, async (span) => {
      for await (const _ of request);
      await work("preprocess", 20);
      await work("forward", 50, { batch_size: 2, "weir.audio.duration": 2.5 });
      response.end('{"text":"one"}');
      span.end();
    }),
  );
});
server.listen(0, "127.0.0.1", () => console.log(`listening on http://127.0.0.1:${server.address().port}`));
process.on("SIGTERM", async () => {
  await provider.shutdown();
  process.exit(0);
});
