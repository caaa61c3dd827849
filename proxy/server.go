package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"weir/tracing"
)

// A Server is the proxy's data path: it accepts client connections and
// carries their requests through the gate to one server.
type Server struct {
	Gate    *Gate
	Sampler *tracing.Sampler
	Logger  *slog.Logger

	network, address string // of the server
	target           string // the server, for messages
	cfg              atomic.Pointer[settings]
	hangups          *hangups
	dialer           net.Dialer
	listenTLS        *tls.Config        // nil: clients speak none
	serverTLS        func() *tls.Config // nil: the server speaks none
	utterances       atomic.Int64       // under way in all streams

	mu         sync.Mutex
	conns      map[*conn]struct{}
	http2      *h2Server // nil: no client has spoken HTTP/2 yet
	transports [numSpoken]*http.Transport
	shutdown   atomic.Bool
	wg         sync.WaitGroup
}

// settings are what a reload can change: read once for each request.
type settings struct {
	router         *Router
	ingest         *tracing.Ingest
	keepHalfClosed bool
	serverTiming   bool
	requestStart   bool
	orca           bool // ask for the server's load
	serverProtocol string
	streamProtocol string // of WebSockets; "": recognise it
	maxHeadSize    int    // bytes
	maxConns       int    // 0: no limit

	connectTimeout, headTimeout, bodyTimeout, responseTimeout, writeTimeout time.Duration
}

func (s *Server) settings() *settings { return s.cfg.Load() }
func (s *Server) draining() bool      { return s.shutdown.Load() }

// Serve accepts connections from l until Shutdown or an error.
func (s *Server) Serve(l net.Listener) error {
	var pause time.Duration
	for {
		nc, err := l.Accept()
		if err == nil {
			pause = 0
			s.start(nc)
			continue
		}
		if s.draining() {
			takeBacklog(l, s.start)
			_ = l.Close()
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if !isPassing(err) {
			return fmt.Errorf("accepting connections: %w", err)
		}
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		s.Logger.Warn("cannot accept a connection; trying again", "error", err, "pause", pause)
		time.Sleep(pause)
	}
}

// passing are the errors of an accept that say nothing about the next one: the
// system is short of something, or the connection broke before it was taken
// (accept(2)).
var passing = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPERM, syscall.EPROTO, syscall.EINTR, syscall.ENOPROTOOPT,
	syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.EOPNOTSUPP, syscall.ENETUNREACH, syscall.ETIMEDOUT,
}

func isPassing(err error) bool {
	return slices.ContainsFunc(passing, func(e error) bool { return errors.Is(err, e) })
}

func (s *Server) start(nc net.Conn) {
	c := &conn{srv: s, addr: nc.RemoteAddr().String(), gone: make(chan struct{})}
	c.client = end{Conn: s.secured(nc), writeTimeout: s.settings().writeTimeout}
	c.client.borrowReader()
	c.cfg = s.settings()
	c.onTrailer = func(name, value []byte) { c.cfg.ingest.Trailer(&c.pass.Observation, name, value) }
	c.bodySent = c.up.over
	if !s.add(c) {
		s.wg.Go(func() { s.turnAway(c) })
		return
	}
	if sc, ok := nc.(syscall.Conn); ok {
		id, err := s.hangups.add(sc, c.clientHungUp)
		if err != nil {
			s.Logger.Warn("cannot watch a connection for the client's leaving", "error", err)
		}
		c.clientID = id
	}
	s.wg.Go(c.serve)
}

const turnAwayTime = 5 * time.Second

// turnAway answers a connection beyond max_connections.
func (s *Server) turnAway(c *conn) {
	defer c.client.Conn.Close()
	_ = c.client.Conn.SetDeadline(time.Now().Add(turnAwayTime)) // a handshake of TLS may be part of it
	c.client.borrowWriter()
	defer c.client.returnWriter()
	c.req.minor = '1'
	c.reply(fault{status: 503, word: "too_many_connections",
		text: fmt.Sprintf("max_connections %d is reached; close idle connections, or raise it", c.cfg.maxConns)}, false)
}

func (s *Server) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := c.cfg.maxConns; limit > 0 && len(s.conns) >= limit {
		return false
	}
	if s.conns == nil {
		s.conns = make(map[*conn]struct{})
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *Server) dial(ctx context.Context) (net.Conn, error) {
	if s.serverTLS != nil {
		return s.dialTLS(ctx, alpn[spokenH1]...)
	}
	return s.dialPlain(ctx)
}

// host is the server's name in a request that brings none.
func (s *Server) host() string {
	if s.network == "unix" {
		return "localhost"
	}
	return s.address
}

// Shutdown lets requests and tunnels in flight end until ctx does, then cuts
// them. Connections that wait for a request are closed at once. The listener
// is the caller's to close.
func (s *Server) Shutdown(ctx context.Context) error {
	s.shutdown.Store(true)
	s.each(func(c *conn) { c.wake() })
	s.stopH2(ctx)
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = fmt.Errorf("drain_timeout passed with %d connections still busy; they were cut", s.each((*conn).cut))
		<-done
	}
	s.hangups.close()
	return err
}

func (s *Server) each(do func(*conn)) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		do(c)
	}
	return len(s.conns)
}

// firstWords is how long a new connection may wait for its first request once
// weir is about to end: its client may not know yet.
const firstWords = 100 * time.Millisecond

// wake ends the wait for a next request; a first one gets a moment.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.phase != idle || c.hurried:
	case c.spoken:
		c.client.stop()
	default:
		c.hurried = true
		time.AfterFunc(firstWords, c.hush)
	}
}

// hush ends the wait for a first request.
func (c *conn) hush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == idle {
		c.client.stop()
	}
}

// EndAccepting ends Serve, once it has taken the connections that clients have
// made already: to close the port would reset them. Their requests are served
// as Shutdown serves those in flight.
func (s *Server) EndAccepting(l net.Listener) {
	s.shutdown.Store(true)
	if d, ok := l.(interface{ SetDeadline(time.Time) error }); !ok || d.SetDeadline(time.Unix(1, 0)) != nil {
		_ = l.Close()
	}
}

// cut ends whatever the connection is doing.
func (c *conn) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.left {
		c.left = true
		close(c.gone)
	}
	if c.abort != nil {
		_ = c.abort.Close()
	}
	_ = c.client.Conn.Close()
}
