package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"weir/tracing"
)

// lingerTime bounds how long a client may go on sending what nobody will
// read, so that it sees the answer and not a reset (RFC 9112, section 9.6).
const lingerTime = 500 * time.Millisecond

// An upload is the request's way to the server.
type upload struct {
	relay
	running bool          // on a goroutine of its own, until done
	done    chan struct{} // one token at its end
	ending  atomic.Bool   // the last bytes of the body are on their way
	err     error         // good after done
	sent    time.Time     // good after done
	took    atomic.Int64  // ns from began to sent; 0: it goes on
	began   time.Time
}

// over is when the upload ended: now, if it has not.
func (u *upload) over() time.Time {
	if d := u.took.Load(); d > 0 {
		return u.began.Add(time.Duration(d))
	}
	return time.Now()
}

// startUpload writes the head, and the body too if it is there already. Else
// the body follows on a goroutine of its own: the server may answer, or the
// two may talk, before it has ended.
func (c *conn) startUpload() {
	u := &c.up
	u.relay = relay{
		body: body{chunked: c.req.chunked, length: max(c.req.length, 0)},
		r:    c.client.r, w: c.server.w,
		ending: &u.ending,
	}
	u.err, u.sent, u.began = nil, time.Time{}, time.Now()
	u.ending.Store(false)
	u.took.Store(0)
	c.appendRequest()
	if !u.chunked && u.length <= int64(c.client.r.Buffered()) {
		c.runUpload()
		return
	}
	if u.done == nil {
		u.done = make(chan struct{}, 1)
	}
	u.running = true
	go func() {
		defer func() { u.done <- struct{}{} }()
		defer c.recoverUpload()
		c.client.flow = c.server.w
		c.client.expect(c.cfg.bodyTimeout, false)
		c.runUpload()
		c.client.flow = nil
	}()
}

func (c *conn) recoverUpload() {
	if v := recover(); v != nil {
		c.up.err = errBug
		_ = c.server.Conn.Close()
		c.logPanic(v)
	}
}

// runUpload moves the body. A server that no longer reads may still answer,
// so its refusal only makes the rest of the body go nowhere; a client that
// breaks off takes the server's connection with it, lest half a request pass
// for a whole one.
func (c *conn) runUpload() {
	u := &c.up
	u.err = u.run()
	if c.client.stopped.Load() && isTimeout(u.err) {
		u.err = errStopped // not the client's fault
	}
	if u.err == nil {
		if err := c.server.w.Flush(); err != nil {
			u.err = &flushError{err}
		}
	}
	u.sent = time.Now()
	u.took.Store(max(1, int64(u.sent.Sub(u.began))))
	if u.err == nil {
		return
	}
	var toServer *flushError
	if !errors.As(u.err, &toServer) || isTimeout(u.err) {
		_ = c.server.Conn.Close()
		return
	}
	if u.running {
		c.client.flow = nil
		_, _ = io.Copy(io.Discard, c.client.r) // until endUpload stops it
	}
}

// appendRequest writes the request's head for the server: the bytes that
// came, less what concerns the client's connection only.
func (c *conn) appendRequest() {
	w, b := c.server.w, c.buf[:0]
	method, _, _ := bytes.Cut(c.req.line, []byte(" "))
	b = append(append(b, method...), ' ')
	b = append(append(b, c.target...), " HTTP/1.1\r\n"...)
	if c.req.hosts == 0 { // HTTP/1.0 needs none, HTTP/1.1 does
		b = append(append(append(b, "Host: "...), c.srv.host()...), "\r\n"...)
	}
	started := false
	for i := range c.req.fields {
		f := &c.req.fields[i]
		switch {
		case c.req.upgrade && f.kind == fieldUpgrade:
			b = append(append(b, f.raw...), "Connection: Upgrade\r\n"...)
		case f.kind == fieldTraceparent || c.req.dropped(f):
		case f.kind == fieldTracestate && c.propagate && c.pass.TraceState == "": // of another trace, or malformed
		case f.kind == fieldContentLength || f.kind == fieldTransferEncoding:
			b = appendFraming(b, &c.req, f)
		case f.kind == fieldTE:
			if hasToken(f.value, "trailers") {
				b = append(b, "TE: trailers\r\n"...)
			}
		default:
			started = started || f.kind == fieldRequestStart
			b = append(b, f.raw...)
		}
	}
	if c.propagate {
		b = append(b, "traceparent: "...)
		b = append(tracing.AppendTraceparent(b, &c.pass.Observation), "\r\n"...)
	}
	if c.cfg.requestStart && !started {
		b = appendRequestStart(b, c.pass.Enqueued)
	}
	b = c.appendOrca(b)
	c.buf = append(b, "\r\n"...)
	_, _ = w.Write(c.buf) // an error stays in w until its flush
}

// appendRequestStart writes t=<seconds>.<3 digits>, the one form that all
// agents read alike.
func appendRequestStart(b []byte, t time.Time) []byte {
	ms := t.UnixMilli()
	b = append(b, "X-Request-Start: t="...)
	b = append(strconv.AppendInt(b, ms/1000, 10), '.')
	for div := int64(100); div > 0; div /= 10 {
		b = append(b, byte('0'+ms/div%10))
	}
	return append(b, "\r\n"...)
}

func hasToken(value []byte, token string) bool {
	for len(value) > 0 {
		var item []byte
		item, value, _ = bytes.Cut(value, []byte(","))
		item, _, _ = bytes.Cut(item, []byte(";"))
		if equalFold(bytes.Trim(item, " \t"), token) {
			return true
		}
	}
	return false
}

// download brings the answer to the client, interim answers first, and tells
// whether both connections are good for another request.
func (c *conn) download() (keep bool, err error) {
	c.server.expect(c.cfg.responseTimeout, false)
	runtime.Gosched() // let others run while the server works: a read at once would find nothing, and cost a system call
	status, err := c.readAnswer()
	for err == nil && status < 200 && status != 101 {
		if c.req.minor != '0' {
			err = c.sendInterim()
		}
		if err == nil {
			status, err = c.readAnswer()
		}
	}
	if err != nil {
		return false, err
	}
	o := &c.pass.Observation
	o.Responded, o.Status = time.Now(), status
	for i := range c.res.fields {
		c.cfg.ingest.Header(o, c.res.fields[i].name, c.res.fields[i].value)
	}
	if status == 101 {
		return false, c.tunnel()
	}
	return c.sendAnswer(status)
}

func (c *conn) readAnswer() (status int, err error) {
	b, err := peekHead(&c.server.r, &c.server, c.cfg.maxHeadSize)
	if err == nil {
		err = c.res.parse(b)
	}
	if err == nil {
		status, err = c.res.checkStatus()
	}
	if err == nil {
		c.answer.DisableNormalizing()
		err = consumed(c.answer.Read(c.server.r), c.server.r, len(b))
	}
	if err != nil {
		return 0, &answerError{err}
	}
	return status, nil
}

func (c *conn) sendInterim() error {
	b := append(append(c.buf[:0], "HTTP/1.1 "...), c.res.line[9:]...)
	b = append(b, "\r\n"...)
	for i := range c.res.fields {
		f := &c.res.fields[i]
		switch {
		case c.res.dropped(f), f.kind == fieldContentLength, f.kind == fieldTransferEncoding:
		default:
			b = append(b, f.raw...)
		}
	}
	c.buf = append(b, "\r\n"...)
	_, _ = c.client.w.Write(c.buf)
	if err := c.client.w.Flush(); err != nil {
		return &flushError{err}
	}
	return nil
}

func (c *conn) sendAnswer(status int) (keep bool, err error) {
	o := &c.pass.Observation
	down := relay{body: body{chunked: c.res.chunked, length: c.res.length}, r: c.server.r, w: c.client.w}
	down.dechunk = down.chunked && c.req.minor == '0'
	down.trailer, down.hide = c.onTrailer, c.orcaAsked
	if c.read.start(c); c.read.on || down.chunked {
		down.tap = &c.read
	}
	switch {
	case c.headOnly || status == 204 || status == 304:
		down.body = body{}
	case down.chunked:
		down.length = -1
	}
	serverStays := !c.res.close && !c.res.doubtful() && (c.res.minor != '0' || c.res.alive) && (down.chunked || down.length >= 0)
	keep = serverStays && !c.req.close && (c.req.minor != '0' || c.req.alive && !down.dechunk) &&
		(!c.up.running || c.up.ending.Load()) && !c.srv.draining()
	down.seen = c.watchBody(status)
	c.appendAnswer(&down, keep)
	c.answered, c.byClose = true, down.dechunk || !down.chunked && down.length < 0
	o.Overhead += time.Since(o.Responded)

	err = down.run()
	o.BytesOut = down.moved
	if err == nil {
		c.srv.Gate.Release(&c.pass)
		if err = c.client.w.Flush(); err != nil {
			err = &flushError{err}
		}
	}
	o.Done = time.Now()
	c.readBody(down.seen)
	if err != nil {
		return false, &answerError{err}
	}
	c.lastUsed, c.bodiless = o.Done, !down.chunked && down.length == 0
	return keep && c.server.r.Buffered() == 0, nil
}

// appendAnswer writes the head of the final answer for the client.
func (c *conn) appendAnswer(down *relay, keep bool) {
	b := append(append(c.buf[:0], "HTTP/1.1 "...), c.res.line[9:]...)
	b = append(b, "\r\n"...)
	for i := range c.res.fields {
		f := &c.res.fields[i]
		switch {
		case c.res.dropped(f), c.hidden(f):
		case f.kind == fieldContentLength && c.res.chunked:
		case f.kind == fieldTransferEncoding && down.dechunk, f.kind == fieldTrailer && down.dechunk:
		case f.kind == fieldContentLength || f.kind == fieldTransferEncoding:
			b = appendFraming(b, &c.res, f)
		default:
			b = append(b, f.raw...)
		}
	}
	if c.cfg.serverTiming {
		b = c.appendTold(b)
	}
	c.buf = append(appendConnection(b, keep, c.req.minor), "\r\n"...)
	_, _ = c.client.w.Write(c.buf)
}

// appendConnection says what becomes of the client's connection, where that
// is not what its version of HTTP implies.
func appendConnection(b []byte, keep bool, minor byte) []byte {
	switch {
	case !keep:
		return append(b, "Connection: close\r\n"...)
	case minor == '0':
		return append(b, "Connection: keep-alive\r\n"...)
	}
	return b
}

// appendTold adds what weir tells its client when asked to: the stages, and
// that the status is the server's (RFC 9209).
func (c *conn) appendTold(b []byte) []byte {
	b = append(b, "Server-Timing: "...)
	b = tracing.AppendServerTiming(b, &c.pass.Observation)
	b = append(b, "\r\nProxy-Status: weir; received-status="...)
	return append(strconv.AppendInt(b, int64(c.pass.Status), 10), "\r\n"...)
}

// endUpload waits for the upload to end, or ends it; it tells whether the
// client's connection is still in step. After a whole answer the client gets a
// little time to finish what it is sending.
func (c *conn) endUpload(answered, keep bool) bool {
	u, o := &c.up, &c.pass.Observation
	if u.running {
		if answered && !keep {
			closeWrite(c.client.Conn)
		}
		c.waitUpload(answered)
		u.running = false
	}
	if !o.Upgraded {
		o.BytesIn = u.moved
	}
	if o.Sent = u.sent; !o.Done.IsZero() && o.Sent.After(o.Done) {
		o.Sent = time.Time{} // nobody waited for it
	}
	return u.err == nil
}

func (c *conn) waitUpload(answered bool) {
	u := &c.up
	if answered {
		t := time.NewTimer(lingerTime)
		defer t.Stop()
		select {
		case <-u.done:
			return
		case <-t.C:
		}
	}
	// Stop both of its waits: for the client's bytes and for the server.
	c.client.stop()
	_ = c.server.Conn.Close()
	<-u.done
	if u.err == nil {
		u.err = errStopped
	}
}

// linger reads on for a while what the client sends after its answer.
func (c *conn) linger() {
	closeWrite(c.client.Conn)
	_ = c.client.Conn.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.Copy(io.Discard, c.client.Conn)
}

func closeWrite(nc net.Conn) {
	if half, ok := nc.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}

func (c *conn) appendSwitch() {
	b := append(append(c.buf[:0], "HTTP/1.1 "...), c.res.line[9:]...)
	b = append(b, "\r\n"...)
	for i := range c.res.fields {
		f := &c.res.fields[i]
		switch {
		case f.kind == fieldUpgrade:
			b = append(append(b, f.raw...), "Connection: Upgrade\r\n"...)
		case c.res.dropped(f), f.kind == fieldContentLength, f.kind == fieldTransferEncoding:
		default:
			b = append(b, f.raw...)
		}
	}
	c.buf = append(b, "\r\n"...)
	_, _ = c.client.w.Write(c.buf)
}
