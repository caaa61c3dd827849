package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// HTTP/2 comes by its preface, or by ALPN under TLS. Its connections are read
// by net/http's server: weir hands each one over and gets its streams back as
// requests, which pass the same gate and fill the same record as all others.

// preface is what every HTTP/2 connection begins with. HTTP/1.1 has no such
// request: its methods and versions differ from the first line on.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// maxStreams is how many streams one connection may have at once. Who may run
// and who has to wait is the gate's to say: a lower number would make a second
// queue, in the client, that nobody could see.
const maxStreams = 10_000

// maxBuffer bounds what one stream may have sent ahead of its reader, one way;
// maxFrame is the largest frame, the least that the standard allows.
const (
	maxBuffer = 512 << 10
	maxFrame  = 16 << 10
)

// greet finds out what a new connection speaks, without waiting for more
// bytes than tell.
func (c *conn) greet() (h2 bool, err error) {
	if t, ok := c.client.Conn.(*tls.Conn); ok {
		return c.shake(t)
	}
	for n := 1; n <= len(preface); n++ {
		b, err := c.client.r.Peek(n)
		if err != nil {
			return false, err
		}
		if n == 1 && isTLS(b[0]) {
			c.notPlain()
			return false, net.ErrClosed
		}
		if b[n-1] != preface[n-1] {
			return false, nil
		}
	}
	return true, nil
}

func (c *conn) notPlain() {
	c.client.borrowWriter()
	c.req.minor = '1'
	c.reply(fault{status: 400, word: "bad_request", text: "this port speaks no TLS; write http://, or set tls_cert and tls_key"}, false)
}

// serveH2 hands the connection to net/http's server until it is closed.
func (c *conn) serveH2() {
	c.client.expect(0, false)
	if !c.setPhase(busy) {
		return
	}
	nc := c.client.Conn
	h, ok := nc.(*handoff)
	if t, secure := nc.(*tls.Conn); secure {
		h, ok = t.NetConn().(*handoff)
	}
	if !ok {
		h = &handoff{Conn: nc, r: c.client.r, closed: make(chan struct{})}
		nc = h
	}
	h.link = newLink(c.srv, c.addr)
	_ = h.SetReadDeadline(time.Time{})
	if s := c.srv.h2(); s != nil && s.take(nc) {
		c.client.r = nil
		<-h.closed
	}
	h.link.close()
}

// A handoff is a connection that net/http reads: first what weir has read of
// it already, then the rest.
type handoff struct {
	net.Conn
	r      *bufio.Reader // nil: nothing was read
	link   *link
	once   sync.Once
	closed chan struct{}
}

func (h *handoff) Read(p []byte) (int, error) {
	if h.r != nil {
		if n := h.r.Buffered(); n > 0 {
			return h.r.Read(p[:min(len(p), n)])
		}
		h.r = nil
	}
	return h.Conn.Read(p)
}

func (h *handoff) Close() error {
	err := h.Conn.Close()
	h.once.Do(func() { close(h.closed) })
	return err
}

// CloseWrite shuts down the sending side.
func (h *handoff) CloseWrite() error {
	closeWrite(h.Conn)
	return nil
}

// linkKey is the context's key for the link of a request's connection.
type linkKey struct{}

func withLink(ctx context.Context, nc net.Conn) context.Context {
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	return context.WithValue(ctx, linkKey{}, nc.(*handoff).link)
}

// An h2Server is net/http's server with a listener that takes connections
// from weir.
type h2Server struct {
	http.Server
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

// h2 is the server of all HTTP/2 connections, started for the first of them;
// nil once weir drains.
func (s *Server) h2() *h2Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining() {
		return nil
	}
	if s.http2 == nil {
		s.http2 = s.newH2()
		s.wg.Go(func() { _ = s.http2.Serve(s.http2) })
	}
	return s.http2
}

func (s *Server) newH2() *h2Server {
	h := &h2Server{conns: make(chan net.Conn), done: make(chan struct{})}
	h.Server = http.Server{
		Handler:        http.HandlerFunc(s.serveStream),
		ConnContext:    withLink,
		MaxHeaderBytes: s.settings().maxHeadSize,
		Protocols:      new(http.Protocols),
		HTTP2:          &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerStream: maxBuffer, MaxReadFrameSize: maxFrame},
		ErrorLog:       slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug),
	}
	h.Protocols.SetHTTP2(true)
	h.Protocols.SetUnencryptedHTTP2(true)
	return h
}

// stopH2 has every HTTP/2 connection told that it gets no more streams.
func (s *Server) stopH2(ctx context.Context) {
	s.mu.Lock()
	h := s.http2
	s.mu.Unlock()
	if h != nil {
		s.wg.Go(func() { _ = h.Shutdown(ctx) })
	}
}

func (h *h2Server) take(nc net.Conn) bool {
	select {
	case h.conns <- nc:
		return true
	case <-h.done:
		return false
	}
}

// Accept, Close and Addr make it a net.Listener.
func (h *h2Server) Accept() (net.Conn, error) {
	select {
	case nc := <-h.conns:
		return nc, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (h *h2Server) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr is nobody's: connections are accepted elsewhere.
func (h *h2Server) Addr() net.Addr { return &net.TCPAddr{} }

// hopByHop are the fields that concern one connection only, in the form that
// http.Header has them. HTTP/2 knows none of them but TE.
var hopByHop = []string{"Connection", "Keep-Alive", "Proxy-Connection", "Transfer-Encoding", "Upgrade", "Http2-Settings"}

// forwardable copies the fields that a message has beyond its connection.
func forwardable(h http.Header) http.Header {
	out := make(http.Header, len(h)+4)
	for name, values := range h {
		out[name] = values
	}
	for _, value := range h["Connection"] {
		for name := range bytes.SplitSeq([]byte(value), []byte(",")) {
			delete(out, http.CanonicalHeaderKey(string(bytes.TrimSpace(name))))
		}
	}
	for _, name := range hopByHop {
		delete(out, name)
	}
	return out
}
