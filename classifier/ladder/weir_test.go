package ladder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/classifier"
)

// fakeWeir is a server that stands for a weir and the server behind it: it
// keeps a record of each request, and shows it on its admin port only later.
type fakeWeir struct {
	mu      sync.Mutex
	records []classifier.Observation
	asked   int
	hide    int // so many are lost
}

func (w *fakeWeir) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/api/verdict":
		fmt.Fprint(rw, `{"waiting":0,"inflight":0,"max_concurrency":4}`)
	case "/api/requests":
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.asked++; w.asked%2 == 1 {
			return // its records are written off the request path
		}
		for i := min(w.hide, len(w.records)); i < len(w.records); i++ {
			b, _ := json.Marshal(&w.records[i])
			fmt.Fprintf(rw, "%s\n", b)
		}
	default:
		began := time.Now()
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(20 * time.Millisecond)
		o := classifier.Observation{Enqueued: began, Dequeued: began.Add(8 * time.Millisecond), Done: time.Now(), Waiting: 3, Inflight: 4, Limit: 4, BatchSize: 2,
			Source: "header", Timings: []classifier.Timing{{Name: "forward", Stage: classifier.StageForward, Dur: 5 * time.Millisecond}}}
		id := strings.Split(r.Header.Get("Traceparent"), "-")
		for i := range o.TraceID {
			_, _ = fmt.Sscanf(id[1][2*i:2*i+2], "%02x", &o.TraceID[i])
		}
		w.mu.Lock()
		w.records = append(w.records, o)
		w.mu.Unlock()
	}
}

func TestTheStagesComeFromWeirsOwnRecordsWhereItIsInFront(t *testing.T) {
	weir := &fakeWeir{}
	s := httptest.NewServer(weir)
	defer s.Close()
	c, err := NewClient(Target{URL: s.URL + "/asr", Admin: strings.TrimPrefix(s.URL, "http://")}, speech(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := &Runner{Client: c}
	run, err := r.Step(t.Context(), Step{Concurrency: 2, Requests: 10}, 1, 1)
	if err != nil || len(run.Notes) > 0 {
		t.Fatalf("%v, %q", err, run.Notes)
	}
	for i := range run.Samples {
		o := &run.Samples[i]
		f, _ := o.In(classifier.StageForward)
		if f != 5*time.Millisecond || o.QueueWait() != 8*time.Millisecond || o.Limit != 4 || o.Inflight != 4 || o.Waiting != 3 || o.BatchSize != 2 {
			t.Fatalf("%+v", o)
		}
	}
	weir.mu.Lock()
	weir.hide = len(weir.records) + 5 // of those that come now, the first five are lost
	weir.mu.Unlock()
	run, err = r.Step(t.Context(), Step{Concurrency: 2, Requests: 10}, 2, 2)
	if err != nil || len(run.Notes) != 1 || !strings.Contains(run.Notes[0], "raise its records") {
		t.Errorf("%v, %q", err, run.Notes)
	}
	c.target.Admin = "127.0.0.1:1"
	run, err = r.Step(t.Context(), Step{Concurrency: 2, Requests: 10}, 4, 4)
	if err != nil || len(run.Notes) != 1 || !strings.Contains(run.Notes[0], "is 127.0.0.1:1 the admin address of weir?") {
		t.Errorf("%v, %q", err, run.Notes)
	}
}

func TestACommandRestoresTheBaseAfterCtrlC(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	s, err := ParseSetter([]string{"n"}, "cmd:echo {n} > "+log, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := SweepPlan{
		Rounds: []Round{{"n", []int{1, 2, 3}, 2}}, Setters: map[string]Setter{"n": s},
		Concurrency: 2, Requests: 8, Repeats: 5, Journal: filepath.Join(t.TempDir(), "restore.json"),
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := newRunner(t, lockedHandler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if b, _ := os.ReadFile(log); string(b) == "3\n" {
			cancel()
		}
	})), Target{})
	r.Pause = 0
	if _, err := r.Sweep(ctx, p); !errors.Is(err, context.Canceled) {
		t.Errorf("err %v", err)
	}
	wantSettings(t, log, "2\n")
}

func TestASweepSaysThatItCouldNotRestoreAndKeepsItsJournal(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "broken")
	s, err := ParseSetter([]string{"n"}, "cmd:test {n} != 2 || test ! -e "+broken, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := SweepPlan{
		Rounds: []Round{{"n", []int{1, 2, 3}, 2}}, Setters: map[string]Setter{"n": s},
		Concurrency: 1, Requests: 8, Repeats: 1, Journal: filepath.Join(t.TempDir(), "restore.json"),
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	r := newRunner(t, lockedHandler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if n++; n == 25 {
			_ = os.WriteFile(broken, nil, 0o644)
			cancel()
		}
	})), Target{})
	r.Pause = 0
	if _, err := r.Sweep(ctx, p); !errors.Is(err, ErrNotRestored) || !strings.Contains(err.Error(), "weir sweep --restore") {
		t.Errorf("err %v", err)
	}
	if _, err := os.Stat(p.Journal); err != nil {
		t.Errorf("the journal is gone: %v", err)
	}
	_ = os.Remove(broken)
	if err := Restore(t.Context(), p.Journal); err != nil {
		t.Error(err)
	}
}
