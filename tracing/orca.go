package tracing

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"

	"weir/classifier"
)

// ORCA's names (cncf/xds, xds.data.orca.v3; gRPC proposal A51), in lower case.
const (
	orcaHeader = "endpoint-load-metrics"
	orcaFormat = "endpoint-load-metrics-format" // of requests; without it servers tell nothing
)

// maxLoad bounds the load metrics that are kept of one answer.
const maxLoad = 16

// OrcaRequest is the request header that asks for load metrics, as a line.
const OrcaRequest = orcaFormat + ": text\r\n"

// IsOrca tells whether an answer's field carries load metrics; IsOrcaFormat
// whether a request's field asks for them.
func IsOrca(name []byte) bool       { return isName(name, orcaHeader) || isName(name, orcaHeader+"-bin") }
func IsOrcaFormat(name []byte) bool { return isName(name, orcaFormat) }

// orca reads the header endpoint-load-metrics in its text and JSON forms: how
// loaded the server was, not how long it took. The binary form is passed over.
func (in *Ingest) orca(o *classifier.Observation, value []byte) {
	form, rest, _ := bytes.Cut(trimSpace(value), []byte(" "))
	switch strings.ToUpper(string(form)) {
	case "TEXT":
		orcaText(o, rest)
	case "JSON":
		orcaJSON(o, rest)
	}
}

// orcaText reads name=value pairs; older emitters wrote a colon.
func orcaText(o *classifier.Observation, list []byte) {
	for pair := range bytes.SplitSeq(list, []byte(",")) {
		i := bytes.IndexAny(pair, "=:")
		if i < 0 {
			continue
		}
		if f, ok := number(trimSpace(pair[i+1:])); ok {
			addLoad(o, string(trimSpace(pair[:i])), f)
		}
	}
}

// orcaJSON reads numbers, and maps of numbers as named_metrics is one.
func orcaJSON(o *classifier.Observation, text []byte) {
	var v map[string]any
	if len(text) > maxServerTiming || json.Unmarshal(text, &v) != nil {
		return
	}
	for name, one := range v {
		switch one := one.(type) {
		case float64:
			addLoad(o, name, one)
		case map[string]any:
			for inner, n := range one {
				if f, ok := n.(float64); ok {
					addLoad(o, name+"."+inner, f)
				}
			}
		}
	}
	slices.SortFunc(o.Load, func(a, b classifier.LoadMetric) int { return strings.Compare(a.Name, b.Name) })
}

// addLoad keeps the first of a name: a second is an error of the server.
func addLoad(o *classifier.Observation, name string, f float64) {
	if t, rest := token([]byte(name)); len(t) == 0 || len(rest) > 0 || len(name) > maxName || len(o.Load) == maxLoad || f < 0 || f > maxCount {
		return
	}
	if slices.ContainsFunc(o.Load, func(l classifier.LoadMetric) bool { return l.Name == name }) {
		return
	}
	o.Load = append(o.Load, classifier.LoadMetric{Name: name, Value: f})
}
