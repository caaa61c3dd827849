package ladder

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"

	"weir/classifier"
)

// Pool sends requests from several processes: one process has one scheduler
// and one garbage collector, which at high rates is what a ladder would
// measure. The parent counts; a worker only sends what it is told to.
type Pool struct {
	workers []*worker
}

// Job is what a worker is started with.
type Job struct {
	Target Target   `json:"target"`
	Audio  []string `json:"audio"`
	Seed   uint64   `json:"seed"`
}

type worker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// order is a line from the parent to a worker; reply is one back.
type order struct {
	Run  *stream `json:"run,omitempty"`
	Stop bool    `json:"stop,omitempty"`
}

type reply struct {
	Ready  bool                    `json:"ready,omitempty"`
	Record *classifier.Observation `json:"record,omitempty"`
	End    *ClientLoad             `json:"end,omitempty"`
	Error  string                  `json:"error,omitempty"`
}

// StartPool starts n processes of the given command, each of which must call
// [Work]. Close ends them.
func StartPool(n int, job Job, command string, args ...string) (*Pool, error) {
	p := &Pool{}
	for range n {
		w, err := startWorker(job, command, args)
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.workers = append(p.workers, w)
	}
	return p, nil
}

func startWorker(job Job, command string, args []string) (*worker, error) {
	w := &worker{cmd: exec.Command(command, args...)}
	ownGroup(w.cmd)
	in, err := w.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.in, w.out = in, bufio.NewScanner(out)
	w.out.Buffer(nil, 1<<20)
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting a worker: %w", err)
	}
	if err := w.tell(job); err != nil {
		return nil, errors.Join(err, w.close())
	}
	if r, err := w.hear(); err != nil || !r.Ready {
		return nil, errors.Join(fmt.Errorf("a worker did not start: %s", r.Error), err, w.close())
	}
	return w, nil
}

func (w *worker) tell(v any) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = w.in.Write(append(b, '\n'))
	}
	return err
}

func (w *worker) hear() (r reply, err error) {
	if !w.out.Scan() {
		return r, errors.Join(errors.New("the worker ended"), w.out.Err())
	}
	return r, json.Unmarshal(w.out.Bytes(), &r)
}

func (w *worker) close() error {
	_ = w.in.Close()
	return w.cmd.Wait()
}

// Close ends the workers.
func (p *Pool) Close() (err error) {
	for _, w := range p.workers {
		err = errors.Join(err, w.close())
	}
	return err
}

// run splits a stream over the workers and hands on what they send.
func (p *Pool) run(ctx context.Context, s stream, stop <-chan struct{}, emit func(classifier.Observation)) (load ClientLoad) {
	var mu sync.Mutex
	var running sync.WaitGroup
	ended := make(chan struct{})
	for i, w := range p.workers {
		part := s.part(i, len(p.workers))
		if part.Rate == 0 && part.Concurrency == 0 || part.Rate > 0 && part.Total == 0 {
			continue
		}
		if w.tell(order{Run: &part}) != nil {
			continue
		}
		running.Go(func() {
			for {
				r, err := w.hear()
				switch {
				case err != nil:
					return
				case r.Record != nil:
					emit(*r.Record)
				case r.End != nil:
					mu.Lock()
					load.merge(*r.End)
					mu.Unlock()
					return
				}
			}
		})
	}
	go func() { running.Wait(); close(ended) }()
	select {
	case <-stop:
	case <-ctx.Done():
	case <-ended:
	}
	for _, w := range p.workers {
		if ctx.Err() != nil {
			_ = w.in.Close() // a worker without a parent drops what is under way
			continue
		}
		_ = w.tell(order{Stop: true})
	}
	<-ended
	return load
}

// part is the i-th of n workers' share. Arrivals of Poisson streams add up to
// one; constant ones are only constant in each worker.
func (s stream) part(i, n int) stream {
	share := func(total int) int { return total/n + btoi(i < total%n) }
	s.Concurrency = share(s.Concurrency)
	s.Total = share(s.Total)
	s.MaxInflight = max(1, share(s.MaxInflight))
	s.Rate /= float64(n)
	s.Seed += uint64(i) * 0x9e3779b9
	s.First += int64(i)
	return s
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Work is the life of a worker: a job, then orders, one JSON line each.
func Work(ctx context.Context, in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	w := &replies{out: json.NewEncoder(out)}
	if !lines.Scan() {
		return lines.Err()
	}
	var job Job
	if err := json.Unmarshal(lines.Bytes(), &job); err != nil {
		return w.fail(err)
	}
	clips, err := LoadAudio(job.Audio, job.Seed)
	if err != nil {
		return w.fail(err)
	}
	c, err := NewClient(job.Target, clips, nil)
	if err != nil {
		return w.fail(err)
	}
	defer c.Close()
	w.send(reply{Ready: true})
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the parent is gone: nobody wants the rest
	stop := make(chan struct{})
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return w.fail(err)
		}
		switch {
		case o.Stop:
			select {
			case <-stop:
			default:
				close(stop)
			}
		case o.Run != nil:
			running.Wait()
			stop = make(chan struct{})
			s, until := *o.Run, stop
			running.Go(func() {
				m := c.startMeter()
				c.run(ctx, s, until, func(o classifier.Observation) { w.send(reply{Record: &o}) })
				end := m.end()
				w.send(reply{End: &end})
			})
		}
	}
	return lines.Err()
}

// replies writes lines from many goroutines.
type replies struct {
	mu  sync.Mutex
	out *json.Encoder
}

func (w *replies) send(r reply) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r) // the parent is gone: the end of in tells
}

func (w *replies) fail(err error) error {
	w.send(reply{Error: err.Error()})
	return err
}
