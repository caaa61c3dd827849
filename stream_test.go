package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"
)

// upgrades runs a server that accepts every upgrade and then answers each read
// with what it read, unmasked by nobody.
func upgrades(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { accept(c) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

func accept(c net.Conn) {
	defer c.Close()
	r := bufio.NewReaderSize(c, 512)
	for line := ""; line != "\r\n"; {
		var err error
		if line, err = r.ReadString('\n'); err != nil {
			return
		}
	}
	fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
	_, _ = io.Copy(io.Discard, c)
}

func upgrade(address string) (net.Conn, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	fmt.Fprint(c, "GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	b := make([]byte, 256)
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Read(b); err != nil {
		c.Close()
		return nil, err
	}
	return c, c.SetReadDeadline(time.Time{})
}

// BenchmarkPacedStreams sends 100 ms frames on many streams at the pace of
// speech, directly and through weir, and reports the time from a frame's send
// to its receipt by the server.
func BenchmarkPacedStreams(b *testing.B) {
	const streams, frames, size = 1000, 50, 3200
	arrived := make(chan time.Duration, streams*frames)
	address := stamped(b, size, arrived)
	w := beginWeirFor(b, "http://"+address)
	for name, target := range map[string]string{"direct": address, "weir": w[len("http://"):]} {
		b.Run(name, func(b *testing.B) {
			for range b.N {
				paced(b, target, streams, frames, size)
				delays := make([]time.Duration, streams*frames)
				for i := range delays {
					delays[i] = <-arrived
				}
				slices.Sort(delays)
				b.ReportMetric(float64(delays[len(delays)/2].Microseconds())/1000, "ms/p50")
				b.ReportMetric(float64(delays[len(delays)*99/100].Microseconds())/1000, "ms/p99")
			}
		})
	}
}

// epoch is where the benchmark's clock begins.
var epoch = time.Now()

// stamped is a server that tells how old each frame is when it comes.
func stamped(b *testing.B, size int, arrived chan<- time.Duration) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				for line := ""; line != "\r\n" && err == nil; line, err = r.ReadString('\n') {
				}
				fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
				for frame := make([]byte, 8+size); ; {
					if _, err := io.ReadFull(r, frame); err != nil {
						return
					}
					arrived <- time.Since(epoch) - time.Duration(binary.LittleEndian.Uint64(frame[8:]))
				}
			}()
		}
	}()
	return l.Addr().String()
}

func paced(b *testing.B, target string, streams, frames, size int) {
	var wg sync.WaitGroup
	for i := range streams {
		c, err := upgrade(target)
		if err != nil {
			b.Fatal(err)
		}
		wg.Go(func() {
			defer c.Close()
			frame := append([]byte{0x82, 0xfe, byte(size >> 8), byte(size), 0, 0, 0, 0}, make([]byte, size)...)
			at := time.Now().Add(time.Duration(i) * 100 * time.Millisecond / time.Duration(streams))
			for n := range frames {
				time.Sleep(time.Until(at.Add(time.Duration(n) * 100 * time.Millisecond)))
				binary.LittleEndian.PutUint64(frame[8:], uint64(time.Since(epoch)))
				if _, err := c.Write(frame); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// beginWeirFor starts a weir for a benchmark and returns its URL.
func beginWeirFor(b *testing.B, server string) string {
	cmd := exec.Command(os.Args[0], "serve", "--server", server, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), "WEIR_TEST_MAIN=1", "OTEL_SDK_DISABLED=true")
	out, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, _ := bufio.NewReader(out).ReadString('\n')
	m := regexp.MustCompile(`listen=(\S+)`).FindStringSubmatch(line)
	if m == nil {
		b.Fatalf("weir said %q", line)
	}
	return "http://" + m[1]
}
