package tracing

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// fromOTLPJSON reads OTLP's JSON, which differs from that of protobuf in its
// ids: they are hexadecimal (OTLP, "JSON Protobuf Encoding").
func fromOTLPJSON(text []byte, m proto.Message) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber() // 64 bits do not fit into a float
	var v any
	if err := d.Decode(&v); err != nil {
		return fmt.Errorf("the body is no JSON: %w", err)
	}
	if err := mendIDs(v, 0); err != nil {
		return err
	}
	fixed, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(fixed, m); err != nil {
		return fmt.Errorf("the body is no OTLP: %w", err)
	}
	return nil
}

// maxNesting is deeper than any telemetry.
const maxNesting = 64

func mendIDs(v any, depth int) error {
	if depth > maxNesting {
		return fmt.Errorf("the body is nested deeper than %d", maxNesting)
	}
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			if err := mendIDs(one, depth+1); err != nil {
				return err
			}
		}
	case map[string]any:
		for key, one := range v {
			text, isText := one.(string)
			if isText && (key == "traceId" || key == "spanId" || key == "parentSpanId" || key == "trace_id" || key == "span_id" || key == "parent_span_id") {
				id, err := hex.DecodeString(text)
				if err != nil {
					return fmt.Errorf("%s %.80q is not hexadecimal", key, text)
				}
				v[key] = base64.StdEncoding.EncodeToString(id)
				continue
			}
			if err := mendIDs(one, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}
