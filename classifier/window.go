package classifier

import (
	"math"
	"math/bits"
	"sort"
	"time"
)

// Sizes of what a window keeps. All memory is a multiple of the classes.
const (
	keptWindows  = 6   // windows that a report may merge
	subsOfWindow = 10  // sub-windows of one window
	keptSubs     = 128 // sub-windows kept: six windows, and as much again for latency
	numCells     = 16  // octaves of audio length
	enough       = 40  // requests for which one window is a report
)

// How long the past counts: half the weight after halfLife, none after
// memorySpan without news. Throughput against load ages faster, because a
// changed setting changes it.
const (
	memorySpan    = time.Hour
	halfLife      = 20 * time.Minute
	curveHalfLife = 10 * time.Minute
)

// maxSpan bounds every duration that is counted, whatever a clock said.
const maxSpan = 24 * time.Hour

// otherClass takes the requests of all classes beyond MaxClasses.
const otherClass = "(other)"

// Window gathers finished requests and cuts them into reports, one for each
// class. It belongs to one goroutine, keeps no pointer into what it is given,
// and its memory is bounded by MaxClasses (at most 320 KiB each, of which a
// class that has lived for half an hour has all). The zero value is ready.
//
// Add reads no clock. Cut closes a tumbling window; what outlives it are the
// six windows before, their merger into minutes and five minutes for
// [Window.Over], the low-load baseline, the forward line and the throughput's
// answer to load, which are kept for an hour and decay.
type Window struct {
	Length     time.Duration // the owner's interval between cuts; 0: 10 s
	MaxClasses int           // 0: 64
	Late       time.Duration // how long after their end requests may be added: what is younger is not yet weighed
	ServerKind string        // see [ServerKinds]; "": recognised by the route, where it can be

	classes    map[string]*class
	overflowed uint64
	probes     probes
	epoch      time.Time // zero of the sub-windows' clock
	opened     time.Time // the last cut
	scratch    slot
}

// class is the state of one traffic class.
type class struct {
	name   string
	kind   string    // of the server
	done   time.Time // of the latest answer
	cur    *slot
	closed [keptWindows]*slot // newest first
	long   long
	subs   ring
	past   memory
	load   float64   // mean number in the system at the last cut
	alone  bool      // at the last cut, no other class took much of the server's time
	seen   time.Time // last cut that had requests
}

// Add counts one finished request. Upgraded ones are counted and nothing
// else; refused ones count with the time that they waited.
func (w *Window) Add(o *Observation) {
	c := w.class(o)
	if o.Upgraded {
		c.cur.upgraded++
		return
	}
	var l life
	l.read(o)
	c.cur.add(&l)
	c.space(&l)
	c.past.addBaseline(&l)
	c.subs.add(&l, w.epoch)
}

// space tells a staircase of answers, one service time apart, from answers
// that come together: one worker from a device that is shared. A gap counts if
// others were in the server and low load was seen of audio as long.
func (c *class) space(l *life) {
	if !l.served {
		return
	}
	last := c.done
	c.done = l.o.Done
	alone := &c.past.base[l.cell]
	if l.inflight < 2 || alone.n < 4 || last.IsZero() {
		return
	}
	gap := ns(l.o.Done.Sub(last)) / (alone.core / alone.n)
	if gap > l.inflight+1 {
		return // so long that nobody was being served
	}
	c.cur.spacedN++
	c.cur.spacing += gap
	if gap > 0.7 && gap < 1.4 {
		c.cur.spaced++
	}
}

// Overflowed is the number of requests whose class was lost to MaxClasses.
func (w *Window) Overflowed() uint64 { return w.overflowed }

func (w *Window) class(o *Observation) *class {
	if c := w.classes[o.Class]; c != nil {
		return c
	}
	return w.newClass(o)
}

func (w *Window) newClass(o *Observation) *class {
	if w.classes == nil {
		w.classes = make(map[string]*class)
		w.startClock(o.Enqueued)
	}
	name := o.Class
	if len(w.classes) >= w.maxClasses() {
		w.overflowed++
		name = otherClass
	}
	c := w.classes[name]
	if c == nil {
		c = &class{name: name, kind: w.ServerKind, cur: new(slot)}
		if c.kind == "" && name != otherClass {
			c.kind = KindOfRoute(o.Route)
		}
		c.subs.step = int64(w.length() / subsOfWindow)
		w.classes[name] = c
	}
	return c
}

func (w *Window) length() time.Duration {
	if w.Length <= 0 {
		return 10 * time.Second
	}
	return max(w.Length, subsOfWindow)
}

func (w *Window) maxClasses() int {
	if w.MaxClasses <= 0 {
		return 64
	}
	return w.MaxClasses
}

// startClock aligns the zero to whole sub-windows of the wall clock, so that
// which request came first makes no difference, and keeps t's monotonic part.
func (w *Window) startClock(t time.Time) {
	w.epoch = t.Add(-time.Duration(t.UnixNano() % int64(w.length()/subsOfWindow)))
}

// Cut closes the window at now and returns a report for each class known, by
// name. A report covers the last window if that has 40 requests, otherwise as
// many as it takes, up to six. A class without requests for an hour is
// forgotten.
func (w *Window) Cut(now time.Time) []Report {
	w.resetClock(now)
	var all float64
	names := make([]string, 0, len(w.classes))
	for name, c := range w.classes {
		if c.forget(now) {
			delete(w.classes, name)
			continue
		}
		all += c.cur.total
		names = append(names, name)
	}
	sort.Strings(names)
	reports := make([]Report, 0, len(names))
	for _, name := range names {
		reports = append(reports, w.cutClass(w.classes[name], now, all))
	}
	w.opened = now
	for i := range reports {
		w.probes.report(&reports[i])
	}
	w.probes.loaded, w.probes.loadedN = 0, 0
	return reports
}

// resetClock recovers from a first request whose clock was absurd.
func (w *Window) resetClock(now time.Time) {
	if off := now.Sub(w.epoch).Abs(); off < 10*365*24*time.Hour || w.classes == nil {
		return
	}
	w.startClock(now)
	for _, c := range w.classes {
		c.subs = ring{step: c.subs.step}
	}
}

func (c *class) forget(now time.Time) bool {
	if c.seen.IsZero() || c.cur.requests+c.cur.upgraded > 0 {
		c.seen = now
	}
	return now.Sub(c.seen) > memorySpan
}

func (w *Window) cutClass(c *class, now time.Time, all float64) Report {
	c.cur.begin(w.opened, now)
	alone := all <= 0 || c.cur.total >= 0.8*all
	c.past.age(now)
	c.past.addFits(c.cur)
	c.past.addBatch(c.cur, now)
	m, n := &w.scratch, 0
	*m = slot{}
	for s := c.cur; s != nil; s = c.closed[n-1] {
		m.merge(s)
		if n++; m.enough() || n == keptWindows {
			break
		}
	}
	r := m.report(c, n)
	c.subs.forgetFuture(now.Sub(w.epoch))
	lag := min(r.P95+w.Late, time.Duration(keptSubs/2)*time.Duration(c.subs.step))
	c.cur.passed = c.subs.sums(c.cur.start.Sub(w.epoch)-lag, now.Sub(w.epoch)-lag)
	c.rotate()
	c.past.addCurve(&c.subs, int64(now.Sub(w.epoch)-lag))
	sums := c.subs.sums(r.Start.Sub(w.epoch)-lag, now.Sub(w.epoch)-lag)
	sums.report(&r)
	if w.Late > 0 {
		r.Parallel, c.past.parallel = 0, 0 // records that come late and in batches lie too coarsely in time to count executions at once
	}
	c.load, c.alone = c.subs.mean(r.Start.Sub(w.epoch)-lag, now.Sub(w.epoch)-lag, vLoad), alone
	c.finish(&r, m)
	return r
}

// finish fills in what the class remembers.
func (c *class) finish(r *Report, m *slot) {
	c.past.addParallel(r)
	c.past.report(r, m, c.load)
	if !c.alone && r.ThroughputElasticity.OK {
		r.ThroughputElasticity.OK = false
		r.Warnings = append(r.Warnings, "other classes take part of the server's time, so this class's throughput says nothing of its capacity")
	}
	r.warn(m)
}

// enough tells whether a report can rest on the slot: on its requests, and on
// those with timings where some have them.
func (s *slot) enough() bool {
	return s.requests >= enough && (s.timed == 0 || s.timed >= enough/2)
}

// rotate makes the oldest slot the current one.
func (c *class) rotate() {
	oldest := c.closed[len(c.closed)-1]
	copy(c.closed[1:], c.closed[:])
	c.closed[0] = c.cur
	if oldest == nil {
		oldest = new(slot)
	}
	*oldest = slot{}
	c.cur = oldest
	c.long.add(c.closed[0])
}

// The parts of a request's time, in the order of Shares; an index into parts.
const (
	pQueue = iota
	pServerQueue
	pUpload
	pPreprocess
	pTransfer
	pForward
	pPostprocess
	pRest
	numParts
)

var partOf = [NumStages]int{StageQueue: pServerQueue, StagePreprocess: pPreprocess,
	StageTransfer: pTransfer, StageForward: pForward, StagePostprocess: pPostprocess}

// parts are nanoseconds. They are whole numbers in a float64, so that sums
// are exact (to 104 days) and the order of adding makes no difference.
type parts [numParts]float64

func (p *parts) merge(o *parts) {
	for i := range p {
		p[i] += o[i]
	}
}

func (p *parts) sum() (s float64) {
	for _, v := range p {
		s += v
	}
	return s
}

// life is one observation, measured once and with every number in bounds.
type life struct {
	o                                   *Observation
	total, gate, upload, stream, server float64 // ns; server: from admission or upload's end to the end
	parts                               parts   // of a timed request: all of total
	served, timed, suspect, refused     bool
	batch, forward                      float64 // requests; ns
	copyOut, copyOutBytes               float64
	copyOutUnsynced, queueTold          bool
	bytes, copies                       float64
	cell                                int
	length                              float64
	inflight, waiting                   float64
}

func ns(d time.Duration) float64 { return float64(min(max(d, 0), maxSpan)) }

func count(n int) float64 { return float64(min(max(n, 0), 1e6)) }

func (l *life) read(o *Observation) {
	l.o = o
	l.total, l.gate = ns(o.Total()), ns(o.QueueWait())
	l.gate = min(l.gate, l.total)
	l.upload = min(ns(uploaded(o)), l.total-l.gate)
	l.server = l.total - l.gate - l.upload
	l.stream = min(ns(o.Stream()), l.server)
	l.refused = o.Refused()
	l.served = o.Outcome == OK && !l.refused
	l.inflight, l.waiting = count(o.Inflight), count(o.Waiting)
	l.readLength()
	l.readStages()
}

// uploaded is the time that the client took to send; of a request given up
// before its last byte, all the time since admission.
func uploaded(o *Observation) time.Duration {
	if o.Sent.IsZero() && o.Responded.IsZero() && !o.Dequeued.IsZero() && o.Outcome == Canceled {
		return between(o.Dequeued, o.Done)
	}
	return o.Upload()
}

// readLength picks the best measure of the audio's length and its octave.
func (l *life) readLength() {
	o, unit := l.o, 1.0
	switch {
	case o.AudioSeconds > 0 && o.AudioSeconds < 1e9:
		l.length, unit = o.AudioSeconds, 0.125
	case o.SeqLen > 0:
		l.length, unit = float64(o.SeqLen), 4
	case o.BytesIn > 0:
		l.length, unit = float64(o.BytesIn), 1024
	}
	l.cell = min(bits.Len64(uint64(l.length/unit)), numCells-1)
}

// readStages sums the server's timings in one pass. A request with one timing
// that cannot be true has no stages; neither has one whose stages exceed the
// time that the server had it by 5 % and 2 ms, which rounding can explain.
func (l *life) readStages() {
	o := l.o
	var told bool
	for i := range o.Timings {
		t := &o.Timings[i]
		if t.Stage == StageOther || int(t.Stage) >= NumStages {
			continue
		}
		l.suspect = l.suspect || t.Untrusted || t.Dur < 0
		told = true
		l.queueTold = l.queueTold || t.Stage == StageQueue
		l.parts[partOf[t.Stage]] += ns(t.Dur)
		if t.Stage == StageTransfer {
			l.readCopy(t)
		}
	}
	if !told || !l.served {
		l.parts, l.suspect = parts{}, false
		return
	}
	sum := l.parts.sum()
	if sum > 1.05*(l.total-l.gate)+2e6 {
		l.suspect = true
	}
	if l.suspect {
		l.parts = parts{}
		return
	}
	l.timed = true
	l.forward = l.parts[pForward]
	if o.BatchSize > 0 && l.forward > 0 {
		l.batch = count(o.BatchSize)
	}
	l.parts[pQueue], l.parts[pUpload] = l.gate, l.upload
	l.parts[pRest] = max(0, l.server-sum)
}

func (l *life) readCopy(t *Timing) {
	l.bytes += float64(max(t.Bytes, 0))
	l.copies += count(t.Count)
	if t.Name == "d2h" {
		l.copyOut += ns(t.Dur)
		l.copyOutBytes += float64(max(t.Bytes, 0))
		l.copyOutUnsynced = l.copyOutUnsynced || !t.Synced
	}
}

// lowLoad tells that the request met nobody: a sample of the server at rest.
// A wait of up to 1 ms is the gate's own work, not a queue.
func (l *life) lowLoad() bool {
	return l.served && l.inflight <= 1 && l.waiting == 0 && l.batch <= 1 && l.gate < 1e6 && !l.suspect && !l.o.Dequeued.IsZero()
}

// slot is one tumbling window of one class: sums, all additive.
type slot struct {
	start, end, first time.Time

	requests, refused, timed, suspect, batched, overlapped, upgraded, admitted, served int
	outcomes                                                                           [len(outcomeNames)]int

	total, gate, upload, stream  float64 // ns, of all requests
	servedUpload, servedServer   float64 // ns, of the served
	timedServer                  float64 // ns, of the timed
	stages                       parts   // ns, of the timed
	inflight, waiting            float64
	limit                        int
	executions, atMax            float64
	batchMax                     float64
	copyOut, bytes, copies, outB float64
	outUnsynced, queueTold       int
	lengths                      moments           // w: requests with a length, x and xx: the length
	cells                        [numCells]float64 // served requests by length
	byBatch, byInflight          fits
	hist                         histogram
	passed                       passed
	hockney                      moments // time of a copy on its bytes, weighed by copies
	spaced, spacedN, spacing     float64 // answers under load: one service time apart, all, and the sum of their gaps in service times
	utterances                   utteranceSums
}

func (s *slot) begin(opened, now time.Time) {
	s.start, s.end = opened, now
	if s.start.IsZero() {
		s.start = s.first
	}
	if s.start.IsZero() || s.start.After(now) {
		s.start = now
	}
}

func (s *slot) add(l *life) {
	o := l.o
	if s.first.IsZero() || o.Enqueued.Before(s.first) {
		s.first = o.Enqueued
	}
	s.requests++
	s.addUtterance(o)
	s.outcomes[min(int(o.Outcome), len(s.outcomes)-1)]++
	s.total += l.total
	s.gate += l.gate
	s.upload += l.upload
	s.stream += l.stream
	s.waiting += l.waiting
	s.limit = max(s.limit, o.Limit)
	if !o.Dequeued.IsZero() {
		s.admitted++
		s.inflight += l.inflight
	}
	s.hist.add(l)
	if o.Outcome == OK && l.refused {
		s.refused++
	}
	if l.served {
		s.addServed(l)
	}
}

func (s *slot) addServed(l *life) {
	s.served++
	s.servedUpload += l.upload
	s.servedServer += l.server
	s.cells[l.cell]++
	if l.length > 0 {
		s.lengths.add(1, l.length, 0)
	}
	if l.o.Overlapped() {
		s.overlapped++
	}
	if l.suspect {
		s.suspect++
	}
	if l.timed {
		s.addTimed(l)
	}
}

func (s *slot) addTimed(l *life) {
	s.timed++
	s.timedServer += l.server
	s.stages.merge(&l.parts)
	s.bytes += l.bytes
	s.copies += l.copies
	s.copyOut += l.copyOut
	s.outB += l.copyOutBytes
	if l.copyOutUnsynced {
		s.outUnsynced++
	}
	if n := l.copies; n > 0 && l.bytes > 0 {
		s.hockney.add(n/max(1, l.batch), l.bytes/n, l.parts[pTransfer]/1e9/n)
	}
	if l.queueTold {
		s.queueTold++
	}
	if l.forward <= 0 {
		return
	}
	if l.batch > 0 {
		s.batched++
		s.executions += 1 / l.batch
		s.atBatch(l.batch, 1/l.batch)
		s.byBatch[l.cell].add(1/l.batch, l.batch, l.forward/1e9)
		return
	}
	if l.inflight > 0 {
		s.byInflight[l.cell].add(1, l.inflight, l.forward/1e9)
	}
}

// atBatch counts executions at the largest batch seen.
func (s *slot) atBatch(batch, executions float64) {
	if batch > s.batchMax {
		s.batchMax, s.atMax = batch, 0
	}
	if batch == s.batchMax {
		s.atMax += executions
	}
}

func (s *slot) merge(o *slot) {
	if s.end.IsZero() {
		s.end = o.end
	}
	s.start = o.start // merged from the newest to the oldest
	s.requests += o.requests
	s.refused += o.refused
	s.timed += o.timed
	s.suspect += o.suspect
	s.batched += o.batched
	s.overlapped += o.overlapped
	s.upgraded += o.upgraded
	s.admitted += o.admitted
	s.served += o.served
	for i := range s.outcomes {
		s.outcomes[i] += o.outcomes[i]
	}
	s.total += o.total
	s.gate += o.gate
	s.upload += o.upload
	s.stream += o.stream
	s.servedUpload += o.servedUpload
	s.servedServer += o.servedServer
	s.timedServer += o.timedServer
	s.stages.merge(&o.stages)
	s.inflight += o.inflight
	s.waiting += o.waiting
	s.limit = max(s.limit, o.limit)
	s.executions += o.executions
	s.atBatch(o.batchMax, o.atMax)
	s.copyOut += o.copyOut
	s.bytes += o.bytes
	s.copies += o.copies
	s.outB += o.outB
	s.outUnsynced += o.outUnsynced
	s.queueTold += o.queueTold
	s.lengths.merge(&o.lengths)
	for i := range s.cells {
		s.cells[i] += o.cells[i]
	}
	s.byBatch.merge(&o.byBatch)
	s.byInflight.merge(&o.byInflight)
	s.passed.merge(&o.passed)
	s.hockney.merge(&o.hockney)
	s.spaced += o.spaced
	s.spacedN += o.spacedN
	s.spacing += o.spacing
	s.hist.merge(&o.hist)
	s.utterances.merge(&o.utterances)
}

// The histogram has eight buckets an octave from 100 us to 28 min, so that a
// percentile read from it is within 4.5 %. Each bucket also sums the parts of
// its requests: shares of the slowest are sums over the upper buckets.
const (
	bucketsOfOctave = 8
	numBuckets      = 24*bucketsOfOctave + 1
	leastBucket     = 1e5 // ns
)

type bucket struct {
	n     float32
	untim float32           // server's time of requests without stages, s
	parts [numParts]float32 // s
}

type histogram [numBuckets]bucket

func (h *histogram) add(l *life) {
	i := 0
	if l.total > leastBucket {
		i = min(1+int(bucketsOfOctave*math.Log2(l.total/leastBucket)), numBuckets-1)
	}
	b := &h[i]
	b.n++
	if !l.timed {
		b.parts[pQueue] += float32(l.gate / 1e9)
		b.parts[pUpload] += float32(l.upload / 1e9)
		b.untim += float32(l.server / 1e9)
		return
	}
	for p, v := range l.parts {
		b.parts[p] += float32(v / 1e9)
	}
}

func (h *histogram) merge(o *histogram) {
	for i := range h {
		if o[i].n == 0 {
			continue
		}
		h[i].n += o[i].n
		h[i].untim += o[i].untim
		for p := range h[i].parts {
			h[i].parts[p] += o[i].parts[p]
		}
	}
}

// quantile is the middle, on a log scale, of the bucket that holds it.
func (h *histogram) quantile(q float64) time.Duration {
	var n float64
	for i := range h {
		n += float64(h[i].n)
	}
	rank := max(1, math.Ceil(q*n))
	for i := range h {
		if rank -= float64(h[i].n); rank <= 0 && n > 0 {
			return bucketMiddle(i)
		}
	}
	return 0
}

func bucketMiddle(i int) time.Duration {
	if i == 0 {
		return leastBucket / 2
	}
	return time.Duration(leastBucket * math.Exp2((float64(i)-0.5)/bucketsOfOctave))
}

// slowest sums the parts of the slowest fraction, taking from the bucket on
// the border no more than is due.
func (h *histogram) slowest(fraction float64) (sum parts, untimed float64) {
	var n float64
	for i := range h {
		n += float64(h[i].n)
	}
	due := fraction * n
	for i := numBuckets - 1; i >= 0 && due > 0; i-- {
		b := &h[i]
		if b.n == 0 {
			continue
		}
		take := min(1, due/float64(b.n))
		due -= float64(b.n)
		untimed += take * float64(b.untim)
		for p, v := range b.parts {
			sum[p] += take * float64(v)
		}
	}
	return sum, untimed
}
