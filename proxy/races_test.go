package proxy

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"weir/classifier"
)

// Arrivals, admissions, timeouts, leavings and reloads at once: no place is
// lost or made, and the server never sees more than the highest limit.
func TestTheGateUnderRaces(t *testing.T) {
	const most = 4
	g := newGate(most, 50, time.Millisecond)
	var inside, peak, entered, left atomic.Int64
	g.Sink = func(*classifier.Observation) { left.Add(1) }
	var wg sync.WaitGroup
	for id := range 32 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(id), 9))
			var p Passage
			for range 300 {
				p.Route = []string{"/a", "/b", ""}[rnd.IntN(3)]
				gone := make(chan struct{})
				if rnd.IntN(4) == 0 {
					go close(gone)
				}
				entered.Add(1)
				if err := g.Enter(&p, gone); err == nil {
					n := inside.Add(1)
					for m := peak.Load(); n > m && !peak.CompareAndSwap(m, n); m = peak.Load() {
					}
					if rnd.IntN(2) == 0 {
						time.Sleep(time.Duration(rnd.IntN(100)) * time.Microsecond)
					}
					inside.Add(-1)
				}
				g.Leave(&p)
				p.reset()
			}
		})
	}
	stop := make(chan struct{})
	wg.Go(func() {
		for n := 0; n < 500; n++ {
			g.SetLimits(Limits{MaxConcurrency: 1 + n%most, MaxQueueSize: n % 50, QueueTimeout: time.Millisecond},
				map[string]Limits{[]string{"/a", "/b"}[n%2]: {MaxConcurrency: 1 + n%3, MaxQueueSize: 50}})
			g.State()
		}
		close(stop)
	})
	wg.Wait()
	<-stop
	if s := g.State(); s.Inflight != 0 || s.Waiting != 0 || g.whole.used != 0 || g.whole.waiting != 0 {
		t.Errorf("in the end %+v", s)
	}
	for name, l := range g.named {
		if l.used != 0 || l.waiting != 0 {
			t.Errorf("%s: %+v", name, l)
		}
	}
	if peak.Load() > most || entered.Load() != left.Load() {
		t.Errorf("%d at once (limit %d), %d came, %d left", peak.Load(), most, entered.Load(), left.Load())
	}
}

func TestAClientThatIsResetInTheQueueFreesItsTurn(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 5, 0)(r)
	busy := r.dial()
	busy.send(post)
	<-h.came
	leaver := r.dial()
	leaver.send("%s", post+post) // pipelined bytes behind it must not hide its leaving
	r.waiting(1)
	hangUp(leaver.Conn)
	r.waiting(0)
	if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" || !o.Dequeued.IsZero() {
		t.Errorf("the record is %+v", o)
	}
	h.release <- struct{}{}
	busy.head()
	if len(h.came) != 0 {
		t.Error("the server saw a request whose client had left")
	}
}

// Small windows and slow ends in both directions at once must not tie each
// other up.
func TestTinyWindowsInBothDirections(t *testing.T) {
	const size = 100_000
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		shrink(c)
		_, _ = readHeadRaw(br)
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)
		_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{io.LimitReader(br, size)}, make([]byte, 777))
		_, _ = io.Copy(io.Discard, br)
	}))
	c := r.dial()
	shrink(c.Conn)
	go func() {
		fmt.Fprintf(c.Conn, "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", size)
		_, _ = io.Copy(c.Conn, io.LimitReader(zeros{}, size))
	}()
	c.head()
	if n, err := io.CopyN(io.Discard, c.Reader, size); n != size {
		t.Errorf("read %d of %d bytes: %v", n, size, err)
	}
	if o := r.record(0); o.BytesIn != size || o.BytesOut != size || o.Outcome != classifier.OK {
		t.Errorf("the record is %+v", o)
	}
}

func shrink(c net.Conn) {
	_ = c.(*net.TCPConn).SetReadBuffer(2 << 10)
	_ = c.(*net.TCPConn).SetWriteBuffer(2 << 10)
}

// Clients choose methods, paths and models; they must not choose how many
// series there are, nor write into the log or break a page that lists records.
func TestHostileNamesMakeFewSeriesAndNoLines(t *testing.T) {
	var log lines
	s := newSidecar(t, func(c *Config) {
		c.Server = "http://" + serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Server-Timing", "fo\"rward;dur=1, evil{x=\"y\"};dur=1, "+strings.Repeat("n", 200)+";dur=0.1, forward;dur=0.1")
		})
		c.Window = Duration(50 * time.Millisecond)
	})
	s.logger = log.logger()
	s.watch.logger, s.server.Logger = s.logger, s.logger
	stop := runSidecar(t, s)
	const requests = 600
	c := dialRaw(t, s.Addr())
	for n := range requests {
		c.send("M%d /v2/models/evil\"%d\xff\\n%%0A/infer?\x80%d HTTP/1.1\r\nHost: evil%d\r\nUser-Agent: \xfe\"\\\r\n\r\n", n, n, n, n)
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
			t.Fatal(head)
		}
	}
	page := func(path string) string {
		resp, err := http.Get("http://" + s.AdminAddr() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return string(b)
	}
	var records string
	for end := time.Now().Add(10 * time.Second); strings.Count(records, "\n") < requests; time.Sleep(time.Millisecond) {
		if records = page("/api/requests?n=1000"); time.Now().After(end) {
			t.Fatalf("%d records", strings.Count(records, "\n"))
		}
	}
	for line := range strings.Lines(records) {
		if !json.Valid([]byte(line)) {
			t.Fatalf("%q is no JSON", line)
		}
	}
	metrics := page("/metrics")
	if n := strings.Count(metrics, "\n"); n > 700 || strings.Contains(metrics, "evil") || strings.Contains(metrics, "M17") {
		t.Errorf("/metrics has %d lines, or names of the client's", n)
	}
	if verdict := page("/api/verdict"); !json.Valid([]byte(verdict)) || strings.Contains(verdict, "evil") {
		t.Errorf("/api/verdict is %s", verdict)
	}
	stop()
	http.DefaultClient.CloseIdleConnections()
	if text := log.String(); strings.Contains(text, "evil") || strings.Contains(text, "M17") {
		t.Errorf("the log says\n%s", text)
	}
}

func TestAWeirWithoutDescriptorsSaysSo(t *testing.T) {
	c := &conn{srv: &Server{target: "http://server"}}
	f := c.faultOf(&connectError{&net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}})
	if f.status != 503 || f.word != "too_many_connections" || !strings.Contains(f.text, "ulimit -n") || strings.Contains(f.text, "listens") {
		t.Errorf("the answer is %+v", f)
	}
}
