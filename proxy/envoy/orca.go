package envoy

import (
	"encoding/base64"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	orca "github.com/cncf/xds/go/xds/data/orca/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"weir/classifier"
	"weir/proxy"
	"weir/tracing"
)

// The names under which servers report their load (ORCA): a header of three
// forms, told apart by their first word, and a binary one, which gRPC servers
// send as a trailer.
const (
	loadHeader    = "endpoint-load-metrics"
	loadHeaderBin = "endpoint-load-metrics-bin"
)

// What is read of one report at most.
const (
	maxLoadReport  = 8 << 10 // bytes
	maxLoadMetrics = 64
)

// isLoadReport tells whether a header, in lower case, is a load report.
func isLoadReport(name string) bool { return name == loadHeader || name == loadHeaderBin }

// parseLoad reads a load report: "TEXT k=v,...", "JSON {...}" or "BIN base64"
// under endpoint-load-metrics, base64 under endpoint-load-metrics-bin. Without
// a first word it is the older text form, k:v,... or k=v,....
func parseLoad(name, value string) (*orca.OrcaLoadReport, error) {
	if len(value) > maxLoadReport {
		return nil, fmt.Errorf("load report of %d bytes is too long; send at most %d", len(value), maxLoadReport)
	}
	if name == loadHeaderBin {
		return parseLoadBin(value)
	}
	form, rest, _ := strings.Cut(strings.TrimSpace(value), " ")
	switch form {
	case "TEXT":
		return parseLoadText(rest)
	case "BIN":
		return parseLoadBin(strings.TrimSpace(rest))
	case "JSON":
		r := new(orca.OrcaLoadReport)
		if err := protojson.Unmarshal([]byte(rest), r); err != nil {
			return nil, fmt.Errorf("load report is no JSON of an OrcaLoadReport: %w", err)
		}
		return r, checkLoad(r)
	}
	return parseLoadText(value)
}

// parseLoadBin takes base64 with and without padding: gRPC leaves it out.
func parseLoadBin(value string) (*orca.OrcaLoadReport, error) {
	raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "="))
	if err != nil {
		return nil, fmt.Errorf("load report is no base64: %w", err)
	}
	r := new(orca.OrcaLoadReport)
	if err := proto.Unmarshal(raw, r); err != nil {
		return nil, fmt.Errorf("load report is no OrcaLoadReport: %w", err)
	}
	return r, checkLoad(r)
}

func parseLoadText(value string) (*orca.OrcaLoadReport, error) {
	r := new(orca.OrcaLoadReport)
	seen := make(map[string]bool)
	for pair := range strings.SplitSeq(value, ",") {
		i := strings.IndexAny(pair, "=:")
		if i < 0 {
			return nil, fmt.Errorf("load report has %.40q in it; write key=value", pair)
		}
		key := strings.TrimSpace(pair[:i])
		v, err := strconv.ParseFloat(strings.TrimSpace(pair[i+1:]), 64)
		if err != nil || seen[key] {
			return nil, fmt.Errorf("load report has %.40q in it; write each key once, with a number", pair)
		}
		seen[key] = true
		if err := setLoad(r, key, v); err != nil {
			return nil, err
		}
	}
	return r, checkLoad(r)
}

func setLoad(r *orca.OrcaLoadReport, key string, v float64) error {
	group, name, grouped := strings.Cut(key, ".")
	switch {
	case key == "application_utilization":
		r.ApplicationUtilization = v
	case key == "cpu_utilization":
		r.CpuUtilization = v
	case key == "mem_utilization":
		r.MemUtilization = v
	case key == "rps_fractional":
		r.RpsFractional = v
	case key == "eps":
		r.Eps = v
	case !grouped || name == "":
		return fmt.Errorf("load report has the key %.40q, which no report has; put metrics of your own under named_metrics", key)
	case group == "named_metrics":
		put(&r.NamedMetrics, name, v)
	case group == "utilization":
		put(&r.Utilization, name, v)
	case group == "request_cost":
		put(&r.RequestCost, name, v)
	default:
		return fmt.Errorf("load report has the group %.40q, which no report has; use named_metrics", group)
	}
	return nil
}

func put(m *map[string]float64, name string, v float64) {
	if *m == nil {
		*m = make(map[string]float64)
	}
	(*m)[name] = v
}

// checkLoad refuses numbers that no balancer may act on.
func checkLoad(r *orca.OrcaLoadReport) error {
	if n := len(r.NamedMetrics) + len(r.Utilization) + len(r.RequestCost); n > maxLoadMetrics {
		return fmt.Errorf("load report has %d metrics; send at most %d", n, maxLoadMetrics)
	}
	for _, v := range []float64{r.ApplicationUtilization, r.CpuUtilization, r.MemUtilization, r.RpsFractional, r.Eps} {
		if !(v >= 0) || math.IsInf(v, 1) {
			return fmt.Errorf("load report has the value %v; utilizations and rates are 0 or more", v)
		}
	}
	for _, m := range []map[string]float64{r.NamedMetrics, r.Utilization, r.RequestCost} {
		for k, v := range m {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				return fmt.Errorf("load report has the value %v for %.40q, which is no number", v, k)
			}
		}
	}
	return nil
}

// loads remembers what servers report of themselves.
type loads struct {
	mu       sync.Mutex
	last     *orca.OrcaLoadReport
	at       time.Time
	reports  int64
	rejected int64
}

// reportMemory is how long a server that reports its load is trusted to go on
// doing so; weir adds no report of its own meanwhile.
const reportMemory = 10 * time.Minute

// take reads a report from an answer; stages among its named metrics go into o
// where nothing else told of the stage.
func (l *loads) take(o *classifier.Observation, in *tracing.Ingest, name, value string, trailer bool) {
	r, err := parseLoad(name, value)
	l.mu.Lock()
	l.at = time.Now()
	if err != nil {
		l.rejected++
	} else {
		l.last = r
		l.reports++
	}
	l.mu.Unlock()
	if err == nil {
		takeStages(o, in, r, trailer)
	}
}

// reporting tells whether the server reports its load.
func (l *loads) reporting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.at.IsZero() && time.Since(l.at) < reportMemory
}

// takeStages reads named metrics such as queue_ms as if they stood in
// Server-Timing, so that the user's mapping applies to them too.
func takeStages(o *classifier.Observation, in *tracing.Ingest, r *orca.OrcaLoadReport, trailer bool) {
	for name, v := range r.NamedMetrics {
		stage, ms, ok := stageMetric(name, v)
		if !ok {
			continue
		}
		var one classifier.Observation
		field := strconv.AppendFloat([]byte(stage+";dur="), ms, 'f', -1, 64)
		if trailer {
			in.Trailer(&one, []byte("server-timing"), field)
		} else {
			in.Header(&one, []byte("server-timing"), field)
		}
		for _, t := range one.Timings {
			if _, told := o.In(t.Stage); t.Stage == classifier.StageOther || told {
				continue
			}
			o.Timings = append(o.Timings, t)
			if o.Source != "trailer" {
				o.Source = one.Source
			}
		}
	}
}

// stageMetric reads the unit at the end of a metric's name: queue_wait_ms is
// the stage queue.
func stageMetric(name string, v float64) (stage string, ms float64, ok bool) {
	for _, unit := range []struct {
		suffix string
		ms     float64
	}{{"_ms", 1}, {"_us", 1e-3}, {"_ns", 1e-6}, {"_seconds", 1e3}, {"_s", 1e3}} {
		if stage, ok = strings.CutSuffix(name, unit.suffix); ok {
			ms = v * unit.ms
			break
		}
	}
	if !ok || v < 0 || strings.ContainsAny(stage, ";,=\" ") {
		return "", 0, false
	}
	for _, suffix := range []string{"_time", "_wait", "_duration", "_latency"} {
		stage = strings.TrimSuffix(stage, suffix)
	}
	return stage, ms, stage != ""
}

// ownLoad is weir's report of the server behind it: how much of its limit is
// taken, waiting requests included, so that it passes 1 before anything is
// refused. Without a limit there is nothing to report.
func ownLoad(g proxy.GateState, wait time.Duration) *orca.OrcaLoadReport {
	if g.MaxConcurrency <= 0 {
		return nil
	}
	return &orca.OrcaLoadReport{
		ApplicationUtilization: float64(g.Inflight+g.Waiting) / float64(g.MaxConcurrency),
		NamedMetrics: map[string]float64{
			"weir_queue_wait_ms": float64(wait.Microseconds()) / 1e3,
			"weir_queue_depth":   float64(g.Waiting),
		},
	}
}

// loadText writes weir's report in the text form.
func loadText(r *orca.OrcaLoadReport) []byte {
	b := append([]byte("TEXT application_utilization="), strconv.FormatFloat(r.ApplicationUtilization, 'f', 4, 64)...)
	for _, name := range []string{"weir_queue_wait_ms", "weir_queue_depth"} {
		b = append(append(append(b, ",named_metrics."...), name...), '=')
		b = strconv.AppendFloat(b, r.NamedMetrics[name], 'f', -1, 64)
	}
	return b
}

// loadBin writes it as gRPC does in a trailer.
func loadBin(r *orca.OrcaLoadReport) []byte {
	raw, _ := proto.Marshal(r)
	return base64.RawStdEncoding.AppendEncode(nil, raw)
}
