package proxy

import (
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

// BenchmarkReadFrame is what the reader adds to a frame of 100 ms of audio:
// on the tunnel's way, and beside it.
func BenchmarkReadFrame(b *testing.B) {
	for name, one := range map[string][]byte{
		"audio": frame(true, 0x82, noise(3200)), "base64": frame(true, 0x81, []byte(appendAudio(3200))),
		"deflate": frame(true, 0xc2, deflated(noise(3200))),
	} {
		b.Run(name, func(b *testing.B) {
			var inflight, stall atomic.Int64
			s := session{base: time.Now(), opened: time.Now(), inflight: &inflight, stall: &stall, sink: func(*classifier.Observation) {}}
			s.inflaters[1] = &inflater{}
			s.start("/v1/realtime", "")
			w := newWSReader(s, true, nil)
			b.ReportAllocs()
			b.SetBytes(int64(len(one)))
			for b.Loop() {
				w.up.read(one, time.Now())
			}
			w.finish(bySides, time.Now())
		})
	}
}
