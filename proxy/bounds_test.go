package proxy

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A limit that a reload brings counts those who are in the server already.
func TestANewLimitCountsWhoIsInAlready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(10, 10, 0)
		enter := func(route string, stay time.Duration) {
			p := &Passage{}
			p.Route = route
			_ = visit(g, p, nil, stay)
		}
		go enter("/slow", time.Minute)
		go enter("/slow", time.Minute)
		synctest.Wait()
		named := map[string]Limits{"/slow": {MaxConcurrency: 2, MaxQueueSize: 9}}
		whole := Limits{MaxConcurrency: 10, MaxQueueSize: 10}
		g.SetLimits(whole, named)
		go enter("/slow", time.Minute)
		synctest.Wait()
		if s := g.State(); s.Inflight != 2 || s.Waiting != 1 {
			t.Errorf("a third got in beside the two: %+v", s)
		}
		g.SetLimits(whole, nil) // it goes, and comes back
		g.SetLimits(whole, named)
		synctest.Wait()
		go enter("/slow", time.Minute)
		synctest.Wait()
		if s := g.State(); s.Inflight != 3 || s.Waiting != 1 {
			t.Errorf("after it went and came back: %+v", s)
		}
		time.Sleep(time.Hour)
		if s := g.State(); s.Inflight != 0 || s.Waiting != 0 || g.whole.used != 0 || g.named["/slow"].used != 0 || g.named["/slow"].waiting != 0 {
			t.Errorf("in the end: %+v", s)
		}
	})
}

// A byte of payload behind 4 KiB of extension, again and again, is an attack.
func TestChunkExtensionsAreBoundedTogether(t *testing.T) {
	got := make(chan string, 1)
	r := newRig(t, echoHeads(t, got))
	c := r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
	go func(conn net.Conn) {
		for range 1000 {
			if _, err := fmt.Fprintf(conn, "1;x=%s\r\na\r\n", strings.Repeat("y", 1<<10)); err != nil {
				return
			}
		}
	}(c.Conn)
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 400 ") {
		t.Errorf("answered %q", head)
	}
	c = r.dial() // signatures as some clients put them there are none
	c.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
	for range 1000 {
		c.send("100;chunk-signature=%064d\r\n%s\r\n", 1, strings.Repeat("a", 255)+"\n")
	}
	c.send("0\r\n\r\n")
	c.expect(plainOK)
}

// What a client sends decides neither how many classes there are nor how large
// a record is.
func TestARecordIsSmallWhateverTheHeadSays(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(http.ResponseWriter, *http.Request) {}))
	long := strings.Repeat("é", 6<<10)
	classes := map[string]bool{}
	for n := range 50 {
		c := r.dial()
		c.send("%s%d /%d/%s?%s=1 HTTP/1.1\r\nHost: %s\r\nUser-Agent: %s\r\ntracestate: a=%s\r\n\r\n",
			strings.Repeat("M", 2000), n, n, long, long, strings.Repeat("h", 5000), long, long)
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
			t.Fatal(head)
		}
		o := r.record(n)
		classes[o.Class] = true
		if size := len(o.Method) + len(o.Target) + len(o.Host) + len(o.UserAgent) + len(o.Model) + len(o.TraceState); size > 4<<10 {
			t.Fatalf("a record holds %d bytes of text", size)
		}
		c.Close()
	}
	if len(classes) != 1 {
		t.Errorf("the client made %d classes", len(classes))
	}
}

// One large head must not make the connection hold its memory for ever.
func TestAConnectionShedsWhatALargeHeadTook(t *testing.T) {
	addr, _ := seen(t, plainOK)
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n%s\r\n", strings.Repeat("a:\r\n", 10_000))
	c.expect(plainOK)
	r.record(0)
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect(plainOK)
	c.Close()
	r.Server.mu.Lock()
	var left []*conn
	for one := range r.conns {
		left = append(left, one)
	}
	r.Server.mu.Unlock()
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 0 }, "connection closed")
	for _, one := range left {
		if cap(one.buf) > readerSize || cap(one.req.fields) > maxFields || one.client.r.Size() > readerSize {
			t.Errorf("the connection holds %d bytes of scratch, %d fields and a reader of %d", cap(one.buf), cap(one.req.fields), one.client.r.Size())
		}
	}
}

func TestTracestateIsJoinedAndBelongsToItsTrace(t *testing.T) {
	addr, heads := seen(t, plainOK)
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n%stracestate: a=1\r\ntracestate: b=2\r\n\r\n", parent)
	c.expect(plainOK)
	if h := <-heads; !strings.Contains(h, "tracestate: a=1\r\ntracestate: b=2\r\n") {
		t.Errorf("the server saw %q", h)
	}
	if o := r.record(0); o.TraceState != "a=1,b=2" {
		t.Errorf("recorded %q", o.TraceState)
	}
	c.send("GET / HTTP/1.1\r\nHost: h\r\ntraceparent: nonsense\r\ntracestate: a=1\r\n\r\n")
	c.expect(plainOK)
	if h := <-heads; strings.Contains(h, "tracestate") || strings.Contains(h, "nonsense") {
		t.Errorf("the state of no trace goes with a new one: %q", h)
	}
}

// Where weir has no connection to a server that could end it, an idle client
// is not kept for ever.
func TestAnIdleConnectionWithoutAServerEnds(t *testing.T) {
	r := newRig(t, "127.0.0.1:1", func(s *settings) { s.headTimeout = 50 * time.Millisecond })
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if all := c.rest(); !strings.HasPrefix(all, "HTTP/1.1 502 ") || strings.Contains(all, "Connection: close") {
		t.Errorf("answered %q", all)
	}
}

func newSidecar(t *testing.T, change func(*Config)) *Sidecar {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Listen, cfg.Admin = "127.0.0.1:0", "127.0.0.1:0"
	change(&cfg)
	s, err := NewSidecar(t.Context(), cfg, SidecarOptions{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// runSidecar runs it until the test or the returned function ends it.
func runSidecar(t *testing.T, s *Sidecar) (stop func()) {
	t.Helper()
	ctx, cancel := contextOf(t)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		done <- nil
	}
	t.Cleanup(stop)
	return stop
}

// The admin port reads no bodies: a form would be kept in memory, and on the
// disk if it is large. So the answer does not wait for one.
func TestTheAdminPortReadsNoBody(t *testing.T) {
	s := newSidecar(t, func(c *Config) { c.Server = "http://127.0.0.1:1" })
	runSidecar(t, s)
	for _, path := range []string{"/api/requests?n=1", "/api/history?class=x"} {
		c := dialRaw(t, s.AdminAddr())
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		c.send("GET %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 100000000\r\n\r\n--b\r\n", path)
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
			t.Errorf("%s: answered %q", path, head)
		}
		c.Close()
	}
}

// However many connect to the admin port, they take a bounded number of
// descriptors.
func TestTheAdminPortsConnectionsAreBounded(t *testing.T) {
	s := newSidecar(t, func(c *Config) { c.Server = "http://127.0.0.1:1" })
	runSidecar(t, s)
	var conns []net.Conn
	for range maxAdmin {
		conns = append(conns, dialRaw(t, s.AdminAddr()).Conn)
	}
	for _, c := range conns[:3] {
		fmt.Fprintf(c, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
		if _, err := io.ReadFull(c, make([]byte, 15)); err != nil {
			t.Error(err)
		}
	}
	if _, err := dialRaw(t, s.AdminAddr()).Conn.Read(make([]byte, 1)); err == nil {
		t.Error("one more was let in")
	}
	for _, c := range conns {
		c.Close()
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c := dialRaw(t, s.AdminAddr())
		fmt.Fprintf(c.Conn, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
		if b, _ := io.ReadAll(c.Conn); strings.HasPrefix(string(b), "HTTP/1.1 200") {
			break
		}
		if time.Now().After(end) {
			t.Fatal("no place became free")
		}
	}
}
