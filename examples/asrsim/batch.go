package asrsim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// What moves over the link, in bytes for each second of the longest audio and
// each request: a batch is padded.
const (
	bytesInPerSecond  = 32000 // 80 mel bands, 100 frames/s, 4 bytes
	bytesOutPerSecond = 200   // 50 token ids/s, 4 bytes
	framesPerSecond   = 50    // of the encoder; Server-Timing's seq
)

var (
	errClosed = errors.New("the server is shutting down: send the request to another one")
	errFull   = errors.New("the queue is full")
)

// job is a request in the batcher. exec is set before taken is closed.
type job struct {
	seconds float64
	queued  time.Time
	taken   chan struct{}
	exec    *execution
}

// execution is one batch on the device. Its instants after started, and its
// link numbers, are set before done is closed.
type execution struct {
	size                               int
	longest                            float64 // s
	started, copied, computed, fetched time.Time
	in, out                            transfer
	done                               chan struct{}
}

type transfer struct {
	copies int
	bytes  float64
}

// enqueue puts a request at the end of the queue.
func (s *Server) enqueue(seconds float64) (*job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	if limit := s.cfg.MaxQueueSize; limit > 0 && len(s.waiting) >= limit {
		return nil, fmt.Errorf("%w: max-queue-size is %d; send fewer at once or raise it", errFull, limit)
	}
	j := &job{seconds: seconds, queued: time.Now(), taken: make(chan struct{})}
	s.waiting = append(s.waiting, j)
	s.stats.MaxWaiting = max(s.stats.MaxWaiting, len(s.waiting))
	s.changed.Broadcast()
	return j, nil
}

// leave takes a request out of the queue, if it is still there.
func (s *Server) leave(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.waiting, j); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
	}
}

// wake takes the lock so that no executor misses it between its look at the
// clock and its sleep.
func (s *Server) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

// execute is the life of one executor.
func (s *Server) execute() {
	for {
		e := s.gather()
		if e == nil || !s.run(e) {
			return
		}
	}
}

// gather waits for the next batch; nil once the server is closed.
func (s *Server) gather() *execution {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed {
		if due, ready := s.due(); ready {
			return s.take()
		} else if due > 0 {
			s.alarm.Reset(due)
		}
		s.changed.Wait()
	}
	return nil
}

// due tells whether a batch is to start now, or else how long the oldest
// request may still wait; 0 if there is none.
func (s *Server) due() (in time.Duration, ready bool) {
	if len(s.waiting) == 0 {
		return 0, false
	}
	in = s.cfg.BatchDelay - time.Since(s.waiting[0].queued)
	return in, in <= 0 || len(s.waiting) >= s.cfg.MaxBatchSize
}

// take makes an execution of the oldest requests.
func (s *Server) take() *execution {
	n := min(len(s.waiting), s.cfg.MaxBatchSize)
	e := &execution{size: n, started: time.Now(), done: make(chan struct{})}
	for _, j := range s.waiting[:n] {
		e.longest = max(e.longest, j.seconds)
		s.stats.QueueWait += e.started.Sub(j.queued)
		j.exec = e
		close(j.taken)
	}
	s.waiting = slices.Delete(s.waiting, 0, n)
	s.stats.Batches[n]++
	return e
}

// run plays one batch on the device; false if Close cut it short.
func (s *Server) run(e *execution) bool {
	e.in = transfer{s.cfg.H2DCopies * e.size, e.padded(bytesInPerSecond)}
	e.out = transfer{1, e.padded(bytesOutPerSecond)}
	ok := s.copy(e.in)
	e.copied = time.Now()
	ok = ok && s.sleep(s.forward(e))
	e.computed = time.Now()
	ok = ok && s.copy(e.out)
	e.fetched = time.Now()
	if !ok {
		return false
	}
	s.mu.Lock()
	s.busy += e.fetched.Sub(e.started)
	s.mu.Unlock()
	close(e.done)
	return true
}

func (e *execution) padded(bytesPerSecond float64) float64 {
	return float64(e.size) * e.longest * bytesPerSecond
}

func (s *Server) forward(e *execution) time.Duration {
	c := s.cfg
	return c.ForwardBase + c.ForwardPerBatch*time.Duration(e.size) + times(c.ForwardPerSecond, e.longest)
}

// copy holds the link, which all executors share.
func (s *Server) copy(t transfer) bool {
	if t.copies == 0 {
		return true
	}
	if wait(context.Background(), s, s.link) != nil {
		return false
	}
	defer func() { <-s.link }()
	return s.sleep(s.cfg.CopyLatency*time.Duration(t.copies) + times(time.Second, t.bytes/s.cfg.Bandwidth))
}

// work holds a host worker for one piece of work. A client that leaves gives
// up its turn, but not work that has begun: threads cannot be cancelled.
func (s *Server) work(ctx context.Context, mean time.Duration) error {
	if err := wait(ctx, s, s.host); err != nil {
		return err
	}
	defer func() { <-s.host }()
	if !s.sleep(mean) {
		return errClosed
	}
	return ctx.Err()
}

// wait takes a place; places are given in the order of asking.
func wait(ctx context.Context, s *Server, places chan struct{}) error {
	select {
	case places <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-s.stop:
		return errClosed
	}
}

// await waits for an event.
func (s *Server) await(ctx context.Context, event <-chan struct{}) error {
	select {
	case <-event:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-s.stop:
		return errClosed
	}
}
