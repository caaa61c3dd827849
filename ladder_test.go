package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"weir/examples/asrsim"
)

// speechFolder is a folder with short clips.
func speechFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for i, d := range []time.Duration{200, 250, 300} {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.wav", i)), asrsim.SynthesizeWAV(d*time.Millisecond, uint64(i)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// command runs weir in this process, in a folder of its own for what it writes.
func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, func(string) string { return "" }, &out, &errs)
	return code, out.String(), errs.String()
}

func serveTest(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL + "/asr"
}

func quick(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	time.Sleep(2 * time.Millisecond)
	w.Header().Set("Server-Timing", "queue;dur=0.5, forward;dur=1;batch=1")
	fmt.Fprint(w, `{"text":"ten of clubs"}`)
}

func TestALadderLeavesTheReportsThatWereAskedFor(t *testing.T) {
	t.Chdir(t.TempDir())
	url := strings.Replace(serveTest(t, quick), "http://", "http://me:s3cret@", 1)
	code, out, errs := command(t, "ladder", "--url", url, "--header", "X-Key: s3cret", "--audio", speechFolder(t), "--steps", "1,2", "--requests", "40", "--pause", "0s",
		"--record", "r.jsonl", "--html", "r.html", "--csv", "r.csv", "--markdown", "r.md", "--json", "--expect", "/text=clubs$")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, errs)
	}
	var report struct {
		Steps []struct{ Concurrency, Sent, Succeeded int }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil || len(report.Steps) != 2 || report.Steps[1].Succeeded != 40 {
		t.Errorf("%v: %s", err, out)
	}
	if !strings.Contains(errs, "step 2 of 2, concurrency 2: 40 requests") || strings.Contains(errs, "\r") {
		t.Errorf("progress that is no terminal's: %q", errs)
	}
	for file, want := range map[string]string{"r.html": "<svg", "r.csv": "concurrency,sent,ok,failed,mean ms", "r.md": "| concurrency | sent |", "r.jsonl": `{"run":{"kind":"ladder"`} {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s: %v, lacks %q", file, err, want)
		}
		if strings.Contains(string(b), "s3cret") {
			t.Errorf("%s holds a secret", file)
		}
	}
	code, again, errs := command(t, "report", "r.jsonl", "--json")
	if code != 0 || again != out {
		t.Errorf("report: exit %d, %s\n%s\n%s", code, errs, again, out)
	}
	code, zh, _ := command(t, "report", "--lang", "zh", "r.jsonl")
	if code != 0 || !strings.Contains(zh, "并发数") {
		t.Errorf("report --lang zh: exit %d\n%s", code, zh)
	}
	code, same, _ := command(t, "compare", "r.jsonl", "r.jsonl")
	if code != 0 || strings.Contains(same, "yes") || !strings.Contains(same, "+0.0 %") {
		t.Errorf("compare: exit %d\n%s", code, same)
	}
}

func TestExperimentsEndWithADocumentedCodeAndAClearMessage(t *testing.T) {
	t.Chdir(t.TempDir())
	speech := speechFolder(t)
	nobody := serveTest(t, quick)
	gone := httptest.NewServer(nil)
	gone.Close()
	var n atomic.Int64
	breaks := serveTest(t, func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) > 60 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		quick(w, r)
	})
	errorBody := serveTest(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{"error":"no model is loaded"}`)
	})
	for _, c := range []struct {
		name string
		args string
		code int
		want string // of stderr
		out  string // of stdout
	}{
		{"unreachable", "ladder --url " + gone.URL + "/asr --audio " + speech, 1, "connection_refused: nothing listens there", ""},
		{"unreachable, probe", "probe --url " + gone.URL + "/asr --audio " + speech, 1, "connection_refused: nothing listens there", ""},
		{"wrong path of audio", "ladder --url " + nobody + " --audio /nowhere.wav", 2, `"/nowhere.wav": no such file`, ""},
		{"no audio", "ladder --url " + nobody, 2, "give files or folders with --audio", ""},
		{"no URL", "ladder --audio " + speech, 2, "write http://host:port/path", ""},
		{"wrong steps", "ladder --url " + nobody + " --audio " + speech + " --steps 1,x", 2, "write 1,2,4,8,16 or auto", ""},
		{"wrong rate", "ladder --url " + nobody + " --audio " + speech + " --rate 0", 2, "no number of requests per second", ""},
		{"wrong language", "ladder --url " + nobody + " --audio " + speech + " --lang fr", 2, "use en or zh", ""},
		{"wrong header", "ladder --url " + nobody + " --audio " + speech + " --header key", 2, "write 'Name: value'", ""},
		{"no token", "ladder --url " + nobody + " --audio " + speech + " --token-env NONE", 2, "export the token", ""},
		{"wrong flag", "ladder --stepz 1", 2, "flag provided but not defined: -stepz", ""},
		{"200 with an error", "ladder --url " + errorBody + " --audio " + speech + " --expect /text", 1, "unexpected_answer: the answer is not what --expect asks for", ""},
		{"all fail in the middle", "ladder --url " + breaks + " --audio " + speech + " --requests 20 --pause 0s --record none", 3, "no request succeeded at concurrency", "status_500"},
		{"nothing to vary", "sweep --url " + nobody + " --audio " + speech, 2, "give --vary NAME=V1,V2,...", ""},
		{"no setter", "sweep --url " + nobody + " --audio " + speech + " --vary a=1,2", 2, "has no --set a=", ""},
		{"no base", "sweep --url " + nobody + " --audio " + speech + " --vary a=1,2 --set a=cmd:true", 2, "give --base a=V", ""},
		{"nothing to restore", "sweep --restore", 0, "", "nothing to restore"},
		{"no record", "report nothing.jsonl", 1, "no such file", ""},
		{"no file", "report", 2, "give one file", ""},
		{"one file", "compare a", 2, "give two files", ""},
		{"help", "ladder --help", 0, "", "Exit codes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errs := command(t, strings.Fields(c.args)...)
			if code != c.code || !strings.Contains(errs, c.want) || !strings.Contains(out, c.out) {
				t.Errorf("exit %d, want %d\nstdout: %s\nstderr: %s\nwant %q and %q", code, c.code, out, errs, c.out, c.want)
			}
		})
	}
	if left, _ := filepath.Glob("weir-*.jsonl"); len(left) > 0 {
		t.Errorf("runs that measured nothing left %q", left)
	}
}

func TestCtrlCLeavesAPartialReportAndItsRecord(t *testing.T) {
	t.Chdir(t.TempDir())
	url := serveTest(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(20 * time.Millisecond)
		quick(w, r)
	})
	p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "ladder", "--url", url, "--audio", speechFolder(t), "--steps", "1,2,4", "--requests", "60", "--record", "r.jsonl", "--pause", "0s")
	p.says("step 1 of 3, concurrency 1: 60 requests")
	time.Sleep(100 * time.Millisecond) // into the second step
	if code := p.end(os.Interrupt); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	for _, want := range []string{"the run was interrupted", "(interrupted)", "raw observations: r.jsonl"} {
		if !strings.Contains(p.output(), want) {
			t.Errorf("output lacks %q:\n%s", want, p.output())
		}
	}
	code, out, errs := command(t, "report", "r.jsonl")
	if code != 0 || !regexp.MustCompile(`(?m)^1 +60 60 `).MatchString(out) {
		t.Errorf("exit %d: %s\n%s", code, errs, out)
	}
}

// The whole path: a server of the sweep's own behind a weir whose limit it
// changes without a restart, and a Ctrl-C that leaves all as it was.
func TestASweepOfWeirsOwnLimitFindsItTooLowAndRestoresIt(t *testing.T) {
	t.Chdir(t.TempDir())
	addresses := freePorts(t, 3)
	config := fmt.Sprintf("listen: %s\nadmin: %s\nserver: http://%s\nmax_concurrency: 2 # for now\nmax_queue_size: 64\n", addresses[0], addresses[1], addresses[2])
	if err := os.WriteFile("weir.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	w := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "serve", "--config", "weir.yaml")
	w.says("listen=")
	t.Setenv("WEIR_TEST_MAIN", "1") // for the server that the sweep starts
	args := []string{
		"sweep", "--url", "http://" + addresses[0] + "/asr", "--audio", speechFolder(t), "--weir", addresses[1],
		"--concurrency", "8", "--requests", "64", "--repeats", "1", "--record", "s.jsonl", "--html", "s.html",
		"--vary", "max_concurrency=4", "--set", "max_concurrency=weir:weir.yaml," + addresses[1],
		"--vary", "max_batch_size=4", "--base", "max_batch_size=16",
		"--set", "max_batch_size=run:" + os.Args[0] + " asrsim --scenario queue --listen " + addresses[2] + " --max-batch-size {max_batch_size}",
	}
	code, out, errs := command(t, args...)
	if code != 0 || !strings.Contains(out, "Verdict: QUEUE") || !strings.Contains(out, "raise max_concurrency from 2 to 4") {
		t.Errorf("exit %d\n%s\n%s", code, out, errs)
	}
	if !strings.Contains(out, "max_concurrency              2*             16    1") {
		t.Errorf("no row of the base:\n%s", out)
	}
	wantFile(t, "weir.yaml", config)

	p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], args...)
	p.says(`max_concurrency=4: 64 requests|max_concurrency=2: 64 requests`)
	if code := p.end(syscall.SIGINT); code != 130 {
		t.Errorf("exit code %d after Ctrl-C, want 130", code)
	}
	wantFile(t, "weir.yaml", config)
	if left, _ := filepath.Glob("*restore*"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func wantFile(t *testing.T, name, want string) {
	t.Helper()
	if b, err := os.ReadFile(name); err != nil || string(b) != want {
		t.Errorf("%s is %q (%v), want %q", name, b, err, want)
	}
}

func freePorts(t *testing.T, n int) (addresses []string) {
	t.Helper()
	for range n {
		s := httptest.NewServer(nil)
		addresses = append(addresses, s.Listener.Addr().String())
		defer s.Close()
	}
	return addresses
}

func TestProbeSplitsARequest(t *testing.T) {
	t.Chdir(t.TempDir())
	code, out, errs := command(t, "probe", "--url", serveTest(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(30 * time.Millisecond)
		w.Header().Set("Server-Timing", "queue;dur=0.5, preprocess;dur=4, forward;dur=25")
	}), "--audio", filepath.Join(speechFolder(t), "0.wav"), "--repeats", "10", "--record", "none")
	if code != 0 || !strings.Contains(out, "forward") || !strings.Contains(out, "Largest stage: forward (0.wav)") {
		t.Errorf("exit %d\n%s\n%s", code, out, errs)
	}
}

func TestAnOpenLoopAndWorkersFromTheCommandLine(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("WEIR_TEST_MAIN", "1")
	url := serveTest(t, quick)
	code, out, errs := command(t, "ladder", "--url", url, "--audio", speechFolder(t), "--rate", "100,200", "--requests", "60", "--workers", "2", "--pause", "0s", "--record", "none")
	if code != 0 || !strings.Contains(out, "200/s") {
		t.Errorf("exit %d\n%s\n%s", code, out, errs)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if code := run(ctx, []string{"ladder", "--url", url, "--audio", speechFolder(t), "--record", "none"}, os.Getenv, io.Discard, io.Discard); code != exitInterrupted {
		t.Errorf("exit code %d when interrupted before the first step", code)
	}
}
