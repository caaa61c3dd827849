package envoy

import (
	"context"
	"slices"
	"sync"
	"time"

	"weir/classifier"
)

// A clock brings the instants of one Envoy's clock to weir's. Only differences
// on Envoy's clock are trusted: the smallest time between the end of a request
// and its entry's arrival, over the last minute or two, is the difference of
// the clocks and the least that the log is late.
type clock struct {
	since       time.Time
	least, past time.Duration
	known       bool
}

// clockMemory is how long a smallest difference counts: a clock that was set
// is followed within twice that.
const clockMemory = time.Minute

// here is when a request that began at start, by Envoy's clock, began by
// weir's. It lies so that the request ended before now.
func (c *clock) here(start time.Time, took time.Duration, now time.Time) time.Time {
	off := now.Round(0).Sub(start.Add(took))
	switch {
	case !c.known:
		c.known, c.since, c.least, c.past = true, now, off, off
	case now.Sub(c.since) > clockMemory:
		c.since, c.past, c.least = now, c.least, off
	default:
		c.least = min(c.least, off)
	}
	late := max(0, off-min(c.least, c.past))
	return now.Add(-late - took)
}

// A replay holds the log's entries back until no request that an entry met in
// the server can still be missing, counts those, and gives the records on in
// the order in which they ended.
type replay struct {
	sink func(*classifier.Observation)

	mu                        sync.Mutex
	held                      []*classifier.Observation // by Done
	longest, before           time.Duration             // of the requests of this minute and the one before
	since                     time.Time
	came, queued, began, over timeline // queued: when they left the queue, one way or other
	born                      time.Time
}

// How long an entry may be under way in Envoy's buffer (buffer_flush_interval
// is 1 s), and how long entries are held at most, for the requests that they
// met to end.
const (
	flushTime = 1500 * time.Millisecond
	maxHold   = 8 * time.Second
	maxLate   = flushTime + maxHold
	maxHeld   = 1 << 16 // entries; one more pushes the oldest out
	maxEvents = 1 << 17 // of a timeline
)

// replayPeriod is how often the replay looks at what it holds.
const replayPeriod = 100 * time.Millisecond

func newReplay(sink func(*classifier.Observation)) *replay {
	return &replay{sink: sink, born: time.Now()}
}

// add takes an entry's record.
func (r *replay) add(o *classifier.Observation, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.since) > time.Minute {
		r.since, r.before, r.longest = now, r.longest, 0
	}
	r.longest = max(r.longest, o.Total())
	left := o.Dequeued
	if left.IsZero() {
		left = o.Done
	} else {
		r.began.add(r.at(o.Dequeued))
		r.over.add(r.at(o.Done))
	}
	r.came.add(r.at(o.Enqueued))
	r.queued.add(r.at(left))
	i := len(r.held)
	for i > 0 && r.held[i-1].Done.After(o.Done) {
		i--
	}
	r.held = slices.Insert(r.held, i, o)
}

// hold is how long after its end an entry's record is given on.
func (r *replay) hold() time.Duration { return flushTime + min(max(r.longest, r.before), maxHold) }

// late is how long after its end a record may come to the sink; 0 while there
// is no log.
func (r *replay) late() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since.IsZero() {
		return 0
	}
	return r.hold() + replayPeriod
}

func (r *replay) at(t time.Time) int64 { return int64(t.Sub(r.born)) }

// release gives on what is due. With all set it is everything.
func (r *replay) release(now time.Time, all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hold := r.hold()
	n := 0
	for n < len(r.held) && (all || len(r.held)-n > maxHeld || now.Sub(r.held[n].Done) >= hold) {
		o := r.held[n]
		before := r.at(o.Enqueued) - 1 // itself is no company
		o.Waiting = max(0, r.came.until(before)-r.queued.until(before))
		if !o.Dequeued.IsZero() {
			o.Inflight = max(1, r.began.until(r.at(o.Dequeued))-r.over.until(r.at(o.Dequeued)))
		}
		r.sink(o)
		n++
	}
	r.held = slices.Delete(r.held, 0, n)
	horizon := r.at(now.Add(-2 * maxLate))
	for _, t := range []*timeline{&r.came, &r.queued, &r.began, &r.over} {
		t.forget(horizon)
	}
}

// run releases until ctx ends, and then the rest.
func (r *replay) run(ctx context.Context) {
	t := time.NewTicker(replayPeriod)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			r.release(now, false)
		case <-ctx.Done():
			r.release(time.Now(), true)
			return
		}
	}
}

// A timeline counts events up to an instant. It remembers the newer ones each,
// and of the older how many they were.
type timeline struct {
	older int
	at    []int64 // ascending
}

func (t *timeline) add(at int64) {
	if len(t.at) == maxEvents {
		t.older += maxEvents / 2
		t.at = slices.Delete(t.at, 0, maxEvents/2)
	}
	i := len(t.at)
	for i > 0 && t.at[i-1] > at {
		i--
	}
	t.at = slices.Insert(t.at, i, at)
}

// until is the number of events at or before an instant.
func (t *timeline) until(at int64) int {
	i, _ := slices.BinarySearch(t.at, at+1)
	return t.older + i
}

func (t *timeline) forget(before int64) {
	i, _ := slices.BinarySearch(t.at, before)
	t.older += i
	t.at = slices.Delete(t.at, 0, i)
}
