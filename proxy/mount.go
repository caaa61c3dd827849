package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// A Service brings requests to a Sidecar's gate, or finished records to its
// sink, from a port of its own.
type Service interface {
	Serve() error                   // until Shutdown, or an error
	Shutdown(context.Context) error // lets what is in flight end until ctx does
}

// Mount has the service run with the sidecar. Call it before Run.
func (s *Sidecar) Mount(one Service) { s.services = append(s.services, one) }

// Handle adds a page to the admin port. Call it before Run.
func (s *Sidecar) Handle(pattern string, h http.Handler) {
	if s.pages == nil {
		s.pages = make(map[string]http.Handler)
	}
	s.pages[pattern] = h
}

// Doubt has f look at each verdict before it is shown: a source of records that
// knows itself to be incomplete takes the verdict back. late tells how long
// after their end records may come. Both run on the sink's goroutine. Call it
// before Run.
func (s *Sidecar) Doubt(late func() time.Duration, f func(classifier.Verdict) classifier.Verdict) {
	s.watch.late, s.watch.doubt = late, f
}

// Gate is the one gate of all protocols; its Sink takes records of requests
// that passed no gate, too.
func (s *Sidecar) Gate() *Gate { return s.server.Gate }

// Sampler decides which requests are traced; nil if none are.
func (s *Sidecar) Sampler() *tracing.Sampler { return s.server.Sampler }

// Metrics are the sidecar's instruments.
func (s *Sidecar) Metrics() *tracing.Metrics { return s.metrics }

// Logger is the sidecar's log.
func (s *Sidecar) Logger() *slog.Logger { return s.logger }

// Rules are what a reload can change: read them once for each request.
type Rules struct {
	Router       *Router
	Ingest       *tracing.Ingest
	ServerTiming bool // tell clients, too, where the time went
	RequestStart bool // tell the server when the request came
	MaxHeadSize  int  // bytes
	HeadTimeout  time.Duration
}

// Rules returns those in force now.
func (s *Sidecar) Rules() Rules {
	c := s.server.settings()
	return Rules{c.router, c.ingest, c.serverTiming, c.requestStart, c.maxHeadSize, c.headTimeout}
}

func (s *Sidecar) shutdownServices(ctx context.Context) {
	for _, one := range s.services {
		if err := one.Shutdown(ctx); err != nil {
			s.logger.Warn(err.Error())
		}
	}
}

// A Refusal is how a request ends that the gate did not let in.
type Refusal struct {
	Status  int
	Word    string // for error.type
	Body    []byte // JSON: the reason and the remedy
	Outcome classifier.Outcome
}

// RefusalOf maps an error of [Gate.Enter] to the request's end. Its Status is
// 0 where nobody waits for an answer.
func RefusalOf(err error) Refusal {
	f, ok := refusalOf(err)
	if !ok {
		return Refusal{Word: "client_gone", Outcome: classifier.Canceled}
	}
	return Refusal{f.status, f.word, f.body(), f.outcome}
}

func refusalOf(err error) (fault, bool) {
	var limit *LimitError
	switch {
	case errors.As(err, &limit) && limit.Err == ErrQueueTimeout:
		return fault{503, "queue_timeout", limit.Error(), classifier.Expired}, true
	case errors.As(err, &limit):
		return fault{503, "queue_full", limit.Error(), classifier.Rejected}, true
	case errors.Is(err, ErrDraining):
		return fault{503, shuttingDown, "weir is shutting down; retry on another instance", classifier.Rejected}, true
	}
	return fault{}, false
}

// AppendRedacted appends a request's target for a record, with the values of
// its query replaced.
func AppendRedacted(dst, target []byte) []byte { return appendRedacted(dst, target) }
