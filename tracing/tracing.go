// Package tracing carries what servers say into the record of a request, and
// the record out to tracing and metrics backends.
//
// The input half turns header fields into a [classifier.Observation]. An
// [Ingest] reads stage timings from the server's answer: Server-Timing as a
// header or trailer, the x-*-time headers of Hugging Face's servers, totals
// that gateways add, and names that the user maps. [RequestStart] reads how
// long a balancer in front of weir held the request; [ReadTraceparent] and
// [Sampler] place it in a trace. All of it runs on the request path: it copies
// what it keeps, allocates once per timed answer and looks at other fields
// only long enough to see that they are none of its own. Only durations are
// taken from other machines, never their clocks, and [Ingest.Finish] marks the
// ones that cannot be true.
//
// The output half builds spans, metrics and log records from finished records,
// off the request path: nothing there can slow, block or fail a request. It is
// the only importer of OpenTelemetry in weir.
package tracing
