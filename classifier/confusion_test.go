package classifier

import (
	"os"
	"testing"
)

func TestConfusion(t *testing.T) {
	truths := labels(t)
	var dev, held score
	for n := range numDrawn {
		s := drawn(n)
		v := s.judge().shown
		if heldOut(n) {
			held.add(v, truths[n])
			continue
		}
		dev.add(v, truths[n])
		if os.Getenv("WEIR_WRONG") != "" && len(answers(v)) >= 0 && !right(v, truths[n].acceptable) {
			t.Logf("%d: truth %v; %s\n%+v", n, truths[n].line(n), tell(v), s)
		}
	}
	t.Logf("tuned against:\n%s\nheld out:\n%s", &dev, &held)
}
