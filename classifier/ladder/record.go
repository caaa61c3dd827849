package ladder

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"weir/classifier"
)

// The phases of a step's requests.
const (
	phaseWarm     = "warmup"
	phaseMeasured = "measured"
	phaseCool     = "cooldown"
)

// line is one line of a record file: exactly one field is set.
type line struct {
	Run    *Header   `json:"run,omitempty"`
	Step   *stepLine `json:"step,omitempty"`
	Sample *sample   `json:"sample,omitempty"`
	End    *endLine  `json:"end,omitempty"`
	Broken *struct{} `json:"interrupted,omitempty"`
}

type stepLine struct {
	Number int `json:"number"`
	Step
}

type sample struct {
	Number int                     `json:"step"`
	Phase  string                  `json:"phase"`
	Record *classifier.Observation `json:"record"`
}

// endLine closes a step. Joined holds the records again where weir's own
// records were joined to them.
type endLine struct {
	Number  int                       `json:"step"`
	From    time.Time                 `json:"from"`
	Until   time.Time                 `json:"until"`
	Client  ClientLoad                `json:"client"`
	Stopped string                    `json:"stopped,omitempty"`
	Notes   []string                  `json:"notes,omitempty"`
	Joined  []*classifier.Observation `json:"joined,omitempty"`
}

// Recorder writes a run as JSON lines while it is measured, so that what was
// measured outlives a crash. A nil Recorder writes nothing.
type Recorder struct {
	mu  sync.Mutex
	w   *bufio.Writer
	err error
}

// NewRecorder begins a record with its header.
func NewRecorder(w io.Writer, h Header) *Recorder {
	r := &Recorder{w: bufio.NewWriter(w)}
	r.write(line{Run: &h}, true)
	return r
}

func (r *Recorder) write(l line, flush bool) {
	if r == nil {
		return
	}
	b, err := json.Marshal(l)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return
	}
	if err == nil {
		_, err = r.w.Write(append(b, '\n'))
	}
	if err == nil && flush {
		err = r.w.Flush()
	}
	r.err = err
}

func (r *Recorder) begin(number int, s Step) {
	r.write(line{Step: &stepLine{number, s}}, true)
}

func (r *Recorder) sample(number int, phase string, o *classifier.Observation) {
	r.write(line{Sample: &sample{number, phase, o}}, false)
}

func (r *Recorder) end(number int, s *StepRun) {
	e := endLine{Number: number, From: s.From, Until: s.Until, Client: s.Client, Stopped: s.Stopped, Notes: s.Notes}
	if s.joined {
		for i := range s.Samples {
			e.Joined = append(e.Joined, &s.Samples[i])
		}
	}
	r.write(line{End: &e}, true)
}

// Interrupted notes that the run was cut short.
func (r *Recorder) Interrupted() { r.write(line{Broken: &struct{}{}}, true) }

// Err is the first error of writing.
func (r *Recorder) Err() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// maxLine bounds a line of a record file, in bytes.
const maxLine = 64 << 20

// ReadRun reads a record file. Of a run that was cut off, a last line that is
// not whole is passed over.
func ReadRun(r io.Reader) (*Run, error) {
	b := bufio.NewScanner(r)
	b.Buffer(nil, maxLine)
	run, numbers := &Run{}, map[int]*StepRun{}
	n, bad := 0, error(nil)
	for b.Scan() {
		n++
		if bad != nil {
			return nil, bad
		}
		var l line
		if err := json.Unmarshal(b.Bytes(), &l); err != nil {
			bad = fmt.Errorf("line %d is no record of a run: %w", n, err)
			continue
		}
		if err := run.take(&l, numbers); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := b.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	if run.Kind == "" {
		return nil, fmt.Errorf("the file has no header of a run: give a .jsonl file that weir ladder, sweep or probe wrote")
	}
	if bad != nil {
		run.Interrupted = true
	}
	return run, nil
}

func (run *Run) take(l *line, numbers map[int]*StepRun) error {
	switch {
	case l.Run != nil:
		run.Header = *l.Run
	case l.Step != nil:
		s := &StepRun{Step: l.Step.Step}
		run.Steps = append(run.Steps, s)
		numbers[l.Step.Number] = s
	case l.Broken != nil:
		run.Interrupted = true
	case l.Sample != nil:
		s := numbers[l.Sample.Number]
		if s == nil || l.Sample.Record == nil {
			return fmt.Errorf("a sample of step %d, which has not begun", l.Sample.Number)
		}
		s.takeSample(l.Sample)
	case l.End != nil:
		s := numbers[l.End.Number]
		if s == nil {
			return fmt.Errorf("the end of step %d, which has not begun", l.End.Number)
		}
		s.From, s.Until, s.Client, s.Stopped, s.Notes = l.End.From, l.End.Until, l.End.Client, l.End.Stopped, l.End.Notes
		for i, o := range l.End.Joined {
			if i < len(s.Samples) && o != nil {
				s.Samples[i] = *o
			}
		}
	}
	return nil
}

func (s *StepRun) takeSample(l *sample) {
	o := *l.Record
	if l.Phase != phaseMeasured {
		s.Extra++
		if l.Phase == phaseWarm {
			s.From = o.Done
		}
		return
	}
	if s.From.IsZero() {
		s.From = o.Enqueued
	}
	s.Samples = append(s.Samples, o)
	s.Until = o.Done
}
