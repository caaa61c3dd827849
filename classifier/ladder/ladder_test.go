package ladder

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
	"weir/examples/asrsim"
)

// A system is a simulated server whose knee and cause are known from its
// settings.
type system struct {
	name   string
	config asrsim.Config
	upload float64 // bytes/s
	limit  int     // of a proxy in front, which tells its queue; 0: none
	cause  classifier.Cause
	// knee is R(1)·Xmax of the settings: what a request takes alone, over what
	// it takes of the bottleneck at its largest batch; nil: beyond the ladder.
	knee func(c asrsim.Config) float64
}

const meanSeconds, longest = 2.75, 3.5

func forwardOf(c asrsim.Config, batch, seconds float64) float64 {
	return c.ForwardBase.Seconds() + batch*c.ForwardPerBatch.Seconds() + seconds*c.ForwardPerSecond.Seconds()
}

func copies(c asrsim.Config, batch float64) float64 {
	return (batch*float64(c.H2DCopies) + 1) * c.CopyLatency.Seconds()
}

func host(c asrsim.Config) float64 {
	return (c.Preprocess + c.Postprocess).Seconds() + meanSeconds*c.PreprocessPerSecond.Seconds()
}

func alone(c asrsim.Config) float64 {
	return host(c) + c.BatchDelay.Seconds() + copies(c, 1) + forwardOf(c, 1, meanSeconds)
}

// deviceKnee is for a device that is the bottleneck with batches of the
// largest size.
func deviceKnee(c asrsim.Config) float64 {
	b := float64(c.MaxBatchSize)
	return alone(c) * b / (copies(c, b) + forwardOf(c, b, longest)) * float64(c.Instances)
}

func systems() []system {
	scenario := func(name string) asrsim.Config {
		s, err := asrsim.FindScenario(name)
		if err != nil {
			panic(err)
		}
		return s.Server
	}
	queue := asrsim.DefaultConfig() // a batch of two, that could be sixteen for the same price
	queue.MaxBatchSize, queue.ForwardPerBatch = 2, 200*time.Microsecond
	return []system{
		{"a limit set too low", scenario("queue"), 0, 2, classifier.Queue, func(asrsim.Config) float64 { return 2 }},
		{"a batch cap set too low", queue, 0, 0, classifier.Queue, deviceKnee},
		{"a full device", scenario("compute"), 0, 0, classifier.Compute, deviceKnee},
		{"slow copies", scenario("transfer"), 0, 0, classifier.Transfer, deviceKnee},
		{"one host thread", scenario("host"), 0, 0, classifier.Host, func(c asrsim.Config) float64 { return alone(c) / host(c) }},
		{"slow uploads", scenario("client"), 50e3, 0, classifier.Client, nil},
	}
}

var rungs = []int{1, 2, 4, 8, 16}

// rung is the place of a concurrency on the ladder, between steps too.
func rung(n float64) float64 { return math.Log2(n) }

// finds tells whether a knee is within one rung of the analytic one.
func (s system) finds(k *Knee, c asrsim.Config) bool {
	if s.knee == nil {
		return k.Concurrency == 0 && strings.Contains(k.Note, "not reached")
	}
	return k.Concurrency > 0 && math.Abs(rung(k.Value)-rung(s.knee(c))) <= 1
}

// gated is a proxy with a limit that tells its wait as weir does.
func gated(next http.Handler, limit int) http.Handler {
	if limit == 0 {
		return next
	}
	places := make(chan struct{}, limit)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body) // as the kernel would
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		came := time.Now()
		places <- struct{}{}
		wait := time.Since(came)
		defer func() { <-places }()
		inner := httptest.NewRecorder()
		next.ServeHTTP(inner, r)
		w.Header().Set("Server-Timing", fmt.Sprintf("weir-queue;dur=%g, %s", ms(wait), inner.Header().Get("Server-Timing")))
		w.WriteHeader(inner.Code)
		_, _ = w.Write(inner.Body.Bytes())
	})
}

func TestTheKneeLandsWithinOneStepOfTheAnalyticOne(t *testing.T) {
	const seeds = 20
	for _, s := range systems() {
		t.Run(s.name, func(t *testing.T) {
			knees, causes := 0, 0
			for seed := range uint64(seeds) {
				synctest.Test(t, func(t *testing.T) {
					c := s.config
					c.Seed = seed
					sim := newSim(t, c)
					defer sim.Close()
					sum := climb(t, newRunner(t, gated(sim, s.limit), Target{Upload: s.upload}), closedSteps(160, rungs...))
					if s.finds(sum.Knee, c) {
						knees++
					} else {
						t.Logf("seed %d: knee %+v", seed, sum.Knee)
					}
					if sum.Verdict.Cause == s.cause {
						causes++
					} else {
						t.Logf("seed %d: verdict %+v", seed, sum.Verdict)
					}
					if len(sum.Warnings) > 0 {
						t.Logf("seed %d: warnings %q", seed, sum.Warnings)
					}
				})
			}
			t.Logf("%d knees, %d verdicts of %d", knees, causes, seeds)
			if knees < seeds-1 || causes < seeds-1 {
				t.Errorf("%d knees and %d verdicts of %d are right", knees, causes, seeds)
			}
		})
	}
}

// busy is a server of c places, each of which takes d for a request: its knee
// is c, exactly.
type busy struct {
	places chan struct{}
	d      time.Duration
	mu     sync.Mutex
	most   int
	now    int
}

func newBusy(c int, d time.Duration) *busy { return &busy{places: make(chan struct{}, c), d: d} }

func (b *busy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	b.now++
	b.most = max(b.most, b.now)
	b.mu.Unlock()
	b.places <- struct{}{}
	time.Sleep(b.d)
	<-b.places
	b.mu.Lock()
	b.now--
	b.mu.Unlock()
}

func TestTheKneeOfAnIdealServerIsExact(t *testing.T) {
	for _, c := range []int{1, 2, 3, 4, 6, 8} {
		synctest.Test(t, func(t *testing.T) {
			sum := climb(t, newRunner(t, newBusy(c, 50*time.Millisecond), Target{}), closedSteps(160, rungs...))
			if math.Abs(sum.Knee.Value/float64(c)-1) > 0.05 || sum.Knee.Concurrency != c {
				t.Errorf("%d places: knee %+v", c, sum.Knee)
			}
			if sum.Knee.Low > c || sum.Knee.High < c {
				t.Errorf("%d places: interval %d to %d", c, sum.Knee.Low, sum.Knee.High)
			}
		})
	}
}
