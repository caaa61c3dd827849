package ladder

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
	"weir/examples/asrsim"
)

// adjustable is a simulated server whose settings the sweep changes: the
// batch cap, and a limit on the requests that are let in.
type adjustable struct {
	t      *testing.T
	config asrsim.Config
	sim    *asrsim.Server
	gate   chan struct{}
	now    map[string]int
}

func (a *adjustable) Set(_ context.Context, _ string, f map[string]int) error {
	if a.now["max_batch_size"] == f["max_batch_size"] && a.now["max_concurrency"] == f["max_concurrency"] {
		return nil
	}
	if a.sim != nil {
		a.sim.Close()
	}
	c := a.config
	c.MaxBatchSize = f["max_batch_size"]
	a.sim, a.gate, a.now = newSim(a.t, c), make(chan struct{}, f["max_concurrency"]), f
	return nil
}

func (a *adjustable) Get(context.Context) (int, bool, error) { return 0, false, nil }
func (a *adjustable) Undo(_ string, base map[string]int) ([]Undo, error) {
	return nil, nil
}
func (a *adjustable) Close() error { a.sim.Close(); return nil }

func (a *adjustable) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body) // as the kernel would
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	a.gate <- struct{}{}
	defer func() { <-a.gate }()
	a.sim.ServeHTTP(w, r)
}

func sweepOf(t *testing.T, c asrsim.Config, limit, batch Round) *Summary {
	t.Helper()
	a := &adjustable{t: t, config: c}
	plan := SweepPlan{
		Rounds:      []Round{limit, batch},
		Setters:     map[string]Setter{"max_concurrency": a, "max_batch_size": a},
		Concurrency: 16, Requests: 128, Repeats: 3,
	}
	if err := plan.Check(); err != nil {
		t.Fatal(err)
	}
	runs, err := newRunner(t, a, Target{}).Sweep(t.Context(), plan)
	if err != nil {
		t.Fatal(err)
	}
	return Summarize(&Run{Header: Header{Kind: KindSweep, Rounds: plan.Rounds}, Steps: runs})
}

// The same symptom, requests that wait, from a limit that is too low and from
// a device that is full: only moving the limit tells them apart.
func TestTheSweepTellsALowLimitFromAFullDeviceInBothDirections(t *testing.T) {
	flat, full := asrsim.DefaultConfig(), asrsim.DefaultConfig()
	flat.ForwardPerBatch = 300 * time.Microsecond
	full.ForwardBase, full.ForwardPerBatch = 2*time.Millisecond, 20*time.Millisecond
	for _, c := range []struct {
		name         string
		config       asrsim.Config
		limit, batch Round
		cause        classifier.Cause
		advice       string
	}{
		{"a limit set too low", flat, Round{"max_concurrency", []int{1, 4, 16}, 2}, Round{"max_batch_size", []int{8}, 16}, classifier.Queue, "raise max_concurrency from 2 to 16"},
		{"a batch cap set too low", flat, Round{"max_concurrency", []int{8, 32}, 16}, Round{"max_batch_size", []int{1, 4, 16}, 2}, classifier.Queue, "raise max_batch_size from 2 to 16"},
		{"a full device behind a limit", full, Round{"max_concurrency", []int{2, 8, 16}, 4}, Round{"max_batch_size", []int{2, 8}, 4}, classifier.Compute, "no limit helps"},
		{"a full device without one", full, Round{"max_concurrency", []int{8, 32}, 16}, Round{"max_batch_size", []int{2, 16}, 8}, classifier.Compute, "no limit helps"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(3) {
				synctest.Test(t, func(t *testing.T) {
					config := c.config
					config.Seed = seed
					s := sweepOf(t, config, c.limit, c.batch)
					if s.Verdict.Cause != c.cause || !strings.Contains(s.Verdict.Advice, c.advice) {
						t.Errorf("seed %d: verdict %+v", seed, s.Verdict)
						for _, e := range s.Effects {
							t.Log(e.Text)
						}
					}
				})
			}
		})
	}
}

// testPlan varies a number in a file; no server has to restart for it.
func testPlan(t *testing.T, h http.Handler, file string) (*Runner, SweepPlan) {
	t.Helper()
	s, err := ParseSetter([]string{"max_batch_size"}, "file:"+file, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := SweepPlan{
		Rounds: []Round{{"max_batch_size", []int{2, 8}, 4}}, Setters: map[string]Setter{"max_batch_size": s},
		Concurrency: 2, Requests: 8, Repeats: 2, Journal: filepath.Join(t.TempDir(), "restore.json"),
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	r := newRunner(t, h, Target{})
	r.Pause = 0
	return r, p
}

const settings = "# the server's own file\nname: \"asr\"\nmax_batch_size: 4   # of 16\nmax_batch_size_note: 7\n"

func settingsFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "server.yaml")
	if err := os.WriteFile(file, []byte(settings), 0o640); err != nil {
		t.Fatal(err)
	}
	return file
}

func wantSettings(t *testing.T, file, want string) {
	t.Helper()
	got, err := os.ReadFile(file)
	if err != nil || string(got) != want {
		t.Errorf("the file is %q (%v), want %q", got, err, want)
	}
}

func TestASweepChangesNothingInAFileButTheNumberAndRestoresIt(t *testing.T) {
	file := settingsFile(t)
	seen := map[string]bool{}
	h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		b, _ := os.ReadFile(file)
		seen[string(b)] = true
	})
	r, p := testPlan(t, lockedHandler(h), file)
	runs, err := r.Sweep(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if want := 1 + 3*2; len(runs) != want {
		t.Errorf("%d visits, want %d", len(runs), want)
	}
	for _, v := range []string{"2", "4", "8"} {
		if want := strings.Replace(settings, "size: 4", "size: "+v, 1); !seen[want] {
			t.Errorf("no request saw the file with %s", v)
		}
	}
	if len(seen) != 3 {
		t.Errorf("requests saw %d files: %v", len(seen), seen)
	}
	wantSettings(t, file, settings)
	if _, err := os.Stat(p.Journal); err == nil {
		t.Error("the journal is still there")
	}
}

func TestASweepRestoresTheFileAfterCtrlC(t *testing.T) {
	file := settingsFile(t)
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if n++; n == 30 {
			cancel()
		}
	})
	r, p := testPlan(t, lockedHandler(h), file)
	runs, err := r.Sweep(ctx, p)
	if !errors.Is(err, context.Canceled) || len(runs) == 0 {
		t.Errorf("%d runs, %v", len(runs), err)
	}
	wantSettings(t, file, settings)
}

func TestACrashedSweepIsRestoredFromItsJournalAndBlocksTheNext(t *testing.T) {
	file := settingsFile(t)
	r, p := testPlan(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), file)
	if err := p.journal(); err != nil { // what a sweep does first; then it crashes
		t.Fatal(err)
	}
	if err := p.set(t.Context(), map[string]int{"max_batch_size": 8}); err != nil {
		t.Fatal(err)
	}
	other := p
	if err := other.journal(); err == nil || !strings.Contains(err.Error(), "weir sweep --restore") {
		t.Errorf("a second sweep began: %v", err)
	}
	_ = r
	if err := Restore(t.Context(), p.Journal); err != nil {
		t.Fatal(err)
	}
	wantSettings(t, file, settings)
}

func TestASweepStopsWhenSomethingElseChangesItsSetting(t *testing.T) {
	file := settingsFile(t)
	h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		_ = os.WriteFile(file, []byte(strings.Replace(settings, "size: 4", "size: 3", 1)), 0o640)
	})
	r, p := testPlan(t, lockedHandler(h), file)
	if _, err := r.Sweep(t.Context(), p); err == nil || !strings.Contains(err.Error(), "something else changes it") {
		t.Errorf("err %v", err)
	}
	wantSettings(t, file, settings)
}

func TestASetterSaysWhatIsWrong(t *testing.T) {
	file := settingsFile(t)
	for _, c := range []struct{ names, how, restart, want string }{
		{"a", "", "", "write cmd:COMMAND"},
		{"a", "magic:x", "", "no way to change a setting"},
		{"a", "weir:weir.yaml", "", "write weir:PATH,ADMIN"},
		{"a", "http:POST", "", "http:METHOD URL BODY"},
		{"a", "file:" + file, "", "has 0 lines"},
		{"max_batch_size", "file:" + file, "systemctl", "write cmd:COMMAND or run:COMMAND"},
		{"a,b", "file:" + file, "", "one --set for each"},
		{"max_batch_size", "file:/nowhere/x", "", "no such file"},
	} {
		_, err := ParseSetter(strings.Split(c.names, ","), c.how, c.restart, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s=%s: %v, want %q", c.names, c.how, err, c.want)
		}
	}
}

func TestACommandRunsAnewOnlyWhenItsTextChanges(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	s, err := ParseSetter([]string{"n"}, "cmd:echo {n} >> "+log, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 1, 2, 2, 1} {
		if err := s.Set(t.Context(), "n", map[string]int{"n": n}); err != nil {
			t.Fatal(err)
		}
	}
	wantSettings(t, log, "1\n2\n1\n")
	bad, _ := ParseSetter([]string{"n"}, "cmd:echo no such setting; exit 3", "", nil)
	if err := bad.Set(t.Context(), "n", map[string]int{"n": 1}); err == nil || !strings.Contains(err.Error(), "no such setting") {
		t.Errorf("err %v", err)
	}
}

func TestAServerOfTheSweepIsRestartedAndEnded(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	script := "sh -c 'trap \"echo end {n} >> " + log + "; exit\" TERM; echo begin {n} >> " + log + "; while :; do sleep 0.01; done'"
	ready := func(ctx context.Context) error {
		for { // the trap is set before the line is written
			if b, _ := os.ReadFile(log); strings.HasSuffix(strings.TrimSpace(string(b)), "1") || strings.HasSuffix(strings.TrimSpace(string(b)), "2") {
				return nil
			}
			if !sleep(ctx, time.Millisecond) {
				return ctx.Err()
			}
		}
	}
	s, err := ParseSetter([]string{"n"}, "run:"+script, "", ready)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 1, 2} {
		if err := s.Set(t.Context(), "n", map[string]int{"n": n}); err != nil {
			t.Fatal(err)
		}
		if n == 2 {
			for { // ready may have seen the old one's end
				if b, _ := os.ReadFile(log); strings.Contains(string(b), "begin 2") {
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	wantSettings(t, log, "begin 1\nend 1\nbegin 2\nend 2\n")
	dead, _ := ParseSetter([]string{"n"}, "run:echo port in use; exit 1", "", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	if err := dead.Set(t.Context(), "n", map[string]int{"n": 1}); err == nil || !strings.Contains(err.Error(), "ended at once") {
		t.Errorf("err %v", err)
	}
}
