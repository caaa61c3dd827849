package envoy

import (
	"context"
	"log/slog"
	"syscall"
	"testing"
	"time"

	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weir/proxy"
)

func benchServer(b *testing.B) (*Server, *grpc.ClientConn) {
	cfg := quiet()
	cfg.EnvoyListen, cfg.MaxConcurrency, cfg.MaxQueueSize = "127.0.0.1:0", 1000, 1000
	side, err := proxy.NewSidecar(b.Context(), cfg, proxy.SidecarOptions{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	s, err := New(side, cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- side.Run(ctx) }()
	conn, err := grpc.NewClient("passthrough:///"+s.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close(); cancel(); <-done })
	return s, conn
}

// cpu is the processor time of this process: on a busy machine it says more
// than the wall clock. It includes the benchmark's own client.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// exchangeOnce is what ext_proc adds to a request: a stream, two messages and
// their replies, the end.
func exchangeOnce(b *testing.B, c procv3.ExternalProcessorClient) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := c.Process(ctx)
	if err != nil {
		b.Fatal(err)
	}
	for _, m := range []*procv3.ProcessingRequest{requestHeaders(text("content-length", "80000"), text("user-agent", "bench"), text("x-request-id", "1")),
		responseHeaders(true, text("server-timing", "queue;dur=1, forward;dur=2;batch=4"))} {
		if err := s.Send(m); err != nil {
			b.Fatal(err)
		}
		if _, err := s.Recv(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExtProc is the time that a request is longer on its way, one at a
// time; half of the work is the client's, which Envoy does faster.
func BenchmarkExtProc(b *testing.B) {
	_, conn := benchServer(b)
	c := procv3.NewExternalProcessorClient(conn)
	b.ReportAllocs()
	began := cpu()
	for b.Loop() {
		exchangeOnce(b, c)
	}
	b.ReportMetric(float64((cpu()-began).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// BenchmarkExtProcParallel is the throughput of client and weir together.
func BenchmarkExtProcParallel(b *testing.B) {
	_, conn := benchServer(b)
	c := procv3.NewExternalProcessorClient(conn)
	b.ReportAllocs()
	b.SetParallelism(64)
	began := cpu()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			exchangeOnce(b, c)
		}
	})
	b.ReportMetric(2*float64(b.N)/(cpu()-began).Seconds(), "messages/cpu-s")
}

// BenchmarkAccessLog is the time of one entry, in batches as Envoy sends them.
func BenchmarkAccessLog(b *testing.B) {
	s, conn := benchServer(b)
	stream, err := logv3.NewAccessLogServiceClient(conn).StreamAccessLogs(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	const batch = 40
	entries := &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{}
	for range batch {
		entries.LogEntry = append(entries.LogEntry, entry(func(e *datav3.HTTPAccessLogEntry) { e.CommonProperties.StartTime = timestamppb.Now() }))
	}
	m := &logv3.StreamAccessLogsMessage{LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: entries}}
	b.ReportAllocs()
	n, began := int64(0), cpu()
	for b.Loop() {
		for i, e := range entries.LogEntry {
			e.CommonProperties.StartTime = timestamppb.New(time.Now().Add(time.Duration(i) * time.Microsecond))
		}
		if err := stream.Send(m); err != nil {
			b.Fatal(err)
		}
		n += batch
	}
	for s.log.entries.Load() < n {
		time.Sleep(time.Millisecond)
	}
	b.ReportMetric(float64((cpu()-began).Nanoseconds())/float64(n), "cpu-ns/entry")
}
