package proxy

import (
	"strings"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// appendOrca asks for the server's load, if that is wanted and the client does
// not ask itself.
func (c *conn) appendOrca(b []byte) []byte {
	c.orcaAsked = false
	if !c.cfg.orca {
		return b
	}
	for i := range c.req.fields {
		if tracing.IsOrcaFormat(c.req.fields[i].name) {
			return b
		}
	}
	c.orcaAsked = true
	return append(b, tracing.OrcaRequest...)
}

// hidden tells whether a field of the answer is for weir alone.
func (c *conn) hidden(f *field) bool {
	return c.orcaAsked && f.kind == fieldOther && tracing.IsOrca(f.name)
}

// loadMean sums what a class's answers said of requests waiting in the server,
// within one window.
type loadMean struct{ sum, n float64 }

// addLoad runs on the sink's goroutine.
func (w *watch) addLoad(o *classifier.Observation) {
	for _, l := range o.Load {
		if !strings.HasSuffix(l.Name, "num_requests_waiting") {
			continue
		}
		m := w.loads[o.Class]
		if m == nil {
			if w.loads == nil || len(w.loads) >= maxCounted {
				return
			}
			m = &loadMean{}
			w.loads[o.Class] = m
		}
		m.sum, m.n = m.sum+l.Value, m.n+1
	}
}

// fillLoad gives a report what the answers themselves said of the server's
// queue, where no metrics page did.
func (w *watch) fillLoad(r *classifier.Report) {
	m := w.loads[r.Class]
	if m == nil || m.n == 0 {
		return
	}
	waiting := classifier.Gauge{Value: m.sum / m.n, OK: true}
	if r.Server == nil {
		r.Server = &classifier.Aggregate{Source: "the answers' load metrics (ORCA)", Server: "the server", Requests: m.n}
	}
	if !r.Server.Waiting.OK {
		r.Server.Waiting = waiting
	}
	*m = loadMean{}
}

// distrustPeriod is the least time between two log lines about impossible timings.
const distrustPeriod = time.Minute

// distrust counts timings that cannot be true, and tells of one now and then.
func (w *watch) distrust(o *classifier.Observation) {
	n := int64(0)
	var worst *classifier.Timing
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Untrusted {
			n++
			worst = t
		}
	}
	if n == 0 || w.untrusted == nil {
		return
	}
	w.untrusted.Add(n)
	if o.Done.Sub(w.doubted) < distrustPeriod {
		return
	}
	w.doubted = o.Done
	w.logger.Warn("the server told a timing that cannot be true; it is not used", "class", o.Class, "name", worst.Name, "told", worst.Dur,
		"service", o.Service(), "timings", w.untrusted.Load(), "remedy", "look at its unit: Server-Timing is in milliseconds; timings names the unit of others")
}
