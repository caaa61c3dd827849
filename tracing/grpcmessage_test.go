package tracing

import (
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"weir/classifier"
)

func varint(b []byte, n protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
}

func bytesField(b []byte, n protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), v)
}

// parameter is an entry of ModelInferResponse.parameters.
func parameter(key string, value []byte) []byte {
	return bytesField(bytesField(nil, 1, []byte(key)), 2, value)
}

func double(f float64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(nil, 4, protowire.Fixed64Type), math.Float64bits(f))
}

func inferResponse() []byte {
	b := bytesField(nil, 1, []byte("conformer"))
	b = bytesField(b, 4, parameter("queue_us", varint(nil, 2, 1500)))
	b = bytesField(b, 4, parameter("forward_ms", double(40.5)))
	b = bytesField(b, 4, parameter("h2d_ns", varint(nil, 5, 2_500_000)))
	b = bytesField(b, 4, parameter("batch", varint(nil, 2, 4)))
	b = bytesField(b, 4, parameter("triton_final_response", varint(nil, 1, 1)))
	return bytesField(b, 6, make([]byte, 3000))
}

func TestTritonsParametersOverGRPC(t *testing.T) {
	for method, message := range map[string][]byte{
		"/inference.GRPCInferenceService/ModelInfer":       inferResponse(),
		"/inference.GRPCInferenceService/ModelStreamInfer": bytesField(nil, 2, inferResponse()),
	} {
		var o classifier.Observation
		mustIngest(t).Message(&o, method, message)
		for stage, want := range map[classifier.Stage]time.Duration{classifier.StageQueue: 1500 * time.Microsecond, classifier.StageForward: 40500 * time.Microsecond, classifier.StageTransfer: 2500 * time.Microsecond} {
			if d, ok := o.In(stage); !ok || d != want {
				t.Errorf("%s, %s: %v, want %v", method, stage, d, want)
			}
		}
		if o.BatchSize != 4 || o.Source != "body" {
			t.Errorf("%s: batch %d, source %q", method, o.BatchSize, o.Source)
		}
	}
	var o classifier.Observation
	text := bytesField(nil, 4, parameter("server_timing", bytesField(nil, 3, []byte("forward;dur=7;batch=2"))))
	mustIngest(t).Message(&o, "/inference.GRPCInferenceService/ModelInfer", text)
	if f, _ := o.In(classifier.StageForward); f != 7*time.Millisecond || o.BatchSize != 2 {
		t.Errorf("%+v", o)
	}
}

func TestTEIsMetadataOverGRPC(t *testing.T) {
	metadata := varint(varint(varint(varint(varint(nil, 1, 99), 3, 20_000_000), 4, 1_000_000), 5, 5_000_000), 6, 13_000_000)
	message := bytesField(bytesField(nil, 1, make([]byte, 3072)), 2, metadata)
	var o classifier.Observation
	mustIngest(t).Message(&o, "/tei.v1.Embed/Embed", message)
	pre, _ := o.In(classifier.StagePreprocess)
	queue, _ := o.In(classifier.StageQueue)
	forward, _ := o.In(classifier.StageForward)
	if pre != time.Millisecond || queue != 5*time.Millisecond || forward != 13*time.Millisecond || o.ServerTotal != 20*time.Millisecond {
		t.Errorf("%v %v %v of %v", pre, queue, forward, o.ServerTotal)
	}
	o = classifier.Observation{}
	mustIngest(t).Message(&o, "/some.Other/Method", message)
	if len(o.Timings) > 0 {
		t.Errorf("another service's message is read: %+v", o.Timings)
	}
}

func FuzzMessage(f *testing.F) {
	f.Add(inferResponse(), uint8(0))
	f.Add(bytesField(nil, 2, varint(nil, 3, math.MaxUint64)), uint8(2))
	f.Fuzz(func(t *testing.T, message []byte, which uint8) {
		methods := []string{"/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer", "/tei.v1.Embed/Embed"}
		var o classifier.Observation
		in, _ := NewIngest(nil)
		in.Message(&o, methods[int(which)%len(methods)], message)
		for _, one := range o.Timings {
			if one.Dur < 0 || one.Dur > maxDuration {
				t.Errorf("%+v", one)
			}
		}
	})
}
