// Package check proves of the files under deploy/ what needs no cluster and no
// engine: that each key is one that its reader knows, and that the comments in
// them, the runbook and the metrics say the same. It is a module of its own,
// because weir itself has no use for the types of Kubernetes.
//
// Run it as `make manifests`, or here as `go test -count=1`: Go's test cache
// does not see files outside of a module, and all that is checked lies outside.
package check

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// root is the repository, seen from here.
const root = "../../.."

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// decode is as strict as the API server with --validate=strict: an unknown, a
// doubled or a wrongly cased key is an error. sigs.k8s.io/yaml's UnmarshalStrict
// alone would take "restartpolicy" for restartPolicy, and the server would not.
func decode(text []byte, into any) error {
	asJSON, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}
	strict, err := json.UnmarshalStrict(asJSON, into)
	return errors.Join(append(strict, err)...)
}

// kinds are those that the manifests may use.
var kinds = map[metav1.TypeMeta]func() any{
	{APIVersion: "v1", Kind: "Service"}:                              func() any { return new(corev1.Service) },
	{APIVersion: "apps/v1", Kind: "Deployment"}:                      func() any { return new(appsv1.Deployment) },
	{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}:      func() any { return new(networkingv1.NetworkPolicy) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "PodMonitor"}:     func() any { return new(podMonitor) },
	{APIVersion: "monitoring.coreos.com/v1", Kind: "PrometheusRule"}: func() any { return new(prometheusRule) },
}

var separator = regexp.MustCompile(`(?m)^---.*$`)

// decodeAll reads a file of many documents into the type that each asks for.
func decodeAll(text string) (objects []any, err error) {
	for i, doc := range separator.Split(text, -1) {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			return nil, fmt.Errorf("document %d: %w", i+1, err)
		}
		made := kinds[kind]
		if made == nil {
			return nil, fmt.Errorf("document %d: no type for kind %q of apiVersion %q; add it to kinds", i+1, kind.Kind, kind.APIVersion)
		}
		o := made()
		if err := decode([]byte(doc), o); err != nil {
			return nil, fmt.Errorf("document %d, %s: %w", i+1, kind.Kind, err)
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// manifests decodes every file of deploy/kubernetes.
func manifests(t *testing.T) (objects []any) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "deploy/kubernetes/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no manifests found: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		some, err := decodeAll(string(text))
		if err != nil {
			t.Errorf("%s: %v", filepath.Base(file), err)
		}
		objects = append(objects, some...)
	}
	return objects
}

// the returns the only object of its type.
func the[T any](t *testing.T, objects []any) *T {
	t.Helper()
	var found []*T
	for _, o := range objects {
		if o, ok := o.(*T); ok {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %v in deploy/kubernetes, want one", len(found), reflect.TypeFor[T]())
	}
	return found[0]
}

func TestEveryManifestDecodesStrictly(t *testing.T) {
	if len(manifests(t)) == 0 {
		t.Error("the manifests hold no object")
	}
}

func TestABadManifestIsRefused(t *testing.T) {
	good := `apiVersion: apps/v1
kind: Deployment
metadata: {name: asr}
spec:
  template:
    spec:
      initContainers:
        - name: weir
          restartPolicy: Always
`
	if _, err := decodeAll(good); err != nil {
		t.Fatalf("the good one: %v", err)
	}
	for _, c := range []struct{ name, old, new, want string }{
		{"a misspelt key", "restartPolicy", "restartPolcy", `unknown field "spec.template.spec.initContainers[0].restartPolcy"`},
		{"a wrongly cased key", "restartPolicy", "restartpolicy", `unknown field "spec.template.spec.initContainers[0].restartpolicy"`},
		{"a key at the wrong level", "      initContainers", "  initContainers", `unknown field "spec.initContainers"`},
		{"a doubled key", "name: weir", "name: weir\n          name: weir", "already set"},
		{"a wrong type", "restartPolicy: Always", "restartPolicy: [Always]", "cannot unmarshal array"},
		{"a kind without a type", "kind: Deployment", "kind: Deploymint", `no type for kind "Deploymint"`},
		{"a second document that is bad", good, good + "---\napiVersion: v1\nkind: Service\nspec: {prots: []}\n", "document 2, Service"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := decodeAll(strings.Replace(good, c.old, c.new, 1))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v; want one with %q", err, c.want)
			}
		})
	}
}
