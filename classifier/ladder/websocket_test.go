package ladder

import (
	"bufio"
	"bytes"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// peer is the server's end of a WebSocket.
type peer struct {
	net.Conn
	r *bufio.Reader
}

// receive reads one message, unmasked; nothing at the end.
func (p *peer) receive() (op byte, data []byte) {
	var head [2]byte
	if _, err := io.ReadFull(p.r, head[:]); err != nil {
		return 0, nil
	}
	n := int(head[1] & 0x7f)
	size := map[int]int{126: 2, 127: 8}[n]
	ext := make([]byte, size+4)
	if _, err := io.ReadFull(p.r, ext); err != nil || head[1]&0x80 == 0 {
		return 0, nil
	}
	switch size {
	case 2:
		n = int(binary.BigEndian.Uint16(ext))
	case 8:
		n = int(binary.BigEndian.Uint64(ext))
	}
	data = make([]byte, n)
	_, _ = io.ReadFull(p.r, data)
	for i := range data {
		data[i] ^= ext[size+i%4]
	}
	if head[0]&15 == opPong {
		return p.receive()
	}
	return head[0] & 15, data
}

func (p *peer) frame(head byte, data string) {
	b := []byte{head, byte(len(data))}
	if len(data) > 125 {
		b = binary.BigEndian.AppendUint16([]byte{head, 126}, uint16(len(data)))
	}
	_, _ = p.Write(append(b, data...))
}

// say sends a text in two frames with a ping between them.
func (p *peer) say(text string) {
	p.frame(1, text[:1])
	p.frame(0x89, "are you there")
	p.frame(0x80, text[1:])
}

// serveSocket serves one WebSocket after the other.
func serveSocket(t *testing.T, serve func(p *peer)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sum := sha1.Sum([]byte(r.Header.Get("Sec-Websocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n", base64.StdEncoding.EncodeToString(sum[:]))
		serve(&peer{conn, rw.Reader})
		_, _ = io.Copy(io.Discard, conn) // to close with bytes unread would reset the connection
	}))
	t.Cleanup(s.Close)
	return strings.Replace(s.URL, "http", "ws", 1) + "/"
}

// pcmClip is 0.55 s of audio: six chunks, the last a half.
func pcmClip() Clip {
	pcm := make([]byte, rawRate*55/100)
	for i := range pcm {
		pcm[i] = byte(i * 7)
	}
	return NewClip("a.raw", pcm)
}

// unfloat turns float samples back.
func unfloat(b []byte) (pcm []byte) {
	for i := 0; i+3 < len(b); i += 4 {
		v := math.Float32frombits(binary.LittleEndian.Uint32(b[i:]))
		pcm = binary.LittleEndian.AppendUint16(pcm, uint16(int16(v*32768)))
	}
	return pcm
}

const timed = `"server_timing":"queue;dur=1, forward;dur=2;batch=3"`

// Each server answers as its original does, from what reference/servers says.
var servers = map[string]func(p *peer) (pcm []byte){
	FunASR: func(p *peer) (pcm []byte) {
		_, begin := p.receive()
		if !bytes.Contains(begin, []byte(`"is_speaking":true`)) {
			return nil
		}
		for {
			op, m := p.receive()
			if op != opBinary {
				p.say(`{"mode":"2pass-online","text":"t"}`)
				p.say(`{"mode":"offline","text":"ten","is_final":false,` + timed + `}`)
				return pcm
			}
			pcm = append(pcm, m...)
		}
	},
	Vosk: func(p *peer) (pcm []byte) {
		p.receive()
		for {
			op, m := p.receive()
			if string(m) == `{"eof" : 1}` {
				p.say(`{"text":"ten",` + timed + `}`)
				return pcm
			}
			if op != opBinary {
				return nil
			}
			pcm = append(pcm, m...)
			p.say(`{"partial":"t"}`)
		}
	},
	Sherpa: func(p *peer) (pcm []byte) {
		for {
			_, m := p.receive()
			if string(m) == "Done" {
				p.say(`{"text":"ten",` + timed + `}`)
				p.say("Done!")
				return pcm
			}
			pcm = append(pcm, unfloat(m)...)
		}
	},
	SherpaOffline: func(p *peer) (pcm []byte) {
		_, head := p.receive()
		want := int(binary.LittleEndian.Uint32(head[4:])) / 2
		for len(pcm) < want {
			_, m := p.receive()
			pcm = append(pcm, unfloat(m)...)
		}
		p.say(`{"text":"ten",` + timed + `}`)
		return pcm
	},
	Realtime: func(p *peer) (pcm []byte) {
		p.say(`{"type":"session.created"}`)
		for {
			var e struct {
				Type, Audio, Model string
				Final              bool
			}
			_, m := p.receive()
			_ = json.Unmarshal(m, &e)
			switch {
			case e.Type == "session.update" && e.Model != "w":
				p.say(`{"type":"error"}`)
				return nil
			case e.Type == "input_audio_buffer.append":
				b, _ := base64.StdEncoding.DecodeString(e.Audio)
				pcm = append(pcm, b...)
			case e.Final:
				p.say(`{"type":"transcription.delta","delta":"t"}`)
				p.say(`{"type":"transcription.done","text":"ten",` + timed + `}`)
				return pcm
			}
		}
	},
}

func socketClient(t *testing.T, target Target) *Client {
	t.Helper()
	c, err := NewClient(target, []Clip{pcmClip()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEachWebSocketServerGetsItsAudioAndTellsItsText(t *testing.T) {
	for shape, serve := range servers {
		got := make(chan []byte, 1)
		url := serveSocket(t, func(p *peer) { got <- serve(p) })
		c := socketClient(t, Target{URL: url, Shape: shape, Expect: "ten|Done!", Fields: []Field{{"model", "w"}}, Timeout: 10 * time.Second})
		o := c.send(t.Context(), 0, time.Now(), 1)
		if failure(&o) != "" {
			t.Errorf("%s: %s", shape, failure(&o))
		}
		if pcm := <-got; !bytes.Equal(pcm, pcmClip().Data) {
			t.Errorf("%s: the server heard %d bytes of %d, or others", shape, len(pcm), len(pcmClip().Data))
		}
		if f, _ := o.In(classifier.StageForward); f != 2*time.Millisecond || o.BatchSize != 3 {
			t.Errorf("%s: forward %v, batch %d", shape, f, o.BatchSize)
		}
	}
}

func TestAPacedStreamTakesItsTimeAndItsLatencyBeginsAtTheEndOfSpeech(t *testing.T) {
	url := serveSocket(t, func(p *peer) {
		for {
			if _, m := p.receive(); string(m) == "Done" {
				time.Sleep(50 * time.Millisecond)
				p.say("Done!")
				return
			}
		}
	})
	c := socketClient(t, Target{URL: url, Shape: Sherpa, Paced: true, Timeout: 10 * time.Second})
	began := time.Now()
	o := c.send(t.Context(), 0, began, 1)
	if spoke := o.Enqueued.Sub(began); failure(&o) != "" || spoke < 550*time.Millisecond {
		t.Errorf("%s, 0.55 s of audio went out in %v", failure(&o), spoke)
	}
	if l := latency(&o); l < 50*time.Millisecond || l > 300*time.Millisecond {
		t.Errorf("latency %v, want that after the end of speech, 50 ms", l)
	}
}

func TestAWebSocketsFailuresHaveTheirWords(t *testing.T) {
	full := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }))
	defer full.Close()
	for _, c := range []struct {
		want, url, shape string
	}{
		{"status_503", full.URL, Sherpa},
		{"connection_closed", serveSocket(t, func(p *peer) { p.receive(); p.Close() }), Vosk},
		{"connection_closed", serveSocket(t, func(p *peer) { p.frame(0x88, "\x03\xf1") }), SherpaOffline},
		{"error_answer", serveSocket(t, func(p *peer) { p.say(`{"type":"error","error":"no slot"}`) }), Realtime},
		{"timeout", serveSocket(t, func(p *peer) {
			for {
				if op, _ := p.receive(); op == 0 {
					return
				}
			}
		}), FunASR},
	} {
		o := socketClient(t, Target{URL: c.url, Shape: c.shape, Timeout: 300 * time.Millisecond}).send(t.Context(), 0, time.Now(), 1)
		if got := failure(&o); got != c.want && !(c.want == "connection_closed" && got == "connection_reset") {
			t.Errorf("%s: %q, want %q", c.shape, got, c.want)
		}
	}
	if _, err := NewClient(Target{URL: "ws://h/", Shape: Vosk}, []Clip{NewClip("a.flac", flacFile(16000))}, nil); err == nil || !strings.Contains(err.Error(), "convert it to such a WAV") {
		t.Errorf("FLAC over a WebSocket: %v", err)
	}
	if err := (&Target{URL: "http://h/asr", Paced: true}).Check(); err == nil || !strings.Contains(err.Error(), "--paced is for") {
		t.Errorf("paced HTTP: %v", err)
	}
}

func FuzzWebSocketFrames(f *testing.F) {
	f.Add([]byte("\x81\x02hi"))
	f.Add([]byte("\x01\x7e\x00\x03abc\x89\x01x\x80\x01d"))
	f.Add([]byte("\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w := &webSocket{Conn: nowhere{}, r: bufio.NewReader(bytes.NewReader(b))}
		for {
			m, err := w.message()
			if err != nil {
				return
			}
			if len(m) > maxAnswer {
				t.Fatalf("a message of %d bytes", len(m))
			}
		}
	})
}

// nowhere takes what is written.
type nowhere struct{ net.Conn }

func (nowhere) Write(b []byte) (int, error) { return len(b), nil }
