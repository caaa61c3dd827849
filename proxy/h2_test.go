package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"weir/classifier"
)

// h2Client speaks HTTP/2 by prior knowledge.
func (r *rig) h2Client() *http.Client {
	t := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	t.Protocols.SetUnencryptedHTTP2(true)
	r.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 20 * time.Second}
}

func (r *rig) do(c *http.Client, method, target string, body io.Reader, change ...func(*http.Request)) (*http.Response, string) {
	r.Helper()
	req, err := http.NewRequest(method, "http://"+r.addr+target, body)
	if err != nil {
		r.Fatal(err)
	}
	for _, f := range change {
		f(req)
	}
	res, err := c.Do(req)
	if err != nil {
		r.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil {
		r.Fatalf("reading the answer: %v", err)
	}
	return res, string(b)
}

func TestHTTP2PassesToAServerOfHTTP1(t *testing.T) {
	var seen *http.Request
	var body []byte
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		seen = req
		body, _ = io.ReadAll(req.Body)
		w.Header()["Date"] = nil
		w.Header().Set("X-Answer", "1")
		w.Header().Set("Connection", "X-Private")
		w.Header().Set("X-Private", "1")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("Server-Timing", "gpu;dur=7")
		w.Header().Set("Trailer", "X-Announced")
		w.WriteHeader(201)
		_, _ = io.WriteString(w, "answer")
		w.Header().Set("X-Announced", "a")
		w.Header().Set(http.TrailerPrefix+"X-Late", "b")
		w.Header().Set(http.TrailerPrefix+"Set-Cookie", "c")
	}), func(s *settings) { s.requestStart = true })
	res, text := r.do(r.h2Client(), "POST", "//a/%2F../b;c?x=%20+y&token=s3cret", strings.NewReader("hello"), func(req *http.Request) {
		req.Header.Set("X-A", "1")
		req.Header.Add("X-A", "2")
		req.Header.Set("Te", "trailers")
		req.Header["User-Agent"] = []string{""}
		req.Host = "HOST.example:80"
		req.Trailer = http.Header{"X-Sum": {"z"}}
	})
	if res.ProtoMajor != 2 || res.StatusCode != 201 || text != "answer" || res.Header.Get("X-Answer") != "1" || res.Header.Get("X-Private")+res.Header.Get("Keep-Alive")+res.Header.Get("Date") != "" {
		t.Errorf("answered %v %v %q", res.Proto, res.Header, text)
	}
	if res.Trailer.Get("X-Announced") != "a" || res.Trailer.Get("X-Late") != "b" || res.Trailer.Get("Set-Cookie") != "" {
		t.Errorf("trailers %v", res.Trailer)
	}
	if seen.RequestURI != "//a/%2F../b;c?x=%20+y&token=s3cret" || seen.Host != "HOST.example:80" || string(body) != "hello" || seen.Proto != "HTTP/1.1" ||
		len(seen.Header["X-A"]) != 2 || seen.UserAgent() != "" || seen.Header.Get("Traceparent") == "" || !strings.HasPrefix(seen.Header.Get("X-Request-Start"), "t=1") || seen.Trailer.Get("X-Sum") != "z" {
		t.Errorf("the server saw %s %s %v %q %v", seen.RequestURI, seen.Host, seen.Header, body, seen.Trailer)
	}
	o := r.record(0)
	if o.Protocol != "h2" || o.Class != "POST" || o.Status != 201 || o.BytesIn != 5 || o.BytesOut != 6 || o.Outcome != classifier.OK || o.Upgraded || o.Sent.IsZero() ||
		o.Target != "//a/%2F../b;c?x=REDACTED&token=REDACTED" || len(o.Timings) != 1 {
		t.Errorf("record %+v", o)
	}
}

func TestAnswersWithoutABodyKeepTheirHeads(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, b *bufio.Reader) {
		for {
			head, err := readHeadRaw(b)
			switch {
			case err != nil:
				return
			case strings.Contains(head, "Transfer-Encoding"), strings.Contains(head, "Content-Length"):
				t.Errorf("a request without a body came as %q", head)
				return
			case strings.HasPrefix(head, "HEAD"):
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
			case strings.Contains(head, "/304"):
				_, _ = io.WriteString(c, "HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n")
			default:
				_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
			}
		}
	}))
	c := r.h2Client()
	if res, text := r.do(c, "HEAD", "/", nil); res.ContentLength != 1234 || text != "" || len(res.Header) != 1 {
		t.Errorf("%v %q", res, text)
	}
	if res, _ := r.do(c, "GET", "/304", nil); res.StatusCode != 304 || len(res.Header) != 1 {
		t.Errorf("%v", res)
	}
	if res, _ := r.do(c, "GET", "/", nil); res.StatusCode != 204 || len(res.Header) != 0 {
		t.Errorf("%v", res)
	}
}

func TestHTTP1AndHTTP2ShareThePort(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) { _, _ = io.WriteString(w, "ok") }))
	for _, c := range []*http.Client{r.h2Client(), {Transport: &http.Transport{DisableKeepAlives: true}}} {
		if _, text := r.do(c, "PUT", "/", strings.NewReader("x")); text != "ok" {
			t.Errorf("%q", text)
		}
	}
	if a, b := r.record(0).Protocol, r.record(1).Protocol; a != "h2" || b != "http/1.1" {
		t.Errorf("%s and %s", a, b)
	}
}

func TestAPrefaceInPartsIsReadAndOneThatStopsIsGivenUp(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {}), func(s *settings) { s.headTimeout = 200 * time.Millisecond })
	slow := r.dial()
	for i := range preface {
		slow.send("%s", preface[i:i+1])
	}
	f := newFrames(t, slow.Conn, slow.Reader)
	_ = f.WriteSettings()
	f.headers(1, true, ":method", "GET", ":scheme", "http", ":authority", "h", ":path", "/")
	if id, ok := f.nextHeaders(); id != 1 || !ok {
		t.Error("no answer")
	}
	stopped := r.dial()
	stopped.send("%s", preface[:10])
	if got := stopped.rest(); got != "" {
		t.Errorf("answered %q", got)
	}
}

func TestInterimAnswersReachClientsOfHTTP2(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Link", "</a>")
		w.WriteHeader(103)
		_, _ = io.WriteString(w, "ok")
	}))
	var early string
	res, _ := r.do(r.h2Client(), "GET", "/", nil, func(req *http.Request) {
		*req = *req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			early = fmt.Sprint(code, h.Get("Link"))
			return nil
		}}))
	})
	if early != "103</a>" || res.StatusCode != 200 {
		t.Errorf("%q, then %v", early, res.Status)
	}
}

// Both ways at once, over a server of HTTP/1.1 and one of HTTP/2.
func TestHTTP2IsCarriedAtFullDuplex(t *testing.T) {
	pong := func(w http.ResponseWriter, req *http.Request) {
		control := http.NewResponseController(w)
		_ = control.EnableFullDuplex()
		_ = control.Flush()
		b := make([]byte, 1)
		for {
			if _, err := io.ReadFull(req.Body, b); err != nil {
				return
			}
			_, _ = w.Write(b)
			_ = control.Flush()
		}
	}
	for _, protocol := range []string{"http1", "h2"} {
		t.Run(protocol, func(t *testing.T) {
			r := newRig(t, serveBoth(t, pong), func(s *settings) { s.serverProtocol = protocol })
			pr, pw := io.Pipe()
			req, _ := http.NewRequest("POST", "http://"+r.addr+"/", pr)
			res, err := r.h2Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			for i := range byte(50) {
				_, _ = pw.Write([]byte{i})
				b := make([]byte, 1)
				if _, err := io.ReadFull(res.Body, b); err != nil || b[0] != i {
					t.Fatalf("%d: %v, %v", i, b, err)
				}
			}
			pw.Close()
			if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
				t.Errorf("%q, %v at the end", rest, err)
			}
		})
	}
}

// serveBoth runs a net/http server of HTTP/1.1 and h2c.
func serveBoth(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return l.Addr().String()
}

func TestRefusalsOverHTTP2AreJSON(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	r := newRig(t, serveHTTP(t, func(http.ResponseWriter, *http.Request) { close(begun); <-release }))
	defer close(release)
	r.Gate.SetLimits(Limits{MaxConcurrency: 1}, nil)
	c := r.h2Client()
	go func() {
		if res, err := c.Get("http://" + r.addr + "/"); err == nil {
			res.Body.Close()
		}
	}()
	<-begun
	res, text := r.do(c, "POST", "/", strings.NewReader("a body that nobody reads"))
	if res.StatusCode != 503 || res.Header.Get("Retry-After") != "1" || res.Header.Get("Content-Type") != "application/json" || !strings.Contains(text, `"type":"queue_full"`) {
		t.Errorf("%v %v %q", res.Status, res.Header, text)
	}
}

func TestCONNECTOverHTTP2IsRefused(t *testing.T) {
	r := newRig(t, unusedAddress(t))
	c := r.dial()
	c.send("%s", preface)
	f := newFrames(t, c.Conn, c.Reader)
	_ = f.WriteSettings()
	f.headers(1, false, ":method", "CONNECT", ":authority", "h:1")
	if got := f.status(1); got != "501" {
		t.Errorf("status %q", got)
	}
	if o := r.record(0); o.Error != "not_supported" || o.Status != 501 {
		t.Errorf("record %+v", o)
	}
}

func TestAnUploadThatBreaksOffIsNeverWhole(t *testing.T) {
	for _, protocol := range []string{"http1", "h2"} {
		t.Run(protocol, func(t *testing.T) {
			begun, ended := make(chan struct{}), make(chan error, 1)
			r := newRig(t, serveBoth(t, func(_ http.ResponseWriter, req *http.Request) {
				close(begun)
				_, err := io.Copy(io.Discard, req.Body)
				ended <- err
			}), func(s *settings) { s.serverProtocol = protocol })
			ctx, cancel := context.WithCancel(t.Context())
			pr, pw := io.Pipe()
			req, _ := http.NewRequestWithContext(ctx, "POST", "http://"+r.addr+"/", pr)
			go func() { _, _ = pw.Write([]byte("half of it")) }()
			go func() { <-begun; cancel() }()
			if _, err := r.h2Client().Do(req); err == nil {
				t.Fatal("it was answered")
			}
			if err := <-ended; err == nil {
				t.Error("the server took it for whole")
			}
			if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" {
				t.Errorf("record %+v", o)
			}
		})
	}
}

func TestAnAnswerThatBreaksOffIsNeverWhole(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, b *bufio.Reader) {
		_, _ = readHeadRaw(b)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
	}))
	res, err := r.h2Client().Get("http://" + r.addr + "/")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); err == nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	if o := r.record(0); o.Outcome != classifier.Failed || o.Error != "server_reset" || o.Status != 200 {
		t.Errorf("record %+v", o)
	}
}

func TestTimeoutsOfHTTP2(t *testing.T) {
	hang := func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		<-req.Context().Done()
	}
	t.Run("response_timeout", func(t *testing.T) {
		r := newRig(t, serveBoth(t, hang), func(s *settings) { s.responseTimeout = 50 * time.Millisecond })
		if res, text := r.do(r.h2Client(), "GET", "/", nil); res.StatusCode != 504 || !strings.Contains(text, "response_timeout") {
			t.Errorf("%v %q", res.Status, text)
		}
	})
	t.Run("body_timeout", func(t *testing.T) {
		r := newRig(t, serveBoth(t, hang), func(s *settings) { s.bodyTimeout = 50 * time.Millisecond })
		pr, pw := io.Pipe()
		defer pw.Close()
		if res, text := r.do(r.h2Client(), "POST", "/", pr); res.StatusCode != 408 || !strings.Contains(text, "body_timeout") {
			t.Errorf("%v %q", res.Status, text)
		}
	})
	t.Run("write_timeout", func(t *testing.T) {
		r := newRig(t, serveBoth(t, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.Copy(w, io.LimitReader(zeros{}, 64<<20))
		}), func(s *settings) { s.writeTimeout = 50 * time.Millisecond })
		res, err := r.h2Client().Get("http://" + r.addr + "/") // and reads nothing
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" {
			t.Errorf("record %+v", o)
		}
	})
}

func TestADrainingWeirSendsClientsOfHTTP2Away(t *testing.T) {
	r := newRig(t, serveHTTP(t, func(http.ResponseWriter, *http.Request) {}))
	c := r.dial()
	c.send("%s", preface)
	f := newFrames(t, c.Conn, c.Reader)
	_ = f.WriteSettings()
	f.headers(1, true, ":method", "GET", ":scheme", "http", ":authority", "h", ":path", "/")
	if got := f.status(1); got != "200" {
		t.Fatalf("status %q", got)
	}
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(within10s(t)) }()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			t.Fatalf("no GOAWAY: %v", err)
		}
		if away, ok := frame.(*http2.GoAwayFrame); ok {
			if away.ErrCode != http2.ErrCodeNo {
				t.Errorf("%v", away.ErrCode)
			}
			break
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestOneClientsConnectionsToTheServerEndWithIt(t *testing.T) {
	var open atomic.Int64
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { _, _ = io.Copy(w, req.Body) }),
		ConnState: func(_ net.Conn, st http.ConnState) {
			open.Add(map[http.ConnState]int64{http.StateNew: 1, http.StateClosed: -1}[st])
		},
	}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	r := newRig(t, l.Addr().String())
	c := r.h2Client()
	for range 5 {
		if _, text := r.do(c, "POST", "/", bytes.NewReader([]byte("x"))); text != "x" {
			t.Fatalf("%q", text)
		}
	}
	if n := open.Load(); n != 1 {
		t.Errorf("%d connections for requests that followed one another", n)
	}
	c.CloseIdleConnections()
	r.eventually(func() bool { return open.Load() == 0 }, "the server's connections are closed")
}
