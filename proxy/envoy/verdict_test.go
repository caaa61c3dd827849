//go:build parts

// These tests play loads in real time: they carry the tag because the race
// detector, under which all others run, makes the machine too slow for them.

package envoy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"weir/classifier"
	"weir/examples/asrsim"
	"weir/proxy"
)

// ways bring the scenario's requests to the simulated server past weir, each
// with the scenario's limit in its own place: in weir, or in Envoy's pool.
var ways = map[string]func(*testing.T, asrsim.Scenario, string) (*rig, string){
	"serve": func(t *testing.T, s asrsim.Scenario, server string) (*rig, string) {
		r := newRig(t, ladder(s, true), func(c *proxy.Config) { c.Listen, c.Server = "127.0.0.1:0", server })
		return r, "http://" + r.side.Addr()
	},
	"ext_proc": func(t *testing.T, s asrsim.Scenario, server string) (*rig, string) {
		r := newRig(t, ladder(s, true))
		_, url := behind(r, server, headersOnly())
		return r, url
	},
	"access log": func(t *testing.T, s asrsim.Scenario, server string) (*rig, string) {
		r := newRig(t, ladder(s, false))
		e := newFake(t, r.conn, server)
		e.log, e.pool = newAccessLog(t, r.conn), newPool(s.MaxConcurrency, s.MaxQueueSize)
		h := httptest.NewServer(e)
		t.Cleanup(h.Close)
		return r, h.URL
	},
}

func ladder(s asrsim.Scenario, limited bool) func(*proxy.Config) {
	return func(c *proxy.Config) {
		c.Window = proxy.Duration(time.Second)
		if limited {
			c.MaxConcurrency, c.MaxQueueSize = s.MaxConcurrency, s.MaxQueueSize
		}
	}
}

// The same overload gives the same verdict, whichever way weir sees it.
func TestOneVerdictWhicheverWay(t *testing.T) {
	type seen struct {
		name, way string
		v         classifier.Verdict
		err       error
	}
	results := make(chan seen, 2*len(ways))
	for _, name := range []string{"queue", "compute"} {
		s, err := asrsim.FindScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		s.Steps = []asrsim.Step{{Clients: 1, For: 4 * time.Second}, {Clients: 4, For: 2 * time.Second}, {Clients: 16, For: 6 * time.Second}}
		for way, open := range ways {
			r, url := open(t, s, simulate(t, s.Server))
			go func() {
				v, err := watch(t.Context(), r, s, url+"/asr")
				results <- seen{name, way, v, err}
			}()
		}
	}
	shares := make(map[string]float64)
	for range 2 * len(ways) {
		one := <-results
		if one.err != nil {
			t.Errorf("%s by %s: %v", one.name, one.way, one.err)
		}
		shares[one.name+" "+one.way] = one.v.Report.Shares.Waiting()
	}
	t.Logf("share of waiting: %v", shares)
	for what, share := range shares {
		name, _, _ := strings.Cut(what, " ")
		if d := share - shares[name+" serve"]; d > 0.15 || d < -0.15 {
			t.Errorf("%s: requests waited %.2f of their time, by serve %.2f", what, share, shares[name+" serve"])
		}
	}
}

// watch drives the load until weir shows the scenario's cause under its last
// step, or soon after.
func watch(ctx context.Context, r *rig, s asrsim.Scenario, url string) (v classifier.Verdict, err error) {
	done := make(chan error, 1)
	go func() { _, err := s.Drive(ctx, url, nil); done <- err }()
	var shown []classifier.Cause
	for range 180 {
		time.Sleep(100 * time.Millisecond)
		all := r.side.Verdicts()
		if len(all) == 0 {
			continue
		}
		v = all[0]
		if !slices.Contains(shown, v.Cause) {
			shown = append(shown, v.Cause)
		}
		if string(v.Cause) == s.Name && v.Report.Inflight+v.Report.Waiting > 10 {
			return v, <-done
		}
	}
	return v, fmt.Errorf("the verdict was never %s; shown were %v, at last %+v", s.Name, shown, v)
}

func simulate(t *testing.T, c asrsim.Config) string {
	t.Helper()
	sim, err := asrsim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: sim}
	go func() { _ = h.Serve(l) }()
	t.Cleanup(func() { h.Close(); sim.Close() })
	return "http://" + l.Addr().String()
}
