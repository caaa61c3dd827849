package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
)

// loaded is how a configuration came about.
type loaded struct {
	args     []string
	getenv   func(string) string
	readFile func(string) ([]byte, error)
	file     string
	places   map[string]place // of each key that was written: "listen", "limits[0].route"
}

// A place is where a value was written.
type place struct {
	source source
	name   string // the file, "env WEIR_LISTEN" or "--listen"
	line   int    // in the file
}

// A source of values; a later one wins.
type source int

const (
	byDefault source = iota
	inFile
	inEnv
	byFlag
)

func (p place) String() string {
	switch p.source {
	case byDefault:
		return "default"
	case inFile:
		return fmt.Sprintf("%s:%d", p.name, p.line)
	}
	return p.name
}

// mistakes are all that is wrong with a configuration, in the order in which
// they were written.
type mistakes []mistake

type mistake struct {
	place
	key  string // "" if it is about none
	text string
}

func (m mistakes) Error() string {
	lines := make([]string, len(m))
	for i, one := range m {
		lines[i] = one.place.String() + ": "
		if one.key != "" && lines[i] != flagName(one.key)+": " {
			lines[i] += one.key + ": "
		}
		lines[i] += one.text
	}
	return strings.Join(lines, "\n")
}

// Load makes the configuration: a flag goes before the environment, that
// before the file (--config or WEIR_CONFIG), and that before the default. The
// error names all mistakes; it is [flag.ErrHelp] if args ask for help.
func Load(args []string, getenv func(string) string, readFile func(string) ([]byte, error)) (Config, error) {
	l := &loader{cfg: DefaultConfig(), loaded: &loaded{args: args, getenv: getenv, readFile: readFile, places: make(map[string]place)}}
	flags, help := l.splitFlags(args)
	if help {
		return Config{}, flag.ErrHelp
	}
	l.fromFile(flags)
	l.fromEnv()
	l.fromFlags(flags)
	if !l.broken {
		l.inherit()
		l.check()
	}
	if len(l.mistakes) > 0 {
		slices.SortStableFunc(l.mistakes, func(a, b mistake) int {
			return cmp.Or(cmp.Compare(a.source, b.source), cmp.Compare(a.line, b.line))
		})
		return Config{}, l.mistakes
	}
	l.cfg.loaded = l.loaded
	return l.cfg, nil
}

// CheckFile names every mistake in a configuration file.
func CheckFile(path string) error {
	_, err := Load([]string{"--config=" + path}, func(string) string { return "" }, os.ReadFile)
	return err
}

// File is the file that c was loaded from; empty if there is none.
func (c Config) File() string {
	if c.loaded == nil {
		return ""
	}
	return c.loaded.file
}

// Reload loads again what c was loaded from.
func (c Config) Reload() (Config, error) {
	if c.loaded == nil {
		return c, nil
	}
	return Load(c.loaded.args, c.loaded.getenv, c.loaded.readFile)
}

// A loader reads one source after the other into cfg.
type loader struct {
	*loaded
	cfg      Config
	at       place // what is being read
	mistakes mistakes
	broken   bool // the file is no YAML: what is missing may stand in it
}

func (l *loader) mistake(p place, key, format string, args ...any) {
	l.mistakes = append(l.mistakes, mistake{p, key, fmt.Sprintf(format, args...)})
}

// A flagValue is one flag as it was given.
type flagValue struct{ key, text string }

const configKey = "config" // the one flag that is no key

// splitFlags reads --key value, --key=value, and --key alone for a bool.
func (l *loader) splitFlags(args []string) (flags []flagValue, help bool) {
	for len(args) > 0 {
		name, text, given := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(args[0], "-"), "-"), "=")
		if !strings.HasPrefix(args[0], "-") || name == "" {
			l.mistake(place{source: byFlag, name: strconv.Quote(args[0])}, "", "is no flag; write --key=value, or --key value where the value is not true or false")
			args = args[1:]
			continue
		}
		if name == "help" || name == "h" {
			return nil, true
		}
		args = args[1:]
		key := strings.ReplaceAll(name, "-", "_")
		f, known := fieldOf(reflect.TypeFor[Config](), key)
		switch {
		case given:
		case known && f.Type.Kind() == reflect.Bool:
			text, given = "true", true
		case len(args) > 0 && !strings.HasPrefix(args[0], "--"):
			text, given, args = args[0], true, args[1:]
		}
		switch at := (place{source: byFlag, name: printable(flagName(key))}); {
		case !known && key != configKey:
			l.mistake(at, "", "is no flag; %s", suggest(key, append(keysOf(reflect.TypeFor[Config]()), configKey), flagName, "weir serve --help names all flags"))
		case !given:
			l.mistake(at, "", "has no value; write %s=value", at.name)
		default:
			flags = append(flags, flagValue{key, text})
		}
	}
	return flags, false
}

func flagName(key string) string { return "--" + strings.ReplaceAll(key, "_", "-") }
func envName(key string) string  { return "WEIR_" + strings.ToUpper(key) }

func (l *loader) fromFile(flags []flagValue) {
	l.file = l.getenv(envName(configKey))
	at := place{source: inEnv, name: "env " + envName(configKey)}
	for _, f := range flags {
		if f.key == configKey {
			l.file, at = f.text, place{source: byFlag, name: flagName(configKey)}
		}
	}
	if l.file == "" {
		return
	}
	text, err := l.readFile(l.file)
	if err != nil {
		var p *fs.PathError
		if errors.As(err, &p) {
			err = p.Err
		}
		l.broken = true
		l.mistake(at, "", "value %q cannot be read: %v; name a file that weir may read", l.file, err)
		return
	}
	l.at = place{source: inFile, name: l.file, line: 1}
	n, ok := l.parse(text)
	l.broken = !ok
	if n != nil {
		l.readMap("", l.placeOf(n), n, reflect.ValueOf(&l.cfg).Elem())
	}
}

func (l *loader) fromEnv() {
	for _, f := range fieldsOf(reflect.TypeFor[Config]()) {
		name := envName(keyOf(f))
		if text := l.getenv(name); text != "" {
			l.at = place{source: inEnv, name: "env " + name}
			l.readText(f, text)
		}
	}
}

func (l *loader) fromFlags(flags []flagValue) {
	for _, one := range flags {
		if f, ok := fieldOf(reflect.TypeFor[Config](), one.key); ok {
			l.at = place{source: byFlag, name: flagName(one.key)}
			l.readText(f, one.text)
		}
	}
}

// readText reads a key's value as it stands in a flag or the environment. It
// is YAML as in the file, but a text is the text itself, which spares the
// quotes around [::]:8080.
func (l *loader) readText(f reflect.StructField, text string) {
	n, ok := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: strings.TrimSpace(text)}, true
	if f.Type.Kind() != reflect.String {
		n, ok = l.parse([]byte(text))
	}
	if n == nil {
		n = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}
	}
	if ok {
		l.read(keyOf(f), l.at, n, reflect.ValueOf(&l.cfg).Elem().FieldByIndex(f.Index))
	}
}

// inherit gives the limits of one route or model the size of the queue that
// they do not tell.
func (l *loader) inherit() {
	for i := range l.cfg.Limits {
		if _, given := l.places[fmt.Sprintf("limits[%d].max_queue_size", i)]; !given {
			l.cfg.Limits[i].MaxQueueSize = l.cfg.MaxQueueSize
		}
	}
}

// WatchFile calls changed when the content of the file is another, until ctx
// ends. It reads the file at each interval, so that it sees every way to
// replace one, a Kubernetes ConfigMap's links included; and it waits until two
// readings agree, since an editor may be halfway through.
func WatchFile(ctx context.Context, path string, interval time.Duration, changed func()) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return // a pipe can be read once only
	}
	known, _ := os.ReadFile(path)
	last := known
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		text, err := os.ReadFile(path)
		if err != nil {
			continue // gone for a moment, perhaps
		}
		if bytes.Equal(text, last) && !bytes.Equal(text, known) {
			known = text
			changed()
		}
		last = text
	}
}
