package classifier

import (
	"fmt"
	"strconv"
	"time"
)

func (q *question) say(format string, args ...any) {
	q.v.Evidence = append(q.v.Evidence, fmt.Sprintf(format, args...))
}

func (q *question) sayWaiting() {
	q.say("%s of the requests' time is waiting: %s in weir's queue before %s, %s in the server's; from %s that is a problem",
		percent(q.Shares.Waiting()), percent(q.Shares.Queue), q.limit(), percent(q.Shares.ServerQueue), percent(q.t.QueueShare))
}

func (q *question) saySlowdown() {
	if q.Baseline > 0 {
		q.say("a request takes %s, %.1f times as long as at low load (%s, of %d requests); below %.1f times is healthy",
			short(q.Means.Core()), q.Slowdown, short(q.Baseline), q.BaselineN, q.t.HealthySlowdown)
	}
}

func (q *question) sayGrowth(name string, d time.Duration) {
	if q.Baseline > 0 {
		q.say("%s took %s more than at low load, %s of all that a request takes longer (from %s it is the cause)", name, short(d), percent(q.part(d)), percent(q.t.Dominates))
		return
	}
	q.say("%s took %s, %s of a request's time (from %s it is the cause; no low load was seen to compare with)", name, short(d), percent(q.part(d)), percent(q.t.Dominates))
}

// sayLine tells what a larger batch costs.
func (q *question) sayLine() {
	l := q.Report.Forward
	what := "one more request in the batch"
	if l.Against == "inflight" {
		what = "one more request in flight"
	}
	switch q.room {
	case roomUnknown:
		q.say("how the forward pass depends on the batch is not known: %d executions, in which the batch hardly varied", l.N)
	case roomFree:
		q.say("%s adds %s to a forward pass of %s: elasticity %.2f (95 %% interval %.2f to %.2f), nearly free", what, short(l.Slope), short(q.Means.Forward), l.Elasticity, l.CI95[0], l.CI95[1])
	case roomLinear:
		q.say("%s adds %s to a forward pass of %s: elasticity %.2f (95 %% interval %.2f to %.2f), no gain from batching", what, short(l.Slope), short(q.Means.Forward), l.Elasticity, l.CI95[0], l.CI95[1])
	default:
		q.say("%s adds %s to a forward pass of %s: elasticity %.2f (95 %% interval %.2f to %.2f), neither free nor without gain", what, short(l.Slope), short(q.Means.Forward), l.Elasticity, l.CI95[0], l.CI95[1])
	}
}

func (q *question) sayBusy() {
	if !q.BusyOK {
		return
	}
	word := "between room and full"
	switch {
	case q.busy < q.t.DeviceIdle:
		word = fmt.Sprintf("below %s it has room", percent(q.t.DeviceIdle))
	case q.busy >= q.t.DeviceFull && q.room == roomFree && !q.pinned():
		word = fmt.Sprintf("with batches of %.1f on average, of %d at most: larger ones would cost it little", q.Batch, q.BatchMax)
	case q.busy >= q.t.DeviceFull:
		word = fmt.Sprintf("from %s it is full", percent(q.t.DeviceFull))
	}
	if q.BusyFrom != "" {
		q.say("the device is busy %s of the time by %s (%s)", percent(q.busy), q.BusyFrom, word)
		return
	}
	q.say("while requests wait, copies and forward passes occupy the device %s of the time (%s)", percent(min(1, q.busy)), word)
}

func (q *question) sayCopies() {
	if q.Copies > 0 {
		q.say("a request makes %.0f copies of %s together, in %s", q.Copies, size(q.CopyBytes), short(q.Means.Transfer))
	}
	d := q.Means.Transfer + q.Means.Forward
	q.say("copies take %s of the time that an execution holds the device", percent(ratio(float64(q.Means.Transfer), float64(d))))
}

// copyAdvice tells many small copies from few large ones: at 1 GB/s and more
// the bytes would be the cost.
func (q *question) copyAdvice() string {
	rate := ratio(q.CopyBytes, q.Means.Transfer.Seconds())
	switch {
	case q.CopyFit && q.CopySmall > 0.5:
		return fmt.Sprintf("merge the copies of a batch into one, from pinned memory: each costs %s whatever its size, which is %s of the copies' time", micros(q.CopyLatency), percent(q.CopySmall))
	case q.CopyFit:
		return fmt.Sprintf("move fewer bytes (half precision, features made on the device), or overlap copies with the forward pass: bytes are %s of the copies' time, at %s a second", percent(1-q.CopySmall), size(q.CopyRate))
	case q.Copies > 1 && (rate == 0 || rate < 1e9):
		return "merge the copies of a batch into one, from pinned memory: each costs its latency, whatever its size"
	case rate >= 1e9:
		return "move fewer bytes (half precision, features made on the device), or overlap copies with the forward pass"
	}
	return "merge copies, use pinned memory, and overlap them with the forward pass; let the server tell bytes and n to know which"
}

func (q *question) sayShares() {
	s := q.Shares
	q.say("the rest: queues %s, forward pass %s, transfer %s, host code %s, unattributed %s",
		percent(s.Waiting()), percent(s.Forward), percent(s.Transfer), percent(s.Preprocess+s.Postprocess), percent(s.Unattributed))
}

func (q *question) limit() string {
	if q.Limit > 0 {
		return "max_concurrency (" + strconv.Itoa(q.Limit) + ")"
	}
	return "max_concurrency (none is set; the server's own limit)"
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

// short writes a duration with three digits.
func short(d time.Duration) string {
	switch ms := float64(d) / 1e6; {
	case d.Abs() >= 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d.Abs() >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d.Abs() >= 100*time.Millisecond:
		return fmt.Sprintf("%.0f ms", ms)
	case d.Abs() >= 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", ms)
	default:
		return fmt.Sprintf("%.2f ms", ms)
	}
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f µs", float64(d)/1e3) }

func size(bytes float64) string {
	switch {
	case bytes >= 1e9:
		return fmt.Sprintf("%.1f GB", bytes/1e9)
	case bytes >= 1e6:
		return fmt.Sprintf("%.1f MB", bytes/1e6)
	case bytes >= 1e3:
		return fmt.Sprintf("%.0f kB", bytes/1e3)
	}
	return fmt.Sprintf("%.0f bytes", bytes)
}
