package tracing

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploggrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Options is what the output half needs to know. Where telemetry goes is read
// from OpenTelemetry's own variables: a signal is exported if an endpoint is
// set for it, or OTEL_{TRACES,METRICS,LOGS}_EXPORTER is "otlp".
type Options struct {
	Getenv         func(string) string // looks up an environment variable; nil: none is set
	Version        string              // of weir
	Logger         *slog.Logger        // for what goes wrong later; nil: nothing is logged
	Server         string              // host:port of the server behind weir, or the path of its socket
	Scheme         string              // that it speaks: "http" or "https"; "": http
	KeepSlow       time.Duration       // keep the trace of a request that took this long, sampled or not; 0: off
	KeepQueueShare float64             // keep the trace of a request that queued for this share of its time; 0: off
}

// exportSettings is where and how one signal is exported. The exporters read
// the environment of the process too; all of it is passed to them as options,
// so that what was checked here is what happens.
type exportSettings struct {
	grpc    bool
	url     string
	headers map[string]string // credentials: never to be shown
	timeout time.Duration
	gzip    bool
	tls     *tls.Config // nil: plain text, or the system's certificates
}

// The default timeout of one export, and the ports of OTLP.
const (
	exportTimeout = 10 * time.Second
	grpcPort      = "4317"
	httpPort      = "4318"
)

var signals = []string{"traces", "metrics", "logs"}

// export reads the settings of one signal: "traces", "metrics" or "logs". It
// returns nil where the signal is not exported, and an error for every mistake
// that an exporter would pass over in silence.
func (o Options) export(signal string) (s *exportSettings, err error) {
	if name := "OTEL_CONFIG_FILE"; o.env(name) != "" {
		return nil, fmt.Errorf("%s is not supported; unset it, and use the other OTEL_ variables", name)
	}
	if on, err := o.wanted(signal); err != nil || !on {
		return nil, err
	}
	s = &exportSettings{}
	if s.grpc, err = o.protocol(signal); err != nil {
		return nil, err
	}
	if s.url, err = o.endpoint(signal, s.grpc); err != nil {
		return nil, err
	}
	if s.headers, err = o.headers(signal); err != nil {
		return nil, err
	}
	if s.gzip, err = o.compression(signal); err != nil {
		return nil, err
	}
	if s.tls, err = o.tls(signal, s.secure()); err != nil {
		return nil, err
	}
	name, _ := o.lookup(signal, "TIMEOUT")
	s.timeout, err = o.milliseconds(name, exportTimeout)
	return s, err
}

func (o Options) env(name string) string {
	if o.Getenv == nil {
		return ""
	}
	return strings.TrimSpace(o.Getenv(name))
}

// lookup finds the signal's own variable, or else the one for all signals.
func (o Options) lookup(signal, what string) (name, value string) {
	name = ownVariable(signal, what)
	if value = o.env(name); value != "" {
		return name, value
	}
	name = "OTEL_EXPORTER_OTLP_" + what
	return name, o.env(name)
}

func ownVariable(signal, what string) string {
	return "OTEL_EXPORTER_OTLP_" + strings.ToUpper(signal) + "_" + what
}

// milliseconds reads a number of milliseconds.
func (o Options) milliseconds(name string, none time.Duration) (time.Duration, error) {
	n, err := o.number(name, int(none.Milliseconds()))
	if err != nil {
		return 0, fmt.Errorf("%w of milliseconds", err)
	}
	return time.Duration(n) * time.Millisecond, nil
}

func (o Options) number(name string, none int) (int, error) {
	value := o.env(name)
	if value == "" {
		return none, nil
	}
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%s=%q is no number above 0; use a whole number", name, value)
	}
	return int(n), nil
}

// wanted tells whether the signal is to be exported.
func (o Options) wanted(signal string) (on bool, err error) {
	if strings.EqualFold(o.env("OTEL_SDK_DISABLED"), "true") {
		return false, nil
	}
	name := "OTEL_" + strings.ToUpper(signal) + "_EXPORTER"
	list := o.env(name)
	if list == "" {
		_, endpoint := o.lookup(signal, "ENDPOINT")
		return endpoint != "", nil
	}
	for kind := range strings.SplitSeq(list, ",") {
		switch kind = strings.TrimSpace(kind); {
		case kind == "otlp":
			on = true
		case kind == "none", kind == "prometheus" && signal == "metrics": // the admin address serves Prometheus anyway
		default:
			return false, fmt.Errorf("%s=%q is not supported; use otlp or none", name, kind)
		}
	}
	return on, nil
}

func (o Options) protocol(signal string) (grpc bool, err error) {
	switch name, value := o.lookup(signal, "PROTOCOL"); value {
	case "grpc":
		return true, nil
	case "http/protobuf", "":
		return false, nil
	default:
		return false, fmt.Errorf("%s=%q is not supported; use grpc or http/protobuf", name, value)
	}
}

func (o Options) compression(signal string) (gzip bool, err error) {
	switch name, value := o.lookup(signal, "COMPRESSION"); value {
	case "gzip":
		return true, nil
	case "none", "":
		return false, nil
	default:
		return false, fmt.Errorf("%s=%q is not supported; use gzip or none", name, value)
	}
}

// endpoint returns the whole URL to which the signal goes.
func (o Options) endpoint(signal string, grpc bool) (string, error) {
	name, value := o.lookup(signal, "ENDPOINT")
	if value == "" {
		value = "http://localhost:" + httpPort
		if grpc {
			value = "http://localhost:" + grpcPort
		}
	}
	u, err := parseEndpoint(name, value)
	if err != nil {
		return "", err
	}
	_, protocol := o.lookup(signal, "PROTOCOL")
	own := name == ownVariable(signal, "ENDPOINT")
	if mistake := portMistake(u, grpc, protocol); mistake != "" {
		return "", fmt.Errorf("%s=%q %s", name, value, mistake)
	}
	if mistake := pathMistake(u, grpc, own, signal); mistake != "" {
		return "", fmt.Errorf("%s=%q %s", name, value, mistake)
	}
	switch {
	case grpc:
		u.Path = ""
		if u.Port() == httpPort && o.Logger != nil {
			o.Logger.Warn("gRPC goes to the port of HTTP", "variable", name, "value", value, "remedy", "4317 is gRPC, 4318 is HTTP: change the port, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")
		}
	case !own:
		u.Path = strings.TrimRight(u.Path, "/") + "/v1/" + signal
	}
	u.RawPath = ""
	return u.String(), nil
}

// portMistake tells what is wrong with the port of an endpoint; "" if nothing.
func portMistake(u *url.URL, grpc bool, protocol string) string {
	switch {
	case protocol == "" && u.Port() == grpcPort:
		return "is the port of gRPC; set OTEL_EXPORTER_OTLP_PROTOCOL=grpc (4317 is gRPC, 4318 is HTTP)"
	case grpc && u.Scheme == "http" && u.Port() == "":
		return "has no port; add it, usually :" + grpcPort
	}
	return ""
}

// pathMistake tells what is wrong with the path of an endpoint; "" if nothing.
// The variable of one signal (own) is used as it is; to the general one the
// signal's path is added.
func pathMistake(u *url.URL, grpc, own bool, signal string) string {
	path := strings.TrimRight(u.Path, "/")
	switch {
	case grpc && path != "":
		return "has a path, which gRPC does not use; drop " + path + ", or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
	case grpc:
	case own && path == "":
		return "has no path, and the variable of one signal is used as it is; add /v1/" + signal
	case own && endsInSignal(path, signal):
		return "has the path of another signal; use /v1/" + signal
	case !own && endsInSignal(path, ""):
		return "has a signal's path, which the general endpoint must not have; drop /v1/..., or use " + ownVariable(signal, "ENDPOINT")
	}
	return ""
}

// parseEndpoint checks what endpoints of all kinds have in common. Where the
// value may hold a password it does not show it.
func parseEndpoint(name, value string) (*url.URL, error) {
	lower := strings.ToLower(value)
	if strings.Contains(value, "@") {
		return nil, fmt.Errorf("%s has a user or password in it (an @), which exporters do not send; use OTEL_EXPORTER_OTLP_HEADERS=Authorization=Basic%%20<base64>", name)
	}
	if !strings.HasPrefix(lower, "http://") && !strings.HasPrefix(lower, "https://") {
		return nil, fmt.Errorf("%s=%q needs http:// or https:// in front, as in http://collector:%s", name, value, httpPort)
	}
	u, err := url.Parse(value)
	var parse *url.Error
	switch {
	case errors.As(err, &parse):
		return nil, fmt.Errorf("%s=%q is no URL: %w; use http://host:port", name, value, parse.Err)
	case err != nil:
		return nil, fmt.Errorf("%s=%q is no URL: %w; use http://host:port", name, value, err)
	case u.Hostname() == "":
		return nil, fmt.Errorf("%s=%q has no host; use http://host:port", name, value)
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("%s has a query or fragment in it, which exporters do not send; drop it, and pass keys by OTEL_EXPORTER_OTLP_HEADERS", name)
	}
	return u, nil
}

// endsInSignal tells whether a path ends as the path of any signal but one.
func endsInSignal(path, but string) bool {
	return slices.ContainsFunc(signals, func(s string) bool { return s != but && strings.HasSuffix(path, "/v1/"+s) })
}

// headers parses key=value pairs. Values are credentials and pairs may be
// mangled, so its errors tell only which pair is wrong.
func (o Options) headers(signal string) (map[string]string, error) {
	name, list := o.lookup(signal, "HEADERS")
	headers := make(map[string]string)
	n := 0
	for pair := range strings.SplitSeq(list, ",") {
		n++
		if strings.TrimSpace(pair) == "" {
			continue // a comma at the end
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("%s: entry %d has no \"=\"; write key=value, comma separated, with %%2C for a comma in a value", name, n)
		}
		key = strings.TrimSpace(key)
		if t, rest := token([]byte(key)); len(t) == 0 || len(rest) > 0 {
			return nil, fmt.Errorf("%s: the key of entry %d is no header name; write key=value, comma separated, not \"key: value\"", name, n)
		}
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if err != nil || strings.ContainsFunc(value, func(c rune) bool { return c < ' ' || c == 0x7f }) {
			return nil, fmt.Errorf("%s: the value of %s cannot be decoded; write %%25 for a %% in it", name, key)
		}
		headers[key] = strings.TrimSpace(value)
	}
	return headers, nil
}

// tls loads the certificate files, if any are named.
func (o Options) tls(signal string, secure bool) (*tls.Config, error) {
	rootName, root := o.lookup(signal, "CERTIFICATE")
	certName, cert := o.lookup(signal, "CLIENT_CERTIFICATE")
	keyName, key := o.lookup(signal, "CLIENT_KEY")
	switch {
	case root == "" && cert == "" && key == "":
		return nil, nil
	case (cert == "") != (key == ""):
		return nil, fmt.Errorf("%s=%q and %s=%q belong together; set both or none", certName, cert, keyName, key)
	case !secure && root != "":
		return nil, fmt.Errorf("%s=%q is for https, but the endpoint is http://; use https://, or unset it", rootName, root)
	case !secure:
		return nil, fmt.Errorf("%s=%q is for https, but the endpoint is http://; use https://, or unset it", certName, cert)
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if root != "" {
		pem, err := os.ReadFile(root)
		if err != nil {
			return nil, fmt.Errorf("%s: %w; name a file of PEM certificates", rootName, err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s=%q has no certificate in it; name a file of PEM certificates", rootName, root)
		}
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("%s=%q, %s=%q: %w; name PEM files that belong together", certName, cert, keyName, key, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

func (s *exportSettings) secure() bool { return strings.HasPrefix(s.url, "https:") }

// Retries start sooner than the exporters' own, so that a backend that was
// just restarted is found again soon.
const (
	retryFirst = time.Second
	retryMax   = 10 * time.Second
	retryFor   = time.Minute
)

// traceClient returns the client that uploads spans, and the connections to
// close after it.
func (s *exportSettings) traceClient() (client otlptrace.Client, closeIdle func()) {
	if s.grpc {
		return otlptracegrpc.NewClient(s.traceGRPC()...), func() {}
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: s.tls, ForceAttemptHTTP2: true,
		DialContext:         (&net.Dialer{Timeout: s.timeout}).DialContext,
		TLSHandshakeTimeout: s.timeout, IdleConnTimeout: 90 * time.Second,
	}
	return otlptracehttp.NewClient(
		otlptracehttp.WithEndpointURL(s.url), otlptracehttp.WithHeaders(s.headers),
		otlptracehttp.WithCompression(otlptracehttp.Compression(s.httpCompression())),
		otlptracehttp.WithEncoding(otlptracehttp.EncodingProtobuf), otlptracehttp.WithTLSClientConfig(nil),
		otlptracehttp.WithHTTPClient(&http.Client{Transport: transport, Timeout: s.timeout}),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: true, InitialInterval: retryFirst, MaxInterval: retryMax, MaxElapsedTime: retryFor}),
	), transport.CloseIdleConnections
}

func (s *exportSettings) traceGRPC() []otlptracegrpc.Option {
	opts := []otlptracegrpc.Option{
		otlptracegrpc.WithEndpointURL(s.url), otlptracegrpc.WithHeaders(s.headers), otlptracegrpc.WithTimeout(s.timeout),
		otlptracegrpc.WithTLSCredentials(s.credentials()), otlptracegrpc.WithDialOption(s.dialOptions()...),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{Enabled: true, InitialInterval: retryFirst, MaxInterval: retryMax, MaxElapsedTime: retryFor}),
	}
	if s.gzip {
		opts = append(opts, otlptracegrpc.WithCompressor("gzip"))
	}
	return opts
}

func (s *exportSettings) metricHTTP() []otlpmetrichttp.Option {
	return []otlpmetrichttp.Option{
		otlpmetrichttp.WithEndpointURL(s.url), otlpmetrichttp.WithHeaders(s.headers), otlpmetrichttp.WithTimeout(s.timeout),
		otlpmetrichttp.WithCompression(otlpmetrichttp.Compression(s.httpCompression())), otlpmetrichttp.WithTLSClientConfig(s.tls),
	}
}

func (s *exportSettings) metricGRPC() []otlpmetricgrpc.Option {
	opts := []otlpmetricgrpc.Option{
		otlpmetricgrpc.WithEndpointURL(s.url), otlpmetricgrpc.WithHeaders(s.headers), otlpmetricgrpc.WithTimeout(s.timeout),
		otlpmetricgrpc.WithTLSCredentials(s.credentials()), otlpmetricgrpc.WithDialOption(s.dialOptions()...),
	}
	if s.gzip {
		opts = append(opts, otlpmetricgrpc.WithCompressor("gzip"))
	}
	return opts
}

func (s *exportSettings) logHTTP() []otlploghttp.Option {
	return []otlploghttp.Option{
		otlploghttp.WithEndpointURL(s.url), otlploghttp.WithHeaders(s.headers), otlploghttp.WithTimeout(s.timeout),
		otlploghttp.WithCompression(otlploghttp.Compression(s.httpCompression())), otlploghttp.WithTLSClientConfig(s.tls),
	}
}

func (s *exportSettings) logGRPC() []otlploggrpc.Option {
	opts := []otlploggrpc.Option{
		otlploggrpc.WithEndpointURL(s.url), otlploggrpc.WithHeaders(s.headers), otlploggrpc.WithTimeout(s.timeout),
		otlploggrpc.WithTLSCredentials(s.credentials()), otlploggrpc.WithDialOption(s.dialOptions()...),
	}
	if s.gzip {
		opts = append(opts, otlploggrpc.WithCompressor("gzip"))
	}
	return opts
}

// httpCompression is NoCompression or GzipCompression of all three exporters.
func (s *exportSettings) httpCompression() otlptracehttp.Compression {
	if s.gzip {
		return otlptracehttp.GzipCompression
	}
	return otlptracehttp.NoCompression
}

func (s *exportSettings) credentials() credentials.TransportCredentials {
	if s.secure() {
		return credentials.NewTLS(s.tls)
	}
	return insecure.NewCredentials()
}

// dialOptions make gRPC look for a backend that is away every ten seconds;
// left alone it would wait up to two minutes.
func (s *exportSettings) dialOptions() []grpc.DialOption {
	wait := backoff.DefaultConfig
	wait.MaxDelay = retryMax
	opts := []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{Backoff: wait, MinConnectTimeout: retryMax})}
	if !s.gzip {
		opts = append(opts, grpc.WithDefaultCallOptions(grpc.UseCompressor("identity")))
	}
	return opts
}

// resource describes this weir: what the environment says, before what can be
// found out, before the default name.
func (o Options) resource(ctx context.Context) (*resource.Resource, error) {
	env, err := o.resourceAttributes()
	if err != nil {
		return nil, err
	}
	found := []attribute.KeyValue{
		attribute.String("service.name", "weir"),
		attribute.String("service.instance.id", instanceID(env)),
	}
	if o.Version != "" {
		found = append(found, attribute.String("service.version", o.Version))
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(found...), resource.WithTelemetrySDK(), resource.WithHost(), resource.WithContainerID(),
		resource.WithAttributes(env...))
	if err != nil && !errors.Is(err, resource.ErrPartialResource) { // a host without a name is no reason to stop
		return nil, fmt.Errorf("resource: %w", err)
	}
	return res, nil
}

// resourceAttributes parses OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME,
// which wins.
func (o Options) resourceAttributes() (kv []attribute.KeyValue, err error) {
	const name = "OTEL_RESOURCE_ATTRIBUTES"
	for pair := range strings.SplitSeq(o.env(name), ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if key = strings.TrimSpace(key); !ok || key == "" {
			return nil, fmt.Errorf("%s: %q is no attribute; write key=value, comma separated, with %%2C for a comma in a value", name, strings.TrimSpace(pair))
		}
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if err != nil {
			return nil, fmt.Errorf("%s: the value of %s cannot be decoded: %w; write %%25 for a %% in it", name, key, err)
		}
		kv = append(kv, attribute.String(key, value))
	}
	if service := o.env("OTEL_SERVICE_NAME"); service != "" {
		kv = append(kv, attribute.String("service.name", service))
	}
	return kv, nil
}

// instanceID names a container by the convention for Kubernetes, and anything
// else at random. An id in the environment wins over it later.
func instanceID(env []attribute.KeyValue) string {
	var parts [3]string
	for _, kv := range env {
		switch kv.Key {
		case "k8s.namespace.name":
			parts[0] = kv.Value.AsString()
		case "k8s.pod.name":
			parts[1] = kv.Value.AsString()
		case "k8s.container.name":
			parts[2] = kv.Value.AsString()
		}
	}
	if slices.Contains(parts[:], "") {
		return randomID()
	}
	return strings.Join(parts[:], ".")
}

// randomID is a random UUID, the same for all signals of this process.
var randomID = sync.OnceValue(func() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
})

// serverAttributes tell where the server behind weir is.
func serverAttributes(server string) []attribute.KeyValue {
	host, port := splitAddress(server)
	kv := []attribute.KeyValue{attribute.String("server.address", host)}
	if port > 0 {
		kv = append(kv, attribute.Int("server.port", port))
	}
	return kv
}

// splitAddress splits host:port; what is no such thing (a socket's path, a
// host alone) is all host. Unlike net.SplitHostPort it makes no garbage.
func splitAddress(address string) (host string, port int) {
	i := strings.LastIndexByte(address, ':')
	if i >= 0 && (strings.IndexByte(address, ':') == i || strings.HasSuffix(address[:i], "]")) {
		if n, err := strconv.ParseUint(address[i+1:], 10, 16); err == nil {
			address, port = address[:i], int(n)
		}
	}
	if n := len(address); n > 1 && address[0] == '[' && address[n-1] == ']' {
		address = address[1 : n-1]
	}
	return address, port
}
