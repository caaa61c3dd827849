package tracing

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/otlptranslator"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/trace"

	"weir/classifier"
)

// Gauges reads what moves between requests, so that a weir in which everything
// is stuck still tells of it. All fields are needed, and safe to call from any
// goroutine.
type Gauges struct {
	Waiting, Inflight, Limit, QueueLimit func() int64
	OldestWaiting, OldestInflight        func() time.Duration
	Abandoned                            func() int64 // requests whose client left while the server worked, ever
	DroppedRecords, DroppedSpans         func() int64 // ever
	Untrusted                            func() int64 // stage timings that cannot be true, ever; may be nil
}

// Metrics is the one set of instruments behind /metrics and OTLP. Observe and
// Verdicts belong to one goroutine. Names, units and attributes are listed in
// deploy/prometheus/RUNBOOK.md; all of them are bounded: routes come from the
// configuration, classes past maxClasses share one name.
type Metrics struct {
	provider *sdkmetric.MeterProvider
	handler  http.Handler
	server   []attribute.KeyValue // of the server behind weir

	serverDuration, clientDuration, queueWait, stageDuration, batchSize, stream metric.Float64Histogram
	rejected, transferIO, observations                                          metric.Int64Counter
	audio                                                                       metric.Float64Counter

	answers map[answer]answerOptions
	words   map[attribute.KeyValue][]metric.AddOption

	mu       sync.Mutex // guards what follows, which scrapes read
	classes  map[string]*classSeries
	verdicts []classifier.Verdict
}

// maxClasses caps the classes, and maxAnswers the combinations of method,
// route, status and error, that get series of their own.
const (
	maxClasses = 128
	maxAnswers = 2000
)

// Durations in seconds: the buckets of the HTTP convention, and three more,
// because speech takes longer than pages; waiting, from 1 ms.
var (
	durationBuckets = []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120}
	waitBuckets     = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}
	batchBuckets    = []float64{1, 2, 4, 8, 16, 32, 64, 128}
)

// NewMetrics makes the instruments, the scrape handler, and the OTLP exporter
// where the environment asks for one.
func NewMetrics(ctx context.Context, o Options, g Gauges) (*Metrics, error) {
	res, err := o.resource(ctx)
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	scrape, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo(),
		otelprom.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithSuffixes))
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	options := []sdkmetric.Option{sdkmetric.WithReader(scrape), sdkmetric.WithResource(res)}
	push, err := o.metricReader(ctx)
	if err != nil {
		return nil, err
	}
	if push != nil {
		options = append(options, sdkmetric.WithReader(push))
	}
	m := &Metrics{
		provider: sdkmetric.NewMeterProvider(options...),
		handler:  promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}),
		server:   serverAttributes(o.Server),
		classes:  make(map[string]*classSeries), answers: make(map[answer]answerOptions),
		words: make(map[attribute.KeyValue][]metric.AddOption),
	}
	i := instruments{meter: m.provider.Meter("weir", metric.WithInstrumentationVersion(o.Version))}
	m.newInstruments(&i)
	m.newGauges(&i, g, o.Version)
	if i.err != nil {
		return nil, fmt.Errorf("metrics: %w", i.err)
	}
	m.begin()
	return m, nil
}

// begin gives counters of rare events a first value: a rate sees no rise in a
// series whose first value is the event itself.
func (m *Metrics) begin() {
	for _, word := range []string{"queue_full", "queue_timeout", "shutting_down"} {
		m.rejected.Add(context.Background(), 0, m.word("error.type", word)...)
	}
	for _, word := range []string{"none", "header", "trailer", "body", "otlp"} {
		m.observations.Add(context.Background(), 0, m.word("weir.timing.source", word)...)
	}
}

// metricReader sends all metrics once a minute, or as OTEL_METRIC_EXPORT_INTERVAL says.
func (o Options) metricReader(ctx context.Context) (sdkmetric.Reader, error) {
	s, err := o.export("metrics")
	if err != nil || s == nil {
		return nil, err
	}
	interval, err := o.milliseconds("OTEL_METRIC_EXPORT_INTERVAL", time.Minute)
	if err != nil {
		return nil, err
	}
	var exporter sdkmetric.Exporter
	if s.grpc {
		exporter, err = otlpmetricgrpc.New(ctx, s.metricGRPC()...)
	} else {
		exporter, err = otlpmetrichttp.New(ctx, s.metricHTTP()...)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return sdkmetric.NewPeriodicReader(exporter, sdkmetric.WithInterval(interval)), nil
}

// instruments makes instruments and keeps the first error.
type instruments struct {
	meter metric.Meter
	err   error
}

func (i *instruments) note(err error) {
	if i.err == nil {
		i.err = err
	}
}

func (i *instruments) histogram(name, unit, text string, buckets []float64) metric.Float64Histogram {
	h, err := i.meter.Float64Histogram(name, metric.WithUnit(unit), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(buckets...))
	i.note(err)
	return h
}

func (i *instruments) counter(name, unit, text string) metric.Int64Counter {
	c, err := i.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
	i.note(err)
	return c
}

func (i *instruments) sum(name, unit, text string) metric.Float64Counter {
	c, err := i.meter.Float64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
	i.note(err)
	return c
}

func (i *instruments) level(name, text string, read func() int64) {
	_, err := i.meter.Int64ObservableUpDownCounter(name, metric.WithUnit("{request}"), metric.WithDescription(text),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { o.Observe(read()); return nil }))
	i.note(err)
}

func (i *instruments) gauge(name, unit, text string, read func(metric.Float64Observer)) {
	_, err := i.meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error { read(o); return nil }))
	i.note(err)
}

func (i *instruments) total(name, unit, text string, read func(metric.Int64Observer)) {
	_, err := i.meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(text),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { read(o); return nil }))
	i.note(err)
}

func (i *instruments) sums(name, unit, text string, read func(metric.Float64Observer)) {
	_, err := i.meter.Float64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(text),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error { read(o); return nil }))
	i.note(err)
}

func (m *Metrics) newInstruments(i *instruments) {
	m.serverDuration = i.histogram("http.server.request.duration", "s", "Requests, from the head read to the last byte given to the client.", durationBuckets)
	m.clientDuration = i.histogram("http.client.request.duration", "s", "Requests, from admission to the server's last byte.", durationBuckets)
	m.queueWait = i.histogram("weir.queue.wait.duration", "s", "Waiting in weir's queue.", waitBuckets)
	m.stageDuration = i.histogram("weir.stage.duration", "s", "Stages of the server's work, as it tells them.", durationBuckets)
	m.batchSize = i.histogram("weir.batch.size", "{request}", "Requests that shared an execution, as the server tells.", batchBuckets)
	m.stream = i.histogram("weir.stream.duration", "s", "Tunnels and endless streams, whose length is no latency.", durationBuckets)
	m.rejected = i.counter("weir.requests.rejected", "{request}", "Requests that weir refused, by reason.")
	m.transferIO = i.counter("weir.transfer.io", "By", "Bytes copied between host and device, as the server tells.")
	m.observations = i.counter("weir.observations", "{request}", "Finished requests, by where their stage timings came from.")
	m.audio = i.sum("weir.audio.duration", "s", "Audio received, as the server tells.")
	i.sums("weir.seconds", "s", "Time that requests spent in each part of their life; parts add up to total.",
		m.observeSums(func(c *classSeries) ([]float64, [][]metric.ObserveOption) { return c.seconds[:], c.partOptions[:] }))
	i.sums("weir.fit", "1", "Sums for the line of forward seconds (y) on batch (x), weighted by 1/batch (w).",
		m.observeSums(func(c *classSeries) ([]float64, [][]metric.ObserveOption) { return c.fit[:], c.fitOptions[:] }))
}

func (m *Metrics) newGauges(i *instruments, g Gauges, version string) {
	i.level("weir.queue.depth", "Requests waiting in weir's queue.", g.Waiting)
	i.level("weir.concurrency.used", "Requests in the server.", g.Inflight)
	i.gauge("weir.queue.limit", "{request}", "max_queue_size.", func(o metric.Float64Observer) { o.Observe(float64(g.QueueLimit())) })
	i.gauge("weir.concurrency.limit", "{request}", "max_concurrency; 0: none.", func(o metric.Float64Observer) { o.Observe(float64(g.Limit())) })
	i.gauge("weir.queue.oldest.age", "s", "How long the oldest waiting request has waited; 0: none waits.", func(o metric.Float64Observer) { o.Observe(g.OldestWaiting().Seconds()) })
	i.gauge("weir.concurrency.oldest.age", "s", "How long the oldest request in the server has been there; 0: none is.", func(o metric.Float64Observer) { o.Observe(g.OldestInflight().Seconds()) })
	i.total("weir.requests.abandoned", "{request}", "Requests whose client left while the server worked on them.", func(o metric.Int64Observer) { o.Observe(g.Abandoned()) })
	i.total("weir.telemetry.dropped", "{item}", "Records and spans that were lost because a queue was full or a backend away.", func(o metric.Int64Observer) {
		o.Observe(g.DroppedRecords(), metric.WithAttributes(attribute.String("weir.signal", "records"), attribute.String("error.type", "queue_full")))
		o.Observe(g.DroppedSpans(), metric.WithAttributes(attribute.String("weir.signal", "traces"), attribute.String("error.type", "export")))
	})
	if g.Untrusted != nil {
		i.total("weir.stages.untrusted", "{timing}", "Stage timings told by the server that cannot be true; they are not used.", func(o metric.Int64Observer) { o.Observe(g.Untrusted()) })
	}
	i.gauge("weir.build.info", "", "Always 1; the version is an attribute.", func(o metric.Float64Observer) {
		o.Observe(1, metric.WithAttributes(attribute.String("version", version)))
	})
	i.gauge("weir.verdict", "", "1 for the cause that is shown, 0 for all others.", m.observeVerdicts)
	i.gauge("weir.window.queue_wait", "1", "Share of both queues in latency, of the last window.", m.observeWindow(func(r *classifier.Report) (float64, bool) { return r.Shares.Waiting(), true }))
	i.gauge("weir.window.transfer", "1", "Share of copies in latency, of the last window.", m.observeWindow(func(r *classifier.Report) (float64, bool) { return r.Shares.Transfer, true }))
	i.gauge("weir.window.forward.slope", "s/{request}", "Forward time of one more request in the batch.", m.observeWindow(func(r *classifier.Report) (float64, bool) { return r.Forward.Slope.Seconds(), r.Forward.OK }))
}

// Handler serves the scrape page, in the text format or OpenMetrics.
func (m *Metrics) Handler() http.Handler { return m.handler }

// Shutdown sends the last metrics. It is safe on nil.
func (m *Metrics) Shutdown(ctx context.Context) error {
	if m == nil {
		return nil
	}
	return m.provider.Shutdown(ctx)
}

// Verdicts replaces the verdicts that are shown.
func (m *Metrics) Verdicts(v []classifier.Verdict) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.verdicts = slices.Clone(v[:min(len(v), maxClasses)])
}

var causes = []classifier.Cause{classifier.Healthy, classifier.Queue, classifier.Compute, classifier.Transfer,
	classifier.Host, classifier.Client, classifier.Mixed, classifier.Unknown}

func (m *Metrics) observeVerdicts(o metric.Float64Observer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range m.verdicts {
		for _, c := range causes {
			is := 0.0
			if v.Cause == c {
				is = 1
			}
			o.Observe(is, metric.WithAttributes(classAttribute(v.Class), attribute.String("weir.verdict.cause", string(c))))
		}
	}
}

func (m *Metrics) observeWindow(read func(*classifier.Report) (float64, bool)) func(metric.Float64Observer) {
	return func(o metric.Float64Observer) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for i := range m.verdicts {
			if x, ok := read(&m.verdicts[i].Report); ok {
				o.Observe(x, metric.WithAttributes(classAttribute(m.verdicts[i].Class)))
			}
		}
	}
}

func classAttribute(class string) attribute.KeyValue { return attribute.String("weir.class", class) }

// classSeries holds one class's additive sums, and the options of its other
// series: making attribute sets anew for each request would cost more than all
// the rest.
type classSeries struct {
	seconds     [numParts]float64
	fit         [numTerms]float64
	partOptions [numParts][]metric.ObserveOption
	fitOptions  [numTerms][]metric.ObserveOption

	route  []metric.RecordOption
	stages [classifier.NumStages + 1][]metric.RecordOption // the last is what is unattributed
}

// The parts of weir.seconds, in the words of [classifier.Shares]. Those of the
// stages follow in the order of [classifier.Stage], from StageQueue on.
const (
	partTotal = iota
	partQueue
	partUpload
	partUnattributed
	partStages
	numParts = partStages + classifier.NumStages - 1
)

func partName(p int) string {
	switch {
	case p < partStages:
		return [...]string{"total", "queue", "upload", "unattributed"}[p]
	case p == partStages:
		return "server_queue"
	}
	return classifier.Stage(p - partStages + 1).String()
}

// The terms of weir.fit.
const (
	termW = iota
	termWX
	termWY
	termWXX
	termWXY
	termWYY
	numTerms
)

var termNames = [numTerms]string{"w", "wx", "wy", "wxx", "wxy", "wyy"}

// class returns the series of o's class; m.mu is held.
func (m *Metrics) class(o *classifier.Observation) *classSeries {
	name := o.Class
	if c := m.classes[name]; c != nil {
		return c
	}
	route := o.Route
	if len(m.classes) >= maxClasses {
		name, route = "(other)", ""
		if c := m.classes[name]; c != nil {
			return c
		}
	}
	c := newClassSeries(name, route)
	m.classes[name] = c
	return c
}

func newClassSeries(class, route string) *classSeries {
	c := &classSeries{}
	for p := range c.partOptions {
		c.partOptions[p] = observeOptions(classAttribute(class), attribute.String("weir.part", partName(p)))
	}
	for f := range c.fitOptions {
		c.fitOptions[f] = observeOptions(classAttribute(class), attribute.String("weir.fit.term", termNames[f]))
	}
	var base []attribute.KeyValue
	if route != "" {
		base = append(base, attribute.String("http.route", route))
	}
	c.route = recordOptions(base...)
	for s := range c.stages {
		name := "unattributed"
		if s == int(classifier.StageQueue) {
			name = "queue_in_server"
		} else if s < classifier.NumStages {
			name = classifier.Stage(s).String()
		}
		c.stages[s] = recordOptions(append(slices.Clone(base), attribute.String("weir.stage", name))...)
	}
	return c
}

func recordOptions(kv ...attribute.KeyValue) []metric.RecordOption {
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

func addOptions(kv ...attribute.KeyValue) []metric.AddOption {
	return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

func observeOptions(kv ...attribute.KeyValue) []metric.ObserveOption {
	return []metric.ObserveOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

func (m *Metrics) observeSums(read func(*classSeries) ([]float64, [][]metric.ObserveOption)) func(metric.Float64Observer) {
	return func(o metric.Float64Observer) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, c := range m.classes {
			sums, options := read(c)
			for i, v := range sums {
				o.Observe(v, options[i]...)
			}
		}
	}
}

// answer is what the series of one answer differ in.
type answer struct {
	method, route, protocol, err string
	status                       int
}

type answerOptions struct{ server, client []metric.RecordOption }

func (m *Metrics) answer(o *classifier.Observation) answerOptions {
	a := answer{method: methodAttribute(o), route: o.Route, protocol: o.Protocol, err: o.Error, status: o.Status}
	if opts, ok := m.answers[a]; ok {
		return opts
	}
	if len(m.answers) >= maxAnswers {
		a = answer{method: otherMethod, err: "other"}
	}
	kv := a.attributes()
	opts := answerOptions{
		server: recordOptions(kv...),
		client: recordOptions(append(slices.Clone(kv), m.server...)...),
	}
	m.answers[a] = opts
	return opts
}

func (a answer) attributes() []attribute.KeyValue {
	kv := []attribute.KeyValue{attribute.String("http.request.method", a.method), attribute.String("url.scheme", "http")}
	if a.route != "" {
		kv = append(kv, attribute.String("http.route", a.route))
	}
	if a.status > 0 {
		kv = append(kv, attribute.Int("http.response.status_code", a.status))
	}
	if v := protocolVersion(a.protocol); v != "" {
		kv = append(kv, attribute.String("network.protocol.version", v))
	}
	switch {
	case a.err != "":
		kv = append(kv, attribute.String("error.type", a.err))
	case a.status >= 500:
		kv = append(kv, attribute.String("error.type", fmt.Sprint(a.status)))
	}
	return kv
}

// Observe counts one finished request.
func (m *Metrics) Observe(o *classifier.Observation) {
	c := m.addSums(o)
	ctx := context.Background()
	m.observations.Add(ctx, 1, m.word("weir.timing.source", source(o))...)
	if o.Outcome == classifier.Rejected || o.Outcome == classifier.Expired {
		m.rejected.Add(ctx, 1, m.word("error.type", o.Error)...)
	}
	if o.Upgraded {
		m.stream.Record(ctx, o.Total().Seconds(), c.route...)
		return
	}
	traced := ctx
	if o.Sampled { // for exemplars
		traced = trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: o.TraceID, SpanID: o.SpanID, TraceFlags: trace.FlagsSampled}))
	}
	a := m.answer(o)
	m.serverDuration.Record(traced, o.Total().Seconds(), a.server...)
	if o.Outcome != classifier.Rejected { // who was turned away at once did not wait, nor go unqueued
		m.queueWait.Record(ctx, o.QueueWait().Seconds(), c.route...)
	}
	if !o.Dequeued.IsZero() {
		m.clientDuration.Record(ctx, max(0, o.Total()-o.QueueWait()).Seconds(), a.client...)
	}
	m.observeServer(ctx, c, o)
}

func source(o *classifier.Observation) string {
	if o.Source == "" {
		return "none"
	}
	return o.Source
}

func (m *Metrics) word(key, value string) []metric.AddOption {
	kv := attribute.String(key, value)
	opts := m.words[kv]
	if opts == nil {
		opts = addOptions(kv)
		m.words[kv] = opts
	}
	return opts
}

// addSums adds the request to its class's sums.
func (m *Metrics) addSums(o *classifier.Observation) *classSeries {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.class(o)
	if !o.Upgraded {
		c.addParts(o)
		c.addFit(o)
	}
	return c
}

// addParts adds the request's life. Stages that ran at the same time can
// exceed the wall time; they are scaled into it, so that the parts of a fleet
// still add up to its total.
func (c *classSeries) addParts(o *classifier.Observation) {
	l := o.Ledger()
	var stages time.Duration
	for _, d := range l.Stages {
		stages += d
	}
	scale := 1.0
	if l.Overlap > 0 && stages > 0 {
		scale = max(0, (stages-l.Overlap).Seconds()/stages.Seconds())
	}
	c.seconds[partTotal] += o.Total().Seconds()
	c.seconds[partQueue] += l.Queue.Seconds()
	c.seconds[partUpload] += l.Upload.Seconds()
	c.seconds[partUnattributed] += (l.Overhead + l.Connect + l.Stream + l.Unattributed).Seconds()
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		c.seconds[partStages+int(s)-1] += scale * l.Stages[s].Seconds()
	}
}

// addFit adds one point with the weight 1/batch: an execution counts once,
// however many requests shared it.
func (c *classSeries) addFit(o *classifier.Observation) {
	d, ok := o.In(classifier.StageForward)
	if !ok || d <= 0 || o.BatchSize <= 0 {
		return
	}
	x, y := float64(o.BatchSize), d.Seconds()
	w := 1 / x
	c.fit[termW] += w
	c.fit[termWX] += w * x
	c.fit[termWY] += w * y
	c.fit[termWXX] += w * x * x
	c.fit[termWXY] += w * x * y
	c.fit[termWYY] += w * y * y
}

func (m *Metrics) observeServer(ctx context.Context, c *classSeries, o *classifier.Observation) {
	if o.AudioSeconds > 0 {
		m.audio.Add(ctx, o.AudioSeconds)
	}
	if len(o.Timings) == 0 {
		return
	}
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		if d, ok := o.In(s); ok {
			m.stageDuration.Record(ctx, d.Seconds(), c.stages[s]...)
		}
	}
	m.stageDuration.Record(ctx, o.Unattributed().Seconds(), c.stages[classifier.NumStages]...)
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Stage == classifier.StageTransfer && t.Bytes > 0 && !t.Untrusted {
			m.transferIO.Add(ctx, t.Bytes, m.word("weir.transfer.direction", direction(t.Name))...)
		}
	}
	if o.BatchSize > 0 {
		m.batchSize.Record(ctx, float64(o.BatchSize))
	}
}

// direction bounds the attribute to the two words that servers use.
func direction(name string) string {
	if name == "h2d" || name == "d2h" {
		return name
	}
	return "unknown"
}
