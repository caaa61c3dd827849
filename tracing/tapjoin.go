package tracing

import (
	"sync"
	"sync/atomic"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// A joiner brings the server's spans and weir's records together by their
// trace id. Spans come before the record where answers are long, and some
// seconds after it where exporters gather batches; both wait for the other for
// a bounded time, in bounded memory.
type joiner struct {
	ingest atomic.Pointer[Ingest]
	wait   time.Duration

	mu     sync.Mutex
	traces map[[16]byte]*toldTrace
	order  []traceArrival // of traces, oldest first
	held   []heldRecord
	joined time.Time // when spans last met a record
	begun  time.Time

	full atomic.Int64 // traces and records given up for lack of room
}

type toldTrace struct{ spans []toldSpan }

type traceArrival struct {
	trace [16]byte
	at    time.Time
}

type heldRecord struct {
	o     classifier.Observation
	until time.Time
}

// Bounds of the join.
const (
	maxTraces     = 8192
	maxTraceSpans = 128
	maxRecords    = 4096
	traceLife     = time.Minute // of spans whose record does not come: longer than most answers
	quietAfter    = 5 * time.Minute
)

// spans takes the spans of one export.
func (j *joiner) spans(list []*tracepb.ResourceSpans, now time.Time) {
	in := j.ingest.Load()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.forget(now)
	for _, r := range list {
		for _, s := range r.ScopeSpans {
			for _, sp := range s.Spans {
				if t, ok := in.readSpan(sp); ok {
					j.add([16]byte(sp.TraceId), t, now)
				}
			}
		}
	}
}

func (j *joiner) add(trace [16]byte, t toldSpan, now time.Time) {
	tr := j.traces[trace]
	if tr == nil {
		if len(j.traces) >= maxTraces {
			j.drop(j.order[0].trace)
			j.order = j.order[1:]
			j.full.Add(1)
		}
		tr = &toldTrace{}
		j.traces[trace] = tr
		j.order = append(j.order, traceArrival{trace, now})
	}
	if len(tr.spans) < maxTraceSpans {
		tr.spans = append(tr.spans, t)
	}
}

func (j *joiner) drop(trace [16]byte) { delete(j.traces, trace) }

func (j *joiner) forget(now time.Time) {
	n := 0
	for n < len(j.order) && now.Sub(j.order[n].at) > traceLife {
		j.drop(j.order[n].trace)
		n++
	}
	j.order = j.order[n:]
}

// hold keeps a record for spans to come; false if there is nothing to wait
// for. It copies o.
func (j *joiner) hold(o *classifier.Observation, now time.Time) bool {
	if !o.Sampled || o.Dequeued.IsZero() || o.Upgraded {
		return false
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.begun.IsZero() {
		j.begun = now
	}
	last := j.joined
	if last.IsZero() {
		last = j.begun
	}
	quiet := now.Sub(last) > quietAfter
	if quiet && j.traces[o.TraceID] == nil {
		return false
	}
	if len(j.held) >= maxRecords {
		j.full.Add(1)
		return false
	}
	j.held = append(j.held, heldRecord{*o, now.Add(j.wait)})
	return true
}

// release gives out the records that need not wait any longer: the time is
// over, or the server's outermost span is here and stages with it. all gives
// out every record.
func (j *joiner) release(now time.Time, all bool, take func(*classifier.Observation)) {
	j.mu.Lock()
	var ready []heldRecord
	kept := j.held[:0]
	for i := range j.held {
		h := &j.held[i]
		if all || !now.Before(h.until) || j.complete(&h.o) {
			j.join(&h.o, now)
			ready = append(ready, *h)
			continue
		}
		kept = append(kept, *h)
	}
	clear(j.held[len(kept):])
	j.held = kept
	j.mu.Unlock()
	for i := range ready {
		take(&ready[i].o)
	}
}

// complete tells whether the span right under weir's own is here, and a stage.
func (j *joiner) complete(o *classifier.Observation) bool {
	tr := j.traces[o.TraceID]
	if tr == nil {
		return false
	}
	root, stage := false, false
	for i := range tr.spans {
		t := &tr.spans[i]
		root = root || t.parent == o.SpanID
		stage = stage || len(t.timings) > 0 || t.events.computeEnd > 0
	}
	return root && stage
}

// join fills the record. Where no other record of the trace waits, spans whose
// parents are missing are its own, too.
func (j *joiner) join(o *classifier.Observation, now time.Time) {
	tr := j.traces[o.TraceID]
	if tr == nil {
		return
	}
	alone := true
	for i := range j.held {
		alone = alone && (j.held[i].o.TraceID != o.TraceID || j.held[i].o.SpanID == o.SpanID)
	}
	alone = alone && !j.shared(tr, o.SpanID)
	if fill(o, tr.spans, alone) {
		j.joined = now
		j.ingest.Load().Finish(o)
	}
}

// shared tells whether some span of the trace hangs under another span that
// did not come: another request's, perhaps.
func (j *joiner) shared(tr *toldTrace, own [8]byte) bool {
	orphans := make(map[[8]byte]bool)
	for i := range tr.spans {
		t := &tr.spans[i]
		if t.parent != own && parentOf(tr.spans, t) == nil && !under(tr.spans, t, own) {
			orphans[t.parent] = true
		}
	}
	for i := range tr.spans {
		if tr.spans[i].parent == own {
			return len(orphans) > 0 // its own are there: what hangs elsewhere is not
		}
	}
	return len(orphans) > 1
}
