package ladder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"weir/classifier"
)

// Round is one one-factor round of a sweep: a setting, the values that it
// takes, and the value that it has while another varies.
type Round struct {
	Factor string `json:"factor"`
	Values []int  `json:"values"`
	Base   int    `json:"base"`
}

// SweepPlan is two (or more) rounds at one load. Each repeat visits all values
// of all rounds in an order of its own, and the base in addition, so that
// drift does not pass for effect.
type SweepPlan struct {
	Rounds      []Round
	Setters     map[string]Setter
	Concurrency int
	Requests    int // of each visit
	Repeats     int
	Journal     string // file that tells how to restore the settings; empty: none
}

// visits are the steps of one repeat: a request alone, for the low load; then
// the values in a seeded order.
func (p SweepPlan) visits(repeat int, seed uint64) (steps []Step) {
	for _, round := range p.Rounds {
		for _, v := range round.Values {
			f := p.base()
			f[round.Factor] = v
			steps = append(steps, Step{Concurrency: p.Concurrency, Requests: p.Requests, Round: round.Factor, Factors: f, Repeat: repeat})
		}
	}
	dice := rand.New(rand.NewPCG(seed, uint64(repeat)))
	dice.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	if repeat == 1 {
		alone := Step{Concurrency: 1, Requests: max(10, min(p.Requests/4, 40)), Factors: p.base()}
		steps = slices.Insert(steps, 0, alone)
	}
	return steps
}

func (p SweepPlan) base() map[string]int {
	f := map[string]int{}
	for _, r := range p.Rounds {
		f[r.Factor] = r.Base
	}
	return f
}

// Check returns the first mistake with its remedy. Values are sorted, and the
// base is made one of them.
func (p *SweepPlan) Check() error {
	if len(p.Rounds) == 0 {
		return errors.New("nothing to vary: give --vary NAME=V1,V2,...")
	}
	for i := range p.Rounds {
		r := &p.Rounds[i]
		if p.Setters[r.Factor] == nil {
			return fmt.Errorf("--vary %s has no --set %s=...: say how it is changed", r.Factor, r.Factor)
		}
		if r.Base <= 0 {
			return fmt.Errorf("%s has no value to hold and to restore: give --base %s=V", r.Factor, r.Factor)
		}
		r.Values = append(r.Values, r.Base)
		slices.Sort(r.Values)
		r.Values = slices.Compact(r.Values)
		if len(r.Values) < 2 || r.Values[0] <= 0 {
			return fmt.Errorf("--vary %s takes two positive values or more, the base among them", r.Factor)
		}
	}
	return nil
}

// Sweep runs the plan and restores the settings, whatever happened. The steps
// measured until an error are returned with it.
func (r *Runner) Sweep(ctx context.Context, p SweepPlan) (runs []*StepRun, err error) {
	defer func() { err = errors.Join(err, p.restore(ctx)) }()
	if err := p.journal(); err != nil {
		return nil, err
	}
	var all []Step
	for repeat := range p.Repeats {
		all = append(all, p.visits(repeat+1, r.Seed)...)
	}
	for i, step := range all {
		if err := p.set(ctx, step.Factors); err != nil {
			return runs, err
		}
		if i == 0 {
			if err := r.Warm(ctx); err != nil {
				return runs, err
			}
		}
		run, err := r.Step(ctx, step, i+1, len(all))
		runs = append(runs, run)
		if err != nil {
			return runs, err
		}
		if err := p.check(ctx, run); err != nil {
			return runs, err
		}
		if err := r.settle(ctx, run); err != nil {
			return runs, err
		}
	}
	return runs, nil
}

// set brings all factors to their values; those that have it already are left
// alone, unless another's change restarts the server that holds them.
func (p SweepPlan) set(ctx context.Context, factors map[string]int) error {
	for _, name := range slices.Sorted(maps.Keys(factors)) {
		if err := p.Setters[name].Set(ctx, name, factors); err != nil {
			return fmt.Errorf("setting %s to %d: %w", name, factors[name], err)
		}
	}
	return nil
}

// check asks after a step whether the settings are still those of the step.
func (p SweepPlan) check(ctx context.Context, run *StepRun) error {
	for name, want := range run.Factors {
		got, known, err := p.Setters[name].Get(ctx)
		if err != nil {
			return fmt.Errorf("reading %s back: %w", name, err)
		}
		if known && got != want {
			return fmt.Errorf("%s was %d at the end of a step that held it at %d: something else changes it too", name, got, want)
		}
	}
	return nil
}

// SweepRow is one value of one round, over the repeats. Times are means over
// the repeats, in milliseconds.
type SweepRow struct {
	Round      string         `json:"round"`
	Factors    map[string]int `json:"factors"`
	Base       bool           `json:"base"`
	Repeats    int            `json:"repeats"`
	Sent       int            `json:"sent"`
	Succeeded  int            `json:"succeeded"`
	Mean       float64        `json:"mean_ms"`
	P95        float64        `json:"p95_ms"`
	Max        float64        `json:"max_ms"`
	Forward    float64        `json:"forward_ms"`
	Transfer   float64        `json:"transfer_ms"`
	Queue      float64        `json:"queue_ms"` // weir's and the server's
	Batch      float64        `json:"batch"`
	Throughput float64        `json:"throughput_rps"`
	RateCI     [2]float64     `json:"throughput_ci95_rps"`

	rate samples
}

// samples are values of one quantity, from the repeats or, with one repeat,
// from blocks of it.
type samples struct {
	mean, rel float64
	dof       float64
}

// Effect is what a factor does to throughput.
type Effect struct {
	Factor string     `json:"factor"`
	From   int        `json:"from"`
	To     int        `json:"to"`
	Gain   float64    `json:"gain"` // relative change of throughput
	CI95   [2]float64 `json:"gain_ci95"`
	Text   string     `json:"text"`
}

// sweep groups the steps into rows, and weighs the effects.
func (s *Summary) sweep(run *Run) {
	for _, round := range run.Rounds {
		var rows []SweepRow
		for _, v := range round.Values {
			if row, ok := s.sweepRow(round, v); ok {
				rows = append(rows, row)
			}
		}
		s.Sweep = append(s.Sweep, rows...)
		s.Effects = append(s.Effects, effects(round, rows)...)
	}
	drifted := s.drift(run)
	s.Verdict = s.sweepVerdict(run)
	if drifted {
		s.Verdict.Confidence = min(s.Verdict.Confidence, driftConfidence)
	}
}

func (s *Summary) sweepRow(round Round, value int) (row SweepRow, ok bool) {
	row = SweepRow{Round: round.Factor, Base: value == round.Base}
	var rates []float64
	var one Row
	for _, r := range s.Steps {
		if r.Round != round.Factor || r.Factors[round.Factor] != value || r.Succeeded == 0 {
			continue
		}
		one = r
		row.Factors = r.Factors
		row.Repeats++
		row.Sent += r.Sent
		row.Succeeded += r.Succeeded
		row.Mean += r.Mean
		row.P95 += r.P95
		row.Max = max(row.Max, r.Max)
		row.Forward += r.Stages["forward"]
		row.Transfer += r.Stages["transfer"]
		row.Queue += r.Stages["queue"] + r.Stages["weir_queue"]
		row.Batch += r.Batch
		rates = append(rates, r.Throughput)
	}
	if row.Repeats == 0 {
		return row, false
	}
	n := float64(row.Repeats)
	for _, x := range []*float64{&row.Mean, &row.P95, &row.Forward, &row.Transfer, &row.Queue, &row.Batch} {
		*x /= n
	}
	row.rate = samples{mean: one.Throughput, rel: one.relRate, dof: blocks - 1}
	if row.Repeats > 1 {
		m, v := meanVar(rates)
		row.rate = samples{m, math.Sqrt(v/n) / m, n - 1}
	}
	row.Throughput = row.rate.mean
	half := student(0.975, row.rate.dof) * zeroNaN(row.rate.rel)
	row.RateCI = [2]float64{max(0, row.Throughput*(1-half)), row.Throughput * (1 + half)}
	return row, true
}

// Gains of throughput: what is worth a change of a setting. A drift as large,
// with the same settings, bounds the confidence of a verdict.
const (
	worthwhile      = 0.10
	driftConfidence = 0.8
)

// effects compares the base with the best value above it, and with the lowest
// below it.
func effects(round Round, rows []SweepRow) (out []Effect) {
	base := slices.IndexFunc(rows, func(r SweepRow) bool { return r.Base })
	if base < 0 {
		return nil
	}
	if base+1 < len(rows) {
		best := base + 1
		for i := best; i < len(rows); i++ {
			if rows[i].Throughput > rows[best].Throughput {
				best = i
			}
		}
		out = append(out, effect(round.Factor, rows[base], rows[best]))
	}
	if base > 0 {
		out = append(out, effect(round.Factor, rows[base], rows[0]))
	}
	return out
}

// effect is the relative change of throughput, with Welch's interval on the
// logarithm.
func effect(factor string, a, b SweepRow) Effect {
	e := Effect{Factor: factor, From: a.Factors[factor], To: b.Factors[factor]}
	d := math.Log(b.Throughput / a.Throughput)
	half := welch(a.rate, b.rate)
	e.Gain = math.Expm1(d)
	e.CI95 = [2]float64{math.Expm1(d - half), math.Expm1(d + half)}
	word := "changed throughput by"
	if e.CI95[0] <= 0 && e.CI95[1] >= 0 {
		word = "made no difference beyond noise:"
	}
	e.Text = fmt.Sprintf("%s from %d to %d %s %+.0f %% (95 %% interval %+.0f to %+.0f %%), latency from %s to %s ms, forward from %s to %s ms, waiting from %s to %s ms",
		factor, e.From, e.To, word, 100*e.Gain, 100*e.CI95[0], 100*e.CI95[1], number(a.Mean), number(b.Mean), number(a.Forward), number(b.Forward), number(a.Queue), number(b.Queue))
	return e
}

// welch is the half width of the 95 % interval of a difference of logarithms.
func welch(a, b samples) float64 {
	va, vb := zeroNaN(a.rel)*zeroNaN(a.rel), zeroNaN(b.rel)*zeroNaN(b.rel)
	if va+vb == 0 {
		return 0
	}
	dof := (va + vb) * (va + vb) / (va*va/a.dof + vb*vb/b.dof)
	return student(0.975, dof) * math.Sqrt(va+vb)
}

// drift compares the base's first visits with its last ones.
func (s *Summary) drift(run *Run) (drifted bool) {
	var base []float64
	for _, r := range s.Steps {
		if r.Round != "" && r.Factors[r.Round] == baseOf(run, r.Round) && r.Succeeded > 0 {
			base = append(base, r.Throughput)
		}
	}
	if len(base) < 2 {
		return false
	}
	first, last := base[0], base[len(base)-1]
	change := last/first - 1
	if drifted = math.Abs(change) > worthwhile; drifted {
		s.Warnings = append(s.Warnings, fmt.Sprintf("with the same settings throughput went from %.3g to %.3g requests/s (%+.0f %%) during the sweep: something else changes; repeat it with more --repeats", first, last, 100*change))
	}
	return drifted
}

func baseOf(run *Run, factor string) int {
	for _, r := range run.Rounds {
		if r.Factor == factor {
			return r.Base
		}
	}
	return 0
}

// sweepVerdict: an experiment beats an inference. If raising a setting brings
// throughput, that setting is the limit. If raising none does, the server is
// full, and the classifier says with what.
func (s *Summary) sweepVerdict(run *Run) *VerdictJSON {
	var best *Effect
	raised := 0
	v := &VerdictJSON{Cause: classifier.Unknown, Evidence: []string{}, Warnings: []string{}}
	for i := range s.Effects {
		e := &s.Effects[i]
		v.Evidence = append(v.Evidence, e.Text)
		if e.To < e.From {
			continue
		}
		raised++
		if e.Gain >= worthwhile && e.CI95[0] > 0 && (best == nil || e.Gain > best.Gain) {
			best = e
		}
	}
	stages := s.baseVerdict(run)
	switch {
	case best != nil:
		v.Cause = classifier.Queue
		i := slices.Index(v.Evidence, best.Text)
		v.Evidence = slices.Insert(slices.Delete(v.Evidence, i, i+1), 0, best.Text)
		v.Confidence = 0.95
		v.Advice = fmt.Sprintf("raise %s from %d to %d: measured, it brings %+.0f %% throughput", best.Factor, best.From, best.To, 100*best.Gain)
	case raised == 0:
		v.Advice = "no value above the base was tried: add higher values with --vary"
	default:
		s.full(v, stages)
	}
	return v
}

// full is the verdict where no setting helps.
func (s *Summary) full(v *VerdictJSON, stages *VerdictJSON) {
	for _, e := range s.Effects {
		if e.To > e.From && e.CI95[1] >= 2*worthwhile {
			v.Warnings = append(v.Warnings, fmt.Sprintf("the interval of %s is too wide to exclude a gain of %.0f %%: run more --repeats", e.Factor, 100*e.CI95[1]))
		}
	}
	v.Cause, v.Confidence = classifier.Compute, 0.8
	v.Advice = "no limit helps: a smaller, quantised or compiled model, a faster device, or another replica"
	if stages != nil {
		switch stages.Cause {
		case classifier.Transfer, classifier.Host, classifier.Client, classifier.Mixed, classifier.Healthy, classifier.Compute:
			v.Cause, v.Advice = stages.Cause, stages.Advice
			v.Confidence = max(v.Confidence, stages.Confidence)
		}
		v.Evidence = append(v.Evidence, stages.Evidence...)
	}
	if len(v.Warnings) > 0 {
		v.Confidence = min(v.Confidence, 0.5)
	}
	if s.mayGain() {
		v.Cause, v.Confidence = classifier.Unknown, 0
		v.Advice = "throughput was too unsteady to tell: run more --repeats and --requests, or on a quieter machine"
		return
	}
	v.Evidence = slices.Insert(v.Evidence, 0, "raising "+strings.Join(s.raised(), " or ")+" brought no throughput")
}

// mayGain tells that raising a setting seemed to bring something, within noise.
func (s *Summary) mayGain() bool {
	return slices.ContainsFunc(s.Effects, func(e Effect) bool { return e.To > e.From && e.Gain >= worthwhile && e.CI95[1] >= 2*worthwhile })
}

func (s *Summary) raised() (names []string) {
	for _, e := range s.Effects {
		if e.To > e.From {
			names = append(names, e.Factor)
		}
	}
	return names
}

// baseVerdict is the classifier's word on the settings as they are.
func (s *Summary) baseVerdict(run *Run) (v *VerdictJSON) {
	for _, r := range s.Steps {
		if r.Round != "" && r.Factors[r.Round] == baseOf(run, r.Round) && r.Verdict != nil {
			v = r.Verdict
		}
	}
	return v
}
