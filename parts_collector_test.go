//go:build parts

package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const collectorConfig = `
receivers: {otlp: {protocols: {grpc: {endpoint: "%s"}, http: {endpoint: "%s"}}}}
exporters: {debug: {verbosity: detailed, use_internal_logger: false}}
service:
  telemetry: {metrics: {level: none}, logs: {level: warn}}
  pipelines:
    traces: {receivers: [otlp], exporters: [debug]}
    metrics: {receivers: [otlp], exporters: [debug]}
    logs: {receivers: [otlp], exporters: [debug]}
`

// All three signals arrive in a real OpenTelemetry Collector, over both of
// OTLP's transports.
func TestACollectorTakesAllSignals(t *testing.T) {
	for i, protocol := range []string{"grpc", "http/protobuf"} {
		t.Run(protocol, func(t *testing.T) {
			a := free(t, 2)
			config := filepath.Join(t.TempDir(), "collector.yaml")
			if err := os.WriteFile(config, fmt.Appendf(nil, collectorConfig, a[0], a[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			c := begin(t, nil, filepath.Join(partsFolder(t), "bin", "collector"), "--config", "file:"+config)
			eventually(t, 60*time.Second, "the collector is up", func() bool {
				r, err := http.Post("http://"+a[1]+"/v1/traces", "application/json", strings.NewReader("{}"))
				if err != nil {
					return false
				}
				r.Body.Close()
				return r.StatusCode == 200
			})
			server, _, release := slowServer(t)
			close(release)
			w := beginWeir(t, server, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=" + protocol, "OTEL_EXPORTER_OTLP_ENDPOINT=http://" + a[i], "OTEL_METRIC_EXPORT_INTERVAL=500", "OTEL_BLRP_SCHEDULE_DELAY=200"}, "--window", "1s")
			for range 50 {
				r, err := http.Post(w.url+"/asr", "", strings.NewReader("sound"))
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			for _, want := range []string{
				`Name +: POST /asr`, `Name +: forward`, `weir\.stage: Str\(forward\)`, // spans
				`Name: weir\.seconds`, `Name: weir\.queue\.depth`, `Name: http\.server\.request\.duration`, `weir\.part: Str\(queue\)`, // metrics
				`weir\.verdict\.changed`, `weir\.verdict\.cause: Str\(healthy\)`, // log records
				`service\.name: Str\(weir\)`,
			} {
				c.says(want)
			}
		})
	}
}
