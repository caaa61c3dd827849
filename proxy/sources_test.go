package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// startSidecar runs a whole weir until the test ends.
func startSidecar(t *testing.T, cfg Config) *Sidecar {
	t.Helper()
	cfg.Listen, cfg.Admin = "127.0.0.1:0", "127.0.0.1:0"
	s, err := NewSidecar(t.Context(), cfg, SidecarOptions{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// modelServer is a server that says nothing in its answers and all on its
// metrics page, as vLLM does: it has half of each request in a queue.
type modelServer struct {
	n       atomic.Int64
	bad     atomic.Bool // the page hangs
	service time.Duration
}

func (m *modelServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/metrics" {
		if m.bad.Load() {
			<-r.Context().Done()
			return
		}
		n := float64(m.n.Load())
		half := n * m.service.Seconds() / 2
		fmt.Fprintf(w, "vllm:num_requests_running 4\nvllm:e2e_request_latency_seconds_sum %v\nvllm:e2e_request_latency_seconds_count %v\n"+
			"vllm:request_queue_time_seconds_sum %v\nvllm:request_inference_time_seconds_sum %v\nDCGM_FI_DEV_GPU_UTIL{gpu=\"0\"} 95\n", 2*half, n, half, half)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	time.Sleep(m.service) // the work
	m.n.Add(1)
	_, _ = io.WriteString(w, `{"text":"one"}`)
}

type verdictsJSON struct {
	Classes []classJSON
	Sources []struct{ Source, Server, Error string }
}

func (s *Sidecar) verdictsJSON(t *testing.T) (v verdictsJSON) {
	t.Helper()
	res, err := http.Get("http://" + s.AdminAddr() + "/api/verdict")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// load sends requests from n clients until stop.
func load(t *testing.T, addr string, n int) (stop func()) {
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				res, err := http.Post("http://"+addr+"/asr", "audio/wav", strings.NewReader("pcm"))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

func TestAServersMetricsFillTheReportAndAHangingPageCostsNothing(t *testing.T) {
	m := &modelServer{service: 20 * time.Millisecond}
	addr := serveHTTP(t, m.ServeHTTP)
	cfg := DefaultConfig()
	cfg.Server, cfg.Window = "http://"+addr, seconds(1)
	cfg.ServerMetrics, cfg.Device = "auto", "http://"+addr+"/metrics"
	s := startSidecar(t, cfg)
	stop := load(t, s.Addr(), 4)
	defer func() { stop() }()
	r := &rig{T: t}
	class := func() *classJSON {
		v := s.verdictsJSON(t)
		for i := range v.Classes {
			if v.Classes[i].Class == "POST /asr" {
				return &v.Classes[i]
			}
		}
		return nil
	}
	r.eventually(func() bool {
		c := class()
		return c != nil && c.StagesFrom == "vLLM at http://"+addr+"/metrics" && c.Device != nil
	}, "the stages come from the metrics")
	c := class()
	if q, f := c.Shares.ServerQueue, c.Shares.Forward; q < 0.35 || q > 0.55 || f < 0.35 || f > 0.55 || c.Timed == 0 {
		t.Errorf("shares %+v, %d timed", c.Shares, c.Timed)
	}
	if c.Device.Busy < 0.949 || c.Device.Busy > 0.951 {
		t.Errorf("device %+v", c.Device)
	}
	m.bad.Store(true)
	r.eventually(func() bool {
		v := s.verdictsJSON(t)
		return len(v.Sources) == 2 && strings.Contains(v.Sources[0].Error, "no whole answer")
	}, "the page is told to hang")
	if c := class(); c == nil || c.Mean > 100 {
		t.Errorf("requests suffer: %+v", c)
	}
}
