package proxy

import (
	"cmp"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strings"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// fault is a mistake in a value that reads well but makes no sense. It is told
// once: not where the key, or a part of it, could not even be read.
func (l *loader) fault(path, format string, args ...any) {
	if !l.faulty(path) {
		l.mistake(l.placeAt(path), path, format, args...)
	}
}

func (l *loader) faulty(path string) bool {
	return slices.ContainsFunc(l.mistakes, func(m mistake) bool { return m.key == path || within(path, m.key) })
}

// within tells whether the key path is a part of the key whole.
func within(whole, path string) bool {
	rest, ok := strings.CutPrefix(path, whole)
	return ok && rest != "" && (rest[0] == '.' || rest[0] == '[')
}

// placeAt is where the key was written, or else the list or map around it.
func (l *loaded) placeAt(path string) place {
	for path != "" {
		if p, ok := l.places[path]; ok {
			return p
		}
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
	return place{}
}

// check finds values that cannot be meant.
func (l *loader) check() {
	c := &l.cfg
	l.checkAddresses()
	l.checkLimits() // before checkRoutes: a route with a mistake is there nevertheless
	l.checkRoutes()
	l.checkTimings()
	l.checkThresholds()
	l.checkEnvoy()
	l.checkTLS()
	l.checkTaps()
	between(l, "otlp_wait", c.OTLPWait, Duration(time.Millisecond), seconds(60))
	l.checkSources("server_metrics", c.ServerMetrics, false)
	l.checkSources("device", c.Device, true)
	l.oneOf("half_close", c.HalfClose, "abort", "keep")
	if c.StreamProtocol != "" {
		l.oneOf("stream_protocol", c.StreamProtocol, protocolNames()...)
	}
	if c.Probe != "" && !strings.HasPrefix(c.Probe, "/") {
		l.fault("probe", "value %.80q is no path; write one that begins with /, such as /health", c.Probe)
	}
	l.oneOf("server_kind", c.ServerKind, append([]string{"auto"}, classifier.ServerKinds()...)...)
	l.oneOf("log_format", c.LogFormat, "text", "json")
	l.oneOf("log_level", c.LogLevel, "debug", "info", "warn", "error")
	between(l, "window", c.Window, seconds(1), seconds(3600))
	between(l, "connect_timeout", c.ConnectTimeout, Duration(time.Millisecond), seconds(3600))
	between(l, "max_head_size", c.MaxHeadSize, 1<<10, 16<<20)
	between(l, "records", c.Records, 0, 100_000)
	between(l, "keep_queue_share", c.KeepQueueShare, 0, 1)
}

func between[T cmp.Ordered](l *loader, key string, v, least, most T) {
	if v < least || v > most {
		l.fault(key, "value %v is out of range; write one from %v to %v", v, least, most)
	}
}

func (l *loader) oneOf(key, v string, words ...string) {
	if !slices.Contains(words, v) {
		l.fault(key, "value %.80q is unknown; write %s", v, strings.Join(words, " or "))
	}
}

func (l *loader) checkAddresses() {
	c := &l.cfg
	_, server, err := serverAddress(c.Server)
	if err != nil {
		l.fault("server", "value %.200q %v", c.Server, err)
	}
	if path, socket, bad := socketPath(c.Listen); socket {
		switch {
		case bad != nil:
			l.fault("listen", "value %.200q %v", c.Listen, bad)
		case err == nil && path == server:
			l.fault(l.later("server", "listen"), "server and listen are one socket, and weir would be its own server; choose another path for one of the two")
		}
		l.checkListen("admin", c.Admin)
		return
	}
	listens := c.Listen == NoListen || l.checkListen("listen", c.Listen)
	if !l.checkListen("admin", c.Admin) || !listens {
		return
	}
	if overlap(c.Listen, c.Admin) {
		l.fault(l.later("listen", "admin"), "listen %s and admin %s are one address; choose another port for one of the two", c.Listen, c.Admin)
	}
	if err == nil && reaches(server, c.Listen) {
		l.fault(l.later("server", "listen"), "server %s and listen %s are one address, and weir would be its own server; choose another port for one of the two", c.Server, c.Listen)
	}
}

// later is the key of the two that was written last, which is likely the one
// to change.
func (l *loader) later(a, b string) string {
	p, q := l.placeAt(a), l.placeAt(b)
	if cmp.Or(cmp.Compare(p.source, q.source), cmp.Compare(p.line, q.line)) > 0 {
		return a
	}
	return b
}

func (l *loader) checkListen(key, address string) bool {
	_, port, err := net.SplitHostPort(address)
	switch {
	case isPort(address):
		l.fault(key, "value %q is a port alone; write %q", address, ":"+address)
	case err != nil:
		l.fault(key, "value %.80q is no address; write host:port, or :port for all interfaces", address)
	case !isPort(port):
		l.fault(key, "value %.80q has no port from 0 to 65535; write host:port, or :port for all interfaces", address)
	default:
		return true
	}
	return false
}

// overlap tells whether two listeners would ask for one address.
func overlap(a, b string) bool {
	return reaches(a, b) || reaches(b, a)
}

// reaches tells whether who dials an address reaches the listener.
func reaches(address, listen string) bool {
	host, port := splitHost(address)
	on, at := splitHost(listen)
	return port == at && port != "0" && (host == on || isWild(on) && isLocal(host))
}

func splitHost(address string) (host, port string) {
	host, port, _ = net.SplitHostPort(address)
	if host == "localhost" {
		host = "127.0.0.1"
	}
	return host, port
}

func isWild(host string) bool { return host == "" || net.ParseIP(host).IsUnspecified() }

func isLocal(host string) bool { return isWild(host) || net.ParseIP(host).IsLoopback() }

func (l *loader) checkRoutes() {
	r, _ := NewRouter(nil)
	for i, template := range l.cfg.Routes {
		if err := r.add(template); err != nil {
			l.fault(fmt.Sprintf("routes[%d]", i), "%v", err)
		}
	}
}

func (l *loader) checkLimits() {
	named := make(map[string]int)
	for i, limit := range l.cfg.Limits {
		path, name := fmt.Sprintf("limits[%d]", i), limit.Route+limit.Model
		first, twice := named[name]
		switch {
		case limit.Route == "" && limit.Model == "":
			l.fault(path, "names neither route nor model; give one of the two")
			continue
		case limit.Route != "" && limit.Model != "":
			l.fault(path, "names both route %q and model %q; make two entries", limit.Route, limit.Model)
			continue
		case limit.Route != "" && !slices.Contains(l.cfg.Routes, limit.Route) && !l.faulty("routes"):
			l.fault(path+".route", "value %.200q is none of routes; %s", limit.Route,
				suggest(limit.Route, l.cfg.Routes, plain, "write one of them as it stands there, or add it"))
		case strings.Contains(limit.Model, "/") || len(limit.Model) > maxModel:
			l.fault(path+".model", "value %.200q is no segment of a path; write it as in requests, of at most %d bytes, a slash as %%2F", limit.Model, maxModel)
		case twice:
			l.fault(path, "is a second limit for %q, after limits[%d]; keep one of the two", name, first)
		}
		named[name] = i
	}
}

func (l *loader) checkTimings() {
	var good []tracing.Mapping
	for i, one := range l.cfg.Timings {
		path := fmt.Sprintf("timings[%d]", i)
		if _, err := tracing.NewIngest(append(good, one)); err != nil {
			l.fault(path, "%s", strings.TrimPrefix(err.Error(), "timings: "))
			continue
		}
		good = append(good, one)
	}
}

// thresholdRanges are those of the thresholds that are not shares, from 0 to 1.
var thresholdRanges = map[string][2]float64{
	"min_requests": {1, 1e6}, "min_timed": {1, 1e6}, "min_baseline": {1, 1e6},
	"healthy_slowdown": {1, 100}, "upload_hides": {1, 100}, "inflated": {0, 100}, "batch_periods": {0, 100},
	"copy_rate": {1, 1e13}, "instances": {1, 1000},
}

func (l *loader) checkThresholds() {
	v := reflect.ValueOf(l.cfg.Thresholds)
	for _, f := range fieldsOf(v.Type()) {
		limits, ok := thresholdRanges[keyOf(f)]
		if !ok {
			limits[1] = 1
		}
		if n := v.FieldByIndex(f.Index); n.CanInt() {
			between(l, "thresholds."+keyOf(f), n.Int(), int64(limits[0]), int64(limits[1]))
		} else {
			between(l, "thresholds."+keyOf(f), n.Float(), limits[0], limits[1])
		}
	}
	t := &l.cfg.Thresholds
	l.ascend("healthy_queue", t.HealthyQueue, "queue_share", t.QueueShare)
	l.ascend("queue_share", t.QueueShare, "alert_queue", t.AlertQueue)
	l.ascend("saturated", t.Saturated, "responds", t.Responds)
	l.ascend("device_idle", t.DeviceIdle, "device_full", t.DeviceFull)
}

func (l *loader) ascend(low string, a float64, high string, b float64) {
	if a <= b || l.faulty("thresholds."+low) || l.faulty("thresholds."+high) {
		return
	}
	key := l.later("thresholds."+low, "thresholds."+high)
	l.fault(key, "%s %v is above %s %v; lower the one or raise the other", low, a, high, b)
}
