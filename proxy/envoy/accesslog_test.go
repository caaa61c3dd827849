package envoy

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/classifier"
	"weir/proxy"
)

// entry is a request of 100 ms that waited 20 ms for a connection.
func entry(change ...func(*datav3.HTTPAccessLogEntry)) *datav3.HTTPAccessLogEntry {
	ms := func(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Millisecond) }
	e := &datav3.HTTPAccessLogEntry{
		CommonProperties: &datav3.AccessLogCommon{
			StartTime: timestamppb.New(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)), Duration: ms(100), UpstreamCluster: "asr",
			TimeToLastRxByte: ms(30), TimeToFirstUpstreamTxByte: ms(25), TimeToLastUpstreamTxByte: ms(32),
			TimeToFirstUpstreamRxByte: ms(90), TimeToLastUpstreamRxByte: ms(95), TimeToLastDownstreamTxByte: ms(99),
			CustomTags: map[string]string{poolReady: "20"},
		},
		ProtocolVersion: datav3.HTTPAccessLogEntry_HTTP2,
		Request:         &datav3.HTTPRequestProperties{RequestMethod: 3, Path: "/asr?key=secret", Authority: "asr", RequestBodyBytes: 80000},
		Response: &datav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(200), ResponseBodyBytes: 12,
			ResponseHeaders: map[string]string{"server-timing": "queue;dur=10, forward;dur=30;batch=4"}},
	}
	for _, f := range change {
		f(e)
	}
	return e
}

func read(t *testing.T, e *datav3.HTTPAccessLogEntry) *classifier.Observation {
	t.Helper()
	r := newRig(t)
	var c clock
	o, ok := r.log.read(e, &c, time.Now())
	if !ok {
		t.Fatal("the entry was passed over")
	}
	return o
}

func TestAnEntryIsARecord(t *testing.T) {
	o := read(t, entry(func(e *datav3.HTTPAccessLogEntry) {
		e.Request.RequestHeaders = map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-00000000000000aa-01"}
	}))
	if o.Class != "POST /asr" || o.Status != 200 || o.Outcome != classifier.OK || o.Protocol != "h2" || o.BytesIn != 80000 || o.BytesOut != 12 || o.Target != "/asr?key=REDACTED" || o.ParentID[7] != 0xaa {
		t.Errorf("record %+v", o)
	}
	for _, c := range []struct {
		what string
		got  time.Duration
		want int
	}{
		{"total", o.Total(), 100}, {"queue wait", o.QueueWait(), 20}, {"upload", o.Upload(), 12},
		{"service", o.Service(), 58}, {"stream", o.Stream(), 10},
	} {
		if c.got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("%s is %v, want %d ms", c.what, c.got, c.want)
		}
	}
	if d, _ := o.In(classifier.StageForward); d != 30*time.Millisecond || o.BatchSize != 4 || o.Source != "header" {
		t.Errorf("forward %v, batch %d, from %q", d, o.BatchSize, o.Source)
	}
	if since := time.Since(o.Done); since < 0 || since > time.Second {
		t.Errorf("done %v ago: the log's clock, of 2001, must not count", since)
	}
}

// Envoy's wait without the custom tag is what cannot be the client's upload.
func TestWaitInEnvoy(t *testing.T) {
	ms := func(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Millisecond) }
	for _, c := range []struct {
		name            string
		change          func(*datav3.AccessLogCommon)
		queue, overhead int
	}{
		{"tag", func(*datav3.AccessLogCommon) {}, 20, 0},
		{"tag, and a filter that took 15 ms", func(p *datav3.AccessLogCommon) { p.TimeToLastRxByte, p.TimeToFirstUpstreamTxByte = ms(1), ms(36) }, 20, 15},
		{"no tag, small body", func(p *datav3.AccessLogCommon) { p.CustomTags, p.TimeToLastRxByte = nil, ms(1) }, 24, 0},
		{"no tag, slow body", func(p *datav3.AccessLogCommon) { p.CustomTags = nil }, 0, 0},
		{"a tag that cannot be", func(p *datav3.AccessLogCommon) { p.CustomTags[poolReady] = "-" }, 0, 0},
		{"a tag beyond the request", func(p *datav3.AccessLogCommon) { p.CustomTags[poolReady] = "99999" }, 25, 0},
		{"no tag, no upload", func(p *datav3.AccessLogCommon) { p.CustomTags, p.TimeToLastRxByte = nil, nil }, 25, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := read(t, entry(func(e *datav3.HTTPAccessLogEntry) { c.change(e.CommonProperties) }))
			if o.QueueWait() != time.Duration(c.queue)*time.Millisecond || o.Overhead != time.Duration(c.overhead)*time.Millisecond {
				t.Errorf("waited %v, overhead %v; want %d and %d ms", o.QueueWait(), o.Overhead, c.queue, c.overhead)
			}
			if l := o.Ledger(); l.Wall() != o.Total() {
				t.Errorf("ledger of %v for %v: %+v", l.Wall(), o.Total(), l)
			}
		})
	}
}

func TestFlagsAreOutcomes(t *testing.T) {
	none := func(p *datav3.AccessLogCommon) {
		p.TimeToFirstUpstreamTxByte, p.TimeToLastUpstreamTxByte, p.TimeToFirstUpstreamRxByte, p.TimeToLastUpstreamRxByte = nil, nil, nil, nil
	}
	for _, c := range []struct {
		flags    *datav3.ResponseFlags
		upstream bool
		outcome  classifier.Outcome
		word     string
	}{
		{&datav3.ResponseFlags{}, true, classifier.OK, ""},
		{&datav3.ResponseFlags{}, false, classifier.Failed, "envoy_reply"},
		{&datav3.ResponseFlags{UpstreamOverflow: true}, false, classifier.Rejected, "queue_full"},
		{&datav3.ResponseFlags{RateLimited: true}, false, classifier.Rejected, "rate_limited"},
		{&datav3.ResponseFlags{OverloadManager: true}, false, classifier.Rejected, "rate_limited"},
		{&datav3.ResponseFlags{DownstreamConnectionTermination: true}, true, classifier.Canceled, "client_gone"},
		{&datav3.ResponseFlags{DownstreamConnectionTermination: true}, false, classifier.Canceled, "client_gone"},
		{&datav3.ResponseFlags{UpstreamRequestTimeout: true}, true, classifier.Failed, "server_timeout"},
		{&datav3.ResponseFlags{UpstreamConnectionFailure: true}, false, classifier.Failed, "server_unreachable"},
		{&datav3.ResponseFlags{NoHealthyUpstream: true}, false, classifier.Failed, "server_unreachable"},
		{&datav3.ResponseFlags{UpstreamRemoteReset: true}, true, classifier.Failed, "server_reset"},
		{&datav3.ResponseFlags{UpstreamProtocolError: true}, true, classifier.Failed, "bad_response"},
	} {
		t.Run(c.flags.String(), func(t *testing.T) {
			o := read(t, entry(func(e *datav3.HTTPAccessLogEntry) {
				e.CommonProperties.ResponseFlags = c.flags
				if !c.upstream {
					none(e.CommonProperties)
				}
			}))
			if o.Outcome != c.outcome || o.Error != c.word {
				t.Errorf("outcome %v, %q; want %v, %q", o.Outcome, o.Error, c.outcome, c.word)
			}
			if c.outcome == classifier.Rejected && o.QueueWait() != o.Total() {
				t.Errorf("a refused request waited %v of %v", o.QueueWait(), o.Total())
			}
		})
	}
}

func TestEntriesThatAreNoRequestsEndArePassedOver(t *testing.T) {
	r := newRig(t, func(c *proxy.Config) { c.EnvoyCluster = "asr" })
	r.processor.seen.add("twice", time.Now())
	var c clock
	for name, e := range map[string]*datav3.HTTPAccessLogEntry{
		"intermediate": entry(func(e *datav3.HTTPAccessLogEntry) { e.CommonProperties.IntermediateLogEntry = true }),
		"periodic": entry(func(e *datav3.HTTPAccessLogEntry) {
			e.CommonProperties.AccessLogType = datav3.AccessLogType_DownstreamPeriodic
		}),
		"other cluster": entry(func(e *datav3.HTTPAccessLogEntry) { e.CommonProperties.UpstreamCluster = "web" }),
		"no start":      entry(func(e *datav3.HTTPAccessLogEntry) { e.CommonProperties.StartTime = nil }),
		"twice":         entry(func(e *datav3.HTTPAccessLogEntry) { e.Request.RequestId = "twice" }),
		"empty":         {},
	} {
		if _, ok := r.log.read(e, &c, time.Now()); ok {
			t.Errorf("%s became a record", name)
		}
	}
	if s := r.state().AccessLog; s.Other != 4 || s.Twice != 1 || s.Broken != 1 {
		t.Errorf("counted %+v", s)
	}
}

// A replay must tell what each request met, whatever the order of the log.
func TestTheReplayCountsWhoMetWhom(t *testing.T) {
	var got []*classifier.Observation
	r := newReplay(func(o *classifier.Observation) { got = append(got, o) })
	now := r.born.Add(time.Hour)
	r.born = now
	one := func(name string, come, enter, end int) *classifier.Observation {
		at := func(ms int) time.Time { return now.Add(time.Duration(ms) * time.Millisecond) }
		o := &classifier.Observation{Class: name, Enqueued: at(come), Done: at(end)}
		if enter >= 0 {
			o.Dequeued = at(enter)
		}
		return o
	}
	// a and b run; c waits for a; d comes while c waits, and is refused.
	for _, o := range []*classifier.Observation{one("d", 30, -1, 31), one("c", 20, 100, 150), one("b", 10, 10, 200), one("a", 0, 0, 100)} {
		r.add(o, now)
	}
	if r.release(now.Add(time.Second), false); len(got) != 0 {
		t.Fatalf("%d given on before the others can have come", len(got))
	}
	r.release(now.Add(2*time.Second), false)
	want := []struct {
		class             string
		waiting, inflight int
	}{{"d", 1, 0}, {"a", 0, 1}, {"c", 0, 2}, {"b", 0, 2}}
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d", len(got), len(want))
	}
	for i, w := range want {
		if o := got[i]; o.Class != w.class || o.Waiting != w.waiting || o.Inflight != w.inflight {
			t.Errorf("record %d is %s with %d waiting, %d in flight; want %+v", i, o.Class, o.Waiting, o.Inflight, w)
		}
	}
}

func TestTimelinesForgetWithoutLosingCount(t *testing.T) {
	var l timeline
	for _, at := range []int64{5, 1, 9, 5, 3} {
		l.add(at)
	}
	l.forget(5)
	l.add(2) // late
	for at, want := range map[int64]int{4: 3, 5: 5, 8: 5, 9: 6} {
		if n := l.until(at); n != want {
			t.Errorf("%d until %d, want %d", n, at, want)
		}
	}
}

// Only differences on Envoy's clock count, whatever it shows.
func TestClocksOfEnvoys(t *testing.T) {
	now := time.Now()
	for _, skew := range []time.Duration{0, -time.Hour, time.Hour} {
		var c clock
		for i, late := range []time.Duration{700, 20, 300, 900} { // ms under way in the buffer
			arrived := now.Add(time.Duration(i) * time.Second)
			began := arrived.Add(-late*time.Millisecond - 100*time.Millisecond)
			got := c.here(began.Add(skew), 100*time.Millisecond, arrived)
			if off := got.Sub(began); i > 0 && (off < 0 || off > 25*time.Millisecond) {
				t.Errorf("skew %v, entry %d: %v off", skew, i, off)
			}
			if got.Add(100 * time.Millisecond).After(arrived) {
				t.Errorf("skew %v, entry %d: ended after its entry came", skew, i)
			}
		}
	}
}

// counters serves Envoy's admin port.
func counters(t *testing.T, text func() string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/stats" || !strings.Contains(r.FormValue("filter"), `http\.ingress_http\.downstream_rq_total`) {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, text())
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// watching puts beside the running server one that reads Envoy's counters only
// when the test does.
func (r *rig) watching(admin string) {
	s := r.Server
	r.Server = &Server{
		listener: s.listener, processor: s.processor, log: s.log, loads: s.loads, least: s.least,
		stats: newStats(admin, "ingress_http", s.log.entries.Load),
	}
}

func TestLostEntriesTakeTheVerdictBack(t *testing.T) {
	var finished atomic.Int64
	admin := counters(t, func() string {
		return fmt.Sprintf("http.ingress_http.downstream_rq_active: 3\nhttp.ingress_http.downstream_rq_total: %d\nhttp.ingress_http.ext_proc.failure_mode_allowed: 7\naccess_logs.grpc_access_log.logs_dropped: 2\n", finished.Load()+3)
	})
	r := newRig(t)
	r.watching(admin)
	step := func(done, logged int64) {
		finished.Add(done)
		r.log.entries.Add(logged)
		r.stats.take(r.stats.read(t.Context()))
	}
	v := classifier.Verdict{Class: "POST /asr", Cause: classifier.Queue, Confidence: 0.9}
	step(0, 0)
	step(100, 100)
	step(100, 60)
	if got := r.doubt(v); got.Cause != classifier.Queue {
		t.Error("a class that the log does not feed was doubted")
	}
	r.log.feed("POST /asr", time.Now())
	if share, ok := r.stats.coverage(); !ok || share < 0.55 || share > 0.65 {
		t.Errorf("coverage %v, %v; want 0.6", share, ok)
	}
	if got := r.doubt(v); got.Cause != classifier.Unknown || !strings.Contains(got.Evidence[0], "60 %") || !strings.Contains(got.Advice, "buffer_size_bytes") {
		t.Errorf("verdict %+v", got)
	}
	for range keptSamples {
		step(100, 100)
	}
	if got := r.doubt(v); got.Cause != classifier.Queue {
		t.Errorf("the loss is a minute ago, but the verdict is %+v", got)
	}
	if s := r.state(); s.Processor.Bypassed != 7 || s.AccessLog.Dropped != 2 || *s.AccessLog.Coverage != 1 {
		t.Errorf("state %+v", s)
	}
	g := r.gauges()
	if share, ok := g.Coverage(); !ok || share != 1 {
		t.Errorf("the gauge of coverage is %v, %v", share, ok)
	}
	if n, ok := g.Bypassed(); !ok || n != 7 {
		t.Errorf("the counter of bypassed requests is %v, %v", n, ok)
	}
	if want := fmt.Sprintf("weir_envoy_access_log_entries_total %d", r.log.entries.Load()); !strings.Contains(string(r.get("/metrics")), want) {
		t.Errorf("/metrics has no line %q", want)
	}
}

func TestCoverageThatIsNotKnownIsSaid(t *testing.T) {
	v := classifier.Verdict{Class: "POST /asr", Cause: classifier.Queue}
	r := newRig(t)
	r.log.feed(v.Class, time.Now())
	if got := r.doubt(v); got.Cause != classifier.Queue || len(got.Warnings) != 1 || !strings.Contains(got.Warnings[0], "envoy_admin") {
		t.Errorf("verdict %+v", got)
	}
	r.watching(counters(t, func() string { return "server.live: 1\n" }))
	r.stats.take(r.stats.read(t.Context()))
	if got := r.doubt(v); len(got.Warnings) != 1 || !strings.Contains(got.Warnings[0], "envoy_stat_prefix") {
		t.Errorf("verdict %+v", got)
	}
}

// A request that passed weir's queue is not counted again by the log; one that
// bypassed it is.
func TestTheLogAndTheProcessorCountEachRequestOnce(t *testing.T) {
	r := newRig(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}))
	t.Cleanup(s.Close)
	e := newFake(t, r.conn, s.URL)
	e.log, e.proc = newAccessLog(t, r.conn), headersOnly()
	ask := func() {
		e.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/asr", strings.NewReader("audio")))
	}
	ask()
	e.proc = nil
	ask()
	e.log.flush()
	all := r.records(2)
	if st := r.state().AccessLog; st.Twice != 1 || st.Entries != 2 || len(all) != 2 {
		t.Errorf("%d records, %+v", len(all), st)
	}
}

func TestManyEnvoysLogAtOnceAndTheLogsEndWithWeir(t *testing.T) {
	const envoys, each = 50, 60
	r := newRig(t, func(c *proxy.Config) { c.Records = 100_000 })
	var wg sync.WaitGroup
	for range envoys {
		l := newAccessLog(t, r.conn)
		wg.Go(func() {
			for range each {
				l.add(entry(func(e *datav3.HTTPAccessLogEntry) { e.CommonProperties.StartTime = timestamppb.Now() }))
			}
			l.flush()
		})
	}
	wg.Wait()
	r.eventually(func() bool { return r.state().AccessLog.Entries == envoys*each }, "all entries came")
	r.records(envoys * each)
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("weir took %v to end with logs open", took)
	}
}

func FuzzEntry(f *testing.F) {
	b, _ := proto.Marshal(entry())
	f.Add(b)
	f.Add([]byte{})
	side, err := proxy.NewSidecar(f.Context(), quiet(), proxy.SidecarOptions{})
	if err != nil {
		f.Fatal(err)
	}
	s := newLogSink(side, new(loads), new(seen), "", nil)
	f.Fuzz(func(t *testing.T, b []byte) {
		e := new(datav3.HTTPAccessLogEntry)
		if proto.Unmarshal(b, e) != nil {
			return
		}
		var c clock
		now := time.Now()
		o, ok := s.read(e, &c, now)
		if !ok {
			return
		}
		if o.Done.Before(o.Enqueued) || o.Done.After(now.Add(time.Second)) || !o.Dequeued.IsZero() && o.Dequeued.Before(o.Enqueued) {
			t.Errorf("instants out of order: %+v", o)
		}
		if l := o.Ledger(); l.Wall() != o.Before+o.Total() {
			t.Errorf("ledger %+v of %v", l, o.Total())
		}
	})
}

func quiet() proxy.Config {
	c := proxy.DefaultConfig()
	c.Listen, c.Admin = proxy.NoListen, "127.0.0.1:0"
	return c
}
