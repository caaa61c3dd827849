package proxy

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
)

func newGate(n, queue int, timeout time.Duration) *Gate {
	g := &Gate{}
	g.SetLimits(Limits{MaxConcurrency: n, MaxQueueSize: queue, QueueTimeout: timeout}, nil)
	return g
}

// visit passes the gate and holds its place for work.
func visit(g *Gate, p *Passage, gone <-chan struct{}, work time.Duration) error {
	err := g.Enter(p, gone)
	if err == nil {
		time.Sleep(work)
	}
	g.Leave(p)
	return err
}

func TestRequestsAreAdmittedInTheOrderTheyCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2, 100, 0)
		admitted := make([]time.Time, 20)
		for i := range admitted {
			go func() {
				var p Passage
				_ = g.Enter(&p, nil)
				admitted[i] = p.Dequeued
				time.Sleep(time.Duration(1+i%3) * time.Second)
				g.Leave(&p)
			}()
			synctest.Wait() // i is at the gate before i+1 comes
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		for i, at := range admitted[1:] {
			if at.IsZero() || at.Before(admitted[i]) {
				t.Fatalf("admitted at %v", admitted)
			}
		}
	})
}

// One place and 100 ms of work give ten requests a second, with 1 client or 50.
func TestAFreedPlaceGoesToTheNextWaiterAtOnce(t *testing.T) {
	for _, clients := range []int{1, 50} {
		synctest.Test(t, func(t *testing.T) {
			g := newGate(1, 100, 0)
			served := 0
			var mu sync.Mutex
			g.Sink = func(*classifier.Observation) { mu.Lock(); served++; mu.Unlock() }
			stop := time.Now().Add(10 * time.Second)
			for range clients {
				go func() {
					for time.Now().Before(stop) {
						_ = visit(g, &Passage{}, nil, 100*time.Millisecond)
					}
				}()
			}
			time.Sleep(10*time.Second - time.Nanosecond)
			mu.Lock()
			n := served
			mu.Unlock()
			if n < 98 || n > 100 {
				t.Errorf("%d clients: %d served in 10 s, want 99 or 100", clients, n)
			}
			time.Sleep(time.Minute)
		})
	}
}

func TestTheServerNeverSeesMoreThanTheLimitAndNoPlaceIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(3, 10, 500*time.Millisecond)
		var mu sync.Mutex
		inside, most, ended := 0, 0, 0
		g.Sink = func(*classifier.Observation) { mu.Lock(); ended++; mu.Unlock() }
		for i := range 300 {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			go func() {
				time.Sleep(time.Duration(r.IntN(1e9 * 5)))
				gone := make(chan struct{})
				if r.IntN(3) == 0 {
					time.AfterFunc(time.Duration(r.IntN(3e8)), func() { close(gone) })
				}
				var p Passage
				if g.Enter(&p, gone) == nil {
					mu.Lock()
					inside++
					most = max(most, inside)
					mu.Unlock()
					time.Sleep(time.Duration(r.IntN(2e8)))
					mu.Lock()
					inside--
					mu.Unlock()
					if r.IntN(2) == 0 {
						g.Release(&p)
					}
				}
				g.Leave(&p)
			}()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if s := g.State(); most != 3 || s.Inflight != 0 || s.Waiting != 0 || ended != 300 || g.whole.used != 0 || g.whole.waiting != 0 {
			t.Errorf("at most %d inside, %d ended, state %+v", most, ended, s)
		}
	})
}

func TestAFullQueueRefusesAtOnceAndAnExpiredWaitOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 2, 3*time.Second)
		go visit(g, &Passage{}, nil, time.Hour)
		synctest.Wait()
		waits := make(chan time.Duration, 2)
		for range 2 {
			go func() {
				var p Passage
				err := visit(g, &p, nil, 0)
				var limit *LimitError
				if !errors.As(err, &limit) || !errors.Is(err, ErrQueueTimeout) || !strings.Contains(err.Error(), "3s") {
					t.Errorf("got %v", err)
				}
				waits <- p.QueueWait()
			}()
		}
		synctest.Wait()
		if s := g.State(); s.Waiting != 2 {
			t.Fatalf("state %+v", s)
		}
		err := visit(g, &Passage{}, nil, 0)
		if !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "max_queue_size 2") {
			t.Errorf("got %v", err)
		}
		for range 2 {
			if w := <-waits; w != 3*time.Second {
				t.Errorf("waited %v, want 3s", w)
			}
		}
		time.Sleep(2 * time.Hour)
	})
}

// The timeout ends at admission, whatever the work takes after it.
func TestTheQueueTimeoutEndsAtAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 2, time.Second)
		if err := visit(g, &Passage{}, nil, time.Hour); err != nil {
			t.Error(err)
		}
	})
}

func TestAClientThatLeavesTheQueueIsTakenOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 9, 0)
		go visit(g, &Passage{}, nil, time.Second)
		synctest.Wait()
		gone := make(chan struct{})
		left := make(chan error)
		go func() { left <- visit(g, &Passage{}, gone, 0) }()
		synctest.Wait()
		close(gone)
		if err := <-left; !errors.Is(err, ErrClientGone) {
			t.Errorf("got %v", err)
		}
		if s := g.State(); s.Waiting != 0 || s.Abandoned != 0 {
			t.Errorf("state %+v", s)
		}
		time.Sleep(time.Minute)
	})
}

func TestTheAgesMoveWhileEverythingIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 9, 0)
		go visit(g, &Passage{}, nil, time.Hour)
		synctest.Wait()
		time.Sleep(time.Second)
		go visit(g, &Passage{}, nil, 0)
		synctest.Wait()
		time.Sleep(time.Minute)
		if s := g.State(); s.OldestWaiting != time.Minute || s.OldestInflight != time.Minute+time.Second {
			t.Errorf("state %+v", s)
		}
		time.Sleep(2 * time.Hour)
	})
}

func TestNewLimitsAreInForceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 9, 0)
		for range 5 {
			go visit(g, &Passage{}, nil, time.Minute)
		}
		synctest.Wait()
		g.SetLimits(Limits{MaxConcurrency: 3, MaxQueueSize: 9}, nil)
		synctest.Wait()
		if s := g.State(); s.Inflight != 3 || s.Waiting != 2 {
			t.Errorf("after raising: %+v", s)
		}
		g.SetLimits(Limits{MaxConcurrency: 1, MaxQueueSize: 9}, nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		if s := g.State(); s.Inflight != 1 || s.Waiting != 1 {
			t.Errorf("after lowering: %+v", s)
		}
		g.SetLimits(Limits{}, nil)
		time.Sleep(time.Hour)
		if s := g.State(); s.Inflight != 0 || s.Waiting != 0 {
			t.Errorf("in the end: %+v", s)
		}
	})
}

// A busy route does not hold up the others, and counts against the whole.
func TestARoutesLimitIsItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Gate{}
		g.SetLimits(Limits{MaxConcurrency: 3, MaxQueueSize: 9}, map[string]Limits{"/slow": {MaxConcurrency: 1, MaxQueueSize: 1}})
		enter := func(route string) error {
			p := &Passage{}
			p.Route = route
			return visit(g, p, nil, time.Minute)
		}
		go enter("/slow")
		synctest.Wait()
		go enter("/slow")
		synctest.Wait()
		if err := enter("/slow"); !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "/slow") {
			t.Errorf("got %v", err)
		}
		go enter("/fast")
		go enter("/fast")
		synctest.Wait()
		if s := g.State(); s.Inflight != 3 || s.Waiting != 1 {
			t.Errorf("state %+v", s)
		}
		time.Sleep(time.Hour)
		if s := g.State(); s.Inflight != 0 || s.Waiting != 0 {
			t.Errorf("in the end %+v", s)
		}
	})
}

func TestADrainingGateServesWhoWaitsAndRefusesWhoComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1, 9, 0)
		go visit(g, &Passage{}, nil, time.Minute)
		waited := make(chan error, 1)
		synctest.Wait()
		go func() { waited <- visit(g, &Passage{}, nil, 0) }()
		synctest.Wait()
		g.Drain()
		if err := visit(g, &Passage{}, nil, 0); !errors.Is(err, ErrDraining) {
			t.Errorf("got %v", err)
		}
		if err := <-waited; err != nil {
			t.Error(err)
		}
	})
}

func BenchmarkGate(b *testing.B) {
	b.ReportAllocs()
	g := newGate(0, 0, 0)
	var p Passage
	for b.Loop() {
		_ = g.Enter(&p, nil)
		g.Leave(&p)
		p.reset()
	}
}
