package tracing

import (
	"math"
	"strconv"
	"time"

	"weir/classifier"
)

// What is read of one answer at most.
const (
	maxServerTiming = 8 << 10 // bytes of one Server-Timing value
	maxTimings      = 32      // timings of one request
	maxName         = 64      // bytes of a name that weir does not know
	maxDuration     = 1000 * time.Hour
	maxCount        = 1 << 53 // bytes, copies, batch, ...: more is no count
)

// truncated names the entry that stands for all timings past the limits.
const truncated = "(truncated)"

// canon is a metric name of weir's own vocabulary, in the order of the work.
type canon uint8

const (
	canonOther canon = iota
	canonQueue
	canonPreprocess
	canonH2D
	canonTransfer
	canonForward
	canonD2H
	canonPostprocess
	canonTotal
	numCanons = int(iota)
)

var canonNames = [numCanons]string{"", "queue", "preprocess", "h2d", "transfer", "forward", "d2h", "postprocess", "total"}

// canonOf is the name for a stage whose own name says no more than the stage.
var canonOf = [classifier.NumStages]canon{
	classifier.StageQueue:       canonQueue,
	classifier.StagePreprocess:  canonPreprocess,
	classifier.StageTransfer:    canonTransfer,
	classifier.StageForward:     canonForward,
	classifier.StagePostprocess: canonPostprocess,
}

// word is a metric name that weir understands; index tells repeats of it apart
// from other words for the same stage.
type word struct {
	name  string
	stage classifier.Stage
	canon canon
	index int
}

const (
	weirQueue = "weir-queue"
	totalName = "total"
	numWords  = 23
)

var words = makeWords(
	word{name: weirQueue, stage: classifier.StageQueue, canon: canonQueue},
	word{name: "queue", stage: classifier.StageQueue, canon: canonQueue},
	word{name: "wait", stage: classifier.StageQueue, canon: canonQueue},
	word{name: "preprocess", stage: classifier.StagePreprocess, canon: canonPreprocess},
	word{name: "tokenize", stage: classifier.StagePreprocess, canon: canonPreprocess},
	word{name: "validation", stage: classifier.StagePreprocess, canon: canonPreprocess},
	word{name: "feature", stage: classifier.StagePreprocess, canon: canonPreprocess},
	word{name: "h2d", stage: classifier.StageTransfer, canon: canonH2D},
	word{name: "compute_input", stage: classifier.StageTransfer, canon: canonH2D},
	word{name: "transfer", stage: classifier.StageTransfer, canon: canonTransfer},
	word{name: "d2h", stage: classifier.StageTransfer, canon: canonD2H},
	word{name: "compute_output", stage: classifier.StageTransfer, canon: canonD2H},
	word{name: "forward", stage: classifier.StageForward, canon: canonForward},
	word{name: "encode", stage: classifier.StageForward, canon: canonForward},
	word{name: "prefill", stage: classifier.StageForward, canon: canonForward},
	word{name: "decode", stage: classifier.StageForward, canon: canonForward},
	word{name: "inference", stage: classifier.StageForward, canon: canonForward},
	word{name: "infer", stage: classifier.StageForward, canon: canonForward},
	word{name: "predict", stage: classifier.StageForward, canon: canonForward},
	word{name: "compute_infer", stage: classifier.StageForward, canon: canonForward},
	word{name: "postprocess", stage: classifier.StagePostprocess, canon: canonPostprocess},
	word{name: totalName, stage: classifier.StageOther, canon: canonTotal},
)

// makeWords indexes the vocabulary from 1; index 0 is for unknown words.
func makeWords(list ...word) map[string]word {
	m := make(map[string]word, len(list))
	for i, w := range list {
		w.index = i + 1
		m[w.name] = w
	}
	return m
}

// member is one metric of a Server-Timing list, its text still in the reader's
// buffer. A count that was not told, or is no count, is 0.
type member struct {
	name                                  []byte
	dur                                   float64
	hasDur, badDur                        bool
	synced                                bool
	bytes, n, batch, seq, tokens, seconds float64
	seen                                  uint16
}

// nextMember reads the metric at the start of b and returns what follows its
// comma. It is as lenient as the standard asks: text that fits no rule is
// passed over up to the next ";" or ",". A metric without a name is empty.
func nextMember(b []byte) (m member, rest []byte) {
	m.name, b = token(skipSpace(b))
	b = skipJunk(b)
	for len(b) > 0 && b[0] == ';' {
		var name, value []byte
		name, value, b = nextParam(b[1:])
		m.set(name, value)
	}
	if len(b) > 0 {
		b = b[1:]
	}
	return m, b
}

// nextParam reads "name = value"; rest begins at ";" or "," or is empty. A
// parameter without "=" has an empty value, and counts as the first of its name.
func nextParam(b []byte) (name, value, rest []byte) {
	name, b = token(skipSpace(b))
	if b = skipSpace(b); len(b) == 0 || b[0] != '=' {
		return name, nil, skipJunk(b)
	}
	if b = skipSpace(b[1:]); len(b) > 0 && b[0] == '"' {
		value, b = quoted(b[1:])
	} else {
		value, b = token(b)
	}
	return name, value, skipJunk(b)
}

// Bits of member.seen: the first parameter of a name wins, however malformed.
const (
	seenDur = 1 << iota
	seenBatch
	seenSeq
	seenBytes
	seenN
	seenTokens
	seenAudio
	seenSync
)

func (m *member) set(name, value []byte) {
	var buf [8]byte
	switch string(lower(buf[:], name)) {
	case "dur":
		if m.first(seenDur) {
			var ok bool
			m.dur, ok = number(value)
			m.hasDur, m.badDur = true, !ok || m.dur < 0
		}
	case "batch":
		m.count(seenBatch, &m.batch, value)
	case "seq":
		m.count(seenSeq, &m.seq, value)
	case "bytes":
		m.count(seenBytes, &m.bytes, value)
	case "n":
		m.count(seenN, &m.n, value)
	case "tokens":
		m.count(seenTokens, &m.tokens, value)
	case "audio":
		if m.count(seenAudio, &m.seconds, value); m.seconds > maxDuration.Seconds() {
			m.seconds = 0
		}
	case "sync":
		if m.first(seenSync) {
			m.synced = len(value) == 1 && value[0] == '1'
		}
	}
}

func (m *member) first(bit uint16) bool {
	was := m.seen & bit
	m.seen |= bit
	return was == 0
}

func (m *member) count(bit uint16, to *float64, value []byte) {
	if !m.first(bit) {
		return
	}
	if f, ok := number(value); ok && f >= 0 && f <= maxCount {
		*to = f
	}
}

// line gathers what the metrics of one Server-Timing value say together.
type line struct {
	batch, seq      mean
	tokens, seconds [numWords]float64
}

// start takes over the means of the fields before, weighed by all forward
// passes that those told.
func (l *line) start(o *classifier.Observation) {
	before, _ := o.In(classifier.StageForward)
	l.batch.add(float64(o.BatchSize), before)
	l.seq.add(float64(o.SeqLen), before)
}

func (l *line) add(m *member, w *word, d time.Duration) {
	if w.stage == classifier.StageForward {
		l.batch.add(m.batch, d)
		l.seq.add(m.seq, d)
	}
	l.tokens[w.index] += m.tokens
	l.seconds[w.index] += m.seconds
}

// apply writes the line's sums into o. Repeats of one name are parts of the
// work and were summed; different names tell of the same tokens and the same
// audio, and so do different fields: the largest counts.
func (l *line) apply(o *classifier.Observation) {
	o.BatchSize = l.batch.round(o.BatchSize)
	o.SeqLen = l.seq.round(o.SeqLen)
	for i := range l.tokens {
		o.Tokens = max(o.Tokens, int(math.Round(min(l.tokens[i], maxCount))))
		o.AudioSeconds = max(o.AudioSeconds, l.seconds[i])
	}
}

// mean weighs values by the duration of the forward pass that they belong to.
type mean struct{ sum, weight float64 }

func (m *mean) add(v float64, d time.Duration) {
	if v > 0 {
		w := max(1, float64(d))
		m.sum, m.weight = m.sum+v*w, m.weight+w
	}
}

func (m *mean) round(none int) int {
	if m.weight == 0 {
		return none
	}
	return int(math.Round(m.sum / m.weight))
}

// number reads a decimal number, with or without fraction and exponent. It
// takes neither signs of infinity nor hexadecimal nor unit suffixes.
func number(b []byte) (f float64, ok bool) {
	if len(b) == 0 || len(b) > 40 {
		return 0, false
	}
	for _, c := range b {
		if (c < '0' || c > '9') && c != '.' && c != '-' && c != '+' && c|0x20 != 'e' {
			return 0, false
		}
	}
	f, err := strconv.ParseFloat(string(b), 64)
	return f, err == nil
}

// toDuration is f units long; not ok if that is negative or beyond belief.
func toDuration(f float64, unit time.Duration) (d time.Duration, ok bool) {
	ns := f * float64(unit)
	if !(ns >= 0 && ns <= float64(maxDuration)) {
		return 0, false
	}
	return time.Duration(ns + 0.5), true
}

// clip shortens a value that is too long to its last whole metric.
func clip(b []byte) (short []byte, cut bool) {
	if len(b) <= maxServerTiming {
		return b, false
	}
	end := maxServerTiming
	for end > 0 && b[end] != ',' {
		end--
	}
	return b[:end], true
}

func skipSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	return b
}

func skipJunk(b []byte) []byte {
	for len(b) > 0 && b[0] != ';' && b[0] != ',' {
		b = b[1:]
	}
	return b
}

// isToken marks the characters of a token (RFC 9110, section 5.6.2).
var isToken = func() (set [256]bool) {
	for _, c := range []byte("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		set[c] = true
	}
	return set
}()

func token(b []byte) (t, rest []byte) {
	for i, c := range b {
		if !isToken[c] {
			return b[:i], b[i:]
		}
	}
	return b, nil
}

// quoted reads up to the closing quote, b beginning after the opening one. A
// backslash stays in the value: no number has one. Without a closing quote all
// of b is the value.
func quoted(b []byte) (s, rest []byte) {
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			return b[:i], b[i+1:]
		case '\\':
			i++
		}
	}
	return b, nil
}

// lower writes b in lower case to buf; nil if it does not fit.
func lower(buf, b []byte) []byte {
	if len(b) > len(buf) {
		return nil
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		buf[i] = c
	}
	return buf[:len(b)]
}

// AppendServerTiming appends the Server-Timing value that weir gives its
// client: weir-queue, the wait in weir's own queue, then what the server told
// so far, merged under the canonical names and less what cannot be true, then
// the server's total. Durations are in milliseconds.
//
// It tells again what the server's own Server-Timing field told, so it belongs
// after that field; an [Ingest] that reads both begins anew at weir-queue.
func AppendServerTiming(dst []byte, o *classifier.Observation) []byte {
	dst = append(dst, weirQueue+";dur="...)
	dst = appendMillis(dst, o.QueueWait())
	var sums [numCanons]classifier.Timing
	var told [numCanons]bool
	limit, limited := trustLimit(o)
	for i := range o.Timings {
		t := &o.Timings[i]
		if t.Untrusted || limited && t.Dur > limit {
			continue
		}
		c := canonical(t)
		if c == canonOther || c == canonTotal {
			continue
		}
		s := &sums[c]
		s.Synced = t.Synced && (s.Synced || !told[c])
		s.Dur, s.Bytes, s.Count, told[c] = s.Dur+t.Dur, s.Bytes+t.Bytes, s.Count+t.Count, true
	}
	for c := canonQueue; c < canonTotal; c++ {
		if told[c] {
			dst = appendStage(dst, o, c, &sums[c])
		}
	}
	if o.ServerTotal > 0 && (!limited || o.ServerTotal <= limit) {
		dst = append(dst, ", "+totalName+";dur="...)
		dst = appendMillis(dst, o.ServerTotal)
	}
	return appendOthers(dst, o)
}

func appendStage(dst []byte, o *classifier.Observation, c canon, sum *classifier.Timing) []byte {
	dst = append(append(dst, ", "...), canonNames[c]...)
	dst = append(dst, ";dur="...)
	dst = appendMillis(dst, sum.Dur)
	if c == canonForward {
		dst = appendParam(dst, ";batch=", int64(o.BatchSize))
		dst = appendParam(dst, ";seq=", int64(o.SeqLen))
		dst = appendParam(dst, ";tokens=", int64(o.Tokens))
	}
	dst = appendParam(dst, ";bytes=", sum.Bytes)
	dst = appendParam(dst, ";n=", int64(sum.Count))
	if sum.Synced {
		dst = append(dst, ";sync=1"...)
	}
	return dst
}

// appendOthers appends the timings that weir does not interpret, under the
// server's own names.
func appendOthers(dst []byte, o *classifier.Observation) []byte {
	limit, limited := trustLimit(o)
	for i := range o.Timings {
		t := &o.Timings[i]
		if t.Untrusted || limited && t.Dur > limit || canonical(t) != canonOther || t.Name == heldComputeTime {
			continue
		}
		dst = append(append(dst, ", "...), t.Name...)
		dst = append(dst, ";dur="...)
		dst = appendMillis(dst, t.Dur)
	}
	return dst
}

func appendParam(dst []byte, name string, v int64) []byte {
	if v <= 0 {
		return dst
	}
	return strconv.AppendInt(append(dst, name...), v, 10)
}

// canonical is the name under which a timing is merged. A user's mapping may
// have given a known word another stage: then the stage decides.
func canonical(t *classifier.Timing) canon {
	var buf [maxName]byte
	if w, ok := words[string(lower(buf[:], []byte(t.Name)))]; ok && w.stage == t.Stage {
		return w.canon
	}
	if int(t.Stage) < len(canonOf) {
		return canonOf[t.Stage]
	}
	return canonOther
}

// appendMillis appends d in milliseconds with up to three decimals.
func appendMillis(dst []byte, d time.Duration) []byte {
	us := int64((max(0, d) + 500) / 1000)
	dst = strconv.AppendInt(dst, us/1000, 10)
	frac := us % 1000
	if frac == 0 {
		return dst
	}
	dst = append(dst, '.', byte('0'+frac/100), byte('0'+frac/10%10), byte('0'+frac%10))
	for dst[len(dst)-1] == '0' {
		dst = dst[:len(dst)-1]
	}
	return dst
}
