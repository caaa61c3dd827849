package proxy

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/classifier"
)

// misbehave is a server that answers each request in some way, good or bad,
// and puts the request's own mark into whatever it says.
func misbehave(n int, c net.Conn, br *bufio.Reader) {
	rnd := rand.New(rand.NewPCG(7, uint64(n)))
	for {
		head, err := readHeadRaw(br)
		if err != nil {
			return
		}
		_, mark, _ := strings.Cut(head, "X-Mark: ")
		mark, _, _ = strings.Cut(mark, "\r\n")
		switch rnd.IntN(12) {
		case 0: // dies without a word
			return
		case 1: // by a reset
			hangUp(c)
			return
		case 2: // half an answer
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n%s", mark)
			return
		case 3: // half an answer in chunks, then a reset
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(mark), mark)
			hangUp(c)
			return
		case 4: // nonsense
			fmt.Fprintf(c, "HTTP/1.1 2000 %s\nX\n\n", mark)
			return
		case 5: // an early answer, then it closes
			fmt.Fprintf(c, "HTTP/1.1 413 Large\r\nContent-Length: %d\r\n\r\n%s", len(mark), mark)
			return
		case 6: // more than was asked for
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%sHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", len(mark), mark)
			return
		case 7: // it takes its time
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
		}
		if !swallowBody(head, br) {
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nServer-Timing: forward;dur=0.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(mark), mark)
	}
}

func swallowBody(head string, br *bufio.Reader) bool {
	var n int64
	if _, rest, ok := strings.Cut(head, "Content-Length: "); ok {
		_, _ = fmt.Sscan(rest, &n)
	}
	_, err := io.CopyN(io.Discard, br, n)
	return err == nil
}

// roam is a client that sends requests, leaves in the middle of some, and
// checks that each answer is its own; it returns how many requests it sent.
func roam(t *testing.T, addr string, id int) {
	rnd := rand.New(rand.NewPCG(8, uint64(id)))
	for round := range 12 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Error(err)
			return
		}
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		br := bufio.NewReader(c)
		for turn := range 1 + rnd.IntN(4) {
			mark := fmt.Sprintf("mark-%d-%d-%d;", id, round, turn)
			size := []int{0, 10, 100_000}[rnd.IntN(3)]
			_, err := fmt.Fprintf(c, "POST /asr HTTP/1.1\r\nHost: h\r\nX-Mark: %s\r\nContent-Length: %d\r\n\r\n", mark, size)
			sent := size
			if rnd.IntN(5) == 0 {
				sent = size / 2
			}
			if err == nil && rnd.IntN(10) > 0 {
				_, err = c.Write(make([]byte, sent))
			}
			if leave := rnd.IntN(8); err != nil || sent < size || leave == 0 {
				break
			}
			if !ownAnswer(t, br, mark) {
				break
			}
		}
		switch rnd.IntN(3) {
		case 0:
			hangUp(c)
		case 1:
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, br)
		}
		_ = c.Close()
	}
}

// ownAnswer reads one answer; false if the connection is of no more use.
func ownAnswer(t *testing.T, br *bufio.Reader, mark string) bool {
	head, err := readHeadRaw(br)
	if err != nil {
		return false
	}
	body := make([]byte, 0, 200)
	switch {
	case strings.Contains(head, "chunked"):
		for !strings.HasSuffix(string(body), "0\r\n\r\n") {
			line, err := br.ReadString('\n')
			body = append(body, line...)
			if err != nil {
				return false
			}
		}
	default:
		var n int64
		_, rest, _ := strings.Cut(head, "Content-Length: ")
		_, _ = fmt.Sscan(rest, &n)
		body, err = io.ReadAll(io.LimitReader(br, n))
	}
	if strings.HasPrefix(head, "HTTP/1.1 200") || strings.HasPrefix(head, "HTTP/1.1 413") {
		if !strings.Contains(string(body), mark) || strings.Contains(string(body), "evil") || strings.Count(string(body), "mark-") != 1 {
			t.Errorf("the answer to %q is %q %q", mark, head, body)
		}
	}
	return err == nil && !strings.Contains(head, "Connection: close")
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc here: ", err)
	}
	return len(entries)
}

// Whatever clients and servers do to each other: each answer is its own
// request's, each record adds up, and in the end no place, goroutine or
// descriptor is held.
func TestChaosLeavesNothingBehind(t *testing.T) {
	addr := script(t, misbehave)
	r := newRig(t, addr, func(s *settings) { s.bodyTimeout = 2 * time.Second })
	limited(5, 8, 50*time.Millisecond)(r)
	before := descriptors(t)
	var clients sync.WaitGroup
	for id := range 24 {
		clients.Go(func() { roam(t, r.addr, id) })
	}
	clients.Wait()
	r.eventually(func() bool { r.Server.mu.Lock(); defer r.Server.mu.Unlock(); return len(r.conns) == 0 }, "connections closed")
	if s := r.Gate.State(); s.Inflight != 0 || s.Waiting != 0 || r.Gate.whole.used != 0 || r.Gate.whole.waiting != 0 {
		t.Errorf("gate %+v", s)
	}
	r.eventually(func() bool { runtime.GC(); return descriptors(t) <= before+2 }, "descriptors closed: %d before, %d now", before, descriptors(t))
	r.mu.Lock()
	defer r.mu.Unlock()
	outcomes := map[string]int{}
	for i := range r.records {
		o := &r.records[i]
		outcomes[o.Outcome.String()+" "+o.Error]++
		checkRecord(t, o)
	}
	t.Logf("%d requests: %v", len(r.records), outcomes)
	if len(outcomes) < 5 {
		t.Errorf("too little happened: %v", outcomes)
	}
}

// checkRecord holds a record to what must be true of any.
func checkRecord(t *testing.T, o *classifier.Observation) {
	t.Helper()
	last := o.Enqueued
	instants := []time.Time{o.Enqueued, o.Dequeued, o.Sent, o.Responded, o.Done}
	if o.Overlapped() {
		instants = []time.Time{o.Enqueued, o.Dequeued, o.Responded, o.Done}
	}
	for _, at := range instants {
		if at.IsZero() {
			continue
		}
		if at.Before(last) {
			t.Errorf("instants out of order: %+v", o)
		}
		last = at
	}
	l := o.Ledger()
	if l.Wall() != o.Before+o.Total() || o.Enqueued.IsZero() || o.Done.IsZero() {
		t.Errorf("the ledger adds up to %v, not %v: %+v", l.Wall(), o.Total(), o)
	}
	for _, d := range []time.Duration{l.Queue, l.Overhead, l.Connect, l.Upload, l.Stream, l.Unattributed} {
		if d < 0 || d > o.Total() {
			t.Errorf("a line of the ledger is %v of %v: %+v", d, o.Total(), l)
		}
	}
	if (o.Outcome == classifier.OK) != (o.Error == "") {
		t.Errorf("outcome %v with the error %q", o.Outcome, o.Error)
	}
	if o.Outcome == classifier.OK && (o.Status == 0 || o.Responded.IsZero()) {
		t.Errorf("a served request without an answer: %+v", o)
	}
}
