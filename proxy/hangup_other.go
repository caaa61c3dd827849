//go:build !linux

package proxy

import (
	"net"
	"syscall"
)

// hangups needs epoll. Elsewhere a peer that left is noticed at the next read
// or write of its connection.
type hangups struct{ done chan struct{} }

func newHangups() (*hangups, error) { return &hangups{make(chan struct{})}, nil }

func (h *hangups) add(syscall.Conn, func(gone bool)) (int32, error) { return 0, nil }
func (h *hangups) remove(int32)                                     {}
func (h *hangups) run()                                             { <-h.done }
func (h *hangups) close()                                           { close(h.done) }

func quiet(syscall.RawConn) bool { return true }

func arrived(any) bool { return false }

func takeBacklog(net.Listener, func(net.Conn)) {}
