package evidence

import (
	"encoding/json"
	"fmt"
)

// tritonStats is the answer to GET /v2/models/stats, of which the whole field's
// best figures come: batch_stats counts executions, by size.
type tritonStats struct {
	Models []tritonModel `json:"model_stats"`
}

type tritonModel struct {
	Name       string `json:"name"`
	Inferences uint64 `json:"inference_count"`
	Executions uint64 `json:"execution_count"`
	Sum        struct {
		Success, Queue tritonTime
		Input          tritonTime `json:"compute_input"`
		Infer          tritonTime `json:"compute_infer"`
		Output         tritonTime `json:"compute_output"`
	} `json:"inference_stats"`
	Batches []struct {
		Size   int        `json:"batch_size"`
		Input  tritonTime `json:"compute_input"`
		Infer  tritonTime `json:"compute_infer"`
		Output tritonTime `json:"compute_output"`
	} `json:"batch_stats"`
}

type tritonTime struct {
	Count uint64 `json:"count"`
	NS    uint64 `json:"ns"`
}

func (t tritonTime) seconds() float64 { return float64(t.NS) * ns }

const maxBatchSizes = 4096

// readTriton adds up the models that execute something. An ensemble has no
// executions of its own: its members tell them. Requests are those of the
// model that answered most: the members of an ensemble each see all of them.
func readTriton(text []byte, to *reading) error {
	var stats tritonStats
	if err := json.Unmarshal(text, &stats); err != nil {
		return fmt.Errorf("the answer is no statistics of Triton: %w", err)
	}
	if stats.Models == nil {
		return fmt.Errorf("the answer has no model_stats: it is not of Triton's /v2/models/stats")
	}
	to.server = "Triton"
	most := 0.0
	for i := range stats.Models {
		m := &stats.Models[i]
		most = max(most, float64(m.Sum.Success.Count))
		if m.Executions > 0 && len(to.sizes) < maxBatchSizes {
			m.read(to)
		}
	}
	to.add(fCompleted, most, 0)
	return nil
}

// read takes the time that requests spent, in which each carries its whole
// batch's, and the time that executions took.
func (m *tritonModel) read(to *reading) {
	to.add(fQueue, m.Sum.Queue.seconds(), 0)
	to.add(fInput, m.Sum.Input.seconds(), 0)
	to.add(fForward, m.Sum.Infer.seconds(), 0)
	to.add(fOutput, m.Sum.Output.seconds(), 0)
	to.add(fTotal, m.Sum.Success.seconds(), 0)
	to.add(fMembers, float64(m.Inferences), 0)
	to.add(fBatches, float64(m.Executions), 0)
	for _, b := range m.Batches {
		if b.Size <= 0 {
			continue
		}
		c := to.sizes[b.Size]
		c.batches += float64(b.Infer.Count)
		c.forward += b.Infer.seconds()
		c.copies += b.Input.seconds() + b.Output.seconds()
		to.sizes[b.Size] = c
	}
}
