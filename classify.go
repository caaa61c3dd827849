package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"weir/classifier"
)

const classifyUsage = `weir classify FILE|URL judges recorded requests as weir would have live.

FILE holds one of these, told apart by its first bytes; "-" is standard input:
  JSON lines as /api/requests gives them, one request a line
  OTLP JSON (resourceSpans) of weir's spans, as an OTLP file exporter writes
  the answer of a Jaeger query API (/api/traces?service=weir...)
URL is asked with GET and may answer with any of them, such as
http://localhost:9115/api/requests?n=100000.

Lines that cannot be used are named on standard error, and skipped.

Exit codes: 0 a verdict was given, whatever it is; 1 the source could not be
read, or held no usable record; 2 wrong flags; 3 with --fail-on, a class has
one of the causes named.
`

// exitFound is for scripts: --fail-on found what it looked for.
const exitFound = 3

type classifyFlags struct {
	source string
	window time.Duration
	json   bool
	quiet  bool
	failOn string
}

func parseClassify(args []string, stdout, stderr io.Writer) (c classifyFlags, code int, stop bool) {
	f := flag.NewFlagSet("weir classify", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stdout, classifyUsage+"\nFlags:\n")
		f.SetOutput(stdout)
		f.PrintDefaults()
	}
	f.DurationVar(&c.window, "window", 10*time.Second, "length of the windows")
	f.BoolVar(&c.json, "json", false, "print JSON, one verdict a line")
	f.BoolVar(&c.quiet, "quiet", false, "do not name the lines that cannot be used, only count them")
	f.StringVar(&c.failOn, "fail-on", "", "causes, separated by commas, that make the exit code 3")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return c, exitOK, true
		}
		return c, exitUsage, true
	}
	if f.NArg() != 1 {
		fmt.Fprintln(stderr, "weir: classify takes one file or address: weir classify requests.jsonl")
		return c, exitUsage, true
	}
	if c.window < 100*time.Millisecond || c.window > time.Hour {
		fmt.Fprintf(stderr, "weir: --window is %v: it must lie between 100ms and 1h\n", c.window)
		return c, exitUsage, true
	}
	for _, cause := range strings.FieldsFunc(c.failOn, isComma) {
		if !classifier.IsCause(cause) {
			fmt.Fprintf(stderr, "weir: --fail-on names %q, which is no cause; causes are healthy, queue, compute, transfer, host, client, mixed, unknown\n", cause)
			return c, exitUsage, true
		}
	}
	c.source = f.Arg(0)
	return c, exitOK, false
}

func isComma(r rune) bool { return r == ',' }

func classify(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	c, code, stop := parseClassify(args, stdout, stderr)
	if stop {
		return code
	}
	in, err := openSource(ctx, c.source, stdin)
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	defer in.Close()
	p := classifier.Replay{Length: c.window}
	bad := 0
	err = classifier.Read(in, p.Add, func(where string, err error) {
		if bad++; !c.quiet {
			fmt.Fprintf(stderr, "weir: %s: %s: %v; skipped\n", c.source, where, err)
		}
	})
	switch {
	case err != nil:
		fmt.Fprintf(stderr, "weir: %s: %v\n", c.source, err)
		return exitError
	case p.Len() == 0:
		fmt.Fprintf(stderr, "weir: %s: %v (%d could not be used)\n", c.source, classifier.ErrNoRecords, bad)
		return exitError
	case bad > 0:
		fmt.Fprintf(stderr, "weir: %s: %d requests read, %d could not be used\n", c.source, p.Len(), bad)
	}
	verdicts, changes := p.Verdicts()
	if err := printVerdicts(stdout, c.json, verdicts, changes); err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	return failOn(c.failOn, verdicts)
}

func failOn(causes string, verdicts []classifier.Verdict) int {
	for _, cause := range strings.FieldsFunc(causes, isComma) {
		for _, v := range verdicts {
			if string(v.Cause) == cause {
				return exitFound
			}
		}
	}
	return exitOK
}

// maxSource bounds what is read from a URL.
const maxSource = 2 << 30

func openSource(ctx context.Context, source string, stdin io.Reader) (io.ReadCloser, error) {
	if source == "-" {
		return io.NopCloser(stdin), nil
	}
	if !strings.HasPrefix(source, "http://") && !strings.HasPrefix(source, "https://") {
		return os.Open(source)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, source, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		first, _ := io.ReadAll(io.LimitReader(answer.Body, 200))
		answer.Body.Close()
		return nil, fmt.Errorf("GET %s: %s: %s", source, answer.Status, strings.TrimSpace(string(first)))
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(answer.Body, maxSource), answer.Body}, nil
}

// verdictLine is one class as JSON.
type verdictLine struct {
	Class      string    `json:"class"`
	Cause      string    `json:"cause"`
	Rule       string    `json:"rule"`
	Confidence float64   `json:"confidence"`
	Since      time.Time `json:"since"`
	Requests   int       `json:"requests"`
	Mean       float64   `json:"mean_ms"`
	P95        float64   `json:"p95_ms"`
	Throughput float64   `json:"throughput"`
	Evidence   []string  `json:"evidence"`
	Warnings   []string  `json:"warnings"`
	Advice     string    `json:"advice"`
}

func printVerdicts(w io.Writer, asJSON bool, verdicts []classifier.Verdict, changes []classifier.Change) error {
	if asJSON {
		e := json.NewEncoder(w)
		for _, v := range verdicts {
			r := v.Report
			err := e.Encode(verdictLine{v.Class, string(v.Cause), v.Rule, v.Confidence, v.Since, r.Requests, ms(r.Mean), ms(r.P95), r.Throughput,
				append([]string{}, v.Evidence...), append([]string{}, v.Warnings...), v.Advice})
			if err != nil {
				return err
			}
		}
		return nil
	}
	var b strings.Builder
	for i, v := range verdicts {
		if i > 0 {
			b.WriteString("\n")
		}
		writeVerdict(&b, classOf(v), plainStyle)
		for _, c := range changes {
			if c.Verdict.Class == v.Class {
				fmt.Fprintf(&b, "  from %s  %s (%.2f)\n", c.At.UTC().Format("15:04:05"), c.Verdict.Cause, c.Verdict.Confidence)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
