//go:build parts

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// A relay stands in front of a backend and can be away: then it takes no
// connections and has closed those that there were.
type relay struct {
	*testing.T
	address, backend string
	mu               sync.Mutex
	listener         net.Listener
	conns            []net.Conn
}

func newRelay(t *testing.T, backend string) *relay {
	t.Helper()
	r := &relay{T: t, address: free(t, 1)[0], backend: backend}
	r.on()
	t.Cleanup(r.off)
	return r
}

func (r *relay) on() {
	r.Helper()
	l, err := net.Listen("tcp", r.address)
	if err != nil {
		r.Fatal(err)
	}
	r.mu.Lock()
	r.listener = l
	r.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.carry(c)
		}
	}()
}

func (r *relay) carry(c net.Conn) {
	b, err := net.Dial("tcp", r.backend)
	if err != nil {
		c.Close()
		return
	}
	r.mu.Lock()
	r.conns = append(r.conns, c, b)
	r.mu.Unlock()
	go func() { _, _ = io.Copy(b, c); b.Close() }()
	_, _ = io.Copy(c, b)
	c.Close()
}

func (r *relay) off() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listener.Close()
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

// A real server with OpenTelemetry's own SDK, and a real backend: one trace has
// the client, weir's spans and the server's below them, each once, also where
// the backend was away for a minute.
func TestTheServersOwnSpansJoinWeirsInJaeger(t *testing.T) {
	j := beginJaeger(t)
	for _, c := range []struct {
		transport, protocol string
		away                time.Duration
	}{{"http", "grpc", 0}, {"proto", "http/protobuf", 0}, {"grpc", "grpc", time.Minute}} {
		t.Run(c.transport+" to "+c.protocol, func(t *testing.T) {
			backend := j.grpc
			if c.protocol != "grpc" {
				backend = j.http
			}
			r := newRelay(t, strings.TrimPrefix(backend, "http://"))
			tap := free(t, 2)
			endpoint := "http://" + tap[1]
			if c.transport == "grpc" {
				endpoint = "http://" + tap[0]
			}
			server := begin(t, nil, "node", "testdata/otel-server.mjs", c.transport, endpoint, filepath.Join(partsFolder(t), "node")).says(`listening on (http://\S+)`)[1]
			w := beginWeir(t, server, []string{
				"OTEL_EXPORTER_OTLP_PROTOCOL=" + c.protocol, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + tracesEndpoint(c.protocol, "http://"+r.address), "OTEL_BSP_EXPORT_TIMEOUT=120000", "OTEL_EXPORTER_OTLP_TIMEOUT=60000", // weir drops its own spans sooner
			}, "--window", "1s", "--otlp-grpc", tap[0], "--otlp-http", tap[1])
			n := 0
			send := func() string {
				n++
				id := fmt.Sprintf("%016x%016x", len(c.transport)*1000+len(c.protocol), n)
				curl(t, id, w.url+"/asr", "--data-binary", "audio")
				return id
			}
			ids := []string{send()}
			j.trace(t, ids[0], "forward")
			if c.away > 0 {
				r.off()
				back := time.Now().Add(c.away)
				time.Sleep(c.away * 3 / 4) // the outage is what is tested
				for range 5 {
					ids = append(ids, send())
				}
				time.Sleep(time.Until(back))
				r.on()
			}
			ids = append(ids, send())
			for _, id := range ids {
				checkJoined(t, j, id)
			}
			checkFilled(t, w.admin)
		})
	}
}

// checkJoined holds a trace to the spans that it must have, once each.
func checkJoined(t *testing.T, j jaeger, id string) {
	t.Helper()
	var tr trace
	eventually(t, 60*time.Second, "all spans of "+id, func() bool {
		tr = j.trace(t, id, "forward")
		return len(tr.Spans) >= 5
	})
	names := map[string][]span{}
	for _, s := range tr.Spans {
		names[s.OperationName] = append(names[s.OperationName], s)
	}
	// Both weir's SERVER span and the server's have the name of the route.
	if len(names["POST"]) != 1 || len(names["POST /asr"]) != 2 || len(names["preprocess"]) != 1 || len(names["forward"]) != 1 {
		t.Fatalf("%s has %d spans: %+v", id, len(tr.Spans), names)
	}
	client := names["POST"][0]
	var server span
	for _, s := range names["POST /asr"] {
		if s.parent() == client.SpanID {
			server = s
		}
	}
	if server.SpanID == "" || names["forward"][0].parent() != server.SpanID || names["preprocess"][0].parent() != server.SpanID {
		t.Errorf("%s: the server's spans are not below weir's: %+v", id, tr.Spans)
	}
}

// checkFilled looks for the spans' times in weir's own records.
func checkFilled(t *testing.T, admin string) {
	t.Helper()
	eventually(t, 30*time.Second, "records with the server's stages", func() bool {
		res, err := http.Get(admin + "/api/requests?n=1")
		if err != nil {
			return false
		}
		defer res.Body.Close()
		var o struct {
			Source  string
			Batch   int
			Audio   float64 `json:"audio_seconds"`
			Timings []struct{ Name string }
		}
		return json.NewDecoder(res.Body).Decode(&o) == nil && o.Source == "otlp" && o.Batch == 2 && o.Audio == 2.5 && len(o.Timings) == 2
	})
}
