package classifier

import (
	"slices"
	"strings"
)

// knobs are the settings of one kind of server, in its own words; "" where it
// has none.
type knobs struct {
	limit string // requests that it works on at once
	batch string // requests that share an execution
	delay string // wait for a batch to fill
	host  string // workers for audio and text
	more  string // executions at once on the device
}

var knobsOf = map[string]knobs{
	"triton": {
		limit: "instance_group[].count", batch: "max_batch_size", delay: "dynamic_batching.max_queue_delay_microseconds",
		host: "instance_group[].count of the pre- and postprocessing models", more: "instance_group[].count",
	},
	"vllm":       {limit: "--max-num-seqs", batch: "--max-num-seqs, --max-num-batched-tokens", host: "VLLM_MAX_AUDIO_PREPROCESS_WORKERS"},
	"sglang":     {limit: "--max-running-requests", batch: "--max-running-requests", host: "request_build_max_workers (sglang-omni)"},
	"tgi":        {limit: "--max-concurrent-requests", batch: "--max-batch-size", delay: "--max-waiting-tokens"},
	"tei":        {limit: "--max-concurrent-requests", batch: "--max-batch-tokens"},
	"torchserve": {limit: "maxWorkers", batch: "batchSize", delay: "maxBatchDelay", host: "minWorkers, maxWorkers", more: "maxWorkers"},
	"ray":        {limit: "max_ongoing_requests", host: "num_replicas"},
	"bentoml":    {limit: "traffic.max_concurrency", batch: "max_batch_size", delay: "max_latency_ms"},
	"litserve":   {batch: "max_batch_size", delay: "batch_timeout", more: "workers_per_device", host: "workers_per_device"},
	"mosec":      {batch: "max_batch_size", delay: "max_wait_time", host: "num of the preprocessing worker", more: "num of the worker"},
	"speaches":   {limit: "WHISPER__NUM_WORKERS", more: "WHISPER__NUM_WORKERS"},
	"whisper.cpp": {
		limit: "more processes: one global lock serves one request at a time", host: "--threads",
	},
	"funasr": {limit: "--decoder-thread-num", batch: "--batch-size", host: "--io-thread-num, --decoder-thread-num", more: "--model-thread-num"},
	"funasr-python": {
		limit: "--concurrent_asr_offline, --concurrent_asr_online", host: "--worker_threads",
	},
	"sherpa": {limit: "--num-work-threads", batch: "--max-batch-size", host: "--num-io-threads"},
}

// ServerKinds names the kinds of servers whose settings the advice can name.
func ServerKinds() []string {
	names := make([]string, 0, len(knobsOf))
	for name := range knobsOf {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// KindOfRoute recognises a server by a route that no other kind has; "" if it
// cannot be told.
func KindOfRoute(route string) string {
	switch {
	case strings.HasPrefix(route, "/v2/models/") && strings.HasSuffix(route, "/infer"):
		return "triton" // KServe's protocol: others speak it, but those that batch are Triton
	case strings.HasPrefix(route, "/predictions/"):
		return "torchserve"
	}
	return ""
}

// name appends, where the kind of server is known, the setting's own name.
func (q *question) name(what string) string {
	k, ok := knobsOf[q.ServerKind]
	if !ok {
		return ""
	}
	setting := map[string]string{"limit": k.limit, "batch": k.batch, "delay": k.delay, "host": k.host, "more": k.more}[what]
	if setting == "" {
		return ""
	}
	return " (" + q.ServerKind + ": " + setting + ")"
}
