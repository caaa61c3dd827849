package classifier

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestZZ(t *testing.T) {
	want := os.Getenv("RULE")
	if want == "" {
		t.Skip()
	}
	truths := labels(t)
	for n := range numDrawn / 2 {
		s := drawn(n)
		v := s.judge().shown
		if want != "*" && !strings.Contains(want, v.Rule) || want == "*" && right(v, truths[n].acceptable) {
			continue
		}
		q := question{Report: v.Report, t: DefaultThresholds()}
		q.prepare()
		r := v.Report
		fmt.Printf("%3d %-9s %-22v %s %.2f | slow %.1f n%d Q %.2f SQ %.2f up %.2f fwd %.2f un %.2f | k %.1f busy %v %.2f par %.1f room %d B %.1f max %d at %.2f lim %d in %.1f inside %.2f eta %.2f%v hid %v cov %.2f fe %.2f[%.2f %.2f] %s\n", n, truths[n].primary, truths[n].acceptable, v.Cause, v.Confidence, r.Slowdown, r.BaselineN, r.Shares.Queue, r.Shares.ServerQueue, r.Shares.Upload, r.Shares.Forward, r.Shares.Unattributed,
			q.periods, q.BusyOK, q.busy, r.Parallel, q.room, r.Batch, r.BatchMax, r.BatchAtMax, r.Limit, r.Inflight, q.inside, r.ThroughputElasticity.Value, r.ThroughputElasticity.OK, q.hidden, r.Coverage(), r.Forward.Elasticity, r.Forward.CI95[0], r.Forward.CI95[1], v.Rule)
	}
}
