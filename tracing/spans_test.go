package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
)

// request is a transcription that was queued, batched and timed: seven spans.
func request() *classifier.Observation {
	begin := time.Now()
	return &classifier.Observation{
		TraceID: [16]byte{1, 2, 3, 15: 4}, SpanID: [8]byte{5, 7: 6}, ParentID: [8]byte{7, 7: 8}, Sampled: true,
		Protocol: "http/1.1", Method: "POST", Target: "/v1/audio/transcriptions?token=REDACTED", Host: "asr.example:8000",
		Client: "192.0.2.7:54321", UserAgent: "me/1", Route: "/v1/audio/transcriptions", Class: "POST /v1/audio/transcriptions",
		Model: "whisper-large-v3", Status: 200,
		Enqueued: begin, Dequeued: begin.Add(100 * time.Millisecond), Sent: begin.Add(110 * time.Millisecond),
		Responded: begin.Add(400 * time.Millisecond), Done: begin.Add(401 * time.Millisecond),
		Overhead: 30 * time.Microsecond, Waiting: 3, Inflight: 4, Limit: 4,
		Timings: []classifier.Timing{
			{Name: "preprocess", Stage: classifier.StagePreprocess, Dur: 20 * time.Millisecond},
			{Name: "h2d", Stage: classifier.StageTransfer, Dur: 5 * time.Millisecond, Bytes: 480000, Count: 2},
			{Name: "infer", Stage: classifier.StageForward, Dur: 200 * time.Millisecond},
			{Name: "d2h", Stage: classifier.StageTransfer, Dur: time.Millisecond, Bytes: 4000},
			{Name: "total", Dur: 250 * time.Millisecond},
		},
		Source: "header", BatchSize: 8, SeqLen: 3000, AudioSeconds: 12.5,
	}
}

// spansOfRequest is how many spans request makes.
const spansOfRequest = 7

// A collector is a loopback OTLP backend over HTTP and gRPC.
type collector struct {
	coltracepb.UnimplementedTraceServiceServer
	answer func() (*coltracepb.ExportTraceServiceResponse, int) // nil, or nil and 200: takes all
	silent bool                                                 // until the client gives up

	mu       sync.Mutex
	requests []*coltracepb.ExportTraceServiceRequest
	headers  []http.Header
}

func (c *collector) take(r *coltracepb.ExportTraceServiceRequest, h http.Header) (*coltracepb.ExportTraceServiceResponse, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.answer != nil {
		if resp, status := c.answer(); resp != nil || status != http.StatusOK {
			return resp, status
		}
	}
	c.requests, c.headers = append(c.requests, r), append(c.headers, h)
	return &coltracepb.ExportTraceServiceResponse{}, http.StatusOK
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		body, _ = gzip.NewReader(r.Body)
	}
	raw, err := io.ReadAll(body)
	var req coltracepb.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(raw, &req)
	}
	if err != nil || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" {
		http.Error(w, fmt.Sprint("no traces: ", r.URL.Path, " ", err), http.StatusBadRequest)
		return
	}
	if c.silent {
		<-r.Context().Done()
		return
	}
	resp, status := c.take(&req, r.Header)
	out, _ := proto.Marshal(resp)
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.WriteHeader(status)
	_, _ = w.Write(out)
}

func (c *collector) Export(ctx context.Context, r *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	if c.silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	md, _ := metadata.FromIncomingContext(ctx)
	h := make(http.Header)
	for k, v := range md {
		h[http.CanonicalHeaderKey(k)] = v
	}
	resp, _ := c.take(r, h)
	return resp, nil
}

func (c *collector) spans() (all []*tracepb.Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.requests {
		for _, rs := range r.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				all = append(all, ss.Spans...)
			}
		}
	}
	return all
}

func serveHTTP(t *testing.T, c http.Handler) (address string) {
	t.Helper()
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func serveGRPC(t *testing.T, c *collector, opts ...grpc.ServerOption) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(opts...)
	coltracepb.RegisterTraceServiceServer(s, c)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// startSpans starts the export with a short delay, and checks at the test's
// end that it left no goroutine.
func startSpans(t *testing.T, o Options, env ...string) *Spans {
	t.Helper()
	o.Getenv = environment(append([]string{"OTEL_BSP_SCHEDULE_DELAY=10"}, env...)...)
	if o.Server == "" {
		o.Server = "127.0.0.1:8001"
	}
	s, err := NewSpans(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = shutdown(s, 50*time.Millisecond) })
	return s
}

func shutdown(s *Spans, within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return s.Shutdown(ctx)
}

// noLeaks fails the test if it ends with more goroutines than it began with.
// It has to come before anything that starts some.
func noLeaks(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		if !eventually(func() bool { return runtime.NumGoroutine() <= before }) {
			buf := make([]byte, 1<<16)
			t.Errorf("%d goroutines became %d:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
		}
	})
}

func eventually(ok func() bool) bool {
	for range 1000 {
		if ok() {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// A journal is a log that tests can read while it is written.
type journal struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.String()
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

func TestSpansReachACollector(t *testing.T) {
	cert, key := certificateFiles(t)
	creds, err := credentials.NewServerTLSFromFile(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	plainHTTP := func(t *testing.T, c *collector) string { return "http://" + serveHTTP(t, c) }
	plainGRPC := func(t *testing.T, c *collector) string { return "http://" + serveGRPC(t, c) }
	for name, c := range map[string]struct {
		serve func(*testing.T, *collector) string
		env   []string
	}{
		"http":      {plainHTTP, nil},
		"http gzip": {plainHTTP, []string{"OTEL_EXPORTER_OTLP_COMPRESSION=gzip"}},
		"grpc":      {plainGRPC, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}},
		"grpc gzip": {plainGRPC, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_EXPORTER_OTLP_COMPRESSION=gzip"}},
		"grpc tls": {func(t *testing.T, c *collector) string {
			_, port, _ := net.SplitHostPort(serveGRPC(t, c, grpc.Creds(creds)))
			return "https://localhost:" + port
		}, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_EXPORTER_OTLP_CERTIFICATE=" + cert}},
		"https": {func(t *testing.T, c *collector) string {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			s := &http.Server{Handler: c}
			done := make(chan struct{})
			go func() { defer close(done); _ = s.ServeTLS(l, cert, key) }()
			t.Cleanup(func() { _ = s.Close(); <-done })
			_, port, _ := net.SplitHostPort(l.Addr().String())
			return "https://localhost:" + port
		}, []string{"OTEL_EXPORTER_OTLP_CERTIFICATE=" + cert}},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			col := &collector{}
			s := startSpans(t, Options{Version: "v1"}, append(c.env, "OTEL_EXPORTER_OTLP_ENDPOINT="+c.serve(t, col),
				"OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer%20SECRET", "OTEL_SERVICE_NAME=asr-weir")...)
			const n = 300 // several batches
			for range n {
				s.Record(request())
			}
			if err := shutdown(s, 5*time.Second); err != nil {
				t.Fatal(err)
			}
			spans := col.spans()
			if len(spans) != n*spansOfRequest || s.Dropped() != 0 {
				t.Fatalf("%d spans came, %d were dropped, want %d and 0", len(spans), s.Dropped(), n*spansOfRequest)
			}
			checkTree(t, request(), spans[:spansOfRequest])
			rs := col.requests[0].ResourceSpans[0]
			if sc := rs.ScopeSpans[0].Scope; sc.Name != "weir" || sc.Version != "v1" || rs.SchemaUrl == "" {
				t.Errorf("scope is %v, schema %q", sc, rs.SchemaUrl)
			}
			if !strings.Contains(rs.Resource.String(), `"asr-weir"`) {
				t.Errorf("resource is %v", rs.Resource)
			}
			if got := col.headers[0].Get("Authorization"); got != "Bearer SECRET" {
				t.Errorf("authorization is %q", got)
			}
			for _, r := range col.requests {
				if k := len(r.ResourceSpans[0].ScopeSpans[0].Spans); k > 512 {
					t.Errorf("a batch has %d spans, want 512 at most", k)
				}
			}
		})
	}
}

func TestTheProcessEnvironmentDoesNotMatter(t *testing.T) {
	for name, value := range map[string]string{
		"ENDPOINT": "http://127.0.0.1:1", "HEADERS": "leak=1", "PROTOCOL": "http/json", "COMPRESSION": "gzip",
		"TIMEOUT": "1", "INSECURE": "false", "TRACES_ENDPOINT": "http://127.0.0.1:1/x", "CERTIFICATE": func() string { c, _ := certificateFiles(t); return c }(),
	} {
		t.Setenv("OTEL_EXPORTER_OTLP_"+name, value)
	}
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		noLeaks(t)
		col := &collector{}
		address := serveHTTP(t, col)
		if protocol == "grpc" {
			address = serveGRPC(t, col)
		}
		s := startSpans(t, Options{}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+address, "OTEL_EXPORTER_OTLP_PROTOCOL="+protocol)
		s.Record(request())
		if err := shutdown(s, 5*time.Second); err != nil {
			t.Fatal(protocol, err)
		}
		if n := len(col.spans()); n != spansOfRequest {
			t.Fatalf("%s: %d spans came, want %d", protocol, n, spansOfRequest)
		}
		if h := col.headers[0]; h.Get("Leak") != "" || h.Get("Content-Encoding") == "gzip" || h.Get("Grpc-Encoding") == "gzip" {
			t.Errorf("%s: headers are %v", protocol, h)
		}
	}
}

func TestNoExportIsNil(t *testing.T) {
	s, err := NewSpans(context.Background(), Options{})
	if s != nil || err != nil {
		t.Fatalf("got %v, %v", s, err)
	}
	s.Record(request())
	if s.Dropped() != 0 || s.Shutdown(context.Background()) != nil {
		t.Error("a nil Spans did something")
	}
}

func TestOnlySampledOrRemarkableRequestsAreKept(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*classifier.Observation)
		want   string // reason; "-": not kept
	}{
		{"sampled", func(o *classifier.Observation) { o.Sampled = true }, ""},
		{"ordinary", func(o *classifier.Observation) {}, "-"},
		{"not found", func(o *classifier.Observation) { o.Status = 404 }, "-"},
		{"client gone", func(o *classifier.Observation) { o.Outcome, o.Status = classifier.Canceled, 0 }, "-"},
		{"server error", func(o *classifier.Observation) { o.Status = 500 }, "error"},
		{"rejected", func(o *classifier.Observation) { o.Outcome, o.Dequeued = classifier.Rejected, time.Time{} }, "rejected"},
		{"expired", func(o *classifier.Observation) { o.Outcome, o.Dequeued = classifier.Expired, time.Time{} }, "expired"},
		{"failed", func(o *classifier.Observation) { o.Outcome = classifier.Failed }, "failed"},
		{"slow", func(o *classifier.Observation) { o.Done = o.Enqueued.Add(2 * time.Second) }, "slow"},
		{"a long tunnel", func(o *classifier.Observation) { o.Done, o.Upgraded = o.Enqueued.Add(2*time.Second), true }, "-"},
		{"queued for half its time", func(o *classifier.Observation) { o.Dequeued = o.Enqueued.Add(210 * time.Millisecond) }, "queue"},
		{"no trace", func(o *classifier.Observation) { o.Sampled, o.TraceID = true, [16]byte{} }, "-"},
		{"no span of weir's own", func(o *classifier.Observation) { o.Sampled, o.SpanID = true, o.ParentID }, "-"},
		{"not finished", func(o *classifier.Observation) { o.Sampled, o.Done = true, time.Time{} }, "-"},
	} {
		s := testSpans(Options{KeepSlow: time.Second, KeepQueueShare: 0.5})
		o := request()
		o.Sampled = false
		c.change(o)
		s.Record(o)
		spans := decode(t, s.filling.raw)
		if c.want == "-" {
			if len(spans) > 0 {
				t.Errorf("%s: kept %d spans, want none", c.name, len(spans))
			}
			continue
		}
		if len(spans) == 0 || spans[0].Flags&1 == 0 {
			t.Errorf("%s: not kept, or not marked as sampled", c.name)
			continue
		}
		a := attributes(spans[0])
		if reason, _ := a["weir.keep.reason"].(string); reason != c.want || (a["weir.keep"] == true) != (c.want != "") {
			t.Errorf("%s: kept for %q, want %q", c.name, reason, c.want)
		}
	}
}

func TestNothingIsKeptLateUnlessAsked(t *testing.T) {
	s := testSpans(Options{})
	o := request()
	o.Sampled, o.Done, o.Dequeued = false, o.Enqueued.Add(time.Hour), o.Enqueued.Add(59*time.Minute)
	if s.Record(o); s.filling.spans != 0 {
		t.Errorf("kept %d spans", s.filling.spans)
	}
}

func TestRecordKeepsNothingOfTheRecord(t *testing.T) {
	s := testSpans(Options{})
	o := request()
	s.Record(o)
	want := slices.Clone(s.filling.raw)
	o.Timings[0] = classifier.Timing{Name: "changed"}
	*o = classifier.Observation{}
	if !bytes.Equal(s.filling.raw, want) || s.tree.o != nil {
		t.Error("the spans changed with the record")
	}
}

func TestABackendThatIsAwayCostsSpansOnlyAndComesBack(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			noLeaks(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			address := l.Addr().String()
			_ = l.Close() // nobody listens there now
			var j journal
			s := startSpans(t, Options{Logger: j.logger()}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+address,
				"OTEL_EXPORTER_OTLP_PROTOCOL="+protocol, "OTEL_EXPORTER_OTLP_TIMEOUT=300")
			n := 0
			if !eventually(func() bool { s.Record(request()); n++; return s.Dropped() >= 3*spansOfRequest }) {
				t.Fatal("nothing was dropped")
			}
			if !eventually(func() bool { return strings.Contains(j.String(), "check that the backend runs and listens there") }) {
				t.Errorf("the log has no remedy: %s", j.String())
			}
			if k := strings.Count(j.String(), "\n"); k != 1 {
				t.Errorf("%d lines were logged, want 1 a minute: %s", k, j.String())
			}
			col := &collector{}
			if l, err = net.Listen("tcp", address); err != nil {
				t.Skip("the port was taken: ", err)
			}
			stop := col.listen(l, protocol)
			defer stop()
			if !eventually(func() bool { s.Record(request()); n++; return len(col.spans()) > 0 }) {
				t.Error("spans do not come after the backend is back")
			}
			if err := shutdown(s, 5*time.Second); err != nil {
				t.Error(err)
			}
			if got := len(col.spans()) + int(s.Dropped()); got != n*spansOfRequest {
				t.Errorf("%d spans came or were counted as dropped, want %d", got, n*spansOfRequest)
			}
		})
	}
}

func (c *collector) listen(l net.Listener, protocol string) (stop func()) {
	done := make(chan struct{})
	if protocol == "grpc" {
		s := grpc.NewServer()
		coltracepb.RegisterTraceServiceServer(s, c)
		go func() { defer close(done); _ = s.Serve(l) }()
		return func() { s.Stop(); <-done }
	}
	s := &http.Server{Handler: c}
	go func() { defer close(done); _ = s.Serve(l) }()
	return func() { _ = s.Close(); <-done }
}

func TestASilentBackendHoldsNeitherTrafficNorMemoryNorShutdown(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			noLeaks(t)
			col := &collector{silent: true}
			address := serveHTTP(t, col)
			if protocol == "grpc" {
				address = serveGRPC(t, col)
			}
			s := startSpans(t, Options{}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+address, "OTEL_EXPORTER_OTLP_PROTOCOL="+protocol)
			o := request()
			o.UserAgent = strings.Repeat("x", maxValue) // fills the queue sooner
			n := 0
			for s.Dropped() < 100*spansOfRequest && n < 100000 {
				s.Record(o)
				n++
			}
			s.mu.Lock()
			held, room := s.held.bytes+len(s.filling.raw), 0
			for _, b := range append(append(slices.Clone(s.full), s.spare...), s.filling) {
				room += cap(b.raw)
			}
			s.mu.Unlock()
			if s.Dropped() == 0 || held > maxHeld+64<<10 || room > 2*maxHeld {
				t.Errorf("%d requests: %d spans dropped, %d bytes held in %d", n, s.Dropped(), held, room)
			}
			begin := time.Now()
			err := shutdown(s, 500*time.Millisecond)
			if took := time.Since(begin); took > 500*time.Millisecond {
				t.Errorf("shutdown took %v of 500ms", took)
			}
			if err == nil || !strings.Contains(err.Error(), "spans were lost") {
				t.Errorf("shutdown says %v", err)
			}
			if want := int64(n * spansOfRequest); s.Dropped() != want {
				t.Errorf("%d of %d spans are counted as dropped", s.Dropped(), want)
			}
			s.Record(o)
			if want := int64((n + 1) * spansOfRequest); s.Dropped() != want {
				t.Error("a record after the end is not counted as dropped")
			}
		})
	}
}

func TestShutdownMayComeTwiceAndWhileRecordsCome(t *testing.T) {
	noLeaks(t)
	col := &collector{}
	s := startSpans(t, Options{}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+serveHTTP(t, col))
	done := make(chan int)
	go func() {
		n := 0
		for range 2000 {
			s.Record(request())
			n += spansOfRequest
		}
		done <- n
	}()
	_ = shutdown(s, 5*time.Second)
	n := <-done
	if err := shutdown(s, time.Second); err != nil {
		t.Error(err)
	}
	if got := len(col.spans()) + int(s.Dropped()); got != n {
		t.Errorf("%d spans came or were dropped, want %d", got, n)
	}
}

func TestSpansThatABackendRefusesAreCounted(t *testing.T) {
	partial := &coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{RejectedSpans: 3, ErrorMessage: "too old (or new)"}}
	for _, c := range []struct {
		name     string
		protocol string
		answer   func() (*coltracepb.ExportTraceServiceResponse, int)
		want     int64
		log      string
	}{
		{"partly", "http/protobuf", func() (*coltracepb.ExportTraceServiceResponse, int) { return partial, 200 }, 3, "too old"},
		{"partly", "grpc", func() (*coltracepb.ExportTraceServiceResponse, int) { return partial, 200 }, 3, "too old"},
		{"all", "http/protobuf", func() (*coltracepb.ExportTraceServiceResponse, int) { return nil, 401 }, spansOfRequest, "OTEL_EXPORTER_OTLP_HEADERS"},
		{"wrong path", "http/protobuf", func() (*coltracepb.ExportTraceServiceResponse, int) { return nil, 404 }, spansOfRequest, "check the path"},
		{"too large", "http/protobuf", func() (*coltracepb.ExportTraceServiceResponse, int) { return nil, 413 }, spansOfRequest, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"},
	} {
		noLeaks(t)
		col := &collector{answer: c.answer}
		address := serveHTTP(t, col)
		if c.protocol == "grpc" {
			address = serveGRPC(t, col)
		}
		var j journal
		s := startSpans(t, Options{Logger: j.logger()}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+address, "OTEL_EXPORTER_OTLP_PROTOCOL="+c.protocol)
		s.Record(request())
		if !eventually(func() bool { return strings.Contains(j.String(), c.log) }) {
			t.Errorf("%s, %s: the log lacks %q: %s", c.name, c.protocol, c.log, j.String())
		}
		if s.Dropped() != c.want {
			t.Errorf("%s, %s: %d spans are dropped, want %d", c.name, c.protocol, s.Dropped(), c.want)
		}
		_ = shutdown(s, time.Second)
	}
}

func TestABusyBackendIsTriedAgain(t *testing.T) {
	noLeaks(t)
	tries := 0
	col := &collector{answer: func() (*coltracepb.ExportTraceServiceResponse, int) {
		if tries++; tries == 1 {
			return nil, http.StatusServiceUnavailable
		}
		return nil, http.StatusOK
	}}
	s := startSpans(t, Options{}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+serveHTTP(t, col))
	s.Record(request())
	if !eventually(func() bool { return len(col.spans()) == spansOfRequest }) || s.Dropped() != 0 {
		t.Errorf("%d spans came, %d are dropped", len(col.spans()), s.Dropped())
	}
}

func TestMixedUpPortsAndSchemesAreNamedInTheLog(t *testing.T) {
	cert, key := certificateFiles(t)
	serveTLS := func(t *testing.T) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: &collector{}, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
		done := make(chan struct{})
		go func() { defer close(done); _ = s.ServeTLS(l, cert, key) }()
		t.Cleanup(func() { _ = s.Close(); <-done })
		return l.Addr().String()
	}
	asHTTP := func(t *testing.T) string { return serveHTTP(t, &collector{}) }
	asGRPC := func(t *testing.T) string { return serveGRPC(t, &collector{}) }
	for _, c := range []struct {
		name             string
		serve            func(*testing.T) string
		scheme, protocol string
		want             string
	}{
		{"http to a gRPC port", asGRPC, "http", "http/protobuf", "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"},
		{"gRPC to an HTTP port", asHTTP, "http", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"},
		{"https to plain HTTP", asHTTP, "https", "http/protobuf", "use http:// in the endpoint"},
		{"gRPC with TLS to a plain port", asGRPC, "https", "grpc", "use http:// in the endpoint"},
		{"http to TLS", serveTLS, "http", "http/protobuf", "https://"},
		{"a certificate that nobody knows", serveTLS, "https", "http/protobuf", "OTEL_EXPORTER_OTLP_CERTIFICATE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			var j journal
			s := startSpans(t, Options{Logger: j.logger()}, "OTEL_EXPORTER_OTLP_ENDPOINT="+c.scheme+"://"+c.serve(t),
				"OTEL_EXPORTER_OTLP_PROTOCOL="+c.protocol, "OTEL_EXPORTER_OTLP_TIMEOUT=300")
			s.Record(request())
			if !eventually(func() bool { return s.Dropped() > 0 && strings.Contains(j.String(), "remedy") }) || !strings.Contains(j.String(), c.want) {
				t.Errorf("the log lacks %q: %s", c.want, j.String())
			}
		})
	}
}

func TestCredentialsAreNeverShown(t *testing.T) {
	noLeaks(t)
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "no such key: "+r.Header.Get("Authorization"), http.StatusForbidden)
	})
	var j journal
	s := startSpans(t, Options{Logger: j.logger()}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+serveHTTP(t, echo),
		"OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer%20hunter2-SECRET")
	s.Record(request())
	if !eventually(func() bool { return strings.Contains(j.String(), "no such key") }) || strings.Contains(j.String(), "SECRET") {
		t.Errorf("the log has %s", j.String())
	}
}

func TestABatchOfTheLargestHeadsStaysSmall(t *testing.T) {
	s := testSpans(Options{})
	o := request()
	o.Target = "/" + strings.Repeat("\xff", 64<<10)
	o.UserAgent = o.Target
	for range 1000 {
		s.Record(o)
	}
	if len(s.full) == 0 {
		t.Fatal("no batch is full")
	}
	for _, b := range s.full {
		if len(b.raw) > 2<<20 || b.spans > s.limits.batch {
			t.Errorf("a batch has %d spans in %d bytes", b.spans, len(b.raw))
		}
	}
}

func TestTheQueueSizeOfTheEnvironmentIsKept(t *testing.T) {
	s := testSpans(Options{})
	s.limits.batch, s.limits.queue = 20, 50
	for range 10 {
		s.Record(request())
	}
	if s.held.spans+s.filling.spans != 49 || s.Dropped() != 3*spansOfRequest || len(s.full) != 3 {
		t.Errorf("%d spans are held and %d dropped, want 49 and 21", s.held.spans+s.filling.spans, s.Dropped())
	}
}

func TestRecordCostsNoAllocation(t *testing.T) {
	for _, kept := range []string{"sampled", "unsampled", "kept late"} {
		s := testSpans(Options{Server: "127.0.0.1:8001", KeepSlow: time.Hour, KeepQueueShare: 0.9})
		o := request()
		o.TraceState = "ot=th:8;rv:6e6d1a75832a2f,vendor=1"
		o.Sampled = kept == "sampled"
		if kept == "kept late" {
			o.Status = 503
		}
		record := func() {
			s.Record(o)
			for b := s.next(); b != nil; b = s.next() {
				s.release(b)
			}
		}
		for range 5000 {
			record() // until all buffers have their size
		}
		if n := testing.AllocsPerRun(5000, record); n != 0 {
			t.Errorf("%s: %v allocations a request, want none", kept, n)
		}
	}
}

// testSpans are spans that nobody uploads.
func testSpans(o Options) *Spans {
	return newSpans(o, nil, batchLimits{delay: time.Second, timeout: time.Second, batch: 512})
}

func BenchmarkRecord(b *testing.B) {
	for _, sampled := range []bool{true, false} {
		name := "unsampled"
		if sampled {
			name = "sampled"
		}
		b.Run(name, func(b *testing.B) {
			s := testSpans(Options{Server: "127.0.0.1:8001", KeepSlow: time.Minute, KeepQueueShare: 0.9})
			o := request()
			o.Sampled = sampled
			bytes := 0
			b.ReportAllocs()
			for b.Loop() {
				s.Record(o)
				if full := s.next(); full != nil {
					bytes += len(full.raw)
					s.release(full)
				}
			}
			b.ReportMetric(float64(bytes)/float64(b.N), "encoded_B/op")
		})
	}
}
