package asrsim

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// drainTime is how long requests under way may take to end after a signal.
const drainTime = 5 * time.Second

const usageHead = `weir asrsim: a simulated GPU server for speech recognition

  POST /asr                       the body is the audio: WAV, or 16 kHz 16 bit
                                  mono samples
  POST /v1/audio/transcriptions   multipart form: file, and stream=true for
                                  server-sent events
  GET  /health

All work is slept, not done. forward = forward-base + forward-per-batch x batch
+ forward-per-second x longest audio; a copy of a batch = copies x copy-latency
+ bytes / bandwidth. Durations take a unit: 1.5s, 30ms, 200us.

Exit codes: 0 ended by a signal, 1 the server failed, 2 wrong flags.

Flags:
`

// options are the command's flags.
type options struct {
	Config
	listen, scenario string
}

// Main is the command `weir asrsim`. It serves until ctx ends and returns the
// exit code: 0 when ctx ended it, 1 when serving failed, 2 for wrong flags.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args)
	var help helpText
	if errors.As(err, &help) {
		fmt.Fprint(stdout, help)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir asrsim: %v\nRun 'weir asrsim -h' for the flags.\n", err)
		return 2
	}
	if err := serve(ctx, o, stdout); err != nil {
		fmt.Fprintf(stderr, "weir asrsim: %v\n", err)
		return 1
	}
	return 0
}

type helpText string

func (h helpText) Error() string { return string(h) }

// parse reads the flags twice if they name a scenario: its settings are then
// the defaults of the others.
func parse(args []string) (options, error) {
	o := options{Config: DefaultConfig()}
	if err := o.read(args); err != nil || o.scenario == "" {
		return o, err
	}
	s, err := FindScenario(o.scenario)
	if err != nil {
		return o, err
	}
	o.Config = s.Server
	return o, o.read(args)
}

func (o *options) read(args []string) error {
	var text bytes.Buffer
	f := o.flags()
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	err := f.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		text.WriteString(usageHead)
		f.SetOutput(&text)
		f.PrintDefaults()
		return helpText(text.String())
	}
	if err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: all settings are flags", f.Arg(0))
	}
	return o.Check()
}

func (o *options) flags() *flag.FlagSet {
	f := flag.NewFlagSet("weir asrsim", flag.ContinueOnError)
	f.StringVar(&o.listen, "listen", "127.0.0.1:8000", "`address` to serve on; port 0 takes a free one")
	f.StringVar(&o.scenario, "scenario", "", "`name` of settings: queue, compute, transfer, host, client or\nhealthy; other flags win")
	f.IntVar(&o.MaxBatchSize, "max-batch-size", o.MaxBatchSize, "`requests` in one execution")
	f.DurationVar(&o.BatchDelay, "batch-delay", o.BatchDelay, "how long a free executor waits for its batch to fill")
	f.IntVar(&o.MaxQueueSize, "max-queue-size", o.MaxQueueSize, "`requests` waiting for a batch; one more is answered 503; 0: no limit")
	f.IntVar(&o.Instances, "instances", o.Instances, "`executors`, each running one batch at a time")
	f.DurationVar(&o.ForwardBase, "forward-base", o.ForwardBase, "forward pass, for each batch")
	f.DurationVar(&o.ForwardPerBatch, "forward-per-batch", o.ForwardPerBatch, "forward pass, for each request of the batch")
	f.DurationVar(&o.ForwardPerSecond, "forward-per-second", o.ForwardPerSecond, "forward pass, for each second of the longest audio")
	f.IntVar(&o.H2DCopies, "h2d-copies", o.H2DCopies, "host-to-device `copies` for each request")
	f.DurationVar(&o.CopyLatency, "copy-latency", o.CopyLatency, "of one copy, whatever its size")
	f.Float64Var(&o.Bandwidth, "bandwidth", o.Bandwidth, "of the link between host and device, in `bytes/s`")
	f.DurationVar(&o.Preprocess, "preprocess", o.Preprocess, "host work before the queue, for each request")
	f.DurationVar(&o.PreprocessPerSecond, "preprocess-per-second", o.PreprocessPerSecond, "host work before the queue, for each second of audio")
	f.IntVar(&o.PreprocessWorkers, "preprocess-workers", o.PreprocessWorkers, "host `threads` for the work before and after")
	f.DurationVar(&o.Postprocess, "postprocess", o.Postprocess, "host work after the device, for each request")
	f.Float64Var(&o.Jitter, "jitter", o.Jitter, "log-normal `width` of all durations; 0: none")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`number` that the jitter starts from")
	f.StringVar(&o.ServerTiming, "server-timing", o.ServerTiming, "how stage timings are told: `header`, trailer or off")
	return f
}

// serve runs the server until ctx ends, then lets requests under way end.
func serve(ctx context.Context, o options, stdout io.Writer) error {
	l, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("%w: choose another address with --listen", err)
	}
	s, err := New(o.Config)
	if err != nil {
		l.Close()
		return err
	}
	defer s.Close()
	web := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- web.Serve(l) }()
	fmt.Fprintf(stdout, "asrsim serves http://%s\n", l.Addr())
	select {
	case err = <-failed:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if web.Shutdown(drain) != nil {
		err = web.Close()
	}
	<-failed
	return err
}
