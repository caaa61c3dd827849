// Package classifier says what limits an ASR server under load.
//
// Its input is the [Observation], the life of one request as the proxy saw it
// and as the server told it. Observations gather in a [Window]; a cut of the
// window gives one [Report] per traffic class; [Classify] weighs a report into
// a [Verdict], and a [Latch] keeps the verdict from flapping. Everything here
// is values in, values out: no clock, no network, no log.
package classifier

import "time"

// Stage is a part of the server's work on one request.
type Stage uint8

// The stages that a server can report. StageOther holds timings that weir
// passes on but does not interpret.
const (
	StageOther       Stage = iota
	StageQueue             // waiting inside the server, as the server reports it
	StagePreprocess        // audio decoding, features, tokenizing, on the host
	StageTransfer          // copies between host and device
	StageForward           // the model: encode, prefill, decode
	StagePostprocess       // text formatting and the like, on the host
	NumStages        = int(iota)
)

var stageNames = [NumStages]string{"other", "queue", "preprocess", "transfer", "forward", "postprocess"}

// String returns the lower-case name used in configuration, metrics and JSON.
func (s Stage) String() string {
	if int(s) < len(stageNames) {
		return stageNames[s]
	}
	return "other"
}

// ParseStage is the inverse of [Stage.String].
func ParseStage(name string) (Stage, bool) {
	for i, n := range stageNames {
		if n == name {
			return Stage(i), true
		}
	}
	return StageOther, false
}

// Timing is one stage duration in the server's own words.
type Timing struct {
	Name      string        // the server's word, such as "h2d" or "prefill"
	Stage     Stage         // what weir takes it for
	Dur       time.Duration // as reported; of the whole batch, if the stage was shared
	Bytes     int64         // moved by this stage; 0: not told
	Count     int           // copies, kernels or calls in this stage; 0: not told
	Synced    bool          // measured with device synchronisation
	Untrusted bool          // cannot be true; kept for display, never used in a verdict
}

// LoadMetric is one number of the server's load at the time of an answer.
type LoadMetric struct {
	Name  string  `json:"name"` // the server's word, such as "named_metrics.num_requests_waiting"
	Value float64 `json:"value"`
}

// Outcome is how a request ended for the proxy.
type Outcome uint8

// The outcomes. Only OK requests carry a whole life; the others still count
// with the time that they waited.
const (
	OK       Outcome = iota // the server's answer reached the client, whatever its status
	Rejected                // refused by a full queue
	Expired                 // refused after queue_timeout
	Canceled                // the client left first
	Failed                  // weir or the server broke the exchange
)

var outcomeNames = [...]string{"ok", "rejected", "expired", "canceled", "failed"}

// String returns the lower-case name used in metrics and JSON.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return "failed"
}

// ParseOutcome is the inverse of [Outcome.String].
func ParseOutcome(name string) (Outcome, bool) {
	for i, n := range outcomeNames {
		if n == name {
			return Outcome(i), true
		}
	}
	return Failed, false
}

// Observation is the life of one request: the one record that flows through
// weir. Zero means "not told" in every field. The five instants are readings
// of one monotonic clock, in the order of the fields; an instant that was
// never reached is the zero Time. All other durations come from other
// machines or from differences on that clock; no foreign timestamp is kept.
//
// An Observation is a plain value: copying it copies the record, and its
// strings belong to it (none aliases a network buffer).
type Observation struct {
	TraceID    [16]byte
	SpanID     [8]byte // weir's own; parent of the server's spans
	ParentID   [8]byte // the caller's span; zero if weir began the trace
	TraceState string
	Sampled    bool

	Protocol  string // "http/1.1", "h2", "grpc", "websocket"
	Scheme    string // that the client used: "https"; "": http
	Method    string
	Target    string // path and query as sent, secrets redacted
	Host      string
	Client    string // address and port of the client
	UserAgent string
	Route     string // template from the configured list, such as "/v1/audio/transcriptions"; low cardinality
	Class     string // method and route: the unit of statistics
	Model     string
	Status    int
	RPCStatus string // of a gRPC call, by the name of its code, such as "DEADLINE_EXCEEDED"; "": not told
	Outcome   Outcome
	Error     string // low-cardinality word for what went wrong: "queue_full", "server_reset", ...
	Upgraded  bool   // a tunnel or an endless stream: its length is no latency

	Enqueued  time.Time // head read, request at the gate
	Dequeued  time.Time // admitted
	Sent      time.Time // last body byte forwarded to the server
	Responded time.Time // head of the final answer read from the server
	Done      time.Time // last byte given to the client, or the exchange given up

	Deadline time.Duration // the time that the client gave the call, from Enqueued; 0: none
	Before   time.Duration // waited in front of weir, by X-Request-Start of a balancer
	Connect  time.Duration // spent on a new connection to the server
	Overhead time.Duration // weir's own work between Enqueued and Done

	Waiting  int // requests already in the queue when this one came
	Inflight int // requests in the server, this one included, when it was admitted
	Limit    int // max_concurrency in force at that moment; 0: none

	Timings      []Timing
	Source       string        // where Timings came from: "header", "trailer", "body"; "": nothing told
	ServerTotal  time.Duration // the server's own measure of its whole work
	BatchSize    int           // requests that shared the execution
	SeqLen       int           // padded sequence length, frames or tokens
	Tokens       int
	AudioSeconds float64

	Load []LoadMetric // how loaded the server said it was (ORCA); no durations

	BytesIn  int64 // request body, from the client
	BytesOut int64 // response body, to the client

	Utterance *Utterance // this is the record of one utterance; nil: of a request
	Session   *Session   // what was read in a WebSocket; nil: it is none
	Events    *Events    // parts of a streamed answer; nil: it had none
}

// Total is the time from Enqueued to Done; 0 while the request lives.
func (o *Observation) Total() time.Duration { return between(o.Enqueued, o.Done) }

// QueueWait is the time that the request waited in weir's queue. A request
// that was refused, or whose client left the queue, waited until Done.
func (o *Observation) QueueWait() time.Duration {
	if o.Dequeued.IsZero() {
		return between(o.Enqueued, o.Done)
	}
	return between(o.Enqueued, o.Dequeued)
}

// Upload is the time from admission to the last body byte, less connecting.
// Where the server answered before the upload ended, it is the time until the
// answer. It is the client's time more than the server's, and never queueing.
func (o *Observation) Upload() time.Duration {
	end := o.Sent
	if !o.Responded.IsZero() && (end.IsZero() || o.Responded.Before(end)) {
		end = o.Responded
	}
	return max(0, between(o.Dequeued, end)-o.Connect)
}

// Overlapped tells that the server began to answer before it had the whole
// request, so that upload and service cannot be told apart.
func (o *Observation) Overlapped() bool {
	return !o.Responded.IsZero() && (o.Sent.IsZero() || o.Responded.Before(o.Sent))
}

// Refused tells that the server turned the request away because it had too
// much to do.
func (o *Observation) Refused() bool {
	switch o.RPCStatus {
	case "RESOURCE_EXHAUSTED", "UNAVAILABLE":
		return true
	}
	return o.Status == 429 || o.Status == 503
}

// Service is the time from the last body byte to the head of the answer, or
// to the end of the answer where the server timed the whole stream (a
// trailer, a body).
func (o *Observation) Service() time.Duration {
	end := o.Responded
	if o.streamTimed() || end.IsZero() {
		end = o.Done
	}
	from := o.Sent
	if o.Overlapped() {
		from = o.Responded
	}
	return between(from, end)
}

// Stream is the time from the head of the answer to its last byte, where the
// server's timings do not cover it.
func (o *Observation) Stream() time.Duration {
	if o.streamTimed() {
		return 0
	}
	return between(o.Responded, o.Done)
}

func (o *Observation) streamTimed() bool {
	return o.Source == "trailer" || o.Source == "body" || o.Source == "otlp"
}

// In sums what the server reported for one stage, leaving out what cannot be
// true; ok is false if it reported nothing.
func (o *Observation) In(s Stage) (d time.Duration, ok bool) {
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Stage == s && !t.Untrusted {
			d, ok = d+t.Dur, true
		}
	}
	return d, ok
}

// Moved sums the bytes and copies that the server reported for its transfers.
func (o *Observation) Moved() (bytes int64, copies int) {
	for i := range o.Timings {
		if t := &o.Timings[i]; t.Stage == StageTransfer && !t.Untrusted {
			bytes, copies = bytes+t.Bytes, copies+t.Count
		}
	}
	return bytes, copies
}

// Reported is the sum of all stages that the server told and that can be true.
func (o *Observation) Reported() (sum time.Duration) {
	for s := StageQueue; int(s) < NumStages; s++ {
		d, _ := o.In(s)
		sum += d
	}
	return sum
}

// Ledger splits the wall time of one request into lines that add up.
type Ledger struct {
	Before       time.Duration // in front of weir; outside Total
	Queue        time.Duration // weir's queue
	Overhead     time.Duration // weir's own work
	Connect      time.Duration
	Upload       time.Duration
	Stages       [NumStages]time.Duration // the server's stages by Stage; index StageOther is unused
	Stream       time.Duration            // the answer's body, after its head
	Unattributed time.Duration            // nobody's: the network, the server's front end, what it does not report
	Overlap      time.Duration            // by how much the lines exceed the wall time (stages that ran in parallel); usually 0
}

// Ledger returns the split. Before + Total() = the sum of all lines but
// Overlap, less Overlap, exactly: Unattributed is what remains.
func (o *Observation) Ledger() Ledger {
	l := Ledger{
		Before:   o.Before,
		Queue:    o.QueueWait(),
		Overhead: o.Overhead,
		Connect:  o.Connect,
		Upload:   max(0, o.Upload()-o.Overhead),
		Stream:   o.Stream(),
	}
	if o.Dequeued.IsZero() {
		l.Overhead, l.Connect = 0, 0
	}
	rest := o.Total() - l.Queue - l.Overhead - l.Connect - l.Upload - l.Stream
	for s := StageQueue; int(s) < NumStages; s++ {
		l.Stages[s], _ = o.In(s)
		rest -= l.Stages[s]
	}
	l.Unattributed, l.Overlap = max(0, rest), max(0, -rest)
	return l
}

// Wall is the time that the ledger accounts for: Before plus Total.
func (l Ledger) Wall() time.Duration {
	sum := l.Before + l.Queue + l.Overhead + l.Connect + l.Upload + l.Stream + l.Unattributed - l.Overlap
	for _, d := range l.Stages {
		sum += d
	}
	return sum
}

// Unattributed is what remains of Total after the queue, the upload and all
// that the server reported; never below zero.
func (o *Observation) Unattributed() time.Duration { return o.Ledger().Unattributed }

func between(a, b time.Time) time.Duration {
	if a.IsZero() || b.IsZero() {
		return 0
	}
	return max(0, b.Sub(a))
}
