package proxy

import (
	"bufio"
	"context"
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

// A request that has reached weir's socket is served, also if weir ends in
// that moment: on a connection that waits in the backlog, on a new one, and on
// one that was idle.
func TestAnEndUnderLoadLosesNoRequest(t *testing.T) {
	for round := range 5 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			s := newSidecar(t, func(c *Config) {
				c.Server = "http://" + serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "text") })
				c.MaxConcurrency = 4
			})
			stop := runSidecar(t, s)
			var clients sync.WaitGroup
			var served, lost atomic.Int32
			for n := range 16 {
				clients.Go(func() {
					for {
						switch fault := oneRequest(s.Addr(), n%2 == 0); fault {
						case "":
							served.Add(1)
						case "refused":
							return
						default:
							t.Log(fault, n)
							lost.Add(1)
						}
					}
				})
			}
			for served.Load() < 100 {
				time.Sleep(time.Millisecond)
			}
			stop()
			clients.Wait()
			// Between the last accept and the close of the port there is a gap of
			// some microseconds that no program can close.
			if lost.Load() > 2 {
				t.Errorf("%d requests were lost, %d served", lost.Load(), served.Load())
			}
		})
	}
}

// oneRequest sends one request on a connection of its own; "" if it was served.
func oneRequest(addr string, wait bool) (fault string) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return "refused"
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if wait {
		time.Sleep(2 * time.Millisecond)
	}
	if _, err := io.WriteString(c, post); err != nil {
		return err.Error()
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err.Error()
	}
	defer r.Body.Close()
	if b, err := io.ReadAll(r.Body); err != nil || string(b) != "text" {
		return fmt.Sprintf("%q, %v", b, err)
	}
	return ""
}

// An idle connection's request that crosses weir's end on its way is served.
func TestARequestThatMeetsTheEndIsServed(t *testing.T) {
	addr, _ := seen(t, plainOK)
	r := newRig(t, addr)
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	c.expect(plainOK)
	var one *conn
	r.Server.mu.Lock()
	for one = range r.conns {
	}
	r.Server.mu.Unlock()
	r.eventually(func() bool { one.mu.Lock(); defer one.mu.Unlock(); return one.phase == idle }, "the connection waits")
	one.mu.Lock() // so that the wake-up comes after the bytes
	c.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	for !arrived(one.client.Conn) && one.client.r.Buffered() == 0 {
		time.Sleep(time.Millisecond)
	}
	one.mu.Unlock()
	go r.Shutdown(t.Context())
	if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
		t.Errorf("answered %q", head)
	}
}

// Reloads under load lose nothing either.
func TestReloadsUnderLoadLoseNoRequest(t *testing.T) {
	s := newSidecar(t, func(c *Config) {
		c.Server = "http://" + serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "text") })
		c.MaxConcurrency = 2
	})
	stop := runSidecar(t, s)
	defer stop()
	var clients sync.WaitGroup
	done := make(chan struct{})
	for range 8 {
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if fault := oneRequest(s.Addr(), false); fault != "" {
					t.Error(fault)
					return
				}
			}
		})
	}
	cfg := s.cfg
	for n := range 50 {
		next := cfg
		next.MaxConcurrency = n % 4 // 0: none
		next.Limits = nil
		if n%3 == 0 {
			next.Limits = []RouteLimit{{Route: "/asr", MaxConcurrency: 1 + n%2, MaxQueueSize: 100}}
		}
		next.WriteTimeout = seconds(n % 2 * 10)
		if err := s.Reload(next); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Millisecond)
	}
	close(done)
	clients.Wait()
	if g := s.server.Gate.State(); g.Inflight != 0 || g.Waiting != 0 {
		t.Errorf("gate %+v", g)
	}
}

// What has not ended when the time is up is cut, wherever it is: in the
// server, in the queue, in a tunnel.
func TestShutdownCutsWhatDoesNotEnd(t *testing.T) {
	came := make(chan string, 3)
	r := newRig(t, script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		head, _ := readHeadRaw(br)
		came <- head
		if strings.Contains(head, "Upgrade: ") {
			fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		}
		_, _ = io.Copy(io.Discard, br)
	}))
	limited(2, 5, 0)(r)
	tunnel, busy, queued := r.dial(), r.dial(), r.dial()
	tunnel.send("GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	tunnel.head()
	busy.send(post)
	<-came
	<-came
	queued.send(post)
	r.waiting(1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := r.Shutdown(ctx); err == nil || !strings.Contains(err.Error(), "3 connections") {
		t.Errorf("the end of the three is %v", err)
	}
	for n := range 3 {
		if o := r.record(n); !o.Upgraded && o.Outcome != classifier.Canceled {
			t.Errorf("recorded as %v, %q", o.Outcome, o.Error)
		}
	}
	if s := r.Gate.State(); s.Inflight != 0 || s.Waiting != 0 {
		t.Errorf("gate %+v", s)
	}
}
