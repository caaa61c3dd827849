package proxy

import (
	"bytes"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// A session turns the messages of one WebSocket into utterances. What a
// message means is the protocol's to say (see protocols.go); the session keeps
// the times. It belongs to one goroutine at a time, and its memory is bounded
// whatever the messages say.
type session struct {
	template  classifier.Observation // identity of the utterances' records
	base      time.Time              // when the session was enqueued: the clock of its spans
	opened    time.Time              // the server accepted the handshake
	sink      func(*classifier.Observation)
	ingest    *tracing.Ingest
	inflight  *atomic.Int64 // utterances under way in all sessions
	stall     *atomic.Int64 // ns during which the server took no bytes
	query     string
	inflaters [2]*inflater // by side; nil: not compressed, or given up

	proto   *protocol // nil: not known yet
	certain bool      // proto cannot be another any more
	class   string
	early   []message // what came before proto was known
	seen    [2]bool   // a data message came, by side
	rate    float64   // bytes of audio a second; 0: not known
	raw     *rawAudio // of protocols that frame the audio themselves
	pairs   pairs     // of protocols with one reply a frame

	open     *utterance   // takes audio
	awaiting []*utterance // speech has ended, the final is due; oldest first
	sent     float64      // seconds of audio in this session
	covered  float64      // seconds that the server told it has worked off
	marks    marks
	ping     []byte // the client's last ping that was not answered
	pinged   time.Time

	sum  classifier.Session
	fate fate
}

// The most utterances that may wait for their finals, and messages kept until
// the protocol is known.
const (
	maxAwaiting   = 64
	maxEarly      = 16
	maxEarlyBody  = 1 << 10
	maxPartialAt  = 32 // partials of an utterance whose time is kept
	maxTimingText = 8 << 10
)

// An utterance is one that has begun.
type utterance struct {
	heard, last  time.Time // first and last audio
	began        time.Time // first audio, or where in it the server heard speech
	eos          time.Time // end of speech; zero: not told yet
	fin          time.Time // final result that may not be the last
	from         float64   // where in the session's audio it begins, in seconds
	audio, first float64   // seconds; of the first message
	bytes        int64
	inflight     int
	item         string // the server's name for it
	estimated    bool   // eos was
	partials     int
	partialAt    []time.Duration
	lag          line2
	lastLag      float64
	stall        int64 // of the session when it began, ns
	timing       []byte
}

// start begins with what the request tells: the protocol that the
// configuration names, or what the path makes likely.
func (s *session) start(target, named string) {
	path, query, _ := strings.Cut(target, "?")
	s.query = query
	if p := protocolNamed(named); p != nil {
		s.become(p, true)
	} else if p := protocolAt(path); p != nil {
		s.become(p, false)
	}
}

// take reads one message.
func (s *session) take(m *message) {
	switch {
	case m.unread != "":
		s.giveUp(m.unread)
	case m.op == opClose:
		s.closed(m)
	case m.op == opPing && m.client:
		s.ping, s.pinged = append(s.ping[:0], m.body...), m.at
	case m.op == opPong && !m.client:
		if !s.pinged.IsZero() && bytes.Equal(s.ping, m.body) {
			s.sum.PingRTT, s.pinged = m.at.Sub(s.pinged), time.Time{}
		}
	case m.data() && m.deflated:
		s.inflate(m)
	case m.data():
		s.data(m)
	}
}

// inflate reads a compressed message. The buffer is its own: m's goes back to
// the pool by its owner.
func (s *session) inflate(m *message) {
	d := s.inflaters[side(m.client)]
	if d == nil {
		return
	}
	if m.cut {
		s.unreadable(m, unreadLong)
		return
	}
	keep := keptText
	if m.op == opBinary {
		keep = keptBinary
	}
	body, size, err := d.inflate(bodies.get(min(keep, 4*len(m.body))), m.body, keep)
	defer bodies.put(body)
	switch {
	case err == errBomb:
		s.unreadable(m, unreadBomb)
	case err != nil:
		s.unreadable(m, unreadDeflate)
	default:
		whole := *m
		whole.body, whole.size, whole.cut = body, size, size > int64(len(body))
		s.data(&whole)
	}
}

// unreadable gives up on a message, and on its direction if the messages to
// come refer to it.
func (s *session) unreadable(m *message, why string) {
	if d := s.inflaters[side(m.client)]; d.reset {
		s.tell(why)
		return
	}
	s.giveUpSide(side(m.client), why)
}

// lose is told that a compressed message of one side was dropped.
func (s *session) lose(side int) {
	if d := s.inflaters[side]; d != nil && !d.reset {
		s.giveUpSide(side, unreadBehind)
	}
}

func (s *session) giveUpSide(side int, why string) {
	s.inflaters[side] = nil
	s.giveUp(why)
}

// giveUp stops making sense of the session: with one direction unread, what
// the other says would be paired wrongly. Speech that is under way is lost to
// weir, not to the client, so that it counts as nothing.
func (s *session) giveUp(why string) {
	s.tell(why)
	s.forget()
	s.proto, s.certain, s.early = nil, true, nil
}

func (s *session) tell(why string) {
	if s.sum.Unread == "" {
		s.sum.Unread = why
	}
}

// forget drops the utterances under way without a record.
func (s *session) forget() {
	n := len(s.awaiting)
	if s.open != nil {
		n++
	}
	s.inflight.Add(-int64(n))
	s.open, s.awaiting = nil, nil
}

// data gives a message to the protocol, once that is known.
func (s *session) data(m *message) {
	first := !s.seen[side(m.client)]
	s.seen[side(m.client)] = true
	if !s.certain {
		if p, sure := recognise(m, first); p != nil && (sure || s.proto == nil) {
			s.become(p, sure)
		}
	}
	if s.proto == nil {
		s.keepEarly(m)
		return
	}
	s.hand(m)
}

func (s *session) hand(m *message) {
	if m.client {
		s.proto.client(s, m)
	} else {
		s.proto.server(s, m)
	}
}

// become takes the protocol for known, and reads what came before.
func (s *session) become(p *protocol, sure bool) {
	s.certain = s.certain || sure
	if s.proto != p {
		s.proto, s.rate = p, p.rate
		s.sum.Protocol = p.name
		s.class = "utterance " + p.name
		if s.template.Route != "" {
			s.class += " " + s.template.Route
		}
		if p.begin != nil {
			p.begin(s)
		}
	}
	early := s.early
	s.early = nil
	for i := range early {
		if s.proto != nil {
			s.hand(&early[i])
		}
	}
}

// keepEarly keeps the start of a message; audio joins the audio before it, but
// not the first, whose time and head count.
func (s *session) keepEarly(m *message) {
	if s.certain {
		return // given up
	}
	n := len(s.early)
	if n > 1 && s.early[n-1].join(m) {
		return
	}
	if n == maxEarly {
		s.early, s.certain = nil, true // it is none of those that weir knows
		return
	}
	kept := *m
	kept.body = append([]byte(nil), m.body[:min(len(m.body), maxEarlyBody)]...)
	kept.cut = kept.cut || len(kept.body) < len(m.body)
	s.early = append(s.early, kept)
}

// What follows is what protocols say of a message.

// ready is the server's word that it takes audio.
func (s *session) ready(m *message) {
	if s.sum.Admission == 0 {
		s.sum.Admission = max(1, m.at.Sub(s.opened))
	}
}

// audio came from the client: so many bytes of the message, at s.rate.
func (s *session) audio(m *message, bytes int64) {
	if bytes <= 0 {
		return
	}
	s.settle()
	u := s.open
	seconds := 0.0
	if s.rate > 0 {
		seconds = float64(bytes) / s.rate
	}
	if u == nil {
		u = &utterance{began: m.began, heard: m.began, from: s.sent, first: seconds / float64(max(m.n, 1)), stall: s.stall.Load()}
		u.inflight = int(s.inflight.Add(1))
		s.open = u
	}
	u.last = m.at
	u.audio += seconds
	u.bytes += bytes
	s.sent += seconds
	if s.proto.offsets {
		s.marks.add(s.sent, m.at.Sub(s.base))
	}
}

// endOfSpeech is told by the client's marker or the server's own endpoint.
func (s *session) endOfSpeech(at time.Time) *utterance {
	u := s.open
	if u == nil {
		return nil
	}
	s.open, u.eos = nil, at
	if len(s.awaiting) == maxAwaiting {
		s.emit(s.awaiting[0], at, noFinal)
	}
	s.awaiting = append(s.awaiting, u)
	return u
}

// endpoint is an end of speech that nobody marked: where the audio ended that
// the server has worked off, or else with the last audio.
func (s *session) endpoint() *utterance {
	u := s.open
	if u == nil {
		return nil
	}
	at := u.last
	if s.covered > u.from && s.covered <= s.sent {
		if d, ok := s.marks.at(s.covered); ok {
			at = s.base.Add(d)
		}
	}
	if at.Before(u.began) {
		at = u.began
	}
	s.endOfSpeech(at)
	u.estimated = true
	return u
}

// current is the utterance that the server works on.
func (s *session) current() *utterance {
	if len(s.awaiting) > 0 {
		return s.awaiting[0]
	}
	return s.open
}

// partial is a result that may change yet.
func (s *session) partial(at time.Time) { s.partialOf(s.current(), at) }

func (s *session) partialOf(u *utterance, at time.Time) {
	if u == nil {
		return
	}
	u.partials++
	if len(u.partialAt) < maxPartialAt {
		u.partialAt = append(u.partialAt, max(1, at.Sub(u.began)))
	}
}

// worked is the server's word on how many seconds of the session's audio it
// has worked off.
func (s *session) worked(seconds float64, at time.Time) {
	if seconds < 0 || seconds > s.sent+1 || s.rate == 0 {
		return // it counts from somewhere else
	}
	s.covered = max(s.covered, min(seconds, s.sent))
	s.behind(max(0, s.sent-seconds), at)
}

// behind is how far the server is behind the audio sent, in seconds.
func (s *session) behind(lag float64, at time.Time) {
	u := s.current()
	if u == nil {
		return
	}
	u.lastLag = lag
	u.lag.add(at.Sub(u.began).Seconds(), lag)
}

// final is the result of the oldest utterance that awaits one, else of the
// speech that is going on: then the server found its end. A final that is not
// sure may be followed by another for the same utterance.
func (s *session) final(m *message, sure bool) {
	if len(s.awaiting) == 0 && s.endpoint() == nil {
		return
	}
	s.finalOf(s.awaiting[0], m, sure)
}

func (s *session) finalOf(u *utterance, m *message, sure bool) {
	u.fin = m.at
	u.keepTiming(m)
	if sure {
		s.emit(u, u.fin, fate{})
	}
}

// keepTiming takes the stage timings that a result carries.
func (u *utterance) keepTiming(m *message) {
	var o object
	if o.read(m.body) {
		if text := o.text("server_timing"); text != "" && len(text) <= maxTimingText {
			u.timing = []byte(text)
		}
	}
}

// settle ends utterances whose final could have been followed by another, but
// was not.
func (s *session) settle() {
	for len(s.awaiting) > 0 && !s.awaiting[0].fin.IsZero() {
		s.emit(s.awaiting[0], s.awaiting[0].fin, fate{})
	}
}

// A fate is how an utterance, or a session, ended.
type fate struct {
	outcome classifier.Outcome
	word    string // for error.type
	status  int    // 503: the server's refusal, in the terms of HTTP
}

var (
	clientGone  = fate{classifier.Canceled, "client_gone", 0}
	serverGone  = fate{classifier.Failed, "server_reset", 0}
	serverError = fate{classifier.Failed, "server_error", 0}
	weirGone    = fate{classifier.Failed, shuttingDown, 0}
	noFinal     = fate{classifier.Failed, "no_final", 0}
)

// failed is the server's word that the utterance which awaits its final gets
// none; before there was any, that it does not serve the session.
func (s *session) failed(at time.Time) {
	if len(s.awaiting) > 0 {
		s.emit(s.awaiting[0], at, serverError)
	} else if s.open == nil && s.sum.Utterances == 0 {
		s.ended(serverError)
	}
}

// refused is the server's word that it has no room for the session.
func (s *session) refused(at time.Time, word string) {
	s.ended(fate{classifier.Failed, word, 0})
	s.finish(fate{classifier.OK, word, 503}, at)
}

// emit makes the record of an utterance that has ended.
func (s *session) emit(u *utterance, done time.Time, f fate) {
	s.remove(u)
	s.inflight.Add(-1)
	s.sum.Utterances++
	if u.eos.IsZero() {
		u.eos = done
	}
	done = later(done, u.eos)
	o := s.template
	o.Class, o.Outcome, o.Error, o.Status = s.class, f.outcome, f.word, f.status
	o.SpanID, o.ParentID = tracing.UtteranceIDs(&s.template, s.sum.Utterances)
	o.Enqueued = s.clock(u.eos)
	o.Dequeued, o.Sent, o.Done = o.Enqueued, o.Enqueued, s.clock(done)
	if f.outcome == classifier.OK {
		o.Responded = o.Done
	}
	o.Inflight, o.AudioSeconds, o.BytesIn = u.inflight, u.audio, u.bytes
	o.Utterance = s.describe(u)
	if u.timing != nil {
		s.ingest.Told(&o, u.timing)
		s.ingest.Finish(&o)
	}
	if s.sink != nil {
		s.sink(&o)
	}
}

func (s *session) describe(u *utterance) *classifier.Utterance {
	d := &classifier.Utterance{
		Protocol: s.proto.name, Index: s.sum.Utterances,
		Speech: max(0, u.eos.Sub(u.began)), Admission: s.sum.Admission, PingRTT: s.sum.PingRTT,
		Stall:    time.Duration(s.stall.Load() - u.stall),
		Partials: u.partials, PartialAt: u.partialAt,
		Acks: int(u.lag.n), Lag: u.lastLag, LagSlope: u.lag.slope(),
		EndEstimated: u.estimated, Unpaced: u.unpaced(),
		QueueHidden: s.sum.Admission == 0 && u.lag.n == 0,
	}
	if len(u.partialAt) > 0 {
		d.FirstPartial = u.partialAt[0]
	}
	return d
}

// unpaced tells whether the audio came faster than it can be spoken, by a
// fifth and by half a second more than jitter explains.
func (u *utterance) unpaced() bool {
	return u.audio-u.first > 1.2*u.last.Sub(u.heard).Seconds()+0.5
}

func (s *session) remove(u *utterance) {
	if s.open == u {
		s.open = nil
		return
	}
	for i, one := range s.awaiting {
		if one == u {
			s.awaiting = append(s.awaiting[:i], s.awaiting[i+1:]...)
			return
		}
	}
}

// clock is an instant on the session's clock, whose wall time was read once.
func (s *session) clock(t time.Time) time.Time { return s.base.Add(t.Sub(s.base)) }

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// ending is how the tunnel came to its end.
type ending uint8

const (
	bySides  ending = iota // both sides closed it
	byClient               // the client broke it off
	byServer
	byWeir // drain_timeout passed
)

// closed reads a close frame: the first tells who ends the session, and why.
func (s *session) closed(m *message) {
	if s.sum.CloseCode != 0 {
		return
	}
	s.sum.CloseCode = m.closeCode()
	if m.client {
		if s.finish(clientGone, m.at) {
			s.ended(clientGone)
		}
		return
	}
	switch code := s.sum.CloseCode; code {
	case 1000, 1001, 1005:
		s.finish(noFinal, m.at)
	case 1008, 1009, 1013: // policy, size, try again later
		s.refused(m.at, "closed_"+strconv.Itoa(code))
	default:
		f := fate{classifier.Failed, "closed", 0}
		if code < 1016 {
			f.word = "closed_" + strconv.Itoa(code)
		}
		s.ended(f)
		s.finish(f, m.at)
	}
}

// finish ends all utterances, with their finals if they have one; it tells
// whether one had none.
func (s *session) finish(f fate, at time.Time) (lost bool) {
	for len(s.awaiting) > 0 {
		if u := s.awaiting[0]; u.fin.IsZero() {
			s.emit(u, at, f)
			lost = true
		} else {
			s.emit(u, u.fin, fate{})
		}
	}
	u := s.open
	switch {
	case u == nil:
	case u.partials == 0 && s.sum.Utterances > 0 && (f == clientGone || f == noFinal):
		s.forget() // the silence after the last word
	default:
		s.emit(u, at, f)
		lost = true
	}
	return lost
}

// end closes the session when its tunnel has ended.
func (s *session) end(by ending, at time.Time) {
	f := clientGone
	switch by {
	case byServer:
		f = serverGone
	case byWeir:
		f = weirGone
	}
	if s.finish(f, at) || by != bySides && s.sum.CloseCode == 0 {
		s.ended(f)
	}
	s.forget()
}

// ended tells how the session ended, unless something told so before.
func (s *session) ended(f fate) {
	if s.fate == (fate{}) {
		s.fate = f
	}
}

// marks remember when which second of the session's audio had been sent, for
// about the last ten seconds.
type marks struct {
	ring []mark
	next int // the oldest, once the ring is full
}

type mark struct {
	seconds float64
	at      time.Duration // since the session's base
}

const (
	maxMarks    = 512
	markSpacing = 20 * time.Millisecond
)

func (k *marks) add(seconds float64, at time.Duration) {
	n := len(k.ring)
	switch {
	case n > 1 && at-k.ring[(k.next+n-2)%n].at < markSpacing:
		k.ring[(k.next+n-1)%n] = mark{seconds, at}
	case n < maxMarks:
		k.ring = append(k.ring, mark{seconds, at})
	default:
		k.ring[k.next] = mark{seconds, at}
		k.next = (k.next + 1) % n
	}
}

// at is when the audio up to there had been sent: the first mark at or beyond.
// Audio older than all marks was sent at its own pace, one hopes.
func (k *marks) at(seconds float64) (at time.Duration, ok bool) {
	const rounding = 1e-6
	n := len(k.ring)
	for i := range n {
		m := k.ring[(k.next+i)%n]
		if m.seconds < seconds-rounding {
			continue
		}
		if i == 0 && n == maxMarks {
			return m.at - time.Duration((m.seconds-seconds)*float64(time.Second)), true
		}
		return m.at, true
	}
	return 0, false
}

// line2 fits a straight line by least squares, in sums.
type line2 struct{ n, x, y, xx, xy float64 }

func (l *line2) add(x, y float64) {
	l.n++
	l.x += x
	l.y += y
	l.xx += x * x
	l.xy += x * y
}

// slope is 0 where there are fewer than three points or no spread.
func (l *line2) slope() float64 {
	d := l.n*l.xx - l.x*l.x
	if l.n < 3 || d <= 1e-9 {
		return 0
	}
	return (l.n*l.xy - l.x*l.y) / d
}
