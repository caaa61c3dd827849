package classifier

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"time"
)

// A system is a server, its clients and weir's gate before it, as numbers.
// The simulator plays it event by event; a remedy is another system. Zero
// means none or unlimited unless said otherwise.
type system struct {
	name   string
	want   []Cause // designed scenarios: the causes that are right
	says   string  // designed scenarios: words that evidence, advice or warnings must hold
	seed   uint64
	phases []phase

	audio, audioCV     float64 // seconds of audio, lognormal
	upload             time.Duration
	slowShare          float64       // of the clients
	slowUpload         time.Duration // theirs
	realtime           bool          // audio comes as fast as it is spoken
	fast               bool          // twice as fast (a remedy)
	download           time.Duration
	timeout            time.Duration // of the client, who then retries
	retries            int
	gate, gateQueue    int // weir's max_concurrency and max_queue_size
	gateTimeout        time.Duration
	network            time.Duration
	server             int // the server's own limit on requests in flight
	serverQueue        int // answers 503 beyond
	serverTimeout      time.Duration
	pre, post          time.Duration // at the mean length
	preCV              float64
	preWorkers         int // 0: one for each request
	postWorkers        int
	loop               bool // pre and post share one event loop
	batch              int  // max_batch_size; 0: 1
	delay              time.Duration
	instances          int     // 0: 1
	byLength           bool    // batches hold one octave of length
	base, item, length float64 // forward, ms: base + item·batch·(longest/mean) + length·(longest/mean)
	cv                 float64
	exponential        bool    // forward times are exponential
	contention         float64 // forward × (1 + contention·(other instances at work))
	chunks             float64 // copies of a request to the device; as many from it if chunksOut is 0
	chunksOut          float64
	alpha              time.Duration
	bytes              float64 // to the device, of a request
	beta               float64 // bytes/s
	warm               time.Duration
	warmFactor         float64
	pauseEvery, pause  time.Duration
	drift              func(t time.Duration) float64 // factor of host work at a moment

	told told
}

// told is what the server says of itself.
type told struct {
	nothing, noQueue, noBatch, noAudio, noBytes bool
	coverage                                    float64 // 0: all
	unit                                        float64 // 0: 1
	unsynced                                    bool    // the forward's time is in the copy after it
	poolInPre                                   bool    // preprocess' timer runs while a request waits for a worker
	noPre                                       bool    // preprocessing is not timed
	overlap                                     bool    // postprocessing is told as parallel to forward
}

// A phase of the load: closed clients, who think between requests, or open
// arrivals.
type phase struct {
	dur     time.Duration
	clients int
	think   time.Duration
	rate    float64 // per second
	burst   float64 // open: the rate is burst times as high for a tenth of the time
	ramp    float64 // open: the rate grows by this factor over the phase
}

// quiet is what comes before the load in most scenarios.
func quiet(think time.Duration) phase { return phase{dur: 30 * time.Second, clients: 1, think: think} }

type job struct {
	id                                          uint64
	client                                      int
	try                                         int
	audio, noise                                float64
	enq, deq, sent, resp, done                  int64
	waiting, inflight                           int
	state                                       int
	status                                      int
	outcome                                     Outcome
	slow                                        bool
	queued, queue, poolWait, pre, h2d, fwd, d2h int64
	post                                        int64
	batch                                       int
	longest                                     float64
}

const (
	stWaiting = iota
	stAdmitted
	stGone
)

type event struct {
	at  int64
	seq int
	do  func()
}
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any     { o := *e; x := o[len(o)-1]; *e = o[:len(o)-1]; return x }

// pool is a station with some workers and a FIFO queue.
type pool struct {
	workers, busy int // workers 0: unlimited
	queue         []func()
}

func (p *pool) take(do func()) {
	if p.workers == 0 || p.busy < p.workers {
		p.busy++
		do()
		return
	}
	p.queue = append(p.queue, do)
}

func (p *pool) give() {
	p.busy--
	if len(p.queue) > 0 {
		do := p.queue[0]
		p.queue = p.queue[1:]
		p.busy++
		do()
	}
}

type sim struct {
	*system
	now       int64
	seq       int
	events    events
	end       int64
	open      *rand.Rand
	think     *rand.Rand
	ids       uint64
	phaseNow  int
	inflight  int
	waiting   int
	line      []*job
	admission pool
	prePool   pool
	postPool  pool
	link      pool
	batchLine []*job
	idle      int
	active    int
	timerAt   int64
	out       []Observation
}

// play runs the system and returns its observations in the order in which
// they were done.
func (s *system) play() []Observation {
	m := &sim{system: s, open: rand.New(rand.NewPCG(s.seed, 1)), think: rand.New(rand.NewPCG(s.seed, 2))}
	m.prePool.workers, m.postPool.workers = s.preWorkers, s.postWorkers
	m.admission.workers, m.link.workers = s.server, 1
	m.idle = max(1, s.instances)
	var at int64
	for i, p := range s.phases {
		m.at(at, func() { m.begin(i) })
		at += int64(p.dur)
	}
	m.end = at
	for len(m.events) > 0 {
		e := heap.Pop(&m.events).(event)
		if e.at >= m.end {
			break
		}
		m.now = e.at
		e.do()
	}
	return m.out
}

func (m *sim) at(t int64, do func()) {
	m.seq++
	heap.Push(&m.events, event{t, m.seq, do})
}

func (m *sim) after(d int64, do func()) { m.at(m.now+max(d, 0), do) }

// work is when d of work that begins now ends, pauses of the whole server
// included.
func (m *sim) work(d int64) int64 {
	if m.pauseEvery == 0 {
		return d
	}
	every, stop := int64(m.pauseEvery), int64(m.pause)
	t, left := m.now, d
	for {
		if in := t % every; in < stop {
			t += stop - in
		}
		run := every - t%every
		if left <= run {
			return t + left - m.now
		}
		t, left = t+run, left-run
	}
}

func (m *sim) begin(i int) {
	before := 0
	if i > 0 {
		before = m.phases[i-1].clients
	}
	m.phaseNow = i
	p := m.phases[i]
	for c := before; c < p.clients; c++ {
		m.after(int64(float64(min(p.think, time.Second)+time.Millisecond)*m.think.Float64()), func() { m.client(c) })
	}
	if p.rate > 0 {
		m.nextOpen(i, m.now)
	}
}

func (m *sim) client(c int) {
	if c < m.phases[m.phaseNow].clients {
		m.send(c, 0)
	}
}

func (m *sim) nextOpen(i int, began int64) {
	if m.phaseNow != i {
		return
	}
	p := m.phases[i]
	rate := p.rate
	if p.ramp > 0 {
		rate *= 1 + (p.ramp-1)*float64(m.now-began)/float64(p.dur)
	}
	if p.burst > 0 {
		if (m.now/int64(200*time.Millisecond))%10 == 0 {
			rate *= p.burst
		} else {
			rate *= max(0, 10-p.burst) / 9
		}
		rate = max(rate, 1e-3)
	}
	gap := int64(m.open.ExpFloat64() / rate * 1e9)
	if p.burst > 0 { // the rate changes within the gap: step by step
		gap = min(gap, int64(50*time.Millisecond))
		hit := m.open.Float64() < 1-math.Exp(-rate*float64(gap)/1e9) || gap < int64(50*time.Millisecond)
		m.after(gap, func() {
			if hit {
				m.send(-1, 0)
			}
			m.nextOpen(i, began)
		})
		return
	}
	m.after(gap, func() { m.send(-1, 0); m.nextOpen(i, began) })
}

func lognormal(z, cv float64) float64 {
	s := math.Sqrt(math.Log(1 + cv*cv))
	return math.Exp(s*z - s*s/2)
}

// send makes a request whose traits depend on its number alone, so that a
// remedied system is sent the same.
func (m *sim) send(client, try int) {
	m.ids++
	rnd := rand.New(rand.NewPCG(m.seed, 1000+m.ids))
	mean := m.audio
	if mean == 0 {
		mean = 5
	}
	r := &job{id: m.ids, client: client, try: try, status: 200, audio: mean, noise: rnd.NormFloat64()}
	if m.audioCV > 0 {
		r.audio = mean * lognormal(rnd.NormFloat64(), m.audioCV)
	}
	r.slow = rnd.Float64() < m.slowShare
	m.arrive(r)
	if m.timeout > 0 {
		m.after(int64(m.timeout), func() { m.giveUp(r) })
	}
}

func (m *sim) arrive(r *job) {
	r.enq, r.waiting = m.now, m.waiting
	switch {
	case m.gate == 0 || m.inflight < m.gate:
		m.admit(r)
		return
	case m.gateQueue > 0 && m.waiting >= m.gateQueue:
		m.finish(r, Rejected, 503)
		return
	}
	m.waiting++
	m.line = append(m.line, r)
	if m.gateTimeout > 0 {
		m.after(int64(m.gateTimeout), func() { m.leaveLine(r, Expired, 503) })
	}
}

func (m *sim) leaveLine(r *job, o Outcome, status int) {
	if r.state != stWaiting {
		return
	}
	r.state = stGone
	m.waiting--
	m.finish(r, o, status)
}

func (m *sim) giveUp(r *job) {
	switch {
	case r.done != 0:
	case r.state == stWaiting:
		m.leaveLine(r, Canceled, 0)
	default:
		m.leave()
		m.finish(r, Canceled, 0)
	}
}

func (m *sim) admit(r *job) {
	r.state, r.deq = stAdmitted, m.now
	m.inflight++
	r.inflight = m.inflight
	up := float64(m.upload)
	if r.slow {
		up = float64(m.slowUpload)
	}
	if m.audio > 0 {
		up *= r.audio / m.audio
	}
	if m.realtime {
		up = r.audio * 1e9
		if m.fast {
			up /= 2
		}
	}
	m.after(int64(up), func() {
		r.sent = m.now
		m.after(int64(m.network), func() { m.enterServer(r) })
	})
}

func (m *sim) leave() {
	m.inflight--
	for len(m.line) > 0 {
		r := m.line[0]
		m.line = m.line[1:]
		if r.state == stWaiting {
			m.waiting--
			m.admit(r)
			return
		}
	}
}

func (m *sim) enterServer(r *job) {
	if m.serverQueue > 0 && len(m.admission.queue) >= m.serverQueue {
		m.answer(r, 503)
		return
	}
	r.queued = m.now
	m.admission.take(func() {
		if m.serverTimeout > 0 && m.now-r.queued > int64(m.serverTimeout) {
			m.admission.give()
			m.answer(r, 503)
			return
		}
		r.queue += m.now - r.queued
		m.preprocess(r)
	})
}

func (m *sim) scale(d time.Duration, r *job, cv float64) int64 {
	f := 1.0
	if m.audio > 0 {
		f = r.audio / m.audio
	}
	if cv > 0 {
		f *= lognormal(r.noise, cv)
	}
	if m.drift != nil {
		f *= m.drift(time.Duration(m.now))
	}
	return int64(float64(d) * f)
}

func (m *sim) preprocess(r *job) {
	from := m.now
	m.prePool.take(func() {
		r.poolWait = m.now - from
		r.pre = m.work(m.scale(m.pre, r, m.preCV))
		m.after(r.pre, func() {
			m.prePool.give()
			r.queued = m.now
			m.batchLine = append(m.batchLine, r)
			m.startBatch()
		})
	})
}

func (m *sim) startBatch() {
	for m.idle > 0 && len(m.batchLine) > 0 {
		size := max(1, m.batch)
		due := m.batchLine[0].queued + int64(m.delay)
		if len(m.batchLine) < size && m.now < due {
			if m.timerAt < m.now || m.timerAt > due {
				m.timerAt = due
				m.at(due, func() { m.timerAt = 0; m.startBatch() })
			}
			return
		}
		m.idle--
		m.active++
		m.execute(m.pick(size))
	}
}

func (m *sim) pick(size int) []*job {
	if !m.byLength {
		n := min(size, len(m.batchLine))
		b := append([]*job(nil), m.batchLine[:n]...)
		m.batchLine = append([]*job(nil), m.batchLine[n:]...)
		return b
	}
	var b, rest []*job
	first := math.Floor(math.Log2(m.batchLine[0].audio))
	for _, r := range m.batchLine {
		if len(b) < size && math.Floor(math.Log2(r.audio)) == first {
			b = append(b, r)
		} else {
			rest = append(rest, r)
		}
	}
	m.batchLine = rest
	return b
}

func (m *sim) copyTime(n int, chunks float64) int64 {
	d := float64(m.alpha) * chunks * float64(n)
	if m.beta > 0 {
		d += m.bytes * float64(n) / m.beta * 1e9
	}
	return int64(d)
}

func (m *sim) forwardTime(b []*job) int64 {
	longest := 0.0
	for _, r := range b {
		longest = max(longest, r.audio)
	}
	rel := 1.0
	if m.audio > 0 {
		rel = longest / m.audio
	}
	f := m.base + m.item*float64(len(b))*rel + m.length*rel
	f *= 1 + m.contention*float64(m.active-1)
	if m.cv > 0 {
		f *= lognormal(b[0].noise, m.cv)
	}
	if m.exponential {
		f *= -math.Log(0.5 * math.Erfc(b[0].noise/math.Sqrt2))
	}
	if m.warm > 0 && m.now < int64(m.warm) {
		f *= m.warmFactor
	}
	for _, r := range b {
		r.longest = longest
	}
	return m.work(int64(f * 1e6))
}

// execute holds the instance for the copies and the forward pass.
func (m *sim) execute(b []*job) {
	for _, r := range b {
		r.queue += m.now - r.queued
		r.batch = len(b)
	}
	began := m.now
	m.link.take(func() {
		m.after(m.copyTime(len(b), m.chunks), func() {
			m.link.give()
			h2d := m.now - began
			fwd := m.forwardTime(b)
			m.after(fwd, func() { m.copyBack(b, h2d, fwd) })
		})
	})
}

func (m *sim) copyBack(b []*job, h2d, fwd int64) {
	began := m.now
	chunks := m.chunksOut
	if chunks == 0 {
		chunks = m.chunks
	}
	m.link.take(func() {
		m.after(m.copyTime(len(b), chunks)/4, func() {
			m.link.give()
			for _, r := range b {
				r.h2d, r.fwd, r.d2h = h2d, fwd, m.now-began
				m.postprocess(r)
			}
			m.idle++
			m.active--
			m.startBatch()
		})
	})
}

func (m *sim) postprocess(r *job) {
	p := &m.postPool
	if m.loop {
		p = &m.prePool
	}
	p.take(func() {
		r.post = m.work(m.scale(m.post, r, 0))
		m.after(r.post, func() {
			p.give()
			m.admission.give()
			m.after(int64(m.network), func() { m.answer(r, 200) })
		})
	})
}

func (m *sim) answer(r *job, status int) {
	if r.done != 0 {
		return // the client left
	}
	r.resp = m.now
	m.after(int64(m.download), func() {
		if r.done == 0 {
			m.leave()
			m.finish(r, OK, status)
		}
	})
}

func (m *sim) finish(r *job, o Outcome, status int) {
	r.done, r.outcome, r.status = m.now, o, status
	m.out = append(m.out, m.observe(r))
	bad := o != OK || status != 200
	if bad && r.try < m.retries {
		m.after(int64(50*time.Millisecond), func() { m.send(r.client, r.try+1) })
		return
	}
	if r.client < 0 {
		return
	}
	think := float64(m.phases[m.phaseNow].think) * m.think.ExpFloat64()
	if bad {
		think += 100e6 // a client that is refused does not spin
	}
	m.after(int64(think), func() { m.client(r.client) })
}

// observe is what weir would record of the request.
func (m *sim) observe(r *job) Observation {
	at := func(t int64) time.Time { return start.Add(time.Duration(t)) }
	o := Observation{Class: "POST /asr", Status: r.status, Outcome: r.outcome, Enqueued: at(r.enq), Done: at(r.done),
		Waiting: r.waiting, Inflight: r.inflight, Limit: m.gate, BytesIn: int64(32000 * r.audio)}
	if !m.told.noAudio {
		o.AudioSeconds = r.audio
	}
	if r.state == stAdmitted {
		o.Dequeued = at(r.deq)
	}
	if r.sent > 0 {
		o.Sent = at(r.sent)
	}
	if r.resp > 0 {
		o.Responded = at(r.resp)
	}
	rnd := rand.New(rand.NewPCG(m.seed, 7777+r.id))
	if r.status == 200 && r.outcome == OK && !m.told.nothing && (m.told.coverage == 0 || rnd.Float64() < m.told.coverage) {
		m.tell(&o, r)
	}
	return o
}

func (m *sim) tell(o *Observation, r *job) {
	t := &m.told
	unit := t.unit
	if unit == 0 {
		unit = 1
	}
	add := func(name string, s Stage, ns int64, bytes, copies float64) {
		d := Timing{Name: name, Stage: s, Dur: time.Duration(float64(ns) * unit), Synced: !t.unsynced}
		if !t.noBytes {
			d.Bytes, d.Count = int64(bytes), int(copies)
		}
		o.Timings = append(o.Timings, d)
	}
	o.Source = "header"
	if !t.noQueue {
		add("queue", StageQueue, r.queue, 0, 0)
	}
	pre := r.pre
	if t.poolInPre {
		pre += r.poolWait
	}
	if !t.noPre {
		add("preprocess", StagePreprocess, pre, 0, 0)
	}
	fwd, d2h := r.fwd, r.d2h
	if t.unsynced {
		fwd, d2h = int64(2*time.Millisecond), r.d2h+r.fwd-int64(2*time.Millisecond)
	}
	n := float64(r.batch)
	out := m.chunksOut
	if out == 0 {
		out = m.chunks
	}
	add("h2d", StageTransfer, r.h2d, m.bytes*n, m.chunks*n)
	add("forward", StageForward, fwd, 0, 0)
	add("d2h", StageTransfer, d2h, m.bytes*n/4, max(1, out*n/4))
	add("postprocess", StagePostprocess, r.post, 0, 0)
	if !t.noBatch {
		o.BatchSize = r.batch
	}
}
