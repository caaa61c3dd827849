package check

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/otlptranslator"
	"k8s.io/apimachinery/pkg/api/resource"
)

// What weir has is read from its source rather than imported: this module is
// apart from weir's, and must do its work while weir does not compile.

func parseGo(t *testing.T, path string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// configKeys are the keys of proxy.Config, and the file's own.
func configKeys(t *testing.T) map[string]bool {
	t.Helper()
	keys := map[string]bool{"config": true}
	ast.Inspect(parseGo(t, "proxy/config.go"), func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Config" {
			return true
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			if field.Tag != nil {
				keys[reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("yaml")] = true
			}
		}
		return false
	})
	if len(keys) < 10 {
		t.Fatalf("proxy/config.go has the keys %v only; has Config moved?", keys)
	}
	return keys
}

var drainDefault = regexp.MustCompile(`DrainTimeout: +seconds\((\d+)\)`)

func defaultDrainTimeout(t *testing.T) time.Duration {
	t.Helper()
	m := drainDefault.FindStringSubmatch(read(t, "proxy/config.go"))
	if m == nil {
		t.Fatal("proxy/config.go gives DrainTimeout no default; has DefaultConfig moved?")
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(n) * time.Second
}

// bytesOf reads a size as GOMEMLIMIT has it: 220MiB.
func bytesOf(t *testing.T, size string) int64 {
	t.Helper()
	q, err := resource.ParseQuantity(strings.TrimSuffix(size, "B"))
	if err != nil {
		t.Fatalf("size %q: %v", size, err)
	}
	return q.Value()
}

// A metric is an instrument of tracing/metrics.go.
type metric struct {
	name, prometheus, unit string
	histogram              bool
	buckets                []string
}

// The methods of tracing's instruments that make one, with their types. The
// unit is the second argument, but for level, which counts requests.
var instruments = map[string]otlptranslator.MetricType{
	"histogram": otlptranslator.MetricTypeHistogram,
	"counter":   otlptranslator.MetricTypeMonotonicCounter,
	"sum":       otlptranslator.MetricTypeMonotonicCounter,
	"sums":      otlptranslator.MetricTypeMonotonicCounter,
	"total":     otlptranslator.MetricTypeMonotonicCounter,
	"level":     otlptranslator.MetricTypeNonMonotonicCounter,
	"gauge":     otlptranslator.MetricTypeGauge,
}

// metrics are all that tracing/metrics.go makes, by their Prometheus names,
// which the exporter's own translator gives.
func metrics(t *testing.T) map[string]metric {
	t.Helper()
	namer := otlptranslator.NewMetricNamer("", otlptranslator.UnderscoreEscapingWithSuffixes)
	found := make(map[string]metric)
	var file *ast.File
	look := func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) < 3 {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		receiver, ok := method.X.(*ast.Ident)
		name := literal(call.Args[0])
		if !ok || receiver.Name != "i" || name == "" {
			return true
		}
		if _, ok := instruments[method.Sel.Name]; !ok {
			t.Fatalf("tracing/metrics.go makes %s by the method %s, which is new here; add it to instruments", name, method.Sel.Name)
		}
		m := metric{name: name, unit: literal(call.Args[1]), histogram: method.Sel.Name == "histogram"}
		if method.Sel.Name == "level" {
			m.unit = "{request}"
		}
		if b, ok := call.Args[len(call.Args)-1].(*ast.Ident); ok && m.histogram {
			m.buckets = numbers(file, b.Name)
		}
		var err error
		m.prometheus, err = namer.Build(otlptranslator.Metric{Name: m.name, Unit: m.unit, Type: instruments[method.Sel.Name]})
		if err != nil {
			t.Fatalf("%s: %v", m.name, err)
		}
		found[m.prometheus] = m
		return true
	}
	for _, name := range []string{"tracing/metrics.go", "tracing/envoymetrics.go"} {
		file = parseGo(t, name)
		ast.Inspect(file, look)
	}
	if len(found) < 10 {
		t.Fatalf("tracing/metrics.go makes %d instruments; is instruments' receiver no longer i?", len(found))
	}
	return found
}

// numbers are what the variable lists, as written.
func numbers(file *ast.File, variable string) (list []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || v.Names[0].Name != variable || len(v.Values) != 1 {
			return true
		}
		ast.Inspect(v.Values[0], func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok {
				list = append(list, l.Value)
			}
			return true
		})
		return false
	})
	return list
}

// literal is the string that e spells out, or "".
func literal(e ast.Expr) string {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
		s, _ := strconv.Unquote(l.Value)
		return s
	}
	return ""
}

// words are all strings that the package's source spells out, as labels of
// Prometheus have them: attributes and their values among them.
func words(t *testing.T, dirs ...string) map[string]bool {
	t.Helper()
	found := make(map[string]bool)
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			rel, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parseGo(t, rel), func(n ast.Node) bool {
				if e, ok := n.(ast.Expr); ok {
					found[strings.ReplaceAll(literal(e), ".", "_")] = true
				}
				return true
			})
		}
	}
	return found
}
