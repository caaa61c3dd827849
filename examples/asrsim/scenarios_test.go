package asrsim

import (
	"math"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// remedy is an intervention that helps against one cause, by
// reference: limits x 4, batch x 4, no delay, all three; compute / 2;
// copies' latency / 2 and bandwidth x 2; host work / 2 and workers x 2; client rates x 2.
type remedy struct {
	cause, name string
	apply       func(s *Scenario)
}

var remedies = []remedy{
	{"queue", "limits x 4", func(s *Scenario) { s.MaxConcurrency *= 4; s.MaxQueueSize *= 4; s.Server.MaxQueueSize *= 4 }},
	{"queue", "batch x 4", func(s *Scenario) { s.Server.MaxBatchSize *= 4 }},
	{"queue", "no batch delay", func(s *Scenario) { s.Server.BatchDelay = 0 }},
	{"queue", "limits x 4, batch x 4, no delay", func(s *Scenario) {
		s.MaxConcurrency *= 4
		s.Server.MaxBatchSize *= 4
		s.Server.BatchDelay = 0
	}},
	{"compute", "forward / 2", func(s *Scenario) {
		s.Server.ForwardBase /= 2
		s.Server.ForwardPerBatch /= 2
		s.Server.ForwardPerSecond /= 2
	}},
	{"transfer", "copy latency / 2, bandwidth x 2", func(s *Scenario) { s.Server.CopyLatency /= 2; s.Server.Bandwidth *= 2 }},
	{"host", "host work / 2, workers x 2", func(s *Scenario) {
		s.Server.Preprocess /= 2
		s.Server.PreprocessPerSecond /= 2
		s.Server.Postprocess /= 2
		s.Server.PreprocessWorkers *= 2
	}},
	{"client", "upload rate x 2", func(s *Scenario) {
		for i := range s.Steps {
			s.Steps[i].UploadRate *= 2
		}
	}},
}

// gate is a stand-in for the proxy's: at most limit requests at once, first
// come first served.
func gate(limit int, next http.Handler) http.Handler {
	if limit == 0 {
		return next
	}
	places := make(chan struct{}, limit)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		places <- struct{}{}
		defer func() { <-places }()
		next.ServeHTTP(w, r)
	})
}

// play runs the steps for 4 s each in a bubble and returns their results.
func play(t *testing.T, s Scenario, steps []Step) (results []Result, stats Stats) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server, err := New(s.Server)
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		for _, step := range steps {
			l := step.load("http://asr.example/asr")
			l.For = 4 * time.Second
			l.Transport = inProcess{gate(s.MaxConcurrency, server)}
			r, err := l.Run(t.Context())
			if err != nil || r.Failed > 0 || r.OK == 0 {
				t.Fatalf("%d clients: %d OK, %d failed, %v, %v", step.Clients, r.OK, r.Failed, r.Err, err)
			}
			results = append(results, r)
		}
		stats = server.Stats()
	})
	return results, stats
}

// with returns the scenario after a remedy, leaving s as it is.
func (s Scenario) with(r remedy) Scenario {
	s.Steps = append([]Step(nil), s.Steps...)
	r.apply(&s)
	return s
}

func TestTheNamedCauseIsTheOneWhoseRemedyHelpsMost(t *testing.T) {
	for _, s := range Scenarios() {
		if s.Name == "healthy" {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			last := len(s.Steps) - 1
			before, _ := play(t, s, s.Steps[last:])
			gain := map[string]float64{}
			for _, r := range remedies {
				healed := s.with(r)
				after, _ := play(t, healed, healed.Steps[last:])
				g := 1 - float64(after[0].Mean())/float64(before[0].Mean())
				t.Logf("%-32s mean %v -> %v", r.name, before[0].Mean(), after[0].Mean())
				gain[r.cause] = max(gain[r.cause], g)
			}
			for cause, g := range gain {
				if cause != s.Name && g > 0.6*gain[s.Name] {
					t.Errorf("the remedy for %s lowers mean latency by %.0f %%, that for %s only by %.0f %%", cause, 100*g, s.Name, 100*gain[s.Name])
				}
			}
			if gain[s.Name] < 0.3 {
				t.Errorf("the remedy for %s lowers mean latency by %.0f %%: want 30 %% or more", s.Name, 100*gain[s.Name])
			}
		})
	}
}

// rise is d ln throughput / d ln clients between two steps.
func rise(a, b Result, from, to int) float64 {
	return math.Log(b.Throughput()/a.Throughput()) / math.Log(float64(to)/float64(from))
}

func TestInTheHealthyScenarioThroughputRisesAndLatencyHardly(t *testing.T) {
	s, err := FindScenario("healthy")
	if err != nil {
		t.Fatal(err)
	}
	r, _ := play(t, s, s.Steps)
	last := len(r) - 1
	if e := rise(r[0], r[last], s.Steps[0].Clients, s.Steps[last].Clients); e < 0.9 {
		t.Errorf("throughput's elasticity is %.2f: want 0.9 or more", e)
	}
	if slow := float64(r[last].Mean()) / float64(r[0].Mean()); slow > 1.25 {
		t.Errorf("16 clients wait %.2f times as long as one: want less than 1.25", slow)
	}
}

func TestTheLimitedScenariosSlowDownUnderLoad(t *testing.T) {
	for _, s := range Scenarios() {
		if s.Name == "healthy" || s.Name == "client" {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			r, _ := play(t, s, s.Steps)
			last := len(r) - 1
			if slow := float64(r[last].Mean()) / float64(r[0].Mean()); slow < 2 {
				t.Errorf("16 clients wait %.2f times as long as one: want 2 or more", slow)
			}
			if e := rise(r[last-1], r[last], 8, 16); e > 0.3 {
				t.Errorf("throughput still rises by an elasticity of %.2f at 16 clients", e)
			}
		})
	}
}

func TestScenariosFitTheDemo(t *testing.T) {
	for _, s := range Scenarios() {
		var whole time.Duration
		for _, step := range s.Steps {
			whole += step.For
		}
		if whole < 35*time.Second || whole > 45*time.Second {
			t.Errorf("%s lasts %v: want about 40s", s.Name, whole)
		}
		r, stats := play(t, s, s.Steps)
		for i, step := range s.Steps {
			if per10 := 10 * r[i].Throughput(); i > 0 && per10 < 40 {
				t.Errorf("%s with %d clients: %.0f requests in 10 s, want 40", s.Name, step.Clients, per10)
			}
			t.Logf("%-9s %2d clients %6.1f/s mean %v p95 %v", s.Name, step.Clients, r[i].Throughput(), r[i].Mean(), r[i].Quantile(0.95))
		}
		t.Logf("%-9s busy %.2f mean batch %.1f batches %v", s.Name, stats.Busy, stats.MeanBatch(), stats.Batches)
	}
}

func TestAnUnknownScenarioNamesTheKnownOnes(t *testing.T) {
	_, err := FindScenario("gpu")
	if want := `no scenario is named "gpu": take one of queue, compute, transfer, host, client, healthy`; err == nil || err.Error() != want {
		t.Errorf("error %q: want %q", err, want)
	}
}
