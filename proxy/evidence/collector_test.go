package evidence

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

// A fake is a server whose page a test writes.
type fake struct {
	*httptest.Server
	page atomic.Value // func(w http.ResponseWriter)
}

func newFake(t *testing.T) *fake {
	f := &fake{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.page.Load().(func(http.ResponseWriter, *http.Request))(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fake) show(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	f.page.Store(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

func tei(n int) string {
	return fmt.Sprintf("te_request_duration_sum %v\nte_request_duration_count %d\nte_request_queue_duration_sum %v\nte_request_inference_duration_sum %v\nte_queue_size 4\n",
		float64(n)*0.1, n, float64(n)*0.06, float64(n)*0.04)
}

// rig is a collector with one source, asked when the test says so.
type rig struct {
	*Collector
	*testing.T
	answered map[string]uint64
	start    time.Time
}

func newRig(t *testing.T, o Options) *rig {
	t.Helper()
	r := &rig{T: t, answered: map[string]uint64{}}
	o.Answered = func() map[string]uint64 {
		m := make(map[string]uint64)
		for k, v := range r.answered {
			m[k] = v
		}
		return m
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r.Collector, r.start = c, time.Now()
	t.Cleanup(c.client.CloseIdleConnections)
	return r
}

func (r *rig) ask() { r.askOnce(r.Context(), r.sources[0]) }

func (r *rig) told(class string) classifier.Aggregate {
	r.Helper()
	list, _ := r.Between(class, r.start, time.Now())
	if len(list) != 1 {
		r.Fatalf("%d aggregates, want 1: %+v", len(list), list)
	}
	return list[0]
}

const work = "POST /asr"

func TestTheMeansOfWhatHappenedBetweenTwoReadings(t *testing.T) {
	f := newFake(t)
	r := newRig(t, Options{Metrics: []string{f.URL}})
	f.show("%s", tei(1000))
	r.answered[work] = 7
	r.ask()
	f.show("%s", tei(1100))
	r.answered[work], r.answered["GET /health"] = 107, 50
	r.ask()
	a := r.told(work)
	if a.Refused != "" || a.Requests != 100 || a.Server != "TEI" || a.Classes != 0 {
		t.Fatalf("%+v", a)
	}
	if q, w := a.Stages[classifier.StageQueue], a.Stages[classifier.StageForward]; q.Round(time.Microsecond) != 60*time.Millisecond || w.Round(time.Microsecond) != 40*time.Millisecond {
		t.Errorf("queue %v, forward %v", q, w)
	}
	if !a.Waiting.OK || a.Waiting.Value != 4 {
		t.Errorf("waiting %+v", a.Waiting)
	}
	if list, _ := r.Between("GET /health", r.start, time.Now()); len(list) > 0 {
		t.Errorf("probes get %+v", list)
	}
}

func TestTheJoinIsRefusedWhereOtherTrafficBypassesWeir(t *testing.T) {
	for _, c := range []struct {
		answered map[string]uint64
		refused  bool
		classes  int
	}{
		{map[string]uint64{work: 100}, false, 0},
		{map[string]uint64{work: 95}, false, 0},
		{map[string]uint64{work: 90}, true, 0},
		{map[string]uint64{work: 120}, true, 0},
		{map[string]uint64{work: 60, "POST /b": 40}, false, 2},
		{map[string]uint64{work: 100, "POST /b": 40}, false, 0},
		{map[string]uint64{work: 50, "POST /b": 10}, true, 0},
	} {
		f := newFake(t)
		r := newRig(t, Options{Metrics: []string{f.URL}})
		f.show("%s", tei(0))
		r.ask()
		f.show("%s", tei(100))
		r.answered = c.answered
		r.ask()
		a := r.told(work)
		if (a.Refused != "") != c.refused || a.Classes != c.classes {
			t.Errorf("%v: refused %q, %d classes; want %v, %d", c.answered, a.Refused, a.Classes, c.refused, c.classes)
		}
		if c.refused && !strings.Contains(a.Refused, "bypasses weir") {
			t.Errorf("the reason is %q", a.Refused)
		}
	}
}

// Whatever a page does, it costs no more than its own error.
func TestPagesThatMisbehave(t *testing.T) {
	for name, c := range map[string]struct {
		page func(http.ResponseWriter, *http.Request)
		want string
	}{
		"hangs": {func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "no whole answer within"},
		"drips": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "te_queue_size 1\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, "no whole answer within"},
		"is 10 MB": {func(w http.ResponseWriter, r *http.Request) {
			for range 10 << 10 {
				_, _ = io.WriteString(w, strings.Repeat("x_y 1\n", 170)+"x 1\n")
			}
		}, "larger than 4 MiB"},
		"is gone":       {func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) }, "404"},
		"changed names": {func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "te2_queue_size 1\n") }, "no metrics of a server"},
		"is a page":     {func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "<!doctype html>") }, "no metrics page"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.page.Store(c.page)
			r := newRig(t, Options{Metrics: []string{f.URL}})
			began := time.Now()
			r.ask()
			if d := time.Since(began); d > maxWait+2*time.Second {
				t.Errorf("it took %v", d)
			}
			st := r.Status()[0]
			if !strings.Contains(st.Error, c.want) || st.Source != f.URL {
				t.Errorf("status %+v, want %q", st, c.want)
			}
			if a := r.told(work); !strings.Contains(a.Refused, c.want) {
				t.Errorf("refused %q, want %q", a.Refused, c.want)
			}
		})
	}
}

func TestAServerThatStartsAnewHasNothingToSayForOnce(t *testing.T) {
	f := newFake(t)
	r := newRig(t, Options{Metrics: []string{f.URL}})
	f.show("%s", tei(1000))
	r.ask()
	f.show("%s", tei(10))
	r.answered[work] = 10
	r.ask()
	if a := r.told(work); !strings.Contains(a.Refused, "started anew") {
		t.Errorf("%+v", a)
	}
	again := time.Now()
	f.show("%s", tei(60))
	r.answered[work] = 60
	r.ask()
	r.start = again
	if a := r.told(work); a.Refused != "" || a.Requests != 50 {
		t.Errorf("%+v", a)
	}
}

func TestAPageThatFailsNowAndThenIsStillUsed(t *testing.T) {
	f := newFake(t)
	r := newRig(t, Options{Metrics: []string{f.URL}, Interval: time.Minute})
	f.show("%s", tei(0))
	r.ask()
	f.show("%s", tei(50))
	r.answered[work] = 50
	r.ask()
	f.show("<html>")
	r.ask()
	if a := r.told(work); a.Refused != "" || a.Requests != 50 {
		t.Errorf("%+v", a)
	}
}

func TestAutoFindsThePage(t *testing.T) {
	f := newFake(t)
	f.page.Store(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, tei(5))
	})
	r := newRig(t, Options{Metrics: []string{Auto}, Server: f.URL})
	r.ask()
	if st := r.Status()[0]; st.Error != "" || st.Server != "TEI" {
		t.Errorf("%+v", st)
	}
}

func TestAutoSaysThatNothingIsThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	r := newRig(t, Options{Metrics: []string{Auto}, Server: "http://" + l.Addr().String()})
	r.ask()
	if st := r.Status()[0]; !strings.Contains(st.Error, "weir doctor") {
		t.Errorf("%+v", st)
	}
}

func TestTheDevicesLoadIsTheMeanOfTheReadings(t *testing.T) {
	f := newFake(t)
	r := newRig(t, Options{Devices: []string{f.URL + "#gpu=0"}})
	for _, busy := range []int{80, 100} {
		f.show("DCGM_FI_DEV_GPU_UTIL{gpu=\"0\"} %d\nDCGM_FI_DEV_GPU_UTIL{gpu=\"1\"} 3\n", busy)
		r.ask()
	}
	list, load := r.Between(work, r.start, time.Now())
	if len(list) != 0 || len(load) != 1 || load[0].Busy != (classifier.Gauge{Value: 0.9, OK: true}) || load[0].Source != "DCGM exporter at "+f.URL+"#gpu=0" {
		t.Errorf("%+v %+v", list, load)
	}
}

func TestAddressesThatCannotBeMeant(t *testing.T) {
	for _, c := range []struct {
		address string
		device  bool
		ok      bool
	}{
		{"http://h:8002/metrics", false, true}, {"https://h/metrics#a=b,c=d", true, true}, {"auto", false, true}, {"nvml", true, true}, {"nvidia-smi", true, true},
		{"auto", true, false}, {"nvml", false, false}, {"h:8002", false, false}, {"http://h#gpu", true, false}, {"ftp://h/", false, false}, {"http://", false, false},
	} {
		if err := Check(c.address, c.device); (err == nil) != c.ok {
			t.Errorf("%q, device %v: %v", c.address, c.device, err)
		}
	}
}

func TestRunEndsWithItsContextAndLeavesNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	f := newFake(t)
	f.page.Store(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	c, err := New(Options{Metrics: []string{f.URL, "auto"}, Devices: []string{f.URL}, Server: f.URL})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { c.Run(ctx); close(done) }()
	cancel()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("Run goes on")
	}
	f.Close()
	for range 200 {
		if runtime.NumGoroutine() <= before+1 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}
