package proxy

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"weir/classifier"
)

// A Passage is one request's way through a [Gate]: its record and its place.
// The zero value is ready for Enter; after Leave it can be used again.
type Passage struct {
	classifier.Observation

	limits     [2]*limit // that this request counts against; nil: unused
	state      passageState
	ready      chan struct{} // one token when a waiter is admitted
	prev, next *Passage      // neighbours in the list of the state
}

type passageState uint8

const (
	outside passageState = iota
	waiting
	admitted
	released // the server is done with it, the client not yet
)

// Limits bounds what one route, one model or the whole server is given.
type Limits struct {
	MaxConcurrency int           // requests in the server at one time; 0: no limit
	MaxQueueSize   int           // requests that may wait; 0: none, refuse at once
	QueueTimeout   time.Duration // longest wait; 0: no limit
}

type limit struct {
	Limits
	name          string // "" for the whole server, else the route or model
	used, waiting int
}

// A Gate admits requests to the server, strictly first come, first served
// within each limit. A request counts against the limits of the whole server
// and against those of its route or model, and needs a place in both. A
// place belongs to one request from its admission until its Leave (or
// [Gate.Release]); no timer ever frees one.
//
// Enter and Leave pair exactly once for every request, refused ones too.
// The zero value admits everything.
type Gate struct {
	// Sink takes the finished record; it must not block or keep the pointer.
	Sink func(*classifier.Observation)

	mu       sync.Mutex
	whole    limit
	named    map[string]*limit
	waiters  passages // in order of arrival
	inflight passages // in order of admission
	draining bool

	admittedTotal, abandoned int64
}

// Refusals by the gate. A [*FullError] or [*ExpiredError] wraps the first two.
var (
	ErrQueueFull    = errors.New("queue is full")
	ErrQueueTimeout = errors.New("waited too long in the queue")
	ErrDraining     = errors.New("weir is shutting down")
	ErrClientGone   = errors.New("client left")
)

// A LimitError names the limit that refused a request.
type LimitError struct {
	Err   error
	Scope string // the route or model; "" for the whole server
	Limits
}

func (e *LimitError) Unwrap() error { return e.Err }

func (e *LimitError) Error() string {
	scope := ""
	if e.Scope != "" {
		scope = " of " + e.Scope
	}
	if e.Err == ErrQueueTimeout {
		return fmt.Sprintf("queue_timeout %v%s passed while max_concurrency %d was in use; retry later, raise max_concurrency if the server has room, or raise queue_timeout",
			e.QueueTimeout, scope, e.MaxConcurrency)
	}
	return fmt.Sprintf("max_queue_size %d%s is reached while max_concurrency %d is in use; retry later, raise max_concurrency if the server has room, or raise max_queue_size",
		e.MaxQueueSize, scope, e.MaxConcurrency)
}

// SetLimits puts new limits in force at once: whole for the server, and named
// by route or model. Waiters that now fit are admitted; nobody loses a place.
func (g *Gate) SetLimits(whole Limits, named map[string]Limits) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.whole = limit{Limits: whole}
	g.named = make(map[string]*limit, len(named))
	for name, l := range named {
		g.named[name] = &limit{Limits: l, name: name}
	}
	g.recount()
	g.admitWaiters()
}

// recount charges all who are in the gate to the limits in force now.
func (g *Gate) recount() {
	for p := g.inflight.head; p != nil; p = p.next {
		p.limits[1] = g.limitOf(p)
		p.count(func(l *limit) { l.used++ })
	}
	for p := g.waiters.head; p != nil; p = p.next {
		p.limits[1] = g.limitOf(p)
		p.count(func(l *limit) { l.waiting++ })
	}
}

// Enter stamps Enqueued, waits for a place, and stamps Dequeued. It returns
// nil with the place taken, or says why not: a [*LimitError], [ErrDraining],
// or [ErrClientGone] when gone is closed while the request waits.
func (g *Gate) Enter(p *Passage, gone <-chan struct{}) error {
	if admitted, err := g.join(p); admitted || err != nil {
		return err
	}
	timer, expired := g.deadline(p)
	if timer != nil {
		defer timer.Stop()
	}
	select {
	case <-p.ready:
		return nil
	case <-gone:
		return g.quit(p, ErrClientGone)
	case <-timerC(timer):
		return g.quit(p, expired)
	}
}

// join admits p, lets it wait, or refuses it.
func (g *Gate) join(p *Passage) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p.Enqueued = time.Now()
	p.Waiting = g.waiters.n
	p.Limit = g.whole.MaxConcurrency
	p.limits = [2]*limit{&g.whole, g.limitOf(p)}
	if g.draining {
		return false, ErrDraining
	}
	if p.fits() {
		g.admit(p)
		return true, nil
	}
	for _, l := range p.limits {
		if l != nil && l.MaxConcurrency > 0 && l.waiting >= l.MaxQueueSize {
			return false, &LimitError{ErrQueueFull, l.name, l.Limits}
		}
	}
	if p.ready == nil {
		p.ready = make(chan struct{}, 1)
	}
	p.state = waiting
	g.waiters.push(p)
	p.count(func(l *limit) { l.waiting++ })
	return false, nil
}

// limitOf is the limit of p's model, else of its route, else none.
func (g *Gate) limitOf(p *Passage) *limit {
	if len(g.named) == 0 {
		return nil
	}
	if l := g.named[p.Model]; l != nil && p.Model != "" {
		return l
	}
	return g.named[p.Route]
}

// deadline is the earliest queue timeout among p's limits.
func (g *Gate) deadline(p *Passage) (*time.Timer, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var first *limit
	for _, l := range p.limits {
		if l != nil && l.QueueTimeout > 0 && (first == nil || l.QueueTimeout < first.QueueTimeout) {
			first = l
		}
	}
	if first == nil {
		return nil, nil
	}
	return time.NewTimer(time.Until(p.Enqueued.Add(first.QueueTimeout))), &LimitError{ErrQueueTimeout, first.name, first.Limits}
}

func timerC(t *time.Timer) <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.C
}

// quit takes a waiter out of the queue, unless it was admitted meanwhile.
func (g *Gate) quit(p *Passage, why error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.state != waiting {
		<-p.ready
		return nil
	}
	g.waiters.remove(p)
	p.count(func(l *limit) { l.waiting-- })
	p.state = outside
	return why
}

// Release gives p's place to the next waiter; Leave does it too. Call it when
// the server has ended its work while the client is still being answered.
func (g *Gate) Release(p *Passage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.release(p)
}

func (g *Gate) release(p *Passage) {
	if p.state != admitted {
		return
	}
	p.state = released
	g.inflight.remove(p)
	p.count(func(l *limit) { l.used-- })
	g.admitWaiters()
}

// Leave ends the passage: it stamps Done if nobody did, frees the place and
// hands the record to Sink.
func (g *Gate) Leave(p *Passage) {
	if p.Done.IsZero() {
		p.Done = time.Now()
	}
	g.mu.Lock()
	if p.Outcome == classifier.Canceled && !p.Dequeued.IsZero() {
		g.abandoned++
	}
	g.release(p)
	p.state = outside
	g.mu.Unlock()
	if g.Sink != nil {
		g.Sink(&p.Observation)
	}
}

// admitWaiters admits, in order of arrival, each waiter that fits. One that
// waits only for its own route's limit does not hold up those behind it.
func (g *Gate) admitWaiters() {
	for p := g.waiters.head; p != nil; {
		next := p.next
		if p.fits() {
			g.waiters.remove(p)
			p.count(func(l *limit) { l.waiting-- })
			g.admit(p)
			p.ready <- struct{}{}
		} else if p.limits[0].full() {
			return
		}
		p = next
	}
}

func (g *Gate) admit(p *Passage) {
	p.state = admitted
	p.count(func(l *limit) { l.used++ })
	g.inflight.push(p)
	g.admittedTotal++
	p.Inflight = g.inflight.n
	p.Dequeued = time.Now()
}

func (p *Passage) fits() bool {
	return !p.limits[0].full() && (p.limits[1] == nil || !p.limits[1].full())
}

func (l *limit) full() bool { return l.MaxConcurrency > 0 && l.used >= l.MaxConcurrency }

func (p *Passage) count(f func(*limit)) {
	for _, l := range p.limits {
		if l != nil {
			f(l)
		}
	}
}

// reset readies p for the next request of its connection.
func (p *Passage) reset() { *p = Passage{ready: p.ready} }

// GateState is what a [Gate] holds at one moment.
type GateState struct {
	Waiting, Inflight int
	Limits            // of the whole server
	OldestWaiting     time.Duration
	OldestInflight    time.Duration
	Admitted          int64 // since the start
	Abandoned         int64 // since the start: clients that left while the server worked for them
	Draining          bool
}

// State reads the gate. The ages move also while everything is stuck.
func (g *Gate) State() GateState {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := GateState{
		Waiting: g.waiters.n, Inflight: g.inflight.n, Limits: g.whole.Limits,
		Admitted: g.admittedTotal, Abandoned: g.abandoned, Draining: g.draining,
	}
	if p := g.waiters.head; p != nil {
		s.OldestWaiting = time.Since(p.Enqueued)
	}
	if p := g.inflight.head; p != nil {
		s.OldestInflight = time.Since(p.Dequeued)
	}
	return s
}

// Drain makes the gate refuse newcomers; who waits already is still served.
func (g *Gate) Drain() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.draining = true
}

// passages is a doubly linked list in order of arrival.
type passages struct {
	head, tail *Passage
	n          int
}

func (l *passages) push(p *Passage) {
	p.prev, p.next = l.tail, nil
	if l.tail == nil {
		l.head = p
	} else {
		l.tail.next = p
	}
	l.tail = p
	l.n++
}

func (l *passages) remove(p *Passage) {
	if p.prev == nil {
		l.head = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		l.tail = p.prev
	} else {
		p.next.prev = p.prev
	}
	p.prev, p.next = nil, nil
	l.n--
}
