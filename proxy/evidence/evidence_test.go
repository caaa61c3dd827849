package evidence

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// fromStart is what happened since a server began, when all was zero.
func fromStart(t *testing.T, file string) (reading, classifier.Aggregate) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	r, err := readPage(text, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	zero := reading{server: r.server}
	for f := range numFields {
		zero.numbers[f].told = r.numbers[f].told
	}
	d, ok := r.since(&zero)
	if !ok {
		t.Fatal("counters ran backwards")
	}
	begin := time.Unix(1_800_000_000, 0)
	return r, d.aggregate(begin, begin.Add(10*time.Second))
}

func TestWhatEachServersPageSays(t *testing.T) {
	type want struct {
		server                                     string
		requests                                   float64
		queue, pre, transfer, forward, post, total float64 // ms of one request; -1: not told
		batch, busy, waiting, running, limit, shed float64 // -1: not told
	}
	for file, w := range map[string]want{
		"vllm.prom":         {"vLLM", 100, 150, -1, -1, 405, -1, 600, 0, -1, 3, 8, -1, 0},
		"vllm-old.prom":     {"vLLM", 100, 150, -1, -1, 400, -1, 600, 0, -1, 3, 8, -1, 0},
		"triton.prom":       {"Triton", 400, 100, -1, 1.5, 50, -1, 200, 4, 0.515, 5, -1, -1, 7},
		"triton-stats.json": {"Triton", 400, 100, -1, 1.5, 50, -1, 200, 4, 0.475, -1, -1, -1, 0},
		"tgi.prom":          {"TGI", 50, 800, 10, -1, 1180, -1, 2000, 3, -1, 2, 4, -1, 3},
		"tei.prom":          {"TEI", 200, 5, 1, -1, 13, -1, 20, 8, -1, 1, -1, -1, 0},
		"sglang.prom":       {"SGLang", 60, 500, -1, -1, 800, -1, 1500, 0, -1, 2, 6, -1, 0},
		"torchserve.prom":   {"TorchServe", 40, 300, -1, -1, 200, -1, 500, 0, -1, -1, -1, -1, 0},
		"kserve.prom":       {"KServe", 30, -1, 100, -1, 400, 10, 0, 0, -1, -1, -1, -1, 0},
		"ovms.prom":         {"OpenVINO Model Server", 20, 150, -1, -1, 300, -1, 500, 0, -1, -1, 3, -1, 0},
		"bentoml.prom":      {"BentoML", 25, -1, -1, -1, -1, -1, 400, 5, -1, -1, 2, -1, 4},
		"rayserve.prom":     {"Ray Serve", 20, -1, -1, -1, -1, -1, 500, 0, -1, 9, 5, -1, 0},
		"whisperlive.prom":  {"WhisperLive", 50, -1, -1, -1, -1, -1, 400, 0, -1, -1, 3, -1, 6},
		"deepgram.prom":     {"Deepgram", 28, -1, -1, -1, -1, -1, 500, 0, -1, -1, 7, 12, 0},
		"mosec.prom":        {"mosec", 40, 50, -1, -1, 300, -1, 500, 4, -1, -1, 4, -1, 5},
		"xinference.prom":   {"Xinference", 30, -1, -1, -1, -1, -1, 1500, 0, -1, -1, 2, 8, 0},
	} {
		t.Run(file, func(t *testing.T) {
			r, a := fromStart(t, file)
			stage := func(s classifier.Stage) float64 {
				if !a.Told[s] {
					return -1
				}
				return a.Stages[s].Seconds() * 1e3
			}
			gauge := func(f field) float64 {
				if !r.numbers[f].told {
					return -1
				}
				return r.numbers[f].sum
			}
			busy := -1.0
			if a.BusyOK {
				busy = a.Busy
			}
			got := want{a.Server, a.Requests,
				stage(classifier.StageQueue), stage(classifier.StagePreprocess), stage(classifier.StageTransfer), stage(classifier.StageForward), stage(classifier.StagePostprocess),
				a.Total.Seconds() * 1e3, a.Batch, busy, gauge(fWaiting), gauge(fRunning), gauge(fLimit), a.Rejected}
			round := func(w *want) {
				for _, p := range []*float64{&w.queue, &w.pre, &w.transfer, &w.forward, &w.post, &w.total, &w.batch, &w.busy} {
					*p = math.Round(*p*1e4) / 1e4
				}
			}
			round(&got)
			round(&w)
			if got != w {
				t.Errorf("\n got %+v\nwant %+v", got, w)
			}
		})
	}
}

func TestTritonsBatchesCountOnceEach(t *testing.T) {
	_, a := fromStart(t, "triton-stats.json")
	if len(a.Sizes) != 2 {
		t.Fatalf("%d sizes, want 2", len(a.Sizes))
	}
	for _, c := range a.Sizes {
		want := map[int]classifier.BatchCost{
			1: {Size: 1, Batches: 40, Forward: 40 * time.Millisecond},
			6: {Size: 6, Batches: 60, Forward: 50 * time.Millisecond},
		}[c.Size]
		if c != want {
			t.Errorf("%+v, want %+v", c, want)
		}
	}
}

func TestWhatTellsOfTheDevice(t *testing.T) {
	for _, c := range []struct {
		file, selects             string
		busy, memory, total, pcie float64
	}{
		{"dcgm.prom", "", 0.78, 45056 * mebi, (45056 + 52608) * mebi, 4e6},
		{"dcgm.prom", "gpu=1", 0.42, 16384 * mebi, 16384 * mebi, 0},
		{"triton.prom", "", 0.47, 4e9, 16e9, 0},
		{"torchserve.prom", "", 0.35, 0, 0, 0},
	} {
		text, err := os.ReadFile(filepath.Join("testdata", c.file))
		if err != nil {
			t.Fatal(err)
		}
		_, selects, err := parseAddress("http://h:1/metrics#" + c.selects)
		if err != nil {
			t.Fatal(err)
		}
		r, err := readPage(text, selects, true)
		if err != nil {
			t.Fatalf("%s#%s: %v", c.file, c.selects, err)
		}
		n := r.numbers
		if math.Abs(n[fBusy].sum-c.busy) > 1e-9 || n[fMemory].sum != c.memory || n[fMemoryTotal].sum != c.total || n[fPCIe].sum != c.pcie {
			t.Errorf("%s#%s: busy %v, memory %v of %v, PCIe %v; want %+v", c.file, c.selects, n[fBusy].sum, n[fMemory].sum, n[fMemoryTotal].sum, n[fPCIe].sum, c)
		}
	}
}

func TestAPageThatSelectsNothingIsAnError(t *testing.T) {
	text, _ := os.ReadFile("testdata/dcgm.prom")
	if _, err := readPage(text, []label{{"gpu", "7"}}, true); err == nil {
		t.Error("a device that is not there passes")
	}
}

func TestNvidiaSmisTable(t *testing.T) {
	var r reading
	if err := readSMI([]byte("35, 1024, 81559\n90, 2048, 81559\n[N/A], [N/A], [N/A]\n"), &r); err != nil {
		t.Fatal(err)
	}
	n := r.numbers
	if n[fBusy].sum != 0.9 || n[fMemory].sum != 3072*mebi || n[fMemoryTotal].sum != 2*81559*mebi {
		t.Errorf("busy %v, memory %v of %v", n[fBusy].sum, n[fMemory].sum, n[fMemoryTotal].sum)
	}
	for _, text := range []string{"", "No devices were found\n", "1,2\n", "\"\n"} {
		if err := readSMI([]byte(text), &reading{}); err == nil {
			t.Errorf("%q passes for a table", text)
		}
	}
}

func TestPagesThatAreNone(t *testing.T) {
	for text, want := range map[string]string{
		"<html>":                   "begin with a metric's name",
		"some_metric 1\n":          "no metrics of a server",
		"":                         "no metrics of a server",
		`{"models":[]}`:            "no model_stats",
		`{"model_stats":`:          "no statistics",
		"te_queue_size\n":          "no value",
		"te_queue_size one\n":      "no number",
		"te_queue_size{a=\"b} 1\n": "does not end",
		"te_queue_size{a} 1\n":     "not of the form",
		"te_queue_size{" + strings.Repeat(`a="b",`, 99): "more than 64 labels",
	} {
		if _, err := readPage([]byte(text), nil, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

func TestLabelsMayHoldAnything(t *testing.T) {
	p, err := parsePage([]byte("a{x=\"}\\\"\\n\\\\,\",y=\"2\",} 3 1700000000\n a 4 # {trace_id=\"1\"} 5\n"), func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	if a := p["a"]; len(a) != 2 || a[0].label("x") != "}\"\n\\," || a[0].label("y") != "2" || a[0].value != 3 || a[1].value != 4 {
		t.Errorf("%+v", p["a"])
	}
}

func TestACounterThatRunsBackwardsIsARestart(t *testing.T) {
	a, b := reading{server: "vLLM"}, reading{server: "vLLM"}
	a.add(fTotal, 5, 10)
	b.add(fTotal, 4, 12)
	if _, ok := b.since(&a); ok {
		t.Error("a smaller sum passes")
	}
	b = reading{server: "TGI"}
	b.add(fTotal, 6, 12)
	if _, ok := b.since(&a); ok {
		t.Error("another server passes")
	}
}

func FuzzReadPage(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.*")
	for _, name := range files {
		text, _ := os.ReadFile(name)
		f.Add(text, false)
		f.Add(text, true)
	}
	f.Fuzz(func(t *testing.T, text []byte, device bool) {
		r, err := readPage(text, []label{{"gpu", "0"}}, device)
		if err != nil {
			return
		}
		for i, n := range r.numbers {
			if !(n.sum >= 0) || !(n.count >= 0) {
				t.Errorf("field %d is %+v", i, n)
			}
		}
		zero := reading{server: r.server}
		for i := range zero.numbers {
			zero.numbers[i].told = true
		}
		d, _ := r.since(&zero)
		a := d.aggregate(time.Unix(0, 0), time.Unix(10, 0))
		for _, s := range a.Stages {
			if s < 0 {
				t.Errorf("a stage of %v", s)
			}
		}
	})
}

func FuzzReadSMI(f *testing.F) {
	f.Add([]byte("35, 1024, 81559\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var r reading
		if readSMI(text, &r) == nil && !(r.numbers[fMemory].sum >= 0) {
			t.Errorf("%+v", r.numbers)
		}
	})
}
