package tracing

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/metric"
)

// EnvoyGauges reads what an Envoy beside weir did. All fields are needed, and
// safe to call from any goroutine.
type EnvoyGauges struct {
	Entries  func() int64           // of the access log, ever
	Streams  func() int64           // of the external processor, ever
	NACKs    func() int64           // of runtime keys, ever
	Coverage func() (float64, bool) // share of Envoy's requests that the log brought; false: not known
	Bypassed func() (int64, bool)   // requests that Envoy let through without weir's answer, ever, by its own count
}

// Envoy adds the instruments that concern an Envoy.
func (m *Metrics) Envoy(g EnvoyGauges) error {
	meter := m.provider.Meter("weir")
	var errs []error
	counter := func(name, unit, help string, read func() (int64, bool)) {
		_, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(help),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				if v, ok := read(); ok {
					o.Observe(v)
				}
				return nil
			}))
		errs = append(errs, err)
	}
	counter("weir.envoy.access_log.entries", "{entry}", "Entries of Envoy's access log that came.", always(g.Entries))
	counter("weir.envoy.ext_proc.streams", "{request}", "Requests for which Envoy asked weir.", always(g.Streams))
	counter("weir.envoy.ext_proc.bypassed", "{request}", "Requests that Envoy let through without weir's answer, by Envoy's count.", g.Bypassed)
	counter("weir.envoy.runtime.nacks", "{refusal}", "Runtime keys that an Envoy refused.", always(g.NACKs))
	_, err := meter.Float64ObservableGauge("weir.envoy.access_log.coverage", metric.WithUnit("1"),
		metric.WithDescription("Share of Envoy's requests of the last minute that its access log brought."),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
			if v, ok := g.Coverage(); ok {
				o.Observe(v)
			}
			return nil
		}))
	for _, e := range append(errs, err) {
		if e != nil {
			return fmt.Errorf("metrics: %w", e)
		}
	}
	return nil
}

func always(read func() int64) func() (int64, bool) {
	return func() (int64, bool) { return read(), true }
}
