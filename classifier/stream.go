package classifier

import "time"

// An Utterance is what one request is on a stream: the speech from its first
// audio (or the final before) to its final result. Its record is an
// [Observation] of its own, with the identity of the session that carried it:
// Enqueued, Dequeued and Sent are the end of speech, Done is the final, so
// that Total is the final latency, the streaming form of end-to-end latency.
// An utterance that got no final ends at Done, too; without an end of speech
// its Total is 0. Durations are in weir's clock, audio in seconds of speech.
type Utterance struct {
	Protocol string // of the session, such as "vosk"
	Index    int    // in its session, from 1

	Speech       time.Duration // from the first audio to the end of speech; Enqueued less this is where it began
	FirstPartial time.Duration // from the first audio to the first partial with text; 0: none came
	Admission    time.Duration // of the session: from the handshake to the server's ready message; 0: not told
	Stall        time.Duration // during which the server took no audio
	PingRTT      time.Duration // last round trip of a client's ping to the server; 0: none

	Partials  int             // with text
	PartialAt []time.Duration // of the first of them, after the first audio
	Acks      int             // how often the server told how far it is
	Lag       float64         // seconds of audio sent that the server had not worked off when it last told; good if Acks > 0
	LagSlope  float64         // growth of Lag, seconds a second; above 0 the server is slower than real time; good if Acks > 2

	EndEstimated bool // no marker told the end of speech: it is where the audio ended that the final covers
	Unpaced      bool // audio came faster than real time: FirstPartial and Lag compare with nothing
	QueueHidden  bool // the protocol does not let waiting be seen: it is somewhere in the final latency
}

// PartialsPerSecond is the number of partials for one second of audio: it
// must not fall where latency gets better.
func (u *Utterance) PartialsPerSecond(audio float64) float64 {
	return ratio(float64(u.Partials), audio)
}

// A Session is what weir read of one WebSocket, beside the record of the
// tunnel itself.
type Session struct {
	Protocol    string // that its messages follow; "": none that weir knows
	Utterances  int
	Admission   time.Duration // from the handshake to the server's ready message; 0: not told
	Stall       time.Duration // during which the server took no bytes
	PingRTT     time.Duration // last round trip of a client's ping to the server; 0: none
	MessagesIn  int64         // from the client, control frames apart
	MessagesOut int64
	CloseCode   int    // of the first close frame; 1005: it had none; 0: no close frame came
	Unread      string // why weir stopped reading, in one word; "": it did not
	Dropped     int64  // messages that weir carried but was too slow to read
}

// Events is what weir saw in an answer that came in parts: the events of an
// SSE answer, or the chunks of another.
type Events struct {
	Count   int
	First   time.Duration // from the last byte of the request to the first event
	Gap     time.Duration // mean between two events; 0: there was one only
	LongGap time.Duration
	Ended   bool // by an event that says so, such as [DONE]
}

type utteranceJSON struct {
	Protocol     string    `json:"protocol"`
	Index        int       `json:"index"`
	Speech       float64   `json:"speech_ms"`
	FirstPartial float64   `json:"first_partial_ms,omitempty"`
	Admission    float64   `json:"admission_ms,omitempty"`
	Stall        float64   `json:"stall_ms,omitempty"`
	PingRTT      float64   `json:"ping_rtt_ms,omitempty"`
	Partials     int       `json:"partials"`
	PartialAt    []float64 `json:"partial_at_ms,omitempty"`
	Acks         int       `json:"acks,omitempty"`
	Lag          float64   `json:"lag_s,omitempty"`
	LagSlope     float64   `json:"lag_slope,omitempty"`
	EndEstimated bool      `json:"end_estimated,omitempty"`
	Unpaced      bool      `json:"unpaced,omitempty"`
	QueueHidden  bool      `json:"queue_hidden,omitempty"`
}

func (u *Utterance) json() *utteranceJSON {
	if u == nil {
		return nil
	}
	j := &utteranceJSON{
		Protocol: u.Protocol, Index: u.Index, Speech: ms(u.Speech), FirstPartial: ms(u.FirstPartial), Admission: ms(u.Admission),
		Stall: ms(u.Stall), PingRTT: ms(u.PingRTT), Partials: u.Partials, Acks: u.Acks, Lag: u.Lag, LagSlope: u.LagSlope,
		EndEstimated: u.EndEstimated, Unpaced: u.Unpaced, QueueHidden: u.QueueHidden,
	}
	for _, d := range u.PartialAt {
		j.PartialAt = append(j.PartialAt, ms(d))
	}
	return j
}

func (j *utteranceJSON) utterance() *Utterance {
	if j == nil {
		return nil
	}
	u := &Utterance{
		Protocol: j.Protocol, Index: j.Index, Speech: duration(j.Speech), FirstPartial: duration(j.FirstPartial), Admission: duration(j.Admission),
		Stall: duration(j.Stall), PingRTT: duration(j.PingRTT), Partials: j.Partials, Acks: j.Acks, Lag: j.Lag, LagSlope: j.LagSlope,
		EndEstimated: j.EndEstimated, Unpaced: j.Unpaced, QueueHidden: j.QueueHidden,
	}
	for _, x := range j.PartialAt {
		u.PartialAt = append(u.PartialAt, duration(x))
	}
	return u
}

type sessionJSON struct {
	Protocol    string  `json:"protocol,omitempty"`
	Utterances  int     `json:"utterances"`
	Admission   float64 `json:"admission_ms,omitempty"`
	Stall       float64 `json:"stall_ms,omitempty"`
	PingRTT     float64 `json:"ping_rtt_ms,omitempty"`
	MessagesIn  int64   `json:"messages_in"`
	MessagesOut int64   `json:"messages_out"`
	CloseCode   int     `json:"close_code,omitempty"`
	Unread      string  `json:"unread,omitempty"`
	Dropped     int64   `json:"dropped,omitempty"`
}

func (s *Session) json() *sessionJSON {
	if s == nil {
		return nil
	}
	return &sessionJSON{s.Protocol, s.Utterances, ms(s.Admission), ms(s.Stall), ms(s.PingRTT), s.MessagesIn, s.MessagesOut, s.CloseCode, s.Unread, s.Dropped}
}

func (j *sessionJSON) session() *Session {
	if j == nil {
		return nil
	}
	return &Session{j.Protocol, j.Utterances, duration(j.Admission), duration(j.Stall), duration(j.PingRTT), j.MessagesIn, j.MessagesOut, j.CloseCode, j.Unread, j.Dropped}
}

type eventsJSON struct {
	Count   int     `json:"count"`
	First   float64 `json:"first_ms"`
	Gap     float64 `json:"gap_ms,omitempty"`
	LongGap float64 `json:"long_gap_ms,omitempty"`
	Ended   bool    `json:"ended,omitempty"`
}

func (e *Events) json() *eventsJSON {
	if e == nil {
		return nil
	}
	return &eventsJSON{e.Count, ms(e.First), ms(e.Gap), ms(e.LongGap), e.Ended}
}

func (j *eventsJSON) events() *Events {
	if j == nil {
		return nil
	}
	return &Events{j.Count, duration(j.First), duration(j.Gap), duration(j.LongGap), j.Ended}
}
