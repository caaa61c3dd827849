package classifier

import (
	"sort"
	"time"
)

// long holds windows merged into minutes, and minutes into fives: what
// [Window.Over] reads. Slots are allocated as time goes by.
type long struct {
	minute, five   *slot    // open: they grow
	minutes, fives [6]*slot // closed, newest first; five minutes are read, and half an hour
}

// add takes a window that was just closed.
func (l *long) add(s *slot) {
	grow(&l.minute, s)
	if l.minute.end.Sub(l.minute.start) < time.Minute {
		return
	}
	grow(&l.five, l.minute)
	l.minute = push(&l.minutes, l.minute)
	if l.five.end.Sub(l.five.start) >= 5*time.Minute {
		l.five = push(&l.fives, l.five)
	}
}

// grow adds s, which came after what *to holds.
func grow(to **slot, s *slot) {
	if *to == nil {
		*to = new(slot)
	}
	t, first := *to, (*to).start
	t.merge(s)
	if t.end = s.end; !first.IsZero() {
		t.start = first
	}
}

// push puts s in front and returns the one that falls out, emptied; nil if
// there was none.
func push(ring *[6]*slot, s *slot) *slot {
	last := ring[len(ring)-1]
	copy(ring[1:], ring[:])
	ring[0] = s
	if last != nil {
		*last = slot{}
	}
	return last
}

// Over returns a report for each class over the last minute, five minutes or
// half an hour, as far as the class has lived. Windows are merged, never cut:
// a report covers up to a fifth more than was asked for, and Start tells. Call
// it after [Window.Cut].
func (w *Window) Over(span time.Duration) []Report {
	names := make([]string, 0, len(w.classes))
	for name := range w.classes {
		names = append(names, name)
	}
	sort.Strings(names)
	reports := make([]Report, 0, len(names))
	for _, name := range names {
		c := w.classes[name]
		m, n := &w.scratch, 0
		*m = slot{}
		c.over(span, func(s *slot) { m.merge(s); n++ })
		if n == 0 {
			continue
		}
		r := m.report(c, n)
		m.passed.report(&r)
		c.finish(&r, m)
		reports = append(reports, r)
	}
	return reports
}

// over calls f with slots that follow each other without a gap, the newest
// first, until they cover the span.
func (c *class) over(span time.Duration, f func(*slot)) {
	if span <= time.Minute {
		until(c.closed[:], span, f)
		return
	}
	if c.long.minute != nil && !c.long.minute.end.IsZero() {
		f(c.long.minute)
	}
	if span <= 5*time.Minute {
		until(c.long.minutes[:5], span, f)
		return
	}
	if c.long.five != nil && !c.long.five.end.IsZero() {
		f(c.long.five)
	}
	until(c.long.fives[:], span, f)
}

func until(slots []*slot, span time.Duration, f func(*slot)) {
	for _, s := range slots {
		if s == nil || span <= 0 {
			return
		}
		f(s)
		span -= s.end.Sub(s.start)
	}
}
