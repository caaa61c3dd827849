package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// deadlinePassed is the word for calls that ended because grpc-timeout did.
const deadlinePassed = "deadline_exceeded"

// Why weir gave a stream up. The text of none reaches a client.
var (
	errDeadline = errors.New("grpc-timeout passed")
	errNoBody   = errors.New("body_timeout passed")
	errNoAnswer = errors.New("response_timeout passed")
	errConnect2 = errors.New("CONNECT over HTTP/2")
)

// deadlineGrace is how much longer than its deadline a call may stay in the
// server: the server's own word for it, and the client's hanging up, are on
// their way and tell more than weir could.
const deadlineGrace = 200 * time.Millisecond

// A stream is one request that came by HTTP/2, and its exchange.
type stream struct {
	srv  *Server
	cfg  *settings
	link *link
	w    http.ResponseWriter
	r    *http.Request

	ctx    context.Context // ends with the client, or by cancel
	cancel context.CancelCauseFunc

	pass      Passage
	grpc      bool
	streaming bool        // by its method
	deadline  *time.Timer // of grpc-timeout; nil: none
	silence   *time.Timer // of response_timeout; nil: none
	body      *requestBody
	down      messageCount
	propagate bool
	answered  bool // the head of the answer is on its way to the client
	guard     *writerGuard
}

// serveStream carries one request that came by HTTP/2.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request) {
	l := r.Context().Value(linkKey{}).(*link)
	if !l.enter() {
		panic(http.ErrAbortHandler)
	}
	defer l.leave()
	x := &stream{srv: s, cfg: s.settings(), link: l, w: w, r: r}
	x.guard = &writerGuard{control: http.NewResponseController(w), timeout: x.cfg.writeTimeout}
	x.ctx, x.cancel = context.WithCancelCause(r.Context())
	defer x.cancel(nil)
	x.describe()
	defer x.leave()
	if err := x.serve(); err != nil {
		x.fail(err)
	}
}

func (x *stream) serve() error {
	if x.r.Method == http.MethodConnect {
		x.pass.Enqueued = time.Now()
		return errConnect2
	}
	x.setDeadline()
	if err := x.srv.Gate.Enter(&x.pass, x.ctx.Done()); err != nil {
		return err
	}
	x.extendDeadline()
	res, err := x.roundTrip()
	if err != nil {
		return err
	}
	defer x.hangUp(res)
	return x.respond(res)
}

// describe fills the record with what the request says of itself.
func (x *stream) describe() {
	o, r := &x.pass.Observation, x.r
	x.grpc = isGRPC(r)
	o.Protocol, o.Client, o.Host, o.UserAgent = "h2", r.RemoteAddr, r.Host, r.UserAgent()
	if r.TLS != nil {
		o.Scheme = "https"
	}
	o.Method, o.Target = r.Method, string(appendRedacted(nil, []byte(r.RequestURI)))
	if x.grpc {
		o.Protocol = "grpc"
		o.Class, o.Route, o.Model, x.streaming = classOfGRPC(x.cfg.router, r.URL.Path)
		o.Deadline, _ = parseGRPCTimeout(r.Header.Get("Grpc-Timeout"))
	} else {
		var model []byte
		o.Class, o.Route, model = x.cfg.router.Match([]byte(r.Method), []byte(r.RequestURI))
		o.Model = string(model)
	}
	now := time.Now()
	for _, name := range []string{"X-Request-Start", "X-Queue-Start"} {
		for _, v := range r.Header[name] {
			if d, ok := tracing.RequestStart([]byte(name), []byte(v), now); ok {
				o.Before = max(o.Before, d)
			}
		}
	}
	hasParent := false
	if parent := r.Header["Traceparent"]; len(parent) == 1 {
		hasParent = tracing.ReadTraceparent(o, []byte(parent[0]), []byte(strings.Join(r.Header["Tracestate"], ",")))
	}
	x.propagate = x.srv.Sampler.Start(o, hasParent)
}

// setDeadline has the call end when grpc-timeout says so.
func (x *stream) setDeadline() {
	if x.pass.Deadline > 0 {
		x.deadline = time.AfterFunc(x.pass.Deadline, func() { x.cancel(errDeadline) })
	}
}

func (x *stream) extendDeadline() {
	if x.deadline != nil && x.deadline.Stop() {
		x.deadline.Reset(time.Until(x.pass.Enqueued.Add(x.pass.Deadline)) + deadlineGrace)
	}
}

// roundTrip sends the request and returns the head of its answer. A request
// that the server did not begin, and of whose body nothing is gone, is sent
// again on another connection: a server that asks its clients to reconnect
// must cost none of them a request.
func (x *stream) roundTrip() (*http.Response, error) {
	as := x.srv.spokenFor(x.grpc)
	req := x.request(as)
	if len(req.Trailer) > 0 && as == spokenH1 {
		req.ContentLength = -1 // HTTP/1.1 has trailers behind chunks only
	}
	if d := x.cfg.responseTimeout; d > 0 {
		x.silence = time.AfterFunc(d, func() { x.cancel(errNoAnswer) })
	}
	for try := 1; ; try++ {
		c, took, err := x.link.reserve(x.ctx, as)
		x.pass.Connect += took
		if err != nil {
			return nil, err
		}
		x.pass.Overhead = time.Since(x.pass.Dequeued) - x.pass.Connect
		if x.body == nil {
			x.pass.Sent = time.Now()
		}
		res, err := c.RoundTrip(req)
		if err == nil {
			return res, nil
		}
		if try == 3 || !isUnprocessed(err) || x.body.touched() {
			return nil, &answerError{err}
		}
	}
}

// request is what the server gets: what came, less what concerns the client's
// connection only.
func (x *stream) request(as spoken) *http.Request {
	r, o := x.r, &x.pass.Observation
	h := forwardable(r.Header)
	delete(h, "Traceparent")
	if x.propagate {
		h["Traceparent"] = []string{string(tracing.AppendTraceparent(nil, o))}
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = []string{""} // else net/http names itself
	}
	if x.cfg.requestStart && h["X-Request-Start"] == nil && h["X-Queue-Start"] == nil {
		_, value, _ := strings.Cut(string(appendRequestStart(nil, o.Enqueued)), ": ")
		h["X-Request-Start"] = []string{strings.TrimSpace(value)}
	}
	if wait := o.QueueWait(); o.Deadline > 0 && wait >= time.Millisecond {
		h["Grpc-Timeout"] = []string{formatGRPCTimeout(o.Deadline - wait)}
	}
	u := *r.URL
	u.Scheme, u.Host = x.srv.scheme(), x.srv.authority()
	req := &http.Request{
		Method: r.Method, URL: &u, Host: r.Host, Header: h, Trailer: r.Trailer, ContentLength: r.ContentLength,
		Proto: "HTTP/2.0", ProtoMajor: 2,
	}
	if r.ContentLength != 0 {
		x.body = newRequestBody(x, as)
		req.Body = x.body
	}
	if x.grpc {
		return req.WithContext(x.ctx)
	}
	return req.WithContext(httptrace.WithClientTrace(x.ctx, &httptrace.ClientTrace{Got1xxResponse: x.interim}))
}

// interim passes an interim answer on. net/http gives the 100 that a client
// may wait for by itself, when the body is first read. It is called within
// RoundTrip only.
func (x *stream) interim(status int, fields textproto.MIMEHeader) error {
	if status == http.StatusContinue {
		return nil
	}
	h := x.w.Header()
	for name, values := range forwardable(http.Header(fields)) {
		h[name] = values
	}
	x.w.WriteHeader(status)
	clear(h)
	return nil
}

// respond brings the answer to the client.
func (x *stream) respond(res *http.Response) error {
	o := &x.pass.Observation
	o.Responded, o.Status = time.Now(), res.StatusCode
	for name, values := range res.Header {
		for _, v := range values {
			x.cfg.ingest.Header(o, []byte(name), []byte(v))
		}
	}
	x.readStatus(res.Header)
	x.writeHead(res)
	o.Overhead += time.Since(o.Responded)
	if err := x.copyBody(res); err != nil {
		return err
	}
	x.copyTrailer(res.Trailer)
	x.srv.Gate.Release(&x.pass)
	o.Done = time.Now()
	return nil
}

// writeHead sends the head at once, unless the answer is nothing else: then
// it ends the stream, as the Trailers-Only answers of gRPC must.
func (x *stream) writeHead(res *http.Response) {
	h := x.w.Header()
	for name, values := range forwardable(res.Header) {
		h[name] = values
	}
	for _, name := range []string{"Date", "Content-Type", "Content-Length"} {
		if _, ok := h[name]; !ok {
			h[name] = nil // else net/http makes one up
		}
	}
	for name := range res.Trailer {
		h.Add("Trailer", name)
	}
	if x.cfg.serverTiming {
		h.Add("Server-Timing", string(tracing.AppendServerTiming(nil, &x.pass.Observation)))
		h.Add("Proxy-Status", "weir; received-status="+strconv.Itoa(res.StatusCode))
	}
	x.w.WriteHeader(res.StatusCode)
	x.answered = true
	if res.ContentLength != 0 {
		_ = x.guard.control.Flush() // an error comes again at the next write
	}
}

// copyBody passes on what comes as it comes.
func (x *stream) copyBody(res *http.Response) error {
	block := blocks.Get().(*[blockSize]byte)
	defer blocks.Put(block)
	for {
		n, err := res.Body.Read(block[:])
		if x.silence != nil {
			x.silence.Reset(x.cfg.responseTimeout)
		}
		if n > 0 {
			x.pass.BytesOut += int64(n)
			x.down.add(block[:n])
			if err := x.write(block[:n]); err != nil {
				return &flushError{err}
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return &answerError{err}
		}
	}
}

func (x *stream) write(p []byte) error {
	x.guard.begin()
	defer x.guard.pause()
	_, err := x.w.Write(p)
	if err == nil {
		err = x.guard.control.Flush()
	}
	return err
}

func (x *stream) copyTrailer(t http.Header) {
	x.readStatus(t)
	h := x.w.Header()
	for name, values := range t {
		if forbiddenTrailer([]byte(name)) {
			delete(h, name)
			continue
		}
		for _, v := range values {
			x.cfg.ingest.Trailer(&x.pass.Observation, []byte(name), []byte(v))
		}
		h[http.TrailerPrefix+name] = values
	}
}

// readStatus takes the status of a call from the trailers, or from the head of
// an answer that has no more.
func (x *stream) readStatus(h http.Header) {
	if v := h["Grpc-Status"]; x.grpc && len(v) > 0 {
		x.pass.RPCStatus = parseGRPCStatus(v[0]).String()
	}
}

// hangUp ends the exchange with the server, before its place is given to
// another: it waits until the server is told, if it is not done.
func (x *stream) hangUp(res *http.Response) {
	x.cancel(nil)
	_ = res.Body.Close()
}

// leave ends the record.
func (x *stream) leave() {
	x.cancel(nil)
	x.guard.end()
	for _, t := range []*time.Timer{x.deadline, x.silence} {
		if t != nil {
			t.Stop()
		}
	}
	o := &x.pass.Observation
	if o.Done.IsZero() {
		o.Done = time.Now()
	}
	if x.body != nil {
		x.body.tell(o)
	}
	o.Upgraded = x.grpc && (x.streaming || x.down.n > 1 || x.body.messages() > 1)
	x.cfg.ingest.Finish(o)
	x.srv.Gate.Leave(&x.pass)
}

// A requestBody is the client's body on its way to the server. net/http reads
// it on a goroutine of its own, which may outlive the exchange by a little.
type requestBody struct {
	io.Reader
	unblock func()
	over    func() bool // nobody need unblock it any more
	idle    *time.Timer // of body_timeout; nil: none, as for calls, which may say nothing for long
	wait    time.Duration
	grpc    bool

	mu    sync.Mutex
	begun bool
	n     int64
	up    messageCount
	sent  time.Time
	err   error
}

func newRequestBody(x *stream, as spoken) *requestBody {
	b := &requestBody{Reader: x.r.Body, unblock: x.guard.breakRead, grpc: x.grpc, wait: x.cfg.bodyTimeout}
	if b.wait > 0 && !b.grpc {
		b.idle = time.AfterFunc(b.wait, func() { x.cancel(errNoBody) })
		b.idle.Stop()
	}
	b.over = func() bool { return false }
	if as != spokenH2 {
		b.over = context.AfterFunc(x.ctx, b.unblock) // over HTTP/1.1 net/http waits for a read to end before it gives up
	}
	return b
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	b.begun = true
	b.mu.Unlock()
	if b.idle != nil {
		b.idle.Reset(b.wait)
		defer b.idle.Stop()
	}
	n, err := b.Reader.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n += int64(n)
	if err != nil {
		b.over()
	}
	if b.grpc {
		b.up.add(p[:n])
	}
	switch {
	case err == io.EOF && b.sent.IsZero():
		b.sent = time.Now()
	case err != nil && err != io.EOF && b.err == nil:
		b.err = err
	}
	return n, err
}

// Close unblocks Read. Of a body that nobody read there is nothing to unblock,
// and it may be needed once more.
func (b *requestBody) Close() error {
	if b.touched() {
		b.unblock()
	}
	return nil
}

func (b *requestBody) touched() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun
}

func (b *requestBody) messages() int {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.up.n
}

func (b *requestBody) tell(o *classifier.Observation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.BytesIn, o.Sent = b.n, b.sent
	if o.Sent.After(o.Done) {
		o.Sent = o.Done
	}
}

// A writerGuard breaks reads and writes of a stream that would never end. All
// that lives longer than the handler goes through it: net/http takes the
// writer back when the handler returns.
type writerGuard struct {
	control *http.ResponseController
	timeout time.Duration // write_timeout; 0: none
	stall   *time.Timer   // runs while the client is to take bytes

	mu    sync.Mutex
	ended bool
}

// begin and pause stand around a write, which the client's flow control may
// hold up.
func (g *writerGuard) begin() {
	switch {
	case g.timeout <= 0:
	case g.stall == nil:
		g.stall = time.AfterFunc(g.timeout, func() { g.within(g.control.SetWriteDeadline) })
	default:
		g.stall.Reset(g.timeout)
	}
}

func (g *writerGuard) pause() {
	if g.stall != nil {
		g.stall.Stop()
	}
}

// breakRead ends a read of the body, and all to come.
func (g *writerGuard) breakRead() { g.within(g.control.SetReadDeadline) }

func (g *writerGuard) within(setDeadline func(time.Time) error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.ended {
		_ = setDeadline(time.Unix(1, 0))
	}
}

func (g *writerGuard) end() {
	g.pause()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ended = true
}

// faultOf maps every error of a stream to its end.
func (x *stream) faultOf(err error) fault {
	server := x.srv.target
	f, known := fault{}, false
	switch cause := context.Cause(x.ctx); {
	case cause == errDeadline && x.pass.Dequeued.IsZero():
		return fault{504, deadlinePassed, "grpc-timeout " + x.pass.Deadline.String() + " passed in the queue", classifier.Expired}
	case cause == errDeadline:
		return fault{504, deadlinePassed, "grpc-timeout " + x.pass.Deadline.String() + " passed", classifier.Canceled}
	case cause == errNoBody:
		return fault{408, "client_timeout", "the body did not come within body_timeout", classifier.Canceled}
	case cause == errNoAnswer:
		return fault{504, "server_timeout", noAnswer(server), classifier.Failed}
	case x.r.Context().Err() != nil, errors.Is(err, ErrClientGone), isFlush(err):
		return fault{0, "client_gone", "the client left", classifier.Canceled}
	case errors.Is(err, errConnect2):
		return fault{501, "not_supported", errConnect.Error(), classifier.Failed}
	case isNoH2(err):
		return fault{502, "bad_response", server + " does not speak HTTP/2, which this request needs; gRPC cannot do without", classifier.Failed}
	default:
		f, known = faultOfGate(err, server)
	}
	if known {
		return f
	}
	return fault{502, "server_reset", server + " broke the exchange off", classifier.Failed}
}

func isFlush(err error) bool {
	var flush *flushError
	return errors.As(err, &flush)
}

// fail ends an exchange that went wrong.
func (x *stream) fail(err error) {
	f := x.faultOf(err)
	o := &x.pass.Observation
	o.Outcome, o.Error = f.outcome, f.word
	x.cancel(err)
	if x.grpc {
		x.failCall(f, err)
		return
	}
	if f.status == 0 || x.answered {
		panic(http.ErrAbortHandler) // RST_STREAM: a part of an answer cannot pass for a whole one
	}
	o.Status = f.status
	x.reply(f)
}

// failCall ends a call with a status: in the trailers if the answer has begun,
// else in the head of one that is nothing else.
func (x *stream) failCall(f fault, err error) {
	code, text := codeOf(f), "weir: "+f.text
	var reset StreamError
	if f.word == "server_reset" && errors.As(err, &reset) {
		code = codeOfReset(reset.Code)
	}
	x.pass.RPCStatus = code.String()
	if f.status == 0 {
		panic(http.ErrAbortHandler)
	}
	h, prefix := x.w.Header(), http.TrailerPrefix
	if !x.answered {
		x.pass.Status, prefix = http.StatusOK, ""
		h["Content-Type"], h["Date"], h["Content-Length"] = []string{"application/grpc"}, nil, nil
		x.tellEnd(f)
	}
	h[prefix+"Grpc-Status"] = []string{strconv.Itoa(int(code))}
	h[prefix+"Grpc-Message"] = []string{escapeGRPCMessage(text)}
	if !x.answered {
		x.w.WriteHeader(http.StatusOK)
	}
}

// reply is weir's own answer.
func (x *stream) reply(f fault) {
	h := x.w.Header()
	text := f.body()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(text)))
	if f.status == 503 {
		h.Set("Retry-After", "1")
	}
	x.tellEnd(f)
	x.w.WriteHeader(f.status)
	if x.r.Method != http.MethodHead {
		_, _ = x.w.Write(text)
	}
}

// tellEnd adds to weir's own answers what it tells beside them; one that comes
// because weir drains ends the connection too, so that clients go elsewhere.
func (x *stream) tellEnd(f fault) {
	h := x.w.Header()
	if x.cfg.serverTiming {
		h.Add("Proxy-Status", "weir; error="+proxyError(f))
	}
	if f.word == shuttingDown {
		h.Set("Connection", "close")
	}
}
