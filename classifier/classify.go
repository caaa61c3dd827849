package classifier

import (
	"fmt"
	"math"
	"time"
)

// Classify weighs a report. It asks its questions in a fixed order, and the
// first that has an answer decides: is there enough evidence, and can it be
// true; is it the client; is anything slow at all; where did the time go that
// requests take longer than at low load; and if that is waiting, is the device
// full while they wait, and would a larger batch cost anything.
//
// Confidence is how often the rule that decided was right of systems drawn at
// random in a simulator (see trust): a number from experiments, but from
// simulated ones. What only an experiment on the server could settle gets 0.5
// at most, and its advice names the experiment.
func Classify(r Report, t Thresholds) Verdict {
	q := question{Report: r, t: t}
	q.prepare()
	for _, ask := range []func(*question) bool{
		(*question).tooFew, (*question).impossible, (*question).wrongUnit, (*question).unsynced,
		(*question).client, (*question).healthy, (*question).batchDelay, (*question).byDevice, (*question).untimed,
		(*question).ownStage, (*question).unexplained, (*question).overBatched, (*question).hostBound, (*question).forward, (*question).queue,
	} {
		if ask(&q) {
			break
		}
	}
	q.sayServer()
	q.v.Class, q.v.Report, q.v.Warnings = r.Class, r, q.Warnings
	return q.v
}

// question is a report on its way to a verdict.
type question struct {
	Report
	t Thresholds
	v Verdict

	grown   Stages  // how much longer a request takes than at low load; all of it, where no low load was seen
	growth  float64 // ns, the sum of grown
	wait    time.Duration
	hidden  bool // wait holds what is unattributed, because the server does not tell its queue
	room    room
	periods float64 // waiting, in executions
	busy    float64 // device time over wall time while requests waited, for each instance; only if BusyOK
	serial  bool    // no batch is told, but requests pass the device one at a time
	inside  float64 // time of an admitted request, over that at low load
}

func (q *question) prepare() {
	q.grown = q.Means.over(q.BaselineStages)
	q.growth = float64(q.grown.Core())
	q.wait = q.grown.Queue + q.grown.ServerQueue
	waited := q.Means.Queue + q.Means.ServerQueue
	if q.hidden = 2*q.QueueTold < q.Timed; q.hidden {
		q.wait += q.grown.Unattributed
		waited += q.grown.Unattributed
	}
	q.room = q.Report.Forward.room(q.t.Elastic)
	if q.Report.Forward.Against == "inflight" && q.room != roomLinear {
		q.room = roomUnknown // a pass that takes no longer may be one that takes nobody along
	}
	if d := q.Means.Forward + q.Means.Transfer; d > 0 {
		q.periods = float64(waited) / float64(d)
	}
	q.inside = ratio(float64(q.Means.Core()-q.Means.Queue), float64(q.Baseline-q.BaselineStages.Queue))
	q.prepareBusy()
}

// prepareBusy divides the device's time among its instances: as many as are
// configured, or as were ever seen at work at once. Where no batch is told,
// the mean number of requests in their passes tells as much if it is one: they
// pass one at a time.
func (q *question) prepareBusy() {
	q.busy = q.BusyQueued / max(1, q.t.Instances, math.Round(q.Parallel))
	if d := q.Means.Forward + q.Means.Transfer; !q.BusyOK && d > 0 && q.Timed >= q.t.MinTimed {
		at := q.Throughput * d.Seconds()
		if q.serial = at > 0.85 && at < 1.1; q.serial {
			q.BusyOK, q.busy, q.BusyQueued, q.Batch, q.BatchMax = true, at, at, 1, 1
		}
	}
	if q.BusyFrom != "" { // a share already
		q.busy = q.BusyQueued
	}
}

// over is the part of each stage above that of b.
func (s Stages) over(b Stages) Stages {
	return Stages{
		Queue: max(0, s.Queue-b.Queue), ServerQueue: max(0, s.ServerQueue-b.ServerQueue),
		Preprocess: max(0, s.Preprocess-b.Preprocess), Transfer: max(0, s.Transfer-b.Transfer),
		Forward: max(0, s.Forward-b.Forward), Postprocess: max(0, s.Postprocess-b.Postprocess),
		Unattributed: max(0, s.Unattributed-b.Unattributed),
	}
}

func (q *question) part(d time.Duration) float64 { return ratio(float64(d), q.growth) }

// decide settles the verdict by the rule named. margin is how far the deciding
// measure is from its threshold, from 0 to 1.
func (q *question) decide(rule string, c Cause, margin float64, advice string) bool {
	q.v.Rule, q.v.Cause, q.v.Advice, q.v.margin = rule, c, advice, min(max(margin, 0), 1)
	q.v.Confidence = trusted(rule, q.v.margin)
	return true
}

// doubt caps the confidence of what only an experiment could settle.
func (q *question) doubt(warning string) bool {
	q.v.Confidence = min(q.v.Confidence, 0.5)
	if warning != "" {
		q.Warnings = append(q.Warnings[:len(q.Warnings):len(q.Warnings)], warning)
	}
	return true
}

// above and below measure how far x is from its threshold, relatively.
func above(x, threshold float64) float64 { return ratio(x-threshold, threshold) }
func below(x, threshold float64) float64 { return ratio(threshold-x, threshold) }

func (q *question) tooFew() bool {
	if q.Requests >= q.t.MinRequests {
		return false
	}
	q.say("requests in the last %s: %d; a verdict takes %d", q.End.Sub(q.Start).Round(time.Second), q.Requests, q.t.MinRequests)
	q.decide("too-few", Unknown, 0, "send more traffic, or lengthen the window")
	return true
}

func (q *question) impossible() bool {
	share := ratio(float64(q.Suspect), float64(q.Suspect+q.Timed))
	if share <= q.t.SuspectShare {
		return false
	}
	q.say("%s of the answers tell stages that cannot be true: longer together than the server had the request", percent(share))
	return q.decide("impossible-stages", Unknown, above(share, q.t.SuspectShare), "look at the unit of the server's timings: Server-Timing is in milliseconds; microseconds sent as milliseconds look like this")
}

func (q *question) wrongUnit() bool {
	if q.Explained <= 0 || q.Explained >= q.t.Explained || q.Timed < q.t.MinTimed {
		return false
	}
	q.say("the stages explain %s of the server's time for a request alone; below %s their unit is wrong or the slow part is not timed", percent(q.Explained), percent(q.t.Explained))
	return q.decide("wrong-unit", Unknown, below(q.Explained, q.t.Explained), "look at the unit of the server's timings: seconds sent as milliseconds look like this")
}

// unsynced: without device synchronisation, the copy that follows the forward
// pass waits for it and carries its time, at an absurd rate.
func (q *question) unsynced() bool {
	if q.CopyOut <= q.Means.Forward || q.CopyOutSynced || q.CopyOutBytes <= 0 || q.CopyOut < time.Millisecond {
		return false
	}
	rate := q.CopyOutBytes / q.CopyOut.Seconds()
	if rate >= q.t.CopyRate {
		return false
	}
	q.say("copies from the device run at %.1f MB/s and take %s, longer than the forward pass (%s): they wait for it", rate/1e6, short(q.CopyOut), short(q.Means.Forward))
	return q.decide("unsynced", Unknown, below(rate, q.t.CopyRate), "synchronise the device before stopping the forward pass's clock, and mark the timings with sync=1")
}

func (q *question) client() bool {
	if q.Shares.Upload < q.t.ClientShare || q.Slowdown >= q.t.UploadHides {
		return false // where the server got slow too, uploads are but the clients' pause
	}
	q.say("%s of the requests' time is the upload of their bodies (%s on average); from %s it is the clients", percent(q.Shares.Upload), short(q.Means.Upload), percent(q.t.ClientShare))
	q.sayShares()
	return q.decide("uploads", Client, above(q.Shares.Upload, q.t.ClientShare), "nothing in the server helps: let clients send compressed audio, or over a faster link; a buffering balancer in front keeps slow uploads away from the limit")
}

func (q *question) healthy() bool {
	if q.refused() > q.t.RefusedShare || 2*q.Canceled > q.Requests || q.OK == 0 {
		return false
	}
	waiting := q.Shares.Waiting()
	switch {
	case q.Baseline > 0 && q.Slowdown < q.t.HealthySlowdown && waiting < q.t.HealthyQueue:
		q.saySlowdown()
		q.say("%s of the requests' time is waiting; below %s it needs no remark", percent(waiting), percent(q.t.HealthyQueue))
		return q.decide("as-at-rest", Healthy, min(2*below(q.Slowdown-1, q.t.HealthySlowdown-1), 2*below(waiting, q.t.HealthyQueue)), "")
	case q.Timed >= q.t.MinTimed && waiting < q.t.AlertQueue && q.periods > 0 && q.periods <= q.t.BatchPeriods && q.Slowdown < q.t.UploadHides && q.responds():
		q.say("requests wait %.1f executions, which batching itself costs, and throughput rises with load (elasticity %.2f, 95 %% interval %.2f to %.2f)", q.periods, q.ThroughputElasticity.Value, q.ThroughputElasticity.CI95[0], q.ThroughputElasticity.CI95[1])
		q.saySlowdown()
		q.decide("responds", Healthy, above(q.ThroughputElasticity.Value, q.t.Responds), "")
		return q.doubt("")
	case q.Baseline == 0 && q.Timed >= q.t.MinTimed && waiting < q.t.HealthyQueue && q.room != roomLinear && q.Shares.Unattributed < q.t.QueueShare:
		q.say("%s of the requests' time is waiting; below %s it needs no remark", percent(waiting), percent(q.t.HealthyQueue))
		q.decide("little-waiting", Healthy, 0, "")
		return q.doubt("no request was seen at low load within the last hour, so growth under load cannot be told")
	}
	return false
}

// responds: more load still brings more throughput.
func (q *question) responds() bool {
	e := q.ThroughputElasticity
	return e.OK && e.Value >= q.t.Responds
}

func (q *question) refused() float64 {
	return ratio(float64(q.Rejected+q.Expired+q.Refused), float64(q.Requests))
}

// batchDelay: requests wait for others to share a batch although none come.
func (q *question) batchDelay() bool {
	alone := ratio(float64(q.BaselineStages.ServerQueue), float64(q.Baseline))
	if q.Shares.Waiting() < q.t.HealthyQueue || alone < q.t.DelayShare || q.Slowdown >= 2 || !q.BusyOK || q.busy >= q.t.DeviceIdle {
		return false
	}
	q.say("even a request alone waits %s in the server's queue, %s of its time: a timer, not other requests", short(q.BaselineStages.ServerQueue), percent(alone))
	q.sayBusy()
	return q.decide("batch-delay", Queue, above(alone, q.t.DelayShare), "lower the server's batch delay"+q.name("delay")+": it buys nothing at this load")
}

// untimed decides what can be decided without the server's word.
func (q *question) untimed() bool {
	if q.Timed >= q.t.MinTimed {
		return false
	}
	if q.Slowdown >= q.t.HealthySlowdown && q.blocked() {
		return q.decide("front-end-blocked", Host, above(float64(q.ProbeLoaded), blockedFactor*float64(q.ProbeRest)), unblock)
	}
	if q.gateHolds() {
		return q.gateRoom()
	}
	if q.Shares.Queue >= q.t.QueueShare {
		q.say("%s of the requests' time is waiting in weir's queue, before %s; from %s that is a problem", percent(q.Shares.Queue), q.limit(), percent(q.t.QueueShare))
		q.saySlowdown()
		q.decide("gate-untimed", Queue, above(q.Shares.Queue, q.t.QueueShare), "raise max_concurrency by half and watch: if throughput rises, the server has room; if only its time per request rises, it is full")
		return q.doubt("the server tells no timings, so whether it has room is not known")
	}
	if 2*q.Canceled > q.Requests {
		q.say("of %d requests %d clients gave up before the answer came, after %s on average: what they waited for is not known", q.Requests, q.Canceled, short(q.Mean))
	}
	q.saySlowdown()
	q.say("%d of %d answers carry stage timings; %d are needed to look inside the server", q.Timed, q.OK, q.t.MinTimed)
	q.sayOutside()
	q.decide("untimed", Unknown, 0, "weir doctor --server URL tells how to see inside: the server's own figures, its spans, or Server-Timing (examples/helpers)")
	return q.doubt("")
}

// sayOutside tells what can be told of a server that tells nothing.
func (q *question) sayOutside() {
	q.sayFree()
	if q.WaitAtMost >= q.t.HealthyQueue {
		q.say("estimated from low load: at most %s of the requests' time is waiting; a server that batches takes longer for more and waits less than that", percent(q.WaitAtMost))
	}
	if q.SpacedN < q.t.MinTimed || q.SpacedFactor < 0.8 || q.SpacedFactor > 1.25 {
		return
	}
	switch {
	case q.Spaced >= 0.7:
		q.say("%s of the answers come one service time after the one before: the server works on one request at a time (one worker, one lock, a blocked event loop, or a device without batching)", percent(q.Spaced))
	case q.Spaced < 0.5:
		q.say("answers come together rather than one service time apart (%s of them do), and load brings no more of them: the requests share the device's time", percent(q.Spaced))
	}
}

// ownStage: a stage of the server other than the forward pass grew. If
// waiting grew more, it is the symptom: they wait for that stage.
func (q *question) ownStage() bool {
	type suspect struct {
		cause Cause
		name  string
		grown time.Duration
	}
	suspects := []suspect{
		{Host, "preprocessing", q.grown.Preprocess}, {Host, "postprocessing", q.grown.Postprocess}, {Transfer, "copies", q.grown.Transfer},
	}
	top := suspects[0]
	for _, s := range suspects[1:] {
		if s.grown > top.grown {
			top = s
		}
	}
	service := float64(q.BaselineStages.Preprocess + q.BaselineStages.Transfer + q.BaselineStages.Forward + q.BaselineStages.Postprocess)
	inflated := ratio(float64(top.grown), service)
	symptom := (q.wait > q.grown.Forward || q.grown.Unattributed > q.grown.Forward) && inflated >= q.t.Inflated && top.grown > q.grown.Forward
	part := q.part(top.grown)
	holds := q.copiesHold()
	switch {
	case top.cause == Transfer && holds && (symptom || part >= q.t.Dominates):
	case part < q.t.Dominates && !symptom:
		return false
	case q.Baseline == 0 && part < q.t.Dominates:
		return false
	}
	q.sayGrowth(top.name, top.grown)
	if symptom && part < q.t.Dominates {
		q.say("requests wait longer still, but for that stage: it grew by %s of a request's whole work at low load (from %s it is the cause)", percent(inflated), percent(q.t.Inflated))
	}
	margin := max(above(part, q.t.Dominates), above(inflated, q.t.Inflated))
	if q.mixed(top.cause, top.grown) {
		return true
	}
	if top.cause == Transfer {
		q.sayCopies()
		return q.decide("copies-grew", Transfer, margin, q.copyAdvice())
	}
	q.sayBusy()
	return q.decide("host-grew", Host, margin, "give the host code more workers or a faster decoder"+q.name("host")+", and keep it off the event loop; a larger device changes nothing")
}

// mixed: the forward pass grew nearly as much as the stage that leads.
func (q *question) mixed(leader Cause, grown time.Duration) bool {
	f := q.grown.Forward
	if f <= 0 || float64((grown-f).Abs()) > q.t.Tie*float64(max(grown, f)) || q.part(f) < q.t.Dominates/2 {
		return false
	}
	q.sayGrowth("the forward pass", f)
	q.v.Among = []Cause{leader, Compute}
	return q.decide("two-grew", Mixed, 1-ratio(float64((grown-f).Abs()), q.t.Tie*float64(max(grown, f))),
		"two causes grow alike, "+string(leader)+" and compute: treat "+string(leader)+" first, it is the cheaper one, and look again")
}

// copiesHold: copies take most of the device's time, so that the forward pass
// waits for them.
func (q *question) copiesHold() bool {
	d := q.Means.Transfer + q.Means.Forward
	return ratio(float64(q.Means.Transfer), float64(d)) >= 0.6 && q.BusyOK && q.busy >= q.t.DeviceIdle
}

// unexplained: the time grew inside the server, in no stage that it tells.
// Where it tells its queue, that is host code: a pool of workers, a front end,
// an event loop. Where it does not, it is waiting as much as anything, and the
// device says more.
func (q *question) unexplained() bool {
	part, grown := q.part(q.grown.Unattributed), q.grown.Unattributed
	leads := part >= q.t.Dominates && grown >= q.grown.Queue+q.grown.ServerQueue
	service := float64(q.Baseline - q.BaselineStages.Queue - q.BaselineStages.ServerQueue)
	symptom := q.grown.Queue > 0 && ratio(float64(grown), service) >= q.t.Inflated && grown > q.grown.Forward && grown > q.grown.ServerQueue && q.Baseline > 0
	if !leads && (q.hidden || !symptom) {
		return false
	}
	if q.blocked() {
		q.sayGrowth("what the server tells in no stage", grown)
		return q.decide("front-end-blocked", Host, above(float64(q.ProbeLoaded), blockedFactor*float64(q.ProbeRest)), unblock)
	}
	if q.hidden {
		return q.hiddenWait(part)
	}
	q.sayGrowth("what the server tells in no stage", grown)
	q.sayWorkers()
	if q.BusyOK && q.busy < q.t.DeviceIdle {
		q.sayBusy()
		return q.decide("host-hidden", Host, below(q.busy, q.t.DeviceIdle), "time what the server does between reading a request and queueing it, and after postprocessing: decoding, an event loop, or too few workers for them hold requests while the device idles")
	}
	q.decide("hidden-told", Unknown, above(part, q.t.Dominates), "time what the server does between reading a request and queueing it, and after postprocessing: that is where the time goes")
	return q.doubt("the server tells its queue, so this time is neither queueing nor a stage: a front end, an event loop, or the network")
}

// hiddenWait is time in no stage of a server that does not tell its queue: if
// the device is not known to be busy meanwhile, it may be host code as well.
func (q *question) hiddenWait(part float64) bool {
	if q.BusyOK && q.busy >= q.t.DeviceIdle {
		return false
	}
	q.sayGrowth("what the server tells in no stage", q.grown.Unattributed)
	q.sayWorkers()
	q.sayLine()
	q.sayBusy()
	if q.room == roomLinear && !q.BusyOK {
		q.decide("hidden-linear", Compute, above(part, q.t.Dominates), computeAdvice)
		return q.doubt("inferred: the server does not tell its own queue")
	}
	q.v.Among = []Cause{Queue, Host}
	q.decide("hidden-wait", Queue, above(part, q.t.Dominates), "let the server tell its queue wait (Server-Timing: queue;dur=…) to be sure; then raise the limit on its requests in flight"+q.name("limit")+" or its batch size"+q.name("batch"))
	return q.doubt("inferred: the server does not tell its own queue, and the wait for a busy worker looks the same")
}

// sayWorkers tells of a host stage that is at work on a whole number of
// requests all the time: that many workers, all busy.
func (q *question) sayWorkers() {
	for _, s := range []struct {
		name string
		time time.Duration
	}{{"preprocessing", q.Means.Preprocess}, {"postprocessing", q.Means.Postprocess}} {
		n := q.Throughput * s.time.Seconds()
		if whole := math.Round(n); whole >= 1 && whole <= 64 && n > 0.93*whole && n < 1.02*whole {
			q.say("%s is at work on %.2f requests at any time: as if it had %.0f workers, all busy", s.name, n, whole)
		}
	}
}

const computeAdvice = "no limit helps: a smaller, quantised or compiled model, a faster device, or another replica"

// overBatched: batches cost as much as they bring, and the device idles while
// requests wait for them to fill.
func (q *question) overBatched() bool {
	if q.room != roomLinear || !q.BusyOK || q.busy >= q.t.DeviceIdle || q.Batch <= 1.5 || q.part(q.grown.Forward) < 0.3 {
		return false
	}
	q.sayLine()
	q.sayBusy()
	return q.decide("over-batched", Queue, below(q.busy, q.t.DeviceIdle), "lower the server's batch delay"+q.name("delay")+" or batch size"+q.name("batch")+": a batch costs as much as its members alone, and waiting for it leaves the device idle")
}

func (q *question) forward() bool {
	if q.grown.Forward < q.wait || q.growth <= 0 || q.grown.Forward == 0 {
		return false
	}
	q.sayGrowth("the forward pass", q.grown.Forward)
	q.sayLine()
	q.sayBusy()
	if !q.BusyOK && q.room != roomLinear {
		q.v.Among = []Cause{Compute, Host}
		q.decide("forward-alone", Compute, 0, "look at the device's own utilisation: near 100 %, "+computeAdvice+"; well below, host code between the steps holds the device up")
		return q.doubt("no batch is told, so whether the device is full is not known: host code that launches the model's steps makes the forward pass grow as well")
	}
	return q.decide("forward-grew", Compute, above(q.part(q.grown.Forward), q.t.Dominates), computeAdvice)
}

// queue: waiting grew most. Whether that is a setting or a full device is
// what the rest is about.
func (q *question) queue() bool {
	q.sayWaiting()
	q.saySlowdown()
	q.sayLine()
	q.sayBusy()
	idle := q.BusyOK && q.busy < q.t.DeviceIdle
	waits := q.periods > q.t.BatchPeriods
	if q.hidden {
		q.Warnings = append(q.Warnings[:len(q.Warnings):len(q.Warnings)], "the server does not tell its queue: what it tells in no stage is taken for waiting, as the device is busy meanwhile")
	}
	switch {
	case q.waiting() < q.t.HealthyQueue && q.refused() <= q.t.RefusedShare:
		q.decide("grew-nowhere", Unknown, 0, "")
		return q.doubt("latency grew, but in no part enough to name it")
	case q.gateHolds():
		return q.gateRoom()
	case q.ownLimit(idle, waits):
		return q.decide("gate-idle", Queue, q.hasRoom(), "raise "+q.limit()+": the server has room for more at once"+q.predict(MaxConcurrency, 2*q.Limit))
	case q.copiesHold():
		q.sayCopies()
		return q.decide("copies-hold", Transfer, above(q.busy, q.t.DeviceIdle), q.copyAdvice())
	case q.gateOne():
		q.say("one request at a time keeps the device busy %s of the time: the next one's upload and host work could run meanwhile", percent(q.busy))
		return q.decide("gate-one", Queue, below(q.busy, q.t.DeviceFull), "raise "+q.limit()+" to 2 and more: host work of one request then overlaps with the device's work for another, and the server may form batches")
	case q.contends():
		q.say("batches of one take %.1f times as long as at low load while up to %.0f run at once: they share the device", ratio(float64(q.Means.Forward), float64(q.BaselineStages.Forward)), q.Parallel)
		return q.decide("contention", Compute, above(ratio(float64(q.Means.Forward), float64(q.BaselineStages.Forward)), 1.3), computeAdvice)
	case q.room == roomLinear && !(idle && waits):
		return q.decide("linear", Compute, above(q.Report.Forward.CI95[0], q.t.Elastic), computeAdvice)
	case q.room == roomFree && !waits:
		return q.structural()
	case q.room == roomFree || idle && waits:
		return q.policy()
	}
	return q.undetermined()
}

// waiting is the share of both queues, that of a queue which is not told
// included as far as it grew.
func (q *question) waiting() float64 {
	w := q.Shares.Waiting()
	if all := q.Means.Core() + q.Means.Upload; q.hidden && all > 0 {
		w += float64(q.grown.Unattributed) / float64(all)
	}
	return w
}

// gateHolds: weir's limit holds requests, while those that it lets through are
// served, several at a time, as fast as one alone.
func (q *question) gateHolds() bool {
	gone := 5*q.Canceled > q.Requests // those who left early make the others look fast
	return !gone && q.Limit > 1 && q.Shares.Queue >= q.t.QueueShare && q.Inflight >= 1.8 && q.Baseline > 0 && q.BaselineN >= q.t.MinBaseline &&
		q.grown.Queue > q.grown.ServerQueue && q.inside < q.t.HealthySlowdown-0.1
}

func (q *question) gateRoom() bool {
	q.say("%s of the requests' time is waiting in weir's queue, before %s, while %.1f requests at once take the server %.2f times as long as one alone", percent(q.Shares.Queue), q.limit(), q.Inflight, q.inside)
	return q.decide("gate-room", Queue, below(q.inside, q.t.HealthySlowdown), "raise "+q.limit()+": the server takes more at once without getting slower"+q.predict(MaxConcurrency, 2*q.Limit))
}

// contends: executions that run beside each other slow each other down.
func (q *question) contends() bool {
	return q.Batch <= 1.05 && q.Parallel >= 1.5 && q.BaselineStages.Forward > 0 && float64(q.Means.Forward) >= 1.3*float64(q.BaselineStages.Forward)
}

// ownLimit: weir's own limit holds requests that the server would take at once.
func (q *question) ownLimit(idle, waits bool) bool {
	own := ratio(float64(q.grown.Queue), float64(q.wait)) > 0.6
	server := ratio(float64(q.Means.ServerQueue), float64(q.Means.Forward+q.Means.Transfer))
	return own && server < 0.5 && waits && idle && q.room != roomLinear
}

// structural: one execution of waiting is what a server costs that takes its
// requests in batches.
func (q *question) structural() bool {
	q.say("the wait is %.1f executions, not more than batching itself costs (up to %.1f)", q.periods, q.t.BatchPeriods)
	if q.responds() {
		q.decide("one-cycle-responds", Healthy, above(q.ThroughputElasticity.Value, q.t.Responds), "")
		return q.doubt("")
	}
	return q.decide("one-cycle", Compute, below(q.periods, q.t.BatchPeriods), "the wait for the running batch is inherent: continuous batching, shorter batches, or another instance or replica shorten it")
}

// hasRoom is the margin of "the device has room": it idles while requests
// wait, or a larger batch would cost it nothing.
func (q *question) hasRoom() float64 {
	margin := 0.0
	if q.room == roomFree {
		margin = min(below(q.Report.Forward.CI95[1], q.t.Elastic), above(q.periods, q.t.BatchPeriods))
	}
	if q.BusyOK {
		margin = max(margin, below(q.busy, q.t.DeviceIdle))
	}
	return margin
}

func (q *question) policy() bool {
	margin := q.hasRoom()
	if q.pinned() {
		q.say("%s of the executions are at the largest batch, %d", percent(q.BatchAtMax), q.BatchMax)
		return q.decide("batch-cap", Queue, margin, "raise the server's max_batch_size"+q.name("batch")+": twice as large a batch hardly takes longer (look at the device's memory first)"+q.predict(MaxBatchSize, 2*q.BatchMax))
	}
	if q.grown.Queue >= q.grown.ServerQueue {
		return q.decide("gate-free", Queue, margin, "raise "+q.limit()+": larger batches are nearly free"+q.predict(MaxConcurrency, 2*q.Limit))
	}
	return q.decide("server-limit", Queue, margin, "let the server take more at once (its limit of sequences, slots or workers in flight)"+q.name("limit")+": larger batches are nearly free")
}

func (q *question) pinned() bool { return q.BatchMax > 0 && q.BatchAtMax >= q.t.BatchPinned }

// gateOne: weir lets one request through at a time, so that the device idles
// while that one is elsewhere.
func (q *question) gateOne() bool {
	return q.Limit == 1 && q.Shares.Queue >= q.t.AlertQueue && q.BusyOK && q.busy < q.t.DeviceFull
}

// undetermined: whether batching is free is not known, or it is neither free
// nor without gain. A device that is busy while requests wait is then the
// likelier cause; what costs nothing to try is said first.
func (q *question) undetermined() bool {
	copies := ratio(float64(q.Means.Transfer), float64(q.Means.Transfer+q.Means.Forward))
	full := q.BusyOK && q.busy >= q.t.DeviceFull
	switch {
	case full && copies >= q.t.Dominates:
		q.sayCopies()
		q.v.Among = []Cause{Transfer, Compute}
		q.decide("copies-and-compute", Mixed, above(q.busy, q.t.DeviceFull), "the device is full with copies and with compute: "+q.copyAdvice()+"; then look again")
		return q.doubt("")
	case q.BusyOK && q.busy >= q.t.DeviceIdle && q.periods <= q.t.BatchPeriods:
		return q.structural()
	case full && q.Batch <= 1.05 && q.Limit > 0 && q.Limit <= 2 && q.grown.Queue > q.grown.ServerQueue:
		q.say("below %s no batch can form: whether batching is free was never seen", q.limit())
		q.v.Among = []Cause{Queue, Compute}
		q.decide("gate-forbids-batches", Mixed, above(q.busy, q.t.DeviceFull), "first raise "+q.limit()+", which costs nothing to try: if the server batches, throughput rises; if it does not, the device is full and takes a faster model, another device or replica")
		return q.doubt("")
	case full && q.BusyFrom != "" && q.Batch == 0:
		q.decide("device-busy", Compute, above(q.busy, q.t.DeviceFull), "another replica or a faster device; if the server batches, try a larger batch first")
		return q.doubt("the device is always busy, but whether a larger batch would cost it more is not known")
	case full && q.Batch <= 1.05:
		q.Warnings = append(q.Warnings[:len(q.Warnings):len(q.Warnings)], "the batch was always one, so whether batching is free is not known")
		return q.decide("always-one", Compute, above(q.busy, q.t.DeviceFull), "if the server can batch, first let it ("+q.limit()+", its max_batch_size)"+q.name("batch")+": that costs nothing to try; else a smaller or faster model, a faster device, or another replica")
	case full && q.room == roomUnclear:
		return q.decide("between", Compute, above(q.busy, q.t.DeviceFull), fmt.Sprintf("the device is full, and twice the batch brings %.1f times the throughput: raise max_batch_size and limits if the latency allows, else another replica or a faster model", math.Exp2(1-q.Report.Forward.Elasticity)))
	case q.part(q.grown.Forward) > 0.25:
		q.decide("forward-some", Compute, 0, computeAdvice)
		return q.doubt("whether a larger batch is free is not known: the batch hardly varied")
	}
	q.v.Among = []Cause{Queue, Compute}
	q.decide("undetermined", Queue, 0, "raise "+q.limit()+" by half and watch: if throughput rises, the limit was too low; if the forward pass grows instead, the device is full")
	return q.doubt("whether the device has room is not known: the batch hardly varied")
}
