package asrsim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// life is one request in the server. The instants tile its time: each stage
// ends where the next begins, so the stages add up to the total.
type life struct {
	audio
	read, decoded time.Time // body read; on its way to the queue
	exec          *execution
	formatted     time.Time
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	select {
	case <-s.stop:
		http.Error(w, errClosed.Error(), http.StatusServiceUnavailable)
	default:
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	}
}

func (s *Server) asr(w http.ResponseWriter, r *http.Request) {
	defer s.enter()()
	a, err := hear(r.Body)
	if err != nil {
		s.refuse(w, r, badRequest{err})
		return
	}
	s.transcribe(w, r, a, false)
}

func (s *Server) transcriptions(w http.ResponseWriter, r *http.Request) {
	defer s.enter()()
	a, stream, err := readForm(r)
	if err != nil {
		s.refuse(w, r, badRequest{err})
		return
	}
	s.transcribe(w, r, a, stream)
}

// readForm streams through a multipart form, whatever the order of its fields.
func readForm(r *http.Request) (a audio, stream bool, err error) {
	parts, err := r.MultipartReader()
	if err != nil {
		return a, false, fmt.Errorf("%w: send multipart/form-data with a field named file", err)
	}
	found := false
	for {
		p, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return a, false, err
		}
		switch p.FormName() {
		case "file":
			found = true
			if a, err = hear(p); err != nil {
				return a, false, err
			}
		case "stream":
			value, _ := io.ReadAll(io.LimitReader(p, 16))
			stream, _ = strconv.ParseBool(string(value))
		}
	}
	if !found {
		return a, false, errors.New("the form has no field named file: add one with the audio")
	}
	return a, stream, nil
}

// transcribe serves a request whose body was read.
func (s *Server) transcribe(w http.ResponseWriter, r *http.Request, a audio, stream bool) {
	l := &life{audio: a, read: time.Now()}
	if err := s.serve(r.Context(), l, func() { s.writeHead(w, stream) }); err != nil {
		if stream && l.exec != nil && r.Context().Err() == nil {
			s.count(&s.stats.Rejected, 1)
			panic(http.ErrAbortHandler) // the head has gone out: only a broken connection tells
		}
		s.refuse(w, r, err)
		return
	}
	s.writeText(w, l, stream)
	s.count(&s.stats.OK, 1)
}

// serve takes a request through the stages; started is called when the device
// begins to work on it.
func (s *Server) serve(ctx context.Context, l *life, started func()) error {
	if err := s.work(ctx, s.cfg.Preprocess+times(s.cfg.PreprocessPerSecond, l.seconds)); err != nil {
		return err
	}
	j, err := s.enqueue(l.seconds)
	if err != nil {
		return err
	}
	l.decoded = j.queued
	if err := s.await(ctx, j.taken); err != nil {
		s.leave(j)
		return err
	}
	l.exec = j.exec
	started()
	if err := s.await(ctx, l.exec.done); err != nil {
		return err
	}
	err = s.work(ctx, s.cfg.Postprocess)
	l.formatted = time.Now()
	return err
}

// writeHead announces the trailer. A streamed answer's head goes out at once;
// that of any other answer waits for its timings.
func (s *Server) writeHead(w http.ResponseWriter, stream bool) {
	if s.inTrailer(stream) {
		w.Header().Set("Trailer", "Server-Timing")
	}
	if stream {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("Cache-Control", "no-cache")
		_ = http.NewResponseController(w).Flush()
	}
}

func (s *Server) inTrailer(stream bool) bool {
	return s.cfg.ServerTiming == TimingTrailer || stream && s.cfg.ServerTiming == TimingHeader
}

// writeText writes the whole answer. A write error means that the client
// left, which its context tells; there is nobody to tell it to.
func (s *Server) writeText(w http.ResponseWriter, l *life, stream bool) {
	words := l.words()
	if s.cfg.ServerTiming != TimingOff && !s.inTrailer(stream) {
		w.Header().Set("Server-Timing", l.serverTiming(len(words)))
	}
	text := transcript{Text: strings.Join(words, " "), Usage: usage{"duration", int(math.Ceil(l.seconds))}}
	if stream {
		writeEvents(w, words, text)
	} else {
		writeJSON(w, http.StatusOK, text)
	}
	if s.inTrailer(stream) {
		w.Header().Set("Server-Timing", l.serverTiming(len(words)))
	}
}

type transcript struct {
	Text  string `json:"text"`
	Usage usage  `json:"usage"`
}

type usage struct {
	Type    string `json:"type"`
	Seconds int    `json:"seconds"`
}

// writeEvents streams the text by groups of words.
func writeEvents(w http.ResponseWriter, words []string, text transcript) {
	for i := 0; i < len(words); i += 4 {
		delta := strings.Join(words[i:min(i+4, len(words))], " ")
		if i > 0 {
			delta = " " + delta
		}
		writeEvent(w, map[string]string{"type": "transcript.text.delta", "delta": delta})
	}
	writeEvent(w, struct {
		Type string `json:"type"`
		transcript
	}{"transcript.text.done", text})
}

func writeEvent(w http.ResponseWriter, event any) {
	data, _ := json.Marshal(event) // strings and numbers: cannot fail
	fmt.Fprintf(w, "data: %s\n\n", data)
	_ = http.NewResponseController(w).Flush()
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value)
}

// serverTiming tells the stages in milliseconds. h2d, forward and d2h are the
// whole batch's, shared by all of it; preprocess and postprocess hold the wait
// for a host worker, as a handler that awaits its thread pool would see them.
func (l *life) serverTiming(tokens int) string {
	e := l.exec
	return fmt.Sprintf("queue;dur=%s, preprocess;dur=%s, h2d;dur=%s;bytes=%.0f;n=%d, "+
		"forward;dur=%s;batch=%d;seq=%.0f;tokens=%d;sync=1, d2h;dur=%s;bytes=%.0f;n=%d, postprocess;dur=%s, total;dur=%s",
		ms(e.started.Sub(l.decoded)), ms(l.decoded.Sub(l.read)),
		ms(e.copied.Sub(e.started)), e.in.bytes, e.in.copies,
		ms(e.computed.Sub(e.copied)), e.size, math.Ceil(e.longest*framesPerSecond), tokens,
		ms(e.fetched.Sub(e.computed)), e.out.bytes, e.out.copies,
		ms(l.formatted.Sub(e.fetched)), ms(l.formatted.Sub(l.read)))
}

func ms(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64)
}

type badRequest struct{ error }

// refuse answers a request that cannot be served and counts it. A client that
// left gets nothing.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		s.count(&s.stats.Canceled, 1)
		return
	}
	w.Header().Del("Trailer")
	if errors.As(err, new(badRequest)) {
		s.count(&s.stats.Invalid, 1)
		writeJSON(w, http.StatusBadRequest, failure("invalid_request_error", err))
		return
	}
	s.count(&s.stats.Rejected, 1)
	w.Header().Set("Retry-After", "1")
	writeJSON(w, http.StatusServiceUnavailable, failure("overloaded", err))
}

func failure(kind string, err error) any {
	return map[string]map[string]string{"error": {"type": kind, "message": err.Error()}}
}
