package classifier

import (
	"strings"
	"testing"
	"time"
)

// probedRun plays a scenario with a probe each second, whose latency depends
// on whether two requests or more are in the server.
func probedRun(t *testing.T, name string, rest, loaded time.Duration) Verdict {
	t.Helper()
	for _, s := range scenarios() {
		if s.name != name {
			continue
		}
		var w Window
		var v Verdict
		all, i := s.play(), 0
		for at := 10 * time.Second; at <= s.lasts(); at += 10 * time.Second {
			for ; i < len(all) && all[i].Done.Before(start.Add(at)); i++ {
				w.Add(&all[i])
			}
			for range 10 {
				if at > 30*time.Second {
					w.Probe(loaded, 9)
				} else {
					w.Probe(rest, 0)
				}
			}
			v = Classify(w.Cut(start.Add(at))[0], DefaultThresholds())
		}
		return v
	}
	t.Fatalf("there is no scenario %q", name)
	return Verdict{}
}

func TestTheProbeTellsABlockedFrontEnd(t *testing.T) {
	for _, c := range []struct {
		name         string
		rest, loaded time.Duration
		want         Cause
		says         string
	}{
		{"no timings, a full device", time.Millisecond, 2 * time.Second, Host, "event loop or front end is blocked"},
		{"no timings, a full device", time.Millisecond, 1100 * time.Microsecond, Unknown, "lies behind it"},
		{"decoding is not timed at all", time.Millisecond, time.Second, Host, "blocked"},
		{"linear batching at capacity", time.Millisecond, 2 * time.Millisecond, Compute, ""},
		{"low load", time.Millisecond, time.Second, Healthy, ""},
	} {
		v := probedRun(t, c.name, c.rest, c.loaded)
		if v.Cause != c.want || !strings.Contains(v.text(), c.says) {
			t.Errorf("%s, %v: want %s and %q: %s", c.name, c.loaded, c.want, c.says, tell(v))
		}
	}
}
