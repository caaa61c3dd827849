package tracing

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	"weir/classifier"
)

const traceparentLen = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

// ReadTraceparent takes the caller's trace context (W3C Trace Context) into o:
// TraceID, ParentID, Sampled as the caller decided, and TraceState. If
// traceparent is invalid it changes nothing and returns false: the trace
// begins here, and tracestate, which may then not be passed on, is ignored.
// Several tracestate fields are to be joined by commas first.
func ReadTraceparent(o *classifier.Observation, traceparent, tracestate []byte) (ok bool) {
	b := trimSpace(traceparent)
	if len(b) < traceparentLen || b[2] != '-' || b[35] != '-' || b[52] != '-' {
		return false
	}
	var version, flags [1]byte
	var trace [16]byte
	var parent [8]byte
	if !unhex(version[:], b[:2]) || !unhex(trace[:], b[3:35]) || !unhex(parent[:], b[36:52]) || !unhex(flags[:], b[53:55]) {
		return false
	}
	switch {
	case version[0] == 0xff, trace == [16]byte{}, parent == [8]byte{}:
		return false
	case len(b) > traceparentLen && (version[0] == 0 || b[traceparentLen] != '-'):
		return false // later versions may be longer
	}
	o.TraceID, o.ParentID, o.Sampled = trace, parent, flags[0]&1 != 0
	o.TraceState = readTraceState(tracestate)
	return true
}

// unhex decodes lower-case hexadecimal; upper case is invalid here.
func unhex(dst, src []byte) bool {
	for _, c := range src {
		if 'A' <= c && c <= 'F' {
			return false
		}
	}
	_, err := hex.Decode(dst, src)
	return err == nil
}

// What of tracestate is passed on.
const (
	maxMembers    = 32
	maxTraceState = 512
	largeMember   = 128
)

// readTraceState copies a tracestate that is valid; one that is not is
// dropped whole, as the standard asks. A list past 512 bytes loses its members
// of more than 128 bytes first, then those at the right, the oldest.
func readTraceState(b []byte) string {
	b = trimSpace(b)
	if len(b) == 0 {
		return ""
	}
	var buf [maxMembers]string
	members := buf[:0]
	size := -1
	for m := range strings.SplitSeq(string(b), ",") {
		if m = strings.Trim(m, " \t"); m == "" {
			continue // empty members are legal
		}
		if len(members) == maxMembers || !validMember(m) || repeated(members, m) {
			return ""
		}
		members, size = append(members, m), size+1+len(m)
	}
	if size > maxTraceState {
		members = shorten(members, size)
	}
	return strings.Join(members, ",")
}

func shorten(members []string, size int) []string {
	for i := len(members) - 1; i >= 0 && size > maxTraceState; i-- {
		if n := len(members[i]); n > largeMember {
			members, size = append(members[:i], members[i+1:]...), size-n-1
		}
	}
	for size > maxTraceState {
		last := len(members) - 1
		members, size = members[:last], size-len(members[last])-1
	}
	return members
}

func repeated(members []string, m string) bool {
	key, _, _ := strings.Cut(m, "=")
	for _, other := range members {
		if k, _, _ := strings.Cut(other, "="); k == key {
			return true
		}
	}
	return false
}

// validMember checks key=value by the standard's characters and lengths.
func validMember(m string) bool {
	key, value, ok := strings.Cut(m, "=")
	if !ok || key == "" || len(key) > 256 || value == "" || len(value) > 256 {
		return false
	}
	if c := key[0]; !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9') {
		return false
	}
	for i := range len(key) {
		c := key[i]
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || strings.IndexByte("_-*/@", c) >= 0) {
			return false
		}
	}
	for i := range len(value) {
		if c := value[i]; c < ' ' || c > '~' || c == '=' {
			return false
		}
	}
	return true
}

// AppendTraceparent appends the context that weir passes on: o's trace, weir's
// own span and weir's own decision.
func AppendTraceparent(dst []byte, o *classifier.Observation) []byte {
	dst = append(dst, "00-"...)
	dst = hex.AppendEncode(dst, o.TraceID[:])
	dst = append(dst, '-')
	dst = hex.AppendEncode(dst, o.SpanID[:])
	if o.Sampled {
		return append(dst, "-01"...)
	}
	return append(dst, "-00"...)
}

// Sampler decides at a request's start whether its spans are kept. A nil
// Sampler makes no spans: it passes the caller's context on as it came.
type Sampler struct {
	root        uint64 // a trace of its own is kept if its number is below; numbers have 63 bits
	parentBased bool
	trustParent bool
}

const keepAll = 1 << 63

// NewSampler returns the sampler that OTEL_TRACES_SAMPLER and
// OTEL_TRACES_SAMPLER_ARG name; empty is parentbased_always_on. With
// trustParent false the caller's context is no parent: the trace begins anew.
func NewSampler(name, arg string, trustParent bool) (*Sampler, error) {
	kind, parentBased := strings.CutPrefix(strings.ToLower(strings.TrimSpace(name)), "parentbased_")
	s := &Sampler{parentBased: parentBased, trustParent: trustParent}
	switch kind {
	case "":
		if parentBased {
			return nil, unknownSampler(name)
		}
		s.root, s.parentBased = keepAll, true
	case "always_on":
		s.root = keepAll
	case "always_off":
	case "traceidratio":
		ratio, err := parseRatio(arg)
		if err != nil {
			return nil, err
		}
		s.root = uint64(ratio * keepAll)
	default:
		return nil, unknownSampler(name)
	}
	return s, nil
}

func unknownSampler(name string) error {
	return fmt.Errorf("OTEL_TRACES_SAMPLER=%q is not supported; use always_on, always_off, traceidratio, or one of them with parentbased_ before it", name)
}

func parseRatio(arg string) (float64, error) {
	arg = strings.TrimSpace(arg)
	if arg == "" {
		return 1, nil // the specification's default
	}
	ratio, err := strconv.ParseFloat(arg, 64)
	if err != nil || !(ratio >= 0 && ratio <= 1) {
		return 0, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%q is no ratio; use a number from 0 to 1", arg)
	}
	return ratio, nil
}

// Start gives o its span, a trace where the caller brought none, and the
// decision. With propagate false nothing is to be injected: without a caller's
// context, "not sampled" would keep the server from tracing on its own.
func (s *Sampler) Start(o *classifier.Observation, hasParent bool) (propagate bool) {
	if s == nil {
		if hasParent {
			o.SpanID = o.ParentID
		}
		return hasParent
	}
	if !hasParent || !s.trustParent {
		hasParent = false
		o.ParentID, o.TraceState = [8]byte{}, ""
		o.TraceID = newTraceID()
	}
	o.SpanID = newSpanID()
	if !hasParent || !s.parentBased {
		o.Sampled = s.keeps(o.TraceID)
	}
	return hasParent || o.Sampled
}

// keeps decides by the low half of the trace's id, as OpenTelemetry's Go and
// Java samplers do, so that all of them agree on one trace.
func (s *Sampler) keeps(trace [16]byte) bool {
	return binary.BigEndian.Uint64(trace[8:])>>1 < s.root
}

func newTraceID() (id [16]byte) {
	binary.BigEndian.PutUint64(id[:8], rand.Uint64())
	half := newSpanID()
	copy(id[8:], half[:])
	return id
}

func newSpanID() (id [8]byte) {
	binary.BigEndian.PutUint64(id[:], max(1, rand.Uint64())) // 0 is no id
	return id
}
