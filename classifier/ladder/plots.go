package ladder

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// plots are the charts of a report, for what was measured.
func (s *Summary) plots() (all []*chart) {
	add := func(c *chart) {
		if c != nil {
			all = append(all, c)
		}
	}
	switch s.Run.Kind {
	case KindProbe:
		add(s.probePlot())
	case KindSweep:
		for _, r := range s.Run.Rounds {
			add(s.roundPlot(r))
			add(s.roundStages(r))
		}
		add(s.forwardPlot())
	default:
		add(s.latencyPlot())
		add(s.throughputPlot())
		add(s.stagePlot())
		add(s.forwardPlot())
		add(s.queuePlot())
		add(s.histogram())
	}
	return all
}

// curve are the steps that succeeded, by load, and their loads.
func (s *Summary) curve() (rows []Row, load []float64, name string) {
	name = "concurrency"
	for _, r := range s.Steps {
		if r.Succeeded > 0 {
			rows = append(rows, r)
		}
	}
	slices.SortStableFunc(rows, func(a, b Row) int {
		return int(math.Copysign(1, float64(a.Concurrency-b.Concurrency)+(a.Rate-b.Rate)))
	})
	for _, r := range rows {
		if r.Rate > 0 {
			name = "requests/s that arrive"
		}
		load = append(load, float64(r.Concurrency)+r.Rate)
	}
	return rows, load, name
}

func (s *Summary) latencyPlot() *chart {
	rows, load, name := s.curve()
	if len(rows) == 0 {
		return nil
	}
	var most float64
	for _, r := range rows {
		most = max(most, r.Max)
	}
	c := &chart{title: "Latency against " + name, xName: name, yName: "ms", x: levels(load), y: linear(most)}
	if k := s.Knee; k != nil && k.Concurrency > 0 {
		c.band(k.Value, float64(k.Low), float64(k.High), "knee: "+k.String())
		c.name("kneekey", "knee, 95 % interval")
	}
	series := []struct {
		class, name string
		of          func(Row) float64
	}{
		{"c8", "max", func(r Row) float64 { return r.Max }}, {"c1", "P95", func(r Row) float64 { return r.P95 }},
		{"c6", "mean", func(r Row) float64 { return r.Mean }}, {"c2", "P50", func(r Row) float64 { return r.P50 }},
	}
	for _, one := range series {
		y := make([]float64, len(rows))
		for i, r := range rows {
			y[i] = one.of(r)
		}
		c.line(one.class, one.name, load, y, func(i int) string {
			return fmt.Sprintf("%s at %s: %s ms (%d requests)", one.name, rows[i].Level(), number(y[i]), rows[i].Succeeded)
		})
	}
	return c
}

func (s *Summary) throughputPlot() *chart {
	rows, load, name := s.curve()
	if len(rows) == 0 {
		return nil
	}
	most, y := 0.0, make([]float64, len(rows))
	for i, r := range rows {
		y[i] = r.Throughput
		most = max(most, r.Throughput, min(r.RateCI[1], 2*r.Throughput))
	}
	c := &chart{title: "Throughput against " + name, xName: name, yName: "requests/s", x: levels(load), y: linear(most)}
	for i, r := range rows {
		if r.RateCI[1] > 0 {
			c.whisker("c2", load[i], r.RateCI[0], r.RateCI[1])
		}
	}
	c.line("c2", "throughput, 95 % interval", load, y, func(i int) string {
		return fmt.Sprintf("%s: %s requests/s (95 %% interval %s to %s), %s seconds of audio a second", rows[i].Level(), number(y[i]), number(rows[i].RateCI[0]), number(rows[i].RateCI[1]), number(rows[i].Audio))
	})
	return c
}

// stageClass gives each part the same colour in all plots.
func stageClass(i int) string { return fmt.Sprintf("c%d", i) }

// stack draws bars of the parts, one bar a place.
func stack(title string, labels []string, bars []map[string]float64) *chart {
	most := 0.0
	used := map[string]bool{}
	for _, b := range bars {
		sum := 0.0
		for k, v := range b {
			sum += v
			used[k] = used[k] || v >= 0.005
		}
		most = max(most, sum)
	}
	if most == 0 {
		return nil
	}
	c := &chart{title: title, yName: "ms of one request", x: places(labels), y: linear(most)}
	for i, b := range bars {
		from := 0.0
		for k, key := range stageKeys {
			c.bar(stageClass(k), float64(i), 0.7, from, from+b[key], fmt.Sprintf("%s, %s: %s ms, %.0f %%", labels[i], strings.ReplaceAll(key, "_", " "), number(b[key]), 100*b[key]/math.Max(total(b), 1e-9)))
			from += b[key]
		}
	}
	for k, key := range stageKeys {
		if used[key] {
			c.name(stageClass(k), strings.ReplaceAll(key, "_", " "))
		}
	}
	return c
}

func total(m map[string]float64) (sum float64) {
	for _, v := range m {
		sum += v
	}
	return sum
}

func (s *Summary) stagePlot() *chart {
	rows, _, name := s.curve()
	var labels []string
	var bars []map[string]float64
	for _, r := range rows {
		if r.Timed > 0 {
			labels, bars = append(labels, r.level()), append(bars, r.Stages)
		}
	}
	c := stack("Where the time goes", labels, bars)
	if c != nil {
		c.xName = name
	}
	return c
}

func (s *Summary) probePlot() *chart {
	var labels []string
	var bars []map[string]float64
	for _, clip := range s.Stages {
		b := map[string]float64{}
		for _, p := range clip.Stages {
			b[p.Name] = p.Median
		}
		labels, bars = append(labels, clip.Clip), append(bars, b)
	}
	return stack("Medians of one request's stages", labels, bars)
}

// forwardPlot holds the forward pass against the batch, a point a batch size
// with its interval.
func (s *Summary) forwardPlot() *chart {
	if len(s.Forward) == 0 {
		return nil
	}
	var batch []float64
	most := 0.0
	for _, e := range s.Forward {
		batch = append(batch, float64(e.Batch))
		most = max(most, e.High)
	}
	c := &chart{title: "Forward pass against batch", xName: "requests in the batch", yName: "ms", x: linear(batch[len(batch)-1]), y: linear(most)}
	if l := s.Line; l != nil {
		a, b := batch[0], batch[len(batch)-1]
		c.draw(`<path class="l c2" d="M%.1f,%.1fL%.1f,%.1f"/>`, c.px(a), c.py(l.Intercept+l.Slope*a), c.px(b), c.py(l.Intercept+l.Slope*b))
		c.name("c2", fmt.Sprintf("%s + %s ms a request; elasticity %.2f (%.2f to %.2f)", number(l.Intercept), number(l.Slope), l.Elasticity, l.CI95[0], l.CI95[1]))
	}
	for i, e := range s.Forward {
		c.whisker("c6", batch[i], e.Low, e.High)
		c.dot("c6", batch[i], e.Mean, fmt.Sprintf("batch of %d: %s ms (95 %% interval %s to %s), %s executions", e.Batch, number(e.Mean), number(e.Low), number(e.High), number(e.N)))
	}
	c.name("c6", "mean of the executions, 95 % interval")
	return c
}

func (s *Summary) queuePlot() *chart {
	rows, load, name := s.curve()
	var x, y []float64
	var told []Row
	for i, r := range rows {
		if r.Timed > 0 {
			x, y, told = append(x, load[i]), append(y, 100*r.queueShare()), append(told, r)
		}
	}
	if len(x) == 0 {
		return nil
	}
	c := &chart{title: "Share of waiting against " + name, xName: name, yName: "% of the requests' time", x: levels(x), y: axis{to: 100, ticks: []float64{0, 25, 50, 75, 100}}}
	c.line("c1", "in weir's and the server's queue", x, y, func(i int) string {
		return fmt.Sprintf("%s: %.0f %% waiting, %s of %s ms", told[i].Level(), y[i], number(told[i].Stages["queue"]+told[i].Stages["weir_queue"]), number(total(told[i].Stages)))
	})
	return c
}

// queueShare is the ratio of sums: each second that users waited counts alike.
func (r *Row) queueShare() float64 {
	return (r.Stages["queue"] + r.Stages["weir_queue"]) / math.Max(total(r.Stages), 1e-9)
}

// histogram is the latency of the step with the most load.
func (s *Summary) histogram() *chart {
	rows, _, _ := s.curve()
	if len(rows) == 0 {
		return nil
	}
	r := rows[len(rows)-1]
	const bins = 24
	low, high := math.Inf(1), 0.0
	for _, d := range r.latencies {
		low, high = min(low, ms(d)), max(high, ms(d))
	}
	width := max((high-low)/bins, 0.001)
	var counts [bins]int
	most := 0
	for _, d := range r.latencies {
		i := min(int((ms(d)-low)/width), bins-1)
		counts[i]++
		most = max(most, counts[i])
	}
	c := &chart{title: "Latencies at " + r.Level(), xName: "ms", yName: "requests", x: axis{from: low - width/2, to: high + width}, y: linear(float64(most))}
	round := linear(high - low).ticks[1]
	for v := round * math.Ceil(low/round); v <= high+width; v += round {
		c.x.ticks = append(c.x.ticks, v)
	}
	for i, n := range counts {
		from := low + float64(i)*width
		c.bar("c2", from+width/2, width*0.92, 0, float64(n), fmt.Sprintf("%d requests took %s to %s ms", n, number(from), number(from+width)))
	}
	c.name("c2", fmt.Sprintf("%d requests", r.Succeeded))
	return c
}

func (s *Summary) roundRows(round Round) (rows []SweepRow) {
	for _, r := range s.Sweep {
		if r.Round == round.Factor {
			rows = append(rows, r)
		}
	}
	return rows
}

func (s *Summary) roundPlot(round Round) *chart {
	rows := s.roundRows(round)
	if len(rows) == 0 {
		return nil
	}
	var x, y []float64
	most := 0.0
	for _, r := range rows {
		x, y = append(x, float64(r.Factors[round.Factor])), append(y, r.Throughput)
		most = max(most, r.Throughput, min(r.RateCI[1], 2*r.Throughput))
	}
	c := &chart{title: "Throughput against " + round.Factor, xName: round.Factor + ", all else held", yName: "requests/s", x: levels(x), y: linear(most)}
	for i, r := range rows {
		c.whisker("c2", x[i], r.RateCI[0], r.RateCI[1])
	}
	c.line("c2", "throughput, 95 % interval", x, y, func(i int) string {
		return fmt.Sprintf("%s=%g: %s requests/s (95 %% interval %s to %s), mean latency %s ms, %d runs", round.Factor, x[i], number(y[i]), number(rows[i].RateCI[0]), number(rows[i].RateCI[1]), number(rows[i].Mean), rows[i].Repeats)
	})
	return c
}

func (s *Summary) roundStages(round Round) *chart {
	var labels []string
	var bars []map[string]float64
	for _, r := range s.roundRows(round) {
		rest := max(0, r.Mean-r.Forward-r.Transfer-r.Queue)
		labels = append(labels, fmt.Sprint(r.Factors[round.Factor]))
		bars = append(bars, map[string]float64{"queue": r.Queue, "transfer": r.Transfer, "forward": r.Forward, "unattributed": rest})
	}
	c := stack("Where the time goes, by "+round.Factor, labels, bars)
	if c != nil {
		c.xName = round.Factor
		for i := range c.legend {
			if c.legend[i].name == "unattributed" {
				c.legend[i].name = "all else"
			}
		}
	}
	return c
}
