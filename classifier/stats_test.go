package classifier

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// station is one queue with the given number of servers and nothing else:
// what textbooks have closed forms for.
func station(rate, service float64, servers int) system {
	return system{seed: 11, phases: []phase{{dur: 3000 * time.Second, rate: rate}}, batch: 1, base: 1e3 * service, instances: servers}
}

// erlangC is the probability of waiting in M/M/c.
func erlangC(load float64, c int) float64 {
	b := 1.0
	for k := 1; k <= c; k++ {
		b = load * b / (float64(k) + load*b)
	}
	return b / (1 - load/float64(c)*(1-b))
}

func TestWaitsAreThoseOfQueueingTheory(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	const rate, service = 10, 0.07
	exponential := func(s system) system { s.exponential = true; return s }
	for _, c := range []struct {
		name string
		s    system
		wait float64 // s
		busy float64
	}{
		{"M/M/1", exponential(station(rate, service, 1)), 0.7 / 0.3 * service, 0.7},
		{"M/D/1", station(rate, service, 1), 0.7 / 0.3 * service / 2, 0.7},
		{"M/M/3", exponential(station(rate, 0.24, 3)), erlangC(2.4, 3) * 0.24 / (3 - 2.4), 2.4},
		{"M/G/1 with a coefficient of variation of 0.5", func() system { s := station(rate, service, 1); s.cv = 0.5; return s }(), 0.7 / 0.3 * service * 1.25 / 2, 0.7},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := Window{Length: 10 * time.Minute}
			all := c.s.play()
			for i := range all {
				w.Add(&all[i])
			}
			r := cutOne(t, &w, 3000*time.Second)
			isNear(t, "the wait", r.Means.ServerQueue.Seconds(), c.wait, 0.07)
			isNear(t, "the device's busy share", r.Busy, c.busy, 0.03)
			isNear(t, "the throughput", r.Throughput, rate, 0.02)
			isNear(t, "the share of waiting", r.Shares.ServerQueue, r.Means.ServerQueue.Seconds()/r.Mean.Seconds(), 1e-6)
			if b := r.Burstiness; b < 0.6 || b > 1.6 {
				t.Errorf("random arrivals have a dispersion of %v: want about 1", b)
			}
		})
	}
}

func TestStudentsIntervalIsThatOfGonum(t *testing.T) {
	for _, dof := range []float64{3, 5, 10, 30, 100, 1000} {
		want := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: dof}.Quantile(0.975)
		if got := student95(dof); math.Abs(got-want) > 0.1*want || dof >= 10 && math.Abs(got-want) > 0.002*want {
			t.Errorf("%v degrees of freedom: %v, want %v", dof, got, want)
		}
	}
}

func TestTheSlopeIsThatOfGonum(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	var m moments
	var x, y, w []float64
	for range 200 {
		xi, wi := 1+7*rnd.Float64(), 0.1+rnd.Float64()
		yi := 3 + 2*xi + rnd.NormFloat64()
		m.add(wi, xi, yi)
		x, y, w = append(x, xi), append(y, yi), append(w, wi)
	}
	var a within
	a.cell(&m)
	_, slope := stat.LinearRegression(x, y, w, false)
	isNear(t, "the slope", a.slope().Value, slope, 1e-9)
}

func TestTheIntervalHoldsTheTruth(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	const trials, trueSlope = 400, 0.3
	hit := 0
	for range trials {
		var f fits
		for range 60 { // executions; each counted once, by its members
			b := 1 + rnd.IntN(8)
			forward := 0.1 * math.Pow(float64(b), trueSlope) * math.Exp(0.1*rnd.NormFloat64())
			for range b {
				f[3].add(1/float64(b), float64(b), forward)
			}
		}
		l := f.line("batch", 0)
		if l.CI95[0] <= trueSlope && trueSlope <= l.CI95[1] {
			hit++
		}
	}
	if share := float64(hit) / trials; share < 0.90 || share > 0.985 {
		t.Errorf("95 %% intervals hold the truth in %v of the trials", share)
	}
}

// mixedTraffic is a day in a minute: two lengths, queues, refusals.
func mixedTraffic() []*Observation {
	rnd := rand.New(rand.NewPCG(9, 10))
	var all []*Observation
	for i := range 900 {
		o := request(time.Duration(i)*66*time.Millisecond, rnd.IntN(60), rnd.IntN(9), rnd.IntN(40), rnd.IntN(9), rnd.IntN(9), 20+rnd.IntN(99), rnd.IntN(9), rnd.IntN(9))
		o.BatchSize, o.Inflight, o.AudioSeconds = 1+rnd.IntN(4), 1+rnd.IntN(6), []float64{3, 20}[rnd.IntN(2)]
		if rnd.IntN(20) == 0 {
			o.Outcome, o.Status, o.Dequeued, o.Sent, o.Responded = Expired, 503, time.Time{}, time.Time{}, time.Time{}
		}
		all = append(all, o)
	}
	return all
}

func TestMergingEqualsPooling(t *testing.T) {
	all := mixedTraffic()
	pooled := new(slot)
	parts := [7]*slot{}
	for i := range parts {
		parts[i] = new(slot)
	}
	for i, o := range all {
		var l life
		l.read(o)
		pooled.add(&l)
		parts[i%7].add(&l)
	}
	merged := new(slot)
	for _, p := range parts {
		merged.merge(p)
	}
	c := &class{name: "x"}
	for _, s := range []*slot{pooled, merged} {
		s.start, s.end, s.first = start, start.Add(time.Minute), start
	}
	a, b := pooled.report(c, 1), merged.report(c, 1)
	la, lb := pooled.byBatch.line("batch", 0), merged.byBatch.line("batch", 0)
	isNear(t, "the elasticity", lb.Elasticity, la.Elasticity, 1e-9)
	isNear(t, "its interval", lb.CI95[1]-lb.CI95[0], la.CI95[1]-la.CI95[0], 1e-6)
	isNear(t, "the mean batch", b.Batch, a.Batch, 1e-9)
	a.Batch, b.Batch = 0, 0
	a.TailShares, b.TailShares = Shares{}, Shares{} // float32
	if x, y := fmt.Sprintf("%+v", a), fmt.Sprintf("%+v", b); x != y {
		t.Errorf("pooled:\n%s\nmerged:\n%s", x, y)
	}
}

// A server twice as slow under half the load has the same verdict: no
// constant hides a time of its own, but for those that are told in the code.
func TestTheVerdictDoesNotDependOnTheUnitOfTime(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	for _, s := range scenarios()[:25] {
		j := s.judge()
		slow := s.play()
		for i := range slow {
			stretch(&slow[i], 2)
		}
		p := Replay{Length: 20 * time.Second, Latch: Latch{For: 40 * time.Second, KeepFor: time.Minute}}
		for i := range slow {
			p.Add(&slow[i])
		}
		last, _ := p.Verdicts()
		if len(last) != 1 || last[0].Cause != j.shown.Cause {
			t.Errorf("%s: %s; stretched: %s", s.name, j.shown.Cause, tell(last[0]))
		}
	}
}

func stretch(o *Observation, by time.Duration) {
	at := func(t time.Time) time.Time {
		if t.IsZero() {
			return t
		}
		return start.Add(by * t.Sub(start))
	}
	o.Enqueued, o.Dequeued, o.Sent, o.Responded, o.Done = at(o.Enqueued), at(o.Dequeued), at(o.Sent), at(o.Responded), at(o.Done)
	for i := range o.Timings {
		o.Timings[i].Dur *= by
	}
}

func TestASteadyHourDoesNotFlap(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	for _, name := range []string{"own limit before a batching server", "linear batching at capacity", "low load", "one decoder thread"} {
		for _, s := range scenarios() {
			if s.name != name {
				continue
			}
			s.phases[1].dur = time.Hour
			if j := s.judge(); j.flips > 0 || !right(j.shown, s.want) {
				t.Errorf("%s: %d changes within the hour, at last %s", name, j.flips, j.shown.Cause)
			}
		}
	}
}
