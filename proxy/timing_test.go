package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"weir/classifier"
	"weir/tracing"
)

const parent = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"

// seen is what a server saw of one request.
func seen(t *testing.T, answer string) (addr string, heads chan string) {
	heads = make(chan string, 10)
	return script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for {
			h, err := readHeadRaw(br)
			if err != nil {
				return
			}
			heads <- h
			_, _ = io.WriteString(c, answer)
		}
	}), heads
}

const plainOK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

func TestTheServerGetsTheTraceWithWeirsOwnSpan(t *testing.T) {
	addr, heads := seen(t, plainOK)
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n%stracestate: a=1\r\n\r\n", parent)
	h := <-heads
	o := r.record(0)
	want := fmt.Sprintf("traceparent: 00-0af7651916cd43dd8448eb211c80319c-%x-01\r\n", o.SpanID)
	if !strings.Contains(h, want) || !strings.Contains(h, "tracestate: a=1\r\n") || strings.Contains(h, "b7ad6b7169203331") {
		t.Errorf("the server saw %q: want %q", h, want)
	}
	if fmt.Sprintf("%x", o.ParentID) != "b7ad6b7169203331" || !o.Sampled {
		t.Errorf("the record is %+v", o)
	}
}

func TestATracestateOnlyGoesOnWithItsTrace(t *testing.T) {
	for name, c := range map[string]struct {
		sent  string
		trust bool
		want  []string // of the server's head
		never string
	}{
		"two fields":           {parent + "tracestate: a=1\r\ntracestate: b=2\r\n", true, []string{"tracestate: a=1\r\n", "tracestate: b=2\r\n", "0af7651916cd43dd8448eb211c80319c"}, "nothing"},
		"no parent":            {"tracestate: a=1\r\n", true, []string{"traceparent: "}, "tracestate"},
		"a malformed parent":   {"traceparent: 00-xyz\r\ntracestate: a=1\r\n", true, []string{"traceparent: 00-"}, "tracestate"},
		"two parents":          {parent + parent + "tracestate: a=1\r\n", true, []string{"traceparent: 00-"}, "0af7651916cd43dd8448eb211c80319c"},
		"a parent not trusted": {parent + "tracestate: a=1\r\n", false, []string{"traceparent: 00-"}, "tracestate"},
	} {
		t.Run(name, func(t *testing.T) {
			addr, heads := seen(t, plainOK)
			r := newRig(t, addr)
			var err error
			if r.Sampler, err = tracing.NewSampler("", "", c.trust); err != nil {
				t.Fatal(err)
			}
			r.dial().send("GET /asr HTTP/1.1\r\nHost: asr\r\n%s\r\n", c.sent)
			h := <-heads
			for _, want := range c.want {
				if !strings.Contains(h, want) {
					t.Errorf("no %q in %q", want, h)
				}
			}
			if strings.Contains(h, c.never) || strings.Count(h, "traceparent") != 1 {
				t.Errorf("%q is in %q, or traceparent is not there once", c.never, h)
			}
		})
	}
}

// Starting a trace, deciding not to keep it and saying so would keep the
// server from tracing on its own.
func TestNothingIsInjectedWhereNothingIsTraced(t *testing.T) {
	addr, heads := seen(t, plainOK)
	r := newRig(t, addr)
	r.Sampler = samplerOf(t, "always_off")
	c := r.dial()
	c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
	if h := <-heads; strings.Contains(h, "traceparent") {
		t.Errorf("the server saw %q", h)
	}
}

func TestXRequestStartIsReadAndAddedWhereWanted(t *testing.T) {
	addr, heads := seen(t, plainOK)
	r := newRig(t, addr, func(s *settings) { s.requestStart = true })
	c := r.dial()
	before := time.Now()
	c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
	m := regexp.MustCompile(`\r\nX-Request-Start: t=(\d+)\.(\d{3})\r\n`).FindStringSubmatch(<-heads)
	if m == nil {
		t.Fatal("no X-Request-Start")
	}
	var ms int64
	_, _ = fmt.Sscan(m[1]+m[2], &ms)
	if d := ms - before.UnixMilli(); d < -1 || d > 10_000 {
		t.Errorf("the stamp is %d ms off", d)
	}
	c.head()
	c.expect("ok")
	stamp := fmt.Sprintf("X-Request-Start: t=%.3f\r\n", float64(time.Now().Add(-2*time.Second).UnixMilli())/1000)
	c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n%s\r\n", stamp)
	if h := <-heads; strings.Count(h, "X-Request-Start") != 1 || !strings.Contains(h, stamp) {
		t.Errorf("the server saw %q", h)
	}
	if o := r.record(1); o.Before < 1900*time.Millisecond || o.Before > time.Minute {
		t.Errorf("waited %v before weir: want 2s", o.Before)
	}
}

func TestTheClientIsToldTheTimingsOnlyWhereWanted(t *testing.T) {
	answer := "HTTP/1.1 200 OK\r\nServer-Timing: h2d;dur=0.001, forward;dur=0.002;batch=3\r\nContent-Length: 2\r\n\r\nok"
	for _, on := range []bool{false, true} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			addr, _ := seen(t, answer)
			r := newRig(t, addr, func(s *settings) { s.serverTiming = on })
			c := r.dial()
			c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
			h := c.head()
			if !strings.Contains(h, "Server-Timing: h2d;dur=0.001, forward;dur=0.002;batch=3\r\n") {
				t.Errorf("the server's own header changed: %q", h)
			}
			if got := strings.Contains(h, "Server-Timing: weir-queue;dur="); got != on {
				t.Errorf("weir's own Server-Timing: %v, want %v in %q", got, on, h)
			}
			if got := strings.Contains(h, "Proxy-Status: weir; received-status=200\r\n"); got != on {
				t.Errorf("Proxy-Status: %v, want %v in %q", got, on, h)
			}
		})
	}
}

func TestAnErrorSaysWhoseItIs(t *testing.T) {
	addr := script(t, func(_ int, c net.Conn, _ *bufio.Reader) {})
	r := newRig(t, addr, func(s *settings) { s.serverTiming = true })
	c := r.dial()
	c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
	if h := c.head(); !strings.Contains(h, "Proxy-Status: weir; error=connection_terminated; details=server_reset\r\n") {
		t.Errorf("nothing tells whose error it is: %q", h)
	}
}

func TestTimingsComeFromHeadersAndTrailers(t *testing.T) {
	for name, answer := range map[string]string{
		"header":  "HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=0.01, forward;dur=0.02;batch=3;seq=99\r\nContent-Length: 2\r\n\r\nok",
		"trailer": "HTTP/1.1 200 OK\r\nTrailer: Server-Timing\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nServer-Timing: queue;dur=0.01, forward;dur=0.02;batch=3;seq=99\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := seen(t, answer)
			r := newRig(t, addr)
			c := r.dial()
			c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
			o := r.record(0)
			d, ok := o.In(classifier.StageForward)
			if !ok || d != 20*time.Microsecond || o.BatchSize != 3 || o.SeqLen != 99 || o.Source != name {
				t.Errorf("the record is %+v", o)
			}
		})
	}
}

// The ledger of one request adds up, end to end, to the wall time, and each
// line is near what really passed there.
func TestTheLedgerOfOneRequestAddsUp(t *testing.T) {
	const slow = 30 * time.Millisecond
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(2 * slow) // what the server tells of, and as much that it does not
		w.Header().Set("Server-Timing", "preprocess;dur=10, forward;dur=20")
		_, _ = io.WriteString(w, "begin")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(slow)
		_, _ = io.WriteString(w, "end")
	})
	r := newRig(t, server)
	limited(1, 9, 0)(r)
	first := r.dial()
	first.send("POST /asr HTTP/1.1\r\nHost: asr\r\nContent-Length: 10\r\n\r\nsound")
	r.eventually(func() bool { return r.Gate.State().Inflight == 1 }, "the first is in")
	second := r.dial()
	second.send("POST /asr HTTP/1.1\r\nHost: asr\r\nContent-Length: 5\r\nX-Request-Start: t=%.3f\r\n\r\nsound", float64(time.Now().Add(-time.Second).UnixMilli())/1000)
	r.waiting(1)
	time.Sleep(slow)
	first.send("sound")
	first.rest2(t)
	second.rest2(t)
	for n := range 2 {
		o := r.record(n)
		l := o.Ledger()
		if l.Wall() != o.Before+o.Total() {
			t.Errorf("the lines of %+v add up to %v: the wall time is %v", l, l.Wall(), o.Before+o.Total())
		}
		if l.Stages[classifier.StageForward] != 20*time.Millisecond || l.Stream < slow || l.Unattributed < slow-5*time.Millisecond || l.Overlap != 0 {
			t.Errorf("request %d: %+v", n, l)
		}
		if l.Overhead <= 0 || l.Overhead > slow {
			t.Errorf("request %d: weir's own work took %v", n, l.Overhead)
		}
	}
	if o := r.record(0); o.Ledger().Upload < slow || o.Ledger().Queue > slow/2 {
		t.Errorf("the upload took %v, the queue %v", o.Ledger().Upload, o.Ledger().Queue)
	}
	if o := r.record(1); o.Ledger().Queue < 4*slow-5*time.Millisecond || o.Ledger().Upload > slow || o.Before < time.Second {
		t.Errorf("the second waited %v, and %v before weir", o.Ledger().Queue, o.Before)
	}
}

// rest2 reads one chunked answer.
func (c *client) rest2(t *testing.T) {
	t.Helper()
	r, err := http.ReadResponse(c.Reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r.Body); err != nil || string(b) != "beginend" {
		t.Errorf("read %q, %v", b, err)
	}
}

func TestSecretsAreRedacted(t *testing.T) {
	addr, heads := seen(t, plainOK)
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET /asr?token=s3cret&s3cret&x=&model=a HTTP/1.1\r\nHost: asr\r\nAuthorization: Bearer s3cret\r\nCookie: s3cret\r\n\r\n")
	if h := <-heads; !strings.HasPrefix(h, "GET /asr?token=s3cret&s3cret&x=&model=a HTTP/1.1\r\n") {
		t.Errorf("the server saw %q", h)
	}
	o := r.record(0)
	if s := fmt.Sprintf("%+v", o); strings.Contains(s, "s3cret") || o.Target != "/asr?token=REDACTED&=REDACTED&x=REDACTED&model=REDACTED" {
		t.Errorf("the record is %s", s)
	}
}
