package proxy

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"weir/tracing"
)

func testRouter(t *testing.T) *Router {
	t.Helper()
	return mustRouter(t, DefaultConfig().Routes...)
}

func mustRouter(t testing.TB, routes ...string) *Router {
	t.Helper()
	r, err := NewRouter(routes)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func testSampler(t *testing.T) *tracing.Sampler {
	t.Helper()
	s, err := tracing.NewSampler("", "", true)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestMatch(t *testing.T) {
	r := mustRouter(t, append(DefaultConfig().Routes, "/", "/both", "/both/", "/m/{model}/v/{version}", "/m/fixed/v/{version}", "/a-{model}.b", "/{any}/x", "/end/{model}/")...)
	long := strings.Repeat("m", 200)
	for _, c := range []struct{ method, path, class, route, model string }{
		{"POST", "/asr", "POST /asr", "/asr", ""},
		{"GET", "/asr", "GET /asr", "/asr", ""},
		{"POST", "/asr/", "POST /asr", "/asr", ""},
		{"POST", "/asr//", "POST", "", ""},
		{"POST", "/asr?language=de", "POST /asr", "/asr", ""},
		{"POST", "/asr/?a=/b", "POST /asr", "/asr", ""},
		{"POST", "/ASR", "POST", "", ""},
		{"POST", "/asr/x/y", "POST", "", ""},
		{"POST", "/as", "POST", "", ""},
		{"POST", "//asr", "POST", "", ""},
		{"POST", "", "POST", "", ""},
		{"OPTIONS", "*", "OPTIONS", "", ""},
		{"GET", "/", "GET /", "/", ""},
		{"GET", "/both", "GET /both", "/both", ""},
		{"GET", "/both/", "GET /both/", "/both/", ""},
		{"GET", "/both//", "GET /both/", "/both/", ""},

		{"BREW", "/asr", "_OTHER /asr", "/asr", ""},
		{"post", "/asr", "_OTHER /asr", "/asr", ""},
		{"", "/nothing", "_OTHER", "", ""},

		{"POST", "/v2/models/whisper/infer", "POST /v2/models/{model}/infer", "/v2/models/{model}/infer", "whisper"},
		{"POST", "/v2/models/whisper/infer/", "POST /v2/models/{model}/infer", "/v2/models/{model}/infer", "whisper"},
		{"POST", "/v2/models/whisper/inferx", "POST", "", ""},
		{"POST", "/v2/models//infer", "POST", "", ""},
		{"POST", "/v2/models/a/b/infer", "POST", "", ""},
		{"POST", "/v2/models/openai%2Fwhisper/infer", "POST /v2/models/{model}/infer", "/v2/models/{model}/infer", "openai%2Fwhisper"},
		{"POST", "/v1/models/whisper:predict", "POST /v1/models/{model}:predict", "/v1/models/{model}:predict", "whisper"},
		{"POST", "/v1/models/a:predict:predict", "POST /v1/models/{model}:predict", "/v1/models/{model}:predict", "a:predict"},
		{"POST", "/v1/models/:predict", "POST", "", ""},
		{"POST", "/v1/models/whisper:explain", "POST", "", ""},
		{"POST", "/predictions/whisper", "POST /predictions/{model}", "/predictions/{model}", "whisper"},
		{"POST", "/predictions/", "POST", "", ""},
		{"POST", "/predictions", "POST", "", ""},
		{"POST", "/a-x.b", "POST /a-{model}.b", "/a-{model}.b", "x"},
		{"POST", "/a-.b", "POST", "", ""},
		{"POST", "/a-b", "POST", "", ""},
		{"POST", "/b-x.b", "POST", "", ""},

		// The first of two patterns counts, and a name that is not model is no model.
		{"POST", "/m/fixed/v/1", "POST /m/{model}/v/{version}", "/m/{model}/v/{version}", "fixed"},
		{"POST", "/z/x", "POST /{any}/x", "/{any}/x", ""},
		{"POST", "/end/m/", "POST /end/{model}/", "/end/{model}/", "m"},
		{"POST", "/end/m", "POST", "", ""},

		{"POST", "/predictions/" + long, "POST /predictions/{model}", "/predictions/{model}", long[:128]},
		{"POST", "/predictions/" + long[:127] + "é", "POST /predictions/{model}", "/predictions/{model}", long[:127]},
		{"POST", "/predictions/modèle", "POST /predictions/{model}", "/predictions/{model}", "modèle"},
		{"POST", "/predictions/a\x01b", "POST /predictions/{model}", "/predictions/{model}", ""},
		{"POST", "/predictions/a\x7f", "POST /predictions/{model}", "/predictions/{model}", ""},
		{"POST", "/predictions/a\xff", "POST /predictions/{model}", "/predictions/{model}", ""},
	} {
		class, route, model := r.Match([]byte(c.method), []byte(c.path))
		if class != c.class || route != c.route || string(model) != c.model {
			t.Errorf("%s %.60q: class %q, route %q, model %q; want %q, %q, %q", c.method, c.path, class, route, model, c.class, c.route, c.model)
		}
	}
}

func TestARouterWithoutRoutesNamesMethods(t *testing.T) {
	class, route, model := mustRouter(t).Match([]byte("POST"), []byte("/asr"))
	if class != "POST" || route != "" || model != nil {
		t.Errorf("class %q, route %q, model %q", class, route, model)
	}
}

func TestRoutesThatAreRefused(t *testing.T) {
	for _, c := range []struct{ routes, says string }{
		{"asr", `route "asr" does not start with a slash; write /asr`},
		{"", `route "" does not start with a slash; write /`},
		{"/a?b=c", `has '?' in it`},
		{"/a#b", `has '#' in it`},
		{"/a b", `has ' ' in it`},
		{"/é", `has 'é' in it`},
		{"/a\nb", `has '\n' in it`},
		{"/{", `braces in "{"`},
		{"/}", `braces in "}"`},
		{"/}{", `braces in "}{"`},
		{"/}{a}", `braces in "}{a}"`},
		{"/{a}}", `braces in "{a}}"`},
		{"/{{a}", `braces in "{{a}"`},
		{"/{a}{b}", `write one pair a segment`},
		{"/{a/b}", `braces in "{a"`},
		{"/{}", `name "" in braces`},
		{"/{model...}", `name "model..." in braces`},
		{"/{Model}", `name "Model" in braces`},
		{"/{model}/{model}", `{model} in it 2 times`},
		{"/asr /asr", `route "/asr" matches the same paths as "/asr"; keep one of the two`},
		{"/x/{a} /x/{b}", `route "/x/{b}" matches the same paths as "/x/{a}"`},
	} {
		routes := []string{c.routes}
		if a, b, ok := strings.Cut(c.routes, " /"); ok && len(b) > 1 {
			routes = []string{a, "/" + b}
		}
		if _, err := NewRouter(routes); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v, want %s", c.routes, err, c.says)
		}
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	r := testRouter(t)
	for _, path := range []string{
		"/v1/audio/transcriptions",
		"/asr/",
		"/asr?x=1",
		"/nothing/of/the/kind/that/would/fit/into/32/bytes/of/the/stack",
		"/v2/models/whisper-large-v3-turbo-with-a-name-as-long-as-the-path-above-is/infer",
	} {
		method, p := []byte("POST"), []byte(path)
		if n := testing.AllocsPerRun(100, func() { r.Match(method, p) }); n > 0 {
			t.Errorf("%s: %v allocations", path, n)
		}
	}
}

func FuzzRouter(f *testing.F) {
	f.Add("POST", "/v2/models/whisper/infer?x=1", "/v2/models/{model}/infer\n/asr")
	f.Add("GET", "//x//", "/{a}/x\n/a{model}b/")
	f.Add("\x00", "/\xff/é", "/}{")
	f.Fuzz(func(t *testing.T, method, path, templates string) {
		routes := strings.Split(templates, "\n")
		r, err := NewRouter(routes)
		if err != nil {
			return
		}
		class, route, model := r.Match([]byte(method), []byte(path))
		word, rest, _ := strings.Cut(class, " ")
		if rest != route || route != "" && !slices.Contains(routes, route) {
			t.Errorf("class %q has no route %q of %q", class, route, routes)
		}
		if word != method && word != otherMethod {
			t.Errorf("class %q of method %q", class, method)
		}
		if len(model) > maxModel || !utf8.Valid(model) || !strings.Contains(path, string(model)) {
			t.Errorf("model %q of path %q", model, path)
		}
		if path, _, _ := bytes.Cut([]byte(path), []byte("?")); slices.Contains(routes, string(path)) && !strings.ContainsAny(string(path), "{}") && route != string(path) {
			t.Errorf("path %q got the route %q, not its own", path, route)
		}
	})
}

func BenchmarkMatch(b *testing.B) {
	r := mustRouter(b, DefaultConfig().Routes...)
	for _, path := range []string{"/v1/audio/transcriptions", "/v2/models/whisper-large-v3/infer", "/nothing", strings.Repeat("/", 10<<10)} {
		name := strings.ReplaceAll(path[:min(len(path), 12)], "/", "_")
		b.Run(name, func(b *testing.B) {
			method, p := []byte("POST"), []byte(path)
			b.ReportAllocs()
			for b.Loop() {
				r.Match(method, p)
			}
		})
	}
}

func samplerOf(t *testing.T, name string) *tracing.Sampler {
	t.Helper()
	s, err := tracing.NewSampler(name, "", true)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
