package asrsim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const msec = time.Millisecond

var oneSecond = SynthesizeWAV(time.Second, 1)

// outcome is one request of a test as its client saw it.
type outcome struct {
	sent, ended time.Duration // since the test's start
	answer      *httptest.ResponseRecorder
	timings     map[string]timing
}

// postAll sends requests at the given times and waits for their answers.
func postAll(t *testing.T, h http.Handler, at ...time.Duration) []outcome {
	t.Helper()
	began := time.Now()
	all := make([]outcome, len(at))
	var clients sync.WaitGroup
	for i, after := range at {
		clients.Go(func() {
			time.Sleep(after)
			all[i].sent = time.Since(began)
			all[i].answer = post(t.Context(), h, oneSecond)
			all[i].ended = time.Since(began)
		})
	}
	clients.Wait()
	for i := range all {
		if v := all[i].answer.Header().Get("Server-Timing"); v != "" {
			all[i].timings = parseTiming(t, v)
		}
	}
	return all
}

func wantDur(t *testing.T, o outcome, stage string, want time.Duration) {
	t.Helper()
	if got := o.timings[stage].dur(); (got - want).Abs() > time.Microsecond {
		t.Errorf("%s took %v: want %v", stage, got, want)
	}
}

func TestEachStageTakesAsLongAsItIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := postAll(t, start(t, exact()), 0)[0]
		for stage, want := range map[string]time.Duration{
			"queue": 0, "preprocess": 10 * msec, "h2d": 3 * msec, "forward": 45 * msec,
			"d2h": msec, "postprocess": 2 * msec, "total": 61 * msec,
		} {
			wantDur(t, o, stage, want)
		}
		if o.ended != 61*msec {
			t.Errorf("the answer took %v: want 61ms", o.ended)
		}
	})
}

func TestServerTimingHasTheCanonicalForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		want := "queue;dur=0, preprocess;dur=10, h2d;dur=3.000032;bytes=32000;n=3, " +
			"forward;dur=45;batch=1;seq=50;tokens=2;sync=1, d2h;dur=1;bytes=200;n=1, postprocess;dur=2, total;dur=61.000032"
		c := exact()
		c.Bandwidth = 1e12
		o := postAll(t, start(t, c), 0)[0]
		if got := o.answer.Header().Get("Server-Timing"); got != want {
			t.Errorf("Server-Timing\n got %s\nwant %s", got, want)
		}
	})
}

func TestReportedStagesAddUpToTheWallTimeOfEveryRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := DefaultConfig()
		c.MaxBatchSize, c.PreprocessWorkers, c.Instances, c.BatchDelay, c.CopyLatency = 3, 2, 2, 4*msec, msec
		var at []time.Duration
		for i := range 60 {
			at = append(at, time.Duration(i)*7*msec)
		}
		for i, o := range postAll(t, start(t, c), at...) {
			var sum time.Duration
			for stage, m := range o.timings {
				if stage != "total" {
					sum += m.dur()
				}
			}
			wall := o.ended - o.sent
			if (sum-wall).Abs() > 10*time.Nanosecond || (o.timings["total"].dur()-wall).Abs() > time.Nanosecond {
				t.Errorf("request %d: stages %v, total %v, wall %v", i, sum, o.timings["total"].dur(), wall)
			}
		}
	})
}

func TestABatchIsNeverLargerThanItsCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize, c.BatchDelay = 8, 5*msec
		s := start(t, c)
		all := postAll(t, s, make([]time.Duration, 20)...)
		var sizes []float64
		for _, o := range all {
			sizes = append(sizes, o.timings["forward"]["batch"])
		}
		slices.Sort(sizes)
		if want := append(slices.Repeat([]float64{4}, 4), slices.Repeat([]float64{8}, 16)...); !slices.Equal(sizes, want) {
			t.Errorf("batches as the requests saw them: %v", sizes)
		}
		if got := s.Stats().Batches; got[8] != 2 || got[4] != 1 || s.Stats().Executions() != 3 {
			t.Errorf("batches by size: %v: want two of 8, one of 4", got)
		}
	})
}

func TestAFullBatchDoesNotWaitForTheDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize, c.BatchDelay = 2, time.Hour
		for _, o := range postAll(t, start(t, c), 0, 3*msec)[:1] {
			wantDur(t, o, "queue", 3*msec)
		}
	})
}

func TestTheDelayRunsFromTheOldestRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.BatchDelay = 10 * msec
		all := postAll(t, start(t, c), 0, 4*msec)
		wantDur(t, all[0], "queue", 10*msec)
		wantDur(t, all[1], "queue", 6*msec)
		for _, o := range all {
			if got := o.timings["forward"]["batch"]; got != 2 {
				t.Errorf("batch of %g: want 2", got)
			}
			wantDur(t, o, "forward", 50*msec)
		}
	})
}

func TestWhileTheExecutorWorksRequestsGatherInItsNextBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := postAll(t, start(t, exact()), 0, 5*msec, 6*msec, 7*msec)
		// The first runs from 10 to 59 ms; the second reaches the queue at 15 ms.
		wantDur(t, all[1], "queue", 44*msec)
		if got := all[3].timings["forward"]["batch"]; got != 3 {
			t.Errorf("batch of %g: want the 3 that waited", got)
		}
	})
}

func TestRequestsAreServedInTheOrderOfArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize = 1
		var at []time.Duration
		for i := range 12 {
			at = append(at, time.Duration(i)*msec)
		}
		all := postAll(t, start(t, c), at...)
		for i, o := range all {
			if want := 61*msec + time.Duration(i)*49*msec; o.ended != want {
				t.Errorf("request %d ended at %v: want %v", i, o.ended, want)
			}
		}
	})
}

func TestTheLongestAudioSetsTheForwardPassAndTheBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.ForwardPerSecond, c.BatchDelay = 10*msec, msec
		s := start(t, c)
		long := make(chan *httptest.ResponseRecorder)
		go func() { long <- post(t.Context(), s, SynthesizeWAV(3*time.Second, 1)) }()
		short := postAll(t, s, 0)[0]
		<-long
		wantDur(t, short, "forward", 80*msec)
		if h := short.timings["h2d"]; h["bytes"] != 2*3*32000 || h["n"] != 6 {
			t.Errorf("h2d moved %g bytes in %g copies: want 192000 in 6", h["bytes"], h["n"])
		}
		if seq := short.timings["forward"]["seq"]; seq != 150 {
			t.Errorf("seq is %g: want 150", seq)
		}
	})
}

func TestExecutorsShareTheLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.Instances, c.MaxBatchSize = 2, 1
		all := postAll(t, start(t, c), 0, msec)
		wantDur(t, all[0], "h2d", 3*msec)
		wantDur(t, all[1], "h2d", 5*msec) // comes 1 ms after the first, whose copies hold the link for 3
		wantDur(t, all[1], "queue", 0)
	})
}

func TestBandwidthSetsTheTimeOfACopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.Bandwidth = 3.2e6
		o := postAll(t, start(t, c), 0)[0]
		wantDur(t, o, "h2d", 13*msec)
	})
}

func TestHostWorkWaitsForAWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.PreprocessWorkers = 1
		all := postAll(t, start(t, c), 0, msec)
		wantDur(t, all[0], "preprocess", 10*msec)
		wantDur(t, all[1], "preprocess", 19*msec)
	})
}

func TestAFullQueueAnswers503WithTheLimitAndTheRemedy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize, c.MaxQueueSize = 1, 2
		s := start(t, c)
		all := postAll(t, s, 0, msec, 2*msec, 3*msec)
		refused := all[3].answer
		if refused.Code != 503 || refused.Header().Get("Retry-After") != "1" {
			t.Errorf("status %d, Retry-After %q: want 503, 1", refused.Code, refused.Header().Get("Retry-After"))
		}
		if body := refused.Body.String(); !strings.Contains(body, "max-queue-size is 2") || !strings.Contains(body, "raise it") {
			t.Errorf("the body names no limit or remedy: %s", body)
		}
		for _, o := range all[:3] {
			if o.answer.Code != 200 {
				t.Errorf("status %d of a request that found room", o.answer.Code)
			}
		}
		if st := s.Stats(); st.Rejected != 1 || st.OK != 3 || st.MaxWaiting != 2 || st.MaxInflight != 4 || st.Inflight != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestACanceledRequestLeavesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize = 1
		s := start(t, c)
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan *httptest.ResponseRecorder)
		go func() {
			time.Sleep(msec)
			gone <- post(ctx, s, oneSecond)
		}()
		time.AfterFunc(20*msec, cancel)
		all := postAll(t, s, 0, 2*msec)
		if w := <-gone; w.Body.Len() > 0 {
			t.Errorf("a client that left was answered %q", w.Body)
		}
		if want := (61 + 49) * msec; all[1].ended != want {
			t.Errorf("the one behind it ended at %v: want %v, as if it had never come", all[1].ended, want)
		}
		if st := s.Stats(); st.Canceled != 1 || st.OK != 2 || st.Executions() != 2 || st.Waiting != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestACanceledRequestStaysInABatchThatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.BatchDelay = msec
		s := start(t, c)
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan time.Time)
		go func() { post(ctx, s, oneSecond); gone <- time.Now() }()
		began := time.Now()
		time.AfterFunc(30*msec, cancel)
		o := postAll(t, s, 0)[0]
		if left := (<-gone).Sub(began); left != 30*msec {
			t.Errorf("its handler returned after %v: want 30ms", left)
		}
		wantDur(t, o, "forward", 50*msec)
		if st := s.Stats(); st.Canceled != 1 || st.OK != 1 || st.Batches[2] != 1 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestACanceledRequestGivesUpItsTurnForAWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.PreprocessWorkers = 1
		s := start(t, c)
		ctx, cancel := context.WithTimeout(t.Context(), 5*msec)
		defer cancel()
		go func() {
			time.Sleep(msec)
			post(ctx, s, oneSecond)
		}()
		all := postAll(t, s, 0, 2*msec)
		wantDur(t, all[1], "preprocess", 18*msec)
	})
}

func TestStatsAgreeWithWhatTheAnswersTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize = 2
		s := start(t, c)
		var queued time.Duration
		for _, o := range postAll(t, s, 0, msec, 2*msec, 3*msec, 4*msec) {
			queued += o.timings["queue"].dur()
		}
		st := s.Stats()
		if st.QueueWait != queued {
			t.Errorf("queue wait %v: the answers tell %v", st.QueueWait, queued)
		}
		if want := 5.0 / 3; st.MeanBatch() != want {
			t.Errorf("mean batch %g: want %g", st.MeanBatch(), want)
		}
		// One batch of 1 (49 ms) and two of 2 (6+50+1 ms), after 10 ms, before 2.
		if want := 163.0 / 175; (st.Busy-want) > 1e-6 || (want-st.Busy) > 1e-6 {
			t.Errorf("busy %g: want %g", st.Busy, want)
		}
	})
}

func TestTheSameSeedGivesTheSameTimesAndAnotherSeedOthers(t *testing.T) {
	run := func(seed uint64) (took time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			c := DefaultConfig()
			c.Seed = seed
			took = postAll(t, start(t, c), 0)[0].ended
		})
		return took
	}
	if a, b := run(7), run(7); a != b {
		t.Errorf("seed 7 gave %v and %v", a, b)
	}
	if a, b := run(7), run(8); a == b {
		t.Errorf("seeds 7 and 8 both gave %v", a)
	}
}

func TestJitterKeepsTheMean(t *testing.T) {
	c := exact()
	c.Jitter = 0.3
	s := start(t, c)
	var sum, low float64
	for range 20000 {
		f := s.luck()
		sum += f / 20000
		if f < 1 {
			low++
		}
	}
	if sum < 0.99 || sum > 1.01 {
		t.Errorf("mean factor %g: want 1", sum)
	}
	if low < 10500 { // the median of a log-normal lies below its mean
		t.Errorf("%g of 20000 factors lie below 1: want 11100 or so", low)
	}
}

func TestCloseAnswersThoseInsideAndThoseWhoComeLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := exact()
		c.MaxBatchSize = 1
		s := start(t, c)
		time.AfterFunc(30*msec, s.Close)
		for _, o := range postAll(t, s, 0, msec, 40*msec) {
			if o.answer.Code != 503 {
				t.Errorf("status %d of the request sent at %v: want 503", o.answer.Code, o.sent)
			}
			if o.ended > 51*msec {
				t.Errorf("the request sent at %v ended at %v", o.sent, o.ended)
			}
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
		if w.Code != 503 {
			t.Errorf("health is %d after Close: want 503", w.Code)
		}
		s.Close()
	})
}

func TestHealthIsGoodAndOtherPathsAreUnknown(t *testing.T) {
	s := start(t, exact())
	for target, want := range map[string]int{"GET /health": 200, "GET /asr": 405, "POST /nowhere": 404} {
		method, path, _ := strings.Cut(target, " ")
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code != want {
			t.Errorf("%s answered %d: want %d", target, w.Code, want)
		}
	}
}

// instant is a server whose work takes no time.
func instant() Config {
	return Config{MaxBatchSize: 8, Instances: 1, PreprocessWorkers: 4, Bandwidth: 1e15, ServerTiming: TimingHeader}
}

func form(t *testing.T, fields ...string) (body *bytes.Buffer, contentType string) {
	t.Helper()
	body = new(bytes.Buffer)
	w := multipart.NewWriter(body)
	for i := 0; i < len(fields); i += 2 {
		if fields[i] == "file" {
			part, err := w.CreateFormFile("file", "a.wav")
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(part, fields[i+1])
		} else if err := w.WriteField(fields[i], fields[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	return body, w.FormDataContentType()
}

func postForm(t *testing.T, h http.Handler, fields ...string) *httptest.ResponseRecorder {
	t.Helper()
	body, contentType := form(t, fields...)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/audio/transcriptions", body)
	r.Header.Set("Content-Type", contentType)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestTheTextDependsOnTheAudioOnly(t *testing.T) {
	a, b := start(t, instant()), start(t, instant())
	first := post(t.Context(), a, oneSecond).Body.String()
	if again := post(t.Context(), b, oneSecond).Body.String(); again != first {
		t.Errorf("the same bytes gave %s and %s", first, again)
	}
	if asForm := postForm(t, b, "model", "whisper-1", "file", string(oneSecond)).Body.String(); asForm != first {
		t.Errorf("raw gave %s, the form %s", first, asForm)
	}
	other := bytes.Clone(oneSecond)
	other[len(other)-1]++
	if changed := post(t.Context(), a, other).Body.String(); changed == first {
		t.Errorf("one bit of difference in the audio makes none in the text: %s", first)
	}
	var answer transcript
	if err := json.Unmarshal([]byte(first), &answer); err != nil || answer.Usage != (usage{"duration", 1}) || answer.Text == "" {
		t.Errorf("answer %s: %v", first, err)
	}
}

func TestAudioWithoutAHeaderIsTakenFor16kHz(t *testing.T) {
	w := post(t.Context(), start(t, instant()), make([]byte, 5*rawRate))
	var answer transcript
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || answer.Usage.Seconds != 5 {
		t.Errorf("answer %s, %v: want 5 seconds", w.Body, err)
	}
}

func TestRequestsWithoutAudioAreAnswered400WithTheRemedy(t *testing.T) {
	s := start(t, instant())
	plain := httptest.NewRecorder()
	s.ServeHTTP(plain, httptest.NewRequest(http.MethodPost, "/v1/audio/transcriptions", strings.NewReader("x")))
	for _, test := range []struct {
		name, remedy string
		w            *httptest.ResponseRecorder
	}{
		{"empty body", "send a WAV file", post(t.Context(), s, nil)},
		{"empty file", "send a WAV file", postForm(t, s, "file", "")},
		{"no file", "add one", postForm(t, s, "model", "x")},
		{"no form", "send multipart/form-data", plain},
	} {
		if test.w.Code != 400 || !strings.Contains(test.w.Body.String(), test.remedy) {
			t.Errorf("%s: %d %s", test.name, test.w.Code, test.w.Body)
		}
	}
	if got := s.Stats().Invalid; got != 4 {
		t.Errorf("%d invalid: want 4", got)
	}
}

func TestTimingsAreToldWhereTheConfigurationSays(t *testing.T) {
	for _, test := range []struct {
		mode            string
		stream          string
		header, trailer bool
	}{
		{TimingHeader, "false", true, false},
		{TimingTrailer, "false", false, true},
		{TimingOff, "false", false, false},
		{TimingHeader, "true", false, true},
		{TimingTrailer, "true", false, true},
		{TimingOff, "true", false, false},
	} {
		c := instant()
		c.ServerTiming = test.mode
		web := httptest.NewServer(start(t, c))
		defer web.Close()
		body, contentType := form(t, "stream", test.stream, "file", string(oneSecond))
		res, err := http.Post(web.URL+"/v1/audio/transcriptions", contentType, body)
		if err != nil {
			t.Fatal(err)
		}
		_, announced := res.Trailer["Server-Timing"]
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		header, trailer := res.Header.Get("Server-Timing") != "", res.Trailer.Get("Server-Timing") != ""
		if header != test.header || trailer != test.trailer || announced != test.trailer {
			t.Errorf("%s, stream=%s: header %t, trailer %t, announced %t", test.mode, test.stream, header, trailer, announced)
		}
	}
}

func TestAStreamedAnswerBeginsWithTheForwardPassAndEndsWithTheTimings(t *testing.T) {
	web := httptest.NewServer(start(t, exact()))
	defer web.Close()
	body, contentType := form(t, "file", string(SynthesizeWAV(4*time.Second, 1)), "stream", "true")
	res, err := http.Post(web.URL+"/v1/audio/transcriptions", contentType, body)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	began := time.Now()
	text, done := readEvents(t, res.Body)
	if waited := time.Since(began); waited < 30*msec {
		t.Errorf("the head came %v before the end: want most of the 49 ms of the batch", waited)
	}
	if text != done || len(strings.Fields(text)) != 10 {
		t.Errorf("deltas %q, done %q: want 10 words", text, done)
	}
	m := parseTiming(t, res.Trailer.Get("Server-Timing"))
	if d := m["forward"].dur(); d < 45*msec || d > 500*msec || m["total"].dur() < 61*msec {
		t.Errorf("trailer %q", res.Trailer.Get("Server-Timing"))
	}
	if got := res.Header.Get("Content-Type"); got != "text/event-stream" {
		t.Errorf("content type %q", got)
	}
}

func readEvents(t *testing.T, r io.Reader) (deltas, done string) {
	t.Helper()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var e struct{ Type, Delta, Text string }
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatalf("event %q: %v", data, err)
		}
		switch e.Type {
		case "transcript.text.delta":
			deltas += e.Delta
		case "transcript.text.done":
			done = e.Text
		default:
			t.Errorf("event of type %q", e.Type)
		}
	}
	return deltas, done
}

func TestAStreamThatTheServerCannotEndIsBrokenOff(t *testing.T) {
	c := exact()
	c.ForwardBase = time.Hour
	s := start(t, c)
	web := httptest.NewServer(s)
	defer web.Close()
	body, contentType := form(t, "file", string(oneSecond), "stream", "true")
	res, err := http.Post(web.URL+"/v1/audio/transcriptions", contentType, body)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	s.Close()
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("the stream ended as if it were whole")
	}
}

func TestAClientThatHangsUpIsCounted(t *testing.T) {
	c := exact()
	c.ForwardBase = time.Hour
	s := start(t, c)
	web := httptest.NewServer(s)
	defer web.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*msec)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, web.URL+"/asr", bytes.NewReader(oneSecond))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := http.DefaultClient.Do(r); err == nil {
		t.Fatal("the request ended")
	}
	for deadline := time.Now().Add(5 * time.Second); s.Stats().Canceled == 0; time.Sleep(msec) {
		if time.Now().After(deadline) {
			t.Fatalf("stats %+v: want one canceled", s.Stats())
		}
	}
}
