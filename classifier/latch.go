package classifier

import "time"

// Latch keeps a verdict from flapping, in Prometheus' words: a new cause must
// hold For before it is shown, and the old one stays KeepFor after it was last
// seen. One latch serves one class; the zero value is ready, and zero
// durations mean the defaults of 20 s and 30 s (negative: none).
//
// Where the raw verdict wavers between several new causes, the one that was
// seen most often since the old one was last seen wins: wavering must not keep
// an old verdict on show that nothing supports any more.
type Latch struct {
	For     time.Duration
	KeepFor time.Duration

	shown Verdict
	seen  time.Time // when the shown cause was last the raw verdict
	rival [numCauses]rival
}

// rival is a cause that was the raw verdict since the shown one last was.
type rival struct {
	times int
	since time.Time // when it first was
}

// Update takes the raw verdict of this moment and returns the one to show.
// While another cause is on its way in, the old verdict is shown with its own
// report and evidence. The first verdict other than unknown shows at once.
// changed tells that the shown cause is another than before.
func (l *Latch) Update(v Verdict, now time.Time) (shown Verdict, changed bool) {
	if v.Cause == l.shown.Cause {
		v.Since = l.shown.Since
		l.show(v, now)
		return l.shown, false
	}
	r := &l.rival[v.Cause.index()]
	if r.times++; r.times == 1 {
		r.since = now
	}
	if !l.due(v.Cause, now) {
		return l.shown, false
	}
	v.Since = now
	l.show(v, now)
	return l.shown, true
}

func (l *Latch) show(v Verdict, now time.Time) {
	l.shown, l.seen, l.rival = v, now, [numCauses]rival{}
}

// due tells whether c may replace what is shown: it does not share its place
// with a rival that was seen more often, and it has held long enough. Unknown
// is no news: it waits for the old verdict to run out only, and gives way at
// once.
func (l *Latch) due(c Cause, now time.Time) bool {
	old := l.shown.Cause
	if old == "" || old == Unknown {
		return true
	}
	mine := l.rival[c.index()]
	for _, r := range l.rival {
		if r.times > mine.times {
			return false
		}
	}
	kept := now.Sub(l.seen) >= span(l.KeepFor, 30*time.Second)
	return kept && (c == Unknown || now.Sub(mine.since) >= span(l.For, 20*time.Second))
}

func span(d, standard time.Duration) time.Duration {
	if d == 0 {
		return standard
	}
	return max(0, d)
}
