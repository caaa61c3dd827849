package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// An exchange is what a client and a server say to each other on one
// connection.
type exchange struct{ request, answer []byte }

// randomExchange is valid, and has nothing in it that concerns one connection
// only: it must pass without the change of a byte.
func randomExchange(rnd *rand.Rand) exchange {
	methods := []string{"GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "x-own"}
	targets := []string{"/", "/asr", "//a/../b", "/%2F%zz?a=%20+b&c;d", "/\xe4\xb8\xad?\"<>", "*", "/?" + strings.Repeat("q", 3000)}
	method := methods[rnd.IntN(len(methods))]
	var b bytes.Buffer
	target := targets[rnd.IntN(len(targets))]
	if target == "*" {
		method = "OPTIONS"
	}
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\n", method, target)
	randomFields(rnd, &b, "hOST: Asr.Example:80\r\n")
	randomBody(rnd, &b, false)
	e := exchange{request: bytes.Clone(b.Bytes())}
	b.Reset()
	for range rnd.IntN(3) {
		fmt.Fprintf(&b, "HTTP/1.1 %d Wait\r\n", 102+rnd.IntN(2))
		randomFields(rnd, &b, "")
		b.WriteString("\r\n")
	}
	status := []int{200, 200, 200, 201, 204, 304, 404, 418, 500, 503, 799}[rnd.IntN(11)]
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", status, []string{"", "OK", "Very \xc3\xa9 Fine\tIndeed"}[rnd.IntN(3)])
	randomFields(rnd, &b, "Server-Timing: forward;dur=1\r\n")
	randomBody(rnd, &b, method == "HEAD" || status == 204 || status == 304)
	e.answer = bytes.Clone(b.Bytes())
	return e
}

func randomFields(rnd *rand.Rand, b *bytes.Buffer, needed string) {
	names := []string{"X-A", "x-a", "Cookie", "Set-Cookie", "set-cookie", "Date", "SERVER", "Content-Type", "User-Agent", "Via", "x_under.score~", "Authorization", "Accept-Encoding"}
	values := []string{"", " ", " a", "b", "\t c \t", " d,e;f=\"g\"", " \xff\xfe", " " + strings.Repeat("v", 2000)}
	n := rnd.IntN(8)
	at := rnd.IntN(n + 1)
	for i := range n + 1 {
		if i == at {
			b.WriteString(needed)
		}
		fmt.Fprintf(b, "%s:%s\r\n", names[rnd.IntN(len(names))], values[rnd.IntN(len(values))])
	}
}

func randomBody(rnd *rand.Rand, b *bytes.Buffer, none bool) {
	size := []int{0, 1, 100, 16 << 10, 16<<10 + 1, 200_000}[rnd.IntN(6)]
	if rnd.IntN(2) == 0 {
		fmt.Fprintf(b, "content-Length: %d\r\n\r\n", size)
		if !none {
			writeNoise(rnd, b, size)
		}
		return
	}
	b.WriteString("Transfer-encoding: chunked\r\nTrailer: X-T, Content-Type\r\n\r\n")
	if none {
		return
	}
	for size > 0 {
		n := 1 + rnd.IntN(size)
		size -= n
		fmt.Fprintf(b, "%x\r\n", n)
		writeNoise(rnd, b, n)
		b.WriteString("\r\n")
	}
	b.WriteString([]string{"0\r\n\r\n", "0\r\nX-T: 1\r\nx-t:\r\n\r\n"}[rnd.IntN(2)])
}

func writeNoise(rnd *rand.Rand, b *bytes.Buffer, n int) {
	for range n {
		b.WriteByte(byte(rnd.Uint32()))
	}
}

// inPieces writes in segments of any size, so that heads and chunks come torn.
func inPieces(rnd *rand.Rand, w io.Writer, b []byte) error {
	for len(b) > 0 {
		n := 1 + rnd.IntN(min(len(b), 1<<rnd.IntN(17)))
		if _, err := w.Write(b[:n]); err != nil {
			return err
		}
		if b = b[n:]; rnd.IntN(4) == 0 {
			runtime.Gosched()
		}
	}
	return nil
}

// Where nothing concerns weir, both sides see the bytes that they would see
// without it: one by one, whatever their pieces.
func TestExchangesAreThoseOfADirectConnection(t *testing.T) {
	const connections, exchanges = 12, 15
	var plays [connections][]exchange
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range plays {
		for range exchanges {
			plays[i] = append(plays[i], randomExchange(rnd))
		}
	}
	faults := make(chan string, connections*exchanges)
	addr := script(t, func(n int, c net.Conn, br *bufio.Reader) {
		rnd := rand.New(rand.NewPCG(3, uint64(n)))
		for i, e := range plays[n] {
			got := make([]byte, len(e.request))
			if m, err := io.ReadFull(br, got); !bytes.Equal(got, e.request) {
				faults <- fmt.Sprintf("request %d.%d: the server saw %v\n%.3000q\nnot\n%.3000q", n, i, err, got[:m], e.request)
				return
			}
			if inPieces(rnd, c, e.answer) != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, br)
	})
	r := newRig(t, addr)
	r.Sampler = nil // no traceparent
	for n := range plays {
		c := r.dial()
		rnd := rand.New(rand.NewPCG(4, uint64(n)))
		for i, e := range plays[n] {
			if err := inPieces(rnd, c.Conn, e.request); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(e.answer))
			if m, err := io.ReadFull(c.Reader, got); !bytes.Equal(got, e.answer) {
				select {
				case fault := <-faults:
					t.Error(fault)
				default:
				}
				t.Fatalf("answer %d.%d: the client saw %v\n%.3000q\nnot\n%.3000q", n, i, err, got[:m], e.answer)
			}
		}
		c.Close()
	}
}

// Noticing a client that leaves takes nothing from one that stays, not even
// bytes that it sent ahead.
func TestAWatchedConnectionCanBeUsedAgain(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	c := r.dial()
	for range 20 {
		c.send(post)
		<-h.came
		c.send("%s", post[:20]) // ahead of its time
		h.release <- struct{}{}
		c.head()
		c.expect("text")
		c.send("%s", post[20:])
		<-h.came
		h.release <- struct{}{}
		c.head()
		c.expect("text")
	}
	if s := r.Gate.State(); s.Abandoned != 0 {
		t.Errorf("gate %+v", s)
	}
}

// An upload that breaks off must end for the server as one that broke off.
func TestATruncatedUploadIsNeverWhole(t *testing.T) {
	for name, tc := range map[string]struct {
		raw  string
		keep bool
		end  func(c *client)
	}{
		"by length":                   {"Content-Length: 10\r\n\r\nhalf", false, func(c *client) { c.Close() }},
		"in chunks":                   {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", false, func(c *client) { c.Close() }},
		"in chunks, by a reset":       {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", false, func(c *client) { hangUp(c.Conn) }},
		"in the last line":            {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n", false, func(c *client) { c.Close() }},
		"by a half-close that counts": {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", true, func(c *client) { _ = c.Conn.(*net.TCPConn).CloseWrite() }},
		"by length, half-closed":      {"Content-Length: 10\r\n\r\nhalf", true, func(c *client) { _ = c.Conn.(*net.TCPConn).CloseWrite() }},
		"by a bad chunk":              {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n", false, func(*client) {}},
		"by a bad trailer":            {"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\nno colon\r\n\r\n", false, func(*client) {}},
		"by silence":                  {"Content-Length: 10\r\n\r\nhalf", true, func(*client) {}},
	} {
		t.Run(name, func(t *testing.T) {
			began, read := make(chan bool, 1), make(chan error, 1)
			r := newRig(t, serveHTTP(t, func(_ http.ResponseWriter, req *http.Request) {
				began <- true
				_, err := io.Copy(io.Discard, req.Body)
				read <- err
			}), func(s *settings) { s.keepHalfClosed, s.bodyTimeout = tc.keep, 500*time.Millisecond })
			c := r.dial()
			c.send("POST /asr HTTP/1.1\r\nHost: h\r\n%s", tc.raw)
			if !strings.HasPrefix(name, "by a bad") { // which may be seen before the server is told of anything
				<-began
			}
			tc.end(c)
			o := r.record(0)
			if len(began) > 0 || !strings.HasPrefix(name, "by a bad") {
				if err := <-read; err == nil {
					t.Error("the server took a part of the upload for the whole")
				}
			}
			if o.Outcome == classifier.OK {
				t.Errorf("recorded as %v", o.Outcome)
			}
		})
	}
}

// The body of a file upload is nobody's business: not a byte of its parts, its
// boundary or what stands around them may change.
func TestAMultipartUploadPassesByteForByte(t *testing.T) {
	var body bytes.Buffer
	body.WriteString("preamble\r\n")
	w := multipart.NewWriter(&body)
	part, _ := w.CreateFormFile("file", "a.wav")
	_, _ = part.Write([]byte("RIFF\x00\r\n--not-the-boundary"))
	_ = w.WriteField("model", "whisper")
	_ = w.Close()
	body.WriteString("epilogue")
	got := make(chan []byte, 1)
	r := newRig(t, serveHTTP(t, func(_ http.ResponseWriter, req *http.Request) {
		b, _ := io.ReadAll(req.Body)
		got <- b
	}))
	resp, err := http.Post("http://"+r.addr+"/asr", w.FormDataContentType(), bytes.NewReader(body.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if b := <-got; !bytes.Equal(b, body.Bytes()) {
		t.Errorf("the server got %q, not %q", b, body.Bytes())
	}
}

// What follows an answer that has no body is not the next answer.
func TestBytesAfterAnAnswerWithoutABodyAreNoAnswer(t *testing.T) {
	for name, tc := range map[string][2]string{
		"HEAD": {"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n"},
		"204":  {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 204 No Content\r\nContent-Length: 40\r\n\r\n"},
		"304":  {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 304 Not Modified\r\n\r\n"},
	} {
		for _, glued := range []bool{true, false} {
			t.Run(fmt.Sprint(name, glued), func(t *testing.T) {
				addr := script(t, func(n int, c net.Conn, br *bufio.Reader) {
					for {
						if _, err := readHeadRaw(br); err != nil {
							return
						}
						if n > 0 {
							fmt.Fprint(c, plainOK)
							continue
						}
						const evil = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
						if glued {
							fmt.Fprint(c, tc[1]+evil)
						} else {
							fmt.Fprint(c, tc[1])
							time.Sleep(5 * time.Millisecond)
							fmt.Fprint(c, evil)
						}
					}
				})
				r := newRig(t, addr)
				c := r.dial()
				c.send("%s", tc[0])
				c.expect(tc[1])
				if !glued {
					time.Sleep(20 * time.Millisecond)
					c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
				}
				if all := readSome(c); strings.Contains(all, "evil") {
					t.Errorf("then the client got %q", all)
				}
			})
		}
	}
}

// readSome reads one answer, or up to the end of the connection.
func readSome(c *client) string {
	b := make([]byte, 1000)
	n, _ := c.Read(b)
	return string(b[:n])
}

func TestAServerOnIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 here: ", err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hi") })}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	r := newRig(t, l.Addr().String())
	c := r.dial()
	c.send("GET / HTTP/1.0\r\n\r\n")
	if got := c.rest(); !strings.HasSuffix(got, "hi") {
		t.Errorf("got %q", got)
	}
}

// A record's texts must not change when the connection's buffers hold another
// request.
func TestARecordStaysAsItWas(t *testing.T) {
	addr, _ := seen(t, "HTTP/1.1 200 OK\r\nServer-Timing: first;dur=1\r\nContent-Length: 2\r\n\r\nok")
	r := newRig(t, addr)
	c := r.dial()
	c.send("POST /v2/models/first/infer?a HTTP/1.1\r\nHost: first\r\nUser-Agent: first\r\n%stracestate: first=1\r\nContent-Length: 0\r\n\r\n", parent)
	c.head()
	c.expect("ok")
	before := fmt.Sprintf("%+v", r.record(0))
	c.send("POST /v2/models/other/infer?b HTTP/1.1\r\nHost: other\r\nUser-Agent: other\r\n%stracestate: other=1\r\nContent-Length: 0\r\n\r\n", parent)
	c.head()
	c.expect("ok")
	r.record(1)
	if after := fmt.Sprintf("%+v", r.record(0)); after != before || !strings.Contains(before, "Model:first") {
		t.Errorf("the record was\n%s\nand became\n%s", before, after)
	}
}

// However large the bodies and however slow who reads them, weir holds a few
// buffers and no more.
func TestMemoryDoesNotGrowWithTheBody(t *testing.T) {
	const size, clients = 16 << 20, 4
	r := newRig(t, serveHTTP(t, func(w http.ResponseWriter, req *http.Request) {
		n, _ := io.Copy(io.Discard, req.Body)
		w.Header().Set("Content-Length", fmt.Sprint(n))
		_, _ = io.CopyN(w, zeros{}, n)
	}))
	var before, m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before) // of the tests so far
	var conns []*client
	for range clients { // they send all and read nothing
		c := r.dial()
		conns = append(conns, c)
		go func() {
			fmt.Fprintf(c.Conn, "POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", size)
			_, _ = io.CopyN(c.Conn, zeros{}, size)
		}()
	}
	for _, c := range conns {
		_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
		c.head() // the whole upload is through
	}
	runtime.GC()
	runtime.ReadMemStats(&m)
	if m.HeapInuse > before.HeapInuse+16<<20 {
		t.Errorf("%d clients with bodies of %d MiB took %d MiB", clients, size>>20, (m.HeapInuse-before.HeapInuse)>>20)
	}
	for _, c := range conns {
		if n, err := io.CopyN(io.Discard, c.Reader, size); n != size {
			t.Errorf("read %d of %d bytes: %v", n, size, err)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
