package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// layers says what each package may import of weir; what is not listed may
// import nothing of it. only lists who may import a library.
var (
	layers = map[string][]string{
		"weir":                     {"weir/proxy", "weir/proxy/envoy", "weir/proxy/evidence", "weir/classifier", "weir/classifier/ladder", "weir/examples/asrsim"},
		"weir/proxy/evidence":      {"weir/classifier"},
		"weir/examples/helpers/go": {},
		"weir/proxy":               {"weir/proxy/evidence", "weir/proxy/page", "weir/tracing", "weir/classifier"},
		"weir/proxy/envoy":         {"weir/proxy", "weir/tracing", "weir/classifier"},
		"weir/proxy/page":          {},
		"weir/tracing":             {"weir/classifier"},
		"weir/classifier":          {},
		"weir/classifier/ladder":   {"weir/classifier", "weir/tracing"}, // never the proxy
		"weir/examples/asrsim":     {},
		"weir/examples/bench":      nil, // compares weir with others, so it knows them
	}
	only = map[string]string{ // the owners, by spaces
		"go.opentelemetry.io/":           "weir/tracing",
		"github.com/prometheus/":         "weir/tracing",
		"google.golang.org/":             "weir/tracing weir/proxy/envoy weir/classifier/ladder",
		"github.com/valyala/fasthttp":    "weir/proxy",
		"go.yaml.in/":                    "weir/proxy",
		"github.com/envoyproxy/go-contr": "weir/proxy/envoy",
		"github.com/cncf/xds/":           "weir/proxy/envoy",
		"github.com/NVIDIA/go-nvml":      "weir/proxy/evidence",
	}
)

func TestImportsRunDownwardsOnly(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		may, known := layers[p.ImportPath]
		if !known {
			t.Errorf("%s is a package that this test does not know: say above what it may import", p.ImportPath)
		}
		if may == nil {
			continue
		}
		for _, i := range p.Imports {
			checkImport(t, p.ImportPath, i, may)
		}
	}
}

func checkImport(t *testing.T, from, what string, may []string) {
	t.Helper()
	if from == "weir/classifier" && strings.Contains(what, ".") && !strings.HasPrefix(what, "gonum.org/") {
		t.Errorf("%s imports %s: it stands on the standard library and gonum", from, what)
	}
	for prefix, owners := range only {
		if strings.HasPrefix(what, prefix) && !slices.Contains(strings.Fields(owners), from) {
			t.Errorf("%s imports %s: only %s does", from, what, owners)
		}
	}
	if !strings.HasPrefix(what, "weir/") {
		return
	}
	for _, m := range may {
		if m == what {
			return
		}
	}
	t.Errorf("%s imports %s: imports run downwards only", from, what)
}
