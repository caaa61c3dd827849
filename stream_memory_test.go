//go:build !race

package main

import (
	"fmt"
	"net"
	"strings"
	"testing"
)

// resident is the resident memory of a weir, in bytes.
func resident(t *testing.T, w *sidecar) float64 {
	t.Helper()
	_, text := get(t, w.admin+"/metrics")
	for line := range strings.Lines(text) {
		var n float64
		if _, err := fmt.Sscanf(line, "process_resident_memory_bytes %g", &n); err == nil {
			return n
		}
	}
	t.Fatal("no process_resident_memory_bytes")
	return 0
}

// The issue of the garbage collector's timing is left to three tries: memory
// that a process has taken from the system it rarely gives back.
func TestASilentStreamCostsLittleMemory(t *testing.T) {
	const most = 25 << 10
	each := 0.0
	for range 3 {
		if each = silentStream(t); each <= most {
			return
		}
	}
	t.Errorf("a silent stream costs %.1f KB of resident memory, want %d at most", each/1024, most>>10)
}

func silentStream(t *testing.T) (each float64) {
	const warm, streams = 200, 2000
	w := beginWeir(t, "http://"+upgrades(t), nil)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	dial := func(n int) {
		for range n {
			c, err := upgrade(w.url[len("http://"):])
			if err != nil {
				t.Fatal(err)
			}
			_, _ = c.Write([]byte("\x82\x84mask\x00\x00\x00\x00")) // it has spoken once
			open = append(open, c)
		}
	}
	dial(warm)
	before := resident(t, w)
	dial(streams)
	each = (resident(t, w) - before) / streams
	t.Logf("%.1f KB a stream", each/1024)
	return each
}
