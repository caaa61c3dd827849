package check

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
)

// compose reads the file with the library of `docker compose` itself, which
// holds it against the specification's schema.
func compose(t *testing.T) *types.Project {
	t.Helper()
	p, err := loadCompose(read(t, "deploy/compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func loadCompose(text string) (*types.Project, error) {
	dir, err := filepath.Abs(filepath.Join(root, "deploy"))
	if err != nil {
		return nil, err
	}
	return loader.LoadWithContext(context.Background(), types.ConfigDetails{
		WorkingDir:  dir,
		ConfigFiles: []types.ConfigFile{{Filename: filepath.Join(dir, "compose.yaml"), Content: []byte(text)}},
	})
}

func TestABadComposeFileIsRefused(t *testing.T) {
	text := read(t, "deploy/compose.yaml")
	for _, c := range []struct{ old, new, want string }{
		{"mem_limit: 256m", "memlimit: 256m", "memlimit"},
		{"mem_limit: 256m", "mem_limit: [256m]", "mem_limit"},
		{"depends_on: [asrsim]", "depends_on: [asrsimm]", "asrsimm"},
		{"<<: *defaults", "<<: *default", "default"},
		{"volumes:\n  prometheus", "volumes:\n  prometheuss", "prometheus"},
	} {
		_, err := loadCompose(strings.Replace(text, c.old, c.new, 1))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q instead of %q: error %v; want one that names %s", c.new, c.old, err, c.want)
		}
	}
}

func TestComposeServicesAreLockedDownAndOnLoopback(t *testing.T) {
	for name, s := range compose(t).Services {
		if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s is not locked down", name)
		}
		if s.MemLimit == 0 {
			t.Errorf("%s has no memory limit", name)
		}
		if s.Logging == nil || s.Logging.Options["max-size"] == "" {
			t.Errorf("%s's log grows for ever", name)
		}
		if s.Build == nil && !strings.Contains(s.Image, ":") || strings.HasSuffix(s.Image, ":latest") {
			t.Errorf("%s: image %q has no fixed tag", name, s.Image)
		}
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("%s publishes port %s on %q, want 127.0.0.1", name, p.Published, p.HostIP)
			}
		}
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind {
				if _, err := os.Stat(v.Source); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
	}
}

func TestComposeAddressesAgree(t *testing.T) {
	services := compose(t).Services
	weir := services["weir"]
	get := func(name string) string {
		if v := weir.Environment[name]; v != nil {
			return *v
		}
		return ""
	}
	if _, port, _ := strings.Cut(get("WEIR_SERVER"), "http://asrsim"); port == "" || !slices.Contains(services["asrsim"].Command, port) {
		t.Errorf("WEIR_SERVER %q is not where asrsim listens: %q", get("WEIR_SERVER"), services["asrsim"].Command)
	}
	for _, name := range []string{"WEIR_LISTEN", "WEIR_ADMIN"} {
		port := portOf(get(name))
		if !slices.ContainsFunc(weir.Ports, func(p types.ServicePortConfig) bool { return int(p.Target) == port.IntValue() }) {
			t.Errorf("%s %q is not published", name, get(name))
		}
	}
	if scraped := "weir" + get("WEIR_ADMIN"); !strings.Contains(read(t, "deploy/prometheus/prometheus.yml"), "targets: ["+scraped+"]") {
		t.Errorf("prometheus.yml does not scrape %s", scraped)
	}
	if grace := weir.StopGracePeriod; grace == nil || int64(*grace) <= int64(defaultDrainTimeout(t)) {
		t.Errorf("stop_grace_period %v must be longer than drain_timeout %v", grace, defaultDrainTimeout(t))
	}
	if soft := bytesOf(t, get("GOMEMLIMIT")); soft <= 0 || soft >= int64(weir.MemLimit) {
		t.Errorf("GOMEMLIMIT %d must be below mem_limit %d", soft, weir.MemLimit)
	}
}

// unit returns the last value of a key of the systemd unit.
func unit(t *testing.T, key string) (value string) {
	t.Helper()
	for line := range strings.Lines(read(t, "deploy/systemd/weir.service")) {
		if v, ok := strings.CutPrefix(line, key+"="); ok {
			value = strings.TrimSpace(v)
		}
	}
	return value
}

func TestTheSystemdUnitLeavesTimeToDrain(t *testing.T) {
	if drain := defaultDrainTimeout(t); bytesOf(t, strings.TrimSuffix(unit(t, "TimeoutStopSec"), "s")) <= int64(drain.Seconds()) {
		t.Errorf("TimeoutStopSec %q must be longer than drain_timeout %v", unit(t, "TimeoutStopSec"), drain)
	}
}

func TestSystemdTakesTheUnit(t *testing.T) {
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here")
	}
	// It wants the binary to be there.
	file := filepath.Join(t.TempDir(), "weir.service")
	text := strings.ReplaceAll(read(t, "deploy/systemd/weir.service"), "/usr/local/bin/weir", "/bin/true")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	// A mistake in a key is a warning to it, and no error; --man=no, since a README is no manual page.
	if out, err := exec.Command(verify, "verify", "--man=no", file).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}
