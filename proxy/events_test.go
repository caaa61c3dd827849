package proxy

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// streaming runs a server whose answer has the head fields given, is chunked,
// and goes on with each piece as told: next is closed over by the test.
func streaming(t *testing.T, fields string, pieces func(write func(string))) string {
	return script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := readHeadRaw(r); err != nil {
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\n%sTransfer-Encoding: chunked\r\n\r\n", fields)
		pieces(func(s string) { fmt.Fprintf(c, "%x\r\n%s\r\n", len(s), s) })
		fmt.Fprint(c, "0\r\n\r\n")
		_, _ = r.ReadByte()
	})
}

const eventStream = "Content-Type: text/event-stream; charset=utf-8\r\n"

// Each event is sent only when the client has the one before, so that a proxy
// which held one back would hang.
func TestEachEventReachesTheClientAsItComes(t *testing.T) {
	got := make(chan time.Time)
	var sent []time.Time
	r := newRig(t, streaming(t, eventStream, func(write func(string)) {
		for i := range 20 {
			sent = append(sent, time.Now())
			write(fmt.Sprintf("data: {\"delta\":\"%d\"}\n\n", i))
			<-got
		}
		write("data: [DONE]\n\n")
	}))
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
	c.head()
	var seen []time.Time
	for i := range 20 {
		for line := ""; !strings.HasPrefix(line, "data:"); {
			var err error
			if line, err = c.Reader.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		seen = append(seen, time.Now())
		got <- seen[i]
	}
	c.rest()
	o := r.record(0)
	e := o.Events
	if e == nil || e.Count != 21 || !e.Ended || e.First <= 0 || e.First > seen[0].Sub(o.Enqueued) || e.LongGap < e.Gap || e.Gap <= 0 {
		t.Fatalf("the events are %+v", e)
	}
	mean := 0.0
	for i := range seen {
		mean += seen[i].Sub(sent[i]).Seconds() / float64(len(seen))
	}
	t.Logf("an event takes %.0f us from the server's write to the client's read", mean*1e6)
	if told := e.First + 20*e.Gap; told > o.Done.Sub(o.Dequeued)+time.Microsecond {
		t.Errorf("the events took %v, the whole exchange %v", told, o.Done.Sub(o.Dequeued))
	}
}

func TestAnAnswerEndsWithTheEventThatSaysSo(t *testing.T) {
	for name, last := range map[string]string{
		"DONE": "data: [DONE]\n\n", "OpenAI's": "event: transcript.text.done\ndata: {\"type\":\"transcript.text.done\",\"text\":\"hello\"}\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan bool)
			r := newRig(t, streaming(t, eventStream, func(write func(string)) {
				write("data: {\"type\":\"transcript.text.delta\",\"delta\":\"he\"}\n\n: a comment is no event\n\n")
				write(last)
				<-got
				time.Sleep(30 * time.Millisecond) // the server tidies up
			}))
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			c.head()
			var text strings.Builder
			for !strings.Contains(text.String(), strings.TrimSpace(last)[6:]) {
				line, err := c.Reader.ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				text.WriteString(line)
			}
			seen := time.Now()
			close(got)
			c.rest()
			o := r.record(0)
			if e := o.Events; e == nil || e.Count != 2 || !e.Ended || o.Done.After(seen) {
				t.Errorf("%+v ended %v after the client saw its end", e, o.Done.Sub(seen))
			}
		})
	}
}

func TestTimingsInABodyAreIngestedLikeAHeader(t *testing.T) {
	const value = `queue;dur=1, forward;dur=2;batch=3, note;desc=\"a, b\"`
	plain := strings.ReplaceAll(value, `\"`, `"`)
	for name, body := range map[string]string{
		"an event":                       eventStream + "\n" + "data: {}\n\nevent: server-timing\ndata: " + plain + "\n\n",
		"the last JSON of an SSE answer": eventStream + "\n" + "data: {\"x\":1}\n\ndata: {\"text\":\"hi\",\"server_timing\":\"" + value + "\"}\n\ndata: [DONE]\n\n",
		"JSON":                           "Content-Type: application/json\r\n\n" + `{"text":"say \"server_timing\": no", "server_timing" : "` + value + `", "x": {}}`,
		"lines of JSON":                  "Content-Type: application/x-ndjson\r\n\n" + `{"server_timing":"queue;dur=9"}` + "\n" + `{"server_timing":"` + value + `"}` + "\n",
	} {
		for _, size := range []int{1, 7, 10_000} {
			t.Run(fmt.Sprint(name, " in pieces of ", size), func(t *testing.T) {
				fields, text, _ := strings.Cut(body, "\n")
				fields += "\n"
				if strings.HasPrefix(body, eventStream) {
					fields, text = eventStream, body[len(eventStream)+1:]
				}
				r := newRig(t, streaming(t, strings.TrimSuffix(fields, "\n")+"\n", func(write func(string)) {
					for s := text; s != ""; {
						n := min(size, len(s))
						write(s[:n])
						s = s[n:]
					}
				}))
				c := r.dial()
				c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
				c.head()
				c.rest()
				o := r.record(0)
				queue, _ := o.In(classifier.StageQueue)
				if o.Source != "body" || queue != time.Millisecond || o.BatchSize != 3 {
					t.Errorf("from %q: %+v", o.Source, o.Timings)
				}
			})
		}
	}
}

func TestABodyIsNotReadWhereItIsNoText(t *testing.T) {
	const body = `{"server_timing":"queue;dur=1"}`
	for name, fields := range map[string]string{
		"compressed": "Content-Type: application/json\r\nContent-Encoding: gzip\r\n", "text": "Content-Type: text/plain\r\n", "unnamed": "",
		"told already": "Content-Type: application/json\r\nServer-Timing: queue;dur=2\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, streaming(t, fields, func(write func(string)) { write(body) }))
			c := r.dial()
			c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			c.head()
			c.rest()
			if o := r.record(0); o.Source == "body" || len(o.Timings) > 1 || o.Events != nil {
				t.Errorf("it was read from %q: %+v", o.Source, o.Timings)
			}
		})
	}
}

func TestChunksAreTheEventsOfOtherAnswers(t *testing.T) {
	next := make(chan bool)
	r := newRig(t, streaming(t, "Content-Type: audio/pcm\r\n", func(write func(string)) {
		for range 5 {
			write("chunk")
			<-next
		}
	}))
	c := r.dial()
	c.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
	c.head()
	for range 5 {
		c.expect("5\r\nchunk\r\n")
		next <- true
	}
	c.rest()
	if e := r.record(0).Events; e == nil || e.Count != 5 || e.Ended || e.Gap <= 0 {
		t.Errorf("the chunks are %+v", e)
	}
}
