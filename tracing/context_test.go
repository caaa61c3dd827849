package tracing

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"weir/classifier"
)

const (
	traceHex  = "0af7651916cd43dd8448eb211c80319c"
	parentHex = "b7ad6b7169203331"
)

func TestTheCallersContextIsTaken(t *testing.T) {
	for sent, sampled := range map[string]bool{
		"00-" + traceHex + "-" + parentHex + "-01":              true,
		"00-" + traceHex + "-" + parentHex + "-00":              false,
		"00-" + traceHex + "-" + parentHex + "-02":              false, // random, not sampled
		"00-" + traceHex + "-" + parentHex + "-03":              true,
		"00-" + traceHex + "-" + parentHex + "-ff":              true, // bits without meaning yet
		"00-" + traceHex + "-" + parentHex + "-fe":              false,
		" \t00-" + traceHex + "-" + parentHex + "-01 \t":        true,
		"01-" + traceHex + "-" + parentHex + "-01":              true, // later versions: the first 55
		"cc-" + traceHex + "-" + parentHex + "-01":              true,
		"fe-" + traceHex + "-" + parentHex + "-00":              false,
		"cc-" + traceHex + "-" + parentHex + "-01-":             true,
		"cc-" + traceHex + "-" + parentHex + "-01-what-IS_this": true,
	} {
		var o classifier.Observation
		if !ReadTraceparent(&o, []byte(sent), []byte("a=1")) {
			t.Errorf("%q is refused", sent)
			continue
		}
		if fmt.Sprintf("%x %x %v %s", o.TraceID, o.ParentID, o.Sampled, o.TraceState) != fmt.Sprintf("%s %s %v a=1", traceHex, parentHex, sampled) || o.SpanID != [8]byte{} {
			t.Errorf("%q gives %x %x %x %v %s", sent, o.TraceID, o.ParentID, o.SpanID, o.Sampled, o.TraceState)
		}
	}
}

func TestAnInvalidContextChangesNothing(t *testing.T) {
	zeros := strings.Repeat("0", 32)
	for name, sent := range map[string]string{
		"nothing":                      "",
		"blanks":                       "   ",
		"a byte short":                 "00-" + traceHex + "-" + parentHex + "-0",
		"no flags":                     "00-" + traceHex + "-" + parentHex,
		"version ff":                   "ff-" + traceHex + "-" + parentHex + "-01",
		"version 00 with more":         "00-" + traceHex + "-" + parentHex + "-01-extra",
		"version 00 with a dash":       "00-" + traceHex + "-" + parentHex + "-01-",
		"version 00 with a digit":      "00-" + traceHex + "-" + parentHex + "-011",
		"a later one without the dash": "cc-" + traceHex + "-" + parentHex + "-01.more",
		"a later one with a digit":     "cc-" + traceHex + "-" + parentHex + "-011",
		"a trace of zeros":             "00-" + zeros + "-" + parentHex + "-01",
		"a parent of zeros":            "00-" + traceHex + "-" + zeros[:16] + "-01",
		"upper case in the trace":      "00-0AF7651916CD43DD8448EB211C80319C-" + parentHex + "-01",
		"one letter in upper case":     "00-" + traceHex[:31] + "C-" + parentHex + "-01",
		"upper case in the parent":     "00-" + traceHex + "-B7AD6B7169203331-01",
		"upper case in the flags":      "00-" + traceHex + "-" + parentHex + "-0A",
		"upper case in the version":    "CC-" + traceHex + "-" + parentHex + "-01",
		"no hexadecimal in the trace":  "00-" + traceHex[:31] + "g-" + parentHex + "-01",
		"none in the parent":           "00-" + traceHex + "-" + parentHex[:15] + "x-01",
		"none in the flags":            "00-" + traceHex + "-" + parentHex + "-0x",
		"none in the version":          "0x-" + traceHex + "-" + parentHex + "-01",
		"underscores":                  "00_" + traceHex + "_" + parentHex + "_01",
		"the first dash":               "00 " + traceHex + "-" + parentHex + "-01",
		"the second dash":              "00-" + traceHex + "." + parentHex + "-01",
		"the third dash":               "00-" + traceHex + "-" + parentHex + "/01",
		"a short trace":                "00-" + traceHex[2:] + "-" + parentHex + "-01",
		"a long trace":                 "00-" + traceHex + "00-" + parentHex + "-01",
		"a short version":              "0-" + traceHex + "-" + parentHex + "-01",
		"a long version":               "000-" + traceHex + "-" + parentHex + "-01",
		"two fields joined":            "00-" + traceHex + "-" + parentHex + "-01,00-" + traceHex + "-" + parentHex + "-01",
		"of a later version":           "cc-" + traceHex + "-" + parentHex + "-01,00-" + traceHex + "-" + parentHex + "-01",
		"a blank inside":               "00-" + traceHex + "- " + parentHex[1:] + "-01",
		"B3":                           traceHex + "-" + parentHex + "-1",
	} {
		o := classifier.Observation{Class: "GET /"}
		if ReadTraceparent(&o, []byte(sent), []byte("a=1")) {
			t.Errorf("%s: %q is accepted", name, sent)
		}
		if fmt.Sprintf("%+v", o) != fmt.Sprintf("%+v", classifier.Observation{Class: "GET /"}) {
			t.Errorf("%s: %q leaves %+v", name, sent, o)
		}
	}
}

func TestTracestateIsPassedOnOrDroppedWhole(t *testing.T) {
	member := func(key string, n int) string { return key + "=" + strings.Repeat("v", n-len(key)-1) }
	list := func(n int) string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprintf("k%d=v", i))
		}
		return strings.Join(all, ",")
	}
	for name, c := range map[string]struct{ sent, want string }{
		"none":                      {"", ""},
		"blanks":                    {" \t", ""},
		"one":                       {"rojo=00f067aa0ba902b7", "rojo=00f067aa0ba902b7"},
		"two, in order":             {"rojo=1,congo=t61rcWkgMzE", "rojo=1,congo=t61rcWkgMzE"},
		"blanks around members":     {" rojo=1 \t,\t congo=2 ", "rojo=1,congo=2"},
		"empty members":             {",rojo=1,, ,congo=2,", "rojo=1,congo=2"},
		"only empty members":        {" , ,", ""},
		"OpenTelemetry's, unharmed": {"ot=th:8;rv:9b8233f7e3a151,a=1", "ot=th:8;rv:9b8233f7e3a151,a=1"},
		"all characters of a key":   {"0a_-*/@z9=1", "0a_-*/@z9=1"},
		"a tenant":                  {"fw529a3039@dt=FfAAAA", "fw529a3039@dt=FfAAAA"},
		"a key that is a digit":     {"1=2", "1=2"},
		"a blank within a value":    {"a= b c", "a= b c"},
		"the ends of a value's set": {"a=!+-<>~", "a=!+-<>~"},
		"the longest key":           {strings.Repeat("k", 256) + "=v", strings.Repeat("k", 256) + "=v"},
		"the longest value":         {"k=" + strings.Repeat("v", 256), "k=" + strings.Repeat("v", 256)},
		"32 members":                {list(32), list(32)},
		"32 and empty ones":         {",," + list(32) + ",", list(32)},

		"33 members":                 {list(33), ""},
		"a key twice":                {"a=1,b=2,a=3", ""},
		"a member twice":             {"a=1,a=1", ""},
		"no value":                   {"a=1,b=", ""},
		"no =":                       {"a=1,b", ""},
		"no key":                     {"a=1,=2", ""},
		"an = in a value":            {"a=1=2", ""},
		"upper case in a key":        {"a=1,Foo=2", ""},
		"a blank before the =":       {"a =1", ""},
		"a key that starts with _":   {"_a=1", ""},
		"a key that starts with @":   {"@a=1", ""},
		"a dot in a key":             {"a.b=1", ""},
		"a key too long":             {strings.Repeat("k", 257) + "=v", ""},
		"a value too long":           {"k=" + strings.Repeat("v", 257), ""},
		"a tab in a value":           {"a=b\tc", ""},
		"a control character":        {"a=b\x01c", ""},
		"a zero byte":                {"a=b\x00", ""},
		"DEL":                        {"a=b\x7f", ""},
		"not ASCII":                  {"a=ü", ""},
		"one bad member of many":     {list(31) + ",?=1", ""},
		"bad past the shortened end": {member("a", 128) + "," + member("b", 128) + "," + member("c", 128) + "," + member("d", 128) + ",E=1", ""},

		"512 bytes":                             {member("a", 200) + "," + member("b", 200) + "," + member("c", 110), member("a", 200) + "," + member("b", 200) + "," + member("c", 110)},
		"513 bytes: the last of the large goes": {member("a", 200) + "," + member("b", 200) + "," + member("c", 111), member("a", 200) + "," + member("c", 111)},
		"as many large ones as needed":          {member("a", 250) + "," + member("b", 129) + "," + member("c", 250) + "," + member("d", 128), member("a", 250) + "," + member("b", 129) + "," + member("d", 128)},
		"128 bytes are not large":               {member("a", 128) + "," + member("b", 128) + "," + member("c", 129) + "," + member("d", 126), member("a", 128) + "," + member("b", 128) + "," + member("d", 126)},
		"then the oldest, at the right":         {member("a", 128) + "," + member("b", 128) + "," + member("c", 128) + "," + member("d", 128) + "," + member("e", 2+1), member("a", 128) + "," + member("b", 128) + "," + member("c", 128)},
		"and more of them":                      {member("a", 129) + "," + member("b", 128) + "," + member("c", 128) + "," + member("d", 127) + "," + member("e", 128) + "," + member("f", 100), member("b", 128) + "," + member("c", 128) + "," + member("d", 127)},
	} {
		var o classifier.Observation
		if !ReadTraceparent(&o, []byte("00-"+traceHex+"-"+parentHex+"-01"), []byte(c.sent)) {
			t.Errorf("%s: the trace is lost with its state", name)
		}
		if o.TraceState != c.want {
			t.Errorf("%s: %q becomes\n%q, want\n%q", name, c.sent, o.TraceState, c.want)
		}
	}
}

func TestTheContextPassedOnIsWeirsOwn(t *testing.T) {
	o := classifier.Observation{SpanID: [8]byte{0: 0xab, 7: 0x01}}
	if !ReadTraceparent(&o, []byte("cc-"+traceHex+"-"+parentHex+"-03-more"), nil) {
		t.Fatal("refused")
	}
	if got, want := string(AppendTraceparent([]byte("> "), &o)), "> 00-"+traceHex+"-ab00000000000001-01"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	o.Sampled = false
	if got, want := string(AppendTraceparent(nil, &o)), "00-"+traceHex+"-ab00000000000001-00"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func sampler(t testing.TB, name, arg string, trust bool) *Sampler {
	t.Helper()
	s, err := NewSampler(name, arg, trust)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// begun starts a request, with a caller's context if flags is not empty.
func begun(t testing.TB, s *Sampler, flags string) (o *classifier.Observation, propagate bool) {
	t.Helper()
	o = &classifier.Observation{}
	hasParent := flags != "" && ReadTraceparent(o, []byte("00-"+traceHex+"-"+parentHex+"-"+flags), []byte("a=1"))
	return o, s.Start(o, hasParent)
}

func TestEachSamplerDecidesAsItsNameSays(t *testing.T) {
	// What becomes of a trace that begins here, of a sampled and of an unsampled parent's.
	const keep, drop = true, false
	for _, c := range []struct {
		name, arg                string
		root, sampled, unsampled bool
	}{
		{"", "", keep, keep, drop},
		{"", "0", keep, keep, drop}, // no sampler that takes an argument
		{"always_on", "", keep, keep, keep},
		{"always_off", "", drop, drop, drop},
		{"traceidratio", "", keep, keep, keep}, // of 1
		{"traceidratio", "1", keep, keep, keep},
		{"traceidratio", "1.0", keep, keep, keep},
		{"traceidratio", "0", drop, drop, drop},
		{"parentbased_always_on", "", keep, keep, drop},
		{"parentbased_always_off", "", drop, keep, drop},
		{"parentbased_traceidratio", "", keep, keep, drop},
		{"parentbased_traceidratio", "0", drop, keep, drop},
		{"parentbased_traceidratio", " 1 ", keep, keep, drop},
		{" ParentBased_Always_Off ", "", drop, keep, drop},
		{"ALWAYS_OFF", "no number", drop, drop, drop},
	} {
		s := sampler(t, c.name, c.arg, true)
		for _, one := range []struct {
			flags string
			want  bool
		}{{"", c.root}, {"01", c.sampled}, {"00", c.unsampled}} {
			o, propagate := begun(t, s, one.flags)
			if o.Sampled != one.want {
				t.Errorf("%q %q: flags %q: sampled is %v", c.name, c.arg, one.flags, o.Sampled)
			}
			if want := one.want || one.flags != ""; propagate != want {
				t.Errorf("%q %q: flags %q: propagate is %v", c.name, c.arg, one.flags, propagate)
			}
		}
	}
}

func TestAParentIsKeptOnlyWhereItIsTrusted(t *testing.T) {
	for _, name := range []string{"", "always_on", "always_off", "traceidratio", "parentbased_always_off"} {
		o, _ := begun(t, sampler(t, name, "", true), "01")
		if fmt.Sprintf("%x %x", o.TraceID, o.ParentID) != traceHex+" "+parentHex || o.TraceState != "a=1" || o.SpanID == o.ParentID || o.SpanID == [8]byte{} {
			t.Errorf("%q: %x %x %x %q", name, o.TraceID, o.ParentID, o.SpanID, o.TraceState)
		}
		keeps := name == "" || name == "always_on" || name == "traceidratio"
		for _, flags := range []string{"01", "00"} {
			o, propagate := begun(t, sampler(t, name, "", false), flags)
			if fmt.Sprintf("%x", o.TraceID) == traceHex || o.TraceID == [16]byte{} || o.ParentID != [8]byte{} || o.TraceState != "" || o.SpanID == [8]byte{} {
				t.Errorf("%q, not trusted: %x %x %x %q", name, o.TraceID, o.ParentID, o.SpanID, o.TraceState)
			}
			if o.Sampled != keeps || propagate != keeps {
				t.Errorf("%q, not trusted, flags %s: sampled %v, propagate %v, want %v", name, flags, o.Sampled, propagate, keeps)
			}
		}
	}
}

func TestARootHasNoParentAndIdsOfItsOwn(t *testing.T) {
	traces, spans := map[[16]byte]bool{}, map[[8]byte]bool{}
	s := sampler(t, "", "", true)
	for range 1000 {
		o, propagate := begun(t, s, "")
		if o.ParentID != [8]byte{} || o.TraceState != "" || !propagate || o.TraceID == [16]byte{} || o.SpanID == [8]byte{} {
			t.Fatalf("%x %x %x %q %v", o.TraceID, o.ParentID, o.SpanID, o.TraceState, propagate)
		}
		traces[o.TraceID], spans[o.SpanID] = true, true
	}
	if len(traces) != 1000 || len(spans) != 1000 {
		t.Errorf("%d traces and %d spans of 1000 requests", len(traces), len(spans))
	}
}

// What an invalid context left in the record, or a record used before, is no parent.
func TestARootForgetsWhatWasThere(t *testing.T) {
	o := &classifier.Observation{TraceID: [16]byte{1}, ParentID: [8]byte{2}, SpanID: [8]byte{3}, TraceState: "a=1", Sampled: true}
	if sampler(t, "always_off", "", true).Start(o, false) || o.Sampled || o.ParentID != [8]byte{} || o.TraceState != "" || o.TraceID == [16]byte{1} || o.SpanID == [8]byte{3} {
		t.Errorf("%x %x %x %q %v", o.TraceID, o.ParentID, o.SpanID, o.TraceState, o.Sampled)
	}
}

func TestANilSamplerPassesTheContextOnAsItCame(t *testing.T) {
	var s *Sampler
	for _, flags := range []string{"00", "01"} {
		o, propagate := begun(t, s, flags)
		if got, want := string(AppendTraceparent(nil, o)), "00-"+traceHex+"-"+parentHex+"-"+flags; got != want || !propagate {
			t.Errorf("%s, %v; want %s", got, propagate, want)
		}
		if o.TraceState != "a=1" {
			t.Errorf("tracestate %q", o.TraceState)
		}
	}
	if o, propagate := begun(t, s, ""); propagate || o.TraceID != [16]byte{} || o.SpanID != [8]byte{} || o.Sampled {
		t.Errorf("without a context: %x %x %v %v", o.TraceID, o.SpanID, o.Sampled, propagate)
	}
}

// anyTrace is a random trace id.
func anyTrace(r *rand.Rand) (id [16]byte) {
	for i := range id {
		id[i] = byte(r.Uint32())
	}
	return id
}

// The decision is the trace id's alone, the same here, in another weir and in
// OpenTelemetry's SDK.
func TestTheRatioDecidesByTheTraceIdAsOpenTelemetryDoes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, ratio := range []float64{1e-19, 0.0001, 0.1, 0.25, 0.5, 0.75, 0.999, 1} {
		a, b := sampler(t, "traceidratio", fmt.Sprint(ratio), true), sampler(t, "parentbased_traceidratio", fmt.Sprintf("%.25f", ratio), true)
		peer := sdktrace.TraceIDRatioBased(ratio)
		kept := 0
		for range 20000 {
			id := anyTrace(r)
			want := peer.ShouldSample(sdktrace.SamplingParameters{TraceID: trace.TraceID(id)}).Decision == sdktrace.RecordAndSample
			o := classifier.Observation{TraceID: id, ParentID: [8]byte{1}}
			a.Start(&o, true)
			if o.Sampled != want || b.keeps(id) != want {
				t.Fatalf("ratio %v, trace %x: %v and %v, OpenTelemetry says %v", ratio, id, o.Sampled, b.keeps(id), want)
			}
			if want {
				kept++
			}
		}
		if got := float64(kept) / 20000; got < ratio-0.02 || got > ratio+0.02 {
			t.Errorf("ratio %v keeps %v", ratio, got)
		}
	}
}

func TestTheRatioHasSharpEdges(t *testing.T) {
	for _, c := range []struct {
		arg, low string
		want     bool
	}{
		{"0.5", "7fffffffffffffff", true},
		{"0.5", "8000000000000000", false},
		{"0.25", "3fffffffffffffff", true},
		{"0.25", "4000000000000000", false},
		{"1", "ffffffffffffffff", true},
		{"0", "0000000000000000", false},
		{"0", "0000000000000001", false},
	} {
		for _, high := range []string{"0000000000000000", "ffffffffffffffff"} {
			var id [16]byte
			if _, err := hex.Decode(id[:], []byte(high+c.low)); err != nil {
				t.Fatal(err)
			}
			if got := sampler(t, "traceidratio", c.arg, true).keeps(id); got != c.want {
				t.Errorf("ratio %s, trace %x: %v", c.arg, id, got)
			}
		}
	}
}

// A trace that is kept at one ratio is kept at each larger one, so that a
// chain of services loses no middle.
func TestALargerRatioKeepsWhatASmallerOneDoes(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	small, large := sampler(t, "traceidratio", "0.2", true), sampler(t, "traceidratio", "0.3", true)
	for range 20000 {
		if id := anyTrace(r); small.keeps(id) && !large.keeps(id) {
			t.Fatalf("trace %x is kept at 0.2 but not at 0.3", id)
		}
	}
}

func TestASamplerThatIsUnknownIsRefusedWithItsRemedy(t *testing.T) {
	for _, name := range []string{"on", "always", "parentbased", "parentbased_", "parentbased_parentbased_always_on", "parentbased_jaeger_remote", "jaeger_remote", "xray", "traceidratio=0.5", "always-on"} {
		s, err := NewSampler(name, "", true)
		if err == nil || s != nil || !strings.Contains(err.Error(), fmt.Sprintf("OTEL_TRACES_SAMPLER=%q", name)) || !strings.Contains(err.Error(), "use always_on") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, arg := range []string{"-0.1", "1.1", "50%", "half", "NaN", "Inf", "-Inf", "0,5", "1e400"} {
		for _, name := range []string{"traceidratio", "parentbased_traceidratio"} {
			s, err := NewSampler(name, arg, true)
			if err == nil || s != nil || !strings.Contains(err.Error(), fmt.Sprintf("OTEL_TRACES_SAMPLER_ARG=%q", arg)) || !strings.Contains(err.Error(), "from 0 to 1") {
				t.Errorf("%s %s: %v", name, arg, err)
			}
		}
	}
}

func FuzzTraceparent(f *testing.F) {
	for _, s := range []string{
		"00-" + traceHex + "-" + parentHex + "-01", "00-" + traceHex + "-" + parentHex + "-00-", "cc-" + traceHex + "-" + parentHex + "-01-more", "ff-" + traceHex + "-" + parentHex + "-01",
		"00-" + strings.Repeat("0", 32) + "-" + parentHex + "-01", "00-" + strings.ToUpper(traceHex) + "-" + parentHex + "-01", "", "--------------------------------------------------------",
	} {
		f.Add([]byte(s), []byte("rojo=00f067aa0ba902b7, congo=t61rcWkgMzE"))
	}
	f.Add([]byte("00-"+traceHex+"-"+parentHex+"-01"), []byte("rojo=1"))
	f.Add([]byte("00-"+traceHex+"-"+parentHex+"-02"), []byte(strings.Repeat("k=v,", 40)))
	f.Add([]byte("00-"+traceHex+"-"+parentHex+"-02"), []byte("a="+strings.Repeat("v", 250)+",b="+strings.Repeat("v", 250)+",c="+strings.Repeat("v", 100)))
	f.Fuzz(func(t *testing.T, parent, state []byte) {
		o := classifier.Observation{TraceID: [16]byte{1}, ParentID: [8]byte{2}, TraceState: "x=y"}
		p, s := bytes.Clone(parent), bytes.Clone(state)
		ok := ReadTraceparent(&o, p, s)
		for i := range s {
			s[i] = '~'
		}
		if !ok {
			if o.TraceID != [16]byte{1} || o.ParentID != [8]byte{2} || o.TraceState != "x=y" || o.Sampled {
				t.Errorf("%q is refused but leaves %x %x %q", parent, o.TraceID, o.ParentID, o.TraceState)
			}
			return
		}
		checkContext(t, &o, bytes.Trim(parent, " \t"))
		checkTraceState(t, o.TraceState, string(state))
	})
}

// checkContext writes the caller's context anew: but for the version and the
// flags it is what came.
func checkContext(t *testing.T, o *classifier.Observation, sent []byte) {
	o.SpanID = o.ParentID
	again := AppendTraceparent(nil, o)
	var flags [1]byte
	if _, err := hex.Decode(flags[:], sent[53:55]); err != nil {
		t.Fatalf("%q is accepted: %v", sent, err)
	}
	want := fmt.Sprintf("00%s%02x", sent[2:53], flags[0]&1)
	if string(again) != want {
		t.Errorf("%q is written as %s, want %s", sent, again, want)
	}
	if sent[0] == 'f' && sent[1] == 'f' || o.TraceID == [16]byte{} || o.ParentID == [8]byte{} || len(sent) > 55 && (sent[55] != '-' || string(sent[:2]) == "00") {
		t.Errorf("%q is accepted", sent)
	}
	back := classifier.Observation{}
	if !ReadTraceparent(&back, again, nil) || back.TraceID != o.TraceID || back.ParentID != o.ParentID || back.Sampled != o.Sampled {
		t.Errorf("%s is not read as it was written", again)
	}
}

// checkTraceState reads what is passed on once more: it is valid, within the
// limits, and members of what came in their order.
func checkTraceState(t *testing.T, state, sent string) {
	if again := readTraceState([]byte(state)); again != state {
		t.Errorf("%q becomes %q when it is read again", state, again)
	}
	if len(state) > maxTraceState || strings.Count(state, ",") >= maxMembers {
		t.Errorf("%d bytes, %d commas", len(state), strings.Count(state, ","))
	}
	rest := strings.Split(sent, ",")
	for m := range strings.SplitSeq(state, ",") {
		for m != "" && len(rest) > 0 && strings.Trim(rest[0], " \t") != m {
			rest = rest[1:]
		}
		if len(rest) == 0 {
			t.Errorf("%q is passed on, but %q came", state, sent)
		}
	}
}

func TestOnlyTracestateCostsAnAllocation(t *testing.T) {
	var o classifier.Observation
	parent, state, buf := []byte("00-"+traceHex+"-"+parentHex+"-01"), []byte("rojo=1"), make([]byte, 0, 64)
	s := sampler(t, "parentbased_traceidratio", "0.5", true)
	for want, tracestate := range [][]byte{nil, state} {
		if n := testing.AllocsPerRun(100, func() {
			s.Start(&o, ReadTraceparent(&o, parent, tracestate))
			buf = AppendTraceparent(buf[:0], &o)
		}); n != float64(want) {
			t.Errorf("tracestate %q: %v allocations, want %d", tracestate, n, want)
		}
	}
}

func BenchmarkReadTraceparent(b *testing.B) {
	var o classifier.Observation
	parent, state := []byte("00-"+traceHex+"-"+parentHex+"-01"), []byte("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
	b.ReportAllocs()
	for b.Loop() {
		ReadTraceparent(&o, parent, state)
	}
}
