package tracing

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// environment is a Getenv of NAME=value lines. It knows nothing of the
// process's own environment.
func environment(lines ...string) func(string) string {
	m := make(map[string]string)
	for _, l := range lines {
		k, v, _ := strings.Cut(l, "=")
		m[k] = v
	}
	return func(name string) string { return m[name] }
}

func TestASignalIsExportedOnlyWhereTheEnvironmentAsksForIt(t *testing.T) {
	for _, c := range []struct {
		env  []string
		want string // signals that are exported
	}{
		{nil, ""},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318"}, "traces metrics logs"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=  "}, ""},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:4318/v1/traces"}, "traces"},
		{[]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://h:4318/v1/metrics"}, "metrics"},
		{[]string{"OTEL_TRACES_EXPORTER=otlp"}, "traces"},
		{[]string{"OTEL_LOGS_EXPORTER=otlp"}, "logs"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_TRACES_EXPORTER=none"}, "metrics logs"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_METRICS_EXPORTER=prometheus"}, "traces logs"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_METRICS_EXPORTER=otlp, prometheus"}, "traces metrics logs"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_SDK_DISABLED=TRUE"}, ""},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_SDK_DISABLED=1"}, "traces metrics logs"},
		{[]string{"OTEL_EXPORTER_OTLP_HEADERS=a=b"}, ""},
	} {
		var got []string
		for _, signal := range signals {
			s, err := Options{Getenv: environment(c.env...)}.export(signal)
			if err != nil {
				t.Errorf("%q: %v", c.env, err)
			}
			if s != nil {
				got = append(got, signal)
			}
		}
		if want := strings.Fields(c.want); !slices.Equal(got, want) {
			t.Errorf("%q exports %q, want %q", c.env, got, want)
		}
	}
	if s, err := (Options{}).export("traces"); s != nil || err != nil {
		t.Errorf("without an environment: %v, %v", s, err)
	}
}

func TestEndpointsBecomeTheAddressThatTheyMean(t *testing.T) {
	for _, c := range []struct {
		env  []string
		grpc bool
		want string
	}{
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318"}, false, "http://h:4318/v1/traces"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318/"}, false, "http://h:4318/v1/traces"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=HTTPS://otlp.example/base/"}, false, "https://otlp.example/base/v1/traces"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT= http://[::1]:4318 "}, false, "http://[::1]:4318/v1/traces"},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:9/any/path"}, false, "http://h:9/any/path"},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:9/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT=http://other:4318"}, false, "http://h:9/v1/traces"},
		{[]string{"OTEL_TRACES_EXPORTER=otlp"}, false, "http://localhost:4318/v1/traces"},
		{[]string{"OTEL_TRACES_EXPORTER=otlp", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, true, "http://localhost:4317"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, true, "http://h:4317"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://h:4317/", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc"}, true, "https://h:4317"},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"}, false, "http://h:4317/v1/traces"},
	} {
		s, err := Options{Getenv: environment(c.env...)}.export("traces")
		if err != nil {
			t.Errorf("%q: %v", c.env, err)
			continue
		}
		if s.url != c.want || s.grpc != c.grpc {
			t.Errorf("%q goes to %q (grpc %v), want %q (grpc %v)", c.env, s.url, s.grpc, c.want, c.grpc)
		}
	}
}

// Each mistake of telemetry.md, section 1.7, and some more.
func TestEveryMistakeIsNamedWithItsRemedy(t *testing.T) {
	const on = "OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318"
	for _, c := range []struct {
		env  []string
		want []string // of the error's text
	}{
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=h:4318"}, []string{"OTEL_EXPORTER_OTLP_ENDPOINT", `"h:4318"`, "needs http://"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=10.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, []string{`"10.0.0.1:4317"`, "needs http://"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=//h:4318"}, []string{"needs http://"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=unix:///run/otel.sock"}, []string{"needs http://"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://"}, []string{"has no host"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:x"}, []string{"is no URL", "invalid port"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318/v1/traces"}, []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "drop /v1/...", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318/v1/metrics/"}, []string{"drop /v1/..."}},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:4318"}, []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "add /v1/traces"}},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:4318/"}, []string{"add /v1/traces"}},
		{[]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://h:4318/v1/logs"}, []string{"another signal", "/v1/traces"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4317"}, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "4317 is gRPC, 4318 is HTTP"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, []string{"has no port", ":4317"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4317/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, []string{"has a path", "drop /v1/traces"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://h/?key=SECRET"}, []string{"query"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://me:SECRET@h:4318"}, []string{"OTEL_EXPORTER_OTLP_ENDPOINT has a user", "OTEL_EXPORTER_OTLP_HEADERS=Authorization=Basic%20"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_HEADERS=Authorization: Bearer SECRET"}, []string{"OTEL_EXPORTER_OTLP_HEADERS", "entry 1", "key=value, comma separated"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_HEADERS=a=b,Authorization: Bearer SECRET="}, []string{"entry 2", "key=value, comma separated"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_HEADERS=a=b,=SECRET"}, []string{"entry 2", "no header name"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_TRACES_HEADERS=a=SECRET%zz"}, []string{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "value of a", "%25"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_HEADERS=a=SECRET%0d%0ab"}, []string{"value of a"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"}, []string{"OTEL_EXPORTER_OTLP_PROTOCOL", `"http/json"`, "grpc or http/protobuf"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http"}, []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", `"http"`}},
		{[]string{on, "OTEL_EXPORTER_OTLP_COMPRESSION=zstd"}, []string{"OTEL_EXPORTER_OTLP_COMPRESSION", `"zstd"`, "gzip or none"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_TIMEOUT=10s"}, []string{"OTEL_EXPORTER_OTLP_TIMEOUT", `"10s"`, "milliseconds"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT=0"}, []string{"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", `"0"`}},
		{[]string{on, "OTEL_TRACES_EXPORTER=console"}, []string{"OTEL_TRACES_EXPORTER", `"console"`, "otlp or none"}},
		{[]string{on, "OTEL_TRACES_EXPORTER=prometheus"}, []string{"OTEL_TRACES_EXPORTER", `"prometheus"`}},
		{[]string{"OTEL_CONFIG_FILE=/etc/otel.yaml"}, []string{"OTEL_CONFIG_FILE is not supported"}},
		{[]string{on, "OTEL_EXPORTER_OTLP_CERTIFICATE=/ca.pem"}, []string{"OTEL_EXPORTER_OTLP_CERTIFICATE", "https://"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://h", "OTEL_EXPORTER_OTLP_CERTIFICATE=/none/ca.pem"}, []string{"OTEL_EXPORTER_OTLP_CERTIFICATE", "/none/ca.pem"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://h", "OTEL_EXPORTER_OTLP_CERTIFICATE=otlp_test.go"}, []string{"otlp_test.go", "no certificate in it"}},
		{[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=https://h", "OTEL_EXPORTER_OTLP_CLIENT_KEY=/k.pem"}, []string{"OTEL_EXPORTER_OTLP_CLIENT_KEY", "belong together"}},
	} {
		_, err := Options{Getenv: environment(c.env...)}.export("traces")
		if err == nil {
			t.Errorf("%q is no error", c.env)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v\nlacks %q", c.env, err, want)
			}
		}
		if strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%q: the error shows the secret: %v", c.env, err)
		}
	}
}

func TestGRPCToThePortOfHTTPIsNamedAtTheStart(t *testing.T) {
	var j journal
	_, err := Options{Logger: j.logger(), Getenv: environment("OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc")}.export("traces")
	if err != nil || !strings.Contains(j.String(), "4317 is gRPC, 4318 is HTTP") {
		t.Errorf("error %v, log %q", err, j.String())
	}
}

func TestHeadersAreReadAsTheExportersReadThem(t *testing.T) {
	for _, c := range []struct {
		value string
		want  map[string]string
	}{
		{"", map[string]string{}},
		{"Authorization=Basic%20abc==", map[string]string{"Authorization": "Basic abc=="}},
		{"Authorization=Basic abc==", map[string]string{"Authorization": "Basic abc=="}},
		{" a = 1 , b=%2C%3D ,", map[string]string{"a": "1", "b": ",="}},
		{"a=", map[string]string{"a": ""}},
	} {
		got, err := Options{Getenv: environment("OTEL_EXPORTER_OTLP_HEADERS=" + c.value)}.headers("traces")
		if err != nil || !maps.Equal(got, c.want) {
			t.Errorf("%q is %q (%v), want %q", c.value, got, err, c.want)
		}
	}
}

func TestASignalsOwnVariablesWin(t *testing.T) {
	s, err := Options{Getenv: environment("OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", "OTEL_EXPORTER_OTLP_TIMEOUT=1000",
		"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT=2000", "OTEL_EXPORTER_OTLP_HEADERS=a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS=b=2",
		"OTEL_EXPORTER_OTLP_COMPRESSION=gzip", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION=none")}.export("traces")
	if err != nil {
		t.Fatal(err)
	}
	if s.timeout != 2*time.Second || s.headers["b"] != "2" || s.headers["a"] != "" || s.gzip {
		t.Errorf("got timeout %v, gzip %v, %d headers", s.timeout, s.gzip, len(s.headers))
	}
}

func TestCertificatesAreLoaded(t *testing.T) {
	cert, key := certificateFiles(t)
	s, err := Options{Getenv: environment("OTEL_EXPORTER_OTLP_ENDPOINT=https://h", "OTEL_EXPORTER_OTLP_CERTIFICATE="+cert,
		"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE="+cert, "OTEL_EXPORTER_OTLP_CLIENT_KEY="+key)}.export("logs")
	if err != nil {
		t.Fatal(err)
	}
	if s.tls.RootCAs == nil || len(s.tls.Certificates) != 1 {
		t.Errorf("got %d certificates", len(s.tls.Certificates))
	}
}

// certificateFiles writes a certificate for 127.0.0.1 and its key.
func certificateFiles(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", secret)
}

func TestTheResourceTellsWhatTheEnvironmentSaysFirst(t *testing.T) {
	host, _ := os.Hostname()
	for _, c := range []struct {
		env  []string
		want map[string]string
	}{
		{nil, map[string]string{"service.name": "weir", "service.version": "v1.2.3", "host.name": host, "telemetry.sdk.language": "go"}},
		{[]string{"OTEL_SERVICE_NAME=a"}, map[string]string{"service.name": "a"}},
		{[]string{"OTEL_RESOURCE_ATTRIBUTES=service.name=b,host.name=node-1,x=a%2Cb"}, map[string]string{"service.name": "b", "host.name": "node-1", "x": "a,b"}},
		{[]string{"OTEL_RESOURCE_ATTRIBUTES=service.name=b", "OTEL_SERVICE_NAME=a"}, map[string]string{"service.name": "a"}},
		{[]string{"OTEL_RESOURCE_ATTRIBUTES=k8s.namespace.name=ns,k8s.pod.name=asr-0,k8s.container.name=weir"}, map[string]string{"service.instance.id": "ns.asr-0.weir", "k8s.pod.name": "asr-0"}},
		{[]string{"OTEL_RESOURCE_ATTRIBUTES=k8s.namespace.name=ns,k8s.pod.name=asr-0,k8s.container.name=weir,service.instance.id=mine"}, map[string]string{"service.instance.id": "mine"}},
	} {
		res, err := Options{Getenv: environment(c.env...), Version: "v1.2.3"}.resource(context.Background())
		if err != nil {
			t.Errorf("%q: %v", c.env, err)
			continue
		}
		got := make(map[string]string)
		for _, kv := range res.Attributes() {
			got[string(kv.Key)] = kv.Value.String()
		}
		for k, v := range c.want {
			if got[k] != v {
				t.Errorf("%q: %s is %q, want %q", c.env, k, got[k], v)
			}
		}
		if res.SchemaURL() == "" {
			t.Errorf("%q: the resource has no schema", c.env)
		}
	}
}

func TestAllSignalsOfOneProcessShareARandomInstance(t *testing.T) {
	id := instanceID(nil)
	if id != instanceID(nil) || !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(id) {
		t.Errorf("got %q", id)
	}
}

func TestMistakesInResourceAttributesAreNamed(t *testing.T) {
	for value, want := range map[string]string{"a": `"a"`, "=b": "no attribute", "a=%zz": "value of a"} {
		_, err := Options{Getenv: environment("OTEL_RESOURCE_ATTRIBUTES=" + value)}.resource(context.Background())
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "OTEL_RESOURCE_ATTRIBUTES") {
			t.Errorf("%q: %v, want %q", value, err, want)
		}
	}
}

func TestBatchLimitsAreReadAndChecked(t *testing.T) {
	l, err := Options{Getenv: environment("OTEL_BSP_SCHEDULE_DELAY=200", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=64", "OTEL_BSP_MAX_QUEUE_SIZE=128")}.batchLimits()
	if want := (batchLimits{delay: 200 * time.Millisecond, timeout: 30 * time.Second, batch: 64, queue: 128}); err != nil || l != want {
		t.Errorf("got %+v, %v, want %+v", l, err, want)
	}
	for _, wrong := range []string{"OTEL_BSP_SCHEDULE_DELAY=1s", "OTEL_BSP_MAX_QUEUE_SIZE=-1", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=many", "OTEL_BSP_EXPORT_TIMEOUT=0"} {
		name, _, _ := strings.Cut(wrong, "=")
		_, err := NewSpans(context.Background(), Options{Getenv: environment("OTEL_EXPORTER_OTLP_ENDPOINT=http://h:4318", wrong)})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
