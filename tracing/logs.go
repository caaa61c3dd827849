package tracing

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploggrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/log"
	sdklog "go.opentelemetry.io/otel/sdk/log"

	"weir/classifier"
)

// Logs sends a log record for each change of a verdict. A nil Logs sends none.
type Logs struct {
	provider *sdklog.LoggerProvider
	logger   log.Logger
}

// NewLogs returns nil where the environment asks for no OTLP logs.
func NewLogs(ctx context.Context, o Options) (*Logs, error) {
	s, err := o.export("logs")
	if err != nil || s == nil {
		return nil, err
	}
	res, err := o.resource(ctx)
	if err != nil {
		return nil, err
	}
	var exporter sdklog.Exporter
	if s.grpc {
		exporter, err = otlploggrpc.New(ctx, s.logGRPC()...)
	} else {
		exporter, err = otlploghttp.New(ctx, s.logHTTP()...)
	}
	if err != nil {
		return nil, fmt.Errorf("logs: %w", err)
	}
	p := sdklog.NewLoggerProvider(sdklog.WithResource(res), sdklog.WithProcessor(sdklog.NewBatchProcessor(exporter)))
	return &Logs{provider: p, logger: p.Logger("weir", log.WithInstrumentationVersion(o.Version))}, nil
}

// VerdictChanged records that a class got another verdict; previous is empty
// for the first.
func (l *Logs) VerdictChanged(v classifier.Verdict, previous classifier.Cause) {
	if l == nil {
		return
	}
	var r log.Record
	r.SetEventName("weir.verdict.changed")
	r.SetTimestamp(v.Since)
	r.SetObservedTimestamp(time.Now())
	r.SetSeverity(log.SeverityWarn)
	r.SetSeverityText("WARN")
	if v.Cause == classifier.Healthy || v.Cause == classifier.Unknown {
		r.SetSeverity(log.SeverityInfo)
		r.SetSeverityText("INFO")
	}
	r.SetBody(attribute.StringValue(fmt.Sprintf("%s: %s. %s", v.Class, v.Cause, strings.Join(v.Evidence, "; "))))
	s := v.Report.Shares
	r.AddAttributes(
		attr("weir.class", v.Class), attr("weir.verdict.cause", string(v.Cause)), attr("weir.verdict.previous", string(previous)),
		attribute.Float64("weir.verdict.confidence", v.Confidence), attr("weir.verdict.advice", v.Advice),
		attribute.Int("weir.window.requests", v.Report.Requests),
		attribute.Float64("weir.window.queue_wait", s.Waiting()), attribute.Float64("weir.window.transfer", s.Transfer), attribute.Float64("weir.window.forward", s.Forward),
		attribute.Float64("weir.window.forward.slope", v.Report.Forward.Slope.Seconds()),
		attr("weir.window.start", v.Report.Start.UTC().Format(time.RFC3339Nano)), attr("weir.window.end", v.Report.End.UTC().Format(time.RFC3339Nano)),
	)
	l.logger.Emit(context.Background(), r)
}

func attr(key, value string) attribute.KeyValue { return attribute.String(key, value) }

// Shutdown sends what is left. It is safe on nil.
func (l *Logs) Shutdown(ctx context.Context) error {
	if l == nil {
		return nil
	}
	return l.provider.Shutdown(ctx)
}
