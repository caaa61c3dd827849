package classifier

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"
)

// record is an Observation as JSON: one wall-clock instant, and durations in
// milliseconds from it, so that a record read back on another machine means
// the same. Ledger is for the reader; it is computed, never read back.
type record struct {
	TraceID      string       `json:"trace_id,omitempty"`
	SpanID       string       `json:"span_id,omitempty"`
	ParentID     string       `json:"parent_id,omitempty"`
	TraceState   string       `json:"trace_state,omitempty"`
	Sampled      bool         `json:"sampled"`
	Protocol     string       `json:"protocol"`
	Scheme       string       `json:"scheme,omitempty"`
	Class        string       `json:"class"`
	Method       string       `json:"method,omitempty"`
	Target       string       `json:"target,omitempty"`
	Host         string       `json:"host,omitempty"`
	Client       string       `json:"client,omitempty"`
	UserAgent    string       `json:"user_agent,omitempty"`
	Route        string       `json:"route,omitempty"`
	Model        string       `json:"model,omitempty"`
	Status       int          `json:"status"`
	RPCStatus    string       `json:"rpc_status,omitempty"`
	Outcome      string       `json:"outcome"`
	Error        string       `json:"error,omitempty"`
	Upgraded     bool         `json:"upgraded,omitempty"`
	Start        time.Time    `json:"start"`
	Dequeued     *float64     `json:"dequeued_ms,omitempty"`
	Sent         *float64     `json:"sent_ms,omitempty"`
	Responded    *float64     `json:"responded_ms,omitempty"`
	Total        *float64     `json:"total_ms,omitempty"`
	Queue        float64      `json:"queue_ms"`
	Deadline     float64      `json:"deadline_ms,omitempty"`
	Before       float64      `json:"before_ms,omitempty"`
	Connect      float64      `json:"connect_ms,omitempty"`
	Overhead     float64      `json:"overhead_ms,omitempty"`
	Ledger       *ledgerJSON  `json:"ledger,omitempty"`
	Waiting      int          `json:"waiting"`
	Inflight     int          `json:"inflight"`
	Limit        int          `json:"max_concurrency,omitempty"`
	Timings      []timingJSON `json:"timings,omitempty"`
	Source       string       `json:"source,omitempty"`
	ServerTotal  float64      `json:"server_total_ms,omitempty"`
	BatchSize    int          `json:"batch,omitempty"`
	SeqLen       int          `json:"seq,omitempty"`
	Tokens       int          `json:"tokens,omitempty"`
	AudioSeconds float64      `json:"audio_seconds,omitempty"`
	Load         []LoadMetric `json:"load,omitempty"`
	BytesIn      int64        `json:"bytes_in"`
	BytesOut     int64        `json:"bytes_out"`

	Utterance *utteranceJSON `json:"utterance,omitempty"`
	Session   *sessionJSON   `json:"session,omitempty"`
	Events    *eventsJSON    `json:"events,omitempty"`
}

type timingJSON struct {
	Name      string  `json:"name"`
	Stage     string  `json:"stage"`
	Dur       float64 `json:"dur_ms"`
	Bytes     int64   `json:"bytes,omitempty"`
	Count     int     `json:"n,omitempty"`
	Synced    bool    `json:"sync,omitempty"`
	Untrusted bool    `json:"untrusted,omitempty"`
}

type ledgerJSON struct {
	Before       float64 `json:"before"`
	Queue        float64 `json:"queue"`
	Overhead     float64 `json:"overhead"`
	Connect      float64 `json:"connect"`
	Upload       float64 `json:"upload"`
	ServerQueue  float64 `json:"server_queue"`
	Preprocess   float64 `json:"preprocess"`
	Transfer     float64 `json:"transfer"`
	Forward      float64 `json:"forward"`
	Postprocess  float64 `json:"postprocess"`
	Stream       float64 `json:"stream"`
	Unattributed float64 `json:"unattributed"`
	Overlap      float64 `json:"overlap,omitempty"`
}

// MarshalJSON writes the record as one line: the format of /api/requests, of
// which files for later classification are made.
func (o *Observation) MarshalJSON() ([]byte, error) {
	since := func(t time.Time) *float64 {
		if t.IsZero() {
			return nil
		}
		d := ms(t.Sub(o.Enqueued))
		return &d
	}
	r := record{
		TraceID: hexID(o.TraceID[:]), SpanID: hexID(o.SpanID[:]), ParentID: hexID(o.ParentID[:]),
		TraceState: o.TraceState, Sampled: o.Sampled,
		Protocol: o.Protocol, Scheme: o.Scheme, Class: o.Class, Method: o.Method, Target: o.Target, Host: o.Host, Client: o.Client,
		UserAgent: o.UserAgent, Route: o.Route, Model: o.Model,
		Status: o.Status, RPCStatus: o.RPCStatus, Outcome: o.Outcome.String(), Error: o.Error, Upgraded: o.Upgraded,
		Start: o.Enqueued, Dequeued: since(o.Dequeued), Sent: since(o.Sent), Responded: since(o.Responded), Total: since(o.Done),
		Queue: ms(o.QueueWait()), Deadline: ms(o.Deadline), Before: ms(o.Before), Connect: ms(o.Connect), Overhead: ms(o.Overhead),
		Waiting: o.Waiting, Inflight: o.Inflight, Limit: o.Limit,
		Source: o.Source, ServerTotal: ms(o.ServerTotal), BatchSize: o.BatchSize, SeqLen: o.SeqLen, Tokens: o.Tokens,
		AudioSeconds: o.AudioSeconds, Load: o.Load, BytesIn: o.BytesIn, BytesOut: o.BytesOut,
		Utterance: o.Utterance.json(), Session: o.Session.json(), Events: o.Events.json(),
	}
	for _, t := range o.Timings {
		r.Timings = append(r.Timings, timingJSON{t.Name, t.Stage.String(), ms(t.Dur), t.Bytes, t.Count, t.Synced, t.Untrusted})
	}
	if !o.Done.IsZero() {
		r.Ledger = o.Ledger().json()
	}
	return json.Marshal(r)
}

func (l Ledger) json() *ledgerJSON {
	return &ledgerJSON{
		Before: ms(l.Before), Queue: ms(l.Queue), Overhead: ms(l.Overhead), Connect: ms(l.Connect), Upload: ms(l.Upload),
		ServerQueue: ms(l.Stages[StageQueue]), Preprocess: ms(l.Stages[StagePreprocess]), Transfer: ms(l.Stages[StageTransfer]),
		Forward: ms(l.Stages[StageForward]), Postprocess: ms(l.Stages[StagePostprocess]),
		Stream: ms(l.Stream), Unattributed: ms(l.Unattributed), Overlap: ms(l.Overlap),
	}
}

// UnmarshalJSON reads what MarshalJSON wrote. Unknown keys are ignored, so
// that newer records can be read.
func (o *Observation) UnmarshalJSON(b []byte) error {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return err
	}
	outcome, ok := ParseOutcome(r.Outcome)
	if !ok {
		return fmt.Errorf("outcome %q is not one of ok, rejected, expired, canceled, failed", r.Outcome)
	}
	at := func(d *float64) time.Time {
		if d == nil {
			return time.Time{}
		}
		return r.Start.Add(duration(*d))
	}
	*o = Observation{
		TraceState: r.TraceState, Sampled: r.Sampled,
		Protocol: r.Protocol, Scheme: r.Scheme, Class: r.Class, Method: r.Method, Target: r.Target, Host: r.Host, Client: r.Client,
		UserAgent: r.UserAgent, Route: r.Route, Model: r.Model,
		Status: r.Status, RPCStatus: r.RPCStatus, Outcome: outcome, Error: r.Error, Upgraded: r.Upgraded,
		Enqueued: r.Start, Dequeued: at(r.Dequeued), Sent: at(r.Sent), Responded: at(r.Responded), Done: at(r.Total),
		Deadline: duration(r.Deadline), Before: duration(r.Before), Connect: duration(r.Connect), Overhead: duration(r.Overhead),
		Waiting: r.Waiting, Inflight: r.Inflight, Limit: r.Limit,
		Source: r.Source, ServerTotal: duration(r.ServerTotal), BatchSize: r.BatchSize, SeqLen: r.SeqLen, Tokens: r.Tokens,
		AudioSeconds: r.AudioSeconds, Load: r.Load, BytesIn: r.BytesIn, BytesOut: r.BytesOut,
		Utterance: r.Utterance.utterance(), Session: r.Session.session(), Events: r.Events.events(),
	}
	for _, t := range r.Timings {
		stage, ok := ParseStage(t.Stage)
		if !ok {
			return fmt.Errorf("timing %q has the unknown stage %q", t.Name, t.Stage)
		}
		o.Timings = append(o.Timings, Timing{t.Name, stage, duration(t.Dur), t.Bytes, t.Count, t.Synced, t.Untrusted})
	}
	for _, id := range []struct {
		dst  []byte
		text string
	}{{o.TraceID[:], r.TraceID}, {o.SpanID[:], r.SpanID}, {o.ParentID[:], r.ParentID}} {
		if err := parseID(id.dst, id.text); err != nil {
			return err
		}
	}
	return nil
}

func hexID(b []byte) string {
	for _, c := range b {
		if c != 0 {
			return hex.EncodeToString(b)
		}
	}
	return ""
}

func parseID(dst []byte, text string) error {
	if text == "" {
		return nil
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(dst) {
		return fmt.Errorf("id %q is not %d hexadecimal digits", text, 2*len(dst))
	}
	copy(dst, b)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// duration is the inverse of ms, to the nanosecond, within what fits.
func duration(ms float64) time.Duration {
	const limit = float64(1<<62) / float64(time.Millisecond)
	switch {
	case ms != ms:
		return 0
	case ms > limit:
		ms = limit
	case ms < -limit:
		ms = -limit
	}
	if ms < 0 {
		return time.Duration(ms*float64(time.Millisecond) - 0.5)
	}
	return time.Duration(ms*float64(time.Millisecond) + 0.5)
}
