package proxy

import (
	"encoding/binary"
	"sync"
	"time"
)

// The opcodes of RFC 6455, section 5.2.
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xa
)

// How much of a message is kept for reading. What its end holds beyond that
// is counted, never kept.
const (
	keptBinary   = 16        // of a binary message: a header, or a word
	keptText     = 64 << 10  // of a text from the server
	keptAsk      = 16 << 10  // of a text from the client
	keptDeflated = 256 << 10 // of a compressed message; a longer one cannot be read
	maxControl   = 125       // of a control frame, by the standard
)

// The words for why a stream cannot be read any further.
const (
	unreadFrames  = "not_websocket"     // the bytes are no frames, or use an extension that weir does not know
	unreadDeflate = "bad_deflate"       // the compressed data is damaged
	unreadBomb    = "deflate_bomb"      // it inflates beyond all measure
	unreadLong    = "message_too_large" // a compressed message is longer than weir keeps
	unreadBehind  = "behind"            // weir was too slow, and a compressed message was lost
	unreadBug     = "bug"
)

// A message is one message or control frame of a WebSocket.
type message struct {
	client   bool // sent by the client
	op       byte
	deflated bool
	cut      bool      // body is not all of it
	size     int64     // bytes of payload, as they went over the wire
	frames   int       // that it came in
	n        int64     // messages that this one stands for: more than one if they were merged for want of room
	began    time.Time // its first byte came
	at       time.Time // its last byte came
	body     []byte    // the start of the payload, unmasked
	unread   string    // not a message: reading has to stop in this direction, for this reason
}

func (m *message) data() bool { return m.op == opText || m.op == opBinary }

// frames reads the frames of one direction as the bytes pass by. It keeps no
// more of them than the start of one message, so that its memory does not
// depend on what the peers send.
type frames struct {
	client   bool // the bytes are the client's: frames are masked
	deflate  bool // permessage-deflate is in force
	emit     func(message)
	unread   string // reading has stopped
	at       time.Time
	head     [14]byte
	have     int // bytes of head
	left     uint64
	op       byte // of the frame
	fin      bool
	mask     [4]byte
	masked   int // bytes of the frame's payload unmasked so far
	started  bool
	msg      message // the data message that is under way, if started
	control  message // the control frame that is under way
	ctrlBody [maxControl]byte
	inFrame  bool
}

// read takes the next bytes of the direction, which came at a moment.
func (f *frames) read(p []byte, at time.Time) {
	f.at = at
	for len(p) > 0 && f.unread == "" {
		if !f.inFrame {
			p = f.readHead(p)
			continue
		}
		n := min(uint64(len(p)), f.left)
		f.payload(p[:n])
		p = p[n:]
		if f.left -= n; f.left == 0 {
			f.endFrame()
		}
	}
}

// readHead collects the head of a frame, which may come in pieces.
func (f *frames) readHead(p []byte) []byte {
	for need := 2; ; {
		if f.have >= 2 {
			if need = headSize(f.head[1]); f.have == need {
				break
			}
		}
		n := copy(f.head[f.have:need], p)
		if n == 0 {
			return p
		}
		f.have += n
		p = p[n:]
	}
	h := f.head[:f.have]
	f.have = 0
	f.openFrame(h)
	return p
}

func headSize(second byte) int {
	n := 2
	switch second & 0x7f {
	case 126:
		n += 2
	case 127:
		n += 8
	}
	if second&0x80 != 0 {
		n += 4
	}
	return n
}

func (f *frames) openFrame(h []byte) {
	f.fin, f.op = h[0]&0x80 != 0, h[0]&0x0f
	rest := h[2:]
	switch f.left = uint64(h[1] & 0x7f); f.left {
	case 126:
		f.left, rest = uint64(binary.BigEndian.Uint16(rest)), rest[2:]
	case 127:
		f.left, rest = binary.BigEndian.Uint64(rest), rest[8:]
	}
	f.masked = 0
	copy(f.mask[:], rest)
	if !f.valid(h) {
		f.stop(unreadFrames)
		return
	}
	f.inFrame = true
	switch {
	case f.op >= opClose:
		f.control = message{client: f.client, op: f.op, n: 1, began: f.at, size: int64(f.left), body: f.ctrlBody[:0]}
	case f.op != opContinuation:
		f.started = true
		f.msg = message{client: f.client, op: f.op, n: 1, began: f.at, deflated: h[0]&0x40 != 0}
		fallthrough
	default:
		f.msg.frames++
		f.msg.size += int64(f.left)
	}
	if f.left == 0 {
		f.endFrame()
	}
}

// valid tells whether RFC 6455 (and 7692, of compression) allows the frame.
func (f *frames) valid(h []byte) bool {
	control, rsv1 := f.op >= opClose, h[0]&0x40 != 0
	switch {
	case h[0]&0x30 != 0, rsv1 && (!f.deflate || control || f.op == opContinuation):
		return false
	case (h[1]&0x80 != 0) != f.client, f.left>>63 != 0:
		return false
	case control:
		return f.op <= opPong && f.fin && f.left <= maxControl
	case f.started:
		return f.op == opContinuation && f.msg.size <= 1<<62-int64(min(f.left, 1<<62))
	}
	return f.op == opText || f.op == opBinary
}

func (f *frames) payload(p []byte) {
	m := &f.msg
	if f.op >= opClose {
		m = &f.control
	}
	if room := f.room(m) - len(m.body); room < len(p) {
		m.cut = true
		p = p[:max(room, 0)]
	}
	if len(p) == 0 {
		return
	}
	if m.body == nil {
		m.body = bodies.get(int(min(f.left, bodySize)))
	}
	from := len(m.body)
	m.body = append(m.body, p...)
	if f.client {
		f.unmask(m.body[from:])
	}
}

// unmask undoes the client's mask, eight bytes at a time where it can.
func (f *frames) unmask(b []byte) {
	var key [8]byte
	for i := range key {
		key[i] = f.mask[(f.masked+i)&3]
	}
	f.masked += len(b)
	word := binary.LittleEndian.Uint64(key[:])
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^word)
	}
	for i := range b {
		b[i] ^= key[i]
	}
}

// room is how many bytes of the message are kept.
func (f *frames) room(m *message) int {
	switch {
	case m.op >= opClose:
		return maxControl
	case m.deflated:
		return keptDeflated
	case m.op == opBinary:
		return keptBinary
	case f.client:
		return keptAsk
	}
	return keptText
}

func (f *frames) endFrame() {
	f.inFrame = false
	if f.op >= opClose {
		f.control.at = f.at
		c := f.control
		c.body = append(bodies.get(len(c.body)), c.body...)
		f.emit(c)
		return
	}
	if !f.fin {
		return
	}
	f.started = false
	f.msg.at = f.at
	f.emit(f.msg)
	f.msg = message{}
}

// stop ends the reading of this direction; its bytes pass on as before.
func (f *frames) stop(why string) {
	f.unread = why
	bodies.put(f.msg.body)
	f.msg, f.started = message{}, false
	f.emit(message{client: f.client, unread: why, began: f.at, at: f.at})
}

// closeCode is the status in a close frame; 1005, by the standard, if it has none.
func (m *message) closeCode() int {
	if len(m.body) < 2 {
		return 1005
	}
	return int(binary.BigEndian.Uint16(m.body))
}

// bodies lends buffers for the kept starts of messages: thousands of streams
// with ten messages a second each would else keep the garbage collector busy.
var bodies bodyPool

const bodySize = 8 << 10

type bodyPool struct{ pool sync.Pool }

// get returns an empty buffer for about n bytes.
func (p *bodyPool) get(n int) []byte {
	if n <= 64 {
		return make([]byte, 0, n)
	}
	if b, ok := p.pool.Get().(*[bodySize]byte); ok {
		return b[:0]
	}
	return make([]byte, 0, bodySize)
}

func (p *bodyPool) put(b []byte) {
	if cap(b) == bodySize {
		p.pool.Put((*[bodySize]byte)(b[:bodySize]))
	}
}
