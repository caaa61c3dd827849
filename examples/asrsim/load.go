package asrsim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Load is a closed loop: each of a number of clients sends a request, waits
// for its answer, thinks, and sends the next.
type Load struct {
	URL        string          // of POST /asr, or of a proxy before it
	Clients    int             // at once; 0: one
	Requests   int             // in all; 0: as many as come to pass in For
	For        time.Duration   // no request begins after that; 0: only Requests bounds the run
	Audio      []time.Duration // lengths, taken in turn; empty: 3 s
	UploadRate float64         // of one client, bytes/s; 0: as fast as it goes
	Think      time.Duration   // between an answer and the next request
	Seed       uint64          // of the audio

	Transport http.RoundTripper // nil: one of its own, closed at the end
}

// refusedPause is what a client waits after anything but a 200, so that a
// refusal does not become a storm.
const refusedPause = 100 * time.Millisecond

// Result is what the clients of one load saw.
type Result struct {
	Sent     int // requests begun
	OK       int // 200, read to the end
	Refused  int // 429 or 503
	Failed   int // other statuses, and broken exchanges
	Canceled int // cut off by the context

	Latencies []time.Duration // of the OK ones, from the request's start to the answer's last byte, in order of size
	Elapsed   time.Duration
	Err       error // the first of the failures; nil if there was none
}

// Throughput is OK requests per second.
func (r Result) Throughput() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.OK) / r.Elapsed.Seconds()
}

// Mean is the mean latency; 0 if no request was OK.
func (r Result) Mean() time.Duration {
	var sum time.Duration
	for _, d := range r.Latencies {
		sum += d
	}
	return sum / time.Duration(max(1, len(r.Latencies)))
}

// Quantile is the latency that a share q (0 to 1) of the OK requests did not
// exceed; 0 if no request was OK.
func (r Result) Quantile(q float64) time.Duration {
	n := len(r.Latencies)
	if n == 0 {
		return 0
	}
	return r.Latencies[min(n-1, max(0, int(q*float64(n)+0.999999)-1))]
}

// Run plays the load and returns when its last request has ended. Requests
// that are under way when For is over are waited for; when ctx ends they are
// cut off. A load that nothing bounds is an error.
func (l Load) Run(ctx context.Context) (Result, error) {
	if l.Requests <= 0 && l.For <= 0 {
		return Result{}, errors.New("the load has no end: set Requests or For")
	}
	if _, err := http.NewRequest(http.MethodPost, l.URL, nil); err != nil {
		return Result{}, fmt.Errorf("%w: give the URL of a server, such as http://127.0.0.1:8080/asr", err)
	}
	run := l.start()
	var clients sync.WaitGroup
	for range max(1, l.Clients) {
		clients.Go(func() { run.client(ctx) })
	}
	clients.Wait()
	return run.end(), nil
}

// running is a load under way.
type running struct {
	Load
	http   http.Client
	bodies [][]byte
	began  time.Time
	next   atomic.Int64 // requests given out

	mu     sync.Mutex
	result Result
}

func (l Load) start() *running {
	if len(l.Audio) == 0 {
		l.Audio = []time.Duration{3 * time.Second}
	}
	if l.Transport == nil {
		l.Transport = &http.Transport{MaxIdleConnsPerHost: max(1, l.Clients), DisableCompression: true}
	} else {
		l.Transport = keepOpen{l.Transport}
	}
	r := &running{Load: l, http: http.Client{Transport: l.Transport}}
	for i, length := range l.Audio {
		r.bodies = append(r.bodies, SynthesizeWAV(length, l.Seed+uint64(i)))
	}
	r.began = time.Now()
	return r
}

// keepOpen hides CloseIdleConnections: a caller's transport stays as it is.
type keepOpen struct{ http.RoundTripper }

func (r *running) end() Result {
	r.http.CloseIdleConnections()
	r.result.Elapsed = time.Since(r.began)
	slices.Sort(r.result.Latencies)
	return r.result
}

func (r *running) client(ctx context.Context) {
	for {
		n := r.next.Add(1) - 1
		over := r.For > 0 && time.Since(r.began) >= r.For
		if over || ctx.Err() != nil || r.Requests > 0 && n >= int64(r.Requests) {
			return
		}
		pause := r.Think
		if !r.request(ctx, r.bodies[n%int64(len(r.bodies))]) {
			pause = max(pause, refusedPause)
		}
		sleepFor(ctx, pause)
	}
}

// request sends one body and counts what came of it.
func (r *running) request(ctx context.Context, body []byte) (ok bool) {
	began := time.Now()
	status, err := r.exchange(ctx, body)
	took := time.Since(began)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Sent++
	switch {
	case err == nil && status == http.StatusOK:
		r.result.OK++
		r.result.Latencies = append(r.result.Latencies, took)
		return true
	case err == nil && (status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable):
		r.result.Refused++
	case ctx.Err() != nil:
		r.result.Canceled++
	default:
		r.result.Failed++
		if r.result.Err == nil {
			r.result.Err = explain(err, status, r.URL)
		}
	}
	return false
}

func explain(err error, status int, url string) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%s answered %d: point the load at the path of a transcription", url, status)
}

func (r *running) exchange(ctx context.Context, body []byte) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, r.upload(ctx, body))
	if err != nil {
		return 0, err
	}
	req.ContentLength = int64(len(body))
	req.Header.Set("Content-Type", "audio/wav")
	res, err := r.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

func (r *running) upload(ctx context.Context, body []byte) io.Reader {
	if r.UploadRate <= 0 {
		return bytes.NewReader(body)
	}
	return &slowReader{ctx: ctx, rest: body, rate: r.UploadRate, began: time.Now()}
}

// slowReader gives its bytes at a rate, in pieces of 20 ms.
type slowReader struct {
	ctx   context.Context
	rest  []byte
	given int
	rate  float64
	began time.Time
}

func (s *slowReader) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		return 0, io.EOF
	}
	piece := min(len(p), len(s.rest), max(1, int(s.rate/50)))
	due := times(time.Second, float64(s.given+piece)/s.rate)
	sleepFor(s.ctx, due-time.Since(s.began))
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	n := copy(p[:piece], s.rest)
	s.rest, s.given = s.rest[n:], s.given+n
	return n, nil
}

// sleepFor sleeps for d, or until ctx ends.
func sleepFor(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
