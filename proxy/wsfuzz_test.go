package proxy

import (
	"bytes"
	"encoding/json"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"weir/classifier"
)

// FuzzFrames feeds bytes whole and in pieces of every size: what is read must
// not depend on how they came.
func FuzzFrames(f *testing.F) {
	f.Add(append(frame(true, 0x01, []byte("he")), frame(true, 0x80, []byte("llo"))...), true, false, 3)
	f.Add(append(frame(false, 0xc2, deflated(noise(100))), frame(false, 0x88, []byte{3, 232})...), false, true, 1)
	f.Add(append(frame(true, 0x89, []byte("ping")), frame(true, 0x82, make([]byte, 70000))...), true, false, 1000)
	f.Fuzz(func(t *testing.T, b []byte, client, deflate bool, piece int) {
		read := func(piece int) (got []message, broken string) {
			r := frames{client: client, deflate: deflate, emit: func(m message) {
				if len(m.body) > keptDeflated || m.size < int64(len(m.body)) || m.cut != (m.size > int64(len(m.body))) {
					t.Fatalf("%d of %d bytes are kept, cut: %v", len(m.body), m.size, m.cut)
				}
				m.body = append([]byte{}, m.body...)
				got = append(got, m)
			}}
			for p := b; len(p) > 0; {
				n := min(piece, len(p))
				r.read(p[:n:n], time.Time{})
				p = p[n:]
			}
			return got, r.unread
		}
		whole, why := read(max(1, len(b)))
		pieces, also := read(1 + (piece&0x7fffffff)%1000)
		if why != also || !reflect.DeepEqual(whole, pieces) {
			t.Fatalf("whole %q %+v, in pieces %q %+v", why, whole, also, pieces)
		}
	})
}

// FuzzProtocols has each protocol read messages that nobody foresaw. The input
// is a sequence of messages: a byte that tells who says what, a length, a body.
func FuzzProtocols(f *testing.F) {
	for _, k := range talks {
		var b []byte
		for _, s := range k.steps {
			kind, body := byte(0), []byte(s.text)
			if s.from == ask {
				kind |= 1
			}
			if s.sound != nil {
				kind, body = kind|2, s.sound[:min(len(s.sound), 16)]
			}
			if len(body) < 256 {
				b = append(append(b, kind, byte(len(body))), body...)
			}
		}
		f.Add(b, k.path)
	}
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		for _, name := range append(protocolNames(), "") {
			fuzzSession(t, b, path, name)
		}
	})
}

func fuzzSession(t *testing.T, b []byte, path, name string) {
	var inflight, stall atomic.Int64
	base := time.Now()
	s := session{base: base, opened: base, inflight: &inflight, stall: &stall, sink: func(o *classifier.Observation) {
		checkUtterance(t, o)
	}}
	s.template.SpanID = [8]byte{1}
	s.start("/"+path, name)
	at := base
	for n := 0; len(b) >= 2; n++ {
		kind, size := b[0], min(int(b[1]), len(b)-2)
		body := b[2 : 2+size]
		b = b[2+size:]
		at = at.Add(time.Duration(kind) * time.Millisecond)
		m := message{client: kind&1 != 0, op: opText, n: 1, began: at, at: at, size: int64(size), body: body}
		if kind&2 != 0 {
			m.op, m.body = opBinary, body[:min(size, keptBinary)]
			m.size += int64(kind) << 8
			m.cut = m.size > int64(len(m.body))
		}
		if kind&0xf0 == 0xf0 {
			m.op = opClose + kind>>2&3
		}
		s.take(&m)
		if len(s.awaiting) > maxAwaiting || len(s.early) > maxEarly || len(s.marks.ring) > maxMarks || len(s.pairs.ring) > 2*maxPairs {
			t.Fatal("the session's memory grows")
		}
	}
	s.end(ending(len(path)%3), at)
	if inflight.Load() != 0 || s.open != nil || len(s.awaiting) != 0 {
		t.Fatalf("%d utterances are left under way", inflight.Load())
	}
}

func checkUtterance(t *testing.T, o *classifier.Observation) {
	u := o.Utterance
	if u == nil || u.Speech < 0 || u.FirstPartial < 0 || len(u.PartialAt) > maxPartialAt || len(u.PartialAt) > u.Partials || o.Done.Before(o.Enqueued) || o.AudioSeconds < 0 {
		t.Fatalf("%+v of %+v", u, o)
	}
	if _, err := json.Marshal(o); err != nil {
		t.Fatal(err)
	}
}

// FuzzObject compares with encoding/json wherever that takes the text, and
// else asks only that the reader ends.
func FuzzObject(f *testing.F) {
	f.Add([]byte(`{"a":"b\"c","d":[1,{"e":2}],"f":{"g":null},"h":-1.5e3,"i":true}`))
	f.Add([]byte(` { "type" : "x" , "audio" : "AAAA`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o object
		o.read(b)
		o.last("d")
		o.object("f")
		var want map[string]json.RawMessage
		if json.Unmarshal(b, &want) != nil || len(want) > 30 || bytes.ContainsRune(b, '\\') {
			return
		}
		for key, value := range want {
			if got := o.raw(key); o.n < len(o.fields) && bytes.ContainsFunc([]byte(key), func(r rune) bool { return r < ' ' || r > '~' }) == false && string(got) != string(value) {
				t.Errorf("%s: got %s, want %s in %s", key, got, value, b)
			}
		}
	})
}

func FuzzInflate(f *testing.F) {
	f.Add(deflated([]byte("hello hello hello")), deflated(noise(1000)), 5)
	f.Fuzz(func(t *testing.T, a, b []byte, keep int) {
		keep = 1 + (keep&0x7fffffff)%keptText
		var d inflater
		for _, p := range [][]byte{a, b} {
			body, size, err := d.inflate(nil, p, keep)
			if len(body) > keep || size > maxInflated+16<<10 || len(d.window) > deflateWindow || err == nil && size < int64(len(body)) {
				t.Fatalf("kept %d of %d, window %d, %v", len(body), size, len(d.window), err)
			}
		}
	})
}

// FuzzEvents: what is read of an answer must not depend on how it is cut.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("event: server-timing\ndata: queue;dur=1\n\ndata: {\"type\":\"transcript.text.done\",\"server_timing\":\"forward;dur=2\"}\r\n\r\ndata: [DONE]\r\r"), true, 3)
	f.Add([]byte(`{"text":"\"server_timing\"","server_timing" : "a;desc=\"b\""}`), false, 1)
	f.Fuzz(func(t *testing.T, b []byte, sse bool, piece int) {
		read := func(piece int) answerReader {
			a := answerReader{on: true, sse: sse}
			for p := b; len(p) > 0; {
				n := min(piece, len(p))
				a.read(p[:n])
				p = p[n:]
			}
			return a
		}
		whole, cut := read(max(1, len(b))), read(1+(piece&0x7fffffff)%50)
		if whole.count != cut.count || whole.end.IsZero() != cut.end.IsZero() || string(whole.told) != string(cut.told) {
			t.Fatalf("%d events, %q; in pieces %d, %q", whole.count, whole.told, cut.count, cut.told)
		}
		if len(whole.line) > maxEventLine || len(whole.value) > maxTimingText+1 {
			t.Fatal("more is kept than should be")
		}
	})
}
