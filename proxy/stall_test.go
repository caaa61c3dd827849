package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
)

// A peer that reads slowly is not one that reads nothing: only the second runs
// into write_timeout, however long one write takes.
func TestASlowReaderIsNoStalledOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		e := end{Conn: ours, writeTimeout: time.Second}
		go func() {
			b := make([]byte, 1<<10)
			for n := 0; n < blockSize; n += len(b) {
				time.Sleep(500 * time.Millisecond)
				if _, err := io.ReadFull(theirs, b); err != nil {
					return
				}
			}
		}()
		began := time.Now()
		if n, err := e.Write(make([]byte, blockSize)); n != blockSize || err != nil {
			t.Errorf("wrote %d of %d bytes in %v: %v", n, blockSize, time.Since(began), err)
		}
		began = time.Now()
		if n, err := e.Write([]byte("more")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) > time.Second {
			t.Errorf("nobody read %d bytes: %v after %v", n, err, time.Since(began))
		}
		ours.Close()
	})
}

// A reload must not leave a deadline behind that nobody asks for any more.
func TestANewWriteTimeoutUndoesTheOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		e := end{Conn: ours, writeTimeout: time.Second}
		go func() { _, _ = io.ReadFull(theirs, make([]byte, 1)) }()
		if _, err := e.Write([]byte("a")); err != nil {
			t.Fatal(err)
		}
		e.allow(0)
		go func() {
			time.Sleep(time.Hour)
			_, _ = io.ReadFull(theirs, make([]byte, 1))
		}()
		if _, err := e.Write([]byte("b")); err != nil {
			t.Error(err)
		}
	})
}

// A server that accepts and never reads costs its client write_timeout, and
// the answer says whose fault it was.
func TestAServerThatTakesNoBytesIsNamed(t *testing.T) {
	proceed := make(chan bool)
	r := newRig(t, script(t, func(_ int, c net.Conn, _ *bufio.Reader) {
		_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
		<-proceed
	}), func(s *settings) { s.writeTimeout = 100 * time.Millisecond })
	defer close(proceed)
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", 64<<20)
	go func() { _, _ = c.Conn.Write(make([]byte, 64<<20)) }()
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 504 ") {
		t.Errorf("answered %q", head)
	}
	if o := r.record(0); o.Outcome != classifier.Failed || o.Error != "server_timeout" {
		t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
	}
}

// A server has nothing to say while the audio still comes: its silence counts
// from the end of the upload.
func TestTheServersSilenceCountsFromTheEndOfTheUpload(t *testing.T) {
	const timeout = 200 * time.Millisecond
	r := newRig(t, script(t, func(n int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		_, _ = io.ReadFull(br, make([]byte, 10))
		if n == 0 {
			fmt.Fprint(c, plainOK)
		}
		_, _ = io.Copy(io.Discard, br)
	}), func(s *settings) { s.responseTimeout = timeout })
	upload := func(c *client) {
		c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n")
		for range 10 {
			time.Sleep(timeout / 4)
			c.send("x")
		}
	}
	c := r.dial()
	upload(c)
	c.expect(plainOK)
	c = r.dial()
	upload(c)
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 504 ") {
		t.Errorf("answered %q", head)
	}
	if o := r.record(1); o.Done.Sub(o.Sent) < timeout*7/8 {
		t.Errorf("given up %v after the upload", o.Done.Sub(o.Sent))
	}
}

// No instant of the record is after Done: an upload that nobody waited for
// has no end.
func TestAnUploadThatTheAnswerOutranHasNoEnd(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		fmt.Fprint(c, plainOK)
		_, _ = io.Copy(io.Discard, br)
	}))
	c := r.dial()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nx")
	c.rest()
	o := r.record(0)
	if !o.Sent.IsZero() || !o.Overlapped() || o.Outcome != classifier.OK || o.Ledger().Wall() != o.Total() {
		t.Errorf("the record is %+v", o)
	}
}

// failing is a listener whose accepts fail before they succeed.
type failing struct {
	net.Listener
	err  error
	left atomic.Int32
}

func (f *failing) Accept() (net.Conn, error) {
	if f.left.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept", f.err)}
	}
	return f.Listener.Accept()
}

// What passes on the system must not end weir.
func TestAFailedAcceptIsNotTheEnd(t *testing.T) {
	addr, _ := seen(t, plainOK)
	r := newRig(t, addr)
	for _, err := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPROTO, syscall.EPERM} {
		l, lerr := net.Listen("tcp", "127.0.0.1:0")
		if lerr != nil {
			t.Fatal(lerr)
		}
		f := &failing{Listener: l, err: err}
		f.left.Store(2)
		served := make(chan error, 1)
		go func() { served <- r.Serve(f) }()
		c := dialRaw(t, l.Addr().String())
		c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
		c.expect(plainOK)
		l.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// A bug met while the upload runs must not give its buffers to another
// connection.
func TestABugDuringAnUploadEndsBoth(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n")
		_, _ = io.Copy(io.Discard, br)
	}))
	c := r.dial()
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 1 }, "connection")
	r.Server.mu.Lock()
	for one := range r.conns {
		one.onTrailer = func(_, _ []byte) { panic("a bug") }
	}
	r.Server.mu.Unlock()
	c.send("POST /asr HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf")
	c.rest()
	if o := r.record(0); o.Status != 200 {
		t.Errorf("the record is %+v", o)
	}
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 0 }, "connection closed")
}
