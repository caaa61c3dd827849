package ladder

import (
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"weir/examples/asrsim"
)

// inProcess is a transport that calls a handler, so that time in a synctest
// bubble passes for both ends.
type inProcess struct{ http.Handler }

func (h inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

// speech is audio of like lengths, with few bytes a second: the simulated
// server hashes them all.
func speech() (clips []Clip) {
	for i, d := range []float64{2.5, 3, 3.5, 2} {
		wav := asrsim.SynthesizeWAV(0, 0)
		binary.LittleEndian.PutUint32(wav[28:], 4000)
		n := int(4000 * d)
		binary.LittleEndian.PutUint32(wav[40:], uint32(n))
		wav = append(wav, make([]byte, n)...)
		wav[44] = byte(i)
		clips = append(clips, NewClip("clip.wav", wav))
	}
	return clips
}

func newSim(t *testing.T, c asrsim.Config) *asrsim.Server {
	t.Helper()
	s, err := asrsim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// newRunner is a runner of the handler, in process.
func newRunner(t *testing.T, h http.Handler, target Target) *Runner {
	t.Helper()
	if target.URL == "" {
		target.URL = "http://asr.test/asr"
	}
	c, err := NewClient(target, speech(), inProcess{h})
	if err != nil {
		t.Fatal(err)
	}
	return &Runner{Client: c, Warmup: 3, Pause: time.Second}
}

func closedSteps(requests int, concurrencies ...int) (steps []Step) {
	for _, n := range concurrencies {
		steps = append(steps, Step{Concurrency: n, Requests: requests})
	}
	return steps
}

// climb runs a ladder and summarizes it.
func climb(t *testing.T, r *Runner, steps []Step) *Summary {
	t.Helper()
	if err := r.Warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	runs, err := r.Ladder(t.Context(), steps)
	if err != nil {
		t.Fatal(err)
	}
	return Summarize(&Run{Header: Header{Kind: KindLadder}, Steps: runs})
}

// lockedHandler calls a handler one at a time, so that it may count.
func lockedHandler(h http.Handler) http.Handler {
	var mu sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		h.ServeHTTP(w, r)
	})
}
