package envoy

import (
	"encoding/base64"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	orca "github.com/cncf/xds/go/xds/data/orca/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
	"weir/proxy"
)

func TestEveryFormOfALoadReport(t *testing.T) {
	want := &orca.OrcaLoadReport{ApplicationUtilization: 1.5, CpuUtilization: 0.25, MemUtilization: 0.5, RpsFractional: 10, Eps: 1,
		NamedMetrics: map[string]float64{"queue_ms": 12.5}, Utilization: map[string]float64{"gpu": 0.75}, RequestCost: map[string]float64{"tokens": 7}}
	raw, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	const pairs = "application_utilization=1.5,cpu_utilization=0.25,mem_utilization=0.5,rps_fractional=10,eps=1,named_metrics.queue_ms=12.5,utilization.gpu=0.75,request_cost.tokens=7"
	for _, c := range []struct{ name, value string }{
		{loadHeader, "TEXT " + pairs},
		{loadHeader, "TEXT " + strings.ReplaceAll(pairs, ",", ", ")},
		{loadHeader, pairs},
		{loadHeader, strings.ReplaceAll(pairs, "=", ":")},
		{loadHeader, `JSON {"application_utilization": 1.5, "cpuUtilization": 0.25, "mem_utilization": 0.5, "rps_fractional": 10, "eps": 1, "named_metrics": {"queue_ms": 12.5}, "utilization": {"gpu": 0.75}, "request_cost": {"tokens": 7}}`},
		{loadHeader, "BIN " + base64.StdEncoding.EncodeToString(raw)},
		{loadHeaderBin, base64.StdEncoding.EncodeToString(raw)},
		{loadHeaderBin, base64.RawStdEncoding.EncodeToString(raw)},
	} {
		got, err := parseLoad(c.name, c.value)
		if err != nil || !proto.Equal(got, want) {
			t.Errorf("%s: %s\n%v, %v", c.name, c.value, got, err)
		}
	}
}

func TestBadLoadReportsAreRefused(t *testing.T) {
	for _, value := range []string{
		"", "TEXT", "TEXT cpu_utilization", "TEXT cpu_utilization=x", "TEXT cpu_utilization=1,cpu_utilization=2", "TEXT cpu_utilization=-1",
		"TEXT cpu_utilization=NaN", "TEXT mem_utilization=Inf", "TEXT nonsense=1", "TEXT named_metrics.=1", "TEXT other.x=1", "TEXT named_metrics.x=NaN",
		"JSON", "JSON {", `JSON {"cpu": 1}`, `JSON {"cpu_utilization": -1}`, "BIN", "BIN !", "BIN /w==", "XML <a/>", strings.Repeat("a", maxLoadReport+1),
	} {
		if r, err := parseLoad(loadHeader, value); err == nil && proto.Size(r) > 0 {
			t.Errorf("%.60q was read as %v", value, r)
		} else if err == nil && value != "BIN" {
			t.Errorf("%.60q was taken", value)
		}
	}
}

func FuzzLoad(f *testing.F) {
	for _, v := range []string{"TEXT cpu_utilization=0.5", `JSON {"named_metrics": {"a_ms": 1}}`, "BIN AAAA", "a:1"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, value string) {
		for _, name := range []string{loadHeader, loadHeaderBin} {
			r, err := parseLoad(name, value)
			if err != nil {
				continue
			}
			if !(r.ApplicationUtilization >= 0) || math.IsInf(r.CpuUtilization, 0) || len(r.NamedMetrics) > maxLoadMetrics {
				t.Errorf("%q: %v", value, r)
			}
			var o classifier.Observation
			takeStages(&o, nil, r, false)
		}
	})
}

func text(name, value string) *corev3.HeaderValue {
	return &corev3.HeaderValue{Key: name, RawValue: []byte(value)}
}

func TestStagesInALoadReport(t *testing.T) {
	r := newRig(t)
	s := openStream(t, r)
	s.ask(requestHeaders())
	s.ask(responseHeaders(true, text(loadHeader, "TEXT named_metrics.queue_wait_ms=0.25,named_metrics.forward_us=10,named_metrics.kv_cache=3,named_metrics.odd_ms=1"),
		text("server-timing", "forward;dur=0.125")))
	_ = s.CloseSend()
	o := r.records(1)[0]
	if d, _ := o.In(classifier.StageQueue); d != 250*time.Microsecond {
		t.Errorf("queue %v, want 250 us", d)
	}
	if d, _ := o.In(classifier.StageForward); d != 125*time.Microsecond {
		t.Errorf("forward %v: Server-Timing told it, and counts alone", d)
	}
	if st := r.state().Load; st.Reports != 1 || st.Last.GetNamedMetrics()["kv_cache"] != 3 {
		t.Errorf("state %+v", st)
	}
}

func setHeaders(m []*corev3.HeaderValueOption) map[string]string {
	fields := make(map[string]string)
	for _, h := range m {
		fields[h.Header.Key] = string(h.Header.RawValue)
	}
	return fields
}

func TestWeirReportsTheLoadOnlyIfAskedAndWhereNobodyElseDoes(t *testing.T) {
	on := func(c *proxy.Config) { c.EnvoyORCA = true }
	for _, c := range []struct {
		name   string
		change []func(*proxy.Config)
		server string // its own report
		want   string
	}{
		{"off", []func(*proxy.Config){limits(4, 4, 0)}, "", ""},
		{"no limit", []func(*proxy.Config){on}, "", ""},
		{"on", []func(*proxy.Config){on, limits(4, 4, 0)}, "", "TEXT application_utilization=0.2500,named_metrics.weir_queue_wait_ms="},
		{"the server reports", []func(*proxy.Config){on, limits(4, 4, 0)}, "TEXT cpu_utilization=0.1", ""},
		{"the server reports nonsense", []func(*proxy.Config){on, limits(4, 4, 0)}, "TEXT nonsense", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.change...)
			s := openStream(t, r)
			s.ask(requestHeaders())
			var own []*corev3.HeaderValue
			if c.server != "" {
				own = append(own, text(loadHeader, c.server))
			}
			a := s.ask(responseHeaders(false, own...))
			got, ok := setHeaders(a.GetResponseHeaders().GetResponse().GetHeaderMutation().GetSetHeaders())[loadHeader]
			if !strings.HasPrefix(got, c.want) || ok != (c.want != "") {
				t.Errorf("report %q, want %q", got, c.want)
			}
			if ok {
				if _, err := parseLoad(loadHeader, got); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestGRPCGetsTheLoadInItsTrailerAndNoSecondOne(t *testing.T) {
	r := newRig(t, limits(2, 4, 0), func(c *proxy.Config) { c.EnvoyORCA = true })
	ask := func(own ...*corev3.HeaderValue) (string, bool) {
		s := openStream(t, r)
		s.ask(requestHeaders(text("content-type", "application/grpc")))
		if h := s.ask(responseHeaders(false)).GetResponseHeaders().GetResponse().GetHeaderMutation(); h != nil {
			t.Errorf("head was changed: %v", h)
		}
		a := s.ask(responseTrailers(own...))
		v, ok := setHeaders(a.GetResponseTrailers().GetHeaderMutation().GetSetHeaders())[loadHeaderBin]
		return v, ok
	}
	v, _ := ask(text("grpc-status", "0"))
	// The place was given back before the trailers were answered.
	if l, err := parseLoad(loadHeaderBin, v); err != nil || l.ApplicationUtilization != 0 || l.NamedMetrics["weir_queue_depth"] != 0 {
		t.Errorf("%v, %v", l, err)
	}
	if v, ok := ask(text(loadHeaderBin, "")); ok {
		t.Errorf("beside the server's own report, %q", v)
	}
	if v, ok := ask(); ok {
		t.Errorf("after a server's report, %q", v)
	}
}

func TestUtilizationPassesOneBeforeAnythingIsRefused(t *testing.T) {
	r := newRig(t, limits(1, 4, 0), func(c *proxy.Config) { c.EnvoyORCA = true })
	s := newServer(t)
	_, url := behind(r, s.URL, headersOnly())
	first := async(t.Context(), url)
	call := s.next(t)
	second := async(t.Context(), url)
	r.eventually(func() bool { return r.side.Gate().State().Waiting == 1 }, "one waits")
	call.begin()
	call.finish()
	if v := (<-first).header.Get(http.CanonicalHeaderKey(loadHeader)); !strings.HasPrefix(v, "TEXT application_utilization=2.0000,") {
		t.Errorf("report %q, want twice the limit", v)
	}
	call = s.next(t)
	call.begin()
	call.finish()
	<-second
}
