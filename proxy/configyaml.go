package proxy

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v4"
)

// parse reads one YAML document; nil if there is nothing in it.
func (l *loader) parse(text []byte) (n *yaml.Node, ok bool) {
	loader, err := yaml.NewLoader(bytes.NewReader(text))
	if err == nil {
		n, err = nextDocument(loader)
	}
	if err == nil && n != nil {
		var second *yaml.Node
		if second, err = nextDocument(loader); second != nil {
			l.mistake(l.placeOf(second), "", "a second document begins here; keep one")
			return nil, false
		}
	}
	if err != nil {
		l.malformed(err)
		return nil, false
	}
	if n != nil && n.ShortTag() == "!!null" {
		n = nil
	}
	return n, true
}

func nextDocument(l *yaml.Loader) (*yaml.Node, error) {
	var n yaml.Node
	err := l.Load(&n)
	switch {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, err
	case n.Kind == yaml.DocumentNode && len(n.Content) == 1:
		return n.Content[0], nil
	}
	return &n, nil
}

func (l *loader) malformed(err error) {
	at, text := l.at, err.Error()
	var e *yaml.LoadError
	if errors.As(err, &e) {
		if at.line > 0 && e.Mark.Line > 0 {
			at.line = e.Mark.Line
		}
		text = e.Message
	}
	l.mistake(at, "", "is no YAML: %s; look at colons, quotes and indentation, and put in quotes what begins with [ { * & ! %% @ or `", text)
}

func (l *loader) placeOf(n *yaml.Node) place {
	p := l.at
	if p.source == inFile {
		p.line = n.Line
	}
	return p
}

// read sets v to the value n of the key path, which stands at at.
func (l *loader) read(path string, at place, n *yaml.Node, v reflect.Value) {
	if v.Kind() != reflect.Struct { // of a map each key has its own place
		l.places[path] = at
	}
	text, isText := v.Addr().Interface().(encoding.TextUnmarshaler)
	switch {
	case n.Kind == yaml.AliasNode:
		l.mistake(at, path, "is an alias; write the value itself")
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null":
		l.mistake(at, path, "has no value; give one, or leave the key out")
	case v.Kind() == reflect.Struct:
		l.readMap(path, at, n, v)
	case v.Kind() == reflect.Slice:
		l.readList(path, at, n, v)
	case n.Kind != yaml.ScalarNode:
		l.mistake(at, path, "is a list or a map; write one value")
	case isText:
		if err := text.UnmarshalText([]byte(n.Value)); err != nil {
			l.mistake(at, path, "value %.80q %v", n.Value, err)
		}
	default:
		if remedy := readScalar(n, v); remedy != "" {
			l.mistake(at, path, "value %.80q %s", n.Value, remedy)
		}
	}
}

// forget drops the places of a list's elements, which a later source replaces.
func (l *loader) forget(path string) {
	for p := range l.places {
		if strings.HasPrefix(p, path+"[") {
			delete(l.places, p)
		}
	}
}

func readScalar(n *yaml.Node, v reflect.Value) (remedy string) {
	tag := n.ShortTag()
	switch v.Kind() {
	case reflect.String:
		v.SetString(n.Value)
	case reflect.Bool:
		if tag != "!!bool" {
			return "is neither true nor false; write one of the two, without quotes"
		}
		v.SetBool(strings.EqualFold(n.Value, "true"))
	case reflect.Int:
		i, err := strconv.Atoi(n.Value)
		if err != nil || tag != "!!int" {
			return "is no whole number; write digits alone, without quotes"
		}
		if i < 0 {
			return "is negative; write 0 or more"
		}
		v.SetInt(int64(i))
	case reflect.Float64:
		f, err := strconv.ParseFloat(n.Value, 64)
		if err != nil || tag != "!!int" && tag != "!!float" {
			return "is no number; write digits, as in 0.5, without quotes"
		}
		if f < 0 {
			return "is negative; write 0 or more"
		}
		v.SetFloat(f)
	}
	return ""
}

func (l *loader) readList(path string, at place, n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		l.mistake(at, path, "is no list; write it in brackets, as in [a, b], or as lines that begin with a dash")
		return
	}
	l.forget(path)
	list := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, one := range n.Content {
		element := fmt.Sprintf("%s[%d]", path, i)
		l.places[element] = l.placeOf(one)
		l.read(element, l.placeOf(one), one, list.Index(i))
	}
	if v.SetZero(); list.Len() > 0 {
		v.Set(list)
	}
}

func (l *loader) readMap(path string, at place, n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		l.mistake(at, path, "is no map; write keys with values, as in %s: value", keysOf(v.Type())[0])
		return
	}
	lines := make(map[string]int, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at, name := l.placeOf(key), key.Value
		whole := strings.TrimPrefix(path+"."+name, ".")
		f, known := fieldOf(v.Type(), name)
		line, twice := lines[name]
		if !twice {
			lines[name] = key.Line
		}
		switch {
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!merge":
			l.mistake(at, path, "has a key that is no word; write one key a line, without << and aliases")
		case !known:
			l.mistake(at, printable(whole), "is no key; %s", suggest(name, keysOf(v.Type()), plain, otherKeys(path, v.Type())))
		case twice:
			l.mistake(at, whole, "is given twice, first in line %d; keep one of the two", line)
		default:
			l.read(whole, at, value, v.FieldByIndex(f.Index))
		}
	}
}

func plain(key string) string { return key }

// printable is the name, in quotes if it would not stand well in a line.
func printable(name string) string {
	if len(name) > 80 || strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsPrint(c) }) {
		return fmt.Sprintf("%.80q", name)
	}
	return name
}

func otherKeys(path string, t reflect.Type) string {
	if path == "" {
		return "weir serve --help names all keys"
	}
	return "the keys here are " + strings.Join(keysOf(t), ", ")
}

func keysOf(t reflect.Type) (keys []string) {
	for _, f := range fieldsOf(t) {
		keys = append(keys, keyOf(f))
	}
	return keys
}

func fieldOf(t reflect.Type, key string) (reflect.StructField, bool) {
	for _, f := range fieldsOf(t) {
		if keyOf(f) == key {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

// suggest names the key that was meant, or else says what to do.
func suggest(key string, keys []string, write func(string) string, or string) string {
	if len(key) > 80 {
		return or
	}
	key = strings.ReplaceAll(strings.ToLower(key), "-", "_")
	best, least := "", 1+min(3, max(1, len(key)/3))
	for _, k := range keys {
		if d := distance(key, k); d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return or
	}
	return fmt.Sprintf("did you mean %s?", write(best))
}

// distance counts the letters to insert, delete or replace to make b of a
// (Levenshtein 1966).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}
