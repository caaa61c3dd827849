package classifier

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// drawn is the nth system drawn at random. The first half were looked at
// while the rules were made, the others (heldOut) never.
func drawn(n int) system {
	r := rand.New(rand.NewPCG(20261201, uint64(n)))
	pick := func(v ...int) int { return v[r.IntN(len(v))] }
	span := func(lo, hi float64) float64 { return lo * math.Pow(hi/lo, r.Float64()) } // log-uniform
	ms := func(lo, hi float64) time.Duration { return time.Duration(span(lo, hi) * 1e6) }
	s := system{name: "drawn " + strconv.Itoa(n), seed: uint64(n) + 1}
	s.audio, s.audioCV = span(2, 20), []float64{0, 0.2, 0.5, 1}[r.IntN(4)]
	s.upload = ms(1, 30)
	if r.IntN(8) == 0 {
		s.upload = ms(50, 1500)
	}
	s.network, s.download = ms(0.1, 2), ms(0.05, 2)
	s.gate = pick(0, 0, 0, 1, 2, 4, 8, 16, 32)
	s.server = pick(0, 0, 0, 0, 0, 2, 4, 8, 16, 32)
	s.pre, s.preCV, s.preWorkers = ms(0.5, 60), 0.3, pick(1, 2, 4, 8, 16, 0)
	s.post, s.postWorkers = ms(0.2, 20), pick(1, 4, 8, 0)
	s.batch, s.instances = pick(1, 1, 2, 4, 8, 16, 32), pick(1, 1, 1, 1, 2, 4)
	if s.batch > 1 && r.IntN(3) == 0 {
		s.delay = ms(3, 150)
	}
	alone, e := span(20, 400), r.Float64()
	if r.IntN(2) == 0 {
		e *= 0.2
	}
	s.base, s.item, s.length = alone*(1-e)*0.8, alone*e, alone*(1-e)*0.2
	s.cv = span(0.02, 0.4)
	if s.instances > 1 {
		s.contention = []float64{0, 0, 0.3, 0.6, 1}[r.IntN(5)]
	}
	s.chunks, s.alpha = span(1, 100), time.Duration(span(5e3, 5e5))
	s.bytes, s.beta = span(1e5, 5e7), span(5e8, 2e10)
	switch r.IntN(10) {
	case 0:
		s.chunks, s.alpha = span(100, 1000), time.Duration(span(5e4, 5e5))
	case 1:
		s.bytes = span(5e7, 5e8)
	}
	switch r.IntN(10) {
	case 0, 1:
		s.pre, s.preWorkers = ms(30, 300), pick(1, 2, 4)
	case 2:
		s.post, s.postWorkers = ms(30, 300), pick(1, 2, 4)
	}
	s.told = told{noBytes: r.IntN(3) == 0, noAudio: r.IntN(2) == 0, poolInPre: r.IntN(2) == 0}
	switch r.IntN(20) {
	case 0, 1, 2:
		s.told.noQueue = true
	case 3, 4:
		s.told.noBatch = true
	case 5, 6:
		s.told.coverage = span(0.1, 0.5)
	case 7:
		s.told.nothing = true
	}
	s.phases = []phase{{dur: 30 * time.Second, clients: 1, think: 150 * time.Millisecond}, s.drawLoad(r)}
	return s
}

// drawLoad is closed clients, or open arrivals at a part of the capacity.
func (s *system) drawLoad(r *rand.Rand) phase {
	p := phase{dur: 70 * time.Second}
	if r.IntN(10) < 6 {
		p.clients = int(2 * math.Pow(24, r.Float64()))
		p.think = time.Duration(5e6 * math.Pow(200, r.Float64()))
		return p
	}
	p.rate = (0.3 + 0.75*r.Float64()) * s.capacity()
	if r.IntN(4) == 0 {
		p.burst = 2 + 4*r.Float64()
	}
	return p
}

// capacity bounds the requests a second, roughly.
func (s *system) capacity() float64 {
	b := float64(s.batch)
	if n := s.server; n > 0 {
		b = min(b, float64(n))
	}
	if n := s.gate; n > 0 {
		b = min(b, float64(n))
	}
	exec := (s.base+s.item*b+s.length)/1e3 + float64(s.copyNanos(b))/1e9
	x := b * float64(s.instances) / exec / (1 + s.contention*float64(s.instances-1))
	if s.preWorkers > 0 && s.pre > 0 {
		x = min(x, float64(s.preWorkers)/s.pre.Seconds())
	}
	if s.postWorkers > 0 && s.post > 0 {
		x = min(x, float64(s.postWorkers)/s.post.Seconds())
	}
	return min(x, 150)
}

func (s *system) copyNanos(n float64) float64 {
	d := float64(s.alpha) * s.chunks * n
	if s.beta > 0 {
		d += s.bytes * n / s.beta * 1e9
	}
	return 1.25 * d
}

// remedies are what one could do about a system, each with the cause that it
// removes.
func remedies() []remedy {
	limits := func(s *system) {
		s.gate, s.server, s.gateQueue, s.serverQueue = 4*s.gate, 4*s.server, 4*s.gateQueue, 4*s.serverQueue
	}
	batch := func(s *system) { s.batch = 4 * max(1, s.batch) }
	delay := func(s *system) { s.delay = 0 }
	return []remedy{
		{"limits x 4", Queue, limits},
		{"max_batch x 4", Queue, batch},
		{"no batch delay", Queue, delay},
		{"all three", Queue, func(s *system) { limits(s); batch(s); delay(s) }},
		{"batches of one at once", Queue, func(s *system) { s.batch, s.delay = 1, 0 }},
		{"forward / 2", Compute, func(s *system) { s.base, s.item, s.length = s.base/2, s.item/2, s.length/2 }},
		{"copies / 2", Transfer, func(s *system) { s.alpha /= 2; s.beta *= 2 }},
		{"preprocessing / 2, workers x 2", Host, func(s *system) { s.pre, s.preWorkers = s.pre/2, 2*s.preWorkers }},
		{"postprocessing / 2, workers x 2", Host, func(s *system) { s.post, s.postWorkers = s.post/2, 2*s.postWorkers }},
		{"uploads / 2", Client, func(s *system) { s.upload, s.slowUpload, s.fast = s.upload/2, s.slowUpload/2, true }},
	}
}

type remedy struct {
	name  string
	cause Cause
	apply func(*system)
}

// cost is what a served request cost its user under load: all time spent,
// that of the refused included, and a second for each refusal.
func (s *system) cost() float64 {
	var spent, served float64
	from := start.Add(s.phases[0].dur)
	for _, o := range s.play() {
		if o.Enqueued.Before(from) && len(s.phases) > 1 {
			continue
		}
		spent += o.Total().Seconds()
		if o.Outcome == OK && o.Status == 200 {
			served++
		} else {
			spent++
		}
	}
	return spent / max(served, 1)
}

// truth is the label of a system by intervention.
type truth struct {
	primary    Cause   // removed by the remedy that helps most, or healthy
	acceptable []Cause // whose remedy helps nearly as much
	gain       map[Cause]float64
}

// label plays the system once more with each remedy. Acceptable are the causes
// whose remedy saves 60 % of what the best one saves, and a mere change of
// settings that saves 30 % of the latency. Healthy is a latency below 1.3
// times that at rest with less than a fifth of it waiting; healthy, too, may
// be called one below twice that at rest where half as much load again brings
// at least 1.4 times the throughput.
func (s *system) label() truth {
	before := s.cost()
	t := truth{gain: map[Cause]float64{}}
	for _, r := range remedies() {
		c := *s
		r.apply(&c)
		t.gain[r.cause] = max(t.gain[r.cause], 1-c.cost()/before)
	}
	best := 0.0
	for _, c := range []Cause{Queue, Compute, Transfer, Host, Client} {
		if t.gain[c] > best {
			best, t.primary = t.gain[c], c
		}
	}
	for _, c := range []Cause{Queue, Compute, Transfer, Host, Client} {
		if t.gain[c] >= 0.6*best || c == Queue && t.gain[c] >= 0.3 {
			t.acceptable = append(t.acceptable, c)
		}
	}
	switch slow, waiting, rate := s.loadedFrom(); {
	case slow < 1.3 && waiting < 0.2:
		t.primary, t.acceptable = Healthy, append(t.acceptable, Healthy)
	case slow < 2 && s.more(1.5) >= 1.4*rate:
		t.acceptable = append(t.acceptable, Healthy)
	}
	return t
}

// more is the throughput under as many times the load.
func (s *system) more(times float64) float64 {
	c := *s
	c.phases = slices.Clone(s.phases)
	last := &c.phases[len(c.phases)-1]
	last.rate *= times
	last.clients = int(math.Round(times * float64(last.clients)))
	_, _, rate := c.loadedFrom()
	return rate
}

// loadedFrom is the true slowdown against rest, the true share of waiting,
// uploads apart, and the throughput.
func (s *system) loadedFrom() (slowdown, waiting, rate float64) {
	c := *s
	c.told = told{}
	var rest, n, load, m, wait float64
	from := start.Add(s.phases[0].dur)
	for _, o := range c.play() {
		if o.Outcome != OK || o.Status != 200 {
			continue
		}
		core := (o.Total() - o.Upload()).Seconds()
		if o.Enqueued.Before(from) {
			rest, n = rest+core, n+1
			continue
		}
		q, _ := o.In(StageQueue)
		load, m, wait = load+core, m+1, wait+(q+o.QueueWait()).Seconds()
	}
	if n == 0 || m == 0 {
		return 1, 0, 0
	}
	return load / m / (rest / n), wait / load, m / (s.lasts() - s.phases[0].dur).Seconds()
}

const (
	numDrawn   = 500
	labelsFile = "testdata/labels.txt"
)

// heldOut tells the part that no rule was tuned against.
func heldOut(n int) bool { return n >= numDrawn/2 }

// labels reads the truth of each drawn system. They take minutes to make
// (WEIR_LABEL=1 makes them anew); TestLabels makes a sample of them again.
func labels(t *testing.T) []truth {
	t.Helper()
	b, err := os.ReadFile(labelsFile)
	if err != nil {
		t.Fatal(err)
	}
	var all []truth
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.Fields(line)
		tr := truth{primary: Cause(f[1])}
		for _, c := range strings.Split(f[2], ",") {
			tr.acceptable = append(tr.acceptable, Cause(c))
		}
		all = append(all, tr)
	}
	return all
}

func (t truth) line(n int) string {
	words := make([]string, 0, len(t.acceptable))
	for _, c := range t.acceptable {
		words = append(words, string(c))
	}
	return fmt.Sprintf("%d %s %s", n, t.primary, strings.Join(words, ","))
}

func TestLabels(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	if os.Getenv("WEIR_LABEL") != "" {
		makeLabels(t)
	}
	all := labels(t)
	for n := 0; n < numDrawn; n += 83 {
		s := drawn(n)
		if got := s.label().line(n); got != all[n].line(n) {
			t.Errorf("label %q: the file has %q", got, all[n].line(n))
		}
	}
}

func makeLabels(t *testing.T) {
	t.Helper()
	lines := make([]string, numDrawn)
	for n := range lines {
		s := drawn(n)
		lines[n] = s.label().line(n)
	}
	if err := os.MkdirAll(filepath.Dir(labelsFile), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(labelsFile, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// score counts verdicts against the truth.
type score struct {
	all, answered, right    int // all systems
	one, oneAnswered, oneOK int // those with one acceptable cause
	matrix                  map[[2]Cause]int
	blind                   [2]int    // right of all, and of those with one cause, by always saying compute
	byConfidence            [4][2]int // answered and right at a confidence up to .7, .8, .9, 1
}

func (s *score) add(v Verdict, t truth) {
	if s.matrix == nil {
		s.matrix = map[[2]Cause]int{}
	}
	a := answers(v)
	said := Unknown
	if len(a) > 0 {
		said = v.Cause
	}
	s.matrix[[2]Cause{t.primary, said}]++
	ok := slices.ContainsFunc(a, func(c Cause) bool { return slices.Contains(t.acceptable, c) })
	s.all++
	single := len(t.acceptable) == 1
	if slices.Contains(t.acceptable, Compute) {
		s.blind[0]++
		if single {
			s.blind[1]++
		}
	}
	if single {
		s.one++
	}
	if len(a) == 0 {
		return
	}
	s.answered++
	b := min(max(int(v.Confidence*10)-6, 0), 3)
	s.byConfidence[b][0]++
	if single {
		s.oneAnswered++
	}
	if !ok {
		return
	}
	s.right++
	s.byConfidence[b][1]++
	if single {
		s.oneOK++
	}
}

func (s *score) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d systems: answered %.3f, right when answering %.3f\n", s.all, ratio(float64(s.answered), float64(s.all)), ratio(float64(s.right), float64(s.answered)))
	fmt.Fprintf(&b, "%d of them with one acceptable cause: answered %.3f, right when answering %.3f\n", s.one, ratio(float64(s.oneAnswered), float64(s.one)), ratio(float64(s.oneOK), float64(s.oneAnswered)))
	fmt.Fprintf(&b, "saying compute always would be right of %.3f, and of %.3f\n", ratio(float64(s.blind[0]), float64(s.all)), ratio(float64(s.blind[1]), float64(s.one)))
	for i, c := range s.byConfidence {
		fmt.Fprintf(&b, "confidence %s: %d answers, right %.3f\n", []string{"0.50-0.70", "0.70-0.80", "0.80-0.90", "0.90-1.00"}[i], c[0], ratio(float64(c[1]), float64(c[0])))
	}
	fmt.Fprintf(&b, "%-10s", "truth \\ says")
	for _, c := range causes {
		fmt.Fprintf(&b, " %8s", c)
	}
	for _, truth := range causes[:6] {
		fmt.Fprintf(&b, "\n%-12s", truth)
		for _, c := range causes {
			fmt.Fprintf(&b, " %8d", s.matrix[[2]Cause{truth, c}])
		}
	}
	b.WriteString("\n")
	return b.String()
}
