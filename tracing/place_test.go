package tracing

import (
	"encoding/binary"
	"math"
	"testing"
	"time"
)

func TestStagesArePlacedAgainstTheEndOfTheirWindow(t *testing.T) {
	const us = int64(1000)
	for _, c := range []struct {
		name       string
		start, end int64 // µs
		durs       []time.Duration
		want       [][2]int64 // µs
		scaled     bool
	}{
		{"nothing told", 100, 200, nil, nil, false},
		{"one stage", 100, 200, []time.Duration{30 * time.Microsecond}, [][2]int64{{170, 200}}, false},
		{"neighbours are 1 µs apart, taken from the earlier one", 100, 200,
			[]time.Duration{30 * time.Microsecond, 20 * time.Microsecond, 10 * time.Microsecond},
			[][2]int64{{140, 169}, {170, 189}, {190, 200}}, false},
		{"a window that is just full", 100, 200,
			[]time.Duration{60 * time.Microsecond, 40 * time.Microsecond}, [][2]int64{{100, 159}, {160, 200}}, false},
		{"under 2 µs is not drawn", 100, 200,
			[]time.Duration{1999, 20 * time.Microsecond, 0}, [][2]int64{{180, 180}, {180, 200}, {200, 200}}, false},
		{"2 µs is drawn", 100, 200,
			[]time.Duration{2 * time.Microsecond, 2 * time.Microsecond}, [][2]int64{{196, 197}, {198, 200}}, false},
		{"fractions of 1 µs are cut off", 100, 200, []time.Duration{10999}, [][2]int64{{190, 200}}, false},
		{"too long is drawn to scale", 100, 200,
			[]time.Duration{300 * time.Microsecond, 100 * time.Microsecond}, [][2]int64{{100, 174}, {175, 200}}, true},
		{"what scaling makes too short is not drawn", 100, 200,
			[]time.Duration{time.Second, 3 * time.Microsecond}, [][2]int64{{100, 198}, {199, 199}}, true},
		{"no window", 100, 100, []time.Duration{time.Second}, [][2]int64{{100, 100}}, true},
		{"a window of 1 µs", 100, 101, []time.Duration{time.Second}, [][2]int64{{100, 100}}, true},
		{"a window upside down", 200, 100, []time.Duration{time.Second}, [][2]int64{{100, 100}}, true},
		{"less than nothing", 100, 200, []time.Duration{-time.Second, 10 * time.Microsecond}, [][2]int64{{190, 190}, {190, 200}}, false},
	} {
		slots := slotsOf(c.durs...)
		if scaled := place(c.start*us, c.end*us, slots); scaled != c.scaled {
			t.Errorf("%s: scaled is %v, want %v", c.name, scaled, c.scaled)
		}
		for i, s := range slots {
			if got := [2]int64{s.start / us, s.end / us}; got != c.want[i] {
				t.Errorf("%s: stage %d is at %v µs, want %v", c.name, i, got, c.want[i])
			}
		}
	}
}

func TestAWindowBetweenMicrosecondsIsCutInwards(t *testing.T) {
	slots := slotsOf(time.Second)
	place(1500, 9900, slots)
	if slots[0].start != 2000 || slots[0].end != 9000 {
		t.Errorf("the stage is at %d to %d ns, want 2000 to 9000", slots[0].start, slots[0].end)
	}
}

func slotsOf(durs ...time.Duration) []slot {
	slots := make([]slot, len(durs))
	for i, d := range durs {
		slots[i].dur = d
	}
	return slots
}

func FuzzPlace(f *testing.F) {
	seed := func(durs ...int64) (b []byte) {
		for _, d := range durs {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		return b
	}
	f.Add(int64(1_700_000_000_123_456_789), int64(400_000_000), seed(20e6, 5e6, 200e6, 1e6))
	f.Add(int64(1_700_000_000_000_000_000), int64(1_000_000), seed(20e6, 5e6, 200e6, 1e6))
	f.Add(int64(0), int64(0), seed(1, 2, 3))
	f.Add(int64(999), int64(2001), seed(math.MaxInt64, math.MaxInt64, math.MinInt64))
	f.Add(int64(5), int64(1<<60), seed(math.MaxInt64, math.MaxInt64, 1999, 2000))
	f.Fuzz(func(t *testing.T, start, window int64, raw []byte) {
		if start < 0 || window < 0 || start > math.MaxInt64-window {
			t.Skip()
		}
		var slots []slot
		for ; len(raw) >= 8 && len(slots) < maxTimings; raw = raw[8:] {
			slots = append(slots, slot{dur: time.Duration(binary.LittleEndian.Uint64(raw))})
		}
		scaled := place(start, start+window, slots)
		checkPlaced(t, start, start+window, slots, scaled)
	})
}

// checkPlaced holds all that is promised of placed stages.
func checkPlaced(t *testing.T, start, end int64, slots []slot, scaled bool) {
	t.Helper()
	last := int64(math.MinInt64)
	var sum, drawn int64
	for i, s := range slots {
		us := min(max(0, s.dur.Microseconds()), maxPlaced)
		if us < 2 {
			us = 0
		}
		sum += us
		if !s.drawn() {
			if s.start != s.end {
				t.Errorf("stage %d ends before it begins: %+v", i, s)
			}
			continue
		}
		drawn += s.end - s.start
		if s.start < start || s.end > end {
			t.Errorf("stage %d is outside of [%d %d]: %+v", i, start, end, s)
		}
		if s.start%microsecond != 0 || s.end%microsecond != 0 {
			t.Errorf("stage %d is not on whole µs: %+v", i, s)
		}
		if last != math.MinInt64 && s.start < last+microsecond {
			t.Errorf("stage %d touches the one before, which ends at %d: %+v", i, last, s)
		}
		if long := (s.end - s.start) / microsecond; !scaled && long != us && long != us-1 || long > us {
			t.Errorf("stage %d of %v is %d µs long", i, s.dur, long)
		}
		if us == 0 {
			t.Errorf("stage %d of %v is drawn", i, s.dur)
		}
		last = s.end
	}
	window := max(0, end/microsecond-(start+microsecond-1)/microsecond)
	if scaled != (sum > window) {
		t.Errorf("scaled is %v for %d µs in %d", scaled, sum, window)
	}
	if drawn > window*microsecond {
		t.Errorf("%d ns are drawn in a window of %d µs", drawn, window)
	}
	if !scaled && sum > 0 && last != end/microsecond*microsecond {
		t.Errorf("the last stage ends at %d, want at the end of the window, %d", last, end)
	}
}

func TestPlacingCostsNoAllocation(t *testing.T) {
	slots := slotsOf(20*time.Millisecond, 5*time.Millisecond, 200*time.Millisecond)
	if n := testing.AllocsPerRun(100, func() { place(1e18, 1e18+4e8, slots) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
