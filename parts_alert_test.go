//go:build parts

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"weir/classifier"
	"weir/examples/asrsim"
)

// beginSim serves a simulated server in this process.
func beginSim(t *testing.T, c asrsim.Config) (url string) {
	t.Helper()
	sim, err := asrsim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(sim)
	t.Cleanup(func() { s.Close(); sim.Close() })
	return s.URL
}

// webhook keeps the states of one alert as they come.
type webhook struct {
	*httptest.Server
	mu     sync.Mutex
	states []string
}

func newWebhook(t *testing.T, alert string) *webhook {
	t.Helper()
	h := &webhook{}
	h.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var message struct {
			Alerts []struct {
				Status string
				Labels map[string]string
			}
		}
		if err := json.NewDecoder(r.Body).Decode(&message); err != nil {
			t.Error(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, a := range message.Alerts {
			if a.Labels["alertname"] == alert {
				h.states = append(h.states, a.Status)
			}
		}
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *webhook) said(state string) func() bool {
	return func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.states) > 0 && h.states[len(h.states)-1] == state
	}
}

func beginAlertmanager(t *testing.T, hook string) (address string) {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf("route: {receiver: hook, group_by: [alertname], group_wait: 1s, group_interval: 1s, repeat_interval: 1h}\nreceivers: [{name: hook, webhook_configs: [{url: %q, send_resolved: true}]}]\n", hook)
	file := filepath.Join(dir, "alertmanager.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	address = free(t, 1)[0]
	begin(t, nil, "prometheus-alertmanager", "--config.file="+file, "--storage.path="+dir, "--web.listen-address="+address, "--cluster.listen-address=", "--log.level=warn")
	ready(t, "Alertmanager", "http://"+address+"/-/ready")
	return address
}

func TestTheQueueAlertReachesAWebhookAndResolves(t *testing.T) {
	s, err := asrsim.FindScenario("queue")
	if err != nil {
		t.Fatal(err)
	}
	hook := newWebhook(t, "WeirQueueWaitShareHigh")
	manager := beginAlertmanager(t, hook.URL)
	w := beginWeir(t, beginSim(t, s.Server), nil, "--max-concurrency", "2")
	beginPrometheus(t, map[string][]string{"asr": {w.admin}}, "2s", fmt.Sprintf("alerting: {alertmanagers: [{static_configs: [{targets: [%q]}]}]}\n", manager))
	load := func(clients int, until func() bool) {
		t.Helper()
		stop := time.Now().Add(90 * time.Second)
		for !until() {
			if time.Now().After(stop) {
				t.Fatalf("with %d clients, the webhook heard %v", clients, hook.states)
			}
			if _, err := (asrsim.Load{URL: w.url + "/asr", Clients: clients, For: time.Second}).Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	load(16, hook.said("firing"))
	load(1, hook.said("resolved"))
}

// Two weirs before unlike servers: what Prometheus makes of their sums is what
// one weir would have made of all their requests.
func TestAFleetsShareAndSlopeAreThePooledOnes(t *testing.T) {
	var admins []string
	var records []classifier.Observation
	for _, name := range []string{"queue", "compute"} {
		s, err := asrsim.FindScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		w := beginWeir(t, beginSim(t, s.Server), nil, "--max-concurrency", "6", "--records", "100000")
		admins = append(admins, w.admin)
		sent := 0
		for _, clients := range []int{1, 4, 12} {
			r, err := (asrsim.Load{URL: w.url + "/asr", Clients: clients, For: 2 * time.Second}).Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			sent += r.Sent
		}
		records = append(records, recordsOf(t, w, sent)...)
	}
	api := beginPrometheus(t, map[string][]string{"asr": admins}, "2s", "")
	eventually(t, 30*time.Second, "both are scraped", func() bool {
		_, body := get(t, api+"/api/v1/query?query=count(weir_build_info)")
		return strings.Contains(body, `"2"`)
	})
	var queue, total float64
	var w, wx, wy, wxx, wxy float64
	for i := range records {
		o := &records[i]
		queue, total = queue+o.QueueWait().Seconds(), total+o.Total().Seconds()
		d, _ := o.In(classifier.StageForward)
		x, y := float64(o.BatchSize), d.Seconds()
		w, wx, wy, wxx, wxy = w+1/x, wx+1, wy+y/x, wxx+x, wxy+y
	}
	for _, c := range []struct {
		what, query string
		want        float64
	}{
		{"share", `sum(weir_seconds_total{weir_part="queue"}) / sum(weir_seconds_total{weir_part="total"})`, queue / total},
		{"slope", slopeQuery, (w*wxy - wx*wy) / (w*wxx - wx*wx)},
	} {
		if got := promValue(t, api, c.query); math.Abs(got-c.want) > 0.01*math.Abs(c.want) {
			t.Errorf("the fleet's %s is %v: pooled, it is %v", c.what, got, c.want)
		}
	}
}

const slopeQuery = `(sum(weir_fit_total{weir_fit_term="w"}) * sum(weir_fit_total{weir_fit_term="wxy"}) - sum(weir_fit_total{weir_fit_term="wx"}) * sum(weir_fit_total{weir_fit_term="wy"}))
/ (sum(weir_fit_total{weir_fit_term="w"}) * sum(weir_fit_total{weir_fit_term="wxx"}) - sum(weir_fit_total{weir_fit_term="wx"})^2)`

// recordsOf reads the JSON lines of a weir's last n requests back.
func recordsOf(t *testing.T, w *sidecar, n int) (all []classifier.Observation) {
	t.Helper()
	var body string
	eventually(t, 10*time.Second, fmt.Sprintf("%d records", n), func() bool {
		_, body = get(t, w.admin+"/api/requests?n=100000")
		return strings.Count(body, "\n") == n
	})
	for lines := bufio.NewScanner(strings.NewReader(body)); lines.Scan(); {
		var o classifier.Observation
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}
