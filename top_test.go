package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// loadedWeir is a running weir that has judged some requests.
func loadedWeir(t *testing.T) *sidecar {
	t.Helper()
	server, _, release := slowServer(t)
	close(release)
	w := beginWeir(t, server, nil, "--window", "1s", "--max-concurrency", "1")
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			for range 10 {
				r, err := http.Post(w.url+"/asr", "audio/wav", strings.NewReader("sound"))
				if err != nil {
					t.Error(err)
					return
				}
				r.Body.Close()
			}
		})
	}
	all.Wait()
	eventually(t, 10*time.Second, "a verdict on 60 requests", func() bool {
		_, body := get(t, w.admin+"/api/verdict?window=5m") // the latest windows may hold a part of them
		return strings.Contains(body, `"requests":60`)
	})
	return w
}

func TestVerdictTopAndClassifyAskARunningWeir(t *testing.T) {
	w := loadedWeir(t)
	code, out, errs := command(t, "verdict", w.admin)
	if code != 0 || !strings.Contains(out, "POST /asr") || !strings.Contains(out, " requests, ") || !strings.Contains(out, "max_concurrency 1") || strings.Contains(out, "\x1b") {
		t.Errorf("verdict: %d %s\n%s", code, errs, out)
	}
	code, out, _ = command(t, "verdict", "--json", strings.TrimPrefix(w.admin, "http://"))
	if code != 0 || !json.Valid([]byte(out)) {
		t.Errorf("verdict --json: %d\n%s", code, out)
	}
	code, out, errs = command(t, "verdict", "--window", "5m", w.admin)
	if code != 0 || !strings.Contains(out, "60 requests") {
		t.Errorf("verdict over five minutes: %d %s\n%s", code, errs, out)
	}
	if code, _, errs = command(t, "verdict", "--window", "7m", w.admin); code != 1 || !strings.Contains(errs, "use 1m, 5m or 30m") {
		t.Errorf("verdict over seven minutes: %d %s", code, errs)
	}
	code, out, errs = command(t, "top", "--count", "2", "--interval", "100ms", w.admin)
	if code != 0 || strings.Count(out, "POST_/asr ") != 2 || strings.Contains(out, "\x1b") {
		t.Errorf("top where there is no terminal: %d %s\n%s", code, errs, out)
	}
	picture, err := look(t.Context(), w.admin, style{terminal: true})
	if err != nil || !strings.Contains(picture, "forward       P50") || !strings.Contains(picture, "rate  ") || strings.Contains(picture, "\x1b") {
		t.Errorf("top without colours: %v\n%s", err, picture)
	}
	picture, err = look(t.Context(), w.admin, style{terminal: true, colour: true})
	if err != nil || !strings.Contains(picture, "\x1b[1;") {
		t.Errorf("top with colours: %v\n%s", err, picture)
	}
	code, out, errs = command(t, "classify", "--window", "1s", w.admin+"/api/requests?n=1000")
	if code != 0 || !strings.Contains(out, "POST /asr") || errs != "" {
		t.Errorf("classify: %d %s\n%s", code, errs, out)
	}
	_, lines := get(t, w.admin+"/api/requests?n=1000")
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(file, []byte("{\"start\":\n"+lines+"nonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs = command(t, "classify", "--json", "--fail-on", "client,healthy,queue,unknown,host,compute,mixed", file)
	if code != 3 || !strings.Contains(errs, ": line 1: ") || !strings.Contains(errs, ": line 62: ") || !strings.Contains(errs, "60 requests read, 2 could not be used") {
		t.Errorf("classify with bad lines: %d %s\n%s", code, errs, out)
	}
	var v verdictLine
	if err := json.Unmarshal([]byte(out), &v); err != nil || v.Class != "POST /asr" || v.Rule == "" {
		t.Errorf("classify --json: %v %s", err, out)
	}
}

func TestCommandsThatCannotWorkSayWhy(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"classify", 2, "one file or address"},
		{"classify --help", 0, "Exit codes"},
		{"classify --window 1ms x", 2, "between 100ms and 1h"},
		{"classify --fail-on slow x", 2, `"slow", which is no cause`},
		{"classify /does/not/exist", 1, "/does/not/exist"},
		{"classify " + empty, 1, "no usable record"},
		{"classify http://127.0.0.1:1/", 1, "refused"},
		{"verdict 127.0.0.1:1", 1, "refused"},
		{"verdict --help", 0, "Exit codes"},
		{"verdict a b", 2, "one address"},
		{"top 127.0.0.1:1", 1, "refused"},
		{"top --interval 1ms", 2, "at least 100ms"},
		{"top --help", 0, "NO_COLOR"},
	} {
		code, out, errs := command(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(out+errs, c.says) {
			t.Errorf("weir %s: exit code %d, want %d and %q: %s%s", c.args, code, c.code, c.says, out, errs)
		}
	}
}

func TestWhatAClientNamedDoesNotSteerTheTerminal(t *testing.T) {
	var b strings.Builder
	writeVerdict(&b, classView{Class: "POST /\x1b[2J\u009b1m", Cause: "queue"}, plainStyle)
	if strings.ContainsAny(b.String(), "\x1b\u009b") {
		t.Errorf("%q", b.String())
	}
}

func TestBarsAndSparklines(t *testing.T) {
	for share, want := range map[float64]string{0: "····", 0.5: "██··", 0.53: "██▏·", 1: "████", 7: "████", -1: "····"} {
		if got := bar(share, 4); got != want {
			t.Errorf("the bar of %v is %q: want %q", share, got, want)
		}
	}
	if got := sparkline([]float64{0, 1, 8, 4}); got != "▁▂█▅" {
		t.Errorf("the sparkline is %q", got)
	}
}
