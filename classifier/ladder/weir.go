package ladder

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"weir/classifier"
)

// adminURL is a path of weir's admin port.
func adminURL(admin, path string) string {
	if !strings.Contains(admin, "://") {
		admin = "http://" + admin
	}
	return strings.TrimRight(admin, "/") + path
}

var adminClient = http.Client{Timeout: 10 * time.Second}

func getAdmin(ctx context.Context, admin, path string) (io.ReadCloser, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, adminURL(admin, path), nil)
	if err != nil {
		return nil, err
	}
	res, err := adminClient.Do(r)
	if err != nil {
		return nil, fmt.Errorf("%w: is %s the admin address of weir?", err, admin)
	}
	if res.StatusCode != http.StatusOK {
		res.Body.Close()
		return nil, fmt.Errorf("%s answered %s: is it the admin address of weir?", adminURL(admin, path), res.Status)
	}
	return res.Body, nil
}

// weirState is what weir tells of its gate.
type weirState struct {
	Waiting        int `json:"waiting"`
	Inflight       int `json:"inflight"`
	MaxConcurrency int `json:"max_concurrency"`
}

func readWeir(ctx context.Context, admin string) (s weirState, err error) {
	body, err := getAdmin(ctx, admin, "/api/verdict")
	if err != nil {
		return s, err
	}
	defer body.Close()
	return s, json.NewDecoder(body).Decode(&s)
}

// drained waits until weir has no request waiting or in flight.
func (c *Client) drained(ctx context.Context) error {
	for range 10 * drainProbes {
		s, err := readWeir(ctx, c.target.Admin)
		if err != nil {
			return err
		}
		if s.Waiting+s.Inflight == 0 {
			return nil
		}
		if !sleep(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
	}
	return errors.New("weir still had requests when the next step began")
}

// joinWeir replaces what the answers told of a step's requests by weir's own
// records of them, found by their trace. They know the wait in weir's queue
// and the limit. A request without a record keeps what its answer told.
func (c *Client) joinWeir(ctx context.Context, s *StepRun) error {
	missing := len(s.Samples)
	for try := 0; missing > 0 && try < 10; try++ {
		if try > 0 && !sleep(ctx, 50*time.Millisecond) { // weir writes its records off the request path
			return ctx.Err()
		}
		records, err := c.weirRecords(ctx, 2*(len(s.Samples)+s.Extra)+100)
		if err != nil {
			return err
		}
		found := matchRecords(s, records)
		if found == 0 && try > 2 {
			break
		}
		missing = len(s.Samples) - found
	}
	if missing > 0 {
		return fmt.Errorf("weir has no record of %d of %d requests: raise its records (1000 by default), or ask the weir that the URL leads to", missing, len(s.Samples))
	}
	return nil
}

// matchRecords joins what it finds and counts it.
func matchRecords(s *StepRun, records map[[16]byte]*classifier.Observation) (found int) {
	for i := range s.Samples {
		if w := records[s.Samples[i].TraceID]; w != nil {
			found++
			s.joined = true
			joinRecord(&s.Samples[i], w)
		}
	}
	return found
}

func (c *Client) weirRecords(ctx context.Context, n int) (map[[16]byte]*classifier.Observation, error) {
	body, err := getAdmin(ctx, c.target.Admin, fmt.Sprintf("/api/requests?n=%d", n))
	if err != nil {
		return nil, err
	}
	defer body.Close()
	records := map[[16]byte]*classifier.Observation{}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var o classifier.Observation
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return nil, fmt.Errorf("a record of weir cannot be read: %w", err)
		}
		records[o.TraceID] = &o
	}
	return records, lines.Err()
}

// joinRecord takes over what weir knows better, on the client's own clock.
func joinRecord(o, w *classifier.Observation) {
	o.Dequeued = o.Enqueued.Add(min(w.QueueWait(), o.Total()))
	if !o.Sent.IsZero() && o.Sent.Before(o.Dequeued) {
		o.Sent = o.Dequeued // the body was in weir's hands, not yet in the server's
	}
	if w.Dequeued.IsZero() {
		o.Dequeued = time.Time{} // refused by weir: it only waited
	}
	o.Waiting, o.Inflight, o.Limit = w.Waiting, w.Inflight, w.Limit
	if len(w.Timings) > 0 {
		o.Timings, o.Source, o.ServerTotal = w.Timings, w.Source, w.ServerTotal
		o.BatchSize, o.SeqLen, o.Tokens = w.BatchSize, w.SeqLen, w.Tokens
	}
	if w.Outcome == classifier.Rejected || w.Outcome == classifier.Expired {
		o.Outcome, o.Error = w.Outcome, w.Outcome.String()
	}
}
