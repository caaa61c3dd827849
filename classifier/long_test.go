package classifier

import (
	"testing"
	"time"
	"unsafe"
)

func TestWindowsMergeIntoMinutesAndHalfHours(t *testing.T) {
	var w Window
	const until = 50 * time.Minute
	next := time.Duration(0)
	for cut := 10 * time.Second; cut <= until; cut += 10 * time.Second {
		for ; next < cut; next += 200 * time.Millisecond {
			forward := 50
			if next >= 45*time.Minute { // the last five minutes are slower
				forward = 100
			}
			w.Add(request(next, 0, 0, 0, 0, 0, forward, 0, 0))
		}
		w.Cut(start.Add(cut))
		for _, span := range []time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute} {
			r := w.Over(span)[0]
			length := r.End.Sub(r.Start)
			if !r.End.Equal(start.Add(cut)) || length > span+span/5+time.Second || length < min(span, cut)-10*time.Second {
				t.Fatalf("after %v, the report over %v covers %v until %v", cut, span, length, r.End.Sub(start))
			}
			if rate := float64(r.Requests) / length.Seconds(); rate < 4.8 || rate > 5.2 {
				t.Fatalf("after %v, %d requests in %v: want 5 a second", cut, r.Requests, length)
			}
		}
	}
	isNear(t, "the busy share of a minute", w.Over(time.Minute)[0].Busy, 0.5, 0.02)
	isNear(t, "forward of five minutes", w.Over(5 * time.Minute)[0].Means.Forward.Seconds(), 0.1, 0.1)
	half := w.Over(30 * time.Minute)[0]
	isNear(t, "the busy share of half an hour", half.Busy, 0.25+0.25*5/30, 0.05)
	if v := Classify(half, DefaultThresholds()); v.Cause != Healthy {
		t.Errorf("over half an hour: %s", tell(v))
	}
}

// perClass is what a class takes at most: the doc comment of Window states it.
const perClass = 320 << 10

func TestMemoryPerClassIsBounded(t *testing.T) {
	slots := 1 + keptWindows + 2*(1+6)
	size := int(unsafe.Sizeof(class{})) + slots*int(unsafe.Sizeof(slot{}))
	t.Logf("a class takes %d KiB at most: %d slots of %d bytes and %d more", size>>10, slots, unsafe.Sizeof(slot{}), unsafe.Sizeof(class{}))
	if size > perClass {
		t.Errorf("a class takes %d bytes: more than the %d that are promised", size, perClass)
	}
	var w Window
	for i := range 1000 { // half a day in windows: nothing may grow any more
		w.Add(request(time.Duration(i)*10*time.Second, 0, 0, 0, 0, 0, 50, 0, 0))
		w.Cut(start.Add(time.Duration(i+1) * 10 * time.Second))
	}
	if n := testing.AllocsPerRun(200, func() {
		w.Add(request(10000*time.Second, 0, 0, 0, 0, 0, 50, 0, 0))
		w.Cut(start.Add(10010 * time.Second))
	}); n > 40 {
		t.Errorf("a cut makes %v allocations", n)
	}
}

// BenchmarkCutOf100000 adds 100,000 observations and reports what the cut and
// the verdict cost beside them.
func BenchmarkCutOf100000(b *testing.B) {
	s := scenarios()[0]
	all := s.play()
	var cut time.Duration
	n := 0
	for b.Loop() {
		var w Window
		for i := range 100000 {
			w.Add(&all[i%len(all)])
		}
		before := time.Now()
		for _, r := range w.Cut(all[len(all)-1].Done) {
			Classify(r, DefaultThresholds())
		}
		cut += time.Since(before)
		n++
	}
	b.ReportMetric(float64(cut.Microseconds())/float64(n), "µs/cut")
}

func TestACutOf100000IsQuick(t *testing.T) {
	s := scenarios()[0]
	all := s.play()
	var w Window
	for i := range 100000 {
		w.Add(&all[i%len(all)])
	}
	before := time.Now()
	w.Cut(all[len(all)-1].Done)
	if took := time.Since(before); took > 50*time.Millisecond && !raceOn {
		t.Errorf("the cut took %v: want at most 50 ms", took)
	}
}
