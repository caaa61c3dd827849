package ladder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weir/examples/asrsim"
)

func TestAnOpenLoopShowsAStallInItsP99(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var sum [2]*Summary
		for i, step := range []Step{{Rate: 100, Arrivals: Constant, Requests: 1000}, {Concurrency: 1, Requests: 1000}} {
			began = time.Now()
			stalled := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				if at := time.Since(began); at > 4*time.Second && at < 5*time.Second {
					time.Sleep(5*time.Second - at) // all who come in that second wait for its end
				}
				time.Sleep(5 * time.Millisecond)
			})
			r := newRunner(t, stalled, Target{})
			runs, err := r.Ladder(t.Context(), []Step{step})
			if err != nil {
				t.Fatal(err)
			}
			sum[i] = Summarize(&Run{Header: Header{Kind: KindLadder}, Steps: runs})
		}
		if p99 := sum[0].Steps[0].P99; p99 < 850 || p99 > 1000 {
			t.Errorf("open loop: P99 is %g ms; of 100 requests that came in the second that the server stalled the tenth waited 900 ms", p99)
		}
		if p99 := sum[1].Steps[0].P99; p99 > 10 {
			t.Errorf("closed loop: P99 is %g ms; one request met the stall", p99)
		}
		if k := sum[0].Knee; k.Concurrency != 0 || !strings.Contains(k.Note, "no closed-loop step") {
			t.Errorf("knee of an open loop: %+v", k)
		}
	})
}

func TestLatencyCountsFromWhenARequestWasDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRunner(t, newBusy(1, 100*time.Millisecond), Target{})
		r.Inflight = 1 // so that arrivals wait in the client
		runs, err := r.Ladder(t.Context(), []Step{{Rate: 20, Arrivals: Constant, Requests: 20}})
		if err != nil {
			t.Fatal(err)
		}
		last := runs[0].Samples[len(runs[0].Samples)-1]
		// Arrival n (from 1) is due at 50 n ms and starts at 50 + 100 (n-1).
		n := runs[0].Extra + len(runs[0].Samples)
		if want := time.Duration(n-1) * 50 * time.Millisecond; last.Before != want || latency(&last) != want+100*time.Millisecond {
			t.Errorf("the last of %d was %v late and took %v", n, last.Before, latency(&last))
		}
	})
}

func TestArrivalsHaveTheirRateAndPoissonItsSpread(t *testing.T) {
	for _, arrivals := range []string{Poisson, Constant} {
		synctest.Test(t, func(t *testing.T) {
			r := newRunner(t, newBusy(1000, time.Millisecond), Target{})
			runs, err := r.Ladder(t.Context(), []Step{{Rate: 50, Arrivals: arrivals, Requests: 2000}})
			if err != nil {
				t.Fatal(err)
			}
			row := Summarize(&Run{Header: Header{Kind: KindLadder}, Steps: runs}).Steps[0]
			if math.Abs(row.Achieved/50-1) > 0.08 {
				t.Errorf("%s: achieved %g requests/s of 50", arrivals, row.Achieved)
			}
			var gaps []float64
			for i := 1; i < len(runs[0].Samples); i++ {
				gaps = append(gaps, runs[0].Samples[i].Enqueued.Sub(runs[0].Samples[i-1].Enqueued).Seconds())
			}
			m, v := meanVar(gaps)
			if cv := math.Sqrt(v) / m; arrivals == Poisson && math.Abs(cv-1) > 0.1 || arrivals == Constant && cv > 0.01 {
				t.Errorf("%s: coefficient of variation %g", arrivals, cv)
			}
		})
	}
}

func TestOnlyTheSteadyPartOfAStepIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		cold := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			d := 10 * time.Millisecond
			if k := n.Add(1); k > 3 && k <= 7 {
				d = time.Second // the first of each client
			}
			time.Sleep(d)
		})
		sum := climb(t, newRunner(t, cold, Target{}), closedSteps(40, 4))
		row := sum.Steps[0]
		if row.Sent != 40 || row.Max != 10 || math.Abs(row.Throughput-400) > 1 || math.Abs(row.Inflight-4) > 0.05 {
			t.Errorf("row %+v", row)
		}
		if row.Extra != 4+3 {
			t.Errorf("%d requests of warm-up and cool-down, want one a client before and the rest under way after", row.Extra)
		}
	})
}

func TestPercentileRanksAreThoseOfTheBinomialDistribution(t *testing.T) {
	for _, c := range []struct{ n, low, high int }{ // ranks from 1
		{100, 90, 100}, {160, 146, 158},
	} {
		low, high := quantileRanks(c.n, 0.95)
		if low+1 != c.low || high+1 != c.high {
			t.Errorf("n=%d: ranks %d to %d, want %d to %d", c.n, low+1, high+1, c.low, c.high)
		}
	}
	if _, high := quantileRanks(64, 0.95); high != 64 {
		t.Errorf("with 64 requests P95 has the upper bound %d", high)
	}
	// Property: the interval holds the quantile in 95 % of samples or more.
	dice := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{20, 80, 160, 500} {
		low, high := quantileRanks(n, 0.95)
		held := 0
		for range 2000 {
			below := 0
			for range n {
				if dice.Float64() < 0.95 {
					below++
				}
			}
			// The k-th value from 0 is below the quantile if more than k are.
			if below > low && (high >= n || below <= high) || n == 20 && high == n {
				held++
			}
		}
		if held < 1880 {
			t.Errorf("n=%d: held %d of 2000", n, held)
		}
	}
}

func TestStudentsQuantiles(t *testing.T) {
	for _, c := range []struct{ p, dof, want float64 }{
		{0.975, 1, 12.706}, {0.975, 2, 4.303}, {0.975, 7, 2.365}, {0.975, 14, 2.145}, {0.975, 100, 1.984}, {0.995, 10, 3.169},
	} {
		if got := student(c.p, c.dof); math.Abs(got/c.want-1) > 0.01 {
			t.Errorf("t(%g, %g) is %.4f, want %.3f", c.p, c.dof, got, c.want)
		}
	}
}

func TestAKneeIsRefusedOrNotFoundWhereThatIsSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name     string
			places   int
			requests int
			steps    []int
			want     string
		}{
			{"too few requests", 4, 64, rungs, "takes 128 there; run it with --requests 128"},
			{"not reached", 64, 160, rungs, "not reached"},
			{"below the lowest step", 1, 160, []int{4, 8, 16}, "below the lowest step"},
			{"one step", 4, 160, []int{4}, "one step is no curve"},
		} {
			k := climb(t, newRunner(t, newBusy(c.places, 50*time.Millisecond), Target{}), closedSteps(c.requests, c.steps...)).Knee
			if k.Concurrency != 0 || !strings.Contains(k.Note, c.want) {
				t.Errorf("%s: %+v", c.name, k)
			}
		}
		k := climb(t, newRunner(t, newBusy(4, 50*time.Millisecond), Target{}), closedSteps(160, 2, 4, 8)).Knee
		if k.Concurrency != 4 || !strings.Contains(k.Note, "an upper bound") || !strings.Contains(k.Note, "bounds only") {
			t.Errorf("without a step of 1, three steps: %+v", k)
		}
	})
}

func TestAnUnsteadyLastStepIsNoRise(t *testing.T) {
	rows := func(noise float64) (all []Row) {
		for n, x := range map[int]float64{1: 10, 2: 10, 4: 10, 8: 12.5} {
			all = append(all, Row{Step: Step{Concurrency: n}, Sent: 200, Succeeded: 200, Throughput: x, Mean: 1000 * float64(n) / x, relRate: noise, relMean: noise})
		}
		return all
	}
	if k := FindKnee(rows(0.01), false); k.Concurrency != 0 || !strings.Contains(k.Note, "not reached") {
		t.Errorf("a clear rise: %+v", k)
	}
	if k := FindKnee(rows(0.2), false); k.Concurrency != 1 || k.High < 2 || !strings.Contains(k.Note, "too unsteady") {
		t.Errorf("a rise within noise: %+v", k)
	}
}

func TestTheAdaptiveLadderDoublesUntilItIsFullAndBisectsTheOnset(t *testing.T) {
	for places, want := range map[int]string{1: "[1 2]", 3: "[1 2 4 8 3]", 6: "[1 2 4 8 16 6 7]", 200: "[1 2 4 8 16 32]"} {
		synctest.Test(t, func(t *testing.T) {
			r := newRunner(t, newBusy(places, 50*time.Millisecond), Target{})
			if err := r.Warm(t.Context()); err != nil {
				t.Fatal(err)
			}
			runs, err := r.Adapt(t.Context(), 32, RequestsFor)
			if err != nil {
				t.Fatal(err)
			}
			var steps []int
			for _, s := range runs {
				steps = append(steps, s.Concurrency)
			}
			sum := Summarize(&Run{Header: Header{Kind: KindLadder}, Steps: runs})
			if fmt.Sprint(steps) != want {
				t.Errorf("%d places: steps %v, want %s; knee %+v", places, steps, want, sum.Knee)
			}
			if places < 32 && math.Abs(sum.Knee.Value/float64(places)-1) > 0.1 {
				t.Errorf("%d places: knee %+v", places, sum.Knee)
			}
		})
	}
}

func TestDoubtsAboutTheClientArePrinted(t *testing.T) {
	good := Row{Step: Step{Concurrency: 4, Requests: 100}, Sent: 100, Succeeded: 100, Mean: 50, Inflight: 4, Client: ClientLoad{CPU: 0.2, Cores: 4, Late: time.Millisecond, Connections: 4}}
	if w := good.doubts(false); len(w) > 0 {
		t.Errorf("doubts about a good step: %q", w)
	}
	for want, change := range map[string]func(r *Row){
		"Little's law":                 func(r *Row) { r.Inflight = 3.5 },
		"known to within 47 % only":    func(r *Row) { r.relRate = 0.2 },
		"started 4.00 ms after they":   func(r *Row) { r.Concurrency, r.Rate, r.Delay = 0, 50, 4 },
		"10 of 100 requests failed":    func(r *Row) { r.Succeeded = 90 },
		"kept 3.5 of 4 cores busy":     func(r *Row) { r.Client.CPU = 3.5 },
		"timers was 9.0 ms late":       func(r *Row) { r.Client.Late = 9 * time.Millisecond },
		"the server closes each":       func(r *Row) { r.Client.Connections = 100 },
		"started 40 requests/s, not 5": func(r *Row) { r.Concurrency, r.Rate, r.Arrivals, r.Achieved = 0, 50, Constant, 40 },
	} {
		r := good
		change(&r)
		if w := r.doubts(false); len(w) != 1 || !strings.Contains(w[0], want) {
			t.Errorf("%q: %q", want, w)
		}
	}
}

// measured runs a ladder of two steps and returns its record.
func measured(t *testing.T, h http.Handler, seed uint64) (*Summary, []byte) {
	t.Helper()
	var file bytes.Buffer
	r := newRunner(t, h, Target{})
	r.Seed = seed
	head := Header{Kind: KindLadder, Version: "test", URL: "http://asr.test/asr", Started: time.Now().Round(0), Clips: 4, Seconds: 11}
	r.Record = NewRecorder(&file, head)
	if err := r.Warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	runs, err := r.Ladder(t.Context(), closedSteps(160, 1, 2, 4, 8))
	if err != nil {
		t.Fatal(err)
	}
	return Summarize(&Run{Header: head, Steps: runs}), file.Bytes()
}

func TestAReportCanBeRemadeFromItsRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := newSim(t, asrsim.DefaultConfig())
		defer sim.Close()
		want, file := measured(t, sim, 1)
		run, err := ReadRun(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		var a, b bytes.Buffer
		if err := errors.Join(want.JSON(&a), Summarize(run).JSON(&b)); err != nil {
			t.Fatal(err)
		}
		if a.String() != b.String() {
			t.Errorf("the reports differ:\n%s\n%s", a.String(), b.String())
		}
		// A run that was cut off in the middle of a line.
		cut, err := ReadRun(bytes.NewReader(file[:len(file)*2/3]))
		if err != nil || !cut.Interrupted || len(cut.Steps) == 0 {
			t.Errorf("cut off: %v", err)
		}
	})
}

func TestAnErrorInARecordNamesItsLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                                "no header",
		"{}\n{\"sample\":{\"step\":3}}\n": "line 2: a sample of step 3",
		"hello\n{}\n":                     "line 1",
		"{\"end\":{\"step\":1}}":          "line 1: the end of step 1",
	} {
		if _, err := ReadRun(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzReadRun(f *testing.F) {
	f.Add([]byte(`{"run":{"kind":"ladder"}}` + "\n" + `{"step":{"number":1,"concurrency":2,"requests":3}}` + "\n" +
		`{"sample":{"step":1,"phase":"measured","record":{"outcome":"ok","status":200,"start":"2026-01-02T03:04:05Z","total_ms":5}}}` + "\n" +
		`{"end":{"step":1,"from":"2026-01-02T03:04:05Z","until":"2026-01-02T03:04:06Z"}}`))
	f.Add([]byte(`{"run":{"kind":"sweep","rounds":[{"factor":"a","values":[1,2],"base":1}]}}` + "\n" + `{"step":{"number":1,"round":"a","factors":{"a":1},"requests":1}}`))
	f.Add([]byte(`{"run":{"kind":"probe"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		run, err := ReadRun(bytes.NewReader(b))
		if err != nil {
			return
		}
		s := Summarize(run)
		var out bytes.Buffer
		if err := errors.Join(s.Text(&out, Chinese), s.CSV(&out, English), s.Markdown(&out, English), s.HTML(&out, English)); err != nil {
			t.Error(err)
		}
		_ = Compare(s, s)
	})
}

func TestCompareTellsAChangeFromNoise(t *testing.T) {
	slow := asrsim.DefaultConfig()
	slow.ForwardBase += 20 * time.Millisecond
	var runs []*Summary
	for i, c := range []asrsim.Config{asrsim.DefaultConfig(), asrsim.DefaultConfig(), slow} {
		synctest.Test(t, func(t *testing.T) {
			c.Seed = uint64(i + 10)
			sim := newSim(t, c)
			defer sim.Close()
			s, _ := measured(t, sim, 1)
			runs = append(runs, s)
		})
	}
	for _, ch := range Compare(runs[0], runs[1]).Changes {
		if ch.Real {
			t.Errorf("another seed of the same server: %+v", ch)
		}
	}
	real := 0
	for _, ch := range Compare(runs[0], runs[2]).Changes {
		if ch.Real && (ch.Change > 0) == (ch.Quantity[0] == 'm') {
			real++
		}
	}
	if real < 7 {
		t.Errorf("a forward pass of 20 ms more: %d of 8 changes seen", real)
	}
}

func TestTheProbeNamesTheLargestStageOrSaysThatItCannot(t *testing.T) {
	probe := func(t *testing.T, h http.Handler, n int) ProbeClip {
		r := newRunner(t, h, Target{})
		runs, err := r.Probe(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		return Summarize(&Run{Header: Header{Kind: KindProbe}, Steps: runs}).Stages[0]
	}
	synctest.Test(t, func(t *testing.T) {
		c := asrsim.DefaultConfig()
		sim := newSim(t, c)
		defer sim.Close()
		got := probe(t, sim, 10)
		if got.Largest != "forward" || math.Abs(got.Stages[0].Median) > 0.1 && got.Stages[0].Name == "queue" {
			t.Errorf("%+v", got)
		}
		if got := probe(t, sim, 3); got.Largest != "" || !strings.Contains(got.Note, "--repeats 6") {
			t.Errorf("three repeats: %+v", got)
		}
		c.Preprocess, c.PreprocessPerSecond, c.ForwardBase, c.ForwardPerSecond, c.Jitter = 40*time.Millisecond, 0, 40*time.Millisecond, 0, 0.4
		alike := newSim(t, c)
		defer alike.Close()
		if got := probe(t, alike, 10); got.Largest != "" || !strings.Contains(got.Note, "disagree too much") {
			t.Errorf("two stages alike: %+v", got)
		}
		if got := probe(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Millisecond) }), 10); !strings.Contains(got.Note, "tells no stages") {
			t.Errorf("no stages: %+v", got)
		}
	})
}

func TestAStepOfFailuresEndsEarlyAndIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		r := newRunner(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if n.Add(1) > 60 {
				w.WriteHeader(503)
			}
		}), Target{})
		if err := r.Warm(t.Context()); err != nil {
			t.Fatal(err)
		}
		runs, err := r.Ladder(t.Context(), closedSteps(40, 1, 2, 4, 8))
		if !errors.Is(err, ErrAllFailed) || !strings.Contains(err.Error(), "concurrency 4") || len(runs) != 3 {
			t.Fatalf("%d steps, %v", len(runs), err)
		}
		s := Summarize(&Run{Header: Header{Kind: KindLadder}, Steps: runs})
		last := s.Steps[2]
		if last.Succeeded != 0 || last.Failed["status_503"] != last.Sent || last.Sent == 0 || last.Stopped == "" {
			t.Errorf("%+v", last)
		}
		var out bytes.Buffer
		if err := errors.Join(s.Text(&out, English), s.HTML(&out, English), s.JSON(&out)); err != nil {
			t.Error(err)
		}
	})
}

func TestSeveralProcessesSendWhatOneWould(t *testing.T) {
	dir := t.TempDir()
	for i, c := range speech() {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.wav", i)), c.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sim := newSim(t, asrsim.DefaultConfig())
	defer sim.Close()
	web := httptest.NewServer(sim)
	defer web.Close()
	clips, err := LoadAudio([]string{dir}, 1)
	if err != nil {
		t.Fatal(err)
	}
	target := Target{URL: web.URL + "/asr"}
	c, err := NewClient(target, clips, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Setenv("WEIR_TEST_WORKER", "1")
	pool, err := StartPool(3, Job{Target: target, Audio: []string{dir}, Seed: 1}, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	r := &Runner{Client: c, Warmup: 1, Pool: pool}
	sum := climb(t, r, closedSteps(40, 2, 8))
	for i, n := range []int{2, 8} {
		row := sum.Steps[i]
		if row.Succeeded != 40 || row.Timed != 40 || math.Abs(row.Inflight/float64(n)-1) > 0.25 || row.Client.Processes != min(n, 3) {
			t.Errorf("%+v", row)
		}
	}
	if err := pool.Close(); err != nil {
		t.Error(err)
	}
}

func TestNoGoroutineOutlivesAnInterruptedStep(t *testing.T) {
	before := runtime.NumGoroutine()
	web := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // else the server does not see the client leave
		select {
		case <-r.Context().Done():
		case <-time.After(time.Minute):
		}
	}))
	c, err := NewClient(Target{URL: web.URL + "/asr"}, speech(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	r := &Runner{Client: c}
	run, err := r.Step(ctx, Step{Concurrency: 8, Requests: 10}, 1, 1)
	if err == nil || run.Stopped != "interrupted" {
		t.Errorf("%v, %+v", err, run)
	}
	c.Close()
	web.Close()
	for range 200 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}

func TestTablesFitEightyColumnsAndAlign(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := newSim(t, asrsim.DefaultConfig())
		defer sim.Close()
		s, _ := measured(t, sim, 1)
		for _, lang := range []string{English, Chinese} {
			var b bytes.Buffer
			if err := s.Text(&b, lang); err != nil {
				t.Fatal(err)
			}
			width := 0
			for l := range strings.SplitSeq(b.String(), "\n") {
				n := columns(l)
				if n > 80 {
					t.Errorf("%s: %d columns: %s", lang, n, l)
				}
				switch {
				case l == "":
					width = 0
				case width == 0 && (strings.HasPrefix(l, "concurrency") || strings.HasPrefix(l, "并发数")):
					width = n
				case width > 0 && n != width:
					t.Errorf("%s: a row of %d columns under a head of %d: %s", lang, n, width, l)
				}
			}
			if lang == Chinese {
				for _, want := range []string{"并发数", "成功数", "平均延迟ms", "P95延迟ms", "最大延迟ms", "吞吐"} {
					if !strings.Contains(b.String(), want) {
						t.Errorf("no column %s", want)
					}
				}
			}
		}
		var v map[string]any
		var b bytes.Buffer
		if err := errors.Join(s.JSON(&b), json.Unmarshal(b.Bytes(), &v)); err != nil {
			t.Fatal(err)
		}
		step := v["steps"].([]any)[0].(map[string]any)
		for _, key := range []string{"concurrency", "sent", "succeeded", "failed", "mean_ms", "p50_ms", "p95_ms", "p99_ms", "max_ms", "throughput_rps", "stages_ms"} {
			if _, ok := step[key]; !ok {
				t.Errorf("JSON has no steps[].%s", key)
			}
		}
		knee := v["knee"].(map[string]any)
		for _, key := range []string{"concurrency", "low", "high", "method", "note"} {
			if _, ok := knee[key]; !ok {
				t.Errorf("JSON has no knee.%s", key)
			}
		}
	})
}
