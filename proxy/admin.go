package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"weir/classifier"
	"weir/proxy/page"
)

// drainPause is how long /drain lets those who route traffic see that weir is
// no longer ready, before it refuses newcomers.
const drainPause = 2 * time.Second

// adminTimeout is how long a client of the admin port may take over one
// answer, and maxAdmin the number of its connections: whoever can reach the
// port must not use up the descriptors that requests need.
const (
	adminTimeout = 30 * time.Second
	maxAdmin     = 256
)

// adminServer is the http.Server of the admin port.
func (s *Sidecar) adminServer() *http.Server {
	return &http.Server{
		Handler: s.admin(), ErrorLog: slog.NewLogLogger(s.logger.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: adminTimeout, IdleTimeout: adminTimeout,
		MaxHeaderBytes: 64 << 10,
	}
}

// A cappedListener closes at once the connections beyond its limit.
type cappedListener struct {
	net.Listener
	limit int64
	open  atomic.Int64
}

func (l *cappedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= l.limit {
			return &cappedConn{Conn: c, l: l}, nil
		}
		l.open.Add(-1)
		_ = c.Close()
	}
}

type cappedConn struct {
	net.Conn
	l    *cappedListener
	once sync.Once
}

func (c *cappedConn) Close() error {
	c.once.Do(func() { c.l.open.Add(-1) })
	return c.Conn.Close()
}

// admin serves the live page and what stands behind it. Nothing of it changes
// anything but /drain.
func (s *Sidecar) admin() http.Handler {
	m := http.NewServeMux()
	m.Handle("GET /", page.Handler())
	m.HandleFunc("GET /api/verdict", s.getVerdict)
	m.HandleFunc("GET /api/requests", s.getRequests)
	m.HandleFunc("GET /api/history", s.getHistory)
	m.Handle("GET /metrics", s.metrics.Handler())
	m.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	m.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	m.HandleFunc("GET /readyz", s.getReady)
	m.HandleFunc("GET /drain", s.getDrain)
	for pattern, h := range s.pages {
		m.Handle(pattern, h)
	}
	return sameHost(m)
}

// sameHost keeps web pages from reading a loopback port under a name of their
// own (DNS rebinding): there, only localhost and addresses are good names.
func sameHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		if local != nil && local.IP.IsLoopback() && host != "localhost" && net.ParseIP(strings.Trim(host, "[]")) == nil {
			http.Error(w, fmt.Sprintf("Host %q is not an address of this port; use localhost or %s", r.Host, local), http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

type sharesJSON struct {
	Queue        float64 `json:"queue"`
	ServerQueue  float64 `json:"server_queue"`
	Upload       float64 `json:"upload"`
	Preprocess   float64 `json:"preprocess"`
	Transfer     float64 `json:"transfer"`
	Forward      float64 `json:"forward"`
	Postprocess  float64 `json:"postprocess"`
	Unattributed float64 `json:"unattributed"`
}

type forwardJSON struct {
	Slope      float64    `json:"slope_ms"`
	Intercept  float64    `json:"intercept_ms"`
	Elasticity float64    `json:"elasticity"`
	CI95       [2]float64 `json:"ci95"`
	Against    string     `json:"against"`
	N          int        `json:"n"`
}

type classJSON struct {
	Class      string       `json:"class"`
	Cause      string       `json:"cause"`
	Confidence float64      `json:"confidence"`
	Since      time.Time    `json:"since"`
	Requests   int          `json:"requests"`
	OK         int          `json:"ok"`
	Timed      int          `json:"timed"`
	Rejected   int          `json:"rejected"`
	Expired    int          `json:"expired"`
	Canceled   int          `json:"canceled"`
	Failed     int          `json:"failed"`
	Refused    int          `json:"refused"` // by the server: 429 and 503
	Mean       float64      `json:"mean_ms"`
	P50        float64      `json:"p50_ms"`
	P95        float64      `json:"p95_ms"`
	Throughput float64      `json:"throughput"`
	Shares     sharesJSON   `json:"shares"`
	Tail       sharesJSON   `json:"tail_shares"`
	Forward    *forwardJSON `json:"forward"` // null: no line could be fitted
	Warnings   []string     `json:"warnings"`
	Evidence   []string     `json:"evidence"`
	Advice     string       `json:"advice"`
	StagesFrom string       `json:"stages_from"` // "": the requests' own timings
	Device     *deviceJSON  `json:"device"`      // null: none is told
}

func classOf(v classifier.Verdict) classJSON {
	r := v.Report
	c := classJSON{
		Class: v.Class, Cause: string(v.Cause), Confidence: v.Confidence, Since: v.Since,
		Requests: r.Requests, OK: r.OK, Timed: r.Timed, Rejected: r.Rejected, Expired: r.Expired, Canceled: r.Canceled, Failed: r.Failed, Refused: r.Refused,
		Mean: milliseconds(r.Mean), P50: milliseconds(r.P50), P95: milliseconds(r.P95), Throughput: r.Throughput,
		Shares: sharesJSON(r.Shares), Tail: sharesJSON(r.TailShares),
		Warnings: append([]string{}, v.Warnings...), Evidence: append([]string{}, v.Evidence...), Advice: v.Advice,
	}
	if l := r.Forward; l.OK {
		c.Forward = &forwardJSON{milliseconds(l.Slope), milliseconds(l.Intercept), l.Elasticity, l.CI95, l.Against, l.N}
	}
	c.StagesFrom, c.Device = r.StagesFrom, deviceOf(r.Device)
	return c
}

func (s *Sidecar) getVerdict(w http.ResponseWriter, r *http.Request) {
	verdicts, err := s.watch.over(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	g := s.server.Gate.State()
	classes := []classJSON{}
	for _, v := range verdicts {
		classes = append(classes, classOf(v))
	}
	writeJSON(w, map[string]any{
		"classes": classes,
		"waiting": g.Waiting, "inflight": g.Inflight, "abandoned": g.Abandoned, "draining": g.Draining,
		"max_concurrency": g.MaxConcurrency, "max_queue_size": g.MaxQueueSize,
		"oldest_waiting_ms": milliseconds(g.OldestWaiting), "oldest_inflight_ms": milliseconds(g.OldestInflight),
		"admitted": g.Admitted, "dropped": s.sink.Dropped() + s.spans.Dropped(),
		"listen": s.Addr(), "server": s.server.target, "version": s.version, "thresholds": s.watch.currentThresholds(),
		"sources": s.watch.evidence.Status(), "otlp": s.watch.tapJSON(), "untrusted": s.untrusted.Load(),
	})
}

func (s *Sidecar) getRequests(w http.ResponseWriter, r *http.Request) {
	n := 100
	if v := r.URL.Query().Get("n"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 0 {
			http.Error(w, fmt.Sprintf("n=%q is not a number of records; use n=100", v), http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	e := json.NewEncoder(w)
	for _, o := range s.watch.last(n) {
		if e.Encode(&o) != nil {
			return
		}
	}
}

func (s *Sidecar) getHistory(w http.ResponseWriter, r *http.Request) {
	class := r.URL.Query().Get("class") // FormValue would read a body, onto the disk if it is large
	points, forward := s.watch.history(class)
	writeJSON(w, map[string]any{
		"class": class, "points": append([]point{}, points...), "forward": append([]forwardPoint{}, forward...),
		"alert": s.watch.currentThresholds().AlertQueue,
	})
}

func (s *Sidecar) getReady(w http.ResponseWriter, _ *http.Request) {
	if s.notReady.Load() {
		http.Error(w, "draining", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

// getDrain is for the server's preStop hook: it returns when the server may be
// stopped. A page in some browser must not be able to call it.
func (s *Sidecar) getDrain(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "" && r.Header.Get("Sec-Fetch-Site") != "none" {
		http.Error(w, "not from a web page", http.StatusForbidden)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.drainTimeout() + adminTimeout))
	ctx, cancel := context.WithTimeout(r.Context(), s.drainTimeout())
	defer cancel()
	if err := s.Drain(ctx); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "drained")
}

// Drain makes weir not ready, then refuses newcomers, and returns when no
// request waits or runs any more.
func (s *Sidecar) Drain(ctx context.Context) error {
	if s.notReady.CompareAndSwap(false, true) {
		s.logger.Info("draining")
	}
	pause := time.NewTimer(drainPause)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	s.server.Gate.Drain()
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		g := s.server.Gate.State()
		if g.Waiting+g.Inflight == 0 {
			return nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("drain_timeout passed with %d requests waiting and %d in the server", g.Waiting, g.Inflight)
		}
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(b)
}
