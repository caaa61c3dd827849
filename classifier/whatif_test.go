package classifier

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// underLoad is the report on the last minute of a system's load.
func underLoad(s *system) Report {
	raw := s.judge().raw
	return raw[len(raw)-1].Report
}

// TestWhatIfHoldsInTheSimulator predicts larger limits and batches for closed
// systems, and then plays them.
func TestWhatIfHoldsInTheSimulator(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	var errors []float64
	inside, shareInside, refused := 0, 0, 0
	for _, gate := range []int{3, 4, 6, 8} {
		for _, item := range []float64{1, 5, 15, 40} {
			for _, clients := range []int{12, 24, 48} {
				s := asr(fmt.Sprintf("limit %d, %v ms an item, %d clients", gate, item, clients), func(s *system) {
					s.gate, s.batch, s.base, s.item, s.cv = gate, 16, 100, item, 0.1
					s.load(closed(clients))
				})
				r := underLoad(&s)
				p := r.WhatIf(MaxConcurrency, 2*gate)
				if p.Refused != "" {
					refused++
					continue
				}
				s.gate *= 2
				truth := underLoad(&s)
				middle := (p.Throughput[0]/0.9 + p.Throughput[1]/1.1) / 2
				errors = append(errors, math.Abs(middle/truth.Throughput-1))
				if p.Throughput[0] <= truth.Throughput && truth.Throughput <= p.Throughput[1] {
					inside++
				}
				if w := truth.Shares.Waiting(); p.Waiting[0] <= w && w <= p.Waiting[1] {
					shareInside++
				}
			}
		}
	}
	slices.Sort(errors)
	n := len(errors)
	t.Logf("%d predictions, %d refused: error of the throughput median %.3f, nine tenths %.3f; truth within the range %d (throughput), %d (waiting)", n, refused, errors[n/2], errors[n*9/10], inside, shareInside)
	if n < 24 || errors[n/2] > 0.05 || errors[n*9/10] > 0.15 || inside*10 < n*8 || shareInside*10 < n*8 {
		t.Errorf("predictions are worse than promised")
	}
}

func TestWhatIfRefusesWhatItCannotSay(t *testing.T) {
	good := asr("limit", func(s *system) { s.gate = 4; s.batches(16) })
	r := underLoad(&good)
	change := func(f func(*Report)) Report { c := r; f(&c); return c }
	for _, c := range []struct {
		report Report
		what   Setting
		to     int
		says   string
	}{
		{r, MaxConcurrency, 0, "at least 1"},
		{r, MaxConcurrency, 64, "beyond twice that nothing is known"},
		{change(func(r *Report) { r.Limit = 0 }), MaxConcurrency, 8, "the server's own"},
		{change(func(r *Report) { r.BusyOK = false }), MaxConcurrency, 8, "no batch"},
		{change(func(r *Report) { r.Forward.OK = false }), MaxConcurrency, 8, "hardly varied"},
		{change(func(r *Report) { r.Parallel = 0 }), MaxConcurrency, 8, "at once is not known"},
		{change(func(r *Report) { r.Means.Unattributed += time.Minute }), MaxConcurrency, 8, "for today's settings"},
	} {
		if p := c.report.WhatIf(c.what, c.to); !strings.Contains(p.String(), c.says) || p.Throughput != [2]float64{} {
			t.Errorf("%s %d: %s: want %q", c.what, c.to, p, c.says)
		}
	}
	if p := r.WhatIf(MaxConcurrency, 6); p.Refused != "" || p.Throughput[0] <= r.Throughput {
		t.Errorf("a limit of 6 instead of 4: %s (now %.3g)", p, r.Throughput)
	}
	capped := asr("cap", func(s *system) { s.batches(4); s.load(closed(32)) })
	r = underLoad(&capped)
	p := r.WhatIf(MaxBatchSize, 8)
	capped.batch = 8
	if truth := underLoad(&capped); p.Refused != "" || truth.Throughput < p.Throughput[0] || truth.Throughput > p.Throughput[1] {
		t.Errorf("%s: played, it is %.3g", p, truth.Throughput)
	}
}
