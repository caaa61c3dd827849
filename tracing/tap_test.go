package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
)

// A tapBackend is a backend that counts the spans it was given, by id.
type tapBackend struct {
	collectorpb.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans map[string]int
	raw   [][]byte // payloads over HTTP
	kinds []string // their content types
	stop  func()
}

func (c *tapBackend) Export(_ context.Context, r *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.add(r)
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

func (c *tapBackend) add(r *collectorpb.ExportTraceServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range r.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, sp := range ss.Spans {
				c.spans[hex.EncodeToString(sp.SpanId)]++
			}
		}
	}
}

func (c *tapBackend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, _ := io.ReadAll(r.Body)
	plain, _ := export{payload: text, gzip: r.Header.Get("Content-Encoding") == "gzip"}.unpacked()
	var m collectorpb.ExportTraceServiceRequest
	err := proto.Unmarshal(plain, &m)
	if r.Header.Get("Content-Type") == "application/json" {
		err = fromOTLPJSON(plain, &m)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.add(&m)
	c.mu.Lock()
	c.raw, c.kinds = append(c.raw, text), append(c.kinds, r.Header.Get("Content-Type"))
	c.mu.Unlock()
}

// counts are the spans taken: how many, and how often the most frequent.
func (c *tapBackend) counts() (n, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, times := range c.spans {
		most = max(most, times)
	}
	return len(c.spans), most
}

// startBackend serves both of OTLP's transports on one address each.
func startBackend(t *testing.T, grpcToo bool, address string) (c *tapBackend, addr string) {
	t.Helper()
	c = &tapBackend{spans: make(map[string]int)}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	if grpcToo {
		s := grpc.NewServer()
		collectorpb.RegisterTraceServiceServer(s, c)
		go func() { _ = s.Serve(l) }()
		c.stop = s.Stop
	} else {
		s := &http.Server{Handler: c}
		go func() { _ = s.Serve(l) }()
		c.stop = func() { _ = s.Close() }
	}
	t.Cleanup(c.stop)
	return c, l.Addr().String()
}

// startTap runs a tap whose telemetry goes to endpoint ("": nowhere).
func startTap(t *testing.T, protocol, endpoint string, m ...Mapping) *Tap {
	t.Helper()
	env := map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
	tap, err := NewTap(Options{Getenv: func(k string) string { return env[k] }, Logger: slog.New(slog.NewTextHandler(t.Output(), nil))},
		TapOptions{GRPC: "127.0.0.1:0", HTTP: "127.0.0.1:0", Wait: 10 * time.Second}, mustIngest(t, m...))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { tap.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return tap
}

// sdk is a server's own OpenTelemetry, as its author set it up.
func sdk(t *testing.T, tap *Tap, overHTTP bool) *sdktrace.TracerProvider {
	t.Helper()
	g, h := tap.Addrs()
	var exporter sdktrace.SpanExporter
	var err error
	if overHTTP {
		exporter, err = otlptracehttp.New(t.Context(), otlptracehttp.WithEndpoint(h), otlptracehttp.WithInsecure(), otlptracehttp.WithCompression(otlptracehttp.GzipCompression))
	} else {
		exporter, err = otlptracegrpc.New(t.Context(), otlptracegrpc.WithEndpoint(g), otlptracegrpc.WithInsecure(), otlptracegrpc.WithCompressor("gzip"))
	}
	if err != nil {
		t.Fatal(err)
	}
	p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter, sdktrace.WithBatchTimeout(50*time.Millisecond)))
	t.Cleanup(func() { _ = p.Shutdown(context.Background()) })
	return p
}

// record is a request that weir carried, answered a second ago.
func record(id byte) *classifier.Observation {
	now := time.Now()
	return &classifier.Observation{TraceID: [16]byte{1, id}, SpanID: [8]byte{2, id}, Sampled: true, Class: "POST /asr", Status: 200,
		Enqueued: now.Add(-2 * time.Second), Dequeued: now.Add(-2 * time.Second), Sent: now.Add(-2 * time.Second), Responded: now, Done: now}
}

// serve makes the spans of a server for one request: a SERVER span below
// weir's, with two stages in it, one of which has a part of its own.
func serve(p *sdktrace.TracerProvider, o *classifier.Observation) {
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: o.TraceID, SpanID: o.SpanID, TraceFlags: trace.FlagsSampled, Remote: true})
	tr := p.Tracer("server")
	at := time.Now().Add(-time.Second)
	ctx, root := tr.Start(trace.ContextWithRemoteSpanContext(context.Background(), parent), "POST /asr", trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindServer))
	_, pre := tr.Start(ctx, "preprocess", trace.WithTimestamp(at))
	pre.End(trace.WithTimestamp(at.Add(100 * time.Millisecond)))
	inner, forward := tr.Start(ctx, "forward", trace.WithTimestamp(at.Add(100*time.Millisecond)), trace.WithAttributes(attribute.Int("batch_size", 4), attribute.Float64("weir.audio.duration", 7)))
	_, decode := tr.Start(inner, "decode", trace.WithTimestamp(at.Add(200*time.Millisecond)))
	decode.End(trace.WithTimestamp(at.Add(500 * time.Millisecond)))
	forward.End(trace.WithTimestamp(at.Add(500 * time.Millisecond)))
	root.End(trace.WithTimestamp(at.Add(600 * time.Millisecond)))
}

const spansOfServe = 4

func checkServed(t *testing.T, o *classifier.Observation) {
	t.Helper()
	pre, _ := o.In(classifier.StagePreprocess)
	forward, _ := o.In(classifier.StageForward)
	if pre != 100*time.Millisecond || forward != 400*time.Millisecond || o.BatchSize != 4 || o.AudioSeconds != 7 || o.Source != "otlp" {
		t.Errorf("preprocess %v, forward %v, batch %d, audio %v, source %q", pre, forward, o.BatchSize, o.AudioSeconds, o.Source)
	}
}

func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s never happened", what)
		}
	}
}

func TestTheServersSpansFillTheRecordAndReachTheBackendOnce(t *testing.T) {
	for _, c := range []struct {
		name               string
		overHTTP, grpcBack bool
	}{{"gRPC to gRPC", false, true}, {"gRPC to HTTP", false, false}, {"HTTP to gRPC", true, true}, {"HTTP to HTTP", true, false}} {
		t.Run(c.name, func(t *testing.T) {
			back, addr := startBackend(t, c.grpcBack, "127.0.0.1:0")
			protocol := "http/protobuf"
			if c.grpcBack {
				protocol = "grpc"
			}
			tap := startTap(t, protocol, "http://"+addr)
			p := sdk(t, tap, c.overHTTP)
			late, early := record(1), record(2)
			if !tap.Hold(late, time.Now()) {
				t.Fatal("the record is not held")
			}
			serve(p, late) // its spans come after the record
			serve(p, early)
			within(t, "both reach the backend", func() bool { n, _ := back.counts(); return n == 2*spansOfServe })
			if !tap.Hold(early, time.Now()) {
				t.Fatal("the record is not held")
			}
			got := 0
			tap.Release(time.Now(), false, func(o *classifier.Observation) { got++; checkServed(t, o) })
			if n, most := back.counts(); got != 2 || n != 2*spansOfServe || most != 1 {
				t.Errorf("%d records; the backend has %d spans, up to %d times", got, n, most)
			}
		})
	}
}

func TestABackendThatIsAwayCostsNoSpan(t *testing.T) {
	for _, grpcBack := range []bool{true, false} {
		t.Run(fmt.Sprint("gRPC ", grpcBack), func(t *testing.T) {
			first, addr := startBackend(t, grpcBack, "127.0.0.1:0")
			protocol := "http/protobuf"
			if grpcBack {
				protocol = "grpc"
			}
			tap := startTap(t, protocol, "http://"+addr)
			p := sdk(t, tap, false)
			serve(p, record(1))
			within(t, "the first", func() bool { n, _ := first.counts(); return n == spansOfServe })
			first.stop()
			for i := range byte(20) {
				serve(p, record(10+i))
			}
			if err := p.ForceFlush(t.Context()); err != nil {
				t.Fatal(err)
			}
			if held, _ := tap.Held(); held == 0 {
				t.Error("nothing is held")
			}
			second, _ := startBackend(t, grpcBack, addr)
			within(t, "the rest", func() bool { // and that it is taken is known
				n, _ := second.counts()
				held, _ := tap.Held()
				return n == 20*spansOfServe && held == 0
			})
			n, most := second.counts()
			held, lost := tap.Held()
			if n != 20*spansOfServe || most != 1 || held != 0 || lost != 0 {
				t.Errorf("%d spans, up to %d times; %d bytes held, %d lost", n, most, held, lost)
			}
		})
	}
}

func TestTheSenderIsHeldBackWhenTooMuchWaits(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // nobody answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	tap := startTap(t, "http/protobuf", "http://"+l.Addr().String())
	g, h := tap.Addrs()
	big, _ := proto.Marshal(&collectorpb.ExportTraceServiceRequest{ResourceSpans: []*tracepb.ResourceSpans{{SchemaUrl: strings.Repeat("x", 12<<20)}}})
	post := func() int {
		res, err := http.Post("http://"+h+"/v1/traces", "application/x-protobuf", bytes.NewReader(big))
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode == 503 && res.Header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		return res.StatusCode
	}
	if got := []int{post(), post(), post()}; !slices.Equal(got, []int{200, 200, 503}) {
		t.Errorf("answers %v", got)
	}
	conn, err := grpc.NewClient(g, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = collectorpb.NewTraceServiceClient(conn).Export(t.Context(), &collectorpb.ExportTraceServiceRequest{ResourceSpans: []*tracepb.ResourceSpans{{SchemaUrl: strings.Repeat("x", 12<<20)}}})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("gRPC: %v", err)
	}
}

func TestJSONPassesAsItIsAndIsReadAsProtobufIs(t *testing.T) {
	back, addr := startBackend(t, false, "127.0.0.1:0")
	tap := startTap(t, "http/protobuf", "http://"+addr)
	o := record(1)
	tap.Hold(o, time.Now())
	text := fmt.Sprintf(`{"resourceSpans":[{"scopeSpans":[{"spans":[
		{"traceId":"%x","spanId":"0102030405060708","parentSpanId":"%X","name":"POST /asr","kind":2,"startTimeUnixNano":"1","endTimeUnixNano":"600000001","futureField":1},
		{"traceId":"%x","spanId":"0102030405060709","parentSpanId":"0102030405060708","name":"Forward","startTimeUnixNano":"1","endTimeUnixNano":"400000001"}]}]}]}`, o.TraceID, o.SpanID, o.TraceID)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, text)
	z.Close()
	_, h := tap.Addrs()
	req, _ := http.NewRequest("POST", "http://"+h+"/v1/traces", bytes.NewReader(packed.Bytes()))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Content-Encoding", "gzip")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if answer, _ := io.ReadAll(res.Body); res.StatusCode != 200 || string(answer) != "{}" {
		t.Fatalf("%d %q", res.StatusCode, answer)
	}
	within(t, "it reaches the backend", func() bool { n, _ := back.counts(); return n == 2 })
	if !bytes.Equal(back.raw[0], packed.Bytes()) || back.kinds[0] != "application/json" {
		t.Error("it was changed on the way")
	}
	tap.Release(time.Now(), false, func(o *classifier.Observation) {
		if f, ok := o.In(classifier.StageForward); !ok || f != 400*time.Millisecond {
			t.Errorf("forward %v", f)
		}
	})
}

func TestWhatIsNoOTLPIsRefusedForGood(t *testing.T) {
	tap := startTap(t, "", "")
	_, h := tap.Addrs()
	for _, c := range []struct {
		method, path, kind, coding, body string
		want                             int
	}{
		{"POST", "/v1/traces", "application/x-protobuf", "", "\xff\xff", 400},
		{"POST", "/v1/traces", "application/json", "", `{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}`, 400},
		{"POST", "/v1/traces", "application/json", "", `{`, 400},
		{"POST", "/v1/traces", "application/x-protobuf", "gzip", "no gzip", 400},
		{"POST", "/v1/traces", "application/x-protobuf", "br", "", 415},
		{"POST", "/v1/traces", "text/plain", "", "", 415},
		{"GET", "/v1/traces", "application/json", "", "", 405},
		{"POST", "/v1/profiles", "application/json", "", "", 404},
		{"POST", "/", "application/json", "", "", 404},
		{"POST", "/v1/traces", "application/x-protobuf", "", "", 200},
		{"POST", "/v1/metrics", "application/x-protobuf", "", "anything", 200},
	} {
		req, _ := http.NewRequest(c.method, "http://"+h+c.path, strings.NewReader(c.body))
		req.Header.Set("Content-Type", c.kind)
		if c.coding != "" {
			req.Header.Set("Content-Encoding", c.coding)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != c.want {
			t.Errorf("%+v: %d", c, res.StatusCode)
		}
	}
}

func TestWeirDoesNotSendToItself(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://" + addr}
	_, err = NewTap(Options{Getenv: func(k string) string { return env[k] }}, TapOptions{HTTP: addr}, nil)
	if err == nil || !strings.Contains(err.Error(), "weir's own otlp address") {
		t.Errorf("%v", err)
	}
}

func TestARecordWaitsNoLongerThanToldAndNotForAQuietServer(t *testing.T) {
	j := &joiner{wait: time.Second, traces: make(map[[16]byte]*toldTrace)}
	j.ingest.Store(mustIngest(t))
	now := time.Now()
	var out []classifier.Observation
	take := func(o *classifier.Observation) { out = append(out, *o) }
	if !j.hold(record(1), now) {
		t.Fatal("not held")
	}
	if j.release(now.Add(999*time.Millisecond), false, take); len(out) != 0 {
		t.Error("released too early")
	}
	if j.release(now.Add(time.Second), false, take); len(out) != 1 || out[0].Source != "" {
		t.Errorf("released %+v", out)
	}
	unsampled := record(3)
	unsampled.Sampled = false
	if j.hold(unsampled, now) {
		t.Error("a request whose spans nobody makes is held")
	}
	if j.hold(record(2), now.Add(quietAfter+time.Minute)) {
		t.Error("held although no span ever came")
	}
	for i := range maxRecords + 5 {
		if held := j.hold(record(byte(i)), now); held != (i < maxRecords) {
			t.Fatalf("record %d: held %v", i, held)
		}
	}
	if j.release(now, true, take); len(out) != 1+maxRecords {
		t.Errorf("%d records came out", len(out))
	}
}

func TestTheMemoryOfSpansIsBounded(t *testing.T) {
	j := &joiner{wait: time.Second, traces: make(map[[16]byte]*toldTrace)}
	j.ingest.Store(mustIngest(t))
	now := time.Now()
	for i := range maxTraces + 100 {
		id := []byte(fmt.Sprintf("%016d", i))
		sp := &tracepb.Span{TraceId: id, SpanId: id[8:], Name: "forward"}
		j.spans([]*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: []*tracepb.Span{sp}}}}}, now)
	}
	if len(j.traces) != maxTraces || len(j.order) != maxTraces {
		t.Errorf("%d traces, %d in order", len(j.traces), len(j.order))
	}
	j.spans(nil, now.Add(traceLife+time.Second))
	if len(j.traces) != 0 || len(j.order) != 0 {
		t.Errorf("%d traces, %d in order after their time", len(j.traces), len(j.order))
	}
}

func number64(f float64) *commonpb.AnyValue {
	return &commonpb.AnyValue{Value: &commonpb.AnyValue_DoubleValue{DoubleValue: f}}
}

// toldBy runs spans of one trace through the join.
func toldBy(t *testing.T, o *classifier.Observation, m []Mapping, spans ...*tracepb.Span) *classifier.Observation {
	t.Helper()
	j := &joiner{wait: time.Second, traces: make(map[[16]byte]*toldTrace)}
	j.ingest.Store(mustIngest(t, m...))
	for _, sp := range spans {
		sp.TraceId = o.TraceID[:]
	}
	now := time.Now()
	j.spans([]*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: spans}}}}, now)
	j.hold(o, now)
	var got *classifier.Observation
	j.release(now, true, func(o *classifier.Observation) { got = o })
	return got
}

func id8(n byte) []byte { return []byte{9, 9, 9, 9, 9, 9, 9, n} }

// Triton, mode=opentelemetry: triton server docs/user_guide/trace.md. The queue
// begins in the model's span and ends in that of the execution below it.
func TestTritonsEventsAreStages(t *testing.T) {
	o := record(1)
	event := func(name string, ms uint64) *tracepb.Span_Event {
		return &tracepb.Span_Event{Name: name, TimeUnixNano: 1_700_000_000_000_000_000 + ms*1_000_000}
	}
	got := toldBy(t, o, nil,
		&tracepb.Span{SpanId: id8(1), ParentSpanId: o.SpanID[:], Name: "InferRequest", Events: []*tracepb.Span_Event{event("HTTP_RECV_START", 0)}},
		&tracepb.Span{SpanId: id8(2), ParentSpanId: id8(1), Name: "conformer", Events: []*tracepb.Span_Event{event("REQUEST_START", 1), event("QUEUE_START", 2), event("REQUEST_END", 90)}},
		&tracepb.Span{SpanId: id8(3), ParentSpanId: id8(2), Name: "compute", Events: []*tracepb.Span_Event{event("COMPUTE_START", 32), event("COMPUTE_INPUT_END", 35), event("COMPUTE_OUTPUT_START", 80), event("COMPUTE_END", 82)}})
	for stage, want := range map[classifier.Stage]time.Duration{classifier.StageQueue: 30, classifier.StageTransfer: 5, classifier.StageForward: 45} {
		if d, _ := got.In(stage); d != want*time.Millisecond {
			t.Errorf("%s: %v, want %d ms", stage, d, want)
		}
	}
}

// vLLM: vllm/tracing, gen_ai.latency.* in seconds.
func TestVLLMsAttributesAreStages(t *testing.T) {
	o := record(1)
	attr := func(key string, f float64) *commonpb.KeyValue {
		return &commonpb.KeyValue{Key: key, Value: number64(f)}
	}
	got := toldBy(t, o, nil, &tracepb.Span{SpanId: id8(1), ParentSpanId: o.SpanID[:], Name: "llm_request", Attributes: []*commonpb.KeyValue{
		attr("gen_ai.latency.time_in_queue", 0.25), attr("gen_ai.latency.time_in_model_prefill", 0.1), attr("gen_ai.latency.time_in_model_decode", 0.4),
		attr("gen_ai.latency.time_in_model_inference", 0.5), attr("gen_ai.latency.e2e", 0.9), attr("gen_ai.latency.time_to_first_token", 0.4),
		{Key: "gen_ai.usage.completion_tokens", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: 33}}}}})
	queue, _ := got.In(classifier.StageQueue)
	forward, _ := got.In(classifier.StageForward)
	if queue != 250*time.Millisecond || forward != 500*time.Millisecond || got.ServerTotal != 900*time.Millisecond || got.Tokens != 33 {
		t.Errorf("queue %v, forward %v, total %v, %d tokens", queue, forward, got.ServerTotal, got.Tokens)
	}
}

func TestSpansByAConfiguredName(t *testing.T) {
	o := record(1)
	m := []Mapping{{Span: "Whisper decode", Stage: "forward"}, {Span: "ffmpeg", Stage: "preprocess"}}
	got := toldBy(t, o, m,
		&tracepb.Span{SpanId: id8(1), ParentSpanId: o.SpanID[:], Name: "ffmpeg", StartTimeUnixNano: 5, EndTimeUnixNano: 5 + 3e6},
		&tracepb.Span{SpanId: id8(2), ParentSpanId: o.SpanID[:], Name: "Whisper decode", StartTimeUnixNano: 5, EndTimeUnixNano: 5 + 7e6},
		&tracepb.Span{SpanId: id8(3), ParentSpanId: o.SpanID[:], Name: "queue", StartTimeUnixNano: 9, EndTimeUnixNano: 5}) // its clock ran backwards
	pre, _ := got.In(classifier.StagePreprocess)
	forward, _ := got.In(classifier.StageForward)
	if _, queue := got.In(classifier.StageQueue); pre != 3*time.Millisecond || forward != 7*time.Millisecond || queue {
		t.Errorf("%+v", got.Timings)
	}
	for want, list := range map[string][]Mapping{
		"need none": {{Span: "a", Stage: "queue", Unit: "s"}}, "a name or a pointer": {{Span: "a", Name: "b", Stage: "queue"}},
		"mapped twice": {{Span: "a", Stage: "queue"}, {Span: "a", Stage: "forward"}}, "is unknown": {{Span: "a", Stage: "q"}},
	} {
		if _, err := NewIngest(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Two requests of one trace (a client that sends several) keep their own.
func TestRequestsOfOneTraceKeepTheirOwnSpans(t *testing.T) {
	a, b := record(1), record(2)
	b.TraceID = a.TraceID
	j := &joiner{wait: time.Second, traces: make(map[[16]byte]*toldTrace)}
	j.ingest.Store(mustIngest(t))
	now := time.Now()
	j.hold(a, now)
	j.hold(b, now)
	span := func(id byte, parent [8]byte, ms uint64) *tracepb.Span {
		return &tracepb.Span{TraceId: a.TraceID[:], SpanId: id8(id), ParentSpanId: parent[:], Name: "forward", StartTimeUnixNano: 1, EndTimeUnixNano: 1 + ms*1e6}
	}
	j.spans([]*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: []*tracepb.Span{span(1, a.SpanID, 10), span(2, b.SpanID, 20)}}}}}, now)
	j.release(now, true, func(o *classifier.Observation) {
		want := map[[8]byte]time.Duration{a.SpanID: 10 * time.Millisecond, b.SpanID: 20 * time.Millisecond}[o.SpanID]
		if f, _ := o.In(classifier.StageForward); f != want {
			t.Errorf("%x: %v, want %v", o.SpanID, f, want)
		}
	})
}

func TestStagesThatSpansToldAreNotDrawnAgain(t *testing.T) {
	o := record(1)
	o.Source, o.Timings = sourceOTLP, []classifier.Timing{{Name: "forward", Stage: classifier.StageForward, Dur: time.Second}}
	tr := newTree("127.0.0.1:1", "")
	if n := tr.plan(o, ""); n != 2 {
		t.Errorf("%d spans, want weir's SERVER and CLIENT", n)
	}
	tr.append(nil)
}

func FuzzTap(f *testing.F) {
	m := &collectorpb.ExportTraceServiceRequest{ResourceSpans: []*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: []*tracepb.Span{
		{TraceId: make([]byte, 16), SpanId: id8(1), ParentSpanId: id8(1), Name: "forward", EndTimeUnixNano: 1 << 63, Events: []*tracepb.Span_Event{{Name: "QUEUE_START", TimeUnixNano: 1}, {Name: "COMPUTE_START", TimeUnixNano: 1 << 63}},
			Attributes: []*commonpb.KeyValue{{Key: "gen_ai.latency.e2e", Value: number64(1e300)}}}}}}}}}
	raw, _ := proto.Marshal(m)
	f.Add(raw, false)
	text, _ := protojson.Marshal(m)
	f.Add(text, true)
	f.Fuzz(func(t *testing.T, payload []byte, isJSON bool) {
		tap := &Tap{}
		tap.traces, tap.wait = make(map[[16]byte]*toldTrace), time.Second
		tap.SetIngest(mustIngest(t))
		if err := tap.take("traces", export{payload: payload, json: isJSON}); err != nil {
			if !errors.Is(err, errBad) {
				t.Errorf("%v", err)
			}
			return
		}
		for id := range tap.traces {
			o := record(1)
			o.TraceID = id
			tap.hold(o, time.Now())
		}
		tap.release(time.Now(), true, func(o *classifier.Observation) {
			for _, one := range o.Timings {
				if one.Dur < 0 || one.Dur > maxDuration {
					t.Errorf("%+v", one)
				}
			}
		})
	})
}
