package tracing

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"time"

	"weir/classifier"
)

// A Body is the part that is kept of an answer's body as it passes: its first
// bytes and its last, in which servers put what they tell of the request. It
// is used again for each answer. The zero value keeps nothing.
type Body struct {
	kind  bodyKind
	total int64
	head  [bodyHead]byte
	tail  []byte // at most 2*bodyTail, of which the last bodyTail count
}

type bodyKind uint8

const (
	bodyOther bodyKind = iota
	bodyJSON
	bodyEvents
)

// What is kept of a body: transcripts with the times of all words come to
// megabytes, but what servers add to them stands at their ends.
const (
	bodyHead   = 2 << 10
	bodyTail   = 16 << 10
	lastEvents = 8
)

// Start begins a new answer and tells whether its body can tell anything:
// plain JSON, or events of JSON.
func (b *Body) Start(contentType, contentEncoding []byte) bool {
	b.kind, b.total, b.tail = bodyOther, 0, b.tail[:0]
	if len(contentEncoding) > 0 && !strings.EqualFold(string(contentEncoding), "identity") {
		return false
	}
	var buf [64]byte
	media, _, _ := bytes.Cut(contentType, []byte(";"))
	switch m := string(lower(buf[:], trimSpace(media))); {
	case m == "application/json", strings.HasSuffix(m, "+json"):
		b.kind = bodyJSON
	case m == "text/event-stream", m == "application/x-ndjson":
		b.kind = bodyEvents
	}
	return b.kind != bodyOther
}

// Add takes the next bytes. It copies what may be of use, and keeps nothing of p.
func (b *Body) Add(p []byte) {
	if b.total < bodyHead {
		copy(b.head[b.total:], p)
	}
	b.total += int64(len(p))
	p = p[max(0, len(p)-bodyTail):]
	if len(b.tail)+len(p) > 2*bodyTail {
		n := copy(b.tail, b.tail[len(b.tail)-bodyTail:])
		b.tail = b.tail[:n]
	}
	if cap(b.tail) == 0 {
		b.tail = make([]byte, 0, 2*bodyTail)
	}
	b.tail = append(b.tail, p...)
}

// Body reads what the answer's body told, once all of it has passed. Stages
// that headers or trailers told already are not read again.
func (in *Ingest) Body(o *classifier.Observation, b *Body) {
	if in == nil || b.total == 0 {
		return
	}
	tail := b.tail[max(0, len(b.tail)-bodyTail):]
	t := teller{in: in, o: o}
	for s := range t.before {
		_, t.before[s] = o.In(classifier.Stage(s))
	}
	switch {
	case b.kind == bodyEvents:
		t.events(tail)
	case b.kind != bodyJSON:
	case b.total == int64(len(tail)):
		firstMembers(tail, t.member)
	default:
		firstMembers(b.head[:], t.member)
		lastMembers(tail, t.member)
	}
	t.finish()
}

// A teller reads the members of one answer's object.
type teller struct {
	in     *Ingest
	o      *classifier.Observation
	before [classifier.NumStages]bool // told before the body
	told   bool

	parameters     []byte // Triton's, if it is Triton
	model, outputs bool
	processing     float64 // FunASR's, in seconds
	factor         float64 // its real-time factor
}

// events reads the newest event that tells anything.
func (t *teller) events(b []byte) {
	for n := 0; n < lastEvents && len(b) > 0; {
		i := bytes.LastIndexByte(b, '\n')
		line := trimBlank(b[i+1:])
		b = b[:max(i, 0)]
		data, isData := bytes.CutPrefix(line, []byte("data:"))
		switch data = skipBlank(data); {
		case len(line) == 0, !isData && line[0] != '{':
			continue
		case isServerTimingEvent(b):
			t.timing(data)
		default:
			firstMembers(data, t.member)
		}
		n++
		if t.told {
			return
		}
	}
}

// isServerTimingEvent looks at the line before the data.
func isServerTimingEvent(before []byte) bool {
	before = before[bytes.LastIndexByte(before, '\n')+1:]
	name, ok := bytes.CutPrefix(before, []byte("event:"))
	return ok && string(trimBlank(skipBlank(name))) == serverTiming
}

// member reads one member of the answer. It may come twice, from the head and
// from the tail of one body; what it told the first time counts.
func (t *teller) member(key, value []byte) {
	t.pointers(key, value)
	switch string(key) {
	case "server_timing":
		var text string
		if json.Unmarshal(value, &text) == nil {
			t.timing([]byte(text))
		}
	case "metrics":
		firstMembers(value, t.vllm)
	case "usage":
		t.usage(value)
	case "meta_info":
		firstMembers(value, t.sglang)
	case "processing_time":
		t.processing, _ = number(value)
	case "rtf":
		t.factor, _ = number(value)
	case "parameters":
		t.parameters = value
	case "model_name":
		t.model = true
	case "outputs":
		t.outputs = true
	}
}

// pointers reads what the user's mapping points at.
func (t *teller) pointers(key, value []byte) {
	for i := range t.in.pointers {
		p := &t.in.pointers[i]
		first, rest, _ := strings.Cut(p.pointer[1:], "/")
		if !isKey(key, first) {
			continue
		}
		v := value
		if len(p.pointer) > 1+len(first) {
			v = pointed(value, "/"+rest)
		}
		v = bytes.Trim(v, `"`) // a number in a string is one
		if len(v) == 0 || string(v) == "null" {
			continue
		}
		if p.total {
			t.total(v, p.unit)
			continue
		}
		t.stage(p.name, p.stage, v, p.unit)
	}
}

// vllm reads the metrics of vLLM (--enable-per-request-metrics): the time to
// the first token counts from when the request was scheduled, and the time of
// generation from the first token.
func (t *teller) vllm(key, value []byte) {
	switch string(key) {
	case "queue_time_ms":
		t.stage("queue_time_ms", classifier.StageQueue, value, time.Millisecond)
	case "time_to_first_token_ms":
		t.stage("prefill", classifier.StageForward, value, time.Millisecond)
	case "generation_time_ms":
		t.stage("decode", classifier.StageForward, value, time.Millisecond)
	}
}

// sglang reads meta_info, in seconds.
func (t *teller) sglang(key, value []byte) {
	switch string(key) {
	case "queue_time":
		t.stage("queue_time", classifier.StageQueue, value, time.Second)
	case "e2e_latency":
		t.total(value, time.Second)
	case "completion_tokens":
		t.tokens(value)
	}
}

// usage reads how much audio there was, where that is what the answer counts,
// and how many tokens came of it.
func (t *teller) usage(value []byte) {
	if string(child(value, "type")) == `"duration"` {
		if f, ok := number(child(value, "seconds")); ok {
			t.audio(f)
		}
	}
	for _, name := range []string{"completion_tokens", "output_tokens"} {
		t.tokens(child(value, name))
	}
}

func (t *teller) tokens(value []byte) {
	if f, ok := number(value); ok && f > 0 && f <= maxCount {
		t.o.Tokens, t.told = max(t.o.Tokens, int(f)), true
	}
}

// maxAudio is more than any request has: a year.
const maxAudio = 365 * 24 * 3600

func (t *teller) audio(seconds float64) {
	if seconds > 0 && seconds <= maxAudio {
		t.o.AudioSeconds, t.told = max(t.o.AudioSeconds, seconds), true
	}
}

// finish reads what several members say together.
func (t *teller) finish() {
	if t.model && (t.outputs || t.parameters != nil) {
		firstMembers(t.parameters, t.triton)
	}
	// FunASR's server; the one name alone might be anybody's.
	if t.processing > 0 && t.factor > 0 {
		if d, ok := toDuration(t.processing, time.Second); ok {
			t.takeTotal(d)
		}
		t.audio(t.processing / t.factor)
	}
	dropCopies(t.o)
}

// tritonUnits are the ends of a response parameter's name.
var tritonUnits = []struct {
	suffix string
	unit   time.Duration
}{{"_ms", time.Millisecond}, {"_us", time.Microsecond}, {"_ns", time.Nanosecond}, {"_s", time.Second}}

// triton reads one response parameter of a python_backend: a stage's name with
// its unit, or a whole Server-Timing value.
func (t *teller) triton(key, value []byte) {
	if string(key) == "server_timing" {
		t.member(key, value)
		return
	}
	for _, u := range tritonUnits {
		name, ok := bytes.CutSuffix(key, []byte(u.suffix))
		if !ok {
			continue
		}
		switch w, _ := t.in.word(name); {
		case w.canon == canonTotal:
			t.total(value, u.unit)
		case w.stage != classifier.StageOther:
			t.stage(w.name, w.stage, value, u.unit)
		}
		return
	}
	if f, ok := number(value); ok && f >= 1 && f <= maxCount {
		switch string(key) {
		case "batch":
			t.o.BatchSize, t.told = int(math.Round(f)), true
		case "seq":
			t.o.SeqLen, t.told = int(math.Round(f)), true
		}
	}
}

// timing reads a Server-Timing value, unless the answer had one in front.
func (t *teller) timing(value []byte) {
	for s := classifier.StageQueue; int(s) < classifier.NumStages; s++ {
		if t.before[s] {
			return
		}
	}
	if t.told {
		return
	}
	t.in.serverTiming(t.o, value, sourceBody)
	t.told = true
}

// sourceBody is the source of timings that the body told.
const sourceBody = "body"

func (t *teller) stage(name string, s classifier.Stage, value []byte, unit time.Duration) {
	if s != classifier.StageOther && t.before[s] || t.has(name) {
		return
	}
	f, ok := number(value)
	if string(value) == "null" {
		return
	}
	d, inRange := toDuration(f, unit)
	addTiming(t.o, classifier.Timing{Name: name, Stage: s, Dur: d, Untrusted: !ok || !inRange}, sourceBody)
	t.told = true
}

// has tells whether the body told that stage before, under the same name.
func (t *teller) has(name string) bool {
	for i := range t.o.Timings {
		if t.o.Timings[i].Name == name {
			return true
		}
	}
	return false
}

func (t *teller) total(value []byte, unit time.Duration) {
	if f, ok := number(value); ok {
		if d, ok := toDuration(f, unit); ok {
			t.takeTotal(d)
			return
		}
	}
	t.in.untrusted.Add(1)
}

func (t *teller) takeTotal(d time.Duration) {
	t.told = true
	if toldTotal(t.o) {
		return
	}
	t.o.ServerTotal = max(t.o.ServerTotal, d)
	if t.o.Source != "trailer" {
		t.o.Source = sourceBody
	}
}
