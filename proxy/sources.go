package proxy

import (
	"strings"
	"time"

	"weir/classifier"
	"weir/proxy/evidence"
	"weir/tracing"
)

// Readings come several times a window, so that a window's ends lie close to
// one.
const readingsOfWindow = 5

// ask readies the sources beside the requests that the configuration names.
func (w *watch) ask(cfg Config) (err error) {
	network, address := cfg.ServerAddress()
	base := ""
	if network == "tcp" {
		base = "http://" + address
	}
	w.answered, w.external, w.loads = make(map[string]uint64), make(map[string]*classifier.External), make(map[string]*loadMean)
	w.evidence, err = evidence.New(evidence.Options{
		Server: base, Metrics: strings.Fields(cfg.ServerMetrics), Devices: strings.Fields(cfg.Device),
		Interval: min(max(cfg.Window.Duration()/readingsOfWindow, 200*time.Millisecond), 5*time.Second), Answered: w.answers,
	})
	return err
}

// checkSources finds addresses that cannot be asked.
func (l *loader) checkSources(key, addresses string, device bool) {
	for address := range strings.FieldsSeq(addresses) {
		if err := evidence.Check(address, device); err != nil {
			l.fault(key, "value %v", err)
		}
	}
}

// maxCounted bounds the classes that are counted; routes are configured, so
// that more are no classes of their own.
const maxCounted = 256

// count counts an answer as servers count requests: those that went well. The
// caller holds mu.
func (w *watch) count(o *classifier.Observation) {
	if w.answered == nil || o.Outcome != classifier.OK || o.Status >= 400 || o.Upgraded {
		return
	}
	if _, known := w.answered[o.Class]; known || len(w.answered) < maxCounted {
		w.answered[o.Class]++
	}
}

// answers is a copy of the counts.
func (w *watch) answers() map[string]uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := make(map[string]uint64, len(w.answered))
	for class, n := range w.answered {
		m[class] = n
	}
	return m
}

// fill adds what was told beside the requests to a report.
func (w *watch) fill(r *classifier.Report) {
	defer w.fillLoad(r)
	if w.evidence == nil || r.Requests == 0 {
		return
	}
	e := w.external[r.Class]
	if e == nil {
		e = &classifier.External{}
		w.external[r.Class] = e
	}
	servers, devices := w.evidence.Between(r.Class, r.Start, r.End)
	e.Fill(r, servers, devices)
}

type deviceJSON struct {
	Source string  `json:"source"`
	Busy   float64 `json:"busy"`
	Memory float64 `json:"memory_bytes,omitempty"`
	Total  float64 `json:"memory_total_bytes,omitempty"`
	PCIe   float64 `json:"pcie_bytes_per_second,omitempty"`
}

func deviceOf(d *classifier.Device) *deviceJSON {
	if d == nil {
		return nil
	}
	return &deviceJSON{d.Source, d.Busy.Value, d.Memory.Value, d.MemoryTotal.Value, d.PCIe.Value}
}

// newTap opens the ports for the server's own telemetry, if there are any.
func (s *Sidecar) newTap(cfg Config, o SidecarOptions) (err error) {
	opts := tracing.Options{Getenv: o.Getenv, Version: o.Version, Logger: s.logger}
	s.watch.tap, err = tracing.NewTap(opts, tracing.TapOptions{GRPC: cfg.OTLPGRPC, HTTP: cfg.OTLPHTTP, Wait: cfg.OTLPWait.Duration()},
		s.server.settings().ingest)
	return err
}

// checkTaps finds ports that would be taken twice.
func (l *loader) checkTaps() {
	c := &l.cfg
	taken := map[string]string{"listen": c.Listen, "admin": c.Admin}
	for _, one := range []struct{ key, address string }{{"otlp_grpc", c.OTLPGRPC}, {"otlp_http", c.OTLPHTTP}} {
		if one.address == "" || !l.checkListen(one.key, one.address) {
			continue
		}
		for _, other := range []string{"listen", "admin", "otlp_grpc"} {
			if a, ok := taken[other]; ok && overlap(a, one.address) {
				l.fault(one.key, "%s and %s are one address; choose another port", one.address, other)
			}
		}
		taken[one.key] = one.address
	}
}

// tapJSON is what the page tells of the server's own telemetry; null if weir
// takes none.
func (w *watch) tapJSON() map[string]any {
	if w.tap == nil {
		return nil
	}
	grpc, http := w.tap.Addrs()
	held, lost := w.tap.Held()
	return map[string]any{"grpc": grpc, "http": http, "held_bytes": held, "lost": lost}
}
