package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"weir/classifier"
)

const verdictUsage = `weir verdict [ADDRESS] shows what a running weir says now.

ADDRESS is that of weir's page, 127.0.0.1:9464 or WEIR_ADMIN if not given.

Exit codes: 0 a verdict was shown, whatever it is; 1 weir could not be asked;
2 wrong flags; 3 with --fail-on, a class has one of the causes named.
`

const topUsage = `weir top [ADDRESS] shows what a running weir says, and goes on showing it.

ADDRESS is that of weir's page, 127.0.0.1:9464 or WEIR_ADMIN if not given.
Where standard output is no terminal, or TERM is dumb, each class is a line at
each interval. NO_COLOR takes the colours away.

Exit codes: 0 it ended by Ctrl-C or --count; 1 weir could not be asked at the
start; 2 wrong flags.
`

type viewFlags struct {
	base     string // http://host:port
	json     bool
	failOn   string
	window   string
	interval time.Duration
	count    int
}

func parseView(name, usage string, args []string, getenv func(string) string, stdout, stderr io.Writer) (v viewFlags, code int, stop bool) {
	f := flag.NewFlagSet("weir "+name, flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stdout, usage+"\nFlags:\n")
		f.SetOutput(stdout)
		f.PrintDefaults()
	}
	if name == "verdict" {
		f.BoolVar(&v.json, "json", false, "print the answer of /api/verdict as it is")
		f.StringVar(&v.window, "window", "", "over the last 1m, 5m or 30m, not the latest windows")
		f.StringVar(&v.failOn, "fail-on", "", "causes, separated by commas, that make the exit code 3")
	} else {
		f.DurationVar(&v.interval, "interval", 2*time.Second, "time between two looks")
		f.IntVar(&v.count, "count", 0, "looks until it ends; 0: until Ctrl-C")
	}
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return v, exitOK, true
		}
		return v, exitUsage, true
	}
	address := f.Arg(0)
	switch {
	case f.NArg() > 1:
		fmt.Fprintf(stderr, "weir: %s takes one address\n", name)
		return v, exitUsage, true
	case name == "top" && (v.interval < 100*time.Millisecond || v.count < 0):
		fmt.Fprintf(stderr, "weir: --interval is %v and --count %d: at least 100ms and 0\n", v.interval, v.count)
		return v, exitUsage, true
	case address == "":
		address = getenv("WEIR_ADMIN")
	}
	if address == "" {
		address = "127.0.0.1:9464"
	}
	for _, cause := range strings.FieldsFunc(v.failOn, isComma) {
		if !classifier.IsCause(cause) {
			fmt.Fprintf(stderr, "weir: --fail-on names %q, which is no cause\n", cause)
			return v, exitUsage, true
		}
	}
	v.base = strings.TrimRight(address, "/")
	if !strings.Contains(address, "://") {
		if strings.HasPrefix(address, ":") {
			v.base = "127.0.0.1" + v.base
		}
		v.base = "http://" + v.base
	}
	return v, exitOK, false
}

// classView is a class as it is shown; the names are those of /api/verdict.
type classView struct {
	Class      string             `json:"class"`
	Cause      string             `json:"cause"`
	Confidence float64            `json:"confidence"`
	Since      time.Time          `json:"since"`
	Requests   int                `json:"requests"`
	Mean       float64            `json:"mean_ms"`
	P50        float64            `json:"p50_ms"`
	P95        float64            `json:"p95_ms"`
	Throughput float64            `json:"throughput"`
	Shares     map[string]float64 `json:"shares"`
	Tail       map[string]float64 `json:"tail_shares"`
	Warnings   []string           `json:"warnings"`
	Evidence   []string           `json:"evidence"`
	Advice     string             `json:"advice"`
}

type stateView struct {
	Classes        []classView `json:"classes"`
	Waiting        int         `json:"waiting"`
	Inflight       int         `json:"inflight"`
	MaxConcurrency int         `json:"max_concurrency"`
	Dropped        int64       `json:"dropped"`
	Server         string      `json:"server"`
	Version        string      `json:"version"`
}

// stageNames are the lines of the bars, in the order of a request's life.
var stageNames = []string{"upload", "queue", "server_queue", "preprocess", "transfer", "forward", "postprocess", "unattributed"}

func sharesOf(s classifier.Shares) map[string]float64 {
	return map[string]float64{"upload": s.Upload, "queue": s.Queue, "server_queue": s.ServerQueue, "preprocess": s.Preprocess,
		"transfer": s.Transfer, "forward": s.Forward, "postprocess": s.Postprocess, "unattributed": s.Unattributed}
}

func classOf(v classifier.Verdict) classView {
	r := v.Report
	return classView{Class: v.Class, Cause: string(v.Cause), Confidence: v.Confidence, Since: v.Since, Requests: r.Requests,
		Mean: ms(r.Mean), P50: ms(r.P50), P95: ms(r.P95), Throughput: r.Throughput,
		Shares: sharesOf(r.Shares), Tail: sharesOf(r.TailShares), Warnings: v.Warnings, Evidence: v.Evidence, Advice: v.Advice}
}

func showVerdict(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	f, code, stop := parseView("verdict", verdictUsage, args, getenv, stdout, stderr)
	if stop {
		return code
	}
	address := f.base + "/api/verdict"
	if f.window != "" {
		address += "?window=" + url.QueryEscape(f.window)
	}
	body, err := fetch(ctx, address)
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	var s stateView
	if err := json.Unmarshal(body, &s); err != nil {
		fmt.Fprintf(stderr, "weir: %s is not weir's page: %v\n", f.base, err)
		return exitError
	}
	if f.json {
		_, err = stdout.Write(append(body, '\n'))
	} else {
		_, err = io.WriteString(stdout, screen(&s, styleFor(stdout, getenv)))
	}
	if err != nil {
		return exitError
	}
	for _, cause := range strings.FieldsFunc(f.failOn, isComma) {
		if slices.ContainsFunc(s.Classes, func(c classView) bool { return c.Cause == cause }) {
			return exitFound
		}
	}
	return exitOK
}

// fetchTimeout is how long a running weir may take to answer.
const fetchTimeout = 5 * time.Second

func fetch(ctx context.Context, address string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 64<<20))
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s: %.200s", address, answer.Status, strings.TrimSpace(string(body)))
	}
	return body, err
}

// style is how text is set off; the zero value is plain.
type style struct{ colour, terminal bool }

var plainStyle = style{}

func styleFor(w io.Writer, getenv func(string) string) style {
	f, ok := w.(*os.File)
	if !ok || getenv("TERM") == "dumb" {
		return style{}
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return style{}
	}
	return style{terminal: true, colour: getenv("NO_COLOR") == ""}
}

var causeColours = map[string]string{"healthy": "32", "unknown": "90", "mixed": "35", "queue": "33", "compute": "31", "transfer": "36", "host": "34", "client": "37"}

func (s style) cause(name string) string {
	if !s.colour {
		return name
	}
	return "\x1b[1;" + causeColours[name] + "m" + name + "\x1b[0m"
}

func (s style) bold(text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[1m" + text + "\x1b[0m"
}

func screen(s *stateView, st style) string {
	var b strings.Builder
	limit := "no limit"
	if s.MaxConcurrency > 0 {
		limit = fmt.Sprintf("max_concurrency %d", s.MaxConcurrency)
	}
	fmt.Fprintf(&b, "weir %s before %s: %d waiting, %d in the server, %s\n", s.Version, s.Server, s.Waiting, s.Inflight, limit)
	if s.Dropped > 0 {
		fmt.Fprintf(&b, "%d records were dropped: the verdict rests on the others\n", s.Dropped)
	}
	if len(s.Classes) == 0 {
		b.WriteString("\nno request has come yet\n")
	}
	for _, c := range s.Classes {
		b.WriteString("\n")
		writeVerdict(&b, c, st)
	}
	return b.String()
}

// writeVerdict writes one class: the verdict, where the time went, and why.
func writeVerdict(b *strings.Builder, c classView, st style) {
	fmt.Fprintf(b, "%s  %s  confidence %.2f", st.bold(clean(c.Class)), st.cause(c.Cause), c.Confidence)
	if !c.Since.IsZero() {
		fmt.Fprintf(b, "  since %s", c.Since.Local().Format("15:04:05"))
	}
	fmt.Fprintf(b, "\n  %d requests, %.2f/s, mean %s, P50 %s, P95 %s\n", c.Requests, c.Throughput, duration(c.Mean), duration(c.P50), duration(c.P95))
	for _, name := range stageNames {
		if c.Shares[name] >= 0.005 || c.Tail[name] >= 0.005 {
			fmt.Fprintf(b, "  %-13s %s %3.0f %%  slowest 5 %%: %3.0f %%\n", name, bar(c.Shares[name], 24), 100*c.Shares[name], 100*c.Tail[name])
		}
	}
	for _, e := range c.Evidence {
		fmt.Fprintf(b, "  because  %s\n", clean(e))
	}
	for _, w := range c.Warnings {
		fmt.Fprintf(b, "  but      %s\n", clean(w))
	}
	if c.Advice != "" {
		fmt.Fprintf(b, "  so       %s\n", clean(c.Advice))
	}
}

// clean keeps what a client named from steering the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// bar is a share drawn with eighths of a cell.
func bar(share float64, width int) string {
	eighths := int(min(max(share, 0), 1)*float64(width)*8 + 0.5)
	text := strings.Repeat("█", eighths/8)
	n := eighths / 8
	if rest := eighths % 8; rest > 0 {
		text += string([]rune("▏▎▍▌▋▊▉")[rest-1])
		n++
	}
	return text + strings.Repeat("·", width-n)
}

// sparkline draws values from zero to their largest.
func sparkline(values []float64) string {
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	marks := []rune("▁▂▃▄▅▆▇█")
	var b strings.Builder
	for _, v := range values {
		i := 0
		if most > 0 {
			i = min(int(max(v, 0)/most*float64(len(marks))), len(marks)-1)
		}
		b.WriteRune(marks[i])
	}
	return b.String()
}

func duration(ms float64) string {
	switch {
	case ms >= 10e3:
		return fmt.Sprintf("%.1f s", ms/1e3)
	case ms >= 1e3:
		return fmt.Sprintf("%.2f s", ms/1e3)
	case ms >= 10:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}

func top(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	f, code, stop := parseView("top", topUsage, args, getenv, stdout, stderr)
	if stop {
		return code
	}
	st := styleFor(stdout, getenv)
	if st.terminal {
		fmt.Fprint(stdout, "\x1b[?25l") // no cursor
		defer fmt.Fprint(stdout, "\x1b[?25h\n")
	}
	tick := time.NewTicker(f.interval)
	defer tick.Stop()
	for n := 1; ; n++ {
		text, err := look(ctx, f.base, st)
		switch {
		case ctx.Err() != nil:
			return exitOK
		case err != nil && n == 1:
			fmt.Fprintf(stderr, "weir: %v\n", err)
			return exitError
		case err != nil:
			text = fmt.Sprintf("weir does not answer: %v\n", err)
		}
		if st.terminal {
			text = "\x1b[H" + strings.ReplaceAll(text, "\n", "\x1b[K\n") + "\x1b[J"
		}
		if _, err := io.WriteString(stdout, text); err != nil {
			return exitError
		}
		if n == f.count {
			return exitOK
		}
		select {
		case <-ctx.Done():
			return exitOK
		case <-tick.C:
		}
	}
}

// sparkPoints is how many windows the sparklines show.
const sparkPoints = 40

// look is one picture, or, where there is no terminal, one line a class.
func look(ctx context.Context, base string, st style) (string, error) {
	body, err := fetch(ctx, base+"/api/verdict")
	if err != nil {
		return "", err
	}
	var s stateView
	if err := json.Unmarshal(body, &s); err != nil {
		return "", fmt.Errorf("%s is not weir's page: %w", base, err)
	}
	if !st.terminal {
		return plainLines(&s), nil
	}
	text := screen(&s, st)
	stages, err := stagePercentiles(ctx, base)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(text)
	for _, c := range s.Classes {
		if err := writeHistory(ctx, &b, base, c.Class, stages[c.Class]); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

func plainLines(s *stateView) string {
	now := time.Now().Format("15:04:05")
	var b strings.Builder
	if len(s.Classes) == 0 {
		fmt.Fprintf(&b, "%s no request has come yet\n", now)
	}
	for _, c := range s.Classes {
		fmt.Fprintf(&b, "%s %s %s %.2f requests=%d rate=%.2f/s mean=%.0fms p95=%.0fms queue=%.0f%% forward=%.0f%% waiting=%d inflight=%d\n",
			now, strings.ReplaceAll(clean(c.Class), " ", "_"), c.Cause, c.Confidence, c.Requests, c.Throughput, c.Mean, c.P95,
			100*(c.Shares["queue"]+c.Shares["server_queue"]), 100*c.Shares["forward"], s.Waiting, s.Inflight)
	}
	return b.String()
}

// stagePercentiles takes the latest records and sorts each stage's times, by
// class and stage.
func stagePercentiles(ctx context.Context, base string) (map[string]map[string][]float64, error) {
	body, err := fetch(ctx, base+"/api/requests?n=1000")
	if err != nil {
		return nil, err
	}
	all := make(map[string]map[string][]float64)
	for _, line := range strings.Split(strings.TrimSpace(string(body)), "\n") {
		var r struct {
			Class  string             `json:"class"`
			Ledger map[string]float64 `json:"ledger"`
		}
		if json.Unmarshal([]byte(line), &r) != nil {
			continue
		}
		if all[r.Class] == nil {
			all[r.Class] = make(map[string][]float64)
		}
		for name, ms := range r.Ledger {
			all[r.Class][name] = append(all[r.Class][name], ms)
		}
	}
	for _, stages := range all {
		for _, v := range stages {
			slices.Sort(v)
		}
	}
	return all, nil
}

func writeHistory(ctx context.Context, b *strings.Builder, base, class string, stages map[string][]float64) error {
	body, err := fetch(ctx, base+"/api/history?class="+url.QueryEscape(class))
	if err != nil {
		return err
	}
	var h struct {
		Points []struct {
			P95        float64 `json:"p95_ms"`
			Throughput float64 `json:"throughput"`
		} `json:"points"`
	}
	if err := json.Unmarshal(body, &h); err != nil {
		return err
	}
	var p95, rate []float64
	for _, p := range h.Points[max(0, len(h.Points)-sparkPoints):] {
		p95, rate = append(p95, p.P95), append(rate, p.Throughput)
	}
	fmt.Fprintf(b, "\n%s, latest %d requests\n", clean(class), len(stages["queue"]))
	for _, name := range stageNames {
		if v := stages[name]; len(v) > 0 && v[len(v)-1] > 0 {
			fmt.Fprintf(b, "  %-13s P50 %9s  P95 %9s\n", name, duration(v[len(v)/2]), duration(v[min(len(v)*95/100, len(v)-1)]))
		}
	}
	if len(p95) > 0 {
		fmt.Fprintf(b, "  P95   %s %s\n  rate  %s %.2f/s\n", sparkline(p95), duration(p95[len(p95)-1]), sparkline(rate), rate[len(rate)-1])
	}
	return nil
}
