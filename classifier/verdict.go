package classifier

import "time"

// Cause is what limits the server.
type Cause string

// The causes.
const (
	Healthy  Cause = "healthy"
	Queue    Cause = "queue"    // a limit, batch cap or batch delay is set too small or too long; the device has room
	Compute  Cause = "compute"  // the model's forward pass: the device is full
	Transfer Cause = "transfer" // copies between host and device
	Host     Cause = "host"     // code on the CPU: decoding audio, features, text
	Client   Cause = "client"   // slow uploads
	Mixed    Cause = "mixed"    // two of them, both named in the evidence
	Unknown  Cause = "unknown"  // too little evidence; the evidence says what is missing
)

var causes = [...]Cause{Healthy, Queue, Compute, Transfer, Host, Client, Mixed, Unknown}

const numCauses = len(causes)

// IsCause tells whether name is one of the causes.
func IsCause(name string) bool {
	for _, c := range causes {
		if string(c) == name {
			return true
		}
	}
	return false
}

// index is the place of c in causes; of a stranger, that of Unknown.
func (c Cause) index() int {
	for i, other := range causes {
		if c == other {
			return i
		}
	}
	return numCauses - 1
}

// Verdict says what limits a class of requests, and why.
type Verdict struct {
	Class       string
	Cause       Cause
	Among       []Cause      // the causes that Mixed names, or between which the data cannot tell
	Rule        string       // the rule that decided, such as "batch-cap"
	Confidence  float64      // 0 to 1; see [Classify]
	margin      float64      // 0 to 1: how far the deciding measure lies beyond its threshold
	Evidence    []string     // sentences with numbers, units and thresholds; the decisive one first
	Advice      string       // the remedy, in the server operator's words
	Predictions []Prediction // what the advice would bring; see [Report.WhatIf]
	Warnings    []string
	Report      Report
	Since       time.Time // when it was first shown; set by [Latch]
}

// Thresholds holds every constant that a verdict depends on. The zero value
// is of no use; start from [DefaultThresholds].
type Thresholds struct {
	MinRequests     int     `yaml:"min_requests" json:"min_requests"`         // fewer say nothing
	MinTimed        int     `yaml:"min_timed" json:"min_timed"`               // fewer timed requests count as no timings
	MinBaseline     int     `yaml:"min_baseline" json:"min_baseline"`         // fewer low-load requests are no baseline
	HealthySlowdown float64 `yaml:"healthy_slowdown" json:"healthy_slowdown"` // below, latency is as at low load
	HealthyQueue    float64 `yaml:"healthy_queue" json:"healthy_queue"`       // share of latency in queues that needs no remark
	QueueShare      float64 `yaml:"queue_share" json:"queue_share"`           // from here queues are a problem
	AlertQueue      float64 `yaml:"alert_queue" json:"alert_queue"`           // above one half some limit binds, whatever the batching
	ClientShare     float64 `yaml:"client_share" json:"client_share"`         // upload's share of latency
	UploadHides     float64 `yaml:"upload_hides" json:"upload_hides"`         // slowdown of the server from which uploads do not excuse it
	Dominates       float64 `yaml:"dominates" json:"dominates"`               // a stage's part of the growth that makes it the cause
	Inflated        float64 `yaml:"inflated" json:"inflated"`                 // growth of a stage, over the low-load service, that makes a queue its symptom
	Tie             float64 `yaml:"tie" json:"tie"`                           // two causes whose parts differ by less than this, relatively, are both named
	Elastic         float64 `yaml:"elastic" json:"elastic"`                   // forward's elasticity: an interval below is free, above is linear
	Responds        float64 `yaml:"responds" json:"responds"`                 // throughput's elasticity from which more load still gives more
	Saturated       float64 `yaml:"saturated" json:"saturated"`               // and below which it gives nothing
	DeviceIdle      float64 `yaml:"device_idle" json:"device_idle"`           // busy share, while requests wait, below which the device has room
	DeviceFull      float64 `yaml:"device_full" json:"device_full"`           // and from which it has none
	BatchPeriods    float64 `yaml:"batch_periods" json:"batch_periods"`       // a wait of that many batches is inherent in batching
	BatchPinned     float64 `yaml:"batch_pinned" json:"batch_pinned"`         // share of executions at the largest batch that makes it a cap
	DelayShare      float64 `yaml:"delay_share" json:"delay_share"`           // server queue over all at low load: a batch timer
	RefusedShare    float64 `yaml:"refused_share" json:"refused_share"`       // refused requests that are a problem of their own
	SuspectShare    float64 `yaml:"suspect_share" json:"suspect_share"`       // impossible timings that spoil the rest
	Explained       float64 `yaml:"explained" json:"explained"`               // stages explain less of a low-load request: wrong unit
	CopyRate        float64 `yaml:"copy_rate" json:"copy_rate"`               // bytes/s; a slower, longer copy hides the forward pass
	Coverage        float64 `yaml:"coverage" json:"coverage"`                 // timed share below which to warn
	Instances       float64 `yaml:"instances" json:"instances"`               // executions that the device runs at once
}

// DefaultThresholds returns the constants of reference/methods, measured on
// simulated servers.
func DefaultThresholds() Thresholds {
	return Thresholds{
		MinRequests: 40, MinTimed: 20, MinBaseline: 8,
		HealthySlowdown: 1.3, HealthyQueue: 0.2, QueueShare: 0.3, AlertQueue: 0.5,
		ClientShare: 0.5, UploadHides: 2, Dominates: 0.4, Inflated: 0.3, Tie: 0.2,
		Elastic: 0.5, Responds: 0.8, Saturated: 0.3,
		DeviceIdle: 0.6, DeviceFull: 0.9,
		BatchPeriods: 1.1, BatchPinned: 0.8, DelayShare: 0.25, RefusedShare: 0.05,
		SuspectShare: 0.05, Explained: 0.05, CopyRate: 20e6, Coverage: 0.9, Instances: 1,
	}
}
