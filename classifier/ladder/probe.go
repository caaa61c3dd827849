package ladder

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// ProbeStage is one stage of one clip, over the repeats. Times are in
// milliseconds.
type ProbeStage struct {
	Name   string     `json:"name"`
	Median float64    `json:"median_ms"`
	Range  [2]float64 `json:"median_ci95_ms"` // by order statistics; equal to min and max with few repeats
	Spread float64    `json:"iqr_ms"`         // between the quartiles
	Share  float64    `json:"share"`          // of the sum of the medians
}

// ProbeClip is one audio file's request, split into its stages.
type ProbeClip struct {
	Clip    string       `json:"clip"`
	Seconds float64      `json:"audio_seconds"`
	Repeats int          `json:"repeats"` // that succeeded
	Total   ProbeStage   `json:"total"`
	Stages  []ProbeStage `json:"stages"`
	Largest string       `json:"largest"` // empty: the repeats disagree too much to say
	Note    string       `json:"note"`
}

// minRepeats is the least number for which the range of the values holds the
// median with 95 % confidence.
const minRepeats = 6

// Probe sends each clip n times, one request at a time, and returns one step
// for each clip.
func (r *Runner) Probe(ctx context.Context, n int) (runs []*StepRun, err error) {
	for i := range r.Client.bodies {
		s := Step{Concurrency: 1, Requests: n}
		r.Record.begin(i+1, s)
		if r.Progress != nil {
			r.Progress.Step(s, i+1, len(r.Client.bodies))
		}
		run := &StepRun{Step: s, From: r.onWall(time.Now())}
		runs = append(runs, run)
		err = r.probeClip(ctx, run, int64(i), i+1)
		r.Record.end(i+1, run)
		if r.Progress != nil {
			r.Progress.StepDone(run)
		}
		if err != nil {
			return runs, err
		}
	}
	return runs, nil
}

func (r *Runner) probeClip(ctx context.Context, run *StepRun, clip int64, number int) error {
	m := r.Client.startMeter()
	defer func() { run.Client = m.end() }()
	good, last := 0, ""
	for range run.Requests {
		o := r.Client.send(ctx, clip, time.Now(), 1)
		if err := ctx.Err(); err != nil {
			run.Stopped = "interrupted"
			return err
		}
		if last = failure(&o); last == "" {
			good++
		}
		r.putOnWall(&o)
		run.Samples = append(run.Samples, o)
		run.Until = o.Done
		r.Record.sample(number, phaseMeasured, &o)
		if r.Progress != nil {
			r.Progress.Request(len(run.Samples), run.Requests, latency(&o))
		}
	}
	if r.Client.target.Admin != "" {
		if err := r.Client.joinWeir(ctx, run); err != nil {
			run.Notes = append(run.Notes, "weir's own records: "+err.Error())
		}
	}
	if good == 0 {
		return fmt.Errorf("%w with %s: %s", ErrAllFailed, r.Client.bodies[clip].clip.Name, remedy(last))
	}
	return nil
}

func probeClips(run *Run) (clips []ProbeClip) {
	for _, s := range run.Steps {
		if len(s.Samples) > 0 {
			clips = append(clips, probeOne(s))
		}
	}
	return clips
}

func probeOne(s *StepRun) ProbeClip {
	c := ProbeClip{Clip: s.Samples[0].Target, Seconds: s.Samples[0].AudioSeconds}
	var total []float64
	var parts [len(stageKeys)][]float64
	told := false
	for i := range s.Samples {
		o := &s.Samples[i]
		if failure(o) != "" {
			continue
		}
		c.Repeats++
		total = append(total, ms(latency(o)))
		l := o.Ledger()
		told = told || trusted(o, l)
		for k, d := range ledgerParts(o, l) {
			parts[k] = append(parts[k], ms(d))
		}
	}
	if c.Repeats == 0 {
		c.Note = "no request succeeded"
		return c
	}
	c.Total = probeStage("total", total)
	var sum float64
	for k, values := range parts {
		p := probeStage(stageKeys[k], values)
		sum += p.Median
		if p.Median > 0 || slices.Max(values) > 0 {
			c.Stages = append(c.Stages, p)
		}
	}
	for k := range c.Stages {
		c.Stages[k].Share = c.Stages[k].Median / math.Max(sum, 1e-9)
	}
	c.judge(told)
	return c
}

// probeStage summarises the values of one stage.
func probeStage(name string, values []float64) ProbeStage {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	p := ProbeStage{Name: name, Median: (v[(n-1)/2] + v[n/2]) / 2, Spread: v[min(3*n/4, n-1)] - v[n/4]}
	low, high := quantileRanks(n, 0.5)
	p.Range = [2]float64{v[low], v[min(high, n-1)]}
	return p
}

// judge names the largest stage, if the repeats agree that it is: the interval
// of its median must lie above that of every other.
func (c *ProbeClip) judge(told bool) {
	if !told {
		c.Note = "the server tells no stages: let it send Server-Timing, or give weir's admin address with --weir"
		return
	}
	if c.Repeats < minRepeats {
		c.Note = fmt.Sprintf("%d repeats are too few to judge: run it with --repeats %d or more", c.Repeats, minRepeats)
		return
	}
	best := c.Stages[0]
	for _, s := range c.Stages {
		if s.Median > best.Median {
			best = s
		}
	}
	for _, s := range c.Stages {
		if s.Name != best.Name && s.Range[1] >= best.Range[0] {
			c.Note = fmt.Sprintf("the repeats disagree too much to judge: the median of %s lies between %.4g and %.4g ms, that of %s between %.4g and %.4g ms; run more with --repeats",
				best.Name, best.Range[0], best.Range[1], s.Name, s.Range[0], s.Range[1])
			return
		}
	}
	c.Largest = best.Name
	if best.Spread > best.Median/2 {
		c.Note = fmt.Sprintf("%s varies much: half of its repeats lie %.4g ms apart", best.Name, best.Spread)
	}
}
