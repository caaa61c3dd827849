package tracing

import (
	"reflect"
	"strings"
	"testing"

	"weir/classifier"
)

// The forms are those of Triton (server/src/orca_http.cc) and vLLM, and of gRPC
// proposal A51.
func TestLoadMetricsInTheirForms(t *testing.T) {
	waiting, cache := classifier.LoadMetric{Name: "named_metrics.num_requests_waiting", Value: 3}, classifier.LoadMetric{Name: "named_metrics.kv_cache_usage_perc", Value: 0.4}
	for value, want := range map[string][]classifier.LoadMetric{
		"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3": {cache, waiting},
		"text named_metrics.kv_cache_usage_perc:0.4,named_metrics.num_requests_waiting:3":  {cache, waiting},
		`JSON {"named_metrics":{"num_requests_waiting":3,"kv_cache_usage_perc":0.4}}`:      {cache, waiting},
		`JSON {"cpu_utilization":0.5,"named_metrics":"x"}`:                                 {{Name: "cpu_utilization", Value: 0.5}},
		"TEXT a=1, a=2, b=NaN, c=, d, =5, e f=1, g=-1":                                     {{Name: "a", Value: 1}},
		"BIN CZqZmZmZmbk/": nil,
		"JSON {":           nil,
		"":                 nil,
	} {
		var o classifier.Observation
		mustIngest(t).Header(&o, []byte("Endpoint-Load-Metrics"), []byte(value))
		if !reflect.DeepEqual(o.Load, want) {
			t.Errorf("%q: %+v, want %+v", value, o.Load, want)
		}
		if len(o.Timings) > 0 || o.Source != "" {
			t.Errorf("%q made timings", value)
		}
	}
}

func FuzzOrca(f *testing.F) {
	f.Add("TEXT a=1, b:2")
	f.Add(`JSON {"named_metrics":{"a":1}}`)
	f.Fuzz(func(t *testing.T, value string) {
		var o classifier.Observation
		in, _ := NewIngest(nil)
		in.Header(&o, []byte(orcaHeader), []byte(value))
		if len(o.Load) > maxLoad {
			t.Errorf("%d metrics", len(o.Load))
		}
		for _, l := range o.Load {
			if l.Name == "" || strings.ContainsAny(l.Name, " ,;=\r\n") || !(l.Value >= 0) {
				t.Errorf("%+v", l)
			}
		}
	})
}
