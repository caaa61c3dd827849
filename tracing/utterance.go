package tracing

import (
	"encoding/binary"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"

	"weir/classifier"
)

// idUtterances is where the ids of a session's utterances begin, far beyond
// those of its own spans.
const idUtterances uint64 = 1 << 32

// UtteranceIDs returns the span id of the nth utterance of a session, and that
// of its parent, the session's SERVER span. Both derive from the id that went
// to the server, so that an utterance's span can be made before its session's.
func UtteranceIDs(session *classifier.Observation, n int) (span, parent [8]byte) {
	seed := binary.BigEndian.Uint64(session.SpanID[:])
	return deriveID(seed, idUtterances+uint64(n)), deriveID(seed, idServer)
}

// planUtterance lays out an utterance: one span, and the stages that the
// server told of its final.
func (t *tree) planUtterance() (spans int) {
	t.admitted = t.at(t.o.Dequeued)
	t.queueEnd = t.start
	t.planStages()
	return 1 + t.drawn
}

// appendUtterance encodes the span of an utterance, from its first audio to
// its final, with the end of speech and the partials as events.
func (t *tree) appendUtterance(b []byte) []byte {
	o, u := t.o, t.o.Utterance
	begin := t.start - micros(u.Speech)
	s := t.span(o.SpanID, o.ParentID, tracepb.Span_SPAN_KIND_INTERNAL, begin, t.end)
	s.name = "utterance"
	b, at := openSpan(b, &s)
	b = appendString(b, "weir.stream.protocol", u.Protocol)
	b = appendInt(b, "weir.utterance.index", int64(u.Index))
	if o.Outcome == classifier.OK && o.Error == "" {
		b = appendDouble(b, "weir.utterance.final_latency", o.Total().Seconds())
	}
	b = appendSeconds(b, "weir.utterance.speech", u.Speech)
	b = appendSeconds(b, "weir.utterance.first_partial", u.FirstPartial)
	b = appendInt(b, "weir.utterance.partials", int64(u.Partials))
	if o.AudioSeconds > 0 {
		b = appendDouble(b, "weir.audio.duration", o.AudioSeconds)
		b = appendDouble(b, "weir.utterance.partial_rate", u.PartialsPerSecond(o.AudioSeconds))
	}
	b = appendSeconds(b, "weir.session.admission", u.Admission)
	b = appendSeconds(b, "weir.utterance.send_stall", u.Stall)
	b = appendSeconds(b, "weir.session.ping_rtt", u.PingRTT)
	if u.Acks > 0 {
		b = appendDouble(b, "weir.utterance.lag", u.Lag)
	}
	if u.Acks > 2 {
		b = appendDouble(b, "weir.utterance.lag_slope", u.LagSlope)
	}
	b = appendIf(b, "weir.utterance.unpaced", u.Unpaced)
	b = appendIf(b, "weir.utterance.end_estimated", u.EndEstimated)
	b = appendIf(b, "weir.queue.hidden", u.QueueHidden)
	b = appendString(b, "weir.timing.source", o.Source)
	b = t.appendUtteranceEvents(b, begin)
	if o.Error != "" {
		b = appendString(b, "error.type", o.Error)
	}
	if o.Outcome == classifier.Failed || o.Status >= 500 {
		b = appendError(b)
	}
	return closeMessage(b, at)
}

func (t *tree) appendUtteranceEvents(b []byte, begin int64) []byte {
	u := t.o.Utterance
	for _, d := range u.PartialAt {
		b = appendEvent(b, "partial", begin+micros(d))
	}
	if u.Speech > 0 {
		b = appendEvent(b, "end_of_speech", t.start)
	}
	if t.o.Outcome == classifier.OK && t.o.Error == "" {
		b = appendEvent(b, "final", t.end)
	}
	if lost := u.Partials - len(u.PartialAt); lost > 0 {
		b = protowire.AppendVarint(append(b, tagDroppedEvents), uint64(lost))
	}
	return b
}

// The tags of a span's events.
const (
	tagEvents        = 11<<3 | byte(protowire.BytesType) // of Span
	tagDroppedEvents = 12<<3 | byte(protowire.VarintType)

	tagEventTime = 1<<3 | byte(protowire.Fixed64Type) // of Event
	tagEventName = 2<<3 | byte(protowire.BytesType)
)

// appendEvent adds an event to the open span, at ns since 1970.
func appendEvent(b []byte, name string, at int64) []byte {
	b, start := openMessage(b, tagEvents)
	b = protowire.AppendFixed64(append(b, tagEventTime), uint64(at))
	b = protowire.AppendString(append(b, tagEventName), name)
	return closeMessage(b, start)
}

func appendIf(b []byte, key string, is bool) []byte {
	if !is {
		return b
	}
	return appendTrue(b, key)
}

func micros(d time.Duration) int64 { return int64(d) - int64(d)%microsecond }

// appendSession adds to a SERVER span what was read in its WebSocket.
func appendSession(b []byte, s *classifier.Session) []byte {
	if s == nil {
		return b
	}
	b = appendString(b, "weir.stream.protocol", s.Protocol)
	b = appendInt(b, "weir.session.utterances", int64(s.Utterances))
	b = appendInt(b, "weir.session.messages.in", s.MessagesIn)
	b = appendInt(b, "weir.session.messages.out", s.MessagesOut)
	b = appendSeconds(b, "weir.session.admission", s.Admission)
	b = appendSeconds(b, "weir.session.send_stall", s.Stall)
	b = appendSeconds(b, "weir.session.ping_rtt", s.PingRTT)
	b = appendCount(b, "weir.session.close_code", int64(s.CloseCode))
	b = appendString(b, "weir.session.unread", s.Unread)
	return appendCount(b, "weir.session.dropped", s.Dropped)
}

// appendEvents adds to a CLIENT span how its answer came in parts.
func appendEvents(b []byte, e *classifier.Events) []byte {
	if e == nil {
		return b
	}
	b = appendInt(b, "weir.stream.events", int64(e.Count))
	b = appendDouble(b, "weir.stream.first_event", e.First.Seconds())
	b = appendSeconds(b, "weir.stream.gap", e.Gap)
	b = appendSeconds(b, "weir.stream.gap.max", e.LongGap)
	return appendIf(b, "weir.stream.ended", e.Ended)
}

// Told reads a Server-Timing value that came in the answer's body, or in a
// message of a stream.
func (in *Ingest) Told(o *classifier.Observation, value []byte) {
	in.read(o, []byte(serverTiming), value, "body")
}
