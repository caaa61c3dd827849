package proxy

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// echoHeads answers each request with 200 and keeps what it was sent.
func echoHeads(t *testing.T, got chan<- string) string {
	return script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			head, err := readHeadRaw(r)
			if err != nil {
				return
			}
			body := ""
			lower := strings.ToLower(head)
			switch {
			case strings.Contains(lower, "transfer-encoding: chunked"):
				for !strings.HasSuffix(body, "0\r\n\r\n") && !strings.HasSuffix(body, ": 1\r\n\r\n") {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					body += line
				}
			case strings.Contains(lower, "content-length:"):
				var n int
				_, _ = fmt.Sscanf(lower[strings.Index(lower, "content-length:"):], "content-length: %d", &n)
				b := make([]byte, n)
				if _, err := readFull(r, b); err != nil {
					return
				}
				body = string(b)
			}
			got <- head + body
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
}

func readFull(r *bufio.Reader, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = r.Read(b[n:])
		n += m
	}
	return n, err
}

// Requests that two parsers could read differently are refused and the
// connection closed; the server sees nothing of them, or no complete message.
func TestRequestsInDoubtAreRefused(t *testing.T) {
	b, err := os.ReadFile("testdata/requests.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct{ Name, Raw, Want string }
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	for _, tc := range cases {
		t.Run(tc.Name, func(t *testing.T) {
			got := make(chan string, 8)
			r := newRig(t, echoHeads(t, got))
			c := r.dial()
			if _, err := c.Conn.Write([]byte(tc.Raw)); err != nil {
				t.Fatal(err)
			}
			head := c.head()
			if tc.Want == "forward" {
				if !strings.HasPrefix(head, "HTTP/1.1 200 OK\r\n") {
					t.Fatalf("answered %q, want the server's 200", head)
				}
				t.Logf("server got %q", <-got)
				return
			}
			if !strings.HasPrefix(head, "HTTP/1.1 "+tc.Want) || !strings.Contains(head, "Connection: close\r\n") {
				t.Fatalf("answered %q, want %s and close", head, tc.Want)
			}
			body := c.rest()
			if strings.Contains(body, "HTTP/1.1 2") {
				t.Fatalf("something was answered after the refusal: %q", body)
			}
			select {
			case head := <-got:
				t.Fatalf("the server got a complete request: %q", head)
			default:
			}
		})
	}
}

func TestHeadsPassUnchanged(t *testing.T) {
	tests := []struct{ name, in, out string }{
		{"case, order, duplicates, white space and empty values stay",
			"POST //a/%2F../b;c?x=%20+y HTTP/1.1\r\nx-b: 1\r\nHost: HOST.Example:8080\r\nX-A:  two \t\r\nX-Empty:\r\nContent-Type: a/b\r\ncontent-type: c/d\r\nCookie: a\r\nCookie: b\r\nContent-Length: 2\r\n\r\nhi",
			"POST //a/%2F../b;c?x=%20+y HTTP/1.1\r\nx-b: 1\r\nHost: HOST.Example:8080\r\nX-A:  two \t\r\nX-Empty:\r\nContent-Type: a/b\r\ncontent-type: c/d\r\nCookie: a\r\nCookie: b\r\nContent-Length: 2\r\n"},
		{"nothing is added to a bare request", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\n"},
		{"hop-by-hop fields stay behind",
			"GET / HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\nProxy-Connection: x\r\nX-Private: 1\r\nX-Public: 1\r\nTE: trailers, deflate\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: h\r\nX-Public: 1\r\nTE: trailers\r\n"},
		{"an upgrade to h2c is no upgrade",
			"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: h\r\n"},
		{"a close is the client's own", "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\n"},
		{"absolute form becomes origin form", "GET http://h/a?b HTTP/1.1\r\nHost: h\r\n\r\n", "GET /a?b HTTP/1.1\r\nHost: h\r\n"},
		{"Expect goes to the server, in any case", "POST / HTTP/1.1\r\nHost: h\r\nexpect: 100-Continue\r\nContent-Length: 2\r\n\r\nhi", "POST / HTTP/1.1\r\nHost: h\r\nexpect: 100-Continue\r\nContent-Length: 2\r\n"},
		{"HTTP/1.0 becomes HTTP/1.1", "GET / HTTP/1.0\r\nHost: h\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\n"},
		{"framing is written anew", "POST / HTTP/1.1\r\nHost: h\r\nCONTENT-length:   002\r\n\r\nhi", "POST / HTTP/1.1\r\nHost: h\r\nCONTENT-length: 2\r\n"},
		{"the caller's traceparent is replaced", "GET / HTTP/1.1\r\nHost: h\r\nTraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=b\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\ntracestate: a=b\r\n"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got := make(chan string, 1)
			r := newRig(t, echoHeads(t, got))
			c := r.dial()
			c.send("%s", tc.in)
			c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n")
			head, _, _ := strings.Cut(<-got, "traceparent: 00-")
			if head != tc.out {
				t.Errorf("the server got\n%q, want\n%q", head, tc.out)
			}
		})
	}
}

func TestALargeHeadPassesAndATooLargeOneIsRefused(t *testing.T) {
	got := make(chan string, 1)
	r := newRig(t, echoHeads(t, got))
	c := r.dial()
	big := strings.Repeat("a", 40<<10)
	c.send("GET / HTTP/1.1\r\nHost: h\r\nX: %s\r\n\r\n", big)
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	if head := <-got; !strings.Contains(head, big) {
		t.Error("the field was cut")
	}
	c = r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\nX: %s\r\n\r\n", strings.Repeat(big, 2))
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 431 ") {
		t.Errorf("answered %q, want 431", head)
	}
}

// An attacker's endless chunk extension must not be swallowed.
func TestAnEndlessChunkExtensionIsRefused(t *testing.T) {
	r := newRig(t, echoHeads(t, make(chan string, 1)))
	c := r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5;x=%s", strings.Repeat("y", 8<<10))
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 400 ") {
		t.Errorf("answered %q, want 400", head)
	}
}

func TestPipelinedRequestsAreAnsweredInOrderAsTheyAreReady(t *testing.T) {
	release := make(chan bool)
	addr := script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for n := 0; ; n++ {
			if _, err := readHeadRaw(r); err != nil {
				return
			}
			if n == 1 {
				<-release
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d", n)
		}
	})
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET /0 HTTP/1.1\r\nHost: h\r\n\r\nGET /1 HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n0") // before the second is done
	close(release)
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1")
}

func TestASlowHeadIsGivenUp(t *testing.T) {
	r := newRig(t, "127.0.0.1:1", func(s *settings) { s.headTimeout = 50 * time.Millisecond })
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHo")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 408 ") {
		t.Errorf("answered %q, want 408", head)
	}
	silent := r.dial()
	if got := silent.rest(); got != "" && !strings.HasPrefix(got, "HTTP/1.1 408 ") {
		t.Errorf("a silent client got %q", got)
	}
}
