package classifier

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// maxLine bounds one line of a file of records.
const maxLine = 4 << 20

// ErrNoRecords tells that a source held not one usable record.
var ErrNoRecords = errors.New("no usable record")

// ReadLines reads records as /api/requests gives them, one JSON object a
// line, and gives each to take, which may keep it. A line that cannot be used
// is given to bad with its number, counted from 1, and loses nothing of the
// rest; empty lines are skipped. The error is that of r.
func ReadLines(r io.Reader, take func(*Observation), bad func(line int, err error)) error {
	in := bufio.NewReaderSize(r, 64<<10)
	for n := 1; ; n++ {
		line, tooLong, err := readLine(in)
		switch {
		case tooLong:
			bad(n, fmt.Errorf("the line is longer than %d MiB", maxLine>>20))
		case len(bytes.TrimSpace(line)) > 0:
			if o, failed := parseRecord(line); failed != nil {
				bad(n, failed)
			} else {
				take(o)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// readLine returns the next line; of one that is too long, nothing.
func readLine(in *bufio.Reader) (line []byte, tooLong bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		if len(line)+len(part) > maxLine {
			line, tooLong = nil, true
		} else if !tooLong {
			line = append(line, part...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, tooLong, err
		}
	}
}

func parseRecord(line []byte) (*Observation, error) {
	o := new(Observation)
	if err := json.Unmarshal(line, o); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, fmt.Errorf("no JSON at byte %d: %w", syntax.Offset, err)
		}
		return nil, err
	}
	if err := o.Check(); err != nil {
		return nil, err
	}
	return o, nil
}

// Check tells what makes a record useless for statistics: no end, instants
// out of order, or durations and counts below zero or beyond reason. A record
// that weir itself made passes.
func (o *Observation) Check() error {
	switch {
	case o.Enqueued.IsZero():
		return errors.New("start is missing")
	case o.Done.IsZero():
		return errors.New("total_ms is missing: the request has no end")
	}
	if err := o.checkInstants(); err != nil {
		return err
	}
	for _, t := range o.Timings {
		if t.Dur < 0 || t.Dur > maxSpan {
			return fmt.Errorf("timing %q has dur_ms %g: it must lie between 0 and %.0f", t.Name, ms(t.Dur), ms(maxSpan))
		}
		if t.Bytes < 0 || t.Count < 0 {
			return fmt.Errorf("timing %q has %d bytes in %d copies: neither can be below 0", t.Name, t.Bytes, t.Count)
		}
	}
	for _, n := range []struct {
		name  string
		value float64
	}{
		{"batch", float64(o.BatchSize)}, {"inflight", float64(o.Inflight)}, {"waiting", float64(o.Waiting)}, {"seq", float64(o.SeqLen)},
		{"audio_seconds", o.AudioSeconds}, {"bytes_in", float64(o.BytesIn)}, {"bytes_out", float64(o.BytesOut)},
	} {
		if !(n.value >= 0 && n.value <= 1e15) {
			return fmt.Errorf("%s is %g: it must lie between 0 and 1e15", n.name, n.value)
		}
	}
	return nil
}

func (o *Observation) checkInstants() error {
	names := []string{"dequeued_ms", "sent_ms", "responded_ms", "total_ms"}
	for i, t := range []time.Time{o.Dequeued, o.Sent, o.Responded, o.Done} {
		if t.IsZero() {
			continue
		}
		d := t.Sub(o.Enqueued)
		if d < 0 || d > maxSpan {
			return fmt.Errorf("%s is %g: it must lie between 0 and %.0f", names[i], ms(d), ms(maxSpan))
		}
	}
	for i, t := range []time.Time{o.Dequeued, o.Sent, o.Responded} {
		if t.After(o.Done) {
			return fmt.Errorf("%s is %g: after total_ms, %g", names[i], ms(t.Sub(o.Enqueued)), ms(o.Done.Sub(o.Enqueued)))
		}
	}
	if !o.Dequeued.IsZero() && (!o.Sent.IsZero() && o.Sent.Before(o.Dequeued) || !o.Responded.IsZero() && o.Responded.Before(o.Dequeued)) {
		return errors.New("sent_ms or responded_ms lies before dequeued_ms")
	}
	return nil
}
