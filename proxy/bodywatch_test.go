package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

func TestTheBodysTimingsAreReadAsItPassesUnchanged(t *testing.T) {
	next := make(chan struct{})
	first, second := "data: {\"text\":\"one\"}\n\n", "data: {\"usage\":{\"type\":\"duration\",\"seconds\":9},\"metrics\":{\"queue_time_ms\":0.001}}\n\ndata: [DONE]\n\n"
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		if _, err := readHeadRaw(br); err != nil {
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(first), first)
		<-next
		fmt.Fprintf(c, "%x\r\n%s\r\n0\r\n\r\n", len(second), second)
	})
	r := newRig(t, addr)
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: asr\r\nContent-Length: 0\r\n\r\n")
	c.head()
	c.expect(fmt.Sprintf("%x\r\n%s\r\n", len(first), first)) // before the second is sent
	close(next)
	c.expect(fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(second), second))
	o := r.record(0)
	if q, ok := o.In(classifier.StageQueue); !ok || q != time.Microsecond || o.AudioSeconds != 9 || o.Source != "body" {
		t.Errorf("%+v", o)
	}
}

func TestLargeBodiesPassWholeAndAreReadAtTheirEnd(t *testing.T) {
	body := `{"text":"` + strings.Repeat("and so on ", 300_000) + `","usage":{"type":"duration","seconds":9}}`
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		for {
			if _, err := readHeadRaw(br); err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
	})
	r := newRig(t, addr)
	c := r.dial()
	for i := range 2 {
		c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
		c.head()
		got := make([]byte, len(body))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != body {
			t.Fatalf("another body came (%v)", err)
		}
		if o := r.record(i); o.AudioSeconds != 9 {
			t.Errorf("audio %v", o.AudioSeconds)
		}
	}
}
