package ladder

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
)

// Change is how one quantity of one step differs between two runs.
type Change struct {
	Step     string     `json:"step"`
	Quantity string     `json:"quantity"`
	A        float64    `json:"a"`
	B        float64    `json:"b"`
	Change   float64    `json:"change"` // relative
	CI       [2]float64 `json:"change_ci"`
	Real     bool       `json:"more_than_noise"` // the interval excludes no change
}

// Comparison says what changed between two runs.
type Comparison struct {
	Changes  []Change  `json:"changes"`
	Knees    [2]*Knee  `json:"knees"`
	Verdicts [2]string `json:"verdicts"`
	Level    float64   `json:"confidence_level"` // of each interval, so that together they are right with 95 %
	Warnings []string  `json:"warnings"`
}

// Compare compares the steps that both runs have. The intervals are Welch's,
// over batch means, at a level corrected for their number (Bonferroni).
func Compare(a, b *Summary) *Comparison {
	c := &Comparison{Warnings: []string{}}
	other := map[string]*Row{}
	for i := range b.Steps {
		other[b.Steps[i].name()] = &b.Steps[i]
	}
	var pairs [][2]*Row
	for i := range a.Steps {
		if r := other[a.Steps[i].name()]; r != nil && r.Succeeded > 0 && a.Steps[i].Succeeded > 0 {
			pairs = append(pairs, [2]*Row{&a.Steps[i], r})
		}
	}
	p := 0.05 / float64(max(1, 2*len(pairs)))
	c.Level = 1 - p
	for _, pair := range pairs {
		x, y := pair[0], pair[1]
		c.Changes = append(c.Changes,
			change(x.name(), "mean latency, ms", x.Mean, y.Mean, x.relMean, y.relMean, p),
			change(x.name(), "throughput, req/s", x.Throughput, y.Throughput, x.relRate, y.relRate, p))
	}
	c.Knees = [2]*Knee{a.Knee, b.Knee}
	for i, s := range []*Summary{a, b} {
		if s.Verdict != nil {
			c.Verdicts[i] = string(s.Verdict.Cause)
		}
	}
	c.warn(a, b)
	return c
}

func (c *Comparison) warn(a, b *Summary) {
	add := func(format string, args ...any) { c.Warnings = append(c.Warnings, fmt.Sprintf(format, args...)) }
	if len(c.Changes) == 0 {
		add("the runs have no step in common: nothing can be compared")
	}
	if a.Run.Kind != b.Run.Kind {
		add("the runs are of different kinds: %s and %s", a.Run.Kind, b.Run.Kind)
	}
	if a.Run.Clips != b.Run.Clips || math.Abs(a.Run.Seconds-b.Run.Seconds) > 0.01 {
		add("the runs used different audio: %d clips of %.1f s and %d of %.1f s", a.Run.Clips, a.Run.Seconds, b.Run.Clips, b.Run.Seconds)
	}
	if a.Run.Shape != b.Run.Shape {
		add("the runs sent different requests: %s and %s", a.Run.Shape, b.Run.Shape)
	}
}

// change is the relative change from a to b. Without standard errors nothing
// is more than noise.
func change(step, quantity string, a, b, relA, relB, p float64) Change {
	c := Change{Step: step, Quantity: quantity, A: a, B: b, Change: b/a - 1}
	va, vb := relA*relA, relB*relB
	if math.IsNaN(va + vb) {
		c.CI = [2]float64{-1, math.MaxFloat64}
		return c
	}
	d, half := math.Log(b/a), 0.0
	if va+vb > 0 {
		dof := (va + vb) * (va + vb) / ((va*va + vb*vb) / (blocks - 1))
		half = student(1-p/2, dof) * math.Sqrt(va+vb)
	}
	c.CI = [2]float64{math.Expm1(d - half), math.Expm1(d + half)}
	c.Real = c.CI[0] > 0 || c.CI[1] < 0
	return c
}

// Text writes the comparison for a terminal.
func (c *Comparison) Text(w io.Writer) error {
	t := &table{head: []string{"step", "quantity", "A", "B", "change", "interval", "more than noise"}}
	for _, ch := range c.Changes {
		word, interval := "no", "not known"
		if ch.Real {
			word = "yes"
		}
		if ch.CI[1] < math.MaxFloat64 {
			interval = fmt.Sprintf("%+.0f to %+.0f %%", 100*ch.CI[0], 100*ch.CI[1])
		}
		t.add(strings.TrimPrefix(ch.Step, "concurrency "), ch.Quantity, number(ch.A), number(ch.B), fmt.Sprintf("%+.1f %%", 100*ch.Change), interval, word)
	}
	b := &strings.Builder{}
	t.text(b)
	for i, k := range c.Knees {
		if k != nil {
			fmt.Fprintf(b, "\nKnee of %c: %s", 'A'+i, wrap(k.String(), 68))
		}
	}
	fmt.Fprintf(b, "\nVerdicts: %s and %s\n", orNone(c.Verdicts[0]), orNone(c.Verdicts[1]))
	for _, x := range c.Warnings {
		fmt.Fprintf(b, "Warning: %s\n", wrap(x, 70))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// JSON writes the comparison.
func (c *Comparison) JSON(w io.Writer) error { return json.NewEncoder(w).Encode(c) }
