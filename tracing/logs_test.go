package tracing

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	logspb "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
)

// bodies is an OTLP/HTTP backend that keeps what it is sent, by path.
type bodies struct {
	*httptest.Server
	mu  sync.Mutex
	got map[string][][]byte
}

func newBodies(t *testing.T) *bodies {
	t.Helper()
	b := &bodies{got: make(map[string][][]byte)}
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := r.Body
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		all, err := io.ReadAll(body)
		if err != nil {
			t.Error(err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.got[r.URL.Path] = append(b.got[r.URL.Path], all)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	t.Cleanup(b.Close)
	return b
}

func (b *bodies) one(t *testing.T, path string, m proto.Message) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.got[path]) == 0 {
		t.Fatalf("nothing came to %s", path)
	}
	if err := proto.Unmarshal(b.got[path][0], m); err != nil {
		t.Fatal(err)
	}
}

func textOf(kv []*commonpb.KeyValue, key string) string {
	for _, a := range kv {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

func TestAChangeOfVerdictIsALogRecord(t *testing.T) {
	b := newBodies(t)
	l, err := NewLogs(t.Context(), Options{Version: "1", Getenv: environment("OTEL_EXPORTER_OTLP_ENDPOINT="+b.URL, "OTEL_SERVICE_NAME=asr-weir")})
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	l.VerdictChanged(classifier.Verdict{Class: "POST /asr", Cause: classifier.Queue, Evidence: []string{"61 % waits", "the device idles"}, Advice: "raise it", Since: at}, classifier.Healthy)
	if err := l.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	var got logspb.ExportLogsServiceRequest
	b.one(t, "/v1/logs", &got)
	res := got.ResourceLogs[0]
	r := res.ScopeLogs[0].LogRecords[0]
	if r.EventName != "weir.verdict.changed" || r.SeverityText != "WARN" || r.TimeUnixNano != uint64(at.UnixNano()) || r.Body.GetStringValue() != "POST /asr: queue. 61 % waits; the device idles" {
		t.Errorf("the record is %v", r)
	}
	for key, want := range map[string]string{"weir.class": "POST /asr", "weir.verdict.cause": "queue", "weir.verdict.previous": "healthy", "weir.verdict.advice": "raise it"} {
		if v := textOf(r.Attributes, key); v != want {
			t.Errorf("%s is %q: want %q", key, v, want)
		}
	}
	if v := textOf(res.Resource.Attributes, "service.name"); v != "asr-weir" {
		t.Errorf("service.name is %q", v)
	}
}

func TestNothingIsSentWhereNothingIsAskedFor(t *testing.T) {
	for name, env := range map[string][]string{
		"no endpoint": {},
		"none":        {"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_LOGS_EXPORTER=none"},
		"disabled":    {"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_SDK_DISABLED=true"},
	} {
		l, err := NewLogs(t.Context(), Options{Getenv: environment(env...)})
		if l != nil || err != nil {
			t.Errorf("%s: %v, %v", name, l, err)
		}
	}
	var none *Logs
	none.VerdictChanged(classifier.Verdict{}, "")
	if err := none.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestMetricsGoOutByOTLPToo(t *testing.T) {
	b := newBodies(t)
	m := testMetrics(t, Options{Getenv: environment("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT="+b.URL+"/v1/metrics", "OTEL_EXPORTER_OTLP_COMPRESSION=gzip")})
	m.Observe(request())
	if err := m.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	var got metricspb.ExportMetricsServiceRequest
	b.one(t, "/v1/metrics", &got)
	names := map[string]string{}
	for _, s := range got.ResourceMetrics[0].ScopeMetrics {
		for _, m := range s.Metrics {
			names[m.Name] = m.Unit
		}
	}
	for name, unit := range map[string]string{"http.server.request.duration": "s", "weir.queue.wait.duration": "s", "weir.seconds": "s", "weir.fit": "1", "weir.queue.depth": "{request}", "weir.transfer.io": "By"} {
		if names[name] != unit {
			t.Errorf("%s has the unit %q: want %q", name, names[name], unit)
		}
	}
}
