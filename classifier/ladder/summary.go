package ladder

import (
	"fmt"
	"math"
	"slices"
	"time"

	"weir/classifier"
)

// VerdictJSON is a verdict as reports print it.
type VerdictJSON struct {
	Cause      classifier.Cause `json:"cause"`
	Confidence float64          `json:"confidence"`
	Evidence   []string         `json:"evidence"`
	Advice     string           `json:"advice"`
	Warnings   []string         `json:"warnings"`
}

// Summary is all that a report says of a run.
type Summary struct {
	Run      Header       `json:"run"`
	Steps    []Row        `json:"steps"`
	Knee     *Knee        `json:"knee,omitempty"`  // of a ladder
	Stages   []ProbeClip  `json:"clips,omitempty"` // of a probe
	Sweep    []SweepRow   `json:"rounds,omitempty"`
	Effects  []Effect     `json:"effects,omitempty"`
	Verdict  *VerdictJSON `json:"verdict"`
	Warnings []string     `json:"warnings"`
	Forward  []Execution  `json:"forward,omitempty"` // forward pass by batch
	Line     *LineJSON    `json:"forward_line,omitempty"`
}

// LineJSON is the straight line of forward against batch.
type LineJSON struct {
	Intercept  float64    `json:"intercept_ms"`
	Slope      float64    `json:"slope_ms"`
	Elasticity float64    `json:"elasticity"`
	CI95       [2]float64 `json:"elasticity_ci95"`
	N          int        `json:"executions"`
}

// Execution is the forward pass at one batch size.
type Execution struct {
	Batch int     `json:"batch"`
	Mean  float64 `json:"forward_ms"`
	Low   float64 `json:"low_ms"` // 95 % interval of the mean
	High  float64 `json:"high_ms"`
	N     float64 `json:"executions"`
}

// Summarize computes the report of a run.
func Summarize(run *Run) *Summary {
	s := &Summary{Run: run.Header, Warnings: []string{}}
	for _, step := range run.Steps {
		s.Steps = append(s.Steps, summarizeStep(step))
	}
	switch run.Kind {
	case KindProbe:
		s.Stages = probeClips(run)
	case KindSweep:
		s.classify(run)
		s.sweep(run)
	default:
		s.classify(run)
		k := FindKnee(s.Steps, run.Paced)
		s.Knee = &k
	}
	s.executions(run)
	s.warn(run)
	return s
}

// The kinds of runs.
const (
	KindLadder = "ladder"
	KindProbe  = "probe"
	KindSweep  = "sweep"
)

// classify replays the records through the classifier's window, one cut for
// each step, and takes the verdict of the step with the most load for the
// run's. Steps of a sweep have different settings, so each is set against the
// low load alone.
func (s *Summary) classify(run *Run) {
	w := &classifier.Window{Length: windowLength(run)}
	var most float64
	for i, step := range run.Steps {
		if len(step.Samples) == 0 {
			continue
		}
		if step.Round != "" {
			w = &classifier.Window{Length: windowLength(run)}
			replay(w, run.Steps[0])
		}
		for _, report := range replay(w, step) {
			s.Steps[i].Verdict = verdictOf(classifier.Classify(report, classifier.DefaultThresholds()))
			if load := step.Rate + float64(step.Concurrency); load >= most {
				most, s.Verdict = load, s.Steps[i].Verdict
				s.Line = lineOf(report.Forward)
			}
		}
	}
}

// replay adds a step to a window; the pause before it belongs to no step.
func replay(w *classifier.Window, step *StepRun) []classifier.Report {
	w.Cut(step.From)
	for j := range step.Samples {
		w.Add(&step.Samples[j])
	}
	return w.Cut(step.Until)
}

func lineOf(l classifier.Line) *LineJSON {
	if !l.OK || l.Against != "batch" {
		return nil
	}
	return &LineJSON{ms(l.Intercept), ms(l.Slope), l.Elasticity, l.CI95, l.N}
}

func verdictOf(v classifier.Verdict) *VerdictJSON {
	return &VerdictJSON{v.Cause, v.Confidence, append([]string{}, v.Evidence...), v.Advice, append([]string{}, v.Warnings...)}
}

// windowLength is the median length of the steps, to 10 ms so that it is the
// same when it is computed again from a file: the classifier's sub-windows are
// a tenth of it.
func windowLength(run *Run) time.Duration {
	var all []time.Duration
	for _, s := range run.Steps {
		if d := s.Until.Sub(s.From); d > 0 {
			all = append(all, d)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return min(max(all[len(all)/2].Round(10*time.Millisecond), 100*time.Millisecond), 10*time.Minute)
}

// executions are the forward passes by batch size, each execution once: a
// request weighs 1/batch.
func (s *Summary) executions(run *Run) {
	type sums struct{ w, x, xx float64 }
	by := map[int]*sums{}
	for _, step := range run.Steps {
		for i := range step.Samples {
			o := &step.Samples[i]
			f, ok := o.In(classifier.StageForward)
			if !ok || o.BatchSize <= 0 || failure(o) != "" {
				continue
			}
			b := by[o.BatchSize]
			if b == nil {
				b = new(sums)
				by[o.BatchSize] = b
			}
			w := 1 / float64(o.BatchSize)
			b.w, b.x, b.xx = b.w+w, b.x+w*ms(f), b.xx+w*ms(f)*ms(f)
		}
	}
	for batch, b := range by {
		e := Execution{Batch: batch, N: b.w, Mean: b.x / b.w}
		e.Low, e.High = e.Mean, e.Mean
		if b.w > 1 {
			half := student(0.975, b.w-1) * math.Sqrt(max(0, b.xx/b.w-e.Mean*e.Mean)/(b.w-1))
			e.Low, e.High = max(0, e.Mean-half), e.Mean+half
		}
		s.Forward = append(s.Forward, e)
	}
	slices.SortFunc(s.Forward, func(a, b Execution) int { return a.Batch - b.Batch })
}

// Limits beyond which the generator itself is in doubt.
const (
	littleOff = 0.10 // throughput times latency over concurrency, from 1
	rateOff   = 0.05 // achieved rate below the wanted one
	delayOff  = 0.05 // starts after they were due, over the mean latency
	cpuFull   = 0.70 // of the cores that the client may use
	lateShare = 0.10 // the client's scheduling delay over the mean latency
	lateLeast = 5 * time.Millisecond
	manyLost  = 0.05 // failures
	fewForP95 = 59
	unsteady  = 0.25 // half width of throughput's interval, relative
)

// warn collects what weakens the numbers.
func (s *Summary) warn(run *Run) {
	add := func(format string, args ...any) { s.Warnings = append(s.Warnings, fmt.Sprintf(format, args...)) }
	if run.Interrupted {
		add("the run was interrupted: these are the steps until then")
	}
	for i := range s.Steps {
		r := &s.Steps[i]
		for _, w := range r.doubts(run.Paced) {
			add("%s: %s", r.name(), w)
		}
		for _, n := range run.Steps[i].Notes {
			add("%s: %s", r.name(), n)
		}
	}
	if few := s.fewest(); few > 0 && few < fewForP95 && run.Kind != KindProbe {
		add("with %d requests a step P95 has no upper bound; it takes %d (and 100 for one that means much)", few, fewForP95)
	}
}

func (r *Row) name() string {
	if r.Round != "" {
		return fmt.Sprintf("%s=%d, repeat %d", r.Round, r.Factors[r.Round], r.Repeat)
	}
	return r.Level()
}

func (s *Summary) fewest() (n int) {
	for _, r := range s.Steps {
		if alone := s.Run.Kind == KindSweep && r.Round == ""; !alone && r.Succeeded > 0 && (n == 0 || r.Succeeded < n) {
			n = r.Succeeded
		}
	}
	return n
}

// doubts are the checks of one step.
func (r *Row) doubts(paced bool) (w []string) {
	add := func(format string, args ...any) { w = append(w, fmt.Sprintf(format, args...)) }
	if r.Stopped != "" {
		add("%s after %d requests", r.Stopped, r.Sent)
	}
	if lost := r.Sent - r.Succeeded; r.Sent > 0 && float64(lost) > manyLost*float64(r.Sent) {
		add("%d of %d requests failed; latency is that of the others", lost, r.Sent)
	}
	if r.Concurrency > 0 && !paced && r.Succeeded == r.Sent && r.Stopped == "" && math.Abs(r.Inflight/float64(r.Concurrency)-1) > littleOff {
		add("throughput times latency is %.2f, not %d, as Little's law has it: the client did not keep that many in flight", r.Inflight, r.Concurrency)
	}
	if half := t7 * zeroNaN(r.relRate); r.Concurrency > 0 && r.Round == "" && half > unsteady { // a sweep judges by its repeats
		add("throughput was not steady and is known to within %.0f %% only: more --requests, or a quieter machine", 100*half)
	}
	if r.Rate > 0 && r.Achieved > 0 && r.Arrivals == Constant && r.Achieved < (1-rateOff)*r.Rate {
		add("the client started %.3g requests/s, not %.3g: it is the limit; use --workers", r.Achieved, r.Rate)
	}
	if r.Rate > 0 && r.Delay > delayOff*r.Mean {
		add("requests started %s ms after they were due, on average: too many are under way for --max-inflight, or the client is the limit; use --workers", number(r.Delay))
	}
	if r.Client.Cores > 0 && r.Client.CPU > cpuFull*float64(r.Client.Cores) {
		add("the client kept %.1f of %d cores busy: it may be the limit; run it on another machine", r.Client.CPU, r.Client.Cores)
	}
	if late := ms(r.Client.Late); r.Client.Late > lateLeast && late > lateShare*r.Mean {
		add("one in a hundred of the client's timers was %.1f ms late or more, %.0f %% of the mean latency: its machine is busy, and latency holds some of that", late, 100*late/r.Mean)
	}
	if r.Concurrency > 0 && r.Client.Connections > int64(r.Concurrency)+int64(r.Sent)/2 {
		add("%d connections for %d requests: the server closes each, so their set-up counts as latency", r.Client.Connections, r.Sent+r.Extra)
	}
	return w
}

// student is the quantile of Student's t, by the Cornish–Fisher expansion
// (Abramowitz and Stegun 26.7.5) from 3 degrees of freedom, and exactly below.
func student(p, dof float64) float64 {
	switch {
	case dof < 1.5:
		return math.Tan(math.Pi * (p - 0.5))
	case dof < 2.5:
		a := 2*p - 1
		return a * math.Sqrt(2/(1-a*a))
	}
	z := math.Sqrt2 * math.Erfinv(2*p-1)
	z3, z5, z7 := z*z*z, math.Pow(z, 5), math.Pow(z, 7)
	return z + (z3+z)/(4*dof) + (5*z5+16*z3+3*z)/(96*dof*dof) + (3*z7+19*z5+17*z3-15*z)/(384*dof*dof*dof)
}
