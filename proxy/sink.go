package proxy

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"weir/classifier"
)

// A Sink takes finished records off the request path: one bounded batch,
// emptied by one goroutine. When that goroutine falls behind, records are
// dropped and counted; no request ever waits for telemetry.
type Sink struct {
	size    int // the bound
	mu      sync.Mutex
	filling []classifier.Observation
	half    chan struct{} // filling is half full
	dropped atomic.Int64

	emptying []classifier.Observation // of Run
}

// NewSink makes a sink for n records.
func NewSink(n int) *Sink {
	return &Sink{
		size:    n,
		filling: make([]classifier.Observation, 0, n), emptying: make([]classifier.Observation, 0, n),
		half: make(chan struct{}, 1),
	}
}

// Put copies the record in, or drops it.
func (s *Sink) Put(o *classifier.Observation) {
	s.mu.Lock()
	n := len(s.filling)
	if n < s.size {
		s.filling = append(s.filling, *o)
	}
	s.mu.Unlock()
	switch n {
	case s.size:
		s.dropped.Add(1)
	case s.size / 2:
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

// drain swaps the two batches; records are read where they lie.
func (s *Sink) drain(take func(*classifier.Observation)) {
	s.mu.Lock()
	s.filling, s.emptying = s.emptying[:0], s.filling
	s.mu.Unlock()
	for i := range s.emptying {
		take(&s.emptying[i])
	}
	clear(s.emptying) // of the strings and timings they hold
}
