package proxy

import (
	"bytes"
	"compress/flate"
	"errors"
	"io"
	"strings"
	"sync"
)

// deflateParams is what the handshake agreed on (RFC 7692, section 7.1).
type deflateParams struct {
	on                       bool
	clientReset, serverReset bool // no context takeover: each message is compressed on its own
}

// parseExtensions reads Sec-WebSocket-Extensions of the answer; known is false
// if it names an extension that weir cannot read.
func parseExtensions(value string) (d deflateParams, known bool) {
	for extension := range strings.SplitSeq(value, ",") {
		name, params, _ := strings.Cut(extension, ";")
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if !strings.EqualFold(name, "permessage-deflate") || d.on {
			return d, false
		}
		d.on = true
		for param := range strings.SplitSeq(params, ";") {
			key, _, _ := strings.Cut(param, "=")
			switch strings.ToLower(strings.TrimSpace(key)) {
			case "client_no_context_takeover":
				d.clientReset = true
			case "server_no_context_takeover":
				d.serverReset = true
			}
		}
	}
	return d, true
}

const (
	deflateWindow = 32 << 10
	maxInflated   = 4 << 20 // of one message; more is a bomb
)

var (
	errBomb   = errors.New("inflates beyond all measure")
	inflaters = sync.Pool{New: func() any { return flate.NewReader(nil) }}
	// Each message ends with an empty block that the sender leaves out; after
	// it, a last empty block tells the reader that there is no more.
	deflateTail = []byte{0, 0, 0xff, 0xff, 1, 0, 0, 0xff, 0xff}
	scratches   = sync.Pool{New: func() any { return new([16 << 10]byte) }}
)

// An inflater decompresses the messages of one direction. Between two of them
// it holds only the window that the next may refer to.
type inflater struct {
	reset  bool // no context takeover
	window []byte
}

// inflate returns the first keep bytes of a message, appended to dst, and its
// whole size. All of it is inflated, since the next message may refer to it.
func (d *inflater) inflate(dst, p []byte, keep int) (body []byte, size int64, err error) {
	r := inflaters.Get().(io.ReadCloser)
	defer inflaters.Put(r)
	src := io.MultiReader(bytes.NewReader(p), bytes.NewReader(deflateTail))
	if err := r.(flate.Resetter).Reset(src, d.window); err != nil {
		return dst, 0, err
	}
	buf := scratches.Get().(*[16 << 10]byte)
	defer scratches.Put(buf)
	for {
		n, err := r.Read(buf[:])
		if size += int64(n); size > maxInflated {
			return dst, size, errBomb
		}
		dst = append(dst, buf[:min(n, max(0, keep-len(dst)))]...)
		if !d.reset {
			d.slide(buf[:n])
		}
		if err == io.EOF {
			return dst, size, nil
		}
		if err != nil {
			return dst, size, err
		}
	}
}

// slide moves the window on over p.
func (d *inflater) slide(p []byte) {
	if len(p) >= deflateWindow {
		d.window = append(d.window[:0], p[len(p)-deflateWindow:]...)
		return
	}
	if over := len(d.window) + len(p) - deflateWindow; over > 0 {
		d.window = d.window[:copy(d.window, d.window[over:])]
	}
	d.window = append(d.window, p...)
}
