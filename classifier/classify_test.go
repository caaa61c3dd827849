package classifier

import (
	"strings"
	"testing"
	"time"
)

const msec = time.Millisecond

// atRest is a server that takes 100 ms for a request alone, 70 of them in the
// forward pass.
var atRest = Stages{Preprocess: 10 * msec, Transfer: 5 * msec, Forward: 70 * msec, Postprocess: 5 * msec, Unattributed: 10 * msec}

// loaded is a report of a server under load: the stages are those of a mean
// request, and everything else follows from them.
func loaded(s Stages, change ...func(*Report)) Report {
	p := parts{float64(s.Queue), float64(s.ServerQueue), float64(s.Upload), float64(s.Preprocess), float64(s.Transfer), float64(s.Forward), float64(s.Postprocess), float64(s.Unattributed)}
	r := Report{
		Class: "POST /asr", Start: start, End: start.Add(10 * time.Second), Windows: 1,
		Requests: 200, OK: 200, Timed: 200, QueueTold: 200, Batched: 200, Shares: p.shares(), Means: s,
		Baseline: atRest.Core(), BaselineStages: atRest, BaselineN: 50, Explained: 0.9,
		Batch: 4, BatchMax: 8, BatchAtMax: 0.2, BusyOK: true, Busy: 0.8, BusyQueued: 0.8, Inflight: 4, Limit: 4,
		ThroughputElasticity: Estimate{Value: 0.05, CI95: [2]float64{0, 0.1}, N: 50, OK: true},
		Forward:              Line{Slope: msec, Intercept: 66 * msec, Elasticity: 0.05, CI95: [2]float64{0.02, 0.08}, N: 100, Against: "batch", OK: true},
	}
	r.Slowdown = float64(s.Core()) / float64(r.Baseline)
	for _, f := range change {
		f(&r)
	}
	return r
}

func busy(share float64) func(*Report) {
	return func(r *Report) { r.Busy, r.BusyQueued = share, share }
}

func elastic(e float64) func(*Report) {
	return func(r *Report) {
		r.Forward.Elasticity, r.Forward.CI95 = e, [2]float64{e - 0.05, e + 0.05}
		r.Forward.Slope = time.Duration(e * float64(r.Means.Forward) / r.Batch)
	}
}

func noLine(r *Report) { r.Forward = Line{N: 12} }

func with(s Stages, change func(*Stages)) Stages { change(&s); return s }

func TestClassify(t *testing.T) {
	untold := func(r *Report) { r.Timed, r.QueueTold, r.Batched, r.BusyOK = 0, 0, 0, false; r.Forward = Line{} }
	slower := func(r *Report) { r.Slowdown = float64(r.Means.Core()) / float64(r.Baseline) }
	for _, c := range []struct {
		name   string
		report Report
		want   Cause
		says   string // in evidence, advice or warnings
		doubt  bool   // confidence at most one half
	}{
		{"too few", loaded(atRest, func(r *Report) { r.Requests = 39 }), Unknown, "a verdict takes 40", true},
		{"microseconds sent as milliseconds", loaded(atRest, func(r *Report) { r.Timed, r.Suspect = 180, 20 }), Unknown, "cannot be true", false},
		{"seconds sent as milliseconds", loaded(atRest, func(r *Report) { r.Explained = 0.001 }), Unknown, "seconds sent as milliseconds", false},
		{"no device synchronisation", loaded(with(atRest, func(s *Stages) { s.Forward, s.Transfer = msec, 70*msec }),
			func(r *Report) { r.CopyOut, r.CopyOutBytes = 69*msec, 500 }), Unknown, "they wait for it", false},
		{"slow uploads", loaded(with(atRest, func(s *Stages) { s.Upload = 300 * msec })), Client, "upload of their bodies", false},
		{"at rest", loaded(atRest), Healthy, "1.0 times as long", false},
		{"one batch of waiting, and throughput rises", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 70 * msec }),
			func(r *Report) { r.ThroughputElasticity.Value = 0.95 }), Healthy, "batching itself costs", true},
		{"healthy, but 10 % are refused", loaded(with(atRest, func(s *Stages) { s.Queue = 20 * msec }),
			func(r *Report) { r.Rejected, r.OK = 20, 180 }), Compute, "batching itself costs", false},
		{"a batch timer", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 50 * msec }),
			func(r *Report) { r.BaselineStages.ServerQueue = 45 * msec; r.Baseline = 145 * msec; r.Slowdown = 1.05 }, busy(0.3)), Queue, "batch delay", false},
		{"no timings, own queue", loaded(with(atRest, func(s *Stages) { s.Queue, s.Unattributed = 400*msec, 160*msec }), slower, untold), Queue, "by half and watch", true},
		{"no timings, but room for more at once", loaded(with(atRest, func(s *Stages) { s.Queue = 400 * msec }), untold), Queue, "4.0 requests at once take the server 1.00 times as long", false},
		{"no timings, slow server", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec }), untold), Unknown, "Server-Timing", true},
		{"own limit, device idle", loaded(with(atRest, func(s *Stages) { s.Queue = 400 * msec }), busy(0.4)), Queue, "raise max_concurrency (4)", false},
		{"the server's limit", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 400 * msec })), Queue, "slots or workers", false},
		{"batches at their cap", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 400 * msec }), func(r *Report) { r.BatchAtMax = 0.95 }), Queue, "max_batch_size", false},
		{"full device", loaded(with(atRest, func(s *Stages) { s.Queue, s.Forward = 600*msec, 280*msec }), busy(1), elastic(0.95)), Compute, "no limit helps", false},
		{"forward grew most", loaded(with(atRest, func(s *Stages) { s.Queue, s.Forward = 100*msec, 280*msec }), busy(1), elastic(0.95)), Compute, "the forward pass took 210 ms more", false},
		{"batches that bring nothing, device idle", loaded(with(atRest, func(s *Stages) { s.ServerQueue, s.Forward = 100*msec, 280*msec }), busy(0.4), elastic(0.95)), Queue, "lower the server's batch delay", false},
		{"one batch of waiting, throughput flat", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 75 * msec }), busy(1)), Compute, "inherent", false},
		{"full, but the batch never varied", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 400 * msec }), busy(0.98), noLine, func(r *Report) { r.Batch, r.BatchMax, r.BatchAtMax = 1, 1, 1 }), Compute, "always one", false},
		{"full, but a limit of two forbids batches", loaded(with(atRest, func(s *Stages) { s.Queue, s.ServerQueue = 400*msec, 80*msec }), busy(0.98), noLine, func(r *Report) { r.Batch, r.BatchMax, r.BatchAtMax, r.Limit = 1, 1, 1, 2 }), Mixed, "no batch can form", true},
		{"one at a time while the device idles", loaded(with(atRest, func(s *Stages) { s.Queue = 400 * msec }), busy(0.7), noLine, func(r *Report) { r.Batch, r.BatchMax, r.BatchAtMax, r.Limit, r.Inflight = 1, 1, 1, 1, 1 }), Queue, "could run meanwhile", false},
		{"nothing known but the wait", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 400 * msec }), noLine, func(r *Report) { r.Batched, r.BusyOK = 0, false }), Queue, "hardly varied", true},
		{"idle, slope unknown", loaded(with(atRest, func(s *Stages) { s.ServerQueue = 400 * msec }), noLine, busy(0.3)), Queue, "below 60 % it has room", false},
		{"copies hold the device", loaded(with(atRest, func(s *Stages) { s.ServerQueue, s.Transfer = 300*msec, 160*msec }), busy(1),
			func(r *Report) { r.Copies, r.CopyBytes = 40, 1e6 }), Transfer, "merge the copies", false},
		{"full, half of it copies", loaded(with(atRest, func(s *Stages) { s.ServerQueue, s.Transfer = 400*msec, 60*msec }), busy(0.98), noLine,
			func(r *Report) { r.BaselineStages.Transfer = 60 * msec; r.Batch, r.BatchMax, r.BatchAtMax = 1, 1, 1 }), Mixed, "copies take 46 %", true},
		{"copies grew", loaded(with(atRest, func(s *Stages) { s.Transfer = 250 * msec }), func(r *Report) { r.Copies, r.CopyBytes = 1, 1e9 }), Transfer, "fewer bytes", false},
		{"decoding grew", loaded(with(atRest, func(s *Stages) { s.Preprocess = 300 * msec })), Host, "preprocessing took 290 ms more", false},
		{"formatting grew", loaded(with(atRest, func(s *Stages) { s.Postprocess = 300 * msec })), Host, "postprocessing", false},
		{"they wait for the decoder", loaded(with(atRest, func(s *Stages) { s.ServerQueue, s.Preprocess = 300*msec, 90*msec })), Host, "but for that stage", false},
		{"two alike", loaded(with(atRest, func(s *Stages) { s.Preprocess, s.Forward = 200*msec, 255*msec })), Mixed, "host and compute", false},
		{"grew where nobody looks, queue told", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec })), Unknown, "event loop", true},
		{"grew where nobody looks, queue not told", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec }), func(r *Report) { r.QueueTold, r.BusyOK = 0, false }), Queue, "inferred", true},
		{"the same, while the device is busy and batches are free", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec }), func(r *Report) { r.QueueTold = 0 }), Queue, "taken for waiting", false},
		{"the same on a full device", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec }), func(r *Report) { r.QueueTold = 0 }, elastic(0.9)), Compute, "taken for waiting", false},
		{"the same on an idle device, queue told", loaded(with(atRest, func(s *Stages) { s.Unattributed = 400 * msec }), busy(0.3)), Host, "while the device idles", false},
		{"everybody gave up", loaded(Stages{Unattributed: 400 * msec}, untold, func(r *Report) { r.OK, r.Canceled = 0, 200 }), Unknown, "clients gave up", true},
		{"no low load was ever seen", loaded(with(atRest, func(s *Stages) { s.Queue = 5 * msec }), func(r *Report) { r.Baseline, r.Slowdown, r.BaselineStages = 0, 0, Stages{} }), Healthy, "no request was seen at low load", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Classify(c.report, DefaultThresholds())
			text := strings.Join(append(append([]string{v.Advice}, v.Evidence...), v.Warnings...), "\n  ")
			if v.Cause != c.want {
				t.Errorf("the verdict is %s: want %s\n  %s", v.Cause, c.want, text)
			}
			if !strings.Contains(text, c.says) {
				t.Errorf("nothing says %q:\n  %s", c.says, text)
			}
			if c.doubt != (v.Confidence <= 0.5) || v.Confidence > 1 || v.Confidence < 0 {
				t.Errorf("the confidence is %v: doubt should be %v", v.Confidence, c.doubt)
			}
			if len(v.Evidence) == 0 && len(v.Warnings) == 0 {
				t.Error("a verdict without evidence")
			}
			if v.Advice == "" && v.Cause != Healthy && v.Cause != Unknown {
				t.Error("a problem without advice")
			}
		})
	}
}

func TestClassifyChangesNothingInTheReport(t *testing.T) {
	r := loaded(with(atRest, func(s *Stages) { s.Queue = 400 * msec }), noLine)
	r.Warnings = make([]string, 1, 10)
	r.Warnings[0] = "a"
	Classify(r, DefaultThresholds())
	if got := r.Warnings[:2][1]; got != "" {
		t.Errorf("Classify wrote %q into the report's warnings", got)
	}
}

func TestLatch(t *testing.T) {
	l := Latch{For: 20 * time.Second, KeepFor: 30 * time.Second}
	at := start
	step := func(c Cause, want Cause, changed bool) {
		t.Helper()
		at = at.Add(10 * time.Second)
		v, ch := l.Update(Verdict{Cause: c}, at)
		if v.Cause != want || ch != changed {
			t.Errorf("after %v of %s: shown %s, changed %v: want %s, %v", at.Sub(start), c, v.Cause, ch, want, changed)
		}
	}
	step(Unknown, Unknown, true)
	step(Queue, Queue, true) // the first word is shown at once
	began := at
	step(Queue, Queue, false)
	step(Compute, Queue, false)
	step(Queue, Queue, false) // a single window changes nothing
	step(Compute, Queue, false)
	step(Compute, Queue, false)
	if v, _ := l.Update(Verdict{Cause: Queue}, at); !v.Since.Equal(began) {
		t.Errorf("shown since %v: want %v", v.Since, began)
	}
	step(Compute, Queue, false)
	step(Compute, Queue, false)
	step(Compute, Compute, true) // 30 s after Queue was last seen, 20 s after Compute came
	step(Unknown, Compute, false)
	step(Unknown, Compute, false)
	step(Unknown, Unknown, true)
	step(Host, Host, true)
}
