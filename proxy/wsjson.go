package proxy

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// An object is the top level of a JSON object, as slices of its text. Reading
// one allocates nothing and takes text that was cut off as far as it goes:
// messages are only looked at, by a reader that nobody asked to check them.
type object struct {
	n      int
	fields [40]struct{ key, value []byte }
}

// read takes b apart; false if it is no object. Fields past the 40th are not seen.
func (o *object) read(b []byte) bool {
	o.n = 0
	b = space(b)
	if len(b) == 0 || b[0] != '{' {
		return false
	}
	for b = space(b[1:]); len(b) > 0 && b[0] == '"' && o.n < len(o.fields); b = space(b) {
		key, rest := value(b)
		rest = space(rest)
		if len(rest) == 0 || rest[0] != ':' {
			break
		}
		f := &o.fields[o.n]
		f.key = unquoted(key)
		f.value, b = value(space(rest[1:]))
		if len(f.value) == 0 {
			break
		}
		o.n++
		if b = space(b); len(b) == 0 || b[0] != ',' {
			break
		}
		b = b[1:]
	}
	return true
}

// raw is the text of a value; nil if there is no such key. Of several the
// last counts, as for most readers.
func (o *object) raw(key string) []byte {
	for i := o.n - 1; i >= 0; i-- {
		if string(o.fields[i].key) == key {
			return o.fields[i].value
		}
	}
	return nil
}

func (o *object) has(key string) bool { return o.raw(key) != nil }
func (o *object) yes(key string) bool { return string(o.raw(key)) == "true" }
func (o *object) no(key string) bool  { return string(o.raw(key)) == "false" }

// is tells whether the value is that string.
func (o *object) is(key, want string) bool {
	v := o.raw(key)
	return len(v) >= 2 && v[0] == '"' && string(unquoted(v)) == want
}

// text is the content of a string value, of at most 8 KiB.
func (o *object) text(key string) string {
	v := o.raw(key)
	if len(v) < 2 || v[0] != '"' || len(v) > 8<<10 {
		return ""
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(unquoted(v))
	}
	var s string
	if json.Unmarshal(v, &s) != nil {
		return ""
	}
	return s
}

// number is a number, also one in quotes.
func (o *object) number(key string) (float64, bool) {
	v := unquoted(o.raw(key))
	if len(v) == 0 || len(v) > 32 {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(v), 64)
	return f, err == nil && f-f == 0
}

// spoken tells whether the value is a string with more than space in it.
func (o *object) spoken(key string) bool { return isSpoken(o.raw(key)) }

func isSpoken(v []byte) bool {
	return len(v) > 2 && v[0] == '"' && len(bytes.TrimSpace(unquoted(v))) > 0
}

// object reads an object within.
func (o *object) object(key string) (in object) {
	in.read(o.raw(key))
	return in
}

// last is the last element of an array, first the first.
func (o *object) last(key string) []byte {
	var last []byte
	elements(o.raw(key), func(v []byte) bool { last = v; return true })
	return last
}

func (o *object) first(key string) []byte {
	var first []byte
	elements(o.raw(key), func(v []byte) bool { first = v; return false })
	return first
}

// elements calls f with each element of an array until it returns false.
func elements(b []byte, f func([]byte) bool) {
	if len(b) == 0 || b[0] != '[' {
		return
	}
	for b = space(b[1:]); len(b) > 0 && b[0] != ']'; {
		v, rest := value(b)
		if len(v) == 0 || !f(v) {
			return
		}
		if rest = space(rest); len(rest) == 0 || rest[0] != ',' {
			return
		}
		b = space(rest[1:])
	}
}

func space(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\n' || b[0] == '\r') {
		b = b[1:]
	}
	return b
}

// unquoted is a string's text between its quotes, escapes and all.
func unquoted(v []byte) []byte {
	if len(v) > 0 && v[0] == '"' {
		v = v[1:]
		if n := len(v); n > 0 && v[n-1] == '"' {
			v = v[:n-1]
		}
	}
	return v
}

// value splits off the value that b begins with; it needs no stack, however
// deep that is nested.
func value(b []byte) (v, rest []byte) {
	if len(b) == 0 {
		return nil, nil
	}
	n, depth := 0, 0
	for n < len(b) {
		switch c := b[n]; c {
		case '"':
			n += quoted(b[n:])
		case '{', '[':
			depth++
			n++
		case '}', ']':
			if depth == 0 {
				return b[:n], b[n:]
			}
			depth--
			n++
		case ',', ':', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return b[:n], b[n:]
			}
			n++
			continue
		default:
			n++
			continue
		}
		if depth == 0 {
			return b[:n], b[n:]
		}
	}
	return b, nil
}

// quoted is the length of the string that b begins with, quotes included.
func quoted(b []byte) int {
	for i := 1; i < len(b); {
		end := bytes.IndexByte(b[i:], '"')
		if end < 0 {
			break
		}
		escape := bytes.IndexByte(b[i:i+end], '\\')
		if escape < 0 {
			return i + end + 1
		}
		i += escape + 2
	}
	return len(b)
}
