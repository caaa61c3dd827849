package envoy

import (
	"errors"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"weir/classifier"
	"weir/proxy"
	"weir/tracing"
)

// A logSink takes Envoy's access log. It is in nobody's way: an entry comes
// when its request is over.
type logSink struct {
	logv3.UnimplementedAccessLogServiceServer
	side    *proxy.Sidecar
	loads   *loads
	seen    *seen  // requests that the external processor has recorded
	cluster string // entries of others are passed over; empty: of none
	stop    chan struct{}
	replay  *replay

	streams, entries, other, twice, broken atomic.Int64

	mu      sync.Mutex
	classes map[string]time.Time // when each last had an entry
}

func newLogSink(side *proxy.Sidecar, l *loads, ids *seen, cluster string, stop chan struct{}) *logSink {
	return &logSink{
		side: side, loads: l, seen: ids, cluster: cluster, stop: stop,
		replay: newReplay(side.Gate().Sink), classes: make(map[string]time.Time),
	}
}

// StreamAccessLogs takes one Envoy's entries until either side ends.
func (s *logSink) StreamAccessLogs(stream logv3.AccessLogService_StreamAccessLogsServer) error {
	s.streams.Add(1)
	defer s.streams.Add(-1)
	failed := make(chan error, 1)
	go func() { failed <- s.receive(stream) }()
	select {
	case err := <-failed:
		return err
	case <-s.stop:
		return status.Error(codes.Unavailable, "weir is shutting down")
	}
}

func (s *logSink) receive(stream logv3.AccessLogService_StreamAccessLogsServer) error {
	var clock clock
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&logv3.StreamAccessLogsResponse{})
		}
		if err != nil {
			return err
		}
		s.takeAll(m.GetHttpLogs().GetLogEntry(), &clock, time.Now())
	}
}

func (s *logSink) takeAll(entries []*datav3.HTTPAccessLogEntry, c *clock, now time.Time) {
	for _, e := range entries {
		s.entries.Add(1)
		if o, ok := s.read(e, c, now); ok {
			s.replay.add(o, now)
		}
	}
}

// read makes a record of an entry, if it is one of the end of a request to the
// server that nothing else has recorded.
func (s *logSink) read(e *datav3.HTTPAccessLogEntry, c *clock, now time.Time) (*classifier.Observation, bool) {
	p := e.GetCommonProperties()
	switch t := p.GetAccessLogType(); {
	case p.GetIntermediateLogEntry(), t != datav3.AccessLogType_NotSet && t != datav3.AccessLogType_DownstreamEnd,
		s.cluster != "" && p.GetUpstreamCluster() != s.cluster:
		s.other.Add(1)
		return nil, false
	case s.seen.has(e.GetRequest().GetRequestId()):
		s.twice.Add(1)
		return nil, false
	case !p.GetStartTime().IsValid():
		s.broken.Add(1)
		return nil, false
	}
	o := new(classifier.Observation)
	rules := s.side.Rules()
	describeEntry(o, e, rules.Router)
	placeEntry(o, e, c.here(p.GetStartTime().AsTime(), length(p), now))
	endEntry(o, e)
	s.takeTimings(o, e, rules.Ingest)
	s.side.Sampler().Start(o, tracing.ReadTraceparent(o, []byte(e.GetRequest().GetRequestHeaders()["traceparent"]), []byte(e.GetRequest().GetRequestHeaders()["tracestate"])))
	s.feed(o.Class, now)
	return o, true
}

func describeEntry(o *classifier.Observation, e *datav3.HTTPAccessLogEntry, r *proxy.Router) {
	q, p := e.GetRequest(), e.GetCommonProperties()
	path := q.GetOriginalPath()
	if path == "" {
		path = q.GetPath()
	}
	var model []byte
	o.Method = q.GetRequestMethod().String()
	o.Class, o.Route, model = r.Match([]byte(o.Method), []byte(path))
	o.Model, o.Target = string(model), string(proxy.AppendRedacted(nil, []byte(path)))
	o.Host, o.UserAgent, o.Client = q.GetAuthority(), q.GetUserAgent(), addressOf(p.GetDownstreamRemoteAddress())
	o.Protocol = protocolOf(e)
	o.Status = int(e.GetResponse().GetResponseCode().GetValue())
	o.BytesIn, o.BytesOut = int64(q.GetRequestBodyBytes()), int64(e.GetResponse().GetResponseBodyBytes())
	o.Upgraded = o.Status == 101
}

func protocolOf(e *datav3.HTTPAccessLogEntry) string {
	if strings.HasPrefix(e.GetRequest().GetRequestHeaders()["content-type"], "application/grpc") {
		return "grpc"
	}
	switch e.GetProtocolVersion() {
	case datav3.HTTPAccessLogEntry_HTTP10:
		return "http/1.0"
	case datav3.HTTPAccessLogEntry_HTTP11:
		return "http/1.1"
	case datav3.HTTPAccessLogEntry_HTTP2:
		return "h2"
	case datav3.HTTPAccessLogEntry_HTTP3:
		return "http/3"
	}
	return "http"
}

func addressOf(a *corev3.Address) string {
	s := a.GetSocketAddress()
	if s == nil {
		return a.GetPipe().GetPath()
	}
	return s.GetAddress() + ":" + strconv.FormatUint(uint64(s.GetPortValue()), 10)
}

// poolReady names the custom tag whose value is
// %UPSTREAM_CONNECTION_POOL_READY_DURATION%: how long, in ms, the request
// waited in Envoy for a connection.
const poolReady = "pool_ready_ms"

// placeEntry lays Envoy's durations out as the instants of a record. Envoy
// forwards a body as it comes, so its wait for a connection and the client's
// upload run side by side; without the tag, the wait is what is left of the
// time until the first byte went upstream once the client had sent all: never
// too much, too little where clients are slower than the queue.
func placeEntry(o *classifier.Observation, e *datav3.HTTPAccessLogEntry, start time.Time) {
	p := e.GetCommonProperties()
	total := length(p)
	o.Enqueued, o.Done = start, start.Add(total)
	if p.GetTimeToFirstUpstreamTxByte() == nil {
		return // it never went to the server
	}
	first, received := span(p.GetTimeToFirstUpstreamTxByte(), total), span(p.GetTimeToLastRxByte(), total)
	wait, told := tagged(p)
	if !told {
		wait = max(0, first-received)
	}
	wait = min(wait, first)
	o.Dequeued = start.Add(wait)
	o.Overhead = max(0, first-wait-received)
	o.Sent = start.Add(max(first, span(p.GetTimeToLastUpstreamTxByte(), total)))
	if d := p.GetTimeToFirstUpstreamRxByte(); d != nil {
		o.Responded = start.Add(max(wait, span(d, total)))
	}
}

// length is the whole time of a request.
func length(p *datav3.AccessLogCommon) time.Duration {
	d := p.GetDuration()
	if d == nil {
		d = p.GetTimeToLastDownstreamTxByte()
	}
	return span(d, maxLength)
}

// maxLength bounds every duration of the log: a longer one is no request.
const maxLength = 24 * time.Hour

// span is a duration between none and most.
func span(d *durationpb.Duration, most time.Duration) time.Duration {
	if d == nil || !d.IsValid() {
		return 0
	}
	return min(max(d.AsDuration(), 0), most)
}

// tagged is the wait for a connection by the custom tag.
func tagged(p *datav3.AccessLogCommon) (time.Duration, bool) {
	ms, err := strconv.ParseFloat(p.GetCustomTags()[poolReady], 64)
	if err != nil || !(ms >= 0) || ms > maxLength.Seconds()*1e3 {
		return 0, false
	}
	return time.Duration(ms * 1e6), true
}

// endEntry reads how the request ended from Envoy's response flags.
func endEntry(o *classifier.Observation, e *datav3.HTTPAccessLogEntry) {
	f := e.GetCommonProperties().GetResponseFlags()
	switch {
	case f.GetUpstreamOverflow():
		o.Outcome, o.Error, o.Dequeued = classifier.Rejected, "queue_full", time.Time{}
	case f.GetOverloadManager(), f.GetRateLimited():
		o.Outcome, o.Error, o.Dequeued = classifier.Rejected, "rate_limited", time.Time{}
	case f.GetDownstreamConnectionTermination(), f.GetDownstreamRemoteReset(), f.GetDownstreamProtocolError():
		o.Outcome, o.Error = classifier.Canceled, "client_gone"
	case f.GetUpstreamRequestTimeout(), f.GetStreamIdleTimeout(), f.GetDurationTimeout(), f.GetUpstreamMaxStreamDurationReached():
		o.Outcome, o.Error = classifier.Failed, "server_timeout"
	case f.GetNoHealthyUpstream(), f.GetUpstreamConnectionFailure(), f.GetDnsResolutionFailure(), f.GetFailedLocalHealthcheck():
		o.Outcome, o.Error = classifier.Failed, "server_unreachable"
	case f.GetUpstreamRemoteReset(), f.GetUpstreamConnectionTermination(), f.GetUpstreamRetryLimitExceeded(), f.GetLocalReset():
		o.Outcome, o.Error = classifier.Failed, "server_reset"
	case f.GetUpstreamProtocolError():
		o.Outcome, o.Error = classifier.Failed, "bad_response"
	case o.Dequeued.IsZero():
		o.Outcome, o.Error = classifier.Failed, envoyReply
	}
}

// takeTimings reads what the server told in headers and trailers that Envoy
// was asked to log.
func (s *logSink) takeTimings(o *classifier.Observation, e *datav3.HTTPAccessLogEntry, in *tracing.Ingest) {
	for name, value := range e.GetResponse().GetResponseHeaders() {
		in.Header(o, []byte(name), []byte(value))
	}
	for name, value := range e.GetResponse().GetResponseTrailers() {
		in.Trailer(o, []byte(name), []byte(value))
	}
	for name, value := range e.GetResponse().GetResponseHeaders() {
		if isLoadReport(name) {
			s.loads.take(o, in, name, value, false)
		}
	}
	for name, value := range e.GetResponse().GetResponseTrailers() {
		if isLoadReport(name) {
			s.loads.take(o, in, name, value, true)
		}
	}
	for name, value := range e.GetRequest().GetRequestHeaders() {
		if d, ok := tracing.RequestStart([]byte(name), []byte(value), o.Enqueued); ok {
			o.Before = max(o.Before, d)
		}
	}
	in.Finish(o)
}

func (s *logSink) feed(class string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.classes[class] = now
}

// fed tells whether verdicts of the class rest on the log.
func (s *logSink) fed(class string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok := s.classes[class]
	return ok && now.Sub(at) < reportMemory
}

// seen remembers for a while which requests one source has recorded, by Envoy's
// x-request-id, so that another does not count them again.
type seen struct {
	mu       sync.Mutex
	now, old map[string]struct{}
	since    time.Time
}

// How long, and how many requests, are remembered, at least.
const (
	seenFor = 2 * time.Minute
	maxSeen = 1 << 16
)

func (s *seen) add(id string, now time.Time) {
	if id == "" || len(id) > 128 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil || now.Sub(s.since) > seenFor || len(s.now) >= maxSeen {
		s.old, s.now, s.since = s.now, make(map[string]struct{}), now
	}
	s.now[id] = struct{}{}
}

func (s *seen) has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.now[id]; ok {
		return true
	}
	_, ok := s.old[id]
	return ok
}
