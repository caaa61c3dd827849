package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// Spans makes spans of finished records and sends them to an OTLP backend. A
// nil Spans makes none. Record encodes a request's spans at once into the batch
// that is being filled; one goroutine uploads batches, in their order. What
// does not fit, or cannot be sent, is dropped and counted: a backend that is
// away or slow costs spans, never time or more than maxHeld of memory.
type Spans struct {
	client    otlptrace.Client
	closeIdle func()
	settings  *exportSettings
	logger    *slog.Logger
	keepSlow  time.Duration
	keepShare float64
	limits    batchLimits

	// Of the goroutine that uploads.
	scope   *tracepb.ScopeSpans
	request []*tracepb.ResourceSpans
	err     error     // the last one that the log has not told of
	told    int64     // dropped spans that the log told of
	toldAt  time.Time // of the last log line

	dropped atomic.Int64
	mu      sync.Mutex // guards what follows
	tree    tree
	filling *batch
	full    []*batch
	spare   []*batch
	held    batchSize // in full batches and in the one that is being uploaded
	closed  bool

	wake   chan struct{} // a batch is full
	stop   chan struct{}
	done   chan struct{}
	ctx    context.Context // of uploads
	cancel context.CancelFunc
	once   sync.Once
}

// batch is a part of a request to the backend: encoded spans.
type batch struct {
	raw   []byte
	spans int
}

type batchSize struct{ bytes, spans int }

// batchLimits are the OTEL_BSP_ variables.
type batchLimits struct {
	delay   time.Duration // how long a span waits for others at most
	timeout time.Duration // of one upload, retries included
	batch   int           // spans in one
	queue   int           // spans that wait to be uploaded; 0: only bytes count
}

// The limits in bytes, and how many emptied batches are kept for later ones.
const (
	maxBatch = 1 << 20
	maxHeld  = 16 << 20
	maxSpare = 4
)

// logPeriod is the time between two log lines about lost spans at least.
const logPeriod = time.Minute

// NewSpans starts the export of spans, or returns nil where the environment
// asks for none. It does not wait for the backend.
func NewSpans(ctx context.Context, o Options) (*Spans, error) {
	settings, err := o.export("traces")
	if err != nil || settings == nil {
		return nil, err
	}
	limits, err := o.batchLimits()
	if err != nil {
		return nil, err
	}
	res, err := o.resource(ctx)
	if err != nil {
		return nil, err
	}
	client, closeIdle := settings.traceClient()
	if err := client.Start(ctx); err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	s := newSpans(o, client, limits)
	s.settings, s.closeIdle = settings, closeIdle
	s.request[0].Resource, s.request[0].SchemaUrl = resourceProto(res), res.SchemaURL()
	go s.run()
	return s, nil
}

func newSpans(o Options, client otlptrace.Client, limits batchLimits) *Spans {
	s := &Spans{
		client: client, closeIdle: func() {}, settings: &exportSettings{},
		logger: o.Logger, keepSlow: o.KeepSlow, keepShare: o.KeepQueueShare, limits: limits,
		scope: &tracepb.ScopeSpans{Scope: &commonpb.InstrumentationScope{Name: "weir", Version: o.Version}},
		tree:  newTree(o.Server, o.Scheme), filling: &batch{},
		wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
	if s.logger == nil {
		s.logger = slog.New(slog.DiscardHandler)
	}
	s.request = []*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{s.scope}}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

func (o Options) batchLimits() (l batchLimits, err error) {
	var errs [4]error
	l.delay, errs[0] = o.milliseconds("OTEL_BSP_SCHEDULE_DELAY", time.Second)
	l.timeout, errs[1] = o.milliseconds("OTEL_BSP_EXPORT_TIMEOUT", 30*time.Second)
	l.batch, errs[2] = o.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
	l.queue, errs[3] = o.number("OTEL_BSP_MAX_QUEUE_SIZE", 0)
	return l, errors.Join(errs[:]...)
}

func resourceProto(res *resource.Resource) *resourcepb.Resource {
	pb := &resourcepb.Resource{}
	for _, kv := range res.Attributes() {
		pb.Attributes = append(pb.Attributes, &commonpb.KeyValue{
			Key:   string(kv.Key),
			Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: kv.Value.String()}},
		})
	}
	return pb
}

// Record makes the spans of one finished request, if it is sampled or worth
// keeping. It never waits for the backend. It keeps nothing of o.
func (s *Spans) Record(o *classifier.Observation) {
	if s == nil || !traced(o) {
		return
	}
	kept := ""
	if !o.Sampled {
		if kept = s.keep(o); kept == "" {
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.tree.plan(o, kept)
	if s.closed || !s.room(n) {
		s.dropped.Add(int64(n))
		return
	}
	if s.filling.spans+n > s.limits.batch {
		s.seal()
	}
	s.filling.raw = s.tree.append(s.filling.raw)
	s.filling.spans += n
	if s.filling.spans >= s.limits.batch || len(s.filling.raw) >= maxBatch {
		s.seal()
	}
}

// traced tells whether weir took part in the request's trace with a span of
// its own. A malformed request has no trace.
func traced(o *classifier.Observation) bool {
	return o.TraceID != [16]byte{} && o.SpanID != [8]byte{} && o.SpanID != o.ParentID && !o.Enqueued.IsZero() && !o.Done.IsZero()
}

// keep tells why a request that was not sampled at its start is kept at its
// end; "" if it is not.
func (s *Spans) keep(o *classifier.Observation) (reason string) {
	switch total := o.Total(); {
	case o.Utterance != nil: // a span without its session's says little
		return ""
	case o.Outcome == classifier.Rejected, o.Outcome == classifier.Expired, o.Outcome == classifier.Failed:
		return o.Outcome.String()
	case o.Status >= 500, rpcServerFailed(o):
		return "error"
	case s.keepSlow > 0 && total >= s.keepSlow && !o.Upgraded:
		return "slow"
	case s.keepShare > 0 && total > 0 && float64(o.QueueWait()) >= s.keepShare*float64(total):
		return "queue"
	}
	return ""
}

func (s *Spans) room(spans int) bool {
	return s.held.bytes+len(s.filling.raw) < maxHeld &&
		(s.limits.queue == 0 || s.held.spans+s.filling.spans+spans <= s.limits.queue)
}

// seal hands the batch that is being filled over for upload.
func (s *Spans) seal() {
	if s.filling.spans == 0 {
		return
	}
	s.full = append(s.full, s.filling)
	s.held.bytes += len(s.filling.raw)
	s.held.spans += s.filling.spans
	s.filling = &batch{}
	if n := len(s.spare); n > 0 {
		s.filling, s.spare = s.spare[n-1], s.spare[:n-1]
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// next takes the oldest full batch; nil if there is none.
func (s *Spans) next() *batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.full) == 0 {
		return nil
	}
	b := s.full[0]
	n := copy(s.full, s.full[1:])
	s.full[n] = nil
	s.full = s.full[:n]
	return b
}

// release makes room for what the batch held, and keeps its memory for another.
func (s *Spans) release(b *batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held.bytes -= len(b.raw)
	s.held.spans -= b.spans
	b.raw, b.spans = b.raw[:0], 0
	if len(s.spare) < maxSpare {
		s.spare = append(s.spare, b)
	}
}

// run uploads full batches, and from time to time what there is.
func (s *Spans) run() {
	defer close(s.done)
	t := time.NewTicker(s.limits.delay)
	defer t.Stop()
	for {
		select {
		case <-s.wake:
		case <-t.C:
			s.flush(false)
		case <-s.stop:
			s.flush(true)
			s.uploadAll()
			return
		}
		s.uploadAll()
	}
}

func (s *Spans) flush(last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seal()
	s.closed = s.closed || last
}

func (s *Spans) uploadAll() {
	for b := s.next(); b != nil; b = s.next() {
		err := s.upload(b)
		s.dropped.Add(int64(lostOf(b, err)))
		s.release(b)
		s.tell(err, time.Now())
	}
}

// upload sends one batch. The spans travel as a field that the message does
// not know, so that no object is made for any of them.
func (s *Spans) upload(b *batch) error {
	ctx, cancel := context.WithTimeout(s.ctx, s.limits.timeout)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return err // shut down
	}
	s.scope.ProtoReflect().SetUnknown(b.raw)
	defer s.scope.ProtoReflect().SetUnknown(nil)
	return s.client.UploadTraces(ctx, s.request)
}

// lostOf is how many spans of the batch were not taken. The exporters' error
// for a partial success has no public type.
func lostOf(b *batch, err error) int {
	if err == nil {
		return 0
	}
	text := err.Error()
	if !strings.Contains(text, "OTLP partial success: ") {
		return b.spans
	}
	count, ok := strings.CutSuffix(text, " spans rejected)")
	n, err := strconv.Atoi(count[strings.LastIndexByte(count, '(')+1:])
	if !ok || err != nil {
		return b.spans
	}
	return min(max(n, 0), b.spans)
}

// tell logs what went wrong and what helps, once a minute at most.
func (s *Spans) tell(err error, now time.Time) {
	dropped := s.dropped.Load()
	if err != nil {
		s.err = err
	}
	if s.err == nil && dropped == s.told || now.Sub(s.toldAt) < logPeriod || s.ctx.Err() != nil {
		return
	}
	text, remedy := "the backend takes them too slowly", "sample fewer traces by OTEL_TRACES_SAMPLER_ARG, or give the backend more"
	if s.err != nil {
		text, remedy = s.settings.scrub(s.err.Error()), remedyFor(s.err.Error())
	}
	s.logger.Warn("spans were lost", "spans", dropped-s.told, "error", text, "remedy", remedy)
	s.err, s.told, s.toldAt = nil, dropped, now
}

// maxErrorText bounds what is logged of an error: it may quote the backend.
const maxErrorText = 300

// scrub takes credentials out of an error's text.
func (s *exportSettings) scrub(text string) string {
	for _, value := range s.headers {
		for _, word := range strings.Fields(value) {
			if len(word) >= 6 {
				text = strings.ReplaceAll(text, word, "REDACTED")
			}
		}
	}
	if len(text) > maxErrorText {
		text = strings.ToValidUTF8(text[:maxErrorText], "") + "..."
	}
	return text
}

// remedies by what errors say; the first that matches counts.
var remedies = []struct{ text, remedy string }{
	{"does not look like a TLS handshake", "the backend speaks plain text: use http:// in the endpoint"},
	{"server gave HTTP response to HTTPS client", "the backend speaks plain text: use http:// in the endpoint"},
	{"HTTP request to an HTTPS server", "the backend speaks TLS: use https:// in the endpoint"},
	{`malformed HTTP response "\x15`, "the backend speaks TLS: use https:// in the endpoint"},
	{"malformed HTTP response", "the backend speaks gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc (4317 is gRPC, 4318 is HTTP)"},
	{"readLoopPeekFail", "the backend speaks gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc (4317 is gRPC, 4318 is HTTP)"}, // it spoke first
	{"frame too large", "the backend speaks HTTP: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf (4317 is gRPC, 4318 is HTTP)"},
	{"server preface", "the backend speaks no gRPC there: try OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf (4317 is gRPC, 4318 is HTTP), or https://"},
	{"x509:", "name the backend's root certificate in OTEL_EXPORTER_OTLP_CERTIFICATE"},
	{"certificate required", "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"},
	{"connection refused", "check that the backend runs and listens there"},
	{"connection reset", "check the endpoint's port, and whether the backend wants https:// there"},
	{"EOF", "check the endpoint's port, and whether the backend wants https:// there"},
	{"no such host", "check the host's name in the endpoint"},
	{"produced zero addresses", "check the host's name in the endpoint"},
	{"401 ", "check OTEL_EXPORTER_OTLP_HEADERS"},
	{"403 ", "check OTEL_EXPORTER_OTLP_HEADERS"},
	{"Unauthenticated", "check OTEL_EXPORTER_OTLP_HEADERS"},
	{"PermissionDenied", "check OTEL_EXPORTER_OTLP_HEADERS"},
	{"404 ", "check the path of the endpoint"},
	{"Unimplemented", "the backend takes no traces there: check the endpoint"},
	{"413 ", "lower OTEL_BSP_MAX_EXPORT_BATCH_SIZE, or raise the backend's limit"},
	{"larger than max", "lower OTEL_BSP_MAX_EXPORT_BATCH_SIZE, or raise the backend's limit"},
	{"partial success", "the backend refused these spans; its message says why"},
	{"deadline exceeded", "the backend gave no answer in time: check it, or raise OTEL_EXPORTER_OTLP_TIMEOUT"},
	{"DeadlineExceeded", "the backend gave no answer in time: check it, or raise OTEL_EXPORTER_OTLP_TIMEOUT"},
	{"Client.Timeout", "the backend gave no answer in time: check it, or raise OTEL_EXPORTER_OTLP_TIMEOUT"},
}

func remedyFor(text string) string {
	for _, r := range remedies {
		if strings.Contains(text, r.text) {
			return r.remedy
		}
	}
	return "check OTEL_EXPORTER_OTLP_ENDPOINT and the backend"
}

// Dropped is the number of spans lost since the start.
func (s *Spans) Dropped() int64 {
	if s == nil {
		return 0
	}
	return s.dropped.Load()
}

// Shutdown sends what is left, returns before ctx ends, and tells of spans
// that it lost. Records that come later are dropped.
func (s *Spans) Shutdown(ctx context.Context) error {
	if s == nil {
		return nil
	}
	before := s.Dropped()
	s.once.Do(func() { close(s.stop) })
	giveUp, cancel := earlier(ctx)
	defer cancel()
	select {
	case <-s.done:
	case <-giveUp.Done():
		s.cancel()
		<-s.done
	}
	s.cancel()
	_ = s.client.Stop(ctx)
	s.closeIdle()
	if lost := s.Dropped() - before; lost > 0 {
		return fmt.Errorf("traces: %d spans were lost at the end, because the backend did not take them in time", lost)
	}
	return nil
}

// earlier ends a little before ctx does, so that there is time to count.
func earlier(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(100*time.Millisecond, time.Until(deadline)/10)))
}
