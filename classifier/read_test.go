package classifier

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// jsonLines writes records as /api/requests does.
func jsonLines(t testing.TB, all []Observation) string {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for i := range all {
		if err := e.Encode(&all[i]); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

type read struct {
	records []*Observation
	bad     []string
}

func readAll(t testing.TB, text string) (r read) {
	t.Helper()
	err := Read(strings.NewReader(text), func(o *Observation) { r.records = append(r.records, o) },
		func(where string, err error) { r.bad = append(r.bad, where+": "+err.Error()) })
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	s := scenarios()[0]
	all := s.play()[:200]
	r := readAll(t, jsonLines(t, all))
	if len(r.records) != 200 || len(r.bad) != 0 {
		t.Fatalf("%d records, bad: %v", len(r.records), r.bad)
	}
	for i, o := range r.records {
		if o.Total() != all[i].Total() || o.QueueWait() != all[i].QueueWait() || o.Inflight != all[i].Inflight || !reflect.DeepEqual(o.Timings, all[i].Timings) {
			t.Fatalf("record %d is\n%+v\nwant\n%+v", i, *o, all[i])
		}
	}
}

func TestBadLinesAreNamedAndLoseNothingOfTheRest(t *testing.T) {
	good := jsonLines(t, []Observation{*request(0, 1, 1, 1, 1, 1, 50, 1, 1)})
	change := func(from, to string) string {
		if !strings.Contains(good, from) {
			t.Fatalf("the record has no %s: %s", from, good)
		}
		return strings.Replace(good, from, to, 1)
	}
	for _, c := range []struct{ line, says string }{
		{change(`"total_ms":57`, `"total_ms":NaN`), "invalid character 'N'"},
		{good[:len(good)/2] + "\n", "no JSON at byte"},
		{change(`"total_ms":57`, `"total_ms":-57`), "total_ms is -57: it must lie between 0 and 86400000"},
		{change(`"total_ms":57`, `"total_ms":1e300`), "total_ms is"},
		{change(`"total_ms":57`, `"total_ms":1e400`), "1e400"},
		{change(`,"total_ms":57`, ``), "the request has no end"},
		{change(`"outcome":"ok"`, `"outcome":"fine"`), `outcome "fine" is not one of ok`},
		{change(`"dur_ms":50`, `"dur_ms":-50`), `timing "forward" has dur_ms -50`},
		{change(`"stage":"forward"`, `"stage":"inference"`), `the unknown stage "inference"`},
		{change(`"batch":1`, `"batch":-1`), "batch is -1"},
		{change(`"responded_ms":57`, `"responded_ms":90`), "after total_ms"},
		{change(`"sent_ms":2`, `"sent_ms":0.5`), "before dequeued_ms"},
		{"[1,2]\n", "cannot unmarshal array"},
		{strings.Repeat("x", maxLine+1) + "\n", "longer than 4 MiB"},
	} {
		r := readAll(t, good+c.line+"\n"+strings.TrimSuffix(good, "\n"))
		if len(r.records) != 2 {
			t.Errorf("%.80s: %d records: want 2", c.line, len(r.records))
		}
		if len(r.bad) != 1 || !strings.HasPrefix(r.bad[0], "line 2: ") || !strings.Contains(r.bad[0], c.says) {
			t.Errorf("%.80s: told %q: want line 2 and %q", c.line, r.bad, c.says)
		}
	}
}

// otlp writes records as the spans that weir makes of them.
func otlp(all []Observation) string {
	var b strings.Builder
	b.WriteString(`{"resourceSpans":[{"scopeSpans":[{"spans":[`)
	for i := range all {
		o, id := &all[i], fmt.Sprintf("%016x", i+1)
		if i > 0 {
			b.WriteString(",")
		}
		span := func(id, parent, name string, kind int, start, end time.Time, attrs string) {
			fmt.Fprintf(&b, `{"traceId":"%032x","spanId":%q,"parentSpanId":%q,"name":%q,"kind":%d,"startTimeUnixNano":"%d","endTimeUnixNano":"%d","attributes":[%s]}`,
				i+1, id, parent, name, kind, start.UnixNano(), end.UnixNano(), strings.TrimPrefix(attrs, ","))
		}
		number := func(key string, v float64) string {
			return fmt.Sprintf(`,{"key":%q,"value":{"doubleValue":%g}}`, key, v)
		}
		whole := func(key string, v int) string { return fmt.Sprintf(`,{"key":%q,"value":{"intValue":"%d"}}`, key, v) }
		span(id, "", o.Class, 2, o.Enqueued, o.Done, number("weir.queue.wait", o.QueueWait().Seconds())+number("weir.service.time", o.Service().Seconds())+
			number("weir.audio.duration", o.AudioSeconds)+whole("http.response.status_code", o.Status))
		if o.Dequeued.IsZero() {
			continue
		}
		b.WriteString(",")
		span("c"+id[1:], id, "POST", 3, o.Dequeued, o.Done, "")
		if o.QueueWait() > 0 {
			b.WriteString(",")
			span("d"+id[1:], id, "queue", 1, o.Enqueued, o.Dequeued, whole("weir.concurrency.limit", o.Limit)+whole("weir.concurrency.used", o.Inflight)+whole("weir.queue.depth", o.Waiting))
		}
		for k, one := range o.Timings {
			b.WriteString(",")
			span(fmt.Sprintf("e%d%s", k, id[2:]), "c"+id[1:], one.Name, 1, o.Dequeued, o.Done,
				fmt.Sprintf(`,{"key":"weir.stage","value":{"stringValue":%q}}`, one.Stage)+number("weir.stage.duration", one.Dur.Seconds())+whole("weir.batch.size", o.BatchSize))
		}
	}
	b.WriteString(`]}]}]}`)
	return b.String()
}

// jaeger turns the same spans into what a Jaeger query API answers.
func jaeger(t *testing.T, text string) string {
	t.Helper()
	var in otlpTraces
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		t.Fatal(err)
	}
	var spans []map[string]any
	for _, s := range in.ResourceSpans[0].ScopeSpans[0].Spans {
		f := s.flat()
		kind := map[string]string{"server": "server", "client": "client"}[f.kind]
		tags := []map[string]any{{"key": "span.kind", "value": kind}}
		for key, v := range f.attrs {
			tags = append(tags, map[string]any{"key": key, "value": v})
		}
		spans = append(spans, map[string]any{"traceID": s.TraceID, "spanID": s.SpanID, "operationName": s.Name, "startTime": f.start.UnixMicro(),
			"duration": f.end.Sub(f.start).Microseconds(), "tags": tags, "references": []map[string]any{{"refType": "CHILD_OF", "traceID": s.TraceID, "spanID": s.Parent}}})
	}
	b, err := json.Marshal(map[string]any{"data": []map[string]any{{"spans": spans}}})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestTheSameVerdictFromEverySource(t *testing.T) {
	for _, name := range []string{"own limit before a batching server", "linear batching at capacity", "one decoder thread"} {
		for _, s := range scenarios() {
			if s.name != name {
				continue
			}
			all := s.play()
			spans := otlp(all)
			for kind, text := range map[string]string{"json lines": jsonLines(t, all), "otlp": spans, "jaeger": jaeger(t, spans)} {
				r := readAll(t, text)
				if len(r.records) != len(all) || len(r.bad) > 0 {
					t.Fatalf("%s from %s: %d records of %d, bad %v", name, kind, len(r.records), len(all), r.bad)
				}
				var p Replay
				for _, o := range r.records {
					p.Add(o)
				}
				last, changes := p.Verdicts()
				if len(last) != 1 || last[0].Cause != s.want[0] {
					t.Errorf("%s from %s: %s", name, kind, tell(last[0]))
				}
				if len(changes) == 0 || changes[0].Verdict.Cause != Healthy {
					t.Errorf("%s from %s: the quiet time before is not told: %d changes", name, kind, len(changes))
				}
			}
		}
	}
}

func TestReplaySkipsLongSilence(t *testing.T) {
	var p Replay
	for day := range 3 {
		for i := range 50 {
			p.Add(request(time.Duration(day)*24*time.Hour*200+time.Duration(i)*100*time.Millisecond, 0, 0, 0, 0, 0, 50, 0, 0))
		}
	}
	if last, _ := p.Verdicts(); len(last) != 1 || last[0].Report.Requests != 50 {
		t.Errorf("%d verdicts", len(last))
	}
}

func FuzzRead(f *testing.F) {
	all := []Observation{*request(0, 1, 1, 1, 1, 1, 50, 1, 1)}
	f.Add(jsonLines(f, all))
	f.Add(otlp(all))
	f.Add(`{"data":[{"spans":[{"traceID":"1","spanID":"2","startTime":5,"duration":-1,"tags":[{"key":"weir.queue.wait","value":1},{"key":"span.kind","value":"server"}]}]}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		var p Replay
		_ = Read(strings.NewReader(text), func(o *Observation) {
			if err := o.Check(); err != nil {
				t.Errorf("a record that does not pass: %v", err)
			}
			p.Add(o)
		}, func(string, error) {})
		p.Verdicts()
	})
}
