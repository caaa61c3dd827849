package tracing

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

const milli = time.Millisecond

// ingestOf is an Ingest with the given mappings.
func ingestOf(t testing.TB, m ...Mapping) *Ingest {
	t.Helper()
	in, err := NewIngest(m)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// readTimings is what an answer with the given Server-Timing header fields tells.
func readTimings(t testing.TB, values ...string) *classifier.Observation {
	t.Helper()
	in, o := ingestOf(t), &classifier.Observation{}
	for _, v := range values {
		in.Header(o, []byte("Server-Timing"), []byte(v))
	}
	return o
}

// shown writes timings as "name:stage duration counts, ...", for tables.
func shown(timings []classifier.Timing) string {
	var all []string
	for _, t := range timings {
		s := fmt.Sprintf("%s:%v %v", t.Name, t.Stage, t.Dur)
		if t.Bytes != 0 {
			s += fmt.Sprintf(" bytes=%d", t.Bytes)
		}
		if t.Count != 0 {
			s += fmt.Sprintf(" n=%d", t.Count)
		}
		if t.Synced {
			s += " sync"
		}
		if t.Untrusted {
			s += " untrusted"
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

func wantTimings(t *testing.T, o *classifier.Observation, want string) {
	t.Helper()
	if got := shown(o.Timings); got != want {
		t.Errorf("timings\n%s\nwant\n%s", got, want)
	}
}

// canonicalHeader is the example of the canonical form, parameter by parameter.
const canonicalHeader = "queue;dur=180.2, preprocess;dur=14.8, h2d;dur=1.9;bytes=1228800;n=3, " +
	"forward;dur=412.5;batch=8;seq=1500;tokens=96;sync=1, " +
	"d2h;dur=0.6;bytes=49152;n=1, postprocess;dur=3.1, total;dur=613.9"

func TestTheCanonicalHeaderIsReadInFull(t *testing.T) {
	o := readTimings(t, canonicalHeader)
	wantTimings(t, o, "queue:queue 180.2ms, preprocess:preprocess 14.8ms, h2d:transfer 1.9ms bytes=1228800 n=3, "+
		"forward:forward 412.5ms sync, d2h:transfer 600µs bytes=49152 n=1, postprocess:postprocess 3.1ms, total:other 613.9ms")
	if o.BatchSize != 8 || o.SeqLen != 1500 || o.Tokens != 96 {
		t.Errorf("batch %d, seq %d, tokens %d: want 8, 1500, 96", o.BatchSize, o.SeqLen, o.Tokens)
	}
	if o.ServerTotal != 613900*time.Microsecond || o.Source != "header" {
		t.Errorf("total %v from %q: want 613.9ms from the header", o.ServerTotal, o.Source)
	}
	if bytes, copies := o.Moved(); bytes != 1228800+49152 || copies != 4 {
		t.Errorf("moved %d bytes in %d copies", bytes, copies)
	}
}

func TestTheWordsOfServersStandForStages(t *testing.T) {
	stages := map[classifier.Stage]string{
		classifier.StageQueue:       "queue wait weir-queue",
		classifier.StagePreprocess:  "preprocess tokenize validation feature",
		classifier.StageTransfer:    "h2d d2h transfer compute_input compute_output",
		classifier.StageForward:     "forward encode prefill decode inference infer predict compute_infer",
		classifier.StagePostprocess: "postprocess",
		classifier.StageOther:       "total",
	}
	n := 0
	for stage, names := range stages {
		for _, name := range strings.Fields(names) {
			n++
			for _, sent := range []string{name, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:]} {
				wantTimings(t, readTimings(t, sent+";dur=2"), fmt.Sprintf("%s:%v 2ms", name, stage))
			}
		}
	}
	if n != len(words) {
		t.Errorf("%d words are tested, weir knows %d", n, len(words))
	}
	if len(words) >= numWords {
		t.Errorf("%d words do not fit in %d places", len(words), numWords)
	}
}

func TestAWordThatIsUnknownIsKeptAsItCame(t *testing.T) {
	for sent, want := range map[string]string{
		"Cache_Read;dur=2.5":                         "Cache_Read:other 2.5ms",
		"forwards;dur=1":                             "forwards:other 1ms",
		"x;dur=1;batch=9":                            "x:other 1ms",
		"!#$%&'*+-.^_`|~09azAZ;dur=1":                "!#$%&'*+-.^_`|~09azAZ:other 1ms",
		strings.Repeat("a", 64) + ";dur=1":           strings.Repeat("a", 64) + ":other 1ms",
		strings.Repeat("a", 65) + ";dur=1":           strings.Repeat("a", 64) + ":other 1ms",
		strings.Repeat("a", 1000) + ";dur=1":         strings.Repeat("a", 64) + ":other 1ms",
		"queue" + strings.Repeat("e", 60) + ";dur=1": "queue" + strings.Repeat("e", 59) + ":other 1ms",
	} {
		o := readTimings(t, sent)
		wantTimings(t, o, want)
		if o.BatchSize != 0 {
			t.Errorf("%q: batch %d, want none: only the forward pass is batched", sent, o.BatchSize)
		}
	}
}

func TestAMetricWithoutADurationIsNoTiming(t *testing.T) {
	o := readTimings(t, `trace;desc=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01, cache;desc="hit", miss, forward;batch=4;seq=9;tokens=3;audio=2.5`)
	wantTimings(t, o, "")
	if o.Source != "" {
		t.Errorf("the source is %q, want none", o.Source)
	}
	if o.BatchSize != 4 || o.SeqLen != 9 || o.Tokens != 3 || o.AudioSeconds != 2.5 {
		t.Errorf("counts %d %d %d %v: want 4 9 3 2.5", o.BatchSize, o.SeqLen, o.Tokens, o.AudioSeconds)
	}
}

// counts is what a header's parameters say together.
type counts struct {
	bytes             int64
	n, batch, seq     int
	tokens            int
	audio             float64
	synced, untrusted bool
	dur               time.Duration
}

func countsOf(o *classifier.Observation) counts {
	c := counts{batch: o.BatchSize, seq: o.SeqLen, tokens: o.Tokens, audio: o.AudioSeconds}
	for _, t := range o.Timings {
		c.bytes, c.n, c.dur = c.bytes+t.Bytes, c.n+t.Count, c.dur+t.Dur
		c.synced, c.untrusted = c.synced || t.Synced, c.untrusted || t.Untrusted
	}
	return c
}

func TestEachParameterIsRead(t *testing.T) {
	for params, want := range map[string]counts{
		";bytes=1228800": {bytes: 1228800},
		";n=3":           {n: 3},
		";batch=8":       {batch: 8},
		";seq=1500":      {seq: 1500},
		";tokens=96":     {tokens: 96},
		";audio=30.5":    {audio: 30.5},
		";sync=1":        {synced: true},
		`;sync="1"`:      {synced: true},
		";sync=0":        {},
		";sync=2":        {},
		";sync=x":        {},
		";sync=true":     {},
		";sync=11":       {},
		";sync":          {},
		";BYTES=7;N=6;Batch=5;SEQ=4;tokenS=3;Audio=2;Sync=1": {bytes: 7, n: 6, batch: 5, seq: 4, tokens: 3, audio: 2, synced: true},
		`;bytes="7"; n = "6" ;batch= 5; seq =4`:              {bytes: 7, n: 6, batch: 5, seq: 4},
		"\t;\tbytes\t=\t7\t;n=6":                             {bytes: 7, n: 6},
		";bytes=1e6;batch=2.5":                               {bytes: 1000000, batch: 3},
		";shared=1;desc=forward;x-unknown=4;dura=7;yes":      {},
		";bytes=-1;n=-1;batch=-1;seq=-1;tokens=-1;audio=-1":  {},
		";bytes=x;n=0x10;batch=NaN;seq=Inf;tokens=1k;audio=": {},
		";batch=0;seq=0;tokens=0":                            {},
		";bytes=9007199254740992;n=9007199254740993":         {bytes: 1 << 53, n: 1 << 53},
		";bytes=9007199254740994;batch=1e30;tokens=1e999":    {},
		// The first of a name counts, even if it is malformed.
		";bytes=7;bytes=8;n=1;n=2;batch=3;batch=4":        {bytes: 7, n: 1, batch: 3},
		";seq=5;SEQ=6;tokens=7;tokens=8;audio=9;audio=10": {seq: 5, tokens: 7, audio: 9},
		";bytes=x;bytes=8;n;n=2;batch=-1;batch=4":         {},
		";sync=0;sync=1": {},
		";sync=1;sync=0": {synced: true},
		";dur=5;bytes=1": {bytes: 1},
	} {
		want.dur = milli
		if got := countsOf(readTimings(t, "forward;dur=1"+params)); got != want {
			t.Errorf("%q gives %+v, want %+v", params, got, want)
		}
	}
}

// Malformed text is passed over up to the next ";" or ",", and costs no more
// than what it stands in.
func TestWhatIsMalformedCostsNoGoodMember(t *testing.T) {
	for sent, want := range map[string]string{
		"":                                 "",
		",":                                "",
		" \t, ,,\t":                        "",
		";":                                "",
		";dur=5":                           "",
		`"queue";dur=5, wait;dur=1`:        "wait:queue 1ms",
		", ,queue;dur=1,,  ,wait;dur=2, ,": "queue:queue 1ms, wait:queue 2ms",
		"queue;dur=1,wait;dur=2":           "queue:queue 1ms, wait:queue 2ms",
		"  queue  ;  dur  =  1  ,\twait\t;\tdur\t=\t2\t": "queue:queue 1ms, wait:queue 2ms",
		`queue;dur="1.5"`:                           "queue:queue 1.5ms",
		`queue;dur=" 1.5"`:                          "queue:queue 0s untrusted",
		`queue;desc="a, b;dur=9";dur=1, wait;dur=2`: "queue:queue 1ms, wait:queue 2ms",
		`queue;desc="a\", b\\";dur=1, wait;dur=2`:   "queue:queue 1ms, wait:queue 2ms",
		`queue;dur=1;desc="no end, wait;dur=2`:      "queue:queue 1ms",
		`queue;dur=1;desc="ends in \`:               "queue:queue 1ms",
		`queue;dur="1`:                              "queue:queue 1ms",
		"queue;dur=1 ms, wait;dur=2":                "queue:queue 1ms, wait:queue 2ms",
		`queue;dur="1"ms;bytes=3`:                   "queue:queue 1ms bytes=3",
		"queue (of GPU 0);dur=1":                    "queue:queue 1ms",
		"queue;dur(ms)=1, wait;dur=2":               "queue:queue 0s untrusted, wait:queue 2ms",
		"queue;dur=1/2;n=3":                         "queue:queue 1ms n=3",
		"queue;dur=1=2;n=3":                         "queue:queue 1ms n=3",
		"queue=5;dur=1":                             "queue:queue 1ms",
		"queue;=5;dur=1":                            "queue:queue 1ms",
		"queue;;dur=1;":                             "queue:queue 1ms",
		"queue;dur=1,5;dur=2":                       "queue:queue 1ms, 5:other 2ms",
		"queue;(bad)=7;dur=1":                       "queue:queue 1ms",
		"(bad);dur=7, queue;dur=1":                  "queue:queue 1ms",
		"@, /, =, queue;dur=1":                      "queue:queue 1ms",
		"queue;dur, wait;dur=2":                     "queue:queue 0s untrusted, wait:queue 2ms",
		"queue;dur=, wait;dur=2":                    "queue:queue 0s untrusted, wait:queue 2ms",
		"queue;dur=abc;n=2, wait;dur=2":             "queue:queue 0s n=2 untrusted, wait:queue 2ms",
		"qu\x00eue;dur=1, wait;dur=2":               "qu:other 1ms, wait:queue 2ms",
		"\xff\xfe;dur=1, wait;dur=2":                "wait:queue 2ms",
		"qüeue;dur=1, wait;dur=2":                   "q:other 1ms, wait:queue 2ms",
		// The first duration counts, even if it is malformed.
		"queue;dur=1;dur=2":      "queue:queue 1ms",
		"queue;DUR=1;dur=2":      "queue:queue 1ms",
		"queue;dur=x;dur=2":      "queue:queue 0s untrusted",
		"queue;dur;dur=2":        "queue:queue 0s untrusted",
		"queue;dur=-1;dur=2":     "queue:queue 0s untrusted",
		"queue;n=1;dur=2;n=3":    "queue:queue 2ms n=1",
		"queue;durx=1;dur=2":     "queue:queue 2ms",
		"queue;duration=1":       "",
		"queue;d\u00fcr=1":       "",
		"queue;dur\xa0=1":        "queue:queue 0s untrusted",
		"queue;desc=dur=3":       "",
		"dur=3":                  "",
		"queue dur=3, dur;dur=4": "dur:other 4ms",
	} {
		o := readTimings(t, sent)
		if got := shown(o.Timings); got != want {
			t.Errorf("%q gives\n%s\nwant\n%s", sent, got, want)
		}
	}
}

func TestADurationIsADecimalNumberOfMilliseconds(t *testing.T) {
	for sent, want := range map[string]time.Duration{
		"0":          0,
		"0.0":        0,
		"-0":         0,
		"12":         12 * milli,
		"412.5":      412500 * time.Microsecond,
		"0.000001":   1,
		"0.0000004":  0,
		".5":         500 * time.Microsecond,
		"5.":         5 * milli,
		"+5":         5 * milli,
		"1.2e3":      1200 * milli,
		"1E+3":       1000 * milli,
		"5e-3":       5 * time.Microsecond,
		"007":        7 * milli,
		"1e-400":     0,
		"3600000000": maxDuration,
		"180.19999999999998863131622783839702606201": -1, // over 40 characters
		"180.1999999999999886313162278":              180200 * time.Microsecond,
		"3600000000.001":                             -1,
		"1e10":                                       -1,
		"1e999":                                      -1,
		"-1":                                         -1,
		"-0.001":                                     -1,
		"-1e-9":                                      -1,
		"NaN":                                        -1,
		"nan":                                        -1,
		"Inf":                                        -1,
		"+Inf":                                       -1,
		"-Infinity":                                  -1,
		"0x10":                                       -1,
		"0x1p4":                                      -1,
		"1_000":                                      -1,
		"5ms":                                        -1,
		"5s":                                         -1,
		"1.2.3":                                      -1,
		"1e":                                         -1,
		"e3":                                         -1,
		".":                                          -1,
		"-":                                          -1,
		"--1":                                        -1,
		"x":                                          -1,
	} {
		o := readTimings(t, "queue;dur="+sent+", wait;dur=1")
		line := fmt.Sprintf("queue:queue %v", want)
		if want < 0 {
			line = "queue:queue 0s untrusted"
		}
		if got := shown(o.Timings); got != line+", wait:queue 1ms" {
			t.Errorf("dur=%s gives %s, want %s", sent, got, line)
		}
		d, _ := o.In(classifier.StageQueue)
		if d != max(0, want)+milli {
			t.Errorf("dur=%s counts as %v", sent, d-milli)
		}
	}
}

// A long audio is worked on in chunks: each is told, all are one stage.
func TestRepeatsAreSummedAndKept(t *testing.T) {
	chunks := "h2d;dur=1;bytes=100;n=1, forward;dur=10, Forward;dur=20, h2d;dur=2;bytes=200;n=2, encode;dur=3, prefill;dur=4, decode;dur=5, compute_output;dur=1;n=4"
	list := "h2d:transfer 1ms bytes=100 n=1, forward:forward 10ms, forward:forward 20ms, h2d:transfer 2ms bytes=200 n=2, " +
		"encode:forward 3ms, prefill:forward 4ms, decode:forward 5ms, compute_output:transfer 1ms n=4"
	for name, o := range map[string]*classifier.Observation{
		"one field":    readTimings(t, chunks),
		"a field each": readTimings(t, strings.Split(chunks, ", ")...),
	} {
		wantTimings(t, o, list)
		if d, _ := o.In(classifier.StageForward); d != 42*milli {
			t.Errorf("%s: %v of forward passes, want 42ms", name, d)
		}
		if d, _ := o.In(classifier.StageTransfer); d != 4*milli {
			t.Errorf("%s: %v of transfers, want 4ms", name, d)
		}
		if bytes, copies := o.Moved(); bytes != 300 || copies != 7 {
			t.Errorf("%s: %d bytes in %d copies, want 300 in 7", name, bytes, copies)
		}
	}
}

func TestBatchAndSequenceAreMeansByDuration(t *testing.T) {
	for sent, want := range map[string][2]int{
		"forward;dur=30;batch=8;seq=1000, forward;dur=10;batch=4;seq=200":                {7, 800},
		"encode;dur=30;batch=8, decode;dur=10;batch=4":                                   {7, 0},
		"forward;dur=30;batch=8, forward;dur=1000, forward;dur=10;batch=4":               {7, 0},
		"forward;dur=30;batch=8, forward;dur=10;batch=0":                                 {8, 0},
		"forward;dur=1;batch=1, forward;dur=1;batch=2":                                   {2, 0},
		"forward;dur=0;batch=3":                                                          {3, 0},
		"forward;dur=0;batch=3, forward;dur=10;batch=5":                                  {5, 0},
		"forward;batch=3, forward;dur=10;batch=5":                                        {5, 0},
		"forward;dur=x;batch=3, forward;dur=10;batch=5":                                  {5, 0},
		"forward;dur=x;batch=3":                                                          {3, 0},
		"preprocess;dur=90;batch=100;seq=100, total;dur=99;batch=100, queue;dur=1;seq=7": {0, 0},
		"forward;dur=10;seq=7, queue;dur=1000;seq=9":                                     {0, 7},
	} {
		if o := readTimings(t, sent); o.BatchSize != want[0] || o.SeqLen != want[1] {
			t.Errorf("%q: batch %d, seq %d, want %v", sent, o.BatchSize, o.SeqLen, want)
		}
		fields := strings.Split(sent, ", ")
		if o := readTimings(t, fields...); strings.Count(sent, "batch=") == len(fields) && o.BatchSize != want[0] {
			t.Errorf("%q in fields of their own: batch %d, want %d", sent, o.BatchSize, want[0])
		}
	}
}

// Parts of the work add up; two words for the same work do not.
func TestTokensAndAudioOfChunksAddUpAndOfOtherWordsDoNot(t *testing.T) {
	for sent, want := range map[string]counts{
		"forward;tokens=3;audio=30, forward;tokens=4;audio=12.5": {tokens: 7, audio: 42.5},
		"forward;tokens=3, FORWARD;tokens=4":                     {tokens: 7},
		"decode;tokens=9;audio=5, total;tokens=9;audio=5":        {tokens: 9, audio: 5},
		"prefill;tokens=2, decode;tokens=9, decode;tokens=1":     {tokens: 10},
		"total;audio=30":     {audio: 30},
		"forward;tokens=0.6": {tokens: 1},
		"forward;tokens=9007199254740992, forward;tokens=9007199254740992": {tokens: 1 << 53},
	} {
		if got := countsOf(readTimings(t, sent)); got != want {
			t.Errorf("%q gives %+v, want %+v", sent, got, want)
		}
	}
	o := readTimings(t, "forward;tokens=9;audio=5", "total;tokens=8;audio=6", "x;dur=1")
	if o.Tokens != 9 || o.AudioSeconds != 6 {
		t.Errorf("of three fields: %d tokens, %v s of audio, want the largest", o.Tokens, o.AudioSeconds)
	}
}

func TestTimingsPastTheLimitAreCutAndMarked(t *testing.T) {
	list := func(n int) string { return strings.TrimSuffix(strings.Repeat("forward;dur=1, ", n), ", ") }
	for n, marked := range map[int]bool{31: false, 32: false, 33: true, 100: true} {
		o := readTimings(t, list(n))
		if got := len(o.Timings); got != min(n, 33) {
			t.Errorf("%d timings were told, %d are kept", n, got)
		}
		last := o.Timings[len(o.Timings)-1]
		if is := last == (classifier.Timing{Name: truncated, Untrusted: true}); is != marked {
			t.Errorf("of %d timings the last is %+v", n, last)
		}
		if d, _ := o.In(classifier.StageForward); d != time.Duration(min(n, 32))*milli {
			t.Errorf("of %d timings %v count", n, d)
		}
	}
	// The limit is the request's, not the field's, and metrics that are no timings do not count.
	o := readTimings(t, list(20)+strings.Repeat(", x;desc=1", 30), list(12))
	if len(o.Timings) != 32 || shown(o.Timings[31:]) != "forward:forward 1ms" {
		t.Errorf("%d timings, the last %s: want 32 good ones", len(o.Timings), shown(o.Timings[31:]))
	}
	o = readTimings(t, list(20), list(12), "queue;dur=1", "queue;dur=1")
	if len(o.Timings) != 33 || !o.Timings[32].Untrusted {
		t.Errorf("%d timings: want 32 and one mark", len(o.Timings))
	}
}

func TestALongFieldIsCutAtItsLastWholeMetric(t *testing.T) {
	const limit = 8192
	good := "queue;dur=1, preprocess;dur=2, "
	pad := func(n int, after string) string { // n bytes before after
		return good + `x;desc="` + strings.Repeat("p", n-len(good)-len(`x;desc="", `)) + `", ` + after
	}
	kept, mark := "queue:queue 1ms, preprocess:preprocess 2ms", ", (truncated):other 0s untrusted"
	for name, c := range map[string]struct{ sent, want string }{
		"as long as may be":    {pad(limit-len("wait;dur=3"), "wait;dur=3"), kept + ", wait:queue 3ms"},
		"one byte longer":      {pad(limit-len("wait;dur=3")+1, "wait;dur=3"), kept + mark},
		"cut right at a comma": {pad(limit-len("wait;dur=3"), "wait;dur=3, forward;dur=4"), kept + ", wait:queue 3ms" + mark},
		"cut in a number":      {pad(limit-len("wait;dur=3"), "wait;dur=34"), kept + mark},
		"cut in a long metric": {good + "x;dur=3;desc=" + strings.Repeat("p", limit), kept + mark},
		"no comma at all":      {"queue;dur=1;desc=" + strings.Repeat("p", limit), mark[2:]},
	} {
		if got := shown(readTimings(t, c.sent).Timings); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestWhatIsToldToTheClientIsMergedUnderCanonicalNames(t *testing.T) {
	begin := time.Now()
	queued := func(o *classifier.Observation) {
		o.Enqueued, o.Dequeued, o.Responded = begin, begin.Add(12345678), begin.Add(12345678+time.Second)
	}
	for _, c := range []struct{ name, told, want string }{
		{"nothing told", "", "weir-queue;dur=12.346"},
		{"the canonical header", canonicalHeader, "weir-queue;dur=12.346, queue;dur=180.2, preprocess;dur=14.8, h2d;dur=1.9;bytes=1228800;n=3, " +
			"forward;dur=412.5;batch=8;seq=1500;tokens=96;sync=1, d2h;dur=0.6;bytes=49152;n=1, postprocess;dur=3.1, total;dur=613.9"},
		{"aliases and repeats, in any order", "decode;dur=5, prefill;dur=4, WAIT;dur=1, feature;dur=1, tokenize;dur=2, compute_output;dur=1;n=1, compute_input;dur=2;bytes=3, transfer;dur=7",
			"weir-queue;dur=12.346, queue;dur=1, preprocess;dur=3, h2d;dur=2;bytes=3, transfer;dur=7, forward;dur=9, d2h;dur=1;n=1"},
		{"synchronised only if all parts are", "forward;dur=1;sync=1, forward;dur=1, h2d;dur=1;sync=1, h2d;dur=1;sync=1, d2h;dur=1, d2h;dur=1;sync=1",
			"weir-queue;dur=12.346, h2d;dur=2;sync=1, forward;dur=2, d2h;dur=2"},
		{"unknown words last, as they came", "Cache;dur=1.25, total;dur=3, queue;dur=0", "weir-queue;dur=12.346, queue;dur=0, total;dur=3, Cache;dur=1.25"},
		{"less what cannot be true", "queue;dur=-1, wait;dur=5, forward;dur=2000, lie;dur=2000, x;dur=abc, total;dur=2000", "weir-queue;dur=12.346, queue;dur=5"},
		{"nothing of what cannot be read", "queue;dur=x, h2d;dur=-1;bytes=5;n=6, forward;dur=1", "weir-queue;dur=12.346, forward;dur=1"},
		{"decimals", "queue;dur=0.0004, preprocess;dur=0.0005, h2d;dur=1.0015, forward;dur=100.05, d2h;dur=0.9999", "weir-queue;dur=12.346, queue;dur=0, preprocess;dur=0.001, h2d;dur=1.002, forward;dur=100.05, d2h;dur=1"},
		{"cut", strings.Repeat("forward;dur=1,", 40), "weir-queue;dur=12.346, forward;dur=32"},
	} {
		o := readTimings(t, c.told)
		queued(o)
		if got := string(AppendServerTiming([]byte("> "), o)); got != "> "+c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
}

func TestAMappedNameIsToldUnderTheNameOfItsStage(t *testing.T) {
	in, o := ingestOf(t, Mapping{Name: "vad", Stage: "preprocess"}, Mapping{Name: "h2d", Stage: "forward"}, Mapping{Name: "encode", Stage: "other"}, Mapping{Name: "took", Stage: "total"}), &classifier.Observation{}
	in.Header(o, []byte("server-timing"), []byte("vad;dur=1, h2d;dur=2, encode;dur=3, took;dur=9"))
	if got, want := string(AppendServerTiming(nil, o)), "weir-queue;dur=0, preprocess;dur=1, forward;dur=2, total;dur=9, encode;dur=3"; got != want {
		t.Errorf("told\n%s\nwant\n%s", got, want)
	}
}

// FuzzServerTiming reads two fields of one answer, and what weir makes of them.
func FuzzServerTiming(f *testing.F) {
	for _, s := range []string{
		canonicalHeader, "", ",", ";dur=1", "queue;dur=-1", "queue;dur=NaN, wait;dur=1e999", `x;desc="a\",b";dur="2.5"`, `x;dur="`, "a;dur=1;dur=2",
		"weir-queue;dur=3, queue;dur=1", strings.Repeat("forward;dur=1;batch=2,", 40), "X-Compute-Time;dur=1, x-queue-time;dur=2", "total;dur=3600000000, forward;dur=3600000000",
		"(truncated);dur=1", "forward;bytes=9007199254740992;n=9007199254740992;dur=0;tokens=9e15;audio=9e15", "Ünïcode;dur=1", "q\x00;dur=1",
	} {
		f.Add([]byte(s), []byte(canonicalHeader), int64(time.Second))
		f.Add([]byte("decode;dur=7;batch=3"), []byte(s), int64(0))
	}
	f.Fuzz(func(t *testing.T, header, trailer []byte, window int64) {
		in, o := ingestOf(t), &classifier.Observation{}
		first, second := bytes.Clone(header), bytes.Clone(trailer)
		in.Header(o, []byte("Server-Timing"), first)
		in.Trailer(o, []byte("server-timing"), second)
		checkBounds(t, o)
		checkNoAlias(t, o, first, second)
		checkTold(t, o)
		checkGoodMembers(t, header)
		checkFinished(t, in, o, time.Duration(uint64(window)%uint64(2*maxDuration)))
	})
}

func checkBounds(t *testing.T, o *classifier.Observation) {
	if len(o.Timings) > maxTimings+1 {
		t.Errorf("%d timings", len(o.Timings))
	}
	for _, one := range o.Timings {
		if one.Dur < 0 || one.Dur > maxDuration || one.Untrusted && one.Dur != 0 || one.Bytes < 0 || one.Bytes > maxCount || one.Count < 0 || one.Count > maxCount || one.Name == "" || len(one.Name) > maxName {
			t.Errorf("%+v", one)
		}
	}
	if o.BatchSize < 0 || o.SeqLen < 0 || o.Tokens < 0 || o.Tokens > maxCount || !(o.AudioSeconds >= 0) || math.IsInf(o.AudioSeconds, 0) || o.ServerTotal < 0 || o.ServerTotal > maxDuration {
		t.Errorf("batch %d, seq %d, tokens %d, audio %v, total %v", o.BatchSize, o.SeqLen, o.Tokens, o.AudioSeconds, o.ServerTotal)
	}
}

// checkNoAlias overwrites the network's buffers, as the next answer does.
func checkNoAlias(t *testing.T, o *classifier.Observation, fields ...[]byte) {
	before := strings.Clone(shown(o.Timings))
	for _, b := range fields {
		for i := range b {
			b[i] = '~'
		}
	}
	if after := shown(o.Timings); after != before {
		t.Errorf("the record holds the network's buffer: %s became %s", before, after)
	}
}

// checkTold reads what weir tells its client: it says the same, and as often
// as it is told on.
func checkTold(t *testing.T, o *classifier.Observation) {
	first := AppendServerTiming(nil, o)
	again := readTimings(t, string(first))
	if len(o.Timings) > maxTimings-2 || len(first) > maxServerTiming {
		return // another weir may have to cut more
	}
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		want, _ := o.In(s)
		if got, _ := again.In(s); (got-want).Abs() > 2*time.Microsecond && want <= maxDuration {
			t.Errorf("%v took %v, weir tells of %v: %s", s, want, got, first)
		}
	}
	wantBytes, wantCopies := o.Moved()
	if bytes, copies := again.Moved(); wantBytes <= maxCount && wantCopies <= maxCount && (bytes != wantBytes || copies != wantCopies) && durationsFit(o) {
		t.Errorf("moved %d in %d, weir tells of %d in %d: %s", wantBytes, wantCopies, bytes, copies, first)
	}
	if d, ok := o.In(classifier.StageForward); ok && d <= maxDuration {
		if again.BatchSize != o.BatchSize || again.SeqLen != o.SeqLen || again.Tokens != o.Tokens {
			t.Errorf("batch %d, seq %d, tokens %d became %d, %d, %d", o.BatchSize, o.SeqLen, o.Tokens, again.BatchSize, again.SeqLen, again.Tokens)
		}
	}
	if (again.ServerTotal - o.ServerTotal).Abs() > time.Microsecond {
		t.Errorf("total %v became %v: %s", o.ServerTotal, again.ServerTotal, first)
	}
	second := AppendServerTiming(nil, again)
	third := AppendServerTiming(nil, readTimings(t, string(second)))
	if string(second) != string(third) {
		t.Errorf("what weir tells of\n%s\nis not what it makes of it,\n%s", second, third)
	}
}

func durationsFit(o *classifier.Observation) bool {
	d, _ := o.In(classifier.StageTransfer)
	return d <= maxDuration
}

// checkGoodMembers puts a good member in front: it is read whatever follows.
func checkGoodMembers(t *testing.T, rest []byte) {
	if strings.Contains(strings.ToLower(string(rest)), weirQueue) || len(rest) > maxServerTiming/2 {
		return // tells all again
	}
	o := readTimings(t, "postprocess;dur=7;n=2,"+string(rest))
	if len(o.Timings) == 0 || shown(o.Timings[:1]) != "postprocess:postprocess 7ms n=2" {
		t.Errorf("%s before %q", shown(o.Timings), rest)
	}
}

// checkFinished ends the request: nothing that counts took longer than the
// server had it.
func checkFinished(t *testing.T, in *Ingest, o *classifier.Observation, window time.Duration) {
	o.Enqueued = time.Unix(1788000000, 0)
	o.Dequeued = o.Enqueued.Add(time.Second)
	o.Responded = o.Dequeued.Add(window / 2)
	o.Done = o.Dequeued.Add(window)
	if o.Source != "trailer" {
		window /= 2
	}
	in.Finish(o)
	longest := time.Duration(float64(window)*1.05) + 2*milli + 1000
	for _, one := range o.Timings {
		if !one.Untrusted && one.Dur > longest {
			t.Errorf("%+v counts, the server had the request for %v", one, window)
		}
	}
	if o.ServerTotal > longest {
		t.Errorf("a total of %v counts, the server had the request for %v", o.ServerTotal, window)
	}
}

func TestAServerTimingFieldCostsOneAllocation(t *testing.T) {
	in, name, value := ingestOf(t, Mapping{Name: "vad", Stage: "preprocess"}), []byte("Server-Timing"), []byte(canonicalHeader)
	n := testing.AllocsPerRun(100, func() {
		var o classifier.Observation
		in.Header(&o, name, value)
		in.Finish(&o)
		kept = o.Timings
	})
	if n != 1 {
		t.Errorf("%v allocations, want 1", n)
	}
}

// kept keeps the compiler from placing timings on the stack.
var kept []classifier.Timing

func TestTellingTheClientCostsNoAllocation(t *testing.T) {
	o := readTimings(t, canonicalHeader)
	buf := make([]byte, 0, 1024)
	if n := testing.AllocsPerRun(100, func() { buf = AppendServerTiming(buf[:0], o) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func BenchmarkServerTiming(b *testing.B) {
	in, name, value := ingestOf(b), []byte("Server-Timing"), []byte(canonicalHeader)
	b.ReportAllocs()
	b.SetBytes(int64(len(value)))
	for b.Loop() {
		var o classifier.Observation
		in.Header(&o, name, value)
		kept = o.Timings
	}
}

func BenchmarkAppendServerTiming(b *testing.B) {
	o := readTimings(b, canonicalHeader)
	buf := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendServerTiming(buf[:0], o)
	}
}

// An audio file of a hundred million years would drown all others in the sums.
func TestAudioBeyondBeliefIsNotCounted(t *testing.T) {
	in, err := NewIngest(nil)
	if err != nil {
		t.Fatal(err)
	}
	var o classifier.Observation
	in.Header(&o, []byte("Server-Timing"), []byte("forward;dur=1;audio=9007199254740992"))
	if o.AudioSeconds != 0 {
		t.Errorf("%v s of audio", o.AudioSeconds)
	}
	in.Header(&o, []byte("Server-Timing"), []byte("forward;dur=1;audio=3600"))
	if o.AudioSeconds != 3600 {
		t.Errorf("%v s of audio, not an hour", o.AudioSeconds)
	}
}
