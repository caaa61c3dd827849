package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"weir/classifier/ladder"
)

// progress tells how far an experiment is: one live line on a terminal, one
// line a step elsewhere.
type progress struct {
	w      io.Writer
	live   bool
	mu     sync.Mutex
	prefix string
	drawn  time.Time
}

func newProgress(w io.Writer) *progress { return &progress{w: w, live: isTerminal(w)} }

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Step begins a line.
func (p *progress) Step(s ladder.Step, number, of int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prefix = fmt.Sprintf("step %d", number)
	if of > 0 {
		p.prefix += fmt.Sprintf(" of %d", of)
	}
	p.prefix += ", " + s.Level()
	if s.Round != "" {
		p.prefix += fmt.Sprintf(", %s=%d", s.Round, s.Factors[s.Round])
	}
	p.drawn = time.Time{}
}

// The live line: its bar, and how often it is drawn anew.
const (
	barWidth  = 24
	drawEvery = 100 * time.Millisecond
)

// Request moves the bar.
func (p *progress) Request(done, of int, last time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if !p.live || of <= 0 || done < of && now.Sub(p.drawn) < drawEvery {
		return
	}
	p.drawn = now
	full := min(barWidth*done/of, barWidth)
	fmt.Fprintf(p.w, "\r\x1b[K%s [%s%s] %d/%d %.0f ms", p.prefix, strings.Repeat("#", full), strings.Repeat(".", barWidth-full), min(done, of), of, ms(last))
}

// StepDone ends the line.
func (p *progress) StepDone(s *ladder.StepRun) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.live {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	took := s.Until.Sub(s.From).Seconds()
	rate := 0.0
	if took > 0 {
		rate = float64(len(s.Samples)) / took
	}
	fmt.Fprintf(p.w, "%s: %d requests in %.1f s, %.1f/s", p.prefix, len(s.Samples), max(0, took), rate)
	if s.Stopped != "" {
		fmt.Fprintf(p.w, " (%s)", s.Stopped)
	}
	fmt.Fprintln(p.w)
}
