// Bench measures weir beside its peers, in one run on one machine: nginx as a
// plain proxy, a ReverseProxy with otelhttp, and no proxy at all. Every request
// through weir and the ReverseProxy is traced and exported; nginx does none of
// that. The figures that mean something are the ratios.
//
// It needs nginx and wrk, and ends by itself: make bench.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

func main() {
	rounds := flag.Int("rounds", 5, "interleaved rounds; medians are printed")
	length := flag.Duration("length", 2*time.Second, "length of one measurement")
	proxyFor := flag.String("reverse-proxy", "", "internal: serve as the ReverseProxy for this URL")
	listen := flag.String("listen", "", "internal: its address")
	flag.Parse()
	if *proxyFor != "" {
		log.Fatal(reverseProxy(*proxyFor, *listen))
	}
	if err := bench(*rounds, *length); err != nil {
		log.Fatal(err)
	}
}

// reverseProxy is the peer that a Go team would write.
func reverseProxy(target, listen string) error {
	exp, err := otlptracehttp.New(context.Background())
	if err != nil {
		return err
	}
	tp := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exp))
	u, err := url.Parse(target)
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 64
	p := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(u) },
		Transport:     otelhttp.NewTransport(transport, otelhttp.WithTracerProvider(tp)),
		FlushInterval: -1,
	}
	return http.ListenAndServe(listen, otelhttp.NewHandler(p, "proxy", otelhttp.WithTracerProvider(tp)))
}

// A peer is one way to the origin.
type peer struct {
	name, addr string
	pid        int
}

func bench(rounds int, length time.Duration) error {
	dir, err := os.MkdirTemp("", "weir-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // nginx's workers are another user
		return err
	}
	var b benchmark
	defer b.stop()
	if err := b.start(dir); err != nil {
		return err
	}
	fmt.Printf("idle: weir uses %d MiB of resident memory\n\n", memory(b.peers[3].pid, "VmRSS"))
	if err := b.large(min(rounds, 3)); err != nil { // first: its peak of memory must not be that of the other load
		return err
	}
	b.small(dir, rounds, length)
	return nil
}

type benchmark struct {
	peers  []peer
	procs  []*exec.Cmd
	origin string
}

func (b *benchmark) start(dir string) error {
	origin, proxied := freeAddr(), freeAddr()
	b.origin = origin
	if err := sparse(filepath.Join(dir, "large"), large); err != nil {
		return err
	}
	collector, err := blackhole()
	if err != nil {
		return err
	}
	weir := filepath.Join(dir, "weir")
	if out, err := exec.Command("go", "build", "-o", weir, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("building weir (run this in the repository's root): %v\n%s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	otlp := "OTEL_EXPORTER_OTLP_ENDPOINT=http://" + collector
	swallow, err := blackhole()
	if err != nil {
		return err
	}
	if _, err := b.nginx(dir, "origin", originConf(dir, origin, swallow)); err != nil {
		return err
	}
	nginx, err := b.nginx(dir, "proxy", proxyConf(origin, proxied))
	if err != nil {
		return err
	}
	rp, rpAddr := 0, freeAddr()
	if rp, err = b.run([]string{otlp}, self, "-reverse-proxy", "http://"+origin, "-listen", rpAddr); err != nil {
		return err
	}
	weirAddr := freeAddr()
	pid, err := b.run([]string{otlp}, weir, "serve", "--server", "http://"+origin, "--listen", weirAddr, "--admin", freeAddr(), "--log-level", "error")
	if err != nil {
		return err
	}
	b.peers = []peer{{"direct", origin, 0}, {"nginx", proxied, nginx}, {"ReverseProxy", rpAddr, rp}, {"weir", weirAddr, pid}}
	for _, p := range b.peers {
		if err := waitFor(p.addr); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// nginx starts one with the given server block.
func (b *benchmark) nginx(dir, name, server string) (pid int, err error) {
	dir = filepath.Join(dir, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, []byte(nginxConf(dir, server)), 0o644); err != nil {
		return 0, err
	}
	return b.run(nil, "nginx", "-c", conf, "-p", dir)
}

func (b *benchmark) run(env []string, name string, args ...string) (int, error) {
	c := exec.Command(name, args...)
	c.Env = append(os.Environ(), env...)
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		return 0, fmt.Errorf("starting %s: %w", name, err)
	}
	b.procs = append(b.procs, c)
	return c.Process.Pid, nil
}

func (b *benchmark) stop() {
	for _, c := range b.procs {
		_ = c.Process.Signal(os.Interrupt)
		_ = c.Wait()
	}
}

// small measures small requests with wrk, 16 connections.
func (b *benchmark) small(dir string, rounds int, length time.Duration) {
	post := filepath.Join(dir, "post.lua")
	_ = os.WriteFile(post, []byte("wrk.method='POST' wrk.body=string.rep('a',8192)"), 0o644)
	for _, load := range []struct {
		name string
		args []string
	}{{"GET, small", nil}, {"POST, 8 KiB", []string{"-s", post}}} {
		rps, p99, cpu := make([][]float64, len(b.peers)), make([][]float64, len(b.peers)), make([][]float64, len(b.peers))
		for range rounds {
			for i, p := range b.peers {
				before := cpuTime(p.pid)
				r, t := wrk(p.addr, length, load.args)
				rps[i], p99[i] = append(rps[i], r), append(p99[i], t)
				cpu[i] = append(cpu[i], float64(cpuTime(p.pid)-before)/(r*length.Seconds())*1e6)
			}
		}
		fmt.Printf("%s, 16 connections, %d rounds of %v\n", load.name, rounds, length)
		fmt.Printf("  %-14s %9s %9s %9s %14s\n", "", "req/s", "/nginx", "p99 ms", "CPU us/request")
		for i, p := range b.peers {
			fmt.Printf("  %-14s %9.0f %9.2f %9.2f %14.1f\n", p.name, median(rps[i]), median(rps[i])/median(rps[1]), median(p99[i]), median(cpu[i]))
		}
		fmt.Println()
	}
}

const large = 256 << 20 // bytes

// large measures one body of 256 MiB each way.
func (b *benchmark) large(rounds int) error {
	fmt.Printf("one body of 256 MiB, %d rounds\n  %-14s %9s %11s %14s\n", rounds, "", "upload s", "download s", "peak RSS MiB")
	up, down := make([][]float64, len(b.peers)), make([][]float64, len(b.peers))
	for range rounds {
		for i, p := range b.peers {
			u, err := timed(func() (*http.Response, error) {
				return http.Post("http://"+p.addr+"/upload", "audio/wav", io.LimitReader(zeros{}, large))
			})
			if err != nil {
				return err
			}
			d, err := timed(func() (*http.Response, error) { return http.Get("http://" + p.addr + "/large") })
			if err != nil {
				return err
			}
			up[i], down[i] = append(up[i], u), append(down[i], d)
		}
	}
	for i, p := range b.peers {
		fmt.Printf("  %-14s %9.2f %11.2f %14d\n", p.name, median(up[i]), median(down[i]), memory(p.pid, "VmHWM"))
	}
	fmt.Println()
	return nil
}

func timed(do func() (*http.Response, error)) (float64, error) {
	began := time.Now()
	resp, err := do()
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err = io.Copy(io.Discard, resp.Body); err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s", resp.Status)
	}
	return time.Since(began).Seconds(), err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

var wrkLine = regexp.MustCompile(`(?m)^\s*99%\s+([\d.]+)(us|ms|s)|^Requests/sec:\s+([\d.]+)`)

func wrk(addr string, length time.Duration, extra []string) (rps, p99 float64) {
	args := append([]string{"-t1", "-c16", "--latency", "-d" + strconv.Itoa(int(length.Seconds())) + "s"}, extra...)
	out, err := exec.Command("wrk", append(args, "http://"+addr+"/")...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "Non-2xx") || strings.Contains(string(out), "Socket errors") {
		log.Fatalf("wrk: %v\n%s", err, out)
	}
	for _, m := range wrkLine.FindAllStringSubmatch(string(out), -1) {
		if m[3] != "" {
			rps, _ = strconv.ParseFloat(m[3], 64)
			continue
		}
		p99, _ = strconv.ParseFloat(m[1], 64)
		p99 *= map[string]float64{"us": 1e-3, "ms": 1, "s": 1e3}[m[2]]
	}
	return rps, p99
}

// memory reads one line of the process's status, in MiB; nginx's is that of
// its largest worker.
func memory(pid int, key string) (most int) {
	for _, p := range append(children(pid), pid) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, key+":"); ok {
				kib, _ := strconv.Atoi(strings.Fields(rest)[0])
				most = max(most, kib/1024)
			}
		}
	}
	return most
}

// cpuTime is the time that a process and its children have spent, in seconds.
func cpuTime(pid int) (sum float64) {
	for _, p := range append(children(pid), pid) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		_, rest, ok := strings.Cut(string(b), ") ")
		if f := strings.Fields(rest); ok && len(f) > 13 {
			user, _ := strconv.Atoi(f[11])
			system, _ := strconv.Atoi(f[12])
			sum += float64(user+system) / 100 // USER_HZ
		}
	}
	return sum
}

func children(pid int) (out []int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, f := range strings.Fields(string(b)) {
		n, _ := strconv.Atoi(f)
		out = append(out, n)
	}
	return out
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

func freeAddr() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func waitFor(addr string) error {
	var err error
	for range 200 {
		var c net.Conn
		if c, err = net.Dial("tcp", addr); err == nil {
			return c.Close()
		}
		time.Sleep(50 * time.Millisecond)
	}
	return err
}

// blackhole reads what it is sent, OTLP or audio, and keeps nothing.
func blackhole() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go func() {
		_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	}()
	return l.Addr().String(), nil
}

func sparse(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Truncate(size)
}

func nginxConf(dir, server string) string {
	return fmt.Sprintf(`worker_processes auto;
daemon off;
pid %[1]s/pid;
error_log %[1]s/error.log;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  keepalive_requests 100000000;
  client_max_body_size 0;
  %[2]s
}
`, dir, server)
}

// originConf answers as an ASR server does, with its stages: weir has them to
// read, to draw and to count.
func originConf(dir, addr, swallow string) string {
	return fmt.Sprintf(`server { listen %s;
    location / { return 200 "hello from the origin\n"; add_header Server-Timing "queue;dur=0.01, forward;dur=0.01;batch=4, postprocess;dur=0.01"; }
    location /large { root %s; }
    location /upload { proxy_pass http://%s; proxy_http_version 1.1; proxy_request_buffering off; }
  }`, addr, dir, swallow)
}

func proxyConf(origin, addr string) string {
	return fmt.Sprintf(`upstream origin { server %s; keepalive 64; keepalive_requests 100000000; }
  server { listen %s;
    location / {
      proxy_pass http://origin;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_request_buffering off;
      proxy_buffering off;
    }
  }`, origin, addr)
}
