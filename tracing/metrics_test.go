package tracing

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

func still(n int64) func() int64 { return func() int64 { return n } }

func testMetrics(t testing.TB, o Options) *Metrics {
	t.Helper()
	if o.Getenv == nil {
		o.Getenv = func(string) string { return "" }
	}
	o.Server = "127.0.0.1:8000"
	m, err := NewMetrics(context.Background(), o, Gauges{
		Waiting: still(3), Inflight: still(2), Limit: still(2), QueueLimit: still(64), Abandoned: still(5), DroppedRecords: still(7), DroppedSpans: still(11),
		OldestWaiting:  func() time.Duration { return 1500 * time.Millisecond },
		OldestInflight: func() time.Duration { return 2500 * time.Millisecond },
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func scrape(t *testing.T, m *Metrics, accept string) string {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, r)
	b, _ := io.ReadAll(w.Body)
	return string(b)
}

// lines returns the scrape's lines of weir's own and HTTP's metrics.
func lines(text string) (all []string) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "weir_") || strings.HasPrefix(line, "http_") {
			all = append(all, strings.TrimSpace(line))
		}
	}
	return all
}

func TestMetricNames(t *testing.T) {
	m := testMetrics(t, Options{Version: "1.2.3"})
	o := request()
	m.Observe(o)
	refused := &classifier.Observation{Class: "POST /asr", Route: "/asr", Method: "POST", Status: 503, Outcome: classifier.Rejected, Error: "queue_full", Enqueued: o.Enqueued, Done: o.Enqueued.Add(time.Millisecond)}
	m.Observe(refused)
	tunnel := &classifier.Observation{Class: "GET /ws", Route: "/ws", Method: "GET", Status: 101, Upgraded: true, Enqueued: o.Enqueued, Dequeued: o.Enqueued, Done: o.Enqueued.Add(time.Minute)}
	m.Observe(tunnel)
	m.Verdicts([]classifier.Verdict{{Class: "POST /asr", Cause: classifier.Queue, Report: classifier.Report{
		Shares: classifier.Shares{Queue: 0.5, ServerQueue: 0.25, Transfer: 0.125}, Forward: classifier.Line{Slope: 2 * time.Millisecond, OK: true}}}})
	text := scrape(t, m, "text/plain")
	for _, want := range []string{
		`http_server_request_duration_seconds_count{http_request_method="POST",http_response_status_code="200",http_route="/v1/audio/transcriptions",network_protocol_version="1.1",url_scheme="http"} 1`,
		`http_server_request_duration_seconds_count{error_type="queue_full",http_request_method="POST",http_response_status_code="503",http_route="/asr",url_scheme="http"} 1`,
		`http_client_request_duration_seconds_sum{http_request_method="POST",http_response_status_code="200",http_route="/v1/audio/transcriptions",network_protocol_version="1.1",server_address="127.0.0.1",server_port="8000",url_scheme="http"} 0.301`,
		`weir_queue_wait_duration_seconds_bucket{http_route="/v1/audio/transcriptions",le="0.25"} 1`,
		`weir_queue_wait_duration_seconds_sum{http_route="/v1/audio/transcriptions"} 0.1`,
		`weir_stage_duration_seconds_sum{http_route="/v1/audio/transcriptions",weir_stage="forward"} 0.2`,
		`weir_stage_duration_seconds_sum{http_route="/v1/audio/transcriptions",weir_stage="transfer"} 0.006`,
		`weir_transfer_io_bytes_total{weir_transfer_direction="h2d"} 480000`,
		`weir_transfer_io_bytes_total{weir_transfer_direction="d2h"} 4000`,
		`weir_batch_size_bucket{le="8"} 1`,
		`weir_audio_duration_seconds_total 12.5`,
		`weir_observations_total{weir_timing_source="header"} 1`,
		`weir_observations_total{weir_timing_source="none"} 2`,
		`weir_requests_rejected_total{error_type="queue_full"} 1`,
		`weir_stream_duration_seconds_sum{http_route="/ws"} 60`,
		`weir_seconds_total{weir_class="POST /v1/audio/transcriptions",weir_part="queue"} 0.1`,
		`weir_seconds_total{weir_class="POST /v1/audio/transcriptions",weir_part="total"} 0.401`,
		`weir_fit_total{weir_class="POST /v1/audio/transcriptions",weir_fit_term="w"} 0.125`,
		`weir_fit_total{weir_class="POST /v1/audio/transcriptions",weir_fit_term="wxx"} 8`,
		`weir_fit_total{weir_class="POST /v1/audio/transcriptions",weir_fit_term="wxy"} 0.2`,
		`weir_queue_depth 3`, `weir_queue_limit 64`, `weir_concurrency_used 2`, `weir_concurrency_limit 2`,
		`weir_queue_oldest_age_seconds 1.5`, `weir_concurrency_oldest_age_seconds 2.5`, `weir_requests_abandoned_total 5`,
		`weir_telemetry_dropped_total{error_type="queue_full",weir_signal="records"} 7`,
		`weir_telemetry_dropped_total{error_type="export",weir_signal="traces"} 11`,
		`weir_window_queue_wait_ratio{weir_class="POST /asr"} 0.75`,
		`weir_window_transfer_ratio{weir_class="POST /asr"} 0.125`,
		`weir_window_forward_slope_seconds{weir_class="POST /asr"} 0.002`,
		`weir_verdict{weir_class="POST /asr",weir_verdict_cause="queue"} 1`,
		`weir_verdict{weir_class="POST /asr",weir_verdict_cause="healthy"} 0`,
		`weir_build_info{version="1.2.3"} 1`,
	} {
		if !slices.Contains(lines(text), want) {
			name, _, _ := strings.Cut(want, "{")
			t.Errorf("no series\n  %s\namong\n  %s", want, strings.Join(slices.DeleteFunc(lines(text), func(s string) bool { return !strings.HasPrefix(s, name) }), "\n  "))
		}
	}
	for _, bad := range []string{"_seconds_seconds", "_ratio_ratio", "otel_scope", "weir_verdict_ratio"} {
		if strings.Contains(text, bad) {
			t.Errorf("the scrape has %s", bad)
		}
	}
	for _, also := range []string{"go_goroutines ", "process_resident_memory_bytes ", "target_info{"} {
		if !strings.Contains(text, also) {
			t.Errorf("the scrape has no %s", also)
		}
	}
}

func TestExemplarsAreInTheOpenMetricsAnswerOnly(t *testing.T) {
	m := testMetrics(t, Options{})
	o := request()
	m.Observe(o)
	id := fmt.Sprintf(`trace_id="%x"`, o.TraceID)
	if !strings.Contains(scrape(t, m, "application/openmetrics-text; version=1.0.0"), id) {
		t.Error("no exemplar in the OpenMetrics answer")
	}
	if strings.Contains(scrape(t, m, "text/plain"), id) {
		t.Error("an exemplar in the text answer")
	}
}

// What clients and servers choose must not become series without end.
func TestTheNumberOfSeriesIsBounded(t *testing.T) {
	m := testMetrics(t, Options{})
	observe := func(from, to int) int {
		for i := from; i < to; i++ {
			o := request()
			o.Host, o.Client, o.Target, o.UserAgent, o.Model = fmt.Sprint("h", i), fmt.Sprint("c", i), fmt.Sprint("/", i), fmt.Sprint("a", i), fmt.Sprint("m", i)
			o.Status, o.Class, o.Method = 100+i%900, fmt.Sprint("POST /", i), "POST"
			o.Timings = []classifier.Timing{{Name: fmt.Sprint("copy", i), Stage: classifier.StageTransfer, Dur: 1, Bytes: 1}}
			m.Observe(o)
		}
		return len(lines(scrape(t, m, "text/plain")))
	}
	before := observe(0, 3000)
	if after := observe(3000, 10000); after != before {
		t.Errorf("%d series, then %d", before, after)
	}
}

var value = regexp.MustCompile(`^weir_seconds_total\{.*weir_part="(\w+)"\} (\S+)$`)

// The parts of a fleet add up to its total, also where stages overlap.
func TestThePartsAddUpToTheTotal(t *testing.T) {
	m := testMetrics(t, Options{})
	o := request()
	m.Observe(o)
	o = request() // overlapping: 280 ms of stages in 290 ms of service, and more
	o.Timings[0].Dur = 250 * time.Millisecond
	m.Observe(o)
	o = request()
	o.Timings = nil
	m.Observe(o)
	sum, total := 0.0, 0.0
	for _, line := range lines(scrape(t, m, "text/plain")) {
		if v := value.FindStringSubmatch(line); v != nil {
			x, _ := strconv.ParseFloat(v[2], 64)
			if v[1] == "total" {
				total += x
			} else {
				sum += x
			}
		}
	}
	if d := sum - total; total < 1.2 || d > 1e-6 || d < -1e-6 {
		t.Errorf("the parts add up to %v: the total is %v", sum, total)
	}
}

func BenchmarkObserve(b *testing.B) {
	m := testMetrics(b, Options{})
	o := request()
	b.ReportAllocs()
	for b.Loop() {
		m.Observe(o)
	}
}
