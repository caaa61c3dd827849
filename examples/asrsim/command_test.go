package asrsim

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// output is a buffer that two goroutines may use.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func TestTheCommandServesUntilItIsTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var stdout, stderr output
	code := make(chan int, 1)
	go func() {
		code <- Main(ctx, []string{"--listen", "127.0.0.1:0", "--scenario=host", "--preprocess", "1ms"}, &stdout, &stderr)
	}()
	address := awaitAddress(t, &stdout)
	res, err := http.Post(address+"/asr", "audio/wav", bytes.NewReader(oneSecond))
	if err != nil || res.StatusCode != 200 {
		t.Fatalf("%v, %v", res, err)
	}
	res.Body.Close()
	if m := parseTiming(t, res.Header.Get("Server-Timing")); m["forward"]["batch"] != 1 {
		t.Errorf("Server-Timing %q", res.Header.Get("Server-Timing"))
	}
	cancel()
	if got := <-code; got != 0 || stderr.String() != "" {
		t.Errorf("exit code %d, stderr %q: want 0 and nothing", got, stderr.String())
	}
	if _, err := net.Dial("tcp", strings.TrimPrefix(address, "http://")); err == nil {
		t.Error("it still listens")
	}
}

func awaitAddress(t *testing.T, stdout *output) string {
	t.Helper()
	for range 1000 {
		if line, _, whole := strings.Cut(stdout.String(), "\n"); whole {
			return strings.TrimPrefix(line, "asrsim serves ")
		}
		time.Sleep(5 * msec)
	}
	t.Fatal("no address was printed within 5 s")
	return ""
}

func TestWrongFlagsExitWith2AndSayWhatIsRight(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"--max-batch-size 0", "max-batch-size is 0: give at least 1"},
		{"--instances 0", "instances is 0: give at least 1"},
		{"--preprocess-workers 0", "preprocess-workers is 0: give at least 1"},
		{"--max-queue-size -1", "max-queue-size is -1: give at least 0"},
		{"--h2d-copies -1", "h2d-copies is -1: give at least 0"},
		{"--forward-base -1ms", "forward-base is -1ms: give 0s or more"},
		{"--bandwidth 0", "bandwidth is 0: give bytes per second above 0"},
		{"--jitter NaN", "jitter is NaN: give 0"},
		{"--server-timing body", `server-timing is "body": give header, trailer or off`},
		{"--scenario gpu", "take one of queue, compute"},
		{"--batch-delay 5", "invalid value"},
		{"--unknown", "not defined"},
		{"serve", `unexpected argument "serve"`},
	} {
		var stdout, stderr bytes.Buffer
		if code := Main(t.Context(), strings.Fields(test.args), &stdout, &stderr); code != 2 {
			t.Errorf("%s: exit code %d: want 2", test.args, code)
		}
		if !strings.Contains(stderr.String(), test.want) || stdout.Len() > 0 {
			t.Errorf("%s: stderr %q: want %q in it", test.args, stderr.String(), test.want)
		}
	}
}

func TestHelpNamesEveryFlagAndExitsWith0(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := Main(t.Context(), []string{"-h"}, &stdout, &stderr); code != 0 || stderr.Len() > 0 {
		t.Errorf("exit code %d, stderr %q", code, stderr.String())
	}
	for flag := range strings.FieldsSeq(`listen scenario max-batch-size batch-delay max-queue-size instances
		forward-base forward-per-batch forward-per-second h2d-copies copy-latency bandwidth
		preprocess preprocess-per-second preprocess-workers postprocess jitter seed server-timing`) {
		if !strings.Contains(stdout.String(), "  -"+flag+" ") {
			t.Errorf("help does not tell of --%s", flag)
		}
	}
}

func TestAnAddressInUseExitsWith1(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var stdout, stderr bytes.Buffer
	if code := Main(t.Context(), []string{"--listen", l.Addr().String()}, &stdout, &stderr); code != 1 {
		t.Errorf("exit code %d: want 1", code)
	}
	if !strings.Contains(stderr.String(), "choose another address with --listen") {
		t.Errorf("stderr %q names no remedy", stderr.String())
	}
}

func TestFlagsWinOverTheScenario(t *testing.T) {
	o, err := parse([]string{"--forward-base", "7ms", "--scenario", "host"})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := FindScenario("host")
	if o.ForwardBase != 7*msec || o.PreprocessWorkers != s.Server.PreprocessWorkers || o.Preprocess != s.Server.Preprocess {
		t.Errorf("options %+v", o)
	}
}
