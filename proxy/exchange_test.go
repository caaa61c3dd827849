package proxy

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

// Both directions of one request must flow at once: a server may answer each
// chunk before it sees the next.
func TestTheTwoBodiesOfOneRequestFlowAtOnce(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		buf := make([]byte, 64)
		for {
			n, err := req.Body.Read(buf)
			_, _ = w.Write(bytes.ToUpper(buf[:n]))
			_ = rc.Flush()
			if err != nil {
				return
			}
		}
	}))
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
	c.send("4\r\nping\r\n")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200") {
		t.Fatal(head)
	}
	c.expect("4\r\nPING\r\n")
	for i := range 3 {
		c.send("2\r\na%d\r\n", i)
		c.expect(fmt.Sprintf("2\r\nA%d\r\n", i))
	}
	c.send("0\r\n\r\n")
	c.expect("0\r\n\r\n")
	o := r.record(0)
	if o.Outcome != classifier.OK || o.BytesIn != 10 || o.BytesOut != 10 || !o.Overlapped() {
		t.Errorf("record %+v", o)
	}
}

// The head must reach the server before any byte of the body comes, and each
// piece of an answer the client as it is written.
func TestNothingIsHeldBack(t *testing.T) {
	next := make(chan bool)
	addr := script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		next <- true
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
		for i := range 3 {
			<-next
			fmt.Fprintf(c, "data: %d\n\n", i)
		}
	})
	r := newRig(t, addr)
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n")
	<-next // the server has the head
	if head := c.head(); !strings.Contains(head, "text/event-stream") {
		t.Fatal(head)
	}
	for i := range 3 {
		next <- true
		c.expect(fmt.Sprintf("data: %d\n\n", i))
	}
	if rest := c.rest(); rest != "" {
		t.Errorf("then %q", rest)
	}
}

// An answer that comes before the upload has ended reaches the client, also
// when the server then closes; 64 MiB are still to be sent.
func TestAnEarlyAnswerReachesTheClient(t *testing.T) {
	for _, how := range []string{"closes", "stays"} {
		t.Run("and the server "+how, func(t *testing.T) {
			addr := script(t, func(_ int, c net.Conn, r *bufio.Reader) {
				_, _ = readHeadRaw(r)
				fmt.Fprintf(c, "HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nbig\n")
				if how == "stays" {
					_, _ = io.Copy(io.Discard, r)
				}
			})
			r := newRig(t, addr)
			for range 20 {
				c := r.dial()
				c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", 64<<20)
				go func() { // as most clients do: write on, whatever happens
					block := make([]byte, 64<<10)
					for range 1024 {
						if _, err := c.Conn.Write(block); err != nil {
							return
						}
					}
				}()
				if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 413 Content Too Large\r\n") {
					t.Fatal(head)
				}
				c.expect("big\n")
				c.Close()
			}
		})
	}
}

func TestAnEarlyAnswerIsNotDelayedByAClientThatSendsNothing(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		fmt.Fprintf(c, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
		_, _ = io.Copy(io.Discard, r)
	}))
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n")
	head := c.head()
	if !strings.HasPrefix(head, "HTTP/1.1 401") || !strings.Contains(head, "Connection: close\r\n") {
		t.Errorf("got %q", head)
	}
	c.rest() // closes within the linger time
}

// A client that leaves must be noticed while the server works, however it
// leaves, and the server be told by its connection closing.
func TestAClientThatLeavesEndsTheServersWork(t *testing.T) {
	leave := map[string]func(c *client){
		"with a FIN":   func(c *client) { _ = c.Conn.(*net.TCPConn).CloseWrite() },
		"with a reset": func(c *client) { _ = c.Conn.(*net.TCPConn).SetLinger(0); c.Close() },
		"after more pipelined bytes": func(c *client) {
			c.send("GET /next HTTP/1.1\r\nHost: h\r\n\r\n")
			c.Close()
		},
		"in the middle of its body": func(c *client) { c.Close() },
	}
	for how, do := range leave {
		t.Run(how, func(t *testing.T) {
			got, closed := make(chan bool), make(chan error, 1)
			r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
				_, _ = readHeadRaw(r)
				got <- true
				_, err := io.Copy(io.Discard, r)
				closed <- err
			}))
			c := r.dial()
			length := 0
			if strings.Contains(how, "middle") {
				length = 100
			}
			c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", length)
			<-got
			began := time.Now()
			do(c)
			<-closed
			t.Logf("the server knew after %v", time.Since(began))
			if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" {
				t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
			}
			if s := r.Gate.State(); s.Abandoned != 1 || s.Inflight != 0 {
				t.Errorf("gate %+v", s)
			}
		})
	}
}

// Even a server that does not read lets the client's leaving be seen.
func TestAClientThatLeavesIsSeenWhileTheServerReadsNothing(t *testing.T) {
	got, proceed := make(chan bool), make(chan bool)
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		got <- true
		<-proceed
	}))
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", 64<<20)
	<-got
	go func() { _, _ = c.Conn.Write(make([]byte, 64<<20)) }()
	r.eventually(func() bool { return r.Gate.State().Inflight == 1 }, "admitted")
	_ = c.Conn.(*net.TCPConn).SetLinger(0)
	c.Close()
	if o := r.record(0); o.Outcome != classifier.Canceled {
		t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
	}
	close(proceed)
}

func TestAHalfClosedClientIsServedWhereThatIsWanted(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		time.Sleep(20 * time.Millisecond) // the FIN is on its way meanwhile
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	}), func(s *settings) { s.keepHalfClosed = true })
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
}

// A truncated upload is never whole for the server, nor a truncated answer
// for the client.
func TestATruncatedAnswerIsNotPassedOffAsWhole(t *testing.T) {
	answers := map[string]string{
		"by length":  "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
		"in chunks":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
		"bad chunks": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n0\r\n\r\n",
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
				_, _ = readHeadRaw(r)
				fmt.Fprint(c, answer)
			}))
			resp, err := http.Get("http://" + r.addr + "/")
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			if err == nil {
				t.Error("the client took half an answer for a whole one")
			}
			if o := r.record(0); o.Outcome != classifier.Failed || o.Error != "server_reset" && o.Error != "bad_response" {
				t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
			}
		})
	}
}

func TestBadAnswersBecome502WithoutTheServersBytes(t *testing.T) {
	for name, answer := range map[string]string{
		"no HTTP":            "SECRET garbage\r\n\r\n",
		"bare LF":            "HTTP/1.1 200 OK\nX: SECRET\n\n",
		"two lengths":        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\nX: SECRET\r\n\r\nx",
		"unknown coding":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: SECRET\r\n\r\n",
		"101 out of the sky": "HTTP/1.1 101 Switching\r\nUpgrade: SECRET\r\nConnection: upgrade\r\n\r\n",
		"nothing":            "",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
				_, _ = readHeadRaw(r)
				fmt.Fprint(c, answer)
			}))
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			all := c.rest()
			if !strings.HasPrefix(all, "HTTP/1.1 502 ") || strings.Contains(all, "SECRET") {
				t.Errorf("answered %q", all)
			}
		})
	}
}

func TestAnswersPassUnchanged(t *testing.T) {
	tests := []struct{ name, request, answer, want string }{
		{"fields, case, order, reason", "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
			"HTTP/1.1 200 Very Fine\r\nx-a: 1\r\nSet-Cookie: a\r\nDate: today\r\nset-cookie: b\r\nContent-Length: 2\r\nX-Last:\r\n\r\nok",
			"HTTP/1.1 200 Very Fine\r\nx-a: 1\r\nSet-Cookie: a\r\nDate: today\r\nset-cookie: b\r\nContent-Length: 2\r\nX-Last:\r\n\r\nok"},
		{"no reason", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n"},
		{"HEAD keeps its length", "HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"},
		{"HEAD keeps its coding", "HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"},
		{"204", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", "HTTP/1.1 204 No Content\r\nX: y\r\n\r\n"},
		{"304 with a length", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n"},
		{"interim answers in order", "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
			"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
			"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"},
		{"no interim answer for HTTP/1.0", "GET / HTTP/1.0\r\n\r\n", "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"},
		{"no chunks for HTTP/1.0", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n2\r\nok\r\n0\r\nX: 1\r\n\r\n", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok"},
		{"keep-alive for HTTP/1.0", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"},
		{"an HTTP/1.0 answer", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"},
		{"to the end of the connection", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\nthat is all", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthat is all"},
		{"chunks and trailers", "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
			"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\nok\r\n0\r\nServer-Timing: a;dur=1\r\nContent-Length: 5\r\nX-T: 1\r\n\r\n",
			"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nServer-Timing: a;dur=1\r\nX-T: 1\r\n\r\n"},
		{"a length beside chunks is dropped", "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
			"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nok\r\n0\r\n\r\n"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
				_, _ = readHeadRaw(r)
				fmt.Fprint(c, tc.answer)
			}))
			c := r.dial()
			c.send("%s", tc.request)
			if got := c.rest(); got != tc.want {
				t.Errorf("the client got\n%q, want\n%q", got, tc.want)
			}
		})
	}
}

func TestExpect100ContinueIsBetweenClientAndServer(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		fmt.Fprintf(c, "HTTP/1.1 100 Continue\r\n\r\n")
		b := make([]byte, 5)
		_, _ = io.ReadFull(r, b)
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n%s", b)
	}))
	c := r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
	c.expect("HTTP/1.1 100 Continue\r\n\r\n") // nobody sent a byte of the body yet
	c.send("hello")
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
}

func TestRequestTrailersReachTheServer(t *testing.T) {
	got := make(chan http.Header, 1)
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		got <- req.Trailer
	}))
	c := r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 7\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n")
	if tr := <-got; tr.Get("X-Sum") != "7" || tr.Get("X-Forwarded-For") != "" {
		t.Errorf("trailers %v", tr)
	}
}

func TestLargeBodiesPassByteForByte(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		h := sha256.New()
		n, _ := io.Copy(h, req.Body)
		w.Header().Set("X-Sum", fmt.Sprintf("%x", h.Sum(nil)))
		w.Header().Set("X-Size", fmt.Sprint(n))
		rnd := rand.NewChaCha8([32]byte{1})
		_, _ = io.CopyN(w, rnd, n)
	}))
	const size = 8<<20 + 12345
	body := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(body)
	for _, chunked := range []bool{false, true} {
		var rd io.Reader = bytes.NewReader(body)
		if chunked {
			rd = io.MultiReader(rd)
		}
		resp, err := http.Post("http://"+r.addr+"/asr", "audio/wav", rd)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !bytes.Equal(got, body) || resp.Header.Get("X-Sum") != fmt.Sprintf("%x", sha256.Sum256(body)) {
			t.Fatalf("chunked %v: a body changed: %v, %d of %d bytes", chunked, err, len(got), size)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// Nothing is ever sent twice: a server that dies with a request in hand has
// seen it once.
func TestARequestArrivesOnceAtMost(t *testing.T) {
	var arrivals atomic.Int32
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for n := 0; ; n++ {
			head, err := readHeadRaw(r)
			if err != nil {
				return
			}
			if strings.Contains(head, "/die") {
				arrivals.Add(1)
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	}))
	for _, method := range []string{"GET", "PUT", "POST", "DELETE"} {
		arrivals.Store(0)
		c := r.dial()
		c.send("GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
		c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		c.send("%s /die HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n", method)
		c.rest()
		if n := arrivals.Load(); n != 1 {
			t.Errorf("%s arrived %d times", method, n)
		}
	}
}

// A server that closes idle connections costs no request.
func TestAnIdleCloseOfTheServerIsMirrored(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := readHeadRaw(r); err == nil {
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	}))
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if got := c.rest(); got != "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" { // rest ends with the close
		t.Errorf("got %q", got)
	}
}

// Bytes that nobody asked for must not become the next answer.
func TestUnaskedBytesOfTheServerAreNoAnswer(t *testing.T) {
	var conns atomic.Int32
	sent := make(chan bool, 2)
	r := newRig(t, script(t, func(n int, c net.Conn, r *bufio.Reader) {
		conns.Add(1)
		for {
			if _, err := readHeadRaw(r); err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			if n == 0 {
				time.Sleep(20 * time.Millisecond) // in a segment of its own
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
				sent <- true
			}
		}
	}))
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	<-sent
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	if n := conns.Load(); n != 2 {
		t.Errorf("%d connections to the server, want a second one", n)
	}
}

func TestATunnelCarriesBytesAndHalfClosesBothWays(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		head, _ := readHeadRaw(r)
		if !strings.Contains(head, "Upgrade: websocket\r\n") || !strings.Contains(head, "Connection: Upgrade\r\n") {
			t.Errorf("the server got %q", head)
		}
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\nglued")
		all, _ := io.ReadAll(r) // until the client's FIN
		fmt.Fprintf(c, "you said %s", all)
	}))
	c := r.dial()
	c.send("GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\nearly")
	c.expect("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n\r\nglued")
	c.send(" and late")
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	if got := c.rest(); got != "you said early and late" {
		t.Errorf("got %q", got)
	}
	if o := r.record(0); !o.Upgraded || o.Status != 101 || o.BytesIn != 14 {
		t.Errorf("record %+v", o)
	}
}

func TestATunnelEndsWithEitherSide(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = io.Copy(io.Discard, r)
	}))
	c := r.dial()
	c.send("GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	c.head()
	if s := r.Gate.State(); s.Inflight != 1 {
		t.Errorf("a tunnel must hold its place: %+v", s)
	}
	_ = c.Conn.(*net.TCPConn).SetLinger(0)
	c.Close()
	r.record(0)
	r.eventually(func() bool { return r.Gate.State().Inflight == 0 }, "place given back")
}

func TestAServerThatCannotBeReachedIsNamed(t *testing.T) {
	l, _ := net.Listen("tcp", "127.0.0.1:0")
	addr := l.Addr().String()
	l.Close()
	r := newRig(t, addr)
	c := r.dial()
	for range 2 { // the client's connection survives it
		c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")
		resp, err := http.ReadResponse(c.Reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != 502 || !strings.Contains(string(b), addr) || !strings.Contains(string(b), "server_unreachable") {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
	}
}

func TestIdleTimeoutsAreOfIdleness(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
	}), func(s *settings) { s.bodyTimeout = 300 * time.Millisecond })
	c := r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n")
	for range 10 { // ten times 100 ms: far longer than the timeout, never idle for so long
		time.Sleep(100 * time.Millisecond)
		c.send("x")
	}
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200") {
		t.Fatal(head)
	}
	c = r.dial()
	c.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nx")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 408") {
		t.Errorf("a stalled upload got %q", head)
	}
}

func TestAServerThatNeverAnswersTimesOutWhereThatIsWanted(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, r *bufio.Reader) { _, _ = io.Copy(io.Discard, r) }),
		func(s *settings) { s.responseTimeout = 50 * time.Millisecond })
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 504") {
		t.Errorf("got %q", head)
	}
}

func TestAUnixServer(t *testing.T) {
	path := t.TempDir() + "/s"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hi") })}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	r := newRig(t, path)
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
	if got := c.rest(); !strings.HasSuffix(got, "hi") {
		t.Errorf("got %q", got)
	}
}

func TestConnectionsBeyondTheLimitAreToldSo(t *testing.T) {
	r := newRig(t, "127.0.0.1:1", func(s *settings) { s.maxConns = 1 })
	first := r.dial()
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 1 }, "first connection")
	second := r.dial()
	second.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	head := second.head()
	if !strings.HasPrefix(head, "HTTP/1.1 503") || !strings.Contains(head, "Retry-After: ") {
		t.Errorf("got %q", head)
	}
	first.Close()
}

// A bug in one connection's goroutine must not end the process.
func TestAPanicEndsOneConnectionOnly(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {}))
	var once sync.Once
	sink := r.Gate.Sink
	r.Gate.Sink = func(o *classifier.Observation) {
		once.Do(func() { panic("a bug") })
		sink(o)
	}
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.rest() // ends, since the connection is closed
	c = r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200") {
		t.Errorf("got %q", head)
	}
	if s := r.Gate.State(); s.Inflight != 0 {
		t.Errorf("a place was lost: %+v", s)
	}
}

func TestShutdownLetsRequestsEndAndClosesIdleConnectionsAtOnce(t *testing.T) {
	release, got := make(chan bool), make(chan bool)
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/slow" {
			got <- true
			<-release
		}
	}))
	idle, never, slow := r.dial(), r.dial(), r.dial()
	idle.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	idle.head()
	slow.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
	<-got
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 3 }, "connections")
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(t.Context()) }()
	if s := idle.rest() + never.rest(); s != "" {
		t.Errorf("idle connections got %q", s)
	}
	close(release)
	if head := slow.head(); !strings.HasPrefix(head, "HTTP/1.1 200") || !strings.Contains(head, "Connection: close\r\n") {
		t.Errorf("the request in flight got %q", head)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What must hold for any client: the record's instants are in order.
func TestInstantsAreInOrder(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		time.Sleep(5 * time.Millisecond)
		fmt.Fprint(w, "text")
	}))
	c := r.dial()
	for n := range 3 {
		c.send("POST /asr?token=hunter2 HTTP/1.1\r\nHost: h\r\nUser-Agent: me/1\r\nContent-Length: 3\r\n\r\nabc")
		if _, err := http.ReadResponse(c.Reader, nil); err != nil {
			t.Fatal(err)
		}
		c.expect("text")
		o := r.record(n)
		if o.Enqueued.After(o.Dequeued) || o.Dequeued.After(o.Sent) || o.Sent.After(o.Responded) || o.Responded.After(o.Done) {
			t.Errorf("instants out of order: %+v", o)
		}
		if l := o.Ledger(); l.Wall() != o.Total() || o.Service() < 5*time.Millisecond {
			t.Errorf("ledger %+v is %v, total is %v", l, l.Wall(), o.Total())
		}
		if o.Method != "POST" || o.Target != "/asr?token=REDACTED" || o.Host != "h" || o.UserAgent != "me/1" {
			t.Errorf("described as %q %q %q %q", o.Method, o.Target, o.Host, o.UserAgent)
		}
	}
}
