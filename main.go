// Weir stands in front of a GPU speech-recognition server and says why it
// gets slow under load. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"weir/examples/asrsim"
	"weir/proxy"
)

// Exit codes.
const (
	exitOK    = 0
	exitError = 1 // something failed while running; the message says what
	exitUsage = 2 // wrong flags, or a configuration with mistakes
)

const usage = `weir stands in front of a GPU speech-recognition server and says why it
gets slow under load.

  weir demo      a simulated server, weir before it, load, the page, the verdict
  weir serve     stand in front of a server
  weir verdict   what a running weir says now, on one screen
  weir top       the same, live
  weir classify  the verdict on recorded requests: a file or an address
  weir envoy     stand beside an Envoy: its access log, queue and limits
  weir check F   name every mistake in the configuration file F
  weir probe     split one request into its stages, several times
  weir ladder    press a server with more and more requests; find its limit
  weir sweep     change one setting at a time; find the one that limits
  weir report    make reports of what probe, ladder or sweep measured
  weir compare   say what changed between two of them
  weir doctor    what a server tells of itself, and how to make it tell more
  weir asrsim    the simulated server alone
  weir version   version, commit and Go release

weir COMMAND --help tells the flags of a command.
Exit codes: 0 all went well; 1 something failed, and the message says what;
2 the flags or the configuration have mistakes. probe, ladder and sweep have
two more, 3 and 130; their --help says which.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal drains, a second one kills
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the whole program, without the process around it.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	switch name, args := args[0], args[1:]; name {
	case "serve":
		return serve(ctx, args, getenv, stdout, stderr)
	case "envoy":
		return serveEnvoy(ctx, args, getenv, stdout, stderr)
	case "check":
		return check(args, getenv, stdout, stderr)
	case "demo":
		return demo(ctx, args, stdout, stderr)
	case "probe":
		return runProbe(ctx, args, getenv, stdout, stderr)
	case "ladder":
		return runLadder(ctx, args, getenv, stdout, stderr)
	case "ladder-worker":
		return ladderWorker(ctx, os.Stdin, stdout, stderr)
	case "sweep":
		return runSweep(ctx, args, getenv, stdout, stderr)
	case "report":
		return runReport(args, stdout, stderr)
	case "compare":
		return runCompare(args, stdout, stderr)
	case "doctor":
		return doctor(ctx, args, stdout, stderr)
	case "asrsim":
		return asrsim.Main(ctx, args, stdout, stderr)
	case "classify":
		return classify(ctx, args, os.Stdin, stdout, stderr)
	case "verdict":
		return showVerdict(ctx, args, getenv, stdout, stderr)
	case "top":
		return top(ctx, args, getenv, stdout, stderr)
	case "version", "--version", "-v":
		fmt.Fprintln(stdout, versionLine())
		return exitOK
	case "help", "--help", "-h":
		fmt.Fprint(stdout, usage)
		return exitOK
	default:
		fmt.Fprintf(stderr, "weir: there is no command %q\n\n%s", name, usage)
		return exitUsage
	}
}

func serve(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	cfg, err := proxy.Load(args, getenv, os.ReadFile)
	if errors.Is(err, flag.ErrHelp) {
		proxy.Usage(stdout)
		return exitOK
	}
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitUsage
	}
	level := new(slog.LevelVar)
	logger := newLogger(cfg, level, stderr)
	s, err := proxy.NewSidecar(ctx, cfg, proxy.SidecarOptions{Getenv: getenv, Logger: logger, Level: level, Version: version()})
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	if err := announce(s, cfg, logger); err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go reload(ctx, cfg, s, logger)
	if err := s.Run(ctx); err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	return exitOK
}

func newLogger(cfg proxy.Config, level *slog.LevelVar, w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// watchPeriod is how often the configuration file is looked at.
const watchPeriod = 2 * time.Second

// reload brings a changed configuration into force, on SIGHUP or when the file
// changes. One with mistakes is refused, and the old one stays.
func reload(ctx context.Context, cfg proxy.Config, s *proxy.Sidecar, logger *slog.Logger) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	changed := make(chan struct{}, 1)
	if file := cfg.File(); file != "" {
		go proxy.WatchFile(ctx, file, watchPeriod, func() { changed <- struct{}{} })
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
		case <-changed:
		}
		next, err := cfg.Reload()
		if err == nil {
			err = s.Reload(next)
		}
		if err != nil {
			logger.Error("the new configuration was refused; the old one stays in force", "error", err)
			continue
		}
		cfg = next
	}
}

func check(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	f := flag.NewFlagSet("weir check", flag.ContinueOnError)
	f.SetOutput(stderr)
	effective := f.Bool("print", false, "print the effective configuration, and where each value came from")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitOK
		}
		return exitUsage
	}
	if f.NArg() != 1 {
		fmt.Fprintln(stderr, "weir: check takes one file: weir check weir.yaml")
		return exitUsage
	}
	if err := proxy.CheckFile(f.Arg(0)); err != nil {
		fmt.Fprintf(stderr, "%v\n", err)
		return exitUsage
	}
	if !*effective {
		fmt.Fprintf(stdout, "%s: no mistakes\n", f.Arg(0))
		return exitOK
	}
	cfg, err := proxy.Load([]string{"--config", f.Arg(0)}, getenv, os.ReadFile)
	if err != nil {
		fmt.Fprintf(stderr, "%v\n", err)
		return exitUsage
	}
	cfg.Print(stdout)
	return exitOK
}

// linkedVersion is set by the linker for releases.
var linkedVersion string

func version() string {
	if linkedVersion != "" {
		return linkedVersion
	}
	if b, ok := debug.ReadBuildInfo(); ok && b.Main.Version != "" && b.Main.Version != "(devel)" {
		return b.Main.Version
	}
	return "devel"
}

func versionLine() string {
	line := "weir " + version()
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return line
	}
	for _, s := range b.Settings {
		if s.Key == "vcs.revision" {
			line += " " + s.Value
		}
	}
	return line + " " + b.GoVersion
}
