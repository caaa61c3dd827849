package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// A Sidecar is a whole weir: the data path, the verdict, the telemetry and the
// admin port, made from one [Config].
type Sidecar struct {
	server  *Server
	watch   *watch
	sink    *Sink
	spans   *tracing.Spans
	metrics *tracing.Metrics
	logs    *tracing.Logs
	logger  *slog.Logger
	level   *slog.LevelVar
	version string

	listener, adminListener net.Listener // listener is nil under NoListen
	services                []Service
	pages                   map[string]http.Handler // of the admin port, by pattern
	notReady                atomic.Bool
	untrusted               atomic.Int64 // timings that cannot be true

	mu  sync.Mutex
	cfg Config
}

// SidecarOptions is what a Sidecar gets from its process.
type SidecarOptions struct {
	Getenv  func(string) string // for OTEL_*; nil: an empty environment
	Logger  *slog.Logger        // nil: slog's default
	Level   *slog.LevelVar      // of Logger, so that a reload can set it; may be nil
	Version string
}

// sinkSize is the number of finished records that may wait for the sink's
// goroutine: a second of traffic at a rate that no ASR server reaches.
const sinkSize = 4096

// NewSidecar opens the two ports and makes everything ready to run.
func NewSidecar(ctx context.Context, cfg Config, o SidecarOptions) (_ *Sidecar, err error) {
	if o.Getenv == nil {
		o.Getenv = func(string) string { return "" }
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s := &Sidecar{logger: o.Logger, level: o.Level, version: o.Version, cfg: cfg, sink: NewSink(sinkSize)}
	defer func() {
		if err != nil {
			s.closeAll()
		}
	}()
	if err := s.newServer(cfg, o); err != nil {
		return nil, err
	}
	if err := s.newTelemetry(ctx, cfg, o); err != nil {
		return nil, err
	}
	s.watch = &watch{
		window: classifier.Window{Length: cfg.Window.Duration(), ServerKind: serverKind(cfg.ServerKind)}, latches: make(map[string]*latch), past: make(map[string]*past),
		probe: newProbe(cfg.Probe, s.server.network, s.server.address, func() int { return s.server.Gate.State().Inflight }),
		spans: s.spans, metrics: s.metrics, logs: s.logs, logger: s.logger, length: cfg.Window.Duration(),
		recent: newRing[classifier.Observation](cfg.Records), untrusted: &s.untrusted,
	}
	if err := s.watch.ask(cfg); err != nil {
		return nil, err
	}
	if err := s.apply(cfg); err != nil {
		return nil, err
	}
	if err := s.listen(cfg); err != nil {
		return nil, err
	}
	return s, s.newTap(cfg, o)
}

func (s *Sidecar) newServer(cfg Config, o SidecarOptions) error {
	sampler, err := tracing.NewSampler(o.Getenv("OTEL_TRACES_SAMPLER"), o.Getenv("OTEL_TRACES_SAMPLER_ARG"), cfg.TrustParent)
	if err != nil {
		return err
	}
	toClients, err := cfg.listenTLS(s.logger)
	if err != nil {
		return err
	}
	toServer, err := cfg.serverTLS(s.logger)
	if err != nil {
		return err
	}
	h, err := newHangups()
	if err != nil {
		return fmt.Errorf("watching connections: %w", err)
	}
	go h.run()
	network, address := cfg.ServerAddress()
	s.server = &Server{
		Gate: &Gate{Sink: s.sink.Put}, Sampler: sampler, Logger: s.logger,
		network: network, address: address, target: cfg.Server, hangups: h,
		listenTLS: toClients, serverTLS: toServer,
	}
	return nil
}

func (s *Sidecar) newTelemetry(ctx context.Context, cfg Config, o SidecarOptions) (err error) {
	_, address := cfg.ServerAddress()
	opts := tracing.Options{
		Getenv: o.Getenv, Version: o.Version, Logger: s.logger, Server: address, Scheme: s.server.scheme(),
		KeepSlow: cfg.KeepSlow.Duration(), KeepQueueShare: cfg.KeepQueueShare,
	}
	if s.spans, err = tracing.NewSpans(ctx, opts); err != nil {
		return err
	}
	if s.logs, err = tracing.NewLogs(ctx, opts); err != nil {
		return err
	}
	gate := s.server.Gate
	s.metrics, err = tracing.NewMetrics(ctx, opts, tracing.Gauges{
		Waiting:        func() int64 { return int64(gate.State().Waiting) },
		Inflight:       func() int64 { return int64(gate.State().Inflight) },
		Limit:          func() int64 { return int64(gate.State().MaxConcurrency) },
		QueueLimit:     func() int64 { return int64(gate.State().MaxQueueSize) },
		OldestWaiting:  func() time.Duration { return gate.State().OldestWaiting },
		OldestInflight: func() time.Duration { return gate.State().OldestInflight },
		Abandoned:      func() int64 { return gate.State().Abandoned },
		DroppedRecords: s.sink.Dropped,
		DroppedSpans:   s.spans.Dropped,
		Untrusted:      s.untrusted.Load,
	})
	return err
}

func (s *Sidecar) listen(cfg Config) (err error) {
	if cfg.Listen != NoListen {
		if s.listener, err = listen(cfg.Listen); err != nil {
			return fmt.Errorf("listen %q: %w; choose another address, or stop what uses it", cfg.Listen, err)
		}
	}
	if s.adminListener, err = net.Listen("tcp", cfg.Admin); err != nil {
		return fmt.Errorf("admin %q: %w; choose another address, or stop what uses it", cfg.Admin, err)
	}
	return nil
}

// apply puts into force what a running weir can change.
func (s *Sidecar) apply(cfg Config) error {
	ingest, err := tracing.NewIngest(cfg.Timings)
	if err != nil {
		return err
	}
	s.watch.tap.SetIngest(ingest)
	router, err := NewRouter(cfg.Routes)
	if err != nil {
		return err
	}
	s.server.cfg.Store(&settings{
		router: router, ingest: ingest,
		keepHalfClosed: cfg.HalfClose == "keep", serverTiming: cfg.ServerTiming, requestStart: cfg.RequestStart, orca: cfg.ORCA,
		serverProtocol: cfg.ServerProtocol, streamProtocol: cfg.StreamProtocol,
		maxHeadSize: int(cfg.MaxHeadSize), maxConns: cfg.MaxConnections,
		connectTimeout: cfg.ConnectTimeout.Duration(), headTimeout: cfg.HeadTimeout.Duration(), bodyTimeout: cfg.BodyTimeout.Duration(),
		responseTimeout: cfg.ResponseTimeout.Duration(), writeTimeout: cfg.WriteTimeout.Duration(),
	})
	named := make(map[string]Limits, len(cfg.Limits))
	for _, l := range cfg.Limits {
		named[l.Route+l.Model] = Limits{l.MaxConcurrency, l.MaxQueueSize, l.QueueTimeout.Duration()}
	}
	s.server.Gate.SetLimits(Limits{cfg.MaxConcurrency, cfg.MaxQueueSize, cfg.QueueTimeout.Duration()}, named)
	s.watch.setThresholds(cfg.Thresholds, cfg.VerdictFor.Duration(), cfg.VerdictKeepFor.Duration())
	if s.level != nil {
		_ = s.level.UnmarshalText([]byte(cfg.LogLevel))
	}
	s.mu.Lock()
	s.cfg = cfg
	s.mu.Unlock()
	return nil
}

// Reload puts a new configuration into force without losing a request. Keys
// that need a restart keep their old value; they are logged.
func (s *Sidecar) Reload(cfg Config) error {
	s.mu.Lock()
	old := s.cfg
	s.mu.Unlock()
	if err := s.apply(cfg); err != nil {
		return err
	}
	if keys := Restart(old, cfg); len(keys) > 0 {
		s.logger.Warn("these keys take effect at the next start", "keys", strings.Join(keys, ", "))
	}
	s.logger.Info("configuration reloaded")
	return nil
}

func (s *Sidecar) drainTimeout() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg.DrainTimeout.Duration()
}

// Addr is the address that clients connect to, if there is one; AdminAddr that
// of the page.
func (s *Sidecar) Addr() string {
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}
func (s *Sidecar) AdminAddr() string { return s.adminListener.Addr().String() }

// Verdicts returns the verdicts that are shown now, the busiest class first.
func (s *Sidecar) Verdicts() []classifier.Verdict { return s.watch.current() }

// flushTimeout bounds the last export: a sidecar may be killed soon after its
// SIGTERM.
const flushTimeout = 2 * time.Second

// Run serves until ctx ends; then it stops accepting, lets what is in flight
// finish within drain_timeout, and sends the last telemetry.
func (s *Sidecar) Run(ctx context.Context) error {
	admin := s.adminServer()
	sinkCtx, stopSink := context.WithCancel(context.Background())
	var sink sync.WaitGroup
	sink.Go(func() { s.sink.Run(sinkCtx, s.watch.take, s.watch.tick) })
	sink.Go(func() { s.watch.evidence.Run(sinkCtx) })
	sink.Go(func() { s.watch.tap.Run(sinkCtx) })
	sink.Go(func() { s.watch.probe.run(sinkCtx) })
	failed, served := make(chan error, 2+len(s.services)), make(chan struct{})
	if s.listener != nil {
		go func() { failed <- s.server.Serve(s.listener); close(served) }()
	}
	for _, one := range s.services {
		go func() { failed <- one.Serve() }()
	}
	go func() { failed <- admin.Serve(&cappedListener{Listener: s.adminListener, limit: maxAdmin}) }()

	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
	}
	s.notReady.Store(true)
	if s.listener != nil {
		s.server.EndAccepting(s.listener)
		<-served
		_ = s.listener.Close()
	}
	drain, cancel := context.WithTimeout(context.Background(), s.drainTimeout())
	defer cancel()
	s.shutdownServices(drain)
	if e := s.server.Shutdown(drain); e != nil {
		s.logger.Warn(e.Error())
	}
	stopSink()
	sink.Wait()
	s.watch.tap.Release(time.Now(), true, s.watch.settle)
	s.flush()
	_ = admin.Close()
	return err
}

// flush sends the last of all three signals side by side: a silent backend
// must not hold up the end three times.
func (s *Sidecar) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, shutdown := range []func(context.Context) error{s.spans.Shutdown, s.metrics.Shutdown, s.logs.Shutdown} {
		wg.Go(func() {
			if err := shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) {
				s.logger.Warn("telemetry was lost at the end", "error", err)
			}
		})
	}
	wg.Wait()
}

func (s *Sidecar) closeAll() {
	for _, l := range []net.Listener{s.listener, s.adminListener} {
		if l != nil {
			_ = l.Close()
		}
	}
	if s.server != nil {
		s.server.hangups.close()
	}
	s.flush()
}
