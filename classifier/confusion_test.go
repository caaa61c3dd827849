package classifier

import (
	"fmt"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
)

func TestConfusion(t *testing.T) {
	truths := labels(t)
	var dev, held score
	rules := rules{}
	for n := range numDrawn {
		s := drawn(n)
		v := s.judge().shown
		if heldOut(n) {
			held.add(v, truths[n])
			continue
		}
		dev.add(v, truths[n])
		rules.add(v, truths[n])
		if os.Getenv("WEIR_WRONG") != "" && !right(v, truths[n].acceptable) {
			l := s.label()
			t.Logf("%d: truth %v %v; %s\n%+v", n, truths[n].line(n), l.gain, tell(v), s)
		}
	}
	t.Logf("tuned against:\n%s\n%s", &dev, rules)
	if os.Getenv("WEIR_HELD") != "" {
		t.Logf("held out:\n%s", &held)
	}
}

// rules counts for each rule and cause how often it decided, and was right.
type rules map[string]*[3]int

func (r rules) add(v Verdict, t truth) {
	key := v.Rule + " " + string(v.Cause)
	n := r[key]
	if n == nil {
		n = &[3]int{}
		r[key] = n
	}
	n[0]++
	if slices.Contains(t.acceptable, v.Cause) {
		n[1]++
	}
	if v.Confidence <= 0.5 {
		n[2]++
	}
}

func (r rules) String() string {
	var lines []string
	for key, n := range r {
		lines = append(lines, fmt.Sprintf("%-32s decided %3d, right %3d, in doubt %3d", key, n[0], n[1], n[2]))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

// TestCalibrate draws further systems, which are in no other test, and prints
// how often each rule is right of them: the source of the constants in
// confidence.go. WEIR_CALIBRATE is how many; 1000 take some minutes.
func TestCalibrate(t *testing.T) {
	many, _ := strconv.Atoi(os.Getenv("WEIR_CALIBRATE"))
	if many == 0 {
		t.Skip("WEIR_CALIBRATE is not set")
	}
	low, high := rules{}, rules{}
	for n := numDrawn; n < numDrawn+many; n++ {
		s := drawn(n)
		v, truth := s.judge().shown, s.label()
		if v.margin < 0.25 {
			low.add(v, truth)
		} else {
			high.add(v, truth)
		}
	}
	t.Logf("margin below 0.25:\n%s\nand above:\n%s", low, high)
}
