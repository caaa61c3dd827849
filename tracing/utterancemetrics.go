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

// begin gives the counter of a rare event its first value.
func (m *utteranceMetrics) begin(ctx context.Context) {
	for _, word := range []string{"not_websocket", "bad_deflate", "deflate_bomb", "message_too_large", "unexpected_message", "behind", "bug"} {
		m.unread.Add(ctx, 0, metric.WithAttributes(attribute.String("error.type", word)))
	}
}

func (m *utteranceMetrics) observe(ctx context.Context, o *classifier.Observation) {
	u := o.Utterance
	opts := m.options[u.Protocol]
	if opts == nil {
		if m.options == nil {
			m.options = make(map[string][]metric.RecordOption)
		}
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
