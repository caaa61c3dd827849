package tracing

import (
	"bytes"
	"strconv"
	"strings"
)

// What follows reads JSON that is not whole: the first bytes of a document, or
// its last. It allocates nothing and believes nothing: where a document is
// malformed it just ends.

// firstMembers calls take for the members of the object at the start of b, as
// long as they are whole.
func firstMembers(b []byte, take func(key, value []byte)) {
	b = skipBlank(b)
	if len(b) == 0 || b[0] != '{' {
		return
	}
	for b = skipBlank(b[1:]); len(b) > 0 && b[0] == '"'; b = skipBlank(b[1:]) {
		key, rest, ok := cutValue(b)
		rest = skipBlank(rest)
		if !ok || len(rest) == 0 || rest[0] != ':' {
			return
		}
		value, rest, ok := cutValue(skipBlank(rest[1:]))
		if !ok {
			return
		}
		take(key[1:len(key)-1], value)
		if b = skipBlank(rest); len(b) == 0 || b[0] != ',' {
			return
		}
	}
}

// lastMembers calls take for the members of the object that ends b, the last
// one first, as long as they are whole. It reads backwards, since only the end
// of a document is sure to lie outside of a string.
func lastMembers(b []byte, take func(key, value []byte)) {
	b = trimBlank(b)
	if len(b) == 0 || b[len(b)-1] != '}' {
		return
	}
	for b = trimBlank(b[:len(b)-1]); len(b) > 0; b = trimBlank(b[:len(b)-1]) {
		value, before, ok := cutLastValue(b)
		before = trimBlank(before)
		if !ok || len(before) == 0 || before[len(before)-1] != ':' {
			return
		}
		key, before, ok := cutLastValue(trimBlank(before[:len(before)-1]))
		if !ok || key[0] != '"' {
			return
		}
		take(key[1:len(key)-1], value)
		if b = trimBlank(before); len(b) == 0 || b[len(b)-1] != ',' {
			return
		}
	}
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

func skipBlank(b []byte) []byte {
	for len(b) > 0 && isBlank(b[0]) {
		b = b[1:]
	}
	return b
}

func trimBlank(b []byte) []byte {
	for len(b) > 0 && isBlank(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

// cutValue cuts the value at the start of b; not ok if it does not end in b.
func cutValue(b []byte) (value, rest []byte, ok bool) {
	if len(b) == 0 {
		return nil, nil, false
	}
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			n := closingQuote(b[i+1:])
			if n < 0 {
				return nil, nil, false
			}
			i += 1 + n
		case '{', '[':
			depth++
			continue
		case '}', ']':
			if depth--; depth < 0 {
				return b[:i], b[i:], i > 0
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return b[:i], b[i:], i > 0
			}
			continue
		default:
			continue
		}
		if depth == 0 {
			return b[:i+1], b[i+1:], true
		}
	}
	return nil, nil, false
}

func closingQuote(b []byte) int {
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			return i
		case '\\':
			i++
		}
	}
	return -1
}

// cutLastValue cuts the value at the end of b; not ok if it does not begin
// in b.
func cutLastValue(b []byte) (value, before []byte, ok bool) {
	if len(b) == 0 {
		return nil, nil, false
	}
	depth := 0
	for i := len(b) - 1; i >= 0; i-- {
		switch b[i] {
		case '"':
			if i = openingQuote(b[:i]); i < 0 {
				return nil, nil, false
			}
		case '}', ']':
			depth++
			continue
		case '{', '[':
			if depth--; depth < 0 {
				return nil, nil, false
			}
		case ':', ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return b[i+1:], b[:i+1], i+1 < len(b)
			}
			continue
		default:
			continue
		}
		if depth == 0 {
			return b[i:], b[:i], true
		}
	}
	return nil, nil, false
}

// openingQuote is the last quote in b that no backslash escapes; -1 if there
// is none.
func openingQuote(b []byte) int {
	for {
		i := bytes.LastIndexByte(b, '"')
		if i < 0 {
			return -1
		}
		slashes := 0
		for slashes < i && b[i-1-slashes] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i
		}
		b = b[:i]
	}
}

// pointed is the value under a JSON pointer (RFC 6901), less its first
// segment, which named value; nil if there is none.
func pointed(value []byte, pointer string) []byte {
	for pointer != "" && value != nil {
		segment, rest, more := strings.Cut(pointer[1:], "/")
		value = child(value, segment)
		if pointer = ""; more {
			pointer = "/" + rest
		}
	}
	return value
}

func child(value []byte, segment string) (found []byte) {
	if len(value) == 0 {
		return nil
	}
	if value[0] == '{' {
		firstMembers(value, func(key, v []byte) {
			if found == nil && isKey(key, segment) {
				found = v
			}
		})
		return found
	}
	n, err := strconv.Atoi(segment)
	if value[0] != '[' || err != nil || n < 0 {
		return nil
	}
	for b := skipBlank(value[1:]); ; n-- {
		v, rest, ok := cutValue(b)
		if !ok || n == 0 {
			return v
		}
		if rest = skipBlank(rest); len(rest) == 0 || rest[0] != ',' {
			return nil
		}
		b = skipBlank(rest[1:])
	}
}

// isKey compares a key with a pointer's segment, in which ~1 stands for / and
// ~0 for ~. Keys with escapes of their own match nothing.
func isKey(key []byte, segment string) bool {
	if strings.IndexByte(segment, '~') >= 0 {
		segment = strings.NewReplacer("~1", "/", "~0", "~").Replace(segment)
	}
	return string(key) == segment
}
