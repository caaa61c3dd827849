package envoy

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/classifier"
	"weir/proxy"
)

// behind puts a fake Envoy with the filter before a server.
func behind(r *rig, upstream string, c *procConfig) (*fakeEnvoy, string) {
	e := newFake(r.T, r.conn, upstream)
	e.proc = c
	h := httptest.NewServer(e)
	r.Cleanup(h.Close)
	return e, h.URL
}

// reply is an answer as a client sees it.
type reply struct {
	status          int
	header, trailer http.Header
	body            string
	err             error
}

func post(ctx context.Context, url string, fields ...string) (a reply) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/asr", strings.NewReader("audio"))
	if err != nil {
		panic(err)
	}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ": ")
		req.Header.Set(name, value)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, res.Trailer, string(b), err}
}

func async(ctx context.Context, url string, fields ...string) <-chan reply {
	c := make(chan reply, 1)
	go func() { c <- post(ctx, url, fields...) }()
	return c
}

func TestARequestPassesTheGateAndIsRecorded(t *testing.T) {
	r := newRig(t, limits(1, 4, 0))
	s := newServer(t)
	c := headersOnly()
	c.attributes = true
	_, url := behind(r, s.URL, c)
	got := async(t.Context(), url, "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	call := s.next(t)
	parent := call.r.Header.Get("Traceparent")
	call.begin("Server-Timing: queue;dur=1, forward;dur=0.5;batch=3")
	call.finish()
	if a := <-got; a.status != 200 || a.header.Get("Server-Timing") != "queue;dur=1, forward;dur=0.5;batch=3" {
		t.Errorf("client got %d, %v", a.status, a.header)
	}
	o := r.records(1)[0]
	if want := "00-0af7651916cd43dd8448eb211c80319c-" + hex.EncodeToString(o.SpanID[:]) + "-01"; parent != want {
		t.Errorf("server got traceparent %q, want %q", parent, want)
	}
	if hex.EncodeToString(o.ParentID[:]) != "b7ad6b7169203331" {
		t.Errorf("parent is %x", o.ParentID)
	}
	if o.Class != "POST /asr" || o.Status != 200 || o.Outcome != classifier.OK || o.BatchSize != 3 || o.BytesIn != 5 || o.Protocol != "http/1.1" || o.Inflight != 1 || o.Limit != 1 {
		t.Errorf("record %+v", o)
	}
	if o.Enqueued.After(o.Dequeued) || o.Dequeued.After(o.Sent) || o.Sent.After(o.Responded) || o.Responded.After(o.Done) {
		t.Errorf("instants out of order: %+v", o)
	}
}

func TestTheQueueIsInWeirAndFirstComeFirstServed(t *testing.T) {
	r := newRig(t, limits(1, 4, 0))
	s := newServer(t)
	_, url := behind(r, s.URL, headersOnly())
	var answers []<-chan reply
	for i := range 4 {
		answers = append(answers, async(t.Context(), url, fmt.Sprintf("X-Number: %d", i)))
		r.eventually(func() bool { g := r.side.Gate().State(); return g.Inflight+g.Waiting == i+1 }, "request %d at the gate", i)
	}
	for i := range 4 {
		call := s.next(t)
		if n := call.r.Header.Get("X-Number"); n != fmt.Sprint(i) {
			t.Errorf("request %s came as the %dth", n, i)
		}
		if !s.idle() {
			t.Error("a second request reached the server beyond max_concurrency")
		}
		call.begin()
		call.finish()
		if a := <-answers[i]; a.status != 200 {
			t.Errorf("answer %d is %d", i, a.status)
		}
	}
	for i, o := range r.records(4) {
		if o.Waiting != max(0, i-1) || i > 0 && o.QueueWait() == 0 {
			t.Errorf("record %d: %d waiting before it, waited %v", i, o.Waiting, o.QueueWait())
		}
	}
}

// The slot is the server's as long as its answer runs; the two ways to close a
// stream, at once or gracefully, make no difference.
func TestThePlaceIsHeldUntilTheAnswerHasEnded(t *testing.T) {
	for _, graceful := range []bool{false, true} {
		t.Run(fmt.Sprintf("graceful=%v", graceful), func(t *testing.T) {
			r := newRig(t, limits(1, 4, 0))
			s := newServer(t)
			c := headersOnly()
			c.graceful = graceful
			_, url := behind(r, s.URL, c)
			first := async(t.Context(), url)
			call := s.next(t)
			call.begin("Trailer: Server-Timing")
			r.eventually(func() bool { return r.state().Processor.Active == 1 }, "one stream")
			second := async(t.Context(), url)
			r.eventually(func() bool { return r.side.Gate().State().Waiting == 1 }, "the second waits")
			if !s.idle() {
				t.Fatal("the second request reached the server while the first answer ran")
			}
			call.w.Header().Set("Server-Timing", "forward;dur=0.25")
			call.finish()
			<-first
			call = s.next(t)
			call.begin()
			call.finish()
			<-second
			o := r.records(2)[0]
			if d, _ := o.In(classifier.StageForward); d != 250*time.Microsecond || o.Source != "trailer" {
				t.Errorf("forward %v from %q", d, o.Source)
			}
		})
	}
}

// Without trailers asked for, an Envoy from 1.37 on ends the stream at the
// answer's head: this is why deploy/envoy asks for them.
func TestAnEnvoyThatSkipsTrailersFreesThePlaceAtTheHead(t *testing.T) {
	r := newRig(t, limits(1, 4, 0))
	s := newServer(t)
	c := headersOnly()
	c.mode.ResponseTrailerMode = modev3.ProcessingMode_SKIP
	_, url := behind(r, s.URL, c)
	first := async(t.Context(), url)
	call := s.next(t)
	call.begin()
	r.eventually(func() bool { return r.side.Gate().State().Inflight == 0 }, "the place is free")
	call.finish()
	<-first
}

func TestAFullQueueIsAnsweredByEnvoyInWeirsWords(t *testing.T) {
	r := newRig(t, limits(1, 0, 0))
	s := newServer(t)
	_, url := behind(r, s.URL, headersOnly())
	first := async(t.Context(), url)
	call := s.next(t)
	a := post(t.Context(), url)
	if a.status != 503 || a.header.Get("Retry-After") != "1" || a.header.Get("Content-Type") != "application/json" ||
		a.header.Get("X-Details") != "weir_queue_full" || !strings.Contains(a.body, `"type":"queue_full"`) || !strings.Contains(a.body, "max_queue_size 0") {
		t.Errorf("refused with %d %v %s", a.status, a.header, a.body)
	}
	g := post(t.Context(), url, "Content-Type: application/grpc")
	if g.header.Get("Grpc-Status") != "14" {
		t.Errorf("gRPC client refused with %v", g.header)
	}
	call.begin()
	call.finish()
	<-first
	if o := r.records(3); o[0].Outcome != classifier.Rejected || o[0].Error != "queue_full" || o[0].Status != 503 {
		t.Errorf("record %+v", o[0])
	}
	if st := r.state(); st.Processor.Refused != 2 {
		t.Errorf("%d refused, want 2", st.Processor.Refused)
	}
}

func TestQueueTimeoutIsWeirsAndNotEnvoys(t *testing.T) {
	r := newRig(t, limits(1, 4, 300*time.Millisecond))
	s := newServer(t)
	c := headersOnly()
	c.messageTimeout, c.maxMessageTimeout = 200*time.Millisecond, 10*time.Second
	e, url := behind(r, s.URL, c)
	first := async(t.Context(), url)
	call := s.next(t)
	if a := post(t.Context(), url); a.status != 503 || !strings.Contains(a.body, "queue_timeout 300ms") {
		t.Errorf("got %d %s", a.status, a.body)
	}
	if e.timeouts.Load() != 0 || e.overrides.Load() != 1 {
		t.Errorf("Envoy's timer ran out %d times and was extended %d times; want 0, 1", e.timeouts.Load(), e.overrides.Load())
	}
	call.begin()
	call.finish()
	<-first
}

// An Envoy that may not be asked for patience goes on without weir: open by
// default, and closed where it is set so. weir sees a request leave its queue.
func TestAnImpatientEnvoyBypassesTheQueue(t *testing.T) {
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprintf("closed=%v", closed), func(t *testing.T) {
			r := newRig(t, limits(1, 4, 30*time.Second))
			s := newServer(t)
			c := headersOnly()
			c.messageTimeout, c.failClosed = 200*time.Millisecond, closed
			e, url := behind(r, s.URL, c)
			first := async(t.Context(), url)
			call := s.next(t)
			second := async(t.Context(), url)
			if !closed {
				by := s.next(t)
				by.begin()
				by.finish()
			}
			if a := <-second; closed && a.status != 504 || !closed && (a.status != 200 || e.failOpen.Load() != 1) {
				t.Errorf("status %d, %d bypassed", a.status, e.failOpen.Load())
			}
			r.eventually(func() bool { return r.state().Processor.Left == 1 }, "the bypass is counted")
			call.begin()
			call.finish()
			<-first
		})
	}
}

func TestAClientThatLeavesTheQueueLeavesItAtOnce(t *testing.T) {
	for _, graceful := range []bool{false, true} {
		t.Run(fmt.Sprintf("graceful=%v", graceful), func(t *testing.T) {
			r := newRig(t, limits(1, 4, 0))
			s := newServer(t)
			c := headersOnly()
			c.graceful = graceful // only a half-close comes within the first second
			e, url := behind(r, s.URL, c)
			first := async(t.Context(), url)
			call := s.next(t)
			ctx, leave := context.WithCancel(t.Context())
			go e.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/asr", strings.NewReader("audio")))
			r.eventually(func() bool { return r.side.Gate().State().Waiting == 1 }, "it waits")
			began := time.Now()
			leave()
			r.eventually(func() bool { return r.side.Gate().State().Waiting == 0 }, "it has left")
			if took := time.Since(began); took > 900*time.Millisecond {
				t.Errorf("noticed after %v", took)
			}
			call.begin()
			call.finish()
			<-first
			if o := r.records(2)[0]; o.Outcome != classifier.Canceled || o.Error != "client_gone" || !o.Dequeued.IsZero() {
				t.Errorf("record %+v", o)
			}
		})
	}
}

func TestAClientThatLeavesWhileTheServerWorksFreesThePlace(t *testing.T) {
	r := newRig(t, limits(1, 4, 0))
	s := newServer(t)
	_, url := behind(r, s.URL, headersOnly())
	ctx, leave := context.WithCancel(t.Context())
	first := async(ctx, url)
	s.next(t)
	leave()
	<-first
	o := r.records(1)[0]
	if o.Outcome != classifier.Canceled || o.Dequeued.IsZero() || r.side.Gate().State().Inflight != 0 {
		t.Errorf("record %+v", o)
	}
}

func TestObservabilityModeHoldsNobodyUp(t *testing.T) {
	r := newRig(t, limits(1, 0, 0))
	s := newServer(t)
	c := headersOnly()
	c.observe = true
	_, url := behind(r, s.URL, c)
	first, second := async(t.Context(), url), async(t.Context(), url)
	a, b := s.next(t), s.next(t)
	for _, one := range []*call{a, b} {
		one.begin("Server-Timing: forward;dur=0.1")
		one.finish()
	}
	<-first
	<-second
	for _, o := range r.records(2) {
		if o.Outcome != classifier.OK || o.Status != 200 || o.QueueWait() > time.Millisecond || o.Done != o.Responded {
			t.Errorf("record %+v", o)
		}
		if d, ok := o.In(classifier.StageForward); !ok || d != 100*time.Microsecond {
			t.Errorf("forward %v", d)
		}
	}
}

func TestTheTraceContextOfTheStreamComesFirst(t *testing.T) {
	r := newRig(t)
	s := newServer(t)
	c := headersOnly()
	c.metadata = []string{"traceparent", "00-0af7651916cd43dd8448eb211c80319c-00000000000000aa-01"}
	_, url := behind(r, s.URL, c)
	got := async(t.Context(), url, "traceparent: 00-0af7651916cd43dd8448eb211c80319c-00000000000000bb-01")
	call := s.next(t)
	call.begin()
	call.finish()
	<-got
	if o := r.records(1)[0]; o.ParentID[7] != 0xaa {
		t.Errorf("parent %x, want Envoy's span aa", o.ParentID)
	}
}

func TestAnEnvoyThatMeansToSendBodiesIsAskedForNone(t *testing.T) {
	r := newRig(t)
	s := newServer(t)
	c := headersOnly()
	c.mode.RequestBodyMode, c.mode.ResponseTrailerMode, c.allowOverride = modev3.ProcessingMode_STREAMED, modev3.ProcessingMode_SKIP, true
	_, url := behind(r, s.URL, c)
	stream := openStream(t, r)
	m := requestHeaders()
	m.ProtocolConfig = &procv3.ProtocolConfiguration{RequestBodyMode: modev3.ProcessingMode_STREAMED}
	a := stream.ask(m).GetModeOverride()
	if a.GetRequestBodyMode() != modev3.ProcessingMode_NONE || a.GetResponseTrailerMode() != modev3.ProcessingMode_SEND || a.GetResponseHeaderMode() != modev3.ProcessingMode_SEND {
		t.Errorf("asked for %v", a)
	}
	// With the override in force the answer's end is seen again.
	got := async(t.Context(), url)
	call := s.next(t)
	call.begin("Trailer: X-Queue-Time")
	call.w.Header().Set("X-Queue-Time", "0.125")
	call.finish()
	<-got
	r.eventually(func() bool { return r.side.Gate().State().Inflight == 1 }, "only the stream by hand is left")
	if o := r.records(1)[0]; o.Source != "trailer" {
		t.Errorf("timings from %q, want the trailer", o.Source)
	}
}

func TestServerTimingTellsClientsOnRequest(t *testing.T) {
	r := newRig(t, func(c *proxy.Config) { c.ServerTiming, c.RequestStart = true, true })
	s := newServer(t)
	_, url := behind(r, s.URL, headersOnly())
	got := async(t.Context(), url)
	call := s.next(t)
	if !strings.HasPrefix(call.r.Header.Get("X-Request-Start"), "t=") {
		t.Errorf("X-Request-Start %q", call.r.Header.Get("X-Request-Start"))
	}
	call.begin("Server-Timing: forward;dur=0.5")
	call.finish()
	if v := (<-got).header.Get("Server-Timing"); !strings.HasPrefix(v, "forward;dur=0.5,weir-queue;dur=") {
		t.Errorf("Server-Timing %q", v)
	}
}

func TestAThousandStreamsAtOnce(t *testing.T) {
	const n = 1000
	r := newRig(t, limits(16, n, 0))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Server-Timing", "forward;dur=0.01")
		_, _ = io.WriteString(w, "text")
	}))
	t.Cleanup(s.Close)
	e := newFake(t, r.conn, s.URL)
	e.proc = headersOnly()
	var wg sync.WaitGroup
	var most int
	var mu sync.Mutex
	for i := range n {
		wg.Go(func() {
			w := httptest.NewRecorder()
			req := httptest.NewRequest(http.MethodPost, "/asr", strings.NewReader("audio"))
			if i%10 == 0 { // a client that does not wait
				ctx, cancel := context.WithTimeout(req.Context(), time.Millisecond)
				defer cancel()
				req = req.WithContext(ctx)
			}
			e.ServeHTTP(w, req)
			g := r.side.Gate().State()
			mu.Lock()
			most = max(most, g.Inflight)
			mu.Unlock()
		})
	}
	wg.Wait()
	r.eventually(func() bool {
		g, st := r.side.Gate().State(), r.state()
		return g.Inflight == 0 && g.Waiting == 0 && st.Processor.Active == 0 && st.Processor.Streams == n
	}, "all streams ended: %+v, %+v", r.side.Gate().State(), r.state().Processor)
	if most > 16 {
		t.Errorf("%d in the server, want 16 at most", most)
	}
	r.records(n - n/10) // of the impatient, some left before they had sent a head
}

// stream is a stream by hand.
type stream struct {
	*testing.T
	procv3.ExternalProcessor_ProcessClient
}

func openStream(t *testing.T, r *rig) *stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	s, err := procv3.NewExternalProcessorClient(r.conn).Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &stream{t, s}
}

func (s *stream) ask(m *procv3.ProcessingRequest) *procv3.ProcessingResponse {
	s.Helper()
	if err := s.Send(m); err != nil && err != io.EOF {
		s.Fatal(err)
	}
	a, err := s.Recv()
	if err != nil {
		s.Fatal(err)
	}
	return a
}

func requestHeaders(more ...*corev3.HeaderValue) *procv3.ProcessingRequest {
	h := headerMap(map[string]string{":method": "POST", ":path": "/asr", ":authority": "asr"})
	h.Headers = append(h.Headers, more...)
	return &procv3.ProcessingRequest{Request: &procv3.ProcessingRequest_RequestHeaders{RequestHeaders: &procv3.HttpHeaders{Headers: h}}}
}

func responseHeaders(ended bool, more ...*corev3.HeaderValue) *procv3.ProcessingRequest {
	h := headerMap(map[string]string{":status": "200"})
	h.Headers = append(h.Headers, more...)
	return &procv3.ProcessingRequest{Request: &procv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &procv3.HttpHeaders{Headers: h, EndOfStream: ended}}}
}

func responseTrailers(more ...*corev3.HeaderValue) *procv3.ProcessingRequest {
	return &procv3.ProcessingRequest{Request: &procv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &procv3.HttpTrailers{Trailers: &corev3.HeaderMap{Headers: more}}}}
}

func TestHostileStreamsEndWithAReasonAndLeakNothing(t *testing.T) {
	r := newRig(t, limits(1, 0, 0), func(c *proxy.Config) { c.HeadTimeout = proxy.Duration(200 * time.Millisecond) })
	huge := requestHeaders(&corev3.HeaderValue{Key: "x-huge", RawValue: []byte(strings.Repeat("a", 1<<20))})
	body := &procv3.ProcessingRequest{Request: &procv3.ProcessingRequest_RequestBody{RequestBody: &procv3.HttpBody{Body: []byte("a")}}}
	for _, c := range []struct {
		name string
		send []*procv3.ProcessingRequest
		code codes.Code
		text string
	}{
		{"nothing at all", nil, codes.DeadlineExceeded, "head_timeout 200ms"},
		{"an answer first", []*procv3.ProcessingRequest{responseHeaders(false)}, codes.InvalidArgument, "request_header_mode"},
		{"trailers first", []*procv3.ProcessingRequest{responseTrailers()}, codes.InvalidArgument, "request_header_mode"},
		{"a body first", []*procv3.ProcessingRequest{body}, codes.InvalidArgument, "request_header_mode"},
		{"an empty message", []*procv3.ProcessingRequest{{}}, codes.InvalidArgument, "request_header_mode"},
		{"headers of a megabyte", []*procv3.ProcessingRequest{huge}, codes.ResourceExhausted, "max_head_size 65536"},
		{"two requests", []*procv3.ProcessingRequest{requestHeaders(), requestHeaders()}, codes.InvalidArgument, "came twice"},
		{"two answers", []*procv3.ProcessingRequest{requestHeaders(), responseHeaders(false), responseHeaders(false)}, codes.InvalidArgument, "came twice"},
		{"trailers without an answer", []*procv3.ProcessingRequest{requestHeaders(), responseTrailers()}, codes.InvalidArgument, "response_header_mode"},
		{"a huge answer", []*procv3.ProcessingRequest{requestHeaders(), responseHeaders(false, huge.GetRequestHeaders().Headers.Headers...)}, codes.ResourceExhausted, "max_head_size"},
	} {
		s := openStream(t, r)
		for _, m := range c.send {
			if err := s.Send(m); err != nil && err != io.EOF {
				t.Fatal(err)
			}
		}
		var err error
		for err == nil {
			_, err = s.Recv()
		}
		if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.text) {
			t.Errorf("%s: %v, want %v with %q", c.name, err, c.code, c.text)
		}
	}
	r.eventually(func() bool { return r.state().Processor.Active == 0 && r.side.Gate().State().Inflight == 0 }, "all is free")
	// One without headers is a request all the same.
	s := openStream(t, r)
	s.ask(&procv3.ProcessingRequest{Request: &procv3.ProcessingRequest_RequestHeaders{RequestHeaders: &procv3.HttpHeaders{}}})
	_ = s.CloseSend()
	if _, err := s.Recv(); err != io.EOF {
		t.Errorf("a half-close ends with %v, want no error", err)
	}
}

func TestBodiesAndFlowControlAreLetBy(t *testing.T) {
	r := newRig(t)
	s := openStream(t, r)
	s.ask(requestHeaders())
	for _, m := range []*procv3.ProcessingRequest{
		{Request: &procv3.ProcessingRequest_RequestBody{RequestBody: &procv3.HttpBody{Body: []byte("a")}}},
		{Request: &procv3.ProcessingRequest_RequestTrailers{RequestTrailers: &procv3.HttpTrailers{}}},
		responseHeaders(false),
		{Request: &procv3.ProcessingRequest_ResponseBody{ResponseBody: &procv3.HttpBody{Body: []byte("a")}}},
		responseTrailers(),
	} {
		a := s.ask(m)
		if got, want := fmt.Sprintf("%T", a.Response), strings.Replace(fmt.Sprintf("%T", m.Request), "Request_", "Response_", 1); got != want {
			t.Errorf("%T was answered by %s", m.Request, got)
		}
	}
	r.eventually(func() bool { return r.side.Gate().State().Inflight == 0 }, "the trailers freed the place")
}

func TestStreamsUnderWayEndWithinTheDrainTimeout(t *testing.T) {
	r := newRig(t, func(c *proxy.Config) { c.DrainTimeout = proxy.Duration(300 * time.Millisecond) })
	s := openStream(t, r)
	s.ask(requestHeaders())
	r.stop()
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("stream ended with %v", err)
	}
}
