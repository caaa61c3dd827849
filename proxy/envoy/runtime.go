package envoy

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"

	"weir/proxy"
)

// runtimeLayer is the name of the one resource that weir serves.
const runtimeLayer = "weir"

// A runtimePush gives Envoy weir's limits as keys of a runtime layer (RTDS).
// They lie over the clusters' own settings as long as the layer has them: weir
// owns no cluster, and an empty layer is Envoy's own configuration again.
type runtimePush struct {
	cluster  string
	names    []string
	min, max int
	dry      bool
	limits   func() proxy.Limits
	logger   *slog.Logger
	cache    *cachev3.LinearCache

	mu      sync.Mutex
	keys    map[string]int // what Envoy is to have, or in a dry run would have
	notes   []string
	acked   map[int64]string // version that each stream has confirmed
	nacks   int64
	refusal string // the last NACK's text
	changed chan struct{}
}

func newRuntimePush(cfg proxy.Config, limits func() proxy.Limits, logger *slog.Logger) *runtimePush {
	r := &runtimePush{
		cluster: cfg.EnvoyCluster, names: cfg.EnvoyKeys, min: cfg.EnvoyMin, max: cfg.EnvoyMax,
		dry: cfg.EnvoyRuntime != "apply", limits: limits, logger: logger,
		acked: make(map[int64]string), changed: make(chan struct{}, 1),
	}
	// A version is never that of an earlier weir: Envoys outlive it.
	prefix := strconv.FormatInt(time.Now().UnixNano(), 36) + "-"
	r.cache = cachev3.NewLinearCache(resource.RuntimeType, cachev3.WithVersionPrefix(prefix))
	r.put(nil)
	r.update()
	return r
}

// register offers the layer by the runtime service and, for clients that know
// no other, by the aggregated one; of no other type is there anything.
func (r *runtimePush) register(ctx context.Context, to *grpc.Server) {
	s := serverv3.NewServer(ctx, r.cache, serverv3.CallbackFuncs{
		StreamRequestFunc: func(id int64, q *discoveryv3.DiscoveryRequest) error {
			r.heard(id, q.GetResponseNonce(), q.GetVersionInfo(), q.GetErrorDetail())
			return nil
		},
		StreamDeltaRequestFunc: func(id int64, q *discoveryv3.DeltaDiscoveryRequest) error {
			r.heard(id, q.GetResponseNonce(), q.GetResponseNonce(), q.GetErrorDetail())
			return nil
		},
		StreamClosedFunc:      func(id int64, _ *corev3.Node) { r.closed(id) },
		DeltaStreamClosedFunc: func(id int64, _ *corev3.Node) { r.closed(id) },
	})
	runtimev3.RegisterRuntimeDiscoveryServiceServer(to, s)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(to, s)
}

// heard takes an Envoy's answer to a version.
func (r *runtimePush) heard(id int64, nonce, version string, refused *rpcstatus.Status) {
	if nonce == "" {
		return // its first request
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if refused != nil {
		r.nacks++
		r.refusal = refused.GetMessage()
		r.logger.Warn("Envoy refused the runtime keys", "reason", r.refusal)
	} else {
		r.acked[id] = version
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *runtimePush) closed(id int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.acked, id)
}

// runtimePeriod is how often the limits are looked at.
const runtimePeriod = time.Second

// run follows the limits until ctx ends.
func (r *runtimePush) run(ctx context.Context) {
	t := time.NewTicker(runtimePeriod)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			r.update()
		case <-ctx.Done():
			return
		}
	}
}

// update gives out the keys of the present limits, if they are others.
func (r *runtimePush) update() {
	keys, notes := r.wanted(r.limits())
	r.mu.Lock()
	same := r.keys != nil && maps.Equal(keys, r.keys)
	r.keys, r.notes = keys, notes
	r.mu.Unlock()
	if same {
		return
	}
	if r.dry {
		r.logger.Info("runtime keys that Envoy would get (dry run)", "keys", keys)
		return
	}
	r.logger.Info("runtime keys for Envoy", "keys", keys)
	r.put(keys)
}

// wanted are the keys for the limits, within bounds. Without a limit there are
// none, and Envoy's own configuration is in force.
func (r *runtimePush) wanted(l proxy.Limits) (keys map[string]int, notes []string) {
	keys = make(map[string]int)
	if l.MaxConcurrency <= 0 {
		return keys, []string{"max_concurrency is 0: there is no limit to give"}
	}
	breaker := "circuit_breakers." + r.cluster + ".default."
	for _, name := range r.names {
		key, value := breaker+name, l.MaxConcurrency
		switch name {
		case "adaptive_concurrency":
			key = "adaptive_concurrency.gradient_controller.max_concurrency_limit"
		case "max_pending_requests":
			value = l.MaxQueueSize
		}
		keys[key] = min(max(value, r.min), r.max)
		if keys[key] != value {
			notes = append(notes, fmt.Sprintf("%s would be %d; envoy_runtime_min and envoy_runtime_max make it %d", key, value, keys[key]))
		}
	}
	return keys, notes
}

// put makes keys the layer. Dots in a key are steps into Envoy's tree, so that
// it may stand as a whole.
func (r *runtimePush) put(keys map[string]int) {
	layer := &structpb.Struct{Fields: make(map[string]*structpb.Value, len(keys))}
	for k, v := range keys {
		layer.Fields[k] = structpb.NewNumberValue(float64(v))
	}
	if err := r.cache.UpdateResource(runtimeLayer, types.Resource(&runtimev3.Runtime{Name: runtimeLayer, Layer: layer})); err != nil {
		r.logger.Error("the runtime layer could not be updated", "error", err)
	}
}

// withdraw empties the layer, so that Envoy's own configuration is in force
// again, and waits until ctx ends for the Envoys to confirm it.
func (r *runtimePush) withdraw(ctx context.Context) {
	r.mu.Lock()
	waiting := maps.Clone(r.acked)
	idle := r.dry || len(r.keys) == 0
	r.mu.Unlock()
	if idle {
		return
	}
	r.put(nil)
	for len(waiting) > 0 {
		select {
		case <-r.changed:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		maps.DeleteFunc(waiting, func(id int64, version string) bool { now, open := r.acked[id]; return !open || now != version })
		r.mu.Unlock()
	}
}

// runtimeState is what the admin page shows.
type runtimeState struct {
	Mode     string         `json:"mode"`
	Keys     map[string]int `json:"keys"`
	Notes    []string       `json:"notes"`
	Envoys   int            `json:"envoys"` // that have confirmed a version
	Versions []string       `json:"versions"`
	NACKs    int64          `json:"nacks"`
	LastNACK string         `json:"last_nack,omitempty"`
}

func (r *runtimePush) state() *runtimeState {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &runtimeState{Mode: "apply", Keys: r.keys, Notes: append([]string{}, r.notes...), Envoys: len(r.acked), NACKs: r.nacks, LastNACK: r.refusal}
	if r.dry {
		s.Mode = "dry_run"
	}
	for _, v := range r.acked {
		s.Versions = append(s.Versions, v)
	}
	slices.Sort(s.Versions)
	s.Versions = slices.Compact(s.Versions)
	return s
}

func (r *runtimePush) nackCount() int64 {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nacks
}
