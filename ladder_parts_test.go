//go:build parts

package main

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"weir/examples/asrsim"
)

// ladderReport is the part of weir ladder --json and weir sweep --json that
// the tests below read.
type ladderReport struct {
	Steps []struct {
		Concurrency, Sent, Succeeded int
		Mean                         float64            `json:"mean_ms"`
		Throughput                   float64            `json:"throughput_rps"`
		Stages                       map[string]float64 `json:"stages_ms"`
	}
	Knee struct {
		Concurrency, Low int
		Note             string
	}
	Rounds []struct {
		Factors    map[string]int
		Throughput float64 `json:"throughput_rps"`
		Queue      float64 `json:"queue_ms"`
	}
	Verdict struct {
		Cause, Advice string
		Evidence      []string
	}
}

func experimentJSON(t *testing.T, args ...string) (r ladderReport) {
	t.Helper()
	code, out, errs := command(t, append(args, "--json", "--record", "none")...)
	if code != 0 {
		t.Fatalf("weir %q: exit %d\n%s", args, code, errs)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

// wrk measures the mean latency of one connection with an established tool.
func wrk(t *testing.T, url, audio string) time.Duration {
	t.Helper()
	script := filepath.Join(t.TempDir(), "post.lua")
	lua := fmt.Sprintf("wrk.method = 'POST'\nlocal f = io.open(%q, 'rb')\nwrk.body = f:read('*a')\nf:close()\nwrk.headers['Content-Type'] = 'audio/wav'\n", audio)
	if err := os.WriteFile(script, []byte(lua), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("wrk", "-t1", "-c1", "-d2s", "-s", script, url).CombinedOutput()
	if err != nil {
		t.Fatalf("wrk: %v\n%s", err, out)
	}
	m := regexp.MustCompile(`Latency\s+(\S+)`).FindSubmatch(out)
	if m == nil || strings.Contains(string(out), "Non-2xx") {
		t.Fatalf("wrk says:\n%s", out)
	}
	d, err := time.ParseDuration(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestTheLadderAndWrkAgreeOnTheLatencyOfOneConnection(t *testing.T) {
	c := asrsim.DefaultConfig()
	c.Jitter = 0
	sim, err := asrsim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer sim.Close()
	web := httptest.NewServer(sim)
	defer web.Close()
	clip := filepath.Join(speechFolder(t), "0.wav")
	var ratios []float64
	for range 5 { // in turn, so that the machine's mood meets both
		r := experimentJSON(t, "ladder", "--url", web.URL+"/asr", "--audio", clip, "--steps", "1", "--requests", "40")
		theirs := float64(wrk(t, web.URL+"/asr", clip)) / 1e6
		ratios = append(ratios, r.Steps[0].Mean/theirs)
		t.Logf("weir %.3f ms, wrk %.3f ms", r.Steps[0].Mean, theirs)
	}
	slices.Sort(ratios)
	if ratios[2] < 0.95 || ratios[2] > 1.05 {
		t.Errorf("weir's mean over wrk's: %.3f, want within 5 %%", ratios)
	}
}

func realSpeech(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"cards/001.wav", "cards/003.wav"} {
		b, err := os.ReadFile(speech + name)
		if err != nil {
			t.Fatalf("%v; `make parts` installs it", err)
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(name)), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// One decoder, one request at a time: the knee is 1 and requests wait in the
// server.
func TestARealRecogniserOfOneWorkerIsFullAtOneRequest(t *testing.T) {
	r := experimentJSON(t, "ladder", "--url", beginRecogniser(t)+"/asr", "--audio", realSpeech(t), "--steps", "1,2,4", "--requests", "40", "--expect", "/text=^(ten|seven) of clubs$")
	if r.Knee.Concurrency > 2 || r.Knee.Concurrency > 0 && r.Knee.Low > 1 {
		t.Errorf("knee %+v, want 1", r.Knee)
	}
	if r.Knee.Concurrency == 0 { // a machine whose speed changes while it is measured
		t.Logf("no knee: %s", r.Knee.Note)
	}
	last := r.Steps[2]
	if last.Succeeded != 40 || last.Stages["queue"] < 0.5*last.Mean {
		t.Errorf("with four at once %d of %d succeeded, %.0f of %.0f ms in the server's queue", last.Succeeded, last.Sent, last.Stages["queue"], last.Mean)
	}
	if r.Verdict.Cause == "healthy" || r.Verdict.Cause == "client" {
		t.Errorf("verdict %+v", r.Verdict)
	}
}

func TestASweepOfARealRecognisersWorkersSeesTheSecondCore(t *testing.T) {
	address := free(t, 1)[0]
	_, port, _ := strings.Cut(address, ":")
	r := experimentJSON(t, "sweep", "--url", "http://"+address+"/asr", "--audio", realSpeech(t), "--concurrency", "4", "--requests", "24", "--repeats", "2",
		"--vary", "workers=1,2", "--base", "workers=1", "--set", "workers=run:"+python+" examples/pocketsphinx/server.py --port "+port+" --workers {workers}")
	if len(r.Rounds) != 2 || r.Rounds[1].Factors["workers"] != 2 {
		t.Fatalf("rounds %+v", r.Rounds)
	}
	one, two := r.Rounds[0], r.Rounds[1]
	if two.Queue > 0.8*one.Queue {
		t.Errorf("a second worker left the queue at %.0f of %.0f ms", two.Queue, one.Queue)
	}
	t.Logf("throughput %.2f and %.2f requests/s; %s: %q", one.Throughput, two.Throughput, r.Verdict.Cause, r.Verdict.Evidence)
	if gain := two.Throughput / one.Throughput; gain > 1.25 && r.Verdict.Cause != "queue" && r.Verdict.Cause != "unknown" { // unknown: within the noise of a busy machine
		t.Errorf("a second worker brought %.2f times the throughput, and the verdict is %s", gain, r.Verdict.Cause)
	}
}
