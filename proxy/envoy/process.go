package envoy

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"weir/classifier"
	"weir/proxy"
	"weir/tracing"
)

// A processor is Envoy's external processor. One gRPC stream is one request of
// Envoy's: the answer to its headers is held until the gate lets it in, and
// its place is free again when the stream ends, which Envoy brings about when
// the answer has ended, or the client left.
type processor struct {
	procv3.UnimplementedExternalProcessorServer
	side  *proxy.Sidecar
	loads *loads
	orca  bool // add a load report where the server sends none
	seen  *seen

	passive proxy.Gate // for Envoys that only let weir watch

	streams, active, refused, left, early atomic.Int64
}

func newProcessor(side *proxy.Sidecar, l *loads, orca bool, ids *seen) *processor {
	p := &processor{side: side, loads: l, orca: orca, seen: ids}
	p.passive.Sink = side.Gate().Sink
	return p
}

// An exchange is one stream.
type exchange struct {
	*processor
	stream   procv3.ExternalProcessor_ProcessServer
	messages chan *procv3.ProcessingRequest
	gone     chan struct{} // closed when Envoy sends no more
	readErr  error         // good after gone

	sendMu sync.Mutex

	pass    proxy.Passage
	rules   proxy.Rules
	gate    *proxy.Gate
	observe bool // Envoy takes no replies
	grpc    bool // the request is one of gRPC
	stamped bool // the request brought an X-Request-Start
	entered bool
}

// errEnd ends a stream that needs nothing more.
var errEnd = errors.New("end of the exchange")

// Process serves one stream.
func (p *processor) Process(stream procv3.ExternalProcessor_ProcessServer) error {
	p.streams.Add(1)
	p.active.Add(1)
	defer p.active.Add(-1)
	x := &exchange{
		processor: p, stream: stream, rules: p.side.Rules(), gate: p.side.Gate(),
		messages: make(chan *procv3.ProcessingRequest, 1), gone: make(chan struct{}),
	}
	defer x.leave()
	go x.receive()
	for {
		req, err := x.next()
		if err == nil {
			err = x.take(req)
		}
		if err != nil {
			return x.end(err)
		}
	}
}

// receive reads ahead: only so is it seen that Envoy half-closes or resets the
// stream while the request waits in the queue.
func (x *exchange) receive() {
	defer close(x.messages)
	defer close(x.gone)
	for {
		req, err := x.stream.Recv()
		if err != nil {
			x.readErr = err
			return
		}
		select {
		case x.messages <- req:
		case <-x.stream.Context().Done():
			x.readErr = x.stream.Context().Err()
			return
		}
	}
}

// next waits for a message; the first one must come within head_timeout.
func (x *exchange) next() (*procv3.ProcessingRequest, error) {
	var late <-chan time.Time
	if !x.entered && x.rules.HeadTimeout > 0 {
		t := time.NewTimer(x.rules.HeadTimeout)
		defer t.Stop()
		late = t.C
	}
	select {
	case req, ok := <-x.messages:
		if !ok {
			return nil, x.readErr
		}
		return req, nil
	case <-late:
		return nil, status.Errorf(codes.DeadlineExceeded, "no request_headers came within head_timeout %v", x.rules.HeadTimeout)
	}
}

// take answers one message.
func (x *exchange) take(req *procv3.ProcessingRequest) error {
	if n := proto.Size(req); n > x.rules.MaxHeadSize {
		return status.Errorf(codes.ResourceExhausted, "message of %d bytes is larger than max_head_size %d; send less, or raise it", n, x.rules.MaxHeadSize)
	}
	if _, first := req.Request.(*procv3.ProcessingRequest_RequestHeaders); !first && !x.entered {
		return status.Errorf(codes.InvalidArgument, "the stream began with %T; set processing_mode.request_header_mode to SEND", req.Request)
	}
	switch m := req.Request.(type) {
	case *procv3.ProcessingRequest_RequestHeaders:
		return x.requestHeaders(req, m.RequestHeaders)
	case *procv3.ProcessingRequest_ResponseHeaders:
		return x.responseHeaders(req, m.ResponseHeaders)
	case *procv3.ProcessingRequest_ResponseTrailers:
		return x.responseTrailers(m.ResponseTrailers)
	case *procv3.ProcessingRequest_RequestTrailers:
		return x.send(&procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_RequestTrailers{RequestTrailers: &procv3.TrailersResponse{}}})
	case *procv3.ProcessingRequest_RequestBody:
		return x.send(&procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_RequestBody{RequestBody: &procv3.BodyResponse{}}})
	case *procv3.ProcessingRequest_ResponseBody:
		return x.send(&procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_ResponseBody{ResponseBody: &procv3.BodyResponse{}}})
	}
	return nil // of the stream itself, such as flow control
}

// requestHeaders is the request's way through the gate.
func (x *exchange) requestHeaders(req *procv3.ProcessingRequest, m *procv3.HttpHeaders) error {
	if x.entered {
		return status.Error(codes.InvalidArgument, "request_headers came twice; one stream is one request")
	}
	if x.observe = req.GetObservabilityMode(); x.observe {
		x.gate = &x.passive
	}
	propagate := x.describe(req, m)
	x.entered = true
	stop := x.askPatience()
	err := x.gate.Enter(&x.pass, x.gone)
	stop()
	if err != nil {
		return x.refuse(err)
	}
	o := &x.pass.Observation
	o.Sent = o.Dequeued // bodies pass by weir: when the last byte went, it does not know
	err = x.send(x.admitted(req, propagate))
	o.Overhead = time.Since(o.Dequeued)
	return err
}

// describe fills the record with what the request says of itself.
func (x *exchange) describe(req *procv3.ProcessingRequest, m *procv3.HttpHeaders) (propagate bool) {
	o := &x.pass.Observation
	now := time.Now()
	var path, agent, parent, state, id string
	for _, h := range m.GetHeaders().GetHeaders() {
		switch value := textOf(h); h.Key {
		case ":method":
			o.Method = value
		case ":path":
			path = value
		case ":authority", "host":
			o.Host = value
		case "user-agent":
			agent = value
		case "traceparent":
			parent = value
		case "tracestate":
			state = value
		case "x-request-id":
			id = value
		case "content-type":
			x.grpc = strings.HasPrefix(value, "application/grpc")
		case "content-length":
			o.BytesIn = size(value)
		case "x-request-start", "x-queue-start", "x-middleware-start":
			x.stamped = true
			if d, ok := tracing.RequestStart([]byte(h.Key), []byte(value), now); ok {
				o.Before = max(o.Before, d)
			}
		}
	}
	var model []byte
	o.Class, o.Route, model = x.rules.Router.Match([]byte(o.Method), []byte(path))
	o.Model, o.UserAgent = string(model), agent
	o.Target = string(proxy.AppendRedacted(nil, []byte(path)))
	o.Protocol = x.protocol(attribute(req, "request.protocol").GetStringValue())
	o.Client = attribute(req, "source.address").GetStringValue()
	x.seen.add(id, now)
	return x.side.Sampler().Start(o, readParent(x.stream.Context(), o, parent, state))
}

// readParent takes the caller's trace context from the stream's metadata,
// where Envoy puts its own span, or else from the request's headers.
func readParent(ctx context.Context, o *classifier.Observation, parent, state string) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get("traceparent"); len(v) > 0 && tracing.ReadTraceparent(o, []byte(v[0]), []byte(strings.Join(md.Get("tracestate"), ","))) {
		return true
	}
	return parent != "" && tracing.ReadTraceparent(o, []byte(parent), []byte(state))
}

func (x *exchange) protocol(told string) string {
	switch {
	case x.grpc:
		return "grpc"
	case strings.HasPrefix(told, "HTTP/2"):
		return "h2"
	case strings.HasPrefix(told, "HTTP/"):
		return strings.ToLower(told)
	}
	return "http"
}

// patience is how long Envoy waits for a reply, at least, before weir asks for
// more; its default is 200 ms.
const patience = 100 * time.Millisecond

// askPatience has Envoy wait for the reply as long as the queue may take,
// where its max_message_timeout allows: its message_timeout is short by default.
func (x *exchange) askPatience() (stop func()) {
	limit := x.gate.State().QueueTimeout
	if x.observe || limit <= 0 {
		return func() {}
	}
	waiting := true // guarded by sendMu
	t := time.AfterFunc(patience, func() {
		x.sendMu.Lock()
		defer x.sendMu.Unlock()
		if waiting {
			_ = x.stream.Send(morePatience(limit + time.Second))
		}
	})
	return func() {
		t.Stop()
		x.sendMu.Lock()
		defer x.sendMu.Unlock()
		waiting = false
	}
}

// refuse tells Envoy to answer the client itself.
func (x *exchange) refuse(err error) error {
	o := &x.pass.Observation
	r := proxy.RefusalOf(err)
	o.Outcome, o.Error, o.Status = r.Outcome, r.Word, r.Status
	if r.Status == 0 {
		x.left.Add(1)
		return errEnd
	}
	x.refused.Add(1)
	if err := x.send(x.refusal(r)); err != nil {
		return err
	}
	o.Done = time.Now()
	return errEnd
}

// responseHeaders reads the answer's head.
func (x *exchange) responseHeaders(req *procv3.ProcessingRequest, m *procv3.HttpHeaders) error {
	o := &x.pass.Observation
	if !o.Responded.IsZero() {
		return status.Error(codes.InvalidArgument, "response_headers came twice; one stream is one request")
	}
	o.Responded = time.Now()
	for _, h := range m.GetHeaders().GetHeaders() {
		value := textOf(h)
		switch h.Key {
		case ":status":
			o.Status = int(size(value))
		case "content-length":
			o.BytesOut = size(value)
		default:
			x.rules.Ingest.Header(o, []byte(h.Key), []byte(value))
		}
	}
	x.takeLoad(m.GetHeaders(), false)
	x.takeAttributes(req)
	if o.Status == 101 {
		o.Upgraded, o.Protocol = true, "websocket"
	}
	if m.GetEndOfStream() {
		o.Done = time.Now()
		x.gate.Release(&x.pass)
	}
	err := x.send(x.responded())
	o.Overhead += time.Since(o.Responded)
	return err
}

// takeAttributes reads what Envoy was asked to tell beside the headers.
func (x *exchange) takeAttributes(req *procv3.ProcessingRequest) {
	o := &x.pass.Observation
	if d, err := time.ParseDuration(attribute(req, "upstream.cx_pool_ready_duration").GetStringValue()); err == nil && d > 0 {
		o.Connect = min(d, o.Responded.Sub(o.Dequeued))
	}
	if n := attribute(req, "request.total_size").GetNumberValue(); n > 0 && o.BytesIn == 0 {
		o.BytesIn = int64(n)
	}
	if details := attribute(req, "response.code_details").GetStringValue(); details != "" && details != "via_upstream" {
		o.Outcome, o.Error = classifier.Failed, envoyReply // Envoy's own answer, not the server's
	}
}

// envoyReply is the word for answers that Envoy gave itself.
const envoyReply = "envoy_reply"

func (x *exchange) takeLoad(m *corev3.HeaderMap, trailer bool) {
	for _, h := range m.GetHeaders() {
		if isLoadReport(h.Key) {
			x.loads.take(&x.pass.Observation, x.rules.Ingest, h.Key, textOf(h), trailer)
		}
	}
}

// responseTrailers is the end of an answer that has trailers.
func (x *exchange) responseTrailers(m *procv3.HttpTrailers) error {
	o := &x.pass.Observation
	if o.Responded.IsZero() {
		return status.Error(codes.InvalidArgument, "response_trailers came without response_headers; set processing_mode.response_header_mode to SEND")
	}
	if o.Done.IsZero() {
		o.Done = time.Now()
	}
	x.gate.Release(&x.pass)
	for _, h := range m.GetTrailers().GetHeaders() {
		x.rules.Ingest.Trailer(o, []byte(h.Key), []byte(textOf(h)))
	}
	x.takeLoad(m.GetTrailers(), true)
	return x.send(x.trailed())
}

// end maps what ended the exchange to the stream's status, and closes the
// record: how Envoy closes a stream, by half-close or reset, says nothing.
func (x *exchange) end(err error) error {
	o := &x.pass.Observation
	switch {
	case !x.entered || o.Dequeued.IsZero():
	case o.Responded.IsZero():
		x.early.Add(1)
		o.Outcome, o.Error = classifier.Canceled, "client_gone"
	case o.Done.IsZero() && x.observe:
		o.Done = o.Responded // the stream outlives the answer by seconds
	case o.Done.IsZero():
		o.Done = time.Now()
	}
	code := status.Code(err)
	if errors.Is(err, errEnd) || errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) || code == codes.Canceled || x.stream.Context().Err() != nil {
		return nil
	}
	return err
}

// leave ends the passage, whatever happened.
func (x *exchange) leave() {
	if !x.entered {
		return
	}
	if x.pass.Done.IsZero() {
		x.pass.Done = time.Now()
	}
	x.rules.Ingest.Finish(&x.pass.Observation)
	x.gate.Leave(&x.pass)
}

// send writes one message, unless Envoy takes none. It is called from two
// goroutines.
func (x *exchange) send(m *procv3.ProcessingResponse) error {
	if x.observe {
		return nil
	}
	x.sendMu.Lock()
	defer x.sendMu.Unlock()
	return x.stream.Send(m)
}

// textOf is a header's value, which newer Envoys send as bytes.
func textOf(h *corev3.HeaderValue) string {
	if len(h.RawValue) > 0 {
		return string(h.RawValue)
	}
	return h.Value
}

// attribute is one that Envoy was asked for; nil if it was not.
func attribute(req *procv3.ProcessingRequest, name string) *structpb.Value {
	for _, s := range req.GetAttributes() {
		if v := s.GetFields()[name]; v != nil {
			return v
		}
	}
	return nil
}

// noBodies asks an Envoy that means to send bodies for none.
func noBodies(c *procv3.ProtocolConfiguration) *modev3.ProcessingMode {
	if c == nil || c.RequestBodyMode == modev3.ProcessingMode_NONE && c.ResponseBodyMode == modev3.ProcessingMode_NONE {
		return nil
	}
	return &modev3.ProcessingMode{
		ResponseHeaderMode: modev3.ProcessingMode_SEND, ResponseTrailerMode: modev3.ProcessingMode_SEND,
		RequestBodyMode: modev3.ProcessingMode_NONE, ResponseBodyMode: modev3.ProcessingMode_NONE,
	}
}
