package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"weir/proxy/evidence"
)

const doctorUsage = `weir doctor asks a server what it is and what it tells of itself, and prints
what weir can see of it, what is missing, and the lines that would add it. It
sends a few GET requests, changes nothing, and sends no audio.

  weir doctor --server http://127.0.0.1:8000

Exit codes: 0 the server answers; 1 it cannot be reached; 2 wrong flags.

`

// doctorTime bounds all that the doctor asks.
const doctorTime = 30 * time.Second

func doctor(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	f := flag.NewFlagSet("weir doctor", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() { fmt.Fprint(stderr, doctorUsage); f.PrintDefaults() }
	server := f.String("server", "http://127.0.0.1:8000", "base `URL` of the ASR server")
	metrics := f.String("metrics", "", "`URL` of its metrics page; looked for if not given")
	device := f.String("device", "http://127.0.0.1:9400/metrics", "`URL` of a DCGM exporter")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitOK
		}
		return exitUsage
	}
	if f.NArg() > 0 || !strings.HasPrefix(*server, "http://") && !strings.HasPrefix(*server, "https://") {
		fmt.Fprintf(stderr, "weir: doctor takes --server http://host:port, not %q\n", append([]string{*server}, f.Args()...))
		return exitUsage
	}
	if err := checkPages(*metrics, *device); err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitUsage
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTime)
	defer cancel()
	name, err := evidence.Ask(ctx, *server)
	if err != nil {
		fmt.Fprintf(stderr, "weir: %v\n", err)
		return exitError
	}
	examine(ctx, stdout, patient{server: strings.TrimRight(*server, "/"), name: name}, *metrics, *device)
	return exitOK
}

func checkPages(metrics, device string) error {
	if metrics != "" {
		if err := evidence.Check(metrics, false); err != nil {
			return fmt.Errorf("--metrics: %w", err)
		}
	}
	if err := evidence.Check(device, true); err != nil {
		return fmt.Errorf("--device: %w", err)
	}
	return nil
}

// A patient is the server and what was found of it.
type patient struct {
	server, name string
	page         *evidence.Found
	device       string // the setting that tells of the device; "": none works
}

func examine(ctx context.Context, w io.Writer, p patient, metrics, device string) {
	pages := evidence.Places(p.server)
	if metrics != "" {
		pages = []string{metrics}
	}
	list, errs := evidence.Look(ctx, pages)
	for i := range list {
		if list[i].Server != "" && p.page == nil {
			p.page = &list[i]
		}
		if list[i].Device && p.device == "" {
			p.device = list[i].Page
		}
	}
	if p.page != nil { // what its numbers say is surer than what it says of itself
		p.name = p.page.Server
	}
	if p.device == "" {
		p.device = findDevice(ctx, device)
	}
	p.tell(w, metrics, errs)
}

func findDevice(ctx context.Context, exporter string) string {
	if list, _ := evidence.Look(ctx, []string{exporter}); len(list) == 1 && list[0].Device {
		return exporter
	}
	if evidence.HasNVML(ctx) == nil {
		return evidence.NVML
	}
	if evidence.HasSMI(ctx) == nil {
		return evidence.SMI
	}
	return ""
}

func (p *patient) tell(w io.Writer, metrics string, errs map[string]error) {
	name := p.name
	if name == "" {
		name = "a server that weir does not know by its answers"
	}
	fmt.Fprintf(w, "%s is %s.\n\nWhat weir can see\n", p.server, name)
	fmt.Fprintln(w, "  yes  queue in front of it, upload, its time per request, its answer to load: always")
	advice := adviceFor(p.name)
	switch {
	case p.page != nil:
		fmt.Fprintf(w, "  yes  its own figures at %s: %s\n", p.page.Page, strings.Join(p.page.Tells, ", "))
	case metrics != "":
		fmt.Fprintf(w, "  no   its own figures: %s: %v\n", metrics, errs[metrics])
	default:
		fmt.Fprintln(w, "  no   its own figures: none where servers have them; if it has some elsewhere, name them with --metrics")
	}
	if p.device != "" {
		fmt.Fprintf(w, "  yes  the device's load by %s\n", p.device)
	} else {
		fmt.Fprintln(w, "  no   the device's load: no DCGM exporter, no nvidia-smi, nothing on its pages")
	}
	answer := "no  "
	if advice.answers {
		answer = "can "
	}
	fmt.Fprintf(w, "  %s timings in its answers: %s\n", answer, advice.inAnswers)
	p.tellRemedies(w, advice)
}

func (p *patient) tellRemedies(w io.Writer, a advice) {
	fmt.Fprintln(w, "\nWhat to add")
	line := "weir serve --server " + p.server
	if p.page != nil {
		line += " --server-metrics " + p.page.Page
	}
	if p.device != "" {
		line += " --device " + p.device
	}
	fmt.Fprintf(w, "  weir:    %s\n", line)
	if p.page == nil && a.metrics != "" {
		fmt.Fprintf(w, "  figures: %s\n", a.metrics)
	}
	if a.spans != "" {
		fmt.Fprintf(w, "  spans:   %s\n", a.spans)
	}
	if a.request != "" {
		fmt.Fprintf(w, "  answers: %s\n", a.request)
	}
	if p.device == "" {
		fmt.Fprintln(w, "  device:  run NVIDIA's dcgm-exporter (port 9400) and give weir --device http://127.0.0.1:9400/metrics#gpu=0,")
		fmt.Fprintln(w, "           or let weir's container see the driver (NVIDIA_DRIVER_CAPABILITIES=utility) and give it --device nvidia-smi")
	}
	if p.page != nil && !slices.Contains(p.page.Tells, "queue") {
		fmt.Fprintln(w, "  note:    its figures tell no queue of its own: a wait inside it shows as unattributed time")
	}
}

// advice is how one kind of server can be made to tell more.
type advice struct {
	answers   bool   // its answers can tell timings without a change of its code
	inAnswers string // how it is with them
	metrics   string // what switches its metrics page on
	spans     string // what sends its OpenTelemetry spans to weir
	request   string // what makes its answers tell timings
}

const (
	otlpWeir = "give weir --otlp-grpc 127.0.0.1:4317, and the server "
	otlpHTTP = "give weir --otlp-http 127.0.0.1:4318, and the server "
	noOwn    = "it puts none there by itself"
	helper   = "where you can change its code: copy examples/helpers/python/stages.py beside it, app = stages.ASGI(app), and with stages.stage(\"forward\"): around the model"
)

var advices = map[string]advice{
	"vLLM": {true, "in the metrics object of chat and completion answers, if it is asked for; not in transcriptions", "leave out --disable-log-stats",
		otlpWeir + "--otlp-traces-endpoint grpc://127.0.0.1:4317, with OTEL_EXPORTER_OTLP_TRACES_INSECURE=true", "--enable-per-request-metrics (chat and completions)"},
	"Triton": {true, "a python_backend can put them into its response's parameters", "--allow-metrics=true (the default), and GET /v2/models/stats is always there",
		otlpHTTP + "--trace-config mode=opentelemetry --trace-config opentelemetry,url=http://127.0.0.1:4318/v1/traces --trace-config rate=1 --trace-config level=TIMESTAMPS",
		"in model.py: examples/helpers/triton/model.py shows pb_utils.InferenceResponse(outputs, parameters={\"server_timing\": ...})"},
	"TGI":    {true, "in x-queue-time and x-inference-time, of answers that are not streamed: nothing to do", "its page is on by default", otlpWeir + "--otlp-endpoint http://127.0.0.1:4317", ""},
	"TEI":    {true, "in x-queue-time and x-inference-time: nothing to do", "its page is on by default", otlpWeir + "--otlp-endpoint http://127.0.0.1:4317", ""},
	"SGLang": {true, "in meta_info of /generate: nothing to do; not in the OpenAI routes", "--enable-metrics", "", ""},
	"TorchServe": {false, noOwn, "metrics_mode=prometheus in config.properties", "",
		"in the handler: examples/helpers/torchserve/handler.py shows context.set_response_header(0, \"Server-Timing\", ...)"},
	"OpenVINO Model Server":  {false, noOwn, "--metrics_enable --rest_port 8000", "", ""},
	"KServe":                 {false, noOwn, "its page is on by default", "", helper},
	"BentoML":                {false, noOwn, "its page is on by default", otlpHTTP + "tracing: {exporter_type: otlp, sample_rate: 1.0, otlp: {protocol: http, endpoint: http://127.0.0.1:4318/v1/traces}} in its configuration", helper},
	"Ray Serve":              {false, noOwn, "ray start --metrics-export-port=8080, then --server-metrics http://127.0.0.1:8080/metrics", "", helper},
	"WhisperLive":            {false, noOwn, "--metrics_port 9091, then --server-metrics http://127.0.0.1:9091/metrics", "", ""},
	"Deepgram":               {false, noOwn, "the engine's page is at :9991/metrics", "", ""},
	"mosec":                  {false, noOwn, "its page is on by default", "", ""},
	"Xinference":             {false, noOwn, "xinference-local --metrics-exporter-port 9998, then --server-metrics http://127.0.0.1:9998/metrics", "", ""},
	"speaches":               {false, noOwn, "", otlpHTTP + "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318", helper},
	"LitServe":               {false, noOwn, "", "", helper},
	"FunASR":                 {true, "in processing_time and rtf of /asr: nothing to do; not in its other routes", "", "", helper},
	"whisper-asr-webservice": {false, noOwn, "", "", helper},
	"WhisperLiveKit":         {false, noOwn, "", "", helper},
	"whisper.cpp":            {false, noOwn, "", "", "examples/helpers/cpp/stages.hpp, in server.cpp around whisper_full_parallel"},
}

func adviceFor(server string) advice {
	if a, ok := advices[server]; ok {
		return a
	}
	return advice{inAnswers: "not known; weir shows any that come", metrics: "if it has a metrics page, give weir --server-metrics URL",
		spans: otlpHTTP + "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318, if it makes OpenTelemetry spans", request: helper}
}
