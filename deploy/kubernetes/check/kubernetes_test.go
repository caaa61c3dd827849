package check

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// pod is the Deployment's, with its two containers told apart.
type pod struct {
	labels       map[string]string
	spec         corev1.PodSpec
	weir, server corev1.Container
}

func thePod(t *testing.T) pod {
	t.Helper()
	d := the[appsv1.Deployment](t, manifests(t))
	p := pod{labels: d.Spec.Template.Labels, spec: d.Spec.Template.Spec}
	if len(p.spec.InitContainers) != 1 || len(p.spec.Containers) != 1 {
		t.Fatalf("%d init containers and %d containers, want one of each", len(p.spec.InitContainers), len(p.spec.Containers))
	}
	p.weir, p.server = p.spec.InitContainers[0], p.spec.Containers[0]
	return p
}

func env(c corev1.Container, name string) string {
	for _, e := range c.Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

// portOf is the number after the last colon.
func portOf(address string) intstr.IntOrString {
	return intstr.Parse(address[strings.LastIndex(address, ":")+1:])
}

func containerPort(c corev1.Container, name string) intstr.IntOrString {
	for _, p := range c.Ports {
		if p.Name == name {
			return intstr.FromInt32(p.ContainerPort)
		}
	}
	return intstr.FromInt32(0)
}

func TestWeirIsANativeSidecar(t *testing.T) {
	w := thePod(t).weir
	if w.RestartPolicy == nil || *w.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Errorf("restartPolicy %v, want Always: without it weir is an init container that must end first", w.RestartPolicy)
	}
}

func TestProbesAskWeirItself(t *testing.T) {
	w := thePod(t).weir
	for _, c := range []struct {
		name, path string
		probe      *corev1.Probe
	}{
		{"startupProbe", "/healthz", w.StartupProbe},
		{"livenessProbe", "/healthz", w.LivenessProbe},
		{"readinessProbe", "/readyz", w.ReadinessProbe},
	} {
		if c.probe == nil || c.probe.HTTPGet == nil || c.probe.HTTPGet.Path != c.path || c.probe.HTTPGet.Port.StrVal != "weir-admin" {
			t.Errorf("%s is %v, want GET %s on weir-admin", c.name, c.probe, c.path)
		}
	}
}

func TestTheServerWaitsForTheDrainAndWeirDoesNot(t *testing.T) {
	p := thePod(t)
	if p.weir.Lifecycle != nil {
		t.Errorf("weir has hooks %v; a preStop of its own would end the proxy before the server", p.weir.Lifecycle)
	}
	l := p.server.Lifecycle
	if l == nil || l.PreStop == nil || l.PreStop.HTTPGet == nil {
		t.Fatal("the server has no preStop httpGet: requests in flight would die with it")
	}
	get := l.PreStop.HTTPGet
	// By number: names of ports are looked up in the container that has the hook.
	if admin := portOf(env(p.weir, "WEIR_ADMIN")); get.Path != "/drain" || get.Port != admin {
		t.Errorf("preStop asks for %s on port %v, want /drain on %v", get.Path, get.Port.String(), admin.String())
	}
	drain, err := time.ParseDuration(env(p.weir, "WEIR_DRAIN_TIMEOUT"))
	if err != nil {
		t.Fatalf("WEIR_DRAIN_TIMEOUT: %v", err)
	}
	grace := p.spec.TerminationGracePeriodSeconds
	if grace == nil || time.Duration(*grace)*time.Second <= drain {
		t.Errorf("terminationGracePeriodSeconds %v must be more than WEIR_DRAIN_TIMEOUT %v", grace, drain)
	}
}

func TestContainersAreLockedDown(t *testing.T) {
	p := thePod(t)
	s := p.spec.SecurityContext
	if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.RunAsUser == nil || *s.RunAsUser == 0 {
		t.Errorf("the pod's securityContext does not keep root out: %v", s)
	}
	if s == nil || s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("the pod has no RuntimeDefault seccomp profile")
	}
	for _, c := range []corev1.Container{p.weir, p.server} {
		s := c.SecurityContext
		switch {
		case s == nil:
			t.Errorf("%s has no securityContext", c.Name)
		case s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem:
			t.Errorf("%s can write to its root", c.Name)
		case s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation:
			t.Errorf("%s may gain privileges", c.Name)
		case s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) > 0:
			t.Errorf("%s keeps capabilities", c.Name)
		}
		if s != nil && (s.RunAsUser != nil || s.RunAsNonRoot != nil) {
			t.Errorf("%s overrides the pod's user", c.Name)
		}
	}
}

func TestMemoryIsLimitedAndTheCPUIsNot(t *testing.T) {
	w := thePod(t).weir
	memory := w.Resources.Limits.Memory().Value()
	if memory == 0 {
		t.Error("weir has no memory limit")
	}
	if _, limited := w.Resources.Limits[corev1.ResourceCPU]; limited {
		t.Error("weir has a CPU limit: throttling a proxy is latency")
	}
	if soft := bytesOf(t, env(w, "GOMEMLIMIT")); soft <= 0 || soft >= memory {
		t.Errorf("GOMEMLIMIT %d must be below the memory limit %d, so that Go collects before the kernel kills", soft, memory)
	}
}

func TestTheServiceLeadsToWeir(t *testing.T) {
	p, s := thePod(t), the[corev1.Service](t, manifests(t))
	for key, value := range s.Spec.Selector {
		if p.labels[key] != value {
			t.Errorf("the Service selects %s=%s, the pod has %q", key, value, p.labels[key])
		}
	}
	if len(s.Spec.Ports) != 1 {
		t.Fatalf("the Service has %d ports, want one: the admin port is not for clients", len(s.Spec.Ports))
	}
	target := s.Spec.Ports[0].TargetPort
	if listen := portOf(env(p.weir, "WEIR_LISTEN")); target.Type != intstr.String || containerPort(p.weir, target.StrVal) != listen {
		t.Errorf("targetPort %v must be the name of weir's port %v", target.String(), listen.String())
	}
	if containerPort(p.server, target.StrVal).IntVal != 0 {
		t.Errorf("the server has a port %v, too; clients would go around weir", target.String())
	}
}

func TestPortsAgreeWithWeirsSettings(t *testing.T) {
	p := thePod(t)
	if admin, port := portOf(env(p.weir, "WEIR_ADMIN")), containerPort(p.weir, "weir-admin"); admin != port {
		t.Errorf("WEIR_ADMIN has port %v, the container's port weir-admin is %v", admin.String(), port.String())
	}
	if !strings.HasPrefix(env(p.weir, "WEIR_ADMIN"), ":") {
		t.Error("WEIR_ADMIN must be on all of the pod's addresses: the kubelet comes from outside")
	}
	server := strings.TrimPrefix(env(p.weir, "WEIR_SERVER"), "http://")
	if !slices.Contains(p.server.Args, server) || !strings.HasPrefix(server, "127.0.0.1:") {
		t.Errorf("WEIR_SERVER %q must be the loopback address that the server is told in its arguments %q", server, p.server.Args)
	}
}

// /drain takes a pod out of service for good: whoever can reach it can stop the
// service.
func TestTheAdminPortIsOpenToPrometheusAlone(t *testing.T) {
	p, n := thePod(t), the[networkingv1.NetworkPolicy](t, manifests(t))
	for key, value := range n.Spec.PodSelector.MatchLabels {
		if p.labels[key] != value {
			t.Errorf("the NetworkPolicy selects %s=%s, the pod has %q", key, value, p.labels[key])
		}
	}
	for _, rule := range n.Spec.Ingress {
		if len(rule.Ports) == 0 {
			t.Error("a rule of the NetworkPolicy opens all ports")
		}
		for _, port := range rule.Ports {
			if (port.Port.StrVal == "weir-admin") != (len(rule.From) > 0) || containerPort(p.weir, port.Port.StrVal).IntVal == 0 {
				t.Errorf("port %v is open to %v; want http to all and weir-admin to Prometheus", port.Port.String(), rule.From)
			}
		}
	}
}

func TestEveryWeirVariableIsAKeyOfItsConfiguration(t *testing.T) {
	keys := configKeys(t)
	for _, e := range thePod(t).weir.Env {
		checkVariable(t, keys, e.Name)
	}
	for name := range compose(t).Services["weir"].Environment {
		checkVariable(t, keys, name)
	}
}

func checkVariable(t *testing.T, keys map[string]bool, name string) {
	t.Helper()
	if key, ok := strings.CutPrefix(name, "WEIR_"); ok && !keys[strings.ToLower(key)] {
		t.Errorf("%s is no setting of weir; it has %q", name, slices.Sorted(maps.Keys(keys)))
	}
}
