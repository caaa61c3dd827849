package classifier

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

func TestLatencyAndBandwidthOfCopiesAreToldApart(t *testing.T) {
	for _, c := range []struct {
		name                string
		alpha, beta         float64 // s, bytes/s
		copies, size, sizes float64 // sizes: how much they vary
		batch               int
		small               float64
		says                string
	}{
		{"many small copies", 20e-6, 10e9, 200, 4e3, 0.5, 1, 0.98, "each costs 20 µs"},
		{"few large ones", 20e-6, 2e9, 2, 50e6, 0.5, 4, 0.001, "at 2.0 GB a second"},
		{"half and half", 100e-6, 1e9, 10, 1e5, 0.8, 2, 0.5, ""},
	} {
		rnd := rand.New(rand.NewPCG(1, 2))
		var w Window
		for i := range 100 {
			o := request(time.Duration(i)*50*time.Millisecond, 0, 0, 0, 0, 0, 50, 0, 500)
			n := c.copies * (1 + rnd.Float64())
			bytes := float64(int(n)) * c.size * (1 + c.sizes*rnd.NormFloat64()/3)
			o.BatchSize = c.batch
			o.Timings[2].Count, o.Timings[2].Bytes = int(n), int64(bytes)
			o.Timings[2].Dur = time.Duration(1e9 * (c.alpha*float64(int(n)) + bytes/c.beta) * (1 + 0.02*rnd.NormFloat64()))
			w.Add(o)
		}
		r := cutOne(t, &w, 10*time.Second)
		if !r.CopyFit {
			t.Errorf("%s: no fit", c.name)
			continue
		}
		if d := r.CopySmall - c.small; d < -0.06 || d > 0.06 {
			t.Errorf("%s: latency is %.3f of the copies' time: want %.3f", c.name, r.CopySmall, c.small)
		}
		q := question{Report: r, t: DefaultThresholds()}
		if !strings.Contains(q.copyAdvice(), c.says) {
			t.Errorf("%s: %q does not say %q", c.name, q.copyAdvice(), c.says)
		}
	}
	var w Window
	for i := range 100 { // sizes that do not vary tell nothing
		w.Add(request(time.Duration(i)*50*time.Millisecond, 0, 0, 0, 0, 5, 50, 0, 0))
	}
	if r := cutOne(t, &w, 10*time.Second); r.CopyFit {
		t.Errorf("copies of one size were split: %+v", r.CopySmall)
	}
}
