package tracing

import (
	"bytes"
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

	collectorlogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A forwarder passes the exports of one signal on, one after the other, as
// they came. An export that the backend cannot take now is tried until it can;
// one that the backend refuses for good is dropped, counted and told.
type forwarder struct {
	signal   string
	settings *exportSettings
	logger   *slog.Logger
	conn     *grpc.ClientConn // nil: HTTP
	client   *http.Client

	mu     sync.Mutex
	queue  []export
	held   int64 // bytes in the queue and under way
	lost   int64
	closed bool
	toldAt time.Time

	wake   chan struct{}
	ctx    context.Context // of the sending
	cancel context.CancelFunc
	done   chan struct{}
}

// maxTapHeld bounds what one signal keeps for a backend that is away.
const maxTapHeld = 32 << 20

func newForwarder(signal string, s *exportSettings, logger *slog.Logger) (f *forwarder, err error) {
	f = &forwarder{signal: signal, settings: s, logger: logger, wake: make(chan struct{}, 1), done: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	if s.grpc {
		_, target, _ := strings.Cut(s.url, "://")
		opts := append(s.dialOptions(), grpc.WithTransportCredentials(s.credentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{})))
		if f.conn, err = grpc.NewClient(target, opts...); err != nil {
			return nil, fmt.Errorf("%s: %w", signal, err)
		}
		return f, nil
	}
	f.client = &http.Client{Timeout: s.timeout, Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: s.tls, ForceAttemptHTTP2: true,
		DialContext: (&net.Dialer{Timeout: s.timeout}).DialContext, IdleConnTimeout: 90 * time.Second,
	}}
	return f, nil
}

// put takes an export, or refuses it where too much is held already. One alone
// is always taken.
func (f *forwarder) put(e export) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.held > 0 && f.held+int64(len(e.payload)) > maxTapHeld {
		return errTooMuch
	}
	f.queue = append(f.queue, e)
	f.held += int64(len(e.payload))
	select {
	case f.wake <- struct{}{}:
	default:
	}
	return nil
}

func (f *forwarder) next() (e export, ok, closed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queue) == 0 {
		return e, false, f.closed
	}
	e = f.queue[0]
	f.queue[0] = export{}
	f.queue = f.queue[1:]
	return e, true, false
}

func (f *forwarder) state() (held, lost int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.held, f.lost
}

// run sends until it is closed and empty, or given up.
func (f *forwarder) run() {
	defer close(f.done)
	for {
		e, ok, closed := f.next()
		switch {
		case ok:
			f.settle(e, f.sendUntilTaken(e))
		case closed || f.ctx.Err() != nil:
			return
		default:
			select {
			case <-f.wake:
			case <-f.ctx.Done():
			}
		}
	}
}

// settle frees what the export took, and tells of one that is lost.
func (f *forwarder) settle(e export, err error) {
	f.mu.Lock()
	f.held -= int64(len(e.payload))
	if err != nil {
		f.lost++
	}
	lost := f.lost
	tell := err != nil && time.Since(f.toldAt) >= logPeriod
	if tell {
		f.toldAt = time.Now()
	}
	f.mu.Unlock()
	if tell {
		f.logger.Warn("the server's own telemetry was lost", "signal", f.signal, "exports", lost,
			"error", f.settings.scrub(err.Error()), "remedy", remedyFor(err.Error()))
	}
}

// sendUntilTaken gives up only when the backend refuses for good, or at the
// end.
func (f *forwarder) sendUntilTaken(e export) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		ctx, cancel := context.WithTimeout(f.ctx, f.settings.timeout)
		again, err := f.send(ctx, e)
		cancel()
		if err == nil || !again {
			return err
		}
		f.tellWaiting(err)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-f.ctx.Done():
			t.Stop()
			return err
		}
	}
}

func (f *forwarder) tellWaiting(err error) {
	f.mu.Lock()
	tell := time.Since(f.toldAt) >= logPeriod
	if tell {
		f.toldAt = time.Now()
	}
	held := f.held
	f.mu.Unlock()
	if tell {
		f.logger.Warn("the backend does not take the server's own telemetry; it is kept", "signal", f.signal, "bytes", held,
			"error", f.settings.scrub(err.Error()), "remedy", remedyFor(err.Error()))
	}
}

// send tries once; again tells whether it makes sense to try it again.
func (f *forwarder) send(ctx context.Context, e export) (again bool, err error) {
	if f.conn != nil {
		return f.sendGRPC(ctx, e)
	}
	return f.sendHTTP(ctx, e)
}

func (f *forwarder) sendGRPC(ctx context.Context, e export) (again bool, err error) {
	payload, err := f.protobuf(e)
	if err != nil {
		return false, err
	}
	for key, value := range f.settings.headers {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	var opts []grpc.CallOption
	if f.settings.gzip {
		opts = append(opts, grpc.UseCompressor("gzip"))
	}
	m, answer := rawMessage(payload), rawMessage{}
	err = f.conn.Invoke(ctx, exportMethod(f.signal), &m, &answer, opts...)
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.OutOfRange, codes.Unavailable, codes.DataLoss, codes.ResourceExhausted, codes.Unknown, codes.Internal:
		return true, err
	}
	return false, err
}

// protobuf is the payload as gRPC carries it.
func (f *forwarder) protobuf(e export) ([]byte, error) {
	plain, err := e.unpacked()
	if err != nil || !e.json {
		return plain, err
	}
	m := map[string]proto.Message{
		"traces": &collectortrace.ExportTraceServiceRequest{}, "metrics": &collectormetrics.ExportMetricsServiceRequest{}, "logs": &collectorlogs.ExportLogsServiceRequest{},
	}[f.signal]
	if err := fromOTLPJSON(plain, m); err != nil {
		return nil, err
	}
	return proto.Marshal(m)
}

func (f *forwarder) sendHTTP(ctx context.Context, e export) (again bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.settings.url, bytes.NewReader(e.payload))
	if err != nil {
		return false, err
	}
	for key, value := range f.settings.headers {
		req.Header.Set(key, value)
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	if e.json {
		req.Header.Set("Content-Type", "application/json")
	}
	if e.gzip {
		req.Header.Set("Content-Encoding", "gzip")
	}
	res, err := f.client.Do(req)
	if err != nil {
		return true, err
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(res.Body, maxErrorText))
	switch {
	case res.StatusCode < 300:
		_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<20))
		return false, nil
	case res.StatusCode == 429 || res.StatusCode == 408 || res.StatusCode >= 500:
		return true, fmt.Errorf("the backend answers %d: %s", res.StatusCode, text)
	}
	return false, fmt.Errorf("the backend answers %d: %s", res.StatusCode, text)
}

// close lets the queue empty until ctx ends, and counts what is left.
func (f *forwarder) close(ctx context.Context) {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		f.cancel()
		<-f.done
	}
	f.cancel()
	f.mu.Lock()
	left := len(f.queue)
	f.lost += int64(max(0, left-1)) // settle counts the last one
	f.queue = nil
	f.mu.Unlock()
	if left > 0 {
		f.settle(export{}, errors.New("weir ended before the backend came back"))
	}
	if f.conn != nil {
		_ = f.conn.Close()
		return
	}
	f.client.CloseIdleConnections()
}
