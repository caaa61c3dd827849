package stages

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// ask sends one request; trailers says that its client takes them.
func ask(t *testing.T, h http.HandlerFunc, trailers bool) (res *http.Response, body string) {
	t.Helper()
	s := httptest.NewServer(Handler(h))
	defer s.Close()
	req, _ := http.NewRequest("GET", s.URL, nil)
	if trailers {
		req.Header.Set("TE", "trailers")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(text)
}

func TestAWholeAnswerTellsAllInItsHeader(t *testing.T) {
	res, body := ask(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(201)
		done := Start(r.Context(), "forward", "batch", 2, "audio", 1.5)
		_, _ = io.WriteString(w, "text")
		done("tokens", 4)
		Start(r.Context(), "a b;c")()
	}, false)
	got := res.Header.Get("Server-Timing")
	if ok, _ := regexp.MatchString(`^forward;dur=[0-9.]+;batch=2;audio=1.5;tokens=4, a_b_c;dur=[0-9.]+, total;dur=[0-9.]+$`, got); !ok || body != "text" || res.StatusCode != 201 {
		t.Errorf("%d %q, %q", res.StatusCode, got, body)
	}
}

func TestAStreamTellsAllInATrailer(t *testing.T) {
	stream := func(w http.ResponseWriter, r *http.Request) {
		Start(r.Context(), "preprocess")()
		_, _ = io.WriteString(w, "a")
		w.(http.Flusher).Flush()
		Start(r.Context(), "forward")()
		_, _ = io.WriteString(w, strings.Repeat("b", 9000))
	}
	res, body := ask(t, stream, true)
	if got := res.Trailer.Get("Server-Timing"); len(body) != 9001 || !strings.Contains(got, "preprocess;") || !strings.Contains(got, "forward;") || !strings.Contains(got, "total;") || res.Header.Get("Server-Timing") != "" {
		t.Errorf("trailer %q, header %q, %d bytes", got, res.Header.Get("Server-Timing"), len(body))
	}
	res, _ = ask(t, stream, false)
	if got := res.Header.Get("Server-Timing"); !strings.HasPrefix(got, "preprocess;dur=") || strings.Contains(got, "forward") || res.Trailer.Get("Server-Timing") != "" {
		t.Errorf("header %q", got)
	}
}

func TestManyGoroutinesAddToOneRecord(t *testing.T) {
	_, r := With(context.Background())
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { r.Add("decode", time.Millisecond, "n", int64(1)) })
	}
	wg.Wait()
	if n := strings.Count(r.Value(false), "decode;dur=1.000;n=1"); n != 50 {
		t.Errorf("%d of 50", n)
	}
	for range 1000 {
		r.Add("decode", time.Millisecond)
	}
	if n := len(r.Value(true)); n > 3000 {
		t.Errorf("the header has %d bytes", n)
	}
}

func TestWithoutARecordNothingHappens(t *testing.T) {
	Start(context.Background(), "forward")("batch", 1)
}

func BenchmarkStage(b *testing.B) {
	ctx, r := With(context.Background())
	for b.Loop() {
		Start(ctx, "forward", "batch", 8, "seq", 1500)()
		r.text, r.n = r.text[:0], 0
	}
}
