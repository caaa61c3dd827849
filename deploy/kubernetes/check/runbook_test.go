package check

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

const runbookFile = "deploy/prometheus/RUNBOOK.md"

func TestEveryAlertHasItsRunbookSection(t *testing.T) {
	var alerts, sections []string
	for _, g := range rulesOf(t).Groups {
		for _, r := range g.Rules {
			if r.Alert == "" {
				continue
			}
			alerts = append(alerts, r.Alert)
			if want := runbookFile + "#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
				t.Errorf("%s: runbook_url %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
			}
			if r.Annotations["summary"] == "" || r.Annotations["description"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s lacks a summary, a description or a severity", r.Alert)
			}
		}
	}
	for line := range strings.Lines(read(t, runbookFile)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "## Weir"); ok {
			sections = append(sections, "Weir"+name)
		}
	}
	slices.Sort(alerts)
	slices.Sort(sections)
	if !slices.Equal(alerts, sections) {
		t.Errorf("alerts %v\nsections %v", alerts, sections)
	}
}

// A row of the runbook's table of metrics.
type row struct {
	name, unit string
	labels     []string
}

var code = regexp.MustCompile("`([^`]*)`")

// table reads the rows of five cells whose second is a name in code. Labels are
// what stands in code in the fourth; their values stand there plain.
func table(t *testing.T) map[string]row {
	t.Helper()
	rows := make(map[string]row)
	for line := range strings.Lines(read(t, runbookFile)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 5 || !code.MatchString(cells[1]) {
			continue
		}
		r := row{name: strings.Trim(cells[1], "` "), unit: strings.Trim(cells[2], "` ")}
		for _, m := range code.FindAllStringSubmatch(cells[3], -1) {
			r.labels = append(r.labels, m[1])
		}
		rows[strings.Trim(cells[0], "` ")] = r
	}
	return rows
}

func TestTheRunbookListsEveryMetric(t *testing.T) {
	have, rows := metrics(t), table(t)
	attributes := words(t, "tracing")
	for name, m := range have {
		r, ok := rows[name]
		switch {
		case !ok:
			t.Errorf("%s (%s, unit %q) has no row in the table of %s", name, m.name, m.unit, runbookFile)
		case r.name != m.name || r.unit != m.unit:
			t.Errorf("%s: the runbook has %s with unit %q; it is %s with unit %q", name, r.name, r.unit, m.name, m.unit)
		}
	}
	for name, r := range rows {
		if _, ok := have[name]; !ok {
			t.Errorf("the runbook has %s, which tracing/metrics.go does not make", name)
		}
		for _, l := range r.labels {
			if !attributes[l] {
				t.Errorf("%s: the runbook gives it the label %s, which is no attribute in tracing", name, l)
			}
		}
	}
}

// What PromQL has besides names of metrics, as far as the rules use it.
var (
	selector  = regexp.MustCompile(`([a-z_:][a-z0-9_:]*)\{([^}]*)\}`)
	matcher   = regexp.MustCompile(`([a-z_]+)(=|!=|=~|!~)"([^"]*)"`)
	grouping  = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right) ?\(([^)]*)\)`)
	timeRange = regexp.MustCompile(`\[[^\]]*\]`)
	braces    = regexp.MustCompile(`\{[^}]*\}`)
	name      = regexp.MustCompile(`[a-z_:][a-z0-9_:]*`)
)

// vocabulary is what a rule can name.
type vocabulary struct {
	metrics  map[string]metric
	rows     map[string]row
	recorded map[string]bool // by the rules themselves
	labels   map[string]bool // of any metric
	values   map[string]bool // of any label
}

func vocabularyOf(t *testing.T) vocabulary {
	t.Helper()
	v := vocabulary{
		metrics: metrics(t), rows: table(t), values: words(t, "tracing", "classifier", "proxy"),
		recorded: make(map[string]bool), labels: map[string]bool{"job": true},
	}
	for _, r := range v.rows {
		for _, l := range r.labels {
			v.labels[l] = true
		}
	}
	for _, g := range rulesOf(t).Groups {
		for _, r := range g.Rules {
			v.recorded[r.Record] = true
		}
	}
	return v
}

// promtool proves that the rules say what their tests expect. This proves that
// weir tells what the rules ask for: a rule on a metric, a label or a value that
// nothing sets is silent for ever.
func TestTheRulesAskForWhatWeirTells(t *testing.T) {
	v := vocabularyOf(t)
	for _, g := range rulesOf(t).Groups {
		for _, r := range g.Rules {
			t.Run(r.Record+r.Alert, func(t *testing.T) { v.check(t, r.Expr) })
		}
	}
}

func (v vocabulary) check(t *testing.T, expr string) {
	t.Helper()
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		for _, label := range name.FindAllString(m[1], -1) {
			if !v.labels[label] {
				t.Errorf("no metric has the label %s", label)
			}
		}
	}
	for _, s := range selector.FindAllStringSubmatch(expr, -1) {
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			v.checkMatcher(t, s[1], m[1], m[3])
		}
	}
	for _, re := range []*regexp.Regexp{grouping, timeRange, braces} {
		expr = re.ReplaceAllString(expr, "")
	}
	for _, n := range name.FindAllString(expr, -1) {
		// The functions that the rules use have neither in their names.
		if _, ok := v.metrics[v.base(n)]; !ok && !v.recorded[n] && strings.ContainsAny(n, ":_") {
			t.Errorf("nothing makes %s", n)
		}
	}
}

func (v vocabulary) checkMatcher(t *testing.T, of, label, value string) {
	t.Helper()
	switch {
	case label == "le":
		if b := v.metrics[v.base(of)].buckets; !slices.Contains(b, value) {
			t.Errorf("le=%q is none of the buckets of %s: %v", value, of, b)
		}
	case !v.recorded[of] && !slices.Contains(v.rows[v.base(of)].labels, label):
		t.Errorf("%s has no label %s", of, label)
	case !v.labels[label] || !v.values[value]:
		t.Errorf("%s has no %s=%q", of, label, value)
	}
}

// base is the histogram that a name with a suffix belongs to, or the name.
func (v vocabulary) base(name string) string {
	for _, suffix := range []string{"_bucket", "_count", "_sum"} {
		if h, ok := strings.CutSuffix(name, suffix); ok && v.metrics[h].histogram {
			return h
		}
	}
	return name
}
