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

// promtool proves that the rules say what their tests expect. This proves that
// weir tells what the rules ask for: a rule on a metric, a label or a value that
// nothing sets is silent for ever.
func TestTheRulesAskForWhatWeirTells(t *testing.T) {
	rows, have := table(t), metrics(t)
	values := words(t, "tracing", "classifier", "proxy")
	recorded := make(map[string]bool)
	labels := map[string]bool{"job": true}
	for _, r := range rows {
		for _, l := range r.labels {
			labels[l] = true
		}
	}
	for _, g := range rulesOf(t).Groups {
		for _, r := range g.Rules {
			recorded[r.Record] = true
		}
	}
	for _, g := range rulesOf(t).Groups {
		for _, r := range g.Rules {
			in := r.Record + r.Alert
			for _, m := range grouping.FindAllStringSubmatch(r.Expr, -1) {
				for _, l := range name.FindAllString(m[1], -1) {
					if !labels[l] {
						t.Errorf("%s: no metric has the label %s", in, l)
					}
				}
			}
			for _, s := range selector.FindAllStringSubmatch(r.Expr, -1) {
				for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
					switch label, value := m[1], m[3]; {
					case label == "le":
						if b := have[strings.TrimSuffix(s[1], "_bucket")].buckets; !slices.Contains(b, value) {
							t.Errorf("%s: le=%q is none of %s's buckets %v", in, value, s[1], b)
						}
					case !recorded[s[1]] && !slices.Contains(rows[base(s[1], have)].labels, label):
						t.Errorf("%s: %s has no label %s", in, s[1], label)
					case !labels[label] || !values[value]:
						t.Errorf("%s: %s has no %s=%q", in, s[1], label, value)
					}
				}
			}
			bare := r.Expr
			for _, re := range []*regexp.Regexp{grouping, timeRange, braces} {
				bare = re.ReplaceAllString(bare, "")
			}
			for _, n := range name.FindAllString(bare, -1) {
				if _, ok := have[base(n, have)]; !ok && !recorded[n] && strings.ContainsAny(n, ":_") {
					t.Errorf("%s: nothing makes %s", in, n)
				}
			}
		}
	}
}

// base is the histogram that a name with a suffix belongs to, or the name.
func base(name string, have map[string]metric) string {
	for _, suffix := range []string{"_bucket", "_count", "_sum"} {
		if h, ok := strings.CutSuffix(name, suffix); ok && have[h].histogram {
			return h
		}
	}
	return name
}
