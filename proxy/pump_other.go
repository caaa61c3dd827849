//go:build !unix

package proxy

// readWaiting needs a descriptor that can be read directly; see the other file.
func (p *pump) readWaiting() error { return p.readBuffered() }
