package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

func TestTheServersLoadIsAskedForAndKeptFromClientsThatDidNotAsk(t *testing.T) {
	const load = "endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=3"
	heads := make(chan string, 10)
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for {
			h, err := readHeadRaw(br)
			if err != nil {
				return
			}
			heads <- h
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\n%s\r\nX-Other: 1\r\nTransfer-Encoding: chunked\r\nTrailer: endpoint-load-metrics\r\n\r\n2\r\nok\r\n0\r\n%s\r\nX-Last: 1\r\n\r\n", load, load)
		}
	})
	for _, c := range []struct {
		on, asks, sent, shown bool
	}{{false, false, false, true}, {true, false, true, false}, {true, true, true, true}, {false, true, true, true}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			r := newRig(t, addr, func(s *settings) { s.orca = c.on })
			cl := r.dial()
			ask := ""
			if c.asks {
				ask = "Endpoint-Load-Metrics-Format: text\r\n"
			}
			cl.send("GET /asr HTTP/1.1\r\nHost: asr\r\n%s\r\n", ask)
			h := cl.head()
			cl.expect("2\r\nok\r\n0\r\n")
			trailers, err := readHeadRaw(cl.Reader)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(strings.ToLower(<-heads), "endpoint-load-metrics-format: text"); (n == 1) != c.sent || n > 1 {
				t.Errorf("%+v: asked for %d times", c, n)
			}
			if got := strings.Contains(h, load); got != c.shown || strings.Contains(trailers, load) != c.shown || !strings.Contains(h, "X-Other: 1") || !strings.Contains(trailers, "X-Last: 1") {
				t.Errorf("%+v: the client got %q and %q", c, h, trailers)
			}
			if o := r.record(0); len(o.Load) != 1 || o.Load[0].Value != 3 {
				t.Errorf("%+v: load %+v", c, o.Load)
			}
		})
	}
}

func TestWhatTheAnswersSayOfTheServersQueueEntersTheReport(t *testing.T) {
	w := &watch{loads: make(map[string]*loadMean)}
	for _, v := range []float64{2, 4} {
		w.addLoad(&classifier.Observation{Class: "POST /asr", Load: []classifier.LoadMetric{{Name: "named_metrics.num_requests_waiting", Value: v}, {Name: "x", Value: 9}}})
	}
	r := classifier.Report{Class: "POST /asr"}
	w.fillLoad(&r)
	if r.Server == nil || r.Server.Waiting != (classifier.Gauge{Value: 3, OK: true}) {
		t.Errorf("%+v", r.Server)
	}
	again := classifier.Report{Class: "POST /asr"}
	if w.fillLoad(&again); again.Server != nil {
		t.Errorf("the window before counts again: %+v", again.Server)
	}
}

func TestImpossibleTimingsAreCountedAndToldOnceAMinute(t *testing.T) {
	var text bytes.Buffer
	var n atomic.Int64
	w := &watch{untrusted: &n, logger: slog.New(slog.NewTextHandler(io.MultiWriter(&text, t.Output()), nil))}
	at := time.Unix(1_800_000_000, 0)
	for _, after := range []time.Duration{0, time.Second, 59 * time.Second, 61 * time.Second} {
		w.distrust(&classifier.Observation{Done: at.Add(after), Timings: []classifier.Timing{{Name: "forward", Untrusted: true}, {Name: "queue"}}})
	}
	if lines := strings.Count(text.String(), "cannot be true"); n.Load() != 4 || lines != 2 {
		t.Errorf("%d counted, %d lines", n.Load(), lines)
	}
}
