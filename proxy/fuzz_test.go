package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
)

// A strictMessage is what the second parser reads: by RFC 9112 to the letter, with
// no freedom that another parser might take differently. It shares no code
// with weir's own.
type strictMessage struct {
	start   string
	fields  [][2]string // names in lower case
	chunked bool
	length  int // -1: not told
}

// parseStrictly reads one head that fills b; false if there is any doubt.
func parseStrictly(b string) (m strictMessage, ok bool) {
	head, found := strings.CutSuffix(b, "\r\n\r\n")
	if !found || strings.Contains(head, "\r\n\r\n") {
		return m, false
	}
	lines := strings.Split(head, "\r\n")
	m.start, m.length = lines[0], -1
	if strings.ContainsAny(lines[0], "\r\n\x00") {
		return m, false
	}
	for _, line := range lines[1:] {
		name, value, found := strings.Cut(line, ":")
		if !found || name == "" || strings.Trim(strings.ToLower(name), "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz") != "" {
			return m, false
		}
		for i := range len(value) {
			if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
				return m, false
			}
		}
		m.fields = append(m.fields, [2]string{strings.ToLower(name), strings.Trim(value, " \t")})
	}
	return m, m.frame()
}

func (m *strictMessage) frame() bool {
	lengths, codings := m.all("content-length"), m.all("transfer-encoding")
	if len(lengths) > 1 || len(codings) > 1 || len(lengths)+len(codings) > 1 {
		return false
	}
	for _, v := range lengths {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || strconv.Itoa(n) != v {
			return false
		}
		m.length = n
	}
	for _, v := range codings {
		if v != "chunked" {
			return false
		}
		m.chunked = true
	}
	return true
}

func (m *strictMessage) all(name string) (values []string) {
	for _, f := range m.fields {
		if f[0] == name {
			values = append(values, f[1])
		}
	}
	return values
}

// bench is a connection without sockets: heads go in, heads come out.
func bench(t *testing.T, in []byte) (*conn, *bytes.Buffer) {
	cfg := &settings{router: testRouter(t), ingest: testIngest(t), maxHeadSize: readerSize}
	s := &Server{Gate: &Gate{}, Sampler: testSampler(t), network: "tcp", address: "server:80", target: "http://server"}
	s.cfg.Store(cfg)
	out := new(bytes.Buffer)
	c := &conn{srv: s, cfg: cfg}
	c.client.r = bufio.NewReaderSize(bytes.NewReader(in), readerSize)
	c.server.r = c.client.r
	c.server.w = bufio.NewWriter(out)
	c.client.w = c.server.w
	return c, out
}

// What weir lets through, a strict second parser and net/http frame as weir
// does, and nothing is hidden in it.
func FuzzRequestHead(f *testing.F) {
	b, err := os.ReadFile("testdata/requests.json")
	if err != nil {
		f.Fatal(err)
	}
	var cases []struct{ Raw string }
	if err := json.Unmarshal(b, &cases); err != nil {
		f.Fatal(err)
	}
	for _, tc := range cases {
		f.Add([]byte(tc.Raw))
	}
	f.Add([]byte("GET / HTTP/1.0\r\nConnection: close, X\r\nX: y\r\n\r\n"))
	f.Add([]byte("GET /ws HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: upgrade\r\nTE: trailers;q=1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		c, out := bench(t, in)
		method, err := c.readRequest()
		if err != nil {
			return
		}
		c.describe(method)
		if o := &c.pass.Observation; len(o.Target) > maxText || len(o.Host) > maxWord || len(o.Method) > maxWord {
			t.Errorf("the record holds %d, %d and %d bytes", len(o.Method), len(o.Target), len(o.Host))
		}
		c.appendRequest()
		_ = c.server.w.Flush()
		m, ok := parseStrictly(out.String())
		if !ok {
			t.Fatalf("%q became the doubtful %q", in, out)
		}
		checkRequest(t, c, &m, string(method))
		checkAgainstNetHTTP(t, c, out.Bytes())
	})
}

func checkRequest(t *testing.T, c *conn, m *strictMessage, method string) {
	t.Helper()
	parts := strings.Split(m.start, " ")
	if len(parts) != 3 || parts[0] != method || parts[1] == "" || parts[2] != "HTTP/1.1" || parts[1][0] != '/' && parts[1] != "*" {
		t.Errorf("the request line became %q", m.start)
	}
	if m.chunked != c.req.chunked || m.length != int(c.req.length) {
		t.Errorf("weir frames by chunks: %v and length %d, the second parser by %v and %d", c.req.chunked, c.req.length, m.chunked, m.length)
	}
	if hosts := m.all("host"); len(hosts) != 1 || c.req.hosts == 1 && hosts[0] != string(c.req.host) {
		t.Errorf("Host became %q", hosts)
	}
	for _, name := range []string{"keep-alive", "proxy-connection", "http2-settings"} {
		if v := m.all(name); v != nil {
			t.Errorf("%s: %q was passed on", name, v)
		}
	}
	upgrade, connection := m.all("upgrade"), m.all("connection")
	if len(upgrade) != len(connection) || len(upgrade) > 1 || len(upgrade) == 1 && (!strings.EqualFold(upgrade[0], "websocket") || connection[0] != "Upgrade") {
		t.Errorf("Upgrade became %q, Connection %q", upgrade, connection)
	}
}

// checkAgainstNetHTTP compares with a parser that others use; where it refuses
// what weir lets through, no harm is done.
func checkAgainstNetHTTP(t *testing.T, c *conn, head []byte) {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
	if err != nil {
		return
	}
	want := max(0, c.req.length)
	if c.req.chunked {
		want = -1
	}
	if r.ContentLength != want {
		t.Errorf("net/http frames %q by %d, weir by %d", head, r.ContentLength, want)
	}
}

// What weir gives its client of an answer's head is framed as weir reads it.
func FuzzResponseHead(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "HTTP/1.1 204 \r\n\r\n", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", "HTTP/1.1 103 Early\r\nLink: a\r\nContent-Length: 9\r\n\r\n",
		"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "HTTP/1.1 200\r\nConnection: X, close\r\nX: y\r\nTrailer: z\r\n\r\n",
		"HTTP/1.1 200 OK\r\nServer-Timing: forward;dur=1\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 O\x00K\r\n\r\n", "HTTP/1.1 200 OK\nX: y\n\n",
	} {
		f.Add([]byte(s), false, false)
		f.Add([]byte(s), true, true)
	}
	f.Fuzz(func(t *testing.T, in []byte, old, told bool) {
		c, out := bench(t, in)
		c.req.minor = '1'
		if old {
			c.req.minor = '0'
		}
		c.cfg.serverTiming = told
		status, err := c.readAnswer()
		if err != nil {
			return
		}
		down := relay{body: body{chunked: c.res.chunked, length: c.res.length}}
		down.dechunk = down.chunked && old
		switch {
		case status == 101:
			c.appendSwitch()
		case status < 200:
			_ = c.sendInterim()
		default:
			c.appendAnswer(&down, false)
		}
		_ = c.client.w.Flush()
		m, ok := parseStrictly(out.String())
		if !ok || !strings.HasPrefix(m.start, "HTTP/1.1 "+strconv.Itoa(status)) {
			t.Fatalf("%q became the doubtful %q", in, out)
		}
		wantChunked, wantLength := c.res.chunked && !old, int(c.res.length)
		if status < 200 {
			wantChunked = false
		}
		if status < 200 || c.res.chunked {
			wantLength = -1
		}
		if m.chunked != wantChunked || m.length != wantLength {
			t.Errorf("%q became %q: framed by %v and %d, want %v and %d", in, out, m.chunked, m.length, wantChunked, wantLength)
		}
		if m.all("keep-alive") != nil || m.all("proxy-connection") != nil {
			t.Errorf("%q became %q", in, out)
		}
	})
}

// What weir makes of chunks, Go's own reader reads as the payload that weir
// counted, and after it nothing is left over.
func FuzzChunks(f *testing.F) {
	for _, s := range []string{"5\r\nhello\r\n0\r\n\r\n", "1;a=b\r\nx\r\n0\r\nX: y\r\n\r\n", "0\r\n\r\nGET / HTTP/1.1\r\n\r\n", "5 \r\nhello\r\n0\r\n\r\n",
		"5\nhello\r\n0\r\n\r\n", "0\r\nContent-Length: 5\r\n\r\n", "00005\r\nhello\r\n000\r\n\r\n", "F\r\n", "-1\r\n", "0x1\r\na\r\n0\r\n\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		rest := bytes.NewReader(in)
		r := bufio.NewReaderSize(rest, readerSize)
		var out, bare bytes.Buffer
		w := bufio.NewWriter(&out)
		b := relay{body: body{chunked: true}, r: r, w: w}
		if b.run() != nil {
			return
		}
		_ = w.Flush()
		left := r.Buffered() + rest.Len()
		resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+out.String())), nil)
		if err != nil {
			t.Fatal(err)
		}
		payload, err := io.ReadAll(resp.Body)
		if err != nil || int64(len(payload)) != b.moved {
			t.Fatalf("%q became %q, which has %d bytes (%v), not %d", in, out.String(), len(payload), err, b.moved)
		}
		for name := range resp.Trailer {
			if forbiddenTrailer([]byte(name)) {
				t.Errorf("the trailer %q was passed on", name)
			}
		}
		w.Reset(&bare)
		r = bufio.NewReaderSize(bytes.NewReader(in), readerSize)
		b = relay{body: body{chunked: true}, r: r, w: w, dechunk: true}
		if err := b.run(); err != nil {
			t.Fatal(err)
		}
		_ = w.Flush()
		if !bytes.Equal(bare.Bytes(), payload) {
			t.Errorf("without chunks %q is %q, with them %q", in, bare.String(), payload)
		}
		// Another reader of the same bytes must end where weir ends.
		strict := bufio.NewReaderSize(bytes.NewReader(in), readerSize)
		resp, err = http.ReadResponse(bufio.NewReaderSize(io.MultiReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"), strict), 16), nil)
		if err != nil {
			t.Fatal(err)
		}
		if theirs, err := io.ReadAll(resp.Body); err == nil && !bytes.Equal(theirs, payload) {
			t.Errorf("of %q net/http reads %q, weir %q (and leaves %d)", in, theirs, payload, left)
		}
	})
}
