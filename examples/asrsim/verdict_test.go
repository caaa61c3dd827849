package asrsim

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// witness is a stand-in for the proxy: a gate that stamps a record of each
// request and adds it to a window.
type witness struct {
	next   http.Handler
	places chan struct{} // nil: no limit
	ingest *tracing.Ingest

	mu                sync.Mutex
	waiting, inflight int
	window            classifier.Window
}

func (g *witness) enter(o *classifier.Observation) {
	g.mu.Lock()
	o.Waiting, o.Limit = g.waiting, cap(g.places)
	g.waiting++
	g.mu.Unlock()
	if g.places != nil {
		g.places <- struct{}{}
	}
	g.mu.Lock()
	g.waiting--
	g.inflight++
	o.Inflight, o.Dequeued = g.inflight, time.Now()
	g.mu.Unlock()
}

func (g *witness) leave(o *classifier.Observation) {
	if g.places != nil {
		<-g.places
	}
	g.mu.Lock()
	g.inflight--
	g.window.Add(o)
	g.mu.Unlock()
}

type stampedBody struct {
	io.ReadCloser
	end *time.Time
}

func (b stampedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF && b.end.IsZero() {
		*b.end = time.Now()
	}
	return n, err
}

func (g *witness) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o := classifier.Observation{Class: "POST /asr", Method: "POST", Enqueued: time.Now(), BytesIn: r.ContentLength}
	g.enter(&o)
	r.Body = stampedBody{r.Body, &o.Sent}
	a := httptest.NewRecorder()
	g.next.ServeHTTP(a, r)
	o.Responded, o.Status = time.Now(), a.Code
	if o.Sent.IsZero() {
		o.Sent = o.Responded
	}
	for name, values := range a.Header() {
		for _, v := range values {
			g.ingest.Header(&o, []byte(name), []byte(v))
			w.Header().Add(name, v)
		}
	}
	o.Done = time.Now()
	g.ingest.Finish(&o)
	w.WriteHeader(a.Code)
	_, _ = w.Write(a.Body.Bytes())
	g.leave(&o)
}

// verdicts plays the steps for 8 s each and classifies each window.
func verdicts(t *testing.T, s Scenario) (all []classifier.Verdict) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server, err := New(s.Server)
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		in, err := tracing.NewIngest(nil)
		if err != nil {
			t.Fatal(err)
		}
		g := &witness{next: server, ingest: in, window: classifier.Window{Length: Window}}
		if s.MaxConcurrency > 0 {
			g.places = make(chan struct{}, s.MaxConcurrency)
		}
		stop := make(chan struct{})
		var ticker sync.WaitGroup
		ticker.Go(func() {
			tick := time.NewTicker(Window)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case now := <-tick.C:
					g.mu.Lock()
					reports := g.window.Cut(now)
					g.mu.Unlock()
					for _, r := range reports {
						all = append(all, classifier.Classify(r, classifier.DefaultThresholds()))
					}
				}
			}
		})
		for _, step := range s.Steps {
			l := step.load("http://asr.example/asr")
			l.Transport = inProcess{g}
			if _, err := l.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		close(stop)
		ticker.Wait()
	})
	return all
}

func TestTheClassifierNamesTheCauseOfEachScenario(t *testing.T) {
	for _, s := range Scenarios() {
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			all := verdicts(t, s)
			for i, v := range all {
				t.Log(i, v.Cause, v.Confidence)
			}
			for _, v := range all[len(all)-4:] {
				if string(v.Cause) != s.Name || v.Confidence < 0.5 {
					t.Errorf("verdict %s (%.2f): want %s%s", v.Cause, v.Confidence, s.Name, lines(v))
				}
			}
			if v := all[len(all)-2]; !t.Failed() {
				t.Log(v.Confidence, lines(v), "\n", v.Advice)
			}
		})
	}
}

func lines(v classifier.Verdict) (s string) {
	for _, e := range append(append([]string{}, v.Evidence...), v.Warnings...) {
		s += "\n  - " + e
	}
	return s + fmt.Sprintf("\n  %+v", v.Report)
}
