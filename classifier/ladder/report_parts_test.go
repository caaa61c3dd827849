//go:build parts

package ladder

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weir/examples/asrsim"
)

// browser is a real Chromium, driven over a pipe by its DevTools protocol:
// messages of JSON that end with a zero byte.
type browser struct {
	t       *testing.T
	in      io.Writer
	out     *bufio.Reader
	id      int
	session string
	faults  []string // exceptions, console errors and failed requests of the page
}

type message struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct{ Message string }
}

func startBrowser(t *testing.T) *browser {
	t.Helper()
	read, toBrowser, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fromBrowser, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
		"--user-data-dir="+t.TempDir(), "--window-size=1280,1700", "about:blank")
	c.ExtraFiles = []*os.File{read, write} // 3 and 4 in the browser
	if err := c.Start(); err != nil {
		t.Fatalf("chromium: %v; `make parts` installs it", err)
	}
	read.Close()
	write.Close()
	t.Cleanup(func() {
		toBrowser.Close() // ends it
		ended := make(chan struct{})
		go func() { _ = c.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			_ = c.Process.Kill()
			<-ended
		}
		fromBrowser.Close()
	})
	return &browser{t: t, in: toBrowser, out: bufio.NewReader(fromBrowser)}
}

// call sends a command and decodes its result; what the page reports meanwhile
// is kept.
func (b *browser) call(method string, params, result any) {
	b.t.Helper()
	b.id++
	m := map[string]any{"id": b.id, "method": method, "params": params}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	text, err := json.Marshal(m)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatal(err)
	}
	for {
		r := b.next()
		if r.ID != b.id {
			continue
		}
		if r.Error != nil {
			b.t.Fatalf("%s: %s", method, r.Error.Message)
		}
		if result != nil {
			err = json.Unmarshal(r.Result, result)
		}
		if err != nil {
			b.t.Fatal(err)
		}
		return
	}
}

func (b *browser) next() (m message) {
	b.t.Helper()
	text, err := b.out.ReadBytes(0)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
		b.t.Fatal(err)
	}
	switch m.Method {
	case "Runtime.exceptionThrown", "Network.loadingFailed", "Log.entryAdded":
		b.faults = append(b.faults, m.Method+" "+string(m.Params))
	case "Runtime.consoleAPICalled":
		if bytes.Contains(m.Params, []byte(`"type":"error"`)) {
			b.faults = append(b.faults, string(m.Params))
		}
	}
	return m
}

// open shows a page and waits until it is loaded.
func (b *browser) open(url string) {
	b.t.Helper()
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Runtime", "Log", "Network", "Page"} {
		b.call(domain+".enable", struct{}{}, nil)
	}
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	for b.next().Method != "Page.loadEventFired" {
	}
}

// eval runs JavaScript in the page.
func (b *browser) eval(script string, result any) {
	b.t.Helper()
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": script, "returnByValue": true}, &r)
	if r.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", script, r.ExceptionDetails)
	}
	if result != nil {
		if err := json.Unmarshal(r.Result.Value, result); err != nil {
			b.t.Fatalf("%s: %v", r.Result.Value, err)
		}
	}
}

func (b *browser) picture(name string) {
	b.t.Helper()
	dir := os.Getenv("WEIR_SCREENSHOTS")
	if dir == "" {
		return
	}
	var shot struct{ Data []byte }
	b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &shot)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name+".png"), shot.Data, 0o644)); err != nil {
		b.t.Fatal(err)
	}
}

func TestTheReportDrawsAllPlotsInABrowserAndEachPointTellsItsNumbers(t *testing.T) {
	reports := map[string]*Summary{}
	synctest.Test(t, func(t *testing.T) {
		sim := newSim(t, asrsim.DefaultConfig())
		defer sim.Close()
		reports["ladder"] = climb(t, newRunner(t, sim, Target{}), closedSteps(160, rungs...))
		runs, err := newRunner(t, sim, Target{}).Probe(t.Context(), 10)
		if err != nil {
			t.Fatal(err)
		}
		reports["probe"] = Summarize(&Run{Header: Header{Kind: KindProbe}, Steps: runs})
		reports["sweep"] = sweepOf(t, asrsim.DefaultConfig(), Round{"max_concurrency", []int{1, 4}, 2}, Round{"max_batch_size", []int{8}, 16})
	})
	b := startBrowser(t)
	for kind, plots := range map[string]int{"ladder": 6, "probe": 1, "sweep": 5} {
		file := filepath.Join(t.TempDir(), kind+".html")
		f, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(reports[kind].HTML(f, English), f.Close()); err != nil {
			t.Fatal(err)
		}
		b.session = ""
		b.open("file://" + file)
		b.checkPlots(kind, plots)
		b.hoverAll(kind)
		b.picture("report-" + kind)
	}
	for _, f := range b.faults {
		t.Errorf("the page reports: %s", f)
	}
}

func (b *browser) checkPlots(kind string, want int) {
	b.t.Helper()
	var plots []struct {
		Title         string
		Marks         int
		Width, Height float64
		Inside        bool
		Text          string
	}
	b.eval(`[...document.querySelectorAll('figure')].map(f => {
		const s = f.querySelector('svg').getBoundingClientRect();
		const inside = [...f.querySelectorAll('.m .d, .m .b')].every(m => { const r = m.getBoundingClientRect();
			return r.width > 0 && r.left >= s.left - 1 && r.right <= s.right + 1 && r.top >= s.top - 1 && r.bottom <= s.bottom + 1; });
		return {Title: f.querySelector('h2').textContent, Marks: f.querySelectorAll('.m').length, Width: s.width, Height: s.height, Inside: inside, Text: f.innerHTML};
	})`, &plots)
	if len(plots) != want {
		b.t.Errorf("%s: %d plots, want %d", kind, len(plots), want)
	}
	for _, p := range plots {
		if p.Marks == 0 || p.Width < 300 || p.Height < 150 || !p.Inside {
			b.t.Errorf("%s, %q: %d marks, %.0f x %.0f pixels, all inside: %v", kind, p.Title, p.Marks, p.Width, p.Height, p.Inside)
		}
		if strings.Contains(p.Text, "NaN") || strings.Contains(p.Text, "Inf") {
			b.t.Errorf("%s, %q: a number that is none", kind, p.Title)
		}
	}
}

// hoverAll moves a real pointer over the first and the last point of each
// plot.
func (b *browser) hoverAll(kind string) {
	b.t.Helper()
	var n int
	b.eval(`document.querySelectorAll('figure').length`, &n)
	for i := range n {
		for _, which := range []string{"0", "m.length - 1"} {
			var at struct {
				X, Y float64
				Tip  string
			}
			b.eval(fmt.Sprintf(`(() => { const m = [...document.querySelectorAll('figure')[%d].querySelectorAll('.m')].filter(e => e.querySelector('.d, .b')); const e = m[%s];
				e.scrollIntoView({block: 'center'}); const r = e.querySelector('.d, .b').getBoundingClientRect();
				return {X: r.left + r.width / 2, Y: r.top + r.height / 2, Tip: document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2).closest('.m')?.dataset.tip ?? ''}; })()`, i, which), &at)
			b.call("Input.dispatchMouseEvent", map[string]any{"type": "mouseMoved", "x": 1, "y": 1}, nil)
			b.call("Input.dispatchMouseEvent", map[string]any{"type": "mouseMoved", "x": at.X, "y": at.Y}, nil)
			var tip struct {
				Text   string
				Hidden bool
			}
			b.eval(`({Text: tip.textContent, Hidden: tip.hidden})`, &tip)
			if tip.Hidden || tip.Text != at.Tip || !strings.ContainsAny(tip.Text, "0123456789") {
				b.t.Errorf("%s, plot %d: the pointer at a point shows %q (hidden: %v), want %q", kind, i, tip.Text, tip.Hidden, at.Tip)
			}
		}
	}
}
