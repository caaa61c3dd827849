package proxy

import (
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// A wsReader reads a WebSocket's messages beside its tunnel. The two pumps of
// the tunnel cut the frames, which is cheap, before the bytes go on, so that a
// question is seen before its answer; what the messages say is read on a goroutine that lives only while there are any.
// When that one falls behind, messages are dropped and counted: the tunnel
// waits for nothing.
type wsReader struct {
	up, down frames
	logger   *slog.Logger

	mu       sync.Mutex
	idle     sync.Cond // busy has become false
	queue    []message
	spare    []message
	held     int  // bytes in the messages of queue
	busy     bool // drain runs
	lost     [2]bool
	dropped  int64
	messages [2]int64 // data messages from the server, from the client

	s session // of the goroutine that drains, or of finish
}

// The most that waits to be read on one connection.
const (
	maxQueued     = 1024      // messages
	maxQueuedSize = 256 << 10 // bytes of them
)

func newWSReader(s session, deflate bool, logger *slog.Logger) *wsReader {
	r := &wsReader{s: s, logger: logger}
	r.idle.L = &r.mu
	r.up = frames{client: true, deflate: deflate, emit: r.put}
	r.down = frames{deflate: deflate, emit: r.put}
	return r
}

func side(client bool) int {
	if client {
		return 1
	}
	return 0
}

// put queues a message for reading, or drops it.
func (r *wsReader) put(m message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.data() {
		r.messages[side(m.client)]++
	}
	if m.unread == "" && (len(r.queue) >= maxQueued || len(r.queue) > 0 && r.held+len(m.body) > maxQueuedSize) {
		r.overflow(&m)
		return
	}
	r.queue = append(r.queue, m)
	r.held += len(m.body)
	if !r.busy {
		r.busy = true
		go r.drain()
	}
}

// overflow keeps what it can of a message for which there is no room: audio
// joins the audio before it.
func (r *wsReader) overflow(m *message) {
	if len(r.queue) > 0 && r.queue[len(r.queue)-1].join(m) {
		bodies.put(m.body)
		return
	}
	r.dropped++
	if m.deflated {
		r.lost[side(m.client)] = true
	}
	bodies.put(m.body)
}

// join adds the audio of another message; false if the two are not of a kind.
func (m *message) join(o *message) bool {
	if m.op != opBinary || o.op != opBinary || m.client != o.client || m.deflated || o.deflated || m.word() || o.word() {
		return false
	}
	m.n += o.n
	m.size += o.size
	m.at = o.at
	return true
}

// word tells whether a binary message is a marker rather than audio: nothing
// at all, or a word in capitals.
func (m *message) word() bool {
	if m.size > keptBinary {
		return false
	}
	for _, c := range m.body {
		if (c < 'A' || c > 'Z') && c != '_' {
			return false
		}
	}
	return true
}

// drain reads what is queued, and ends when there is no more.
func (r *wsReader) drain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) > 0 {
		batch, lost := r.queue, r.lost
		r.queue, r.spare, r.held = r.spare[:0], nil, 0
		r.mu.Unlock()
		r.read(batch, lost)
		clear(batch)
		r.mu.Lock()
		if cap(batch) <= 8 { // for the next single message; a burst's is let go
			r.spare = batch[:0]
		}
	}
	r.busy = false
	r.idle.Broadcast()
}

func (r *wsReader) read(batch []message, lost [2]bool) {
	defer r.recover()
	for side, is := range lost {
		if is {
			r.s.lose(side)
		}
	}
	for i := range batch {
		r.s.take(&batch[i])
		bodies.put(batch[i].body)
	}
}

func (r *wsReader) recover() {
	if v := recover(); v != nil {
		r.s.giveUp(unreadBug)
		r.logger.Error("reading a stream was given up after a bug in weir; the stream itself goes on", "panic", v, "stack", string(debug.Stack()))
	}
}

// finish waits until all is read and closes the session, r.s.
func (r *wsReader) finish(by ending, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.recover()
	for r.busy {
		r.idle.Wait()
	}
	r.s.sum.Dropped = r.dropped
	r.s.sum.MessagesOut, r.s.sum.MessagesIn = r.messages[0], r.messages[1]
	r.s.sum.Stall = time.Duration(r.s.stall.Load())
	r.s.end(by, at)
}
