package proxy

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"weir/tracing"
)

// A conn is one client connection and the one connection to the server that
// is pinned to it: the server sees the connections it would see without weir,
// and no byte of one client can ever reach another.
type conn struct {
	srv    *Server
	client end
	server end // Conn is nil while there is none
	raw    syscall.RawConn
	addr   string

	pass      Passage
	cfg       *settings // in force for the current request
	req       head
	res       head
	up        upload
	read      answerReader
	parsed    fasthttp.RequestHeader
	answer    fasthttp.ResponseHeader
	target    []byte // in origin form
	buf       []byte // scratch
	onTrailer func(name, value []byte)
	bodySent  func() time.Time // of the current request; now, if it goes on

	orcaAsked bool      // weir asked for the server's load, not the client
	propagate bool      // send traceparent to the server
	used      bool      // the server's connection has carried a request before
	lastUsed  time.Time // when the server's connection gave its last answer
	bodiless  bool      // and that it had no body, whatever its head said
	answered  bool      // bytes of an answer may have reached the client
	byClose   bool      // and the client learns its end from the connection's
	headOnly  bool      // the request is HEAD: no answer to it has a body

	gone     chan struct{} // closed when the client has left
	clientID int32
	serverID int32

	mu         sync.Mutex
	phase      phase
	spoken     bool      // a request has come
	hurried    bool      // the first one has a moment left to come
	left       bool      // gone is closed
	pinned     net.Conn  // the server's connection
	serverLeft bool      // and whether the server closed it
	abort      io.Closer // ends what the connection waits for, when the client leaves
}

// phase is what a hang-up of either side means now.
type phase uint8

const (
	idle    phase = iota // between requests
	busy                 // in an exchange
	tunnel               // after 101: half-closes are relayed as bytes are
	closing              // nothing more to tell
)

func (c *conn) serve() {
	defer c.close()
	defer c.recover()
	c.expectRequest()
	if h2, err := c.greet(); err != nil {
		return
	} else if h2 {
		c.serveH2()
		return
	}
	for ok := true; ok; ok = c.exchange() {
		c.expectRequest()
	}
}

// expectRequest lets a client be idle as long as the server keeps its side
// open. Where there is no server's side, nobody else would ever end it.
func (c *conn) expectRequest() {
	c.shed()
	if c.server.Conn != nil {
		c.client.expect(0, false)
	} else {
		c.client.expect(c.srv.settings().headTimeout, false)
	}
}

// recover keeps one connection's bug from ending all others.
func (c *conn) recover() {
	if v := recover(); v != nil {
		c.logPanic(v)
		c.giveUp()
	}
}

// giveUp ends what still runs after a bug. Its buffers are not used again: who
// knows what is in them, and who writes to them yet.
func (c *conn) giveUp() {
	_ = c.client.Conn.Close()
	if c.server.Conn != nil {
		_ = c.server.Conn.Close()
	}
	if c.up.running {
		<-c.up.done
	}
	c.client.w, c.server.r, c.server.w = nil, nil, nil
}

func (c *conn) logPanic(v any) {
	c.srv.Logger.Error("a connection was given up after a bug in weir", "panic", v, "client", c.addr, "stack", string(debug.Stack()))
}

func (c *conn) close() {
	c.setPhase(closing)
	c.dropServer()
	c.client.returnWriter()
	c.srv.hangups.remove(c.clientID)
	_ = c.client.Conn.Close()
	c.srv.remove(c)
}

// exchange carries one request; it tells whether the connection is good for
// another.
func (c *conn) exchange() bool {
	if err := c.awaitRequest(); err != nil {
		return false
	}
	c.cfg, c.answered = c.srv.settings(), false
	c.client.allow(c.cfg.writeTimeout)
	c.client.borrowWriter()
	defer c.client.returnWriter()
	method, err := c.readRequest()
	if err != nil {
		return c.refuseHead(err)
	}
	c.describe(method)
	err = c.srv.Gate.Enter(&c.pass, c.gone)
	defer c.leave()
	if err != nil {
		return c.refuse(err)
	}
	return c.forward()
}

func (c *conn) leave() {
	if c.pass.Done.IsZero() {
		c.pass.Done = time.Now()
	}
	c.read.finish(&c.pass.Observation)
	c.cfg.ingest.Finish(&c.pass.Observation)
	c.srv.Gate.Leave(&c.pass)
	c.pass.reset()
}

// awaitRequest waits for the first byte of a request.
func (c *conn) awaitRequest() error {
	if !c.setPhase(idle) {
		return net.ErrClosed
	}
	if c.srv.draining() && c.client.r.Buffered() == 0 {
		c.wake()
	} else {
		runtime.Gosched() // as in download: let the next request come
	}
	b, err := c.client.r.Peek(1)
	if err != nil && c.client.stopped.Load() && arrived(c.client.Conn) { // a request met weir's end half-way
		c.client.resume()
		b, err = c.client.r.Peek(1)
	}
	if err == nil && b[0] == '\r' { // one empty line in front of a request is harmless (RFC 9112, section 2.2)
		if b, err = c.client.r.Peek(2); err == nil && b[1] == '\n' {
			_, _ = c.client.r.Discard(2)
			_, err = c.client.r.Peek(1)
		}
	}
	if err == nil && !c.setPhase(busy) {
		err = net.ErrClosed
	}
	c.client.resume()
	return err
}

func (c *conn) readRequest() (method []byte, err error) {
	c.client.expect(c.cfg.headTimeout, true)
	c.headOnly = false
	b, err := peekHead(&c.client.r, &c.client, c.cfg.maxHeadSize)
	if err != nil {
		return nil, err
	}
	err = c.req.parse(b)
	c.headOnly = bytes.HasPrefix(c.req.line, []byte("HEAD "))
	if err != nil {
		return nil, err
	}
	method, target, err := c.req.checkRequest()
	if err != nil {
		return nil, err
	}
	c.parsed.DisableNormalizing()
	if err = consumed(c.parsed.Read(c.client.r), c.client.r, len(b)); err != nil {
		return nil, badHead("request head is malformed")
	}
	if string(method) == "CONNECT" {
		return nil, errConnect
	}
	c.target, err = c.req.originForm(target)
	return method, err
}

// describe fills the record with what the request says of itself. All strings
// share one allocation, since none may alias the reader's buffer.
func (c *conn) describe(method []byte) {
	o := &c.pass.Observation
	o.Protocol, o.Scheme, o.Client = "http/1.1", c.scheme(), c.addr
	var agent, state []byte
	hasParent, parents := false, 0
	for i := range c.req.fields {
		switch f := &c.req.fields[i]; f.kind {
		case fieldUserAgent:
			agent = f.value
		case fieldTraceparent:
			parents++
		case fieldTracestate:
			state = joinState(state, f.value)
		case fieldRequestStart:
			if d, ok := tracing.RequestStart(f.name, f.value, time.Now()); ok {
				o.Before = max(o.Before, d)
			}
		}
	}
	for i := range c.req.fields {
		if f := &c.req.fields[i]; f.kind == fieldTraceparent && parents == 1 { // of several, none can be trusted
			hasParent = tracing.ReadTraceparent(o, f.value, state)
		}
	}
	c.propagate = c.srv.Sampler.Start(o, hasParent)
	var model []byte
	o.Class, o.Route, model = c.cfg.router.Match(method, c.target)
	method, name, agent := first(method, maxWord), first(c.req.host, maxWord), first(agent, maxText)
	n := appendRedacted(append(c.buf[:0], method...), c.target)
	n = first(n, len(method)+maxText)
	target := len(n)
	n = append(append(append(n, model...), name...), agent...)
	c.buf = n
	s := string(n)
	host, user := target+len(model), target+len(model)+len(name)
	o.Method, o.Target, o.Model, o.Host, o.UserAgent = s[:len(method)], s[len(method):target], s[target:host], s[host:user], s[user:]
}

// joinState makes one list of several tracestate fields.
func joinState(a, b []byte) []byte {
	if a == nil {
		return b
	}
	return slices.Concat(a, []byte(","), b)
}

// What a record keeps of a request's texts, in bytes: thousands of records
// wait in memory, and a head may be large.
const (
	maxText = 1 << 10
	maxWord = 256
)

func first(b []byte, n int) []byte { return b[:min(len(b), n)] }

// appendRedacted appends a target with the values of its query replaced:
// tokens and signatures travel there.
func appendRedacted(dst, target []byte) []byte {
	path, query, ok := bytes.Cut(target, []byte("?"))
	dst = append(dst, path...)
	for sep := byte('?'); ok; sep = '&' {
		var pair []byte
		pair, query, ok = bytes.Cut(query, []byte("&"))
		key, _, hasValue := bytes.Cut(pair, []byte("="))
		if !hasValue { // a lone word may be a token itself
			key = nil
		}
		dst = append(append(dst, sep), key...)
		dst = append(dst, "=REDACTED"...)
	}
	return dst
}

// forward carries an admitted request to the server and its answer back.
func (c *conn) forward() bool {
	c.answered = false
	if err := c.connect(); err != nil {
		return c.fail(err)
	}
	c.startUpload()
	c.pass.Overhead = time.Since(c.pass.Dequeued) - c.pass.Connect
	keep, err := c.download()
	inStep := c.endUpload(err == nil, keep)
	if err != nil {
		return c.fail(err)
	}
	if !keep || !inStep {
		c.dropServer() // before the client takes its time
		if c.up.err != errStopped {
			c.linger()
		}
		return false
	}
	c.used = true
	c.server.returnReader()
	c.server.returnWriter()
	return true
}

// shed drops what one large head made the connection hold, lest thousands of
// idle connections hold it.
func (c *conn) shed() {
	if cap(c.buf) > readerSize {
		c.buf = nil
	}
	if cap(c.req.fields) > maxFields {
		c.req.fields, c.parsed = nil, fasthttp.RequestHeader{}
	}
	if cap(c.res.fields) > maxFields {
		c.res.fields, c.answer = nil, fasthttp.ResponseHeader{}
	}
	if c.client.r.Size() > readerSize && c.client.r.Buffered() == 0 {
		c.client.r = bufio.NewReaderSize(&c.client, readerSize)
	}
}

// maxFields is the number of fields that a connection keeps room for.
const maxFields = 256

// connect takes the pinned connection if it is still good, or makes a new one.
func (c *conn) connect() error {
	if c.server.Conn != nil {
		if c.justUsed() || quiet(c.raw) {
			return c.openServer(c.server.Conn)
		}
		c.dropServer()
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.connectTimeout)
	defer cancel()
	if !c.onLeave(closer(cancel)) {
		return ErrClientGone
	}
	nc, err := c.srv.dial(ctx)
	c.pass.Connect = time.Since(began)
	if err != nil {
		return &connectError{err}
	}
	c.used = false
	c.server = end{Conn: nc}
	sc, ok := rawConn(nc).(syscall.Conn)
	if ok {
		c.raw, err = sc.SyscallConn()
	}
	if ok && err == nil {
		c.pin(nc)
		c.serverID, err = c.srv.hangups.add(sc, func(bool) { c.serverHungUp(nc) })
	}
	if err != nil {
		return &connectError{err}
	}
	return c.openServer(nc)
}

func (c *conn) pin(nc net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pinned, c.serverLeft = nc, false
}

// justUsed spares a busy connection the look for unasked bytes: they come, if
// ever, after an answer without a body, or late.
func (c *conn) justUsed() bool {
	return !c.bodiless && c.pass.Dequeued.Sub(c.lastUsed) < time.Millisecond
}

// openServer readies the server's end for one exchange.
func (c *conn) openServer(nc net.Conn) error {
	c.server.borrowReader()
	c.server.borrowWriter()
	c.server.allow(c.cfg.writeTimeout)
	c.server.silentSince = c.bodySent
	c.server.flow = c.client.w
	if !c.onLeave(nc) {
		return ErrClientGone
	}
	return nil
}

func (c *conn) dropServer() {
	if c.server.Conn == nil {
		return
	}
	c.pin(nil)
	c.srv.hangups.remove(c.serverID)
	_ = c.server.Conn.Close()
	c.server.returnReader()
	c.server.returnWriter()
	c.server = end{}
}

// clientHungUp runs when the client shut down its side of the connection.
func (c *conn) clientHungUp(gone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left || c.phase == tunnel || !gone && c.srv.settings().keepHalfClosed {
		return
	}
	c.left = true
	close(c.gone)
	if c.abort != nil {
		_ = c.abort.Close()
	}
}

// serverHungUp runs when the server closed its side of pinned; between two
// requests that closes the client's too, as it would see it without weir.
func (c *conn) serverHungUp(pinned net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pinned != pinned {
		return
	}
	c.serverLeft = true
	if c.phase == idle {
		c.phase = closing
		_ = c.client.Conn.Close()
	}
}

type closer func()

func (f closer) Close() error { f(); return nil }

// onLeave has abort called when the client leaves; false if it has left.
func (c *conn) onLeave(abort io.Closer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.abort = abort
	return !c.left
}

// setPhase moves on, unless the connection is being closed.
func (c *conn) setPhase(p phase) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == closing || p == idle && c.serverLeft {
		return false
	}
	c.phase = p
	if p != busy {
		c.abort = nil
	} else {
		c.spoken = true
	}
	return true
}
