//go:build parts

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/examples/asrsim"
)

const (
	python = "/usr/bin/python3"
	speech = "/usr/share/pocketsphinx/test/data/"
)

// free returns n addresses of loopback on which nothing listens.
func free(t *testing.T, n int) (addresses []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		addresses = append(addresses, l.Addr().String())
	}
	return addresses
}

// ready waits until a program that was started answers.
func ready(t *testing.T, name, url string) {
	t.Helper()
	eventually(t, 60*time.Second, name+" is up", func() bool {
		r, err := http.Get(url)
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == 200
	})
}

// beginRecogniser starts the real recogniser and returns its URL.
func beginRecogniser(t *testing.T) string {
	t.Helper()
	return begin(t, nil, python, "examples/pocketsphinx/server.py", "--port", "0").says(`listening on (http://\S+)`)[1]
}

const jaegerConfig = `
service:
  extensions: [jaeger_storage, jaeger_query, healthcheckv2]
  pipelines:
    traces: {receivers: [otlp], processors: [batch], exporters: [jaeger_storage_exporter]}
  telemetry: {metrics: {level: none}, logs: {level: warn}}
extensions:
  jaeger_query:
    storage: {traces: memory}
    http: {endpoint: "%[1]s"}
    grpc: {endpoint: "%[2]s"}
  jaeger_storage: {backends: {memory: {memory: {max_traces: 10000}}}}
  healthcheckv2: {use_v2: true, http: {endpoint: "%[3]s"}}
receivers:
  otlp: {protocols: {grpc: {endpoint: "%[4]s"}, http: {endpoint: "%[5]s"}}}
processors: {batch: {timeout: 100ms}}
exporters: {jaeger_storage_exporter: {trace_storage: memory}}
`

type jaeger struct{ query, grpc, http string }

func beginJaeger(t *testing.T) jaeger {
	t.Helper()
	a := free(t, 5)
	config := filepath.Join(t.TempDir(), "jaeger.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, jaegerConfig, a[0], a[1], a[2], a[3], a[4]), 0o600); err != nil {
		t.Fatal(err)
	}
	begin(t, []string{"OTEL_TRACES_SAMPLER=always_off"}, filepath.Join(partsFolder(t), "bin", "jaeger"), "--config", config)
	ready(t, "Jaeger", "http://"+a[2]+"/status")
	return jaeger{"http://" + a[0], "http://" + a[3], "http://" + a[4]}
}

// partsFolder is where deploy/parts puts what it builds.
func partsFolder(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("WEIR_PARTS"); dir != "" {
		return dir
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(cache, "weir-parts")
}

// trace is what Jaeger's query API returns of one; times in microseconds.
type trace struct {
	TraceID string
	Spans   []span
}

type span struct {
	SpanID, OperationName string
	StartTime, Duration   int64
	References            []struct{ RefType, SpanID string }
	Tags                  []struct {
		Key   string
		Value any
	}
	Logs []struct {
		Fields []struct {
			Key   string
			Value any
		}
	}
	Warnings []string
}

func (s span) tag(key string) any {
	for _, t := range s.Tags {
		if t.Key == key {
			return t.Value
		}
	}
	return nil
}

func (s span) parent() string {
	if len(s.References) == 0 {
		return ""
	}
	return s.References[0].SpanID
}

// trace waits until Jaeger has a span of that name in the trace.
func (j jaeger) trace(t *testing.T, id, name string) (tr trace) {
	t.Helper()
	eventually(t, 30*time.Second, "trace "+id+" in Jaeger", func() bool {
		code, body := get(t, j.query+"/api/traces/"+id)
		var answer struct{ Data []trace }
		if code != 200 || json.Unmarshal([]byte(body), &answer) != nil || len(answer.Data) != 1 {
			return false
		}
		tr = answer.Data[0]
		for _, s := range tr.Spans {
			if s.OperationName == name {
				return true
			}
		}
		return false
	})
	return tr
}

// curl posts as a user would, in the given trace, and returns the answer and
// the time that curl measured.
func curl(t *testing.T, traceID, url string, args ...string) (body []byte, took time.Duration) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "body")
	args = append([]string{"-sS", "--fail-with-body", "-o", file, "-w", "%{time_total}",
		"-H", "traceparent: 00-" + traceID + "-00f067aa0ba902b7-01", url}, args...)
	out, err := exec.Command("curl", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("curl %v: %v\n%s", args, err, out)
	}
	seconds, err := strconv.ParseFloat(string(out), 64)
	if err != nil {
		t.Fatalf("curl said %q", out)
	}
	if body, err = os.ReadFile(file); err != nil {
		t.Fatal(err)
	}
	return body, time.Duration(seconds * 1e9)
}

func TestRealSpeechGoesThroughAndItsTraceAddsUp(t *testing.T) {
	server := beginRecogniser(t)
	j := beginJaeger(t)
	for _, backend := range []struct{ protocol, endpoint string }{{"grpc", j.grpc}, {"http/protobuf", j.http}} {
		w := beginWeir(t, server, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=" + backend.protocol, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + tracesEndpoint(backend.protocol, backend.endpoint)}, "--window", "1s")
		for i, c := range []struct {
			path, text string
			args       []string
		}{
			{"/asr", "go forward ten meters", []string{"--data-binary", "@" + speech + "goforward.raw"}},
			{"/asr", "go somewhere and do something", []string{"-H", "Transfer-Encoding: chunked", "--data-binary", "@" + speech + "something.raw"}},
			{"/v1/audio/transcriptions", "ten of clubs", []string{"-F", "file=@" + speech + "cards/001.wav", "-F", "model=pocketsphinx"}},
		} {
			t.Run(fmt.Sprint(backend.protocol, c.path, i), func(t *testing.T) {
				direct, _ := curl(t, traceID(0, 0, 0), server+c.path, c.args...)
				// On a busy machine a process may wait for a processor between two
				// stages, which no stage tells: one undisturbed try is asked for.
				for try := range 10 {
					id := traceID(len(backend.protocol), i, try)
					through, took := curl(t, id, w.url+c.path, c.args...)
					if !bytes.Equal(direct, through) || !strings.Contains(string(through), c.text) {
						t.Fatalf("through weir: %q, directly: %q, spoken: %q", through, direct, c.text)
					}
					off, tolerance := checkTrace(t, j.trace(t, id, "postprocess"), "POST "+c.path, took)
					t.Logf("stages and queue lack %v of the %v that curl measured", off, took)
					if off.Abs() <= tolerance {
						return
					}
				}
				t.Error("the stages never added up to within 5 ms or 2 % of what curl measured")
			})
		}
		if backend.protocol == "grpc" {
			checkPage(t, w)
		}
	}
}

func traceID(protocol, text, try int) string {
	return fmt.Sprintf("%016x%08x%08x", protocol+1, text+1, try+1)
}

func tracesEndpoint(protocol, endpoint string) string {
	if protocol == "grpc" {
		return endpoint
	}
	return endpoint + "/v1/traces"
}

// checkTrace holds one trace to its shape, and returns what its queue and
// stages lack of what curl measured, beside what they may lack.
func checkTrace(t *testing.T, tr trace, name string, took time.Duration) (off, tolerance time.Duration) {
	t.Helper()
	byName := map[string]span{}
	byID := map[string]span{}
	for _, s := range tr.Spans {
		byName[s.OperationName], byID[s.SpanID] = s, s
		for _, w := range s.Warnings {
			if !strings.Contains(w, "invalid parent span") { // curl exports none
				t.Errorf("Jaeger warns of %s: %s", s.OperationName, w)
			}
		}
	}
	root, client := byName[name], byName["POST"]
	if root.SpanID == "" || client.SpanID == "" || root.parent() != "00f067aa0ba902b7" || client.parent() != root.SpanID {
		t.Fatalf("the spans are %+v", tr.Spans)
	}
	var sum time.Duration
	for _, stage := range []string{"preprocess", "queue_in_server", "forward", "postprocess"} {
		s, ok := byName[stage]
		if !ok || s.parent() != client.SpanID {
			t.Errorf("no %s under the CLIENT span", stage)
		}
		sum += time.Duration(s.Duration) * time.Microsecond
	}
	if q, ok := byName["queue"]; ok {
		sum += time.Duration(q.Duration) * time.Microsecond
	}
	if b := byName["forward"].tag("weir.batch.size"); fmt.Sprint(b) != "1" {
		t.Errorf("forward's weir.batch.size is %v: want 1", b)
	}
	for _, s := range tr.Spans {
		if p, ok := byID[s.parent()]; ok && (s.StartTime < p.StartTime || s.StartTime+s.Duration > p.StartTime+p.Duration) {
			t.Errorf("%s is not inside %s", s.OperationName, p.OperationName)
		}
	}
	return took - sum, max(5*time.Millisecond, took/50)
}

// checkPage opens the page in a real browser. WEIR_SCREENSHOTS keeps the
// picture, for looking at.
func checkPage(t *testing.T, w *sidecar) {
	t.Helper()
	dom := browse(t, w.admin+"/", "page.png")
	for _, want := range []string{"POST /asr", "forward", "/v1/audio/transcriptions"} {
		if !strings.Contains(dom, want) {
			t.Errorf("the page does not show %q", want)
		}
	}
}

// browse takes a screenshot and returns the page's DOM after five seconds.
func browse(t *testing.T, url, picture string) string {
	t.Helper()
	dir := t.TempDir()
	if d := os.Getenv("WEIR_SCREENSHOTS"); d != "" {
		picture = filepath.Join(d, picture)
	} else {
		picture = filepath.Join(dir, picture)
	}
	chromium := func(args ...string) []byte {
		args = append([]string{"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
			"--disable-component-update", "--disable-sync", "--hide-scrollbars", "--user-data-dir=" + filepath.Join(dir, "profile"),
			"--window-size=1280,2400", "--timeout=5000", "--virtual-time-budget=5000"}, args...)
		var out, errs bytes.Buffer
		cmd := exec.Command("chromium", append(args, url)...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Fatalf("chromium: %v\n%s", err, &errs)
		}
		return out.Bytes()
	}
	chromium("--screenshot=" + picture)
	if info, err := os.Stat(picture); err != nil || info.Size() < 20_000 {
		t.Errorf("the screenshot: %v, %v", info, err)
	}
	return string(chromium("--dump-dom"))
}

// quickRules are deploy/prometheus/weir.rules.yaml with windows that a test
// can wait for; alerts keep firing for the given time.
func quickRules(t *testing.T, keep string) string {
	t.Helper()
	b, err := os.ReadFile("deploy/prometheus/weir.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return strings.NewReplacer("[5m]", "[8s]", "[15m]", "[8s]", "[30m]", "[16s]", "[1h]", "[16s]", "[6h]", "[16s]",
		"interval: 15s", "interval: 1s", "interval: 30s", "interval: 1s", "interval: 1m", "interval: 1s",
		"keep_firing_for: 5m", "keep_firing_for: "+keep, "for: 2m", "for: 3s", "for: 5m", "for: 3s", "for: 10m", "for: 3s", "for: 15m", "for: 3s").Replace(string(b))
}

// beginPrometheus scrapes the targets of each job every second. more is added
// to its configuration.
func beginPrometheus(t *testing.T, targets map[string][]string, keep, more string) (api string) {
	t.Helper()
	dir := t.TempDir()
	var c strings.Builder
	fmt.Fprintf(&c, "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%s/rules.yaml]\n%sscrape_configs:\n", dir, more)
	for job, urls := range targets {
		fmt.Fprintf(&c, "  - {job_name: %s, static_configs: [{targets: [%s]}]}\n", job, strings.ReplaceAll(strings.Join(urls, ", "), "http://", ""))
	}
	for name, text := range map[string]string{"prometheus.yml": c.String(), "rules.yaml": quickRules(t, keep)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	address := free(t, 1)[0]
	begin(t, nil, "prometheus", "--config.file="+dir+"/prometheus.yml", "--storage.tsdb.path="+dir+"/data", "--web.listen-address="+address, "--log.level=warn")
	ready(t, "Prometheus", "http://"+address+"/-/ready")
	return "http://" + address
}

// firing lists the jobs for which the alert fires now.
func firing(t *testing.T, api, alert string) (jobs []string) {
	t.Helper()
	_, body := get(t, api+"/api/v1/query?query="+url.QueryEscape(`ALERTS{alertstate="firing",alertname="`+alert+`"}`))
	var answer struct {
		Data struct {
			Result []struct{ Metric map[string]string }
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	for _, r := range answer.Data.Result {
		jobs = append(jobs, r.Metric["job"])
	}
	return jobs
}

// TestEachScenarioGetsItsVerdictAndOnlyTheQueueItsAlert runs all scenarios at
// once: they sleep most of the time.
func TestEachScenarioGetsItsVerdictAndOnlyTheQueueItsAlert(t *testing.T) {
	targets := map[string][]string{}
	weirs := map[string]*sidecar{}
	for _, s := range asrsim.Scenarios() {
		sim, err := asrsim.New(s.Server)
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewServer(sim)
		t.Cleanup(func() { server.Close(); sim.Close() })
		w := beginWeir(t, server.URL, nil, "--window", asrsim.Window.String(), "--verdict-for", "4s", "--verdict-keep-for", "4s",
			"--max-concurrency", strconv.Itoa(s.MaxConcurrency), "--max-queue-size", strconv.Itoa(s.MaxQueueSize))
		weirs[s.Name], targets[s.Name] = w, []string{w.admin}
	}
	api := beginPrometheus(t, targets, "1h", "")
	var loads sync.WaitGroup
	verdicts := map[string]string{}
	var mu sync.Mutex
	for _, s := range asrsim.Scenarios() {
		loads.Go(func() {
			if _, err := s.Drive(t.Context(), weirs[s.Name].url+"/asr", nil); err != nil {
				t.Error(err)
			}
			cause, text := verdict(t, weirs[s.Name])
			mu.Lock()
			defer mu.Unlock()
			verdicts[s.Name] = cause
			t.Logf("%s: %s", s.Name, text)
		})
	}
	loads.Wait()
	for name, cause := range verdicts {
		if cause != name {
			t.Errorf("the verdict on %s is %s", name, cause)
		}
	}
	// Alerts are kept firing for an hour, so that this sees all that ever fired.
	if jobs := firing(t, api, "WeirQueueWaitShareHigh"); len(jobs) != 1 || jobs[0] != "queue" {
		t.Errorf("WeirQueueWaitShareHigh fires for %v: want queue only", jobs)
	}
	if jobs := firing(t, api, "WeirComputeBound"); len(jobs) != 1 || jobs[0] != "compute" {
		t.Errorf("WeirComputeBound fires for %v: want compute only", jobs)
	}
	if jobs := firing(t, api, "WeirTelemetryDropped"); len(jobs) != 0 {
		t.Errorf("WeirTelemetryDropped fires for %v", jobs)
	}
	checkRecorded(t, api)
	browse(t, weirs["queue"].admin+"/", "queue.png")
	browse(t, weirs["compute"].admin+"/", "compute.png")
}

func verdict(t *testing.T, w *sidecar) (cause, text string) {
	_, body := get(t, w.admin+"/api/verdict")
	var v struct {
		Classes []struct {
			Cause      string
			Confidence float64
			Evidence   []string
		}
	}
	if err := json.Unmarshal([]byte(body), &v); err != nil || len(v.Classes) != 1 {
		t.Errorf("%v in %s", err, body)
		return "", ""
	}
	c := v.Classes[0]
	return c.Cause, fmt.Sprint(c.Cause, " ", c.Confidence, "\n  ", strings.Join(c.Evidence, "\n  "))
}

// promValue is the one value of a query; NaN, and an error, if there is none.
func promValue(t *testing.T, api, query string) float64 {
	t.Helper()
	_, body := get(t, api+"/api/v1/query?query="+url.QueryEscape(query))
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || len(answer.Data.Result) != 1 {
		t.Errorf("%s: %v in %s", query, err, body)
		return math.NaN()
	}
	x, err := strconv.ParseFloat(fmt.Sprint(answer.Data.Result[0].Value[1]), 64)
	if err != nil {
		t.Error(err)
	}
	return x
}

// checkRecorded compares the slope that Prometheus computes from the additive
// sums with the simulator's own, and the parts with their total.
func checkRecorded(t *testing.T, api string) {
	t.Helper()
	value := func(query string) float64 { t.Helper(); return promValue(t, api, query) }
	terms := func(a, b string) string {
		return fmt.Sprintf(`scalar(weir_fit_total{job="compute",weir_fit_term="%s"})*scalar(weir_fit_total{job="compute",weir_fit_term="%s"})`, a, b)
	}
	slope := value(fmt.Sprintf("vector((%s-%s)/(%s-%s))", terms("w", "wxy"), terms("wx", "wy"), terms("w", "wxx"), terms("wx", "wx")))
	if math.Abs(slope-0.018) > 0.002 {
		t.Errorf("the slope from the additive sums is %v s: the simulator's is 0.018", slope)
	}
	for _, s := range asrsim.Scenarios() {
		sum := value(fmt.Sprintf(`sum(weir_seconds_total{job=%q,weir_part!="total"}) / sum(weir_seconds_total{job=%q,weir_part="total"})`, s.Name, s.Name))
		if math.Abs(sum-1) > 0.001 {
			t.Errorf("%s: the parts add up to %v of the total", s.Name, sum)
		}
	}
}

func TestTheDemoEndsWithItsVerdict(t *testing.T) {
	t.Parallel()
	p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "demo", "--once", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	p.says(`Verdict for POST /asr: QUEUE`)
	if code := p.exit(); code != 0 {
		t.Errorf("exit code %d: want 0", code)
	}
	for line := range strings.Lines(p.output()) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}
