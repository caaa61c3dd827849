package classifier

import (
	"strings"
	"testing"
	"time"
)

func TestAdviceNamesTheKnobOfTheServer(t *testing.T) {
	for _, c := range []struct {
		kind, route string
		system      string
		says        string
	}{
		{"", "/v2/models/whisper/infer", "max_batch_size is too small", "(triton: max_batch_size)"},
		{"", "/v2/models/{model}/infer", "a batch delay too long", "max_queue_delay_microseconds"},
		{"vllm", "/v1/audio/transcriptions", "the server's limit, its queue told", "--max-num-seqs"},
		{"vllm", "/v1/audio/transcriptions", "one decoder thread", "VLLM_MAX_AUDIO_PREPROCESS_WORKERS"},
		{"funasr", "/recognition", "one decoder thread", "--decoder-thread-num"},
		{"", "/v1/audio/transcriptions", "one decoder thread", "more workers or a faster decoder, and"},
	} {
		for _, s := range scenarios() {
			if s.name != c.system {
				continue
			}
			w := Window{ServerKind: c.kind}
			all := s.play()
			var v Verdict
			i := 0
			for at := 10 * time.Second; at <= s.lasts(); at += 10 * time.Second {
				for ; i < len(all) && all[i].Done.Before(start.Add(at)); i++ {
					all[i].Route = c.route
					w.Add(&all[i])
				}
				v = Classify(w.Cut(start.Add(at))[0], DefaultThresholds())
			}
			if !strings.Contains(v.Advice, c.says) {
				t.Errorf("%s, %s: %q does not say %q", c.kind, c.system, v.Advice, c.says)
			}
		}
	}
	for _, kind := range ServerKinds() {
		if k := knobsOf[kind]; k.limit+k.batch == "" {
			t.Errorf("%s has neither a limit nor a batch size", kind)
		}
	}
}

func TestAVerdictPredictsWhatItsAdviceBrings(t *testing.T) {
	s := asr("limit", func(s *system) { s.gate = 4; s.batches(16) })
	v := s.judge().shown
	if v.Cause != Queue || len(v.Predictions) != 1 || v.Predictions[0].To != 8 || v.Predictions[0].Refused == "" && !strings.Contains(v.Advice, "throughput would be") {
		t.Errorf("%s\n%+v", tell(v), v.Predictions)
	}
}
