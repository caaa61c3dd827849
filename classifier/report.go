package classifier

import "time"

// Shares splits latency into parts of one, as the ratio of sums (time spent
// in a part over time spent in all, of all requests): each second that users
// waited weighs alike, and the numbers of several replicas can be added. The
// eight parts add up to one where any time was spent.
type Shares struct {
	Queue        float64 // weir's own queue
	ServerQueue  float64 // the server's queue, as it tells it
	Upload       float64 // the client's upload: never queueing
	Preprocess   float64
	Transfer     float64
	Forward      float64
	Postprocess  float64
	Unattributed float64 // network, the server's front end, the stream of the answer, what nobody reports
}

// Waiting is the share of both queues.
func (s Shares) Waiting() float64 { return s.Queue + s.ServerQueue }

// Stages holds the mean time of one request in each part, in the order and
// meaning of [Shares].
type Stages struct {
	Queue, ServerQueue, Upload, Preprocess, Transfer, Forward, Postprocess, Unattributed time.Duration
}

// Core is the time without the upload: what queueing and the server took.
func (s Stages) Core() time.Duration {
	return s.Queue + s.ServerQueue + s.Preprocess + s.Transfer + s.Forward + s.Postprocess + s.Unattributed
}

// Estimate is a number with its 95 % confidence interval; N is the number of
// points behind it. OK is false where the data cannot carry an estimate; the
// other fields are then no evidence.
type Estimate struct {
	Value float64
	CI95  [2]float64
	N     int
	OK    bool
}

// Line is the model's forward pass against the batch (or, where no batch is
// told, against the requests in flight): forward = Intercept + Slope x. The
// line is for the eye; verdicts rest on the elasticity, d ln forward / d ln x,
// which is 0 where batching is free and 1 where the work is serial. Both are
// fitted within classes of like audio length, with each execution weighing
// one (a request weighs 1/batch).
type Line struct {
	Slope      time.Duration // for one more request in the batch
	Intercept  time.Duration // at a batch of none
	Elasticity float64
	CI95       [2]float64 // of the elasticity
	AtMean     float64    // elasticity of the straight line at the mean batch: local, where Elasticity averages over all batches seen
	N          int        // executions (requests, if against in-flight)
	Against    string     // "batch", "inflight", "" if no forward time is told
	Remembered bool       // fitted to the last hour, because the window's batches did not vary
	OK         bool       // enough executions, enough variation, an interval narrow enough
}

// Report is what one class of requests did in the most recent windows.
// Durations are of one request; a number that could not be told is zero.
type Report struct {
	Class      string
	Start, End time.Time
	ServerKind string // "triton", ...: whose settings the advice names; "": not known
	Windows    int    // windows merged: 1 where the last one had enough requests, else up to 6

	Requests   int // ended in the window, Upgraded ones apart
	OK         int // answered, whatever the status
	Rejected   int // by weir: queue full
	Expired    int // by weir: queue_timeout
	Canceled   int // by the client
	Failed     int // broken exchanges
	Refused    int // of OK: the server answered 429 or 503
	Timed      int // of OK: with stage timings that can be true
	QueueTold  int // of Timed: with the server's own queue among them
	Suspect    int // of OK: with stage timings that cannot be true
	Batched    int // of Timed: with a batch size
	Overlapped int // of OK: answer began before the upload ended
	Upgraded   int // tunnels and endless streams, outside of everything else

	Shares     Shares
	TailShares Shares // of the slowest 5 %
	Stream     float64
	Means      Stages // of the OK requests
	Forward    Line

	Mean, P50, P95 time.Duration // of all requests, refused ones included; percentiles within 4.5 %

	Baseline       time.Duration // mean at low load, without the upload, for this window's mix of lengths; 0: none seen in the last hour
	BaselineStages Stages
	BaselineN      int
	Explained      float64 // of the server's time at low load, by its stages; 0: not known
	Slowdown       float64 // mean without the upload, over Baseline; 0: no baseline

	Throughput           float64  // answered requests per second
	ThroughputElasticity Estimate // d ln throughput / d ln requests in the system

	Burstiness float64 // variance over mean of the arrivals in a tenth of a window: 1 at random, more in bursts; 0: not known

	WaitAtMost   float64 // where the server tells nothing: share of the time that is waiting, estimated, at most; 0: not known
	Spaced       float64 // share of answers under load that came one service time after the one before: 1 where one worker serves
	SpacedN      int     // answers behind Spaced
	SpacedFactor float64 // mean time between those answers, in service times: 1 where load brings no throughput

	ProbeRest   time.Duration // mean latency of the health path at rest; 0: no probe
	ProbeLoaded time.Duration // and with two requests or more in the server
	ProbeN      int           // probes behind ProbeLoaded

	Inflight   float64 // mean number in the server at admission
	Waiting    float64 // mean number already in weir's queue at arrival
	Limit      int     // the largest max_concurrency in force; 0: none
	Batch      float64 // mean batch of an execution; 0: not told
	BatchMax   int     // largest batch seen within the last hour
	BatchAtMax float64 // share of executions at BatchMax
	Busy       float64 // device time over wall time, (forward + transfer)/batch summed; above 1 with several instances
	BusyQueued float64 // the same at the moments when requests waited
	BusyOK     bool    // a batch is told, so that Busy means something
	Parallel   float64 // most executions at once within the last hour, by Busy of a tenth of a window; 0: not known

	Copies        float64       // copies of one request; 0: not told
	CopyBytes     float64       // bytes moved by one request; 0: not told
	CopyLatency   time.Duration // of one copy, whatever its size, by regression of time on copies and bytes; only if CopyFit
	CopyRate      float64       // bytes per second beside that
	CopySmall     float64       // share of the copies' time that is their latency
	CopyFit       bool          // bytes and copies are told, and varied enough to tell latency from bandwidth
	CopyOut       time.Duration // device to host
	CopyOutBytes  float64
	CopyOutSynced bool    // every such timing was taken with device synchronisation
	TimedAlike    float64 // server's time in timed requests over that in the others; 0: not known

	Server     *Aggregate // what the server's own metrics told of this time; nil: nothing that can be used
	Device     *Device    // the busiest device; nil: none is told
	StagesFrom string     // source of the stages, if it is not the requests' own timings
	BusyFrom   string     // source of Busy, if it is the device's own measure

	Warnings []string
}

// Coverage is the share of answered requests whose stages can be trusted.
func (r Report) Coverage() float64 {
	if r.OK-r.Refused <= 0 {
		return 0
	}
	return float64(r.Timed) / float64(r.OK-r.Refused)
}
