package envoy

import (
	"fmt"
	"strconv"
	"time"

	orca "github.com/cncf/xds/go/xds/data/orca/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"weir/proxy"
	"weir/tracing"
)

// admitted lets the request go on, with weir's span as its parent.
func (x *exchange) admitted(req *procv3.ProcessingRequest, propagate bool) *procv3.ProcessingResponse {
	var set []*corev3.HeaderValueOption
	if propagate {
		set = append(set, header("traceparent", tracing.AppendTraceparent(nil, &x.pass.Observation)))
	}
	if x.rules.RequestStart && !x.stamped {
		ms := x.pass.Enqueued.UnixMilli()
		set = append(set, header("x-request-start", fmt.Appendf(nil, "t=%d.%03d", ms/1000, ms%1000)))
	}
	return &procv3.ProcessingResponse{
		Response:     &procv3.ProcessingResponse_RequestHeaders{RequestHeaders: headersResponse(set)},
		ModeOverride: noBodies(req.GetProtocolConfig()),
	}
}

// responded lets the answer go on, with what clients and balancers are told.
func (x *exchange) responded() *procv3.ProcessingResponse {
	var set []*corev3.HeaderValueOption
	if x.rules.ServerTiming {
		one := header("server-timing", tracing.AppendServerTiming(nil, &x.pass.Observation))
		one.AppendAction = corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
		set = append(set, one)
	}
	if r := x.report(); r != nil && !x.grpc {
		set = append(set, header(loadHeader, loadText(r)))
	}
	return &procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: headersResponse(set)}}
}

// trailed lets the trailers go on; gRPC's balancers read load reports there.
func (x *exchange) trailed() *procv3.ProcessingResponse {
	t := &procv3.TrailersResponse{}
	if r := x.report(); r != nil && x.grpc {
		t.HeaderMutation = &procv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{header(loadHeaderBin, loadBin(r))}}
	}
	return &procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: t}}
}

// report is weir's load report, where one is asked for and the server sends none.
func (x *exchange) report() *orca.OrcaLoadReport {
	if !x.orca || x.loads.reporting() {
		return nil
	}
	return ownLoad(x.gate.State(), x.pass.QueueWait())
}

// refusal is weir's own answer.
func (x *exchange) refusal(r proxy.Refusal) *procv3.ProcessingResponse {
	set := []*corev3.HeaderValueOption{header("content-type", []byte("application/json"))}
	if r.Status == 503 {
		set = append(set, header("retry-after", []byte("1")))
	}
	if own := x.report(); own != nil {
		set = append(set, header(loadHeader, loadText(own)))
	}
	m := &procv3.ImmediateResponse{
		Status:  &typev3.HttpStatus{Code: typev3.StatusCode(r.Status)},
		Headers: &procv3.HeaderMutation{SetHeaders: set},
		Body:    r.Body,
		Details: "weir_" + r.Word,
	}
	if x.grpc {
		m.Headers.SetHeaders = set[2:] // Envoy makes a gRPC answer of it, and sets the type itself
		m.GrpcStatus = &procv3.GrpcStatus{Status: uint32(codes.Unavailable)}
	}
	return &procv3.ProcessingResponse{Response: &procv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: m}}
}

// morePatience asks Envoy to wait that long for the reply.
func morePatience(d time.Duration) *procv3.ProcessingResponse {
	return &procv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d)}
}

func headersResponse(set []*corev3.HeaderValueOption) *procv3.HeadersResponse {
	if len(set) == 0 {
		return &procv3.HeadersResponse{}
	}
	return &procv3.HeadersResponse{Response: &procv3.CommonResponse{HeaderMutation: &procv3.HeaderMutation{SetHeaders: set}}}
}

func header(name string, value []byte) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, RawValue: value},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// size reads a decimal number; 0 if it is none.
func size(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}
