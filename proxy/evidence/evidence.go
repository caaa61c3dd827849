// Package evidence reads what servers and devices tell of themselves beside
// their answers: metrics pages, Triton's statistics, the device's load. A
// [Collector] asks its sources at an interval, far from any request, and keeps
// a few minutes of readings. What they say of a stretch of time comes out as a
// [classifier.Aggregate] or [classifier.Device].
//
// Nothing here is trusted more than it deserves: a page that hangs, is too
// large, is no metrics page or says what cannot be true gives an error to show
// and no evidence; counters count as differences, and one that runs backwards
// means that the server was started anew.
package evidence

import (
	"math"
	"time"

	"weir/classifier"
)

// field is a thing that servers tell, whatever they call it.
type field uint8

const (
	fCompleted  field = iota // requests answered; a counter
	fQueue                   // stages: seconds and how many requests they are of
	fPreprocess              // ...
	fInput                   // copies to the device
	fForward
	fOutput // copies from the device
	fPostprocess
	fTotal    // the whole request by the server's clock
	fBatch    // sum: members of batches; count: batches
	fMembers  // members of batches; a counter
	fBatches  // batches; a counter
	fRejected // requests refused
	fDevice   // seconds of device time, each batch once; a counter
	fWaiting  // gauges: requests in the server's queue
	fRunning  // requests being worked on
	fLimit    // how many the server takes at once
	fBusy     // busy share of the device, 0 to 1
	fMemory   // bytes in use on the device
	fMemoryTotal
	fPCIeIn  // bytes to the device; a counter
	fPCIeOut // bytes from it; a counter
	fPCIe    // bytes/s, both ways; a gauge
	numFields
)

// number is what was read of one field: a sum, and of how many requests it is
// where the source counts them with it.
type number struct {
	sum, count float64
	told       bool
}

// A reading is all that one source told at one instant, in seconds and plain
// counts.
type reading struct {
	at       time.Time
	server   string // the kind of server, as in "vLLM"
	place    string // where it was found; "": where the source says
	numbers  [numFields]number
	sizes    map[int]sizeCost  // by batch size
	answered map[string]uint64 // weir's own answers by class, at that instant
}

// sizeCost is what the batches of one size cost so far.
type sizeCost struct{ batches, forward, copies float64 } // s

func (r *reading) add(f field, sum, count float64) {
	n := &r.numbers[f]
	n.sum, n.count, n.told = n.sum+sum, n.count+count, true
}

// isGauge tells fields whose value is now, not since the start.
func (f field) isGauge() bool {
	return f >= fWaiting && f <= fMemoryTotal || f == fPCIe
}

// stageOf is the stage that a field times.
var stageOf = map[field]classifier.Stage{
	fQueue: classifier.StageQueue, fPreprocess: classifier.StagePreprocess, fInput: classifier.StageTransfer,
	fForward: classifier.StageForward, fOutput: classifier.StageTransfer, fPostprocess: classifier.StagePostprocess,
}

// since is what happened from a to b; ok is false if a counter ran backwards.
func (b *reading) since(a *reading) (d reading, ok bool) {
	d = reading{at: b.at, server: b.server, sizes: make(map[int]sizeCost, len(b.sizes))}
	for f := range numFields {
		from, to := a.numbers[f], b.numbers[f]
		if !from.told || !to.told || f.isGauge() {
			continue
		}
		n := number{to.sum - from.sum, to.count - from.count, true}
		if n.sum < 0 || n.count < 0 {
			return d, false
		}
		d.numbers[f] = n
	}
	for size, to := range b.sizes {
		from := a.sizes[size]
		c := sizeCost{to.batches - from.batches, to.forward - from.forward, to.copies - from.copies}
		if c.batches < 0 || c.forward < 0 || c.copies < 0 {
			return d, false
		}
		if c.batches > 0 {
			d.sizes[size] = c
		}
	}
	return d, a.server == b.server
}

// aggregate turns differences over a stretch of time into means of one
// request.
func (d *reading) aggregate(start, end time.Time) classifier.Aggregate {
	a := classifier.Aggregate{Server: d.server, Start: start, End: end, Requests: d.completed()}
	for f, stage := range stageOf {
		n := d.numbers[f]
		if !n.told || a.Requests <= 0 {
			continue
		}
		a.Stages[stage] += seconds(n.sum / a.Requests)
		a.Told[stage] = true
	}
	if n := d.numbers[fTotal]; n.told && a.Requests > 0 {
		a.Total = seconds(n.sum / a.Requests)
	}
	d.batches(&a, end.Sub(start).Seconds())
	a.Rejected = d.numbers[fRejected].sum
	return a
}

// completed is the number of requests that the stages are of.
func (d *reading) completed() float64 {
	for _, f := range []field{fCompleted, fTotal, fForward, fQueue} {
		n := d.numbers[f]
		if f == fCompleted && n.told {
			return n.sum
		}
		if n.count > 0 {
			return n.count
		}
	}
	return 0
}

// batches fills in what is told of executions. The device's time counts each
// batch once; where only sums over requests are told, each of which carries
// its whole batch's time, they are divided by the mean batch.
func (d *reading) batches(a *classifier.Aggregate, wall float64) {
	if n := d.numbers[fBatch]; n.told && n.count > 0 {
		a.Batch = n.sum / n.count
	}
	if m, n := d.numbers[fMembers], d.numbers[fBatches]; m.told && n.told && n.sum > 0 {
		a.Batch = m.sum / n.sum
	}
	var device float64
	for size, c := range d.sizes {
		a.Sizes = append(a.Sizes, classifier.BatchCost{Size: size, Batches: c.batches, Forward: seconds(c.forward / c.batches)})
		device += c.forward + c.copies
	}
	switch {
	case wall <= 0:
	case len(d.sizes) > 0:
		a.Busy, a.BusyOK = device/wall, true
	case d.numbers[fDevice].told && a.Batch > 0:
		a.Busy, a.BusyOK = d.numbers[fDevice].sum/a.Batch/wall, true
	}
}

func seconds(s float64) time.Duration {
	if !(s > 0) {
		return 0
	}
	return time.Duration(math.Min(s, 1e9) * 1e9)
}
