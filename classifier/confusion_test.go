package classifier

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
)

const confusionFile = "testdata/confusion.txt"

// TestConfusion classifies every drawn system and holds the counts against
// testdata/confusion.txt: none may get worse. WEIR_UPDATE=1 writes the file
// anew; with -v the counts by rule are printed, of the part that was tuned
// against.
func TestConfusion(t *testing.T) {
	if raceOn {
		t.Skip("one goroutine")
	}
	truths := labels(t)
	var tuned, held score
	byRule := rules{}
	for n := range numDrawn {
		s := drawn(n)
		v := s.judge().shown
		if heldOut(n) {
			held.add(v, truths[n])
			continue
		}
		tuned.add(v, truths[n])
		byRule.add(v, truths[n])
	}
	t.Logf("by rule, of the systems tuned against:\n%s", byRule)
	now := fmt.Sprintf("held out: %s\ntuned against: %s", &held, &tuned)
	if os.Getenv("WEIR_UPDATE") != "" {
		if err := os.WriteFile(confusionFile, []byte(now), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.ReadFile(confusionFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(before) == now {
		return
	}
	t.Logf("now:\n%s", now)
	was := numbers.FindAllString(string(before), 4)
	is := numbers.FindAllString(now, 4)
	for i := range is {
		if i >= len(was) || is[i] < was[i] {
			t.Errorf("a share of the held-out systems fell: %v, before %v", is, was)
			break
		}
	}
	if runtime.GOARCH == "amd64" { // others may round otherwise
		t.Errorf("%s does not show this state: if it is no worse, write it anew with WEIR_UPDATE=1", confusionFile)
	}
}

// numbers finds the shares that the summary begins with.
var numbers = regexp.MustCompile(`\d\.\d{3}`)

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
