package proxy

import (
	"bytes"
	"encoding/binary"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// A protocol says what the messages of one kind of ASR server mean: when it is
// ready, what ends speech, what is a partial or a final result, how far the
// server is, and how it refuses.
type protocol struct {
	name    string
	rate    float64 // bytes a second of the audio, where no message says otherwise; 0: not known
	offsets bool    // results tell where in the audio they end
	begin   func(*session)
	client  func(*session, *message)
	server  func(*session, *message)
}

const (
	pcm16k   = 2 * 16000 // bytes a second of 16-bit samples
	pcm24k   = 2 * 24000
	float16k = 4 * 16000 // of 32-bit floats
)

// The protocols that weir knows, by the name in stream_protocol.
var (
	funasrOffline  = &protocol{name: "funasr-offline", rate: pcm16k, client: funasrClient, server: funasrOfflineServer}
	funasr2Pass    = &protocol{name: "funasr-2pass", rate: pcm16k, client: funasrClient, server: funasr2PassServer}
	funasrRealtime = &protocol{name: "funasr-realtime", rate: pcm16k, offsets: true, client: funasrRealtimeClient, server: funasrRealtimeServer}
	sherpaOnline   = &protocol{name: "sherpa-onnx-online", rate: float16k, offsets: true, client: sherpaOnlineClient, server: sherpaOnlineServer}
	sherpaOffline  = &protocol{name: "sherpa-onnx-offline", begin: func(s *session) { s.raw = &rawAudio{} }, client: sherpaOfflineClient, server: sherpaOfflineServer}
	vosk           = &protocol{name: "vosk", rate: pcm16k, offsets: true, client: voskClient, server: voskServer}
	whisperLive    = &protocol{name: "whisperlive", rate: float16k, offsets: true, client: whisperLiveClient, server: whisperLiveServer}
	whisperLiveKit = &protocol{name: "whisperlivekit", client: whisperLiveKitClient, server: whisperLiveKitServer}
	deepgram       = &protocol{name: "deepgram", offsets: true, begin: deepgramBegin, client: deepgramClient, server: deepgramServer}
	kaldi          = &protocol{name: "kaldi-gstreamer", rate: pcm16k, offsets: true, begin: kaldiBegin, client: kaldiClient, server: kaldiServer}
	openaiRealtime = &protocol{name: "openai-realtime", rate: pcm24k, offsets: true, client: realtimeClient, server: openaiServer}
	vllmRealtime   = &protocol{name: "vllm-realtime", rate: pcm16k, client: realtimeClient, server: vllmServer}
)

var protocols = []*protocol{
	funasrOffline, funasr2Pass, funasrRealtime, sherpaOnline, sherpaOffline, vosk,
	whisperLive, whisperLiveKit, deepgram, kaldi, openaiRealtime, vllmRealtime,
}

// protocolNames are the values of stream_protocol.
func protocolNames() (names []string) {
	for _, p := range protocols {
		names = append(names, p.name)
	}
	return names
}

func protocolNamed(name string) *protocol {
	for _, p := range protocols {
		if p.name == name {
			return p
		}
	}
	return nil
}

// protocolAt is what a path makes likely; nil if it says nothing.
func protocolAt(path string) *protocol {
	switch {
	case strings.HasSuffix(path, "/v1/listen"):
		return deepgram
	case strings.HasSuffix(path, "/v1/realtime"):
		return openaiRealtime
	case strings.HasSuffix(path, "/client/ws/speech"):
		return kaldi
	case strings.HasSuffix(path, "/asr"):
		return whisperLiveKit
	}
	return nil
}

// recognise tells the protocol by one message; sure is false where another
// speaks alike. first: it is the first of its side.
func recognise(m *message, first bool) (p *protocol, sure bool) {
	switch {
	case m.client && m.op == opText:
		return recogniseAsk(m.body)
	case m.client:
		return recogniseAudio(m, first)
	case m.op == opText:
		return recogniseResult(m.body)
	}
	return nil, false
}

func recogniseAsk(b []byte) (*protocol, bool) {
	switch text := string(bytes.TrimSpace(b[:min(len(b), 32)])); {
	case text == "Done":
		return sherpaOnline, true
	case text == "EOS":
		return kaldi, true
	case text == "START", text == "STOP", text == "COMMIT", strings.HasPrefix(text, "HOTWORDS:"), strings.HasPrefix(text, "LANGUAGE:"):
		return funasrRealtime, true
	}
	var o object
	if !o.read(b) {
		return nil, false
	}
	kind, config := o.text("type"), o.object("config")
	switch {
	case kind == "CloseStream", kind == "Finalize", kind == "KeepAlive":
		return deepgram, true
	case kind == "input_audio_buffer.commit" && o.has("final"):
		return vllmRealtime, true
	case strings.HasPrefix(kind, "input_audio_buffer."), strings.HasSuffix(kind, "session.update"):
		return openaiRealtime, false
	case o.has("is_speaking"), o.has("is_finished"), o.has("chunk_size"):
		if o.is("mode", "offline") {
			return funasrOffline, true
		}
		return funasr2Pass, true
	case o.has("eof"), config.has("sample_rate"):
		return vosk, true
	case o.has("uid"):
		return whisperLive, true
	}
	return nil, false
}

func recogniseAudio(m *message, first bool) (*protocol, bool) {
	switch {
	case string(m.body) == endOfAudio:
		return whisperLive, true
	case string(m.body) == "EOS":
		return kaldi, true
	}
	if _, _, ok := sherpaHead(m.body); ok && first {
		return sherpaOffline, true
	}
	return nil, false
}

func recogniseResult(b []byte) (*protocol, bool) {
	if string(bytes.TrimSpace(b[:min(len(b), 32)])) == "Done!" {
		return sherpaOnline, true
	}
	var o object
	if !o.read(b) {
		return nil, false
	}
	kind := o.text("type")
	switch {
	case o.is("event", "started"):
		return funasrRealtime, true
	case o.is("message", "SERVER_READY"), o.is("status", "WAIT"), o.has("segments") && o.has("uid"):
		return whisperLive, true
	case kind == "config", kind == "ready_to_stop", o.has("remaining_time_transcription"):
		return whisperLiveKit, true
	case kind == "Results", kind == "SpeechStarted", kind == "Metadata":
		return deepgram, true
	case strings.HasPrefix(kind, "transcription."):
		return vllmRealtime, true
	case strings.HasPrefix(kind, "conversation."), strings.HasPrefix(kind, "input_audio_buffer."):
		return openaiRealtime, true
	case kind == "session.created", kind == "transcription_session.created":
		return openaiRealtime, false
	case o.is("mode", "offline"):
		return funasrOffline, true
	case strings.HasPrefix(o.text("mode"), "2pass"):
		return funasr2Pass, true
	case o.has("segment") && o.has("text"):
		return sherpaOnline, true
	case o.has("status") && (o.has("result") || o.has("adaptation_state")), string(o.raw("status")) == "9":
		return kaldi, true
	case o.n == 1 && o.has("partial"):
		return vosk, true
	}
	return nil, false
}

// FunASR: the runtime's two servers, in C++ and Python.

func funasrClient(s *session, m *message) {
	var o object
	switch {
	case m.op == opBinary:
		s.audio(m, m.size)
	case !o.read(m.body):
	case o.no("is_speaking"), o.yes("is_finished"):
		s.endOfSpeech(m.at)
	default:
		if fs, ok := o.number("audio_fs"); ok && fs > 0 {
			s.rate = 2 * fs
		}
		if f := o.text("wav_format"); f != "" && !strings.EqualFold(f, "pcm") {
			s.rate = 0
		}
	}
}

// The offline server sends one JSON for all that was said, whatever stands in
// its is_final.
func funasrOfflineServer(s *session, m *message) {
	var o object
	if o.read(m.body) && !o.has("is_end") {
		s.final(m, true)
	}
}

// In two passes the second, offline, is the final of a sentence. After the
// client's end of speech more than one may come; the last has is_final in the
// C++ server, and is the last in Python's.
func funasr2PassServer(s *session, m *message) {
	var o object
	if !o.read(m.body) || o.has("is_end") {
		return
	}
	marked := len(s.awaiting) > 0
	switch {
	case strings.HasSuffix(o.text("mode"), "offline"):
		s.final(m, !marked || o.yes("is_final"))
	case o.spoken("text"):
		s.partial(m.at)
	}
}

// FunASR's realtime server (funasr/bin/realtime_ws.py).

func funasrRealtimeClient(s *session, m *message) {
	if m.op == opBinary {
		s.audio(m, m.size)
		return
	}
	switch string(bytes.TrimSpace(m.body)) {
	case "COMMIT", "STOP":
		s.endOfSpeech(m.at)
	}
}

func funasrRealtimeServer(s *session, m *message) {
	var o object
	if !o.read(m.body) {
		return
	}
	switch o.text("event") {
	case "started":
		s.ready(m)
		return
	case "stopped":
		if len(s.awaiting) > 0 {
			s.final(m, true)
		}
		return
	case "error":
		s.failed(m.at)
		return
	}
	var last object
	if last.read(o.last("sentences")) {
		if end, ok := last.number("end"); ok {
			s.worked(end/1000, m.at)
		}
	}
	if o.yes("is_final") {
		s.final(m, true)
	} else if o.spoken("partial") || last.n > 0 {
		s.partial(m.at)
	}
}

// sherpa-onnx, streaming: its C++ server says Done!, its Python server closes.

func sherpaOnlineClient(s *session, m *message) {
	if m.op == opBinary {
		s.audio(m, m.size)
	} else if string(bytes.TrimSpace(m.body)) == "Done" {
		s.endOfSpeech(m.at)
	}
}

func sherpaOnlineServer(s *session, m *message) {
	if string(bytes.TrimSpace(m.body)) == "Done!" {
		if len(s.awaiting) > 0 && !s.awaiting[0].fin.IsZero() {
			s.settle()
		} else if len(s.awaiting) > 0 {
			s.final(m, true)
		}
		return
	}
	var o object
	if !o.read(m.body) {
		return
	}
	s.sherpaOffset(&o, m.at)
	switch {
	case len(s.awaiting) > 0:
		s.final(m, false)
	case o.yes("is_final"):
		s.final(m, true)
	case o.spoken("text"):
		s.partial(m.at)
	}
}

// sherpaOffset reads where in the audio the last token of a result is.
func (s *session) sherpaOffset(o *object, at time.Time) {
	start, ok := o.number("start_time")
	last := object{}
	last.n, last.fields[0].key, last.fields[0].value = 1, []byte("t"), o.last("timestamps")
	if end, told := last.number("t"); told && ok {
		s.worked(start+end, at)
	}
}

// sherpa-onnx, whole utterances: a head of 8 bytes with sample rate and size,
// then as many bytes, then the next.

type rawAudio struct{ left int64 }

// sherpaHead reads the head; ok tells whether it can be one. As floats the
// numbers would be silence beyond all hearing.
func sherpaHead(b []byte) (rate, size int64, ok bool) {
	if len(b) < 8 {
		return 0, 0, false
	}
	rate, size = int64(binary.LittleEndian.Uint32(b)), int64(binary.LittleEndian.Uint32(b[4:]))
	return rate, size, rate >= 4000 && rate <= 192000 && size > 0 && size%4 == 0 && size < 1<<31
}

func sherpaOfflineClient(s *session, m *message) {
	if m.op != opBinary {
		return // Done: no more will come
	}
	n := m.size
	if s.raw.left == 0 {
		rate, size, ok := sherpaHead(m.body)
		if !ok {
			s.giveUp("unexpected_message")
			return
		}
		s.rate, s.raw.left = float64(4*rate), size
		n -= 8
	}
	if n > s.raw.left {
		s.giveUp("unexpected_message")
		return
	}
	s.raw.left -= n
	s.audio(m, n)
	if s.raw.left == 0 {
		s.endOfSpeech(m.at)
	}
}

func sherpaOfflineServer(s *session, m *message) {
	if m.op == opText && len(s.awaiting) > 0 {
		s.final(m, true)
	}
}

// Vosk: one reply for each frame of audio and for its eof, none for a config.

func voskClient(s *session, m *message) {
	if m.op == opBinary {
		s.audio(m, m.size)
		s.pairs.push(pair{at: m.at, sent: s.sent, n: m.n})
		return
	}
	var o, config object
	o.read(m.body)
	switch {
	case o.has("config"):
		config = o.object("config")
		if rate, ok := config.number("sample_rate"); ok && rate > 0 {
			s.rate = 2 * rate
		}
	case o.has("eof"), o.has("reset"):
		s.endOfSpeech(m.at)
		s.pairs.push(pair{at: m.at, sent: s.sent, n: 1, eof: true})
	}
}

func voskServer(s *session, m *message) {
	var o object
	if m.op != opText || !o.read(m.body) {
		return
	}
	to, paired := s.pairs.pop()
	if paired {
		s.worked(to.sent, m.at)
	}
	switch {
	case o.has("partial"):
		if o.spoken("partial") {
			s.partial(m.at)
		}
	case to.eof && len(s.awaiting) == 0:
	case len(s.awaiting) > 0 && !to.eof && paired:
		// A result for a frame before the eof: the speech in front of it.
		s.partial(m.at)
	default:
		s.final(m, true)
	}
}

// pairs are the frames whose replies are due, oldest first.
type pairs struct {
	ring []pair
	next int
	lost bool // too many at one time: pairing is of no use any more
}

type pair struct {
	at   time.Time
	sent float64
	n    int64 // frames
	eof  bool
}

const maxPairs = 4096

func (p *pairs) push(one pair) {
	if p.lost || len(p.ring)-p.next >= maxPairs {
		*p = pairs{lost: true}
		return
	}
	if p.next > 0 && p.next == len(p.ring) {
		p.ring, p.next = p.ring[:0], 0
	} else if p.next >= maxPairs {
		p.ring = p.ring[:copy(p.ring, p.ring[p.next:])]
		p.next = 0
	}
	p.ring = append(p.ring, one)
}

func (p *pairs) pop() (one pair, ok bool) {
	if p.next == len(p.ring) {
		return pair{}, false
	}
	first := &p.ring[p.next]
	one = *first
	if first.n--; first.n <= 0 {
		p.next++
	}
	return one, true
}

// WhisperLive.

const endOfAudio = "END_OF_AUDIO"

func whisperLiveClient(s *session, m *message) {
	switch {
	case m.op != opBinary:
	case string(m.body) == endOfAudio:
		s.endOfSpeech(m.at)
	default:
		s.audio(m, m.size)
	}
}

// The last segment that is complete is the final; which one was the last shows
// when the session ends.
func whisperLiveServer(s *session, m *message) {
	var o, last object
	if !o.read(m.body) {
		return
	}
	switch {
	case o.is("message", "SERVER_READY"):
		s.ready(m)
	case o.is("message", "DISCONNECT"):
		s.settle()
	case o.is("status", "WAIT"):
		s.refused(m.at, "server_full")
	case o.is("status", "ERROR"):
		s.failed(m.at)
	case last.read(o.last("segments")):
		if end, ok := last.number("end"); ok {
			s.worked(end, m.at)
		}
		u := s.current()
		if u != nil && last.yes("completed") {
			u.fin = m.at
			u.keepTiming(m)
		} else if last.spoken("text") {
			s.partial(m.at)
		}
	}
}

// WhisperLiveKit.

func whisperLiveKitClient(s *session, m *message) {
	switch {
	case m.op != opBinary:
	case m.size == 0:
		s.endOfSpeech(m.at)
	default:
		s.audio(m, m.size)
	}
}

func whisperLiveKitServer(s *session, m *message) {
	var o object
	if !o.read(m.body) {
		return
	}
	switch kind := o.text("type"); {
	case kind == "config":
		s.ready(m)
		if o.yes("useAudioWorklet") {
			s.rate = pcm16k // else it is a compressed container
		}
		return
	case kind == "ready_to_stop":
		if len(s.awaiting) > 0 {
			s.final(m, true)
		}
		return
	case o.is("status", "error"), o.has("error") && o.spoken("error"):
		s.failed(m.at)
		return
	}
	if lag, ok := o.number("remaining_time_transcription"); ok && lag >= 0 {
		s.behind(lag, m.at)
	}
	var line object
	if o.spoken("buffer_transcription") || line.read(o.last("lines")) && line.spoken("text") {
		s.partial(m.at)
	}
}

// Deepgram, and servers that speak like it.

func deepgramBegin(s *session) {
	q, _ := url.ParseQuery(s.query)
	rate, _ := strconv.ParseFloat(q.Get("sample_rate"), 64)
	channels := 1.0
	if n, err := strconv.Atoi(q.Get("channels")); err == nil && n > 0 && n <= 64 {
		channels = float64(n)
	}
	switch q.Get("encoding") {
	case "linear16":
		rate *= 2
	case "linear32":
		rate *= 4
	case "mulaw", "alaw":
	default:
		rate = 0 // in a container, or compressed
	}
	if rate > 0 && rate < 1e7 {
		s.rate = rate * channels
	}
}

func deepgramClient(s *session, m *message) {
	var o object
	switch {
	case m.op == opBinary && m.size == 0:
		s.endOfSpeech(m.at) // an empty message closes the stream, too
	case m.op == opBinary:
		s.audio(m, m.size)
	case !o.read(m.body):
	case o.is("type", "CloseStream"), o.is("type", "Finalize"):
		s.endOfSpeech(m.at)
	}
}

func deepgramServer(s *session, m *message) {
	var o object
	if !o.read(m.body) {
		return
	}
	switch o.text("type") {
	case "Results":
		s.deepgramResult(m, &o)
	case "Metadata":
		if len(s.awaiting) == 0 {
			return
		}
		if s.awaiting[0].fin.IsZero() {
			s.final(m, true)
		} else {
			s.settle()
		}
	case "Error":
		s.failed(m.at)
	}
}

func (s *session) deepgramResult(m *message, o *object) {
	start, told := o.number("start")
	duration, ok := o.number("duration")
	if told && ok {
		s.worked(start+duration, m.at)
	}
	channel := o.object("channel")
	var best object
	best.read(channel.first("alternatives"))
	switch spoken := best.spoken("transcript"); {
	case o.yes("from_finalize"), o.yes("speech_final") && (spoken || len(s.awaiting) > 0):
		s.final(m, true)
	case o.yes("is_final") && len(s.awaiting) > 0:
		s.final(m, false)
	case spoken:
		s.partial(m.at)
	}
}

// Kaldi's GStreamer server.

func kaldiBegin(s *session) {
	q, _ := url.ParseQuery(s.query)
	kind := q.Get("content-type")
	if kind == "" {
		return
	}
	s.rate = 0
	_, after, ok := strings.Cut(kind, "rate=(int)")
	digits, _, _ := strings.Cut(after, ",")
	if rate, err := strconv.ParseFloat(strings.TrimSpace(digits), 64); ok && err == nil && rate > 0 && rate < 1e6 && strings.Contains(kind, "x-raw") {
		s.rate = 2 * rate
	}
}

func kaldiClient(s *session, m *message) {
	switch {
	case string(m.body) == "EOS" && m.size == 3:
		s.endOfSpeech(m.at)
	case m.op == opBinary:
		s.audio(m, m.size)
	}
}

func kaldiServer(s *session, m *message) {
	var o object
	if !o.read(m.body) {
		return
	}
	status, _ := o.number("status")
	if status != 0 {
		if status == 9 { // no worker is free
			s.refused(m.at, "server_full")
		} else {
			s.failed(m.at)
		}
		return
	}
	if total, ok := o.number("total-length"); ok {
		s.worked(total, m.at)
	}
	result := o.object("result")
	var best object
	best.read(result.first("hypotheses"))
	switch {
	case result.n == 0:
	case result.yes("final"):
		s.final(m, len(s.awaiting) == 0)
	case best.spoken("transcript"):
		s.partial(m.at)
	}
}

// OpenAI's realtime transcription, and vLLM's form of it.

func realtimeClient(s *session, m *message) {
	var o object
	if m.op != opText || !o.read(m.body) {
		return
	}
	switch kind := o.text("type"); {
	case kind == "input_audio_buffer.append":
		s.audio(m, audioBytes(&o, m))
	case kind == "input_audio_buffer.commit":
		if !o.no("final") { // with false, vLLM begins to work, but speech goes on
			s.endOfSpeech(m.at)
		}
	case strings.HasSuffix(kind, "session.update"):
		s.audioFormat(&o)
	}
}

// audioBytes is the size of the audio in an append, which is in base64.
func audioBytes(o *object, m *message) int64 {
	v := unquoted(o.raw("audio"))
	n := int64(len(v))
	if m.cut && n > 0 {
		n += m.size - int64(len(m.body)) - int64(len(`"}`)) // as if nothing came after it
	}
	return n/4*3 - int64(bytes.Count(v[max(0, len(v)-2):], []byte("=")))
}

// audioFormat reads how the audio is coded, in either form of a session.
func (s *session) audioFormat(o *object) {
	in := o.object("session")
	switch in.text("input_audio_format") {
	case "pcm16":
		s.rate = s.proto.rate
	case "g711_ulaw", "g711_alaw":
		s.rate = 8000
	}
	audio := in.object("audio")
	input := audio.object("input")
	format := input.object("format")
	switch rate, ok := format.number("rate"); {
	case format.is("type", "audio/pcmu"), format.is("type", "audio/pcma"):
		s.rate = 8000
	case ok && rate > 0 && rate < 1e6:
		s.rate = 2 * rate
	}
}

func openaiServer(s *session, m *message) {
	var o object
	if m.op != opText || !o.read(m.body) {
		return
	}
	kind := o.text("type")
	switch {
	case strings.HasSuffix(kind, "session.created"):
		s.ready(m)
	case kind == "input_audio_buffer.speech_started":
		s.speechStarted(&o)
	case kind == "input_audio_buffer.speech_stopped":
		if end, ok := o.number("audio_end_ms"); ok {
			s.worked(end/1000, m.at)
		}
		if u := s.endOfSpeech(m.at); u != nil {
			u.item = o.text("item_id")
		}
	case kind == "input_audio_buffer.committed":
		s.committed(o.text("item_id"))
	case strings.HasSuffix(kind, "input_audio_transcription.delta"):
		s.partialOf(s.item(o.text("item_id")), m.at)
	case strings.HasSuffix(kind, "input_audio_transcription.completed"):
		if u := s.item(o.text("item_id")); u != nil {
			s.finalOf(u, m, true)
		}
	case strings.HasSuffix(kind, "input_audio_transcription.failed"):
		s.failed(m.at)
	case kind == "error":
		s.failed(m.at)
	}
}

// speechStarted moves the beginning of the speech from the first audio, which
// may be long silence, to where the server heard it.
func (s *session) speechStarted(o *object) {
	start, ok := o.number("audio_start_ms")
	if u := s.open; u != nil && ok {
		if d, ok := s.marks.at(start / 1000); ok && u.partials == 0 {
			u.began = later(s.base.Add(d), u.began)
			u.began = earlier(u.began, u.last)
		}
	}
}

// committed names the utterance that ended last; after a server's endpoint
// that has the name already.
func (s *session) committed(item string) {
	for _, u := range s.awaiting {
		if u.item == item {
			return
		}
	}
	for _, u := range s.awaiting {
		if u.item == "" {
			u.item = item
			return
		}
	}
}

// item is the utterance with that name, else the oldest that has none.
func (s *session) item(name string) *utterance {
	for _, u := range s.awaiting {
		if u.item == name {
			return u
		}
	}
	for _, u := range s.awaiting {
		if u.item == "" {
			return u
		}
	}
	return nil
}

func vllmServer(s *session, m *message) {
	var o object
	if m.op != opText || !o.read(m.body) {
		return
	}
	switch o.text("type") {
	case "session.created":
		s.ready(m)
	case "transcription.delta":
		if o.spoken("delta") {
			s.partial(m.at)
		}
	case "transcription.done":
		s.final(m, true)
	case "error":
		s.failed(m.at)
	}
}
