package classifier

import (
	"strings"
	"testing"
	"time"
)

// untimedReport is a class whose answers tell nothing: service is all that weir
// knows of the server.
func untimedReport(at time.Time, n int, service time.Duration, inflight float64) Report {
	return Report{
		Class: "POST /asr", Start: at.Add(-10 * time.Second), End: at, Windows: 1, Requests: n, OK: n,
		Shares: Shares{Unattributed: 1}, Means: Stages{Unattributed: service}, Mean: service, Inflight: inflight,
	}
}

func aggregate(n float64, queue, forward time.Duration) Aggregate {
	a := Aggregate{Source: "vLLM at http://h/metrics", Server: "vLLM", Requests: n}
	a.Stages[StageQueue], a.Told[StageQueue] = queue, true
	a.Stages[StageForward], a.Told[StageForward] = forward, true
	return a
}

const ms100 = 100 * time.Millisecond

func atMinute(m int) time.Time {
	return time.Unix(1_800_000_000, 0).Add(time.Duration(m) * time.Minute)
}

func TestMetricsGiveTheStagesThatAnswersDoNotTell(t *testing.T) {
	var e External
	low := untimedReport(atMinute(0), 50, 11*ms100/10, 1)
	e.Fill(&low, []Aggregate{aggregate(50, 0, ms100)}, nil)
	high := untimedReport(atMinute(1), 200, 6*ms100, 6)
	a := aggregate(200, 4*ms100, ms100)
	e.Fill(&high, []Aggregate{a}, nil)
	if m := high.Means; m.ServerQueue != 4*ms100 || m.Forward != ms100 || m.Unattributed != ms100 {
		t.Errorf("means %+v", m)
	}
	if s := high.Shares; s.ServerQueue < 0.66 || s.ServerQueue > 0.67 || s.Waiting()+s.Forward+s.Unattributed < 0.999 {
		t.Errorf("shares %+v", s)
	}
	if high.StagesFrom != a.Source || high.Timed != 200 || high.QueueTold != 200 {
		t.Errorf("from %q, %d timed, %d with a queue", high.StagesFrom, high.Timed, high.QueueTold)
	}
	if b := high.BaselineStages; b.Forward != ms100 || b.ServerQueue != 0 || high.Slowdown < 5 {
		t.Errorf("baseline %+v, slowdown %v", b, high.Slowdown)
	}
	if v := Classify(high, DefaultThresholds()); v.Cause != Queue {
		t.Errorf("%s: %v", v.Cause, v.Evidence)
	}
}

func TestMetricsNeverReplaceTheRequestsOwnTimings(t *testing.T) {
	var e External
	r := untimedReport(atMinute(0), 50, 5*ms100, 3)
	r.Timed, r.Means = 50, Stages{Forward: 5 * ms100}
	before := r
	a := aggregate(50, 4*ms100, ms100)
	e.Fill(&r, []Aggregate{a}, nil)
	if r.Means != before.Means || r.StagesFrom != "" || r.Server == nil {
		t.Errorf("%+v", r)
	}
}

func TestMetricsThatCannotBeTrueAreNotUsed(t *testing.T) {
	var e External
	for _, a := range []Aggregate{aggregate(50, 4*ms100, 2*ms100), {Source: "x", Refused: "it counts others"}} {
		r := untimedReport(atMinute(0), 50, 5*ms100, 3)
		e.Fill(&r, []Aggregate{a}, nil)
		if r.Timed != 0 || r.Means.Unattributed != 5*ms100 || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "is not used") {
			t.Errorf("%+v", r)
		}
		if v := Classify(r, DefaultThresholds()); v.Cause != Unknown {
			t.Errorf("%s: %v", v.Cause, v.Evidence)
		}
	}
}

func TestTheTimeOutsideOfTheServersClockIsTold(t *testing.T) {
	var e External
	r := untimedReport(atMinute(0), 100, 9*ms100, 8)
	a := aggregate(100, 0, ms100)
	a.Total = 2 * ms100
	e.Fill(&r, []Aggregate{a}, nil)
	v := Classify(r, DefaultThresholds())
	if !strings.Contains(strings.Join(v.Evidence, "\n"), "vLLM's own clock covers 200 ms of the 900 ms") {
		t.Errorf("%s: %q", v.Cause, v.Evidence)
	}
}

func TestBatchesOfEachSizeGiveTheLineAndTheBusyShare(t *testing.T) {
	var e External
	r := untimedReport(atMinute(0), 400, 6*ms100, 8)
	a := aggregate(400, 4*ms100, ms100)
	a.Batch, a.Busy, a.BusyOK = 4, 0.97, true
	a.Sizes = []BatchCost{{1, 40, 25 * time.Millisecond}, {2, 40, 50 * time.Millisecond}, {4, 40, ms100}, {8, 40, 2 * ms100}}
	e.Fill(&r, []Aggregate{a}, nil)
	l := r.Forward
	if !l.OK || l.Against != "batch" || l.Elasticity < 0.99 || l.Elasticity > 1.01 || l.Slope.Round(time.Millisecond) != 25*time.Millisecond {
		t.Errorf("%+v", l)
	}
	if r.Busy != 0.97 || !r.BusyOK || r.BatchMax != 8 || r.BatchAtMax != 0.25 || r.Batch != 4 {
		t.Errorf("busy %v %v, batch %v of %d, %v at most", r.Busy, r.BusyOK, r.Batch, r.BatchMax, r.BatchAtMax)
	}
	if v := Classify(r, DefaultThresholds()); v.Cause != Compute {
		t.Errorf("%s: %q", v.Cause, v.Evidence)
	}
}

func deviceAt(busy float64) []Device {
	return []Device{{Source: "an idle one", Busy: Gauge{0.01, true}}, {Source: "DCGM exporter at http://h", Busy: Gauge{busy, true}}}
}

// A full GPU and a server that is held up by its own host code trace the same
// picture: what tells them apart is the device.
func TestTheDeviceTellsComputeFromHost(t *testing.T) {
	for busy, want := range map[float64]Cause{0.97: Compute, 0.2: Host} {
		var e External
		low := untimedReport(atMinute(0), 50, ms100, 1)
		e.Fill(&low, []Aggregate{aggregate(50, 0, ms100)}, deviceAt(0.1))
		r := untimedReport(atMinute(1), 200, 6*ms100, 8)
		e.Fill(&r, []Aggregate{aggregate(200, ms100, 5*ms100)}, deviceAt(busy))
		v := Classify(r, DefaultThresholds())
		if v.Cause != want || !strings.Contains(strings.Join(v.Evidence, "\n"), "DCGM exporter at http://h") {
			t.Errorf("busy %v: %s, want %s: %q", busy, v.Cause, want, v.Evidence)
		}
	}
}

func TestTheDeviceAloneSaysSomethingOfAServerThatTellsNothing(t *testing.T) {
	server := func(waiting float64) []Aggregate {
		return []Aggregate{{Source: "x", Server: "X", Requests: 200, Waiting: Gauge{waiting, true}}}
	}
	for _, c := range []struct {
		busy    float64
		servers []Aggregate
		want    Cause
		says    string
	}{
		{0.97, nil, Compute, "from 90 % it is full"},
		{0.2, nil, Unknown, "below 60 % it has room"},
		{0.2, server(6), Queue, "below 60 % it has room"},
		{0.2, server(0), Host, "below 60 % it has room"},
		{0.75, nil, Unknown, "0 of 200 answers carry stage timings"},
	} {
		var e External
		r := untimedReport(atMinute(1), 200, 6*ms100, 8)
		r.Baseline, r.BaselineN, r.Slowdown, r.BaselineStages = ms100, 20, 6, Stages{Unattributed: ms100}
		e.Fill(&r, c.servers, deviceAt(c.busy))
		v := Classify(r, DefaultThresholds())
		if v.Cause != c.want || v.Confidence > 0.5 || !strings.Contains(strings.Join(v.Evidence, "\n"), c.says) {
			t.Errorf("busy %v, servers %v: %s (%v), want %s: %q", c.busy, c.servers, v.Cause, v.Confidence, c.want, v.Evidence)
		}
	}
}

func TestWhatIsRememberedOfTheServerFadesWithinTheHour(t *testing.T) {
	var e External
	low := untimedReport(atMinute(0), 50, ms100, 1)
	e.Fill(&low, []Aggregate{aggregate(50, 0, ms100)}, nil)
	r := untimedReport(atMinute(70), 200, 6*ms100, 6)
	r.Baseline = ms100
	e.Fill(&r, []Aggregate{aggregate(200, 4*ms100, ms100)}, nil)
	if r.BaselineStages != (Stages{}) || r.Baseline != 0 {
		t.Errorf("baseline %v %+v", r.Baseline, r.BaselineStages)
	}
}
