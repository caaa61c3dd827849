package tracing

import (
	"strings"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

func rpcRequest(status string) *classifier.Observation {
	o := request()
	o.Protocol, o.Method, o.Model = "grpc", "POST", ""
	o.Target, o.Route, o.Class = "/a.ASR/Recognize", "/a.ASR/Recognize", "grpc /a.ASR/Recognize"
	o.RPCStatus, o.Deadline = status, 5*time.Second
	return o
}

func TestACallsSpansFollowTheConventionsForRPC(t *testing.T) {
	o := rpcRequest("OK")
	spans := spansOf(t, o, "")
	if a, b := spans[0].Name, spans[2].Name; a != "a.ASR/Recognize" || b != a {
		t.Errorf("spans are named %q and %q", a, b)
	}
	wantAttributes(t, spans[0], map[string]any{
		"rpc.system.name": "grpc", "rpc.method": "a.ASR/Recognize", "rpc.status_code": "OK", "network.protocol.version": "2",
		"client.address": "192.0.2.7", "network.peer.address": "192.0.2.7", "network.peer.port": int64(54321),
		"server.address": "asr.example", "server.port": int64(8000), "user_agent.original": "me/1", "weir.deadline": 5.0,
		"weir.queue.wait": 0.1, "weir.service.time": 0.29, "weir.unattributed": o.Unattributed().Seconds(), "weir.overhead": 0.00003, "weir.audio.duration": 12.5,
	})
	wantAttributes(t, spans[2], map[string]any{
		"rpc.system.name": "grpc", "rpc.method": "a.ASR/Recognize", "rpc.status_code": "OK", "network.protocol.version": "2",
		"server.address": "127.0.0.1", "server.port": int64(8001), "service.peer.name": "asr-server", "weir.timing.source": "header",
	})
	checkTree(t, o, spans)
}

func TestAnUnknownMethodIsNoName(t *testing.T) {
	o := rpcRequest("OK")
	o.Route, o.Target = "", "/made.Up/Name"
	s := spansOf(t, o, "")[0]
	if a := attributes(s); s.Name != "grpc" || a["rpc.method"] != "_OTHER" || a["rpc.method_original"] != "made.Up/Name" {
		t.Errorf("%s: %v", s.Name, a)
	}
}

func TestTheStatusOfACallIsAnErrorForWhoMadeItOrForWhoServedIt(t *testing.T) {
	for _, c := range []struct {
		status, word   string
		outcome        classifier.Outcome
		server, client bool
		serverType     any
	}{
		{"OK", "", classifier.OK, false, false, nil},
		{"NOT_FOUND", "", classifier.OK, false, true, nil},
		{"INTERNAL", "", classifier.OK, true, true, "INTERNAL"},
		{"DEADLINE_EXCEEDED", "", classifier.OK, true, true, "DEADLINE_EXCEEDED"},
		{"RESOURCE_EXHAUSTED", "", classifier.OK, false, true, nil},
		{"UNAVAILABLE", "server_reset", classifier.Failed, true, true, "server_reset"},
		{"CANCELLED", "client_gone", classifier.Canceled, false, false, "client_gone"},
		{"", "", classifier.OK, false, true, nil}, // the server ended the call without a status
	} {
		o := rpcRequest(c.status)
		o.Error, o.Outcome = c.word, c.outcome
		spans := spansOf(t, o, "")
		isError := func(s *tracepb.Span) bool { return s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR }
		if isError(spans[0]) != c.server || isError(spans[2]) != c.client || attributes(spans[0])["error.type"] != c.serverType {
			t.Errorf("%q: SERVER %v with %v, CLIENT %v", c.status, isError(spans[0]), attributes(spans[0])["error.type"], isError(spans[2]))
		}
	}
}

func TestCallsAreCountedAsCalls(t *testing.T) {
	m := testMetrics(t, Options{})
	m.Observe(rpcRequest("OK"))
	failed := rpcRequest("UNAVAILABLE")
	failed.Route = ""
	m.Observe(failed)
	refused := rpcRequest("RESOURCE_EXHAUSTED")
	refused.Dequeued, refused.Outcome, refused.Error = time.Time{}, classifier.Rejected, "queue_full"
	m.Observe(refused)
	text := scrape(t, m, "")
	for _, want := range []string{
		`rpc_server_call_duration_seconds_count{rpc_method="a.ASR/Recognize",rpc_status_code="OK",rpc_system_name="grpc"} 1`,
		`rpc_client_call_duration_seconds_count{rpc_method="a.ASR/Recognize",rpc_status_code="OK",rpc_system_name="grpc",server_address="127.0.0.1",server_port="8000"} 1`,
		`rpc_server_call_duration_seconds_count{error_type="UNAVAILABLE",rpc_method="_OTHER",rpc_status_code="UNAVAILABLE",rpc_system_name="grpc"} 1`,
		`rpc_server_call_duration_seconds_count{error_type="queue_full",rpc_method="a.ASR/Recognize",rpc_status_code="RESOURCE_EXHAUSTED",rpc_system_name="grpc"} 1`,
		`weir_requests_rejected_total{error_type="queue_full"} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(text, "http_server_request_duration_seconds_count{") {
		t.Error("calls are counted as requests of HTTP too")
	}
}

func TestSpansTellOfTLS(t *testing.T) {
	o := request()
	o.Scheme = "https"
	tr := newTree("asr.example:443", "https")
	tr.plan(o, "")
	spans := decode(t, tr.append(nil))
	if a, b := attributes(spans[0])["url.scheme"], attributes(spans[2])["url.full"]; a != "https" || b != "https://asr.example:443/v1/audio/transcriptions?token=REDACTED" {
		t.Errorf("%v, %v", a, b)
	}
	m := testMetrics(t, Options{})
	m.Observe(o)
	if !strings.Contains(scrape(t, m, ""), `url_scheme="https"`) {
		t.Error("metrics do not tell of TLS")
	}
}
