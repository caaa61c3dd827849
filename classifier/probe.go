package classifier

import "time"

// probes sums the latencies of a trivial request, such as one for the health
// path: at rest, for long, and under load, in the current window.
type probes struct {
	rest, restN     float64 // ns; the weight of the past is bounded
	loaded, loadedN float64
}

// restWeight bounds how many probes at rest are remembered: five minutes of them.
const restWeight = 300

// Probe counts a trivial request that took so long while n requests were in
// the server: none is rest, two or more are load. One that was given up counts with the time until then.
func (w *Window) Probe(took time.Duration, n int) {
	p := &w.probes
	switch {
	case n >= 2:
		p.loaded, p.loadedN = p.loaded+ns(took), p.loadedN+1
		return
	case n == 1:
		return // neither: one request blocks a single worker already
	}
	if p.restN >= restWeight {
		p.rest *= restWeight / (restWeight + 1.0)
		p.restN = restWeight * restWeight / (restWeight + 1.0)
	}
	p.rest, p.restN = p.rest+ns(took), p.restN+1
}

func (p *probes) report(r *Report) {
	r.ProbeN = int(p.loadedN)
	r.ProbeRest, r.ProbeLoaded = time.Duration(ratio(p.rest, p.restN)), time.Duration(ratio(p.loaded, p.loadedN))
}

// A front end counts as blocked from this factor over its latency at rest, and
// from this latency; below half of either it counts as free.
const (
	blockedFactor  = 10
	blockedLatency = 20 * time.Millisecond
)

func (q *question) probed() bool { return q.ProbeN >= 5 && q.ProbeRest > 0 }

// blocked: even a trivial request waits while others are served, so that what
// is full is the server's front end.
func (q *question) blocked() bool {
	if !q.probed() || q.ProbeLoaded < blockedFactor*q.ProbeRest || q.ProbeLoaded < blockedLatency {
		return false
	}
	q.say("the health path takes %s under load, and %s at rest: the server's event loop or front end is blocked", short(q.ProbeLoaded), short(q.ProbeRest))
	return true
}

func (q *question) sayFree() {
	if q.probed() && (2*q.ProbeLoaded < blockedFactor*q.ProbeRest || 2*q.ProbeLoaded < blockedLatency) {
		q.say("the health path answers in %s under load, and in %s at rest: the front end is free, what is waited for lies behind it", short(q.ProbeLoaded), short(q.ProbeRest))
	}
}

const unblock = "take audio decoding, and whatever else blocks, off the event loop (a pool of processes), or let more workers accept requests"
