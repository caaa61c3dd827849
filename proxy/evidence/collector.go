package evidence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"weir/classifier"
)

// A Collector asks servers and devices for their numbers, each source on a
// goroutine of its own, so that one that hangs holds up no other. A nil
// Collector has no sources.
type Collector struct {
	sources  []*source
	interval time.Duration
	answered func() map[string]uint64
	client   *http.Client
}

// Options says what a [Collector] asks, and how often.
type Options struct {
	Server   string   // base URL of the server behind weir, for "auto"; empty: it has none
	Metrics  []string // URLs of metrics pages or of Triton's statistics, or "auto"
	Devices  []string // URLs of exporters with the device's load, "nvml" or "nvidia-smi"
	Interval time.Duration
	// Answered is how many requests weir saw answered, by class, since the
	// start. Called once a reading, from several goroutines.
	Answered func() map[string]uint64
}

// Limits of what is kept and waited for.
const (
	maxAge   = 3 * time.Minute // of a reading
	maxWait  = 3 * time.Second // for an answer, the whole page included
	maxKept  = 256             // readings of one source
	missable = 3               // intervals without a reading after which a source has nothing to say
)

// New makes a Collector; nil if there is nothing to ask. Each source may have
// a fragment that selects series by label: http://host:9400/metrics#gpu=0.
func New(o Options) (*Collector, error) {
	if len(o.Metrics)+len(o.Devices) == 0 {
		return nil, nil
	}
	c := &Collector{interval: max(o.Interval, 100*time.Millisecond), answered: o.Answered, client: newClient()}
	if c.answered == nil {
		c.answered = func() map[string]uint64 { return nil }
	}
	for _, address := range o.Metrics {
		one, err := newSource(address, false, o.Server)
		if err != nil {
			return nil, fmt.Errorf("server_metrics: %w", err)
		}
		c.sources = append(c.sources, one)
	}
	for _, address := range o.Devices {
		one, err := newSource(address, true, o.Server)
		if err != nil {
			return nil, fmt.Errorf("device: %w", err)
		}
		c.sources = append(c.sources, one)
	}
	return c, nil
}

func newClient() *http.Client {
	return &http.Client{
		Timeout: maxWait,
		Transport: &http.Transport{ // no proxy: sources are local
			DialContext: (&net.Dialer{Timeout: time.Second}).DialContext, MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute,
		},
	}
}

// A source is one page that is asked.
type source struct {
	address string // as configured
	device  bool   // asked for the device alone
	ask     func(ctx context.Context, c *Collector) (reading, error)

	mu       sync.Mutex
	readings []reading // newest last
	err      error     // of the last try
	tried    time.Time
}

// Auto is the address that stands for looking where servers have their pages.
const Auto = "auto"

func newSource(address string, device bool, server string) (*source, error) {
	s := &source{address: address, device: device}
	if device && address == NVML {
		s.ask = askNVML
		return s, nil
	}
	if device && address == SMI {
		s.ask = askSMI
		return s, nil
	}
	if address == Auto && !device {
		if server == "" {
			return nil, fmt.Errorf("auto needs a server with a host and a port; name the page's URL")
		}
		s.ask = (&finder{server: server}).ask
		return s, nil
	}
	u, selects, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	s.ask = func(ctx context.Context, c *Collector) (reading, error) { return c.scrape(ctx, u, selects, device) }
	return s, nil
}

// parseAddress splits the selection of series off a URL.
func parseAddress(address string) (u string, selects []label, err error) {
	parsed, err := url.Parse(address)
	if err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https" {
		return "", nil, fmt.Errorf("%.200q is no URL; write http://host:port/metrics", address)
	}
	for pair := range strings.SplitSeq(parsed.Fragment, ",") {
		if pair == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		if !ok {
			return "", nil, fmt.Errorf("%.80q after # selects nothing; write #label=value, as in #gpu=0", pair)
		}
		selects = append(selects, label{name, value})
	}
	parsed.Fragment = ""
	return parsed.String(), selects, nil
}

// Check tells whether an address can be one of Options.Metrics or, for device,
// Options.Devices.
func Check(address string, device bool) error {
	_, err := newSource(address, device, "http://127.0.0.1:1")
	return err
}

// Run asks all sources until ctx ends.
func (c *Collector) Run(ctx context.Context) {
	if c == nil {
		return
	}
	var wg sync.WaitGroup
	for _, one := range c.sources {
		wg.Go(func() { c.keepAsking(ctx, one) })
	}
	wg.Wait()
	c.client.CloseIdleConnections()
}

func (c *Collector) keepAsking(ctx context.Context, one *source) {
	t := time.NewTicker(c.interval)
	defer t.Stop()
	for {
		c.askOnce(ctx, one)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (c *Collector) askOnce(ctx context.Context, one *source) {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	r, err := one.ask(ctx, c)
	if errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		err = fmt.Errorf("it gave no whole answer within %s", maxWait)
	}
	r.at, r.answered = time.Now(), c.answered()
	one.mu.Lock()
	defer one.mu.Unlock()
	one.tried, one.err = r.at, err
	if err == nil {
		one.keep(r)
	}
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func (s *source) keep(r reading) {
	s.readings = append(s.readings, r)
	old := 0
	for old < len(s.readings) && (r.at.Sub(s.readings[old].at) > maxAge || len(s.readings)-old > maxKept) {
		old++
	}
	s.readings = slices.Delete(s.readings, 0, old)
}

// scrape reads one page.
func (c *Collector) scrape(ctx context.Context, u string, selects []label, device bool) (reading, error) {
	text, err := c.get(ctx, u)
	if err != nil {
		return reading{}, err
	}
	return readPage(text, selects, device)
}

// readPage tells a metrics page from Triton's statistics by its first byte.
func readPage(text []byte, selects []label, device bool) (r reading, err error) {
	r.sizes = make(map[int]sizeCost)
	if trimmed := strings.TrimLeft(string(text[:min(len(text), 64)]), " \r\n\t"); strings.HasPrefix(trimmed, "{") && !device {
		return r, readTriton(text, &r)
	}
	p, err := parsePage(text, func(name string) bool { return wanted[name] })
	if err != nil {
		return r, err
	}
	p.keep(selects)
	if a := known(devices, p); a != nil {
		a.read(p, &r)
		r.server = a.server
	}
	a := known(adapters, p)
	switch {
	case device && r.server == "":
		return r, fmt.Errorf("the page tells nothing of a device; DCGM's exporter, Triton and TorchServe do (the labels after # must fit, too)")
	case device:
	case a == nil:
		return r, fmt.Errorf("the page has no metrics of a server that weir knows")
	default:
		a.read(p, &r)
		r.server = a.server
	}
	return r, nil
}

// keep drops the series whose labels do not fit.
func (p page) keep(selects []label) {
	for name, list := range p {
		p[name] = slices.DeleteFunc(list, func(s sample) bool {
			return slices.ContainsFunc(selects, func(l label) bool { return s.label(l.name) != l.value })
		})
	}
}

func (c *Collector) get(ctx context.Context, u string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4,application/json;q=0.5,*/*;q=0.1")
	req.Header.Set("User-Agent", "weir")
	res, err := c.client.Do(req)
	if err != nil {
		var e *url.Error
		if errors.As(err, &e) {
			err = e.Err // the address is told with it anyway
		}
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("it answers %s", res.Status)
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxPage+1))
	if len(text) > maxPage {
		return nil, fmt.Errorf("the page is larger than %d MiB", maxPage>>20)
	}
	return text, err
}

// A Status is how one source does, for the admin page.
type Status struct {
	Source string    `json:"source"`
	Server string    `json:"server"` // the kind found; empty: none yet
	Place  string    `json:"place"`  // where auto found it
	Device bool      `json:"device"`
	Asked  time.Time `json:"asked"`
	Error  string    `json:"error"` // of the last try; empty: it went well
}

// Status tells of all sources.
func (c *Collector) Status() []Status {
	list := []Status{}
	if c == nil {
		return list
	}
	for _, one := range c.sources {
		one.mu.Lock()
		st := Status{Source: one.address, Device: one.device, Asked: one.tried}
		if n := len(one.readings); n > 0 {
			st.Server = one.readings[n-1].server
			st.Place = one.readings[n-1].place
		}
		if one.err != nil {
			st.Error = one.err.Error()
		}
		one.mu.Unlock()
		list = append(list, st)
	}
	return list
}

// Between tells what the sources said of the time from start to end, and of
// the class that weir knows by that name.
func (c *Collector) Between(class string, start, end time.Time) (list []classifier.Aggregate, load []classifier.Device) {
	if c == nil {
		return nil, nil
	}
	for _, one := range c.sources {
		one.mu.Lock()
		list = append(list, one.aggregate(class, start, end, c.interval)...)
		if d, ok := one.load(start, end); ok {
			load = append(load, d)
		}
		one.mu.Unlock()
	}
	return list, load
}

// name is the source as evidence names it: what it is, and where.
func (s *source) name(r *reading) string {
	address := s.address
	if r != nil && r.place != "" {
		address = r.place
	}
	if r == nil || r.server == "" {
		return address
	}
	return r.server + " at " + address
}

// span is the pair of readings that lies closest around a stretch of time.
func (s *source) span(start, end time.Time) (a, b *reading) {
	for i := range s.readings {
		r := &s.readings[i]
		if !r.at.After(start) || a == nil {
			a = r
		}
		if r.at.After(end) && b != nil {
			break
		}
		b = r
	}
	return a, b
}

func (s *source) aggregate(class string, start, end time.Time, interval time.Duration) []classifier.Aggregate {
	if s.device || !isWork(class) {
		return nil
	}
	from, to := s.span(start, end)
	refuse := func(format string, args ...any) []classifier.Aggregate {
		return []classifier.Aggregate{{Source: s.name(to), Refused: fmt.Sprintf(format, args...)}}
	}
	stale := to == nil || end.Sub(to.at) > missable*interval+maxWait
	switch {
	case stale && s.err != nil:
		return refuse("%v", s.err)
	case stale, from == to:
		return nil // it has just begun
	}
	d, ok := to.since(from)
	if !ok {
		return refuse("its counters ran backwards: it was started anew")
	}
	a := joined{d.aggregate(from.at, to.at)}
	a.Source = s.name(to)
	s.gauges(&a, start, end)
	if to.answered[class] == from.answered[class] {
		return nil
	}
	a.Refused = a.join(class, from.answered, to.answered)
	return []classifier.Aggregate{a.Aggregate}
}

// gauges takes the mean of the readings within the stretch of time.
func (s *source) gauges(a *joined, start, end time.Time) {
	for f, to := range map[field]*classifier.Gauge{fWaiting: &a.Waiting, fRunning: &a.Running, fLimit: &a.Limit} {
		*to = s.mean(f, start, end)
	}
}

func (s *source) mean(f field, start, end time.Time) (g classifier.Gauge) {
	n := 0.0
	for i := range s.readings {
		r := &s.readings[i]
		if r.numbers[f].told && !r.at.Before(start) && !r.at.After(end) {
			g.Value += r.numbers[f].sum
			n++
		}
	}
	if n > 0 {
		g.Value, g.OK = g.Value/n, true
	}
	return g
}

func (s *source) load(start, end time.Time) (d classifier.Device, ok bool) {
	d.Busy = s.mean(fBusy, start, end)
	d.Memory, d.MemoryTotal = s.mean(fMemory, start, end), s.mean(fMemoryTotal, start, end)
	d.PCIe = s.mean(fPCIe, start, end)
	d.Source = s.address
	if n := len(s.readings); n > 0 {
		d.Source = s.name(&s.readings[n-1])
	}
	return d, d.Busy.OK || d.Memory.OK
}
