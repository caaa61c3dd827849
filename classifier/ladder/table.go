package ladder

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Languages of column names and headings. Numbers, verdicts and JSON keys are
// the same in both.
const (
	English = "en"
	Chinese = "zh"
)

var zh = map[string]string{
	"concurrency": "并发数", "rate": "到达率", "sent": "发送数", "ok": "成功数", "failed": "失败数",
	"mean ms": "平均延迟ms", "P50 ms": "P50延迟ms", "P95 ms": "P95延迟ms", "P99 ms": "P99延迟ms", "max ms": "最大延迟ms",
	"req/s": "吞吐", "audio s/s": "音频秒/秒", "verdict": "结论", "batch": "批大小",
	"client": "客户端ms", "weir queue": "weir排队ms", "upload": "上传ms", "queue": "排队ms", "preprocess": "预处理ms", "pre": "预处理ms", "post": "后处理ms", "rest": "未归因ms",
	"transfer": "传输ms", "forward": "前向ms", "postprocess": "后处理ms", "unattributed": "未归因ms",
	"round": "轮次", "runs": "次数", "stage": "阶段", "median ms": "中位数ms", "95 % interval": "95%区间", "quartiles apart": "四分位距ms", "share": "占比",
	"Knee": "拐点", "Verdict": "结论", "Advice": "建议", "Warning": "警告", "Stages, mean ms of one request": "各阶段平均耗时ms",
	"Latency turns": "延迟转折", "confidence": "置信度", "Largest stage": "最大阶段",
}

func say(lang, text string) string {
	if lang == Chinese {
		if t := zh[text]; t != "" {
			return t
		}
	}
	return text
}

// table is what all formats but JSON print.
type table struct {
	title  string
	head   []string
	rows   [][]string
	narrow []bool // columns that go to a table of their own where 80 columns do not hold all; nil: none
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// number prints four digits at most where that loses nothing of use.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 999.5:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 99.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.05:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case a == 0:
		return "0"
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// p95 marks a 95th percentile that has no upper bound.
func (r *Row) p95() string {
	if r.Succeeded > 0 && r.P95Range[1] == 0 {
		return "≥" + number(r.P95Range[0])
	}
	return number(r.P95)
}

func (r *Row) level() string {
	if r.Rate > 0 {
		return strconv.FormatFloat(r.Rate, 'g', -1, 64) + "/s"
	}
	return strconv.Itoa(r.Concurrency)
}

// stepTable is one row a step.
func (s *Summary) stepTable(lang string) *table {
	t := &table{}
	for _, h := range []string{"concurrency", "sent", "ok", "failed", "mean ms", "P50 ms", "P95 ms", "P99 ms", "max ms", "req/s", "audio s/s"} {
		t.head = append(t.head, say(lang, h))
		t.narrow = append(t.narrow, h == "P50 ms" || h == "P99 ms" || h == "audio s/s")
	}
	if len(s.Steps) > 0 && s.Steps[0].Rate > 0 {
		t.head[0] = say(lang, "rate")
	}
	for i := range s.Steps {
		r := &s.Steps[i]
		t.add(r.level(), strconv.Itoa(r.Sent), strconv.Itoa(r.Succeeded), strconv.Itoa(r.Sent-r.Succeeded),
			number(r.Mean), number(r.P50), r.p95(), number(r.P99), number(r.Max), number(r.Throughput), number(r.Audio))
	}
	return t
}

// worthShowing is the share of latency below which a stage has no column.
const worthShowing = 0.005

// short are the stages' names where a line has 80 columns for all of them.
var short = map[string]string{"weir_queue": "weir queue", "preprocess": "pre", "postprocess": "post", "unattributed": "rest"}

func stageName(lang, key string) string {
	if s := short[key]; s != "" {
		return say(lang, s)
	}
	return say(lang, key)
}

// stagesTable is the time of each stage, a row a step; nil if nothing is told.
func (s *Summary) stagesTable(lang string) *table {
	var used []string
	for _, key := range stageKeys {
		if slices.ContainsFunc(s.Steps, func(r Row) bool { return r.Stages[key] >= worthShowing*r.Mean && r.Timed > 0 }) {
			used = append(used, key)
		}
	}
	if len(used) == 0 {
		return nil
	}
	t := &table{title: say(lang, "Stages, mean ms of one request"), head: []string{say(lang, "concurrency")}}
	if s.Steps[0].Rate > 0 {
		t.head[0] = say(lang, "rate")
	}
	for _, key := range used {
		t.head = append(t.head, stageName(lang, key))
	}
	t.head = append(t.head, say(lang, "batch"), say(lang, "verdict"))
	for i := range s.Steps {
		r := &s.Steps[i]
		cells := []string{r.level()}
		for _, key := range used {
			v := "–"
			if r.Timed > 0 {
				v = number(r.Stages[key])
			}
			cells = append(cells, v)
		}
		verdict, batch := "–", "–"
		if r.Verdict != nil {
			verdict = string(r.Verdict.Cause)
		}
		if r.Batch > 0 {
			batch = number(r.Batch)
		}
		t.add(append(cells, batch, verdict)...)
	}
	return t
}

// sweepTable is one row a value of each round.
func (s *Summary) sweepTable(lang string) *table {
	t := &table{head: []string{say(lang, "round")}}
	var factors []string
	for _, r := range s.Run.Rounds {
		factors = append(factors, r.Factor)
	}
	t.head = append(t.head, factors...)
	for _, h := range []string{"runs", "mean ms", "P95 ms", "max ms", "forward", "transfer", "queue", "req/s"} {
		t.head = append(t.head, say(lang, h))
	}
	t.narrow = make([]bool, len(t.head))
	for _, r := range s.Sweep {
		cells := []string{r.Round}
		for _, f := range factors {
			mark := ""
			if f == r.Round && r.Base {
				mark = "*"
			}
			cells = append(cells, strconv.Itoa(r.Factors[f])+mark)
		}
		t.add(append(cells, strconv.Itoa(r.Repeats), number(r.Mean), number(r.P95), number(r.Max), number(r.Forward), number(r.Transfer), number(r.Queue), number(r.Throughput))...)
	}
	return t
}

// probeTable is the stages of one clip.
func (c ProbeClip) table(lang string) *table {
	t := &table{title: fmt.Sprintf("%s, %s s, %d requests one at a time", c.Clip, number(c.Seconds), c.Repeats)}
	for _, h := range []string{"stage", "median ms", "95 % interval", "quartiles apart", "share"} {
		t.head = append(t.head, say(lang, h))
	}
	row := func(p ProbeStage, share string) {
		t.add(say(lang, strings.ReplaceAll(p.Name, "_", " ")), number(p.Median), number(p.Range[0])+" to "+number(p.Range[1]), number(p.Spread), share)
	}
	for _, p := range c.Stages {
		row(p, strconv.FormatFloat(100*p.Share, 'f', 0, 64)+" %")
	}
	row(c.Total, "")
	return t
}

// tables are all tables of a report, in order.
func (s *Summary) tables(lang string) (all []*table) {
	switch s.Run.Kind {
	case KindProbe:
		for _, c := range s.Stages {
			all = append(all, c.table(lang))
		}
	case KindSweep:
		all = append(all, s.sweepTable(lang))
	default:
		all = append(all, s.stepTable(lang))
		if t := s.stagesTable(lang); t != nil {
			all = append(all, t)
		}
	}
	return all
}

// Text writes the report for a terminal of 80 columns.
func (s *Summary) Text(w io.Writer, lang string) error {
	b := &strings.Builder{}
	for _, t := range s.tables(lang) {
		t.text(b)
		b.WriteByte('\n')
	}
	for _, l := range s.lines(lang) {
		if l[0] == "-" {
			fmt.Fprintf(b, "  - %s\n", wrap(l[1], 76))
			continue
		}
		fmt.Fprintf(b, "%s: %s\n", l[0], wrap(l[1], 78-columns(l[0])))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// lines are what a report says in words, as label and text.
func (s *Summary) lines(lang string) (l [][2]string) {
	add := func(label, text string) { l = append(l, [2]string{say(lang, label), text}) }
	for i := range s.Steps {
		if r := &s.Steps[i]; len(r.Failed) > 0 {
			var kinds []string
			for _, k := range slices.Sorted(maps.Keys(r.Failed)) {
				kinds = append(kinds, fmt.Sprintf("%s %d", k, r.Failed[k]))
			}
			add("failed", r.name()+": "+strings.Join(kinds, ", "))
		}
	}
	for _, c := range s.Stages {
		if c.Largest != "" {
			add("Largest stage", c.Largest+" ("+c.Clip+")")
		}
		if c.Note != "" {
			add("Warning", c.Clip+": "+c.Note)
		}
	}
	if k := s.Knee; k != nil {
		add("Knee", k.String())
		if k.Onset[1] > 0 {
			add("Latency turns", fmt.Sprintf("between concurrency %d and %d (more than %g times that of the lowest step)", k.Onset[0], k.Onset[1], onsetRatio))
		}
		for _, c := range k.Candidates {
			add("- "+c.Method, strings.TrimSpace(number(c.Value)+" "+c.Note))
		}
	}
	if v := s.Verdict; v != nil {
		add("Verdict", fmt.Sprintf("%s (%s %.2f)", strings.ToUpper(string(v.Cause)), say(lang, "confidence"), v.Confidence))
		for _, e := range v.Evidence {
			add("-", e)
		}
		if v.Advice != "" {
			add("Advice", v.Advice)
		}
		for _, e := range v.Warnings {
			add("Warning", e)
		}
	}
	for _, e := range s.Warnings {
		add("Warning", e)
	}
	return l
}

// String says a knee in one sentence.
func (k Knee) String() string {
	if k.Concurrency == 0 {
		return k.Note
	}
	text := fmt.Sprintf("concurrency %d (95 %% interval %d to %d), by %s", k.Concurrency, k.Low, k.High, k.Method)
	if k.Note != "" {
		text += "; " + k.Note
	}
	return text
}

// JSON writes the summary.
func (s *Summary) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(s)
}

// CSV writes the main table with the stages beside it; the column names are
// ASCII unless another language is asked for.
func (s *Summary) CSV(w io.Writer, lang string) error {
	c := csv.NewWriter(w)
	for i, t := range s.csvTables(lang) {
		if i > 0 {
			_ = c.Write(nil)
		}
		_ = c.Write(t.head)
		_ = c.WriteAll(t.rows)
	}
	c.Flush()
	return c.Error()
}

func (s *Summary) csvTables(lang string) []*table {
	all := s.tables(lang)
	if s.Run.Kind == KindProbe || s.Run.Kind == KindSweep || len(all) < 2 {
		return all
	}
	wide := all[0]
	wide.head = append(wide.head, all[1].head[1:]...)
	for i := range wide.rows {
		wide.rows[i] = append(wide.rows[i], all[1].rows[i][1:]...)
	}
	return []*table{wide}
}

// Markdown writes the tables and the words.
func (s *Summary) Markdown(w io.Writer, lang string) error {
	b := &strings.Builder{}
	for _, t := range s.tables(lang) {
		if t.title != "" {
			fmt.Fprintf(b, "%s\n\n", cell(t.title))
		}
		fmt.Fprintf(b, "| %s |\n|%s\n", strings.Join(t.head, " | "), strings.Repeat("---:|", len(t.head)))
		for _, r := range t.rows {
			escaped := make([]string, len(r))
			for i := range r {
				escaped[i] = cell(r[i])
			}
			fmt.Fprintf(b, "| %s |\n", strings.Join(escaped, " | "))
		}
		b.WriteByte('\n')
	}
	for _, l := range s.lines(lang) {
		if l[0] == "-" {
			fmt.Fprintf(b, "  - %s\n", cell(l[1]))
			continue
		}
		fmt.Fprintf(b, "- **%s**: %s\n", strings.TrimPrefix(l[0], "- "), cell(l[1]))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

var markdownEscapes = strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`, "_", `\_`)

func cell(text string) string { return markdownEscapes.Replace(text) }

// text aligns the columns to the right, the first of words to the left.
func (t *table) text(b *strings.Builder) {
	if t.title != "" {
		fmt.Fprintf(b, "%s\n", t.title)
	}
	widths := t.widths()
	total := len(widths) - 1
	for _, w := range widths {
		total += w
	}
	if total > 80 && t.narrow != nil && slices.Contains(t.narrow, true) {
		t.split(false).text(b)
		b.WriteByte('\n')
		t.split(true).text(b)
		return
	}
	for _, r := range append([][]string{t.head}, t.rows...) {
		for i, c := range r {
			pad := strings.Repeat(" ", widths[i]-columns(c))
			if i == 0 {
				b.WriteString(c + pad)
				continue
			}
			b.WriteString(" " + pad + c)
		}
		b.WriteByte('\n')
	}
}

// split keeps the first column and those that are narrow or are not.
func (t *table) split(narrow bool) *table {
	pick := func(r []string) (out []string) {
		for i, c := range r {
			if i == 0 || t.narrow[i] == narrow {
				out = append(out, c)
			}
		}
		return out
	}
	s := &table{head: pick(t.head)}
	for _, r := range t.rows {
		s.add(pick(r)...)
	}
	return s
}

func (t *table) widths() []int {
	w := make([]int, len(t.head))
	for _, r := range append([][]string{t.head}, t.rows...) {
		for i, c := range r {
			w[i] = max(w[i], columns(c))
		}
	}
	return w
}

// columns is the width of a text on a terminal: East Asian wide characters
// take two.
func columns(s string) (n int) {
	for _, r := range s {
		n++
		if r >= 0x1100 && (r <= 0x115f || r >= 0x2e80 && r <= 0xa4cf || r >= 0xac00 && r <= 0xd7a3 || r >= 0xf900 && r <= 0xfaff || r >= 0xfe30 && r <= 0xfe6f || r >= 0xff00 && r <= 0xff60 || r >= 0xffe0 && r <= 0xffe6 || r >= 0x20000 && r <= 0x3fffd) {
			n++
		}
	}
	return n
}

// wrap breaks text into lines, the first of at most width columns; the others
// are indented by four.
func wrap(text string, width int) string {
	var b strings.Builder
	at := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case at+1+columns(word) > width:
			b.WriteString("\n    ")
			at, width = 0, 76
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += columns(word)
	}
	return b.String()
}
