package tracing

import (
	"math/bits"
	"time"
)

// microsecond is the resolution of placed spans, in ns: that of Jaeger. All
// instants are whole microseconds, and siblings are one apart: siblings that
// touch vanish from Jaeger's critical path.
const microsecond = int64(time.Microsecond)

// maxPlaced bounds one duration in µs (31 years), so that sums cannot overflow.
const maxPlaced = int64(1e15)

// slot is where one stage is drawn. Instants are in ns since 1970.
type slot struct {
	dur        time.Duration // in: as reported
	start, end int64         // out; equal if the stage is too short to be drawn
}

func (s *slot) drawn() bool { return s.end > s.start }

// place draws stages of which only the durations are known: one after another
// in the order given, against the end of the window, since what a server does
// not report comes mostly before its first stage. Stages under 2 µs are not
// drawn. If the stages are longer than the window they are drawn to scale.
//
// All slots lie in the window, in order, with 1 µs between them, which is
// taken from the earlier one.
func place(start, end int64, slots []slot) (scaled bool) {
	first, last := (start+microsecond-1)/microsecond, end/microsecond
	window := max(0, last-first)
	var sum int64
	for i := range slots {
		sum += slots[i].micros()
	}
	scaled = sum > window
	at := max(first, last-sum)
	if last < first {
		at = last
	}
	from, done := at, int64(0)
	for i := range slots {
		done += slots[i].micros()
		to := at + done
		if scaled {
			to = at + scale(done, window, sum)
		}
		slots[i].put(from, to, to < at+min(sum, window))
		from = to
	}
	return scaled
}

// micros is how long the slot wants to be.
func (s *slot) micros() int64 {
	us := min(s.dur.Microseconds(), maxPlaced)
	if us < 2 {
		return 0
	}
	return us
}

// put places the slot between two instants in µs; with gap it gives up its
// last µs.
func (s *slot) put(from, to int64, gap bool) {
	s.start, s.end = from*microsecond, from*microsecond
	if to-from < 2 {
		return
	}
	if gap {
		to--
	}
	s.end = to * microsecond
}

// scale is part*window/sum, part being at most sum.
func scale(part, window, sum int64) int64 {
	if sum <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(part), uint64(window))
	q, _ := bits.Div64(hi, lo, uint64(sum))
	return int64(q)
}
