package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestMain makes the test binary a weir when it is run as one: the tests below
// send signals to a real process.
func TestMain(m *testing.M) {
	if os.Getenv("WEIR_TEST_MAIN") != "" {
		main()
	}
	os.Exit(m.Run())
}

// process is a program that a test started.
type process struct {
	*testing.T
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed once it ended
	mu   sync.Mutex
	out  bytes.Buffer // stdout and stderr
	news chan struct{}
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case p.news <- struct{}{}:
	default:
	}
	return p.out.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// begin starts a program; the end of the test ends it.
func begin(t *testing.T, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{T: t, name: filepath.Base(name), cmd: exec.Command(name, args...), done: make(chan struct{}), news: make(chan struct{}, 1)}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%s: %v; `make parts` installs what the tests need", name, err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(20 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", p.name, p.output())
		}
	})
	return p
}

// says waits for a line that matches, and returns its submatches.
func (p *process) says(pattern string) []string {
	p.Helper()
	re := regexp.MustCompile(pattern)
	deadline := time.After(60 * time.Second)
	for {
		if m := re.FindStringSubmatch(p.output()); m != nil {
			return m
		}
		select {
		case <-p.news:
		case <-p.done:
			if m := re.FindStringSubmatch(p.output()); m != nil {
				return m
			}
			p.Fatalf("%s ended (%v) before it said %q", p.name, p.cmd.ProcessState, pattern)
		case <-deadline:
			p.Fatalf("%s never said %q", p.name, pattern)
		}
	}
}

// end sends the signal and returns the exit code.
func (p *process) end(s os.Signal) int {
	p.Helper()
	_ = p.cmd.Process.Signal(s)
	return p.exit()
}

// exit waits for the end and returns the exit code.
func (p *process) exit() int {
	p.Helper()
	select {
	case <-p.done:
	case <-time.After(60 * time.Second):
		p.Fatalf("%s did not end", p.name)
	}
	return p.cmd.ProcessState.ExitCode()
}

// sidecar is a weir in a process of its own.
type sidecar struct {
	*process
	url, admin string
}

func beginWeir(t *testing.T, server string, env []string, args ...string) *sidecar {
	t.Helper()
	args = append([]string{"serve", "--server", server, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)
	p := begin(t, append([]string{"WEIR_TEST_MAIN=1"}, env...), os.Args[0], args...)
	m := p.says(`listen=(\S+) .*page=http://([^/\s]+)/`)
	return &sidecar{p, "http://" + m[1], "http://" + m[2]}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, within)
		}
	}
}

// slowServer answers after release is closed.
func slowServer(t *testing.T) (url string, came chan struct{}, release chan struct{}) {
	t.Helper()
	came, release = make(chan struct{}, 100), make(chan struct{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		came <- struct{}{}
		<-release
		w.Header().Set("Server-Timing", "forward;dur=1;batch=2")
		fmt.Fprint(w, "text")
	})}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return "http://" + l.Addr().String(), came, release
}

func TestSIGTERMFinishesWhatIsInFlightAndExitsWithZero(t *testing.T) {
	server, came, release := slowServer(t)
	w := beginWeir(t, server, nil)
	answers := make(chan string, 1)
	go func() {
		r, err := http.Post(w.url+"/asr", "audio/wav", strings.NewReader("sound"))
		if err != nil {
			answers <- err.Error()
			return
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		answers <- string(b)
	}()
	<-came
	_ = w.cmd.Process.Signal(syscall.SIGTERM)
	eventually(t, 10*time.Second, "the port is closed", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	close(release)
	if a := <-answers; a != "text" {
		t.Errorf("the request in flight got %q", a)
	}
	if code := w.exit(); code != 0 {
		t.Errorf("exit code %d: want 0", code)
	}
}

func TestAReloadRaisesTheLimitAndABadFileIsRefused(t *testing.T) {
	server, came, release := slowServer(t)
	defer close(release)
	file := filepath.Join(t.TempDir(), "weir.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("max_concurrency: 1\n")
	w := beginWeir(t, server, nil, "--config", file)
	for range 3 {
		go func() {
			r, err := http.Post(w.url+"/asr", "", strings.NewReader("sound"))
			if err == nil {
				r.Body.Close()
			}
		}()
	}
	<-came
	write("max_concurency: 3\n")
	_ = w.cmd.Process.Signal(syscall.SIGHUP)
	w.says(`refused.*max_concurency`)
	write("max_concurrency: 3\n")
	_ = w.cmd.Process.Signal(syscall.SIGHUP)
	<-came
	<-came // only a limit of 3 lets them in: none has been answered
}

func TestTheAdminPortTellsOfARequest(t *testing.T) {
	server, _, release := slowServer(t)
	close(release)
	w := beginWeir(t, server, nil, "--window", "1s")
	for range 50 {
		r, err := http.Post(w.url+"/asr?token=secret", "", strings.NewReader("sound"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	var v struct {
		Classes []struct {
			Class, Cause string
			Requests     int
			Shares       map[string]float64
		}
	}
	eventually(t, 10*time.Second, "the verdict", func() bool {
		_, body := get(t, w.admin+"/api/verdict")
		if err := json.Unmarshal([]byte(body), &v); err != nil {
			t.Fatal(err)
		}
		return len(v.Classes) == 1 && v.Classes[0].Requests == 50
	})
	if c := v.Classes[0]; c.Class != "POST /asr" || c.Shares["forward"] <= 0 {
		t.Errorf("the verdict is %+v", c)
	}
	_, records := get(t, w.admin+"/api/requests?n=1000")
	if n := strings.Count(records, "\n"); n != 50 || strings.Contains(records, "secret") {
		t.Errorf("%d records: want 50, and no secret", n)
	}
	_, metrics := get(t, w.admin+"/metrics")
	for _, line := range []string{
		`weir_seconds_total{weir_class="POST /asr",weir_part="forward"}`, `weir_queue_depth 0`, `weir_observations_total{weir_timing_source="header"} 50`,
		`http_server_request_duration_seconds_count{http_request_method="POST",http_response_status_code="200",http_route="/asr"`,
		`weir_verdict{weir_class="POST /asr",weir_verdict_cause="queue"} `, `weir_fit_total{weir_class="POST /asr",weir_fit_term="w"} 25`,
	} {
		if !strings.Contains(metrics, line) {
			t.Errorf("/metrics has no %s", line)
		}
	}
	if strings.Contains(metrics, "secret") {
		t.Error("/metrics tells the secret")
	}
	if code, _ := get(t, w.admin+"/readyz"); code != 200 {
		t.Errorf("/readyz says %d", code)
	}
	if code, body := get(t, w.admin+"/drain"); code != 200 {
		t.Errorf("/drain says %d %s", code, body)
	}
	if code, _ := get(t, w.admin+"/readyz"); code != 503 {
		t.Errorf("/readyz says %d after /drain", code)
	}
	r, err := http.Post(w.url+"/asr", "", strings.NewReader("sound"))
	if err != nil || r.StatusCode != 503 || !r.Close {
		t.Errorf("a drained weir answers %v, %v", r, err)
	}
}

func TestCommands(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("listen: :8080\nmax_concurrancy: 3\nqueue_timeout: 3000\nwindow: [1]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := filepath.Join(t.TempDir(), "good.yaml")
	if err := os.WriteFile(good, []byte("max_concurrency: 3\nqueue_timeout: 3s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"", 2, []string{"weir serve"}},
		{"help", 0, []string{"weir serve", "Exit codes"}},
		{"nonsense", 2, []string{`no command "nonsense"`}},
		{"version", 0, []string{"weir ", "go1."}},
		{"serve --help", 0, []string{"--max-concurrency", "--queue-timeout", "WEIR_"}},
		{"serve --max-concurrancy 3", 2, []string{"max-concurrancy", "max-concurrency"}},
		{"serve --window 3", 2, []string{"window"}},
		{"check", 2, []string{"one file"}},
		{"check " + bad, 2, []string{":2:", "max_concurrency", ":3:", "3000", ":4:", "window"}},
		{"check " + good, 0, []string{"no mistakes"}},
		{"check --print " + good, 0, []string{"max_concurrency: 3", "good.yaml:1", "default"}},
		{"check /does/not/exist", 2, []string{"/does/not/exist"}},
		{"demo --scenario nonsense", 2, []string{"queue, compute"}},
		{"asrsim --help", 0, []string{"forward-base"}},
		{"serve --listen 256.0.0.1:1", 1, []string{"256.0.0.1:1"}},
	} {
		t.Run(c.args, func(t *testing.T) {
			var out bytes.Buffer
			code := run(context.Background(), strings.Fields(c.args), func(string) string { return "" }, &out, &out)
			if code != c.code {
				t.Errorf("exit code %d: want %d", code, c.code)
			}
			for _, s := range c.says {
				if !strings.Contains(out.String(), s) {
					t.Errorf("nothing says %q:\n%s", s, &out)
				}
			}
			for l := bufio.NewScanner(bytes.NewReader(out.Bytes())); l.Scan(); {
				if n := len([]rune(l.Text())); n > 80 && !strings.Contains(c.args, "check") && !strings.Contains(l.Text(), "weir:") {
					t.Errorf("a line has %d columns: %s", n, l.Text())
				}
			}
		})
	}
}
