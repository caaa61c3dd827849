package classifier

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// request is a served request that came at `at` after start; times in ms.
func request(at time.Duration, queue, upload, serverQueue, pre, transfer, forward, post, rest int) *Observation {
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	o := &Observation{Class: "POST /asr", Status: 200, Enqueued: start.Add(at), Inflight: 1, BatchSize: 1, Source: "header"}
	o.Dequeued = o.Enqueued.Add(ms(queue))
	o.Sent = o.Dequeued.Add(ms(upload))
	o.Responded = o.Sent.Add(ms(serverQueue + pre + transfer + forward + post + rest))
	o.Done = o.Responded
	o.Timings = []Timing{
		{Name: "queue", Stage: StageQueue, Dur: ms(serverQueue)}, {Name: "preprocess", Stage: StagePreprocess, Dur: ms(pre)},
		{Name: "h2d", Stage: StageTransfer, Dur: ms(transfer), Bytes: 1000, Count: 2}, {Name: "forward", Stage: StageForward, Dur: ms(forward)},
		{Name: "postprocess", Stage: StagePostprocess, Dur: ms(post)},
	}
	return o
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-6+1e-3*math.Abs(want) {
		t.Errorf("%s is %v: want %v", what, got, want)
	}
}

func cutOne(t *testing.T, w *Window, at time.Duration) Report {
	t.Helper()
	all := w.Cut(start.Add(at))
	if len(all) != 1 {
		t.Fatalf("%d reports: want one", len(all))
	}
	return all[0]
}

func TestSharesAreRatiosOfSums(t *testing.T) {
	var w Window
	for i := range 50 {
		w.Add(request(time.Duration(i)*100*time.Millisecond, 100, 50, 20, 10, 10, 100, 5, 5))
	}
	// One long request weighs as much as the seconds that its user waited.
	w.Add(request(time.Second, 7500, 0, 0, 0, 0, 0, 0, 7500))
	r := cutOne(t, &w, 10*time.Second)
	near(t, "queue", r.Shares.Queue, (50*100.+7500)/(50*300+15000))
	near(t, "upload", r.Shares.Upload, 50*50./30000)
	near(t, "forward", r.Shares.Forward, 50*100./30000)
	near(t, "unattributed", r.Shares.Unattributed, (50*5.+7500)/30000)
	near(t, "the sum", r.Shares.Queue+r.Shares.ServerQueue+r.Shares.Upload+r.Shares.Preprocess+r.Shares.Transfer+r.Shares.Forward+r.Shares.Postprocess+r.Shares.Unattributed, 1)
	near(t, "tail queue", r.TailShares.Queue, (7500+1.55*100)/(15000+1.55*300)) // of 51, 5 % are the long one and 1.55 others
	near(t, "copies", r.Copies, 2)
	if r.Requests != 51 || r.OK != 51 || r.Timed != 51 || r.QueueTold != 51 || r.Windows != 1 {
		t.Errorf("counts are wrong: %+v", r)
	}
	if p := r.P50; p < 286*time.Millisecond || p > 314*time.Millisecond {
		t.Errorf("P50 is %v: want 300ms within 4.5 %%", p)
	}
}

func TestThoseWhoGaveUpWaitingCountWithTheirWait(t *testing.T) {
	var w Window
	for i := range 40 {
		w.Add(request(time.Duration(i)*100*time.Millisecond, 0, 0, 0, 0, 0, 100, 0, 0))
		o := &Observation{Class: "POST /asr", Outcome: Expired, Status: 503, Enqueued: start, Done: start.Add(900 * time.Millisecond)}
		w.Add(o)
	}
	r := cutOne(t, &w, 10*time.Second)
	near(t, "queue", r.Shares.Queue, 0.9)
	if r.Means.Queue != 450*time.Millisecond {
		t.Errorf("the mean wait is %v: want 450ms", r.Means.Queue)
	}
	if r.Expired != 40 || r.OK != 40 || r.Refused != 0 {
		t.Errorf("counts are wrong: %+v", r)
	}
}

func TestTheOrderOfRequestsMakesNoDifference(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var all []*Observation
	for i := range 200 {
		all = append(all, request(time.Duration(i)*45*time.Millisecond, rnd.IntN(50), rnd.IntN(9), rnd.IntN(9), rnd.IntN(9), rnd.IntN(9), 1+rnd.IntN(99), rnd.IntN(9), rnd.IntN(9)))
	}
	report := func() Report {
		w := Window{Length: 10 * time.Second}
		w.Cut(start)
		for _, o := range all {
			w.Add(o)
		}
		return cutOne(t, &w, 10*time.Second)
	}
	first := report()
	rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	second := report()
	// Sums of logarithms round differently.
	first.Forward, second.Forward, first.ThroughputElasticity, second.ThroughputElasticity = Line{}, Line{}, Estimate{}, Estimate{}
	first.TailShares, second.TailShares = Shares{}, Shares{} // float32
	if a, b := fmt.Sprintf("%+v", first), fmt.Sprintf("%+v", second); a != b {
		t.Errorf("reports differ:\n%s\n%s", a, b)
	}
}

func TestFewRequestsMergeWindows(t *testing.T) {
	var w Window
	at := time.Duration(0)
	for n := range 8 {
		for range 10 {
			w.Add(request(at, 0, 0, 0, 0, 0, 50, 0, 0))
			at += time.Second
		}
		r := cutOne(t, &w, at)
		if want := min(n+1, 4); r.Windows != want || r.Requests != 10*want {
			t.Errorf("cut %d: %d windows with %d requests: want %d with %d", n, r.Windows, r.Requests, want, 10*want)
		}
	}
}

func TestClassesAreCappedAndTheRestIsCounted(t *testing.T) {
	w := Window{MaxClasses: 3}
	for i := range 10 {
		o := request(0, 0, 0, 0, 0, 0, 50, 0, 0)
		o.Class = fmt.Sprintf("POST /%d", i)
		w.Add(o)
	}
	all := w.Cut(start.Add(10 * time.Second))
	if len(all) != 4 || all[0].Class != "(other)" || all[0].Requests != 7 || w.Overflowed() != 7 {
		t.Errorf("%d reports, first %q with %d requests, %d overflowed", len(all), all[0].Class, all[0].Requests, w.Overflowed())
	}
}

func TestAClassWithoutRequestsIsForgotten(t *testing.T) {
	var w Window
	w.Add(request(0, 0, 0, 0, 0, 0, 50, 0, 0))
	for at := 10 * time.Second; at < 59*time.Minute; at += 10 * time.Second {
		if len(w.Cut(start.Add(at))) != 1 {
			t.Fatalf("forgotten after %v", at)
		}
	}
	if n := len(w.Cut(start.Add(62 * time.Minute))); n != 0 {
		t.Errorf("still there after 62 minutes")
	}
}

func TestTheSlopeIsFittedToExecutionsWithinLengths(t *testing.T) {
	var w Window
	at := time.Duration(0)
	add := func(batch, forward, bytes int) {
		for range batch { // each member tells the whole batch's time
			o := request(at, 0, 0, 0, 0, 0, forward, 0, 0)
			o.BatchSize, o.BytesIn, o.Inflight = batch, int64(bytes), batch
			w.Add(o)
		}
		at += 20 * time.Millisecond
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 150 {
		// Short clips come in large batches: across lengths, a larger batch looks faster.
		b := 1 + rnd.IntN(4)
		add(b, 200+10*b, 1<<20)
		b = 5 + rnd.IntN(4)
		add(b, 20+10*b, 1<<12)
	}
	r := cutOne(t, &w, 10*time.Second)
	if !r.Forward.OK || r.Forward.N != 300 {
		t.Fatalf("no line: %+v", r.Forward)
	}
	if s := r.Forward.Slope; s < 9900*time.Microsecond || s > 10100*time.Microsecond {
		t.Errorf("the slope is %v: want 10ms", s)
	}
	if e := r.Forward; e.Elasticity < 0.1 || e.Elasticity > 0.6 || e.CI95[0] > e.Elasticity || e.CI95[1] < e.Elasticity {
		t.Errorf("the elasticity is %v (%v)", e.Elasticity, e.CI95)
	}
}

func TestStagesThatCannotBeTrueAreLeftOut(t *testing.T) {
	var w Window
	for i := range 50 {
		o := request(time.Duration(i)*100*time.Millisecond, 0, 0, 0, 0, 0, 100, 0, 0)
		if i < 5 {
			o.Timings[3].Dur = time.Hour
		}
		w.Add(o)
	}
	r := cutOne(t, &w, 10*time.Second)
	if r.Suspect != 5 || r.Timed != 45 || r.Shares.Forward < 0.99 {
		t.Errorf("%d suspect, %d timed, forward's share %v", r.Suspect, r.Timed, r.Shares.Forward)
	}
}

func TestTunnelsAreNoLatency(t *testing.T) {
	var w Window
	o := request(0, 0, 0, 0, 0, 0, 9000, 0, 0)
	o.Upgraded = true
	w.Add(o)
	if r := cutOne(t, &w, 10*time.Second); r.Upgraded != 1 || r.Requests != 0 || r.Mean != 0 {
		t.Errorf("a tunnel counts: %+v", r)
	}
}

// finite fails on a number that is none, anywhere in v.
func finite(t *testing.T, path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Float64:
		if f := v.Float(); math.IsNaN(f) || math.IsInf(f, 0) {
			t.Errorf("%s is %v", path, f)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			finite(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			finite(t, fmt.Sprint(path, i), v.Index(i))
		}
	}
}

func FuzzWindow(f *testing.F) {
	f.Add(int64(0), int64(100), int64(200), int64(300), int64(50), 1, 200, 3.0, uint8(0), int64(1000))
	f.Add(int64(-1)<<62, int64(1)<<62, int64(-5), int64(0), int64(1)<<62, -7, 999, math.Inf(1), uint8(9), int64(-9))
	f.Fuzz(func(t *testing.T, at, dequeued, responded, done, forward int64, batch, status int, audio float64, outcome uint8, bytes int64) {
		var w Window
		for i := range 45 {
			o := &Observation{
				Class: "c", Enqueued: start.Add(time.Duration(at)), Status: status, Outcome: Outcome(outcome), BatchSize: batch + i%3,
				Inflight: batch, Waiting: status, SeqLen: batch, AudioSeconds: audio, BytesIn: bytes, Connect: time.Duration(bytes),
				Timings: []Timing{{Name: "d2h", Stage: StageTransfer, Dur: time.Duration(forward / 2), Bytes: bytes}, {Stage: StageForward, Dur: time.Duration(forward)}, {Stage: Stage(outcome), Dur: time.Duration(at)}},
			}
			o.Dequeued = o.Enqueued.Add(time.Duration(dequeued))
			o.Responded = o.Enqueued.Add(time.Duration(responded))
			o.Done = o.Enqueued.Add(time.Duration(done))
			w.Add(o)
		}
		for _, now := range []time.Duration{time.Second, 10 * time.Second, time.Duration(at)} {
			for _, r := range w.Cut(start.Add(now)) {
				v := Classify(r, DefaultThresholds())
				finite(t, "verdict", reflect.ValueOf(v))
				if v.Confidence < 0 || v.Confidence > 1 {
					t.Errorf("confidence is %v", v.Confidence)
				}
				sum := r.Shares.Queue + r.Shares.ServerQueue + r.Shares.Upload + r.Shares.Preprocess + r.Shares.Transfer + r.Shares.Forward + r.Shares.Postprocess + r.Shares.Unattributed
				if sum != 0 && math.Abs(sum-1) > 1e-6 {
					t.Errorf("the shares add up to %v: %+v", sum, r.Shares)
				}
			}
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	var w Window
	o := request(0, 1, 1, 1, 1, 1, 50, 1, 1)
	w.Add(o)
	b.ReportAllocs()
	for b.Loop() {
		w.Add(o)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	var w Window
	o := request(0, 1, 1, 1, 1, 1, 50, 1, 1)
	w.Add(o)
	if n := testing.AllocsPerRun(100, func() { w.Add(o) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
