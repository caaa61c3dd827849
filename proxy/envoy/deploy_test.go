package envoy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	grpclogv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	procfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/client_side_weighted_round_robin/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
)

const deploy = "../../deploy/envoy/"

// documents reads a file's YAML documents as JSON.
func documents(t *testing.T, text string) (all [][]byte) {
	t.Helper()
	d := yaml.NewDecoder(strings.NewReader(text))
	for {
		var one any
		err := d.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(one)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
}

// validate holds a message, and all that is packed in it, against the rules in
// Envoy's definitions.
func validate(m proto.Message) (err error) {
	if v, ok := m.(interface{ ValidateAll() error }); ok {
		err = v.ValidateAll()
	}
	visit(m.ProtoReflect(), func(a *anypb.Any) {
		inner, e := a.UnmarshalNew()
		if e == nil {
			e = validate(inner)
		}
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", a.TypeUrl, e))
		}
	})
	return err
}

func visit(m protoreflect.Message, f func(*anypb.Any)) {
	if a, ok := m.Interface().(*anypb.Any); ok {
		f(a)
		return
	}
	m.Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case d.IsMap():
			if d.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool { visit(v.Message(), f); return true })
			}
		case d.Message() == nil:
		case d.IsList():
			for i := range v.List().Len() {
				visit(v.List().Get(i).Message(), f)
			}
		default:
			visit(v.Message(), f)
		}
		return true
	})
}

func load(t *testing.T, text string) (*bootstrapv3.Bootstrap, error) {
	t.Helper()
	b := new(bootstrapv3.Bootstrap)
	if err := protojson.Unmarshal(documents(t, text)[0], b); err != nil {
		return nil, err
	}
	return b, validate(b)
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(deploy + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestConfigurationsForEnvoyHoldAgainstItsDefinitions(t *testing.T) {
	files, err := filepath.Glob(deploy + "*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		name := filepath.Base(f)
		if name == "istio.yaml" {
			continue
		}
		b, err := load(t, readFile(t, name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		checkNames(t, name, b)
	}
}

// checkNames finds clusters that a configuration names and does not have.
func checkNames(t *testing.T, file string, b *bootstrapv3.Bootstrap) {
	have := make(map[string]bool)
	for _, c := range b.GetStaticResources().GetClusters() {
		have[c.Name] = true
		if c.GetLoadAssignment().GetClusterName() != c.Name {
			t.Errorf("%s: cluster %s has the endpoints of %s", file, c.Name, c.GetLoadAssignment().GetClusterName())
		}
	}
	text := readFile(t, file)
	for _, key := range []string{"cluster_name: ", "{ cluster: "} {
		for _, part := range strings.Split(text, key)[1:] {
			if name := strings.FieldsFunc(part, func(c rune) bool { return strings.ContainsRune(" ,}\n", c) })[0]; !have[name] {
				t.Errorf("%s: there is no cluster %s", file, name)
			}
		}
	}
}

func TestABadConfigurationForEnvoyIsRefused(t *testing.T) {
	text := readFile(t, "ext-proc.yaml")
	for _, c := range []struct{ old, new, want string }{
		{"message_timeout: 35s", "message_timeuot: 35s", "message_timeuot"},
		{"response_trailer_mode: SEND", "response_trailer_mode: SENT", "SENT"},
		{"failure_mode_allow: true", "failure_mode_allow: 3", "failureModeAllow"},
		{"http.ext_proc.v3", "http.ext_prok.v3", "ext_prok"},
		{"message_timeout: 35s", "message_timeout: 35000s", "MessageTimeout"},
		{"stat_prefix: ingress_http", "stat_prefix: \"\"", "StatPrefix"},
	} {
		if _, err := load(t, strings.Replace(text, c.old, c.new, 1)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q instead of %q: %v; want an error that names %s", c.new, c.old, err, c.want)
		}
	}
}

// What weir counts on, whatever else the files say.
func TestConfigurationsForEnvoyAskForWhatWeirNeeds(t *testing.T) {
	found := 0
	look := func(name string, m proto.Message) {
		var all func(m proto.Message)
		all = func(m proto.Message) {
			switch m := m.(type) {
			case *procfilterv3.ExternalProcessor:
				found++
				p := m.ProcessingMode
				if p.ResponseTrailerMode != procfilterv3.ProcessingMode_SEND || p.RequestBodyMode != 0 || p.ResponseBodyMode != 0 || !m.FailureModeAllow || m.MessageTimeout.AsDuration() <= 30*time.Second {
					t.Errorf("%s: %v", name, m)
				}
			case *grpclogv3.HttpGrpcAccessLogConfig:
				found++
				tags := m.CommonConfig.CustomTags
				if len(tags) != 1 || tags[0].Tag != poolReady || m.CommonConfig.BufferFlushInterval.AsDuration() > flushTime || !strings.Contains(strings.Join(m.AdditionalResponseHeadersToLog, ","), "server-timing") {
					t.Errorf("%s: %v", name, m)
				}
			}
			visit(m.ProtoReflect(), func(a *anypb.Any) {
				if inner, err := a.UnmarshalNew(); err == nil {
					all(inner)
				}
			})
		}
		all(m)
	}
	for _, name := range []string{"access-log.yaml", "ext-proc.yaml", "runtime.yaml"} {
		b, err := load(t, readFile(t, name))
		if err != nil {
			t.Fatal(err)
		}
		look(name, b)
		if name == "runtime.yaml" && b.GetLayeredRuntime().GetLayers()[0].GetRtdsLayer().GetName() != runtimeLayer {
			t.Errorf("runtime.yaml asks for another layer than %s", runtimeLayer)
		}
	}
	for _, m := range istioPatches(t) {
		look("istio.yaml", m)
	}
	if found != 4 {
		t.Errorf("%d configurations of weir's filters and logs, want 4", found)
	}
}

// istioPatches are the parts of Envoy's configuration in the EnvoyFilters,
// decoded strictly.
func istioPatches(t *testing.T) (all []proto.Message) {
	t.Helper()
	for _, doc := range documents(t, readFile(t, "istio.yaml")) {
		var f struct {
			Spec struct {
				ConfigPatches []struct {
					ApplyTo string
					Patch   struct{ Value json.RawMessage }
				}
			}
		}
		if err := json.NewDecoder(bytes.NewReader(doc)).Decode(&f); err != nil {
			t.Fatal(err)
		}
		for _, p := range f.Spec.ConfigPatches {
			m := map[string]proto.Message{"CLUSTER": new(clusterv3.Cluster), "NETWORK_FILTER": new(listenerv3.Filter), "HTTP_FILTER": new(hcmv3.HttpFilter)}[p.ApplyTo]
			if m == nil {
				t.Fatalf("istio.yaml: a patch of %q", p.ApplyTo)
			}
			if err := protojson.Unmarshal(p.Patch.Value, m); err != nil {
				t.Errorf("istio.yaml: %v", err)
			}
			all = append(all, m)
		}
	}
	return all
}
