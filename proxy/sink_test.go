package proxy

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
)

func TestTheSinkLosesNothingThatFitsAndCountsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSink(10)
		var taken []int
		ctx, stop := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() {
			s.Run(ctx, func(o *classifier.Observation) { taken = append(taken, o.Status) }, func(time.Time) {})
		})
		for i := range 15 { // faster than the sink's goroutine can be woken
			s.Put(&classifier.Observation{Status: i})
		}
		synctest.Wait()
		if got := len(taken) + int(s.Dropped()); got != 15 || len(taken) < 10 {
			t.Errorf("%d taken, %d dropped", len(taken), s.Dropped())
		}
		before := len(taken)
		s.Put(&classifier.Observation{Status: 100})
		stop()
		run.Wait() // the end empties it
		if len(taken) != before+1 || taken[before] != 100 {
			t.Errorf("after the end: %v", taken)
		}
		for i, n := range taken[:10] {
			if n != i {
				t.Errorf("taken in the order %v", taken)
			}
		}
	})
}

func TestManyMayPutAtOnce(t *testing.T) {
	s := NewSink(64)
	n := 0
	ctx, stop := context.WithCancel(t.Context())
	var run, put sync.WaitGroup
	run.Go(func() { s.Run(ctx, func(*classifier.Observation) { n++ }, func(time.Time) {}) })
	for range 8 {
		put.Go(func() {
			for range 1000 {
				s.Put(&classifier.Observation{})
			}
		})
	}
	put.Wait()
	stop()
	run.Wait()
	if n+int(s.Dropped()) != 8000 {
		t.Errorf("%d taken and %d dropped of 8000", n, s.Dropped())
	}
}
