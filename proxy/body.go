package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"
	"strconv"
	"sync/atomic"

	"weir/tracing"
)

// A body is how the end of a message body is told.
type body struct {
	chunked bool
	length  int64 // bytes; -1: until the connection closes
}

// errBadBody is the sender's fault: chunked coding that cannot be trusted.
var errBadBody = errors.New("bad chunked coding")

const (
	maxChunkLine   = 4 << 10
	maxChunkDigits = 15
	maxTrailer     = 16 << 10
	maxWaste       = 16 << 10 // bytes of chunk lines beyond what the chunks are worth
)

// A relay moves one body from r to w and frames it anew: chunk extensions and
// all other freedoms of the sender stay behind. What it writes may sit in w
// until r is read again or w is flushed.
type relay struct {
	body
	r       *bufio.Reader
	w       *bufio.Writer
	dechunk bool                     // write the bare bytes, for a peer that knows no chunks
	trailer func(name, value []byte) // shown each trailer field; may be nil
	seen    *tracing.Body            // takes the payload as it passes; may be nil
	hide    bool                     // keep ORCA's trailers back: weir asked for them
	moved   int64                    // payload bytes so far
	waste   int64                    // bytes of chunk lines beyond what the chunks were worth
	ending  *atomic.Bool             // set before the bytes that end the body are written; may be nil
	tap     *answerReader            // shown what was written; may be nil
}

// run moves the whole body. Errors of r come as they are, those of w as a
// flushError, truncation as io.ErrUnexpectedEOF, bad coding as errBadBody.
func (b *relay) run() error {
	if b.chunked {
		return b.chunks()
	}
	if b.length < 0 {
		err := b.bytes(math.MaxInt64, false)
		if err == io.ErrUnexpectedEOF {
			err = nil
		}
		return err
	}
	return b.bytes(b.length, true)
}

// bytes moves n bytes. Small ones are copied between the buffers; large ones
// pass through one block without touching them.
func (b *relay) bytes(n int64, final bool) error {
	var block *[blockSize]byte
	for n > 0 {
		if have := int64(b.r.Buffered()); have > 0 {
			p, _ := b.r.Peek(int(min(have, n)))
			if err := b.write(p, final && int64(len(p)) == n); err != nil {
				return err
			}
			_, _ = b.r.Discard(len(p))
			n -= int64(len(p))
			continue
		}
		if block == nil {
			block = blocks.Get().(*[blockSize]byte)
			defer blocks.Put(block)
		}
		got, err := b.r.Read(block[:min(int64(blockSize), n)])
		if got > 0 {
			if err := b.write(block[:got], final && int64(got) == n); err != nil {
				return err
			}
			n -= int64(got)
		}
		if err != nil && n > 0 {
			return unexpected(err)
		}
	}
	return nil
}

func (b *relay) write(p []byte, last bool) error {
	if last {
		b.end()
	}
	b.moved += int64(len(p))
	_, err := b.w.Write(p)
	if b.tap != nil {
		b.tap.read(p)
	}
	if b.seen != nil {
		b.seen.Add(p)
	}
	return written(err)
}

func (b *relay) end() {
	if b.ending != nil {
		b.ending.Store(true)
	}
}

// written marks an error as the receiver's.
func written(err error) error {
	if err == nil {
		return nil
	}
	return &flushError{err}
}

func (b *relay) chunks() error {
	for {
		size, err := b.chunkSize()
		if err != nil {
			return err
		}
		if size == 0 {
			return b.trailers()
		}
		if b.tap != nil {
			b.tap.chunk()
		}
		if !b.dechunk {
			_, _ = b.w.Write(strconv.AppendInt(b.w.AvailableBuffer(), size, 16))
			_, _ = b.w.WriteString("\r\n")
		}
		if err := b.bytes(size, false); err != nil {
			return err
		}
		if err := b.crlf(); err != nil {
			return err
		}
		if !b.dechunk {
			if _, err := b.w.WriteString("\r\n"); err != nil {
				return written(err)
			}
		}
	}
}

func (b *relay) crlf() error {
	p, err := b.r.Peek(2)
	if err != nil {
		return unexpected(err)
	}
	if p[0] != '\r' || p[1] != '\n' {
		return errBadBody
	}
	_, _ = b.r.Discard(2)
	return nil
}

func (b *relay) chunkSize() (int64, error) {
	line, err := readLine(b.r, maxChunkLine)
	if err != nil {
		return 0, err
	}
	size, err := parseChunkSize(line)
	// Long extensions on small chunks are work for nothing: a line may cost 16
	// bytes, and as much as its chunk carries.
	b.waste = max(0, b.waste+int64(len(line))-16-size)
	if b.waste > maxWaste {
		return 0, errBadBody
	}
	return size, err
}

// parseChunkSize reads 1*HEXDIG [ extension ]. White space is allowed only
// before the extension.
func parseChunkSize(line []byte) (n int64, err error) {
	digits := 0
	for ; digits < len(line); digits++ {
		d := hexValue(line[digits])
		if d < 0 {
			break
		}
		if digits == maxChunkDigits {
			return 0, errBadBody
		}
		n = n<<4 | int64(d)
	}
	rest := bytes.TrimLeft(line[digits:], " \t")
	if digits == 0 || len(rest) > 0 && rest[0] != ';' || bytes.IndexByte(rest, '\r') >= 0 {
		return 0, errBadBody
	}
	return n, nil
}

func hexValue(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= lower(c) && lower(c) <= 'f':
		return int(lower(c)-'a') + 10
	}
	return -1
}

// readLine returns the next line without its CRLF; it aliases the buffer.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	for seen := 0; ; {
		b, _ := r.Peek(min(r.Buffered(), limit))
		if i := bytes.IndexByte(b[seen:], '\n'); i >= 0 {
			i += seen
			if i == 0 || b[i-1] != '\r' {
				return nil, errBadBody
			}
			_, _ = r.Discard(i + 1)
			return b[:i-1], nil
		}
		if len(b) >= limit {
			return nil, errBadBody
		}
		seen = len(b)
		if _, err := r.Peek(len(b) + 1); err != nil {
			return nil, unexpected(err)
		}
	}
}

// trailers ends a chunked body. Fields that would change how the message is
// framed, routed or trusted are dropped (RFC 9110, section 6.5.1).
func (b *relay) trailers() error {
	if !b.dechunk {
		_, _ = b.w.WriteString("0\r\n")
	}
	for size := 0; ; {
		line, err := readLine(b.r, maxTrailer)
		if err != nil {
			return err
		}
		if len(line) == 0 {
			break
		}
		if size += len(line); size > maxTrailer {
			return errBadBody
		}
		if err := b.trailerField(line); err != nil {
			return err
		}
	}
	b.end()
	if b.dechunk {
		return nil
	}
	_, err := b.w.WriteString("\r\n")
	return written(err)
}

func (b *relay) trailerField(line []byte) error {
	f, err := parseField(line[:len(line)+2]) // the CRLF still stands behind it
	if err != nil {
		return errBadBody
	}
	if forbiddenTrailer(f.name) {
		return nil
	}
	if b.trailer != nil {
		b.trailer(f.name, f.value)
	}
	if b.dechunk || b.hide && tracing.IsOrca(f.name) {
		return nil
	}
	_, err = b.w.Write(f.raw)
	return written(err)
}

func forbiddenTrailer(name []byte) bool {
	switch kindOf(name) {
	case fieldOther, fieldUserAgent, fieldTraceparent, fieldTracestate:
	default:
		return true
	}
	for _, s := range []string{"authorization", "cookie", "set-cookie", "content-type", "content-encoding", "content-range", "forwarded"} {
		if equalFold(name, s) {
			return true
		}
	}
	return len(name) > 12 && equalFold(name[:12], "x-forwarded-")
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
