package proxy

import (
	"context"
	"sync/atomic"
	"time"

	"weir/classifier"
)

// A Sink takes finished records off the request path: one bounded channel,
// emptied by one goroutine. When that goroutine falls behind, records are
// dropped and counted; no request ever waits for telemetry.
type Sink struct {
	records chan classifier.Observation
	half    chan struct{} // the channel is half full
	dropped atomic.Int64
}

// NewSink makes a sink for n records.
func NewSink(n int) *Sink {
	return &Sink{records: make(chan classifier.Observation, n), half: make(chan struct{}, 1)}
}

// Put copies the record in, or drops it.
func (s *Sink) Put(o *classifier.Observation) {
	select {
	case s.records <- *o:
	default:
		s.dropped.Add(1)
		return
	}
	if len(s.records) == cap(s.records)/2 {
		select {
		case s.half <- struct{}{}:
		default:
		}
	}
}

// Dropped is the number of records dropped since the start.
func (s *Sink) Dropped() int64 { return s.dropped.Load() }

// sinkPeriod is how long a record may lie in the sink: emptying it in batches
// spares the request path a wake-up for each request.
const sinkPeriod = 25 * time.Millisecond

// Run gives every record to take, and calls tick after each batch, until ctx
// ends; then it empties the sink.
func (s *Sink) Run(ctx context.Context, take func(*classifier.Observation), tick func(time.Time)) {
	t := time.NewTicker(sinkPeriod)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-s.half:
		case <-ctx.Done():
			s.drain(take)
			return
		}
		s.drain(take)
		tick(time.Now())
	}
}

func (s *Sink) drain(take func(*classifier.Observation)) {
	for range len(s.records) {
		o := <-s.records
		take(&o)
	}
}
