package envoy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	client "github.com/envoyproxy/go-control-plane/pkg/client/sotw/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/proxy"
)

func withRuntime(mode string) func(*proxy.Config) {
	return func(c *proxy.Config) {
		c.MaxConcurrency, c.MaxQueueSize = 8, 100
		c.EnvoyRuntime, c.EnvoyCluster = mode, "outbound|80||asr.default.svc"
		c.EnvoyKeys = []string{"max_requests", "max_pending_requests", "max_connections", "adaptive_concurrency"}
		c.EnvoyMax = 64
	}
}

const breaker = "circuit_breakers.outbound|80||asr.default.svc.default."

// keysOf reads a runtime layer as Envoy does: nested maps are steps of a path.
func keysOf(t *testing.T, r *client.Response) map[string]float64 {
	t.Helper()
	if len(r.Resources) != 1 {
		t.Fatalf("%d resources, want one", len(r.Resources))
	}
	one := new(runtimev3.Runtime)
	if err := r.Resources[0].UnmarshalTo(one); err != nil {
		t.Fatal(err)
	}
	keys := make(map[string]float64)
	for k, v := range one.GetLayer().GetFields() {
		keys[k] = v.GetNumberValue()
	}
	return keys
}

// fetch waits for a response of go-control-plane's own client.
func fetch(t *testing.T, c client.ADSClient) *client.Response {
	t.Helper()
	type result struct {
		*client.Response
		error
	}
	got := make(chan result, 1)
	go func() { r, err := c.Fetch(); got <- result{r, err} }()
	select {
	case r := <-got:
		if r.error != nil {
			t.Fatal(r.error)
		}
		return r.Response
	case <-time.After(10 * time.Second):
		t.Fatal("no response")
		return nil
	}
}

func newClient(t *testing.T, r *rig) client.ADSClient {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c := client.NewADSClient(ctx, &corev3.Node{Id: "test"}, resource.RuntimeType)
	if err := c.InitConnect(r.conn); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRuntimeFollowsTheLimitsAndIsTakenBack(t *testing.T) {
	r := newRig(t, withRuntime("apply"))
	c := newClient(t, r)
	got := keysOf(t, fetch(t, c))
	want := map[string]float64{breaker + "max_requests": 8, breaker + "max_connections": 8, breaker + "max_pending_requests": 64, "adaptive_concurrency.gradient_controller.max_concurrency_limit": 8}
	if !maps.Equal(got, want) {
		t.Errorf("keys %v, want %v", got, want)
	}
	if err := c.Ack(); err != nil {
		t.Fatal(err)
	}
	r.eventually(func() bool { return r.state().Runtime.Envoys == 1 }, "the confirmation")
	if n := r.state().Runtime.Notes; len(n) != 1 || !strings.Contains(n[0], "would be 100") {
		t.Errorf("notes %q; want one on the bound of max_pending_requests", n)
	}

	next := r.cfg
	next.MaxConcurrency = 200
	if err := r.side.Reload(next); err != nil {
		t.Fatal(err)
	}
	if got := keysOf(t, fetch(t, c)); got[breaker+"max_requests"] != 64 {
		t.Errorf("after the change %v, want max_requests at its bound 64", got)
	}
	if err := c.Nack("no such cluster"); err != nil {
		t.Fatal(err)
	}
	r.eventually(func() bool { s := r.state().Runtime; return s.NACKs == 1 && s.LastNACK == "no such cluster" }, "the refusal is shown")
	if text := string(r.get("/metrics")); !strings.Contains(text, "weir_envoy_runtime_nacks_total 1") {
		t.Error("the refusal is not counted on /metrics")
	}

	next.MaxConcurrency = 0
	if err := r.side.Reload(next); err != nil {
		t.Fatal(err)
	}
	if got := keysOf(t, fetch(t, c)); len(got) != 0 {
		t.Errorf("without a limit %v, want no keys", got)
	}
	_ = c.Ack()
	next.MaxConcurrency = 4
	if err := r.side.Reload(next); err != nil {
		t.Fatal(err)
	}
	if got := keysOf(t, fetch(t, c)); got[breaker+"max_requests"] != 4 {
		t.Errorf("limited again %v", got)
	}
	_ = c.Ack()
	r.eventually(func() bool { return len(r.state().Runtime.Versions) == 1 }, "confirmed")
	go r.stop()
	if got := keysOf(t, fetch(t, c)); len(got) != 0 {
		t.Errorf("at weir's end %v, want no keys", got)
	}
	_ = c.Ack()
}

func TestADryRunShowsAndChangesNothing(t *testing.T) {
	r := newRig(t, withRuntime("dry_run"))
	if got := keysOf(t, fetch(t, newClient(t, r))); len(got) != 0 {
		t.Errorf("Envoy got %v", got)
	}
	var page struct {
		Runtime struct {
			Mode string
			Keys map[string]int
		}
	}
	if err := json.Unmarshal(r.get("/api/envoy"), &page); err != nil {
		t.Fatal(err)
	}
	if page.Runtime.Mode != "dry_run" || page.Runtime.Keys[breaker+"max_requests"] != 8 {
		t.Errorf("page shows %+v", page.Runtime)
	}
}

func TestRuntimeIsOffByDefault(t *testing.T) {
	r := newRig(t)
	s, err := runtimev3.NewRuntimeDiscoveryServiceClient(r.conn).StreamRuntime(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.Unimplemented {
		t.Errorf("%v, want Unimplemented", err)
	}
}

// Envoy asks the runtime service by name, the way of rtds_layer.
func TestRuntimeByItsOwnServiceInBothForms(t *testing.T) {
	r := newRig(t, withRuntime("apply"))
	c := runtimev3.NewRuntimeDiscoveryServiceClient(r.conn)
	s, err := c.StreamRuntime(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Send(&discoveryv3.DiscoveryRequest{Node: &corev3.Node{Id: "envoy"}, TypeUrl: resource.RuntimeType, ResourceNames: []string{"weir"}})
	a, err := s.Recv()
	if err != nil || len(a.Resources) != 1 {
		t.Fatalf("%v, %v", a, err)
	}
	d, err := c.DeltaRuntime(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = d.Send(&discoveryv3.DeltaDiscoveryRequest{Node: &corev3.Node{Id: "envoy"}, TypeUrl: resource.RuntimeType, ResourceNamesSubscribe: []string{"weir"}})
	b, err := d.Recv()
	if err != nil || len(b.Resources) != 1 || b.Resources[0].Name != "weir" {
		t.Fatalf("%v, %v", b, err)
	}
	_ = d.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resource.RuntimeType, ResponseNonce: b.Nonce, ErrorDetail: &rpcstatus.Status{Message: "bad"}})
	r.eventually(func() bool { return r.state().Runtime.NACKs == 1 }, "the refusal")
}

func TestWeirIsNoSourceOfClusters(t *testing.T) {
	r := newRig(t, withRuntime("apply"))
	s, err := discoveryv3.NewAggregatedDiscoveryServiceClient(r.conn).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Send(&discoveryv3.DiscoveryRequest{Node: &corev3.Node{Id: "envoy"}, TypeUrl: resource.ClusterType})
	if a, err := s.Recv(); err == nil {
		t.Errorf("got %v", a)
	} else if err == io.EOF || !strings.Contains(fmt.Sprint(err), "Runtime") {
		t.Errorf("refused with %v, want a reason that names what there is", err)
	}
}
