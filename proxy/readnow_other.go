//go:build !unix

package proxy

// readWaiting needs a descriptor that can be read directly. Elsewhere a silent
// stream holds a buffer.
func readWaiting(e *end, take func([]byte)) error { return readBuffered(e, take) }
