package ladder

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"weir/classifier"
)

// sendOne sends a request over loopback and returns its record.
func sendOne(t *testing.T, h http.Handler, target Target) classifier.Observation {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	target.URL = s.URL + "/asr"
	return sendTo(t, target)
}

func sendTo(t *testing.T, target Target) classifier.Observation {
	t.Helper()
	c, err := NewClient(target, speech(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c.send(t.Context(), 0, time.Now(), 1)
}

func TestEachShapeCarriesTheAudioUnchanged(t *testing.T) {
	want := speech()[0].Data
	var got []byte
	var form map[string][]string
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind {
		case "multipart/form-data":
			file, _, err := r.FormFile("audio_file")
			if err != nil {
				t.Error(err)
				return
			}
			got, _ = io.ReadAll(file)
			form = r.MultipartForm.Value
		case "application/json":
			var v struct{ In struct{ B string } }
			if err := json.NewDecoder(r.Body).Decode(&v); err != nil {
				t.Error(err)
			}
			got, _ = base64.StdEncoding.DecodeString(v.In.B)
		default:
			got, _ = io.ReadAll(r.Body)
		}
		if r.Header.Get("X-Key") != "k" || r.Host != "asr.example" {
			t.Errorf("headers %v, host %q", r.Header, r.Host)
		}
	})
	headers := []Field{{"X-Key", "k"}, {"Host", "asr.example"}}
	for _, target := range []Target{
		{Shape: Raw}, {Shape: JSON, Template: `{"in":{"b":"{audio}"}}`},
		{Shape: Multipart, FileField: "audio_file", Fields: []Field{{"model", "whisper-1"}}},
	} {
		got, target.Headers = nil, headers
		o := sendOne(t, h, target)
		if failure(&o) != "" || !bytes.Equal(got, want) {
			t.Errorf("%s: %s, %d bytes arrived of %d", target.Shape, failure(&o), len(got), len(want))
		}
	}
	if form["model"] == nil || form["model"][0] != "whisper-1" {
		t.Errorf("form %v", form)
	}
}

func TestStagesAreReadFromHeadersAndTrailersAndWeirsWaitIsAQueue(t *testing.T) {
	o := sendOne(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		time.Sleep(60 * time.Millisecond)
		w.Header().Set("Server-Timing", "weir-queue;dur=20, queue;dur=5, forward;dur=12.5;batch=4")
	}), Target{})
	f, _ := o.In(classifier.StageForward)
	q, _ := o.In(classifier.StageQueue)
	if f != 12500*time.Microsecond || q != 5*time.Millisecond || o.BatchSize != 4 || o.QueueWait() != 20*time.Millisecond {
		t.Errorf("forward %v, server's queue %v, batch %d, weir's queue %v", f, q, o.BatchSize, o.QueueWait())
	}
	o = sendOne(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Trailer", "Server-Timing")
		fmt.Fprint(w, "text")
		time.Sleep(30 * time.Millisecond)
		w.Header().Set("Server-Timing", "forward;dur=25")
	}), Target{})
	if f, _ := o.In(classifier.StageForward); f != 25*time.Millisecond || o.Source != "trailer" {
		t.Errorf("forward %v by %q", f, o.Source)
	}
	if !o.Sent.After(o.Enqueued) || o.Responded.Before(o.Sent) || !o.Done.After(o.Responded) {
		t.Errorf("instants out of order: %v %v %v %v", o.Enqueued, o.Sent, o.Responded, o.Done)
	}
}

func TestEachKindOfFailureHasItsWord(t *testing.T) {
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	if o := sendTo(t, Target{URL: "http://" + gone.Addr().String() + "/asr"}); failure(&o) != "connection_refused" || o.Outcome != classifier.Failed {
		t.Errorf("nobody listens: %q, %v", failure(&o), o.Outcome)
	}
	hang := make(chan struct{})
	defer close(hang)
	for _, c := range []struct {
		want   string
		target Target
		h      http.HandlerFunc
	}{
		{"", Target{}, func(http.ResponseWriter, *http.Request) {}},
		{"status_503", Target{}, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }},
		{"status_302", Target{}, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", 302) }},
		{"timeout", Target{Timeout: 50 * time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-hang:
			}
		}},
		{"connection_closed", Target{}, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			panic(http.ErrAbortHandler)
		}},
		{"unexpected_answer", Target{Expect: "/text"}, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"error":"no model"}`) }},
		{"", Target{Expect: "/text"}, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"text":"ten"}`) }},
	} {
		if o := sendOne(t, c.h, c.target); failure(&o) != c.want {
			t.Errorf("got %q, want %q", failure(&o), c.want)
		}
	}
}

func TestAnExpectationIsAPointerOrAPattern(t *testing.T) {
	for _, c := range []struct {
		expect, body string
		good         bool
	}{
		{"", "anything", true},
		{"ten of", `{"text":"ten of clubs"}`, true},
		{"^ten", `{"text":"ten of clubs"}`, false},
		{"/text", `{"text":"ten"}`, true},
		{"/text", `{"text":""}`, false},
		{"/text", `{"text":null}`, false},
		{"/ok", `{"ok":false}`, false},
		{"/ok", `{"ok":true}`, true},
		{"/n", `{"n":0}`, true},
		{"/text", `ten`, false},
		{"/text=^ten", `{"text":"ten of clubs"}`, true},
		{"/text=clubs$", `{"text":"ten"}`, false},
		{"/segments/1/text", `{"segments":[{},{"text":"x"}]}`, true},
		{"/segments/2/text", `{"segments":[{},{"text":"x"}]}`, false},
		{"/segments/-1", `{"segments":[1]}`, false},
		{"/a~1b/m~0n", `{"a/b":{"m~n":"x"}}`, true},
	} {
		f, err := ParseExpect(c.expect)
		if err != nil {
			t.Fatal(err)
		}
		if good := f == nil || f([]byte(c.body)); good != c.good {
			t.Errorf("%q on %s: %v", c.expect, c.body, good)
		}
	}
	if _, err := ParseExpect("(("); err == nil || !strings.Contains(err.Error(), "write a JSON pointer") {
		t.Errorf("err %v", err)
	}
}

func FuzzExpect(f *testing.F) {
	f.Add("/a/0/~1=x", `{"a":["x"]}`)
	f.Add("x+", "xx")
	f.Fuzz(func(t *testing.T, expect, body string) {
		if e, err := ParseExpect(expect); err == nil && e != nil {
			e([]byte(body))
		}
	})
}

func TestAMistakenTargetSaysWhatToWrite(t *testing.T) {
	for _, c := range []struct {
		target Target
		want   string
	}{
		{Target{URL: "localhost:8000"}, "write http://host:port/path"},
		{Target{URL: "http://h/x", Shape: "soap"}, "use multipart, raw, json"},
		{Target{URL: "http://h/x", Shape: JSON, Template: "{audio"}, "is no JSON with {audio}"},
		{Target{URL: "http://h/x", Expect: "["}, "--expect"},
	} {
		if err := c.target.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.target, err, c.want)
		}
	}
}

// TestMain makes the test binary a worker when it is run as one.
func TestMain(m *testing.M) {
	if os.Getenv("WEIR_TEST_WORKER") != "" {
		if err := Work(context.Background(), os.Stdin, os.Stdout); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}
