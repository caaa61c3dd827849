// Package stages tells a proxy, a browser or a trace where a request's time
// went. Copy this file into your server; it needs only the standard library.
//
//	http.ListenAndServe(":8000", stages.Handler(mux))
//	...
//	done := stages.Start(ctx, "forward", "batch", 8, "seq", 1500)
//	text := model.Run(features)
//	done("tokens", len(text))
//
// The names that weir understands: queue, preprocess, h2d, forward (or encode,
// prefill, decode), d2h, postprocess. The parameters: batch, seq, tokens, audio
// (seconds), bytes, n, sync. The stages go into the header Server-Timing if the
// handler has ended before the head is written (an answer of up to 2 KiB, or
// one written in its last statement); in any case into a trailer, if the
// answer is chunked and the client sent "TE: trailers".
package stages

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

type key struct{}

// A Record is the stages of one request. It may be used from any goroutine; a
// nil Record takes nothing.
type Record struct {
	began time.Time
	mu    sync.Mutex
	text  []byte
	n     int
}

const most = 64 // stages of one request

// With begins a record in a context.
func With(ctx context.Context) (context.Context, *Record) {
	r := &Record{began: time.Now()}
	return context.WithValue(ctx, key{}, r), r
}

// From is the record of a context's request; nil if there is none.
func From(ctx context.Context) *Record {
	r, _ := ctx.Value(key{}).(*Record)
	return r
}

// Start begins a stage; the function that it returns ends it. parameters are
// names and numbers by turns, at either end.
func Start(ctx context.Context, name string, parameters ...any) (done func(more ...any)) {
	r := From(ctx)
	began := time.Now()
	return func(more ...any) { r.Add(name, time.Since(began), append(parameters, more...)...) }
}

// Add adds a stage that was timed elsewhere, as for all requests of a batch.
func (r *Record) Add(name string, d time.Duration, parameters ...any) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n++; r.n > most {
		return
	}
	if len(r.text) > 0 {
		r.text = append(r.text, ", "...)
	}
	r.text = appendMetric(r.text, name, d)
	for i := 0; i+1 < len(parameters); i += 2 {
		r.text = append(append(append(append(r.text, ';'), token(fmt.Sprint(parameters[i]))...), '='), number(parameters[i+1])...)
	}
}

// Value is the Server-Timing value so far, with the total if all is over.
func (r *Record) Value(total bool) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := string(r.text)
	if !total {
		return text
	}
	if text != "" {
		text += ", "
	}
	return string(appendMetric([]byte(text), "total", time.Since(r.began)))
}

func appendMetric(b []byte, name string, d time.Duration) []byte {
	b = append(append(b, token(name)...), ";dur="...)
	return strconv.AppendFloat(b, float64(max(0, d))/1e6, 'f', 3, 64)
}

// token replaces what cannot stand in a header.
func token(name string) string {
	return strings.Map(func(c rune) rune {
		if c == '-' || c == '_' || c == '.' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' {
			return c
		}
		return '_'
	}, name)
}

func number(v any) string {
	switch v := v.(type) {
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case int:
		return strconv.Itoa(v)
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return token(fmt.Sprint(v))
}

// Handler gives each request a record and puts it into the answer.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, record := With(r.Context())
		out := &writer{ResponseWriter: w, record: record, trailer: strings.Contains(strings.ToLower(r.Header.Get("TE")), "trailers")}
		next.ServeHTTP(out, r.WithContext(ctx))
		out.end()
	})
}

// writer holds the head back until the body is too large to wait for, or has
// ended.
type writer struct {
	http.ResponseWriter
	record  *Record
	trailer bool
	status  int
	held    []byte
	begun   bool
}

const hold = 2 << 10 // bytes of a body that wait for the handler's end

func (w *writer) WriteHeader(status int) {
	switch {
	case status < 200:
		w.ResponseWriter.WriteHeader(status)
	case w.status == 0:
		w.status = status
	}
}

func (w *writer) Write(p []byte) (int, error) {
	if !w.begun && len(w.held)+len(p) <= hold {
		w.held = append(w.held, p...)
		return len(p), nil
	}
	if err := w.begin(false); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(p)
}

// begin writes the head, and what was held of the body.
func (w *writer) begin(whole bool) error {
	if w.begun {
		return nil
	}
	w.begun = true
	switch {
	case !whole && w.trailer && w.Header().Get("Content-Length") == "":
		w.Header().Add("Trailer", "Server-Timing")
	default:
		w.trailer = false
		if value := w.record.Value(whole); value != "" {
			w.Header().Add("Server-Timing", value)
		}
	}
	if w.status == 0 {
		w.status = http.StatusOK
	}
	w.ResponseWriter.WriteHeader(w.status)
	if len(w.held) == 0 {
		return nil
	}
	_, err := w.ResponseWriter.Write(w.held)
	return err
}

func (w *writer) end() {
	_ = w.begin(true)
	if w.trailer {
		w.Header().Set("Server-Timing", w.record.Value(true))
	}
}

// Flush lets streams begin at once.
func (w *writer) Flush() {
	_ = w.begin(false)
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap is for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }
