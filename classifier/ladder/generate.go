package ladder

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weir/classifier"
)

// Arrivals of an open loop.
const (
	Poisson  = "poisson"
	Constant = "constant"
)

// stream is what one process of clients does in one step, until it is told to
// stop.
type stream struct {
	Concurrency int     `json:"concurrency,omitempty"` // closed loop: requests in flight
	Rate        float64 `json:"rate,omitempty"`        // open loop: arrivals per second
	Arrivals    string  `json:"arrivals,omitempty"`
	Total       int     `json:"total,omitempty"` // open loop: arrivals in all
	MaxInflight int     `json:"max_inflight,omitempty"`
	Seed        uint64  `json:"seed"`
	First       int64   `json:"first"` // number of the first request: which clip it takes
}

// failurePause keeps a client whose request failed from making a storm.
const failurePause = 100 * time.Millisecond

// run sends requests until stop closes, ctx ends or (open loop) all arrivals
// have come, and returns when the last has ended. emit is called from many
// goroutines.
func (c *Client) run(ctx context.Context, s stream, stop <-chan struct{}, emit func(classifier.Observation)) {
	if s.Rate > 0 {
		c.open(ctx, s, stop, emit)
		return
	}
	c.closed(ctx, s, stop, emit)
}

func (c *Client) closed(ctx context.Context, s stream, stop <-chan struct{}, emit func(classifier.Observation)) {
	var inflight atomic.Int64
	var next atomic.Int64
	next.Store(s.First)
	var clients sync.WaitGroup
	for range s.Concurrency {
		clients.Go(func() {
			for !over(ctx, stop) {
				o := c.send(ctx, next.Add(1)-1, time.Now(), int(inflight.Add(1)))
				inflight.Add(-1)
				emit(o)
				if failure(&o) != "" {
					sleep(ctx, failurePause)
				}
			}
		})
	}
	clients.Wait()
}

func over(ctx context.Context, stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	case <-ctx.Done():
		return true
	default:
		return false
	}
}

// open starts each request when it is due, however many are under way, so
// that a stall of the server delays no arrival. Beyond MaxInflight an arrival
// waits in the client, and its latency counts from when it was due.
func (c *Client) open(ctx context.Context, s stream, stop <-chan struct{}, emit func(classifier.Observation)) {
	places := make(chan struct{}, max(1, s.MaxInflight))
	var clients sync.WaitGroup
	defer clients.Wait()
	dice := rand.New(rand.NewPCG(s.Seed, 0x0a441ba1))
	due := time.Now()
	for n := range int64(s.Total) {
		due = due.Add(gap(s, dice))
		if !sleep(ctx, time.Until(due)) || over(ctx, stop) {
			return
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		at := due
		clients.Go(func() {
			o := c.send(ctx, s.First+n, at, len(places))
			<-places
			emit(o)
		})
	}
}

// gap is the time between two arrivals.
func gap(s stream, dice *rand.Rand) time.Duration {
	mean := float64(time.Second) / s.Rate
	if s.Arrivals == Constant {
		return time.Duration(mean)
	}
	return time.Duration(mean * dice.ExpFloat64())
}

// failure is the kind of a request's failure; empty: it succeeded.
func failure(o *classifier.Observation) string {
	if o.Error != "" {
		return o.Error
	}
	if o.Outcome != classifier.OK {
		return o.Outcome.String()
	}
	return ""
}

// ClientLoad is what one step cost the client, so that the generator is never
// taken for the server.
type ClientLoad struct {
	CPU         float64       `json:"cpu_cores"`   // cores kept busy, on average
	Cores       int           `json:"cores"`       // that it may use
	Late        time.Duration `json:"late_ns"`     // 99th percentile of how late a sleeping goroutine woke
	Connections int64         `json:"connections"` // opened in the step
	Processes   int           `json:"processes"`
	Wall        time.Duration `json:"wall_ns"`
}

// merge adds another process on the same machine.
func (l *ClientLoad) merge(o ClientLoad) {
	l.CPU += o.CPU
	l.Cores = max(l.Cores, o.Cores)
	l.Late = max(l.Late, o.Late)
	l.Connections += o.Connections
	l.Processes += o.Processes
	l.Wall = max(l.Wall, o.Wall)
}

// meter watches this process while a step runs.
type meter struct {
	c      *Client
	start  time.Time
	cpu    time.Duration
	opened int64
	stop   chan struct{}
	ended  chan struct{}
	late   []time.Duration
}

const meterPeriod = 10 * time.Millisecond

func (c *Client) startMeter() *meter {
	m := &meter{c: c, start: time.Now(), cpu: cpuTime(), opened: c.opened.Load(), stop: make(chan struct{}), ended: make(chan struct{})}
	go m.watch()
	return m
}

func (m *meter) watch() {
	defer close(m.ended)
	t := time.NewTimer(meterPeriod)
	defer t.Stop()
	for {
		due := time.Now().Add(meterPeriod)
		t.Reset(meterPeriod)
		select {
		case <-m.stop:
			return
		case <-t.C:
			m.note(max(0, time.Since(due)))
		}
	}
}

// note keeps at most the last 100,000 readings.
func (m *meter) note(late time.Duration) {
	if len(m.late) == 100_000 {
		m.late = slices.Delete(m.late, 0, len(m.late)/2)
	}
	m.late = append(m.late, late)
}

func (m *meter) end() ClientLoad {
	close(m.stop)
	<-m.ended
	l := ClientLoad{Cores: cores(), Connections: m.c.opened.Load() - m.opened, Processes: 1, Wall: time.Since(m.start)}
	if l.Wall > 0 {
		l.CPU = float64(cpuTime()-m.cpu) / float64(l.Wall)
	}
	if len(m.late) > 0 {
		slices.Sort(m.late)
		l.Late = m.late[len(m.late)*99/100]
	}
	return l
}
