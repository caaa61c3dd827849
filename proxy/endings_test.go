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

// hangUp closes a connection so that its peer sees a reset.
func hangUp(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// The server's work on a request ends with the server's connection; a client
// that takes its time to read the error must not keep others waiting.
func TestAClientThatDawdlesOverAnErrorHoldsNoPlace(t *testing.T) {
	r := newRig(t, script(t, func(n int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		if n > 0 {
			fmt.Fprint(c, plainOK)
		}
	}))
	limited(1, 5, 0)(r)
	dawdler := r.dial()
	dawdler.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhalf")
	if head := dawdler.head(); !strings.HasPrefix(head, "HTTP/1.1 502 ") {
		t.Fatalf("answered %q", head)
	}
	c := r.dial() // while weir still lingers for the first
	began := time.Now()
	c.send("GET /asr HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect(plainOK)
	if d := time.Since(began); d > lingerTime/2 {
		t.Errorf("the next request waited %v for a client that had its answer", d)
	}
}

// An answer that ends with the connection is whole when the connection ends
// well; a client that is still sending must not take a half for it.
func TestABrokenAnswerWithoutALengthEndsInAReset(t *testing.T) {
	for name, request := range map[string]string{
		"after the upload":  "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody",
		"during the upload": "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhalf",
		"HTTP/1.0, chunks":  "GET /chunks HTTP/1.0\r\nHost: h\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan bool)
			r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
				head, _ := readHeadRaw(br)
				if strings.Contains(head, "/chunks") {
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
				} else {
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\nhalf")
				}
				<-got
				hangUp(c)
			}))
			c := r.dial()
			c.send("%s", request)
			c.head()
			c.expect("half")
			close(got)
			if rest, err := io.ReadAll(c.Reader); err == nil {
				t.Errorf("the client took half an answer for a whole one (then %q)", rest)
			}
			if o := r.record(0); o.Outcome != classifier.Failed || o.Error != "server_reset" {
				t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
			}
		})
	}
}

// Where the framing tells that an answer broke off, the client gets all that
// came, as it would without weir: no reset may throw it away.
func TestWhatCameOfABrokenAnswerReachesTheClient(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		head, _ := readHeadRaw(br)
		answer, _, _ := strings.Cut(head, "traceparent")
		_, answer, _ = strings.Cut(answer, "Answer: ")
		fmt.Fprint(c, strings.NewReplacer("|", "\r\n").Replace(strings.TrimSpace(answer)))
	}))
	for n, answer := range []string{
		"HTTP/1.1 200 OK|Content-Length: 100||half",
		"HTTP/1.1 200 OK|Transfer-Encoding: chunked||4|half|",
	} {
		c := r.dial()
		c.send("GET /asr HTTP/1.1\r\nHost: h\r\nAnswer: %s\r\n\r\n", answer)
		r.record(n) // all is over before the client reads
		got, err := io.ReadAll(c.Reader)
		if want := strings.ReplaceAll(answer, "|", "\r\n"); err != nil || string(got) != want {
			t.Errorf("the client got %q, %v: want %q and the end", got, err, want)
		}
	}
}

// The last answer must not be lost to a reset because the client sent more
// than weir will read.
func TestAnAnswerSurvivesWhatTheClientSentAfterIt(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
	}))
	for range 50 {
		c := r.dial()
		c.send("GET /asr HTTP/1.1\r\nHost: h\r\n\r\n")
		c.send("POST /next HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", 64<<10, strings.Repeat("x", 64<<10))
		got, err := io.ReadAll(c.Reader)
		if err != nil || string(got) != "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok" {
			t.Fatalf("the client got %q, %v", got, err)
		}
		c.Close()
	}
}

// What kind of request came before must not decide whether a refusal has a body.
func TestARefusalAfterHEADHasItsBody(t *testing.T) {
	addr, _ := seen(t, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
	r := newRig(t, addr)
	c := r.dial()
	c.send("HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.head()
	c.send("GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 400 ") {
		t.Fatalf("answered %q", head)
	}
	if body := c.rest(); !strings.Contains(body, "2 Host fields") {
		t.Errorf("the refusal's body is %q", body)
	}
	c = r.dial()
	c.send("HEAD / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n")
	c.head()
	if body := c.rest(); body != "" {
		t.Errorf("HEAD was refused with the body %q", body)
	}
}
