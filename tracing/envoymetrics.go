package tracing

import (
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
	i := instruments{meter: m.provider.Meter("weir")}
	i.total("weir.envoy.access_log.entries", "{entry}", "Entries of Envoy's access log that came.", func(o metric.Int64Observer) { o.Observe(g.Entries()) })
	i.total("weir.envoy.ext_proc.streams", "{request}", "Requests for which Envoy asked weir.", func(o metric.Int64Observer) { o.Observe(g.Streams()) })
	i.total("weir.envoy.ext_proc.bypassed", "{request}", "Requests that Envoy let through without weir's answer, by Envoy's count.", func(o metric.Int64Observer) {
		if n, ok := g.Bypassed(); ok {
			o.Observe(n)
		}
	})
	i.total("weir.envoy.runtime.nacks", "{refusal}", "Runtime keys that an Envoy refused.", func(o metric.Int64Observer) { o.Observe(g.NACKs()) })
	i.gauge("weir.envoy.access_log.coverage", "1", "Share of Envoy's requests of the last minute that its access log brought.", func(o metric.Float64Observer) {
		if share, ok := g.Coverage(); ok {
			o.Observe(share)
		}
	})
	if i.err != nil {
		return fmt.Errorf("metrics: %w", i.err)
	}
	return nil
}
