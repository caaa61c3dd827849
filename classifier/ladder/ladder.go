// Package ladder measures a speech-recognition server by experiment: it
// presses with 1, 2, 4, 8, 16 requests at once and finds where latency turns
// (the ladder), splits one request into its stages (the probe), and changes one
// setting at a time (the sweep).
//
// A [Client] sends requests and makes an [classifier.Observation] of each, with
// the same reading of Server-Timing as the proxy. A [Runner] drives it through
// steps; what it measured is a [Run], raw records and all, from which
// [Summarize] makes the [Summary] that every report prints. The verdict is
// [classifier.Classify]'s, as for live traffic.
//
// In a closed loop each step measures a fixed number of requests after a
// warm-up of one request a client, by order of completion, and keeps the load
// up until the last of them: neither the first requests on cold connections
// nor the thinning out at the end count. In an open loop requests start when
// they are due, and latency counts from then.
package ladder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"weir/classifier"
)

// Step is one level of load: a concurrency (closed loop) or a rate (open).
type Step struct {
	Concurrency int     `json:"concurrency,omitempty"`
	Rate        float64 `json:"rate,omitempty"` // requests/s
	Arrivals    string  `json:"arrivals,omitempty"`
	Requests    int     `json:"requests"` // measured; warm-up apart

	// Of a sweep.
	Round   string         `json:"round,omitempty"`   // the setting that varies in it
	Factors map[string]int `json:"factors,omitempty"` // all settings in force
	Repeat  int            `json:"repeat,omitempty"`
}

// Level names a step's load.
func (s Step) Level() string {
	if s.Rate > 0 {
		return fmt.Sprintf("%g requests/s", s.Rate)
	}
	return fmt.Sprintf("concurrency %d", s.Concurrency)
}

// StepRun is what one step measured.
type StepRun struct {
	Step
	Samples []classifier.Observation // the measured requests, by completion
	Extra   int                      // warm-up and cool-down requests, not in Samples
	From    time.Time                // where the measured interval begins: the last warm-up's end
	Until   time.Time
	Client  ClientLoad
	Stopped string // why it ended early; empty: it did not
	Notes   []string
	joined  bool // weir's own records replaced what the answers told
}

// Run is a whole experiment with its raw records.
type Run struct {
	Header
	Steps []*StepRun
}

// Header says what was run. It holds no secret: of headers only the names.
type Header struct {
	Kind        string    `json:"kind"` // ladder, probe or sweep
	Version     string    `json:"version"`
	URL         string    `json:"url"`
	Shape       string    `json:"shape"`
	Clips       int       `json:"clips"`
	Seconds     float64   `json:"audio_seconds"`   // of all clips
	Paced       bool      `json:"paced,omitempty"` // audio at the speed of speech
	Seed        uint64    `json:"seed"`
	Started     time.Time `json:"started"`
	Interrupted bool      `json:"interrupted,omitempty"`
	Rounds      []Round   `json:"rounds,omitempty"` // of a sweep
}

// Runner drives a client through steps.
type Runner struct {
	Client   *Client
	Pool     *Pool         // nil: requests are sent by this process
	Seed     uint64        // of arrivals and of the order of a sweep
	Warmup   int           // requests, one at a time, before the first step
	Pause    time.Duration // between steps, after the last answer; 0: none
	Inflight int           // at most, in an open loop; 0: 1000
	Progress Progress      // nil: none
	Record   *Recorder     // nil: records are only kept in memory

	first  int64 // number of the next request
	alone  time.Duration
	anchor time.Time
}

// onWall puts an instant on one wall clock that runs like the monotonic one:
// records that are read back from a file then give the same numbers.
func (r *Runner) onWall(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	if r.anchor.IsZero() {
		r.anchor = time.Now()
	}
	return r.anchor.Round(0).Add(t.Sub(r.anchor))
}

func (r *Runner) putOnWall(o *classifier.Observation) {
	for _, t := range []*time.Time{&o.Enqueued, &o.Dequeued, &o.Sent, &o.Responded, &o.Done} {
		*t = r.onWall(*t)
	}
}

// Progress is told how far the run is.
type Progress interface {
	Step(s Step, number, of int) // a step begins; of is 0 where the number of steps is not known
	Request(done, of int, last time.Duration)
	StepDone(s *StepRun)
}

// ErrAllFailed tells that no request of a step succeeded.
var ErrAllFailed = errors.New("no request succeeded")

// failuresToStop ends a step that has had nothing but failures.
const failuresToStop = 20

// defaultInflight bounds an open loop whose server does not keep up.
const defaultInflight = 1000

// Warm sends the warm-up and returns an error if none of it succeeded: then
// there is nothing to measure. The error says what happened and what to do.
func (r *Runner) Warm(ctx context.Context) error {
	var last classifier.Observation
	good := false
	for range max(1, r.Warmup) {
		last = r.Client.send(ctx, r.first, time.Now(), 1)
		r.first++
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if failure(&last) == "" {
			good, r.alone = true, last.Total()
		}
	}
	if !good {
		if mistake := r.Client.mistake.Load(); mistake != nil {
			return fmt.Errorf("%w: %s: %w", ErrAllFailed, r.Client.target.Shown(), *mistake)
		}
		return fmt.Errorf("%w: %s: %s", ErrAllFailed, r.Client.target.Shown(), remedy(failure(&last)))
	}
	return nil
}

// remedy says what a kind of failure means and what to do about it.
func remedy(kind string) string {
	text, known := map[string]string{
		"connection_refused": "nothing listens there: start the server, or correct the address",
		"no_such_host":       "its host name is not known: correct it",
		"timeout":            "no answer in time: raise --timeout, or look at the server",
		"unexpected_answer":  "the answer is not what --expect asks for: look at it with curl, or correct --expect",
		"status_400":         "the server cannot read the request: try another --shape, --file-field or --field",
		"status_401":         "the server wants authorization: add --header or --token-env",
		"status_403":         "the server refuses this caller: add --header or --token-env",
		"status_404":         "there is no such path: give the path of a transcription in --url",
		"status_405":         "that path takes no POST: give the path of a transcription in --url",
		"status_415":         "the server does not take this kind of audio: convert it, or try another --shape",
		"status_422":         "the server cannot read the request: try another --shape, --file-field or --field",
	}[kind]
	if !known {
		text = "look at the server's log"
	}
	return kind + ": " + text
}

// Step measures one level of load. The error is ErrAllFailed or the context's;
// what was measured until then is returned as well.
func (r *Runner) Step(ctx context.Context, step Step, number, of int) (*StepRun, error) {
	r.Record.begin(number, step)
	if r.Progress != nil {
		r.Progress.Step(step, number, of)
	}
	t := r.newTally(step, number)
	s := stream{
		Concurrency: step.Concurrency, Rate: step.Rate, Arrivals: step.Arrivals, Total: t.warm + t.want,
		MaxInflight: r.Inflight, Seed: r.Seed + uint64(number), First: r.first,
	}
	if s.MaxInflight <= 0 {
		s.MaxInflight = defaultInflight
	}
	if r.Pool != nil {
		t.run.Client = r.Pool.run(ctx, s, t.stop, t.add)
	} else {
		m := r.Client.startMeter()
		r.Client.run(ctx, s, t.stop, t.add)
		t.run.Client = m.end()
	}
	r.first += int64(t.done)
	return t.run, r.finish(ctx, t, number)
}

func (r *Runner) finish(ctx context.Context, t *tally, number int) error {
	run := t.run
	if ctx.Err() != nil {
		run.Stopped = "interrupted"
	}
	if r.Client.target.Admin != "" {
		if err := r.Client.joinWeir(ctx, run); err != nil {
			run.Notes = append(run.Notes, "weir's own records: "+err.Error())
		}
	}
	r.Record.end(number, run)
	if r.Progress != nil {
		r.Progress.StepDone(run)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.good == 0 {
		return fmt.Errorf("%w at %s: %s", ErrAllFailed, run.Level(), remedy(t.lastFailure))
	}
	return nil
}

// tally counts the requests of one step as they end.
type tally struct {
	r           *Runner
	number      int
	warm, want  int
	stop        chan struct{}
	mu          sync.Mutex
	run         *StepRun
	done, good  int
	lastFailure string
	stopped     bool
}

func (r *Runner) newTally(step Step, number int) *tally {
	t := &tally{r: r, number: number, warm: step.Concurrency, want: step.Requests, stop: make(chan struct{})}
	if step.Rate > 0 {
		t.warm = max(1, step.Requests/10)
	}
	t.run = &StepRun{Step: step, From: r.onWall(time.Now())}
	return t
}

// add takes the next request that ended; the order of calls is the order of
// completion.
func (t *tally) add(o classifier.Observation) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := failure(&o)
	if kind == "canceled" {
		return
	}
	t.r.putOnWall(&o)
	t.done++
	if kind == "" {
		t.good++
	} else {
		t.lastFailure = kind
	}
	phase := t.place(o)
	t.r.Record.sample(t.number, phase, &o)
	if t.r.Progress != nil {
		t.r.Progress.Request(len(t.run.Samples), t.want, latency(&o))
	}
	switch {
	case len(t.run.Samples) >= t.want:
		t.end("")
	case t.good == 0 && t.done >= failuresToStop:
		t.end("nothing but failures")
	}
}

// place puts a request into its phase.
func (t *tally) place(o classifier.Observation) (phase string) {
	if t.done <= t.warm && !t.stopped && !(t.good == 0 && t.lastFailure != "") {
		t.run.Extra++
		t.run.From = o.Done
		return phaseWarm
	}
	if t.stopped {
		t.run.Extra++
		return phaseCool
	}
	t.run.Samples = append(t.run.Samples, o)
	t.run.Until = o.Done
	return phaseMeasured
}

func (t *tally) end(why string) {
	if !t.stopped {
		t.stopped = true
		t.run.Stopped = why
		close(t.stop)
	}
}

// latency is what a request cost its sender, from when it was due.
func latency(o *classifier.Observation) time.Duration { return o.Before + o.Total() }

// settle waits for the server to be empty before the next step.
func (r *Runner) settle(ctx context.Context, last *StepRun) error {
	if !sleep(ctx, r.Pause) {
		return ctx.Err()
	}
	if r.Client.target.Admin != "" {
		if err := r.Client.drained(ctx); err != nil {
			last.Notes = append(last.Notes, err.Error())
		}
		return ctx.Err()
	}
	if !gaveUp(last) {
		return nil // every request was answered, so none is left in the server
	}
	for range drainProbes {
		o := r.Client.send(ctx, 0, time.Now(), 1)
		if err := ctx.Err(); err != nil {
			return err
		}
		if failure(&o) == "" && o.Total() < 2*r.alone {
			return nil
		}
		if !sleep(ctx, time.Second) {
			return ctx.Err()
		}
	}
	last.Notes = append(last.Notes, "the server had not recovered from this step's abandoned requests when the next step began")
	return nil
}

const drainProbes = 30

// gaveUp tells whether requests may still be at work in the server.
func gaveUp(s *StepRun) bool {
	for i := range s.Samples {
		if s.Samples[i].Outcome != classifier.OK {
			return true
		}
	}
	return false
}

// Ladder runs the steps. A nil error means that all were measured; otherwise
// the run holds what was measured until then.
func (r *Runner) Ladder(ctx context.Context, steps []Step) (runs []*StepRun, err error) {
	for i, step := range steps {
		if i > 0 {
			if err := r.settle(ctx, runs[i-1]); err != nil {
				return runs, err
			}
		}
		run, err := r.Step(ctx, step, i+1, len(steps))
		runs = append(runs, run)
		if err != nil {
			return runs, err
		}
	}
	return runs, nil
}

// Adapt runs 1, 2, 4, ... until the last doubling gained less than a quarter
// of what it could, or to most; then it halves the interval in which latency
// turns, twice at most. requests gives the measured requests of a step.
func (r *Runner) Adapt(ctx context.Context, most int, requests func(concurrency int) int) (runs []*StepRun, err error) {
	next := 1
	for next > 0 {
		if len(runs) > 0 {
			if err := r.settle(ctx, runs[len(runs)-1]); err != nil {
				return runs, err
			}
		}
		run, err := r.Step(ctx, Step{Concurrency: next, Requests: requests(next)}, len(runs)+1, 0)
		runs = append(runs, run)
		if err != nil {
			return runs, err
		}
		next = nextStep(runs, most)
	}
	return runs, nil
}

// maxBisections bounds the steps that Adapt puts between others.
const maxBisections = 2

// nextStep is the concurrency that tells most, given what was measured; 0: the
// ladder is complete.
func nextStep(runs []*StepRun, most int) int {
	points := pointsOf(runs)
	last := points[len(points)-1]
	doublings := 1
	for n := 1; n < int(last.n); n *= 2 {
		doublings++
	}
	if len(runs) == doublings && !saturated(points) && int(last.n)*2 <= most {
		return int(last.n) * 2
	}
	if len(runs)-doublings >= maxBisections {
		return 0
	}
	low, high, ok := onset(points)
	if middle := bisect(low, high); ok && middle > 0 {
		return middle
	}
	return 0
}

// bisect is the geometric middle of two concurrencies; 0 if none is between.
func bisect(low, high int) int {
	for m := low + 1; m < high; m++ {
		if m*m >= low*high {
			return m
		}
	}
	if high-low > 1 {
		return high - 1
	}
	return 0
}

// RequestsFor is how many requests a step takes by default: enough for a knee,
// and for a 95th percentile with an upper bound.
func RequestsFor(concurrency int) int { return max(160, needed(concurrency)) }

// Ready waits until a request succeeds, for at most limit.
func (r *Runner) Ready(ctx context.Context, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for {
		o := r.Client.send(ctx, r.first, time.Now(), 1)
		kind := failure(&o)
		switch {
		case kind == "":
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("the server did not answer well within %s of the change: %s", limit, remedy(kind))
		}
		if !sleep(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}
