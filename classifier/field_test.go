package classifier

import (
	"math"
	"strings"
	"testing"
	"time"
)

// A rung is what a public report tells of one level of load: times of a mean
// request in ms, and how many were in the server. Zero is not told.
type rung struct {
	c                                            int     // closed clients
	latency, queue, pre, transfer, forward, post float64 // ms
	batch                                        int
	refused                                      float64 // share answered 503, after the latency
	told, queueTold, together                    bool
}

// climb plays the rungs, each for the given time, as c clients whose answers
// are spread evenly (or as told), and returns the last verdict.
func climb(t *testing.T, each time.Duration, rungs ...rung) Verdict {
	t.Helper()
	var all []Observation
	at := time.Duration(0)
	for _, r := range rungs {
		gap := time.Duration(r.latency / float64(r.c) * 1e6)
		n := 0
		for done := at + gap; done < at+each; done += gap {
			n++
			if r.together { // all c at once, then nothing until the next c
				done += time.Duration(r.c-1) * gap
				for range r.c - 1 {
					all = append(all, *r.observation(done, n))
				}
			}
			all = append(all, *r.observation(done, n))
		}
		at += each
	}
	raw := judge(all, at).raw
	if len(raw) == 0 {
		t.Fatal("no verdict")
	}
	return raw[len(raw)-1]
}

func (r *rung) observation(done time.Duration, n int) *Observation {
	ms := func(v float64) time.Duration { return time.Duration(v * 1e6) }
	o := &Observation{Class: "POST /asr", Status: 200, Inflight: r.c, BatchSize: r.batch, AudioSeconds: 5, Done: start.Add(done)}
	o.Enqueued = o.Done.Add(-ms(r.latency))
	o.Dequeued, o.Sent, o.Responded = o.Enqueued, o.Enqueued, o.Done
	if float64(n%100) < 100*r.refused {
		o.Status = 503
		return o
	}
	if !r.told {
		return o
	}
	o.Source = "header"
	add := func(name string, s Stage, v float64) {
		o.Timings = append(o.Timings, Timing{Name: name, Stage: s, Dur: ms(v), Synced: true})
	}
	if r.queueTold {
		add("queue", StageQueue, r.queue)
	}
	add("preprocess", StagePreprocess, r.pre)
	add("h2d", StageTransfer, r.transfer)
	add("forward", StageForward, r.forward)
	add("postprocess", StagePostprocess, r.post)
	return o
}

func (v Verdict) text() string {
	return strings.Join(append(append([]string{v.Advice}, v.Evidence...), v.Warnings...), "\n")
}

// TestFieldCases holds the classifier against public reports. Where the
// numbers of a report cannot carry its label without a source that is not
// there, the right answer is doubt, and the test says what would settle it.
func TestFieldCases(t *testing.T) {
	const span = 40 * time.Second
	half := 20 * time.Second
	for _, c := range []struct {
		name    string
		verdict func(t *testing.T) Verdict
		want    []Cause // of answers; Unknown: doubt
		says    string
	}{
		{"C02 a host that orchestrates: forward grew, no device busy told", func(t *testing.T) Verdict {
			return climb(t, span,
				rung{c: 1, latency: 42.93, pre: 5.20, queue: 1.03, forward: 35.93, told: true, queueTold: true},
				rung{c: 32, latency: 159.47, pre: 20.15, queue: 44.29, forward: 86.75, told: true, queueTold: true})
		}, []Cause{Unknown}, "utilisation"},
		{"C03 admission at its limit, seen from outside: a fifth is shed", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 100}, rung{c: 8, latency: 205}, rung{c: 16, latency: 337}, rung{c: 32, latency: 612}, rung{c: 64, latency: 1255, refused: 0.22})
		}, []Cause{Unknown}, "stage timings"},
		{"C04 decode at its cap, with batches told", func(t *testing.T) Verdict {
			row := func(c int, latency, forward, queue float64) rung {
				return rung{c: c, batch: min(c, 32), latency: latency, forward: forward, queue: queue, pre: 3, told: true, queueTold: true}
			}
			return climb(t, span, row(1, 102, 97, 0), row(2, 127, 120, 0), row(4, 174, 165, 0), row(8, 255, 243, 0), row(16, 395, 375, 4),
				row(32, 668, 614, 30), row(64, 1339, 614, 700))
		}, []Cause{Compute}, ""},
		{"C04 the same, seen from outside", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 102}, rung{c: 2, latency: 127}, rung{c: 4, latency: 174}, rung{c: 8, latency: 255}, rung{c: 16, latency: 395}, rung{c: 32, latency: 668}, rung{c: 64, latency: 1339})
		}, []Cause{Unknown}, "at most 9"},
		{"C09 host-bound, but the same picture from outside as C04", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 100}, rung{c: 8, latency: 360}, rung{c: 16, latency: 550}, rung{c: 32, latency: 840}, rung{c: 48, latency: 1180}, rung{c: 64, latency: 1510})
		}, []Cause{Unknown}, "at most"},
		{"C05 audio is loaded in the event loop, in no stage", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 260, forward: 200, queue: 1, told: true, queueTold: true, batch: 1},
				rung{c: 128, latency: 25000, forward: 300, queue: 2, told: true, queueTold: true, batch: 1})
		}, []Cause{Host, Unknown}, "event loop"},
		{"C07 refused after seconds of preprocessing", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 500}, rung{c: 60, latency: 6500, refused: 0.3})
		}, []Cause{Unknown}, "stage timings"},
		{"C15 large tensors in shared memory: the device does one at a time", func(t *testing.T) Verdict {
			return climb(t, span, rung{c: 1, latency: 17.9, queue: 0.11, transfer: 1.649, forward: 15.665, told: true, queueTold: true},
				rung{c: 4, latency: 67.7, queue: 50.0, transfer: 1.649, forward: 15.665, told: true, queueTold: true})
		}, []Cause{Compute}, "one"},
		{"C30 answers by order of arrival: a staircase", func(t *testing.T) Verdict {
			return climb(t, half, rung{c: 1, latency: 450}, rung{c: 10, latency: 4500})
		}, []Cause{Unknown}, "works on one request at a time"},
		{"C32 two at once take twice as long, and end together", func(t *testing.T) Verdict {
			return climb(t, 90*time.Second, rung{c: 1, latency: 1000}, rung{c: 4, latency: 4000, together: true})
		}, []Cause{Unknown}, "share the device's time"},
		{"C43 an async endpoint that blocks: one by one", func(t *testing.T) Verdict {
			return climb(t, 60*time.Second, rung{c: 1, latency: 1000}, rung{c: 2, latency: 2000}, rung{c: 10, latency: 10000})
		}, []Cause{Unknown}, "works on one request at a time"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := c.verdict(t)
			if !right(v, c.want) || !strings.Contains(v.text(), c.says) {
				t.Errorf("want %v and %q: %s", c.want, c.says, tell(v))
			}
		})
	}
}

// batchRow is a line of Triton's batch statistics.
type batchRow struct {
	batch, executions int
	each              float64 // ms
}

// C01: a dump of Triton's statistics. Each request is charged its whole
// batch's time, so that the sum of compute is 7.6 times the busy time.
func TestFieldCaseTritonWhisper(t *testing.T) {
	rows := []batchRow{{1, 60, 299.48}, {2, 17, 380.81}, {3, 14, 525.33}, {4, 7, 434.79}, {5, 2, 536.36}, {6, 4, 573.50}, {7, 3, 641.76}, {8, 659, 710.33}}
	var w Window
	at := 0.0 // ms: the device's clock
	for _, r := range rows {
		for range r.executions {
			at += r.each
			for range r.batch {
				o := request(0, 0, 0, 0, 0, 0, 0, 0, 0)
				o.Done = start.Add(time.Duration(at * 1e6))
				o.Enqueued = o.Done.Add(-time.Duration((2217.2 + r.each + 1.7) * 1e6))
				o.Dequeued, o.Sent, o.Responded = o.Enqueued, o.Enqueued, o.Done
				o.BatchSize, o.Inflight = r.batch, 32
				o.Timings = []Timing{{Name: "queue", Stage: StageQueue, Dur: 2217200 * time.Microsecond}, {Name: "compute_input", Stage: StageTransfer, Dur: 1160 * time.Microsecond},
					{Name: "compute_infer", Stage: StageForward, Dur: time.Duration(r.each * 1e6)}, {Name: "compute_output", Stage: StageTransfer, Dur: 540 * time.Microsecond}}
				w.Add(o)
			}
		}
	}
	r := cutOne(t, &w, time.Duration(at*1e6)+time.Second)
	isNear(t, "the queue's share", r.Shares.ServerQueue, 0.7597, 0.01)
	isNear(t, "forward's share", r.Shares.Forward, 0.2398, 0.01)
	isNear(t, "the mean batch", r.Batch, 7.17, 0.02)
	isNear(t, "the slope in ms", float64(r.Forward.Slope)/1e6, 56.6, 0.02)
	isNear(t, "the intercept in ms", float64(r.Forward.Intercept)/1e6, 257.7, 0.02)
	v := Classify(r, DefaultThresholds())
	if !right(v, []Cause{Queue}) || v.Rule != "batch-cap" {
		t.Errorf("want queue, for batches are at their cap of 8 and nearly free: %s", tell(v))
	}
}

// C25: a transducer's encoder, batch against time.
func TestFieldCaseTransducerEncoder(t *testing.T) {
	for _, c := range []struct {
		name             string
		times            []float64
		intercept, slope float64
	}{
		{"onnx", []float64{7.44, 14.92, 22.84, 41.62, 80.48, 171.97}, 2.71, 1.297},
		{"tensorrt", []float64{5.21834, 11.7826, 20.4444, 37.583, 69.8312, 139.702}, 3.47, 1.059},
	} {
		var f fits
		for i, b := range []float64{1, 8, 16, 32, 64, 128} {
			for range 10 { // ten executions each
				f[0].add(1, b, c.times[i]/1e3)
			}
		}
		l := f.line("batch", 0)
		if !l.OK || math.Abs(float64(l.Slope)/1e6-c.slope) > 0.01 || math.Abs(float64(l.Intercept)/1e6-c.intercept) > 0.1 {
			t.Errorf("%s: %v + %v b: want %v + %v b", c.name, l.Intercept, l.Slope, c.intercept, c.slope)
		}
		if l.AtMean < 0.9 || l.room(0.5) != roomLinear {
			t.Errorf("%s: elasticity %v at the mean batch: beyond 32 a larger one brings nothing", c.name, l.AtMean)
		}
	}
}

// C12: batches of 32 at 100 a second, 2 ms each: evenly they never wait, in
// bursts they wait four times as long as they run. The arrivals are named.
func TestFieldCaseBursts(t *testing.T) {
	s := asr("bursts", func(s *system) {
		s.base, s.item, s.pre, s.post, s.upload, s.chunks, s.bytes, s.audioCV, s.preCV, s.cv = 2, 0, 0, 0, 0, 0, 0, 0, 0, 0.02
		s.phases = []phase{quiet(50 * time.Millisecond), {dur: loadedFor, rate: 100, burst: 6}}
	})
	v := s.judge().shown
	if v.Report.Burstiness < burstyFrom || !strings.Contains(v.text(), "bursts") {
		t.Errorf("the dispersion of arrivals is %v: %s", v.Report.Burstiness, tell(v))
	}
}

// C35: requests come faster than they are served: each takes longer than the
// one before, without end.
func TestFieldCaseArrivalsBeyondService(t *testing.T) {
	s := asr("overload", func(s *system) { s.base, s.item = 800, 0; s.load(open(1.6)) })
	if v := s.judge().shown; !right(v, []Cause{Compute, Unknown}) {
		t.Errorf("want compute: %s", tell(v))
	}
}

func isNear(t *testing.T, what string, got, want, relative float64) {
	t.Helper()
	if math.Abs(got-want) > relative*math.Abs(want) {
		t.Errorf("%s is %v: want %v within %v", what, got, want, relative)
	}
}
