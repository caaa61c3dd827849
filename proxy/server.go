package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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

	mu       sync.Mutex
	conns    map[*conn]struct{}
	shutdown atomic.Bool
	wg       sync.WaitGroup
}

// settings are what a reload can change: read once for each request.
type settings struct {
	router         *Router
	ingest         *tracing.Ingest
	keepHalfClosed bool
	serverTiming   bool
	requestStart   bool
	orca           bool // ask for the server's load
	maxHeadSize    int  // bytes
	maxConns       int  // 0: no limit

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
		if s.draining() || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) && !errors.Is(err, syscall.ECONNABORTED) {
			return fmt.Errorf("accepting connections: %w", err)
		}
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		s.Logger.Warn("cannot accept a connection; trying again", "error", err, "pause", pause)
		time.Sleep(pause)
	}
}

func (s *Server) start(nc net.Conn) {
	c := &conn{srv: s, addr: nc.RemoteAddr().String(), gone: make(chan struct{})}
	c.client = end{Conn: nc, writeTimeout: s.settings().writeTimeout}
	c.client.r = bufio.NewReaderSize(&c.client, readerSize)
	c.cfg = s.settings()
	c.onTrailer = func(name, value []byte) { c.cfg.ingest.Trailer(&c.pass.Observation, name, value) }
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

// turnAway answers a connection beyond max_connections.
func (s *Server) turnAway(c *conn) {
	defer c.client.Conn.Close()
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
	return s.dialer.DialContext(ctx, s.network, s.address)
}

// Shutdown lets requests and tunnels in flight end until ctx does, then cuts
// them. Connections that wait for a request are closed at once. The listener
// is the caller's to close.
func (s *Server) Shutdown(ctx context.Context) error {
	s.shutdown.Store(true)
	s.each(func(c *conn) { c.wake() })
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

// wake ends the wait for a next request.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == idle {
		c.client.stop()
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
