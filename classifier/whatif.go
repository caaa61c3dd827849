package classifier

import (
	"fmt"
	"math"
)

// Setting is one that a what-if changes.
type Setting string

// The settings.
const (
	MaxConcurrency Setting = "max_concurrency" // weir's limit
	MaxBatchSize   Setting = "max_batch_size"  // the server's
)

// Prediction is what would become of a class if one setting changed and its
// clients stayed as they are: as many requests in the system as now, each
// followed by the next.
type Prediction struct {
	Setting    Setting
	From, To   int
	Throughput [2]float64 // requests per second, from and to; it is no more than this if clients send no more than they do now
	Waiting    [2]float64 // share of the time (without the upload) spent in queues
	Refused    string     // why it cannot be said; the numbers are then zero
}

// String is one sentence.
func (p Prediction) String() string {
	if p.Refused != "" {
		return fmt.Sprintf("what %s %d would bring cannot be said from this: %s", p.Setting, p.To, p.Refused)
	}
	return fmt.Sprintf("with %s %d instead of %d, throughput would be %.3g to %.3g a second and waiting %s to %s of the time",
		p.Setting, p.To, p.From, p.Throughput[0], p.Throughput[1], percent(p.Waiting[0]), percent(p.Waiting[1]))
}

// cohort is the model behind a what-if: clients who move through gate, batch
// and device in groups. With m requests let in, c executions at once that take
// d(B), and extra time outside of the device, a batch of B meets
// m = X (d + max(d/c, extra + d/2c)), with X = c B / d (an operational law,
// and half a batch of waiting for the next to begin).
type cohort struct {
	clients, extra, instances float64
	batch, device             float64 // as measured: mean batch, seconds an execution
	elasticity                float64 // of device with batch
	slope                     float64 // relative, for one more in the batch; 0: the elasticity holds
	most                      float64 // largest batch
}

func (m cohort) time(batch float64) float64 {
	if m.slope > 0 {
		return m.device * max(0.1, 1+m.slope*(batch-m.batch))
	}
	return m.device * math.Pow(batch/m.batch, m.elasticity)
}

func (m cohort) let(batch float64) float64 {
	d := m.time(batch)
	x := m.instances * batch / d
	return x * (d + max(d/m.instances, m.extra+d/(2*m.instances)))
}

// at returns batch, throughput and the share of waiting with limit requests
// let in (0: no limit).
func (m cohort) at(limit float64) (batch, rate, waiting float64) {
	in := m.clients
	if limit > 0 {
		in = min(in, limit)
	}
	lo, hi := 1.0, m.most
	for range 60 {
		mid := (lo + hi) / 2
		if m.let(mid) < in {
			lo = mid
		} else {
			hi = mid
		}
	}
	d := m.time(lo)
	rate = min(m.instances*lo/d, in/(d+m.extra))
	total := m.clients / rate
	return lo, rate, max(0, 1-(d+m.extra)/total)
}

// WhatIf predicts what a setting would bring. It refuses where the report
// does not carry it: no line of forward against batch, the device's instances
// not known, a batch beyond twice the largest seen, or a model that does not
// even give today's throughput within a quarter.
func (r Report) WhatIf(what Setting, to int) Prediction {
	p := Prediction{Setting: what, To: to, From: r.Limit}
	if what == MaxBatchSize {
		p.From = r.BatchMax
	}
	device := (r.Means.Forward + r.Means.Transfer).Seconds()
	switch {
	case to < 1:
		p.Refused = "a limit is at least 1"
	case what == MaxConcurrency && r.Limit == 0:
		p.Refused = "none is in force, so the limit that holds requests is the server's own"
	case !r.BusyOK || device <= 0:
		p.Refused = "the server tells no batch or no forward time"
	case !r.Forward.OK || r.Forward.Against != "batch":
		p.Refused = "how the forward pass grows with the batch is not known: the batch hardly varied"
	case r.Parallel < 0.5:
		p.Refused = "how many executions the device runs at once is not known"
	case r.Throughput <= 0:
		p.Refused = "nothing was served"
	}
	if p.Refused != "" {
		return p
	}
	return r.predict(p)
}

func (r Report) predict(p Prediction) Prediction {
	m := cohort{
		clients:    r.Throughput * (r.Means.Core() + r.Means.Upload).Seconds(),
		extra:      (r.Means.Upload + r.Means.Preprocess + r.Means.Postprocess + r.Means.Unattributed).Seconds(),
		instances:  max(1, math.Round(r.Parallel)),
		batch:      max(1, r.Batch),
		device:     (r.Means.Forward + r.Means.Transfer).Seconds(),
		elasticity: r.Forward.Elasticity,
		most:       2 * float64(r.BatchMax),
	}
	pinned := r.BatchAtMax >= 0.8
	if pinned {
		m.most = float64(r.BatchMax)
	}
	if _, today, _ := m.at(float64(r.Limit)); math.Abs(today-r.Throughput) > r.Throughput/4 {
		p.Refused = fmt.Sprintf("the model gives %.3g requests a second for today's settings, and there are %.3g", today, r.Throughput)
		return p
	}
	limit := float64(r.Limit)
	if p.Setting == MaxConcurrency {
		limit = float64(p.To)
	} else {
		m.most = float64(p.To)
	}
	p.Throughput, p.Waiting = [2]float64{math.Inf(1), 0}, [2]float64{1, 0}
	line := ratio(float64(r.Forward.Slope), float64(r.Forward.at(m.batch)))
	for i, e := range []float64{r.Forward.CI95[0], r.Forward.Elasticity, r.Forward.CI95[1], 0} {
		m.elasticity = max(0, e)
		if i == 3 { // the straight line: the two bracket how forward goes on beyond what was seen
			m.slope = max(line, 0)
		}
		batch, rate, waiting := m.at(limit)
		if beyond := batch > 1.95*float64(r.BatchMax); beyond && (p.Setting == MaxConcurrency || p.To > 2*r.BatchMax) {
			return Prediction{Setting: p.Setting, From: p.From, To: p.To, Refused: fmt.Sprintf("batches would grow to %.0f, and the largest seen was %d: beyond twice that nothing is known", batch, r.BatchMax)}
		}
		p.Throughput = [2]float64{min(p.Throughput[0], rate), max(p.Throughput[1], rate)}
		p.Waiting = [2]float64{min(p.Waiting[0], waiting), max(p.Waiting[1], waiting)}
	}
	return p.widen()
}

// widen adds what the model itself errs by: a tenth of the throughput, and
// ten points of the share. In TestWhatIfHoldsInTheSimulator the first holds
// for 43 of 45 systems and the second for 38.
func (p Prediction) widen() Prediction {
	p.Throughput = [2]float64{0.9 * p.Throughput[0], 1.1 * p.Throughput[1]}
	p.Waiting = [2]float64{max(0, p.Waiting[0]-0.1), min(1, p.Waiting[1]+0.1)}
	return p
}

// predict adds a what-if to the verdict, and returns what the advice says of it.
func (q *question) predict(what Setting, to int) string {
	p := q.WhatIf(what, to)
	q.v.Predictions = append(q.v.Predictions, p)
	if p.Refused != "" {
		return ""
	}
	return "; " + p.String()
}
