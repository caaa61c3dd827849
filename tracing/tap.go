package tracing

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/encoding/gzip" // what many exporters send
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
)

// A Tap is an OTLP endpoint for the server behind weir: the server sends its
// telemetry here instead of to its collector. The tap reads the spans that
// belong to weir's requests, and passes everything on unchanged to where weir
// sends its own; where weir sends no such signal, the tap only reads. What it
// has taken it does not lose while weir runs: it keeps it until the backend
// takes it, and takes no more when too much is kept, so that the senders wait
// and try again. A nil Tap does nothing.
type Tap struct {
	joiner
	logger   *slog.Logger
	forwards map[string]*forwarder // by signal; only read
	grpc     *grpc.Server
	http     *http.Server
	lis      [2]net.Listener // gRPC, HTTP; nil: off
	wg       sync.WaitGroup
}

// TapOptions is where a [Tap] listens. Empty addresses are off.
type TapOptions struct {
	GRPC, HTTP string
	Wait       time.Duration // for the spans of a request that has ended
}

// Limits of one export that is taken.
const (
	maxExport    = 16 << 20 // bytes, as they come
	maxUnpacked  = 64 << 20 // bytes, unpacked
	maxExports   = 32       // at one time
	otlpServices = "/opentelemetry.proto.collector."
)

// NewTap opens the ports; nil if both are off.
func NewTap(o Options, t TapOptions, in *Ingest) (_ *Tap, err error) {
	if t.GRPC == "" && t.HTTP == "" {
		return nil, nil
	}
	tap := &Tap{logger: o.Logger, forwards: make(map[string]*forwarder)}
	if tap.logger == nil {
		tap.logger = slog.New(slog.DiscardHandler)
	}
	tap.wait, tap.traces = t.Wait, make(map[[16]byte]*toldTrace)
	tap.SetIngest(in)
	defer func() {
		if err != nil {
			tap.closeListeners()
		}
	}()
	for i, address := range []string{t.GRPC, t.HTTP} {
		if address == "" {
			continue
		}
		if tap.lis[i], err = net.Listen("tcp", address); err != nil {
			return nil, fmt.Errorf("otlp %q: %w; choose another address, or stop what uses it", address, err)
		}
	}
	for _, signal := range signals {
		settings, err := o.export(signal)
		if err != nil {
			return nil, err
		}
		if settings == nil {
			continue
		}
		if tap.reaches(settings.url) {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT for %s is weir's own otlp address; name the backend there", signal)
		}
		f, err := newForwarder(signal, settings, tap.logger)
		if err != nil {
			return nil, err
		}
		tap.forwards[signal] = f
	}
	tap.grpc = grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(tap.takeGRPC),
		grpc.MaxRecvMsgSize(maxExport), grpc.MaxConcurrentStreams(maxExports))
	tap.http = &http.Server{Handler: http.HandlerFunc(tap.takeHTTP), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(tap.logger.Handler(), slog.LevelDebug)}
	return tap, nil
}

// SetIngest puts a new mapping of names in force.
func (t *Tap) SetIngest(in *Ingest) {
	if t != nil {
		t.ingest.Store(in)
	}
}

// Addrs are the addresses that the tap listens on, gRPC first; "" if off.
func (t *Tap) Addrs() (grpc, http string) {
	if t == nil {
		return "", ""
	}
	var a [2]string
	for i, l := range t.lis {
		if l != nil {
			a[i] = l.Addr().String()
		}
	}
	return a[0], a[1]
}

// reaches tells whether an endpoint is one of the tap's own ports.
func (t *Tap) reaches(url string) bool {
	_, rest, _ := strings.Cut(url, "://")
	authority, _, _ := strings.Cut(rest, "/")
	host, port, err := net.SplitHostPort(authority)
	if err != nil || host != "localhost" && !net.ParseIP(host).IsLoopback() {
		return false
	}
	for _, l := range t.lis {
		if l == nil {
			continue
		}
		if _, own, _ := net.SplitHostPort(l.Addr().String()); own == port {
			return true
		}
	}
	return false
}

func (t *Tap) closeListeners() {
	for _, l := range t.lis {
		if l != nil {
			_ = l.Close()
		}
	}
}

// Run takes telemetry until ctx ends, and then passes on what it holds for a
// little longer.
func (t *Tap) Run(ctx context.Context) {
	if t == nil {
		return
	}
	for _, f := range t.forwards {
		t.wg.Go(f.run)
	}
	if t.lis[0] != nil {
		t.wg.Go(func() { t.ended(t.grpc.Serve(t.lis[0])) })
	}
	if t.lis[1] != nil {
		t.wg.Go(func() { t.ended(t.http.Serve(t.lis[1])) })
	}
	<-ctx.Done()
	t.stop()
}

func (t *Tap) ended(err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		t.logger.Error("the otlp port failed", "error", err)
	}
}

// lastForward bounds the end: what the backend does not take by then is lost,
// and told.
const lastForward = 2 * time.Second

func (t *Tap) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), lastForward)
	defer cancel()
	_ = t.http.Shutdown(ctx)
	t.grpc.Stop()
	for _, f := range t.forwards {
		f.close(ctx)
	}
	t.wg.Wait()
}

// Hold keeps a copy of a finished record until the server's spans are here, or
// a bounded time has passed; false: there is nothing to wait for.
func (t *Tap) Hold(o *classifier.Observation, now time.Time) bool {
	return t != nil && t.hold(o, now)
}

// Release gives out the records that have waited long enough, filled with what
// the spans told; all of them at the end.
func (t *Tap) Release(now time.Time, all bool, take func(*classifier.Observation)) {
	if t != nil {
		t.release(now, all, take)
	}
}

// Held is what the tap keeps now for backends, in bytes, and how many exports
// it lost to backends that refused them or did not come back before the end.
func (t *Tap) Held() (bytes, lost int64) {
	if t == nil {
		return 0, 0
	}
	for _, f := range t.forwards {
		b, n := f.state()
		bytes, lost = bytes+b, lost+n
	}
	return bytes, lost
}

// An export is one message of a sender, as it came.
type export struct {
	payload []byte
	json    bool
	gzip    bool
}

// unpacked is the payload without compression.
func (e export) unpacked() ([]byte, error) {
	if !e.gzip {
		return e.payload, nil
	}
	z, err := gzip.NewReader(strings.NewReader(string(e.payload)))
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(z, maxUnpacked+1))
	if len(b) > maxUnpacked {
		return nil, fmt.Errorf("it unpacks to more than %d MiB", maxUnpacked>>20)
	}
	return b, err
}

var (
	errTooMuch = errors.New("too much waits for the backend; try again later")
	errBad     = errors.New("this is no OTLP")
)

// take reads one export and hands it on. Spans are read only once it is sure
// that the sender will not send them again.
func (t *Tap) take(signal string, e export) error {
	var request collectorpb.ExportTraceServiceRequest
	if signal == "traces" {
		plain, err := e.unpacked()
		if err == nil && e.json {
			err = fromOTLPJSON(plain, &request)
		} else if err == nil {
			err = proto.Unmarshal(plain, &request)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errBad, err)
		}
	}
	if f := t.forwards[signal]; f != nil {
		if err := f.put(e); err != nil {
			return err
		}
	}
	t.spans(request.ResourceSpans, time.Now())
	return nil
}

// takeGRPC serves the three Export methods, whose messages it does not change.
func (t *Tap) takeGRPC(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	signal := ""
	for _, s := range signals {
		if method == exportMethod(s) {
			signal = s
		}
	}
	if signal == "" {
		return status.Errorf(codes.Unimplemented, "weir takes Export of traces, metrics and logs, not %s", method)
	}
	var m rawMessage
	if err := stream.RecvMsg(&m); err != nil {
		return err
	}
	switch err := t.take(signal, export{payload: m}); {
	case errors.Is(err, errBad):
		return status.Error(codes.InvalidArgument, err.Error())
	case err != nil:
		return status.Error(codes.Unavailable, err.Error()) // OTLP: to be tried again
	}
	return stream.SendMsg(&rawMessage{})
}

func exportMethod(signal string) string {
	kind := map[string]string{"traces": "trace.v1.Trace", "metrics": "metrics.v1.Metrics", "logs": "logs.v1.Logs"}[signal]
	return otlpServices + kind + "Service/Export"
}

func (t *Tap) takeHTTP(w http.ResponseWriter, r *http.Request) {
	signal := strings.TrimPrefix(r.URL.Path, "/v1/")
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	coding := r.Header.Get("Content-Encoding")
	e := export{json: strings.TrimSpace(kind) == "application/json", gzip: coding == "gzip"}
	switch {
	case signal == r.URL.Path || exportMethod(signal) == otlpServices+"Service/Export":
		http.Error(w, "weir takes POST /v1/traces, /v1/metrics and /v1/logs", http.StatusNotFound)
		return
	case r.Method != http.MethodPost:
		http.Error(w, "use POST", http.StatusMethodNotAllowed)
		return
	case !e.json && strings.TrimSpace(kind) != "application/x-protobuf":
		http.Error(w, fmt.Sprintf("Content-Type %q is no OTLP; use application/x-protobuf or application/json", kind), http.StatusUnsupportedMediaType)
		return
	case coding != "" && coding != "identity" && coding != "gzip":
		http.Error(w, fmt.Sprintf("Content-Encoding %q is not supported; use gzip or none", coding), http.StatusUnsupportedMediaType)
		return
	}
	var err error
	if e.payload, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxExport)); err != nil {
		http.Error(w, fmt.Sprintf("reading the body: %v; send at most %d MiB at once", err, maxExport>>20), http.StatusRequestEntityTooLarge)
		return
	}
	switch err := t.take(signal, e); {
	case errors.Is(err, errBad):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case err != nil:
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable) // OTLP: to be tried again
	case e.json:
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{}")
	default:
		w.Header().Set("Content-Type", "application/x-protobuf")
	}
}

// rawMessage is a message that is not decoded.
type rawMessage []byte

// rawCodec passes messages through. It bears protobuf's name, which is what
// they are.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(*rawMessage)
	if !ok {
		return nil, fmt.Errorf("%T is no raw message", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(*m)}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*rawMessage)
	if !ok {
		return fmt.Errorf("%T is no raw message", v)
	}
	*m = data.Materialize()
	return nil
}
