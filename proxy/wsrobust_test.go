package proxy

import (
	"bufio"
	"bytes"
	"compress/flate"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"weir/classifier"
)

// settled waits until the gate and the streams hold nothing any more.
func (r *rig) settled() {
	r.Helper()
	r.eventually(func() bool {
		s := r.Gate.State()
		return s.Inflight == 0 && s.Waiting == 0 && r.utterances.Load() == 0
	}, "places and utterances given back")
}

// drainTo reads all that comes, so that the other side never waits.
func drainTo(c io.Reader) { _, _ = io.Copy(io.Discard, c) }

func TestAClientThatLeavesTheQueueNeverReachesTheServer(t *testing.T) {
	hold := make(chan struct{})
	r := newRig(t, wsServer(t, websocket.CompressionDisabled, func(ctx context.Context, c *websocket.Conn) { <-hold }))
	r.Gate.SetLimits(Limits{MaxConcurrency: 1, MaxQueueSize: 10}, nil)
	first := wsDial(t, r.addr, "/ws", websocket.CompressionDisabled)
	waiter := r.dial()
	waiter.send("%s", askUpgrade("/ws"))
	r.eventually(func() bool { return r.Gate.State().Waiting == 1 }, "one waits")
	waiter.Conn.Close()
	if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" || !o.Dequeued.IsZero() || o.Session != nil {
		t.Errorf("who left the queue is recorded as %+v", o)
	}
	close(hold)
	first.CloseNow()
	r.settled()
}

// midStream has a Vosk stream under way: audio sent, the reply to come.
func midStream(t *testing.T, do func(r *rig, client, server net.Conn)) *rig {
	server := make(chan net.Conn)
	done := make(chan struct{})
	r := newRig(t, upgrade(t, "", func(c *client) { server <- c.Conn; <-done }))
	t.Cleanup(func() { close(done) })
	c := r.upgraded("/ws")
	s := <-server
	c.send("%s", frame(true, 0x81, []byte(`{"config":{"sample_rate":16000}}`)))
	c.send("%s", frame(true, 0x82, noise(3200)))
	got := make([]byte, 3200)
	if _, err := io.ReadFull(s, got); err != nil {
		t.Fatal(err)
	}
	do(r, c.Conn, s)
	return r
}

func TestAnEndInTheMiddleOfAStreamIsToldForWhatItIs(t *testing.T) {
	reset := func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() }
	for name, one := range map[string]struct {
		do      func(r *rig, client, server net.Conn)
		outcome classifier.Outcome
		word    string
	}{
		"the client is gone":  {func(_ *rig, c, _ net.Conn) { reset(c) }, classifier.Canceled, "client_gone"},
		"the client hangs up": {func(_ *rig, c, s net.Conn) { c.Close(); drainTo(s); s.Close() }, classifier.Canceled, "client_gone"},
		"the client closes": {func(_ *rig, c, s net.Conn) {
			c.Write(frame(true, 0x88, []byte{3, 232}))
			c.Close()
			drainTo(s)
			s.Close()
		}, classifier.Canceled, "client_gone"},
		"the server is gone":  {func(_ *rig, _, s net.Conn) { reset(s) }, classifier.Failed, "server_reset"},
		"the server hangs up": {func(_ *rig, c, s net.Conn) { s.Close(); drainTo(c); c.Close() }, classifier.Failed, "server_reset"},
		"the server says it failed": {func(_ *rig, c, s net.Conn) {
			s.Write(frame(false, 0x88, []byte{3, 243}))
			s.Close()
			drainTo(c)
			c.Close()
		}, classifier.Failed, "closed_1011"},
	} {
		t.Run(name, func(t *testing.T) {
			r := midStream(t, one.do)
			u, o := r.record(0), r.record(1)
			if u.Utterance == nil || u.Outcome != one.outcome || u.Error != one.word {
				t.Errorf("the utterance is %v %q: %+v", u.Outcome, u.Error, u.Utterance)
			}
			if o.Session == nil || o.Outcome != one.outcome || o.Error != one.word {
				t.Errorf("the session is %v %q: %+v", o.Outcome, o.Error, o.Session)
			}
			r.settled()
		})
	}
}

func TestAHalfClosedStreamStillGetsItsFinal(t *testing.T) {
	r := midStream(t, func(_ *rig, c, s net.Conn) {
		c.Write(frame(true, 0x81, []byte(`{"eof" : 1}`)))
		_ = c.(*net.TCPConn).CloseWrite()
		drainTo(s)
		s.Write(frame(false, 0x81, []byte(`{"partial":"he"}`)))
		s.Write(frame(false, 0x81, []byte(`{"text":"hello"}`)))
		s.Close()
		drainTo(c)
		c.Close()
	})
	if o := r.record(0); o.Outcome != classifier.OK || o.Utterance.Partials != 1 || o.Utterance.EndEstimated {
		t.Errorf("the utterance is %v %q: %+v", o.Outcome, o.Error, o.Utterance)
	}
	if o := r.record(1); o.Outcome != classifier.OK || o.Session.CloseCode != 0 {
		t.Errorf("the session is %v %q: %+v", o.Outcome, o.Error, o.Session)
	}
	r.settled()
}

func TestAHundredThousandTinyFrames(t *testing.T) {
	const frames = 100_000
	r := newRig(t, upgrade(t, "", func(c *client) { _, _ = io.Copy(c.Conn, c.Reader) }))
	c := r.upgraded("/ws")
	all := []byte(nil)
	for i := range frames {
		all = append(all, frame(true, 0x82, []byte{byte(i), byte(i >> 8)})...)
	}
	go c.Conn.Write(all)
	got := make([]byte, len(all))
	if _, err := io.ReadFull(c.Reader, got); err != nil || !bytes.Equal(got, all) {
		t.Fatalf("the bytes came back changed, %v", err)
	}
	c.Conn.Close()
	// The echo is masked, which no server's frames are: that side is unread.
	if s := r.record(0).Session; s.MessagesIn != frames || s.Unread != unreadFrames {
		t.Errorf("the session was read as %+v", s)
	}
	r.settled()
}

func TestABurstBeforeTheUpgradeIsAnsweredIsNotLost(t *testing.T) {
	const burst = 200
	release := make(chan struct{})
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = readHeadRaw(br)
		<-release
		fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		n, _ := io.Copy(io.Discard, br)
		_, _ = c.Write(frame(false, 0x81, fmt.Appendf(nil, `{"mode":"offline","text":"%d bytes"}`, n)))
	})
	r := newRig(t, addr)
	c := r.dial()
	all := append([]byte(askUpgrade("/ws")), frame(true, 0x81, []byte(`{"mode":"offline","chunk_size":[1],"is_speaking":true}`))...)
	head := len(askUpgrade("/ws"))
	for range burst {
		all = append(all, frame(true, 0x82, noise(640))...)
	}
	all = append(all, frame(true, 0x81, []byte(`{"is_speaking":false}`))...)
	go func() {
		_, _ = c.Conn.Write(all)
		_ = c.Conn.(*net.TCPConn).CloseWrite()
		close(release)
	}()
	c.head()
	if got := c.rest(); !strings.Contains(got, fmt.Sprintf("%d bytes", len(all)-head)) {
		t.Errorf("the server got %q of %d bytes", got, len(all)-head)
	}
	c.Conn.Close()
	if o := r.record(0); o.Utterance == nil || math.Abs(o.AudioSeconds-burst*640/32000.) > 1e-6 || !o.Utterance.Unpaced || o.Outcome != classifier.OK {
		t.Errorf("the utterance is %+v of %v s", o.Utterance, o.AudioSeconds)
	}
	if s := r.record(1).Session; s.MessagesIn != burst+2 || s.Dropped != 0 {
		t.Errorf("the session was read as %+v", s)
	}
	r.settled()
}

// deflated is a message's payload as permessage-deflate sends it.
func deflated(p []byte) []byte {
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, flate.BestCompression)
	_, _ = w.Write(p)
	_ = w.Flush()
	return bytes.TrimSuffix(b.Bytes(), []byte{0, 0, 0xff, 0xff})
}

func TestDeflateBombsPassAndAreNotInflated(t *testing.T) {
	bomb := deflated(make([]byte, 100<<20)) // 100 KiB
	long := make([]byte, 2*keptDeflated)
	for name, one := range map[string]struct {
		payload []byte
		params  string
		unread  string
	}{
		"a bomb":                      {bomb, "", unreadBomb},
		"a bomb, each on its own":     {bomb, "; client_no_context_takeover", unreadBomb},
		"no deflate at all":           {[]byte("\xff\xff\xff"), "", unreadDeflate},
		"more than weir would keep":   {long, "", unreadLong},
		"an extension weir lacks":     {[]byte("x"), ", x-unknown", unreadFrames},
		"deflate and nothing strange": {deflated([]byte("hello")), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			server := make(chan []byte, 1)
			r := newRig(t, upgrade(t, "Sec-WebSocket-Extensions: permessage-deflate"+one.params+"\r\n", func(c *client) {
				got, _ := io.ReadAll(c.Reader)
				server <- got
			}))
			c := r.upgraded("/ws")
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			sent := frame(true, 0xc2, one.payload)
			_, _ = c.Conn.Write(sent)
			_ = c.Conn.(*net.TCPConn).CloseWrite()
			if got := <-server; !bytes.Equal(got, sent) {
				t.Errorf("%d bytes came, %d were sent", len(got), len(sent))
			}
			c.rest()
			c.Conn.Close()
			if s := r.record(0).Session; s.Unread != one.unread {
				t.Errorf("unread is %q, want %q", s.Unread, one.unread)
			}
			runtime.ReadMemStats(&after)
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 16<<20 {
				t.Errorf("%d MiB were allocated", grown>>20)
			}
			r.settled()
		})
	}
}

func TestMessagesThatTheReaderIsTooSlowForAreCountedAndAudioIsKept(t *testing.T) {
	w := newWSReader(session{inflaters: [2]*inflater{1: {}}}, true, nil)
	w.busy = true // as if drain hung
	for range 3 * maxQueued {
		w.put(message{client: true, op: opBinary, n: 1, size: 640})
	}
	if len(w.queue) != maxQueued || w.dropped != 0 || w.queue[maxQueued-1].n != 2*maxQueued+1 || w.queue[maxQueued-1].size != 640*(2*maxQueued+1) {
		t.Errorf("%d are queued, %d dropped; the last stands for %d", len(w.queue), w.dropped, w.queue[len(w.queue)-1].n)
	}
	w.put(message{client: true, op: opText, n: 1, body: []byte("text")})
	w.put(message{client: true, op: opBinary, n: 1, deflated: true})
	w.put(message{client: true, op: opBinary, n: 1})
	if w.dropped != 3 || !w.lost[1] || w.lost[0] {
		t.Errorf("%d were dropped, deflate lost: %v", w.dropped, w.lost)
	}
}

func TestABugInTheReaderEndsTheReadingOnly(t *testing.T) {
	r := newRig(t, upgrade(t, "", func(c *client) { _, _ = io.Copy(io.Discard, c.Reader) }))
	r.Gate.Sink = func(o *classifier.Observation) {
		if o.Utterance != nil {
			panic("a bug")
		}
		r.sink(o)
	}
	c := r.upgraded("/ws")
	c.send("%s", frame(true, 0x82, sherpaUtterance(8000, 400)))
	c.send("%s", frame(true, 0x88, []byte{3, 232}))
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	c.rest()
	c.Conn.Close()
	if s := r.record(0).Session; s.Unread != unreadBug {
		t.Errorf("the session was read as %+v", s)
	}
}

func TestAnUnknownProtocolStillGetsItsSession(t *testing.T) {
	r := newRig(t, upgrade(t, "", func(c *client) {
		_, _ = c.Conn.Write(frame(false, 0x81, []byte("welcome")))
		_, _ = io.Copy(io.Discard, c.Reader)
	}))
	c := r.upgraded("/ws")
	c.expect(string(frame(false, 0x81, []byte("welcome"))))
	for range 3 * maxEarly {
		c.send("%s", frame(true, 0x82, noise(640)))
		c.send("%s", frame(true, 0x81, []byte("what is this")))
	}
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	c.rest()
	c.Conn.Close()
	o := r.record(0)
	if s := o.Session; s.Protocol != "" || s.Utterances != 0 || s.MessagesIn != 6*maxEarly || s.MessagesOut != 1 || s.Unread != "" || o.Outcome != classifier.OK || o.BytesIn == 0 {
		t.Errorf("the session was read as %+v", s)
	}
}

func TestSlowReadersStallTheSenderAndTheRecordSaysForHowLong(t *testing.T) {
	const pause = 100 * time.Millisecond
	r := newRig(t, upgrade(t, "", func(c *client) {
		time.Sleep(pause)
		_, _ = io.Copy(io.Discard, c.Reader)
	}))
	c := r.upgraded("/ws")
	for range 32 {
		_, _ = c.Conn.Write(frame(true, 0x82, make([]byte, 1<<20)))
	}
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	c.rest()
	c.Conn.Close()
	s := r.record(0).Session
	if s.Stall <= 0 || s.Stall > 20*time.Second || s.MessagesIn != 32 {
		t.Errorf("the session was read as %+v", s)
	}
}

func TestAStreamThatWeirCutsAtItsEndSaysSo(t *testing.T) {
	r := newRig(t, upgrade(t, "", func(c *client) { _, _ = io.Copy(io.Discard, c.Reader) }))
	c := r.upgraded("/ws")
	c.send("%s", frame(true, 0x82, sherpaUtterance(8000, 400)))
	r.eventually(func() bool { return r.utterances.Load() == 1 }, "an utterance under way")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Shutdown(ctx); err == nil {
		t.Error("Shutdown did not tell that it cut a stream")
	}
	for n := range 2 {
		if o := r.record(n); o.Outcome != classifier.Failed || o.Error != shuttingDown {
			t.Errorf("record %d is %v %q", n, o.Outcome, o.Error)
		}
	}
}

// A connection whose descriptor is out of reach, as under TLS.
func TestAPumpReadsAnyConnection(t *testing.T) {
	from, client := net.Pipe()
	to, server := net.Pipe()
	p := pump{from: &end{Conn: from}, to: &end{Conn: to}, tap: &frames{client: true, emit: func(message) {}}}
	p.from.borrowReader()
	done := make(chan struct{})
	go func() { p.run(); to.Close(); close(done) }()
	want := frame(true, 0x82, noise(100_000))
	go func() { _, _ = client.Write(want); client.Close() }()
	got, err := io.ReadAll(server)
	<-done
	if !bytes.Equal(got, want) || err != nil || p.moved != int64(len(want)) || p.tap.unread != "" {
		t.Errorf("%d of %d bytes came through, %v", len(got), len(want), err)
	}
}
