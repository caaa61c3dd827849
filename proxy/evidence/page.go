package evidence

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// A page is what was read of one metrics page: the samples of the families
// that some adapter knows, by name.
type page map[string][]sample

// sample is one line of a page.
type sample struct {
	labels []label
	value  float64
}

type label struct{ name, value string }

func (s *sample) label(name string) string {
	for _, l := range s.labels {
		if l.name == name {
			return l.value
		}
	}
	return ""
}

// Limits of a page. More is no metrics page that anybody could use.
const (
	maxPage    = 4 << 20 // bytes
	maxSamples = 20_000  // of the families that are wanted
	maxLabels  = 64
	maxLine    = 64 << 10
)

// parsePage reads the text format of Prometheus or OpenMetrics, and keeps the
// samples that want asks for. A line that cannot be read is an error: half a
// page must not pass for a whole one.
func parsePage(text []byte, want func(name string) bool) (page, error) {
	p, n := make(page), 0
	for number := 1; len(text) > 0; number++ {
		var line []byte
		line, text, _ = bytes.Cut(text, []byte("\n"))
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		if len(line) > maxLine {
			return nil, fmt.Errorf("line %d has %d bytes: that is no metrics page", number, len(line))
		}
		name, rest := cutName(line)
		if name == "" {
			return nil, fmt.Errorf("line %d, %.60q, does not begin with a metric's name: that is no metrics page", number, line)
		}
		if !want(name) {
			continue
		}
		s, err := parseSample(rest)
		if err != nil {
			return nil, fmt.Errorf("line %d, %.60q: %w", number, line, err)
		}
		if n++; n > maxSamples {
			return nil, fmt.Errorf("more than %d samples are of use; name the page of one server", maxSamples)
		}
		p[name] = append(p[name], s)
	}
	return p, nil
}

func isNameByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == ':'
}

func cutName(line []byte) (name string, rest []byte) {
	i := 0
	for i < len(line) && isNameByte(line[i]) {
		i++
	}
	if i == 0 || '0' <= line[0] && line[0] <= '9' {
		return "", nil
	}
	if i < len(line) && line[i] != '{' && line[i] != ' ' && line[i] != '\t' {
		return "", nil
	}
	return string(line[:i]), line[i:]
}

// parseSample reads what follows the name: labels, the value, and perhaps a
// time stamp or an exemplar, which do not matter.
func parseSample(b []byte) (s sample, err error) {
	if len(b) > 0 && b[0] == '{' {
		if s.labels, b, err = parseLabels(b[1:]); err != nil {
			return s, err
		}
	}
	fields := bytes.Fields(b)
	if len(fields) == 0 {
		return s, fmt.Errorf("it has no value")
	}
	if s.value, err = strconv.ParseFloat(string(fields[0]), 64); err != nil {
		return s, fmt.Errorf("%.40q is no number", fields[0])
	}
	return s, nil
}

// parseLabels reads name="value" pairs up to the closing brace.
func parseLabels(b []byte) (labels []label, rest []byte, err error) {
	for {
		b = bytes.TrimLeft(b, " \t,")
		if len(b) == 0 {
			return nil, nil, fmt.Errorf("its labels do not end")
		}
		if b[0] == '}' {
			return labels, b[1:], nil
		}
		name, after, ok := bytes.Cut(b, []byte(`="`))
		if !ok {
			return nil, nil, fmt.Errorf("a label is not of the form name=\"value\"")
		}
		var value string
		if value, b, ok = unquote(after); !ok {
			return nil, nil, fmt.Errorf("a label's value does not end")
		}
		if len(labels) == maxLabels {
			return nil, nil, fmt.Errorf("it has more than %d labels", maxLabels)
		}
		labels = append(labels, label{string(bytes.TrimSpace(name)), value})
	}
}

// unquote reads up to the closing quote; \n, \\ and \" are the escapes.
func unquote(b []byte) (value string, rest []byte, ok bool) {
	var w strings.Builder
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			return w.String(), b[i+1:], true
		case c == '\\' && i+1 < len(b):
			i++
			if c = b[i]; c == 'n' {
				c = '\n'
			}
			w.WriteByte(c)
		default:
			w.WriteByte(c)
		}
	}
	return "", nil, false
}
