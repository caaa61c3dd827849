package classifier

import "time"

// Latch keeps a verdict from flapping, in Prometheus' words: a new cause must
// hold For before it is shown, and the old one stays KeepFor after it was last
// seen. One latch serves one class; the zero value is ready, and zero
// durations mean the defaults of 20 s and 30 s (negative: none).
type Latch struct {
	For     time.Duration
	KeepFor time.Duration

	shown     Verdict
	seen      time.Time // when the shown cause was last the raw verdict
	candidate Cause
	since     time.Time // when the candidate began
}

// Update takes the raw verdict of this moment and returns the one to show.
// While another cause is on its way in, the old verdict is shown with its own
// report and evidence. The first verdict other than unknown shows at once.
// changed tells that the shown cause is another than before.
func (l *Latch) Update(v Verdict, now time.Time) (shown Verdict, changed bool) {
	if v.Cause == l.shown.Cause {
		l.hold(v, now)
		return l.shown, false
	}
	if v.Cause != l.candidate {
		l.candidate, l.since = v.Cause, now
	}
	if !l.due(now) {
		return l.shown, false
	}
	v.Since = now
	l.shown, l.seen, l.candidate = v, now, ""
	return l.shown, true
}

func (l *Latch) hold(v Verdict, now time.Time) {
	v.Since = l.shown.Since
	l.shown, l.seen, l.candidate = v, now, ""
}

// due tells whether the candidate may replace what is shown. Unknown is no
// news: it waits for the old verdict to run out only, and gives way at once.
func (l *Latch) due(now time.Time) bool {
	old := l.shown.Cause
	if old == "" || old == Unknown {
		return true
	}
	kept := now.Sub(l.seen) >= span(l.KeepFor, 30*time.Second)
	if l.candidate == Unknown {
		return kept
	}
	return kept && now.Sub(l.since) >= span(l.For, 20*time.Second)
}

func span(d, standard time.Duration) time.Duration {
	if d == 0 {
		return standard
	}
	return max(0, d)
}
