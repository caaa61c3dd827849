package asrsim

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Window is the length of a classifier's window that suits the scenarios:
// even the step of one client fills it within a few.
const Window = 2 * time.Second

// Scenario is a server, the limits of the proxy before it, and a load, such
// that Cause limits the whole: its remedy lowers latency under the last step
// more than that of any other cause. The tests hold each scenario to that.
type Scenario struct {
	Name   string // also the cause: queue, compute, transfer, host, client, healthy
	Story  string // one sentence
	Remedy string // what lowers the latency

	Server         Config
	MaxConcurrency int // of the proxy before the server; 0: no limit
	MaxQueueSize   int // of the proxy before the server; 0: no limit
	Steps          []Step
}

// Step is one level of load.
type Step struct {
	Clients    int
	For        time.Duration
	Think      time.Duration // between an answer and the next request
	UploadRate float64       // of one client, bytes/s; 0: as fast as it goes
}

// lengths of audio, alike enough that length is no cause.
var lengths = []time.Duration{2500 * time.Millisecond, 3 * time.Second, 3500 * time.Millisecond, 2 * time.Second}

// ladder is 40 s of 1, 2, 4, 8 and 16 clients.
func ladder(think time.Duration, uploadRate float64) []Step {
	var steps []Step
	for _, clients := range []int{1, 2, 4, 8, 16} {
		steps = append(steps, Step{Clients: clients, For: 8 * time.Second, Think: think, UploadRate: uploadRate})
	}
	return steps
}

// Scenarios returns all scenarios. They last about 40 s each.
func Scenarios() []Scenario {
	return []Scenario{queueScenario(), computeScenario(), transferScenario(), hostScenario(), clientScenario(), healthyScenario()}
}

// FindScenario returns the scenario of that name.
func FindScenario(name string) (Scenario, error) {
	var names []string
	for _, s := range Scenarios() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Scenario{}, fmt.Errorf("no scenario is named %q: take one of %s", name, strings.Join(names, ", "))
}

// queueScenario: two at a time may enter, half of whose time is on the host;
// the device idles in that time and could take sixteen for the price of two.
func queueScenario() Scenario {
	c := DefaultConfig()
	c.BatchDelay = 8 * time.Millisecond
	c.ForwardBase, c.ForwardPerBatch = 30*time.Millisecond, 300*time.Microsecond
	c.Preprocess, c.Postprocess = 16*time.Millisecond, 8*time.Millisecond
	c.PreprocessWorkers = 16
	return Scenario{
		Name: "queue", Server: c, MaxConcurrency: 2, MaxQueueSize: 64, Steps: ladder(0, 0),
		Story:  "the proxy lets two requests in, while the server could batch sixteen at nearly the same price",
		Remedy: "raise max_concurrency to 8 or more",
	}
}

// computeScenario: each request of a batch costs as much again.
func computeScenario() Scenario {
	c := DefaultConfig()
	c.MaxBatchSize = 8
	c.ForwardBase, c.ForwardPerBatch, c.ForwardPerSecond = 5*time.Millisecond, 18*time.Millisecond, 300*time.Microsecond
	return Scenario{
		Name: "compute", Server: c, MaxConcurrency: 32, MaxQueueSize: 64, Steps: ladder(0, 0),
		Story:  "the forward pass grows in step with the batch: the device is full",
		Remedy: "a faster or a second device, a smaller or quantised model",
	}
}

// transferScenario: forty small copies for each request, one after the other.
func transferScenario() Scenario {
	c := DefaultConfig()
	c.MaxBatchSize = 8
	c.ForwardBase, c.ForwardPerBatch = 18*time.Millisecond, 300*time.Microsecond
	c.H2DCopies, c.CopyLatency = 40, 500*time.Microsecond
	return Scenario{
		Name: "transfer", Server: c, MaxConcurrency: 32, MaxQueueSize: 64, Steps: ladder(0, 0),
		Story:  "forty small copies to the device for each request take longer than the forward pass",
		Remedy: "one copy for each batch, from pinned memory",
	}
}

// hostScenario: one thread decodes for all.
func hostScenario() Scenario {
	c := DefaultConfig()
	c.ForwardBase, c.ForwardPerBatch = 14*time.Millisecond, 300*time.Microsecond
	c.Preprocess, c.Postprocess, c.PreprocessWorkers = 24*time.Millisecond, 3*time.Millisecond, 1
	return Scenario{
		Name: "host", Server: c, MaxConcurrency: 32, MaxQueueSize: 64, Steps: ladder(0, 0),
		Story:  "a single host thread decodes all audio, while the device waits for it",
		Remedy: "more decoding workers, a faster decoder",
	}
}

// clientScenario: 80 KB of audio take 200 ms to come in.
func clientScenario() Scenario {
	c := DefaultConfig()
	c.ForwardBase, c.ForwardPerBatch = 20*time.Millisecond, 300*time.Microsecond
	c.Instances = 2
	return Scenario{
		Name: "client", Server: c, MaxConcurrency: 64, MaxQueueSize: 64, Steps: ladder(0, 400e3),
		Story:  "each client takes 0.2 s to send its audio, the server a fraction of that to work on it",
		Remedy: "clients with a faster link, or compressed audio",
	}
}

// healthyScenario: users who think between requests.
func healthyScenario() Scenario {
	c := DefaultConfig()
	c.ForwardBase, c.ForwardPerBatch = 20*time.Millisecond, 300*time.Microsecond
	c.Instances = 2
	return Scenario{
		Name: "healthy", Server: c, MaxConcurrency: 32, MaxQueueSize: 64, Steps: ladder(200*time.Millisecond, 0),
		Story:  "moderate load: throughput rises with the clients, latency hardly does",
		Remedy: "none is needed",
	}
}

// Drive plays the steps against the URL of POST /asr, one after the other,
// and returns their results; each is also given to done as it ends, if done
// is not nil. It ends early with ctx's error.
func (s Scenario) Drive(ctx context.Context, url string, done func(Step, Result)) ([]Result, error) {
	var results []Result
	for _, step := range s.Steps {
		r, err := step.load(url).Run(ctx)
		if err != nil {
			return results, err
		}
		results = append(results, r)
		if done != nil {
			done(step, r)
		}
		if err := ctx.Err(); err != nil {
			return results, err
		}
	}
	return results, nil
}

func (s Step) load(url string) Load {
	return Load{URL: url, Clients: s.Clients, For: s.For, Audio: lengths, UploadRate: s.UploadRate, Think: s.Think, Seed: s.seed()}
}

// seed gives each step audio of its own.
func (s Step) seed() uint64 { return uint64(16 * s.Clients) }
