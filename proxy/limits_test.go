package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

// held is a server that answers each request when the test says so.
type held struct {
	addr          string
	came          chan struct{} // a token for each request that arrived
	release       chan struct{} // a token lets one answer go
	inside, most  atomic.Int32
	closedByProxy atomic.Int32
}

func newHeld(t *testing.T) *held {
	h := &held{came: make(chan struct{}, 1000), release: make(chan struct{}, 1000)}
	h.addr = serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then does net/http notice a client that leaves
		n := h.inside.Add(1)
		defer h.inside.Add(-1)
		for m := h.most.Load(); n > m && !h.most.CompareAndSwap(m, n); m = h.most.Load() {
		}
		h.came <- struct{}{}
		select {
		case <-h.release:
			fmt.Fprint(w, "text")
		case <-r.Context().Done():
			h.closedByProxy.Add(1)
		}
	})
	return h
}

func limited(n, queue int, timeout time.Duration) func(*rig) {
	return func(r *rig) {
		r.Gate.SetLimits(Limits{MaxConcurrency: n, MaxQueueSize: queue, QueueTimeout: timeout}, nil)
	}
}

const post = "POST /asr HTTP/1.1\r\nHost: asr\r\nContent-Length: 5\r\n\r\nsound"

func (r *rig) waiting(n int) {
	r.Helper()
	r.eventually(func() bool { return r.Gate.State().Waiting == n }, "%d waiting", n)
}

func TestAFullQueueSaysWhichLimitAndKeepsTheConnection(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 0, 0)(r)
	h.release <- struct{}{}
	c := r.dial()
	c.send(post) // a reused connection: its first answer must not spoil the second
	c.head()
	c.expect("text")
	<-h.came
	busy := r.dial()
	busy.send(post)
	<-h.came
	c.send(post)
	head := c.head()
	for _, want := range []string{"HTTP/1.1 503 Service Unavailable\r\n", "Retry-After: 1\r\n", "Content-Type: application/json\r\n"} {
		if !strings.Contains(head, want) {
			t.Errorf("no %q in %q", want, head)
		}
	}
	if strings.Contains(head, "Connection: close") {
		t.Errorf("the refused request's body is here, so its connection is good: %q", head)
	}
	body := make([]byte, 20)
	_, _ = c.Read(body)
	rest, _ := c.Peek(c.Buffered())
	text := string(body) + string(rest)
	for _, want := range []string{"max_queue_size 0", "max_concurrency 1", "raise", `"type":"queue_full"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	_, _ = c.Discard(len(rest))
	h.release <- struct{}{}
	busy.head()
	busy.expect("text")
	h.release <- struct{}{}
	c.send(post)
	c.head()
	c.expect("text")
	if o := r.ended(classifier.Rejected); o.Error != "queue_full" || o.Status != 503 {
		t.Errorf("the record is %+v", o)
	}
}

func TestAnExpiredWaitIs503AndTheServerNeverSawIt(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 5, 30*time.Millisecond)(r)
	busy := r.dial()
	busy.send(post)
	<-h.came
	c := r.dial()
	c.send(post)
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 503 ") {
		t.Errorf("answer %q", head)
	}
	o := r.ended(classifier.Expired)
	if o.Error != "queue_timeout" || o.QueueWait() < 30*time.Millisecond || len(h.came) != 0 {
		t.Errorf("the record is %+v", o)
	}
	h.release <- struct{}{}
	busy.head()
}

func TestAClientThatLeavesTheQueueIsNoErrorAndFreesItsTurn(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 5, 0)(r)
	busy := r.dial()
	busy.send(post)
	<-h.came
	leaver, stayer := r.dial(), r.dial()
	leaver.send(post)
	r.waiting(1)
	stayer.send(post)
	r.waiting(2)
	leaver.Close()
	r.waiting(1)
	if o := r.ended(classifier.Canceled); o.Status != 0 || !o.Dequeued.IsZero() {
		t.Errorf("the record is %+v", o)
	}
	h.release <- struct{}{}
	h.release <- struct{}{}
	busy.head()
	stayer.head()
	stayer.expect("text")
	if n := r.Gate.State().Abandoned; n != 0 {
		t.Errorf("%d abandoned: the server never saw that request", n)
	}
}

func TestAbandonedWorkIsCountedAndItsPlaceIsFreedWhenTheServerIsTold(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 5, 0)(r)
	c := r.dial()
	c.send(post)
	<-h.came
	c.Close()
	r.eventually(func() bool { return h.closedByProxy.Load() == 1 }, "the server is told")
	next := r.dial()
	next.send(post)
	<-h.came
	h.release <- struct{}{}
	next.head()
	if s := r.Gate.State(); s.Abandoned != 1 {
		t.Errorf("state %+v: want 1 abandoned", s)
	}
}

func TestTheServerNeverSeesMoreThanTheLimitOverTheWire(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(3, 1000, 0)(r)
	var clients sync.WaitGroup
	for range 30 {
		clients.Go(func() {
			c := r.dial()
			for range 5 {
				c.send(post)
				c.head()
				c.expect("text")
			}
		})
	}
	for range 3 {
		<-h.came
	}
	r.waiting(27)
	for range 150 {
		h.release <- struct{}{}
	}
	clients.Wait()
	if n := h.most.Load(); n != 3 {
		t.Errorf("the server saw %d at once: want 3", n)
	}
	r.eventually(func() bool { s := r.Gate.State(); return s.Inflight == 0 && s.Waiting == 0 }, "the gate is empty")
}

// Limits hold requests: a thousand idle connections take no place.
func TestIdleConnectionsTakeNoPlace(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	limited(1, 0, 0)(r)
	for range 100 {
		c := r.dial()
		h.release <- struct{}{}
		c.send(post)
		<-h.came
		c.head()
		c.expect("text")
	}
	if s := r.Gate.State(); s.Inflight != 0 {
		t.Errorf("state %+v", s)
	}
}

func TestADrainedWeirRefusesAndTellsToComeAgainElsewhere(t *testing.T) {
	h := newHeld(t)
	r := newRig(t, h.addr)
	r.Gate.Drain()
	c := r.dial()
	c.send(post)
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 503 ") || !strings.Contains(head, "Retry-After") {
		t.Errorf("answer %q", head)
	}
	if o := r.ended(classifier.Rejected); o.Error != "shutting_down" {
		t.Errorf("the record is %+v", o)
	}
}

// A server that dies in the middle gives its place back too.
func TestABrokenExchangeGivesItsPlaceBack(t *testing.T) {
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
	})
	r := newRig(t, addr)
	limited(1, 0, 0)(r)
	for range 3 {
		c := r.dial()
		c.send("GET /asr HTTP/1.1\r\nHost: asr\r\n\r\n")
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 502 ") {
			t.Errorf("answer %q", head)
		}
		r.eventually(func() bool { return r.Gate.State().Inflight == 0 }, "the place is free")
	}
}
