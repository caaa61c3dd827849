package envoy

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weir/classifier"
	"weir/proxy"
)

// A rig is a weir beside an Envoy of the test's.
type rig struct {
	*testing.T
	side *proxy.Sidecar
	*Server
	conn *grpc.ClientConn
	cfg  proxy.Config
	stop func()
}

func newRig(t *testing.T, change ...func(*proxy.Config)) *rig {
	t.Helper()
	checkGoroutines(t)
	cfg := proxy.DefaultConfig()
	cfg.Listen, cfg.Admin, cfg.EnvoyListen = proxy.NoListen, "127.0.0.1:0", "127.0.0.1:0"
	cfg.Window, cfg.VerdictFor, cfg.VerdictKeepFor = proxy.Duration(time.Second), 1, 1 // ns: without delay
	cfg.DrainTimeout = proxy.Duration(5 * time.Second)
	for _, f := range change {
		f(&cfg)
	}
	side, err := proxy.NewSidecar(t.Context(), cfg, proxy.SidecarOptions{Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(side, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- side.Run(ctx) }()
	r := &rig{T: t, side: side, Server: s, cfg: cfg}
	r.conn = dial(t, s.Addr())
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// limits sets the gate's limits.
func limits(concurrency, queue int, timeout time.Duration) func(*proxy.Config) {
	return func(c *proxy.Config) {
		c.MaxConcurrency, c.MaxQueueSize, c.QueueTimeout = concurrency, queue, proxy.Duration(timeout)
	}
}

// eventually waits, bounded, for what another goroutine brings about.
func (r *rig) eventually(ok func() bool, format string, args ...any) {
	r.Helper()
	for end := time.Now().Add(15 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			r.Fatalf("never happened: "+format, args...)
		}
		time.Sleep(time.Millisecond)
	}
}

// records waits for n records on the admin port, oldest first.
func (r *rig) records(n int) (all []record) {
	r.Helper()
	r.eventually(func() bool {
		all = nil
		for line := range bytes.Lines(r.get("/api/requests?n=100000")) {
			var one record
			if err := json.Unmarshal(line, &one.Observation); err != nil {
				r.Fatalf("%s: %v", line, err)
			}
			all = append(all, one)
		}
		return len(all) >= n
	}, "%d records", n)
	return all
}

type record struct{ classifier.Observation }

func (r *rig) get(path string) []byte {
	r.Helper()
	res, err := http.Get("http://" + r.side.AdminAddr() + path)
	if err != nil {
		r.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != 200 {
		r.Fatalf("%s: %s, %v", path, res.Status, err)
	}
	return b
}

func (r *rig) state() state { return r.Server.state() }

var ours = regexp.MustCompile(`weir/proxy/envoy\.\(\*(Server|exchange|logSink|replay|stats|runtimePush)\)`)

var checked sync.Map

// checkGoroutines fails the test if it leaves goroutines of this package behind.
func checkGoroutines(t *testing.T) {
	if _, twice := checked.LoadOrStore(t, true); twice {
		return // the check of the first rig runs after the others have ended
	}
	t.Cleanup(func() {
		var stacks []byte
		for range 300 {
			stacks = make([]byte, 4<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			if !ours.Match(stacks) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("goroutines left:\n%s", stacks)
	})
}

// server is a stand-in for the ASR server: it answers when told to.
type server struct {
	*httptest.Server
	arrived chan *call
}

type call struct {
	r    *http.Request
	w    http.ResponseWriter
	done chan struct{}
}

func newServer(t *testing.T) *server {
	s := &server{arrived: make(chan *call, 2000)}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then does net/http look whether the client is still there
		c := &call{r, w, make(chan struct{})}
		s.arrived <- c
		select {
		case <-c.done:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *server) next(t *testing.T) *call {
	t.Helper()
	select {
	case c := <-s.arrived:
		return c
	case <-time.After(15 * time.Second):
		t.Fatal("no request reached the server")
		return nil
	}
}

func (s *server) idle() bool { return len(s.arrived) == 0 }

// finish ends the answer.
func (c *call) finish() { close(c.done) }

// begin sends the answer's head, with fields "name: value".
func (c *call) begin(fields ...string) {
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ": ")
		c.w.Header().Set(name, value)
	}
	c.w.WriteHeader(200)
	c.w.(http.Flusher).Flush()
}
