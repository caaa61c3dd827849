package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// A rig is a weir on loopback in front of a server of the test's.
type rig struct {
	*testing.T
	*Server
	addr    string
	mu      sync.Mutex
	records []classifier.Observation
}

func newRig(t *testing.T, server string, change ...func(*settings)) *rig {
	t.Helper()
	checkGoroutines(t)
	cfg := &settings{
		router: testRouter(t), ingest: testIngest(t), maxHeadSize: 64 << 10,
		connectTimeout: 5 * time.Second, headTimeout: 10 * time.Second, bodyTimeout: 10 * time.Second, writeTimeout: 10 * time.Second,
	}
	for _, f := range change {
		f(cfg)
	}
	r := &rig{T: t}
	h, err := newHangups()
	if err != nil {
		t.Fatal(err)
	}
	go h.run()
	r.Server = &Server{
		Gate: &Gate{Sink: r.sink}, Sampler: testSampler(t), Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
		network: "tcp", address: server, target: "http://" + server, hangups: h,
	}
	if strings.HasPrefix(server, "/") {
		r.network = "unix"
	}
	r.cfg.Store(cfg)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.Serve(l) }()
	t.Cleanup(func() {
		l.Close()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = r.Shutdown(ctx)
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *rig) sink(o *classifier.Observation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, *o)
}

// record waits for the nth record (from 0).
func (r *rig) record(n int) classifier.Observation {
	r.Helper()
	var o classifier.Observation
	r.eventually(func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.records) <= n {
			return false
		}
		o = r.records[n]
		return true
	}, "record %d", n)
	return o
}

// ended waits for a record with that outcome.
func (r *rig) ended(with classifier.Outcome) (o classifier.Observation) {
	r.Helper()
	r.eventually(func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, o = range r.records {
			if o.Outcome == with {
				return true
			}
		}
		return false
	}, "a record that is %s", with)
	return o
}

// eventually waits, bounded, for what another goroutine brings about.
func (r *rig) eventually(ok func() bool, format string, args ...any) {
	r.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			r.Fatalf("never happened: "+format, args...)
		}
		time.Sleep(time.Millisecond)
	}
}

// checkGoroutines fails the test if it leaves goroutines of this package behind.
func checkGoroutines(t *testing.T) {
	t.Cleanup(func() {
		var stacks []byte
		for range 200 {
			stacks = make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			if !bytes.Contains(stacks, []byte("weir/proxy.(*conn)")) && !bytes.Contains(stacks, []byte("weir/proxy.(*Server)")) &&
				!bytes.Contains(stacks, []byte("weir/proxy.(*requestBody)")) && !bytes.Contains(stacks, []byte("weir/proxy.(*handoff)")) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("goroutines left:\n%s", stacks)
	})
}

// script runs a server that treats the nth connection (from 0) with do.
func script(t *testing.T, do func(n int, c net.Conn, r *bufio.Reader)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				do(n, c, bufio.NewReader(c))
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

// serveHTTP runs a net/http server.
func serveHTTP(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, ErrorLog: slog.NewLogLogger(slog.NewTextHandler(io.Discard, nil), 0)}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return l.Addr().String()
}

// readHeadRaw reads a head as bytes.
func readHeadRaw(r *bufio.Reader) (string, error) {
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		b.WriteString(line)
		if err != nil || line == "\r\n" {
			return b.String(), err
		}
	}
}

type client struct {
	*testing.T
	net.Conn
	*bufio.Reader
}

func (r *rig) dial() *client {
	r.Helper()
	return dialRaw(r.T, r.addr)
}

func dialRaw(t *testing.T, addr string) *client {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { c.Close() })
	return &client{t, c, bufio.NewReader(c)}
}

func (c *client) Read(p []byte) (int, error) { return c.Reader.Read(p) }

func (c *client) send(format string, args ...any) {
	c.Helper()
	if _, err := fmt.Fprintf(c.Conn, format, args...); err != nil {
		c.Fatal(err)
	}
}

func (c *client) head() string {
	c.Helper()
	h, err := readHeadRaw(c.Reader)
	if err != nil {
		c.Fatalf("reading a head: %v after %q", err, h)
	}
	return h
}

func (c *client) expect(want string) {
	c.Helper()
	b := make([]byte, len(want))
	n, err := io.ReadFull(c.Reader, b)
	if string(b[:n]) != want {
		c.Fatalf("read %q (%v), want %q", b[:n], err, want)
	}
}

func (c *client) rest() string {
	c.Helper()
	b, err := io.ReadAll(c.Reader)
	if err != nil {
		c.Logf("reading the rest: %v", err)
	}
	return string(b)
}

func testIngest(t *testing.T) *tracing.Ingest {
	in, err := tracing.NewIngest(nil)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func contextOf(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithCancel(context.WithoutCancel(t.Context()))
}

// lines gathers a log.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
