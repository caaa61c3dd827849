package evidence

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"weir/classifier"
)

// Found is what one page was found to tell.
type Found struct {
	Page   string   // its URL
	Server string   // the kind of server; "": only of the device
	Tells  []string // in the words of a report: "queue", "forward", "batch sizes", ...
	Device bool     // the device's load is there
}

// tellable names the fields for people, in the order of a request's life.
var tellable = []struct {
	field field
	name  string
}{
	{fTotal, "total"}, {fQueue, classifier.StageQueue.String()}, {fPreprocess, classifier.StagePreprocess.String()}, {fInput, "copies"},
	{fForward, classifier.StageForward.String()}, {fPostprocess, classifier.StagePostprocess.String()}, {fBatch, "mean batch"}, {fMembers, "mean batch"},
	{fWaiting, "requests waiting now"}, {fRunning, "requests running now"}, {fLimit, "limit"}, {fRejected, "refused requests"},
}

// Look reads one page once, or all Places of a server.
func Look(ctx context.Context, pages []string) (list []Found, errs map[string]error) {
	c := &Collector{client: newClient()}
	defer c.client.CloseIdleConnections()
	errs = make(map[string]error)
	for _, address := range pages {
		u, selects, err := parseAddress(address)
		if err != nil {
			errs[address] = err
			continue
		}
		r, err := c.lookAt(ctx, u, selects)
		if err != nil {
			errs[address] = err
			continue
		}
		list = append(list, found(address, &r))
	}
	return list, errs
}

// lookAt takes a page of a device alone, too.
func (c *Collector) lookAt(ctx context.Context, u string, selects []label) (reading, error) {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	text, err := c.get(ctx, u)
	if err != nil {
		return reading{}, err
	}
	r, err := readPage(text, selects, false)
	if err != nil {
		if d, deviceErr := readPage(text, selects, true); deviceErr == nil {
			d.server = ""
			return d, nil
		}
	}
	return r, err
}

func found(address string, r *reading) Found {
	f := Found{Page: address, Server: r.server, Device: r.numbers[fBusy].told}
	for _, t := range tellable {
		if r.numbers[t.field].told && !strings.Contains(strings.Join(f.Tells, "|"), t.name) {
			f.Tells = append(f.Tells, t.name)
		}
	}
	if len(r.sizes) > 0 {
		f.Tells = append(f.Tells, "each batch size's cost")
	}
	return f
}

// A sign is an answer by which a server is known.
type sign struct{ path, text, server string }

// signs are tried in this order; of one path the first text that is there.
var signs = []sign{
	{"/v2", `"triton"`, "Triton"},
	{"/v2", `"OpenVINO Model Server"`, "OpenVINO Model Server"},
	{"/v1/models", `"owned_by":"vllm"`, "vLLM"},
	{"/v1/models", `"owned_by":"sglang"`, "SGLang"},
	{"/v1/models", `"owned_by":"Systran"`, "speaches"},
	{"/info", `"max_concurrent_requests"`, "TGI"},
	{"/info", `"max_batch_tokens"`, "TEI"},
	{"/get_server_info", `"max_running_requests"`, "SGLang"},
	{"/openapi.json", `"title":"speaches`, "speaches"},
	{"/openapi.json", `"title":"WhisperLiveKit`, "WhisperLiveKit"},
	{"/openapi.json", `"title":"Whisper Asr Webservice`, "whisper-asr-webservice"},
	{"/openapi.json", `"title":"FunASR`, "FunASR"},
	{"/openapi.json", `"title":"LiteServer`, "LitServe"},
	{"/ping", `"status":"Healthy"`, "TorchServe"},
	{"/", "Whisper.cpp Server", "whisper.cpp"},
	{"/", "mosec", "mosec"},
	{"/docs.json", "BentoML", "BentoML"},
}

// Ask tells what kind of server answers at base, by its own description; "" if
// it does not say, and an error if nobody is there.
func Ask(ctx context.Context, base string) (server string, err error) {
	c := &Collector{client: newClient()}
	defer c.client.CloseIdleConnections()
	answers := make(map[string]string)
	reached := false
	for _, s := range signs {
		text, asked := answers[s.path]
		if !asked {
			ctx, cancel := context.WithTimeout(ctx, maxWait)
			raw, e := c.get(ctx, strings.TrimRight(base, "/")+s.path)
			cancel()
			text = squeeze(raw)
			answers[s.path] = text
			reached = reached || e == nil || strings.HasPrefix(e.Error(), "it answers ")
			if e != nil && !reached {
				return "", fmt.Errorf("%s cannot be reached: %w", base, e)
			}
		}
		if strings.Contains(text, s.text) {
			return s.server, nil
		}
	}
	return "", nil
}

// squeeze takes the blanks out of JSON, so that signs need not know its form.
func squeeze(raw []byte) string {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return string(raw)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return string(raw)
	}
	return string(b)
}

// HasSMI tells whether nvidia-smi is there and shows a device.
func HasSMI(ctx context.Context) error {
	_, err := askSMI(ctx, nil)
	return err
}

// HasNVML tells whether this build can use the driver's library.
func HasNVML(ctx context.Context) error {
	_, err := askNVML(ctx, nil)
	return err
}
