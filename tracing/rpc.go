package tracing

import (
	"strings"

	"go.opentelemetry.io/otel/attribute"

	"weir/classifier"
)

// What OpenTelemetry's conventions for RPC ask of gRPC calls. Their method is
// a name that weir knows, or _OTHER: clients can think of any.

func isRPC(o *classifier.Observation) bool { return o.Protocol == "grpc" }

// rpcMethod is "package.Service/Method", or _OTHER.
func rpcMethod(o *classifier.Observation) string {
	if o.Route == "" {
		return otherMethod
	}
	return strings.TrimPrefix(o.Route, "/")
}

// rpcName is the name of a call's spans.
func rpcName(o *classifier.Observation) string {
	if o.Route == "" {
		return "grpc"
	}
	return strings.TrimPrefix(o.Route, "/")
}

// rpcServerFailed tells whether a call is an error for who gave the service:
// a client's mistake, or a server that is full, is none.
func rpcServerFailed(o *classifier.Observation) bool {
	switch o.RPCStatus {
	case "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS":
		return true
	}
	return isRPC(o) && o.RPCStatus == "" && o.Outcome == classifier.Failed
}

// rpcClientFailed tells whether a call is an error for who made it.
func rpcClientFailed(o *classifier.Observation) bool {
	return o.RPCStatus != "OK" && o.Outcome != classifier.Canceled
}

// rpcError is the value of error.type: weir's own word, or the status.
func rpcError(o *classifier.Observation) string {
	if o.Error != "" {
		return o.Error
	}
	return o.RPCStatus
}

func appendRPC(b []byte, o *classifier.Observation) []byte {
	b = appendString(b, "rpc.system.name", "grpc")
	b = appendString(b, "rpc.method", rpcMethod(o))
	return appendString(b, "rpc.status_code", o.RPCStatus)
}

// appendRPCServer adds a call's attributes and status to its SERVER span.
func (t *tree) appendRPCServer(b []byte) []byte {
	o := t.o
	b = appendRPC(b, o)
	if o.Route == "" {
		b = appendString(b, "rpc.method_original", strings.TrimPrefix(o.Target, "/"))
	}
	b = appendSeconds(b, "weir.deadline", o.Deadline)
	b = appendString(b, "network.protocol.version", "2")
	b = appendString(b, "user_agent.original", o.UserAgent)
	b = appendPeers(b, o)
	if rpcServerFailed(o) {
		return appendError(appendString(b, "error.type", rpcError(o)))
	}
	return appendString(b, "error.type", o.Error)
}

// appendRPCClient adds a call's attributes and status to its CLIENT span.
func (t *tree) appendRPCClient(b []byte) []byte {
	o := t.o
	b = append(appendRPC(b, o), t.server...)
	b = appendString(b, "network.protocol.version", "2")
	if rpcClientFailed(o) {
		b = appendError(appendString(b, "error.type", rpcError(o)))
	}
	return b
}

// rpcMetrics are the instruments of gRPC calls.
type rpcMetrics struct {
	serverDuration, clientDuration *family
	calls                          map[call]answerSeries
}

// call is what the series of one call differ in.
type call struct{ method, status, err string }

// observe counts one finished call.
func (r *rpcMetrics) observe(o *classifier.Observation, server []attribute.KeyValue) {
	s := r.series(o, server)
	s.server.recordTraced(o.Total().Seconds(), o)
	if !o.Dequeued.IsZero() {
		s.client.record(max(0, o.Total()-o.QueueWait()).Seconds())
	}
}

func (r *rpcMetrics) series(o *classifier.Observation, server []attribute.KeyValue) answerSeries {
	c := call{method: rpcMethod(o), status: o.RPCStatus, err: o.Error}
	if c.err == "" && rpcServerFailed(o) {
		c.err = o.RPCStatus
	}
	if found, ok := r.calls[c]; ok {
		return found
	}
	if len(r.calls) >= maxAnswers {
		c = call{method: otherMethod, err: "other"}
		if found, ok := r.calls[c]; ok {
			return found
		}
	}
	kv := []attribute.KeyValue{attribute.String("rpc.system.name", "grpc"), attribute.String("rpc.method", c.method)}
	if c.status != "" {
		kv = append(kv, attribute.String("rpc.status_code", c.status))
	}
	if c.err != "" {
		kv = append(kv, attribute.String("error.type", c.err))
	}
	made := answerSeries{r.serverDuration.series(kv...), r.clientDuration.series(append(kv, server...)...)}
	r.calls[c] = made
	return made
}
