package ladder

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// Client sends the requests of one target. It is safe for concurrent use.
type Client struct {
	target *Target
	bodies []body
	expect Expect
	ingest *tracing.Ingest
	http   http.Client
	class  string
	opened atomic.Int64 // connections

	rpcLock sync.Mutex
	rpc     *rpc                  // nil: not connected yet
	mistake atomic.Pointer[error] // in how a gRPC method is called
}

// NewClient makes the requests for the clips ready. A nil transport is one of
// the client's own, with a connection for each request in flight, kept open.
func NewClient(t Target, clips []Clip, transport http.RoundTripper) (*Client, error) {
	if err := t.Check(); err != nil {
		return nil, err
	}
	if len(clips) == 0 {
		return nil, errors.New("no audio to send")
	}
	expect, err := ParseExpect(t.Expect)
	if err != nil {
		return nil, err
	}
	ingest, err := tracing.NewIngest(nil)
	if err != nil {
		return nil, err
	}
	if transport == nil {
		transport = &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 4096, IdleConnTimeout: time.Minute, DisableCompression: true,
		}
	}
	c := &Client{target: &t, expect: expect, ingest: ingest, class: "POST " + t.path()}
	if t.webSocket() {
		c.class = "GET " + t.path()
	}
	c.http = http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	for i := range clips {
		b, err := t.body(&clips[i])
		if err != nil {
			return nil, err
		}
		c.bodies = append(c.bodies, b)
	}
	return c, nil
}

// Close closes the idle connections.
func (c *Client) Close() {
	c.http.CloseIdleConnections()
	c.rpcLock.Lock()
	defer c.rpcLock.Unlock()
	if c.rpc != nil {
		_ = c.rpc.conn.Close()
		c.rpc = nil
	}
}

// maxAnswer is how much of an answer is kept for Expect, in bytes.
const maxAnswer = 1 << 20

// send makes the n-th request, which was due at a moment that may have
// passed: that delay is the client's own and goes into Before. inflight counts
// the requests under way, this one included.
func (c *Client) send(ctx context.Context, n int64, due time.Time, inflight int) (o classifier.Observation) {
	b := &c.bodies[n%int64(len(c.bodies))]
	o = classifier.Observation{
		Protocol: "http/1.1", Method: http.MethodPost, Route: c.target.path(), Class: c.class, Target: b.clip.Name,
		Inflight: inflight, AudioSeconds: b.clip.Seconds, BytesIn: int64(len(b.content)),
	}
	rand.Read(o.TraceID[:])
	rand.Read(o.SpanID[:])
	ctx, cancel := context.WithTimeout(ctx, c.target.Timeout)
	defer cancel()
	o.Enqueued = time.Now()
	o.Dequeued = o.Enqueued
	o.Before = max(0, o.Enqueued.Sub(due))
	exchange := c.exchange
	switch {
	case c.target.webSocket():
		exchange = c.stream
	case c.target.Shape == GRPC:
		exchange = c.call
	}
	answer, err := exchange(ctx, b, &o)
	o.Done = time.Now()
	c.ingest.Finish(&o)
	takeWeirQueue(&o)
	c.judge(ctx, &o, answer, err)
	return o
}

func (c *Client) judge(ctx context.Context, o *classifier.Observation, answer []byte, err error) {
	switch {
	case o.Error != "":
	case err != nil && errors.Is(context.Cause(ctx), context.Canceled):
		o.Outcome, o.Error = classifier.Canceled, "canceled"
	case err != nil:
		o.Outcome, o.Error = classifier.Failed, errorWord(err)
	case o.Status < 200 || o.Status > 299:
		o.Error = "status_" + strconv.Itoa(o.Status)
	case c.expect != nil && !c.expect(answer):
		o.Error = "unexpected_answer"
	}
}

// errorWord names what broke an exchange.
func errorWord(err error) string {
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case errors.Is(err, errAnswer):
		return "error_answer"
	case errors.As(err, &dns):
		return "no_such_host"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection_refused"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "connection_reset"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection_closed"
	}
	return "broken"
}

// stamps are what the transport's goroutines tell of one request, in
// nanoseconds since its start; 0: not told.
type stamps struct {
	start           time.Time
	wrote, answered atomic.Int64
	connected       atomic.Int64
}

func (s *stamps) now(a *atomic.Int64) { a.Store(max(1, int64(time.Since(s.start)))) }

func (c *Client) trace(s *stamps) *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) {
			if !i.Reused {
				c.opened.Add(1)
				s.now(&s.connected)
			}
		},
		WroteRequest:         func(httptrace.WroteRequestInfo) { s.now(&s.wrote) },
		GotFirstResponseByte: func() { s.now(&s.answered) },
	}
}

func (c *Client) exchange(ctx context.Context, b *body, o *classifier.Observation) (answer []byte, err error) {
	s := &stamps{start: o.Enqueued}
	r, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, c.trace(s)), http.MethodPost, c.target.URL, c.upload(ctx, b, s))
	if err != nil {
		return nil, err
	}
	r.ContentLength = int64(len(b.content))
	c.target.apply(r, b.kind)
	if c.target.Admin != "" {
		r.Header.Set("Traceparent", "00-"+hex.EncodeToString(o.TraceID[:])+"-"+hex.EncodeToString(o.SpanID[:])+"-01")
	}
	res, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	c.stamp(o, s)
	o.Status = res.StatusCode
	for name, values := range res.Header {
		for _, v := range values {
			c.ingest.Header(o, []byte(name), []byte(v))
		}
	}
	answer, o.BytesOut, err = readAnswer(res.Body)
	for name, values := range res.Trailer {
		for _, v := range values {
			c.ingest.Trailer(o, []byte(name), []byte(v))
		}
	}
	return answer, err
}

// stamp fills in the instants. Without the transport's word (a transport that
// is not net/http's) the head came when Do returned.
func (c *Client) stamp(o *classifier.Observation, s *stamps) {
	o.Responded = time.Now()
	if d := s.answered.Load(); d > 0 {
		o.Responded = s.start.Add(time.Duration(d))
	}
	if d := s.wrote.Load(); d > 0 {
		o.Sent = s.start.Add(time.Duration(d))
	}
	o.Connect = time.Duration(s.connected.Load())
}

// readAnswer reads to the end and keeps the beginning.
func readAnswer(r io.Reader) (kept []byte, n int64, err error) {
	kept, err = io.ReadAll(io.LimitReader(r, maxAnswer))
	if err != nil {
		return kept, int64(len(kept)), err
	}
	more, err := io.Copy(io.Discard, r)
	return kept, int64(len(kept)) + more, err
}

// takeWeirQueue makes a wait that a weir told of by Server-Timing the queue's:
// it is no stage of the server.
func takeWeirQueue(o *classifier.Observation) {
	for i, t := range o.Timings {
		if t.Name != "weir-queue" {
			continue
		}
		if !t.Untrusted {
			o.Dequeued = o.Enqueued.Add(t.Dur)
		}
		o.Timings = append(o.Timings[:i], o.Timings[i+1:]...)
		return
	}
}

// upload is the body: it notes when its last byte was taken, and gives its
// bytes at the target's rate.
func (c *Client) upload(ctx context.Context, b *body, s *stamps) io.ReadCloser {
	return &upload{ctx: ctx, rest: bytes.NewReader(b.content), rate: c.target.Upload, stamps: s}
}

type upload struct {
	ctx    context.Context
	rest   *bytes.Reader
	rate   float64
	stamps *stamps
}

func (u *upload) Read(p []byte) (int, error) {
	if u.rate > 0 && u.rest.Len() > 0 {
		p = p[:min(len(p), max(1, int(u.rate/50)))] // pieces of 20 ms
		given := float64(u.rest.Size()) - float64(u.rest.Len()-min(len(p), u.rest.Len()))
		due := time.Duration(given / u.rate * float64(time.Second))
		if !sleep(u.ctx, due-time.Since(u.stamps.start)) {
			return 0, u.ctx.Err()
		}
	}
	n, err := u.rest.Read(p)
	if u.rest.Len() == 0 && n > 0 {
		u.stamps.now(&u.stamps.wrote)
	}
	return n, err
}

func (u *upload) Close() error { return nil }

// sleep tells whether d passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
