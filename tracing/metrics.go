package tracing

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
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
	"go.opentelemetry.io/otel/sdk/instrumentation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

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

	sums
	rpc                                                                         rpcMetrics
	serverDuration, clientDuration, queueWait, stageDuration, batchSize, stream *family // histograms
	rejected, transferIO, observations, audio, seconds, fit                     *family // counters

	classes    map[string]*classSeries
	answers    map[answer]answerSeries
	words      map[attribute.KeyValue]*series // of the counters with one attribute
	whole      struct{ batchSize, audio *series }
	utterances utteranceMetrics

	verdictsMu sync.Mutex // guards verdicts
	verdicts   []classifier.Verdict
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
	m := &Metrics{
		server:  serverAttributes(o.Server),
		sums:    sums{scope: instrumentation.Scope{Name: "weir", Version: o.Version}, start: time.Now()},
		classes: make(map[string]*classSeries), answers: make(map[answer]answerSeries), words: make(map[attribute.KeyValue]*series),
		rpc: rpcMetrics{calls: make(map[call]answerSeries)},
	}
	scrape, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithProducer(&m.sums), otelprom.WithoutScopeInfo(),
		otelprom.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithSuffixes))
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	options := []sdkmetric.Option{sdkmetric.WithReader(scrape), sdkmetric.WithResource(res)}
	push, err := o.metricReader(ctx, &m.sums)
	if err != nil {
		return nil, err
	}
	if push != nil {
		options = append(options, sdkmetric.WithReader(push))
	}
	m.provider = sdkmetric.NewMeterProvider(options...)
	m.handler = promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
	i := instruments{meter: m.provider.Meter("weir", metric.WithInstrumentationVersion(o.Version)), sums: &m.sums}
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
		m.word(m.rejected, "error.type", word)
	}
	for _, word := range []string{"none", "header", "trailer", "body", "otlp"} {
		m.word(m.observations, "weir.timing.source", word)
	}
	m.whole.batchSize, m.whole.audio = m.batchSize.series(), m.audio.series()
	m.utterances.begin()
}

// metricReader sends all metrics once a minute, or as OTEL_METRIC_EXPORT_INTERVAL says.
func (o Options) metricReader(ctx context.Context, p sdkmetric.Producer) (sdkmetric.Reader, error) {
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
	return sdkmetric.NewPeriodicReader(exporter, sdkmetric.WithInterval(interval), sdkmetric.WithProducer(p)), nil
}

// instruments makes instruments and keeps the first error.
type instruments struct {
	meter metric.Meter
	*sums
	err error
}

func (i *instruments) note(err error) {
	if i.err == nil {
		i.err = err
	}
}

func (i *instruments) histogram(name, unit, text string, bounds []float64) *family {
	return i.family(name, unit, text, bounds)
}

func (i *instruments) counter(name, unit, text string) *family {
	return i.family(name, unit, text, nil)
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
	m.utterances = utteranceMetrics{
		final:        i.histogram("weir.utterance.final.duration", "s", "Final latency of utterances: from the end of speech to the final result.", durationBuckets),
		firstPartial: i.histogram("weir.utterance.first_partial.duration", "s", "From the first audio of an utterance, sent at the pace of speech, to its first partial result.", durationBuckets),
		firstEvent:   i.histogram("weir.stream.first_event.duration", "s", "From the last byte of a request to the first event of its streamed answer.", durationBuckets),
		count:        i.counter("weir.utterances", "{utterance}", "Utterances on streams, by how they ended."),
		unread:       i.counter("weir.stream.unread", "{stream}", "Streams that weir carried but could not read to their end, by reason."),
		ended:        make(map[ending]*series), words: make(map[string]*series), protocols: make(map[string]protocolSeries),
	}
	m.audio = i.counter("weir.audio.duration", "s", "Audio received, as the server tells, or the bytes of a stream.")
	m.seconds = i.counter("weir.seconds", "s", "Time that requests spent in each part of their life; parts add up to total.")
	m.fit = i.counter("weir.fit", "1", "Sums for the line of forward seconds (y) on batch (x), weighted by 1/batch (w).")
	m.rpc.serverDuration = i.histogram("rpc.server.call.duration", "s", "Unary gRPC calls, from the head read to the last byte given to the client.", durationBuckets)
	m.rpc.clientDuration = i.histogram("rpc.client.call.duration", "s", "Unary gRPC calls, from admission to the server's last byte.", durationBuckets)
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
	m.verdictsMu.Lock()
	defer m.verdictsMu.Unlock()
	m.verdicts = slices.Clone(v[:min(len(v), maxClasses)])
}

var causes = []classifier.Cause{classifier.Healthy, classifier.Queue, classifier.Compute, classifier.Transfer,
	classifier.Host, classifier.Client, classifier.Mixed, classifier.Unknown}

func (m *Metrics) observeVerdicts(o metric.Float64Observer) {
	m.verdictsMu.Lock()
	defer m.verdictsMu.Unlock()
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
		m.verdictsMu.Lock()
		defer m.verdictsMu.Unlock()
		for i := range m.verdicts {
			if x, ok := read(&m.verdicts[i].Report); ok {
				o.Observe(x, metric.WithAttributes(classAttribute(m.verdicts[i].Class)))
			}
		}
	}
}

func classAttribute(class string) attribute.KeyValue { return attribute.String("weir.class", class) }

// classSeries are the series of one class.
type classSeries struct {
	seconds           [numParts]*series
	fit               [numTerms]*series
	queueWait, stream *series
	stages            [classifier.NumStages + 1]*series // the last is what is unattributed
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

// class returns the series of o's class.
func (m *Metrics) class(o *classifier.Observation) *classSeries {
	if c := m.classes[o.Class]; c != nil {
		return c
	}
	name, route := o.Class, o.Route
	if len(m.classes) >= maxClasses {
		name, route = "(other)", ""
		if c := m.classes[name]; c != nil {
			return c
		}
	}
	c := m.newClassSeries(name, route)
	m.classes[name] = c
	return c
}

func (m *Metrics) newClassSeries(class, route string) *classSeries {
	c := &classSeries{}
	for p := range c.seconds {
		c.seconds[p] = m.seconds.series(classAttribute(class), attribute.String("weir.part", partName(p)))
	}
	for f := range c.fit {
		c.fit[f] = m.fit.series(classAttribute(class), attribute.String("weir.fit.term", termNames[f]))
	}
	// By route; methods share a series, so the next class of the route finds it.
	c.queueWait, c.stream = m.route(m.queueWait, route, ""), m.route(m.stream, route, "")
	for s := range c.stages {
		name := "unattributed"
		if s == int(classifier.StageQueue) {
			name = "queue_in_server"
		} else if s < classifier.NumStages {
			name = classifier.Stage(s).String()
		}
		if s != int(classifier.StageOther) {
			c.stages[s] = m.route(m.stageDuration, route, name)
		}
	}
	return c
}

// route finds or makes the series of a route, and of a stage if there is one.
func (m *Metrics) route(f *family, route, stage string) *series {
	var kv []attribute.KeyValue
	if route != "" {
		kv = append(kv, attribute.String("http.route", route))
	}
	if stage != "" {
		kv = append(kv, attribute.String("weir.stage", stage))
	}
	set := attribute.NewSet(kv...)
	for _, s := range f.all {
		if s.attributes.Equals(&set) {
			return s
		}
	}
	return f.series(kv...)
}

// answer is what the series of one answer differ in.
type answer struct {
	method, route, protocol, scheme, err string
	status                               int
}

type answerSeries struct{ server, client *series }

func (m *Metrics) answer(o *classifier.Observation) answerSeries {
	a := answer{method: methodAttribute(o), route: o.Route, protocol: o.Protocol, scheme: o.Scheme, err: o.Error, status: o.Status}
	if found, ok := m.answers[a]; ok {
		return found
	}
	if len(m.answers) >= maxAnswers {
		a = answer{method: otherMethod, err: "other"}
		if found, ok := m.answers[a]; ok {
			return found
		}
	}
	kv := a.attributes()
	made := answerSeries{m.serverDuration.series(kv...), m.clientDuration.series(append(kv, m.server...)...)}
	m.answers[a] = made
	return made
}

func (a answer) attributes() []attribute.KeyValue {
	kv := []attribute.KeyValue{attribute.String("http.request.method", a.method), attribute.String("url.scheme", schemeOf(a.scheme))}
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
		kv = append(kv, attribute.String("error.type", strconv.Itoa(a.status)))
	}
	return kv
}

// word finds or makes the series of a counter's one attribute.
func (m *Metrics) word(f *family, key, value string) *series {
	kv := attribute.String(key, value)
	s := m.words[kv]
	if s == nil {
		s = f.series(kv)
		m.words[kv] = s
	}
	return s
}

// Observe counts one finished request.
func (m *Metrics) Observe(o *classifier.Observation) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.class(o)
	if o.Utterance != nil {
		m.utterances.observe(o)
		c.addParts(o)
		m.observeServer(c, o)
		return
	}
	m.utterances.observeSession(o)
	m.word(m.observations, "weir.timing.source", source(o)).add(1)
	if o.Outcome == classifier.Rejected || o.Outcome == classifier.Expired {
		m.word(m.rejected, "error.type", o.Error).add(1)
	}
	if o.Upgraded {
		c.stream.record(o.Total().Seconds())
		return
	}
	if isRPC(o) {
		m.rpc.observe(o, m.server)
	} else {
		m.observeHTTP(o)
	}
	if o.Outcome != classifier.Rejected { // who was turned away at once did not wait, nor go unqueued
		c.queueWait.recordTraced(o.QueueWait().Seconds(), o)
	}
	c.addParts(o)
	m.observeServer(c, o)
}

func (m *Metrics) observeHTTP(o *classifier.Observation) {
	a := m.answer(o)
	a.server.recordTraced(o.Total().Seconds(), o)
	if !o.Dequeued.IsZero() {
		a.client.record(max(0, o.Total()-o.QueueWait()).Seconds())
	}
}

func source(o *classifier.Observation) string {
	if o.Source == "" {
		return "none"
	}
	return o.Source
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
	c.seconds[partTotal].add(o.Total().Seconds())
	c.seconds[partQueue].add(l.Queue.Seconds())
	c.seconds[partUpload].add(l.Upload.Seconds())
	c.seconds[partUnattributed].add((l.Overhead + l.Connect + l.Stream + l.Unattributed).Seconds())
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		c.seconds[partStages+int(s)-1].add(scale * l.Stages[s].Seconds())
	}
}

func (m *Metrics) observeServer(c *classSeries, o *classifier.Observation) {
	if o.AudioSeconds > 0 {
		m.whole.audio.add(o.AudioSeconds)
	}
	if len(o.Timings) == 0 {
		return
	}
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		if d, ok := o.In(s); ok {
			c.stages[s].record(d.Seconds())
		}
	}
	c.stages[classifier.NumStages].record(o.Unattributed().Seconds())
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Stage == classifier.StageTransfer && t.Bytes > 0 && !t.Untrusted {
			m.word(m.transferIO, "weir.transfer.direction", direction(t.Name)).add(float64(t.Bytes))
		}
	}
	if o.BatchSize > 0 {
		m.whole.batchSize.record(float64(o.BatchSize))
		c.addFit(o)
	}
}

// direction bounds the attribute to the two words that servers use.
func direction(name string) string {
	if name == "h2d" || name == "d2h" {
		return name
	}
	return "unknown"
}

// addFit adds one point with the weight 1/batch: an execution counts once,
// however many requests shared it.
func (c *classSeries) addFit(o *classifier.Observation) {
	d, ok := o.In(classifier.StageForward)
	if !ok || d <= 0 {
		return
	}
	x, y := float64(o.BatchSize), d.Seconds()
	w := 1 / x
	for term, v := range [numTerms]float64{w, w * x, w * y, w * x * x, w * x * y, w * y * y} {
		c.fit[term].add(v)
	}
}
