package proxy

import (
	"bufio"
	"io"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"weir/classifier"
)

// stalled is the shortest time in a write that counts as the other side taking
// no bytes: a write that need not wait takes microseconds.
const stalled = time.Millisecond

// A pump moves one direction of a tunnel, byte for byte, and shows what it
// moved to a reader beside it. It holds a buffer only while there are bytes to
// move: thousands of silent streams hold none.
type pump struct {
	from, to *end
	tap      *frames // may be nil
	moved    int64
	stall    *atomic.Int64 // gets the time in which to took no bytes; may be nil
	buf      []byte        // of readBuffered
	readErr  error
	writeErr error
}

// run moves bytes until from ends or one of the two breaks.
func (p *pump) run() {
	for p.from.r.Buffered() > 0 && p.writeErr == nil {
		b, _ := p.from.r.Peek(p.from.r.Buffered())
		p.forward(b)
		_, _ = p.from.r.Discard(len(b))
	}
	p.from.dropReader()
	for p.readErr == nil && p.writeErr == nil {
		p.readErr = p.readWaiting()
	}
	if p.readErr == io.EOF {
		p.readErr = nil
	}
}

func (p *pump) forward(b []byte) {
	now := time.Now()
	if p.tap != nil { // before the other side can answer: the reader sees cause before effect
		p.tap.read(b, now)
		now = time.Now()
	}
	_, p.writeErr = p.to.Write(b)
	p.moved += int64(len(b))
	if p.stall != nil {
		if d := time.Since(now); d >= stalled {
			p.stall.Add(int64(d))
		}
	}
}

// readBuffered is for connections whose descriptor cannot be read directly,
// such as those with TLS: a silent stream holds a small buffer.
func (p *pump) readBuffered() error {
	if p.buf == nil {
		p.buf = make([]byte, 8<<10)
	}
	n, err := p.from.Read(p.buf)
	if n > 0 {
		p.forward(p.buf[:n])
	}
	return err
}

// tunnel carries bytes both ways after a 101, half-closes too, until both
// sides have ended or one breaks.
func (c *conn) tunnel() error {
	o := &c.pass.Observation
	if !c.req.upgrade || !c.res.switches() || c.up.running {
		return &answerError{badHead("101 to what was not asked for")}
	}
	if !c.setPhase(tunnel) {
		return ErrClientGone
	}
	o.Upgraded, o.Protocol = true, "websocket"
	c.appendSwitch()
	c.answered = true
	if err := c.client.w.Flush(); err != nil {
		return &flushError{err}
	}
	opened := time.Now()
	c.client.expect(0, false)
	c.server.expect(0, false)
	c.client.flow, c.server.flow = nil, nil
	c.client.returnWriter()
	c.server.returnWriter()
	reader := c.newReader(opened)
	c.letGo()
	up := pump{from: &c.client, to: &c.server, tap: &reader.up, stall: reader.s.stall}
	down := pump{from: &c.server, to: &c.client, tap: &reader.down}
	by := c.pumpBoth(&up, &down)
	if c.hasLeft() { // in a tunnel only weir's own end sets it
		by = byWeir
	}
	o.BytesIn, o.BytesOut, o.Done = up.moved, down.moved, time.Now()
	c.srv.Gate.Release(&c.pass)
	reader.finish(by, o.Done)
	s := &reader.s
	sum := s.sum // not a pointer into the reader, which can go
	o.Session, o.Outcome, o.Error = &sum, s.fate.outcome, s.fate.word
	return nil
}

// letGo leaves the memory that a tunnel needs no more to others: a silent
// stream may last for hours.
func (c *conn) letGo() {
	c.up.relay, c.req, c.res = relay{}, head{}, head{}
	c.parsed, c.answer = fasthttp.RequestHeader{}, fasthttp.ResponseHeader{}
	c.target, c.buf = nil, nil
}

// pumpBoth runs the two directions, and tells which side broke the tunnel.
func (c *conn) pumpBoth(up, down *pump) ending {
	first := make(chan ending, 2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer c.recoverUpload()
		c.pumpOne(up, first, byClient, byServer)
	}()
	c.pumpOne(down, first, byServer, byClient)
	<-done
	select {
	case by := <-first:
		return by
	default:
		return bySides
	}
}

// pumpOne runs one direction to its end. A clean end is passed on as a
// half-close; a break takes both connections down.
func (c *conn) pumpOne(p *pump, first chan<- ending, reads, writes ending) {
	p.run()
	switch {
	case p.writeErr != nil:
		first <- writes
	case p.readErr != nil:
		first <- reads
	default:
		closeWrite(p.to.Conn)
		return
	}
	_ = c.client.Conn.Close()
	_ = c.server.Conn.Close()
}

// dropReader leaves the buffer of an end that is read without one from now on
// to others.
func (e *end) dropReader() {
	e.returnReader()
	e.r = bufio.NewReaderSize(e, 16)
}

// newReader makes the reader of a WebSocket beside its tunnel.
func (c *conn) newReader(opened time.Time) *wsReader {
	var extensions []byte
	for i := range c.res.fields {
		if f := &c.res.fields[i]; equalFold(f.name, "sec-websocket-extensions") {
			extensions = append(append(extensions, f.value...), ',')
		}
	}
	deflate, known := parseExtensions(string(extensions))
	s := session{
		template: c.pass.identity(), base: c.pass.Enqueued, opened: opened,
		sink: c.srv.Gate.Sink, ingest: c.cfg.ingest, inflight: &c.srv.utterances, stall: new(atomic.Int64),
	}
	if deflate.on {
		s.inflaters = [2]*inflater{{reset: deflate.serverReset}, {reset: deflate.clientReset}}
	}
	s.start(string(c.target), c.cfg.streamProtocol)
	if !known {
		s.giveUp(unreadFrames)
	}
	return newWSReader(s, deflate.on, c.srv.Logger)
}

// identity is what an utterance's record takes over from its session's.
func (p *Passage) identity() classifier.Observation {
	o := &p.Observation
	return classifier.Observation{
		TraceID: o.TraceID, SpanID: o.SpanID, ParentID: o.ParentID, TraceState: o.TraceState, Sampled: o.Sampled,
		Protocol: "websocket", Method: o.Method, Target: o.Target, Host: o.Host, Client: o.Client, UserAgent: o.UserAgent,
		Route: o.Route, Model: o.Model, Limit: o.Limit,
	}
}
