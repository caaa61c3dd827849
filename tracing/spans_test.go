package tracing

import (
	"context"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// nowhere takes all spans at once.
type nowhere struct{}

func (nowhere) Start(context.Context) error                                  { return nil }
func (nowhere) Stop(context.Context) error                                   { return nil }
func (nowhere) UploadTraces(context.Context, []*tracepb.ResourceSpans) error { return nil }

// request is a transcription that was queued, batched and timed: seven spans.
func request() *classifier.Observation {
	begin := time.Now()
	return &classifier.Observation{
		TraceID: [16]byte{1, 2, 3, 15: 4}, SpanID: [8]byte{5, 7: 6}, ParentID: [8]byte{7, 7: 8}, Sampled: true,
		Protocol: "http/1.1", Method: "POST", Target: "/v1/audio/transcriptions?token=REDACTED", Host: "asr.example:8000",
		Client: "192.0.2.7:54321", UserAgent: "me/1", Route: "/v1/audio/transcriptions", Class: "POST /v1/audio/transcriptions",
		Model: "whisper-large-v3", Status: 200,
		Enqueued: begin, Dequeued: begin.Add(100 * time.Millisecond), Sent: begin.Add(110 * time.Millisecond),
		Responded: begin.Add(400 * time.Millisecond), Done: begin.Add(401 * time.Millisecond),
		Overhead: 30 * time.Microsecond, Waiting: 3, Inflight: 4, Limit: 4,
		Timings: []classifier.Timing{
			{Name: "preprocess", Stage: classifier.StagePreprocess, Dur: 20 * time.Millisecond},
			{Name: "h2d", Stage: classifier.StageTransfer, Dur: 5 * time.Millisecond, Bytes: 480000, Count: 2},
			{Name: "infer", Stage: classifier.StageForward, Dur: 200 * time.Millisecond},
			{Name: "d2h", Stage: classifier.StageTransfer, Dur: time.Millisecond, Bytes: 4000},
			{Name: "total", Dur: 250 * time.Millisecond},
		},
		Source: "header", BatchSize: 8, SeqLen: 3000, AudioSeconds: 12.5,
	}
}

func testSpans(o Options) *Spans {
	return newSpans(o, nowhere{}, batchLimits{delay: time.Second, timeout: time.Second, batch: 512})
}

func BenchmarkRecord(b *testing.B) {
	for _, sampled := range []bool{true, false} {
		name := "unsampled"
		if sampled {
			name = "sampled"
		}
		b.Run(name, func(b *testing.B) {
			s := testSpans(Options{Server: "127.0.0.1:8001", KeepSlow: time.Minute, KeepQueueShare: 0.9})
			o := request()
			o.Sampled = sampled
			b.ReportAllocs()
			for b.Loop() {
				s.Record(o)
				if full := s.next(); full != nil {
					s.release(full)
				}
			}
			if n := s.Dropped(); n > 0 {
				b.Errorf("%d spans dropped, want none", n)
			}
		})
	}
}
