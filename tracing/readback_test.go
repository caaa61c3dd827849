package tracing

import (
	"encoding/base64"
	"encoding/hex"
	"regexp"
	"strings"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protojson"

	"weir/classifier"
)

var idField = regexp.MustCompile(`"(traceId|spanId|parentSpanId)":\s*"([^"]*)"`)

// otlpJSON writes spans as a collector's file exporter does. It differs from
// the protobuf mapping in its ids: hexadecimal digits, not base64.
func otlpJSON(t *testing.T, spans []*tracepb.Span) string {
	t.Helper()
	b, err := protojson.Marshal(&tracepb.TracesData{ResourceSpans: []*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: spans}}}}})
	if err != nil {
		t.Fatal(err)
	}
	return idField.ReplaceAllStringFunc(string(b), func(field string) string {
		m := idField.FindStringSubmatch(field)
		id, err := base64.StdEncoding.DecodeString(m[2])
		if err != nil {
			t.Fatal(err)
		}
		return `"` + m[1] + `":"` + hex.EncodeToString(id) + `"`
	})
}

func TestRecordsAreReadBackFromTheirSpans(t *testing.T) {
	c := &collector{}
	s := startSpans(t, Options{}, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+serveHTTP(t, c))
	sent := request()
	s.Record(sent)
	refused := &classifier.Observation{
		TraceID: [16]byte{9}, SpanID: [8]byte{9}, Sampled: true, Method: "POST", Route: "/asr", Class: "POST /asr", Status: 503,
		Outcome: classifier.Rejected, Error: "queue_full", Enqueued: sent.Enqueued, Done: sent.Enqueued.Add(20 * time.Millisecond),
	}
	s.Record(refused)
	if err := shutdown(s, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	var got []*classifier.Observation
	err := classifier.Read(strings.NewReader(otlpJSON(t, c.spans())), func(o *classifier.Observation) { got = append(got, o) },
		func(where string, err error) { t.Errorf("%s: %v", where, err) })
	if err != nil || len(got) != 2 {
		t.Fatalf("%d records, %v: want 2", len(got), err)
	}
	o, no := got[0], got[1]
	if o.Outcome != classifier.OK {
		o, no = no, o
	}
	if no.Outcome != classifier.Rejected || no.QueueWait().Round(time.Millisecond) != 20*time.Millisecond {
		t.Errorf("the refused request: %s after %v", no.Outcome, no.QueueWait())
	}
	close := func(what string, got, want time.Duration) {
		t.Helper()
		if (got - want).Abs() > 10*time.Microsecond {
			t.Errorf("%s is %v: want %v", what, got, want)
		}
	}
	close("the wait", o.QueueWait(), sent.QueueWait())
	close("the total", o.Total(), sent.Total())
	for stage := classifier.StageQueue; int(stage) < classifier.NumStages; stage++ {
		a, _ := o.In(stage)
		b, _ := sent.In(stage)
		close(stage.String(), a, b)
	}
	bytes, copies := o.Moved()
	if bytes != 484000 || copies != 2 {
		t.Errorf("%d bytes in %d copies: want 484000 in 2", bytes, copies)
	}
	if o.TraceID != sent.TraceID || o.Class != sent.Class || o.Route != sent.Route || o.Model != sent.Model || o.Status != 200 ||
		o.Waiting != 3 || o.Inflight != 4 || o.Limit != 4 || o.BatchSize != 8 || o.SeqLen != 3000 || o.AudioSeconds != 12.5 {
		t.Errorf("read back: %+v", o)
	}
}
