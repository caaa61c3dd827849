//go:build !race

package proxy

import (
	"bufio"
	"io"
	"net"
	"testing"

	"weir/classifier"
)

// A traced, timed and recorded request costs two allocations: one for all of
// its strings, one for its timings.
func TestARequestCostsTwoAllocations(t *testing.T) {
	const ask = "POST /v2/models/whisper/infer?token=secret HTTP/1.1\r\nHost: asr\r\n" + parent + "User-Agent: me\r\nContent-Length: 5\r\n\r\nsound"
	answer := []byte("HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=0.1, preprocess;dur=0.1, h2d;dur=0.1;bytes=100, forward;dur=0.1;batch=3, d2h;dur=0.1, postprocess;dur=0.1\r\nContent-Length: 4\r\n\r\ntext")
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			if n < len(ask) || string(b[n-5:n]) != "sound" {
				t.Errorf("the server read a part of a request: %q", b[:n])
				return
			}
			_, _ = c.Write(answer)
		}
	})
	r := newRig(t, addr)
	sink := NewSink(16)
	r.Gate.Sink = sink.Put
	c := r.dial()
	question, got := []byte(ask), make([]byte, 64<<10)
	turn := func() {
		if _, err := c.Conn.Write(question); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c.Conn, got[:len(answer)]); err != nil {
			t.Fatal(err)
		}
		sink.drain(func(*classifier.Observation) {})
	}
	turn()
	if n := testing.AllocsPerRun(2000, turn); n > 2 {
		t.Errorf("%v allocations a request: want 2 at most", n)
	}
}
