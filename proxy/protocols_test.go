package proxy

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"weir/classifier"
)

// A step is one message of a conversation, and what it means.
type step struct {
	from  speaker
	text  string // as a text message
	sound []byte // else as a binary one
	mark  string // "ready", "audio", "partial", "eos", "final", of the current utterance
	took  [2]time.Time
}

type speaker bool

const (
	ask  speaker = true // by the client
	tell speaker = false
)

func says(from speaker, text, mark string) *step { return &step{from: from, text: text, mark: mark} }
func sends(sound []byte, mark string) *step      { return &step{from: ask, sound: sound, mark: mark} }
func closes(from speaker) *step                  { return &step{from: from, mark: "close"} }

// A talk is a conversation of one protocol and what weir must make of it.
type talk struct {
	t       *testing.T
	path    string
	steps   []*step
	want    []classifier.Utterance // what is exact of each utterance
	audio   []float64              // seconds of each
	outcome []classifier.Outcome   // of each; nil: all OK
	session string                 // the session's error word
}

// noise are samples that are no head of sherpa's.
func noise(n int) []byte { return bytes.Repeat([]byte{0x3e, 0x9a, 0x11, 0xbe}, n/4) }

func appendAudio(n int) string {
	return `{"type":"input_audio_buffer.append","audio":"` + base64.StdEncoding.EncodeToString(noise(n)) + `"}`
}

func sherpaUtterance(rate, size int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(rate))
	return append(binary.LittleEndian.AppendUint32(b, uint32(size)), noise(size)...)
}

// talks follow the session table: ready, end of speech, final, progress and
// refusal of each protocol.
var talks = map[string]talk{
	"funasr-offline": {
		steps: []*step{
			says(ask, `{"mode":"offline","chunk_size":[5,10,5],"wav_name":"a","wav_format":"pcm","audio_fs":8000,"is_speaking":true}`, ""),
			sends(noise(8000), "audio"), sends(noise(8000), ""),
			says(ask, `{"is_speaking":false}`, "eos"),
			says(tell, `{"is_final":false,"mode":"offline","text":"hello","wav_name":"a"}`, "final"),
			sends(noise(1600), "audio"), says(ask, `{"is_finished":true}`, "eos"), says(tell, `{"mode":"offline","text":"again"}`, "final"),
		},
		want: []classifier.Utterance{{QueueHidden: true}, {QueueHidden: true}}, audio: []float64{1, 0.1},
	},
	"funasr-2pass": {
		steps: []*step{
			says(ask, `{"mode":"2pass","chunk_size":[5,10,5],"wav_name":"a","is_speaking":true}`, ""),
			sends(noise(3200), "audio"),
			says(tell, `{"mode":"2pass-online","text":"hel","is_final":false}`, "partial"),
			sends(noise(3200), "eos"), // the server finds the end of the sentence itself
			says(tell, `{"mode":"2pass-offline","text":"hello.","is_final":false}`, "final"),
			sends(noise(6400), "audio"), says(tell, `{"mode":"2pass-online","text":"wor"}`, "partial"), says(tell, `{"mode":"2pass-online","text":""}`, ""),
			says(ask, `{"is_speaking":false}`, "eos"),
			says(tell, `{"mode":"2pass-offline","text":"world,","is_final":false}`, ""),
			says(tell, `{"mode":"2pass-offline","text":"I am here.","is_final":true}`, "final"),
		},
		want: []classifier.Utterance{{Partials: 1, EndEstimated: true, QueueHidden: true}, {Partials: 1, QueueHidden: true}}, audio: []float64{0.2, 0.2},
	},
	"funasr-2pass in Python, whose last result has no mark of it": {
		steps: []*step{
			says(ask, `{"mode":"2pass","chunk_size":[5,10,5],"is_speaking":true}`, ""),
			sends(noise(3200), "audio"), says(ask, `{"is_speaking":false}`, "eos"),
			says(tell, `{"mode":"2pass-offline","text":"one","is_final":false}`, ""), says(tell, `{"mode":"2pass-offline","text":"two","is_final":false}`, "final"),
			sends(noise(6400), "audio"), says(ask, `{"is_speaking":false}`, "eos"), says(tell, `{"mode":"2pass-offline","text":"three","is_final":false}`, "final"),
		},
		want: []classifier.Utterance{{Protocol: "funasr-2pass", QueueHidden: true}, {Protocol: "funasr-2pass", QueueHidden: true}}, audio: []float64{0.1, 0.2},
	},
	"funasr-realtime": {
		steps: []*step{
			says(ask, "START", ""), says(tell, `{"event":"started"}`, "ready"),
			sends(noise(32000), "audio"),
			says(tell, `{"sentences":[],"partial":"he","partial_start_ms":0,"is_final":false}`, "partial"),
			sends(noise(32000), ""),
			says(tell, `{"sentences":[{"text":"hello","start":0,"end":500},{"text":"you","start":600,"end":1500}],"partial":"","is_final":false}`, "partial"),
			says(ask, "COMMIT", "eos"),
			says(tell, `{"sentences":[{"text":"hello you","start":0,"end":2000}],"partial":"","is_final":true}`, "final"),
			sends(noise(3200), "audio"), says(ask, "STOP", "eos"), says(tell, `{"event":"stopped"}`, "final"),
		},
		want: []classifier.Utterance{{Partials: 2, Acks: 2, Lag: 0, Unpaced: true}, {}}, audio: []float64{2, 0.1},
	},
	"sherpa-onnx-online": {
		steps: []*step{
			sends(noise(6400), "audio"), sends(noise(6400), ""),
			says(tell, `{"text":" he","tokens":["h","e"],"timestamps":[0.02,0.1],"segment":0,"start_time":0,"is_final":false}`, "partial"),
			sends(noise(6400), "eos"),
			says(tell, `{"text":" hello","tokens":["h"],"timestamps":[0.02,0.3],"segment":0,"start_time":0,"is_final":true}`, "final"),
			sends(noise(6400), "audio"), says(ask, "Done", "eos"),
			says(tell, `{"text":" you","timestamps":[0.05],"segment":1,"start_time":0.3,"is_final":false}`, ""),
			says(tell, `{"text":" you all","timestamps":[0.05],"segment":1,"start_time":0.3,"is_final":true,"is_eof":true}`, "final"),
			says(tell, "Done!", ""),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 2, EndEstimated: true}, {Acks: 2, Lag: 0.05}}, audio: []float64{0.3, 0.1},
	},
	"sherpa-onnx-online in Python, which closes after its last result": {
		steps: []*step{
			sends(noise(6400), "audio"), says(tell, `{"text":"hi","segment":0}`, "partial"), says(ask, "Done", "eos"),
			says(tell, `{"text":"hi there","segment":0}`, "final"), closes(tell),
		},
		want: []classifier.Utterance{{Protocol: "sherpa-onnx-online", Partials: 1, QueueHidden: true}}, audio: []float64{0.1},
	},
	"sherpa-onnx-offline": {
		steps: []*step{
			sends(sherpaUtterance(8000, 6400)[:1000], "audio"), sends(sherpaUtterance(8000, 6400)[1000:], "eos"),
			says(tell, `{"text":"one","timestamps":[0.1]}`, "final"),
			sends(sherpaUtterance(16000, 3200), "audio eos"), says(tell, "two", "final"), says(ask, "Done", ""),
		},
		want: []classifier.Utterance{{QueueHidden: true}, {QueueHidden: true}}, audio: []float64{0.2, 0.05},
	},
	"sherpa-onnx-offline refuses what is too long": {
		steps:   []*step{sends(sherpaUtterance(8000, 6400), "audio eos"), &step{from: tell, mark: "close 1009"}},
		want:    []classifier.Utterance{{Protocol: "sherpa-onnx-offline", QueueHidden: true}},
		audio:   []float64{0.2},
		session: "closed_1009",
	},
	"vosk": {
		steps: []*step{
			says(ask, `{"config":{"sample_rate":8000}}`, ""),
			sends(noise(1600), "audio"), says(tell, `{"partial":""}`, ""),
			sends(noise(1600), ""), says(tell, `{"partial":"one"}`, "partial"),
			sends(noise(1600), "eos"), says(tell, `{"result":[],"text":"one two"}`, "final"),
			sends(noise(1600), "audio"), says(tell, `{"partial":"three"}`, "partial"),
			says(ask, `{"eof" : 1}`, "eos"), says(tell, `{"text":"three","server_timing":"queue;dur=0.001, forward;dur=0.01;batch=1"}`, "final"),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 3, EndEstimated: true}, {Partials: 1, Acks: 2}}, audio: []float64{0.3, 0.1},
	},
	"whisperlive": {
		steps: []*step{
			says(ask, `{"uid":"u","language":"en","task":"transcribe","model":"small","use_vad":true}`, ""),
			says(tell, `{"uid":"u","message":"SERVER_READY","backend":"faster_whisper"}`, "ready"),
			sends(noise(64000), "audio"),
			says(tell, `{"uid":"u","segments":[{"start":"0.000","end":"0.800","text":"hello","completed":false}]}`, "partial"),
			sends([]byte(endOfAudio), "eos"),
			says(tell, `{"uid":"u","segments":[{"start":"0.000","end":"0.800","text":"hello","completed":true},{"start":"0.8","end":"1.0","text":"you","completed":true}]}`, "final"),
			says(tell, `{"uid":"u","message":"DISCONNECT"}`, ""),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 2}}, audio: []float64{1},
	},
	"whisperlive is full": {
		steps: []*step{
			says(ask, `{"uid":"u","language":"en","task":"transcribe"}`, ""), says(tell, `{"uid":"u","status":"WAIT","message":2.5}`, ""), closes(tell),
		},
		session: "server_full",
	},
	"whisperlivekit": {
		path: "/asr",
		steps: []*step{
			says(tell, `{"type":"config","useAudioWorklet":true}`, "ready"),
			sends(noise(3200), "audio"), sends(noise(3200), ""),
			says(tell, `{"status":"active_transcription","lines":[],"buffer_transcription":"he","remaining_time_transcription":0.25}`, "partial"),
			{from: ask, sound: []byte{}, mark: "eos"},
			says(tell, `{"type":"ready_to_stop"}`, "final"),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 1, Lag: 0.25}}, audio: []float64{0.2},
	},
	"deepgram": {
		path: "/v1/listen?encoding=linear16&sample_rate=8000&channels=2",
		steps: []*step{
			sends(noise(16000), "audio eos"), // the final covers no more than this
			says(tell, `{"type":"Results","start":0,"duration":0.4,"is_final":false,"channel":{"alternatives":[{"transcript":"he"}]}}`, "partial"),
			sends(noise(16000), ""),
			says(tell, `{"type":"Results","start":0,"duration":0.5,"is_final":true,"speech_final":true,"channel":{"alternatives":[{"transcript":"hello"}]}}`, "final"),
			sends(noise(3200), "audio"), says(ask, `{"type":"CloseStream"}`, "eos"),
			says(tell, `{"type":"Results","start":1,"duration":0.1,"is_final":true,"speech_final":false,"channel":{"alternatives":[{"transcript":"you"}]}}`, "final"),
			says(tell, `{"type":"Metadata","duration":1.1}`, ""),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 2, Lag: 0.5, EndEstimated: true}, {Acks: 1}}, audio: []float64{1, 0.1},
	},
	"kaldi-gstreamer": {
		path: "/client/ws/speech?content-type=audio/x-raw,+layout=(string)interleaved,+rate=(int)8000,+format=(string)S16LE,+channels=(int)1",
		steps: []*step{
			sends(noise(4000), "audio"),
			says(tell, `{"status":0,"segment":0,"result":{"hypotheses":[{"transcript":"hi."}],"final":false}}`, "partial"),
			sends(noise(4000), "eos"),
			says(tell, `{"status":0,"segment":0,"result":{"hypotheses":[{"transcript":"hi."}],"final":true},"segment-start":0,"segment-length":0.5,"total-length":0.5}`, "final"),
			sends(noise(4000), "audio"), says(ask, "EOS", "eos"),
			says(tell, `{"status":0,"segment":1,"result":{"hypotheses":[{"transcript":"you."}],"final":true}}`, "final"),
			says(tell, `{"status":0,"adaptation_state":{"type":"string+gzip+base64"}}`, ""), closes(tell),
		},
		want: []classifier.Utterance{{Partials: 1, Acks: 1, EndEstimated: true}, {QueueHidden: true}}, audio: []float64{0.5, 0.25},
	},
	"kaldi-gstreamer has no worker": {
		steps:   []*step{says(tell, `{"status":9,"message":"No decoder available, try again later"}`, ""), closes(tell)},
		session: "server_full",
	},
	"openai-realtime": {
		path: "/v1/realtime?intent=transcription",
		steps: []*step{
			says(tell, `{"type":"session.created","session":{}}`, "ready"),
			says(ask, `{"type":"session.update","session":{"type":"transcription","audio":{"input":{"format":{"type":"audio/pcm","rate":24000}}}}}`, ""),
			says(ask, appendAudio(24000), "audio"),
			says(tell, `{"type":"input_audio_buffer.speech_started","audio_start_ms":0,"item_id":"item_1"}`, ""),
			says(ask, appendAudio(24000), ""),
			says(tell, `{"type":"input_audio_buffer.speech_stopped","audio_end_ms":1000,"item_id":"item_1"}`, "eos"),
			says(tell, `{"type":"input_audio_buffer.committed","item_id":"item_1"}`, ""),
			says(tell, `{"type":"conversation.item.input_audio_transcription.delta","item_id":"item_1","delta":"he"}`, "partial"),
			says(ask, appendAudio(4800), "audio2"), says(ask, `{"type":"input_audio_buffer.commit"}`, "eos2"), // the second begins before the first is done
			says(tell, `{"type":"input_audio_buffer.committed","item_id":"item_2"}`, ""),
			says(tell, `{"type":"conversation.item.input_audio_transcription.completed","item_id":"item_2","transcript":"you"}`, "final2"),
			says(tell, `{"type":"conversation.item.input_audio_transcription.completed","item_id":"item_1","transcript":"hello"}`, "final"),
		},
		want: []classifier.Utterance{{}, {Partials: 1, Acks: 1}}, audio: []float64{0.1, 1},
	},
	"openai-realtime, an utterance that fails": {
		path: "/v1/realtime",
		steps: []*step{
			says(tell, `{"type":"transcription_session.created"}`, "ready"), says(ask, appendAudio(4800), "audio"),
			says(ask, `{"type":"input_audio_buffer.commit"}`, "eos"), says(tell, `{"type":"input_audio_buffer.committed","item_id":"i"}`, ""),
			says(tell, `{"type":"conversation.item.input_audio_transcription.failed","item_id":"i","error":{}}`, "final"),
		},
		want: []classifier.Utterance{{Protocol: "openai-realtime"}}, audio: []float64{0.1}, outcome: []classifier.Outcome{classifier.Failed},
	},
	"vllm-realtime": {
		path: "/v1/realtime",
		steps: []*step{
			says(tell, `{"type":"session.created","id":"s"}`, "ready"), says(ask, `{"type":"session.update","model":"m"}`, ""),
			says(ask, `{"type":"input_audio_buffer.commit","final":false}`, ""),
			says(ask, appendAudio(32000), "audio"),
			says(tell, `{"type":"transcription.delta","delta":"he"}`, "partial"),
			says(ask, `{"type":"input_audio_buffer.commit","final":true}`, "eos"),
			says(tell, `{"type":"transcription.done","text":"hello","usage":{}}`, "final"),
		},
		want: []classifier.Utterance{{Partials: 1}}, audio: []float64{1},
	},
}

func TestEachProtocolIsRecognisedAndItsUtterancesAreTimed(t *testing.T) {
	for name, one := range talks {
		t.Run(name, func(t *testing.T) {
			for tries := 5; ; tries-- { // the bounds hold always; 2 ms need a quiet moment
				worst := one.hold(t, name, websocket.CompressionDisabled, "")
				if worst < 2*time.Millisecond {
					return
				}
				if t.Failed() || tries == 1 {
					t.Fatalf("the times are up to %v from what the client saw", worst)
				}
			}
		})
	}
}

func TestAProtocolIsReadThroughDeflateAndWhenItIsNamed(t *testing.T) {
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			talks[p.name].hold(t, p.name, websocket.CompressionContextTakeover, p.name)
		})
	}
}

// hold has the conversation through a weir, one message after the other, and
// checks its records. It returns the largest distance between a time of the
// records and the same as the client saw it.
func (k talk) hold(t *testing.T, name string, mode websocket.CompressionMode, named string) (worst time.Duration) {
	t.Run("talk", func(t *testing.T) {
		k.t = t
		server := make(chan *websocket.Conn)
		done := make(chan struct{})
		r := newRig(t, wsServer(t, mode, func(_ context.Context, c *websocket.Conn) { server <- c; <-done }), func(s *settings) { s.streamProtocol = named })
		path := k.path
		if path == "" {
			path = "/stream"
		}
		client := wsDial(t, r.addr, path, mode)
		k.talk(client, <-server)
		close(done)
		client.Close(websocket.StatusNormalClosure, "")
		for n := range k.want {
			worst = max(worst, k.check(r.record(n), n, name))
		}
		o := r.record(len(k.want))
		if o.Session == nil || o.Session.Utterances != len(k.want) || o.Error != k.session || o.Session.Unread != "" {
			t.Errorf("the session's record is %q %+v", o.Error, o.Session)
		}
		if len(k.want) > 0 {
			k.checkAdmission(o)
		}
		if n := r.utterances.Load(); n != 0 {
			t.Errorf("%d utterances are still under way", n)
		}
	})
	return worst
}

func (k talk) talk(client, server *websocket.Conn) {
	t := k.t
	ctx := wsContext(t)
	for _, s := range k.steps {
		from, to := server, client
		if s.from == ask {
			from, to = client, server
		}
		s.took[0] = time.Now()
		var code websocket.StatusCode = websocket.StatusNormalClosure
		if _, err := fmt.Sscanf(s.mark, "close %d", &code); err == nil || s.mark == "close" {
			go from.Close(code, "")
			_, _, _ = to.Read(ctx)
			s.took[1] = time.Now()
			continue
		}
		kind, body := websocket.MessageText, []byte(s.text)
		if s.sound != nil {
			kind, body = websocket.MessageBinary, s.sound
		}
		if err := from.Write(ctx, kind, body); err != nil {
			t.Fatal(err)
		}
		gotKind, got, err := to.Read(ctx)
		s.took[1] = time.Now()
		if err != nil || gotKind != kind || !bytes.Equal(got, body) {
			t.Fatalf("%.80q came as %.80q, %v", body, got, err)
		}
	}
}

// heardAs is when the client saw the parts of one utterance.
type heardAs struct{ audio, partial, eos, final *step }

// utterances are those of the conversation, in the order of their finals. A
// mark with a 2 is of an utterance that runs beside another.
func (k talk) utterances() (all []heardAs) {
	now := map[string]*heardAs{"": {}, "2": {}}
	for _, s := range k.steps {
		for mark := range strings.FieldsSeq(s.mark) {
			kind := strings.TrimSuffix(mark, "2")
			u := now[mark[len(kind):]]
			switch kind {
			case "audio":
				u.audio = s
			case "eos":
				u.eos = s
			case "partial":
				if u.partial == nil {
					u.partial = s
				}
			case "final", "close":
				if u.final = s; u.audio != nil {
					all = append(all, *u)
				}
				*u = heardAs{}
			}
		}
	}
	return all
}

// seen is when the client saw the message.
func (s *step) seen() time.Time {
	if s.from == ask {
		return s.took[0]
	}
	return s.took[1]
}

// within checks that a time lies between a message's sending and its arrival:
// all are of one clock.
func (s *step) within(t *testing.T, what string, at time.Time) time.Duration {
	t.Helper()
	if at.Before(s.took[0].Add(-microsecond)) || at.After(s.took[1].Add(microsecond)) {
		t.Errorf("%s was at %v and %v around its message", what, at.Sub(s.took[0]), at.Sub(s.took[1]))
	}
	return at.Sub(s.seen()).Abs()
}

const microsecond = time.Microsecond // JSON's and spans' resolution

func (k talk) check(o classifier.Observation, n int, name string) (worst time.Duration) {
	t, want, got, saw := k.t, k.want[n], o.Utterance, k.utterances()[n]
	if got == nil {
		t.Fatalf("record %d is none of an utterance: %+v", n, o)
	}
	if want.Protocol == "" {
		want.Protocol = name
	}
	want.Index = n + 1
	same := *got
	if math.Abs(same.Lag-want.Lag) < 1e-3 {
		same.Lag = want.Lag
	}
	same.Speech, same.FirstPartial, same.Admission, same.Stall, same.PingRTT, same.PartialAt, same.LagSlope = 0, 0, 0, 0, 0, nil, 0
	if !reflect.DeepEqual(same, want) {
		t.Errorf("utterance %d is %+v, want %+v", n, same, want)
	}
	class := "utterance " + want.Protocol
	if o.Route != "" {
		class += " " + o.Route
	}
	outcome := classifier.OK
	if k.outcome != nil {
		outcome = k.outcome[n]
	}
	if o.Outcome != outcome || o.Upgraded || o.Class != class || math.Abs(o.AudioSeconds-k.audio[n]) > 1e-3 {
		t.Errorf("utterance %d has the record %v, %q, %v s of audio", n, o.Outcome, o.Class, o.AudioSeconds)
	}
	if told := strings.Contains(saw.final.text, "server_timing"); told != (o.Source == "body") || told && o.BatchSize != 1 {
		t.Errorf("utterance %d has timings from %q: %+v", n, o.Source, o.Timings)
	}
	worst = saw.eos.within(t, "the end of speech", o.Enqueued)
	worst = max(worst, saw.final.within(t, "the final", o.Done))
	began := o.Enqueued.Add(-got.Speech)
	worst = max(worst, saw.audio.within(t, "the first audio", began))
	if saw.partial != nil {
		worst = max(worst, saw.partial.within(t, "the first partial", began.Add(got.FirstPartial)))
	}
	latency := saw.final.seen().Sub(saw.eos.seen())
	return max(worst, (latency - o.Total()).Abs())
}

func (k talk) checkAdmission(o classifier.Observation) {
	for _, s := range k.steps {
		if s.mark == "ready" {
			if o.Session.Admission <= 0 {
				k.t.Error("the server was ready, but the record does not say when")
			}
			return
		}
	}
	if o.Session.Admission != 0 {
		k.t.Errorf("admission is %v, but nothing said ready", o.Session.Admission)
	}
}
