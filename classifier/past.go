package classifier

import (
	"math"
	"time"
)

// memory is what a class remembers beyond its windows: the server at rest,
// its forward line, and its throughput's answer to load.
type memory struct {
	base                [numCells]rest
	told                float64 // n of base, undecayed within the window: enough to see news
	byBatch, byInflight fits
	curve               [numCells]moments // ln throughput on ln number in the system, by octave of that number
	open                point
	folded              int64 // sub-windows before this one are in the curve
	aged, newest        time.Time
	batchMax            float64 // largest batch within the last hour
	batchSeen           time.Time
	parallel            float64 // largest busy share of a sub-window within the last hour
	parallelSeen        time.Time
}

// rest sums low-load requests of one length cell.
type rest struct {
	n, core, timed, service float64
	parts                   parts
}

func (m *memory) addBaseline(l *life) {
	if !l.lowLoad() {
		return
	}
	m.told++
	b := &m.base[l.cell]
	b.n++
	b.core += l.total - l.upload
	if l.timed {
		b.timed++
		b.service += l.server - l.stream
		b.parts.merge(&l.parts)
	}
}

func (m *memory) addFits(s *slot) {
	m.byBatch.merge(&s.byBatch)
	m.byInflight.merge(&s.byInflight)
}

// age decays what is remembered to now, and drops a baseline without news.
func (m *memory) age(now time.Time) {
	if m.told > 0 {
		m.newest, m.told = now, 0
	}
	if now.Sub(m.newest) > memorySpan {
		m.base = [numCells]rest{}
	}
	if !m.aged.IsZero() {
		m.scale(max(0, now.Sub(m.aged)))
	}
	m.aged = now
}

func (m *memory) scale(passed time.Duration) {
	f := math.Exp2(-passed.Seconds() / halfLife.Seconds())
	for i := range m.base {
		m.base[i].scale(f)
	}
	m.byBatch.scale(f)
	m.byInflight.scale(f)
	f = math.Exp2(-passed.Seconds() / curveHalfLife.Seconds())
	for i := range m.curve {
		m.curve[i].scale(f)
	}
}

func (r *rest) scale(f float64) {
	r.n *= f
	r.core *= f
	r.timed *= f
	r.service *= f
	for i := range r.parts {
		r.parts[i] *= f
	}
}

// baseline is the server at rest for the given mix of lengths: each cell's
// mean, weighed by the window's requests (direct standardisation). Cells that
// were never seen at rest take the mean of those that were.
func (m *memory) baseline(mix *[numCells]float64) (core float64, p parts, n, timed, explained float64) {
	var all, sum rest
	var weight, timedWeight float64
	for i := range m.base {
		b := &m.base[i]
		all.merge(b)
		if b.n < 1 || mix[i] == 0 {
			continue
		}
		weight += mix[i]
		sum.core += mix[i] * b.core / b.n
		if b.timed >= 1 {
			timedWeight += mix[i]
			for k := range p {
				p[k] += mix[i] * b.parts[k] / b.timed
			}
		}
	}
	if weight > 0 {
		core = sum.core / weight
	} else if all.n > 0 {
		core = all.core / all.n
	}
	for k := range p {
		if timedWeight > 0 {
			p[k] /= timedWeight
		} else if all.timed > 0 {
			p[k] = all.parts[k] / all.timed
		}
	}
	if all.service > 0 {
		stages := all.parts.sum() - all.parts[pQueue] - all.parts[pUpload] - all.parts[pRest]
		explained = stages / all.service
	}
	return core, p, all.n, all.timed, explained
}

func (r *rest) merge(o *rest) {
	r.n += o.n
	r.core += o.core
	r.timed += o.timed
	r.service += o.service
	r.parts.merge(&o.parts)
}

// What a sub-window sums. Times are spread over the sub-windows in which they
// passed, so that a long execution does not count where it ended.
const (
	vDone = iota // requests served
	vLoad        // time in the system, ns
	vWait        // time in queues, ns
	vBusy        // device time: forward and transfer over batch, ns
	vCame        // arrivals
	numSub
)

type sub struct {
	key int64
	v   [numSub]float64
}

// ring holds the last sub-windows, by number since the epoch. A number from
// the future must not shut out the present: forgetFuture clears it.
type ring struct {
	step   int64 // ns
	subs   [keptSubs]sub
	oldest int64 // number of the first sub-window that had anything
	used   bool
}

func (r *ring) at(key int64) *sub {
	s := &r.subs[key&(keptSubs-1)]
	if s.key > key {
		return nil
	}
	if s.key < key {
		*s = sub{key: key}
	}
	return s
}

func (r *ring) key(at int64) int64 {
	k := at / r.step
	if at%r.step < 0 {
		k--
	}
	return k
}

func (r *ring) add(l *life, epoch time.Time) {
	o := l.o
	end := int64(o.Done.Sub(epoch))
	from := end - int64(l.total)
	if k := r.key(from); !r.used || k < r.oldest {
		r.oldest, r.used = k, true
	}
	r.spread(from, end, 1, vLoad)
	if s := r.at(r.key(from)); s != nil {
		s.v[vCame]++
	}
	r.spread(from, from+int64(l.gate), 1, vWait)
	if !l.served {
		return
	}
	if s := r.at(r.key(end)); s != nil {
		s.v[vDone]++
	}
	r.addExecution(l, from, end)
}

// addExecution lays the device's time before the end of the server's work,
// less what comes after it, and the server's queue before that.
func (r *ring) addExecution(l *life, from, end int64) {
	device := l.parts[pForward] + l.parts[pTransfer]
	if !l.timed || device <= 0 {
		return
	}
	to := end - int64(l.parts[pPostprocess])
	if !l.o.streamTimed() {
		to -= int64(l.stream)
	}
	to = max(to, from)
	if l.batch > 0 {
		r.spread(to-int64(device), to, 1/l.batch, vBusy)
	}
	if q := l.parts[pServerQueue]; q > 0 {
		r.spread(to-int64(device)-int64(q), to-int64(device), 1, vWait)
	}
}

// spread adds weight times the overlap of [from, to) with each sub-window.
func (r *ring) spread(from, to int64, weight float64, what int) {
	from = max(from, to-(keptSubs-1)*r.step)
	for k := r.key(from); from < to; k++ {
		next := min(to, (k+1)*r.step)
		if s := r.at(k); s != nil {
			s.v[what] += weight * float64(next-from)
		}
		from = next
	}
}

func (r *ring) forgetFuture(now time.Duration) {
	last := r.key(int64(now))
	for i := range r.subs {
		if r.subs[i].key > last {
			r.subs[i] = sub{}
		}
	}
	r.oldest = min(r.oldest, last)
}

// between calls f for each whole sub-window of [from, to) since the class was
// first seen, also for those in which nothing happened.
func (r *ring) between(from, to time.Duration, f func(s *sub)) {
	if !r.used {
		return
	}
	first, last := max(r.key(int64(from)), r.oldest), r.key(int64(to))
	first = max(first, last-keptSubs+1)
	for k := first; k < last; k++ {
		s := r.subs[k&(keptSubs-1)]
		if s.key != k {
			s = sub{key: k}
		}
		f(&s)
	}
}

func (r *ring) mean(from, to time.Duration, what int) float64 {
	var n, sum float64
	r.between(from, to, func(s *sub) { n, sum = n+1, sum+s.v[what] })
	if n == 0 {
		return 0
	}
	return sum / n / float64(r.step)
}

// passed is what some sub-windows add up to.
type passed struct{ n, wait, busy, waitBusy, most, came, came2, length float64 }

func (p *passed) merge(o *passed) {
	p.n += o.n
	p.wait += o.wait
	p.busy += o.busy
	p.waitBusy += o.waitBusy
	p.most = max(p.most, o.most)
	p.came += o.came
	p.came2 += o.came2
	p.length = max(p.length, o.length)
}

func (r *ring) sums(from, until time.Duration) (p passed) {
	p.length = float64(r.step)
	r.between(from, until, func(s *sub) {
		p.n++
		p.most = max(p.most, s.v[vBusy])
		p.wait += s.v[vWait]
		p.busy += s.v[vBusy]
		p.waitBusy += s.v[vWait] * s.v[vBusy]
		p.came += s.v[vCame]
		p.came2 += s.v[vCame] * s.v[vCame]
	})
	return p
}

// report fills in what the sub-windows tell: how evenly requests came, and
// the device's time, on average and at the moments when requests waited.
// Requests whose timings are not told are taken to be like the others
// (Horvitz–Thompson).
func (p *passed) report(to *Report) {
	if p.n >= subsOfWindow && p.came > 0 {
		to.Burstiness = max(0, p.came2-p.came*p.came/p.n) / (p.n - 1) / (p.came / p.n)
	}
	if p.n == 0 || to.Batched == 0 {
		return
	}
	whole := float64(to.OK-to.Refused) / float64(to.Batched)
	to.BusyOK = true
	to.Busy = p.busy / p.n / p.length * whole
	to.BusyQueued = to.Busy
	if to.Coverage() >= 0.9 {
		to.Parallel = p.most / p.length * whole
	}
	if p.wait > 0 {
		to.BusyQueued = p.waitBusy / p.wait / p.length * whole
	}
}

// point gathers sub-windows until they hold enough completions that their
// rate is more than chance.
type point struct{ subs, done, load float64 }

const (
	pointDone = 10
	pointSubs = 10
)

// addCurve takes the sub-windows that have settled (nothing in flight can
// still add to them) into the throughput curve, each once.
func (m *memory) addCurve(r *ring, settled int64) {
	from := max(m.folded, r.oldest)
	r.between(time.Duration(from*r.step), time.Duration(settled), func(s *sub) {
		m.folded = s.key + 1
		m.open.subs++
		m.open.done += s.v[vDone]
		m.open.load += s.v[vLoad]
		if m.open.done >= pointDone || m.open.subs >= pointSubs {
			m.addPoint(float64(r.step))
		}
	})
}

func (m *memory) addPoint(step float64) {
	p := m.open
	m.open = point{}
	if p.done == 0 || p.load <= 0 {
		return
	}
	number, rate := p.load/p.subs/step, p.done/p.subs/step*1e9
	m.curve[octave(number)].add(1, math.Log(number), math.Log(rate))
}

func octave(number float64) int {
	return min(max(int(math.Floor(math.Log2(max(number, 0.5))))+1, 0), numCells-1)
}

// elasticity is d ln throughput / d ln number in the system near the number
// of now: from a quarter of it upwards. Far below, everything responds.
func (m *memory) elasticity(number float64) Estimate {
	var a moments
	for i := max(0, octave(number)-2); i < numCells; i++ {
		a.merge(&m.curve[i])
	}
	var w within
	w.cell(&a)
	return w.slope()
}

// addBatch remembers the largest batch: without it, a quiet window would make
// its own largest batch look like a cap.
func (m *memory) addBatch(s *slot, now time.Time) {
	if s.batchMax >= m.batchMax || now.Sub(m.batchSeen) > memorySpan {
		m.batchMax, m.batchSeen = s.batchMax, now
	}
}

// addParallel remembers the most executions at once.
func (m *memory) addParallel(r *Report) {
	if now := r.End; r.Parallel >= m.parallel || now.Sub(m.parallelSeen) > memorySpan {
		m.parallel, m.parallelSeen = r.Parallel, now
	}
	r.Parallel = m.parallel
}

// report fills in the baseline, the throughput's answer, and the forward line
// of the last hour where that of the windows says nothing.
func (m *memory) report(r *Report, s *slot, number float64) {
	core, p, n, timed, explained := m.baseline(&s.cells)
	r.BaselineN = int(math.Round(n))
	if n >= 1 {
		r.Baseline = time.Duration(core)
		r.Explained = explained
	}
	if timed >= 1 {
		r.BaselineStages = p.stages()
	}
	if r.Baseline > 0 {
		r.Slowdown = float64(r.Means.Core()) / float64(r.Baseline)
	}
	r.ThroughputElasticity = m.elasticity(number)
	r.Spaced, r.SpacedN, r.SpacedFactor = ratio(s.spaced, s.spacedN), int(s.spacedN), ratio(s.spacing, s.spacedN)
	if core := float64(r.Means.Core()); r.Timed == 0 && n >= 20 && core > 0 {
		r.WaitAtMost = max(0, 1-float64(r.Baseline)/core)
	}
	r.BatchMax = int(m.batchMax)
	if s.batchMax == m.batchMax && s.executions > 0 {
		r.BatchAtMax = s.atMax / s.executions
	}
	m.line(r, s)
}

func (m *memory) line(r *Report, s *slot) {
	now, past, against := &s.byBatch, &m.byBatch, "batch"
	if 2*s.batched < s.timed {
		now, past, against = &s.byInflight, &m.byInflight, "inflight"
	}
	widen := 0.0
	if s.lengthCV() > 0.5 {
		widen = 0.1
	}
	r.Forward = now.line(against, widen)
	if r.Forward.OK || r.Forward.N == 0 {
		return
	}
	if l := past.line(against, widen); l.OK {
		l.Remembered = true
		r.Forward = l
	}
}

// lengthCV is the coefficient of variation of the audio's length.
func (s *slot) lengthCV() float64 {
	m := s.lengths
	if m.w < 2 || m.x <= 0 {
		return 0
	}
	mean := m.x / m.w
	return math.Sqrt(max(0, m.xx/m.w-mean*mean)) / mean
}
