package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"weir/classifier/ladder"
)

const sweepAbout = `weir sweep: changes one setting at a time, under one load, and says which of
them holds throughput back

  weir sweep --url http://127.0.0.1:8080/asr --audio speech/ --concurrency 16 \
    --vary max_concurrency=2,4,8 --set max_concurrency=weir:weir.yaml,127.0.0.1:9464 \
    --vary max_batch_size=4,8,16 --set max_batch_size=file:server.conf \
    --restart 'cmd:systemctl restart asr'

How a setting is changed, --set NAME=HOW (or NAME,NAME=HOW):
  weir:PATH,ADMIN        weir's own configuration file; it needs no restart
  file:PATH              the number after NAME in a file, then --restart
  http:METHOD URL BODY   a call
  cmd:COMMAND            a command, run by sh to its end
  run:COMMAND            a server that the sweep starts, restarts and ends
{NAME} in BODY and COMMAND stands for the value. What was there before is
restored at the end, also after Ctrl-C; after a crash by weir sweep --restore.
Exit codes as those of weir ladder.
`

// sweepFlags are the flags of weir sweep alone.
type sweepFlags struct {
	vary, base, set list
	restart         string
	plan            ladder.SweepPlan
	restore         bool
	wait            time.Duration
}

func (s *sweepFlags) flags(f *flag.FlagSet) {
	f.Var(&s.vary, "vary", "a round: `NAME=V1,V2,...`; can be repeated")
	f.Var(&s.base, "base", "`NAME=V`: the value in force now, held while another setting\nvaries; not needed for file: and weir:")
	f.Var(&s.set, "set", "`NAME=HOW` a setting is changed; see above")
	f.StringVar(&s.restart, "restart", "", "`cmd:COMMAND` or run:COMMAND that restarts the server after a\nfile has changed")
	f.IntVar(&s.plan.Concurrency, "concurrency", 16, "`requests` at once, the same throughout")
	f.IntVar(&s.plan.Requests, "requests", 0, "measured `requests` of each visit; 0: 160, or 8 a client")
	f.IntVar(&s.plan.Repeats, "repeats", 3, "visits of each value, in an order that differs each time")
	f.StringVar(&s.plan.Journal, "journal", "weir-sweep-restore.json", "`file` that holds how to restore the settings while the sweep runs")
	f.BoolVar(&s.restore, "restore", false, "restore the settings that a sweep left behind, and end")
	f.DurationVar(&s.wait, "wait", 2*time.Minute, "for the server to answer again after a change")
}

// runSweep is the command weir sweep.
func runSweep(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	e := &experiment{kind: ladder.KindSweep, stdout: stdout, stderr: stderr, pause: 200 * time.Millisecond}
	var s sweepFlags
	f := flag.NewFlagSet("weir sweep", flag.ContinueOnError)
	e.flags(f)
	s.flags(f)
	rest, code, done := parse(f, args, sweepAbout, stdout, stderr)
	if done {
		return code
	}
	if s.restore {
		return restore(ctx, s.plan.Journal, stdout, stderr)
	}
	err := s.check()
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("unexpected argument %q: all settings are flags", rest[0])
	}
	if err == nil {
		err = e.prepare(getenv)
	}
	if err == nil {
		err = s.prepare(ctx, e)
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir sweep: %v\n", err)
		return exitUsage
	}
	h, err := e.start(s.plan.Rounds)
	if err != nil {
		fmt.Fprintf(stderr, "weir sweep: %v\n", err)
		return exitError
	}
	runs, err := e.runner.Sweep(ctx, s.plan)
	return e.finish(h, runs, err)
}

func restore(ctx context.Context, journal string, stdout, stderr io.Writer) int {
	err := ladder.Restore(ctx, journal)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(stdout, "nothing to restore: there is no %s\n", journal)
	case err != nil:
		fmt.Fprintf(stderr, "weir sweep: %v\n", err)
		return exitError
	default:
		fmt.Fprintln(stdout, "the settings are restored")
	}
	return exitOK
}

func (s *sweepFlags) check() error {
	p := &s.plan
	if p.Concurrency < 1 || p.Repeats < 1 || p.Requests < 0 {
		return fmt.Errorf("--concurrency %d, --repeats %d and --requests %d: give 1, 1 and 0 or more", p.Concurrency, p.Repeats, p.Requests)
	}
	if p.Requests == 0 {
		p.Requests = ladder.RequestsFor(p.Concurrency)
	}
	return nil
}

// prepare makes the rounds and the setters.
func (s *sweepFlags) prepare(ctx context.Context, e *experiment) error {
	bases := map[string]int{}
	for _, t := range s.base {
		name, text, _ := strings.Cut(t, "=")
		v, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("--base %q: write NAME=V with a whole number", t)
		}
		bases[name] = v
	}
	s.plan.Setters = map[string]ladder.Setter{}
	for _, t := range s.set {
		left, how, _ := strings.Cut(t, "=")
		names := strings.Split(left, ",")
		setter, err := ladder.ParseSetter(names, how, s.restart, s.ready(e))
		if err != nil {
			return err
		}
		for _, name := range names {
			s.plan.Setters[name] = setter
		}
	}
	for _, t := range s.vary {
		round, err := s.round(ctx, t, bases)
		if err != nil {
			return err
		}
		s.plan.Rounds = append(s.plan.Rounds, round)
	}
	return s.plan.Check()
}

// round reads one --vary; a setting that can be read holds its own base.
func (s *sweepFlags) round(ctx context.Context, text string, bases map[string]int) (r ladder.Round, err error) {
	name, values, ok := strings.Cut(text, "=")
	if ok {
		r.Values, err = numbers(values)
	}
	if !ok || err != nil {
		return r, fmt.Errorf("--vary %q: write NAME=V1,V2,... with whole numbers above 0", text)
	}
	r.Factor, r.Base = name, bases[name]
	setter := s.plan.Setters[name]
	if setter == nil {
		return r, nil // Check says so
	}
	now, known, err := setter.Get(ctx)
	if known && err == nil {
		if r.Base != 0 && r.Base != now {
			return r, fmt.Errorf("--base %s=%d, but it is %d now: leave --base out, or set it first", name, r.Base, now)
		}
		r.Base = now
	}
	return r, err
}

// ready waits until the server answers a request well.
func (s *sweepFlags) ready(e *experiment) ladder.Ready {
	return func(ctx context.Context) error { return e.runner.Ready(ctx, s.wait) }
}
