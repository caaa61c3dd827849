package tracing

import (
	"slices"
	"strings"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// sourceOTLP is the source of timings that the server's own spans told.
const sourceOTLP = "otlp"

// A told span is what is kept of one span of the server: where it belongs, and
// what it says of stages.
type toldSpan struct {
	id, parent [8]byte
	timings    []classifier.Timing
	total      time.Duration
	batch, seq int
	tokens     int
	audio      float64
	events     tritonEvents
}

// tritonEvents are the instants that Triton writes as events (mode=opentelemetry),
// in ns of its own clock; only their differences mean anything.
type tritonEvents struct{ queue, compute, inputEnd, outputStart, computeEnd uint64 }

func (e *tritonEvents) set(name string, at uint64) {
	switch name {
	case "QUEUE_START":
		e.queue = at
	case "COMPUTE_START":
		e.compute = at
	case "COMPUTE_INPUT_END":
		e.inputEnd = at
	case "COMPUTE_OUTPUT_START":
		e.outputStart = at
	case "COMPUTE_END":
		e.computeEnd = at
	}
}

// readSpan reads a span; only its place in the trace is of use where it tells
// no stage.
func (in *Ingest) readSpan(sp *tracepb.Span) (t toldSpan, ok bool) {
	if len(sp.TraceId) != 16 || len(sp.SpanId) != 8 {
		return t, false
	}
	copy(t.id[:], sp.SpanId)
	copy(t.parent[:], sp.ParentSpanId)
	for _, e := range sp.Events {
		t.events.set(e.Name, e.TimeUnixNano)
	}
	if s, named := in.spanStage(sp.Name); named && sp.EndTimeUnixNano >= sp.StartTimeUnixNano {
		d := time.Duration(min(sp.EndTimeUnixNano-sp.StartTimeUnixNano, uint64(maxDuration)))
		if s.total {
			t.total = d
		} else {
			t.timings = append(t.timings, classifier.Timing{Name: s.name, Stage: s.stage, Dur: d})
		}
	}
	var model modelTimes
	for _, kv := range sp.Attributes {
		t.attribute(kv.Key, kv.Value, &model)
	}
	model.add(&t)
	return t, true
}

// spanStage is the stage that a span of that name times: the user's mapping
// first, then weir's vocabulary.
func (in *Ingest) spanStage(name string) (t target, ok bool) {
	if in == nil {
		return t, false
	}
	for i := range in.spans {
		if in.spans[i].span == name {
			return in.spans[i].target, true
		}
	}
	w := words[strings.ToLower(name)]
	return target{name: w.name, stage: w.stage, total: w.canon == canonTotal}, w.name != "" && w.canon != canonTotal
}

// modelTimes are vLLM's attributes of a request, in seconds.
type modelTimes struct{ queue, prefill, decode, inference, forward, e2e float64 }

// attribute reads what vLLM tells (vllm/tracing: gen_ai.latency.*, seconds), and
// the counts that weir's own helpers and others give.
func (t *toldSpan) attribute(key string, v *commonpb.AnyValue, m *modelTimes) {
	f, ok := numeric(v)
	if !ok || f < 0 || f > maxCount {
		return
	}
	switch key {
	case "gen_ai.latency.time_in_queue":
		m.queue = f
	case "gen_ai.latency.time_in_model_prefill":
		m.prefill = f
	case "gen_ai.latency.time_in_model_decode":
		m.decode = f
	case "gen_ai.latency.time_in_model_inference":
		m.inference = f
	case "gen_ai.latency.time_in_model_forward":
		m.forward = f
	case "gen_ai.latency.e2e":
		m.e2e = f
	case "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens":
		t.tokens = int(f)
	case "weir.batch.size", "batch", "batch_size":
		t.batch = int(f)
	case "weir.sequence.length", "seq", "sequence_length":
		t.seq = int(f)
	case "weir.audio.duration", "audio":
		t.audio = min(f, maxAudio)
	}
}

// add turns the attributes into timings, each part of the forward pass once.
func (m *modelTimes) add(t *toldSpan) {
	put := func(name string, s classifier.Stage, seconds float64) {
		if d, ok := toDuration(seconds, time.Second); ok && seconds > 0 {
			t.timings = append(t.timings, classifier.Timing{Name: name, Stage: s, Dur: d})
		}
	}
	if m.queue > 0 {
		put("time_in_queue", classifier.StageQueue, m.queue)
	}
	switch {
	case m.prefill > 0 || m.decode > 0:
		put("prefill", classifier.StageForward, m.prefill)
		put("decode", classifier.StageForward, m.decode)
	case m.inference > 0:
		put("inference", classifier.StageForward, m.inference)
	default:
		put("forward", classifier.StageForward, m.forward)
	}
	if d, ok := toDuration(m.e2e, time.Second); ok {
		t.total = max(t.total, d)
	}
}

func numeric(v *commonpb.AnyValue) (float64, bool) {
	switch v := v.GetValue().(type) {
	case *commonpb.AnyValue_DoubleValue:
		return v.DoubleValue, v.DoubleValue == v.DoubleValue
	case *commonpb.AnyValue_IntValue:
		return float64(v.IntValue), true
	}
	return 0, false
}

// fill adds to a record what the spans under it tell. It keeps what the answer
// told itself.
func fill(o *classifier.Observation, spans []toldSpan, alone bool) (added bool) {
	var before [classifier.NumStages]bool
	for s := range before {
		_, before[s] = o.In(classifier.Stage(s))
	}
	for i := range spans {
		t := &spans[i]
		if !alone && !under(spans, t, o.SpanID) {
			continue
		}
		for _, one := range t.all(spans) {
			if one.Stage != classifier.StageOther && (before[one.Stage] || covered(spans, t, one.Stage)) {
				continue
			}
			addTiming(o, one, sourceOf(o))
			added = true
		}
		if t.total > 0 && !toldTotal(o) {
			o.ServerTotal = max(o.ServerTotal, t.total)
		}
		o.BatchSize, o.SeqLen, o.Tokens = first(o.BatchSize, t.batch), first(o.SeqLen, t.seq), max(o.Tokens, t.tokens)
		o.AudioSeconds = max(o.AudioSeconds, t.audio)
	}
	return added
}

func first(a, b int) int {
	if a > 0 {
		return a
	}
	return b
}

// sourceOf keeps the name of the source that told first.
func sourceOf(o *classifier.Observation) string {
	if o.Source != "" {
		return o.Source
	}
	return sourceOTLP
}

// all are the span's timings, and those that Triton's events make together
// with the events of its children.
func (t *toldSpan) all(spans []toldSpan) []classifier.Timing {
	e := t.events
	if e.queue == 0 && e.compute == 0 {
		return t.timings
	}
	list := slices.Clone(t.timings)
	put := func(name string, s classifier.Stage, from, to uint64) {
		if from > 0 && to >= from && to-from <= uint64(maxDuration) {
			list = append(list, classifier.Timing{Name: name, Stage: s, Dur: time.Duration(to - from)})
		}
	}
	began := e.compute
	for i := range spans {
		if c := &spans[i]; began == 0 && c.parent == t.id {
			began = c.events.compute
		}
	}
	put("queue", classifier.StageQueue, e.queue, began)
	put("compute_input", classifier.StageTransfer, e.compute, e.inputEnd)
	put("compute_infer", classifier.StageForward, e.inputEnd, e.outputStart)
	put("compute_output", classifier.StageTransfer, e.outputStart, e.computeEnd)
	return list
}

// maxDepth bounds the walk to a span's ancestors.
const maxDepth = 32

// under tells whether the span belongs below the span with that id.
func under(spans []toldSpan, t *toldSpan, root [8]byte) bool {
	for range maxDepth {
		if t.parent == root {
			return true
		}
		if t = parentOf(spans, t); t == nil {
			return false
		}
	}
	return false
}

// covered tells whether a span above tells the same stage: it has the time
// already.
func covered(spans []toldSpan, t *toldSpan, s classifier.Stage) bool {
	for range maxDepth {
		if t = parentOf(spans, t); t == nil {
			return false
		}
		if slices.ContainsFunc(t.timings, func(one classifier.Timing) bool { return one.Stage == s }) {
			return true
		}
	}
	return false
}

func parentOf(spans []toldSpan, t *toldSpan) *toldSpan {
	for i := range spans {
		if spans[i].id == t.parent {
			return &spans[i]
		}
	}
	return nil
}
