package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Only one Upgrade to websocket is a tunnel: whoever hides another protocol
// beside it would talk to the server past the gate.
func TestNoOtherProtocolHidesBesideWebsocket(t *testing.T) {
	for name, fields := range map[string]string{
		"a field before": "Upgrade: h2c\r\nUpgrade: websocket\r\n",
		"a field after":  "Upgrade: websocket\r\nUpgrade: h2c\r\n",
		"in a list":      "Upgrade: websocket, h2c\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan string, 1)
			r := newRig(t, echoHeads(t, got))
			c := r.dial()
			c.send("GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n%s\r\n", fields)
			c.head()
			if head := <-got; strings.Contains(head, "pgrade") {
				t.Errorf("the server got %q", head)
			}
		})
	}
}

func TestOnlyTheProtocolAskedForIsSwitchedTo(t *testing.T) {
	for name, tc := range map[string]struct{ request, answer string }{
		"another protocol": {"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"},
		"no protocol":      {"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "HTTP/1.1 101 S\r\n\r\n"},
		"HTTP/1.0":         {"GET /ws HTTP/1.0\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := seen(t, tc.answer)
			r := newRig(t, addr)
			c := r.dial()
			c.send("%s", tc.request)
			if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 502 ") {
				t.Errorf("answered %q", head)
			}
			if o := r.record(0); o.Upgraded {
				t.Error("weir made a tunnel")
			}
		})
	}
}

// Health checks of old balancers come as HTTP/1.0 and without a Host; passed on
// as HTTP/1.1 they need one, or a strict server refuses them.
func TestARequestWithoutHostGetsTheServers(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) { fmt.Fprint(w, req.Host) }))
	c := r.dial()
	c.send("GET / HTTP/1.0\r\n\r\n")
	if got := c.rest(); !strings.HasPrefix(got, "HTTP/1.1 200 ") || !strings.HasSuffix(got, "\r\n\r\n"+r.address) {
		t.Errorf("answered %q", got)
	}
}

// Answers that two parsers could read differently go no further.
func TestAnswersInDoubtBecome502(t *testing.T) {
	for name, answer := range map[string]string{
		"NUL in the reason":           "HTTP/1.1 200 O\x00K\r\nContent-Length: 0\r\n\r\n",
		"ESC in the reason":           "HTTP/1.1 200 \x1b[31m\r\nContent-Length: 0\r\n\r\n",
		"bare CR in the reason":       "HTTP/1.1 200 OK\rX: y\r\nContent-Length: 0\r\n\r\n",
		"bare CR in a value":          "HTTP/1.1 200 OK\r\nX: y\rContent-Length: 9\r\nContent-Length: 0\r\n\r\n",
		"a folded field":              "HTTP/1.1 200 OK\r\nX: y\r\n Content-Length: 9\r\nContent-Length: 0\r\n\r\n",
		"space before the colon":      "HTTP/1.1 200 OK\r\nContent-Length : 9\r\nContent-Length: 0\r\n\r\n",
		"two statuses":                "HTTP/1.1 200200 OK\r\nContent-Length: 0\r\n\r\n",
		"a signed length":             "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
		"a list of lengths":           "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
		"identity":                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nhello",
		"chunked twice":               "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"status 099":                  "HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
		"an interim answer, broken":   "HTTP/1.1 103 OK\r\nX\x00: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
		"version 2":                   "HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
		"empty lines without an end":  "\r\n\r\n\r\n\r\n",
		"a chunked HTTP/1.0 with gap": "HTTP/1.0 200 OK\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := seen(t, answer)
			r := newRig(t, addr)
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			if got := c.rest(); !strings.HasPrefix(got, "HTTP/1.1 502 ") {
				t.Errorf("answered %q", got)
			}
		})
	}
}

// An interim answer has no body, whatever it says of one; a client that
// believed it would take the final answer for that body.
func TestAnInterimAnswerSaysNothingOfABody(t *testing.T) {
	for _, field := range []string{"Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"} {
		t.Run(field, func(t *testing.T) {
			addr, _ := seen(t, "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n"+field+"\r\n"+plainOK)
			r := newRig(t, addr)
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			c.expect("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + plainOK)
		})
	}
}

// A server whose framing is in doubt is not trusted with a second answer on
// the same connection.
func TestAnAnswerWithDoubtfulFramingIsTheLastOfItsConnection(t *testing.T) {
	for name, answer := range map[string]string{
		"length beside chunks": "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
		"chunks in HTTP/1.0":   "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr, _ := seen(t, answer)
			r := newRig(t, addr)
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			if got := c.rest(); got != "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nok\r\n0\r\n\r\n" {
				t.Errorf("answered %q", got)
			}
		})
	}
}

func TestTheHeadLimitHoldsAlsoBelowTheBuffersSize(t *testing.T) {
	const limit = 1 << 10
	addr, _ := seen(t, plainOK)
	r := newRig(t, addr, func(s *settings) { s.maxHeadSize = limit })
	fill := func(n int) string {
		head := "GET / HTTP/1.1\r\nHost: h\r\nX: "
		return head + strings.Repeat("a", n-len(head)-4) + "\r\n\r\n"
	}
	for n, want := range map[int]string{limit: "200", limit + 1: "431", 8 * limit: "431"} {
		c := r.dial()
		c.send("%s", fill(n))
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 "+want) {
			t.Errorf("a head of %d bytes: answered %q, want %s", n, head, want)
		}
	}
}

// Nothing that a client sends after a refusal may become a request.
func TestNothingAfterARefusalIsServed(t *testing.T) {
	for name, raw := range map[string]string{
		"a body that is not here yet": "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 90\r\n\r\n" + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
		"chunks":                      "POST /asr HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
		"a body that waits for 100":   "POST /asr HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n" + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
		"a bad head":                  "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx" + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHeld(t)
			r := newRig(t, h.addr)
			limited(1, 0, 0)(r)
			busy := r.dial()
			busy.send(post)
			<-h.came
			c := r.dial()
			c.send("%s", raw)
			if all := c.rest(); strings.Count(all, "HTTP/1.1 ") != 1 || !strings.Contains(all, "Connection: close\r\n") {
				t.Errorf("answered %q: want one refusal and a closed connection", all)
			}
			if len(h.came) != 0 {
				t.Error("the server got what the client hid behind the refused request")
			}
		})
	}
}

// Many small fields are as large as few large ones, and cost the same.
func TestManyFieldsPassWithinTheLimit(t *testing.T) {
	got := make(chan string, 1)
	r := newRig(t, echoHeads(t, got))
	c := r.dial()
	fields := strings.Repeat("a:\r\n", 10_000)
	c.send("GET / HTTP/1.1\r\nHost: h\r\n%s\r\n", fields)
	c.expect(plainOK)
	if head := <-got; strings.Count(head, "\r\na:\r\n")+strings.Count(head, "\r\na:\r\na:") < 10_000/2 {
		t.Error("fields were lost")
	}
}

// A flood of interim answers is passed on as it comes, and holds no memory.
func TestAFloodOfInterimAnswersPasses(t *testing.T) {
	const n = 10_000
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		w := bufio.NewWriter(c)
		for range n {
			fmt.Fprint(w, "HTTP/1.1 102 Processing\r\n\r\n")
		}
		fmt.Fprint(w, plainOK)
		_ = w.Flush()
		_, _ = io.Copy(io.Discard, br)
	}))
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	for range n {
		c.expect("HTTP/1.1 102 Processing\r\n\r\n")
	}
	c.expect(plainOK)
}

// A reader that grew for a large head must hand over every byte that it read
// ahead: requests behind that head are requests too, also where one of them
// begins just behind the full reader.
func TestRequestsBehindALargeHeadAreServed(t *testing.T) {
	const behind, limit = 400, 64 << 10
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Length", "4")
		fmt.Fprint(w, req.URL.Path)
	}), func(s *settings) { s.maxHeadSize = limit })
	request := func(n int) string { return fmt.Sprintf("GET /%03d HTTP/1.1\r\nHost: h\r\n\r\n", n) }
	all := "GET /big HTTP/1.1\r\nHost: h\r\nX: "
	all += strings.Repeat("a", limit-50*len(request(0))-len(all)-4) + "\r\n\r\n"
	first := len(all) - 5<<10
	for n := range behind {
		all += request(n)
	}
	c := r.dial()
	c.send("%s", all[:first])
	time.Sleep(20 * time.Millisecond) // so that weir asks for more when its reader is nearly full
	c.send("%s", all[first:])
	c.head()
	c.expect("/big")
	for n := range behind {
		c.head()
		c.expect(fmt.Sprintf("/%03d", n))
	}
}
