package ladder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Setter changes one setting, or several that one command holds.
type Setter interface {
	// Set brings the setting named to its value in factors. Setting what is
	// set already does nothing.
	Set(ctx context.Context, name string, factors map[string]int) error
	// Get reads the setting back; known is false where that cannot be done.
	Get(ctx context.Context) (value int, known bool, err error)
	// Undo tells what restores the setting after a crash.
	Undo(name string, base map[string]int) ([]Undo, error)
	// Close ends what Set began.
	Close() error
}

// Undo is one thing to do to restore what a sweep changed.
type Undo struct {
	File    string `json:"file,omitempty"`
	Content []byte `json:"content,omitempty"`
	Command string `json:"command,omitempty"`
	HTTP    string `json:"http,omitempty"` // METHOD URL BODY
}

// Ready waits until the server answers again after a change; nil: not waited for.
type Ready func(ctx context.Context) error

// ParseSetter reads how a setting is changed:
//
//	cmd:COMMAND           run by sh, to its end; {NAME} stands for a setting's value
//	run:COMMAND           a server that the sweep starts, restarts and ends
//	http:METHOD URL BODY  one call
//	file:PATH             the number after the setting's name in a file, then restart
//	weir:PATH,ADMIN       weir's own configuration file; no restart
//
// restart is a cmd: or run: text, or empty.
func ParseSetter(names []string, how, restart string, ready Ready) (Setter, error) {
	kind, text, _ := strings.Cut(how, ":")
	if strings.TrimSpace(text) == "" {
		return nil, fmt.Errorf("--set %s=%q: write cmd:COMMAND, run:COMMAND, http:METHOD URL BODY, file:PATH or weir:PATH,ADMIN", strings.Join(names, ","), how)
	}
	switch kind {
	case "cmd":
		return &command{template: text, ready: ready}, nil
	case "run":
		return &server{template: text, ready: ready}, nil
	case "http":
		return newCall(text, ready)
	case "file":
		after, err := parseRestart(names, restart, ready)
		if err != nil {
			return nil, err
		}
		return newFile(names, text, after)
	case "weir":
		path, admin, ok := strings.Cut(text, ",")
		if !ok {
			return nil, fmt.Errorf("--set %s=%q: write weir:PATH,ADMIN, such as weir:weir.yaml,127.0.0.1:9464", strings.Join(names, ","), how)
		}
		f, err := newFile(names, path, nil)
		if err != nil {
			return nil, err
		}
		return &weirFile{fileSetting: f, admin: admin}, nil
	}
	return nil, fmt.Errorf("--set %s=%q: %s: is no way to change a setting: use cmd:, run:, http:, file: or weir:", strings.Join(names, ","), how, kind)
}

func parseRestart(names []string, restart string, ready Ready) (Setter, error) {
	if restart == "" {
		return nil, nil
	}
	if !strings.HasPrefix(restart, "cmd:") && !strings.HasPrefix(restart, "run:") {
		return nil, fmt.Errorf("--restart %q: write cmd:COMMAND or run:COMMAND", restart)
	}
	return ParseSetter(names, restart, "", ready)
}

// expand puts the values of all settings into a template.
func expand(template string, factors map[string]int) string {
	for name, v := range factors {
		template = strings.ReplaceAll(template, "{"+name+"}", strconv.Itoa(v))
	}
	return template
}

// command is run anew whenever its text changes.
type command struct {
	template, last string
	ready          Ready
}

func (c *command) Set(ctx context.Context, _ string, factors map[string]int) error {
	text := expand(c.template, factors)
	if text == c.last {
		return nil
	}
	if err := shell(ctx, text); err != nil {
		return err
	}
	c.last = text
	return waitReady(ctx, c.ready)
}

func (c *command) Get(context.Context) (int, bool, error) { return 0, false, nil }
func (c *command) Close() error                           { return nil }

func (c *command) Undo(_ string, base map[string]int) ([]Undo, error) {
	return []Undo{{Command: expand(c.template, base)}}, nil
}

func waitReady(ctx context.Context, ready Ready) error {
	if ready == nil {
		return nil
	}
	return ready(ctx)
}

// shell runs a command to its end; what it printed is part of an error.
func shell(ctx context.Context, text string) error {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", text)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("%q: %w: %s", text, err, bytes.TrimSpace(out))
	}
	return nil
}

// server is a process of the sweep's own.
type server struct {
	template, last string
	ready          Ready
	process        *process
}

func (s *server) Set(ctx context.Context, _ string, factors map[string]int) error {
	text := expand(s.template, factors)
	if text == s.last && s.process.alive() {
		return nil
	}
	s.process.stop()
	p, err := startProcess(text)
	if err != nil {
		return err
	}
	s.process, s.last = p, text
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("%q ended at once: %s", text, p.tail()))
		case <-ctx.Done():
		}
	}()
	if err := waitReady(ctx, s.ready); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return fmt.Errorf("%q: %w", text, err)
	}
	return nil
}

func (s *server) Get(context.Context) (int, bool, error)      { return 0, false, nil }
func (s *server) Undo(string, map[string]int) ([]Undo, error) { return nil, nil }
func (s *server) Close() error                                { s.process.stop(); return nil }

// process is a child with all of its own children.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	mu   sync.Mutex
	out  []byte
}

func startProcess(text string) (*process, error) {
	p := &process{cmd: exec.Command("/bin/sh", "-c", "exec "+text), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.WaitDelay = 2 * time.Second
	ownGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%q: %w", text, err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	return p, nil
}

const keptOutput = 2000

// Write keeps the end of what the process prints.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = append(p.out, b...)
	p.out = p.out[max(0, len(p.out)-keptOutput):]
	return len(b), nil
}

func (p *process) tail() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(bytes.TrimSpace(p.out))
}

func (p *process) alive() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// endTime is how long a process may take to end by itself.
const endTime = 10 * time.Second

func (p *process) stop() {
	if !p.alive() {
		return
	}
	endGroup(p.cmd, false)
	select {
	case <-p.done:
	case <-time.After(endTime):
		endGroup(p.cmd, true)
		<-p.done
	}
}

// call changes a setting by HTTP.
type call struct {
	method, url, body, last string
	ready                   Ready
}

func newCall(text string, ready Ready) (*call, error) {
	method, rest, ok := strings.Cut(strings.TrimSpace(text), " ")
	url, body, _ := strings.Cut(rest, " ")
	if !ok || !strings.HasPrefix(url, "http") {
		return nil, fmt.Errorf("http:%s: write http:METHOD URL BODY, such as http:POST http://127.0.0.1:8000/config {\"max_batch_size\":{max_batch_size}}", text)
	}
	return &call{method: method, url: url, body: body, ready: ready}, nil
}

func (c *call) Set(ctx context.Context, _ string, factors map[string]int) error {
	text := c.expanded(factors)
	if text == c.last {
		return nil
	}
	if err := makeCall(ctx, text); err != nil {
		return err
	}
	c.last = text
	return waitReady(ctx, c.ready)
}

func (c *call) expanded(factors map[string]int) string {
	return expand(c.method+" "+c.url+" "+c.body, factors)
}

func makeCall(ctx context.Context, text string) error {
	method, rest, _ := strings.Cut(text, " ")
	url, body, _ := strings.Cut(rest, " ")
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	if strings.HasPrefix(body, "{") {
		r.Header.Set("Content-Type", "application/json")
	}
	res, err := adminClient.Do(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode < 200 || res.StatusCode > 299 {
		answer, _, _ := readAnswer(res.Body)
		return fmt.Errorf("%s %s answered %s: %s", method, url, res.Status, bytes.TrimSpace(answer[:min(len(answer), 200)]))
	}
	return nil
}

func (c *call) Get(context.Context) (int, bool, error) { return 0, false, nil }
func (c *call) Close() error                           { return nil }

func (c *call) Undo(_ string, base map[string]int) ([]Undo, error) {
	return []Undo{{HTTP: c.expanded(base)}}, nil
}

// fileSetting is the number after a key in a file: YAML, JSON, TOML, INI or a
// shell's variables. All else in the file stays as it is.
type fileSetting struct {
	path    string
	pattern *regexp.Regexp
	after   Setter // restarts the server; nil: it need not be
}

func newFile(names []string, path string, after Setter) (*fileSetting, error) {
	if len(names) != 1 {
		return nil, fmt.Errorf("%s: a file holds each setting apart: give one --set for each", strings.Join(names, ","))
	}
	f := &fileSetting{path: path, after: after}
	f.pattern = regexp.MustCompile(`(?m)^([ \t]*(?:export[ \t]+)?["']?` + regexp.QuoteMeta(names[0]) + `["']?[ \t]*[:=][ \t]*["']?)(\d+)`)
	_, _, err := f.Get(context.Background())
	return f, err
}

func (f *fileSetting) read() (content []byte, place []int, err error) {
	content, err = os.ReadFile(f.path)
	if err != nil {
		return nil, nil, err
	}
	all := f.pattern.FindAllSubmatchIndex(content, -1)
	if len(all) != 1 {
		return nil, nil, fmt.Errorf("%s has %d lines that set it to a number: there must be one", f.path, len(all))
	}
	return content, all[0][4:6], nil
}

func (f *fileSetting) Get(context.Context) (int, bool, error) {
	content, place, err := f.read()
	if err != nil {
		return 0, false, err
	}
	v, err := strconv.Atoi(string(content[place[0]:place[1]]))
	return v, err == nil, err
}

func (f *fileSetting) Set(ctx context.Context, name string, factors map[string]int) error {
	changed, err := f.write(factors[name])
	if err != nil || f.after == nil {
		return err
	}
	if changed {
		forget(f.after)
	}
	return f.after.Set(ctx, name, factors)
}

// forget makes a restart happen although its command is the same.
func forget(s Setter) {
	switch s := s.(type) {
	case *command:
		s.last = ""
	case *server:
		s.last = ""
	}
}

// write puts the value into the file, in place: a file that is mounted into a
// container cannot be replaced.
func (f *fileSetting) write(value int) (changed bool, err error) {
	content, place, err := f.read()
	if err != nil {
		return false, err
	}
	text := strconv.Itoa(value)
	if string(content[place[0]:place[1]]) == text {
		return false, nil
	}
	next := append([]byte{}, content[:place[0]]...)
	next = append(append(next, text...), content[place[1]:]...)
	info, err := os.Stat(f.path)
	if err != nil {
		return false, err
	}
	return true, os.WriteFile(f.path, next, info.Mode().Perm())
}

func (f *fileSetting) Undo(_ string, base map[string]int) ([]Undo, error) {
	content, err := os.ReadFile(f.path)
	undo := []Undo{{File: f.path, Content: content}}
	if c, ok := f.after.(*command); ok && err == nil {
		undo = append(undo, Undo{Command: expand(c.template, base)})
	}
	return undo, err
}

func (f *fileSetting) Close() error {
	if f.after == nil {
		return nil
	}
	return f.after.Close()
}

// weirFile is a setting of a running weir, which reads its file again by
// itself.
type weirFile struct {
	*fileSetting
	admin string
}

// reloadTime is how long weir may take to see that its file changed.
const reloadTime = 15 * time.Second

func (w *weirFile) Set(ctx context.Context, name string, factors map[string]int) error {
	if _, err := w.write(factors[name]); err != nil {
		return err
	}
	for deadline := time.Now().Add(reloadTime); ; {
		s, err := readWeir(ctx, w.admin)
		if err != nil {
			return err
		}
		if name != "max_concurrency" || s.MaxConcurrency == factors[name] {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("weir still has max_concurrency %d, %s after %s was changed: is that the file it was started with, and is the value not overridden by a flag?", s.MaxConcurrency, reloadTime, w.path)
		}
		if !sleep(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
	}
}
