package page

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// ours are the files that were written here; uPlot's are foreign.
var ours = []string{"index.html", "page.css", "page.js", "favicon.svg"}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := files.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func get(path string, header ...string) *http.Response {
	r := httptest.NewRequest("GET", path, nil)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, r)
	return w.Result()
}

func TestEveryAnswerCarriesTheStrictPolicy(t *testing.T) {
	for _, path := range []string{"/", "/page.js", "/page.css", "/nothing"} {
		h := get(path).Header
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
				"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			"X-Content-Type-Options": "nosniff",
			"Referrer-Policy":        "no-referrer",
		} {
			if got := h.Get(name); got != want {
				t.Errorf("GET %s: %s: %q, want %q", path, name, got, want)
			}
		}
	}
}

func TestFilesAreServedWithTheirTypeAndRevalidatedByETag(t *testing.T) {
	for path, want := range types {
		first := get(path)
		if first.StatusCode != http.StatusOK || first.Header.Get("Content-Type") != want.contentType {
			t.Errorf("GET %s: %d %q, want 200 %q", path, first.StatusCode, first.Header.Get("Content-Type"), want.contentType)
		}
		if first.Header.Get("Cache-Control") != "no-cache" {
			t.Errorf("GET %s: Cache-Control %q, want no-cache", path, first.Header.Get("Cache-Control"))
		}
		if b, _ := io.ReadAll(first.Body); string(b) != read(t, want.file) {
			t.Errorf("GET %s: %d bytes, not the file", path, len(b))
		}
		if again := get(path, "If-None-Match", first.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
			t.Errorf("GET %s with its ETag: %d, want 304", path, again.StatusCode)
		}
	}
}

func TestEverythingElseIs404(t *testing.T) {
	for _, path := range []string{"/index.html", "/page.go", "/uPlot.LICENSE", "/page.js/", "//", "/x", "/api/verdict", "/..%2fpage.go"} {
		if got := get(path).StatusCode; got != http.StatusNotFound {
			t.Errorf("GET %s: %d, want 404", path, got)
		}
	}
}

func TestThePageCanOnlyBeRead(t *testing.T) {
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, httptest.NewRequest("POST", "/", nil))
	if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" {
		t.Errorf("POST /: %d, Allow %q; want 405 and GET, HEAD", w.Code, w.Header().Get("Allow"))
	}
}

func TestEveryFileThatThePageNamesIsServed(t *testing.T) {
	names := regexp.MustCompile(`<(?:link|script|img)[^>]*? (?:href|src)="([^"]*)"`).FindAllStringSubmatch(read(t, "index.html"), -1)
	if len(names) < 5 {
		t.Fatalf("only %d files named in index.html; the pattern is wrong", len(names))
	}
	for _, n := range names {
		if got := get("/" + n[1]).StatusCode; got != http.StatusOK {
			t.Errorf("index.html names %q: %d, want 200", n[1], got)
		}
	}
}

func TestEveryCauseHasAnIcon(t *testing.T) {
	causes := regexp.MustCompile(`(?m)^  (\w+): \['[A-Z]`).FindAllStringSubmatch(read(t, "page.js"), -1)
	if len(causes) != 8 {
		t.Fatalf("%d causes found in page.js, want 8", len(causes))
	}
	for _, c := range causes {
		if !strings.Contains(read(t, "index.html"), `id="icon-`+c[1]+`"`) {
			t.Errorf("the cause %q has no icon in index.html", c[1])
		}
	}
}

func TestEveryIdThatTheScriptUsesIsOnThePage(t *testing.T) {
	html := read(t, "index.html")
	for _, id := range regexp.MustCompile(`(?:\$|showList|table)\('([\w-]+)'`).FindAllStringSubmatch(read(t, "page.js"), -1) {
		if !strings.Contains(html, `id="`+id[1]+`"`) {
			t.Errorf("page.js looks for #%s, which index.html lacks", id[1])
		}
	}
}

func TestNothingIsLoadedFromElsewhere(t *testing.T) {
	outside := regexp.MustCompile(`(?i)[a-z]+://[^\s"'<>]*|["'(]//[^\s"'<>]+|@import`)
	for _, file := range ours {
		text := strings.ReplaceAll(read(t, file), `xmlns="http://www.w3.org/2000/svg"`, "") // a name, not an address
		for _, url := range outside.FindAllString(text, -1) {
			t.Errorf("%s refers to %s", file, url)
		}
	}
}

func TestThereIsNoInlineScriptOrStyle(t *testing.T) {
	for _, bad := range []string{`<script(?:[^>]*)>[^<]`, `<style`, `\sstyle=`, `\son[a-z]+=`, `javascript:`} {
		if s := regexp.MustCompile(`(?i)` + bad).FindString(read(t, "index.html")); s != "" {
			t.Errorf("index.html holds %q, which the policy forbids", s)
		}
	}
}

func TestTheScriptMakesNoMarkupOfText(t *testing.T) {
	for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser", "srcdoc", "setAttribute('style'", "createContextualFragment", "setHTMLUnsafe"} {
		if strings.Contains(read(t, "page.js"), bad) {
			t.Errorf("page.js uses %s", bad)
		}
	}
}

func TestTextStandsOutFromWhatLiesBehindIt(t *testing.T) {
	css := read(t, "page.css")
	light, dark, ok := strings.Cut(css, "prefers-color-scheme: dark")
	if !ok {
		t.Fatal("page.css has no dark scheme")
	}
	for scheme, text := range map[string]string{"light": light, "dark": dark} {
		colors := map[string]float64{}
		for _, m := range regexp.MustCompile(`--([a-z-]+): #([0-9a-f]{6});`).FindAllStringSubmatch(text, -1) {
			colors[m[1]] = luminance(t, m[2])
		}
		for _, front := range []string{"text", "quiet", "accent", "bad", "good"} {
			for _, back := range []string{"back", "card", "sunk", "bad-back"} {
				a, b := colors[front], colors[back]
				if contrast := (max(a, b) + 0.05) / (min(a, b) + 0.05); contrast < 4.5 {
					t.Errorf("%s scheme: %s on %s has a contrast of %.2f, want at least 4.5", scheme, front, back, contrast)
				}
			}
		}
	}
}

// luminance is the relative luminance of a colour, as WCAG 2.2 defines it.
func luminance(t *testing.T, hex string) float64 {
	t.Helper()
	var r, g, b uint8
	if _, err := fmt.Sscanf(hex, "%02x%02x%02x", &r, &g, &b); err != nil {
		t.Fatal(err)
	}
	linear := func(c uint8) float64 {
		if v := float64(c) / 255; v > 0.04045 {
			return math.Pow((v+0.055)/1.055, 2.4)
		}
		return float64(c) / 255 / 12.92
	}
	return 0.2126*linear(r) + 0.7152*linear(g) + 0.0722*linear(b)
}

// hostile is a class name as a client could make it.
const hostile = `POST /<img src=x onerror=alert(1)>`

// A fakeWeir serves the page with canned answers, as the admin port does.
type fakeWeir struct {
	*httptest.Server
	verdict  map[string]any
	history  map[string]any
	requests []map[string]any
	asked    atomic.Int64                   // questions for the verdict
	broken   func(question int64) (is bool) // whether weir hangs up on that question; nil: never
	probe    string                         // script that the page runs beside its own; "": none
}

// startWeir serves what a busy weir would; change the fields before the first question.
func startWeir(t *testing.T) *fakeWeir {
	t.Helper()
	w := &fakeWeir{verdict: busyVerdict(), history: busyHistory(), requests: lastRequests()}
	m := http.NewServeMux()
	m.Handle("GET /", Handler())
	m.HandleFunc("GET /{$}", func(rw http.ResponseWriter, r *http.Request) {
		page := httptest.NewRecorder()
		Handler().ServeHTTP(page, r)
		maps.Copy(rw.Header(), page.Header())
		rw.Header().Del("Content-Length")
		_, _ = io.WriteString(rw, page.Body.String())
		if w.probe != "" {
			_, _ = io.WriteString(rw, `<script src="probe.js"></script>`)
		}
	})
	m.HandleFunc("GET /probe.js", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "text/javascript")
		_, _ = io.WriteString(rw, w.probe)
	})
	m.HandleFunc("GET /api/verdict", func(rw http.ResponseWriter, _ *http.Request) {
		if n := w.asked.Add(1); w.broken != nil && w.broken(n) {
			panic(http.ErrAbortHandler)
		}
		answer(rw, w.verdict)
	})
	m.HandleFunc("GET /api/history", func(rw http.ResponseWriter, r *http.Request) {
		h := map[string]any{"class": r.FormValue("class")}
		maps.Copy(h, w.history)
		answer(rw, h)
	})
	m.HandleFunc("GET /api/requests", func(rw http.ResponseWriter, r *http.Request) {
		if r.FormValue("n") != "30" {
			http.Error(rw, "n", http.StatusBadRequest)
			return
		}
		for _, o := range w.requests {
			answer(rw, o)
		}
	})
	w.Server = httptest.NewServer(m)
	t.Cleanup(w.Close)
	return w
}

func answer(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) }

func sharesOf(queue, serverQueue, upload, preprocess, transfer, forward, postprocess float64) map[string]any {
	return map[string]any{
		"queue": queue, "server_queue": serverQueue, "upload": upload, "preprocess": preprocess, "transfer": transfer,
		"forward": forward, "postprocess": postprocess,
		"unattributed": max(0, 1-queue-serverQueue-upload-preprocess-transfer-forward-postprocess),
	}
}

func class(name, cause string, more map[string]any) map[string]any {
	c := map[string]any{
		"class": name, "cause": cause, "confidence": 0.92, "since": time.Now().Add(-192 * time.Second),
		"requests": 418, "ok": 402, "timed": 398, "rejected": 9, "expired": 4, "canceled": 2, "failed": 1, "refused": 0,
		"mean_ms": 412.3, "p50_ms": 388.1, "p95_ms": 903.7, "throughput": 41.8,
		"shares": sharesOf(0.52, 0.06, 0.02, 0.03, 0.02, 0.28, 0.02), "tail_shares": sharesOf(0.7, 0.06, 0.02, 0.03, 0.02, 0.12, 0.02),
		"forward": nil, "warnings": []string{}, "evidence": []string{}, "advice": "",
	}
	maps.Copy(c, more)
	return c
}

func busyVerdict() map[string]any {
	return map[string]any{
		"classes": []any{
			class(hostile, "queue", map[string]any{
				"forward": map[string]any{"slope_ms": 1.92, "intercept_ms": 38.1, "elasticity": 0.31, "ci95": []float64{0.24, 0.38}, "against": "batch", "n": 212},
				"evidence": []string{
					"58 % of latency is queueing (alert from 50 %): 52 % in weir, 6 % in the server.",
					"Forward grows little with the batch: elasticity 0.31 (95 % interval 0.24 to 0.38), so larger batches are nearly free.",
					"The batch was at its largest (16) in 94 % of executions, and the device was busy 41 % of the time while requests waited.",
				},
				"advice":   "Raise max_concurrency (16 now) to 32, and the server's max_batch_size with it.",
				"warnings": []string{"4 of 402 answered requests carried no timings."},
			}),
			class("POST /v1/audio/transcriptions", "healthy", map[string]any{"requests": 12, "ok": 12, "timed": 0}),
		},
		"waiting": 23, "inflight": 16, "abandoned": 3, "draining": false, "max_concurrency": 16, "max_queue_size": 64,
		"oldest_waiting_ms": 412.7, "oldest_inflight_ms": 1240.2, "admitted": 18422, "dropped": 0,
		"listen": "127.0.0.1:8080", "server": "http://127.0.0.1:9000", "version": "v0.1.0",
		"thresholds": map[string]any{"min_requests": 40, "coverage": 0.9},
	}
}

// busyHistory is half an hour in which the load grows, with a pause in it.
func busyHistory() map[string]any {
	random := rand.New(rand.NewPCG(1, 2))
	end := time.Now().Truncate(10 * time.Second)
	points := []any{}
	for i := range 180 {
		if i > 60 && i < 75 {
			continue // no requests
		}
		load := float64(i) / 180
		queue := max(0, load-0.35)*0.9 + 0.03*random.Float64()
		rest := 1 - queue
		points = append(points, map[string]any{
			"end": end.Add(time.Duration(i-179) * 10 * time.Second), "requests": 100 + i, "mean_ms": 90 + 400*queue, "p95_ms": 190 + 900*queue + 40*random.Float64(),
			"throughput": 10 + 30*math.Min(load, 0.6), "cause": "queue",
			"shares": sharesOf(queue, 0.08*rest, 0.04*rest, 0.07*rest, 0.05*rest, 0.62*rest, 0.05*rest),
		})
	}
	forward := []any{}
	for i := range 300 {
		batch := 1 + int(16*math.Sqrt(random.Float64()))
		batch = min(batch, 16)
		forward = append(forward, map[string]any{"batch": batch, "inflight": batch + i%3, "forward_ms": 38 + 1.9*float64(batch) + 4*random.NormFloat64()})
	}
	return map[string]any{"points": points, "forward": forward, "alert": 0.5}
}

func lastRequests() []map[string]any {
	random := rand.New(rand.NewPCG(3, 4))
	var list []map[string]any
	start := time.Now().Add(-40 * time.Second)
	for i := range 30 {
		queue, forward := 40+400*random.Float64(), 45+30*random.Float64()
		ledger := map[string]any{
			"before": 0.0, "queue": queue, "overhead": 0.05, "connect": 0.0, "upload": 6.1, "server_queue": 22.4, "preprocess": 9.8,
			"transfer": 6.2, "forward": forward, "postprocess": 3.1, "stream": 4.2, "unattributed": 12.5,
		}
		o := map[string]any{
			"trace_id": fmt.Sprintf("4bf92f3577b34da6a3ce929d0e0e%04x", i), "span_id": fmt.Sprintf("00f067aa0ba9%04x", i), "sampled": true,
			"protocol": "http/1.1", "class": hostile, "method": "POST", "target": "/asr?lang=en", "host": "asr.internal:8080",
			"client": "10.1.2.3:51234", "user_agent": `curl/8.5.0 <script>alert(2)</script>`, "route": "/asr", "model": "<b>whisper-large-v3</b>",
			"status": 200, "outcome": "ok", "start": start.Add(time.Duration(i) * time.Second), "dequeued_ms": queue, "queue_ms": queue,
			"total_ms": queue + forward + 64.35, "ledger": ledger, "waiting": 20 + i%5, "inflight": 16, "max_concurrency": 16, "source": "header",
			"timings": []any{
				map[string]any{"name": "batch_wait", "stage": "queue", "dur_ms": 22.4}, map[string]any{"name": "features", "stage": "preprocess", "dur_ms": 9.8},
				map[string]any{"name": "h2d", "stage": "transfer", "dur_ms": 6.2, "bytes": 1920000, "n": 4, "sync": true},
				map[string]any{"name": "encode", "stage": "forward", "dur_ms": forward}, map[string]any{"name": "itn", "stage": "postprocess", "dur_ms": 3.1},
			},
			"batch": 1 + i%16, "audio_seconds": 3 + 0.7*float64(i%9), "bytes_in": 184320, "bytes_out": 412,
		}
		switch i {
		case 21:
			o["connect_ms"] = 30.0
			ledger["connect"], ledger["stream"], ledger["unattributed"] = 80.0, 120.0, 70.0
			o["total_ms"] = queue + forward + 318.0
		case 24:
			o["status"], o["outcome"], o["error"], o["timings"], o["batch"] = 503, "expired", "queue_timeout", nil, 0
			o["total_ms"], o["ledger"] = 900.0, map[string]any{"queue": 900.0}
		case 26:
			o["status"], o["outcome"], o["error"], o["timings"], o["batch"], o["audio_seconds"] = 429, "rejected", "queue_full", nil, 0, 0
			o["total_ms"], o["ledger"] = 0.08, map[string]any{"overhead": 0.08}
		case 27:
			o["status"] = 500
		}
		list = append(list, o)
	}
	return list
}

func TestTheFakeWeirAnswersAllThatThePageAsks(t *testing.T) {
	w := startWeir(t)
	for _, path := range []string{"/", "/api/verdict", "/api/history?class=x", "/api/requests?n=30"} {
		r, err := http.Get(w.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusOK {
			t.Errorf("GET %s: %d", path, r.StatusCode)
		}
	}
}
