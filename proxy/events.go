package proxy

import (
	"bytes"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// An answerReader looks at an answer's body as it passes by: when its events
// came, and what it tells of the server's stages. It changes and holds back
// nothing; of the body it keeps a line of 8 KiB at most.
type answerReader struct {
	on     bool // the body is text that weir reads
	sse    bool // it is a stream of server-sent events, else JSON
	ingest *tracing.Ingest

	count            int
	first, last, end time.Time
	longest          time.Duration

	line    []byte // of an SSE answer, as far as it has come
	cut     bool   // line is not all of it
	cr      bool   // the last byte was a CR, which an LF may follow
	content bool   // the event has data
	timing  bool   // the event is called server-timing

	key   int    // bytes of timingKey that the body ends with
	value []byte // of server_timing, as far as it has come
	state valueState
	told  []byte // the last server_timing that is whole
}

const maxEventLine = 8 << 10

// start readies the reader for the answer whose head was read.
func (a *answerReader) start(c *conn) {
	var kind, coding []byte
	for i := range c.res.fields {
		switch f := &c.res.fields[i]; {
		case f.kind != fieldOther:
		case equalFold(f.name, "content-type"):
			kind = f.value
		case equalFold(f.name, "content-encoding"):
			coding = f.value
		}
	}
	a.begin(kind, coding, c.cfg.ingest)
}

// begin readies the reader for a body with this Content-Type and
// Content-Encoding.
func (a *answerReader) begin(kind, coding []byte, ingest *tracing.Ingest) {
	*a = answerReader{line: a.line[:0], value: a.value[:0], told: a.told[:0], ingest: ingest}
	kind, _, _ = bytes.Cut(kind, []byte(";"))
	kind = bytes.TrimSpace(kind)
	plain := len(coding) == 0 || equalFold(coding, "identity")
	a.sse = plain && equalFold(kind, "text/event-stream")
	a.on = a.sse || plain && (equalFold(kind, "application/json") || equalFold(kind, "application/x-ndjson"))
}

// chunk is told of each chunk of an answer: in one that is no SSE stream, they
// are its events.
func (a *answerReader) chunk() {
	if !a.sse {
		a.event(time.Now())
	}
}

func (a *answerReader) event(now time.Time) {
	if a.count++; a.count == 1 {
		a.first = now
	} else {
		a.longest = max(a.longest, now.Sub(a.last))
	}
	a.last = now
}

// read takes the next bytes of the body.
func (a *answerReader) read(p []byte) {
	switch {
	case !a.on:
	case a.sse:
		a.lines(p)
	default:
		a.json(p)
	}
}

// lines cuts an SSE stream into its lines, which end with CR, LF or both.
func (a *answerReader) lines(p []byte) {
	if a.cr && len(p) > 0 && p[0] != '\n' {
		a.endLine()
	}
	a.cr = len(p) > 0 && p[len(p)-1] == '\r'
	for len(p) > 0 {
		i := bytes.IndexAny(p, "\r\n")
		if i < 0 {
			a.keep(p)
			return
		}
		a.keep(p[:i])
		if p[i] == '\n' || i+1 < len(p) && p[i+1] != '\n' { // CRLF ends the line once: at its LF
			a.endLine()
		}
		p = p[i+1:]
	}
}

func (a *answerReader) keep(p []byte) {
	room := maxEventLine - len(a.line)
	a.cut = a.cut || room < len(p)
	a.line = append(a.line, p[:min(room, len(p))]...)
}

// endLine reads one line of an event; an empty one ends the event.
func (a *answerReader) endLine() {
	line, cut := a.line, a.cut
	a.line, a.cut = a.line[:0], false
	if len(line) == 0 {
		if a.content {
			a.event(time.Now())
		}
		a.content, a.timing = false, false
		return
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "event":
		a.timing = string(value) == "server-timing"
	case "data":
		a.content = true
		a.data(value, cut)
	}
}

func (a *answerReader) data(value []byte, cut bool) {
	switch {
	case a.timing:
		if !cut {
			a.told = append(a.told[:0], value...)
		}
		return
	case string(bytes.TrimSpace(value)) == "[DONE]":
		a.end = time.Now()
		return
	}
	if bytes.Contains(value, transcriptDone) {
		var o object
		if o.read(value) && o.is("type", "transcript.text.done") {
			a.end = time.Now()
		}
	}
	a.state, a.key = outsideValue, 0
	a.json(value)
}

var (
	transcriptDone = []byte("transcript.text.done")
	timingKey      = []byte(`"server_timing"`)
)

// valueState is where in "server_timing": "..." the body is.
type valueState uint8

const (
	outsideValue valueState = iota
	beforeColon
	beforeValue
	inValue
	inEscape
)

// json looks for the key server_timing and takes the text after it, wherever
// in the JSON it stands and however the body is cut.
func (a *answerReader) json(p []byte) {
	for len(p) > 0 {
		if a.state == outsideValue {
			n, found := a.findKey(p)
			p = p[n:]
			if found {
				a.state = beforeColon
			}
			continue
		}
		a.step(p[0])
		p = p[1:]
	}
}

// findKey moves over p to behind the next key; found is false if there is none.
func (a *answerReader) findKey(p []byte) (n int, found bool) {
	if a.key == 0 {
		if n = bytes.IndexByte(p, timingKey[0]); n < 0 {
			return len(p), false
		}
	}
	for ; n < len(p); n++ {
		switch {
		case p[n] == timingKey[a.key]:
			a.key++
		case p[n] == timingKey[0]:
			a.key = 1
		default:
			a.key = 0
			next := bytes.IndexByte(p[n:], timingKey[0])
			if next < 0 {
				return len(p), false
			}
			n += next - 1
		}
		if a.key == len(timingKey) {
			a.key = 0
			return n + 1, true
		}
	}
	return n, false
}

func (a *answerReader) step(c byte) {
	switch {
	case a.state == beforeColon && c == ':':
		a.state = beforeValue
	case a.state == beforeValue && c == '"':
		a.state, a.value = inValue, append(a.value[:0], c)
	case a.state <= beforeValue:
		if c != ' ' && c != '\t' && c != '\n' && c != '\r' {
			a.state = outsideValue
		}
	case len(a.value) > maxTimingText:
		a.state = outsideValue
	case a.state == inEscape:
		a.state, a.value = inValue, append(a.value, c)
	case c == '\\':
		a.state, a.value = inEscape, append(a.value, c)
	default:
		a.value = append(a.value, c)
		if c == '"' {
			a.state = outsideValue
			a.take()
		}
	}
}

func (a *answerReader) take() {
	o := object{n: 1}
	o.fields[0].key, o.fields[0].value = timingKey, a.value
	a.told = append(a.told[:0], o.text(string(timingKey))...)
}

// finish puts what was seen into the record, and forgets it. An answer that
// told its own end ended there, whatever the server still sends.
func (a *answerReader) finish(o *classifier.Observation) {
	if len(a.told) > 0 && len(o.Timings) == 0 { // told twice, it would count twice
		a.ingest.Told(o, a.told)
	}
	if !a.end.IsZero() && o.Outcome == classifier.OK {
		o.Done = a.end
	}
	if a.count > 1 || a.count == 1 && a.sse {
		o.Events = a.events(o)
	}
	*a = answerReader{line: a.line[:0], value: a.value[:0], told: a.told[:0]}
}

func (a *answerReader) events(o *classifier.Observation) *classifier.Events {
	from := o.Sent
	if from.IsZero() || from.After(a.first) {
		from = o.Dequeued
	}
	e := &classifier.Events{Count: a.count, First: a.first.Sub(from), LongGap: a.longest, Ended: !a.end.IsZero()}
	if a.count > 1 {
		e.Gap = a.last.Sub(a.first) / time.Duration(a.count-1)
	}
	return e
}
