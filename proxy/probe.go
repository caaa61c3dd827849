package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"time"
)

// A probe asks the server for a trivial path once a second, on a connection of
// its own, and tells how long it took: a blocked event loop shows.
type probe struct {
	path     string
	client   *http.Client
	inflight func() int
	results  chan probeResult // bounded: what nobody takes is lost
}

type probeResult struct {
	took     time.Duration
	inflight int
}

const (
	probePeriod  = time.Second
	probeTimeout = 30 * time.Second
)

// newProbe returns nil, which probes nothing, if path is empty.
func newProbe(path, network, address string, inflight func() int) *probe {
	if path == "" {
		return nil
	}
	var d net.Dialer
	return &probe{
		path: path, inflight: inflight, results: make(chan probeResult, 64),
		client: &http.Client{
			Timeout:       probeTimeout,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				DisableKeepAlives: true,
				DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, network, address) },
			},
		},
	}
}

// run probes until ctx ends.
func (p *probe) run(ctx context.Context) {
	if p == nil {
		return
	}
	t := time.NewTicker(probePeriod)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		n, began := p.inflight(), time.Now()
		if !p.ask(ctx) && time.Since(began) < probeTimeout {
			continue // no server, or no HTTP: not a latency
		}
		select {
		case p.results <- probeResult{time.Since(began), n}:
		default:
		}
	}
}

// ask tells whether any answer came, whatever its status.
func (p *probe) ask(ctx context.Context) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://server"+p.path, nil)
	if err != nil {
		return false
	}
	req.Header.Set("User-Agent", "weir-probe")
	answer, err := p.client.Do(req)
	if err != nil {
		return false
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 1<<20))
	answer.Body.Close()
	return true
}

// take gives what was measured since the last call to f.
func (p *probe) take(f func(took time.Duration, inflight int)) {
	if p == nil {
		return
	}
	for {
		select {
		case r := <-p.results:
			f(r.took, r.inflight)
		default:
			return
		}
	}
}
