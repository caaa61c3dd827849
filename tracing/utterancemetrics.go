package tracing

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"weir/classifier"
)

// utteranceMetrics are the instruments of streams. Their attributes are the
// protocol, of a fixed list, and words of weir's own.
type utteranceMetrics struct {
	final, firstPartial, firstEvent metric.Float64Histogram
	count, unread                   metric.Int64Counter
	options                         map[string][]metric.RecordOption // by protocol
}

func (m *utteranceMetrics) newInstruments(i *instruments) {
	m.final = i.histogram("weir.utterance.final.duration", "s", "Final latency of utterances: from the end of speech to the final result.", durationBuckets)
	m.firstPartial = i.histogram("weir.utterance.first_partial.duration", "s", "From the first audio of an utterance, sent at the pace of speech, to its first partial result.", durationBuckets)
	m.firstEvent = i.histogram("weir.stream.first_event.duration", "s", "From the last byte of a request to the first event of its streamed answer.", durationBuckets)
	m.count = i.counter("weir.utterances", "{utterance}", "Utterances on streams, by how they ended.")
	m.unread = i.counter("weir.stream.unread", "{stream}", "Streams that weir carried but could not read to their end, by reason.")
	m.options = make(map[string][]metric.RecordOption)
}

func (m *utteranceMetrics) observe(ctx context.Context, o *classifier.Observation) {
	u := o.Utterance
	opts := m.options[u.Protocol]
	if opts == nil {
		opts = recordOptions(attribute.String("weir.stream.protocol", u.Protocol))
		m.options[u.Protocol] = opts
	}
	m.count.Add(ctx, 1, metric.WithAttributes(attribute.String("weir.stream.protocol", u.Protocol), attribute.String("weir.outcome", o.Outcome.String())))
	if o.Outcome == classifier.OK && o.Error == "" {
		m.final.Record(ctx, o.Total().Seconds(), opts...)
	}
	if u.FirstPartial > 0 && !u.Unpaced {
		m.firstPartial.Record(ctx, u.FirstPartial.Seconds(), opts...)
	}
}

// observeSession counts what the records of requests tell of streams.
func (m *utteranceMetrics) observeSession(ctx context.Context, o *classifier.Observation) {
	if e := o.Events; e != nil {
		m.firstEvent.Record(ctx, e.First.Seconds())
	}
	s := o.Session
	if s == nil {
		return
	}
	word := s.Unread
	if word == "" && s.Dropped > 0 {
		word = "behind"
	}
	if word != "" {
		m.unread.Add(ctx, 1, metric.WithAttributes(attribute.String("error.type", word)))
	}
}
