package proxy

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// isGRPC tells whether a request is a gRPC call. gRPC-Web and Connect are
// plain HTTP to a proxy: their status does not travel in trailers.
func isGRPC(r *http.Request) bool {
	if r.ProtoMajor != 2 || r.Method != http.MethodPost {
		return false
	}
	kind := r.Header.Get("Content-Type")
	rest, ok := strings.CutPrefix(kind, "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// grpcMethods are the calls that weir knows by name: the speech services and
// the health check. What is not listed here or in routes is one class, since
// clients can make up as many names as they like. A stream has more than one
// message one way or the other, however many are seen.
var grpcMethods = map[string]grpcMethod{}

type grpcMethod struct {
	class  string // "grpc /pkg.Service/Method"
	stream bool
}

func init() {
	const unary, stream = false, true
	for _, service := range []struct {
		name    string
		stream  bool
		methods []string
	}{
		{"nvidia.riva.asr.RivaSpeechRecognition", unary, []string{"Recognize", "GetRivaSpeechRecognitionConfig"}},
		{"nvidia.riva.asr.RivaSpeechRecognition", stream, []string{"StreamingRecognize"}},
		{"inference.GRPCInferenceService", unary, []string{"ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics",
			"ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"}},
		{"inference.GRPCInferenceService", stream, []string{"ModelStreamInfer"}},
		{"grpc.health.v1.Health", unary, []string{"Check", "List"}},
		{"grpc.health.v1.Health", stream, []string{"Watch"}},
		{"vosk.stt.v1.SttService", stream, []string{"StreamingRecognize"}},
		{"vosk.stt.v1.StatsService", unary, []string{"GetStats"}},
		{"paraformer.ASR", stream, []string{"Recognize"}},
	} {
		for _, m := range service.methods {
			path := "/" + service.name + "/" + m
			grpcMethods[path] = grpcMethod{"grpc " + path, service.stream}
		}
	}
}

// grpcOther is the class of the calls that are not known by name.
const grpcOther = "grpc " + otherMethod

// classOfGRPC names a call's class and route: a known method, or a template of
// routes that its path matches.
func classOfGRPC(router *Router, path string) (class, route, model string, stream bool) {
	_, template, m := router.Match([]byte(http.MethodPost), []byte(path))
	known, ok := grpcMethods[path]
	switch {
	case template != "":
		return "grpc " + template, template, string(m), known.stream
	case ok:
		return known.class, path, "", known.stream
	}
	return grpcOther, "", "", false
}

// parseGRPCTimeout reads grpc-timeout: at most 8 digits and a unit.
func parseGRPCTimeout(s string) (d time.Duration, ok bool) {
	if len(s) < 2 || len(s) > 9 {
		return 0, false
	}
	digits, unit := s[:len(s)-1], grpcUnits[s[len(s)-1]]
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || unit == 0 {
		return 0, false
	}
	const longest = 1<<63 - 1
	if n > uint64(longest/unit) {
		return longest, true // 99999999 hours are for ever
	}
	return time.Duration(n) * unit, true
}

var grpcUnits = map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}

// formatGRPCTimeout writes d in the smallest unit that 8 digits hold, rounded
// up: a call must not end before its time.
func formatGRPCTimeout(d time.Duration) string {
	for _, unit := range []byte("numSMH") {
		size := grpcUnits[unit]
		if n := int64((d + size - 1) / size); n < 1e8 && d < 1<<62 {
			return strconv.FormatInt(max(0, n), 10) + string(unit)
		}
	}
	return "99999999H"
}

// A grpcCode is a status of gRPC.
type grpcCode int

// The codes that weir itself gives or looks at.
const (
	grpcOK                grpcCode = 0
	grpcCanceled          grpcCode = 1
	grpcUnknown           grpcCode = 2
	grpcDeadlineExceeded  grpcCode = 4
	grpcPermissionDenied  grpcCode = 7
	grpcResourceExhausted grpcCode = 8
	grpcUnimplemented     grpcCode = 12
	grpcInternal          grpcCode = 13
	grpcUnavailable       grpcCode = 14
)

var grpcNames = [...]string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}

// String is the name that the specification gives the code; what is no code is
// UNKNOWN, as clients take it.
func (c grpcCode) String() string {
	if c < 0 || int(c) >= len(grpcNames) {
		return "UNKNOWN"
	}
	return grpcNames[c]
}

func parseGRPCStatus(s string) grpcCode {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n >= len(grpcNames) {
		return grpcUnknown
	}
	return grpcCode(n)
}

// codeOf is the status with which a call ends that weir refuses or gives up.
// A full queue is RESOURCE_EXHAUSTED, which clients do not send again by
// themselves: another try at once would only make the queue longer. What
// another instance, or this one a moment later, could do is UNAVAILABLE, which
// they do send again.
func codeOf(f fault) grpcCode {
	switch f.word {
	case "queue_full", "queue_timeout":
		return grpcResourceExhausted
	case deadlinePassed:
		return grpcDeadlineExceeded
	case "client_gone", "client_timeout":
		return grpcCanceled
	case "bad_request", "bad_response":
		return grpcInternal
	case "not_supported":
		return grpcUnimplemented
	}
	return grpcUnavailable
}

// codeOfReset is what clients make of the code of an RST_STREAM frame
// (doc/PROTOCOL-HTTP2.md of gRPC).
func codeOfReset(code uint32) grpcCode {
	const refused, cancel, calm, insecure = 0x7, 0x8, 0xb, 0xc
	switch code {
	case refused:
		return grpcUnavailable
	case cancel:
		return grpcCanceled
	case calm:
		return grpcResourceExhausted
	case insecure:
		return grpcPermissionDenied
	}
	return grpcInternal
}

// escapeGRPCMessage percent-encodes what grpc-message cannot hold.
func escapeGRPCMessage(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '%' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// A messageCount counts the length-prefixed messages of one direction of a
// call as their bytes go by.
type messageCount struct {
	n    int
	have int // bytes of the prefix so far
	left uint32
}

const messagePrefix = 5 // a flag, and the length in 4 bytes

func (m *messageCount) add(p []byte) {
	for len(p) > 0 {
		if m.have == messagePrefix {
			skip := min(uint64(m.left), uint64(len(p)))
			m.left -= uint32(skip)
			p = p[skip:]
			if m.left == 0 {
				m.have = 0
			}
			continue
		}
		if m.have > 0 {
			m.left = m.left<<8 | uint32(p[0])
		} else {
			m.left = 0
		}
		p = p[1:]
		if m.have++; m.have == messagePrefix {
			m.n++
			if m.left == 0 {
				m.have = 0
			}
		}
	}
}
