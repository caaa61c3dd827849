//go:build unix

package proxy

import (
	"io"
	"syscall"
)

// readWaiting waits until there is something to read and forwards it. The
// buffer is borrowed when the bytes are there.
func (p *pump) readWaiting() error {
	sc, ok := p.from.Conn.(syscall.Conn)
	if !ok {
		return p.readBuffered()
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return err
	}
	var (
		block *[blockSize]byte
		n     int
	)
	waited := raw.Read(func(fd uintptr) bool {
		block = blocks.Get().(*[blockSize]byte)
		if n, err = readNow(fd, block[:]); err == syscall.EAGAIN {
			blocks.Put(block)
			block = nil
			return false
		}
		return true
	})
	if block != nil {
		defer blocks.Put(block)
	}
	switch {
	case waited != nil:
		return waited
	case err != nil:
		return err
	case n == 0:
		return io.EOF
	}
	p.forward(block[:n])
	return nil
}

// readNow reads what there is without waiting; EAGAIN if there is nothing.
func readNow(fd uintptr, b []byte) (int, error) {
	for {
		n, err := syscall.Read(int(fd), b)
		if err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}
