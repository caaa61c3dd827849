package proxy

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/stats"
)

// h2frames is one HTTP/2 connection, frame by frame.
type h2frames struct {
	*testing.T
	*http2.Framer
	enc *hpack.Encoder
	buf *bytes.Buffer
}

func newFrames(t *testing.T, w io.Writer, r io.Reader) *h2frames {
	f := &h2frames{T: t, Framer: http2.NewFramer(w, r), buf: new(bytes.Buffer)}
	f.enc = hpack.NewEncoder(f.buf)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	return f
}

// serveFrames runs a server that treats each connection with do.
func serveFrames(t *testing.T, do func(f *h2frames)) string {
	return script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := r.Discard(len(preface)); err != nil {
			return
		}
		f := newFrames(t, c, r)
		_ = f.WriteSettings()
		do(f)
		for { // until the other side has closed
			if _, err := f.ReadFrame(); err != nil {
				return
			}
		}
	})
}

// nextHeaders waits for the next request, answering what is due to h2frames on
// the way.
func (f *h2frames) nextHeaders() (id uint32, ok bool) {
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return 0, false
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			return frame.StreamID, true
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = f.WriteSettingsAck()
			}
		case *http2.PingFrame:
			_ = f.WritePing(true, frame.Data)
		}
	}
}

func (f *h2frames) headers(id uint32, end bool, fields ...string) {
	f.buf.Reset()
	for i := 0; i < len(fields); i += 2 {
		_ = f.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.buf.Bytes(), EndHeaders: true, EndStream: end})
}

func (f *h2frames) reset(id uint32, code int) { _ = f.WriteRSTStream(id, http2.ErrCode(code)) }

// connCount counts the connections that a gRPC server gets.
type connCount struct{ n *atomic.Int64 }

func (c connCount) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (c connCount) HandleRPC(context.Context, stats.RPCStats)                         {}
func (c connCount) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (c connCount) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnBegin); ok {
		c.n.Add(1)
	}
}

// status is that of the answer on a stream.
func (f *h2frames) status(id uint32) string { return f.answer(id)[":status"] }

// answer is the head of the answer on a stream.
func (f *h2frames) answer(id uint32) map[string]string {
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			f.Fatalf("no answer: %v", err)
		}
		if h, ok := frame.(*http2.MetaHeadersFrame); ok && h.StreamID == id {
			m := make(map[string]string)
			for _, one := range h.Fields {
				m[one.Name] = one.Value
			}
			return m
		}
	}
}
