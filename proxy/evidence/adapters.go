package evidence

import (
	"math"
	"strings"
)

// An adapter says how one kind of server tells its numbers. A server is known
// by its markers: the first adapter of which a family is on the page is meant.
type adapter struct {
	server  string // as users call it
	markers []string
	rules   []rule
}

// A rule maps one family to a field. What several rules tell of one field adds
// up.
type rule struct {
	family  string
	what    field
	form    form
	unit    float64 // what 1 is in seconds, or in plain numbers; 0: 1
	only    string  // "label=a|b": only series whose label has one of these values; "label!=a|b": none of them
	part    bool    // its count is left out: another rule counts the same requests
	instead bool    // it takes the place of what rules before it told
	orElse  bool    // only where no rule before it told the field
	less    bool    // its sum is taken off the field: for times that contain another
}

// form is how a family tells a number.
type form uint8

const (
	histogram form = iota // family_sum and family_count; summaries look alike
	counter               // family, or family_total
	gauge                 // of several series the largest: one full device is not hidden by an idle one
	gaugeSum              // a gauge whose series add up
)

// Units, in seconds.
const (
	s  = 1.0
	ms = 1e-3
	us = 1e-6
	ns = 1e-9
)

const mebi = 1 << 20

// adapters in the order in which they are tried. Where a family tells
// something else than its name says, a comment says so; the sources are named
// in testdata/README.md.
var adapters = []adapter{
	{"vLLM", []string{"vllm:num_requests_running", "vllm:e2e_request_latency_seconds"}, []rule{
		// The clock starts behind audio decoding: what is missing in the total is the front end.
		{family: "vllm:e2e_request_latency_seconds", what: fTotal, unit: s},
		{family: "vllm:request_queue_time_seconds", what: fQueue, unit: s},
		{family: "vllm:request_prefill_time_seconds", what: fForward, unit: s},
		{family: "vllm:request_decode_time_seconds", what: fForward, unit: s, part: true},
		{family: "vllm:request_inference_time_seconds", what: fForward, unit: s, instead: true},
		{family: "vllm:num_requests_waiting", what: fWaiting, form: gaugeSum},
		{family: "vllm:num_requests_running", what: fRunning, form: gaugeSum},
	}},
	{"Triton", []string{"nv_inference_request_success", "nv_inference_count"}, []rule{
		{family: "nv_inference_request_success", what: fCompleted, form: counter},
		{family: "nv_inference_request_duration_us", what: fTotal, form: counter, unit: us},
		{family: "nv_inference_queue_duration_us", what: fQueue, form: counter, unit: us},
		{family: "nv_inference_compute_input_duration_us", what: fInput, form: counter, unit: us},
		{family: "nv_inference_compute_infer_duration_us", what: fForward, form: counter, unit: us},
		{family: "nv_inference_compute_output_duration_us", what: fOutput, form: counter, unit: us},
		// The same sums once more: each request carries its whole batch's time.
		{family: "nv_inference_compute_input_duration_us", what: fDevice, form: counter, unit: us},
		{family: "nv_inference_compute_infer_duration_us", what: fDevice, form: counter, unit: us},
		{family: "nv_inference_compute_output_duration_us", what: fDevice, form: counter, unit: us},
		{family: "nv_inference_count", what: fMembers, form: counter},
		{family: "nv_inference_exec_count", what: fBatches, form: counter},
		{family: "nv_inference_pending_request_count", what: fWaiting, form: gaugeSum},
		{family: "nv_inference_request_failure", what: fRejected, form: counter, only: "reason=REJECTED"},
	}},
	{"TGI", []string{"tgi_request_count", "tgi_request_duration", "tgi_queue_size"}, []rule{
		{family: "tgi_request_duration", what: fTotal, unit: s},
		{family: "tgi_request_queue_duration", what: fQueue, unit: s},
		{family: "tgi_request_validation_duration", what: fPreprocess, unit: s},
		{family: "tgi_request_inference_duration", what: fForward, unit: s},
		{family: "tgi_batch_next_size", what: fBatch, unit: 1},
		{family: "tgi_queue_size", what: fWaiting, form: gaugeSum},
		{family: "tgi_batch_current_size", what: fRunning, form: gaugeSum},
		{family: "tgi_request_failure", what: fRejected, form: counter, only: "err=overloaded"},
	}},
	{"TEI", []string{"te_request_count", "te_request_duration", "te_queue_size"}, []rule{
		{family: "te_request_duration", what: fTotal, unit: s},
		{family: "te_request_queue_duration", what: fQueue, unit: s},
		{family: "te_request_tokenization_duration", what: fPreprocess, unit: s},
		{family: "te_request_inference_duration", what: fForward, unit: s},
		{family: "te_batch_next_size", what: fBatch, unit: 1},
		{family: "te_queue_size", what: fWaiting, form: gaugeSum},
		{family: "te_request_failure", what: fRejected, form: counter, only: "err=overloaded"},
	}},
	{"SGLang", []string{"sglang:num_running_reqs", "sglang:e2e_request_latency_seconds"}, []rule{
		{family: "sglang:e2e_request_latency_seconds", what: fTotal, unit: s},
		{family: "sglang:queue_time_seconds", what: fQueue, unit: s},
		{family: "sglang:per_stage_req_latency_seconds", what: fForward, unit: s, part: true, only: "stage=prefill_forward|decode_forward"},
		{family: "sglang:num_queue_reqs", what: fWaiting, form: gaugeSum},
		{family: "sglang:num_running_reqs", what: fRunning, form: gaugeSum},
	}},
	{"TorchServe", []string{"ts_inference_requests_total", "ts_inference_latency_microseconds"}, []rule{
		{family: "ts_inference_requests_total", what: fCompleted, form: counter},
		{family: "ts_inference_latency_microseconds", what: fTotal, form: counter, unit: us},
		{family: "ts_queue_latency_microseconds", what: fQueue, form: counter, unit: us},
		// The latency counts from the request's arrival, so the queue is in it.
		{family: "ts_inference_latency_microseconds", what: fForward, form: counter, unit: us},
		{family: "ts_queue_latency_microseconds", what: fForward, form: counter, unit: us, less: true},
	}},
	{"KServe", []string{"request_predict_seconds"}, []rule{
		{family: "request_preprocess_seconds", what: fPreprocess, unit: s},
		{family: "request_predict_seconds", what: fForward, unit: s},
		{family: "request_postprocess_seconds", what: fPostprocess, unit: s},
	}},
	{"OpenVINO Model Server", []string{"ovms_requests_success", "ovms_inference_time_us"}, []rule{
		// Buckets and sums are in microseconds.
		{family: "ovms_request_time_us", what: fTotal, unit: us},
		{family: "ovms_inference_time_us", what: fForward, unit: us},
		{family: "ovms_wait_for_infer_req_time_us", what: fQueue, unit: us},
		{family: "ovms_current_requests", what: fRunning, form: gaugeSum},
		{family: "ovms_infer_req_queue_size", what: fLimit, form: gaugeSum},
		{family: "ovms_requests_rejected", what: fRejected, form: counter},
	}},
	{"BentoML", []string{"bentoml_service_request_in_progress", "bentoml_service_request_duration_seconds"}, []rule{
		{family: "bentoml_service_request_duration_seconds", what: fTotal, unit: s, only: "endpoint!=/healthz|/readyz|/livez|/metrics"},
		{family: "bentoml_service_adaptive_batch_size", what: fBatch, unit: 1},
		{family: "bentoml_service_request_in_progress", what: fRunning, form: gaugeSum},
		{family: "bentoml_service_request", what: fRejected, form: counter, only: "http_response_code=429|503"},
	}},
	{"Ray Serve", []string{"ray_serve_deployment_processing_latency_ms", "ray_serve_num_http_requests"}, []rule{
		{family: "ray_serve_deployment_processing_latency_ms", what: fTotal, unit: ms},
		{family: "ray_serve_deployment_queued_queries", what: fWaiting, form: gaugeSum},
		{family: "ray_serve_replica_processing_queries", what: fRunning, form: gaugeSum},
	}},
	{"WhisperLive", []string{"whisperlive_connections_active", "whisperlive_transcription_latency_seconds"}, []rule{
		// The wait for the model's lock is in it.
		{family: "whisperlive_transcription_latency_seconds", what: fTotal, unit: s},
		{family: "whisperlive_connections_active", what: fRunning, form: gaugeSum},
		{family: "whisperlive_connections_rejected", what: fRejected, form: counter},
	}},
	{"Deepgram", []string{"engine_active_requests"}, []rule{
		{family: "engine_batch_response_time_seconds", what: fTotal, unit: s},
		{family: "engine_active_requests", what: fRunning, form: gaugeSum},
		{family: "engine_max_active_requests", what: fLimit, form: gaugeSum},
	}},
	{"mosec", []string{"mosec_service_remaining_task", "mosec_service_process_duration_second"}, []rule{
		{family: "mosec_service_process_duration_second", what: fTotal, unit: s, only: "stage=total"},
		{family: "mosec_service_process_duration_second", what: fForward, unit: s, part: true, only: "stage!=total"},
		// From the first member's coming until the batch is full or its time is over.
		{family: "mosec_service_batch_duration_second", what: fQueue, unit: s, part: true},
		{family: "mosec_service_batch_size", what: fBatch, unit: 1},
		{family: "mosec_service_remaining_task", what: fRunning, form: gaugeSum},
		{family: "mosec_service_throughput", what: fRejected, form: counter, only: "code=429|503"},
	}},
	{"Xinference", []string{"xinference:model_request_duration_seconds", "xinference:model_serve_count"}, []rule{
		{family: "xinference:model_request_duration_seconds", what: fTotal, unit: s},
		{family: "xinference:model_serve_count", what: fRunning, form: gaugeSum},
		{family: "xinference:model_request_limit", what: fLimit, form: gaugeSum},
	}},
}

// devices tell of the device alone; their numbers stand beside a server's on
// one page, too.
var devices = []adapter{
	{"DCGM exporter", []string{"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"}, []rule{
		{family: "DCGM_FI_DEV_GPU_UTIL", what: fBusy, form: gauge, unit: 0.01},
		{family: "DCGM_FI_PROF_GR_ENGINE_ACTIVE", what: fBusy, form: gauge, unit: 1, orElse: true},
		{family: "DCGM_FI_DEV_FB_USED", what: fMemory, form: gaugeSum, unit: mebi},
		{family: "DCGM_FI_DEV_FB_USED", what: fMemoryTotal, form: gaugeSum, unit: mebi},
		{family: "DCGM_FI_DEV_FB_FREE", what: fMemoryTotal, form: gaugeSum, unit: mebi},
		// Bytes per second, as DCGM gives them, although the exporter's default list says "counter".
		{family: "DCGM_FI_PROF_PCIE_RX_BYTES", what: fPCIe, form: gaugeSum},
		{family: "DCGM_FI_PROF_PCIE_TX_BYTES", what: fPCIe, form: gaugeSum},
	}},
	{"Triton", []string{"nv_gpu_utilization"}, []rule{
		{family: "nv_gpu_utilization", what: fBusy, form: gauge, unit: 1},
		{family: "nv_gpu_memory_used_bytes", what: fMemory, form: gaugeSum},
		{family: "nv_gpu_memory_total_bytes", what: fMemoryTotal, form: gaugeSum},
	}},
	{"TorchServe", []string{"GPUUtilization"}, []rule{
		{family: "GPUUtilization", what: fBusy, form: gauge, unit: 0.01},
		{family: "GPUMemoryUsed", what: fMemory, form: gaugeSum, unit: mebi},
	}},
}

// wanted are the names of all samples that any rule reads.
var wanted = func() map[string]bool {
	m := make(map[string]bool)
	for _, list := range [][]adapter{adapters, devices} {
		for _, a := range list {
			for _, r := range a.rules {
				for _, suffix := range []string{"", "_sum", "_count", "_total"} {
					m[r.family+suffix] = true
				}
			}
			for _, f := range a.markers {
				m[f], m[f+"_count"], m[f+"_total"] = true, true, true
			}
		}
	}
	return m
}()

// known finds the adapter whose server made the page; nil if none did.
func known(list []adapter, p page) *adapter {
	for i := range list {
		for _, f := range list[i].markers {
			if len(p[f])+len(p[f+"_count"])+len(p[f+"_total"]) > 0 {
				return &list[i]
			}
		}
	}
	return nil
}

// read applies the adapter's rules to a page.
func (a *adapter) read(p page, to *reading) {
	for i := range a.rules {
		r := &a.rules[i]
		n := &to.numbers[r.what]
		if r.orElse && n.told {
			continue
		}
		sum, count, ok := r.read(p)
		if !ok {
			continue
		}
		if r.instead {
			*n = number{}
		}
		if r.less {
			sum, count = -min(sum, n.sum), 0
		}
		if r.part {
			count = 0
		}
		to.add(r.what, sum, count)
	}
}

// read sums the family's series. ok is false if there are none.
func (r *rule) read(p page) (sum, count float64, ok bool) {
	unit := r.unit
	if unit == 0 {
		unit = 1
	}
	switch r.form {
	case histogram:
		sum, ok = r.sum(p[r.family+"_sum"])
		count, _ = r.sum(p[r.family+"_count"])
		return sum * unit, count, ok
	case gauge:
		sum, ok = r.most(p[r.family])
	case gaugeSum:
		sum, ok = r.sum(p[r.family])
	default:
		if sum, ok = r.sum(p[r.family]); !ok {
			sum, ok = r.sum(p[r.family+"_total"])
		}
	}
	return sum * unit, 0, ok
}

func (r *rule) sum(list []sample) (sum float64, ok bool) {
	for i := range list {
		if r.takes(&list[i]) {
			sum, ok = sum+list[i].value, true
		}
	}
	return sum, ok
}

func (r *rule) most(list []sample) (most float64, ok bool) {
	for i := range list {
		if r.takes(&list[i]) {
			most, ok = max(most, list[i].value), true
		}
	}
	return most, ok
}

// takes tells whether the series counts. NaN and the like stand for "nothing
// yet" in some servers.
func (r *rule) takes(s *sample) bool {
	if !(s.value >= 0 && s.value <= math.MaxFloat64) {
		return false
	}
	if r.only == "" {
		return true
	}
	name, values, _ := strings.Cut(r.only, "=")
	name, not := strings.CutSuffix(name, "!")
	for v := range strings.SplitSeq(values, "|") {
		if s.label(name) == v {
			return !not
		}
	}
	return not
}
