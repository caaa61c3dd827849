package proxy

import (
	"bufio"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// An end is one of the two sockets of an exchange. Reading it first writes
// out what is buffered for the other end, so that no byte waits for another
// that may never come; and its timeouts are of idleness: each byte that moves
// renews them.
type end struct {
	net.Conn
	r    *bufio.Reader // reads through the end
	w    *bufio.Writer // writes through the end; only during an exchange
	flow *bufio.Writer // flushed before a read can block; nil: none

	readTimeout, writeTimeout time.Duration // 0: none
	readArmed, writeArmed     time.Time     // when the deadlines were last set
	once                      bool          // readTimeout is for all reads together
	stopped                   atomic.Bool   // reads fail from now on

	silentSince func() time.Time // when the peer's turn to speak began; nil: with each read
}

// A flushError is the other end's failure, met while this end was read.
type flushError struct{ err error }

func (e *flushError) Error() string { return e.err.Error() }
func (e *flushError) Unwrap() error { return e.err }

func (e *end) Read(p []byte) (int, error) {
	if e.flow != nil && e.flow.Buffered() > 0 {
		if err := e.flow.Flush(); err != nil {
			return 0, &flushError{err}
		}
	}
	if e.readTimeout > 0 && (!e.once || e.readArmed.IsZero()) {
		arm(e.readTimeout, &e.readArmed, e.Conn.SetReadDeadline)
	}
	if e.stopped.Load() { // after arm, which may have undone the deadline of stop
		return 0, os.ErrDeadlineExceeded
	}
	n, err := e.Conn.Read(p)
	for n == 0 && isTimeout(err) && e.renew() {
		n, err = e.Conn.Read(p)
	}
	return n, err
}

// renew gives a peer more time that had no reason to speak yet.
func (e *end) renew() bool {
	if e.silentSince == nil || e.stopped.Load() {
		return false
	}
	until := e.silentSince().Add(e.readTimeout)
	if !until.After(time.Now()) {
		return false
	}
	_ = e.Conn.SetReadDeadline(until)
	return true
}

// stop ends the read that another goroutine waits in, and those to come.
func (e *end) stop() {
	e.stopped.Store(true)
	_ = e.Conn.SetReadDeadline(time.Unix(1, 0))
}

// resume undoes stop.
func (e *end) resume() {
	if e.stopped.CompareAndSwap(true, false) {
		e.readArmed = time.Time{}
		_ = e.Conn.SetReadDeadline(time.Time{})
	}
}

// Write is done when all of p is: as long as the peer takes bytes, however
// few, its time does not run out.
func (e *end) Write(p []byte) (sent int, err error) {
	for {
		if e.writeTimeout > 0 {
			arm(e.writeTimeout, &e.writeArmed, e.Conn.SetWriteDeadline)
		}
		n, err := e.Conn.Write(p[sent:])
		sent += n
		if n == 0 || !isTimeout(err) {
			return sent, err
		}
		e.writeArmed = time.Time{}
	}
}

// allow sets the timeout of the writes to come.
func (e *end) allow(timeout time.Duration) {
	if timeout == e.writeTimeout {
		return
	}
	e.writeTimeout = timeout
	if !e.writeArmed.IsZero() {
		e.writeArmed = time.Time{}
		_ = e.Conn.SetWriteDeadline(time.Time{})
	}
}

// arm moves a deadline, but not for each call: it may come an eighth early.
func arm(timeout time.Duration, armed *time.Time, set func(time.Time) error) {
	now := time.Now()
	if now.Sub(*armed) > timeout/8 {
		*armed = now
		_ = set(now.Add(timeout)) // fails only on a closed connection, as the read will
	}
}

// expect sets the timeout of the reads to come: of each, or once for all of
// them together. 0 lets them wait for ever.
func (e *end) expect(timeout time.Duration, once bool) {
	if timeout == e.readTimeout && once == e.once {
		return
	}
	e.readTimeout, e.once = timeout, once
	if !e.readArmed.IsZero() {
		e.readArmed = time.Time{}
		_ = e.Conn.SetReadDeadline(time.Time{})
	}
}

func isTimeout(err error) bool {
	if err == nil { // as most often: n would cost an allocation
		return false
	}
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// Buffers. A reader of the client's stays with its connection, which waits in
// it for the next request; everything else is borrowed for one exchange.
const (
	readerSize = 16 << 10
	writerSize = 16 << 10
	blockSize  = 64 << 10
)

var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, readerSize) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, writerSize) }}
	blocks  = sync.Pool{New: func() any { return new([blockSize]byte) }}
)

func (e *end) borrowWriter() {
	e.w = writers.Get().(*bufio.Writer)
	e.w.Reset(e)
}

func (e *end) returnWriter() {
	if e.w != nil {
		e.w.Reset(nil)
		writers.Put(e.w)
		e.w = nil
	}
}

func (e *end) borrowReader() {
	e.r = readers.Get().(*bufio.Reader)
	e.r.Reset(e)
}

// returnReader gives the reader back; one that grew for a large head is left
// to the garbage collector.
func (e *end) returnReader() {
	if e.r != nil && e.r.Size() == readerSize {
		e.r.Reset(nil)
		readers.Put(e.r)
	}
	e.r = nil
}
