package classifier

import (
	"fmt"
	"time"
)

// report reads n merged windows. What class memory adds comes later.
func (s *slot) report(c *class, n int) Report {
	r := Report{
		Class: c.name, ServerKind: c.kind, Start: s.start, End: s.end, Windows: n,
		Requests: s.requests, OK: s.outcomes[OK], Rejected: s.outcomes[Rejected], Expired: s.outcomes[Expired],
		Canceled: s.outcomes[Canceled], Failed: s.outcomes[Failed],
		Refused: s.refused, Timed: s.timed, QueueTold: s.queueTold, Suspect: s.suspect, Batched: s.batched,
		Overlapped: s.overlapped, Upgraded: s.upgraded,
		P50: s.hist.quantile(0.50), P95: s.hist.quantile(0.95),
		Limit: s.limit,
	}
	s.reportShares(&r)
	s.reportMeans(&r)
	s.reportCopies(&r)
	r.Mean = mean(s.total, s.requests)
	r.Inflight, r.Waiting = ratio(s.inflight, float64(s.admitted)), ratio(s.waiting, float64(s.requests))
	r.Batch = ratio(float64(s.batched), s.executions)
	r.Throughput = ratio(float64(s.served), s.end.Sub(s.start).Seconds())
	if others := s.served - s.timed; others > 0 && s.timed > 0 {
		r.TimedAlike = ratio(s.timedServer/float64(s.timed), (s.servedServer-s.timedServer)/float64(others))
	}
	return r
}

func (s *slot) reportShares(r *Report) {
	r.Stream = ratio(s.stream, s.total)
	server := s.total - s.gate - s.upload
	r.Shares = spreadServer(s.gate, s.upload, server, &s.stages).shares()
	tail, untimed := s.hist.slowest(0.05)
	r.TailShares = spreadServer(tail[pQueue], tail[pUpload], serverPart(&tail)+untimed, &tail).shares()
}

func (s *slot) reportMeans(r *Report) {
	if s.served == 0 {
		// Of those who gave up, the time until they did is all that is known.
		n, in := max(1, float64(s.requests)), max(1, float64(s.admitted))
		r.Means = parts{pQueue: s.gate / n, pUpload: s.upload / in, pRest: (s.total - s.gate - s.upload) / in}.stages()
		return
	}
	n := float64(s.served)
	p := spreadServer(0, s.servedUpload/n, s.servedServer/n, &s.stages)
	// Those who gave up waiting count with their wait, or survivors alone would
	// make the queue look short.
	p[pQueue] = ratio(s.gate, float64(s.requests-s.outcomes[Rejected]))
	r.Means = p.stages()
}

func (s *slot) reportCopies(r *Report) {
	if s.timed == 0 {
		return
	}
	n := float64(s.timed)
	r.Copies, r.CopyBytes = s.copies/n, s.bytes/n
	r.CopyOut, r.CopyOutBytes = mean(s.copyOut, s.timed), s.outB/n
	r.CopyOutSynced = s.outUnsynced == 0
	s.reportHockney(r)
}

// reportHockney tells a copy's latency from its bandwidth: time = latency +
// bytes / bandwidth (Hockney), fitted over the requests, each weighing its
// copies. It takes sizes that vary by a tenth or more, and a line that
// explains half of the variance or has no slope to speak of.
func (s *slot) reportHockney(r *Report) {
	m := &s.hockney
	if m.w <= 0 || s.timed < enough/2 {
		return
	}
	x, y := m.x/m.w, m.y/m.w
	sxx, sxy, syy := m.xx-m.x*x, m.xy-m.x*y, m.yy-m.y*y
	if x <= 0 || y <= 0 || sxx < 0.01*m.w*x*x {
		return
	}
	slope := sxy / sxx
	explained := ratio(slope*sxy, syy)
	if slope*x > 0.1*y && explained < 0.5 {
		return // something else moves the time
	}
	latency := min(max(y-slope*x, 0), y)
	r.CopyFit, r.CopyLatency, r.CopySmall = true, seconds(latency), latency/y
	if slope > 0 {
		r.CopyRate = 1 / slope
	}
}

// spreadServer splits the server's time as the timed requests split theirs;
// without any, all of it is nobody's.
func spreadServer(gate, upload, server float64, timed *parts) (p parts) {
	if all := serverPart(timed); all > 0 {
		for k, v := range timed {
			p[k] = server * v / all
		}
	} else {
		p[pRest] = server
	}
	p[pQueue], p[pUpload] = gate, upload
	return p
}

func serverPart(p *parts) float64 { return p.sum() - p[pQueue] - p[pUpload] }

func (p parts) shares() Shares {
	all := p.sum()
	if all <= 0 {
		return Shares{}
	}
	return Shares{
		Queue: p[pQueue] / all, ServerQueue: p[pServerQueue] / all, Upload: p[pUpload] / all,
		Preprocess: p[pPreprocess] / all, Transfer: p[pTransfer] / all, Forward: p[pForward] / all,
		Postprocess: p[pPostprocess] / all, Unattributed: p[pRest] / all,
	}
}

func (p parts) stages() Stages {
	return Stages{
		Queue: time.Duration(p[pQueue]), ServerQueue: time.Duration(p[pServerQueue]), Upload: time.Duration(p[pUpload]),
		Preprocess: time.Duration(p[pPreprocess]), Transfer: time.Duration(p[pTransfer]), Forward: time.Duration(p[pForward]),
		Postprocess: time.Duration(p[pPostprocess]), Unattributed: time.Duration(p[pRest]),
	}
}

func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

func mean(sum float64, n int) time.Duration { return time.Duration(ratio(sum, float64(n))) }

// burstyFrom is the variance over mean of arrivals from which to speak of
// bursts; closed clients in lock-step stay below it.
const burstyFrom = 4

// warn tells what weakens the numbers of the report.
func (r *Report) warn(s *slot) {
	add := func(format string, args ...any) { r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...)) }
	if c := r.Coverage(); r.Timed > 0 && c < 0.9 {
		add("only %s of the answers carry stage timings; the others are taken to be like them", percent(c))
		if a := r.TimedAlike; a > 0 && (a < 0.67 || a > 1.5) {
			add("but requests with timings took %.1f times as long in the server as those without", a)
		}
	}
	if r.Suspect > 0 {
		add("%s of %d answers have stage timings that cannot be true and are left out", percent(ratio(float64(r.Suspect), float64(s.served))), s.served)
	}
	if r.Timed > 0 && r.Batched*2 < r.Timed {
		add("the server tells no batch size, so forward is held against the requests in flight, which mixes batching with waiting inside the server")
	}
	if o := ratio(float64(r.Overlapped), float64(r.OK)); o > 0.1 {
		add("%s of the answers began before the upload ended, so upload and service cannot be told apart in them", percent(o))
	}
	if r.Burstiness > burstyFrom {
		add("requests come in bursts: their number in a tenth of a window varies %.0f times as much as at random, so they queue at a load that would be no trouble if it came evenly", r.Burstiness)
	}
	s.utterances.warn(add)
	if cv := s.lengthCV(); cv > 0.5 && r.Forward.OK {
		add("the length of the audio varies much (coefficient of variation %.1f); the slope is fitted within octaves of length and may keep a part of its influence", cv)
	}
}
