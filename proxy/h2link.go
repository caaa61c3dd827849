package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// A link is what weir keeps for one client's HTTP/2 connection: connections to
// the server of its own, so that no client can hold up another's, and the
// server sees each client apart, as it would without weir. There is one where
// the server speaks HTTP/2, and more only if the server allows a connection
// fewer streams than the client opens; there is one for each request at a time
// where it speaks HTTP/1.1.
type link struct {
	srv    *Server
	client string

	dialing chan struct{} // held by who makes a connection

	mu       sync.Mutex
	conns    [numSpoken][]*http.ClientConn
	closed   bool
	handlers int
	idle     chan struct{} // closed when closed and the last handler has ended
}

// spoken is how a request travels to the server.
type spoken int

const (
	spokenH1   spoken = iota // HTTP/1.1
	spokenH2                 // HTTP/2
	spokenALPN               // as the server chooses in its TLS handshake
	numSpoken
)

func newLink(s *Server, client string) *link {
	return &link{srv: s, client: client, dialing: make(chan struct{}, 1), idle: make(chan struct{})}
}

// enter counts a handler; false if the connection is gone.
func (l *link) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.handlers++
	return true
}

func (l *link) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handlers--
	if l.closed && l.handlers == 0 {
		close(l.idle)
	}
}

// close waits for the handlers, whose client is gone, and closes what they used.
func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	if l.handlers == 0 {
		close(l.idle)
	}
	l.mu.Unlock()
	<-l.idle
	for _, conns := range l.conns {
		for _, c := range conns {
			_ = c.Close()
		}
	}
}

// spokenFor is how a request travels.
func (s *Server) spokenFor(grpc bool) spoken {
	protocol := s.settings().serverProtocol
	switch {
	case protocol == "h2":
		return spokenH2
	case protocol == "http1":
		return spokenH1
	case s.serverTLS != nil:
		return spokenALPN
	case grpc:
		return spokenH2
	}
	return spokenH1
}

// reserve finds a connection that can take one more request, or makes one; it
// tells how long making one took.
func (l *link) reserve(ctx context.Context, as spoken) (*http.ClientConn, time.Duration, error) {
	if c := l.free(as); c != nil {
		return c, 0, nil
	}
	began := time.Now()
	select {
	case l.dialing <- struct{}{}:
		defer func() { <-l.dialing }()
	case <-ctx.Done():
		return nil, time.Since(began), ctx.Err()
	}
	if c := l.free(as); c != nil { // another request's
		return c, time.Since(began), nil
	}
	c, err := l.srv.connect(ctx, as)
	if err == nil {
		err = c.Reserve()
	}
	if err != nil {
		return nil, time.Since(began), &connectError{err}
	}
	l.mu.Lock()
	l.conns[as] = append(l.conns[as], c)
	l.mu.Unlock()
	return c, time.Since(began), nil
}

// free reserves a place on a connection that is there, and forgets those that
// are no more.
func (l *link) free(as spoken) (found *http.ClientConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[as] = slices.DeleteFunc(l.conns[as], func(c *http.ClientConn) bool { return c.Err() != nil })
	for _, c := range l.conns[as] {
		if c.Reserve() == nil {
			return c
		}
	}
	return nil
}

// connect makes a connection for a link.
func (s *Server) connect(ctx context.Context, as spoken) (*http.ClientConn, error) {
	if limit := s.settings().connectTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	return s.transport(as).NewClientConn(ctx, s.scheme(), s.authority())
}

func (s *Server) scheme() string {
	if s.serverTLS != nil {
		return "https"
	}
	return "http"
}

// authority stands in the URLs of requests; what they say of the host is the
// client's word. A socket has no name of its own.
func (s *Server) authority() string {
	if s.network == "unix" {
		return "localhost:80"
	}
	return s.address
}

var alpn = [numSpoken][]string{spokenH1: {"http/1.1"}, spokenH2: {"h2"}, spokenALPN: {"h2", "http/1.1"}}

// transport is what makes connections of one kind, and speaks over them.
func (s *Server) transport(as spoken) *http.Transport {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.transports[as] == nil {
		s.transports[as] = s.newTransport(as)
	}
	return s.transports[as]
}

func (s *Server) newTransport(as spoken) *http.Transport {
	t := &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dialPlain(ctx) },
		DialTLSContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dialTLS(ctx, alpn[as]...) },
		DisableCompression:     true,
		MaxResponseHeaderBytes: int64(s.settings().maxHeadSize),
		Protocols:              new(http.Protocols),
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerStream: maxBuffer, MaxReadFrameSize: maxFrame},
	}
	t.Protocols.SetHTTP1(as != spokenH2)
	t.Protocols.SetHTTP2(as != spokenH1)
	t.Protocols.SetUnencryptedHTTP2(as == spokenH2)
	return t
}

func (s *Server) dialPlain(ctx context.Context) (net.Conn, error) {
	return s.dialer.DialContext(ctx, s.network, s.address)
}

// dialTLS makes a connection to an https server.
func (s *Server) dialTLS(ctx context.Context, protocols ...string) (net.Conn, error) {
	nc, err := s.dialPlain(ctx)
	if err != nil {
		return nil, err
	}
	nc, err = s.secureServer(ctx, nc, protocols...)
	if err != nil {
		return nil, err
	}
	if got := nc.(*tls.Conn).ConnectionState().NegotiatedProtocol; len(protocols) == 1 && protocols[0] == "h2" && got != "h2" {
		_ = nc.Close()
		return nil, errNoH2
	}
	return nc, nil
}

var errNoH2 = errors.New("the server does not speak HTTP/2")

// isNoH2 tells whether an error means that the server does not speak HTTP/2;
// net/http has a hint for it, and no type.
func isNoH2(err error) bool {
	return errors.Is(err, errNoH2) || err != nil && (strings.Contains(err.Error(), "looked like an HTTP/1.1 header") ||
		strings.Contains(err.Error(), "client conn could not be established")) // the answer came before the question
}

// isUnprocessed tells whether the server cannot have begun to work on the
// request: it said so (REFUSED_STREAM, or GOAWAY with an earlier stream), or
// the connection was closed before anything was sent.
func isUnprocessed(err error) bool {
	const refused = 0x7
	var reset StreamError
	if errors.As(err, &reset) {
		return reset.Code == refused
	}
	switch err.Error() {
	case "http2: client conn not usable", "http2: Transport received Server's graceful shutdown GOAWAY":
		return true
	}
	return false
}

// A StreamError is an RST_STREAM frame. net/http fills any struct of this
// shape with its own error.
type StreamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (e StreamError) Error() string { return "the stream was reset" }
