package proxy

import (
	"net/http/httptest"
	"testing"
	"time"

	"weir/classifier"
)

func TestLongVerdictsCoverWhatWasAsked(t *testing.T) {
	w := &watch{window: classifier.Window{}}
	begin := time.Date(2026, 12, 1, 10, 0, 0, 0, time.UTC)
	for cut := range 48 { // eight minutes
		for i := range 50 {
			at := begin.Add(time.Duration(cut)*10*time.Second + time.Duration(i)*200*time.Millisecond)
			w.window.Add(&classifier.Observation{Class: "POST /asr", Status: 200, Enqueued: at, Dequeued: at, Sent: at, Responded: at.Add(50 * time.Millisecond), Done: at.Add(50 * time.Millisecond)})
		}
		w.window.Cut(begin.Add(time.Duration(cut+1) * 10 * time.Second))
		w.judgeLong(classifier.DefaultThresholds())
	}
	for query, want := range map[string][2]int{"1m": {300, 300}, "5m": {1500, 1850}, "30m": {2400, 2400}} {
		v, err := w.over(httptest.NewRequest("GET", "/api/verdict?window="+query, nil))
		if err != nil || len(v) != 1 || v[0].Report.Requests < want[0] || v[0].Report.Requests > want[1] {
			t.Errorf("over %s: %v, %d requests: want %v", query, err, v[0].Report.Requests, want)
		}
	}
	if _, err := w.over(httptest.NewRequest("GET", "/api/verdict?window=2m", nil)); err == nil {
		t.Error("two minutes were given")
	}
}
