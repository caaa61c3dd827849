// Package asrsim is a simulated GPU server for speech recognition, with one
// knob for each thing that can limit such a server.
//
// A request goes the way that it goes in a real one. Its body is read (the
// client's time). A host worker decodes it. It waits, first come first
// served, until the batcher takes it: at once if an executor is free, or after
// BatchDelay, and with at most MaxBatchSize others. The executor copies the
// batch to the device over a link that all executors share, runs the forward
// pass, and copies the result back. A host worker formats the text. Every
// duration is slept on a timer, with seeded jitter, so that a small machine
// can play a large one and testing/synctest can play it in no time.
//
// The server tells each answer's stages in a Server-Timing header or trailer
// and keeps its own truth in [Server.Stats]. [Load] is a closed-loop load
// generator; a [Scenario] sets server, limits and load so that one named
// cause limits the whole.
package asrsim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"
)

// Ways to tell an answer's stage timings.
const (
	TimingHeader  = "header"  // Server-Timing in the head; a streamed answer has it in the trailer all the same
	TimingTrailer = "trailer" // Server-Timing in the trailer, announced
	TimingOff     = "off"     // nothing told, as most servers do
)

// Config holds the knobs. All durations are means of a log-normal
// distribution of width Jitter. Start from [DefaultConfig].
type Config struct {
	MaxBatchSize int           // requests in one execution, at least 1
	BatchDelay   time.Duration // how long a free executor waits for the batch to fill, from the oldest request's arrival; 0: not at all
	MaxQueueSize int           // requests waiting for the batcher; one more is answered 503; 0: no limit
	Instances    int           // executors, each running one batch at a time, at least 1

	ForwardBase      time.Duration // forward = ForwardBase + ForwardPerBatch·requests + ForwardPerSecond·seconds of the longest audio
	ForwardPerBatch  time.Duration
	ForwardPerSecond time.Duration

	H2DCopies   int           // host-to-device copies for each request of a batch
	CopyLatency time.Duration // of one copy, whatever its size
	Bandwidth   float64       // of the link between host and device, bytes/s, above 0

	Preprocess          time.Duration // decoding, for each request
	PreprocessPerSecond time.Duration // decoding, for each second of audio
	PreprocessWorkers   int           // host threads for decoding and formatting, at least 1
	Postprocess         time.Duration // formatting, for each request

	Jitter       float64 // standard deviation of the logarithm of each duration; 0: none
	Seed         uint64  // of the jitter
	ServerTiming string  // TimingHeader, TimingTrailer or TimingOff
}

// DefaultConfig is a server with room: about 55 ms for one request, a forward
// pass nearly flat up to a batch of 16.
func DefaultConfig() Config {
	return Config{
		MaxBatchSize: 16, Instances: 1,
		ForwardBase: 40 * time.Millisecond, ForwardPerBatch: 500 * time.Microsecond, ForwardPerSecond: 500 * time.Microsecond,
		H2DCopies: 3, CopyLatency: 20 * time.Microsecond, Bandwidth: 12e9,
		Preprocess: 6 * time.Millisecond, PreprocessPerSecond: 500 * time.Microsecond, PreprocessWorkers: 8,
		Postprocess: 2 * time.Millisecond,
		Jitter:      0.08, Seed: 1, ServerTiming: TimingHeader,
	}
}

// Check returns the first mistake in c, with its remedy.
func (c Config) Check() error {
	for _, n := range []struct {
		name       string
		value, min int
	}{
		{"max-batch-size", c.MaxBatchSize, 1}, {"max-queue-size", c.MaxQueueSize, 0}, {"instances", c.Instances, 1},
		{"h2d-copies", c.H2DCopies, 0}, {"preprocess-workers", c.PreprocessWorkers, 1},
	} {
		if n.value < n.min {
			return fmt.Errorf("%s is %d: give at least %d", n.name, n.value, n.min)
		}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"batch-delay", c.BatchDelay}, {"forward-base", c.ForwardBase}, {"forward-per-batch", c.ForwardPerBatch},
		{"forward-per-second", c.ForwardPerSecond}, {"copy-latency", c.CopyLatency}, {"preprocess", c.Preprocess},
		{"preprocess-per-second", c.PreprocessPerSecond}, {"postprocess", c.Postprocess},
	} {
		if d.value < 0 {
			return fmt.Errorf("%s is %v: give 0s or more", d.name, d.value)
		}
	}
	return c.checkRest()
}

func (c Config) checkRest() error {
	if !(c.Bandwidth > 0) {
		return fmt.Errorf("bandwidth is %g: give bytes per second above 0, such as 12e9", c.Bandwidth)
	}
	if !(c.Jitter >= 0 && c.Jitter <= 2) {
		return fmt.Errorf("jitter is %g: give 0 (none) to 2", c.Jitter)
	}
	switch c.ServerTiming {
	case TimingHeader, TimingTrailer, TimingOff:
		return nil
	}
	return fmt.Errorf("server-timing is %q: give %s, %s or %s", c.ServerTiming, TimingHeader, TimingTrailer, TimingOff)
}

// Server is the simulated server, an [http.Handler]:
//
//	POST /asr                        the body is the audio
//	POST /v1/audio/transcriptions    OpenAI's form: file, and stream=true for server-sent events
//	GET  /health
//
// Audio is a WAV file, or else taken for 16 kHz, 16 bit, one channel. The text
// depends on nothing but the audio's bytes.
type Server struct {
	cfg  Config
	mux  *http.ServeMux
	stop chan struct{} // closed by Close
	ends sync.WaitGroup
	host chan struct{} // a place for each host worker
	link chan struct{} // one place: the link between host and device

	mu      sync.Mutex
	changed *sync.Cond // waiting, closed, or the oldest request's delay
	alarm   *time.Timer
	waiting []*job // oldest first
	closed  bool
	born    time.Time
	busy    time.Duration
	stats   Stats

	dice     *rand.Rand
	diceLock sync.Mutex
}

// New starts a server's executors. Close ends them.
func New(c Config) (*Server, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg:  c,
		mux:  http.NewServeMux(),
		stop: make(chan struct{}),
		host: make(chan struct{}, c.PreprocessWorkers),
		link: make(chan struct{}, 1),
		born: time.Now(),
		dice: rand.New(rand.NewPCG(c.Seed, 0x5eed)),
	}
	s.stats.Batches = make([]int, c.MaxBatchSize+1)
	s.changed = sync.NewCond(&s.mu)
	s.alarm = time.AfterFunc(time.Hour, s.wake)
	s.alarm.Stop()
	s.mux.HandleFunc("POST /asr", s.asr)
	s.mux.HandleFunc("POST /v1/audio/transcriptions", s.transcriptions)
	s.mux.HandleFunc("GET /health", s.health)
	for range c.Instances {
		s.ends.Go(s.execute)
	}
	return s, nil
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// Close ends the executors and waits for them. Requests in the server, and
// those that come later, are answered 503. It can be called again.
func (s *Server) Close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.stop)
		s.alarm.Stop()
		s.changed.Broadcast()
	}
	s.mu.Unlock()
	s.ends.Wait()
}

// Stats is what the server knows of itself.
type Stats struct {
	Requests int // came to a POST path
	OK       int
	Rejected int // 503: the queue was full, or the server closed
	Canceled int // the client left, in the upload, in the queue or in an execution
	Invalid  int // 400

	Batches     []int         // executions by size: Batches[3] had three requests
	Busy        float64       // share of the executors' time that they ran a batch, copies included, since New; a running batch counts when it ends
	QueueWait   time.Duration // in the batcher's queue, summed over the requests taken
	Waiting     int           // in the batcher's queue now
	MaxWaiting  int           // and at most
	Inflight    int           // in the server now, from the head read to the last byte written
	MaxInflight int           // and at most
}

// Executions is the number of batches run.
func (s Stats) Executions() (n int) {
	for _, k := range s.Batches {
		n += k
	}
	return n
}

// MeanBatch is the mean number of requests in an execution; 0 if none ran.
func (s Stats) MeanBatch() float64 {
	var requests int
	for size, k := range s.Batches {
		requests += size * k
	}
	return float64(requests) / float64(max(1, s.Executions()))
}

// Stats returns a snapshot.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.stats
	now.Batches = append([]int(nil), s.stats.Batches...)
	now.Waiting = len(s.waiting)
	if alive := time.Since(s.born); alive > 0 {
		now.Busy = float64(s.busy) / float64(alive) / float64(s.cfg.Instances)
	}
	return now
}

// enter counts a request in; the function that it returns counts it out.
func (s *Server) enter() (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Requests++
	s.stats.Inflight++
	s.stats.MaxInflight = max(s.stats.MaxInflight, s.stats.Inflight)
	return func() { s.count(&s.stats.Inflight, -1) }
}

func (s *Server) count(what *int, by int) {
	s.mu.Lock()
	*what += by
	s.mu.Unlock()
}

// sleep passes a jittered duration of work, and tells whether it was not
// ended by Close.
func (s *Server) sleep(mean time.Duration) bool {
	if mean <= 0 {
		return true
	}
	t := time.NewTimer(time.Duration(float64(mean) * s.luck()))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.stop:
		return false
	}
}

// luck is a log-normal factor with mean 1.
func (s *Server) luck() float64 {
	if s.cfg.Jitter == 0 {
		return 1
	}
	s.diceLock.Lock()
	defer s.diceLock.Unlock()
	return math.Exp(s.cfg.Jitter*s.dice.NormFloat64() - s.cfg.Jitter*s.cfg.Jitter/2)
}

// times multiplies a duration by a number that need not be whole.
func times(d time.Duration, n float64) time.Duration { return time.Duration(float64(d) * n) }
