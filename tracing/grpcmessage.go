package tracing

import (
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"weir/classifier"
)

// Message reads what a gRPC answer tells in its message: Triton's response
// parameters and TEI's metadata. method is the call's path; message is without
// the frame in front, and may be cut off at its end. Offer the first message
// of a call: what later ones tell of the same stages is not read again.
// Metadata of the call itself goes to [Ingest.Header] and [Ingest.Trailer].
func (in *Ingest) Message(o *classifier.Observation, method string, message []byte) {
	if in == nil {
		return
	}
	t := teller{in: in, o: o}
	for s := range t.before {
		_, t.before[s] = o.In(classifier.Stage(s))
	}
	switch {
	case method == "/inference.GRPCInferenceService/ModelInfer":
		t.tritonMessage(message)
	case method == "/inference.GRPCInferenceService/ModelStreamInfer":
		eachField(message, func(n protowire.Number, _ uint64, inner []byte) {
			if n == 2 { // ModelStreamInferResponse.infer_response
				t.tritonMessage(inner)
			}
		})
	case strings.HasPrefix(method, "/tei.v1."):
		eachField(message, func(n protowire.Number, _ uint64, inner []byte) {
			if n == 2 { // metadata, in the answers of Embed, Predict and Rerank
				eachField(inner, t.teiMetadata)
			}
		})
	}
}

// tritonMessage reads ModelInferResponse.parameters, a map of InferParameter
// (triton common, protobuf/grpc_service.proto).
func (t *teller) tritonMessage(message []byte) {
	eachField(message, func(n protowire.Number, _ uint64, entry []byte) {
		if n != 4 {
			return
		}
		var key, text []byte
		eachField(entry, func(n protowire.Number, _ uint64, inner []byte) {
			switch n {
			case 1:
				key = inner
			case 2:
				text = parameterText(inner)
			}
		})
		if string(key) == "server_timing" {
			t.timing(text)
			return
		}
		if len(text) > 0 {
			t.triton(key, text)
		}
	})
}

// parameterText is the parameter's number as JSON would have it, or its text.
func parameterText(b []byte) (text []byte) {
	eachField(b, func(n protowire.Number, v uint64, inner []byte) {
		switch n {
		case 2: // int64_param
			text = strconv.AppendInt(nil, int64(v), 10)
		case 3: // string_param
			text = inner
		case 4: // double_param
			text = strconv.AppendFloat(nil, math.Float64frombits(v), 'g', -1, 64)
		case 5: // uint64_param
			text = strconv.AppendUint(nil, v, 10)
		}
	})
	return text
}

// teiMetadata reads tei.v1.Metadata, in nanoseconds (TEI, proto/tei.proto).
func (t *teller) teiMetadata(n protowire.Number, v uint64, _ []byte) {
	text := strconv.AppendUint(nil, v, 10)
	switch n {
	case 3:
		t.total(text, time.Nanosecond)
	case 4:
		t.stage("tokenization_time_ns", classifier.StagePreprocess, text, time.Nanosecond)
	case 5:
		t.stage("queue_time_ns", classifier.StageQueue, text, time.Nanosecond)
	case 6:
		t.stage("inference_time_ns", classifier.StageForward, text, time.Nanosecond)
	}
}

// eachField calls take for each field that can be read: v is the value of a
// number, inner that of text, bytes and messages.
func eachField(b []byte, take func(n protowire.Number, v uint64, inner []byte)) {
	for len(b) > 0 {
		n, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			return
		}
		b = b[size:]
		var v uint64
		var inner []byte
		switch kind {
		case protowire.VarintType:
			v, size = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			v, size = protowire.ConsumeFixed64(b)
		case protowire.BytesType:
			inner, size = protowire.ConsumeBytes(b)
		default:
			size = protowire.ConsumeFieldValue(n, kind, b)
		}
		if size < 0 {
			return
		}
		b = b[size:]
		take(n, v, inner)
	}
}
