package classifier

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

var start = time.Date(2026, 12, 1, 10, 0, 0, 0, time.UTC)

// aLife is a request with the given instants in ms after its start.
func aLife(dequeued, sent, responded, done int) Observation {
	at := func(n int) time.Time { return start.Add(time.Duration(n) * time.Millisecond) }
	return Observation{Enqueued: start, Dequeued: at(dequeued), Sent: at(sent), Responded: at(responded), Done: at(done)}
}

func timing(name string, s Stage, n int) Timing {
	return Timing{Name: name, Stage: s, Dur: time.Duration(n) * time.Millisecond}
}

func TestALedgerNamesWhereEachMillisecondWent(t *testing.T) {
	o := aLife(100, 130, 530, 560)
	o.Before, o.Connect, o.Overhead = 7*time.Millisecond, 5*time.Millisecond, time.Millisecond
	o.Timings = []Timing{timing("queue", StageQueue, 50), timing("h2d", StageTransfer, 10), timing("forward", StageForward, 300), timing("d2h", StageTransfer, 10),
		{Name: "forward", Stage: StageForward, Dur: time.Hour, Untrusted: true}}
	l := o.Ledger()
	want := Ledger{Before: 7, Queue: 100, Overhead: 1, Connect: 5, Upload: 24, Stream: 30, Unattributed: 30}
	want.Stages[StageQueue], want.Stages[StageTransfer], want.Stages[StageForward] = 50, 20, 300
	if got := inMS(l); got != want {
		t.Errorf("ledger %+v, want %+v", got, want)
	}
	if l.Wall() != o.Before+o.Total() {
		t.Errorf("the lines add up to %v, the wall time is %v", l.Wall(), o.Before+o.Total())
	}
}

func inMS(l Ledger) Ledger {
	v := reflect.ValueOf(&l).Elem()
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Int64 {
			f.SetInt(f.Int() / int64(time.Millisecond))
		}
	}
	for i := range l.Stages {
		l.Stages[i] /= time.Millisecond
	}
	return l
}

func TestStagesThatRanInParallelShowAsOverlap(t *testing.T) {
	o := aLife(0, 0, 100, 100)
	o.Timings = []Timing{timing("preprocess", StagePreprocess, 80), timing("forward", StageForward, 70)}
	if l := o.Ledger(); l.Overlap != 50*time.Millisecond || l.Unattributed != 0 || l.Wall() != o.Total() {
		t.Errorf("ledger %+v", l)
	}
}

func TestTheLedgerAlwaysAddsUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var o Observation
		at := func() time.Time {
			if r.IntN(5) == 0 {
				return time.Time{}
			}
			return start.Add(time.Duration(r.IntN(1e9)))
		}
		o.Enqueued, o.Dequeued, o.Sent, o.Responded, o.Done = start, at(), at(), at(), at()
		o.Connect, o.Overhead, o.Before = time.Duration(r.IntN(1e8)), time.Duration(r.IntN(1e6)), time.Duration(r.IntN(1e8))
		o.Source = []string{"", "header", "trailer"}[r.IntN(3)]
		for range r.IntN(5) {
			o.Timings = append(o.Timings, Timing{Stage: Stage(r.IntN(NumStages)), Dur: time.Duration(r.IntN(1e9)), Untrusted: r.IntN(4) == 0})
		}
		if l := o.Ledger(); l.Wall() != o.Before+o.Total() || l.Unattributed < 0 || l.Overlap < 0 {
			t.Fatalf("%+v gives %+v: %v instead of %v", o, l, l.Wall(), o.Before+o.Total())
		}
	}
}

func TestARefusedRequestWaitedUntilItsEnd(t *testing.T) {
	o := Observation{Enqueued: start, Done: start.Add(time.Second), Outcome: Expired}
	if o.QueueWait() != time.Second || o.Ledger().Queue != time.Second {
		t.Errorf("waited %v", o.QueueWait())
	}
}

func TestARecordSurvivesJSON(t *testing.T) {
	o := aLife(1, 2, 30, 31)
	o.Enqueued = o.Enqueued.Add(123456789)
	o.TraceID, o.SpanID = [16]byte{1, 2}, [8]byte{3}
	o.Protocol, o.Class, o.Method, o.Target, o.Status, o.Outcome, o.Error = "http/1.1", "POST /asr", "POST", "/asr\"<é", 503, Rejected, "queue_full"
	o.Timings = []Timing{{Name: "h2d", Stage: StageTransfer, Dur: 1900 * time.Microsecond, Bytes: 1 << 40, Count: 3, Synced: true}}
	o.Scheme, o.RPCStatus, o.Deadline = "https", "UNAVAILABLE", 5*time.Second
	o.BatchSize, o.SeqLen, o.AudioSeconds, o.BytesIn, o.Sampled = 8, 1500, 12.5, 99, true
	b, err := json.Marshal(&o)
	if err != nil {
		t.Fatal(err)
	}
	var back Observation
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(o, back) {
		t.Errorf("read back\n%+v, wrote\n%+v\nas %s", back, o, b)
	}
}

func FuzzObservationJSON(f *testing.F) {
	f.Add([]byte(`{"outcome":"ok","start":"2026-12-01T10:00:00Z","dequeued_ms":1e300,"timings":[{"stage":"forward","dur_ms":-1}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Observation
		if json.Unmarshal(b, &o) != nil {
			return
		}
		if l := o.Ledger(); l.Unattributed < 0 {
			t.Errorf("%s gives %+v", b, l)
		}
		if _, err := json.Marshal(&o); err != nil && o.Enqueued.Year() < 9999 && o.Enqueued.Year() > 0 {
			t.Errorf("%s cannot be written again: %v", b, err)
		}
	})
}
