package evidence

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"sync"
)

// A finder looks for a server's page where servers have them, and stays with
// the first that it finds until that is gone.
type finder struct {
	server string
	mu     sync.Mutex
	found  string
}

// Places are the URLs where the server at base may tell its numbers, the best
// first.
func Places(base string) []string {
	u, err := url.Parse(base)
	if err != nil {
		return nil
	}
	at := func(port, path string) string {
		host := u.Host
		if port != "" {
			host = net.JoinHostPort(u.Hostname(), port)
		}
		return "http://" + host + path
	}
	return []string{
		at("", "/v2/models/stats"), // Triton: before /metrics, since it counts executions
		at("", "/metrics"),         // vLLM, SGLang, TGI, TEI, BentoML, KServe, OVMS, mosec, Xinference
		at("8002", "/metrics"),     // Triton
		at("8082", "/metrics"),     // TorchServe
		at("9991", "/metrics"),     // Deepgram's engine
		at("8080", "/metrics"),     // Ray Serve's and others' second port
		at("9090", "/metrics"),
	}
}

func (f *finder) ask(ctx context.Context, c *Collector) (reading, error) {
	f.mu.Lock()
	found := f.found
	f.mu.Unlock()
	if found != "" {
		r, err := c.scrape(ctx, found, nil, false)
		r.place = found
		return r, err
	}
	for _, place := range Places(f.server) {
		r, err := c.scrape(ctx, place, nil, false)
		if err == nil && r.server != "" {
			r.place = place
			f.mu.Lock()
			f.found = place
			f.mu.Unlock()
			return r, nil
		}
		if ctx.Err() != nil {
			return reading{}, ctx.Err()
		}
	}
	return reading{}, fmt.Errorf("no page that weir knows is where servers have theirs; weir doctor tells how to switch it on, or name it in server_metrics")
}
