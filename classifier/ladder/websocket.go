package ladder

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha1"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"weir/classifier"
)

// The shapes that stream audio over a WebSocket, one connection an utterance.
const (
	FunASR        = "funasr"         // JSON that begins, 16-bit samples, JSON that ends
	Vosk          = "vosk"           // a reply for each message
	Sherpa        = "sherpa"         // float samples, Done, results until Done!
	SherpaOffline = "sherpa-offline" // length and float samples, one result
	Realtime      = "realtime"       // OpenAI's realtime events, as vLLM serves them
)

// dialect is how one kind of server wants its audio.
type dialect struct {
	begin  func(t *Target, c *Clip) []outgoing
	chunk  func(pcm []byte) outgoing
	end    []outgoing
	final  func(m []byte, seen, sent int) bool // m is the answer that ends the utterance
	failed func(m []byte) bool                 // m tells of an error; nil: none does
}

// outgoing is one message.
type outgoing struct {
	binary bool
	data   []byte
}

func text(s string) outgoing { return outgoing{data: []byte(s)} }

var dialects = map[string]dialect{
	FunASR: {
		begin: func(_ *Target, c *Clip) []outgoing {
			name, _ := json.Marshal(c.Name)
			return []outgoing{text(`{"mode":"offline","chunk_size":[5,10,5],"wav_name":` + string(name) + `,"wav_format":"pcm","audio_fs":16000,"is_speaking":true}`)}
		},
		chunk: func(pcm []byte) outgoing { return outgoing{true, pcm} },
		end:   []outgoing{text(`{"is_speaking":false}`)},
		// The C++ server says is_final false in its only answer; 2pass servers
		// send others before the one with the mode of the second pass.
		final: func(m []byte, _, _ int) bool {
			var v struct{ Mode string }
			return json.Unmarshal(m, &v) == nil && (v.Mode == "" || strings.HasSuffix(v.Mode, "offline"))
		},
	},
	Vosk: {
		begin: func(*Target, *Clip) []outgoing { return []outgoing{text(`{"config":{"sample_rate":16000}}`)} },
		chunk: func(pcm []byte) outgoing { return outgoing{true, pcm} },
		end:   []outgoing{text(`{"eof" : 1}`)},
		final: func(_ []byte, seen, sent int) bool { return seen > sent },
	},
	Sherpa: {
		chunk: func(pcm []byte) outgoing { return outgoing{true, floats(pcm)} },
		end:   []outgoing{text("Done")},
		final: func(m []byte, _, _ int) bool { return string(m) == "Done!" },
	},
	SherpaOffline: {
		begin: func(_ *Target, c *Clip) []outgoing {
			pcm, _ := c.samples()
			head := binary.LittleEndian.AppendUint32(nil, 16000)
			return []outgoing{{true, binary.LittleEndian.AppendUint32(head, uint32(2*len(pcm)))}}
		},
		chunk: func(pcm []byte) outgoing { return outgoing{true, floats(pcm)} },
		final: func([]byte, int, int) bool { return true },
	},
	Realtime: {
		begin: func(t *Target, _ *Clip) []outgoing {
			update := map[string]any{"type": "session.update"}
			for _, f := range t.Fields {
				update[f.Name] = f.Value
			}
			b, _ := json.Marshal(update)
			return []outgoing{{data: b}, text(`{"type":"input_audio_buffer.commit","final":false}`)}
		},
		chunk: func(pcm []byte) outgoing {
			return text(`{"type":"input_audio_buffer.append","audio":"` + base64.StdEncoding.EncodeToString(pcm) + `"}`)
		},
		end:    []outgoing{text(`{"type":"input_audio_buffer.commit","final":true}`)},
		final:  func(m []byte, _, _ int) bool { return eventType(m) == "transcription.done" },
		failed: func(m []byte) bool { return eventType(m) == "error" },
	},
}

func eventType(m []byte) string {
	var v struct{ Type string }
	_ = json.Unmarshal(m, &v) // what is no JSON is no event
	return v.Type
}

// floats turns 16-bit samples into 32-bit floats from -1 to 1.
func floats(pcm []byte) []byte {
	b := make([]byte, 0, 2*len(pcm))
	for i := 0; i+1 < len(pcm); i += 2 {
		v := float32(int16(binary.LittleEndian.Uint16(pcm[i:]))) / 32768
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// samples are the clip's 16-bit samples, mono, 16 kHz.
func (c *Clip) samples() ([]byte, error) {
	if strings.HasPrefix(c.Type, "audio/L16") {
		return c.Data, nil
	}
	if c.Type == "audio/wav" {
		if rate, at, n := wavData(c.Data); rate == rawRate {
			return c.Data[at : at+n&^1], nil
		}
	}
	return nil, fmt.Errorf("audio %q cannot be streamed: WebSocket servers take samples of 16 kHz, 16 bit, mono; convert it to such a WAV file", c.Name)
}

// chunkBytes is 100 ms of samples.
const chunkBytes = rawRate / 10

// errAnswer tells that the server answered with an error of its own.
var errAnswer = errors.New("the server answered with an error")

// stream sends one utterance and waits for its final answer. If it is paced,
// the audio goes out at the speed of speech, and the request begins, for all
// statistics, when the last of it was sent: the time before is the speaker's.
func (c *Client) stream(ctx context.Context, b *body, o *classifier.Observation) ([]byte, error) {
	o.Protocol = "websocket"
	began := time.Now()
	w, err := c.dial(ctx, o)
	if err != nil || w == nil {
		return nil, err
	}
	defer w.Close()
	defer context.AfterFunc(ctx, func() { w.Close() })()
	o.Connect = time.Since(began)
	d := dialects[c.target.Shape]
	pcm := b.content
	answers := w.listen(&d, (len(pcm)+chunkBytes-1)/chunkBytes)
	sendErr := c.speak(ctx, w, &d, b, pcm)
	o.Sent = time.Now()
	if c.target.Paced {
		o.Enqueued, o.Dequeued, o.Connect = o.Sent, o.Sent, 0
	}
	a := <-answers
	o.Responded, o.BytesOut, o.Status = time.Now(), a.bytes, http.StatusOK
	if a.err != nil {
		return nil, errors.Join(ctx.Err(), a.err, sendErr)
	}
	var timing struct {
		ServerTiming string `json:"server_timing"`
	}
	_ = w.frame(opClose, []byte{3, 232}) // 1000, normal; what comes of it changes nothing
	if json.Unmarshal(a.final, &timing) == nil && timing.ServerTiming != "" {
		c.ingest.Trailer(o, []byte("server-timing"), []byte(timing.ServerTiming))
	}
	return a.final, nil
}

// speak sends all of an utterance's messages.
func (c *Client) speak(ctx context.Context, w *webSocket, d *dialect, b *body, pcm []byte) error {
	if d.begin != nil {
		for _, m := range d.begin(c.target, b.clip) {
			if err := w.send(m); err != nil {
				return err
			}
		}
	}
	began := time.Now()
	for at := 0; at < len(pcm); at += chunkBytes {
		end := min(at+chunkBytes, len(pcm))
		if c.target.Paced {
			// A chunk exists once it was spoken.
			if !sleep(ctx, time.Duration(float64(end)/rawRate*float64(time.Second))-time.Since(began)) {
				return ctx.Err()
			}
		}
		if err := w.send(d.chunk(pcm[at:end])); err != nil {
			return err
		}
	}
	for _, m := range d.end {
		if err := w.send(m); err != nil {
			return err
		}
	}
	return nil
}

// webSocket is the client's end of RFC 6455, without extensions.
type webSocket struct {
	net.Conn
	r  *bufio.Reader
	mu sync.Mutex // of writing: an answer to a ping may fall between messages
}

// dial opens a connection. Where the server refuses the upgrade, the status is
// noted and w is nil.
func (c *Client) dial(ctx context.Context, o *classifier.Observation) (w *webSocket, err error) {
	u, err := url.Parse(c.target.URL)
	if err != nil {
		return nil, err
	}
	conn, err := dialURL(ctx, u)
	if err != nil {
		return nil, err
	}
	if d, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(d)
	}
	w = &webSocket{Conn: conn, r: bufio.NewReader(conn)}
	o.Status, err = c.upgrade(ctx, w, u, o)
	if err != nil || o.Status != http.StatusSwitchingProtocols {
		conn.Close()
		return nil, err
	}
	return w, nil
}

func dialURL(ctx context.Context, u *url.URL) (net.Conn, error) {
	secure := u.Scheme == "wss" || u.Scheme == "https"
	port := u.Port()
	if port == "" {
		port = map[bool]string{true: "443", false: "80"}[secure]
	}
	address := net.JoinHostPort(u.Hostname(), port)
	if secure {
		return (&tls.Dialer{Config: &tls.Config{ServerName: u.Hostname()}}).DialContext(ctx, "tcp", address)
	}
	return (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", address)
}

func (c *Client) upgrade(ctx context.Context, w *webSocket, u *url.URL, o *classifier.Observation) (status int, err error) {
	at := *u
	at.Scheme = strings.Replace(strings.Replace(u.Scheme, "wss", "https", 1), "ws", "http", 1)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return 0, err
	}
	c.target.apply(r, "")
	r.Header.Del("Content-Type")
	var nonce [16]byte
	rand.Read(nonce[:])
	key := base64.StdEncoding.EncodeToString(nonce[:])
	for name, v := range map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-Websocket-Version": "13", "Sec-Websocket-Key": key} {
		r.Header.Set(name, v)
	}
	if c.target.Shape == FunASR {
		r.Header.Set("Sec-Websocket-Protocol", "binary") // its servers want it
	}
	if c.target.Admin != "" {
		r.Header.Set("Traceparent", "00-"+hex.EncodeToString(o.TraceID[:])+"-"+hex.EncodeToString(o.SpanID[:])+"-01")
	}
	if err := r.Write(w); err != nil {
		return 0, err
	}
	res, err := http.ReadResponse(w.r, r)
	if err != nil {
		return 0, err
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		res.Body.Close()
		return res.StatusCode, nil
	}
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	if res.Header.Get("Sec-Websocket-Accept") != base64.StdEncoding.EncodeToString(sum[:]) {
		return 0, errors.New("the server's handshake is not a WebSocket's")
	}
	return res.StatusCode, nil
}

// Opcodes of RFC 6455.
const (
	opContinue = 0
	opText     = 1
	opBinary   = 2
	opClose    = 8
	opPing     = 9
	opPong     = 10
)

func (w *webSocket) send(m outgoing) error {
	op := byte(opText)
	if m.binary {
		op = opBinary
	}
	return w.frame(op, m.data)
}

// frame writes one frame, masked as a client must.
func (w *webSocket) frame(op byte, data []byte) error {
	b := make([]byte, 0, len(data)+14)
	b = append(b, 0x80|op)
	switch n := len(data); {
	case n < 126:
		b = append(b, 0x80|byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 0x80|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 0x80|127), uint64(n))
	}
	var mask [4]byte
	rand.Read(mask[:])
	b = append(b, mask[:]...)
	for i, c := range data {
		b = append(b, c^mask[i%4])
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.Write(b)
	return err
}

// readFrame reads one frame's head and payload.
func readFrame(r io.Reader) (op byte, last bool, data []byte, err error) {
	var head [14]byte
	if _, err = io.ReadFull(r, head[:2]); err != nil {
		return 0, false, nil, err
	}
	op, last = head[0]&15, head[0]&0x80 != 0
	if head[0]&0x70 != 0 || head[1]&0x80 != 0 {
		return 0, false, nil, errors.New("the server sent a frame with reserved bits or a mask")
	}
	n := uint64(head[1] & 0x7f)
	if n >= 126 {
		size := 2 + 6*int(n-126)
		if _, err = io.ReadFull(r, head[2:2+size]); err != nil {
			return 0, false, nil, err
		}
		n = 0
		for _, b := range head[2 : 2+size] {
			n = n<<8 | uint64(b)
		}
	}
	if n > maxAnswer || op >= opClose && (n > 125 || !last) {
		return 0, false, nil, fmt.Errorf("the server sent a frame of %d bytes", n)
	}
	data = make([]byte, n)
	_, err = io.ReadFull(r, data)
	return op, last, data, err
}

// message reads the next whole message, and answers pings on the way.
func (w *webSocket) message() (data []byte, err error) {
	for {
		op, last, part, err := readFrame(w.r)
		if err != nil {
			return nil, err
		}
		switch op {
		case opPing:
			if err := w.frame(opPong, part); err != nil {
				return nil, err
			}
		case opPong:
		case opClose:
			return nil, io.EOF
		case opText, opBinary, opContinue:
			if data = append(data, part...); len(data) > maxAnswer {
				return nil, fmt.Errorf("the server sent a message of more than %d bytes", maxAnswer)
			}
			if last {
				return data, nil
			}
		default:
			return nil, fmt.Errorf("the server sent a frame with the unknown opcode %d", op)
		}
	}
}

// answer is what came of an utterance. final is the last message with content.
type answer struct {
	final []byte
	bytes int64
	err   error
}

// listen reads until the utterance's final answer; sent is the number of its
// chunks.
func (w *webSocket) listen(d *dialect, sent int) <-chan answer {
	out := make(chan answer, 1)
	go func() {
		var a answer
		for seen := 1; ; seen++ {
			m, err := w.message()
			if err != nil {
				a.err = err
				break
			}
			a.bytes += int64(len(m))
			if d.failed != nil && d.failed(m) {
				a.err = errAnswer
				break
			}
			if json.Valid(m) {
				a.final = m
			}
			if d.final(m, seen, sent) {
				break
			}
		}
		out <- a
	}()
	return out
}
