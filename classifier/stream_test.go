package classifier

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestARecordOfAStreamSurvivesJSON(t *testing.T) {
	full := aLife(1, 2, 30, 31)
	full.Utterance = &Utterance{
		Protocol: "vosk", Index: 3, Speech: 2 * time.Second, FirstPartial: 400 * time.Millisecond, Admission: time.Millisecond, Stall: 5 * time.Millisecond,
		PingRTT: 7 * time.Millisecond, Partials: 4, PartialAt: []time.Duration{400 * time.Millisecond, time.Second}, Acks: 9, Lag: 0.25, LagSlope: 0.5,
		EndEstimated: true, Unpaced: true, QueueHidden: true,
	}
	full.Session = &Session{"vosk", 2, time.Second, time.Millisecond, 3 * time.Millisecond, 11, 12, 1011, "behind", 13}
	full.Events = &Events{5, time.Second, time.Millisecond, 2 * time.Millisecond, true}
	for _, part := range []any{*full.Utterance, *full.Session, *full.Events} {
		for v, i := reflect.ValueOf(part), 0; i < v.NumField(); i++ {
			if v.Field(i).IsZero() {
				t.Errorf("the test leaves %T.%s zero", part, v.Type().Field(i).Name)
			}
		}
	}
	b, err := json.Marshal(&full)
	if err != nil {
		t.Fatal(err)
	}
	var back Observation
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(full, back) {
		t.Errorf("read back\n%+v, wrote\n%+v\nas %s", back, full, b)
	}
}

// utterances adds n utterances of one stream each, as change has them.
func utterances(w *Window, n int, change func(i int, o *Observation)) {
	for i := range n {
		o := request(time.Duration(i)*100*time.Millisecond, 0, 0, 0, 0, 0, 0, 0, 300)
		o.Class, o.Utterance = "utterance vosk", &Utterance{Protocol: "vosk"}
		change(i, o)
		w.Add(o)
	}
}

func TestTheVerdictSaysWhereAStreamDoesNotLetTheQueueBeSeen(t *testing.T) {
	var w Window
	utterances(&w, 50, func(i int, o *Observation) { o.Utterance.QueueHidden = i%2 == 0 })
	v := Classify(cutOne(t, &w, 10*time.Second), DefaultThresholds())
	if !slices.ContainsFunc(v.Warnings, func(s string) bool { return strings.HasPrefix(s, "queue: not observable in 25 of 50 utterances") }) {
		t.Errorf("the verdict %s warns %q", v.Cause, v.Warnings)
	}
	utterances(&w, 50, func(int, *Observation) {})
	for _, s := range Classify(cutOne(t, &w, 20*time.Second), DefaultThresholds()).Warnings {
		if strings.HasPrefix(s, "queue:") {
			t.Errorf("it still warns %q", s)
		}
	}
}

func TestAServerSlowerThanRealTimeIsNamed(t *testing.T) {
	var w Window
	utterances(&w, 60, func(i int, o *Observation) {
		o.Utterance.Acks, o.Utterance.LagSlope = 10, 0.2
		switch {
		case i < 10:
			o.Utterance.LagSlope = 0.01
		case i < 20:
			o.Utterance.Acks = 1
		case i < 30:
			o.Utterance.Unpaced = true
		}
	})
	r := cutOne(t, &w, 10*time.Second)
	for _, want := range []string{"the server fell behind real time in 30 of 40 utterances", "audio came faster than real time in 10 of 60 utterances"} {
		if !slices.ContainsFunc(r.Warnings, func(s string) bool { return strings.HasPrefix(s, want) }) {
			t.Errorf("no warning %q among %q", want, r.Warnings)
		}
	}
}
