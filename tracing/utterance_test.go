package tracing

import (
	"slices"
	"strings"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// spokenSession is a stream and the first utterance on it: 2 s of speech that
// began 1 s into the session, and a final 300 ms after its end.
func spokenSession() (session, utterance *classifier.Observation) {
	begin := time.Now()
	session = &classifier.Observation{
		TraceID: [16]byte{1}, SpanID: [8]byte{2}, ParentID: [8]byte{3}, Sampled: true,
		Protocol: "websocket", Method: "GET", Target: "/ws", Route: "/ws", Class: "GET /ws", Status: 101, Upgraded: true,
		Enqueued: begin, Dequeued: begin, Sent: begin, Responded: begin.Add(time.Millisecond), Done: begin.Add(5 * time.Second),
		Session: &classifier.Session{Protocol: "vosk", Utterances: 1, MessagesIn: 21, MessagesOut: 20, CloseCode: 1000, Unread: "behind", Dropped: 2},
	}
	u := *session
	u.Session, u.Upgraded, u.Status, u.Class = nil, false, 0, "utterance vosk /ws"
	u.SpanID, u.ParentID = UtteranceIDs(session, 1)
	eos := begin.Add(3 * time.Second)
	u.Enqueued, u.Dequeued, u.Sent, u.Responded, u.Done = eos, eos, eos, eos.Add(300*time.Millisecond), eos.Add(300*time.Millisecond)
	u.AudioSeconds, u.Source = 2, "body"
	u.Timings = []classifier.Timing{{Name: "forward", Stage: classifier.StageForward, Dur: 200 * time.Millisecond}}
	u.Utterance = &classifier.Utterance{
		Protocol: "vosk", Index: 1, Speech: 2 * time.Second, FirstPartial: 500 * time.Millisecond,
		Partials: 3, PartialAt: []time.Duration{500 * time.Millisecond, 2200 * time.Millisecond},
		Acks: 20, Lag: 0.1, LagSlope: 0.01, QueueHidden: true, EndEstimated: true, Unpaced: true,
	}
	return session, &u
}

func TestAnUtteranceIsAChildOfItsSessionWithPartialsAsEvents(t *testing.T) {
	s := testSpans(Options{})
	session, utterance := spokenSession()
	s.Record(utterance)
	s.Record(session)
	spans := decode(t, s.filling.raw)
	server := spans[slices.IndexFunc(spans, func(p *tracepb.Span) bool { return p.Kind == tracepb.Span_SPAN_KIND_SERVER })]
	one := spans[slices.IndexFunc(spans, func(p *tracepb.Span) bool { return p.Name == "utterance" })]
	if string(one.ParentSpanId) != string(server.SpanId) || string(one.TraceId) != string(server.TraceId) {
		t.Errorf("the utterance's parent is %x, the session's span %x", one.ParentSpanId, server.SpanId)
	}
	begin := uint64(session.Enqueued.UnixNano())
	ms := func(at uint64) int { return int((at - begin + 500_000) / 1_000_000) }
	if ms(one.StartTimeUnixNano) != 1000 || ms(one.EndTimeUnixNano) != 3300 {
		t.Errorf("the utterance lasts from %d to %d ms of its session, want 1000 to 3300", ms(one.StartTimeUnixNano), ms(one.EndTimeUnixNano))
	}
	var events []string
	for _, e := range one.Events {
		events = append(events, e.Name+"@"+(time.Duration(ms(e.TimeUnixNano))*time.Millisecond).String())
	}
	if got := strings.Join(events, " "); got != "partial@1.5s partial@3.2s end_of_speech@3s final@3.3s" {
		t.Errorf("the events are %s", got)
	}
	if one.DroppedEventsCount != 1 {
		t.Errorf("%d partials are told to be without event, want 1", one.DroppedEventsCount)
	}
	forward := spans[slices.IndexFunc(spans, func(p *tracepb.Span) bool { return p.Name == "forward" })]
	if string(forward.ParentSpanId) != string(one.SpanId) || forward.StartTimeUnixNano < one.StartTimeUnixNano || forward.EndTimeUnixNano > one.EndTimeUnixNano {
		t.Errorf("forward is %v", forward)
	}
	checkAttributes(t, one, "weir.stream.protocol=vosk", "weir.utterance.final_latency=0.3", "weir.utterance.speech=2", "weir.utterance.first_partial=0.5",
		"weir.utterance.partials=3", "weir.utterance.partial_rate=1.5", "weir.utterance.lag=0.1", "weir.utterance.lag_slope=0.01",
		"weir.queue.hidden=true", "weir.utterance.end_estimated=true", "weir.utterance.unpaced=true")
	checkAttributes(t, server, "weir.stream.protocol=vosk", "weir.session.utterances=1", "weir.session.messages.in=21", "weir.session.close_code=1000",
		"weir.session.unread=behind", "weir.session.dropped=2")
}

func checkAttributes(t *testing.T, s *tracepb.Span, want ...string) {
	t.Helper()
	var have []string
	for _, kv := range s.Attributes {
		have = append(have, kv.Key+"="+strings.TrimSpace(strings.SplitN(kv.Value.String(), ":", 2)[1]))
	}
	for _, w := range want {
		key, value, _ := strings.Cut(w, "=")
		if !slices.Contains(have, w) && !slices.Contains(have, key+`="`+value+`"`) {
			t.Errorf("%s has no %s among %v", s.Name, w, have)
		}
	}
}

func TestUtterancesOfOneSessionHaveIdsOfTheirOwn(t *testing.T) {
	session, _ := spokenSession()
	seen := map[[8]byte]bool{}
	for n := range 10_000 {
		id, parent := UtteranceIDs(session, n)
		if seen[id] || id == parent || id == session.SpanID {
			t.Fatalf("utterance %d has the id %x again", n, id)
		}
		seen[id] = true
	}
}

func TestAnUtteranceOfAnUnsampledSessionIsNotKeptAlone(t *testing.T) {
	s := testSpans(Options{KeepSlow: time.Millisecond})
	_, u := spokenSession()
	u.Sampled, u.Outcome = false, classifier.Failed
	if s.Record(u); s.filling.spans != 0 {
		t.Errorf("kept %d spans", s.filling.spans)
	}
}

func TestAnUtteranceCostsNoAllocation(t *testing.T) {
	s := testSpans(Options{})
	_, u := spokenSession()
	record := func() {
		s.Record(u)
		for b := s.next(); b != nil; b = s.next() {
			s.release(b)
		}
	}
	for range 5000 {
		record()
	}
	if n := testing.AllocsPerRun(5000, record); n != 0 {
		t.Errorf("%v allocations an utterance, want none", n)
	}
}

func TestUtterancesHaveMetricsOfTheirOwnAndAreNoRequests(t *testing.T) {
	m := testMetrics(t, Options{})
	session, u := spokenSession()
	m.Observe(u)
	lost := *u
	lost.Outcome, lost.Error, lost.Responded = classifier.Canceled, "client_gone", time.Time{}
	paced := *u.Utterance
	paced.Unpaced = false
	lost.Utterance = &paced
	m.Observe(&lost)
	m.Observe(session)
	streamed := request()
	streamed.Events = &classifier.Events{Count: 3, First: 250 * time.Millisecond}
	m.Observe(streamed)
	text := scrape(t, m, "text/plain")
	for _, want := range []string{
		`weir_utterances_total{weir_outcome="ok",weir_stream_protocol="vosk"} 1`,
		`weir_utterances_total{weir_outcome="canceled",weir_stream_protocol="vosk"} 1`,
		`weir_utterance_final_duration_seconds_sum{weir_stream_protocol="vosk"} 0.3`,
		`weir_utterance_final_duration_seconds_count{weir_stream_protocol="vosk"} 1`,
		`weir_utterance_first_partial_duration_seconds_sum{weir_stream_protocol="vosk"} 0.5`,
		`weir_utterance_first_partial_duration_seconds_count{weir_stream_protocol="vosk"} 1`,
		`weir_stream_unread_total{error_type="behind"} 1`,
		`weir_stream_unread_total{error_type="deflate_bomb"} 0`,
		`weir_stream_first_event_duration_seconds_sum 0.25`,
		`weir_seconds_total{weir_class="utterance vosk /ws",weir_part="forward"} 0.4`,
		`weir_audio_duration_seconds_total 16.5`,
	} {
		if !slices.Contains(lines(text), want) {
			name, _, _ := strings.Cut(want, "{")
			t.Errorf("no series\n  %s\namong\n  %s", want, strings.Join(slices.DeleteFunc(lines(text), func(s string) bool { return !strings.HasPrefix(s, name) }), "\n  "))
		}
	}
	if strings.Contains(text, `http_server_request_duration_seconds_count{http_request_method="GET"`) {
		t.Error("a stream counts as a request's latency")
	}
}

func TestTimingsInTheBodyCoverTheWholeAnswer(t *testing.T) {
	in := testIngestOf(t)
	o := request()
	o.Timings, o.Source = nil, ""
	o.Responded, o.Done = o.Dequeued.Add(10*time.Millisecond), o.Dequeued.Add(2*time.Second)
	in.Told(o, []byte("queue;dur=100, forward;dur=1500;batch=4"))
	in.Finish(o)
	if d, ok := o.In(classifier.StageForward); !ok || d != 1500*time.Millisecond || o.Source != "body" || o.BatchSize != 4 {
		t.Errorf("forward is %v, %v, from %q: %+v", d, ok, o.Source, o.Timings)
	}
}

func testIngestOf(t *testing.T) *Ingest {
	in, err := NewIngest(nil)
	if err != nil {
		t.Fatal(err)
	}
	return in
}
