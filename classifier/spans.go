package classifier

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Read reads records from JSON lines, from OTLP JSON, or from the answer of a
// Jaeger query API, which it tells apart by their first bytes. What cannot be
// used is given to bad with the place where it stands, and skipped.
//
// Of spans only those that weir made become records: a SERVER span with
// weir.queue.wait, the queue and CLIENT spans below it, and the stages below
// those. What spans do not tell (the end of the upload, for one) stays zero.
func Read(r io.Reader, take func(*Observation), bad func(where string, err error)) error {
	in := bufio.NewReaderSize(r, 64<<10)
	first, _ := in.Peek(4096)
	switch head := string(bytes.TrimSpace(first)); {
	case strings.HasPrefix(head, "{") && strings.Contains(firstLine(head), `"resourceSpans"`):
		return readOTLP(in, take, bad)
	case strings.HasPrefix(head, `{"data"`), strings.HasPrefix(head, "{") && strings.Contains(head, `"traceID"`) && !strings.Contains(firstLine(head), `"outcome"`):
		return readJaeger(in, take, bad)
	}
	return ReadLines(in, take, func(line int, err error) { bad("line "+strconv.Itoa(line), err) })
}

// firstLine is the text up to where a JSON-lines record would end; of
// indented JSON, all of it.
func firstLine(s string) string {
	line, rest, _ := strings.Cut(s, "\n")
	if strings.HasPrefix(strings.TrimSpace(rest), "{") {
		return line
	}
	return s
}

// flatSpan is a span in neither format's words.
type flatSpan struct {
	trace, id, parent, name, kind string
	start, end                    time.Time
	attrs                         map[string]any // string, float64 or bool
}

func (s *flatSpan) number(key string) float64 {
	f, _ := s.attrs[key].(float64)
	return f
}

func (s *flatSpan) text(key string) string {
	t, _ := s.attrs[key].(string)
	return t
}

func (s *flatSpan) count(key string) int { return int(min(max(s.number(key), 0), 1e9)) }

// gather holds spans until the whole source is read, for children may come
// before their parents.
type gather struct {
	servers  []*flatSpan
	children map[string][]*flatSpan // by trace and parent id
}

func (g *gather) add(s *flatSpan) {
	if g.children == nil {
		g.children = make(map[string][]*flatSpan)
	}
	if _, ok := s.attrs["weir.queue.wait"]; ok && strings.EqualFold(s.kind, "server") {
		g.servers = append(g.servers, s)
		return
	}
	g.children[s.trace+s.parent] = append(g.children[s.trace+s.parent], s)
}

func (g *gather) records(take func(*Observation), bad func(where string, err error)) {
	admitted := make([]admission, 0, len(g.servers))
	for _, s := range g.servers {
		o := g.record(s)
		if err := o.Check(); err != nil {
			bad("span "+s.id, err)
			continue
		}
		admitted = append(admitted, admission{o, g.toldInflight(s)})
	}
	countInflight(admitted)
	for _, a := range admitted {
		take(a.o)
	}
}

func (g *gather) below(s *flatSpan) []*flatSpan { return g.children[s.trace+s.id] }

func (g *gather) record(s *flatSpan) *Observation {
	o := &Observation{
		Class: s.name, Route: s.text("http.route"), Method: s.text("http.request.method"), Model: s.text("gen_ai.request.model"),
		Status: s.count("http.response.status_code"), Enqueued: s.start, Done: s.end, Sampled: true,
		AudioSeconds: s.number("weir.audio.duration"), BytesIn: int64(s.count("http.request.body.size")), BytesOut: int64(s.count("http.response.body.size")),
		Error: s.text("error.type"),
	}
	_ = parseID(o.TraceID[:], s.trace)
	for _, c := range g.below(s) {
		switch {
		case strings.EqualFold(c.kind, "client"):
			o.Dequeued = c.start
			_ = parseID(o.SpanID[:], c.id)
			g.stages(o, c)
		case c.name == "queue":
			o.Waiting, o.Limit, o.Inflight = c.count("weir.queue.depth"), c.count("weir.concurrency.limit"), c.count("weir.concurrency.used")
		}
	}
	if service := s.number("weir.service.time"); !o.Dequeued.IsZero() && service > 0 {
		o.Responded = o.Done
		o.Sent = latest(o.Dequeued, o.Done.Add(-time.Duration(service*1e9)))
	}
	o.Outcome = outcomeOf(o)
	return o
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// outcomeOf guesses the outcome, which spans tell by an error word only.
func outcomeOf(o *Observation) Outcome {
	switch {
	case o.Error == "queue_full":
		return Rejected
	case o.Error == "queue_timeout":
		return Expired
	case strings.Contains(o.Error, "cancel") || o.Error == "client_left":
		return Canceled
	case o.Status == 0:
		return Failed
	}
	return OK
}

// stages reads the stage spans below the CLIENT span.
func (g *gather) stages(o *Observation, client *flatSpan) {
	for _, c := range g.below(client) {
		stage, ok := ParseStage(c.text("weir.stage"))
		if !ok {
			continue
		}
		d := time.Duration(c.number("weir.stage.duration") * 1e9)
		name := c.text("weir.stage.name")
		if name == "" {
			name = stage.String()
		}
		o.Timings = append(o.Timings, Timing{Name: name, Stage: stage, Dur: d, Bytes: int64(c.count("weir.transfer.size")), Count: c.count("weir.transfer.count")})
		o.BatchSize = max(o.BatchSize, c.count("weir.batch.size"))
		o.SeqLen = max(o.SeqLen, c.count("weir.sequence.length"))
	}
	if len(o.Timings) > 0 {
		o.Source = client.text("weir.timing.source")
		if o.Source == "" {
			o.Source = "header"
		}
	}
}

type admission struct {
	o    *Observation
	told bool
}

func (g *gather) toldInflight(s *flatSpan) bool {
	for _, c := range g.below(s) {
		if c.name == "queue" && c.count("weir.concurrency.used") > 0 {
			return true
		}
	}
	return false
}

// countInflight counts those in the server at each admission, where the span
// does not tell it: weir tells it on the queue span, and only who waited has one.
func countInflight(all []admission) {
	var ends []time.Time
	slices.SortFunc(all, func(a, b admission) int { return a.o.Dequeued.Compare(b.o.Dequeued) })
	for _, a := range all {
		if a.o.Dequeued.IsZero() {
			continue
		}
		ends = slices.DeleteFunc(ends, func(end time.Time) bool { return !end.After(a.o.Dequeued) })
		ends = append(ends, a.o.Done)
		if !a.told {
			a.o.Inflight = len(ends)
		}
	}
}

type otlpValue struct {
	String *string         `json:"stringValue"`
	Int    json.RawMessage `json:"intValue"` // a string or a number
	Double *float64        `json:"doubleValue"`
	Bool   *bool           `json:"boolValue"`
}

type otlpSpan struct {
	TraceID    string          `json:"traceId"`
	SpanID     string          `json:"spanId"`
	Parent     string          `json:"parentSpanId"`
	Name       string          `json:"name"`
	Kind       json.RawMessage `json:"kind"` // a number or a name
	Start      json.RawMessage `json:"startTimeUnixNano"`
	End        json.RawMessage `json:"endTimeUnixNano"`
	Attributes []struct {
		Key   string    `json:"key"`
		Value otlpValue `json:"value"`
	} `json:"attributes"`
}

type otlpTraces struct {
	ResourceSpans []struct {
		ScopeSpans []struct {
			Spans []otlpSpan `json:"spans"`
		} `json:"scopeSpans"`
	} `json:"resourceSpans"`
}

// readOTLP reads one or more ExportTraceServiceRequests, one after the other.
func readOTLP(r io.Reader, take func(*Observation), bad func(where string, err error)) error {
	var g gather
	d := json.NewDecoder(r)
	for n := 1; ; n++ {
		var t otlpTraces
		if err := d.Decode(&t); err != nil {
			if !errors.Is(err, io.EOF) {
				bad(fmt.Sprintf("byte %d", d.InputOffset()), err)
			}
			break
		}
		for _, rs := range t.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				for i := range ss.Spans {
					g.add(ss.Spans[i].flat())
				}
			}
		}
	}
	g.records(take, bad)
	return nil
}

func (s *otlpSpan) flat() *flatSpan {
	f := &flatSpan{trace: s.TraceID, id: s.SpanID, parent: s.Parent, name: s.Name, attrs: make(map[string]any, len(s.Attributes)),
		start: unixNano(s.Start), end: unixNano(s.End)}
	switch kind := strings.Trim(string(s.Kind), `"`); kind {
	case "2", "SPAN_KIND_SERVER":
		f.kind = "server"
	case "3", "SPAN_KIND_CLIENT":
		f.kind = "client"
	}
	for _, a := range s.Attributes {
		switch v := a.Value; {
		case v.String != nil:
			f.attrs[a.Key] = *v.String
		case v.Double != nil:
			f.attrs[a.Key] = *v.Double
		case v.Bool != nil:
			f.attrs[a.Key] = *v.Bool
		case v.Int != nil:
			if n, err := strconv.ParseFloat(strings.Trim(string(v.Int), `"`), 64); err == nil {
				f.attrs[a.Key] = n
			}
		}
	}
	return f
}

func unixNano(raw json.RawMessage) time.Time {
	n, err := strconv.ParseInt(strings.Trim(string(raw), `"`), 10, 64)
	if err != nil || n <= 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

type jaegerSpan struct {
	TraceID    string `json:"traceID"`
	SpanID     string `json:"spanID"`
	Name       string `json:"operationName"`
	References []struct {
		Type string `json:"refType"`
		Span string `json:"spanID"`
	} `json:"references"`
	Start    int64 `json:"startTime"` // µs
	Duration int64 `json:"duration"`  // µs
	Tags     []struct {
		Key   string `json:"key"`
		Value any    `json:"value"`
	} `json:"tags"`
}

func readJaeger(r io.Reader, take func(*Observation), bad func(where string, err error)) error {
	var answer struct {
		Data []struct {
			Spans []jaegerSpan `json:"spans"`
		} `json:"data"`
	}
	if err := json.NewDecoder(r).Decode(&answer); err != nil {
		return fmt.Errorf("no answer of a Jaeger query API: %w", err)
	}
	var g gather
	for _, t := range answer.Data {
		for i := range t.Spans {
			g.add(t.Spans[i].flat())
		}
	}
	g.records(take, bad)
	return nil
}

func (s *jaegerSpan) flat() *flatSpan {
	f := &flatSpan{trace: s.TraceID, id: s.SpanID, name: s.Name, attrs: make(map[string]any, len(s.Tags))}
	if s.Start > 0 {
		f.start = time.UnixMicro(s.Start).UTC()
		f.end = f.start.Add(time.Duration(min(max(s.Duration, 0), maxSpan.Microseconds()+1)) * time.Microsecond)
	}
	for _, ref := range s.References {
		if ref.Type == "CHILD_OF" || f.parent == "" {
			f.parent = ref.Span
		}
	}
	for _, tag := range s.Tags {
		f.attrs[tag.Key] = tag.Value
	}
	f.kind = f.text("span.kind")
	return f
}
