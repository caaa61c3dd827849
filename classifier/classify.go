package classifier

import (
	"math"
	"time"
)

// Classify weighs a report. It asks its questions in a fixed order, and the
// first that has an answer decides: is there enough evidence, and can it be
// true; is it the client; is anything slow at all; where did the time go that
// requests take longer than at low load; and if that is waiting, is the device
// full while they wait, and would a larger batch cost anything.
//
// Confidence is 0.5 for a measure that just crosses its threshold and 1 for
// one twice as far, times what the number of requests is worth (0.8 at 40,
// 0.95 at 200). What only an experiment could settle gets 0.5 at most, and its
// advice names the experiment.
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
	room    room
	periods float64 // waiting, in executions
	busy    float64 // device time over wall time while requests waited, for each instance; only if BusyOK
}

func (q *question) prepare() {
	q.grown = q.Means.over(q.BaselineStages)
	q.growth = float64(q.grown.Core())
	q.wait = q.grown.Queue + q.grown.ServerQueue
	q.room = q.Report.Forward.room(q.t.Elastic)
	if d := q.Means.Forward + q.Means.Transfer; d > 0 {
		q.periods = float64(q.Means.Queue+q.Means.ServerQueue) / float64(d)
	}
	q.busy = q.BusyQueued / math.Max(1, q.t.Instances)
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

// decide settles the verdict. how far the deciding measure is from its
// threshold is the margin, from 0 to 1.
func (q *question) decide(c Cause, margin float64, advice string) bool {
	n := float64(q.Requests)
	q.v.Cause, q.v.Advice = c, advice
	q.v.Confidence = math.Round(100*(0.5+0.5*min(max(margin, 0), 1))*n/(n+10)) / 100
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
	q.decide(Unknown, 0, "send more traffic, or lengthen the window")
	q.v.Confidence = 0
	return true
}

func (q *question) impossible() bool {
	share := ratio(float64(q.Suspect), float64(q.Suspect+q.Timed))
	if share <= q.t.SuspectShare {
		return false
	}
	q.say("%s of the answers tell stages that cannot be true: longer together than the server had the request", percent(share))
	return q.decide(Unknown, above(share, q.t.SuspectShare), "look at the unit of the server's timings: Server-Timing is in milliseconds; microseconds sent as milliseconds look like this")
}

func (q *question) wrongUnit() bool {
	if q.Explained <= 0 || q.Explained >= q.t.Explained || q.Timed < q.t.MinTimed {
		return false
	}
	q.say("the stages explain %s of the server's time for a request alone; below %s their unit is wrong or the slow part is not timed", percent(q.Explained), percent(q.t.Explained))
	return q.decide(Unknown, below(q.Explained, q.t.Explained), "look at the unit of the server's timings: seconds sent as milliseconds look like this")
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
	return q.decide(Unknown, below(rate, q.t.CopyRate), "synchronise the device before stopping the forward pass's clock, and mark the timings with sync=1")
}

func (q *question) client() bool {
	if q.Shares.Upload < q.t.ClientShare {
		return false
	}
	q.say("%s of the requests' time is the upload of their bodies (%s on average); from %s it is the clients", percent(q.Shares.Upload), short(q.Means.Upload), percent(q.t.ClientShare))
	q.sayShares()
	return q.decide(Client, above(q.Shares.Upload, q.t.ClientShare), "nothing in the server helps: let clients send compressed audio, or over a faster link; a buffering balancer in front keeps slow uploads away from the limit")
}

func (q *question) healthy() bool {
	if q.refused() > q.t.RefusedShare {
		return false
	}
	waiting := q.Shares.Waiting()
	switch {
	case q.Baseline > 0 && q.Slowdown < q.t.HealthySlowdown && waiting < q.t.HealthyQueue:
		q.saySlowdown()
		q.say("%s of the requests' time is waiting; below %s it needs no remark", percent(waiting), percent(q.t.HealthyQueue))
		return q.decide(Healthy, min(2*below(q.Slowdown-1, q.t.HealthySlowdown-1), 2*below(waiting, q.t.HealthyQueue)), "")
	case q.Timed >= q.t.MinTimed && waiting < q.t.AlertQueue && q.periods > 0 && q.periods <= q.t.BatchPeriods && q.responds():
		q.say("requests wait %.1f executions, which batching itself costs, and throughput rises with load (elasticity %.2f, 95 %% interval %.2f to %.2f)", q.periods, q.ThroughputElasticity.Value, q.ThroughputElasticity.CI95[0], q.ThroughputElasticity.CI95[1])
		q.saySlowdown()
		return q.decide(Healthy, above(q.ThroughputElasticity.Value, q.t.Responds), "")
	case q.Baseline == 0 && q.Timed >= q.t.MinTimed && waiting < q.t.HealthyQueue && q.room != roomLinear && q.Shares.Unattributed < q.t.QueueShare:
		q.say("%s of the requests' time is waiting; below %s it needs no remark", percent(waiting), percent(q.t.HealthyQueue))
		q.decide(Healthy, 0, "")
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
	return q.decide(Queue, above(alone, q.t.DelayShare), "lower the server's batch delay (max_queue_delay, batch_wait_timeout): it buys nothing at this load")
}

// untimed decides what can be decided without the server's word.
func (q *question) untimed() bool {
	if q.Timed >= q.t.MinTimed {
		return false
	}
	if q.Shares.Queue >= q.t.QueueShare {
		q.say("%s of the requests' time is waiting in weir's queue, before %s; from %s that is a problem", percent(q.Shares.Queue), q.limit(), percent(q.t.QueueShare))
		q.saySlowdown()
		q.decide(Queue, above(q.Shares.Queue, q.t.QueueShare), "raise max_concurrency by half and watch: if throughput rises, the server has room; if only its time per request rises, it is full")
		return q.doubt("the server tells no timings, so whether it has room is not known")
	}
	q.saySlowdown()
	q.say("%d of %d answers carry stage timings; %d are needed to look inside the server", q.Timed, q.OK, q.t.MinTimed)
	return q.decide(Unknown, 0, "weir doctor --server URL tells how to see inside: the server's own figures, its spans, or Server-Timing (examples/helpers)")
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
		return q.decide(Transfer, margin, q.copyAdvice())
	}
	q.sayBusy()
	return q.decide(Host, margin, "give the host code more workers or a faster decoder, and keep it off the event loop; a larger device changes nothing")
}

// mixed: the forward pass grew nearly as much as the stage that leads.
func (q *question) mixed(leader Cause, grown time.Duration) bool {
	f := q.grown.Forward
	if f <= 0 || float64((grown-f).Abs()) > q.t.Tie*float64(max(grown, f)) || q.part(f) < q.t.Dominates/2 {
		return false
	}
	q.sayGrowth("the forward pass", f)
	return q.decide(Mixed, 1-ratio(float64((grown-f).Abs()), q.t.Tie*float64(max(grown, f))),
		"two causes grow alike, "+string(leader)+" and compute: treat "+string(leader)+" first, it is the cheaper one, and look again")
}

// copiesHold: copies take most of the device's time, so that the forward pass
// waits for them.
func (q *question) copiesHold() bool {
	d := q.Means.Transfer + q.Means.Forward
	return ratio(float64(q.Means.Transfer), float64(d)) >= 0.6 && q.BusyOK && q.busy >= q.t.DeviceIdle
}

// unexplained: the time grew inside the server, in no stage that it tells.
func (q *question) unexplained() bool {
	part := q.part(q.grown.Unattributed)
	if part < q.t.Dominates || q.grown.Unattributed < q.wait {
		return false
	}
	q.sayGrowth("what the server tells in no stage", q.grown.Unattributed)
	switch {
	case 2*q.QueueTold >= q.Timed:
		q.decide(Unknown, above(part, q.t.Dominates), "time what the server does between reading a request and queueing it, and after postprocessing: that is where the time goes")
		return q.doubt("the server tells its queue, so this time is neither queueing nor a stage: a front end, an event loop, or the network")
	case q.room == roomLinear:
		q.sayLine()
		q.decide(Compute, above(part, q.t.Dominates), computeAdvice)
		return q.doubt("inferred: the server does not tell its own queue")
	}
	q.sayLine()
	q.sayBusy()
	q.decide(Queue, above(part, q.t.Dominates), "let the server tell its queue wait (Server-Timing: queue;dur=…) to be sure; then raise the limit on its requests in flight or its batch size")
	return q.doubt("inferred: the server does not tell its own queue, and the wait for a busy worker looks the same")
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
	return q.decide(Queue, below(q.busy, q.t.DeviceIdle), "lower the server's batch delay or batch size: a batch costs as much as its members alone, and waiting for it leaves the device idle")
}

func (q *question) forward() bool {
	if q.grown.Forward < q.wait || q.growth <= 0 || q.grown.Forward == 0 {
		return false
	}
	q.sayGrowth("the forward pass", q.grown.Forward)
	q.sayLine()
	q.sayBusy()
	return q.decide(Compute, above(q.part(q.grown.Forward), q.t.Dominates), computeAdvice)
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
	switch {
	case q.Shares.Waiting() < q.t.HealthyQueue && q.refused() <= q.t.RefusedShare:
		q.decide(Unknown, 0, "")
		return q.doubt("latency grew, but in no part enough to name it")
	case q.ownLimit(idle, waits):
		return q.decide(Queue, q.hasRoom(), "raise "+q.limit()+": the server has room for more at once")
	case q.copiesHold():
		q.sayCopies()
		return q.decide(Transfer, above(q.busy, q.t.DeviceIdle), q.copyAdvice())
	case q.room == roomLinear && !(idle && waits):
		return q.decide(Compute, above(q.Report.Forward.CI95[0], q.t.Elastic), computeAdvice)
	case q.room == roomFree && !waits:
		return q.structural()
	case q.room == roomFree || idle && waits:
		return q.policy()
	}
	return q.undetermined()
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
		return q.decide(Healthy, above(q.ThroughputElasticity.Value, q.t.Responds), "")
	}
	return q.decide(Compute, below(q.periods, q.t.BatchPeriods), "the wait for the running batch is inherent: continuous batching, shorter batches, or another instance or replica shorten it")
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
		return q.decide(Queue, margin, "raise the server's max_batch_size: twice as large a batch hardly takes longer (look at the device's memory first)")
	}
	if q.grown.Queue >= q.grown.ServerQueue {
		return q.decide(Queue, margin, "raise "+q.limit()+": larger batches are nearly free")
	}
	return q.decide(Queue, margin, "let the server take more at once (its limit of sequences, slots or workers in flight): larger batches are nearly free")
}

func (q *question) pinned() bool { return q.BatchMax > 0 && q.BatchAtMax >= q.t.BatchPinned }

// undetermined: a full device and a limit set too low trace the same picture
// until one of them is moved.
func (q *question) undetermined() bool {
	copies := ratio(float64(q.Means.Transfer), float64(q.Means.Transfer+q.Means.Forward))
	switch {
	case q.BusyOK && q.busy >= q.t.DeviceFull && copies >= q.t.Dominates:
		q.sayCopies()
		q.decide(Mixed, above(q.busy, q.t.DeviceFull), "the device is full with copies and with compute: "+q.copyAdvice()+"; then look again")
		return q.doubt("")
	case q.BusyOK && q.busy >= q.t.DeviceFull && q.Batch <= 1.05 && (q.Batch > 0 || q.BusyFrom == ""):
		q.decide(Compute, above(q.busy, q.t.DeviceFull), "another replica or a faster device; if the server can batch, try its max_batch_size above 1 first")
		return q.doubt("the batch was always one, so whether batching is free is not known")
	case q.BusyFrom != "" && q.busy >= q.t.DeviceFull && q.Batch == 0:
		q.decide(Compute, above(q.busy, q.t.DeviceFull), "another replica or a faster device; if the server batches, try a larger batch first")
		return q.doubt("the device is always busy, but whether a larger batch would cost it more is not known")
	case q.part(q.grown.Forward) > 0.25:
		q.decide(Compute, 0, computeAdvice)
		return q.doubt("whether a larger batch is free is not known: the batch hardly varied")
	}
	q.decide(Queue, 0, "raise "+q.limit()+" by half and watch: if throughput rises, the limit was too low; if the forward pass grows instead, the device is full")
	return q.doubt("whether the device has room is not known: the batch hardly varied")
}
