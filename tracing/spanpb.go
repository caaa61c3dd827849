package tracing

import (
	"math"
	"strconv"
	"unicode/utf8"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
)

// Spans are written straight into a buffer in protobuf's wire format: building
// tracepb.Span objects first would cost twenty allocations each. These are the
// tags of opentelemetry/proto/trace/v1/trace.proto and common.proto, a field's
// number and its wire type, in one byte each.
const (
	tagSpans = 2<<3 | byte(protowire.BytesType) // of ScopeSpans

	tagTraceID    = 1<<3 | byte(protowire.BytesType) // of Span
	tagSpanID     = 2<<3 | byte(protowire.BytesType)
	tagTraceState = 3<<3 | byte(protowire.BytesType)
	tagParentID   = 4<<3 | byte(protowire.BytesType)
	tagName       = 5<<3 | byte(protowire.BytesType)
	tagKind       = 6<<3 | byte(protowire.VarintType)
	tagStart      = 7<<3 | byte(protowire.Fixed64Type)
	tagEnd        = 8<<3 | byte(protowire.Fixed64Type)
	tagAttributes = 9<<3 | byte(protowire.BytesType)
	tagStatus     = 15<<3 | byte(protowire.BytesType)
	fieldFlags    = 16 // two bytes

	tagStatusCode = 3<<3 | byte(protowire.VarintType) // of Status

	tagKey   = 1<<3 | byte(protowire.BytesType) // of KeyValue
	tagValue = 2<<3 | byte(protowire.BytesType)

	tagString = 1<<3 | byte(protowire.BytesType) // of AnyValue
	tagBool   = 2<<3 | byte(protowire.VarintType)
	tagInt    = 3<<3 | byte(protowire.VarintType)
	tagDouble = 4<<3 | byte(protowire.Fixed64Type)

	tagSize = 1
)

// Flags of a span: those of W3C, and whether its parent is in another process.
const (
	flagSampled     uint32 = 1
	flagsKnowRemote        = uint32(tracepb.SpanFlags_SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
	flagRemote             = uint32(tracepb.SpanFlags_SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
)

// maxValue bounds one text in bytes. A head may hold 64 KiB, a batch must stay
// well under the 4 MiB that most backends take.
const maxValue = 4096

// span is what all spans have; attributes and status follow it.
type span struct {
	trace      [16]byte
	id, parent [8]byte // a zero parent: none
	state      []byte  // tracestate, in ASCII
	flags      uint32
	kind       tracepb.Span_SpanKind
	name, rest string // the name is both, one after the other
	start, end int64  // ns since 1970
}

// openSpan begins a span in a ScopeSpans; closeMessage ends it.
func openSpan(b []byte, s *span) (_ []byte, at int) {
	b, at = openMessage(b, tagSpans)
	b = append(append(b, tagTraceID, byte(len(s.trace))), s.trace[:]...)
	b = append(append(b, tagSpanID, byte(len(s.id))), s.id[:]...)
	if len(s.state) > 0 {
		b = protowire.AppendBytes(append(b, tagTraceState), s.state)
	}
	if s.parent != [8]byte{} {
		b = append(append(b, tagParentID, byte(len(s.parent))), s.parent[:]...)
	}
	b = protowire.AppendTag(b, fieldFlags, protowire.Fixed32Type)
	b = protowire.AppendFixed32(b, s.flags)
	b = appendSize(append(b, tagName), textSize(s.name)+textSize(s.rest))
	b = appendText(appendText(b, s.name), s.rest)
	b = append(b, tagKind, byte(s.kind))
	b = protowire.AppendFixed64(append(b, tagStart), uint64(s.start))
	return protowire.AppendFixed64(append(b, tagEnd), uint64(s.end)), at
}

// openMessage begins a message whose length is not known yet, with room for
// one byte of length; at is where its content begins.
func openMessage(b []byte, tag byte) (_ []byte, at int) {
	b = append(b, tag, 0)
	return b, len(b)
}

// closeMessage writes the length of the message that was opened, moving its
// content if the length needs more room.
func closeMessage(b []byte, at int) []byte {
	size := len(b) - at
	if more := protowire.SizeVarint(uint64(size)) - 1; more > 0 {
		var room [10]byte
		b = append(b, room[:more]...)
		copy(b[at+more:], b[at:at+size])
	}
	protowire.AppendVarint(b[:at-1], uint64(size))
	return b
}

// appendError gives the open span the status Error. Without it the status is
// unset; a status OK is for people to give.
func appendError(b []byte) []byte {
	return append(b, tagStatus, 2, tagStatusCode, byte(tracepb.Status_STATUS_CODE_ERROR))
}

// appendString adds an attribute to the open span; an empty one is left out.
func appendString(b []byte, key, value string) []byte {
	if value == "" {
		return b
	}
	return appendStrings(b, key, value, "")
}

// appendStrings adds an attribute whose value is in two parts.
func appendStrings(b []byte, key, value, rest string) []byte {
	n := textSize(value) + textSize(rest)
	b = appendKey(b, key, tagSize+protowire.SizeBytes(n))
	b = appendSize(append(b, tagString), n)
	return appendText(appendText(b, value), rest)
}

// appendDigits adds a number as text, as error.type has it.
func appendDigits(b []byte, key string, n int) []byte {
	var buf [20]byte
	digits := strconv.AppendInt(buf[:0], int64(n), 10)
	b = appendKey(b, key, tagSize+protowire.SizeBytes(len(digits)))
	return protowire.AppendBytes(append(b, tagString), digits)
}

func appendInt(b []byte, key string, n int64) []byte {
	b = appendKey(b, key, tagSize+protowire.SizeVarint(uint64(n)))
	return protowire.AppendVarint(append(b, tagInt), uint64(n))
}

func appendDouble(b []byte, key string, x float64) []byte {
	b = appendKey(b, key, tagSize+protowire.SizeFixed64())
	return protowire.AppendFixed64(append(b, tagDouble), math.Float64bits(x))
}

func appendTrue(b []byte, key string) []byte {
	return append(appendKey(b, key, tagSize+1), tagBool, 1)
}

// appendKey begins an attribute: all of it but the content of its value, which
// has the given size.
func appendKey(b []byte, key string, size int) []byte {
	b = appendSize(append(b, tagAttributes), tagSize+protowire.SizeBytes(len(key))+tagSize+protowire.SizeBytes(size))
	b = append(appendSize(append(b, tagKey), len(key)), key...)
	return appendSize(append(b, tagValue), size)
}

// appendSize appends a length, which mostly fits one byte.
func appendSize(b []byte, n int) []byte {
	if n < 1<<7 {
		return append(b, byte(n))
	}
	return protowire.AppendVarint(b, uint64(n))
}

// appendText appends text that clients may have sent. One byte that is no
// UTF-8 would make a backend refuse the whole batch.
func appendText(b []byte, s string) []byte {
	s = s[:min(len(s), maxValue)]
	if utf8.ValidString(s) {
		return append(b, s...)
	}
	for _, c := range s {
		b = utf8.AppendRune(b, c)
	}
	return b
}

// textSize is the number of bytes that appendText appends.
func textSize(s string) (n int) {
	s = s[:min(len(s), maxValue)]
	if utf8.ValidString(s) {
		return len(s)
	}
	for _, c := range s {
		n += utf8.RuneLen(c)
	}
	return n
}
