package classifier

import (
	"slices"
	"time"
)

// Replay judges records after the fact as weir would have live: it sorts them
// by their end, cuts windows of the given length, and latches. A last cut
// takes what remains. The zero value is ready.
type Replay struct {
	Length     time.Duration // of a window; 0: 10 s
	Thresholds Thresholds    // the zero value: the defaults
	Latch      Latch         // For and KeepFor of each class's latch

	all     []Observation
	latches map[string]*Latch
}

// Add keeps a copy of the record.
func (p *Replay) Add(o *Observation) { p.all = append(p.all, *o) }

// Len is the number of records kept.
func (p *Replay) Len() int { return len(p.all) }

// Change is a verdict that differs from the one shown before for its class.
type Change struct {
	At      time.Time
	Verdict Verdict
}

// Verdicts returns the verdicts that were shown last, one a class, by name,
// and every change on the way.
func (p *Replay) Verdicts() (last []Verdict, changes []Change) {
	if len(p.all) == 0 {
		return nil, nil
	}
	slices.SortStableFunc(p.all, func(a, b Observation) int { return a.Done.Compare(b.Done) })
	if p.Thresholds == (Thresholds{}) {
		p.Thresholds = DefaultThresholds()
	}
	p.latches = make(map[string]*Latch)
	w := Window{Length: p.Length}
	first := p.all[0].Enqueued
	for i := range p.all {
		if e := p.all[i].Enqueued; e.Before(first) {
			first = e
		}
	}
	at := first.Truncate(w.length()).Add(w.length())
	for i := range p.all {
		o := &p.all[i]
		for gap := 0; !o.Done.Before(at); gap++ {
			last, changes = p.cut(&w, at, changes)
			at = at.Add(w.length())
			if gap >= idleCuts { // nothing changes any more until there is news
				at = o.Done.Truncate(w.length()).Add(w.length())
			}
		}
		w.Add(o)
	}
	return p.cut(&w, at, changes)
}

// idleCuts is how many cuts without news are made before the clock jumps:
// longer than a class is remembered.
const idleCuts = 1000

func (p *Replay) cut(w *Window, at time.Time, changes []Change) ([]Verdict, []Change) {
	var shown []Verdict
	for _, r := range w.Cut(at) {
		l := p.latches[r.Class]
		if l == nil {
			l = &Latch{For: p.Latch.For, KeepFor: p.Latch.KeepFor}
			p.latches[r.Class] = l
		}
		before := l.shown.Cause
		v, changed := l.Update(Classify(r, p.Thresholds), at)
		if changed && !(before == "" && v.Cause == Unknown) {
			changes = append(changes, Change{at, v})
		}
		shown = append(shown, v)
	}
	return shown, changes
}
