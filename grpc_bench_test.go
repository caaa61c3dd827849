//go:build parts

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// bytesCodec is for messages that are bytes already.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (bytesCodec) Unmarshal(b []byte, v any) error { *v.(*[]byte) = bytes.Clone(b); return nil }
func (bytesCodec) Name() string                    { return "bytes" }

// nginxGRPC is nginx as a proxy of gRPC: every call is passed on as it comes.
const nginxGRPC = `worker_processes auto; daemon off; pid %[1]s/pid; error_log %[1]s/error.log;
events { worker_connections 1024; }
http {
  access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  keepalive_requests 100000000;
  upstream server { server %[2]s; keepalive 64; keepalive_requests 100000000; }
  server { listen %[3]s http2; location / { grpc_pass grpc://server; client_max_body_size 0; } }
}
`

// BenchmarkGRPCUnary compares, within one run and in turns, unary calls of
// 8 KiB by 16 callers over one connection: direct, through nginx, through weir.
func BenchmarkGRPCUnary(b *testing.B) {
	peers := beginPeers(b)
	type result struct{ rates, p99s []float64 }
	results := make(map[string]*result)
	for b.Loop() {
		for _, p := range peers {
			rate, p99 := hammer(b, p.conn, time.Second)
			r := results[p.name]
			if r == nil {
				r = &result{}
				results[p.name] = r
			}
			r.rates, r.p99s = append(r.rates, rate), append(r.p99s, p99)
		}
	}
	for name, r := range results {
		slices.Sort(r.rates)
		slices.Sort(r.p99s)
		b.ReportMetric(r.rates[len(r.rates)/2], name+"_calls/s")
		b.ReportMetric(r.p99s[len(r.p99s)/2], name+"_p99_ms")
	}
}

type grpcPeer struct {
	name string
	conn *grpc.ClientConn
}

func beginPeers(b *testing.B) (peers []grpcPeer) {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer(grpc.ForceServerCodec(bytesCodec{}), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		var m []byte
		for {
			if err := s.RecvMsg(&m); err != nil {
				if err == io.EOF {
					return nil
				}
				return err
			}
			m = m[:64]
			if err := s.SendMsg(&m); err != nil {
				return err
			}
		}
	}))
	go func() { _ = server.Serve(l) }()
	b.Cleanup(server.Stop)
	a := freeAddresses(b, 3)
	dir := b.TempDir()
	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxGRPC, dir, l.Addr(), a[0]), 0o600); err != nil {
		b.Fatal(err)
	}
	beginFor(b, nil, "/usr/sbin/nginx", "-c", conf, "-p", dir)
	beginFor(b, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "serve", "--server", "http://"+l.Addr().String(), "--listen", a[1], "--admin", a[2], "--log-level", "error")
	for _, p := range []struct{ name, address string }{{"direct", l.Addr().String()}, {"nginx", a[0]}, {"weir", a[1]}} {
		for end := time.Now().Add(10 * time.Second); !answers(p.address); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				b.Fatalf("%s does not listen", p.name)
			}
		}
		c, err := grpc.NewClient(p.address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{})))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		peers = append(peers, grpcPeer{p.name, c})
	}
	return peers
}

// hammer makes calls for a while and returns calls a second and the 99th
// percentile of their time in ms.
func hammer(b *testing.B, c *grpc.ClientConn, length time.Duration) (rate, p99 float64) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), length+20*time.Second)
	defer cancel()
	var mu sync.Mutex
	var all []time.Duration
	began := time.Now()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			var own []time.Duration
			for in, out := make([]byte, 8<<10), []byte(nil); time.Since(began) < length; {
				at := time.Now()
				if err := c.Invoke(ctx, "/nvidia.riva.asr.RivaSpeechRecognition/Recognize", &in, &out); err != nil {
					b.Error(err)
					return
				}
				own = append(own, time.Since(at))
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, own...)
		})
	}
	wg.Wait()
	if len(all) == 0 {
		b.Fatal("no call came back")
	}
	slices.Sort(all)
	return float64(len(all)) / time.Since(began).Seconds(), float64(all[len(all)*99/100]) / float64(time.Millisecond)
}

func freeAddresses(b *testing.B, n int) (addresses []string) {
	b.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		defer l.Close()
		addresses = append(addresses, l.Addr().String())
	}
	return addresses
}

// beginFor starts a program that ends with the benchmark.
func beginFor(b *testing.B, env []string, name string, args ...string) {
	b.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatalf("%s: %v; `make parts` installs what the benchmarks need", name, err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	})
}
