package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/valyala/fasthttp"
)

// A head is the start line and the fields of one message, as they came. Its
// slices alias the reader's buffer: they are good until the next read.
//
// fasthttp parses heads too, and more leniently than a proxy may: what two
// parsers could read differently is refused here first (RFC 9112, sections
// 2.2, 5 and 6), so that no request can hide in another.
type head struct {
	line    []byte // start line, without CRLF
	fields  []field
	named   [][]byte // hop-by-hop fields that Connection names
	length  int64    // Content-Length; -1: none
	chunked bool
	close   bool // Connection: close
	alive   bool // Connection: keep-alive
	upgrade bool // Connection: upgrade with Upgrade: websocket
	expect  bool // Expect: 100-continue
	minor   byte // of HTTP/1.x, as a digit
	host    []byte
	hosts   int
	tokens  []byte // value of Upgrade
	tokened int    // number of Upgrade fields
}

type field struct {
	kind        fieldKind
	name, value []byte // value without surrounding white space
	raw         []byte // the whole line, CRLF included
}

// fieldKind marks the fields that weir treats specially.
type fieldKind uint8

const (
	fieldOther fieldKind = iota
	fieldConnection
	fieldContentLength
	fieldTransferEncoding
	fieldHost
	fieldUpgrade
	fieldHopByHop // Keep-Alive, Proxy-Connection, HTTP2-Settings
	fieldTE
	fieldExpect
	fieldTraceparent
	fieldTracestate
	fieldUserAgent
	fieldRequestStart
	fieldTrailer
)

// kindOf looks a field name up without allocating.
func kindOf(name []byte) fieldKind {
	is := func(s string) bool { return len(s) == len(name) && equalFold(name, s) }
	switch len(name) {
	case 2:
		if is("te") {
			return fieldTE
		}
	case 4:
		if is("host") {
			return fieldHost
		}
	case 6:
		if is("expect") {
			return fieldExpect
		}
	case 7:
		switch {
		case is("upgrade"):
			return fieldUpgrade
		case is("trailer"):
			return fieldTrailer
		}
	case 10:
		switch {
		case is("connection"):
			return fieldConnection
		case is("keep-alive"):
			return fieldHopByHop
		case is("user-agent"):
			return fieldUserAgent
		case is("tracestate"):
			return fieldTracestate
		}
	case 11:
		if is("traceparent") {
			return fieldTraceparent
		}
	case 13:
		if is("x-queue-start") {
			return fieldRequestStart
		}
	case 14:
		switch {
		case is("content-length"):
			return fieldContentLength
		case is("http2-settings"):
			return fieldHopByHop
		}
	case 15:
		if is("x-request-start") {
			return fieldRequestStart
		}
	case 16:
		if is("proxy-connection") {
			return fieldHopByHop
		}
	case 17:
		if is("transfer-encoding") {
			return fieldTransferEncoding
		}
	}
	return fieldOther
}

// What is wrong with a head. The texts go to the peer that sent it.
var (
	errBareLF       = errors.New("a line ends in LF without CR")
	errHeadTooLarge = errors.New("head is larger than max_head_size")
)

type headError struct{ msg string }

func (e *headError) Error() string { return e.msg }

func badHead(format string, args ...any) error { return &headError{fmt.Sprintf(format, args...)} }

// peekHead waits for a whole head and returns it without consuming it. A bare
// LF is refused the moment it comes: two parsers would disagree on it. The
// reader, which reads from src, grows up to limit bytes if the head needs it.
func peekHead(r **bufio.Reader, src io.Reader, limit int) ([]byte, error) {
	start, seen := 0, 0 // of the current line; looked at so far
	for {
		b, _ := (*r).Peek((*r).Buffered())
		for {
			i := bytes.IndexByte(b[seen:], '\n')
			if i < 0 {
				seen = len(b)
				break
			}
			i += seen
			if i == start || b[i-1] != '\r' {
				return nil, errBareLF
			}
			if i >= limit {
				return nil, errHeadTooLarge
			}
			if i == start+1 {
				return b[:i+1], nil
			}
			start, seen = i+1, i+1
		}
		if len(b) >= limit {
			return nil, errHeadTooLarge
		}
		if len(b) == (*r).Size() {
			*r = grown(b, src, limit)
		}
		if _, err := (*r).Peek(len(b) + 1); err != nil {
			return nil, err
		}
	}
}

// grown is a larger reader of src, with what a smaller one holds. It must not
// read through that one, which might keep bytes that [bufio.Reader.Buffered]
// does not tell of.
func grown(held []byte, src io.Reader, size int) *bufio.Reader {
	return bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(held)), src), size)
}

// consumed passes over the one error of fasthttp's that is none here: trailer
// fields that may not be sent are announced. They are dropped when they come.
func consumed(err error, r *bufio.Reader, head int) error {
	if errors.Is(err, fasthttp.ErrBadTrailer) {
		_, err = r.Discard(head)
	}
	return err
}

// parse fills h from a whole head, refusing what is ambiguous.
func (h *head) parse(b []byte) error {
	*h = head{fields: h.fields[:0], named: h.named[:0], length: -1}
	end := bytes.IndexByte(b, '\n')
	h.line, b = b[:end-1], b[end+1:]
	if bytes.IndexByte(h.line, '\r') >= 0 {
		return badHead("a bare CR in the start line %.64q", h.line)
	}
	for len(b) > 2 {
		end = bytes.IndexByte(b, '\n') + 1
		if err := h.addField(b[:end]); err != nil {
			return err
		}
		b = b[end:]
	}
	h.upgrade = h.upgrade && h.switches()
	return nil
}

// switches tells whether the head names websocket, and nothing else, to switch to.
func (h *head) switches() bool { return h.tokened == 1 && equalFold(h.tokens, "websocket") }

func (h *head) addField(raw []byte) error {
	f, err := parseField(raw)
	if err != nil {
		return err
	}
	f.kind = kindOf(f.name)
	switch f.kind {
	case fieldContentLength:
		if h.length >= 0 {
			return badHead("more than one Content-Length")
		}
		if h.length = parseLength(f.value); h.length < 0 {
			return badHead("Content-Length %.32q is not a number of bytes", f.value)
		}
	case fieldTransferEncoding:
		if h.chunked {
			return badHead("more than one Transfer-Encoding")
		}
		if !equalFold(f.value, "chunked") {
			return badHead("Transfer-Encoding %.32q is not supported; only chunked is", f.value)
		}
		h.chunked = true
	case fieldConnection:
		h.addConnection(f.value)
	case fieldHost:
		h.host = f.value
		h.hosts++
	case fieldUpgrade:
		h.tokens = f.value
		h.tokened++
	case fieldExpect:
		h.expect = equalFold(f.value, "100-continue")
	}
	h.fields = append(h.fields, f)
	return nil
}

// parseField splits one line, CRLF included, and checks its characters.
func parseField(raw []byte) (field, error) {
	line := raw[:len(raw)-2]
	colon := bytes.IndexByte(line, ':')
	if colon <= 0 {
		return field{}, badHead("field line %.64q has no name", line)
	}
	name, value := line[:colon], line[colon+1:]
	for _, c := range name {
		if !isToken[c] {
			return field{}, badHead("field name %.64q has the character %q", name, c)
		}
	}
	for _, c := range value {
		if c < ' ' && c != '\t' || c == 0x7f {
			return field{}, badHead("field %.64q has the character %q in its value", name, c)
		}
	}
	return field{name: name, value: bytes.Trim(value, " \t"), raw: raw}, nil
}

// addConnection notes the options of one Connection field. The fields that
// frame or route the message cannot be named away.
func (h *head) addConnection(value []byte) {
	for len(value) > 0 {
		var token []byte
		token, value, _ = bytes.Cut(value, []byte(","))
		token = bytes.Trim(token, " \t")
		switch {
		case equalFold(token, "close"):
			h.close = true
		case equalFold(token, "keep-alive"):
			h.alive = true
		case equalFold(token, "upgrade"):
			h.upgrade = true
		default:
			switch kindOf(token) {
			case fieldHost, fieldContentLength, fieldTransferEncoding, fieldTE:
			default:
				h.named = append(h.named, token)
			}
		}
	}
}

// dropped tells whether a field stays on this side of weir. Fields that frame
// the message are written anew where they stood, by [head.append].
func (h *head) dropped(f *field) bool {
	switch f.kind {
	case fieldConnection, fieldHopByHop, fieldUpgrade:
		return true
	}
	for _, name := range h.named {
		if equalFoldBytes(name, f.name) {
			return true
		}
	}
	return false
}

// appendFraming writes Content-Length or Transfer-Encoding in canonical form,
// with the name as it came.
func appendFraming(dst []byte, h *head, f *field) []byte {
	dst = append(dst, f.name...)
	if f.kind == fieldContentLength {
		dst = strconv.AppendInt(append(dst, ": "...), h.length, 10)
		return append(dst, "\r\n"...)
	}
	return append(dst, ": chunked\r\n"...)
}

// parseLength reads a Content-Length; -1 if it is none.
func parseLength(b []byte) int64 {
	if len(b) == 0 || len(b) > 18 { // 18 digits fit an int64
		return -1
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int64(c-'0')
	}
	return n
}

// isToken marks the characters of a token (RFC 9110, section 5.6.2).
var isToken = func() (t [256]bool) {
	for c := '0'; c <= '9'; c++ {
		t[c] = true
	}
	for c := 'a'; c <= 'z'; c++ {
		t[c], t[c-'a'+'A'] = true, true
	}
	for _, c := range "!#$%&'*+-.^_`|~" {
		t[c] = true
	}
	return t
}()

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// equalFold compares ASCII without regard to case; s is lower case.
func equalFold(b []byte, s string) bool {
	if len(b) != len(s) {
		return false
	}
	for i := range b {
		if lower(b[i]) != s[i] {
			return false
		}
	}
	return true
}

func equalFoldBytes(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if lower(a[i]) != lower(b[i]) {
			return false
		}
	}
	return true
}

// checkRequest parses what is special to a request: its line and its Host.
func (h *head) checkRequest() (method, target []byte, err error) {
	method, rest, _ := bytes.Cut(h.line, []byte(" "))
	target, version, ok := bytes.Cut(rest, []byte(" "))
	if !ok || len(method) == 0 || len(target) == 0 {
		return nil, nil, badHead("request line %.64q is not METHOD TARGET HTTP/1.1", h.line)
	}
	for _, c := range method {
		if !isToken[c] {
			return nil, nil, badHead("method %.32q has the character %q", method, c)
		}
	}
	for _, c := range target {
		if c <= ' ' || c == 0x7f || c == '#' {
			return nil, nil, badHead("request target %.64q has the character %q", target, c)
		}
	}
	if len(version) != 8 || string(version[:7]) != "HTTP/1." || version[7] < '0' || version[7] > '9' {
		return nil, nil, badHead("version %.16q is not HTTP/1.0 or HTTP/1.1", version)
	}
	h.minor = version[7]
	h.upgrade = h.upgrade && h.minor != '0'
	if string(target) == "*" && string(method) != "OPTIONS" {
		return nil, nil, badHead("request target * is for OPTIONS only")
	}
	if h.minor == '0' && h.chunked {
		return nil, nil, badHead("Transfer-Encoding in an HTTP/1.0 request")
	}
	if h.chunked && h.length >= 0 {
		return nil, nil, badHead("both Content-Length and Transfer-Encoding")
	}
	return method, target, h.checkHost()
}

func (h *head) checkHost() error {
	if h.hosts > 1 || h.hosts == 0 && h.minor != '0' {
		return badHead("%d Host fields; there must be one", h.hosts)
	}
	if h.hosts == 1 && len(h.host) == 0 {
		return badHead("Host is empty")
	}
	for _, c := range h.host {
		if !isToken[c] && !bytes.Contains([]byte("[]:(),;="), []byte{c}) {
			return badHead("Host %.64q has the character %q", h.host, c)
		}
	}
	return nil
}

// originForm turns a target in absolute form into origin form. The authority
// must be the Host; a proxy that believes one and a server that believes the
// other would serve two different sites.
func (h *head) originForm(target []byte) ([]byte, error) {
	if target[0] == '/' || string(target) == "*" {
		return target, nil
	}
	scheme, rest, ok := bytes.Cut(target, []byte("://"))
	if !ok || !equalFold(scheme, "http") && !equalFold(scheme, "https") {
		return nil, badHead("request target %.64q is neither a path nor an http URL", target)
	}
	end := bytes.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	if !equalFoldBytes(rest[:end], h.host) {
		return nil, badHead("request target names the host %.64q, Host says %.64q", rest[:end], h.host)
	}
	path := rest[end:]
	if len(path) == 0 || path[0] != '/' {
		path = append([]byte("/"), path...)
	}
	return path, nil
}

// doubtful tells that others may see the end of this message elsewhere (RFC
// 9112, sections 6.1 and 6.3).
func (h *head) doubtful() bool { return h.chunked && (h.length >= 0 || h.minor == '0') }

// checkStatus parses the status line: HTTP/1.x SP 3DIGIT [SP reason].
func (h *head) checkStatus() (status int, err error) {
	l := h.line
	if len(l) < 12 || string(l[:7]) != "HTTP/1." || l[7] < '0' || l[7] > '9' || l[8] != ' ' || len(l) > 12 && l[12] != ' ' {
		return 0, badHead("status line is not HTTP/1.x")
	}
	h.minor = l[7]
	for _, c := range l[9:12] {
		if c < '0' || c > '9' {
			return 0, badHead("status is not a number")
		}
		status = status*10 + int(c-'0')
	}
	if status < 100 {
		return 0, badHead("status %d", status)
	}
	for _, c := range l[12:] {
		if c < ' ' && c != '\t' || c == 0x7f {
			return 0, badHead("reason has the character %q", c)
		}
	}
	return status, nil
}
