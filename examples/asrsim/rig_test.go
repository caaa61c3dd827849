package asrsim

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// exact is a server without jitter whose stages are round numbers:
// 10 ms preprocess, 3 x 1 ms + bytes copy in, 40 ms forward + 5 ms a request, 1 ms copy out, 2 ms postprocess.
func exact() Config {
	c := DefaultConfig()
	c.Jitter = 0
	c.ForwardBase, c.ForwardPerBatch, c.ForwardPerSecond = 40*time.Millisecond, 5*time.Millisecond, 0
	c.H2DCopies, c.CopyLatency, c.Bandwidth = 3, time.Millisecond, 1e15
	c.Preprocess, c.PreprocessPerSecond, c.Postprocess = 10*time.Millisecond, 0, 2*time.Millisecond
	c.PreprocessWorkers = 32
	return c
}

func start(t *testing.T, c Config) *Server {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// inProcess is a transport that calls a handler, so that time in a synctest
// bubble passes for both ends.
type inProcess struct{ http.Handler }

func (h inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

func post(ctx context.Context, h http.Handler, body []byte) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/asr", bytes.NewReader(body)))
	return w
}

// timing is one metric of a Server-Timing value.
type timing map[string]float64

func (m timing) dur() time.Duration { return time.Duration(m["dur"]*1e6 + 0.5) }

// parseTiming reads a Server-Timing value strictly.
func parseTiming(t *testing.T, value string) map[string]timing {
	t.Helper()
	all := map[string]timing{}
	for metric := range strings.SplitSeq(value, ", ") {
		name, params, _ := strings.Cut(metric, ";")
		all[name] = timing{}
		for param := range strings.SplitSeq(params, ";") {
			key, number, _ := strings.Cut(param, "=")
			v, err := strconv.ParseFloat(number, 64)
			if err != nil {
				t.Fatalf("Server-Timing %q: parameter %q of %q is no number", value, param, name)
			}
			all[name][key] = v
		}
	}
	return all
}
