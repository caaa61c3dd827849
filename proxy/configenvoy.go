package proxy

import (
	"net"
	"net/url"
	"strings"
)

// NoListen as the value of listen leaves out the port for clients: requests
// come by other ways, such as an Envoy.
const NoListen = "none"

// defaultEnvoyListen is where weir listens for an Envoy when it does nothing else.
const defaultEnvoyListen = "127.0.0.1:9465"

// EnvoyConfig is what concerns an Envoy beside weir (package proxy/envoy).
type EnvoyConfig struct {
	EnvoyListen     string   `yaml:"envoy_listen" restart:"yes" group:"Envoy (weir envoy, or weir serve with envoy_listen)" help:"Address of the gRPC services for an Envoy (access log, external processor, runtime): host:port or unix:/path. If empty: 127.0.0.1:9465 under weir envoy, else none."`
	EnvoyAdmin      string   `yaml:"envoy_admin" restart:"yes" help:"Envoy's admin address, http://host:port. Its counters tell how much of the access log was lost and how many requests bypassed the queue."`
	EnvoyStatPrefix string   `yaml:"envoy_stat_prefix" restart:"yes" help:"The stat_prefix of the connection manager that logs to weir or asks it."`
	EnvoyCluster    string   `yaml:"envoy_cluster" restart:"yes" help:"Envoy's name of the server's cluster: log entries of others are passed over, and it stands in the runtime keys. If empty: all entries."`
	EnvoyCoverage   float64  `yaml:"envoy_coverage" restart:"yes" help:"Share of Envoy's requests that the access log must bring; below it there is no verdict."`
	EnvoyORCA       bool     `yaml:"envoy_orca" restart:"yes" help:"Tell balancers in endpoint-load-metrics how full the server is, where the server does not do so itself."`
	EnvoyRuntime    string   `yaml:"envoy_runtime" restart:"yes" help:"Give Envoy weir's limits as runtime keys (RTDS): off, dry_run (only show them) or apply."`
	EnvoyKeys       []string `yaml:"envoy_runtime_keys" restart:"yes" help:"The keys: max_requests, max_pending_requests and max_connections of the cluster, adaptive_concurrency."`
	EnvoyMin        int      `yaml:"envoy_runtime_min" restart:"yes" help:"The least value that a key ever gets."`
	EnvoyMax        int      `yaml:"envoy_runtime_max" restart:"yes" help:"The largest one."`
}

func defaultEnvoy() EnvoyConfig {
	return EnvoyConfig{
		EnvoyStatPrefix: "ingress_http", EnvoyCoverage: 0.9, EnvoyRuntime: "off",
		EnvoyKeys: []string{"max_requests", "max_pending_requests"}, EnvoyMin: 1, EnvoyMax: 1024,
	}
}

// EnvoyAddress is where weir listens for an Envoy: "tcp" and host:port, or
// "unix" and a path; empty if it does not.
func (c Config) EnvoyAddress() (network, address string) {
	listen := c.EnvoyListen
	if listen == "" && c.Listen == NoListen {
		listen = defaultEnvoyListen
	}
	if strings.HasPrefix(listen, "unix:") {
		network, address, _ = serverAddress(listen)
		return network, address
	}
	if listen == "" {
		return "", ""
	}
	return "tcp", listen
}

var envoyKeys = []string{"max_requests", "max_pending_requests", "max_connections", "adaptive_concurrency"}

func (l *loader) checkEnvoy() {
	c := &l.cfg
	l.checkEnvoyAddresses()
	between(l, "envoy_coverage", c.EnvoyCoverage, 0, 1)
	between(l, "envoy_runtime_min", c.EnvoyMin, 1, 1_000_000)
	between(l, "envoy_runtime_max", c.EnvoyMax, 1, 1_000_000)
	l.oneOf("envoy_runtime", c.EnvoyRuntime, "off", "dry_run", "apply")
	for _, key := range c.EnvoyKeys {
		l.oneOf("envoy_runtime_keys", key, envoyKeys...)
	}
	if c.EnvoyMin > c.EnvoyMax {
		l.fault(l.later("envoy_runtime_min", "envoy_runtime_max"), "envoy_runtime_min %d is above envoy_runtime_max %d; lower the one or raise the other", c.EnvoyMin, c.EnvoyMax)
	}
	if c.EnvoyRuntime != "off" && c.EnvoyCluster == "" {
		l.fault("envoy_runtime", "value %q needs the name of Envoy's cluster; set envoy_cluster", c.EnvoyRuntime)
	}
	if strings.ContainsAny(c.EnvoyStatPrefix+c.EnvoyCluster, " \t\n") {
		l.fault(l.later("envoy_stat_prefix", "envoy_cluster"), "value has a space in it; write the name as in Envoy's configuration")
	}
}

func (l *loader) checkEnvoyAddresses() {
	c := &l.cfg
	switch {
	case strings.HasPrefix(c.EnvoyListen, "unix:"):
		if _, _, err := serverAddress(c.EnvoyListen); err != nil {
			l.fault("envoy_listen", "value %.200q %v", c.EnvoyListen, err)
		}
	case c.EnvoyListen != "" && l.checkListen("envoy_listen", c.EnvoyListen):
		for _, other := range []struct{ key, address string }{{"listen", c.Listen}, {"admin", c.Admin}} {
			if overlap(c.EnvoyListen, other.address) {
				l.fault(l.later("envoy_listen", other.key), "envoy_listen %s and %s %s are one address; choose another port for one of the two", c.EnvoyListen, other.key, other.address)
			}
		}
	}
	if c.EnvoyAdmin == "" {
		return
	}
	u, err := url.Parse(c.EnvoyAdmin)
	if err != nil || u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
		l.fault("envoy_admin", "value %.200q is no address; write http://host:port", c.EnvoyAdmin)
	} else if _, _, err := net.SplitHostPort(u.Host); err != nil {
		l.fault("envoy_admin", "value %.200q has no port; write http://host:port", c.EnvoyAdmin)
	}
}
