package proxy

import (
	"fmt"
	"net/http"
	"time"

	"weir/classifier"
)

// serverKind is the kind for the classifier, to which none means auto.
func serverKind(configured string) string {
	if configured == "auto" {
		return ""
	}
	return configured
}

// longSpans are those over which the page can be asked for a verdict, beside
// the latest windows. Such verdicts are not latched: their windows are long.
var longSpans = []time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute}

// judgeLong judges the longer spans. It runs on the sink's goroutine, after a cut.
func (w *watch) judgeLong(t classifier.Thresholds) {
	long := make(map[time.Duration][]classifier.Verdict, len(longSpans))
	for _, span := range longSpans {
		var verdicts []classifier.Verdict
		for _, r := range w.window.Over(span) {
			verdicts = append(verdicts, classifier.Classify(r, t))
		}
		sortByTime(verdicts)
		long[span] = verdicts
	}
	w.mu.Lock()
	w.long = long
	w.mu.Unlock()
}

// over returns the verdicts that a request asks for by window=1m, 5m or 30m;
// without it, those of the latest windows.
func (w *watch) over(r *http.Request) ([]classifier.Verdict, error) {
	text := r.FormValue("window")
	if text == "" {
		return w.current(), nil
	}
	span, err := time.ParseDuration(text)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, known := range longSpans {
		if err == nil && span == known {
			return w.long[span], nil // replaced as a whole, never changed
		}
	}
	return nil, fmt.Errorf("window=%q is not kept; use 1m, 5m or 30m, or leave it out for the latest windows", text)
}
