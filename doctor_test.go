package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// pages is a server that answers some paths.
func pages(t *testing.T, texts map[string]string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := texts[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func fixture(t *testing.T, name string) string {
	text, err := os.ReadFile("proxy/evidence/testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// unused is an address where nobody listens.
func unused(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

func runDoctor(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(context.Background(), append([]string{"doctor"}, args...), func(string) string { return "" }, &out, &err)
	return code, out.String(), err.String()
}

func TestDoctorTellsWhatAServerTellsAndWhatWouldAddMore(t *testing.T) {
	none := unused(t) + "/metrics"
	t.Setenv("PATH", "") // this machine's own nvidia-smi is not what the test is about
	for name, c := range map[string]struct {
		pages map[string]string
		want  []string
		not   []string
	}{
		"vLLM with its page": {map[string]string{"/v1/models": `{"data": [{"owned_by": "vllm"}]}`, "/metrics": fixture(t, "vllm.prom")},
			[]string{"is vLLM.", "total, queue, forward, requests waiting now, requests running now", "--server-metrics URL/metrics", "--otlp-traces-endpoint", "--enable-per-request-metrics", "no   the device's load", "dcgm-exporter"},
			[]string{"--disable-log-stats"}},
		"vLLM without": {map[string]string{"/v1/models": `{"data": [{"owned_by": "vllm"}]}`},
			[]string{"is vLLM.", "no   its own figures", "leave out --disable-log-stats"}, []string{"--server-metrics URL"}},
		"Triton": {map[string]string{"/v2": `{"name":"triton","version":"2.60.0"}`, "/v2/models/stats": fixture(t, "triton-stats.json"), "/metrics": fixture(t, "triton.prom")},
			[]string{"is Triton.", "each batch size's cost", "--server-metrics URL/v2/models/stats", "mode=opentelemetry", "yes  the device's load by URL/metrics", "--device URL/metrics"}, nil},
		"speaches": {map[string]string{"/openapi.json": `{"info":{"title":"speaches"}}`},
			[]string{"is speaches.", "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318", "stages.ASGI(app)"}, nil},
		"one that only tells totals": {map[string]string{"/metrics": fixture(t, "xinference.prom")},
			[]string{"is Xinference.", "tell no queue of its own"}, nil},
		"unknown": {map[string]string{"/": "hello"},
			[]string{"a server that weir does not know", "stages.py", "weir serve --server URL"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			url := pages(t, c.pages)
			code, out, stderr := runDoctor("--server", url, "--device", none)
			if code != exitOK || stderr != "" {
				t.Fatalf("exit %d: %s", code, stderr)
			}
			for _, text := range c.want {
				if text = strings.ReplaceAll(text, "URL", url); !strings.Contains(out, text) {
					t.Errorf("no %q in\n%s", text, out)
				}
			}
			for _, text := range c.not {
				if text = strings.ReplaceAll(text, "URL", url); strings.Contains(out, text) {
					t.Errorf("%q is in\n%s", text, out)
				}
			}
		})
	}
}

func TestDoctorsExitCodes(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--server", unused(t)}, exitError, "cannot be reached"},
		{[]string{"--server", "localhost:8000"}, exitUsage, "http://host:port"},
		{[]string{"--metrics", "x"}, exitUsage, "--metrics: "},
		{[]string{"--what"}, exitUsage, "flag provided but not defined"},
		{[]string{"--help"}, exitOK, "sends no audio"},
	} {
		if code, _, stderr := runDoctor(c.args...); code != c.code || !strings.Contains(stderr, c.says) {
			t.Errorf("%v: exit %d, %q", c.args, code, stderr)
		}
	}
}
