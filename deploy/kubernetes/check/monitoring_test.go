package check

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The fields of the Prometheus operator's types that are used here; another is
// an error until it is added.
type (
	podMonitor struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			JobLabel            string               `json:"jobLabel"`
			Selector            metav1.LabelSelector `json:"selector"`
			PodMetricsEndpoints []struct {
				Port     string `json:"port"`
				Path     string `json:"path"`
				Interval string `json:"interval"`
			} `json:"podMetricsEndpoints"`
		} `json:"spec"`
	}
	prometheusRule struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              rules `json:"spec"`
	}
	rules struct {
		Groups []group `json:"groups"`
	}
	group struct {
		Name     string `json:"name"`
		Interval string `json:"interval"`
		Rules    []rule `json:"rules"`
	}
	rule struct {
		Record        string            `json:"record"`
		Alert         string            `json:"alert"`
		Expr          string            `json:"expr"`
		For           string            `json:"for"`
		KeepFiringFor string            `json:"keep_firing_for"`
		Labels        map[string]string `json:"labels"`
		Annotations   map[string]string `json:"annotations"`
	}
)

const (
	rulesFile      = "deploy/prometheus/weir.rules.yaml"
	monitoringFile = "deploy/kubernetes/monitoring.yaml"
	generated      = "  # From here on generated: UPDATE=1 make manifests\n"
)

func rulesOf(t *testing.T) (r rules) {
	t.Helper()
	if err := decode([]byte(read(t, rulesFile)), &r); err != nil {
		t.Fatalf("%s: %v", rulesFile, err)
	}
	return r
}

// TestMain renews what is generated before any test reads it, if UPDATE is set.
func TestMain(m *testing.M) {
	if os.Getenv("UPDATE") != "" {
		text, err := monitoringText()
		if err == nil {
			err = os.WriteFile(filepath.Join(root, monitoringFile), []byte(text), 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// monitoringText is what monitoringFile must be: its own head, then the text of
// the rules, indented, so that their comments come along.
func monitoringText() (string, error) {
	text, err := os.ReadFile(filepath.Join(root, monitoringFile))
	if err != nil {
		return "", err
	}
	head, _, ok := strings.Cut(string(text), generated)
	if !ok {
		return "", fmt.Errorf("%s has no line %q", monitoringFile, generated)
	}
	text, err = os.ReadFile(filepath.Join(root, rulesFile))
	if err != nil {
		return "", err
	}
	_, groups, ok := strings.Cut("\n"+string(text), "\ngroups:\n")
	if !ok {
		return "", fmt.Errorf("%s has no line groups:", rulesFile)
	}
	var b strings.Builder
	b.WriteString(head + generated + "  groups:\n")
	for line := range strings.Lines(groups) {
		if line != "\n" {
			line = "  " + line
		}
		b.WriteString(line)
	}
	return b.String(), nil
}

func TestPrometheusRuleIsTheRulesFile(t *testing.T) {
	want, err := monitoringText()
	if err != nil {
		t.Fatal(err)
	}
	if read(t, monitoringFile) != want {
		t.Errorf("%s does not have the rules of %s; run UPDATE=1 make manifests", monitoringFile, rulesFile)
	}
	if p := the[prometheusRule](t, manifests(t)); !reflect.DeepEqual(p.Spec, rulesOf(t)) {
		t.Errorf("spec.groups differ from %s after decoding", rulesFile)
	}
}

func TestThePodMonitorFindsWeirsPort(t *testing.T) {
	objects := manifests(t)
	m, p := the[podMonitor](t, objects), thePod(t)
	d, s := the[appsv1.Deployment](t, objects), the[corev1.Service](t, objects)
	if !reflect.DeepEqual(m.Spec.Selector.MatchLabels, d.Spec.Selector.MatchLabels) || !reflect.DeepEqual(s.Spec.Selector, d.Spec.Selector.MatchLabels) {
		t.Errorf("the PodMonitor selects %v, the Service %v, the Deployment %v", m.Spec.Selector.MatchLabels, s.Spec.Selector, d.Spec.Selector.MatchLabels)
	}
	if p.labels[m.Spec.JobLabel] == "" {
		t.Errorf("jobLabel %q is no label of the pod; the rules need one job for each service", m.Spec.JobLabel)
	}
	if len(m.Spec.PodMetricsEndpoints) != 1 {
		t.Fatalf("%d endpoints, want one", len(m.Spec.PodMetricsEndpoints))
	}
	e := m.Spec.PodMetricsEndpoints[0]
	if containerPort(p.weir, e.Port).IntVal == 0 || e.Path != "/metrics" {
		t.Errorf("the PodMonitor scrapes %s on %q, want /metrics on one of weir's ports", e.Path, e.Port)
	}
	if n := the[networkingv1.NetworkPolicy](t, objects); !opens(n, e.Port) {
		t.Errorf("the NetworkPolicy keeps Prometheus from port %s", e.Port)
	}
}

func opens(n *networkingv1.NetworkPolicy, port string) bool {
	for _, rule := range n.Spec.Ingress {
		for _, p := range rule.Ports {
			if p.Port.StrVal == port {
				return true
			}
		}
	}
	return false
}
