package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"weir/classifier"
)

// wsServer runs a WebSocket server of another maker's; do has the connection
// until it returns.
func wsServer(t *testing.T, mode websocket.CompressionMode, do func(ctx context.Context, c *websocket.Conn)) string {
	return serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{CompressionMode: mode, CompressionThreshold: 1, InsecureSkipVerify: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(-1)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		do(ctx, c)
	})
}

// wsDial connects to an address through the library's client.
func wsDial(t *testing.T, addr, path string, mode websocket.CompressionMode) *websocket.Conn {
	t.Helper()
	c, _, err := websocket.Dial(wsContext(t), "ws://"+addr+path, &websocket.DialOptions{CompressionMode: mode, CompressionThreshold: 1})
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadLimit(-1)
	t.Cleanup(func() { c.CloseNow() })
	return c
}

func wsContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// echo sends every message back until the client closes.
func echoWS(ctx context.Context, c *websocket.Conn) {
	for {
		kind, r, err := c.Reader(ctx)
		if err != nil {
			return
		}
		w, err := c.Writer(ctx, kind)
		if err != nil {
			return
		}
		if _, err := io.Copy(w, r); err != nil || w.Close() != nil {
			return
		}
	}
}

var compressions = map[string]websocket.CompressionMode{
	"plain": websocket.CompressionDisabled, "deflate": websocket.CompressionContextTakeover, "deflate, each on its own": websocket.CompressionNoContextTakeover,
}

func TestAWebSocketIsEchoedThroughWeirAndReadBesideIt(t *testing.T) {
	for name, mode := range compressions {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, wsServer(t, mode, echoWS))
			c, ctx := wsDial(t, r.addr, "/ws", mode), wsContext(t)
			sound := bytes.Repeat([]byte("sound is repetition, "), 50_000) // 1 MiB
			sizes := []int{0, 1, 125, 126, 127, 65535, 65536, len(sound)}
			for _, n := range sizes {
				if err := c.Write(ctx, websocket.MessageBinary, sound[:n]); err != nil {
					t.Fatal(err)
				}
				kind, got, err := c.Read(ctx)
				if err != nil || kind != websocket.MessageBinary || !bytes.Equal(got, sound[:n]) {
					t.Fatalf("%d bytes came back as %d, %v, %v", n, len(got), kind, err)
				}
			}
			if err := c.Close(4321, "enough"); err != nil {
				t.Error(err)
			}
			o := r.record(0)
			if s := o.Session; s == nil || s.Unread != "" || s.Dropped != 0 || s.MessagesIn != int64(len(sizes)) || s.MessagesOut != int64(len(sizes)) || s.CloseCode != 4321 {
				t.Errorf("the session was read as %+v", s)
			}
			if o.Outcome != classifier.OK || o.Error != "" || !o.Upgraded {
				t.Errorf("the record is %+v", o)
			}
		})
	}
}

func TestMessagesInManyFramesAreOneMessage(t *testing.T) {
	for name, mode := range compressions {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, wsServer(t, mode, echoWS))
			c, ctx := wsDial(t, r.addr, "/ws", mode), wsContext(t)
			w, err := c.Writer(ctx, websocket.MessageText)
			if err != nil {
				t.Fatal(err)
			}
			var want strings.Builder
			for range 100 {
				_, _ = io.WriteString(w, strings.Repeat("piece ", 100))
				want.WriteString(strings.Repeat("piece ", 100))
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if _, got, err := c.Read(ctx); err != nil || string(got) != want.String() {
				t.Fatalf("%d bytes came back, want %d: %v", len(got), want.Len(), err)
			}
			c.Close(websocket.StatusNormalClosure, "")
			if s := r.record(0).Session; s.MessagesIn != 1 || s.MessagesOut != 1 || s.Unread != "" || s.CloseCode != 1000 {
				t.Errorf("the session was read as %+v", s)
			}
		})
	}
}

func TestCloseCodesPassBothWays(t *testing.T) {
	for _, code := range []websocket.StatusCode{1000, 1001, 1003, 1008, 1009, 1011, 3000, 4999} {
		t.Run(code.String(), func(t *testing.T) { testCloseCode(t, code) })
	}
}

func testCloseCode(t *testing.T, code websocket.StatusCode) {
	r := newRig(t, wsServer(t, websocket.CompressionDisabled, func(ctx context.Context, c *websocket.Conn) {
		if _, text, err := c.Read(ctx); err == nil && string(text) == "you close" {
			c.Close(code, "because")
			return
		}
		_, _, err := c.Read(ctx)
		var e websocket.CloseError
		if !errors.As(err, &e) || e.Code != code || e.Reason != "because" {
			t.Errorf("the server saw %v, want code %d", err, code)
		}
	}))
	ctx := wsContext(t)
	c := wsDial(t, r.addr, "/ws", websocket.CompressionDisabled)
	_ = c.Write(ctx, websocket.MessageText, []byte("you close"))
	_, _, err := c.Read(ctx)
	var e websocket.CloseError
	if !errors.As(err, &e) || e.Code != code || e.Reason != "because" {
		t.Errorf("the client saw %v, want code %d", err, code)
	}
	c = wsDial(t, r.addr, "/ws", websocket.CompressionDisabled)
	_ = c.Write(ctx, websocket.MessageText, []byte("I close"))
	if err := c.Close(code, "because"); err != nil {
		t.Error(err)
	}
	for n := range 2 {
		if s := r.record(n).Session; s.CloseCode != int(code) {
			t.Errorf("the record says %d, want %d", s.CloseCode, code)
		}
	}
}

func TestPingsPassAndTellTheRoundTrip(t *testing.T) {
	const pause = 30 * time.Millisecond
	r := newRig(t, wsServer(t, websocket.CompressionDisabled, func(ctx context.Context, c *websocket.Conn) {
		time.Sleep(pause) // the library answers pings as it reads
		echoWS(ctx, c)
	}))
	c, ctx := wsDial(t, r.addr, "/ws", websocket.CompressionDisabled), wsContext(t)
	go c.Read(ctx)
	began := time.Now()
	if err := c.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	c.CloseNow()
	if d := r.record(0).Session.PingRTT; d <= 0 || d > took {
		t.Errorf("the round trip is %v, the client measured %v", d, took)
	}
}

func TestRealFramesAreNotHeldUpByAReaderThatCannotReadThem(t *testing.T) {
	for name, c := range map[string]struct{ say, unread string }{
		"no frames at all":            {"GARBAGE and more of it, none of it a frame", unreadFrames},
		"a frame without its mask":    {"\x81\x02hi", unreadFrames},
		"a continuation of nothing":   {"\x80\x82mask\x05\x08", unreadFrames},
		"a control frame in pieces":   {"\x09\x80mask", unreadFrames},
		"a control frame too long":    {"\x89\xfe\x00\x80mask" + strings.Repeat("x", 128), unreadFrames},
		"an unknown opcode":           {"\x83\x80mask", unreadFrames},
		"compression nobody agreed":   {"\xc1\x80mask", unreadFrames},
		"a length beyond all lengths": {"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xffmask", unreadFrames},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, upgrade(t, "", func(c *client) { _, _ = io.Copy(c.Conn, c.Reader) }))
			k := r.upgraded("/ws")
			k.send("%s", c.say)
			k.expect(c.say)
			k.send("and on it goes")
			k.expect("and on it goes")
			k.Conn.Close()
			o := r.record(0)
			if o.Session.Unread != c.unread {
				t.Errorf("unread is %q, want %q", o.Session.Unread, c.unread)
			}
		})
	}
}
