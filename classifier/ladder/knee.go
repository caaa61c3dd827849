package ladder

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Knee is the concurrency at which the server is full: more brings no
// throughput, only latency.
type Knee struct {
	Concurrency int         `json:"concurrency"` // 0: none found; note says why
	Low         int         `json:"low"`         // 95 % interval
	High        int         `json:"high"`
	Value       float64     `json:"value"` // before rounding
	Method      string      `json:"method"`
	Note        string      `json:"note"`
	Onset       [2]int      `json:"onset"`      // latency first exceeds 1.25 times that of the lowest step between these; 0 0: nowhere
	Candidates  []Candidate `json:"candidates"` // what other methods say
}

// Candidate is one method's knee.
type Candidate struct {
	Method string  `json:"method"`
	Value  float64 `json:"value"`
	Note   string  `json:"note,omitempty"`
}

// The methods.
const (
	methodBounds = "asymptotic bounds R(1)·Xmax (Denning and Buzen 1978)"
	methodHinge  = "hinge of ln R on ln N"
	methodUSL    = "Universal Scalability Law (Gunther)"
	methodPower  = "power X/R (Kleinrock)"
)

// Thresholds of the knee, measured on simulated systems.
const (
	gainLeft   = 0.25 // d ln X / d ln N of the last doubling from which throughput still rises
	onsetRatio = 1.25
	widen      = 1.3 // the interval's nominal 95 % covered 88 %
)

// needed is the least number of requests of a step that a knee may rest on:
// eight blocks, each of one round of the clients.
func needed(concurrency int) int { return max(5*blocks, blocks*concurrency) }

// point is one step of the curves, in the units of X(N) and R(N).
type point struct {
	n, x, r    float64 // concurrency, requests/s, s
	relX, relR float64
	sent       int
}

func pointsOf(runs []*StepRun) []point {
	var rows []Row
	for _, s := range runs {
		rows = append(rows, summarizeStep(s))
	}
	return points(rows)
}

// points are the closed-loop steps by concurrency. Of two with the same, the
// last counts.
func points(rows []Row) []point {
	byN := map[int]point{}
	for _, r := range rows {
		if r.Concurrency > 0 && r.Succeeded > 0 {
			byN[r.Concurrency] = point{float64(r.Concurrency), r.Throughput, r.Mean / 1000, r.relRate, r.relMean, r.Sent}
		}
	}
	var p []point
	for _, v := range byN {
		p = append(p, v)
	}
	slices.SortFunc(p, func(a, b point) int { return int(a.n - b.n) })
	return p
}

// gain is d ln X / d ln N between two points.
func gain(a, b point) float64 { return math.Log(b.x/a.x) / math.Log(b.n/a.n) }

// saturated tells that the last doubling gained less than gainLeft.
func saturated(p []point) bool { return len(p) >= 2 && lastGain(p) < gainLeft }

// lastGain compares the last step with the one at about half of it.
func lastGain(p []point) float64 {
	half, last := lastDoubling(p)
	return gain(half, last)
}

// lastDoubling is the last step and the one nearest to half of it.
func lastDoubling(p []point) (half, last point) {
	last = p[len(p)-1]
	half = p[len(p)-2]
	for _, q := range p[:len(p)-1] {
		if math.Abs(math.Log(last.n/q.n/2)) < math.Abs(math.Log(last.n/half.n/2)) {
			half = q
		}
	}
	return half, last
}

// rises tells that the last doubling gained enough, beyond chance.
func rises(p []point) bool {
	half, last := lastDoubling(p)
	noise := t7 * math.Hypot(zeroNaN(half.relX), zeroNaN(last.relX)) / math.Log(last.n/half.n)
	return gain(half, last) >= gainLeft && gain(half, last) > noise
}

// onset is the interval of concurrencies in which latency first exceeds
// onsetRatio times the lowest step's, beyond chance, and stays there.
func onset(p []point) (low, high int, ok bool) {
	for i := 1; i < len(p); i++ {
		if above(p[0], p[i]) && (i+1 == len(p) || above(p[0], p[i+1])) {
			return int(p[i-1].n), int(p[i].n), true
		}
	}
	return 0, 0, false
}

func above(base, p point) bool {
	err := zeroNaN(base.relR)*base.r*onsetRatio + zeroNaN(p.relR)*p.r
	return p.r > onsetRatio*base.r+err
}

func zeroNaN(x float64) float64 {
	if math.IsNaN(x) {
		return 0
	}
	return x
}

// FindKnee finds the knee in the rows of a closed-loop ladder. Of paced
// streams, whose latency is counted from the end of speech, a client is busy
// for the length of the audio too: then N*/X(N*) of the lowest step is the time
// of one stream, by Little's law.
func FindKnee(rows []Row, paced bool) Knee {
	p := points(rows)
	switch {
	case len(p) == 0:
		return Knee{Note: "not computed: a knee is a concurrency, and no closed-loop step succeeded"}
	case len(p) < 2:
		return Knee{Note: "not computed: one step is no curve; give several with --steps"}
	}
	if note := tooFew(p); note != "" {
		return Knee{Note: note}
	}
	k := Knee{Method: methodBounds}
	if paced {
		for i := range p {
			p[i].r = p[i].n / p[i].x
		}
		k.Method = "N·Xmax/X(N) of the lowest step, for paced streams"
	}
	if low, high, ok := onset(p); ok {
		k.Onset = [2]int{low, high}
	}
	k.bounds(p)
	k.candidates(p)
	return k
}

func tooFew(p []point) string {
	for _, q := range p {
		if n := needed(int(q.n)); q.sent < n {
			return fmt.Sprintf("refused: the step of concurrency %.0f has %d requests, and a knee takes %d there; run it with --requests %d", q.n, q.sent, n, needed(int(p[len(p)-1].n)))
		}
	}
	return ""
}

// bounds is N* = R(1) Xmax: with N* requests at work the bottleneck is always
// busy. R of the lowest step stands for R(1).
func (k *Knee) bounds(p []point) {
	first, last := p[0], p[len(p)-1]
	best := first
	for _, q := range p {
		if q.x > best.x {
			best = q
		}
	}
	if rises(p) {
		k.Note = fmt.Sprintf("not reached: the last doubling, to %.0f, still brought %.0f %% of what it could; go on to higher steps", last.n, 100*lastGain(p))
		k.Value = first.r * best.x
		return
	}
	value := first.r * best.x
	if first.n > 1 && gain(first, p[1]) < gainLeft {
		k.Note = fmt.Sprintf("below the lowest step: already from %.0f to %.0f throughput hardly rose; begin with --steps 1", first.n, p[1].n)
		k.High = int(first.n)
		return
	}
	spread := math.Exp(widen * t7 * math.Hypot(zeroNaN(first.relR), zeroNaN(best.relX)))
	k.Value = value
	k.Concurrency = max(1, int(math.Round(value)))
	k.Low, k.High = max(1, int(math.Floor(value/spread))), int(math.Ceil(value*spread))
	var notes []string
	if first.n > 1 {
		notes = append(notes, fmt.Sprintf("an upper bound: no step of concurrency 1 was run, and that of %.0f stands for it", first.n))
	}
	if lastGain(p) >= gainLeft {
		notes = append(notes, "throughput was too unsteady to tell whether it still rises: run more --requests")
	}
	if k.Concurrency == 1 {
		notes = append(notes, "one request at a time fills the server")
	}
	if len(p) < 4 {
		notes = append(notes, "fewer than four steps: bounds only")
	}
	if k.Onset[1] > 0 && 1.5*float64(k.Onset[1]) <= value {
		notes = append(notes, fmt.Sprintf("latency turns earlier, between %d and %d: requests wait there for each other's batch, while throughput still rises", k.Onset[0], k.Onset[1]))
	}
	k.Note = strings.Join(notes, "; ")
}

// candidates are the other methods, for comparison.
func (k *Knee) candidates(p []point) {
	if len(p) < 4 {
		return
	}
	k.Candidates = append(k.Candidates, hinge(p), power(p))
	if c, ok := usl(p); ok {
		k.Candidates = append(k.Candidates, c)
	}
}

// hinge fits ln R = ln(R0^4 + (s N)^4)/4, two straight lines with a rounded
// corner at N = R0/s, by least squares over a grid of corners.
func hinge(p []point) Candidate {
	best, at := math.Inf(1), 0.0
	for corner := p[0].n / 2; corner <= 2*p[len(p)-1].n; corner *= 1.01 {
		var sum, sq float64
		for _, q := range p {
			d := math.Log(q.r) - math.Log(1+math.Pow(q.n/corner, 4))/4
			sum += d
			sq += d * d
		}
		if rss := sq - sum*sum/float64(len(p)); rss < best {
			best, at = rss, corner
		}
	}
	c := Candidate{Method: methodHinge, Value: at}
	if at >= p[len(p)-1].n {
		c.Note = "beyond the last step"
	}
	return c
}

// power is the step with the most throughput for its latency.
func power(p []point) Candidate {
	best := p[0]
	for _, q := range p {
		if q.x/q.r > best.x/best.r {
			best = q
		}
	}
	return Candidate{Method: methodPower, Value: best.n, Note: "a step of the ladder"}
}

// usl fits N/X = (1 + s(N-1) + k N(N-1))/l, which is linear in 1/l, s/l and
// k/l, with each point's relative error alike; from six steps. The peak is at
// sqrt((1-s)/k).
func usl(p []point) (c Candidate, ok bool) {
	if len(p) < 6 {
		return c, false
	}
	var a [3][4]float64
	for _, q := range p {
		y := q.n / q.x
		row := [3]float64{1 / y, (q.n - 1) / y, q.n * (q.n - 1) / y}
		for i := range row {
			for j := range row {
				a[i][j] += row[i] * row[j]
			}
			a[i][3] += row[i]
		}
	}
	b, ok := solve(a)
	if !ok || b[0] <= 0 || b[2] <= 0 {
		return c, false
	}
	sigma, kappa := b[1]/b[0], b[2]/b[0]
	if sigma >= 1 {
		return c, false
	}
	return Candidate{Method: methodUSL, Value: math.Sqrt((1 - sigma) / kappa), Note: "where throughput peaks"}, true
}

// solve is Gauss' elimination with pivoting.
func solve(a [3][4]float64) (x [3]float64, ok bool) {
	for i := range a {
		best := i
		for j := i + 1; j < 3; j++ {
			if math.Abs(a[j][i]) > math.Abs(a[best][i]) {
				best = j
			}
		}
		a[i], a[best] = a[best], a[i]
		if math.Abs(a[i][i]) < 1e-12 {
			return x, false
		}
		for j := i + 1; j < 3; j++ {
			f := a[j][i] / a[i][i]
			for k := i; k < 4; k++ {
				a[j][k] -= f * a[i][k]
			}
		}
	}
	for i := 2; i >= 0; i-- {
		x[i] = a[i][3]
		for j := i + 1; j < 3; j++ {
			x[i] -= a[i][j] * x[j]
		}
		x[i] /= a[i][i]
	}
	return x, true
}
