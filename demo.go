package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"weir/classifier"
	"weir/examples/asrsim"
	"weir/proxy"
)

// demo plays one scenario: a simulated server, weir before it, clients that
// grow more and more, and the verdict.
func demo(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	f := flag.NewFlagSet("weir demo", flag.ContinueOnError)
	f.SetOutput(stderr)
	name := f.String("scenario", "queue", "what limits the simulated server: "+strings.Join(scenarioNames(), ", "))
	once := f.Bool("once", false, "end after the verdict; the exit code is 1 if it is not the scenario's")
	listen := f.String("listen", "127.0.0.1:8080", "address of weir; port 0 takes a free one")
	admin := f.String("admin", "127.0.0.1:9464", "address of the live page; port 0 takes a free one")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitOK
		}
		return exitUsage
	}
	scenario, err := asrsim.FindScenario(*name)
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitUsage
	}
	ok, err := playDemo(ctx, scenario, *listen, *admin, *once, stdout)
	switch {
	case errors.Is(err, context.Canceled):
		return exitOK
	case err != nil:
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	case *once && !ok:
		return exitError
	}
	return exitOK
}

func scenarioNames() (names []string) {
	for _, s := range asrsim.Scenarios() {
		names = append(names, s.Name)
	}
	return names
}

// playDemo tells whether the verdict was the scenario's.
func playDemo(ctx context.Context, scenario asrsim.Scenario, listen, admin string, once bool, w io.Writer) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, address, err := startSim(scenario.Server)
	if err != nil {
		return false, err
	}
	defer server()
	cfg := proxy.DefaultConfig()
	cfg.Listen, cfg.Admin, cfg.Server = freeOr(listen), freeOr(admin), "http://"+address
	cfg.MaxConcurrency, cfg.MaxQueueSize = scenario.MaxConcurrency, scenario.MaxQueueSize
	cfg.Window = proxy.Duration(asrsim.Window)
	cfg.VerdictFor, cfg.VerdictKeepFor = proxy.Duration(2*asrsim.Window), proxy.Duration(2*asrsim.Window)
	s, err := proxy.NewSidecar(ctx, cfg, proxy.SidecarOptions{Logger: slog.New(slog.DiscardHandler), Version: version()})
	if err != nil {
		return false, err
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	stop := func() error { cancel(); return <-ended }

	fmt.Fprintf(w, "Scenario %s: %s\n\n", scenario.Name, wrap(scenario.Story, 78-len("Scenario : ")-len(scenario.Name)))
	fmt.Fprintf(w, "  simulated server  %s\n  weir in front     http://%s/asr\n  live page         http://%s/\n\n", cfg.Server, s.Addr(), s.AdminAddr())
	fmt.Fprintf(w, "%7s %6s %6s %7s %9s %9s %7s  %s\n", "clients", "sent", "ok", "refused", "mean ms", "p95 ms", "req/s", "verdict so far")
	if _, err := scenario.Drive(ctx, "http://"+s.Addr()+"/asr", func(step asrsim.Step, r asrsim.Result) { printStep(w, s, step, r) }); err != nil {
		return false, errors.Join(err, stop())
	}
	v := lastVerdict(s)
	printVerdict(w, v)
	if once {
		return string(v.Cause) == scenario.Name, stop()
	}
	fmt.Fprintf(w, "\nThe page stays up at http://%s/ until Ctrl-C.\n", s.AdminAddr())
	<-ctx.Done()
	return true, <-ended
}

// startSim serves the simulated server on a free port of loopback.
func startSim(c asrsim.Config) (stop func(), address string, err error) {
	sim, err := asrsim.New(c)
	if err != nil {
		return nil, "", err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		sim.Close()
		return nil, "", err
	}
	h := &http.Server{Handler: sim, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = h.Serve(l) }()
	return func() { _ = h.Close(); sim.Close() }, l.Addr().String(), nil
}

// freeOr is the address, or one with a free port where it is taken: the demo
// must start beside whatever else runs.
func freeOr(address string) string {
	l, err := net.Listen("tcp", address)
	if err == nil {
		_ = l.Close()
		return address
	}
	host, _, splitErr := net.SplitHostPort(address)
	if splitErr != nil {
		return address // NewSidecar says what is wrong with it
	}
	return net.JoinHostPort(host, "0")
}

func printStep(w io.Writer, s *proxy.Sidecar, step asrsim.Step, r asrsim.Result) {
	cause := classifier.Unknown
	if v := s.Verdicts(); len(v) > 0 {
		cause = v[0].Cause
	}
	fmt.Fprintf(w, "%7d %6d %6d %7d %9.1f %9.1f %7.1f  %s\n", step.Clients, r.Sent, r.OK, r.Refused,
		ms(r.Mean()), ms(r.Quantile(0.95)), r.Throughput(), cause)
}

// lastVerdict waits for the window that holds the last step's end.
func lastVerdict(s *proxy.Sidecar) classifier.Verdict {
	time.Sleep(asrsim.Window / 4) // the records are in; the next cut may only dilute them
	for _, v := range s.Verdicts() {
		return v
	}
	return classifier.Verdict{Cause: classifier.Unknown}
}

// printVerdict writes a verdict for a terminal of 80 columns.
func printVerdict(w io.Writer, v classifier.Verdict) {
	fmt.Fprintf(w, "\nVerdict for %s: %s (confidence %.2f)\n", v.Class, strings.ToUpper(string(v.Cause)), v.Confidence)
	for _, e := range v.Evidence {
		fmt.Fprintf(w, "  - %s\n", wrap(e, 76))
	}
	if v.Advice != "" {
		fmt.Fprintf(w, "\n  Advice: %s\n", wrap(v.Advice, 70))
	}
	for _, e := range v.Warnings {
		fmt.Fprintf(w, "  Warning: %s\n", wrap(e, 69))
	}
}

// wrap breaks text into lines of at most width columns, indented by four from
// the second on.
func wrap(text string, width int) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case column+1+len(word) > width:
			b.WriteString("\n    ")
			column = 0
			width = 76
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
