package tracing

import (
	"go.opentelemetry.io/otel/attribute"

	"weir/classifier"
)

// utteranceMetrics are the instruments of streams. Their attributes are the
// protocol, of a fixed list, and words of weir's own.
type utteranceMetrics struct {
	final, firstPartial, firstEvent, count, unread *family

	protocols map[string]protocolSeries
	ended     map[ending]*series
	words     map[string]*series // of unread
	events    *series            // of firstEvent
}

type protocolSeries struct{ final, firstPartial *series }

// ending is what the series of one way to end differ in.
type ending struct{ protocol, outcome string }

// begin gives the counter of a rare event its first value.
func (m *utteranceMetrics) begin() {
	for _, word := range []string{"not_websocket", "bad_deflate", "deflate_bomb", "message_too_large", "unexpected_message", "behind", "bug"} {
		m.words[word] = m.unread.series(attribute.String("error.type", word))
	}
	m.events = m.firstEvent.series()
}

func (m *utteranceMetrics) observe(o *classifier.Observation) {
	u := o.Utterance
	protocol := attribute.String("weir.stream.protocol", u.Protocol)
	s, ok := m.protocols[u.Protocol]
	if !ok {
		s = protocolSeries{m.final.series(protocol), m.firstPartial.series(protocol)}
		m.protocols[u.Protocol] = s
	}
	end := ending{u.Protocol, o.Outcome.String()}
	if m.ended[end] == nil {
		m.ended[end] = m.count.series(protocol, attribute.String("weir.outcome", end.outcome))
	}
	m.ended[end].add(1)
	if o.Outcome == classifier.OK && o.Error == "" {
		s.final.recordTraced(o.Total().Seconds(), o)
	}
	if u.FirstPartial > 0 && !u.Unpaced {
		s.firstPartial.record(u.FirstPartial.Seconds())
	}
}

// observeSession counts what the records of requests tell of streams.
func (m *utteranceMetrics) observeSession(o *classifier.Observation) {
	if e := o.Events; e != nil {
		m.events.record(e.First.Seconds())
	}
	s := o.Session
	if s == nil {
		return
	}
	word := s.Unread
	if word == "" && s.Dropped > 0 {
		word = "behind"
	}
	if word == "" {
		return
	}
	if m.words[word] == nil {
		m.words[word] = m.unread.series(attribute.String("error.type", word))
	}
	m.words[word].add(1)
}
