package proxy

import (
	"fmt"
	"net"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// Config is everything that can be set. Its tags are the one place that says
// of a key its name, in a file (listen), as a flag (--listen) and in the
// environment (WEIR_LISTEN), what it does, and whether it takes a restart.
type Config struct {
	Server string `yaml:"server" restart:"yes" group:"Addresses" help:"Address of the ASR server: http://host:port, https://host:port or unix:/path."`
	Listen string `yaml:"listen" restart:"yes" help:"Address that clients connect to: host:port, of which port 0 takes a free one, or unix:/path."`
	Admin  string `yaml:"admin" restart:"yes" help:"Address of the live page, /metrics, /readyz and /drain."`

	MaxConcurrency int          `yaml:"max_concurrency" group:"Queue" help:"Requests in the server at one time; more of them wait in line. 0: no limit."`
	MaxQueueSize   int          `yaml:"max_queue_size" help:"Requests that may wait; more are answered 503. 0: none waits."`
	QueueTimeout   Duration     `yaml:"queue_timeout" help:"Longest wait; then the answer is 503. 0: no limit."`
	Limits         []RouteLimit `yaml:"limits" help:"Limits of one route or model, within those above, as in [{route: /asr, max_concurrency: 2}]; the keys are route or model, max_concurrency, max_queue_size (if not given, as above) and queue_timeout."`

	Routes         []string              `yaml:"routes" group:"Verdict" help:"Templates of paths: the requests of each are judged as a class of their own. {model} stands for one segment of a path, or a part of it. Other paths are forwarded as well."`
	Window         Duration              `yaml:"window" restart:"yes" help:"Time between two verdicts."`
	VerdictFor     Duration              `yaml:"verdict_for" help:"How long a new cause must last until it is shown."`
	VerdictKeepFor Duration              `yaml:"verdict_keep_for" help:"How long a cause is shown after it has gone."`
	Records        int                   `yaml:"records" restart:"yes" help:"Latest requests that the live page keeps."`
	ServerKind     string                `yaml:"server_kind" restart:"yes" help:"What your server is, so that advice names its own settings: auto, triton, vllm, sglang, tgi, tei, torchserve, ray, bentoml, litserve, mosec, speaches, whisper.cpp, funasr, funasr-python or sherpa. auto recognises triton and torchserve by their routes."`
	Probe          string                `yaml:"probe" restart:"yes" help:"Path of the server, such as /health, that weir asks for once a second, to tell a blocked event loop by its latency. Empty: none."`
	Thresholds     classifier.Thresholds `yaml:"thresholds" help:"The constants of the verdict. One given alone changes no other."`

	Timings        []tracing.Mapping `yaml:"timings" group:"Timings" help:"Names that your server uses for its stages, as in [{name: x-decode-ms, stage: preprocess, unit: ms}]: a response header or Server-Timing metric; queue, preprocess, transfer, forward, postprocess, other or total; ms, s, us or ns, or no unit for a metric in ms. For a number in a JSON answer, {pointer: /timings/decode, stage: forward, unit: ms}."`
	StreamProtocol string            `yaml:"stream_protocol" help:"What the server's WebSockets speak, where weir does not recognise it by itself: funasr-offline, funasr-2pass, funasr-realtime, sherpa-onnx-online, sherpa-onnx-offline, vosk, whisperlive, whisperlivekit, deepgram, kaldi-gstreamer, openai-realtime or vllm-realtime. Empty: recognise it."`
	ServerTiming   bool              `yaml:"server_timing" help:"Tell clients, too, in Server-Timing where the time went."`
	RequestStart   bool              `yaml:"request_start" help:"Tell the server in X-Request-Start when the request came."`

	ORCA          bool   `yaml:"orca" help:"Ask the server for its load with each request (the header endpoint-load-metrics-format, which vLLM, Triton and gRPC services know), and keep the answer from clients that did not ask."`
	ServerMetrics string `yaml:"server_metrics" restart:"yes" help:"Where the server tells its own figures, for servers that put no timings in their answers: the URLs of its metrics page or of Triton's /v2/models/stats, with a space between two, or auto to look for it. A fragment selects series by label, as in #model_name=large. Empty: nowhere."`
	Device        string `yaml:"device" restart:"yes" help:"Where the device's load is told: the URL of a DCGM exporter, of Triton's or TorchServe's metrics, with #gpu=0 or the like to select; nvidia-smi; or nvml. Empty: nowhere."`

	OTLPGRPC string   `yaml:"otlp_grpc" restart:"yes" help:"Address where the server may send its own OpenTelemetry spans (and metrics and logs) by gRPC: weir reads the stages in them and passes all of it on to where OTEL_* sends weir's own. As in 127.0.0.1:4317. Empty: off."`
	OTLPHTTP string   `yaml:"otlp_http" restart:"yes" help:"The same by HTTP, as in 127.0.0.1:4318. Empty: off."`
	OTLPWait Duration `yaml:"otlp_wait" restart:"yes" help:"How long a finished request waits for the server's spans; exporters gather them for 5s by default."`

	ConnectTimeout  Duration `yaml:"connect_timeout" group:"Connections" help:"Longest time to connect to the server."`
	HeadTimeout     Duration `yaml:"head_timeout" help:"Longest time for the head of a request to come. 0: no limit."`
	BodyTimeout     Duration `yaml:"body_timeout" help:"Longest silence within the body of a request. 0: no limit."`
	ResponseTimeout Duration `yaml:"response_timeout" help:"Longest silence of the server. 0: no limit."`
	WriteTimeout    Duration `yaml:"write_timeout" help:"Longest time that the other side takes no bytes. 0: no limit."`
	MaxConnections  int      `yaml:"max_connections" help:"Clients' connections at one time; more are answered 503. 0: no limit."`
	MaxHeadSize     Size     `yaml:"max_head_size" help:"Largest head of a request or an answer."`
	HalfClose       string   `yaml:"half_close" help:"What it means that a client shuts down its sending side: it has left (abort), or it waits for the answer (keep)."`
	DrainTimeout    Duration `yaml:"drain_timeout" help:"Time that requests in flight have to finish when weir ends."`

	TLSConfig

	TrustParent    bool     `yaml:"trust_parent" restart:"yes" group:"Traces and logs (exporters are set by OTEL_*)" help:"Continue the trace that a client's traceparent names; false: begin a new one."`
	KeepSlow       Duration `yaml:"keep_slow" restart:"yes" help:"Keep the trace of a request that took longer, sampled or not. 0: off."`
	KeepQueueShare float64  `yaml:"keep_queue_share" restart:"yes" help:"Keep the trace of a request that queued for more than this share of its time, sampled or not. 0: off."`
	LogFormat      string   `yaml:"log_format" restart:"yes" help:"text or json."`
	LogLevel       string   `yaml:"log_level" help:"debug, info, warn or error."`

	EnvoyConfig // see configenvoy.go

	loaded *loaded // nil: made by hand
}

// A RouteLimit bounds one route, named by its template, or one model.
type RouteLimit struct {
	Route          string   `yaml:"route"`
	Model          string   `yaml:"model"`
	MaxConcurrency int      `yaml:"max_concurrency"`
	MaxQueueSize   int      `yaml:"max_queue_size"`
	QueueTimeout   Duration `yaml:"queue_timeout"`
}

// DefaultConfig returns the configuration of a weir that nobody has told
// anything: transparent, with no limit.
func DefaultConfig() Config {
	return Config{
		Server: "http://127.0.0.1:8000", Listen: ":8080", Admin: "127.0.0.1:9464",
		MaxQueueSize: 1024,
		Routes: []string{
			"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions",
			"/v2/models/{model}/infer", "/v1/models/{model}:predict", "/predictions/{model}",
			"/asr", "/recognition", "/inference", "/transcribe", "/generate", "/health", "/healthz",
		},
		Window: seconds(10), VerdictFor: seconds(20), VerdictKeepFor: seconds(30), Records: 1000, ServerKind: "auto",
		Thresholds:     classifier.DefaultThresholds(),
		OTLPWait:       seconds(7),
		ConnectTimeout: seconds(5), HeadTimeout: seconds(30), BodyTimeout: seconds(300), WriteTimeout: seconds(300),
		MaxHeadSize: 64 << 10, HalfClose: "abort", DrainTimeout: seconds(30),
		TLSConfig:   TLSConfig{ServerProtocol: "auto"},
		TrustParent: true, LogFormat: "text", LogLevel: "info",
		EnvoyConfig: defaultEnvoy(),
	}
}

func seconds(n int) Duration { return Duration(n) * Duration(time.Second) }

// ServerAddress is where the server is dialed: "tcp" and host:port, or "unix"
// and a path.
func (c Config) ServerAddress() (network, address string) {
	network, address, _ = serverAddress(c.Server)
	return network, address
}

// maxSocketPath is the longest path that fits into a sockaddr_un everywhere.
const maxSocketPath = 103

// socketPath reads unix:/path; ok tells whether the address is meant so.
func socketPath(address string) (path string, ok bool, err error) {
	path, ok = strings.CutPrefix(address, "unix:")
	if !ok {
		return "", false, nil
	}
	path = "/" + strings.TrimLeft(path, "/")
	if !strings.HasPrefix(address, "unix:/") || path == "/" || len(path) > maxSocketPath {
		return "", true, fmt.Errorf("is no socket; write unix: and its absolute path, of at most %d bytes", maxSocketPath)
	}
	return path, true, nil
}

func serverAddress(server string) (network, address string, err error) {
	if path, ok, err := socketPath(server); ok {
		if err != nil {
			return "", "", err
		}
		return "unix", path, nil
	}
	u, err := url.Parse(server)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return "", "", fmt.Errorf("is no address; write http://host:port, https://host:port or unix:/path")
	case u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return "", "", fmt.Errorf("is more than an address; write %s://%s, since paths and credentials are passed on as clients send them", u.Scheme, u.Host)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if !isPort(port) || port == "0" {
		return "", "", fmt.Errorf("has no port from 1 to 65535; write http://host:port")
	}
	return "tcp", net.JoinHostPort(u.Hostname(), port), nil
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && strconv.FormatUint(n, 10) == s
}

// Restart tells which keys differ that only a new start puts into force.
func Restart(old, new Config) (keys []string) {
	a, b := reflect.ValueOf(old), reflect.ValueOf(new)
	for _, f := range fieldsOf(a.Type()) {
		if f.Tag.Get("restart") != "" && !reflect.DeepEqual(a.FieldByIndex(f.Index).Interface(), b.FieldByIndex(f.Index).Interface()) {
			keys = append(keys, keyOf(f))
		}
	}
	return keys
}

// fieldsOf are the fields of a struct that have a key, in their order.
func fieldsOf(t reflect.Type) (fields []reflect.StructField) {
	for _, f := range reflect.VisibleFields(t) {
		if keyOf(f) != "" {
			fields = append(fields, f)
		}
	}
	return fields
}

func keyOf(f reflect.StructField) string {
	key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return key
}

// A Duration is a time.Duration that has a unit in text, always.
type Duration time.Duration

// Duration returns d as the standard library has it.
func (d Duration) Duration() time.Duration { return time.Duration(d) }

// String is as short as can be: 5m, not 5m0s.
func (d Duration) String() string {
	s := time.Duration(d).String()
	if d == 0 {
		return "0"
	}
	if t, ok := strings.CutSuffix(s, "m0s"); ok {
		s = t + "m"
	}
	if t, ok := strings.CutSuffix(s, "h0m"); ok {
		s = t + "h"
	}
	return s
}

// MarshalYAML is String, but 0 needs no quotes.
func (d Duration) MarshalYAML() (any, error) {
	if d == 0 {
		return 0, nil
	}
	return d.String(), nil
}

// UnmarshalText reads "3s" or "500ms". A number alone is refused, but for 0:
// half of all readers would take it for seconds, half for milliseconds.
func (d *Duration) UnmarshalText(text []byte) error {
	if n, err := strconv.ParseUint(string(text), 10, 64); err == nil && n > 0 {
		short := fmt.Sprintf("%ds", n)
		if n%1000 == 0 {
			short = fmt.Sprintf("%ds", n/1000)
		}
		return fmt.Errorf("has no unit; write %dms or %s", n, short)
	}
	v, err := time.ParseDuration(string(text))
	switch {
	case err != nil:
		return fmt.Errorf("is no duration; write a number with a unit, as in 500ms, 3s or 1m30s")
	case v < 0:
		return fmt.Errorf("is negative; write 0 or more")
	}
	*d = Duration(v)
	return nil
}

// A Size is a number of bytes; in text it may have a unit.
type Size int64

var sizeUnits = []struct {
	name  string
	bytes Size
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// String uses the largest unit that needs no fraction.
func (s Size) String() string {
	for _, u := range sizeUnits {
		if s != 0 && s%u.bytes == 0 {
			return strconv.FormatInt(int64(s/u.bytes), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// MarshalYAML is String, but a mere number needs no quotes.
func (s Size) MarshalYAML() (any, error) {
	if text := s.String(); text != strconv.FormatInt(int64(s), 10) {
		return text, nil
	}
	return int64(s), nil
}

// UnmarshalText reads "65536" or "64KiB".
func (s *Size) UnmarshalText(text []byte) error {
	digits, unit := string(text), Size(1)
	for _, u := range sizeUnits {
		if d, ok := strings.CutSuffix(digits, u.name); ok {
			digits, unit = d, u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil {
		return fmt.Errorf("is no size; write a number of bytes, or one with KiB, MiB or GiB, as in 64KiB")
	}
	*s = Size(n) * unit
	return nil
}
