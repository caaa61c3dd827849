package tracing

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/classifier"
)

// readAnswer offers "name: value" lines in turn; those that begin with "~"
// are trailer fields.
func readAnswer(in *Ingest, lines ...string) *classifier.Observation {
	o := &classifier.Observation{}
	for _, l := range lines {
		read, l := in.Header, l
		if strings.HasPrefix(l, "~") {
			read, l = in.Trailer, l[1:]
		}
		name, value, _ := strings.Cut(l, ":")
		read(o, []byte(name), []byte(value))
	}
	return o
}

func TestTheHeadersOfTGIAreRead(t *testing.T) {
	in := ingestOf(t)
	o := readAnswer(in, "x-compute-type: gpu+optimized", "x-compute-time: 0.613", "x-compute-characters: 12", "x-validation-time: 1",
		"x-queue-time: 180", "x-inference-time: 412", "x-time-per-token: 4", "x-prompt-tokens: 7", "x-generated-tokens: 96")
	in.Finish(o)
	wantTimings(t, o, "x-validation-time:preprocess 1ms, x-queue-time:queue 180ms, x-inference-time:forward 412ms")
	if o.ServerTotal != 613*milli {
		t.Errorf("total %v: want x-compute-time in seconds", o.ServerTotal)
	}
	if o.Tokens != 96 || o.Source != "header" || in.Untrusted() != 0 {
		t.Errorf("%d tokens, source %q, %d untrusted", o.Tokens, o.Source, in.Untrusted())
	}
}

func TestTheHeadersOfTEIAreRead(t *testing.T) {
	in := ingestOf(t)
	o := readAnswer(in, "x-compute-type: gpu", "X-Compute-Time: 613", "x-compute-characters: 12", "x-compute-tokens: 7",
		"X-Tokenization-Time: 2", "X-QUEUE-TIME: 180", "x-inference-time:  412\t")
	in.Finish(o)
	wantTimings(t, o, "x-tokenization-time:preprocess 2ms, x-queue-time:queue 180ms, x-inference-time:forward 412ms")
	if o.ServerTotal != 613*milli {
		t.Errorf("total %v: want x-compute-time in milliseconds", o.ServerTotal)
	}
	if o.Tokens != 0 {
		t.Errorf("%d tokens: want none, x-compute-tokens are the request's", o.Tokens)
	}
}

func TestTheUnitOfXComputeTimeIsTheServersNeverAGuess(t *testing.T) {
	for name, c := range map[string]struct {
		lines []string
		want  time.Duration
	}{
		"seconds beside x-validation-time":                  {[]string{"x-compute-time: 12.25", "x-validation-time: 0"}, 12250 * milli},
		"in any order":                                      {[]string{"x-validation-time: 0", "x-compute-time: 12.25"}, 12250 * milli},
		"milliseconds beside x-tokenization-time":           {[]string{"x-compute-time: 12", "x-tokenization-time: 0"}, 12 * milli},
		"beside a value that is none":                       {[]string{"x-compute-time: 12", "x-tokenization-time: soon"}, 12 * milli},
		"nothing without either":                            {[]string{"x-compute-time: 12", "x-queue-time: 1"}, 0},
		"x-total-time is better":                            {[]string{"x-compute-time: 12", "x-validation-time: 0", "x-total-time: 13"}, 13 * milli},
		"so is a total in Server-Timing":                    {[]string{"server-timing: total;dur=13", "x-compute-time: 12", "x-tokenization-time: 0"}, 13 * milli},
		"no number":                                         {[]string{"x-compute-time: fast", "x-validation-time: 0"}, 0},
		"a negative number":                                 {[]string{"x-compute-time: -1", "x-validation-time: 0"}, 0},
		"too long to be true":                               {[]string{"x-compute-time: 3600001", "x-validation-time: 0"}, 0},
		"the longest that can be":                           {[]string{"x-compute-time: 3600000", "x-validation-time: 0"}, maxDuration},
		"a metric of that name in Server-Timing is no help": {[]string{"server-timing: x-compute-time;dur=12", "x-validation-time: 0"}, 0},
	} {
		in := ingestOf(t)
		o := readAnswer(in, c.lines...)
		in.Finish(o)
		if o.ServerTotal != c.want {
			t.Errorf("%s: total %v, want %v", name, o.ServerTotal, c.want)
		}
		if s := shown(o.Timings); strings.Contains(s, "(x-compute-time)") || in.Untrusted() > 1 {
			t.Errorf("%s: timings %s, %d untrusted", name, s, in.Untrusted())
		}
	}
}

func TestXComputeTimeAloneTellsNothing(t *testing.T) {
	for _, line := range []string{"x-compute-time: 12", "~x-compute-time: 12"} {
		in := ingestOf(t)
		o := readAnswer(in, line)
		if got := string(AppendServerTiming(nil, o)); got != "weir-queue;dur=0" {
			t.Errorf("%s is told on as %s", line, got)
		}
		in.Finish(o)
		if len(o.Timings) != 0 || o.Source != "" || o.ServerTotal != 0 {
			t.Errorf("%s: %s from %q, total %v: want nothing told", line, shown(o.Timings), o.Source, o.ServerTotal)
		}
	}
}

// Gateways copied these headers, and the same server may send both kinds.
func TestXTimeHeadersCountOnlyWhereNothingElseTellsOfTheStage(t *testing.T) {
	for name, c := range map[string]struct {
		lines []string
		want  string
	}{
		"told twice":           {[]string{"x-queue-time: 5", "x-queue-time: 6"}, "x-queue-time:queue 5ms"},
		"Server-Timing first":  {[]string{"server-timing: wait;dur=4", "x-queue-time: 5"}, "wait:queue 4ms"},
		"Server-Timing second": {[]string{"x-queue-time: 5", "server-timing: wait;dur=4"}, "wait:queue 4ms"},
		"TGI and its copies":   {[]string{"x-validation-time: 1", "x-queue-time: 2", "x-inference-time: 3", "server-timing: forward;dur=3, queue;dur=2, validation;dur=1"}, "forward:forward 3ms, queue:queue 2ms, validation:preprocess 1ms"},
		"TEI and its copies":   {[]string{"x-tokenization-time: 1", "x-inference-time: 3", "server-timing: infer;dur=3, tokenize;dur=1"}, "infer:forward 3ms, tokenize:preprocess 1ms"},
		"in the trailer":       {[]string{"x-queue-time: 5", "x-inference-time: 6", "~server-timing: wait;dur=4"}, "x-inference-time:forward 6ms, wait:queue 4ms"},
		"another stage only":   {[]string{"x-inference-time: 5", "server-timing: wait;dur=4, total;dur=9"}, "x-inference-time:forward 5ms, wait:queue 4ms, total:other 9ms"},
		"a mapped header":      {[]string{"x-queue-time: 5", "waited: 4"}, "waited:queue 4ms"},
		"a bad one after":      {[]string{"x-queue-time: 5", "server-timing: wait;dur=soon"}, "x-queue-time:queue 5ms, wait:queue 0s untrusted"},
		"a bad one before":     {[]string{"server-timing: wait;dur=soon", "x-queue-time: 5"}, "wait:queue 0s untrusted, x-queue-time:queue 5ms"},
		"bad itself":           {[]string{"x-queue-time: 5ms", "x-inference-time: -1"}, "x-queue-time:queue 0s untrusted, x-inference-time:forward 0s untrusted"},
		"bad, then good":       {[]string{"x-queue-time: 5ms", "x-queue-time: 5"}, "x-queue-time:queue 0s untrusted, x-queue-time:queue 5ms"},
		"a metric so named":    {[]string{"server-timing: x-queue-time;dur=3, total;dur=4", "x-queue-time: 5"}, "x-queue-time:other 3ms, total:other 4ms, x-queue-time:queue 5ms"},
		"nothing in it":        {[]string{"x-queue-time:", "x-inference-time: 0"}, "x-queue-time:queue 0s untrusted, x-inference-time:forward 0s"},
	} {
		o := readAnswer(ingestOf(t, Mapping{Name: "waited", Stage: "queue", Unit: "ms"}), c.lines...)
		if got := shown(o.Timings); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestTotalsOfServersAndGateways(t *testing.T) {
	for name, c := range map[string]struct {
		lines     []string
		want      time.Duration
		untrusted uint64
	}{
		"TGI and TEI, ms":               {[]string{"x-total-time: 613"}, 613 * milli, 0},
		"OpenAI, ms":                    {[]string{"OpenAI-Processing-Ms: 613"}, 613 * milli, 0},
		"Envoy, ms":                     {[]string{"X-Envoy-Upstream-Service-Time: 613"}, 613 * milli, 0},
		"Rails, seconds":                {[]string{"X-Runtime: 0.613250"}, 613250 * time.Microsecond, 0},
		"the largest is the outermost":  {[]string{"x-total-time: 600", "x-envoy-upstream-service-time: 613", "x-runtime: 0.5"}, 613 * milli, 0},
		"Server-Timing wins, first":     {[]string{"server-timing: total;dur=500", "x-total-time: 613"}, 500 * milli, 0},
		"Server-Timing wins, last":      {[]string{"x-total-time: 613", "server-timing: total;dur=500"}, 500 * milli, 0},
		"and in a trailer":              {[]string{"x-total-time: 613", "~Server-Timing: total;dur=500"}, 500 * milli, 0},
		"the largest of Server-Timing":  {[]string{"server-timing: total;dur=500, TOTAL;dur=600, total;dur=400"}, 600 * milli, 0},
		"a total that is none":          {[]string{"x-total-time: 613", "server-timing: total;dur=-1"}, 613 * milli, 1},
		"a total that is none, first":   {[]string{"server-timing: total;dur=-1", "x-total-time: 613"}, 613 * milli, 1},
		"a header that is none":         {[]string{"x-total-time: soon", "openai-processing-ms: -5", "x-runtime: 1e300", "x-runtime:"}, 0, 4},
		"one past the limit of timings": {[]string{"x-total-time: 613", "server-timing: " + strings.Repeat("x;dur=1,", 32) + "total;dur=500"}, 613 * milli, 1},
		"none":                          {[]string{"server-timing: queue;dur=5"}, 0, 0},
	} {
		in := ingestOf(t)
		o := readAnswer(in, c.lines...)
		in.Finish(o)
		if o.ServerTotal != c.want || in.Untrusted() != c.untrusted {
			t.Errorf("%s: total %v, %d untrusted; want %v and %d", name, o.ServerTotal, in.Untrusted(), c.want, c.untrusted)
		}
	}
}

func TestGeneratedTokensAreTheLargestTold(t *testing.T) {
	for want, lines := range map[int][]string{
		96: {"x-generated-tokens: 96"},
		97: {"server-timing: forward;dur=1;tokens=97", "X-Generated-Tokens: 96"},
		98: {"x-generated-tokens: 98", "server-timing: forward;dur=1;tokens=97"},
		0:  {"x-generated-tokens: -1", "x-generated-tokens: many", "x-generated-tokens: 1e300", "x-generated-tokens: 9007199254740994"},
	} {
		if o := readAnswer(ingestOf(t), lines...); o.Tokens != want {
			t.Errorf("%q: %d tokens, want %d", lines, o.Tokens, want)
		}
	}
}

func TestTheSourceIsTheTrailerIfItToldAnything(t *testing.T) {
	for name, c := range map[string]struct {
		lines []string
		want  string
	}{
		"nothing":                   {nil, ""},
		"other fields":              {[]string{"content-type: text/plain", "~checksum: 5"}, ""},
		"a header":                  {[]string{"server-timing: queue;dur=1"}, "header"},
		"a trailer":                 {[]string{"~server-timing: queue;dur=1"}, "trailer"},
		"both":                      {[]string{"server-timing: queue;dur=1", "~server-timing: forward;dur=1"}, "trailer"},
		"a trailer without timings": {[]string{"server-timing: queue;dur=1", "~server-timing: forward;batch=1"}, "header"},
		"in whichever order":        {[]string{"~server-timing: queue;dur=1", "server-timing: forward;dur=1"}, "trailer"},
		"a mapped trailer":          {[]string{"~took: 5"}, "trailer"},
		"x-queue-time":              {[]string{"x-queue-time: 5"}, "header"},
	} {
		if o := readAnswer(ingestOf(t, Mapping{Name: "took", Stage: "forward", Unit: "s"}), c.lines...); o.Source != c.want {
			t.Errorf("%s: source %q, want %q", name, o.Source, c.want)
		}
	}
	if o := readAnswer(ingestOf(t), "server-timing: queue;dur=1, forward;dur=2", "~server-timing: forward;dur=3"); shown(o.Timings) != "queue:queue 1ms, forward:forward 2ms, forward:forward 3ms" {
		t.Errorf("header and trailer together: %s", shown(o.Timings))
	}
}

// A weir in front of the server tells all of its answer again, merged.
func TestBehindAnotherWeirItsAccountCounts(t *testing.T) {
	told := "h2d;dur=1;bytes=5, forward;dur=2;batch=9;tokens=7;audio=30, total;dur=40"
	weir := "weir-queue;dur=100.5, queue;dur=3, forward;dur=2;batch=4;seq=3, total;dur=30"
	want := "weir-queue:queue 100.5ms, queue:queue 3ms, forward:forward 2ms, total:other 30ms"
	for name, lines := range map[string][]string{
		"in a field of its own": {"x-queue-time: 3", "Server-Timing: " + told, "x-generated-tokens: 5", "Server-Timing: " + weir},
		"joined by a proxy":     {"x-queue-time: 3", "Server-Timing: " + told + "," + strings.ToUpper(weir)},
		"two weirs":             {"Server-Timing: " + told, "Server-Timing: weir-queue;dur=7, forward;dur=2;batch=6", "Server-Timing: " + weir},
		"after a flood":         {"Server-Timing: " + strings.Repeat("x;dur=1,", 50), "Server-Timing: " + told, "Server-Timing: " + weir},
	} {
		in := ingestOf(t)
		o := readAnswer(in, lines...)
		if got := shown(o.Timings); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		if o.BatchSize != 4 || o.SeqLen != 3 || o.Tokens != 0 || o.ServerTotal != 30*milli {
			t.Errorf("%s: batch %d, seq %d, tokens %d, total %v: want 4, 3, 0, 30ms", name, o.BatchSize, o.SeqLen, o.Tokens, o.ServerTotal)
		}
		if d, _ := o.In(classifier.StageQueue); d != 103500*time.Microsecond {
			t.Errorf("%s: %v of queueing, want both queues", name, d)
		}
		if o.AudioSeconds != 30 {
			t.Errorf("%s: %v s of audio, want 30: weir does not tell it again", name, o.AudioSeconds)
		}
	}
}

func TestWhatAWeirTellsIsReadByTheNext(t *testing.T) {
	begin := time.Now()
	inner := readTimings(t, canonicalHeader+", Cache;dur=1")
	inner.Enqueued, inner.Dequeued, inner.Responded = begin, begin.Add(25*milli), begin.Add(time.Second)
	outer := readTimings(t, canonicalHeader+", Cache;dur=1", string(AppendServerTiming(nil, inner)))
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		want, _ := inner.In(s)
		if s == classifier.StageQueue {
			want += 25 * milli
		}
		if got, _ := outer.In(s); got != want {
			t.Errorf("%v took %v, want %v", s, got, want)
		}
	}
	if outer.BatchSize != 8 || outer.SeqLen != 1500 || outer.Tokens != 96 || outer.ServerTotal != inner.ServerTotal {
		t.Errorf("batch %d, seq %d, tokens %d, total %v", outer.BatchSize, outer.SeqLen, outer.Tokens, outer.ServerTotal)
	}
	if got, want := shown(outer.Timings[len(outer.Timings)-1:]), "Cache:other 1ms"; got != want {
		t.Errorf("the last timing is %s, want %s", got, want)
	}
}

func TestMappedNamesAreRead(t *testing.T) {
	mappings := []Mapping{
		{Name: "x-asr-queue", Stage: "queue", Unit: "us"},
		{Name: "x-asr-features", Stage: "preprocess", Unit: "ns"},
		{Name: "x-asr-decode", Stage: "forward", Unit: "s"},
		{Name: "x-asr-text", Stage: "postprocess", Unit: "ms"},
		{Name: "x-asr-copy", Stage: "transfer", Unit: "ms"},
		{Name: "x-asr-misc", Stage: "other", Unit: "ms"},
		{Name: "x-asr-total", Stage: "total", Unit: "us"},
		{Name: "vad", Stage: "preprocess"},
		{Name: "whole", Stage: "total"},
		{Name: "encode", Stage: "preprocess"},
		{Name: "x-runtime", Stage: "forward", Unit: "ms"},
		{Name: "x-queue-time", Stage: "queue", Unit: "s"},
		{Name: "x-compute-time", Stage: "forward", Unit: "s"},
		{Name: "openai-processing-ms", Stage: "total", Unit: "us"},
	}
	for _, c := range []struct {
		name  string
		lines []string
		want  string
		total time.Duration
	}{
		{"each unit", []string{"X-ASR-Queue: 1500", "x-asr-features: 2500000", "x-asr-decode: 0.5", "x-asr-text: 3", "x-asr-copy: 4", "x-asr-misc: 5", "x-asr-total: 9000"},
			"x-asr-queue:queue 1.5ms, x-asr-features:preprocess 2.5ms, x-asr-decode:forward 500ms, x-asr-text:postprocess 3ms, x-asr-copy:transfer 4ms, x-asr-misc:other 5ms", 9 * milli},
		{"as trailers", []string{"~x-asr-decode: 0.5"}, "x-asr-decode:forward 500ms", 0},
		{"told twice", []string{"x-asr-decode: 0.5", "x-asr-decode: 0.25"}, "x-asr-decode:forward 500ms, x-asr-decode:forward 250ms", 0},
		{"as metrics, in their unit", []string{"server-timing: x-asr-queue;dur=1500;n=2, X-Asr-Decode;dur=0.5;batch=3"}, "x-asr-queue:queue 1.5ms n=2, x-asr-decode:forward 500ms", 0},
		{"metrics, in ms", []string{"server-timing: VAD;dur=7, whole;dur=8"}, "vad:preprocess 7ms, total:other 8ms", 8 * milli},
		{"a metric is no header", []string{"vad: 7", "whole: 8", "encode: 9"}, "", 0},
		{"before built-in words", []string{"server-timing: Encode;dur=7, prefill;dur=8"}, "encode:preprocess 7ms, prefill:forward 8ms", 0},
		{"before built-in headers", []string{"x-runtime: 7", "x-queue-time: 2", "x-compute-time: 3", "openai-processing-ms: 5000"},
			"x-runtime:forward 7ms, x-queue-time:queue 2s, x-compute-time:forward 3s", 5 * milli},
		{"what is no number", []string{"x-asr-queue: 5ms", "x-asr-decode:", "x-asr-text: -1", "x-asr-total: x"},
			"x-asr-queue:queue 0s untrusted, x-asr-decode:forward 0s untrusted, x-asr-text:postprocess 0s untrusted", 0},
		{"other names as long", []string{"x-asr-queux: 1", "x-asr: 5", "x: 5"}, "", 0},
	} {
		in := ingestOf(t, mappings...)
		o := readAnswer(in, c.lines...)
		in.Finish(o)
		if got := shown(o.Timings); got != c.want || o.ServerTotal != c.total {
			t.Errorf("%s: %s, total %v\nwant %s, total %v", c.name, got, o.ServerTotal, c.want, c.total)
		}
	}
	if o := readAnswer(ingestOf(t, mappings...), "server-timing: x-asr-decode;dur=1;batch=3;seq=5, vad;dur=1;batch=7"); o.BatchSize != 3 || o.SeqLen != 5 {
		t.Errorf("batch %d, seq %d of a mapped forward pass: want 3, 5", o.BatchSize, o.SeqLen)
	}
	longest := strings.Repeat("a", 63)
	if o := readAnswer(ingestOf(t, Mapping{Name: longest, Stage: "forward", Unit: "ms"}), longest+": 5", longest+"a: 6"); shown(o.Timings) != longest+":forward 5ms" {
		t.Errorf("the longest name: %s", shown(o.Timings))
	}
}

func TestAMappingThatIsWrongIsRefusedWithItsRemedy(t *testing.T) {
	for _, c := range []struct {
		mapping Mapping
		want    []string
	}{
		{Mapping{Name: "", Stage: "queue"}, []string{`name ""`, "lower-case"}},
		{Mapping{Name: "X-Wait", Stage: "queue"}, []string{`name "X-Wait"`, "lower-case"}},
		{Mapping{Name: "x wait", Stage: "queue"}, []string{`name "x wait"`}},
		{Mapping{Name: "x-wait:", Stage: "queue"}, []string{`name "x-wait:"`}},
		{Mapping{Name: "wärten", Stage: "queue"}, []string{`name "wärten"`}},
		{Mapping{Name: strings.Repeat("a", 64), Stage: "queue"}, []string{"at most 63"}},
		{Mapping{Name: "server-timing", Stage: "queue", Unit: "ms"}, []string{`"server-timing"`, "name the metric"}},
		{Mapping{Name: "x-wait", Stage: ""}, []string{`stage ""`, `"x-wait"`, "queue, preprocess, transfer, forward, postprocess, other or total"}},
		{Mapping{Name: "x-wait", Stage: "Queue"}, []string{`stage "Queue"`, `"x-wait"`}},
		{Mapping{Name: "x-wait", Stage: "decode"}, []string{`stage "decode"`}},
		{Mapping{Name: "x-wait", Stage: "queue", Unit: "m"}, []string{`unit "m"`, `"x-wait"`, "ms, s, us or ns"}},
		{Mapping{Name: "x-wait", Stage: "queue", Unit: "MS"}, []string{`unit "MS"`}},
		{Mapping{Name: "twice", Stage: "queue"}, []string{`"twice" is mapped twice`}},
	} {
		in, err := NewIngest([]Mapping{{Name: "twice", Stage: "forward", Unit: "ms"}, c.mapping})
		if err == nil || in != nil {
			t.Errorf("%+v is accepted", c.mapping)
			continue
		}
		for _, part := range append(c.want, "timings: ") {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%+v: %v, want it to say %s", c.mapping, err, part)
			}
		}
	}
}

// aRequest has a window of 1s to the head of its answer and of 3s to its end.
func aRequest(o *classifier.Observation) *classifier.Observation {
	begin := time.Now()
	o.Enqueued, o.Dequeued, o.Sent = begin.Add(-time.Hour), begin, begin.Add(900*milli)
	o.Responded, o.Done = begin.Add(time.Second), begin.Add(3*time.Second)
	return o
}

func TestWhatTookLongerThanTheServerHadTheRequestIsUntrusted(t *testing.T) {
	for _, c := range []struct {
		name, line, want string
		total            time.Duration
		untrusted        uint64
	}{
		{"as long as 5 % and 2 ms more", "server-timing: forward;dur=1052", "forward:forward 1.052s", 0, 0},
		{"longer", "server-timing: forward;dur=1052.000001, queue;dur=3", "forward:forward 1.052000001s untrusted, queue:queue 3ms", 0, 1},
		{"each stage by itself: they may overlap", "server-timing: forward;dur=1000, h2d;dur=1000, queue;dur=1000", "forward:forward 1s, h2d:transfer 1s, queue:queue 1s", 0, 0},
		{"a total in time", "server-timing: total;dur=1052", "total:other 1.052s", 1052 * milli, 0},
		{"a total", "server-timing: total;dur=1053, queue;dur=1", "total:other 1.053s untrusted, queue:queue 1ms", 0, 1},
		{"a header's total in time", "x-total-time: 1052", "", 1052 * milli, 0},
		{"a header's total", "x-total-time: 1053", "", 0, 1},
		{"an x-*-time header", "x-queue-time: 1053", "x-queue-time:queue 1.053s untrusted", 0, 1},
		{"a mapped header", "took: 1.053", "took:forward 1.053s untrusted", 0, 1},
		{"unknown words too", "server-timing: x;dur=5000", "x:other 5s untrusted", 0, 1},
		{"a trailer has until the end", "~server-timing: forward;dur=3152, total;dur=3152", "forward:forward 3.152s, total:other 3.152s", 3152 * milli, 0},
		{"but no longer", "~server-timing: forward;dur=3152.5, queue;dur=1", "forward:forward 3.1525s untrusted, queue:queue 1ms", 0, 1},
		{"what could not be read is counted with it", "server-timing: forward;dur=x, queue;dur=5000, total;dur=1e99", "forward:forward 0s untrusted, queue:queue 5s untrusted, total:other 0s untrusted", 0, 3},
	} {
		in := ingestOf(t, Mapping{Name: "took", Stage: "forward", Unit: "s"})
		o := aRequest(readAnswer(in, c.line))
		in.Finish(o)
		if got := shown(o.Timings); got != c.want || o.ServerTotal != c.total || in.Untrusted() != c.untrusted {
			t.Errorf("%s: %s, total %v, %d untrusted\nwant %s, total %v, %d", c.name, got, o.ServerTotal, in.Untrusted(), c.want, c.total, c.untrusted)
		}
	}
}

func TestTwoMillisecondsAreForgivenOnTheShortestRequests(t *testing.T) {
	for window, longest := range map[time.Duration]time.Duration{
		0:                      2 * milli,
		10 * time.Microsecond:  2*milli + 10500,
		40 * milli:             44 * milli,
		time.Hour:              time.Hour + 3*time.Minute + 2*milli,
		-time.Second:           2 * milli, // never: instants are of one clock
		100 * time.Millisecond: 107 * milli,
	} {
		for _, extra := range []time.Duration{0, 1} {
			in := ingestOf(t)
			o := &classifier.Observation{Timings: []classifier.Timing{{Name: "forward", Stage: classifier.StageForward, Dur: longest + extra}}, Source: "header", Dequeued: time.Now()}
			o.Responded = o.Dequeued.Add(window)
			o.Done = o.Responded.Add(time.Hour)
			in.Finish(o)
			if o.Timings[0].Untrusted != (extra > 0) {
				t.Errorf("%v of %v: untrusted is %v", longest+extra, window, o.Timings[0].Untrusted)
			}
		}
	}
}

func TestWithoutAWindowNothingIsDoubted(t *testing.T) {
	for name, forget := range map[string]func(*classifier.Observation){
		"never admitted":              func(o *classifier.Observation) { o.Dequeued = time.Time{} },
		"never answered":              func(o *classifier.Observation) { o.Responded = time.Time{} },
		"a trailer of an endless one": func(o *classifier.Observation) { o.Source, o.Done = "trailer", time.Time{} },
	} {
		in := ingestOf(t)
		o := aRequest(readAnswer(in, "server-timing: forward;dur=99999, total;dur=99999, queue;dur=x"))
		forget(o)
		in.Finish(o)
		if got := shown(o.Timings); got != "forward:forward 1m39.999s, total:other 1m39.999s, queue:queue 0s untrusted" || o.ServerTotal != 99999*milli || in.Untrusted() != 1 {
			t.Errorf("%s: %s, total %v, %d untrusted", name, got, o.ServerTotal, in.Untrusted())
		}
	}
}

func TestANilIngestReadsNothing(t *testing.T) {
	var in *Ingest
	o := readAnswer(in, "server-timing: queue;dur=x", "~x-queue-time: 5", "x-total-time: 5")
	in.Finish(o)
	if len(o.Timings) != 0 || o.ServerTotal != 0 || in.Untrusted() != 0 {
		t.Errorf("%+v", o)
	}
}

func TestOneIngestServesAllConnections(t *testing.T) {
	in := ingestOf(t, Mapping{Name: "vad", Stage: "preprocess"})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				in.Finish(aRequest(readAnswer(in, "server-timing: vad;dur=1, queue;dur=x", "x-total-time: 99999")))
			}
		})
	}
	wg.Wait()
	if in.Untrusted() != 1600 {
		t.Errorf("%d untrusted, want 1600", in.Untrusted())
	}
}

func TestNamesAndValuesAreCopied(t *testing.T) {
	in, o := ingestOf(t, Mapping{Name: "x-asr", Stage: "forward", Unit: "s"}), &classifier.Observation{}
	for _, l := range []string{"Server-Timing: Cache;dur=1, QUEUE;dur=2, vad;dur=3", "X-Asr: 1", "X-Inference-Time: 3", "X-Validation-Time: 3", "X-Compute-Time: 1"} {
		b := []byte(l)
		name, value, _ := bytes.Cut(b, []byte(":"))
		in.Header(o, name, value)
		for i := range b {
			b[i] = '~'
		}
	}
	wantTimings(t, o, "Cache:other 1ms, queue:queue 2ms, vad:other 3ms, x-asr:forward 1s, x-validation-time:preprocess 3ms, (x-compute-time):other 1ms")
}

func TestAFieldThatTellsNothingCostsNoAllocation(t *testing.T) {
	in := ingestOf(t, Mapping{Name: "x-asr-decode", Stage: "forward", Unit: "s"})
	var o classifier.Observation
	for _, l := range []string{
		"", ":", "content-type: application/json", "Server: uvicorn", "server-timinh: queue;dur=1", "Server-Timings: queue;dur=1", "set-cookie: a=b", "X-Request-Id: 5", "x-asr-decodd: 1",
		"openai-processing-mt: 5", "openai-version: 2020", "x-envoy-upstream-service-tims: 5", "x-queue-timf: 5", "x: 5", "date: today", strings.Repeat("x", 12) + ": 1", strings.Repeat("x", 300) + ": 1",
	} {
		name, value, _ := strings.Cut(l, ":")
		n, v := []byte(name), []byte(value)
		if allocs := testing.AllocsPerRun(100, func() {
			in.Header(&o, n, v)
			in.Trailer(&o, n, v)
		}); allocs != 0 {
			t.Errorf("%s: %v allocations, want none", l, allocs)
		}
	}
	if got := fmt.Sprintf("%+v", o); got != fmt.Sprintf("%+v", classifier.Observation{}) {
		t.Errorf("they told %s", got)
	}
	if allocs := testing.AllocsPerRun(100, func() { in.Finish(&o) }); allocs != 0 {
		t.Errorf("finishing costs %v allocations, want none", allocs)
	}
}

func TestTotalsCostNoAllocation(t *testing.T) {
	in := ingestOf(t)
	var o classifier.Observation
	for _, name := range []string{"x-total-time", "openai-processing-ms", "x-runtime", "x-envoy-upstream-service-time", "x-generated-tokens"} {
		n, v := []byte(name), []byte("12")
		if allocs := testing.AllocsPerRun(100, func() { in.Header(&o, n, v) }); allocs != 0 {
			t.Errorf("%s: %v allocations, want none", name, allocs)
		}
	}
}

func BenchmarkIrrelevantHeader(b *testing.B) {
	in := ingestOf(b, Mapping{Name: "x-asr-decode", Stage: "forward", Unit: "s"})
	for _, name := range []string{"Content-Type", "Server", "X-Request-Id", "X-Asr-Decodd"} {
		b.Run(name, func(b *testing.B) {
			var o classifier.Observation
			n, v := []byte(name), []byte("application/json")
			b.ReportAllocs()
			for b.Loop() {
				in.Header(&o, n, v)
			}
		})
	}
}

func BenchmarkTGI(b *testing.B) {
	in := ingestOf(b)
	var names, values [][]byte
	for _, l := range []string{"x-compute-type: gpu", "x-compute-time: 0.613", "x-total-time: 613", "x-validation-time: 1", "x-queue-time: 180", "x-inference-time: 412", "x-generated-tokens: 96"} {
		name, value, _ := strings.Cut(l, ": ")
		names, values = append(names, []byte(name)), append(values, []byte(value))
	}
	b.ReportAllocs()
	for b.Loop() {
		var o classifier.Observation
		for i := range names {
			in.Header(&o, names[i], values[i])
		}
		in.Finish(&o)
		kept = o.Timings
	}
}
