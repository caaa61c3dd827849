package ladder

import (
	"math"
	"slices"
	"time"

	"weir/classifier"
)

// Row is one step as every report prints it. Times are in milliseconds.
type Row struct {
	Step
	Sent      int            `json:"sent"`
	Succeeded int            `json:"succeeded"`
	Failed    map[string]int `json:"failed"` // by kind
	Mean      float64        `json:"mean_ms"`
	P50       float64        `json:"p50_ms"`
	P95       float64        `json:"p95_ms"`
	P95Range  [2]float64     `json:"p95_ci95_ms"` // 95 % interval, by order statistics; 0 above: no upper bound with so few requests
	P99       float64        `json:"p99_ms"`
	Max       float64        `json:"max_ms"`

	Throughput float64    `json:"throughput_rps"` // successes per second
	Audio      float64    `json:"audio_seconds_per_second"`
	MeanCI     [2]float64 `json:"mean_ci95_ms"`                // by batch means
	RateCI     [2]float64 `json:"throughput_ci95_rps"`         // by batch means
	Inflight   float64    `json:"mean_inflight"`               // throughput times latency, by Little's law
	Delay      float64    `json:"client_delay_ms"`             // mean time from when a request was due to its start
	Achieved   float64    `json:"achieved_rate_rps,omitempty"` // open loop: starts per second

	Stages  map[string]float64 `json:"stages_ms"`       // means of one request; empty: nothing told
	Timed   int                `json:"timed"`           // successes whose stages were told
	Batch   float64            `json:"batch,omitempty"` // mean of an execution
	Verdict *VerdictJSON       `json:"verdict,omitempty"`
	Client  ClientLoad         `json:"client"`
	Extra   int                `json:"warmup_and_cooldown"`
	Stopped string             `json:"stopped,omitempty"`

	relMean, relRate float64 // standard errors, relative; NaN: not known
	latencies        []time.Duration
}

// blocks is the number of blocks of the batch means: consecutive requests are
// alike, blocks of them hardly.
const blocks = 8

// t7 is the 97.5 % quantile of Student's t with blocks - 1 degrees of freedom.
const t7 = 2.3646

// summarizeStep makes the row of a step.
func summarizeStep(s *StepRun) Row {
	r := Row{Step: s.Step, Sent: len(s.Samples), Failed: map[string]int{}, Stages: map[string]float64{}, Client: s.Client, Extra: s.Extra, Stopped: s.Stopped}
	var good []*classifier.Observation
	for i := range s.Samples {
		o := &s.Samples[i]
		if kind := failure(o); kind != "" {
			r.Failed[kind]++
			continue
		}
		good = append(good, o)
		r.latencies = append(r.latencies, latency(o))
		r.Audio += o.AudioSeconds
		r.Delay += ms(o.Before)
	}
	r.Delay /= max(1, float64(len(good)))
	r.Succeeded = len(good)
	r.rates(s, good)
	r.latency()
	r.stages(good)
	return r
}

func (r *Row) latency() {
	if len(r.latencies) == 0 {
		return
	}
	sorted := slices.Sorted(slices.Values(r.latencies))
	var sum time.Duration
	for _, d := range sorted {
		sum += d
	}
	r.Mean = ms(sum) / float64(len(sorted))
	r.P50, r.P95, r.P99 = ms(quantile(sorted, 0.50)), ms(quantile(sorted, 0.95)), ms(quantile(sorted, 0.99))
	r.Max = ms(sorted[len(sorted)-1])
	low, high := quantileRanks(len(sorted), 0.95)
	r.P95Range[0] = ms(sorted[low])
	if high < len(sorted) {
		r.P95Range[1] = ms(sorted[high])
	}
	r.Inflight = r.Throughput * r.Mean / 1000
	var m float64
	m, r.relMean = blockMeans(len(r.latencies), func(i int) float64 { return ms(r.latencies[i]) })
	r.MeanCI = interval(m, r.relMean)
}

// rates are taken between completions: from the last of the warm-up to the
// last measured one (open loop: between the first start and the last end).
func (r *Row) rates(s *StepRun, good []*classifier.Observation) {
	wall := s.Until.Sub(s.From).Seconds()
	if wall <= 0 || len(good) == 0 {
		r.relMean, r.relRate = math.NaN(), math.NaN()
		return
	}
	r.Throughput = float64(len(good)) / wall
	r.Audio /= wall
	if s.Rate > 0 {
		r.Achieved = achieved(s)
	}
	ends := make([]time.Time, len(good))
	for i, o := range good {
		ends[i] = o.Done
	}
	r.relRate = rateError(s.From, ends)
	r.RateCI = interval(r.Throughput, r.relRate)
}

// achieved is the rate of starts, between the first and the last.
func achieved(s *StepRun) float64 {
	if len(s.Samples) < 2 {
		return 0
	}
	first, last := s.Samples[0].Enqueued, s.Samples[0].Enqueued
	for i := range s.Samples {
		at := s.Samples[i].Enqueued
		if at.Before(first) {
			first = at
		}
		if at.After(last) {
			last = at
		}
	}
	if !last.After(first) {
		return 0
	}
	return float64(len(s.Samples)-1) / last.Sub(first).Seconds()
}

// rateError is the relative standard error of a rate, from the durations of
// blocks of as many completions each.
func rateError(from time.Time, ends []time.Time) float64 {
	size := len(ends) / blocks
	if size == 0 {
		return math.NaN()
	}
	var x []float64
	for b := range blocks {
		to := ends[(b+1)*size-1]
		x = append(x, to.Sub(from).Seconds())
		from = to
	}
	return relError(x)
}

// blockMeans returns the mean of n values and the relative standard error of
// it by batch means.
func blockMeans(n int, at func(i int) float64) (mean, rel float64) {
	for i := range n {
		mean += at(i) / float64(n)
	}
	size := n / blocks
	if size == 0 {
		return mean, math.NaN()
	}
	var x []float64
	for b := range blocks {
		var sum float64
		for i := b * size; i < (b+1)*size; i++ {
			sum += at(i) / float64(size)
		}
		x = append(x, sum)
	}
	return mean, relError(x)
}

// relError is the standard error of the mean of x, over that mean.
func relError(x []float64) float64 {
	m, v := meanVar(x)
	if m <= 0 || len(x) < 2 {
		return math.NaN()
	}
	return math.Sqrt(v/float64(len(x))) / m
}

func meanVar(x []float64) (mean, variance float64) {
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		variance += (v - mean) * (v - mean) / float64(len(x)-1)
	}
	return mean, variance
}

// interval is the 95 % interval of a block mean; zero where it is not known.
func interval(mean, rel float64) [2]float64 {
	if math.IsNaN(rel) {
		return [2]float64{}
	}
	return [2]float64{max(0, mean*(1-t7*rel)), mean * (1 + t7*rel)}
}

// quantile is the value at rank ceil(q n).
func quantile(sorted []time.Duration, q float64) time.Duration {
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// quantileRanks are the indices of the order statistics that hold the quantile
// with 95 % confidence, by the binomial distribution. high is n where no order
// statistic bounds it from above: for the 95th percentile, below 73 requests
// (59 for a one-sided bound).
func quantileRanks(n int, q float64) (low, high int) {
	cdf := 0.0 // P(K <= k), of the number K of values below the quantile
	low, high = 0, n
	all, _ := math.Lgamma(float64(n + 1))
	for k := range n {
		in, _ := math.Lgamma(float64(k + 1))
		out, _ := math.Lgamma(float64(n - k + 1))
		cdf += math.Exp(all - in - out + float64(k)*math.Log(q) + float64(n-k)*math.Log1p(-q))
		if cdf <= 0.025 {
			low = k
		}
		if cdf >= 0.975 {
			return low, k
		}
	}
	return low, high
}

// stages are the mean times of the successes whose stages were told, plus what
// nobody told. All add up to the mean of those requests.
func (r *Row) stages(good []*classifier.Observation) {
	var executions, batched float64
	var sums [len(stageKeys)]time.Duration
	for _, o := range good {
		l := o.Ledger()
		if !trusted(o, l) {
			continue
		}
		r.Timed++
		for i, d := range ledgerParts(o, l) {
			sums[i] += d
		}
		if o.BatchSize > 0 {
			batched++
			executions += 1 / float64(o.BatchSize)
		}
	}
	if executions > 0 {
		r.Batch = batched / executions
	}
	for i, key := range stageKeys {
		if r.Timed > 0 {
			r.Stages[key] = ms(sums[i]) / float64(r.Timed)
		}
	}
}

// stageKeys are the parts of a request, in the order in which it passes them.
var stageKeys = [...]string{"client", "weir_queue", "upload", "queue", "preprocess", "transfer", "forward", "postprocess", "unattributed"}

// ledgerParts are the times by stageKeys.
func ledgerParts(o *classifier.Observation, l classifier.Ledger) [len(stageKeys)]time.Duration {
	return [...]time.Duration{
		o.Before, l.Queue, l.Upload + l.Connect, l.Stages[classifier.StageQueue], l.Stages[classifier.StagePreprocess],
		l.Stages[classifier.StageTransfer], l.Stages[classifier.StageForward], l.Stages[classifier.StagePostprocess],
		max(0, l.Unattributed-l.Overlap) + l.Stream,
	}
}

// trusted tells that the server told stages that can be true.
func trusted(o *classifier.Observation, l classifier.Ledger) bool {
	_, queue := o.In(classifier.StageQueue)
	if o.Reported() == 0 && !queue {
		return false
	}
	return float64(l.Overlap) <= 0.05*float64(o.Total())+2e6
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
