package proxy

import (
	"context"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestTheProbeMeasuresAnyAnswerAndNothingElse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if r.URL.Path != "/health" || r.Header.Get("User-Agent") != "weir-probe" {
			t.Errorf("asked for %s by %s", r.URL.Path, r.Header.Get("User-Agent"))
		}
		http.NotFound(w, r)
	})}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	p := newProbe("/health", "tcp", l.Addr().String(), func() int { return 7 })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	r := <-p.results
	if r.inflight != 7 || r.took <= 0 || r.took > 10*time.Second || asked.Load() == 0 {
		t.Errorf("%+v after %d questions", r, asked.Load())
	}
	cancel()
	running.Wait()

	if away := newProbe("/health", "tcp", "127.0.0.1:1", func() int { return 0 }); away.ask(t.Context()) {
		t.Error("a server that is away answered")
	}
	var none *probe
	none.run(t.Context())
	none.take(func(time.Duration, int) { t.Error("nothing was probed") })
	if newProbe("", "tcp", "", nil) != nil {
		t.Error("an empty path makes a probe")
	}
}
