package envoy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"google.golang.org/grpc"
)

// fakeEnvoy is an HTTP proxy that speaks Envoy's side of the protocols, in the
// order and with the rules of Envoy's ext_proc filter and its gRPC access log
// (read in their source; no Envoy was run).
type fakeEnvoy struct {
	conn     *grpc.ClientConn
	upstream string // http://host:port
	client   *http.Client

	proc *procConfig // nil: no ext_proc filter
	log  *accessLog  // nil: no access log
	pool *pool       // nil: as many connections as it takes

	total, active, failOpen, timeouts, immediate, overrides atomic.Int64
}

// procConfig is the filter's configuration.
type procConfig struct {
	mode              modev3.ProcessingMode
	messageTimeout    time.Duration // 200 ms by default
	maxMessageTimeout time.Duration // 0: weir may ask for no more
	failClosed        bool
	allowOverride     bool
	observe           bool
	closeEarly        bool // ext_proc_stream_close_optimization, on since 1.37
	graceful          bool // half-close, and reset only if the server does not end the stream
	attributes        bool
	metadata          []string // initial metadata of the stream
}

// headersOnly is the mode that deploy/envoy asks for.
func headersOnly() *procConfig {
	return &procConfig{
		messageTimeout: 30 * time.Second, closeEarly: true,
		mode: modev3.ProcessingMode{
			RequestHeaderMode: modev3.ProcessingMode_SEND, ResponseHeaderMode: modev3.ProcessingMode_SEND,
			ResponseTrailerMode: modev3.ProcessingMode_SEND, RequestTrailerMode: modev3.ProcessingMode_SKIP,
		},
	}
}

func newFake(t testing.TB, conn *grpc.ClientConn, upstream string) *fakeEnvoy {
	tr := &http.Transport{MaxIdleConnsPerHost: 2000, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &fakeEnvoy{conn: conn, upstream: upstream, client: &http.Client{Transport: tr}}
}

// ServeHTTP carries one request.
func (e *fakeEnvoy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.total.Add(1)
	e.active.Add(1)
	defer e.active.Add(-1)
	l := &life{envoy: e, w: w, r: r, start: time.Now()}
	defer l.logEntry()
	if e.proc != nil {
		l.filter = e.openFilter(r.Context())
		defer l.filter.destroy()
	}
	l.run()
}

// life is one request in Envoy.
type life struct {
	envoy  *fakeEnvoy
	w      http.ResponseWriter
	r      *http.Request
	filter *filter
	start  time.Time

	poolReady                                              time.Duration
	mu                                                     sync.Mutex // guards lastRx, lastTx and in while the body may still be read
	lastRx, firstTx, lastTx, firstUpRx, lastUpRx, downLast time.Time
	status                                                 int
	header, trailer                                        http.Header
	in, out                                                int64
	flags                                                  datav3.ResponseFlags
}

func (l *life) run() {
	fields := l.requestFields()
	if f := l.filter; f != nil {
		m := &procv3.HttpHeaders{Headers: headerMap(fields), EndOfStream: l.r.ContentLength == 0}
		reply, ok := f.ask(l.r.Context(), &procv3.ProcessingRequest{
			Request: &procv3.ProcessingRequest_RequestHeaders{RequestHeaders: m}, Attributes: f.attributes(map[string]any{"request.protocol": l.r.Proto, "source.address": l.r.RemoteAddr}),
		})
		if im := reply.GetImmediateResponse(); im != nil {
			l.local(im)
			return
		}
		if !ok {
			l.abandoned(f)
			return
		}
		apply(fields, reply.GetRequestHeaders().GetResponse().GetHeaderMutation())
	}
	began := time.Now()
	release, overflow := l.envoy.pool.take(l.r.Context())
	l.poolReady = time.Since(began)
	if overflow {
		l.flags.UpstreamOverflow = true
		l.answerSelf(503, "upstream connect error or disconnect/reset before headers. reset reason: overflow")
		return
	}
	if release == nil {
		l.flags.DownstreamConnectionTermination = true
		return
	}
	defer release()
	l.forward(fields)
}

// abandoned is a request for which the filter gave no answer and may not let it by.
func (l *life) abandoned(f *filter) {
	if l.r.Context().Err() != nil {
		l.flags.DownstreamConnectionTermination = true
		return
	}
	l.answerSelf(f.failStatus, "ext_proc failed")
}

func (l *life) answerSelf(status int, text string) {
	l.status = status
	l.w.WriteHeader(status)
	_, _ = io.WriteString(l.w, text)
	l.downLast = time.Now()
}

// local is the answer that the processor asked for.
func (l *life) local(im *procv3.ImmediateResponse) {
	l.envoy.immediate.Add(1)
	fields := make(map[string]string)
	apply(fields, im.GetHeaders())
	for k, v := range fields {
		l.w.Header().Set(k, v)
	}
	if im.GetGrpcStatus() != nil {
		l.w.Header().Set("Grpc-Status", fmt.Sprint(im.GetGrpcStatus().GetStatus()))
	}
	l.w.Header().Set("X-Details", im.GetDetails())
	l.answerSelf(int(im.GetStatus().GetCode()), string(im.GetBody()))
}

func (l *life) requestFields() map[string]string {
	fields := map[string]string{":method": l.r.Method, ":path": l.r.URL.RequestURI(), ":authority": l.r.Host, ":scheme": "http"}
	for k, v := range l.r.Header {
		fields[strings.ToLower(k)] = strings.Join(v, ",")
	}
	if fields["x-request-id"] == "" {
		fields["x-request-id"] = fmt.Sprintf("%p-%d", l, l.start.UnixNano())
	}
	l.r.Header.Set("X-Request-Id", fields["x-request-id"])
	if l.r.ContentLength > 0 {
		fields["content-length"] = fmt.Sprint(l.r.ContentLength)
	}
	return fields
}

// forward sends the request upstream as it comes, and the answer down.
func (l *life) forward(fields map[string]string) {
	l.firstTx = time.Now()
	body := &countedBody{ReadCloser: l.r.Body, life: l}
	req, err := http.NewRequestWithContext(l.r.Context(), l.r.Method, l.envoy.upstream+l.r.URL.RequestURI(), body)
	if err != nil {
		panic(err)
	}
	req.ContentLength = l.r.ContentLength
	for k, v := range fields {
		if !strings.HasPrefix(k, ":") && k != "content-length" && k != "host" && k != "connection" {
			req.Header.Set(k, v)
		}
	}
	res, err := l.envoy.client.Do(req)
	l.mu.Lock()
	if l.lastRx.IsZero() {
		l.lastRx, l.lastTx = l.firstTx, l.firstTx
	}
	l.mu.Unlock()
	if err != nil {
		if l.r.Context().Err() != nil {
			l.flags.DownstreamConnectionTermination = true
			return
		}
		l.flags.UpstreamConnectionFailure = true
		l.answerSelf(503, "upstream connect error")
		return
	}
	defer res.Body.Close()
	l.firstUpRx, l.status, l.header = time.Now(), res.StatusCode, res.Header
	l.answer(res)
}

func (l *life) answer(res *http.Response) {
	out := map[string]string{":status": fmt.Sprint(res.StatusCode)}
	for k, v := range res.Header {
		out[strings.ToLower(k)] = strings.Join(v, ",")
	}
	ended := res.ContentLength == 0
	if f := l.filter; f != nil {
		m := &procv3.HttpHeaders{Headers: headerMap(out), EndOfStream: ended}
		reply, ok := f.askIf(f.mode.ResponseHeaderMode != modev3.ProcessingMode_SKIP, l.r.Context(), &procv3.ProcessingRequest{
			Request:    &procv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: m},
			Attributes: f.attributes(map[string]any{"response.code_details": "via_upstream", "upstream.cx_pool_ready_duration": l.poolReady.String()}),
		})
		if !ok {
			l.abandoned(f)
			return
		}
		apply(out, reply.GetResponseHeaders().GetResponse().GetHeaderMutation())
		if f.c.closeEarly && (ended || f.mode.ResponseTrailerMode != modev3.ProcessingMode_SEND) {
			f.destroy()
		}
	}
	for k, v := range out {
		if !strings.HasPrefix(k, ":") {
			l.w.Header().Set(k, v)
		}
	}
	l.w.WriteHeader(res.StatusCode)
	l.out, _ = io.Copy(flushWriter{l.w}, res.Body)
	l.lastUpRx, l.trailer = time.Now(), res.Trailer
	if l.r.Context().Err() != nil {
		l.flags.DownstreamConnectionTermination = true
		return
	}
	l.sendTrailers(res.Trailer)
	l.downLast = time.Now()
}

// sendTrailers asks about trailers only where there are some: Envoy makes none up.
func (l *life) sendTrailers(t http.Header) {
	out := make(map[string]string)
	for k, v := range t {
		out[strings.ToLower(k)] = strings.Join(v, ",")
	}
	if f := l.filter; f != nil && len(out) > 0 && f.mode.ResponseTrailerMode == modev3.ProcessingMode_SEND {
		reply, ok := f.ask(l.r.Context(), &procv3.ProcessingRequest{
			Request: &procv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &procv3.HttpTrailers{Trailers: headerMap(out)}},
		})
		if ok {
			apply(out, reply.GetResponseTrailers().GetHeaderMutation())
		}
	}
	for k, v := range out {
		l.w.Header().Set(http.TrailerPrefix+k, v)
	}
}

type flushWriter struct{ http.ResponseWriter }

func (f flushWriter) Write(b []byte) (int, error) {
	n, err := f.ResponseWriter.Write(b)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

// countedBody stamps the end of an upload.
type countedBody struct {
	io.ReadCloser
	life *life
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.life.mu.Lock()
	defer b.life.mu.Unlock()
	b.life.in += int64(n)
	if err != nil {
		now := time.Now()
		b.life.lastRx, b.life.lastTx = now, now
	}
	return n, err
}

// filter is the ext_proc filter of one request.
type filter struct {
	envoy   *fakeEnvoy
	c       *procConfig
	mode    modev3.ProcessingMode
	stream  procv3.ExternalProcessor_ProcessClient
	cancel  context.CancelFunc
	replies chan *procv3.ProcessingResponse
	ended   chan struct{} // the server ended the stream
	err     error         // good after ended

	complete   bool // Envoy goes on without the processor
	closed     bool
	failStatus int
}

func (e *fakeEnvoy) openFilter(context.Context) *filter {
	ctx, cancel := context.WithCancel(context.Background())
	if len(e.proc.metadata) > 0 {
		ctx = metadata.AppendToOutgoingContext(ctx, e.proc.metadata...)
	}
	f := &filter{envoy: e, c: e.proc, mode: modev3.ProcessingMode{
		RequestHeaderMode: e.proc.mode.RequestHeaderMode, ResponseHeaderMode: e.proc.mode.ResponseHeaderMode,
		RequestBodyMode: e.proc.mode.RequestBodyMode, ResponseBodyMode: e.proc.mode.ResponseBodyMode,
		RequestTrailerMode: e.proc.mode.RequestTrailerMode, ResponseTrailerMode: e.proc.mode.ResponseTrailerMode,
	}, cancel: cancel, replies: make(chan *procv3.ProcessingResponse, 8), ended: make(chan struct{})}
	stream, err := procv3.NewExternalProcessorClient(e.conn).Process(ctx)
	if err != nil {
		f.err = err
		close(f.ended)
		return f
	}
	f.stream = stream
	go f.receive()
	return f
}

func (f *filter) receive() {
	defer close(f.ended)
	for {
		m, err := f.stream.Recv()
		if err != nil {
			f.err = err
			return
		}
		f.replies <- m
	}
}

func (f *filter) attributes(a map[string]any) map[string]*structpb.Struct {
	if !f.c.attributes {
		return nil
	}
	s, err := structpb.NewStruct(a)
	if err != nil {
		panic(err)
	}
	return map[string]*structpb.Struct{"envoy.filters.http.ext_proc": s}
}

func (f *filter) askIf(asked bool, ctx context.Context, m *procv3.ProcessingRequest) (*procv3.ProcessingResponse, bool) {
	if !asked {
		return nil, true
	}
	return f.ask(ctx, m)
}

// ask sends a message and waits for the reply. ok is false where the request
// must not go on.
func (f *filter) ask(ctx context.Context, m *procv3.ProcessingRequest) (reply *procv3.ProcessingResponse, ok bool) {
	if f.complete {
		return nil, true
	}
	m.ObservabilityMode = f.c.observe
	if m.GetRequestHeaders() != nil {
		m.ProtocolConfig = &procv3.ProtocolConfiguration{RequestBodyMode: f.mode.RequestBodyMode, ResponseBodyMode: f.mode.ResponseBodyMode}
	}
	if f.stream == nil || f.stream.Send(m) != nil && !f.c.observe {
		return nil, f.failed(500)
	}
	if f.c.observe {
		return nil, true
	}
	timer := time.NewTimer(f.c.messageTimeout)
	defer func() { timer.Stop() }()
	extended := false
	for {
		select {
		case reply = <-f.replies:
		case <-timer.C:
			f.envoy.timeouts.Add(1)
			return nil, f.failed(504)
		case <-ctx.Done():
			f.destroy()
			return nil, false
		case <-f.ended:
			select {
			case reply = <-f.replies: // what came before the end
			default:
				return nil, f.failed(500)
			}
		}
		d := reply.GetOverrideMessageTimeout()
		if d == nil {
			break
		}
		if !extended && d.AsDuration() >= time.Millisecond && d.AsDuration() <= f.c.maxMessageTimeout {
			extended = true
			f.envoy.overrides.Add(1)
			timer.Reset(d.AsDuration())
		}
	}
	if o := reply.GetModeOverride(); o != nil && f.c.allowOverride {
		f.mode.ResponseHeaderMode, f.mode.ResponseTrailerMode = o.ResponseHeaderMode, o.ResponseTrailerMode
		f.mode.RequestBodyMode, f.mode.ResponseBodyMode = o.RequestBodyMode, o.ResponseBodyMode
	}
	if reply.GetImmediateResponse() != nil {
		f.complete = true
		f.destroy()
	}
	return reply, true
}

// failed is what becomes of a request when the processor does.
func (f *filter) failed(status int) bool {
	f.complete, f.failStatus = true, status
	f.destroy()
	if f.c.failClosed {
		return false
	}
	f.envoy.failOpen.Add(1)
	return true
}

// destroy closes the stream: by a half-close, and by a reset either at once or
// when the server does not end it within a second. In observability mode that
// happens some time after the request.
func (f *filter) destroy() {
	if f.stream == nil {
		f.cancel()
	}
	if f.closed || f.stream == nil {
		return
	}
	f.closed = true
	if f.c.observe {
		time.AfterFunc(200*time.Millisecond, f.cancel) // deferred_close_timeout, 5 s by default
		return
	}
	_ = f.stream.CloseSend()
	if !f.c.graceful {
		f.cancel()
		return
	}
	go func() {
		select {
		case <-f.ended:
		case <-time.After(time.Second):
		}
		f.cancel()
	}()
}

func headerMap(fields map[string]string) *corev3.HeaderMap {
	m := &corev3.HeaderMap{}
	for k, v := range fields {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: k, RawValue: []byte(v)})
	}
	sort.Slice(m.Headers, func(i, j int) bool { return m.Headers[i].Key < m.Headers[j].Key })
	return m
}

// apply does what a mutation asks for.
func apply(fields map[string]string, m *procv3.HeaderMutation) {
	for _, s := range m.GetSetHeaders() {
		k, v := s.Header.Key, string(s.Header.RawValue)
		if s.AppendAction == corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD && fields[k] != "" {
			v = fields[k] + "," + v
		}
		fields[k] = v
	}
	for _, k := range m.GetRemoveHeaders() {
		delete(fields, k)
	}
}

// pool is max_connections of an HTTP/1.1 cluster, with max_pending_requests.
type pool struct {
	places  chan struct{}
	pending atomic.Int64
	most    int64
}

func newPool(connections, pending int) *pool {
	return &pool{places: make(chan struct{}, connections), most: int64(pending)}
}

func (p *pool) take(ctx context.Context) (release func(), overflow bool) {
	if p == nil {
		return func() {}, false
	}
	if p.pending.Add(1) > p.most {
		p.pending.Add(-1)
		return nil, true
	}
	defer p.pending.Add(-1)
	select {
	case p.places <- struct{}{}:
		return func() { <-p.places }, false
	case <-ctx.Done():
		return nil, false
	}
}

// accessLog is Envoy's gRPC logger: a buffer that is sent when it is full or a
// second old, without any acknowledgement.
type accessLog struct {
	stream  logv3.AccessLogService_StreamAccessLogsClient
	skew    time.Duration // of Envoy's clock
	lose    func() bool   // may be nil
	noTag   bool
	mu      sync.Mutex
	buffer  []*datav3.HTTPAccessLogEntry
	first   bool
	stopped chan struct{}
	done    sync.WaitGroup
}

func newAccessLog(t testing.TB, conn *grpc.ClientConn) *accessLog {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := logv3.NewAccessLogServiceClient(conn).StreamAccessLogs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	l := &accessLog{stream: stream, first: true, stopped: make(chan struct{})}
	l.done.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				l.flush()
			case <-l.stopped:
				return
			}
		}
	})
	t.Cleanup(func() { close(l.stopped); l.done.Wait(); cancel() })
	return l
}

func (l *accessLog) add(e *datav3.HTTPAccessLogEntry) {
	if l.lose != nil && l.lose() {
		return
	}
	l.mu.Lock()
	l.buffer = append(l.buffer, e)
	full := len(l.buffer) >= 40 // about 16 KiB
	l.mu.Unlock()
	if full {
		l.flush()
	}
}

func (l *accessLog) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.buffer) == 0 {
		return
	}
	m := &logv3.StreamAccessLogsMessage{LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{
		HttpLogs: &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: l.buffer}}}
	if l.first {
		m.Identifier = &logv3.StreamAccessLogsMessage_Identifier{Node: &corev3.Node{Id: "fake"}, LogName: "weir"}
		l.first = false
	}
	if err := l.stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
		return
	}
	l.buffer = nil
}

// logEntry logs what became of the request.
func (l *life) logEntry() {
	log := l.envoy.log
	if log == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since := func(t time.Time) *durationpb.Duration {
		if t.IsZero() {
			return nil
		}
		return durationpb.New(t.Sub(l.start))
	}
	p := &datav3.AccessLogCommon{
		StartTime: timestamppb.New(l.start.Add(log.skew)), Duration: durationpb.New(time.Since(l.start)), UpstreamCluster: "asr",
		TimeToLastRxByte: since(l.lastRx), TimeToFirstUpstreamTxByte: since(l.firstTx), TimeToLastUpstreamTxByte: since(l.lastTx),
		TimeToFirstUpstreamRxByte: since(l.firstUpRx), TimeToLastUpstreamRxByte: since(l.lastUpRx), TimeToLastDownstreamTxByte: since(l.downLast),
		ResponseFlags: &l.flags, AccessLogType: datav3.AccessLogType_DownstreamEnd,
	}
	if !log.noTag && !l.firstTx.IsZero() {
		p.CustomTags = map[string]string{poolReady: fmt.Sprint(l.poolReady.Milliseconds())}
	}
	log.add(&datav3.HTTPAccessLogEntry{
		CommonProperties: p, ProtocolVersion: datav3.HTTPAccessLogEntry_HTTP11,
		Request: &datav3.HTTPRequestProperties{
			RequestMethod: corev3.RequestMethod(corev3.RequestMethod_value[l.r.Method]), Path: l.r.URL.RequestURI(), Authority: l.r.Host,
			RequestId: l.r.Header.Get("X-Request-Id"), RequestBodyBytes: uint64(l.in),
			RequestHeaders: map[string]string{"traceparent": l.r.Header.Get("Traceparent")},
		},
		Response: &datav3.HTTPResponseProperties{
			ResponseCode: wrapperspb.UInt32(uint32(l.status)), ResponseBodyBytes: uint64(l.out),
			ResponseHeaders: logged(l.header), ResponseTrailers: logged(l.trailer),
		},
	})
}

// logged are the fields that additional_response_headers_to_log names.
func logged(h http.Header) map[string]string {
	m := make(map[string]string)
	for _, name := range []string{"server-timing", "endpoint-load-metrics"} {
		if v := h.Values(name); len(v) > 0 {
			m[name] = strings.Join(v, ",")
		}
	}
	return m
}
