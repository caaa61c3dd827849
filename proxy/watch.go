package proxy

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"weir/classifier"
	"weir/proxy/evidence"
	"weir/tracing"
)

// A watch turns records into verdicts and keeps what the admin page shows.
// Its take and tick run on the sink's goroutine; everything else may be
// called from anywhere.
type watch struct {
	window     classifier.Window
	probe      *probe
	latches    map[string]*latch
	next       time.Time // when the window is cut
	spans      *tracing.Spans
	metrics    *tracing.Metrics
	logs       *tracing.Logs
	logger     *slog.Logger
	untrusted  *atomic.Int64 // timings that cannot be true; nil: not counted
	doubted    time.Time     // when the log last told of one
	loads      map[string]*loadMean
	tap        *tracing.Tap        // nil: the server's own spans are not read
	evidence   *evidence.Collector // nil: nothing beside the requests is asked
	external   map[string]*classifier.External
	length     time.Duration
	late       func() time.Duration // may be nil, as doubt; see Sidecar.Doubt
	doubt      func(classifier.Verdict) classifier.Verdict
	mu         sync.Mutex // guards what follows
	thresholds classifier.Thresholds
	latchFor   time.Duration
	latchKeep  time.Duration
	verdicts   []classifier.Verdict // one a class, the busiest first
	recent     ring[classifier.Observation]
	answered   map[string]uint64 // requests answered well, by class
	past       map[string]*past
	long       map[time.Duration][]classifier.Verdict // by span
}

// A latch remembers the cause that it showed before.
type latch struct {
	classifier.Latch
	cause classifier.Cause
}

// past is a class's history for the page.
type past struct {
	points  ring[point]
	forward ring[forwardPoint]
}

type point struct {
	End        time.Time  `json:"end"`
	Requests   int        `json:"requests"`
	Mean       float64    `json:"mean_ms"`
	P95        float64    `json:"p95_ms"`
	Throughput float64    `json:"throughput"`
	Shares     sharesJSON `json:"shares"`
	Cause      string     `json:"cause"`
}

type forwardPoint struct {
	Batch    int     `json:"batch"`
	Inflight int     `json:"inflight"`
	Forward  float64 `json:"forward_ms"`
}

const (
	pastPoints   = 360 // an hour of 10 s windows
	pastForward  = 400
	maxHistories = 64
)

func (w *watch) take(o *classifier.Observation) {
	if !w.tap.Hold(o, time.Now()) {
		w.settle(o)
	}
}

// settle counts a record that is as complete as it will be.
func (w *watch) settle(o *classifier.Observation) {
	w.distrust(o)
	w.addLoad(o)
	w.window.Add(o)
	w.spans.Record(o)
	w.metrics.Observe(o)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recent.push(*o)
	w.count(o)
	if d, ok := o.In(classifier.StageForward); ok {
		if p := w.pastOf(o.Class); p != nil {
			p.forward.push(forwardPoint{o.BatchSize, o.Inflight, milliseconds(d)})
		}
	}
}

func (w *watch) pastOf(class string) *past {
	p := w.past[class]
	if p == nil && len(w.past) < maxHistories {
		p = &past{points: newRing[point](pastPoints), forward: newRing[forwardPoint](pastForward)}
		w.past[class] = p
	}
	return p
}

// tick cuts the window when its time has come.
func (w *watch) tick(now time.Time) {
	w.tap.Release(now, false, w.settle)
	if now.Before(w.next) {
		return
	}
	if w.next.IsZero() {
		w.next = now.Truncate(w.length)
	}
	for !w.next.After(now) {
		w.next = w.next.Add(w.length)
	}
	if w.late != nil {
		w.window.Late = w.late()
	}
	w.probe.take(w.window.Probe)
	w.judge(w.window.Cut(now), now)
}

// judge turns reports into the verdicts that are shown, and tells of changes.
func (w *watch) judge(reports []classifier.Report, now time.Time) {
	w.mu.Lock()
	thresholds, latchFor, latchKeep := w.thresholds, w.latchFor, w.latchKeep
	w.mu.Unlock()
	verdicts := make([]classifier.Verdict, 0, len(reports))
	seen := make(map[string]bool, len(reports))
	for _, r := range reports {
		l := w.latches[r.Class]
		if l == nil {
			l = &latch{}
			w.latches[r.Class] = l
		}
		l.For, l.KeepFor = latchFor, latchKeep
		w.fill(&r)
		shown, changed := l.Update(classifier.Classify(r, thresholds), now)
		if w.doubt != nil { // after the latch: what is not known is not shown for a while longer
			shown = w.doubt(shown)
			changed = shown.Cause != l.cause
		}
		if changed {
			w.tell(shown, l.cause)
			l.cause = shown.Cause
		}
		seen[r.Class] = true
		verdicts = append(verdicts, shown)
		w.keep(r, shown)
	}
	for class := range w.latches {
		if !seen[class] {
			delete(w.latches, class)
			delete(w.external, class)
		}
	}
	w.judgeLong(thresholds)
	sortByTime(verdicts)
	w.metrics.Verdicts(verdicts)
	w.mu.Lock()
	w.verdicts = verdicts
	w.mu.Unlock()
}

// tell logs a verdict that differs from the one before.
func (w *watch) tell(v classifier.Verdict, previous classifier.Cause) {
	if previous == "" && v.Cause == classifier.Unknown {
		return // nothing was known and nothing is
	}
	w.logs.VerdictChanged(v, previous)
	level := slog.LevelWarn
	if v.Cause == classifier.Healthy || v.Cause == classifier.Unknown {
		level = slog.LevelInfo
	}
	w.logger.Log(context.Background(), level, "verdict changed", "class", v.Class, "cause", v.Cause, "previous", previous,
		"confidence", v.Confidence, "evidence", strings.Join(v.Evidence, "; "), "advice", v.Advice)
}

// keep adds one window to the class's history.
func (w *watch) keep(r classifier.Report, v classifier.Verdict) {
	if r.Requests == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.pastOf(r.Class); p != nil {
		p.points.push(point{
			End: r.End, Requests: r.Requests, Mean: milliseconds(r.Mean), P95: milliseconds(r.P95),
			Throughput: r.Throughput, Shares: sharesJSON(r.Shares), Cause: string(v.Cause),
		})
	}
}

// sortByTime puts the class that took most of the users' time first.
func sortByTime(v []classifier.Verdict) {
	slices.SortStableFunc(v, func(a, b classifier.Verdict) int {
		return cmp.Compare(float64(b.Report.Requests)*float64(b.Report.Mean), float64(a.Report.Requests)*float64(a.Report.Mean))
	})
}

func (w *watch) current() []classifier.Verdict {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.verdicts // replaced as a whole, never changed
}

// last returns up to n of the newest records, newest last.
func (w *watch) last(n int) []classifier.Observation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.recent.last(n)
}

func (w *watch) history(class string) (points []point, forward []forwardPoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.past[class]
	if p == nil {
		return nil, nil
	}
	return p.points.last(pastPoints), p.forward.last(pastForward)
}

// A ring keeps the newest size values.
type ring[T any] struct {
	size   int
	values []T
	next   int // the oldest, once there are size values
}

func newRing[T any](size int) ring[T] { return ring[T]{size: size} }

func (r *ring[T]) push(v T) {
	switch {
	case len(r.values) < r.size:
		r.values = append(r.values, v)
	case r.size > 0:
		r.values[r.next] = v
		r.next = (r.next + 1) % r.size
	}
}

// last copies up to n of the newest values, newest last.
func (r *ring[T]) last(n int) []T {
	out := make([]T, 0, len(r.values))
	out = append(append(out, r.values[r.next:]...), r.values[:r.next]...)
	return out[max(0, len(out)-n):]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// setThresholds puts new thresholds in force from the next window on.
func (w *watch) setThresholds(t classifier.Thresholds, latchFor, keepFor time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.thresholds, w.latchFor, w.latchKeep = t, latchFor, keepFor
}

// currentThresholds are those that the page shows.
func (w *watch) currentThresholds() classifier.Thresholds {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.thresholds
}
