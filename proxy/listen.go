package proxy

import (
	"errors"
	"net"
	"os"
	"syscall"
)

// listen opens host:port, or unix:/path. A socket that a weir left behind
// which was killed is in the way of its next start, and is removed; one that
// somebody listens on is not.
func listen(address string) (net.Listener, error) {
	path, socket, err := socketPath(address)
	if err != nil {
		return nil, err
	}
	if !socket {
		return net.Listen("tcp", address)
	}
	l, err := net.Listen("unix", path)
	if errors.Is(err, syscall.EADDRINUSE) && abandoned(path) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		return net.Listen("unix", path)
	}
	return l, err
}

// abandoned tells whether path is a socket that nobody listens on.
func abandoned(path string) bool {
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
