package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"weir/classifier/ladder"
)

// Exit codes of the experiments, beside the others.
const (
	exitFailures    = 3   // measured, but a step had no success
	exitInterrupted = 130 // by Ctrl-C; what was measured is reported
)

// list is a flag that can be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

// experiment holds the flags that probe, ladder and sweep share.
type experiment struct {
	kind           string
	target         ladder.Target
	audio          list
	headers        list
	fields         list
	tokenEnv       string
	seed           uint64
	warmup         int
	pause          time.Duration
	workers        int
	record         string
	out            outputs
	stdout, stderr io.Writer

	clips  []ladder.Clip
	runner *ladder.Runner
	file   *os.File
}

// outputs are the reports to write.
type outputs struct {
	json                bool
	lang                string
	html, csv, markdown string
}

func (o *outputs) flags(f *flag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print JSON instead of tables")
	f.StringVar(&o.lang, "lang", "en", "`language` of column names: en or zh")
	f.StringVar(&o.html, "html", "", "write a self-contained page with plots to this `file`")
	f.StringVar(&o.csv, "csv", "", "write the table as CSV to this `file`")
	f.StringVar(&o.markdown, "markdown", "", "write tables and words as Markdown to this `file`")
}

func (o *outputs) check() error {
	if o.lang != ladder.English && o.lang != ladder.Chinese {
		return fmt.Errorf("--lang %q is unknown: use en or zh", o.lang)
	}
	return nil
}

func (e *experiment) flags(f *flag.FlagSet) {
	f.StringVar(&e.target.URL, "url", "", "`URL` that takes the audio")
	f.Var(&e.audio, "audio", "audio `file` or folder (WAV, MP3, FLAC, raw PCM); can be repeated")
	f.StringVar(&e.target.Shape, "shape", "", "of a request: multipart, raw, json; of a WebSocket: funasr,\nvosk, sherpa, sherpa-offline or realtime; or grpc; default:\nraw if the path ends in /asr, else multipart")
	f.StringVar(&e.target.FileField, "file-field", "file", "`name` of the form's field with the audio")
	f.Var(&e.fields, "field", "another field of the form, `name=value`; can be repeated")
	f.BoolVar(&e.target.Paced, "paced", false, "over a stream: send audio at the speed of speech, and count\nlatency from its end")
	f.StringVar(&e.target.Template, "template", "", "of a json or grpc request; {audio} stands for the audio in base64")
	f.StringVar(&e.target.Descriptor, "descriptor", "", "of grpc: `file` with a FileDescriptorSet; default: the server's\nreflection")
	f.Var(&e.headers, "header", "`'Name: value'`; can be repeated")
	f.StringVar(&e.tokenEnv, "token-env", "", "environment `variable` with a bearer token")
	f.StringVar(&e.target.Expect, "expect", "", "what a good answer holds: a JSON `pointer` such as /text,\n/text=REGEX, or a regular expression")
	f.DurationVar(&e.target.Timeout, "timeout", 5*time.Minute, "of one request")
	f.Float64Var(&e.target.Upload, "upload-rate", 0, "`bytes/s` of one client's upload; 0: as fast as it goes")
	f.StringVar(&e.target.Admin, "weir", "", "admin `address` of the weir behind the URL: its records tell\nthe wait in its queue and the stages")
	f.Uint64Var(&e.seed, "seed", 1, "`number` that the order of the audio and arrivals start from")
	f.IntVar(&e.warmup, "warmup", 5, "`requests` before the first step, which do not count")
	f.StringVar(&e.record, "record", "", "raw observations go to this `file` of JSON lines; none: nowhere;\ndefault: weir-KIND-TIME.jsonl")
	e.out.flags(f)
}

// parse reads flags that may stand before and after other arguments. done
// tells that the command ends here, with that exit code.
func parse(f *flag.FlagSet, args []string, about string, stdout, stderr io.Writer) (rest []string, code int, done bool) {
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	for {
		err := f.Parse(args)
		switch {
		case errors.Is(err, flag.ErrHelp):
			fmt.Fprint(stdout, about, "\nFlags:\n")
			f.SetOutput(stdout)
			f.PrintDefaults()
			return nil, exitOK, true
		case err != nil:
			fmt.Fprintf(stderr, "%s: %v\nRun '%s --help' for the flags.\n", f.Name(), err, f.Name())
			return nil, exitUsage, true
		case f.NArg() == 0:
			return rest, exitOK, false
		}
		rest, args = append(rest, f.Arg(0)), f.Args()[1:]
	}
}

// prepare reads what the flags name. Its errors are mistakes of usage.
func (e *experiment) prepare(getenv func(string) string) (err error) {
	if err := e.out.check(); err != nil {
		return err
	}
	if e.target.Headers, err = pairs(e.headers, ":", "--header", "'Name: value'"); err != nil {
		return err
	}
	if e.target.Fields, err = pairs(e.fields, "=", "--field", "name=value"); err != nil {
		return err
	}
	if e.tokenEnv != "" {
		token := getenv(e.tokenEnv)
		if token == "" {
			return fmt.Errorf("--token-env %s: that variable is empty: export the token in it", e.tokenEnv)
		}
		e.target.Headers = append(e.target.Headers, ladder.Field{Name: "Authorization", Value: "Bearer " + token})
	}
	if err := e.target.Check(); err != nil {
		return err
	}
	e.clips, err = ladder.LoadAudio(e.audio, e.seed)
	return err
}

func pairs(texts []string, sep, name, form string) (fields []ladder.Field, err error) {
	for _, t := range texts {
		k, v, ok := strings.Cut(t, sep)
		if k = strings.TrimSpace(k); !ok || k == "" {
			return nil, fmt.Errorf("%s %q: write %s", name, t, form)
		}
		fields = append(fields, ladder.Field{Name: k, Value: strings.TrimSpace(v)})
	}
	return fields, nil
}

// start opens the record and makes the runner.
func (e *experiment) start(rounds []ladder.Round) (ladder.Header, error) {
	h := ladder.Header{
		Paced: e.target.Paced,
		Kind:  e.kind, Version: version(), URL: e.target.Shown(), Shape: e.target.Shape, Clips: len(e.clips),
		Seed: e.seed, Started: time.Now().Round(0), Rounds: rounds,
	}
	for _, c := range e.clips {
		h.Seconds += c.Seconds
	}
	c, err := ladder.NewClient(e.target, e.clips, nil)
	if err != nil {
		return h, err
	}
	e.runner = &ladder.Runner{Client: c, Seed: e.seed, Warmup: e.warmup, Pause: e.pause, Progress: newProgress(e.stderr)}
	if e.record == "none" {
		return h, nil
	}
	if e.record == "" {
		e.record = "weir-" + e.kind + "-" + h.Started.Format("20060102-150405") + ".jsonl"
	}
	if e.file, err = os.Create(e.record); err != nil {
		return h, fmt.Errorf("%w: choose another file with --record, or --record none", err)
	}
	e.runner.Record = ladder.NewRecorder(e.file, h)
	return h, nil
}

// finish reports what was measured and returns the exit code for err.
func (e *experiment) finish(h ladder.Header, steps []*ladder.StepRun, err error) int {
	e.runner.Client.Close()
	interrupted := errors.Is(err, context.Canceled)
	h.Interrupted = interrupted
	if interrupted {
		e.runner.Record.Interrupted()
	}
	code := e.code(err, len(steps))
	if recordErr := e.runner.Record.Err(); recordErr != nil {
		fmt.Fprintf(e.stderr, "weir: the raw observations could not all be written: %v\n", recordErr)
		code = max(code, exitError)
	}
	if e.file != nil {
		_ = e.file.Close()
	}
	if err != nil && (!interrupted || errors.Is(err, ladder.ErrNotRestored)) {
		fmt.Fprintf(e.stderr, "weir: %v\n", err)
	}
	if len(steps) == 0 {
		if e.file != nil {
			_ = os.Remove(e.record) // nothing but its header
		}
		return code
	}
	if err := e.out.write(ladder.Summarize(&ladder.Run{Header: h, Steps: steps}), e.stdout); err != nil {
		fmt.Fprintf(e.stderr, "weir: %v\n", err)
		code = max(code, exitError)
	}
	if e.file != nil {
		fmt.Fprintf(e.stderr, "raw observations: %s (weir report %s makes reports of them)\n", e.record, e.record)
	}
	return code
}

func (e *experiment) code(err error, steps int) int {
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, ladder.ErrNotRestored):
		return exitError
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, ladder.ErrAllFailed) && steps > 0:
		return exitFailures
	}
	return exitError
}

// write makes every report that was asked for.
func (o *outputs) write(s *ladder.Summary, stdout io.Writer) error {
	var all error
	for _, f := range []struct {
		name  string
		write func(io.Writer) error
	}{
		{o.html, func(w io.Writer) error { return s.HTML(w, o.lang) }},
		{o.csv, func(w io.Writer) error { return s.CSV(w, o.lang) }},
		{o.markdown, func(w io.Writer) error { return s.Markdown(w, o.lang) }},
	} {
		if f.name != "" {
			all = errors.Join(all, writeFile(f.name, f.write))
		}
	}
	if o.json {
		return errors.Join(all, s.JSON(stdout))
	}
	return errors.Join(all, s.Text(stdout, o.lang))
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

const ladderAbout = `weir ladder: presses a server with more and more requests at once, and says
where it is full and what fills it

  weir ladder --url http://127.0.0.1:8000/asr --audio speech/ --steps 1,2,4,8,16
  weir ladder --url ... --audio ... --rate 2,4,8        open loop

Each step measures the same number of requests, after a warm-up of one request
a client. Exit codes: 0 measured; 1 could not measure; 2 wrong flags or audio;
3 a step had no success, the steps before are reported; 130 interrupted, the
steps until then are reported.
`

// runLadder is the command weir ladder.
func runLadder(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	e := &experiment{kind: ladder.KindLadder, stdout: stdout, stderr: stderr}
	f := flag.NewFlagSet("weir ladder", flag.ContinueOnError)
	e.flags(f)
	steps := f.String("steps", "1,2,4,8,16", "requests at once in each step, or auto: double until throughput\nno longer rises, then look closer where latency turns")
	most := f.Int("max", 128, "highest `concurrency` of --steps auto")
	requests := f.Int("requests", 0, "measured `requests` of each step; 0: 160, or 8 a client")
	rate := f.String("rate", "", "open loop: `requests/s` that arrive in each step, instead of --steps")
	arrivals := f.String("arrivals", ladder.Poisson, "of an open loop: poisson or constant")
	inflight := f.Int("max-inflight", 1000, "`requests` of an open loop under way at most")
	f.DurationVar(&e.pause, "pause", 500*time.Millisecond, "between steps, once all answers are in")
	f.IntVar(&e.workers, "workers", 0, "`processes` that send; 0: this one")
	rest, code, done := parse(f, args, ladderAbout, stdout, stderr)
	if done {
		return code
	}
	plan, err := ladderSteps(*steps, *rate, *arrivals, *requests)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("unexpected argument %q: all settings are flags", rest[0])
	}
	if err == nil {
		err = e.prepare(getenv)
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir ladder: %v\n", err)
		return exitUsage
	}
	h, err := e.start(nil)
	if err != nil {
		fmt.Fprintf(stderr, "weir ladder: %v\n", err)
		return exitError
	}
	e.runner.Inflight = *inflight
	runs, err := e.climb(ctx, plan, *most, *requests)
	return e.finish(h, runs, err)
}

// climb runs the steps; none means that they are to be found.
func (e *experiment) climb(ctx context.Context, plan []ladder.Step, most, requests int) ([]*ladder.StepRun, error) {
	if err := e.runner.Warm(ctx); err != nil {
		return nil, err
	}
	if e.workers > 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		e.runner.Pool, err = ladder.StartPool(e.workers, ladder.Job{Target: e.target, Audio: e.audio, Seed: e.seed}, self, "ladder-worker")
		if err != nil {
			return nil, err
		}
		defer e.runner.Pool.Close()
	}
	if plan != nil {
		return e.runner.Ladder(ctx, plan)
	}
	return e.runner.Adapt(ctx, most, func(concurrency int) int {
		if requests > 0 {
			return requests
		}
		return ladder.RequestsFor(concurrency)
	})
}

// ladderSteps reads --steps or --rate; nil steps mean auto.
func ladderSteps(steps, rate, arrivals string, requests int) (plan []ladder.Step, err error) {
	if requests < 0 {
		return nil, fmt.Errorf("--requests %d: give 0 (chosen for you) or more", requests)
	}
	if arrivals != ladder.Poisson && arrivals != ladder.Constant {
		return nil, fmt.Errorf("--arrivals %q is unknown: use poisson or constant", arrivals)
	}
	if rate != "" {
		for t := range strings.SplitSeq(rate, ",") {
			r, err := strconv.ParseFloat(strings.TrimSpace(t), 64)
			if err != nil || !(r > 0) || r > 1e6 {
				return nil, fmt.Errorf("--rate %q: %q is no number of requests per second above 0", rate, t)
			}
			n := requests
			if n == 0 {
				n = ladder.RequestsFor(1)
			}
			plan = append(plan, ladder.Step{Rate: r, Arrivals: arrivals, Requests: n})
		}
		return plan, nil
	}
	if steps == "auto" {
		return nil, nil
	}
	all, err := numbers(steps)
	if err != nil {
		return nil, fmt.Errorf("--steps %q: %w: write 1,2,4,8,16 or auto", steps, err)
	}
	most := slices.Max(all)
	if requests == 0 {
		requests = ladder.RequestsFor(most) // the same for each step
	}
	for _, n := range all {
		plan = append(plan, ladder.Step{Concurrency: n, Requests: requests})
	}
	return plan, nil
}

// numbers reads whole numbers above 0, separated by commas.
func numbers(text string) (all []int, err error) {
	for t := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(t))
		if err != nil || n <= 0 || n > 100_000 {
			return nil, fmt.Errorf("%q is no whole number from 1 to 100000", t)
		}
		all = append(all, n)
	}
	return all, nil
}

// ladderWorker is a process of --workers; it speaks with its parent only.
func ladderWorker(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) int {
	if err := ladder.Work(ctx, stdin, stdout); err != nil {
		fmt.Fprintf(stderr, "weir ladder-worker: %v\n", err)
		return exitError
	}
	return exitOK
}

const probeAbout = `weir probe: splits one request into its stages, several times, one request at a
time, and says which stage is largest

  weir probe --url http://127.0.0.1:8000/asr --audio speech.wav

Exit codes: 0 measured; 1 could not measure; 2 wrong flags or audio; 3 a file
had no success; 130 interrupted, what was measured is reported.
`

// runProbe is the command weir probe.
func runProbe(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	e := &experiment{kind: ladder.KindProbe, stdout: stdout, stderr: stderr}
	f := flag.NewFlagSet("weir probe", flag.ContinueOnError)
	e.flags(f)
	repeats := f.Int("repeats", 10, "`requests` for each audio file")
	rest, code, done := parse(f, args, probeAbout, stdout, stderr)
	if done {
		return code
	}
	err := e.prepare(getenv)
	switch {
	case len(rest) > 0:
		err = fmt.Errorf("unexpected argument %q: all settings are flags", rest[0])
	case *repeats < 1:
		err = fmt.Errorf("--repeats %d: give 1 or more", *repeats)
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir probe: %v\n", err)
		return exitUsage
	}
	h, err := e.start(nil)
	if err != nil {
		fmt.Fprintf(stderr, "weir probe: %v\n", err)
		return exitError
	}
	if err := e.runner.Warm(ctx); err != nil {
		return e.finish(h, nil, err)
	}
	runs, err := e.runner.Probe(ctx, *repeats)
	return e.finish(h, runs, err)
}

const reportAbout = `weir report FILE: makes reports of the raw observations of a probe, a ladder or
a sweep

  weir report weir-ladder-20260102-030405.jsonl --html report.html
`

// runReport is the command weir report.
func runReport(args []string, stdout, stderr io.Writer) int {
	var o outputs
	f := flag.NewFlagSet("weir report", flag.ContinueOnError)
	o.flags(f)
	rest, code, done := parse(f, args, reportAbout, stdout, stderr)
	if done {
		return code
	}
	err := o.check()
	if err == nil && len(rest) != 1 {
		err = errors.New("give one file: weir report FILE")
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir report: %v\n", err)
		return exitUsage
	}
	s, err := readSummary(rest[0])
	if err == nil {
		err = o.write(s, stdout)
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir report: %v\n", err)
		return exitError
	}
	return exitOK
}

func readSummary(name string) (*ladder.Summary, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	run, err := ladder.ReadRun(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return ladder.Summarize(run), nil
}

const compareAbout = `weir compare A B: says what changed from run A to run B, and whether the
difference is more than noise

  weir compare before.jsonl after.jsonl
`

// runCompare is the command weir compare.
func runCompare(args []string, stdout, stderr io.Writer) int {
	f := flag.NewFlagSet("weir compare", flag.ContinueOnError)
	asJSON := f.Bool("json", false, "print JSON instead of a table")
	rest, code, done := parse(f, args, compareAbout, stdout, stderr)
	if done {
		return code
	}
	if len(rest) != 2 {
		fmt.Fprintln(stderr, "weir compare: give two files: weir compare A B")
		return exitUsage
	}
	var s [2]*ladder.Summary
	for i, name := range rest {
		var err error
		if s[i], err = readSummary(name); err != nil {
			fmt.Fprintf(stderr, "weir compare: %v\n", err)
			return exitError
		}
	}
	c := ladder.Compare(s[0], s[1])
	write := c.Text
	if *asJSON {
		write = c.JSON
	}
	if err := write(stdout); err != nil {
		fmt.Fprintf(stderr, "weir compare: %v\n", err)
		return exitError
	}
	return exitOK
}
