package asrsim

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const url = "http://asr.example/asr"

func run(t *testing.T, l Load) Result {
	t.Helper()
	if l.URL == "" {
		l.URL = url
	}
	r, err := l.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestALoadEndsWithItsCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, exact())
		r := run(t, Load{Clients: 3, Requests: 10, Transport: inProcess{s}})
		if r.Sent != 10 || r.OK != 10 || len(r.Latencies) != 10 || r.Err != nil {
			t.Errorf("result %+v", r)
		}
		if st := s.Stats(); st.Requests != 10 || st.MaxInflight != 3 {
			t.Errorf("the server saw %d requests, at most %d at once", st.Requests, st.MaxInflight)
		}
	})
}

func TestALoadBeginsNoRequestAfterItsTimeAndWaitsForTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, exact())
		r := run(t, Load{For: 100 * msec, Audio: []time.Duration{time.Second}, Transport: inProcess{s}})
		if r.OK != 2 || r.Elapsed != 122*msec || r.Mean() != 61*msec {
			t.Errorf("%d OK in %v, mean %v: want 2 of 61ms in 122ms", r.OK, r.Elapsed, r.Mean())
		}
	})
}

func TestClientsThinkBetweenRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, Load{Requests: 3, Think: time.Second, Transport: inProcess{start(t, exact())}})
		if want := 3 * (time.Second + 61*msec); r.Elapsed < want-msec || r.Elapsed > want+msec {
			t.Errorf("three requests took %v: want %v", r.Elapsed, want)
		}
	})
}

func TestASlowClientUploadsAtItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, exact())
		r := run(t, Load{Requests: 1, UploadRate: 64000, Audio: []time.Duration{2 * time.Second}, Transport: inProcess{s}})
		want := time.Second + 44*time.Second/64000 + 61*msec
		if got := r.Mean(); (got - want).Abs() > msec {
			t.Errorf("latency %v: want %v", got, want)
		}
	})
}

func TestALoadThatIsCutOffEndsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.ForwardBase = time.Hour
		s := start(t, c)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		r, err := Load{URL: url, Clients: 4, For: time.Hour, Transport: inProcess{s}}.Run(ctx)
		if took := time.Since(began); took != time.Second || err != nil {
			t.Errorf("it ended after %v with %v: want 1s", took, err)
		}
		if r.Canceled != 4 || r.Failed != 0 || r.Err != nil || r.Throughput() != 0 {
			t.Errorf("result %+v: want 4 canceled", r)
		}
		if st := s.Stats(); st.Canceled != 4 {
			t.Errorf("the server saw %d canceled", st.Canceled)
		}
	})
}

func TestACutOffReachesASlowUpload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, exact())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, _ := Load{URL: url, For: time.Minute, UploadRate: 100, Transport: inProcess{s}}.Run(ctx)
		if r.Canceled != 1 || r.Elapsed != time.Second || s.Stats().Canceled != 1 {
			t.Errorf("result %+v, stats %+v", r, s.Stats())
		}
	})
}

func TestARefusedClientPausesBeforeItTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) })
		r := run(t, Load{For: time.Second, Transport: inProcess{refuse}})
		if r.Refused != 10 || r.OK != 0 || r.Err != nil || r.Mean() != 0 || r.Quantile(0.5) != 0 {
			t.Errorf("result %+v: want 10 refused in a second", r)
		}
	})
}

type deadEnd struct{ error }

func (d deadEnd) RoundTrip(*http.Request) (*http.Response, error) { return nil, d.error }

func TestFailuresAreCountedAndTheFirstIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		r := run(t, Load{Requests: 2, Transport: deadEnd{broken}})
		if r.Failed != 2 || !errors.Is(r.Err, broken) {
			t.Errorf("result %+v", r)
		}
		r = run(t, Load{Requests: 1, Transport: inProcess{http.NotFoundHandler()}})
		if r.Failed != 1 || r.Err == nil || r.Err.Error() != url+" answered 404: point the load at the path of a transcription" {
			t.Errorf("result %+v", r)
		}
	})
}

func TestALoadWithoutAnEndOrAURLIsAnError(t *testing.T) {
	for _, l := range []Load{{URL: url}, {URL: "http://[", Requests: 1}} {
		if _, err := l.Run(t.Context()); err == nil {
			t.Errorf("%+v: no error", l)
		}
	}
}

func TestQuantilesAreOfTheLatenciesSeen(t *testing.T) {
	r := Result{}
	for i := range 100 {
		r.Latencies = append(r.Latencies, time.Duration(i+1)*msec)
	}
	for q, want := range map[float64]time.Duration{0: msec, 0.5: 50 * msec, 0.95: 95 * msec, 1: 100 * msec} {
		if got := r.Quantile(q); got != want {
			t.Errorf("quantile %g is %v: want %v", q, got, want)
		}
	}
}

// The whole way over real sockets: every body arrives whole and in order.
func TestALoadOverLoopbackLeavesNoConnectionOpen(t *testing.T) {
	s := start(t, instant())
	var open atomic.Int64
	web := httptest.NewUnstartedServer(s)
	web.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			open.Add(1)
		case http.StateClosed:
			open.Add(-1)
		}
	}
	web.Start()
	defer web.Close()
	r := run(t, Load{URL: web.URL + "/asr", Clients: 4, Requests: 20, UploadRate: 4e6, Audio: []time.Duration{500 * msec}})
	if r.OK != 20 || r.Err != nil {
		t.Errorf("result %+v", r)
	}
	if fast := 16000 * time.Second / 4e6; r.Latencies[0] < fast {
		t.Errorf("a request took %v: its upload alone takes %v", r.Latencies[0], fast)
	}
	for deadline := time.Now().Add(5 * time.Second); open.Load() > 0; time.Sleep(msec) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are still open", open.Load())
		}
	}
}

func TestDrivingAScenarioPlaysItsStepsInOrderAndStopsWhenToldTo(t *testing.T) {
	web := httptest.NewServer(start(t, instant()))
	defer web.Close()
	s := Scenario{}
	for _, clients := range []int{1, 2, 4} {
		s.Steps = append(s.Steps, Step{Clients: clients, For: 30 * msec, Think: 5 * msec})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen []int
	results, err := s.Drive(ctx, web.URL+"/asr", func(step Step, r Result) {
		seen = append(seen, step.Clients)
		if r.OK == 0 || r.Err != nil {
			t.Errorf("%d clients: %d OK, %v", step.Clients, r.OK, r.Err)
		}
		if step.Clients == 2 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || len(results) != 2 || !slices.Equal(seen, []int{1, 2}) {
		t.Errorf("steps %v, %d results, %v: want 1 and 2, then an end", seen, len(results), err)
	}
	if results, err = s.Drive(t.Context(), web.URL+"/asr", nil); err != nil || len(results) != 3 {
		t.Errorf("%d results, %v: want 3", len(results), err)
	}
}

func TestBodiesArriveWholeAtAnyRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		want := SynthesizeWAV(time.Second, 5)
		for _, rate := range []float64{1, 49, 64000, 1e9} {
			r := running{Load: Load{UploadRate: rate}}
			got, err := io.ReadAll(r.upload(t.Context(), want))
			if err != nil || string(got) != string(want) {
				t.Errorf("at %g bytes/s: %d bytes, %v: want %d", rate, len(got), err, len(want))
			}
		}
	})
}
