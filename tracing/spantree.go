package tracing

import (
	"encoding/binary"
	"strings"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"weir/classifier"
)

// tree turns one record into its spans:
//
//	SERVER   POST /v1/audio/transcriptions   Enqueued → Done
//	├ INTERNAL queue                         Enqueued → Dequeued
//	└ CLIENT   POST                          Dequeued → Done; its id went to the server
//	   └ INTERNAL preprocess, transfer, ...  placed by [place]
//
// It is used again for each request, so that none costs an allocation.
type tree struct {
	server  []byte // attributes of the server, encoded
	baseURL string // of the server; "": it has none

	o                    *classifier.Observation
	kept                 string // why a request that was not sampled is kept
	state                []byte
	flags                uint32
	start, admitted, end int64 // in ns since 1970, whole µs; admitted 0: never
	queueEnd             int64 // at start: no queue span
	slots                [maxTimings]slot
	timings              [maxTimings]*classifier.Timing // of slots
	stages               int                            // of slots in use
	drawn                int
	untrusted            int
	scaled               bool
}

func newTree(server, scheme string) tree {
	t := tree{state: make([]byte, 0, maxTraceState)}
	host, port := splitAddress(server)
	t.server = appendString(t.server, "server.address", host)
	if port > 0 {
		t.server = appendInt(t.server, "server.port", int64(port))
		t.baseURL = schemeOf(scheme) + "://" + server
	}
	t.server = appendString(t.server, "service.peer.name", "asr-server")
	return t
}

// plan lays out the spans of o and returns their number. kept is empty for a
// sampled request.
func (t *tree) plan(o *classifier.Observation, kept string) (spans int) {
	t.o, t.kept, t.flags = o, kept, flagSampled|flagsKnowRemote
	if kept == "" {
		t.state = append(t.state[:0], o.TraceState...)
	} else {
		t.state = appendWithoutThreshold(t.state[:0], o.TraceState)
	}
	t.start, t.end = t.at(o.Enqueued), t.at(o.Done)
	t.admitted, t.stages, t.drawn, t.untrusted, t.scaled = 0, 0, 0, 0, false
	if o.Utterance != nil {
		return t.planUtterance()
	}
	spans = 1
	if o.Dequeued.IsZero() {
		t.queueEnd = t.end
	} else {
		spans++
		t.admitted = t.at(o.Dequeued)
		t.queueEnd = max(t.start, t.admitted-microsecond)
		t.planStages()
	}
	if t.queueEnd > t.start {
		spans++
	}
	return spans + t.drawn
}

// at is an instant of the record on the wall clock. The wall clock is read
// once, at Enqueued: two readings could run backwards.
func (t *tree) at(instant time.Time) int64 {
	o := t.o
	begin := o.Enqueued.UnixNano()
	if instant.IsZero() || instant.Before(o.Enqueued) {
		instant = o.Enqueued
	}
	if instant.After(o.Done) && !o.Done.IsZero() {
		instant = o.Done
	}
	ns := begin + int64(instant.Sub(o.Enqueued))
	return ns - ns%microsecond
}

// planStages collects the stages that can be drawn, in the order of the work.
func (t *tree) planStages() {
	if t.o.Source == sourceOTLP {
		return // the server's own spans are there
	}
	for rank := range numRanks {
		for i := range t.o.Timings {
			one := &t.o.Timings[i]
			if rankOf(one) != rank || t.stages == len(t.slots) {
				continue
			}
			t.slots[t.stages], t.timings[t.stages] = slot{dur: one.Dur}, one
			t.stages++
		}
	}
	for i := range t.o.Timings {
		if t.o.Timings[i].Untrusted {
			t.untrusted++
		}
	}
	end := t.at(t.o.Responded)
	if t.o.Responded.IsZero() || t.o.Source == "trailer" || t.o.Source == "body" {
		end = t.end // the timings cover the whole answer
	}
	slots := t.slots[:t.stages]
	t.scaled = place(t.admitted, end, slots)
	for i := range slots {
		if slots[i].drawn() {
			t.drawn++
		}
	}
}

// The order of the work. A transfer of unknown direction is taken for input.
const (
	rankNone = -1
	numRanks = 6
)

func rankOf(t *classifier.Timing) int {
	switch {
	case t.Untrusted:
		return rankNone
	case t.Stage == classifier.StageTransfer && transferDirection(t.Name) == "d2h":
		return 4
	}
	switch t.Stage {
	case classifier.StageQueue:
		return 0
	case classifier.StagePreprocess:
		return 1
	case classifier.StageTransfer:
		return 2
	case classifier.StageForward:
		return 3
	case classifier.StagePostprocess:
		return 5
	}
	return rankNone
}

// transferDirection is what the server's word for a copy says of its
// direction; "" if nothing.
func transferDirection(name string) string {
	switch name {
	case "h2d", "compute_input":
		return "h2d"
	case "d2h", "compute_output":
		return "d2h"
	}
	return ""
}

// append encodes the planned spans, parents first, and forgets the record.
func (t *tree) append(b []byte) []byte {
	defer t.forget()
	if t.o.Utterance != nil {
		b = t.appendUtterance(b)
	} else {
		b = t.appendServer(b)
	}
	if t.queueEnd > t.start {
		b = t.appendQueue(b)
	}
	if t.admitted > 0 {
		if t.o.Utterance == nil {
			b = t.appendClient(b)
		}
		for i := range t.stages {
			if t.slots[i].drawn() {
				b = t.appendStage(b, i)
			}
		}
	}
	return b
}

func (t *tree) forget() {
	t.o = nil
	clear(t.timings[:t.stages])
}

// The spans' ids all derive from the one that went to the server.
const (
	idServer uint64 = 1 + iota
	idQueue
	idStages
)

// id is one of the request's span ids: a step of SplitMix64, so that the ids of
// one request differ and those of any two are as unlike as random ones.
func (t *tree) id(n uint64) (id [8]byte) {
	return deriveID(binary.BigEndian.Uint64(t.o.SpanID[:]), n)
}

func deriveID(seed, n uint64) (id [8]byte) {
	x := seed + n*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	binary.BigEndian.PutUint64(id[:], max(1, x^x>>31)) // 0 is no id
	return id
}

func (t *tree) span(id, parent [8]byte, kind tracepb.Span_SpanKind, start, end int64) span {
	return span{
		trace: t.o.TraceID, id: id, parent: parent, state: t.state, flags: t.flags,
		kind: kind, start: start, end: end,
	}
}

func (t *tree) appendServer(b []byte) []byte {
	o := t.o
	s := t.span(t.id(idServer), o.ParentID, tracepb.Span_SPAN_KIND_SERVER, t.start, t.end)
	s.name, s.rest = spanName(o)
	if isRPC(o) {
		s.name, s.rest = rpcName(o), ""
	}
	if s.parent != [8]byte{} {
		s.flags |= flagRemote
	}
	b, at := openSpan(b, &s)
	if isRPC(o) {
		b = t.appendRPCServer(b)
	} else {
		b = t.appendHTTPServer(b)
	}
	b = appendString(b, "gen_ai.request.model", o.Model)
	b = appendDouble(b, "weir.queue.wait", o.QueueWait().Seconds())
	if t.admitted > 0 {
		b = appendDouble(b, "weir.service.time", o.Service().Seconds())
		b = appendDouble(b, "weir.unattributed", o.Unattributed().Seconds())
	}
	b = appendSeconds(b, "weir.overhead", o.Overhead)
	b = appendSeconds(b, "weir.before", o.Before)
	if o.AudioSeconds > 0 {
		b = appendDouble(b, "weir.audio.duration", o.AudioSeconds)
	}
	b = appendSession(b, o.Session)
	if t.kept != "" {
		b = appendTrue(b, "weir.keep")
		b = appendString(b, "weir.keep.reason", t.kept)
	}
	return closeMessage(b, at)
}

func (t *tree) appendQueue(b []byte) []byte {
	s := t.span(t.id(idQueue), t.id(idServer), tracepb.Span_SPAN_KIND_INTERNAL, t.start, t.queueEnd)
	s.name = "queue"
	b, at := openSpan(b, &s)
	b = appendInt(b, "weir.queue.depth", int64(t.o.Waiting))
	if t.o.Limit > 0 {
		b = appendInt(b, "weir.concurrency.limit", int64(t.o.Limit))
	}
	if t.admitted > 0 {
		b = appendInt(b, "weir.concurrency.used", int64(t.o.Inflight))
	}
	return closeMessage(b, at)
}

// appendClient encodes the span of the exchange with the server. It ends with
// the answer's last byte, not with its head.
func (t *tree) appendClient(b []byte) []byte {
	s := t.span(t.o.SpanID, t.id(idServer), tracepb.Span_SPAN_KIND_CLIENT, t.admitted, t.end)
	s.name = httpMethodName(t.o)
	if isRPC(t.o) {
		s.name = rpcName(t.o)
	}
	b, at := openSpan(b, &s)
	if isRPC(t.o) {
		b = t.appendRPCClient(b)
	} else {
		b = t.appendHTTPClient(b)
	}
	b = appendString(b, "weir.timing.source", source(t.o))
	b = appendEvents(b, t.o.Events)
	for _, l := range t.o.Load {
		b = appendDouble(b, "weir.server.load."+l.Name, l.Value)
	}
	if t.untrusted > 0 {
		b = appendInt(b, "weir.stages.untrusted", int64(t.untrusted))
	}
	return closeMessage(b, at)
}

// stageNames are the names of stage spans. The server's own words would make a
// new series each in metrics that backends derive from spans.
var stageNames = [classifier.NumStages]string{
	classifier.StageQueue:       "queue_in_server",
	classifier.StagePreprocess:  "preprocess",
	classifier.StageTransfer:    "transfer",
	classifier.StageForward:     "forward",
	classifier.StagePostprocess: "postprocess",
}

func (t *tree) appendStage(b []byte, i int) []byte {
	one := t.timings[i]
	s := t.span(t.id(idStages+uint64(i)), t.o.SpanID, tracepb.Span_SPAN_KIND_INTERNAL, t.slots[i].start, t.slots[i].end)
	s.name = stageNames[one.Stage]
	b, at := openSpan(b, &s)
	b = appendString(b, "weir.stage", s.name)
	b = appendDouble(b, "weir.stage.duration", one.Dur.Seconds())
	b = appendString(b, "weir.stage.name", one.Name)
	switch one.Stage {
	case classifier.StageForward:
		b = appendCount(b, "weir.batch.size", int64(t.o.BatchSize))
		b = appendCount(b, "weir.sequence.length", int64(t.o.SeqLen))
	case classifier.StageTransfer:
		b = appendCount(b, "weir.transfer.size", one.Bytes)
		b = appendCount(b, "weir.transfer.count", int64(one.Count))
		b = appendString(b, "weir.transfer.direction", transferDirection(one.Name))
	}
	b = appendTrue(b, "weir.time.estimated")
	if t.scaled {
		b = appendTrue(b, "weir.time.scaled")
	}
	return closeMessage(b, at)
}

// appendCount adds a number, if it was told.
func appendCount(b []byte, key string, n int64) []byte {
	if n <= 0 {
		return b
	}
	return appendInt(b, key, n)
}

func appendSeconds(b []byte, key string, d time.Duration) []byte {
	if d <= 0 {
		return b
	}
	return appendDouble(b, key, d.Seconds())
}

// appendHTTPServer adds HTTP's attributes and status to a SERVER span.
func (t *tree) appendHTTPServer(b []byte) []byte {
	o := t.o
	path, query, _ := strings.Cut(o.Target, "?")
	b = appendMethod(b, o)
	b = appendString(b, "url.path", path)
	b = appendString(b, "url.query", query)
	b = appendString(b, "url.scheme", schemeOf(o.Scheme))
	b = appendString(b, "http.route", o.Route)
	b = appendCount(b, "http.response.status_code", int64(o.Status))
	b = appendString(b, "network.protocol.version", protocolVersion(o.Protocol))
	b = appendString(b, "user_agent.original", o.UserAgent)
	b = appendPeers(b, o)
	switch {
	case o.Error != "":
		b = appendString(b, "error.type", o.Error)
	case o.Status >= 500:
		b = appendDigits(b, "error.type", o.Status)
	}
	if serverFailed(o) {
		b = appendError(b)
	}
	return b
}

// appendPeers tells who called, and under which name.
func appendPeers(b []byte, o *classifier.Observation) []byte {
	peer, port := splitAddress(o.Client)
	b = appendString(b, "client.address", peer)
	b = appendString(b, "network.peer.address", peer)
	b = appendCount(b, "network.peer.port", int64(port))
	host, port := splitAddress(o.Host)
	b = appendString(b, "server.address", host)
	return appendCount(b, "server.port", int64(port))
}

func schemeOf(scheme string) string {
	if scheme == "" {
		return "http"
	}
	return scheme
}

// appendHTTPClient adds HTTP's attributes and status to a CLIENT span.
func (t *tree) appendHTTPClient(b []byte) []byte {
	o := t.o
	b = appendMethod(b, o)
	b = append(b, t.server...)
	if t.baseURL != "" {
		b = appendStrings(b, "url.full", t.baseURL, o.Target)
	}
	b = appendString(b, "network.protocol.version", protocolVersion(o.Protocol))
	status := answerStatus(o)
	b = appendCount(b, "http.response.status_code", int64(status))
	switch {
	case o.Outcome == classifier.Canceled: // on purpose: no error of the server
	case o.Error != "":
		b = appendError(appendString(b, "error.type", o.Error))
	case status >= 400:
		b = appendError(appendDigits(b, "error.type", status))
	}
	return b
}

// serverFailed tells whether the SERVER span is an error: by the status that
// the client got, or because it lost bytes that were on their way.
func serverFailed(o *classifier.Observation) bool {
	switch o.Outcome {
	case classifier.Failed:
		return o.Status < 400 || o.Status >= 500
	case classifier.Canceled:
		return o.Status >= 500 || !o.Responded.IsZero()
	}
	return o.Status >= 500
}

// answerStatus is the status that the server gave; 0 if it is not known. After
// an error the status may be weir's own.
func answerStatus(o *classifier.Observation) int {
	if o.Responded.IsZero() || o.Error != "" && o.Status >= 400 {
		return 0
	}
	return o.Status
}

const otherMethod = "_OTHER"

// methodAttribute is the method, if it is a known one: others would be as many
// as a client likes.
func methodAttribute(o *classifier.Observation) string {
	switch o.Method {
	case "POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE":
		return o.Method
	}
	return otherMethod
}

func appendMethod(b []byte, o *classifier.Observation) []byte {
	method := methodAttribute(o)
	b = appendString(b, "http.request.method", method)
	if method == otherMethod && o.Method != otherMethod {
		b = appendString(b, "http.request.method_original", o.Method)
	}
	return b
}

// httpMethodName is the method as part of a span's name.
func httpMethodName(o *classifier.Observation) string {
	if m := methodAttribute(o); m != otherMethod {
		return m
	}
	return "HTTP"
}

// spanName is the name of a SERVER span, in two parts: never with the path,
// which has as many values as clients think of.
func spanName(o *classifier.Observation) (name, rest string) {
	name = httpMethodName(o)
	if o.Route == "" {
		return name, ""
	}
	return name + " ", o.Route
}

// protocolVersion is HTTP's version in a record's protocol.
func protocolVersion(protocol string) string {
	switch protocol {
	case "h2", "grpc":
		return "2"
	case "websocket":
		return "1.1"
	}
	version, _ := strings.CutPrefix(protocol, "http/")
	return version
}

// appendWithoutThreshold appends a tracestate less OpenTelemetry's sampling
// threshold: of a request that is kept for what became of it, nobody knows the
// probability.
func appendWithoutThreshold(dst []byte, state string) []byte {
	first := len(dst)
	for member := range strings.SplitSeq(state, ",") {
		key, value, _ := strings.Cut(member, "=")
		if key == "ot" {
			mark := len(dst)
			dst = appendMember(dst, first, "ot=")
			if kept := len(dst); len(appendSubkeys(dst, value)) == kept {
				dst = dst[:mark]
			} else {
				dst = appendSubkeys(dst, value)
			}
			continue
		}
		dst = appendMember(dst, first, member)
	}
	return dst
}

func appendMember(dst []byte, first int, member string) []byte {
	if len(dst) > first && member != "" {
		dst = append(dst, ',')
	}
	return append(dst, member...)
}

// appendSubkeys appends the parts of an "ot" member but th, the threshold.
func appendSubkeys(dst []byte, value string) []byte {
	first := len(dst)
	for part := range strings.SplitSeq(value, ";") {
		if strings.HasPrefix(part, "th:") {
			continue
		}
		if len(dst) > first {
			dst = append(dst, ';')
		}
		dst = append(dst, part...)
	}
	return dst
}
