package proxy

import (
	"net"
	"os"
	"sync"
	"syscall"
)

// hangups tells when a peer closes its side of a connection, without reading
// from it: bytes that the peer sent before stay where they are, and a reader
// or writer that is busy with the connection is not disturbed. One epoll
// instance of its own serves all connections; it costs one system call for
// each connection and none for a request.
type hangups struct {
	epoll *os.File
	raw   syscall.RawConn

	mu    sync.Mutex
	next  int32
	calls map[int32]func(gone bool)
}

func newHangups() (*hangups, error) {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := syscall.SetNonblock(fd, true); err != nil { // so that Go's poller waits for it, and no thread
		return nil, os.NewSyscallError("fcntl", err)
	}
	h := &hangups{epoll: os.NewFile(uintptr(fd), "epoll"), calls: make(map[int32]func(bool))}
	h.raw, err = h.epoll.SyscallConn()
	return h, err
}

const (
	epollRDHUP = 0x2000
	epollET    = 1 << 31
)

// add has call run, on the goroutine of [hangups.run], when the peer of conn
// shuts down its writing side (gone false) or both (gone true). It must not
// block. The id is for remove.
func (h *hangups) add(conn syscall.Conn, call func(gone bool)) (id int32, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	h.mu.Lock()
	h.next++
	id = h.next
	h.calls[id] = call
	h.mu.Unlock()
	ctlErr := raw.Control(func(fd uintptr) {
		// Pad is the upper half of the 64 bits that epoll gives back: an id,
		// since the number of a closed descriptor is soon another's.
		ev := syscall.EpollEvent{Events: epollRDHUP | epollET, Fd: int32(fd), Pad: id}
		err = h.control(int(fd), &ev)
	})
	if ctlErr != nil {
		err = ctlErr
	}
	if err != nil {
		h.remove(id)
	}
	return id, err
}

func (h *hangups) control(fd int, ev *syscall.EpollEvent) (err error) {
	if ctlErr := h.raw.Control(func(ep uintptr) {
		err = os.NewSyscallError("epoll_ctl", syscall.EpollCtl(int(ep), syscall.EPOLL_CTL_ADD, fd, ev))
	}); ctlErr != nil {
		return ctlErr
	}
	return err
}

// remove forgets a connection; closing it tells the kernel.
func (h *hangups) remove(id int32) {
	h.mu.Lock()
	delete(h.calls, id)
	h.mu.Unlock()
}

// run delivers events until close.
func (h *hangups) run() {
	events := make([]syscall.EpollEvent, 64)
	for {
		n := 0
		err := h.raw.Read(func(fd uintptr) bool {
			var err error
			n, err = syscall.EpollWait(int(fd), events, 0)
			return n > 0 || err != nil && err != syscall.EINTR
		})
		if err != nil {
			return // closed
		}
		for _, ev := range events[:max(n, 0)] {
			h.mu.Lock()
			call := h.calls[ev.Pad]
			h.mu.Unlock()
			if call != nil {
				call(ev.Events&(syscall.EPOLLHUP|syscall.EPOLLERR) != 0)
			}
		}
	}
}

func (h *hangups) close() { _ = h.epoll.Close() }

// quiet tells whether an idle connection is still good: its peer neither sent
// a byte that nobody asked for nor closed it.
func quiet(raw syscall.RawConn) bool {
	ok := false
	err := raw.Read(func(fd uintptr) bool {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		ok = n < 1 && err == syscall.EAGAIN
		return true
	})
	return ok && err == nil
}

// arrived tells whether bytes of the peer's wait to be read. Deadlines do not
// matter to it.
func arrived(conn any) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, _ = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	})
	return err == nil && n > 0
}

// takeBacklog accepts what waits in the listener's backlog and nothing else.
func takeBacklog(l net.Listener, take func(net.Conn)) {
	sc, ok := l.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	var fds []int
	_ = raw.Control(func(fd uintptr) {
		for {
			one, _, err := syscall.Accept4(int(fd), syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			fds = append(fds, one)
		}
	})
	_ = l.Close()
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "connection")
		if c, err := net.FileConn(f); err == nil {
			take(c)
		}
		_ = f.Close()
	}
}
