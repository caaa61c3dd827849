package proxy

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weir/classifier"
	"weir/tracing"
)

// sources is what a configuration is loaded from.
type sources struct {
	args []string
	env  map[string]string
	file string // the content of weir.yaml, which is the only file
}

func (s sources) load() (Config, error) {
	return Load(s.args, func(name string) string { return s.env[name] }, s.read)
}

func (s sources) read(name string) ([]byte, error) {
	if name != "weir.yaml" {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return []byte(s.file), nil
}

func (s sources) mustLoad(t *testing.T) Config {
	t.Helper()
	c, err := s.load()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// bare is c without its history, to compare.
func bare(c Config) Config {
	c.loaded = nil
	return c
}

func TestDefaultsAreWhatNobodySet(t *testing.T) {
	if got, want := bare(sources{}.mustLoad(t)), DefaultConfig(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestAFlagGoesBeforeTheEnvironmentAndThatBeforeTheFile(t *testing.T) {
	file, env, args := "max_concurrency: 1", map[string]string{"WEIR_MAX_CONCURRENCY": "2"}, []string{"--max-concurrency", "3"}
	config := []string{"--config=weir.yaml"}
	for _, c := range []struct {
		sources
		want int
		from string
	}{
		{sources{}, 0, "default"},
		{sources{args: config, file: file}, 1, "weir.yaml:1"},
		{sources{env: map[string]string{"WEIR_CONFIG": "weir.yaml"}, file: file}, 1, "weir.yaml:1"},
		{sources{args: config, file: file, env: env}, 2, "env WEIR_MAX_CONCURRENCY"},
		{sources{args: append(args, config...), file: file, env: env}, 3, "--max-concurrency"},
		{sources{args: append(args, "--max-concurrency=4"), env: env}, 4, "--max-concurrency"},
		{sources{args: args}, 3, "--max-concurrency"},
		{sources{env: map[string]string{"WEIR_MAX_CONCURRENCY": ""}}, 0, "default"},
		{sources{args: config, env: map[string]string{"WEIR_CONFIG": "none.yaml"}, file: file}, 1, "weir.yaml:1"},
	} {
		got := c.mustLoad(t)
		if from := got.loaded.placeAt("max_concurrency").String(); got.MaxConcurrency != c.want || from != c.from {
			t.Errorf("%+v: %d from %s, want %d from %s", c.sources, got.MaxConcurrency, from, c.want, c.from)
		}
	}
}

func TestEveryKeyIsAFlagAVariableAndALine(t *testing.T) {
	full, err := os.ReadFile("testdata/config/valid-full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := sources{args: []string{"--config", "weir.yaml"}, file: string(full)}.mustLoad(t)
	v, d := reflect.ValueOf(want), reflect.ValueOf(DefaultConfig())
	var args []string
	env := make(map[string]string)
	for _, f := range fieldsOf(v.Type()) {
		key, text := keyOf(f), inline(v.FieldByIndex(f.Index))
		if reflect.DeepEqual(v.FieldByIndex(f.Index).Interface(), d.FieldByIndex(f.Index).Interface()) {
			t.Errorf("valid-full.yaml does not set %s", key)
		}
		text = strings.Trim(text, `"'`)
		args = append(args, "--"+strings.ReplaceAll(key, "_", "-")+"="+text)
		env["WEIR_"+strings.ToUpper(key)] = text
	}
	if got := (sources{args: args}).mustLoad(t); !reflect.DeepEqual(bare(got), bare(want)) {
		t.Errorf("by flags %+v, want %+v", bare(got), bare(want))
	}
	if got := (sources{env: env}).mustLoad(t); !reflect.DeepEqual(bare(got), bare(want)) {
		t.Errorf("by environment %+v, want %+v", bare(got), bare(want))
	}
}

func TestFormsOfFlags(t *testing.T) {
	for _, c := range []struct {
		args string
		ok   func(Config) bool
	}{
		{"--listen :1", func(c Config) bool { return c.Listen == ":1" }},
		{"-listen=:1", func(c Config) bool { return c.Listen == ":1" }},
		{"--listen [::]:1", func(c Config) bool { return c.Listen == "[::]:1" }},
		{"--server-timing", func(c Config) bool { return c.ServerTiming }},
		{"--server-timing --listen :1", func(c Config) bool { return c.ServerTiming && c.Listen == ":1" }},
		{"--trust-parent=false", func(c Config) bool { return !c.TrustParent }},
		{"--max_queue_size 7", func(c Config) bool { return c.MaxQueueSize == 7 }},
		{"--routes [/a,/b]", func(c Config) bool { return slices.Equal(c.Routes, []string{"/a", "/b"}) }},
		{"--routes []", func(c Config) bool { return len(c.Routes) == 0 }},
		{"--keep-slow 2s --keep-slow 3s", func(c Config) bool { return c.KeepSlow == seconds(3) }},
		{"--max-head-size 128KiB", func(c Config) bool { return c.MaxHeadSize == 128<<10 }},
	} {
		got, err := sources{args: strings.Fields(c.args)}.load()
		if err != nil || !c.ok(got) {
			t.Errorf("%s: %v, %+v", c.args, err, bare(got))
		}
	}
}

func TestSomeThresholdsLeaveTheOthers(t *testing.T) {
	c := sources{
		args: []string{"--config=weir.yaml", "--thresholds", "{tie: 0.3}"},
		env:  map[string]string{"WEIR_THRESHOLDS": "queue_share: 0.4"},
		file: "thresholds:\n  tie: 0.1\n  min_requests: 7\n",
	}.mustLoad(t)
	want := classifier.DefaultThresholds()
	want.Tie, want.QueueShare, want.MinRequests = 0.3, 0.4, 7
	if c.Thresholds != want {
		t.Errorf("%+v, want %+v", c.Thresholds, want)
	}
}

func TestALaterListReplacesAnEarlier(t *testing.T) {
	c := sources{
		args: []string{"--config=weir.yaml", "--limits", "[{route: /asr, max_concurrency: 2}]"},
		file: "limits:\n  - {model: a, max_queue_size: 3}\n  - {model: b}\n",
	}.mustLoad(t)
	if want := []RouteLimit{{Route: "/asr", MaxConcurrency: 2, MaxQueueSize: 1024}}; !slices.Equal(c.Limits, want) {
		t.Errorf("%+v, want %+v", c.Limits, want)
	}
}

func TestALimitInheritsTheSizeOfTheQueue(t *testing.T) {
	c := sources{
		args: []string{"--config=weir.yaml", "--max-queue-size=5"},
		file: "limits:\n  - {route: /asr, max_concurrency: 2}\n  - {model: a, max_queue_size: 0}\n",
	}.mustLoad(t)
	if c.Limits[0].MaxQueueSize != 5 || c.Limits[1].MaxQueueSize != 0 {
		t.Errorf("%+v", c.Limits)
	}
}

func TestHelpIsNoMistake(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"-h"}, {"--listen", "x", "--nonsense", "--help"}} {
		if _, err := (sources{args: args}).load(); !errors.Is(err, flag.ErrHelp) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestMistakesInFlagsAndEnvironment(t *testing.T) {
	for _, c := range []struct {
		name string
		sources
		want []string
	}{
		{"unknown flags and words", sources{args: []string{"--listne", "5", "--nonsense=1", "word", "-"}}, []string{
			"--listne: is no flag; did you mean --listen?",
			"--nonsense: is no flag; weir serve --help names all flags",
			`"word": is no flag; write --key=value, or --key value where the value is not true or false`,
			`"-": is no flag; write --key=value, or --key value where the value is not true or false`,
		}},
		{"names that stand badly in a line", sources{args: []string{"--a\nb=1", "--config", "weir.yaml"}, file: `{"a\nb": 1, "` + strings.Repeat("x", 99) + `": 1}`}, []string{
			`weir.yaml:1: "a\nb": is no key; weir serve --help names all keys`,
			`weir.yaml:1: "` + strings.Repeat("x", 80) + `": is no key; weir serve --help names all keys`,
			`"--a\nb": is no flag; weir serve --help names all flags`,
		}},
		{"a bool is given with =", sources{args: []string{"--server-timing", "false"}}, []string{
			`"false": is no flag; write --key=value, or --key value where the value is not true or false`,
		}},
		{"flags without value", sources{args: []string{"--listen", "--admin", ":1", "--routes", "", "--window"}}, []string{
			"--listen: has no value; write --listen=value",
			"--window: has no value; write --window=value",
			"--routes: has no value; give one, or leave the key out",
		}},
		{"values", sources{
			args: []string{"--max-concurrency", "many", "--routes", "[/asr, asr]", "--limits", "[{route: /asr, max: 1}]"},
			env:  map[string]string{"WEIR_WINDOW": "10", "WEIR_ADMIN": "[::]:x", "WEIR_SERVER_TIMING": "1", "WEIR_TIMINGS": "[", "WEIR_PARTS": "/parts", "WEIR_PORT": "tcp://1.2.3.4:80"},
		}, []string{
			`env WEIR_WINDOW: window: value "10" has no unit; write 10ms or 10s`,
			"env WEIR_TIMINGS: is no YAML: did not find expected node content; look at colons, quotes and indentation, and put in quotes what begins with [ { * & ! % @ or `",
			`env WEIR_SERVER_TIMING: server_timing: value "1" is neither true nor false; write one of the two, without quotes`,
			`env WEIR_ADMIN: admin: value "[::]:x" has no port from 0 to 65535; write host:port, or :port for all interfaces`,
			`--max-concurrency: value "many" is no whole number; write digits alone, without quotes`,
			"--limits: limits[0].max: is no key; the keys here are route, model, max_concurrency, max_queue_size, queue_timeout",
			`--routes: routes[1]: route "asr" does not start with a slash; write /asr`,
		}},
		{"no numbers", sources{args: []string{"--keep-queue-share=NaN", "--thresholds", "{tie: '0.1', elastic: .inf, responds: Inf, dominates: 1e999}"}}, []string{
			`--keep-queue-share: value "NaN" is no number; write digits, as in 0.5, without quotes`,
			`--thresholds: thresholds.tie: value "0.1" is no number; write digits, as in 0.5, without quotes`,
			`--thresholds: thresholds.elastic: value ".inf" is no number; write digits, as in 0.5, without quotes`,
			`--thresholds: thresholds.responds: value "Inf" is no number; write digits, as in 0.5, without quotes`,
			`--thresholds: thresholds.dominates: value "1e999" is no number; write digits, as in 0.5, without quotes`,
		}},
		{"the file comes first", sources{args: []string{"--window=1", "--config=weir.yaml"}, env: map[string]string{"WEIR_WINDOW": "2"}, file: "records: x\nwindow: 3"}, []string{
			`weir.yaml:1: records: value "x" is no whole number; write digits alone, without quotes`,
			`weir.yaml:2: window: value "3" has no unit; write 3ms or 3s`,
			`env WEIR_WINDOW: window: value "2" has no unit; write 2ms or 2s`,
			`--window: value "1" has no unit; write 1ms or 1s`,
		}},
		{"no file", sources{args: []string{"--config", "none.yaml", "--limits", "[{route: /in-the-file}]"}}, []string{
			`--config: value "none.yaml" cannot be read: file does not exist; name a file that weir may read`,
		}},
		{"no file that can be read as YAML", sources{args: []string{"--config", "weir.yaml", "--limits", "[{route: /in-the-file}]"}, file: "routes: [/in-the-file"}, []string{
			"weir.yaml:2: is no YAML: did not find expected ',' or ']'; look at colons, quotes and indentation, and put in quotes what begins with [ { * & ! % @ or `",
		}},
		{"no file of the environment", sources{env: map[string]string{"WEIR_CONFIG": "none.yaml"}}, []string{
			`env WEIR_CONFIG: value "none.yaml" cannot be read: file does not exist; name a file that weir may read`,
		}},
		{"control characters", sources{args: []string{"--config", "weir.yaml"}, file: "listen: \x01"}, []string{
			"weir.yaml:1: is no YAML: control characters are not allowed (value: 1); look at colons, quotes and indentation, and put in quotes what begins with [ { * & ! % @ or `",
		}},
		{"depth", sources{args: []string{"--config", "weir.yaml"}, file: strings.Repeat("[", 1<<20)}, []string{
			"weir.yaml:1: is no YAML: exceeded max depth of 10000; look at colons, quotes and indentation, and put in quotes what begins with [ { * & ! % @ or `",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.load()
			sameLines(t, err, c.want)
		})
	}
}

func sameLines(t *testing.T, err error, want []string) {
	t.Helper()
	var got []string
	if err != nil {
		got = strings.Split(err.Error(), "\n")
	}
	for i := range max(len(got), len(want)) {
		g, w := append(got, make([]string, i+1)...)[i], append(want, make([]string, i+1)...)[i]
		if g != w {
			t.Errorf("line %d:\ngot  %s\nwant %s", i+1, g, w)
		}
	}
}

// The files say in comments what is wrong with them: "# want LINE: MISTAKE".
func TestConfigurationFiles(t *testing.T) {
	files, err := filepath.Glob("testdata/config/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for line := range strings.Lines(string(text)) {
				if mistake, ok := strings.CutPrefix(line, "# want "); ok {
					want = append(want, file+":"+strings.TrimSuffix(mistake, "\n"))
				}
			}
			if strings.HasPrefix(filepath.Base(file), "valid") != (len(want) == 0) {
				t.Fatalf("a file is called valid, or it wants mistakes; this one wants %d", len(want))
			}
			sameLines(t, CheckFile(file), want)
		})
	}
}

func TestServerAddress(t *testing.T) {
	for _, c := range []struct{ server, network, address, err string }{
		{"http://127.0.0.1:8000", "tcp", "127.0.0.1:8000", ""},
		{"http://asr", "tcp", "asr:80", ""},
		{"HTTP://asr:9000/", "tcp", "asr:9000", ""},
		{"http://[::1]:8000", "tcp", "[::1]:8000", ""},
		{"http://[fe80::1%25eth0]:8000", "tcp", "[fe80::1%eth0]:8000", ""},
		{"https://asr", "tcp", "asr:443", ""},
		{"https://asr:8443", "tcp", "asr:8443", ""},
		{"unix:/run/asr.sock", "unix", "/run/asr.sock", ""},
		{"unix:///run/asr.sock", "unix", "/run/asr.sock", ""},

		{"", "", "", "is no address"},
		{"127.0.0.1:8000", "", "", "is no address"},
		{"localhost:8000", "", "", "is no address"},
		{"http://", "", "", "is no address"},
		{"http://:8000", "", "", "is no address"},
		{"grpc://asr:1", "", "", "is no address"},
		{"http://a b", "", "", "is no address"},
		{"http://asr:0", "", "", "has no port from 1 to 65535"},
		{"http://asr:65536", "", "", "has no port from 1 to 65535"},
		{"http://asr:1/v1", "", "", "more than an address; write http://asr:1,"},
		{"http://asr:1?a=b", "", "", "more than an address"},
		{"http://asr:1?", "", "", "more than an address"},
		{"http://asr:1#a", "", "", "more than an address"},
		{"http://u:p@asr:1", "", "", "more than an address; write http://asr:1,"},
		{"unix:", "", "", "is no socket"},
		{"unix:/", "", "", "is no socket"},
		{"unix:run/asr.sock", "", "", "is no socket"},
		{"unix:/" + strings.Repeat("x", 103), "", "", "is no socket"},
	} {
		network, address := Config{Server: c.server}.ServerAddress()
		_, err := sources{args: []string{"--server=" + c.server}}.load()
		if network != c.network || address != c.address {
			t.Errorf("%.80s: %q %q, want %q %q", c.server, network, address, c.network, c.address)
		}
		if (err == nil) != (c.err == "") || err != nil && c.server != "" && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%.80s: %v, want %q", c.server, err, c.err)
		}
	}
}

func TestWeirIsNotItsOwnServer(t *testing.T) {
	for _, c := range []struct {
		server, listen, admin string
		ok                    bool
	}{
		{"http://127.0.0.1:8000", ":8080", ":9464", true},
		{"http://127.0.0.1:8080", ":8080", ":9464", false},
		{"http://localhost:8080", "127.0.0.1:8080", ":9464", false},
		{"http://[::1]:8080", "[::]:8080", ":9464", false},
		{"http://asr:8080", ":8080", ":9464", true},
		{"http://127.0.0.2:8080", "127.0.0.1:8080", ":9464", true},
		{"unix:/run/asr", ":8080", ":9464", true},
		{"http://x", ":8080", "127.0.0.1:8080", false},
		{"http://x", "127.0.0.1:8080", ":8080", false},
		{"http://x", "10.0.0.1:8080", "10.0.0.1:8080", false},
		{"http://x", "10.0.0.1:8080", "127.0.0.1:8080", true},
		{"http://x", ":0", ":0", true},
	} {
		_, err := sources{args: []string{"--server", c.server, "--listen", c.listen, "--admin", c.admin}}.load()
		if (err == nil) != c.ok {
			t.Errorf("server %s, listen %s, admin %s: %v", c.server, c.listen, c.admin, err)
		}
	}
}

func TestDurationsInText(t *testing.T) {
	for _, c := range []struct {
		text  string
		want  time.Duration
		again string
	}{
		{"0", 0, "0"},
		{"0s", 0, "0"},
		{"500ms", 500 * time.Millisecond, "500ms"},
		{"3s", 3 * time.Second, "3s"},
		{"1.5s", 1500 * time.Millisecond, "1.5s"},
		{"90s", 90 * time.Second, "1m30s"},
		{"300s", 5 * time.Minute, "5m"},
		{"10m", 10 * time.Minute, "10m"},
		{"60m", time.Hour, "1h"},
		{"1h0m10s", time.Hour + 10*time.Second, "1h0m10s"},
		{"20h30m", 20*time.Hour + 30*time.Minute, "20h30m"},
	} {
		var d Duration
		if err := d.UnmarshalText([]byte(c.text)); err != nil || d.Duration() != c.want || d.String() != c.again {
			t.Errorf("%s: %v, %v; want %v, %s", c.text, d, err, c.want, c.again)
		}
		var e Duration
		if err := e.UnmarshalText([]byte(d.String())); err != nil || e != d {
			t.Errorf("%v is read again as %v, %v", d, e, err)
		}
	}
	for _, text := range []string{"", "3000", "1", "-1", "-1s", "s", "3 s", "1d", "1e3s", "+", "9999999h"} {
		var d Duration
		if err := d.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is read as %v", text, d)
		}
	}
}

func TestSizesInText(t *testing.T) {
	for _, c := range []struct {
		text  string
		want  Size
		again string
	}{
		{"0", 0, "0"}, {"65536", 65536, "64KiB"}, {"64KiB", 65536, "64KiB"}, {"1000", 1000, "1000"},
		{"1025KiB", 1025 << 10, "1025KiB"}, {"1024KiB", 1 << 20, "1MiB"}, {"2GiB", 2 << 30, "2GiB"}, {"4294967295GiB", 4294967295 << 30, "4294967295GiB"},
	} {
		var s Size
		if err := s.UnmarshalText([]byte(c.text)); err != nil || s != c.want || s.String() != c.again {
			t.Errorf("%s: %v, %v; want %d, %s", c.text, s, err, c.want, c.again)
		}
	}
	for _, text := range []string{"", "-1", "KiB", "64 KiB", "64KB", "64k", "1.5MiB", "0x10", "4294967296", "1KiBKiB"} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is read as %v", text, s)
		}
	}
}

func TestUsageNamesEveryKeyWithin80Columns(t *testing.T) {
	var b bytes.Buffer
	Usage(&b)
	for line := range strings.Lines(b.String()) {
		if n := len(strings.TrimSuffix(line, "\n")); n > 80 || strings.HasSuffix(line, " \n") {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	for _, f := range fieldsOf(reflect.TypeFor[Config]()) {
		if !strings.Contains(b.String(), "\n  "+flagName(keyOf(f))+" ") {
			t.Errorf("%s is not there", flagName(keyOf(f)))
		}
		if help := f.Tag.Get("help"); !strings.HasSuffix(help, ".") {
			t.Errorf("%s: help %q is no sentence", keyOf(f), help)
		}
	}
	for _, text := range []string{"\nQueue\n", "  --listen *", "Default: 64KiB.", "Default: 0.", "Default: [/v1/audio/transcriptions,"} {
		if !strings.Contains(b.String(), text) {
			t.Errorf("%q is not there", text)
		}
	}
}

func TestPrintTellsWhereEachValueCameFrom(t *testing.T) {
	c := sources{
		args: []string{"--config=weir.yaml", "--listen", ":1"},
		env:  map[string]string{"WEIR_MAX_CONCURRENCY": "2", "WEIR_THRESHOLDS": "{tie: 0.3}"},
		file: "# ours\nrecords: 5\nthresholds:\n  queue_share: 0.4\nroutes:\n  - /asr\n  - '/m/{model}'\nlimits:\n- {model: '7'}\n",
	}.mustLoad(t)
	var b bytes.Buffer
	c.Print(&b)
	for _, want := range []string{
		"listen: :1 # --listen",
		"max_concurrency: 2 # env WEIR_MAX_CONCURRENCY",
		"records: 5 # weir.yaml:2",
		"queue_share: 0.4 # weir.yaml:4",
		"tie: 0.3 # env WEIR_THRESHOLDS",
		"min_requests: 40 # default",
		"routes: # weir.yaml:5 - /asr - /m/{model} ",
		"limits: # weir.yaml:8 - {route: \"\", model: \"7\", max_concurrency: 0, max_queue_size: 1024, queue_timeout: 0} ",
		"queue_timeout: 0 # default",
		"window: 10s # default",
		"timings: [] # default",
	} {
		if text := " " + strings.Join(strings.Fields(b.String()), " ") + " "; !strings.Contains(text, " "+want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	if want := `  - {route: "", model: "7", max_concurrency: 0, max_queue_size: 1024, queue_timeout: 0}`; !strings.Contains(b.String(), "\n"+want+"\n") {
		t.Errorf("no line of its own for %s in\n%s", want, b.String())
	}
	again := sources{args: []string{"--config=weir.yaml"}, file: b.String()}.mustLoad(t)
	if !reflect.DeepEqual(bare(again), bare(c)) {
		t.Errorf("what Print wrote is read as %+v, want %+v", bare(again), bare(c))
	}
	b.Reset()
	DefaultConfig().Print(&b)
	if strings.Count(b.String(), "# default") < 30 {
		t.Errorf("defaults are printed as\n%s", b.String())
	}
}

func TestReloadReadsTheSameSourcesAgain(t *testing.T) {
	s := sources{args: []string{"--config=weir.yaml", "--listen=:1"}, env: map[string]string{"WEIR_ADMIN": ":2"}, file: "records: 1"}
	c, err := Load(s.args, func(name string) string { return s.env[name] }, func(name string) ([]byte, error) { return s.read(name) })
	if err != nil {
		t.Fatal(err)
	}
	if c.File() != "weir.yaml" {
		t.Errorf("loaded from %q", c.File())
	}
	s.file = "records: 2"
	next, err := c.Reload()
	if err != nil || next.Records != 2 || next.Listen != ":1" || next.Admin != ":2" {
		t.Errorf("%+v, %v", next, err)
	}
	s.file = "records: x"
	if _, err = next.Reload(); err == nil {
		t.Error("a mistake was not seen")
	}
	s.file = "records: 3"
	if next, err = next.Reload(); err != nil || next.Records != 3 {
		t.Errorf("%+v, %v", next, err)
	}
	if c, err := DefaultConfig().Reload(); err != nil || !reflect.DeepEqual(c, DefaultConfig()) || c.File() != "" {
		t.Errorf("the default was reloaded as %+v, %v", c, err)
	}
}

func TestRestartNamesWhatAReloadCannotChange(t *testing.T) {
	full := sources{args: []string{"--config=testdata/config/valid-full.yaml"}}
	c, err := Load(full.args, func(string) string { return "" }, os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"server", "listen", "admin", "window", "records", "server_kind", "probe", "server_metrics", "device", "otlp_grpc", "otlp_http", "otlp_wait", "tls_cert", "tls_key", "tls_client_ca", "server_ca", "server_name", "server_cert", "server_key", "server_insecure", "trust_parent", "keep_slow", "keep_queue_share", "log_format",
		"envoy_listen", "envoy_admin", "envoy_stat_prefix", "envoy_cluster", "envoy_coverage", "envoy_orca", "envoy_runtime", "envoy_runtime_keys", "envoy_runtime_min", "envoy_runtime_max"}
	if got := Restart(DefaultConfig(), c); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := Restart(c, c); got != nil {
		t.Errorf("%q without a change", got)
	}
	if got := Restart(DefaultConfig(), sources{args: []string{"--max-concurrency=3"}}.mustLoad(t)); got != nil {
		t.Errorf("%q for a key that reloads", got)
	}
}

func TestWatchFileCallsWhenTheContentHasChanged(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps func(t *testing.T, dir string, pass func())
		calls int
	}{
		{"nothing happens", func(_ *testing.T, _ string, pass func()) { pass() }, 0},
		{"another content", func(t *testing.T, dir string, pass func()) {
			write(t, dir+"/weir.yaml", "b")
			pass()
			write(t, dir+"/weir.yaml", "c")
			pass()
		}, 2},
		{"a touch", func(t *testing.T, dir string, pass func()) {
			write(t, dir+"/weir.yaml", "a")
			pass()
		}, 0},
		{"a rename over it", func(t *testing.T, dir string, pass func()) {
			write(t, dir+"/new", "b")
			must(t, os.Rename(dir+"/new", dir+"/weir.yaml"))
			pass()
		}, 1},
		{"gone and back", func(t *testing.T, dir string, pass func()) {
			must(t, os.Remove(dir+"/weir.yaml"))
			pass()
			write(t, dir+"/weir.yaml", "a")
			pass()
			write(t, dir+"/weir.yaml", "b")
			pass()
		}, 1},
		{"there and back between two readings that agree", func(t *testing.T, dir string, pass func()) {
			write(t, dir+"/weir.yaml", "")
			time.Sleep(watched)
			write(t, dir+"/weir.yaml", "a")
			pass()
		}, 0},
		{"a ConfigMap's links", func(t *testing.T, dir string, pass func()) {
			for _, v := range []string{"1", "2"} {
				must(t, os.Mkdir(dir+"/.."+v, 0o755))
				write(t, dir+"/.."+v+"/weir.yaml", "b"+v)
			}
			must(t, os.Symlink("..1", dir+"/..data"))
			must(t, os.Remove(dir+"/weir.yaml"))
			must(t, os.Symlink("..data/weir.yaml", dir+"/weir.yaml"))
			pass() // first call
			must(t, os.Symlink("..2", dir+"/..tmp"))
			must(t, os.Rename(dir+"/..tmp", dir+"/..data"))
			must(t, os.RemoveAll(dir+"/..1"))
			pass() // second
		}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir+"/weir.yaml", "a")
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan struct{})
				go func() {
					defer close(done)
					WatchFile(ctx, dir+"/weir.yaml", watched, func() { calls++ })
				}()
				time.Sleep(watched / 2) // between two readings from now on
				c.steps(t, dir, func() { time.Sleep(3 * watched) })
				cancel()
				<-done
				if calls != c.calls {
					t.Errorf("%d calls, want %d", calls, c.calls)
				}
			})
		})
	}
}

const watched = 2 * time.Second

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWatchFileLeavesPipesAlone(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		WatchFile(t.Context(), os.DevNull, time.Millisecond, func() { t.Error("called") })
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("still watching")
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"listen", "listne", 2}, {"flaw", "lawn", 2}, {"é", "e", 2}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("from %q to %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

// What can be read can be printed and read again; what cannot is told by place.
func FuzzConfig(f *testing.F) {
	files, _ := filepath.Glob("testdata/config/*.yaml")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text), "--max-concurrency=3", "{tie: 0.3}")
	}
	f.Add("a: *a", "--limits=[", "[{}]")
	f.Add("limits: [{model: \"a\\nb # c\"}]", "--timings=[{name: a, stage: queue}]", "")
	f.Add("queue_timeout: 1.5s\nmax_head_size: 2000", "--keep-queue-share=1e-9", "copy_rate: 123456789.5")
	f.Fuzz(func(t *testing.T, file, arg, env string) {
		s := sources{args: []string{"--config=weir.yaml", arg}, file: file, env: map[string]string{"WEIR_THRESHOLDS": env}}
		c, err := s.load()
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if err != flag.ErrHelp && !strings.Contains(line, ": ") {
					t.Errorf("%q tells no place", line)
				}
			}
			return
		}
		var b bytes.Buffer
		c.Print(&b)
		again, err := sources{args: []string{"--config=weir.yaml"}, file: b.String()}.load()
		if err != nil || fmt.Sprintf("%+v", bare(again)) != fmt.Sprintf("%+v", bare(c)) {
			t.Errorf("%v: %+v, want %+v; printed as\n%s", err, bare(again), bare(c), b.String())
		}
		if network, address := c.ServerAddress(); network == "" || address == "" {
			t.Errorf("server %q has no address", c.Server)
		}
		if _, err := NewRouter(c.Routes); err != nil {
			t.Error(err)
		}
		if _, err := tracing.NewIngest(c.Timings); err != nil {
			t.Error(err)
		}
	})
}
