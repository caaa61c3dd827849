package classifier

// utteranceSums is what a window adds up of utterances alone.
type utteranceSums struct {
	n, hidden, unpaced, behind, sloped int
}

func (s *slot) addUtterance(o *Observation) {
	u, sums := o.Utterance, &s.utterances
	if u == nil {
		return
	}
	sums.n++
	if u.QueueHidden {
		sums.hidden++
	}
	if u.Unpaced {
		sums.unpaced++
		return // it runs behind by its own fault
	}
	if u.Acks > 2 {
		sums.sloped++
		if u.LagSlope > fallsBehind {
			sums.behind++
		}
	}
}

// fallsBehind is the slope of lag, in seconds a second, from which a server
// counts as slower than real time: a stream of a minute then ends 3 s late.
const fallsBehind = 0.05

func (a *utteranceSums) merge(b *utteranceSums) {
	a.n += b.n
	a.hidden += b.hidden
	a.unpaced += b.unpaced
	a.behind += b.behind
	a.sloped += b.sloped
}

// warn says what a stream does not let weir see, and that the server falls
// behind, which no latency of a single utterance shows.
func (a *utteranceSums) warn(add func(format string, args ...any)) {
	if a.hidden > 0 {
		add("queue: not observable in %d of %d utterances, because their protocol shows neither readiness nor progress; waiting inside the server is part of unattributed", a.hidden, a.n)
	}
	if a.unpaced > 0 {
		add("audio came faster than real time in %d of %d utterances; their first partial and lag compare with nothing", a.unpaced, a.n)
	}
	if a.behind > 0 {
		add("the server fell behind real time in %d of %d utterances whose progress it tells", a.behind, a.sloped)
	}
}
