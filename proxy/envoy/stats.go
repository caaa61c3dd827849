package envoy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// stats reads Envoy's own counters from its admin port: only they tell what
// never reached weir.
type stats struct {
	url     string
	names   statNames
	entries func() int64 // of the access log that came
	client  http.Client

	mu      sync.Mutex
	samples []sample // oldest first
	err     error
}

// statNames are the counters' names in one Envoy.
type statNames struct{ total, active, bypassed, timeouts, dropped string }

// sample is one reading.
type sample struct {
	finished int64 // requests that Envoy has begun and ended
	entries  int64
	counters map[string]int64
}

const (
	statsPeriod  = 5 * time.Second
	statsTimeout = 2 * time.Second
	maxStats     = 1 << 20 // bytes of one reading
	keptSamples  = 14      // 13 periods: coverage over a minute, and one to shift by
)

func newStats(admin, prefix string, entries func() int64) *stats {
	n := statNames{
		total: "http." + prefix + ".downstream_rq_total", active: "http." + prefix + ".downstream_rq_active",
		bypassed: "http." + prefix + ".ext_proc.failure_mode_allowed", timeouts: "http." + prefix + ".ext_proc.message_timeouts",
		dropped: "access_logs.grpc_access_log.logs_dropped",
	}
	var quoted []string
	for _, name := range []string{n.total, n.active, n.bypassed, n.timeouts, n.dropped} {
		quoted = append(quoted, regexp.QuoteMeta(name))
	}
	filter := url.Values{"filter": {"^(" + strings.Join(quoted, "|") + ")$"}}
	return &stats{url: strings.TrimRight(admin, "/") + "/stats?" + filter.Encode(), names: n, entries: entries, client: http.Client{Timeout: statsTimeout}}
}

// run reads until ctx ends.
func (s *stats) run(ctx context.Context) {
	t := time.NewTicker(statsPeriod)
	defer t.Stop()
	defer s.client.CloseIdleConnections()
	for {
		s.take(s.read(ctx))
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *stats) read(ctx context.Context) (map[string]int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return nil, err
	}
	res, err := s.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("envoy_admin does not answer: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("envoy_admin answers %s; is it Envoy's admin port?", res.Status)
	}
	return parseStats(io.LimitReader(res.Body, maxStats))
}

// parseStats reads lines of "name: number"; others are passed over.
func parseStats(r io.Reader) (map[string]int64, error) {
	counters := make(map[string]int64)
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		i := strings.LastIndex(lines.Text(), ": ")
		if i < 0 {
			continue
		}
		if n, err := strconv.ParseInt(lines.Text()[i+2:], 10, 64); err == nil && n >= 0 {
			counters[lines.Text()[:i]] = n
		}
	}
	return counters, lines.Err()
}

func (s *stats) take(counters map[string]int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	total, ok := counters[s.names.total]
	if err == nil && !ok {
		err = fmt.Errorf("envoy_admin knows no %s; set envoy_stat_prefix to the stat_prefix of the connection manager", s.names.total)
	}
	s.err = err
	if err != nil {
		return
	}
	one := sample{finished: max(0, total-counters[s.names.active]), entries: s.entries(), counters: counters}
	if n := len(s.samples); n > 0 && one.finished < s.samples[n-1].finished-slack(s.samples[n-1].finished) {
		s.samples = nil // Envoy was started anew
	}
	if len(s.samples) == keptSamples {
		s.samples = s.samples[:copy(s.samples, s.samples[1:])]
	}
	s.samples = append(s.samples, one)
}

// slack is how far total less active may go back: Envoy's threads do not
// count both at one instant.
func slack(finished int64) int64 { return 10 + finished/100 }

// coverage is the share of Envoy's requests of the last minute whose entries
// came. Entries come up to a second late, so that they are held against the
// requests of the same time and of one period before, whichever were fewer:
// late is not lost. It is not known where Envoy had hardly any request.
func (s *stats) coverage() (share float64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.samples)
	if s.err != nil || n < 3 {
		return 0, false
	}
	entries := s.samples[n-1].entries - s.samples[1].entries
	finished := min(s.samples[n-1].finished-s.samples[1].finished, s.samples[n-2].finished-s.samples[0].finished)
	if finished < 10 {
		return 0, false
	}
	return min(1, float64(entries)/float64(finished)), true
}

// counter is one of Envoy's as last read; 0 if it has none of the name yet.
func (s *stats) counter(name string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.samples) == 0 {
		return 0
	}
	return s.samples[len(s.samples)-1].counters[name]
}

func (s *stats) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}
