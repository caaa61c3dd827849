package tracing

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"weir/classifier"
)

// Mapping teaches weir a name that a server uses for a stage.
type Mapping struct {
	Name  string `yaml:"name"`  // a response header that holds one number, or a Server-Timing metric; lower case
	Stage string `yaml:"stage"` // as in [classifier.Stage.String], or "total"
	Unit  string `yaml:"unit"`  // ms, s, us or ns; empty: Name is a metric only, in ms as the standard has it

	Pointer string `yaml:"pointer"` // instead of Name: a JSON pointer into the answer's body; Unit must be given
	Span    string `yaml:"span"`    // instead of Name: the name of one of the server's own spans
}

var unitNames = map[string]time.Duration{"s": time.Second, "ms": time.Millisecond, "us": time.Microsecond, "ns": time.Nanosecond}

// target is what a mapped name stands for.
type target struct {
	name   string
	stage  classifier.Stage
	total  bool
	header bool
	unit   time.Duration
}

// Ingest reads stage timings from answers. It holds no request's state: one
// serves all connections at once. A nil Ingest reads nothing.
type Ingest struct {
	custom    map[string]target
	pointers  []pointerTarget
	spans     []spanTarget
	lengths   uint64 // bit n: a custom name of n bytes exists
	untrusted atomic.Uint64
}

// NewIngest returns an Ingest that knows the built-in names and those of m,
// which win over built-in ones.
func NewIngest(m []Mapping) (*Ingest, error) {
	in := &Ingest{custom: make(map[string]target, len(m))}
	for _, one := range m {
		if one.Span != "" {
			s, err := in.span(one)
			if err != nil {
				return nil, err
			}
			in.spans = append(in.spans, s)
			continue
		}
		if one.Pointer != "" {
			p, err := in.point(one)
			if err != nil {
				return nil, err
			}
			in.pointers = append(in.pointers, p)
			continue
		}
		t, err := one.target()
		if err != nil {
			return nil, err
		}
		if _, twice := in.custom[one.Name]; twice {
			return nil, fmt.Errorf("timings: %q is mapped twice; keep one of the two", one.Name)
		}
		in.custom[one.Name] = t
		in.lengths |= 1 << len(one.Name)
	}
	return in, nil
}

func (m Mapping) target() (target, error) {
	t := target{name: m.Name, total: m.Stage == totalName, header: m.Unit != "", unit: time.Millisecond}
	if !isLowerName(m.Name) {
		return t, fmt.Errorf("timings: name %q is no header or metric name; use lower-case letters, digits, - and _, at most %d of them", m.Name, maxName-1)
	}
	if m.Name == serverTiming {
		return t, fmt.Errorf("timings: %q is read anyway; name the metric inside it", m.Name)
	}
	var ok bool
	if t.stage, ok = classifier.ParseStage(m.Stage); !ok && !t.total {
		return t, fmt.Errorf("timings: stage %q of %q is unknown; use queue, preprocess, transfer, forward, postprocess, other or total", m.Stage, m.Name)
	}
	if t.header {
		if t.unit, ok = unitNames[m.Unit]; !ok {
			return t, fmt.Errorf("timings: unit %q of %q is unknown; use ms, s, us or ns", m.Unit, m.Name)
		}
	}
	return t, nil
}

// pointerTarget is what a mapped place in the body stands for.
type pointerTarget struct {
	target
	pointer string
}

// maxPointers bounds what is looked for in each answer.
const maxPointers = 32

func (in *Ingest) point(m Mapping) (p pointerTarget, err error) {
	last := m.Pointer[strings.LastIndexByte(m.Pointer, '/')+1:]
	switch {
	case m.Name != "":
		return p, fmt.Errorf("timings: %q has both a name and a pointer; make two entries", m.Name)
	case m.Pointer[0] != '/' || last == "" || len(m.Pointer) > 200:
		return p, fmt.Errorf("timings: %.200q is no JSON pointer; write /key/key, as in /timings/decode", m.Pointer)
	case m.Unit == "":
		return p, fmt.Errorf("timings: %q has no unit; write ms, s, us or ns, since numbers in JSON tell none", m.Pointer)
	case len(in.pointers) == maxPointers:
		return p, fmt.Errorf("timings: more than %d pointers; keep those that matter", maxPointers)
	}
	for _, other := range in.pointers {
		if other.pointer == m.Pointer {
			return p, fmt.Errorf("timings: %q is mapped twice; keep one of the two", m.Pointer)
		}
	}
	unit, ok := unitNames[m.Unit]
	if !ok {
		return p, fmt.Errorf("timings: unit %q of %q is unknown; use ms, s, us or ns", m.Unit, m.Pointer)
	}
	p = pointerTarget{target{name: pointerName(m.Pointer), total: m.Stage == totalName, unit: unit}, m.Pointer}
	if p.stage, ok = classifier.ParseStage(m.Stage); !ok && !p.total {
		return p, fmt.Errorf("timings: stage %q of %q is unknown; use queue, preprocess, transfer, forward, postprocess, other or total", m.Stage, m.Pointer)
	}
	return p, nil
}

// spanTarget is what a mapped span stands for.
type spanTarget struct {
	target
	span string
}

func (in *Ingest) span(m Mapping) (s spanTarget, err error) {
	switch {
	case m.Name != "" || m.Pointer != "":
		return s, fmt.Errorf("timings: span %q has a name or a pointer as well; make two entries", m.Span)
	case m.Unit != "":
		return s, fmt.Errorf("timings: span %q has the unit %q, but spans need none; leave it out", m.Span, m.Unit)
	case len(m.Span) > 200 || len(in.spans) == maxPointers:
		return s, fmt.Errorf("timings: span %.80q is too long, or one of more than %d; keep those that matter", m.Span, maxPointers)
	}
	for _, other := range in.spans {
		if other.span == m.Span {
			return s, fmt.Errorf("timings: span %q is mapped twice; keep one of the two", m.Span)
		}
	}
	s = spanTarget{target{name: pointerName("/" + m.Span), total: m.Stage == totalName}, m.Span}
	var ok bool
	if s.stage, ok = classifier.ParseStage(m.Stage); !ok && !s.total {
		return s, fmt.Errorf("timings: stage %q of %q is unknown; use queue, preprocess, transfer, forward, postprocess, other or total", m.Stage, m.Span)
	}
	return s, nil
}

// pointerName is a pointer as the name of a timing, which must be a token.
func pointerName(pointer string) string {
	name := []byte(pointer[1:])
	for i, c := range name {
		if !isToken[c] {
			name[i] = '.'
		}
	}
	return string(name[max(0, len(name)-maxName):])
}

// Header reads one response header of the final answer into o. Offer every
// header: an irrelevant one costs a few comparisons and no allocation.
func (in *Ingest) Header(o *classifier.Observation, name, value []byte) {
	in.read(o, name, value, "header")
}

// Trailer does for a trailer field what [Ingest.Header] does for a header.
func (in *Ingest) Trailer(o *classifier.Observation, name, value []byte) {
	in.read(o, name, value, "trailer")
}

// Built-in header names, in lower case.
const (
	serverTiming     = "server-timing"
	queueTime        = "x-queue-time"
	inferenceTime    = "x-inference-time"
	validationTime   = "x-validation-time"   // TGI only
	tokenizationTime = "x-tokenization-time" // TEI only
	computeTime      = "x-compute-time"      // TGI: seconds, TEI: milliseconds
	totalTime        = "x-total-time"
	generatedTokens  = "x-generated-tokens"
	openaiTime       = "openai-processing-ms"
	envoyTime        = "x-envoy-upstream-service-time"
	runtimeTime      = "x-runtime"
)

func (in *Ingest) read(o *classifier.Observation, name, value []byte, source string) {
	if in == nil || len(name) == 0 {
		return
	}
	if in.lengths>>len(name)&1 != 0 {
		if t, ok := in.lookup(name); ok && t.header {
			in.mapped(o, t, value, source)
			return
		}
	}
	switch name[0] | 0x20 {
	case 's':
		if isName(name, serverTiming) {
			in.serverTiming(o, value, source)
		}
	case 'e':
		if isName(name, orcaHeader) {
			in.orca(o, value)
		}
	case 'o':
		if isName(name, openaiTime) {
			in.totalHeader(o, value, time.Millisecond)
		}
	case 'x':
		in.builtin(o, name, value, source)
	}
}

func (in *Ingest) builtin(o *classifier.Observation, name, value []byte, source string) {
	switch {
	case isName(name, queueTime):
		in.stageHeader(o, queueTime, classifier.StageQueue, value, source)
	case isName(name, inferenceTime):
		in.stageHeader(o, inferenceTime, classifier.StageForward, value, source)
	case isName(name, validationTime):
		in.stageHeader(o, validationTime, classifier.StagePreprocess, value, source)
	case isName(name, tokenizationTime):
		in.stageHeader(o, tokenizationTime, classifier.StagePreprocess, value, source)
	case isName(name, computeTime):
		in.holdComputeTime(o, value, source)
	case isName(name, totalTime), isName(name, envoyTime):
		in.totalHeader(o, value, time.Millisecond)
	case isName(name, runtimeTime):
		in.totalHeader(o, value, time.Second)
	case isName(name, generatedTokens):
		if f, ok := number(trimSpace(value)); ok && f >= 0 && f <= maxCount {
			o.Tokens = max(o.Tokens, int(f))
		}
	}
}

// serverTiming reads one Server-Timing value.
func (in *Ingest) serverTiming(o *classifier.Observation, value []byte, source string) {
	value, cut := clip(value)
	var l line
	l.start(o)
	for len(value) > 0 {
		var m member
		if m, value = nextMember(value); len(m.name) > 0 {
			in.take(o, &l, &m, source)
		}
	}
	l.apply(o)
	if cut {
		addTiming(o, classifier.Timing{Name: truncated, Untrusted: true}, source)
	}
	dropCopies(o)
}

// take adds one metric. One without dur is no timing, but its counts stand.
func (in *Ingest) take(o *classifier.Observation, l *line, m *member, source string) {
	w, unit := in.word(m.name)
	if w.name == weirQueue {
		beginAnew(o, l)
	}
	d, untrusted := m.duration(unit)
	l.add(m, &w, d)
	if !m.hasDur {
		return
	}
	if w.name == "" && len(o.Timings) < maxTimings {
		w.name = string(m.name[:min(len(m.name), maxName)])
	}
	addTiming(o, classifier.Timing{
		Name: w.name, Stage: w.stage, Dur: d, Untrusted: untrusted,
		Bytes: int64(m.bytes), Count: int(m.n), Synced: m.synced,
	}, source)
	if w.canon == canonTotal && !untrusted {
		tellTotal(o)
	}
}

// duration is the metric's dur; untrusted and 0 if it is no duration.
func (m *member) duration(unit time.Duration) (d time.Duration, untrusted bool) {
	d, ok := toDuration(m.dur, unit)
	if m.badDur || !ok {
		return 0, true
	}
	return d, false
}

// beginAnew forgets what the answer told before weir-queue: another weir in
// front of the server tells all of it again, merged, from that metric on; all
// but the audio.
func beginAnew(o *classifier.Observation, l *line) {
	*l = line{seconds: l.seconds}
	clear(o.Timings)
	o.Timings = o.Timings[:0]
	o.BatchSize, o.SeqLen, o.Tokens, o.ServerTotal = 0, 0, 0, 0
}

// word finds what a metric name stands for: the user's mapping first, then the
// vocabulary, upper or lower case. The zero word is an unknown name.
func (in *Ingest) word(name []byte) (w word, unit time.Duration) {
	var buf [maxName]byte
	low := lower(buf[:], name)
	if len(in.custom) > 0 {
		if t, ok := in.custom[string(low)]; ok {
			w = word{name: t.name, stage: t.stage, canon: canonOf[t.stage]}
			if t.total {
				w.name, w.canon = totalName, canonTotal
			}
			return w, t.unit
		}
	}
	return words[string(low)], time.Millisecond
}

func (in *Ingest) lookup(name []byte) (t target, ok bool) {
	var buf [maxName]byte
	t, ok = in.custom[string(lower(buf[:], name))]
	return t, ok
}

// mapped reads a header of the user's mapping.
func (in *Ingest) mapped(o *classifier.Observation, t target, value []byte, source string) {
	if t.total {
		in.totalHeader(o, value, t.unit)
		return
	}
	d, ok := headerDuration(value, t.unit)
	addTiming(o, classifier.Timing{Name: t.name, Stage: t.stage, Dur: d, Untrusted: !ok}, source)
	dropCopies(o)
}

// stageHeader reads one of the x-*-time headers, in milliseconds. Gateways
// copy them, and some servers tell the same stage by Server-Timing as well:
// these headers count only where nothing else tells of the stage; what cannot
// be read tells nothing.
func (in *Ingest) stageHeader(o *classifier.Observation, name string, s classifier.Stage, value []byte, source string) {
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Stage == s && !t.Untrusted {
			return
		}
	}
	d, ok := headerDuration(value, time.Millisecond)
	addTiming(o, classifier.Timing{Name: name, Stage: s, Dur: d, Untrusted: !ok}, source)
}

// dropCopies removes x-*-time timings of stages that another name tells too.
func dropCopies(o *classifier.Observation) {
	var told [classifier.NumStages]bool
	copies := false
	for i := range o.Timings {
		t := &o.Timings[i]
		switch {
		case t.Stage == classifier.StageOther: // the metrics there tell of different things
		case isStageHeader(t.Name):
			copies = true
		case !t.Untrusted:
			told[t.Stage] = true
		}
	}
	if copies {
		o.Timings = slices.DeleteFunc(o.Timings, func(t classifier.Timing) bool {
			return isStageHeader(t.Name) && told[t.Stage]
		})
	}
}

func isStageHeader(name string) bool {
	switch name {
	case queueTime, inferenceTime, validationTime, tokenizationTime:
		return true
	}
	return false
}

// totalHeader reads a header that tells the server's total only.
func (in *Ingest) totalHeader(o *classifier.Observation, value []byte, unit time.Duration) {
	d, ok := headerDuration(value, unit)
	switch {
	case !ok:
		in.untrusted.Add(1)
	case !toldTotal(o):
		o.ServerTotal = max(o.ServerTotal, d)
	}
}

// tellTotal takes the total of a Server-Timing field, which wins over totals
// of other headers; of several the largest is the outermost. One past the limit
// of timings is not known.
func tellTotal(o *classifier.Observation) {
	if !toldTotal(o) {
		return
	}
	o.ServerTotal = 0
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Name == totalName && !t.Untrusted {
			o.ServerTotal = max(o.ServerTotal, t.Dur)
		}
	}
}

func toldTotal(o *classifier.Observation) bool {
	for i := range o.Timings {
		if o.Timings[i].Name == totalName && !o.Timings[i].Untrusted {
			return true
		}
	}
	return false
}

// holdComputeTime keeps x-compute-time, as if in milliseconds, until the other
// headers have told whose it is.
func (in *Ingest) holdComputeTime(o *classifier.Observation, value []byte, source string) {
	if d, ok := headerDuration(value, time.Millisecond); ok {
		addTiming(o, classifier.Timing{Name: heldComputeTime, Dur: d}, source)
	}
}

// heldComputeTime names x-compute-time until then. No metric and no mapping can
// have that name.
const heldComputeTime = "(" + computeTime + ")"

// settleComputeTime gives x-compute-time its unit: seconds beside TGI's
// x-validation-time, milliseconds beside TEI's x-tokenization-time. It stands
// in for a missing total; without a neighbour its unit is unknown, and it is
// dropped.
func settleComputeTime(o *classifier.Observation) {
	at, unit := -1, time.Duration(0)
	for i := range o.Timings {
		switch o.Timings[i].Name {
		case heldComputeTime:
			at = i
		case validationTime:
			unit = time.Second
		case tokenizationTime:
			unit = time.Millisecond
		}
	}
	if at < 0 {
		return
	}
	if d := o.Timings[at].Dur; o.ServerTotal == 0 && d <= maxDuration/1000 {
		o.ServerTotal = d * (unit / time.Millisecond)
	}
	o.Timings = slices.DeleteFunc(o.Timings, func(t classifier.Timing) bool { return t.Name == heldComputeTime })
	if len(o.Timings) == 0 {
		o.Source = ""
	}
}

// addTiming appends a timing, up to the limit; the entry past the limit is a mark
// that more was told.
func addTiming(o *classifier.Observation, t classifier.Timing, source string) {
	if len(o.Timings) > maxTimings {
		return
	}
	if o.Timings == nil {
		o.Timings = make([]classifier.Timing, 0, 8) // the canonical names, in one allocation
	}
	if len(o.Timings) == maxTimings {
		t = classifier.Timing{Name: truncated, Untrusted: true}
	}
	o.Timings = append(o.Timings, t)
	if o.Source != "trailer" {
		o.Source = source
	}
}

// Finish marks what cannot be true, once Done is stamped. A stage that took
// longer than the server had the request, by more than 5 % and 2 ms (rounding
// and clocks of different pace explain that much), is untrusted; so is a
// total, which is forgotten. The server had the request from Dequeued to the
// head of the answer, or to its end where the timings came in a trailer or the
// body. That
// stages together exceed that time is no lie: they may overlap.
func (in *Ingest) Finish(o *classifier.Observation) {
	if in == nil || len(o.Timings) == 0 && o.ServerTotal == 0 {
		return
	}
	settleComputeTime(o)
	limit, limited := trustLimit(o)
	n := uint64(0)
	if limited && o.ServerTotal > limit {
		if !toldTotal(o) { // else the timing is counted below
			n++
		}
		o.ServerTotal = 0
	}
	for i := range o.Timings {
		t := &o.Timings[i]
		if limited && t.Dur > limit {
			t.Untrusted = true
		}
		if t.Untrusted {
			n++
		}
	}
	if n > 0 {
		in.untrusted.Add(n)
	}
}

// trustLimit is the longest that a stage can have taken; not ok if the time
// that the server had the request is not known.
func trustLimit(o *classifier.Observation) (d time.Duration, ok bool) {
	end := o.Responded
	if o.Source == "trailer" || o.Source == sourceBody || o.Source == sourceOTLP {
		end = o.Done
	}
	if o.Dequeued.IsZero() || end.IsZero() {
		return 0, false
	}
	window := max(0, end.Sub(o.Dequeued))
	return window + window/20 + 2*time.Millisecond, true
}

// Untrusted counts the timings and totals that could not be true or could not
// be read, since the start.
func (in *Ingest) Untrusted() uint64 {
	if in == nil {
		return 0
	}
	return in.untrusted.Load()
}

func headerDuration(value []byte, unit time.Duration) (time.Duration, bool) {
	f, ok := number(trimSpace(value))
	if !ok {
		return 0, false
	}
	return toDuration(f, unit)
}

func trimSpace(b []byte) []byte {
	b = skipSpace(b)
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// isName compares a header name in any case with one in lower case.
func isName(b []byte, name string) bool {
	if len(b) != len(name) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		if c != name[i] {
			return false
		}
	}
	return true
}

// isLowerName tells whether s can be compared with names in lower case.
func isLowerName(s string) bool {
	t, rest := token([]byte(s))
	return len(t) > 0 && len(t) < maxName && len(rest) == 0 && s == strings.ToLower(s)
}
