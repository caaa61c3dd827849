package tracing

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
)

func decode(t testing.TB, raw []byte) []*tracepb.Span {
	t.Helper()
	var s tracepb.ScopeSpans
	if err := proto.Unmarshal(raw, &s); err != nil {
		t.Fatalf("the spans are no protobuf: %v", err)
	}
	if extra := s.ProtoReflect().GetUnknown(); len(extra) > 0 {
		t.Fatalf("%d bytes that no ScopeSpans has", len(extra))
	}
	for _, one := range s.Spans {
		if extra := one.ProtoReflect().GetUnknown(); len(extra) > 0 {
			t.Fatalf("span %s has %d bytes that no Span has", one.Name, len(extra))
		}
	}
	return s.Spans
}

// spansOf encodes the spans of o and reads them again.
func spansOf(t testing.TB, o *classifier.Observation, kept string) []*tracepb.Span {
	t.Helper()
	tr := newTree("127.0.0.1:8001", "")
	n := tr.plan(o, kept)
	spans := decode(t, tr.append(nil))
	if len(spans) != n {
		t.Errorf("%d spans were planned, and %d encoded", n, len(spans))
	}
	return spans
}

func attributes(s *tracepb.Span) map[string]any {
	m := make(map[string]any)
	for _, kv := range s.Attributes {
		if _, twice := m[kv.Key]; twice {
			m["twice:"+kv.Key] = true
		}
		switch v := kv.Value.Value.(type) {
		case *commonpb.AnyValue_StringValue:
			m[kv.Key] = v.StringValue
		case *commonpb.AnyValue_IntValue:
			m[kv.Key] = v.IntValue
		case *commonpb.AnyValue_DoubleValue:
			m[kv.Key] = v.DoubleValue
		case *commonpb.AnyValue_BoolValue:
			m[kv.Key] = v.BoolValue
		}
	}
	return m
}

func wantAttributes(t *testing.T, s *tracepb.Span, want map[string]any) {
	t.Helper()
	got := attributes(s)
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s: %s is %v, want %v", s.Name, k, got[k], v)
		}
	}
	for k, v := range got {
		if _, ok := want[k]; !ok {
			t.Errorf("%s: %s is %v, want none", s.Name, k, v)
		}
	}
}

func named(spans []*tracepb.Span, name string) *tracepb.Span {
	for _, s := range spans {
		if s.Name == name {
			return s
		}
	}
	return &tracepb.Span{Name: "no " + name}
}

func TestASpanInWireFormatIsWhatWasAsked(t *testing.T) {
	s := span{
		trace: [16]byte{1, 15: 2}, id: [8]byte{3, 7: 4}, parent: [8]byte{5, 7: 6}, state: []byte("a=1,b=2"),
		flags: flagSampled | flagsKnowRemote | flagRemote, kind: tracepb.Span_SPAN_KIND_SERVER,
		name: "POST ", rest: "/asr", start: 1_700_000_000_000_001_000, end: 1_700_000_000_000_002_000,
	}
	long := strings.Repeat("x", 300)
	b, at := openSpan(nil, &s)
	b = appendString(b, "text", "täxt")
	b = appendString(b, "none", "")
	b = appendString(b, "long", long)
	b = appendStrings(b, "both", "http://h", "/p")
	b = appendDigits(b, "digits", 503)
	b = appendInt(b, "int", -1)
	b = appendInt(b, "big", math.MaxInt64)
	b = appendDouble(b, "double", 0.25)
	b = appendTrue(b, "true")
	b = appendError(b)
	got := decode(t, closeMessage(b, at))
	text := func(k, v string) *commonpb.KeyValue {
		return &commonpb.KeyValue{Key: k, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: v}}}
	}
	integer := func(k string, v int64) *commonpb.KeyValue {
		return &commonpb.KeyValue{Key: k, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: v}}}
	}
	want := &tracepb.Span{
		TraceId: s.trace[:], SpanId: s.id[:], ParentSpanId: s.parent[:], TraceState: "a=1,b=2", Flags: 0x301,
		Name: "POST /asr", Kind: tracepb.Span_SPAN_KIND_SERVER, StartTimeUnixNano: uint64(s.start), EndTimeUnixNano: uint64(s.end),
		Attributes: []*commonpb.KeyValue{
			text("text", "täxt"), text("long", long), text("both", "http://h/p"), text("digits", "503"),
			integer("int", -1), integer("big", math.MaxInt64),
			{Key: "double", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_DoubleValue{DoubleValue: 0.25}}},
			{Key: "true", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_BoolValue{BoolValue: true}}},
		},
		Status: &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR},
	}
	if len(got) != 1 || !proto.Equal(got[0], want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

func TestLengthsOfAllSizesAreClosedRight(t *testing.T) {
	for _, n := range []int{0, 1, 126, 127, 128, 129, 16383, 16384, 3 << 20} {
		b, at := openMessage([]byte("before"), tagSpans)
		b = closeMessage(append(b, strings.Repeat("x", n)...), at)
		b = append(b, "after"...)
		v, size := protowire.ConsumeBytes(b[len("before")+1:])
		if size < 0 || len(v) != n || strings.Trim(string(v), "x") != "" || !strings.HasSuffix(string(b), "after") {
			t.Errorf("%d bytes came back as %d", n, len(v))
		}
	}
}

func TestTextIsMadeValidAndCut(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"plain", "plain"},
		{"täxt 语音", "täxt 语音"},
		{"a\xffb", "a\uFFFDb"},
		{"\xc3", "\uFFFD"},
		{strings.Repeat("x", maxValue+9), strings.Repeat("x", maxValue)},
		{strings.Repeat("x", maxValue-1) + "ä", strings.Repeat("x", maxValue-1) + "\uFFFD"},
	} {
		got := string(appendText(nil, c.in))
		if got != c.want || textSize(c.in) != len(got) {
			t.Errorf("%.20q became %.20q of %d bytes (%d announced), want %.20q", c.in, got, len(got), textSize(c.in), c.want)
		}
	}
}

func TestARequestBecomesTheSpansOfTheModel(t *testing.T) {
	o := request()
	o.TraceState = "vendor=1"
	spans := spansOf(t, o, "")
	names := make([]string, len(spans))
	for i, s := range spans {
		names[i] = s.Name
		if string(s.TraceId) != string(o.TraceID[:]) || s.TraceState != "vendor=1" {
			t.Errorf("%s is in trace %x, %q", s.Name, s.TraceId, s.TraceState)
		}
	}
	want := []string{"POST /v1/audio/transcriptions", "queue", "POST", "preprocess", "transfer", "forward", "transfer"}
	if !slices.Equal(names, want) {
		t.Fatalf("spans are %q, want %q", names, want)
	}
	server, queue, client := spans[0], spans[1], spans[2]
	if server.Kind != tracepb.Span_SPAN_KIND_SERVER || string(server.ParentSpanId) != string(o.ParentID[:]) || server.Flags != 0x301 {
		t.Errorf("SERVER is %v", server)
	}
	if queue.Kind != tracepb.Span_SPAN_KIND_INTERNAL || string(queue.ParentSpanId) != string(server.SpanId) || queue.Flags != 0x101 {
		t.Errorf("queue is %v", queue)
	}
	if client.Kind != tracepb.Span_SPAN_KIND_CLIENT || string(client.ParentSpanId) != string(server.SpanId) || string(client.SpanId) != string(o.SpanID[:]) {
		t.Errorf("CLIENT is %v", client)
	}
	for _, s := range spans[3:] {
		if s.Kind != tracepb.Span_SPAN_KIND_INTERNAL || string(s.ParentSpanId) != string(client.SpanId) {
			t.Errorf("stage is %v", s)
		}
	}
	checkTree(t, o, spans)
}

func TestSpansCarryTheAttributesOfTheConventions(t *testing.T) {
	o := request()
	o.Before = 2 * time.Millisecond
	o.Timings[0].Untrusted = true
	spans := spansOf(t, o, "")
	wantAttributes(t, spans[0], map[string]any{
		"http.request.method": "POST", "url.path": "/v1/audio/transcriptions", "url.query": "token=REDACTED", "url.scheme": "http",
		"http.route": "/v1/audio/transcriptions", "http.response.status_code": int64(200), "network.protocol.version": "1.1",
		"client.address": "192.0.2.7", "network.peer.address": "192.0.2.7", "network.peer.port": int64(54321),
		"server.address": "asr.example", "server.port": int64(8000), "user_agent.original": "me/1",
		"gen_ai.request.model": "whisper-large-v3", "weir.queue.wait": 0.1, "weir.service.time": 0.29,
		"weir.unattributed": o.Unattributed().Seconds(), "weir.overhead": 0.00003, "weir.before": 0.002, "weir.audio.duration": 12.5,
	})
	wantAttributes(t, named(spans, "queue"), map[string]any{
		"weir.queue.depth": int64(3), "weir.concurrency.limit": int64(4), "weir.concurrency.used": int64(4),
	})
	wantAttributes(t, named(spans, "POST"), map[string]any{
		"http.request.method": "POST", "server.address": "127.0.0.1", "server.port": int64(8001), "service.peer.name": "asr-server",
		"url.full": "http://127.0.0.1:8001/v1/audio/transcriptions?token=REDACTED", "http.response.status_code": int64(200),
		"network.protocol.version": "1.1", "weir.timing.source": "header", "weir.stages.untrusted": int64(1),
	})
	wantAttributes(t, named(spans, "transfer"), map[string]any{
		"weir.stage": "transfer", "weir.stage.duration": 0.005, "weir.stage.name": "h2d", "weir.time.estimated": true,
		"weir.transfer.size": int64(480000), "weir.transfer.count": int64(2), "weir.transfer.direction": "h2d",
	})
	wantAttributes(t, named(spans, "forward"), map[string]any{
		"weir.stage": "forward", "weir.stage.duration": 0.2, "weir.stage.name": "infer", "weir.time.estimated": true,
		"weir.batch.size": int64(8), "weir.sequence.length": int64(3000),
	})
	if s := named(spans, "preprocess"); s.SpanId != nil {
		t.Errorf("an untrusted timing was drawn: %v", s)
	}
}

func TestStagesAreDrawnInTheOrderOfTheWork(t *testing.T) {
	o := request()
	o.Timings = []classifier.Timing{
		{Name: "postprocess", Stage: classifier.StagePostprocess, Dur: time.Millisecond},
		{Name: "compute_output", Stage: classifier.StageTransfer, Dur: time.Millisecond},
		{Name: "decode", Stage: classifier.StageForward, Dur: time.Millisecond},
		{Name: "compute_input", Stage: classifier.StageTransfer, Dur: time.Millisecond},
		{Name: "vad", Stage: classifier.StagePreprocess, Dur: time.Millisecond},
		{Name: "mystery", Stage: classifier.StageOther, Dur: time.Millisecond},
		{Name: "queue", Stage: classifier.StageQueue, Dur: time.Millisecond},
		{Name: "prefill", Stage: classifier.StageForward, Dur: time.Millisecond},
	}
	var words, names []string
	for _, s := range spansOf(t, o, "")[3:] {
		words, names = append(words, attributes(s)["weir.stage.name"].(string)), append(names, s.Name)
	}
	if want := []string{"queue", "vad", "compute_input", "decode", "prefill", "compute_output", "postprocess"}; !slices.Equal(words, want) {
		t.Errorf("stages are %q, want %q", words, want)
	}
	if want := []string{"queue_in_server", "preprocess", "transfer", "forward", "forward", "transfer", "postprocess"}; !slices.Equal(names, want) {
		t.Errorf("names are %q, want %q", names, want)
	}
}

func TestStagesLongerThanTheWindowAreMarkedAsScaled(t *testing.T) {
	o := request()
	o.Timings[2].Dur = 10 * time.Second
	spans := spansOf(t, o, "")
	forward := named(spans, "forward")
	if a := attributes(forward); a["weir.time.scaled"] != true || a["weir.stage.duration"] != 10.0 {
		t.Errorf("forward has %v, want it scaled and its duration as told", a)
	}
	checkTree(t, o, spans)
}

func TestTimingsOfTheWholeStreamMayReachToItsEnd(t *testing.T) {
	o := request()
	o.Responded = o.Sent.Add(time.Millisecond)
	for source, late := range map[string]bool{"header": false, "trailer": true, "body": true} {
		o.Source = source
		s := named(spansOf(t, o, ""), "forward")
		if after := s.EndTimeUnixNano > uint64(o.Responded.UnixNano()); after != late {
			t.Errorf("%s: the last stages end after the answer's head: %v, want %v", source, after, late)
		}
	}
}

func TestARequestThatWasNeverAdmittedHasNoClientSpan(t *testing.T) {
	o := request()
	o.Dequeued, o.Sent, o.Responded, o.Timings = time.Time{}, time.Time{}, time.Time{}, nil
	o.Status, o.Outcome, o.Error = 503, classifier.Rejected, "queue_full"
	spans := spansOf(t, o, "rejected")
	if len(spans) != 2 || spans[1].Name != "queue" || spans[1].EndTimeUnixNano != spans[0].EndTimeUnixNano {
		t.Fatalf("spans are %v, want SERVER and a queue that lasts as long", spans)
	}
	a := attributes(spans[0])
	if a["error.type"] != "queue_full" || a["weir.keep"] != true || a["weir.keep.reason"] != "rejected" || a["weir.service.time"] != nil {
		t.Errorf("SERVER has %v", a)
	}
	if spans[0].Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR {
		t.Errorf("status of SERVER is %v, want an error", spans[0].Status)
	}
}

func TestARequestThatDidNotWaitHasNoQueueSpan(t *testing.T) {
	o := request()
	o.Dequeued = o.Enqueued.Add(900)
	if s := named(spansOf(t, o, ""), "queue"); s.SpanId != nil {
		t.Errorf("got %v", s)
	}
}

func TestARootHasNoRemoteParent(t *testing.T) {
	o := request()
	o.ParentID = [8]byte{}
	if s := spansOf(t, o, "")[0]; len(s.ParentSpanId) > 0 || s.Flags != 0x101 {
		t.Errorf("parent %x, flags %#x, want none and 0x101", s.ParentSpanId, s.Flags)
	}
}

func TestStatusAndErrorTypeFollowTheConventions(t *testing.T) {
	const unset, bad = tracepb.Status_STATUS_CODE_UNSET, tracepb.Status_STATUS_CODE_ERROR
	for _, c := range []struct {
		status                 int
		outcome                classifier.Outcome
		word                   string
		answered               bool
		server, client         tracepb.Status_StatusCode
		serverType, clientType any
		clientStatus           any
	}{
		{200, classifier.OK, "", true, unset, unset, nil, nil, int64(200)},
		{302, classifier.OK, "", true, unset, unset, nil, nil, int64(302)},
		{404, classifier.OK, "", true, unset, bad, nil, "404", int64(404)},
		{503, classifier.OK, "", true, bad, bad, "503", "503", int64(503)},
		{502, classifier.Failed, "server_unreachable", false, bad, bad, "server_unreachable", "server_unreachable", nil},
		{504, classifier.Failed, "server_timeout", false, bad, bad, "server_timeout", "server_timeout", nil},
		{200, classifier.Failed, "server_reset", true, bad, bad, "server_reset", "server_reset", int64(200)},
		{0, classifier.Failed, "server_reset", false, bad, bad, "server_reset", "server_reset", nil},
		{400, classifier.Failed, "bad_request", false, unset, bad, "bad_request", "bad_request", nil},
		{0, classifier.Canceled, "client_gone", false, unset, unset, "client_gone", nil, nil},
		{200, classifier.Canceled, "client_gone", true, bad, unset, "client_gone", nil, int64(200)},
		{408, classifier.Canceled, "client_timeout", false, unset, unset, "client_timeout", nil, nil},
	} {
		o := request()
		o.Status, o.Outcome, o.Error = c.status, c.outcome, c.word
		if !c.answered {
			o.Responded, o.Timings = time.Time{}, nil
		}
		name := fmt.Sprint(c.status, " ", c.outcome, " ", c.word)
		spans := spansOf(t, o, "")
		server, client := spans[0], named(spans, "POST")
		if server.Status.GetCode() != c.server || client.Status.GetCode() != c.client {
			t.Errorf("%s: status of SERVER %v and CLIENT %v, want %v and %v", name, server.Status.GetCode(), client.Status.GetCode(), c.server, c.client)
		}
		s, cl := attributes(server), attributes(client)
		if s["error.type"] != c.serverType || cl["error.type"] != c.clientType {
			t.Errorf("%s: error.type of SERVER %v and CLIENT %v, want %v and %v", name, s["error.type"], cl["error.type"], c.serverType, c.clientType)
		}
		if cl["http.response.status_code"] != c.clientStatus {
			t.Errorf("%s: status code of CLIENT %v, want %v", name, cl["http.response.status_code"], c.clientStatus)
		}
	}
}

func TestNamesNeverHoldThePathNorWhatClientsMakeUp(t *testing.T) {
	for _, c := range []struct{ method, route, server, client, attribute string }{
		{"POST", "/asr", "POST /asr", "POST", "POST"},
		{"POST", "", "POST", "POST", "POST"},
		{"BREW", "/asr", "HTTP /asr", "HTTP", "_OTHER"},
		{"post", "", "HTTP", "HTTP", "_OTHER"},
	} {
		o := request()
		o.Method, o.Route, o.Target = c.method, c.route, "/secret/path/1234"
		spans := spansOf(t, o, "")
		if spans[0].Name != c.server || spans[2].Name != c.client {
			t.Errorf("%s %s: names are %q and %q, want %q and %q", c.method, c.route, spans[0].Name, spans[2].Name, c.server, c.client)
		}
		a := attributes(spans[0])
		if a["http.request.method"] != c.attribute {
			t.Errorf("%s: http.request.method is %v, want %s", c.method, a["http.request.method"], c.attribute)
		}
		if original := a["http.request.method_original"]; c.attribute == "_OTHER" && original != c.method {
			t.Errorf("%s: http.request.method_original is %v", c.method, original)
		}
	}
}

func TestHeadsThatAreNoTextOrTooLongDoNotSpoilTheBatch(t *testing.T) {
	o := request()
	o.Target, o.UserAgent, o.Method = "/\xff\xfe?q=\xc3", strings.Repeat("ü", 40000), "\x80"
	raw := 0
	for _, s := range spansOf(t, o, "") {
		raw += proto.Size(s)
		for k, v := range attributes(s) {
			if text, ok := v.(string); ok && (!utf8.ValidString(text) || len(text) > 3*maxValue) {
				t.Errorf("%s: %s has %d bytes", s.Name, k, len(text))
			}
		}
	}
	if raw > 64<<10 {
		t.Errorf("the request takes %d bytes", raw)
	}
}

func TestServersOnASocketHaveNoPort(t *testing.T) {
	tr := newTree("/run/asr.sock", "")
	tr.plan(request(), "")
	a := attributes(named(decode(t, tr.append(nil)), "POST"))
	if a["server.address"] != "/run/asr.sock" || a["server.port"] != nil || a["url.full"] != nil {
		t.Errorf("CLIENT has %v", a)
	}
}

func TestAddressesAreSplit(t *testing.T) {
	for _, c := range []struct {
		in, host string
		port     int
	}{
		{"192.0.2.1:80", "192.0.2.1", 80}, {"[2001:db8::1]:443", "2001:db8::1", 443}, {"asr.example", "asr.example", 0},
		{"2001:db8::1", "2001:db8::1", 0}, {"[::1]", "::1", 0}, {"/run/asr.sock", "/run/asr.sock", 0}, {"h:99999", "h:99999", 0},
		{"h:", "h:", 0}, {"", "", 0}, {"[", "[", 0}, {":80", "", 80},
	} {
		if host, port := splitAddress(c.in); host != c.host || port != c.port {
			t.Errorf("%q is %q and %d, want %q and %d", c.in, host, port, c.host, c.port)
		}
	}
}

func TestLateKeptSpansLoseTheSamplingThresholdOnly(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"vendor=1", "vendor=1"},
		{"ot=th:8", ""},
		{"ot=th:8;rv:6e6d1a75832a2f", "ot=rv:6e6d1a75832a2f"},
		{"ot=rv:6e6d1a75832a2f;th:8,vendor=1", "ot=rv:6e6d1a75832a2f,vendor=1"},
		{"a=1,ot=th:0,b=th:2", "a=1,b=th:2"},
		{"a=1,ot=p:8;r:62", "a=1,ot=p:8;r:62"},
	} {
		if got := string(appendWithoutThreshold(nil, c.in)); got != c.want {
			t.Errorf("%q became %q, want %q", c.in, got, c.want)
		}
		o := request()
		o.TraceState, o.Sampled = c.in, false
		if s := spansOf(t, o, "slow")[0]; s.TraceState != c.want || s.Flags&1 == 0 {
			t.Errorf("the span of %q has %q and flags %#x", c.in, s.TraceState, s.Flags)
		}
	}
}

func TestIdsOfARequestDifferAndNeverAreZero(t *testing.T) {
	seen := make(map[[8]byte]bool)
	tr := newTree("", "")
	for i := range 1000 {
		tr.o = &classifier.Observation{SpanID: [8]byte{7: byte(i), 6: byte(i >> 8)}}
		for n := range uint64(40) {
			id := tr.id(n + 1)
			if id == [8]byte{} || seen[id] || id == tr.o.SpanID {
				t.Fatalf("id %x of request %d is no new one", id, i)
			}
			seen[id] = true
		}
	}
}

// checkTree holds what Jaeger needs: children inside their parents, siblings
// that never touch, instants on whole µs.
func checkTree(t *testing.T, o *classifier.Observation, spans []*tracepb.Span) {
	t.Helper()
	byID := make(map[string]*tracepb.Span)
	siblings := make(map[string][]*tracepb.Span)
	for _, s := range spans {
		if byID[string(s.SpanId)] != nil {
			t.Errorf("the id of %s is not unique", s.Name)
		}
		byID[string(s.SpanId)] = s
		siblings[string(s.ParentSpanId)] = append(siblings[string(s.ParentSpanId)], s)
		if s.StartTimeUnixNano%1000 != 0 || s.EndTimeUnixNano%1000 != 0 || s.EndTimeUnixNano < s.StartTimeUnixNano {
			t.Errorf("%s is at %d to %d", s.Name, s.StartTimeUnixNano, s.EndTimeUnixNano)
		}
	}
	for _, s := range spans {
		parent := byID[string(s.ParentSpanId)]
		if parent == nil {
			if string(s.ParentSpanId) != string(o.ParentID[:]) && len(s.ParentSpanId) > 0 {
				t.Errorf("the parent of %s is not there", s.Name)
			}
			continue
		}
		if s.StartTimeUnixNano < parent.StartTimeUnixNano || s.EndTimeUnixNano > parent.EndTimeUnixNano {
			t.Errorf("%s is outside of its parent %s", s.Name, parent.Name)
		}
	}
	for _, list := range siblings {
		for i := 1; i < len(list); i++ {
			if list[i].StartTimeUnixNano < list[i-1].EndTimeUnixNano+1000 {
				t.Errorf("%s touches %s", list[i-1].Name, list[i].Name)
			}
		}
	}
}

// FuzzSpans feeds requests of any shape; whatever comes out must be a tree
// that backends can read.
func FuzzSpans(f *testing.F) {
	f.Add("POST", "/asr?x=1", "me", "a=1", int64(1e8), int64(1e7), int64(3e8), int64(1e6), int64(2e8), uint8(0))
	f.Add("\xff", "\xff", "\x80", "ot=th:8", int64(0), int64(0), int64(0), int64(0), int64(-5), uint8(3))
	f.Add("GET", "", "", "", int64(1500), int64(999), int64(1), int64(0), int64(1<<62), uint8(9))
	f.Fuzz(func(t *testing.T, method, target, agent, state string, wait, sent, answer, rest, dur int64, kind uint8) {
		o := request()
		o.Method, o.Target, o.UserAgent = method, target, agent
		_ = ReadTraceparent(o, []byte("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), []byte(state))
		o.Dequeued = o.Enqueued.Add(step(wait))
		o.Sent = o.Dequeued.Add(step(sent))
		o.Responded = o.Sent.Add(step(answer))
		o.Done = o.Responded.Add(step(rest))
		o.Outcome = classifier.Outcome(kind % 5)
		for i := range o.Timings {
			o.Timings[i].Dur = time.Duration(dur) >> i
		}
		if kind%7 == 3 {
			o.Dequeued, o.Sent, o.Responded = time.Time{}, time.Time{}, time.Time{}
		}
		kept := ""
		if kind > 128 {
			kept = "slow"
		}
		checkTree(t, o, spansOf(t, o, kept))
	})
}

// step makes any number a duration up to an hour.
func step(n int64) time.Duration { return time.Duration(uint64(n) % uint64(time.Hour)) }
