package proxy

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// A Router names the class of a request by its method and path. Classes are
// few, whatever clients send: what no route matches is one class a method.
type Router struct {
	literals map[string]*route // by path
	patterns []*route          // with parts in braces; the first that matches counts
	shapes   map[string]string // the template of each shape, to find two that are one
}

// A route is one template, cut up at its slashes.
type route struct {
	template string
	classes  [len(methods) + 1]string // by the index of the method
	segments []segment                // none in a literal route
}

// A segment is one part of a path. With a name it matches whatever stands
// between prefix and suffix, if anything does.
type segment struct {
	prefix, suffix string
	name           string // "": the segment is prefix, literally
}

// methods are those that OpenTelemetry knows; others are "_OTHER", lest a
// client make up as many classes as it likes.
var methods = [...]string{"POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"}

const (
	otherMethod = "_OTHER"
	modelName   = "model" // the part of a template that names the model
	maxModel    = 128     // bytes of a model's name
)

// NewRouter returns a router for templates such as /v2/models/{model}/infer. A
// part in braces stands for one segment or, as in {model}:predict, for the
// rest of it. Literal routes go before others, and those in their order.
func NewRouter(routes []string) (*Router, error) {
	r := &Router{literals: make(map[string]*route), shapes: make(map[string]string)}
	for _, template := range routes {
		if err := r.add(template); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *Router) add(template string) error {
	one, err := newRoute(template)
	if err != nil {
		return fmt.Errorf("route %q %w", template, err)
	}
	shape := one.shape()
	if twin, twice := r.shapes[shape]; twice {
		return fmt.Errorf("route %q matches the same paths as %q; keep one of the two", template, twin)
	}
	r.shapes[shape] = template
	if len(one.segments) == 0 {
		r.literals[template] = one
	} else {
		r.patterns = append(r.patterns, one)
	}
	return nil
}

func newRoute(template string) (*route, error) {
	if !strings.HasPrefix(template, "/") {
		return nil, fmt.Errorf("does not start with a slash; write /%s", template)
	}
	if i := strings.IndexFunc(template, notInPath); i >= 0 {
		c, _ := utf8.DecodeRuneInString(template[i:])
		return nil, fmt.Errorf("has %q in it, which no path can have; write it as in a request: percent-encoded, without query", c)
	}
	r := &route{template: template}
	for i, method := range methods {
		r.classes[i] = method + " " + template
	}
	r.classes[len(methods)] = otherMethod + " " + template
	if !strings.ContainsAny(template, "{}") {
		return r, nil
	}
	models := 0
	for part := range strings.SplitSeq(template[1:], "/") {
		s, err := newSegment(part)
		if err != nil {
			return nil, err
		}
		if s.name == modelName {
			models++
		}
		r.segments = append(r.segments, s)
	}
	if models > 1 {
		return nil, fmt.Errorf("has {%s} in it %d times; give all but one another name", modelName, models)
	}
	return r, nil
}

func notInPath(c rune) bool { return c <= ' ' || c >= 0x7f || c == '?' || c == '#' }

func newSegment(part string) (segment, error) {
	prefix, rest, open := strings.Cut(part, "{")
	name, suffix, closed := strings.Cut(rest, "}")
	switch {
	case !open && !strings.Contains(part, "}"):
		return segment{prefix: part}, nil
	case !open, !closed, strings.Contains(prefix, "}"), strings.ContainsAny(suffix, "{}"), strings.Contains(name, "{"):
		return segment{}, fmt.Errorf("has braces in %q that are no pair; write one pair a segment, as in {model} or {model}:predict", part)
	case name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz_") != "":
		return segment{}, fmt.Errorf("has the name %q in braces; use lower-case letters and _, as in {model}", name)
	}
	return segment{prefix: prefix, suffix: suffix, name: name}, nil
}

// shape is the template without its names.
func (r *route) shape() string {
	if len(r.segments) == 0 {
		return r.template
	}
	var b strings.Builder
	for _, s := range r.segments {
		b.WriteString("/" + s.prefix)
		if s.name != "" {
			b.WriteString("{}" + s.suffix)
		}
	}
	return b.String()
}

// Match tells the class of a request, the template that its path matches, and
// the model that the path names; without a template the class is the method.
// A query in path is passed over, and so is one slash at its end. The model
// is a part of path; nothing is allocated.
func (r *Router) Match(method, path []byte) (class, template string, model []byte) {
	m := methodIndex(method)
	path, _, _ = bytes.Cut(path, []byte("?"))
	one, name := r.find(path)
	if one == nil && len(path) > 1 && path[len(path)-1] == '/' {
		one, name = r.find(path[:len(path)-1])
	}
	switch {
	case one != nil:
		return one.classes[m], one.template, modelOf(name)
	case m < len(methods):
		return methods[m], "", nil
	}
	return otherMethod, "", nil
}

func methodIndex(method []byte) int {
	for i, m := range methods {
		if string(method) == m {
			return i
		}
	}
	return len(methods)
}

func (r *Router) find(path []byte) (one *route, model []byte) {
	if one := r.literals[string(path)]; one != nil {
		return one, nil
	}
	for _, one := range r.patterns {
		if model, ok := one.match(path); ok {
			return one, model
		}
	}
	return nil, nil
}

// match reads the path once, and only as far as it matches.
func (r *route) match(path []byte) (model []byte, ok bool) {
	for i := range r.segments {
		if len(path) == 0 || path[0] != '/' {
			return nil, false
		}
		part := path[1:]
		if end := bytes.IndexByte(part, '/'); end >= 0 {
			part = part[:end]
		}
		path = path[1+len(part):]
		s := &r.segments[i]
		value, ok := s.match(part)
		if !ok {
			return nil, false
		}
		if s.name == modelName {
			model = value
		}
	}
	return model, len(path) == 0
}

func (s *segment) match(part []byte) (value []byte, ok bool) {
	if s.name == "" {
		return nil, string(part) == s.prefix
	}
	n := len(part) - len(s.prefix) - len(s.suffix)
	if n <= 0 || string(part[:len(s.prefix)]) != s.prefix || string(part[len(s.prefix)+n:]) != s.suffix {
		return nil, false
	}
	return part[len(s.prefix) : len(s.prefix)+n], true
}

// modelOf is the model's name as it stands in the path, cut off where it is
// too long, and none if it is no text: telemetry takes nothing else.
func modelOf(name []byte) []byte {
	if len(name) > maxModel {
		end := maxModel
		for end > 0 && !utf8.RuneStart(name[end]) {
			end--
		}
		name = name[:end]
	}
	for _, c := range name {
		if c < ' ' || c == 0x7f {
			return nil
		}
	}
	if !utf8.Valid(name) {
		return nil
	}
	return name
}
