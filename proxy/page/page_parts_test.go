//go:build parts

package page

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A look is one way to open the page.
type look struct {
	name string // of the picture
	size string // of the window
	path string // with the query
	dark bool
}

// chromium runs the real browser without a window.
func chromium(t *testing.T, url string, l look, flags ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	scheme := "--blink-settings=preferredColorScheme=1"
	if l.dark {
		scheme = "--blink-settings=preferredColorScheme=0"
	}
	args := append([]string{
		"--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
		"--user-data-dir=" + t.TempDir(), "--virtual-time-budget=4000", "--window-size=" + l.size, scheme,
	}, flags...)
	c := exec.CommandContext(ctx, "chromium", append(args, url+l.path)...)
	c.WaitDelay = 5 * time.Second // its helpers may keep the pipe
	var errors strings.Builder
	c.Stderr = &errors
	out, err := c.Output()
	if err != nil {
		t.Fatalf("chromium: %v\n%s", err, errors.String())
	}
	return string(out)
}

// open returns the page's elements after some seconds of its life, and leaves
// a picture in the directory WEIR_SCREENSHOTS, if that is set.
func open(t *testing.T, url string, l look) string {
	t.Helper()
	dir := os.Getenv("WEIR_SCREENSHOTS")
	if dir == "" {
		dir = t.TempDir()
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	picture := filepath.Join(dir, l.name+".png")
	dom := chromium(t, url, l, "--screenshot="+picture, "--dump-dom")
	if s, err := os.Stat(picture); err != nil || s.Size() < 10_000 {
		t.Errorf("no picture of the page: %v", err)
	}
	return dom
}

func holds(t *testing.T, dom string, wants ...string) {
	t.Helper()
	dom = strings.ReplaceAll(dom, "\u00a0", " ")
	dom = strings.ReplaceAll(dom, "&nbsp;", " ")
	for _, want := range wants {
		if !strings.Contains(dom, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}

func lacks(t *testing.T, dom string, wants ...string) {
	t.Helper()
	for _, bad := range wants {
		if i := strings.Index(dom, bad); i >= 0 {
			t.Errorf("the page holds %q: …%s…", bad, dom[max(0, i-80):min(len(dom), i+200)])
		}
	}
}

func TestTheBrowserShowsTheVerdictAndItsEvidence(t *testing.T) {
	dom := open(t, startWeir(t).URL, look{name: "busy-light", size: "1440,2600", path: "/"})
	holds(t, dom,
		"<b>Queue</b>: requests wait, while the server could take more at once", `data-cause="queue"`, `href="#icon-queue"`,
		"confidence 0.92 of 1", "58 % of latency is queueing (alert from 50 %)", "Raise max_concurrency (16 now) to 32", "4 of 402 answered requests carried no timings.",
		"Forward = 38 ms + 1.9 ms for each request in the batch.", "Elasticity 0.31 (95 % confidence interval 0.24 to 0.38, from 212 executions",
		"of 64", "of 16", "1.24 s", "18,422 admitted", "(99 %)", "v0.1.0", "http://127.0.0.1:9000",
		"4bf92f3577b34da6a3ce929d0e0e001d", "503 expired", "429 rejected", "500 error", "<canvas",
	)
	if rows := strings.Count(dom, `class="trace mono"`); rows != 30 {
		t.Errorf("%d rows of requests, want 30", rows)
	}
	lacks(t, dom, "data-error", "weir does not answer")
}

func TestWhatClientsSendStaysText(t *testing.T) {
	dom := open(t, startWeir(t).URL, look{name: "busy-dark", size: "1440,2600", dark: true, path: "/"})
	holds(t, dom, "POST /&lt;img src=x onerror=alert(1)&gt; (queue)")
	lacks(t, dom, "<img src=x", "<img src=\"x\"", "<script>alert", "<b>whisper", "data-error")
}

// openAll opens a request and the tables, and tells whether anything is wider
// than the window. Chromium's window is 500 pixels wide at least; zoom makes
// them the 360 of a phone.
const openAll = `setTimeout(() => {
	if (innerWidth < 600) document.documentElement.style.zoom = innerWidth / 360;
	document.querySelectorAll('.numbers, #requests li:nth-child(9) details').forEach(d => d.open = true);
	setTimeout(() => {
		const page = document.documentElement;
		page.dataset.fits = page.scrollWidth <= page.clientWidth;
	}, 500);
}, 2000)`

func TestThePageFitsAPhone(t *testing.T) {
	w := startWeir(t)
	w.probe = openAll
	dom := open(t, w.URL, look{name: "busy-narrow", size: "500,9000", path: "/"})
	holds(t, dom, `data-fits="true"`)
	lacks(t, dom, "data-error")
}

func TestARequestOpensToAllOfItsNumbers(t *testing.T) {
	w := startWeir(t)
	w.probe = openAll
	dom := open(t, w.URL, look{name: "open", size: "1440,4400", path: "/"})
	holds(t, dom, `data-fits="true"`, "271 ms (42 %)", "6.2 ms, as transfer, 1.9 MB, n=4, synchronised",
		"<dd>&lt;b&gt;whisper-large-v3&lt;/b&gt;</dd>", "<dd>curl/8.5.0 &lt;script&gt;alert(2)&lt;/script&gt;</dd>", "16 of 16", "184 kB")
	lacks(t, dom, "data-error", "<script>alert", "<b>whisper")
}

func TestTheAddressChoosesTheClass(t *testing.T) {
	dom := open(t, startWeir(t).URL, look{name: "healthy", size: "1440,2600", path: "/?class=POST+%2Fv1%2Faudio%2Ftranscriptions"})
	holds(t, dom, `data-cause="healthy"`, "n is too small: 12 requests in the window", "tells no stage timings")
	lacks(t, dom, "data-error")
}

func TestBeforeTheFirstRequestThePageSaysHowToSendOne(t *testing.T) {
	w := startWeir(t)
	w.verdict = map[string]any{"classes": []any{}, "waiting": 0, "inflight": 0, "abandoned": 0, "max_concurrency": 0, "admitted": 0, "dropped": 0, "server": "http://127.0.0.1:9000", "version": "v0.1.0", "listen": "127.0.0.1:8080",
		"thresholds": map[string]any{"min_requests": 40, "coverage": 0.9}}
	w.history = map[string]any{"points": []any{}, "forward": []any{}, "alert": 0.5}
	w.requests = nil
	dom := open(t, w.URL, look{name: "empty", size: "1440,1500", path: "/"})
	holds(t, dom, "No request yet", "Send one to 127.0.0.1:8080 instead of the server", "curl --data-binary @audio.wav 127.0.0.1:8080/asr", "No window has ended yet.", "No request has ended.")
	lacks(t, dom, "data-error")
}

func TestThePageSaysWhenWeirDoesNotAnswer(t *testing.T) {
	w := startWeir(t)
	w.broken = func(question int64) bool { return question > 1 }
	dom := open(t, w.URL, look{name: "gone", size: "1440,1200", path: "/"})
	holds(t, dom, "weir does not answer (since ", `<body class="stale">`)
	lacks(t, dom, "data-error")
}

func TestThePageRecoversWhenWeirAnswersAgain(t *testing.T) {
	w := startWeir(t)
	w.broken = func(question int64) bool { return question == 1 }
	dom := open(t, w.URL, look{name: "recovered", size: "1440,1200", path: "/"})
	holds(t, dom, "<b>Queue</b>")
	lacks(t, dom, "weir does not answer (since ", `<body class="stale">`, "data-error")
}
