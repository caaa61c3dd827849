package classifier

import (
	"fmt"
	"math"
	"time"
)

// Gauge is a mean of what something told now and then; OK is false if it told
// nothing.
type Gauge struct {
	Value float64
	OK    bool
}

// Aggregate is what a server told of a stretch of time by its own metrics, not
// of single requests: means of one request.
type Aggregate struct {
	Source     string // as in "vLLM at http://127.0.0.1:8000/metrics"
	Server     string // the kind of server
	Start, End time.Time
	Refused    string // why it must not be used; "": it may
	Classes    int    // classes that its numbers are of; 0: this one alone

	Requests float64
	Stages   [NumStages]time.Duration // of one request, which carries its whole batch's time
	Told     [NumStages]bool
	Total    time.Duration // of one request by the server's clock; 0: not told

	Batch    float64 // mean batch of an execution; 0: not told
	Sizes    []BatchCost
	Busy     float64 // device time over wall time, each execution once
	BusyOK   bool
	Rejected float64 // requests that the server refused

	Waiting, Running, Limit Gauge // requests in the server's queue, in work, and at most in work
}

// BatchCost is what batches of one size cost on average.
type BatchCost struct {
	Size    int
	Batches float64
	Forward time.Duration
}

// Device is what was told of the device's load over a stretch of time.
type Device struct {
	Source              string
	Busy                Gauge // share of the time in which anything ran on it
	Memory, MemoryTotal Gauge // bytes
	PCIe                Gauge // bytes/s, both ways
}

// External remembers for one class what sources beside the requests told: how
// the server's stages were at low load, and how the forward pass depended on
// the batch. The zero value is ready; it belongs to one goroutine.
type External struct {
	rest   parts // mean stages at low load, ns, weighed by requests
	weight float64
	points fits
	last   time.Time
	most   int // largest batch
}

// Fill adds to a report what servers and devices told of its time. Timings of
// the requests themselves are better and stay; without them the means of the
// server's metrics take their place.
func (e *External) Fill(r *Report, servers []Aggregate, devices []Device) {
	e.age(r.End)
	for i := range devices {
		if d := &devices[i]; d.Busy.OK && (r.Device == nil || d.Busy.Value > r.Device.Busy.Value) {
			r.Device = d
		}
	}
	for i := range servers {
		e.server(r, &servers[i])
	}
	if r.Device != nil && (!r.BusyOK || r.StagesFrom != "" && r.Server != nil && !r.Server.BusyOK) {
		// The device's own word; what the executions' times add up to is finer, where it is told.
		r.Busy, r.BusyQueued, r.BusyOK, r.BusyFrom = r.Device.Busy.Value, r.Device.Busy.Value, true, r.Device.Source
	}
}

func (e *External) server(r *Report, a *Aggregate) {
	switch {
	case a.Refused != "":
		r.Warnings = append(r.Warnings, fmt.Sprintf("%s is not used: %s", a.Source, a.Refused))
		return
	case r.Server != nil:
		return // the first source that may be used counts
	case a.Requests <= 0:
		return
	}
	r.Server = a
	if r.Timed*2 >= r.OK-r.Refused && r.Timed > 0 {
		return
	}
	if why := e.stages(r, a); why != "" {
		r.Warnings = append(r.Warnings, fmt.Sprintf("%s is not used: %s", a.Source, why))
		return
	}
	e.batch(r, a)
}

// stages puts the server's means where nothing was known. It tells why it did
// not.
func (e *External) stages(r *Report, a *Aggregate) (why string) {
	var sum, told time.Duration
	for s := StageQueue; int(s) < NumStages; s++ {
		if a.Told[s] {
			sum, told = sum+a.Stages[s], 1
		}
	}
	// All of the server's time, however little of it some requests told.
	m := &r.Means
	server := m.ServerQueue + m.Preprocess + m.Transfer + m.Forward + m.Postprocess + m.Unattributed
	switch {
	case told == 0:
		return "" // a total only; see ServerTotal's sentence
	case float64(sum) > 1.05*float64(server)+2e6:
		return fmt.Sprintf("its stages take %s of a request, more than the %s that the server had it", short(sum), short(server))
	}
	share := r.Shares.ServerQueue + r.Shares.Preprocess + r.Shares.Transfer + r.Shares.Forward + r.Shares.Postprocess + r.Shares.Unattributed
	p := parts{
		pServerQueue: float64(a.Stages[StageQueue]), pPreprocess: float64(a.Stages[StagePreprocess]), pTransfer: float64(a.Stages[StageTransfer]),
		pForward: float64(a.Stages[StageForward]), pPostprocess: float64(a.Stages[StagePostprocess]), pRest: math.Max(0, float64(server-sum)),
	}
	e.put(r, &p, share)
	r.StagesFrom = a.Source
	r.Timed, r.QueueTold = r.OK-r.Refused, 0
	if a.Told[StageQueue] {
		r.QueueTold = r.Timed
	}
	r.Warnings = append(r.Warnings, fmt.Sprintf("the stages are means of %.0f requests by %s, not told by the requests themselves", a.Requests, a.Source))
	if a.Classes > 1 {
		r.Warnings = append(r.Warnings, fmt.Sprintf("these means are of %d classes together", a.Classes))
	}
	e.baseline(r, &p)
	return ""
}

// put writes the split of the server's time into means and shares.
func (e *External) put(r *Report, p *parts, share float64) {
	m, s, all := &r.Means, &r.Shares, p.sum()
	st := p.stages()
	m.ServerQueue, m.Preprocess, m.Transfer, m.Forward, m.Postprocess, m.Unattributed =
		st.ServerQueue, st.Preprocess, st.Transfer, st.Forward, st.Postprocess, st.Unattributed
	if all <= 0 {
		return
	}
	k := share / all
	s.ServerQueue, s.Preprocess, s.Transfer, s.Forward, s.Postprocess, s.Unattributed =
		k*p[pServerQueue], k*p[pPreprocess], k*p[pTransfer], k*p[pForward], k*p[pPostprocess], k*p[pRest]
}

// baseline remembers the stages of times at low load, and compares with them.
// Where the server was never seen at low load since weir asks it, growth under
// load has nothing to be compared with.
func (e *External) baseline(r *Report, p *parts) {
	if r.Inflight <= 1.1 && r.Waiting < 0.1 && r.OK > 0 {
		n := float64(r.OK)
		for k := range p {
			e.rest[k] = (e.rest[k]*e.weight + p[k]*n) / (e.weight + n)
		}
		e.weight += n
	}
	if e.weight >= 1 {
		r.BaselineStages = e.rest.stages()
		if r.Baseline == 0 {
			r.Baseline, r.BaselineN = r.BaselineStages.Core(), int(e.weight)
		}
	} else if r.BaselineStages == (Stages{}) || r.BaselineStages.Forward == 0 && r.BaselineStages.Unattributed >= 0 {
		r.Baseline, r.BaselineStages, r.BaselineN = 0, Stages{}, 0
	}
	r.Slowdown = ratio(float64(r.Means.Core()), float64(r.Baseline))
	r.Explained = 0
}

// batch takes what the server told of its executions. Where it told no sizes,
// the windows themselves are points: their mean batch, or else the requests in
// the server, against their mean forward pass.
func (e *External) batch(r *Report, a *Aggregate) {
	if a.Batch > 0 {
		r.Batch, r.Batched = a.Batch, r.Timed
	}
	if a.BusyOK {
		r.Busy, r.BusyQueued, r.BusyOK, r.BusyFrom = a.Busy, a.Busy, true, ""
	}
	forward := a.Stages[StageForward].Seconds()
	x, against := a.Batch, "batch"
	if x <= 0 {
		x, against = r.Inflight, "inflight"
		if a.Running.OK && a.Running.Value >= 1 {
			x = a.Running.Value
		}
	}
	var atMost, all float64
	for _, c := range a.Sizes {
		e.points[0].add(c.Batches, float64(c.Size), c.Forward.Seconds())
		e.most = max(e.most, c.Size)
		all += c.Batches
	}
	for _, c := range a.Sizes {
		if c.Size == e.most {
			atMost = c.Batches
		}
	}
	if all > 0 {
		r.BatchMax, r.BatchAtMax = e.most, atMost/all
	} else if x > 0 && forward > 0 {
		e.points[0].add(1, x, forward)
	}
	// Means hide how far single executions lie apart: the interval is wider than it looks.
	if l := e.points.line(against, 0.1); l.N > 0 {
		r.Forward = l
	}
}

// age lets what is remembered fade, and forgets it after an hour without news.
func (e *External) age(now time.Time) {
	if !e.last.IsZero() {
		passed := now.Sub(e.last)
		if passed > memorySpan || passed < 0 {
			*e = External{}
		} else {
			f := math.Exp2(-passed.Seconds() / halfLife.Seconds())
			e.weight *= f
			e.points.scale(f)
		}
	}
	e.last = now
}

// byDevice decides by the device where the server tells no stages: whether it
// is full while requests take longer.
func (q *question) byDevice() bool {
	slow := q.Baseline > 0 && q.Slowdown >= q.t.HealthySlowdown || q.Shares.Queue >= q.t.QueueShare
	if q.Timed >= q.t.MinTimed || q.Device == nil || !slow {
		return false
	}
	busy := q.Device.Busy.Value
	switch {
	case busy >= q.t.DeviceFull:
		q.sayDevice()
		q.saySlowdown()
		q.decide("device-full", Compute, above(busy, q.t.DeviceFull), computeAdvice+"; if the server can batch, try a larger batch first")
		return q.doubt("the server tells no timings: the device is always busy, but whether a larger batch would cost it more is not known")
	case busy >= q.t.DeviceIdle:
		return false
	}
	q.sayDevice()
	q.saySlowdown()
	grew := q.grown.Unattributed > q.wait
	switch {
	case q.serverQueues():
		q.decide("device-idle-server-queue", Queue, below(busy, q.t.DeviceIdle), "let the server take more at once (its limit of sequences, slots or workers in flight): the device has room")
		return q.doubt("")
	case grew && q.Server != nil && q.Server.Waiting.OK:
		q.decide("device-idle-host", Host, below(busy, q.t.DeviceIdle), "the device waits for code on the host: give it more workers, and keep decoding off the event loop")
		return q.doubt("inferred: no queue in the server, a device that idles, and requests that take longer")
	case !grew:
		q.decide("device-idle-gate", Queue, below(busy, q.t.DeviceIdle), "raise "+q.limit()+" by half and watch: the device has room")
		return q.doubt("the server tells no timings, so whether its host code has room as well is not known")
	}
	q.decide("device-idle", Unknown, 0, "it is not the device: let the server tell its stages (weir doctor shows how) to tell its host code from a limit of its own")
	return q.doubt("the device idles while requests take longer: code on the host, or a limit inside the server")
}

// serverQueues: the server itself says that requests wait in it.
func (q *question) serverQueues() bool {
	return q.Server != nil && q.Server.Waiting.OK && q.Server.Waiting.Value >= 1 &&
		q.Server.Waiting.Value >= 0.3*q.Inflight
}

// hostBound: what the server calls its forward pass grew, but the device
// idles: it waits for the host to give it work.
func (q *question) hostBound() bool {
	if q.Device == nil || q.Device.Busy.Value >= q.t.DeviceIdle || q.grown.Forward < q.wait || q.part(q.grown.Forward) < q.t.Dominates {
		return false
	}
	if q.Baseline > 0 && q.Slowdown < q.t.HealthySlowdown {
		return false
	}
	q.sayGrowth("the forward pass", q.grown.Forward)
	q.sayDevice()
	return q.decide("device-host-bound", Host, below(q.Device.Busy.Value, q.t.DeviceIdle),
		"the device waits for the host within the forward pass: more worker processes (one Python process runs one thread at a time), CUDA graphs or a compiled model, fewer and larger kernels; a larger device changes nothing")
}

func (q *question) sayDevice() {
	d := q.Device
	word := "between room and full"
	switch {
	case d.Busy.Value < q.t.DeviceIdle:
		word = fmt.Sprintf("below %s it has room", percent(q.t.DeviceIdle))
	case d.Busy.Value >= q.t.DeviceFull:
		word = fmt.Sprintf("from %s it is full", percent(q.t.DeviceFull))
	}
	q.say("the device is busy %s of the time by %s (%s)", percent(d.Busy.Value), d.Source, word)
}

// sayServer tells how much of the time the server's own clock covers: what is
// missing lies before it, where servers decode audio.
func (q *question) sayServer() {
	a := q.Server
	if a == nil || a.Total <= 0 {
		return
	}
	m := q.Means
	had := m.ServerQueue + m.Preprocess + m.Transfer + m.Forward + m.Postprocess + m.Unattributed
	if outside := had - a.Total; outside > had/10 && outside > time.Millisecond {
		q.say("%s's own clock covers %s of the %s that it has a request; the other %s pass before or after it (reading and decoding audio, the event loop)",
			a.Server, short(a.Total), short(had), short(outside))
	}
	if a.Waiting.OK && a.Waiting.Value >= 0.5 {
		q.say("%s tells %.1f requests in its own queue on average", a.Server, a.Waiting.Value)
	}
}
