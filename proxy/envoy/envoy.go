// Package envoy puts weir beside an Envoy instead of in front of the server.
//
// Three gRPC services, through go-control-plane's types, serve one Envoy or
// many: the access-log sink makes records of requests that are over, without
// touching them; the external processor lets requests through weir's gate
// while their bodies stay in Envoy; and the runtime service gives Envoy weir's
// limits as runtime keys. All of them fill the records that package proxy
// fills, so that gate, verdict and telemetry are the same.
//
// What weir cannot see of Envoy it reads from Envoy's own counters: how many
// entries of the log were lost, and how many requests went by the queue because
// the processor did not answer. Where too much was lost there is no verdict.
package envoy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	orca "github.com/cncf/xds/go/xds/data/orca/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"weir/classifier"
	"weir/proxy"
	"weir/tracing"
)

// A Server offers the services for Envoy. It is a [proxy.Service].
type Server struct {
	listener  net.Listener
	grpc      *grpc.Server
	logger    *slog.Logger
	least     float64 // coverage below which there is no verdict
	processor *processor
	log       *logSink
	loads     *loads
	runtime   *runtimePush // nil: off
	stats     *stats       // nil: envoy_admin is not set

	background context.Context
	cancel     context.CancelFunc
	stop       chan struct{} // closed when endless streams are to end
	wg         sync.WaitGroup
	once       sync.Once
	mu         sync.Mutex
	ended      bool // nothing may join wg any more
}

// New opens the port that cfg names and joins the sidecar. Call it before
// [proxy.Sidecar.Run]; it returns nil if cfg names no port.
func New(side *proxy.Sidecar, cfg proxy.Config) (*Server, error) {
	network, address := cfg.EnvoyAddress()
	if network == "" {
		return nil, nil
	}
	l, err := listen(network, address)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l, logger: side.Logger(), least: cfg.EnvoyCoverage, loads: new(loads), stop: make(chan struct{})}
	s.background, s.cancel = context.WithCancel(context.Background())
	ids := new(seen)
	s.processor = newProcessor(side, s.loads, cfg.EnvoyORCA, ids)
	s.log = newLogSink(side, s.loads, ids, cfg.EnvoyCluster, s.stop)
	if cfg.EnvoyAdmin != "" {
		s.stats = newStats(cfg.EnvoyAdmin, cfg.EnvoyStatPrefix, s.log.entries.Load)
	}
	s.grpc = newGRPC(s.logger)
	procv3.RegisterExternalProcessorServer(s.grpc, s.processor)
	logv3.RegisterAccessLogServiceServer(s.grpc, s.log)
	if cfg.EnvoyRuntime != "off" {
		s.runtime = newRuntimePush(cfg, func() proxy.Limits { return side.Gate().State().Limits }, s.logger)
		s.runtime.register(s.background, s.grpc)
	}
	if err := side.Metrics().Envoy(s.gauges()); err != nil {
		l.Close()
		s.cancel()
		return nil, err
	}
	side.Mount(s)
	side.Doubt(s.log.replay.late, s.doubt)
	side.Handle("GET /api/envoy", http.HandlerFunc(s.getState))
	return s, nil
}

func listen(network, address string) (net.Listener, error) {
	if network == "unix" { // a socket that an earlier weir left behind
		if info, err := os.Lstat(address); err == nil && info.Mode().Type() == os.ModeSocket {
			_ = os.Remove(address)
		}
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, fmt.Errorf("envoy_listen %q: %w; choose another address, or stop what uses it", address, err)
	}
	return l, nil
}

// What Envoys may send, and how a peer that vanished without a word is found.
const (
	maxMessage    = 4 << 20 // bytes; a batch of log entries is 16 KiB by default
	pingAfter     = 30 * time.Second
	pingTimeout   = 10 * time.Second
	pingsAtMost   = 5 * time.Second
	streamsAtMost = 1 << 16 // on one connection
)

func newGRPC(logger *slog.Logger) *grpc.Server {
	return grpc.NewServer(
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(streamsAtMost),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingsAtMost, PermitWithoutStream: true}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
			defer func() {
				if v := recover(); v != nil {
					logger.Error("a stream was given up after a bug in weir", "panic", v, "method", info.FullMethod, "stack", string(debug.Stack()))
					err = status.Error(codes.Internal, "a bug in weir")
				}
			}()
			return next(srv, ss)
		}),
	)
}

// Addr is the address that Envoys connect to.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Serve serves until Shutdown.
func (s *Server) Serve() error {
	s.begin()
	if err := s.grpc.Serve(s.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serving Envoys: %w", err)
	}
	return nil
}

// begin starts what runs beside the port, unless the end came first.
func (s *Server) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	s.wg.Go(func() { s.log.replay.run(s.background) })
	if s.stats != nil {
		s.wg.Go(func() { s.stats.run(s.background) })
	}
	if s.runtime != nil {
		s.wg.Go(func() { s.runtime.run(s.background) })
	}
}

// withdrawTime is how long Envoys have to confirm that they are on their own
// configuration again.
const withdrawTime = time.Second

// Shutdown takes the runtime keys back, ends the logs and lets requests that
// are under way end until ctx does.
func (s *Server) Shutdown(ctx context.Context) (err error) {
	s.once.Do(func() {
		s.mu.Lock()
		s.ended = true
		s.mu.Unlock()
		if s.runtime != nil {
			withdraw, cancel := context.WithTimeout(ctx, withdrawTime)
			s.runtime.withdraw(withdraw)
			cancel()
		}
		close(s.stop)
		s.cancel()
		ended := make(chan struct{})
		go func() { s.grpc.GracefulStop(); close(ended) }()
		select {
		case <-ended:
		case <-ctx.Done():
			if n := s.processor.active.Load(); n > 0 {
				err = fmt.Errorf("drain_timeout passed with %d of Envoy's requests still under way; they were cut", n)
			}
			s.grpc.Stop()
			<-ended
		}
		s.wg.Wait()
	})
	return err
}

// doubt takes back verdicts that rest on too little of the access log.
func (s *Server) doubt(v classifier.Verdict) classifier.Verdict {
	if !s.log.fed(v.Class, time.Now()) {
		return v
	}
	if s.stats == nil {
		v.Warnings = append(slices.Clone(v.Warnings), "how much of Envoy's access log was lost is not known; set envoy_admin")
		return v
	}
	share, ok := s.stats.coverage()
	switch err := s.stats.failure(); {
	case err != nil:
		v.Warnings = append(slices.Clone(v.Warnings), "how much of Envoy's access log was lost is not known: "+err.Error())
	case ok && share < s.least:
		v.Cause, v.Confidence = classifier.Unknown, 0
		v.Evidence = []string{fmt.Sprintf("Envoy's access log brought %.0f %% of the requests that Envoy counted in the last minute; below envoy_coverage (%.0f %%) the rest could change the verdict", 100*share, 100*s.least)}
		v.Advice = "raise buffer_size_bytes of the log's grpc_log_config, and log all requests of the connection manager that envoy_stat_prefix names"
	}
	return v
}

func (s *Server) gauges() tracing.EnvoyGauges {
	return tracing.EnvoyGauges{
		Entries: s.log.entries.Load, Streams: s.processor.streams.Load, NACKs: func() int64 { return s.runtime.nackCount() },
		Coverage: func() (float64, bool) {
			if s.stats == nil {
				return 0, false
			}
			return s.stats.coverage()
		},
		Bypassed: func() (int64, bool) {
			if s.stats == nil {
				return 0, false
			}
			return s.stats.counter(s.stats.names.bypassed), true
		},
	}
}

// state is what the admin port tells of Envoy.
type state struct {
	Listen    string `json:"listen"`
	AccessLog struct {
		Streams  int64    `json:"streams"`
		Entries  int64    `json:"entries"`
		Other    int64    `json:"other"`  // of other clusters, or not of a request's end
		Twice    int64    `json:"twice"`  // recorded by the external processor
		Broken   int64    `json:"broken"` // without a start
		Coverage *float64 `json:"coverage"`
		Dropped  int64    `json:"dropped_by_envoy"`
	} `json:"access_log"`
	Processor struct {
		Streams  int64 `json:"streams"`
		Active   int64 `json:"active"`
		Refused  int64 `json:"refused"`
		Left     int64 `json:"left_queue"` // ended by Envoy while they waited
		Early    int64 `json:"unanswered"` // ended by Envoy before the answer's head
		Bypassed int64 `json:"bypassed"`   // let through by Envoy without weir's answer, by Envoy's count
		Timeouts int64 `json:"message_timeouts"`
	} `json:"ext_proc"`
	Load struct {
		Reports  int64                `json:"reports"`
		Rejected int64                `json:"rejected"`
		Last     *orca.OrcaLoadReport `json:"last"`
	} `json:"orca"`
	Runtime    *runtimeState `json:"runtime"`
	StatsError string        `json:"stats_error,omitempty"`
}

func (s *Server) state() (t state) {
	t.Listen = s.Addr()
	t.AccessLog.Streams, t.AccessLog.Entries = s.log.streams.Load(), s.log.entries.Load()
	t.AccessLog.Other, t.AccessLog.Twice, t.AccessLog.Broken = s.log.other.Load(), s.log.twice.Load(), s.log.broken.Load()
	p := s.processor
	t.Processor.Streams, t.Processor.Active = p.streams.Load(), p.active.Load()
	t.Processor.Refused, t.Processor.Left, t.Processor.Early = p.refused.Load(), p.left.Load(), p.early.Load()
	s.loads.mu.Lock()
	t.Load.Reports, t.Load.Rejected, t.Load.Last = s.loads.reports, s.loads.rejected, s.loads.last
	s.loads.mu.Unlock()
	t.Runtime = s.runtime.state()
	if s.stats == nil {
		return t
	}
	if share, ok := s.stats.coverage(); ok {
		t.AccessLog.Coverage = &share
	}
	t.AccessLog.Dropped = s.stats.counter(s.stats.names.dropped)
	t.Processor.Bypassed, t.Processor.Timeouts = s.stats.counter(s.stats.names.bypassed), s.stats.counter(s.stats.names.timeouts)
	if err := s.stats.failure(); err != nil {
		t.StatsError = err.Error()
	}
	return t
}

func (s *Server) getState(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(s.state())
}
