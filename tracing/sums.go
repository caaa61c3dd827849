package tracing

import (
	"context"
	"sort"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/instrumentation"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"weir/classifier"
)

// sums are the counters and histograms of finished requests. They are kept
// here and handed to the SDK's readers when they collect, because a request
// moves some twenty of them, and each call of an SDK instrument costs as much
// as all twenty additions. Temporality is cumulative.
type sums struct {
	scope    instrumentation.Scope
	start    time.Time
	mu       sync.Mutex // guards the families' series
	families []*family
}

// A family is one counter, or one histogram if it has bounds.
type family struct {
	name, unit, text string
	bounds           []float64 // upper, inclusive
	all              []*series
}

// A series is one set of attributes of a family.
type series struct {
	attributes attribute.Set
	bounds     []float64
	sum        float64
	count      uint64
	buckets    []uint64 // one more than bounds
	example    metricdata.Exemplar[float64]
}

func (s *sums) family(name, unit, text string, bounds []float64) *family {
	f := &family{name: name, unit: unit, text: text, bounds: bounds}
	s.families = append(s.families, f)
	return f
}

// series makes another series; its caller keeps it for the next time.
func (f *family) series(kv ...attribute.KeyValue) *series {
	s := &series{attributes: attribute.NewSet(kv...), bounds: f.bounds}
	if f.bounds != nil {
		s.buckets = make([]uint64, len(f.bounds)+1)
	}
	f.all = append(f.all, s)
	return s
}

func (s *series) add(v float64) { s.sum += v }

func (s *series) record(v float64) {
	s.sum += v
	s.count++
	s.buckets[sort.SearchFloat64s(s.bounds, v)]++
}

// recordTraced also keeps the request as the example of its series, if its
// trace can be looked up.
func (s *series) recordTraced(v float64, o *classifier.Observation) {
	s.record(v)
	if !o.Sampled {
		return
	}
	e := &s.example
	e.Time, e.Value = o.Done, v
	e.TraceID = append(e.TraceID[:0], o.TraceID[:]...)
	e.SpanID = append(e.SpanID[:0], o.SpanID[:]...)
}

// Produce is called by the readers when they collect.
func (s *sums) Produce(context.Context) ([]metricdata.ScopeMetrics, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	out := metricdata.ScopeMetrics{Scope: s.scope}
	for _, f := range s.families {
		if len(f.all) > 0 {
			out.Metrics = append(out.Metrics, metricdata.Metrics{Name: f.name, Unit: f.unit, Description: f.text, Data: f.data(s.start, now)})
		}
	}
	return []metricdata.ScopeMetrics{out}, nil
}

func (f *family) data(start, now time.Time) metricdata.Aggregation {
	if f.bounds == nil {
		d := metricdata.Sum[float64]{Temporality: metricdata.CumulativeTemporality, IsMonotonic: true}
		for _, s := range f.all {
			d.DataPoints = append(d.DataPoints, metricdata.DataPoint[float64]{Attributes: s.attributes, StartTime: start, Time: now, Value: s.sum})
		}
		return d
	}
	d := metricdata.Histogram[float64]{Temporality: metricdata.CumulativeTemporality}
	for _, s := range f.all {
		d.DataPoints = append(d.DataPoints, s.histogram(start, now))
	}
	return d
}

// histogram copies: the point is read after the lock is given back.
func (s *series) histogram(start, now time.Time) metricdata.HistogramDataPoint[float64] {
	p := metricdata.HistogramDataPoint[float64]{
		Attributes: s.attributes, StartTime: start, Time: now,
		Count: s.count, Sum: s.sum, Bounds: s.bounds, BucketCounts: append([]uint64(nil), s.buckets...),
	}
	if e := s.example; e.TraceID != nil {
		e.TraceID, e.SpanID = append([]byte(nil), e.TraceID...), append([]byte(nil), e.SpanID...)
		p.Exemplars = []metricdata.Exemplar[float64]{e}
	}
	return p
}
