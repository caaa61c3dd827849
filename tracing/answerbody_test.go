package tracing

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// readBody gives a body to an Ingest in pieces of n bytes.
func readBody(t *testing.T, in *Ingest, kind, body string, n int, before ...classifier.Timing) *classifier.Observation {
	t.Helper()
	o := &classifier.Observation{Timings: before}
	b := &Body{}
	if !b.Start([]byte(kind), nil) {
		t.Fatalf("%q is not read", kind)
	}
	for rest := body; rest != ""; {
		m := min(n, len(rest))
		b.Add([]byte(rest[:m]))
		rest = rest[m:]
	}
	in.Body(o, b)
	return o
}

func mustIngest(t *testing.T, m ...Mapping) *Ingest {
	t.Helper()
	in, err := NewIngest(m)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

const (
	jsonType  = "application/json; charset=utf-8"
	eventType = "text/event-stream"
)

// What servers put into their answers; the forms are those that their sources
// or documentation give (vLLM: entrypoints/openai protocol and
// --enable-per-request-metrics; SGLang: tokenizer_manager meta_info; FunASR:
// funasr/bin/_server_app.py; Triton: protocol/extension_parameters.md; OpenAI:
// the transcription object).
var answers = map[string]struct {
	kind, body string
	want       classifier.Observation
}{
	"vLLM transcription": {jsonType, `{"text":"a \"b\" }","usage":{"type":"duration","seconds":12}}`,
		classifier.Observation{AudioSeconds: 12}},
	"OpenAI tokens": {jsonType, `{"text":"a","usage":{"type":"tokens","input_tokens":14,"output_tokens":45,"total_tokens":59}}`,
		classifier.Observation{Tokens: 45}},
	"a length that is no audio": {jsonType, `{"language":"en","duration":"8.47","text":"a"}`, classifier.Observation{}},
	"vLLM chat": {jsonType, `{"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7},"metrics":{"time_to_first_token_ms":80.5,"generation_time_ms":419.5,"queue_time_ms":12,"mean_itl_ms":4,"tokens_per_second":null}}`,
		classifier.Observation{Tokens: 7, Source: "body", Timings: []classifier.Timing{
			{Name: "prefill", Stage: classifier.StageForward, Dur: 80500 * time.Microsecond},
			{Name: "decode", Stage: classifier.StageForward, Dur: 419500 * time.Microsecond},
			{Name: "queue_time_ms", Stage: classifier.StageQueue, Dur: 12 * time.Millisecond}}}},
	"vLLM's last chunk": {eventType, "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"completion_tokens\":3},\"metrics\":{\"queue_time_ms\":2}}\n\ndata: [DONE]\n\n",
		classifier.Observation{Tokens: 3, Source: "body", Timings: []classifier.Timing{{Name: "queue_time_ms", Stage: classifier.StageQueue, Dur: 2 * time.Millisecond}}}},
	"OpenAI's last event": {eventType, "event: transcript.text.done\r\ndata: {\"type\":\"transcript.text.done\",\"text\":\"a\",\"usage\":{\"type\":\"duration\",\"seconds\":3.5}}\r\n\r\n",
		classifier.Observation{AudioSeconds: 3.5}},
	"SGLang": {jsonType, `{"text":"a","meta_info":{"id":"x","completion_tokens":5,"queue_time":0.25,"e2e_latency":1.5}}`,
		classifier.Observation{Tokens: 5, Source: "body", ServerTotal: 1500 * time.Millisecond, Timings: []classifier.Timing{{Name: "queue_time", Stage: classifier.StageQueue, Dur: 250 * time.Millisecond}}}},
	"FunASR": {jsonType, `{"text":"a","processing_time":0.5,"rtf":0.05}`,
		classifier.Observation{Source: "body", ServerTotal: 500 * time.Millisecond, AudioSeconds: 10}},
	"somebody's processing_time": {jsonType, `{"text":"a","processing_time":512}`, classifier.Observation{}},
	"Triton": {jsonType, `{"model_name":"asr","model_version":"1","parameters":{"queue_us":1500,"forward_ms":40,"postprocess_s":0.001,"h2d_ns":2500000,"batch":4,"sequence_id":7,"total_ms":50},"outputs":[{"name":"T","datatype":"BYTES","shape":[1],"data":["a"]}]}`,
		classifier.Observation{Source: "body", BatchSize: 4, ServerTotal: 50 * time.Millisecond, Timings: []classifier.Timing{
			{Name: "queue", Stage: classifier.StageQueue, Dur: 1500 * time.Microsecond},
			{Name: "forward", Stage: classifier.StageForward, Dur: 40 * time.Millisecond},
			{Name: "postprocess", Stage: classifier.StagePostprocess, Dur: time.Millisecond},
			{Name: "h2d", Stage: classifier.StageTransfer, Dur: 2500 * time.Microsecond}}}},
	"parameters of somebody else": {jsonType, `{"parameters":{"forward_ms":40}}`, classifier.Observation{}},
	"a python_backend's Server-Timing": {jsonType, `{"model_name":"asr","parameters":{"server_timing":"forward;dur=40;batch=2"},"outputs":[]}`,
		classifier.Observation{Source: "body", BatchSize: 2, Timings: []classifier.Timing{{Name: "forward", Stage: classifier.StageForward, Dur: 40 * time.Millisecond}}}},
	"server_timing": {jsonType, `{"text":"a","server_timing":"queue;dur=3"}`,
		classifier.Observation{Source: "body", Timings: []classifier.Timing{{Name: "queue", Stage: classifier.StageQueue, Dur: 3 * time.Millisecond}}}},
	"a Server-Timing event": {eventType, "data: {\"text\":\"a\"}\n\nevent: server-timing\ndata: queue;dur=3\n\n",
		classifier.Observation{Source: "body", Timings: []classifier.Timing{{Name: "queue", Stage: classifier.StageQueue, Dur: 3 * time.Millisecond}}}},
	"malformed": {jsonType, `{"usage":{"type":"duration","seconds":1`, classifier.Observation{}},
	"no object": {jsonType, `[{"server_timing":"queue;dur=3"}]`, classifier.Observation{}},
}

func TestWhatBodiesTell(t *testing.T) {
	for name, c := range answers {
		t.Run(name, func(t *testing.T) {
			for _, n := range []int{1, 7, 1 << 20} {
				o := readBody(t, mustIngest(t), c.kind, c.body, n)
				if !reflect.DeepEqual(*o, c.want) {
					t.Errorf("in pieces of %d:\n got %+v\nwant %+v", n, *o, c.want)
				}
			}
		})
	}
}

// A transcript with the times of all words is long; what is told of the
// request stands at its ends, whatever the text looks like.
func TestALongBodyIsReadAtItsEnds(t *testing.T) {
	text, _ := json.Marshal(strings.Repeat(`he said "}, {\" \\`, 20_000))
	for _, body := range []string{
		fmt.Sprintf(`{"text":%s,"usage":{"type":"duration","seconds":7},"metrics":{"queue_time_ms":2}} `, text),
		fmt.Sprintf(`{"metrics":{"queue_time_ms":2},"usage":{"seconds":7,"type":"duration"},"text":%s}`, text),
		fmt.Sprintf(`{"metrics":{"queue_time_ms":2},"segments":[%s],"usage":{"type":"duration","seconds":7}}`, text),
		fmt.Sprintf(`{"segments":[%s],"metrics":{"queue_time_ms":2},"usage":{"type":"duration","seconds":7},"note":"so: \"}, \\\\\" \\\\"}`, text),
	} {
		for _, n := range []int{4 << 10, 1 << 30} {
			o := readBody(t, mustIngest(t), jsonType, body, n)
			q, ok := o.In(classifier.StageQueue)
			if !ok || q != 2*time.Millisecond || o.AudioSeconds != 7 {
				t.Errorf("%.40s... of %d bytes: %+v", body, len(body), o)
			}
		}
	}
}

func TestATextThatLooksLikeTimingsIsText(t *testing.T) {
	text, _ := json.Marshal(strings.Repeat(" ", 40_000) + `","metrics":{"queue_time_ms":2},"a":"`)
	body := fmt.Sprintf(`{"text":%s}`, text)
	if o := readBody(t, mustIngest(t), jsonType, body, 1<<30); len(o.Timings) > 0 {
		t.Errorf("%+v", o.Timings)
	}
}

func TestUnitsOfOneName(t *testing.T) {
	for unit, want := range map[string]time.Duration{"s": 2 * time.Second, "ms": 2 * time.Millisecond, "us": 2 * time.Microsecond, "ns": 2} {
		in := mustIngest(t, Mapping{Pointer: "/timings/0/decode", Stage: "preprocess", Unit: unit})
		o := readBody(t, in, jsonType, `{"timings":[{"decode":"2"},{"decode":9}]}`, 99)
		if d, ok := o.In(classifier.StagePreprocess); !ok || d != want {
			t.Errorf("%s: %v, want %v", unit, d, want)
		}
		if got := string(AppendServerTiming(nil, o)); strings.ContainsAny(got, "/") {
			t.Errorf("%q has a name that is no token", got)
		}
	}
}

func TestWhatAHeaderToldIsNotReadAgain(t *testing.T) {
	told := classifier.Timing{Name: "queue", Stage: classifier.StageQueue, Dur: time.Second}
	o := readBody(t, mustIngest(t), jsonType, answers["vLLM chat"].body, 99, told)
	if q, _ := o.In(classifier.StageQueue); q != time.Second {
		t.Errorf("queue %v", q)
	}
	if f, ok := o.In(classifier.StageForward); !ok || f != 500*time.Millisecond {
		t.Errorf("forward %v", f)
	}
	o = readBody(t, mustIngest(t), jsonType, answers["server_timing"].body, 99, told)
	if len(o.Timings) != 1 {
		t.Errorf("%+v", o.Timings)
	}
}

func TestValuesThatCannotBeTrueAreMarked(t *testing.T) {
	for _, v := range []string{"-1", "1e300", `"soon"`, "true"} {
		in := mustIngest(t)
		o := readBody(t, in, jsonType, `{"metrics":{"queue_time_ms":`+v+`}}`, 99)
		o.Dequeued, o.Responded = time.Unix(1, 0), time.Unix(2, 0)
		o.Done = o.Responded
		in.Finish(o)
		if len(o.Timings) != 1 || !o.Timings[0].Untrusted || in.Untrusted() != 1 {
			t.Errorf("%s: %+v, %d counted", v, o.Timings, in.Untrusted())
		}
	}
	in := mustIngest(t)
	o := readBody(t, in, jsonType, `{"metrics":{"queue_time_ms":5000}}`, 99)
	o.Dequeued, o.Responded, o.Done = time.Unix(1, 0), time.Unix(2, 0), time.Unix(4, 0)
	if in.Finish(o); !o.Timings[0].Untrusted {
		t.Error("5 s within 3 s pass")
	}
	o.Done, o.Timings[0].Untrusted = time.Unix(7, 0), false
	if in.Finish(o); o.Timings[0].Untrusted {
		t.Error("the end of a streamed answer is not what counts")
	}
}

func TestBodiesThatTellNothing(t *testing.T) {
	b := &Body{}
	for _, c := range []struct{ kind, coding string }{{"text/plain", ""}, {"", ""}, {"application/json", "gzip"}, {"application/jsonx", ""}, {"audio/wav", ""}} {
		if b.Start([]byte(c.kind), []byte(c.coding)) {
			t.Errorf("%+v is read", c)
		}
	}
	for _, c := range []struct{ kind, coding string }{{"Application/JSON", ""}, {"application/problem+json", "identity"}, {"text/event-stream;charset=utf-8", ""}} {
		if !b.Start([]byte(c.kind), []byte(c.coding)) {
			t.Errorf("%+v is not read", c)
		}
	}
}

func TestMistakesInPointers(t *testing.T) {
	good := Mapping{Pointer: "/a", Stage: "queue", Unit: "s"}
	for want, m := range map[string][]Mapping{
		"both a name":     {{Pointer: "/a", Name: "a", Stage: "queue", Unit: "s"}},
		"no JSON pointer": {{Pointer: "a", Stage: "queue", Unit: "s"}},
		"has no unit":     {{Pointer: "/a", Stage: "queue"}},
		"unit \"m\"":      {{Pointer: "/a", Stage: "queue", Unit: "m"}},
		"stage \"x\"":     {{Pointer: "/a", Stage: "x", Unit: "s"}},
		"mapped twice":    {good, good},
		"more than 32":    append(manyPointers(), good),
	} {
		if _, err := NewIngest(m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func manyPointers() (m []Mapping) {
	for i := range maxPointers {
		m = append(m, Mapping{Pointer: fmt.Sprintf("/a/%d", i), Stage: "queue", Unit: "s"})
	}
	return m
}

func FuzzBody(f *testing.F) {
	for _, c := range answers {
		f.Add(c.body, c.kind == eventType, 3)
	}
	f.Add(`{"a~b":{"c/d":[1,{"e":2}]},"x":"\\\""}`, false, 1)
	f.Fuzz(func(t *testing.T, body string, events bool, n int) {
		in := mustIngest(t, Mapping{Pointer: "/a~0b/c~1d/1/e", Stage: "forward", Unit: "ms"}, Mapping{Pointer: "/x", Stage: "total", Unit: "s"})
		kind := jsonType
		if events {
			kind = eventType
		}
		o := readBody(t, in, kind, body, max(1, n%4096))
		whole := readBody(t, in, kind, body, len(body)+1)
		if !reflect.DeepEqual(o, whole) {
			t.Errorf("pieces give %+v, the whole %+v", o, whole)
		}
		for _, one := range o.Timings {
			if one.Dur < 0 {
				t.Errorf("%+v", one)
			}
		}
		if o.AudioSeconds < 0 || o.ServerTotal < 0 || o.Tokens < 0 {
			t.Errorf("%+v", o)
		}
	})
}

// What is read from either end of valid JSON is what encoding/json reads.
func FuzzMembers(f *testing.F) {
	for _, c := range answers {
		f.Add(c.body)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var want map[string]json.RawMessage
		valid := json.Unmarshal([]byte(text), &want) == nil && want != nil
		forward, backward := map[string]string{}, map[string]string{}
		firstMembers([]byte(text), func(k, v []byte) { forward[string(k)] = string(v) })
		lastMembers([]byte(text), func(k, v []byte) {
			if _, twice := backward[string(k)]; !twice {
				backward[string(k)] = string(v)
			}
		})
		if !valid || strings.ContainsAny(text, "\\") || !json.Valid([]byte(text)) {
			return
		}
		for _, got := range []map[string]string{forward, backward} {
			if len(got) != len(want) {
				t.Fatalf("%d members, want %d of %q", len(got), len(want), text)
			}
			for k, v := range want {
				if !utf8Alike(k) {
					continue
				}
				if g, ok := got[k]; !ok || strings.TrimSpace(g) != strings.TrimSpace(string(v)) {
					t.Errorf("%q is %q, want %q", k, g, v)
				}
			}
		}
	})
}

// utf8Alike leaves out keys that encoding/json mends.
func utf8Alike(k string) bool { return !strings.Contains(k, "\uFFFD") }

func BenchmarkBodyOfATranscript(b *testing.B) {
	in, _ := NewIngest(nil)
	text := []byte(`{"text":"` + strings.Repeat("and then he went on ", 100) + `","usage":{"type":"duration","seconds":12}}`)
	var body Body
	var o classifier.Observation
	b.ReportAllocs()
	for b.Loop() {
		body.Start([]byte("application/json"), nil)
		body.Add(text)
		in.Body(&o, &body)
	}
}
