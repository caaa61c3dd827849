package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weir/classifier"
)

// rawBytes is a codec for messages that are bytes already.
type rawBytes struct{}

func (rawBytes) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (rawBytes) Unmarshal(b []byte, v any) error { *v.(*[]byte) = bytes.Clone(b); return nil }
func (rawBytes) Name() string                    { return "raw" }
func init()                                      { encoding.RegisterCodec(rawBytes{}) }
func send(s interface{ SendMsg(any) error }, text string) error {
	b := []byte(text)
	return s.SendMsg(&b)
}

func receive(s interface{ RecvMsg(any) error }) (string, error) {
	var b []byte
	err := s.RecvMsg(&b)
	return string(b), err
}

// serveCalls runs a gRPC server of grpc-go in which do answers every method.
func serveCalls(t *testing.T, do func(method string, s grpc.ServerStream) error, opts ...grpc.ServerOption) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(append(opts, grpc.ForceServerCodec(rawBytes{}), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		return do(method, s)
	}))...)
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	return l.Addr().String()
}

// calls connects grpc-go's client.
func (r *rig) calls(opts ...grpc.DialOption) *grpc.ClientConn {
	r.Helper()
	c, err := grpc.NewClient(r.addr, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(rawBytes{}))}, opts...)...)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { c.Close() })
	return c
}

func within10s(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

const (
	recognize = "/nvidia.riva.asr.RivaSpeechRecognition/Recognize"
	asStream  = "/nvidia.riva.asr.RivaSpeechRecognition/StreamingRecognize"
)

var both = &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}

func (r *rig) open(ctx context.Context, method string, opts ...grpc.DialOption) grpc.ClientStream {
	r.Helper()
	s, err := r.calls(opts...).NewStream(ctx, both, method)
	if err != nil {
		r.Fatal(err)
	}
	return s
}

func echo(_ string, s grpc.ServerStream) error {
	for {
		text, err := receive(s)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(s, text); err != nil {
			return err
		}
	}
}

func TestAUnaryCallPassesWithItsMetadataAndBecomesARecord(t *testing.T) {
	var seen metadata.MD
	r := newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error {
		seen, _ = metadata.FromIncomingContext(s.Context())
		_ = s.SetHeader(metadata.Pairs("x-head", "1", "bin-bin", "\x00\xff"))
		s.SetTrailer(metadata.Pairs("x-trail", "2", "server-timing", "decode;dur=3"))
		return echo("", s)
	}))
	var head, trailer metadata.MD
	in, out := []byte("hello"), []byte(nil)
	ctx := metadata.AppendToOutgoingContext(within10s(t), "x-user", "a", "x-user", "b", "key-bin", "\x01\xfe")
	if err := r.calls().Invoke(ctx, recognize, &in, &out, grpc.Header(&head), grpc.Trailer(&trailer)); err != nil || string(out) != "hello" {
		t.Fatalf("%q, %v", out, err)
	}
	if got := seen["x-user"]; len(got) != 2 || got[0] != "a" || seen["key-bin"][0] != "\x01\xfe" || len(seen["traceparent"]) != 1 {
		t.Errorf("the server saw %v", seen)
	}
	if head["x-head"][0] != "1" || head["bin-bin"][0] != "\x00\xff" || trailer["x-trail"][0] != "2" {
		t.Errorf("the client saw %v and %v", head, trailer)
	}
	o := r.record(0)
	if o.Protocol != "grpc" || o.Class != "grpc "+recognize || o.Route != recognize || o.RPCStatus != "OK" || o.Status != 200 || o.Outcome != classifier.OK || o.Upgraded {
		t.Errorf("record %+v", o)
	}
	if o.Deadline < 9*time.Second || o.BytesIn != 10 || o.BytesOut != 10 || o.Sent.IsZero() || o.Responded.Before(o.Sent) || o.Done.Before(o.Responded) {
		t.Errorf("record %+v", o)
	}
	if o.Source != "trailer" || len(o.Timings) != 1 || o.Timings[0].Dur != 3*time.Millisecond {
		t.Errorf("timings %+v from %q", o.Timings, o.Source)
	}
}

func TestStreamsOfAllKindsRunAtFullDuplex(t *testing.T) {
	r := newRig(t, serveCalls(t, echo))
	s := r.open(within10s(t), asStream)
	for i := range 100 { // each answer comes before the next is asked
		text := strconv.Itoa(i)
		if err := send(s, text); err != nil {
			t.Fatal(err)
		}
		if got, err := receive(s); got != text || err != nil {
			t.Fatalf("%q, %v, want %q", got, err, text)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := receive(s); err != io.EOF {
		t.Fatalf("%v after the end of the client's messages", err)
	}
	o := r.record(0)
	if !o.Upgraded || o.RPCStatus != "OK" || o.Class != "grpc "+asStream || o.BytesIn != o.BytesOut {
		t.Errorf("record %+v", o)
	}
}

func TestAClientStreamAndAServerStreamPass(t *testing.T) {
	r := newRig(t, serveCalls(t, func(method string, s grpc.ServerStream) error {
		if method == "/a.B/Down" {
			for i := range 50 {
				if err := send(s, strconv.Itoa(i)); err != nil {
					return err
				}
			}
			return status.Error(codes.DataLoss, "50 % lost, schön")
		}
		var all strings.Builder
		for {
			text, err := receive(s)
			if err == io.EOF {
				return send(s, all.String())
			}
			if err != nil {
				return err
			}
			all.WriteString(text)
		}
	}))
	up := r.open(within10s(t), "/a.B/Up")
	for range 20 {
		if err := send(up, "ab"); err != nil {
			t.Fatal(err)
		}
	}
	_ = up.CloseSend()
	if got, err := receive(up); got != strings.Repeat("ab", 20) || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	down := r.open(within10s(t), "/a.B/Down")
	_ = down.CloseSend()
	n := 0
	var err error
	for ; err == nil; n++ {
		_, err = receive(down)
	}
	if st := status.Convert(err); n != 51 || st.Code() != codes.DataLoss || st.Message() != "50 % lost, schön" {
		t.Fatalf("%d messages, then %v", n-1, err)
	}
	for range 2 {
		r.eventually(func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.records) == 2 }, "two records")
	}
	for n := range 2 {
		if o := r.record(n); !o.Upgraded || o.Class != "grpc _OTHER" || o.Route != "" {
			t.Errorf("record %+v", o)
		}
	}
}

func TestAnAnswerThatIsTrailersOnlyStaysSo(t *testing.T) {
	r := newRig(t, serveCalls(t, func(string, grpc.ServerStream) error { return status.Error(codes.NotFound, "no such model") }))
	in, out := []byte("x"), []byte(nil)
	err := r.calls().Invoke(within10s(t), recognize, &in, &out)
	if st := status.Convert(err); st.Code() != codes.NotFound || st.Message() != "no such model" {
		t.Fatalf("%v", err)
	}
	if o := r.record(0); o.RPCStatus != "NOT_FOUND" || o.Outcome != classifier.OK || o.Error != "" {
		t.Errorf("record %+v", o)
	}
}

func TestACancellationReachesTheServerAndFreesThePlace(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan time.Time, 1)
	r := newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error {
		close(begun)
		<-s.Context().Done()
		ended <- time.Now()
		return s.Context().Err()
	}))
	r.Gate.SetLimits(Limits{MaxConcurrency: 1}, nil)
	ctx, cancel := context.WithCancel(within10s(t))
	s := r.open(ctx, asStream)
	_ = send(s, "x")
	<-begun
	at := time.Now()
	cancel()
	if took := (<-ended).Sub(at); took > 500*time.Millisecond {
		t.Errorf("the server heard of it after %v", took)
	}
	r.eventually(func() bool { return r.Gate.State().Inflight == 0 }, "the place is free")
	if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" || o.RPCStatus != "CANCELLED" {
		t.Errorf("record %+v", o)
	}
}

func TestAClientWhoseConnectionBreaksIsGone(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan struct{})
	r := newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error {
		close(begun)
		<-s.Context().Done()
		close(ended)
		return s.Context().Err()
	}))
	var nc net.Conn
	s := r.open(within10s(t), asStream, grpc.WithContextDialer(func(ctx context.Context, a string) (c net.Conn, err error) {
		if nc != nil {
			return nil, errors.New("once only")
		}
		nc, err = (&net.Dialer{}).DialContext(ctx, "tcp", a)
		return nc, err
	}))
	_ = send(s, "x")
	<-begun
	nc.Close()
	<-ended
	r.eventually(func() bool { return r.Gate.State().Inflight == 0 }, "the place is free")
}

// brokenServer resets each stream after its answer has begun, with code.
func brokenServer(t *testing.T, begin bool, code int) string {
	return serveFrames(t, func(f *h2frames) {
		for {
			id, ok := f.nextHeaders()
			if !ok {
				return
			}
			if begin {
				f.headers(id, false, ":status", "200", "content-type", "application/grpc")
			}
			f.reset(id, code)
		}
	})
}

func TestAResetByTheServerReachesTheClientAsTheSameStatus(t *testing.T) {
	for _, begin := range []bool{false, true} {
		for code, want := range map[int]codes.Code{0x8: codes.Canceled, 0xb: codes.ResourceExhausted, 0x2: codes.Internal, 0xc: codes.PermissionDenied} {
			t.Run(fmt.Sprintf("code %#x, begun %v", code, begin), func(t *testing.T) {
				r := newRig(t, brokenServer(t, begin, code))
				in, out := []byte("x"), []byte(nil)
				err := r.calls().Invoke(within10s(t), recognize, &in, &out)
				if got := status.Code(err); got != want {
					t.Errorf("%v, want %v", err, want)
				}
				if o := r.record(0); o.Error != "server_reset" || o.Outcome != classifier.Failed || o.RPCStatus != grpcNames[want] {
					t.Errorf("record %+v", o)
				}
			})
		}
	}
}

func TestAServerThatIsGoneIsUnavailable(t *testing.T) {
	r := newRig(t, unusedAddress(t))
	in, out := []byte("x"), []byte(nil)
	err := r.calls().Invoke(within10s(t), recognize, &in, &out)
	if st := status.Convert(err); st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "cannot connect to") {
		t.Fatalf("%v", err)
	}
	if o := r.record(0); o.Error != "server_unreachable" || o.RPCStatus != "UNAVAILABLE" {
		t.Errorf("record %+v", o)
	}
}

func TestAServerOfHTTP1SaysWhyItCannotTakeCalls(t *testing.T) {
	r := newRig(t, script(t, func(_ int, c net.Conn, _ *bufio.Reader) {
		_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
	}))
	in, out := []byte("x"), []byte(nil)
	err := r.calls().Invoke(within10s(t), recognize, &in, &out)
	if st := status.Convert(err); st.Code() != codes.Internal || !strings.Contains(st.Message(), "does not speak HTTP/2") {
		t.Fatalf("%v", err)
	}
}

func unusedAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// occupied is a rig whose one place is taken until release is called.
func occupied(t *testing.T, queue int, timeout time.Duration) (r *rig, release func()) {
	t.Helper()
	begun, end := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	r = newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error {
		if first.CompareAndSwap(false, true) {
			close(begun)
			<-end
		}
		md, _ := metadata.FromIncomingContext(s.Context())
		s.SetTrailer(metadata.Pairs("x-timeout", strings.Join(md["grpc-timeout"], ",")))
		deadline, ok := s.Context().Deadline()
		if ok {
			s.SetTrailer(metadata.Pairs("x-left", time.Until(deadline).String()))
		}
		return echo("", s)
	}))
	r.Gate.SetLimits(Limits{MaxConcurrency: 1, MaxQueueSize: queue, QueueTimeout: timeout}, nil)
	s := r.open(t.Context(), asStream)
	_ = send(s, "first")
	<-begun
	return r, sync.OnceFunc(func() { _ = s.CloseSend(); close(end) })
}

func TestAFullQueueIsResourceExhausted(t *testing.T) {
	r, release := occupied(t, 0, 0)
	defer release()
	in, out := []byte("x"), []byte(nil)
	err := r.calls().Invoke(within10s(t), recognize, &in, &out)
	if st := status.Convert(err); st.Code() != codes.ResourceExhausted || !strings.Contains(st.Message(), "weir: max_queue_size 0 is reached while max_concurrency 1 is in use") {
		t.Fatalf("%v", err)
	}
	if o := r.record(0); o.Outcome != classifier.Rejected || o.Error != "queue_full" || o.RPCStatus != "RESOURCE_EXHAUSTED" || !o.Dequeued.IsZero() {
		t.Errorf("record %+v", o)
	}
}

func TestAQueueTimeoutIsResourceExhausted(t *testing.T) {
	r, release := occupied(t, 1, 20*time.Millisecond)
	defer release()
	in, out := []byte("x"), []byte(nil)
	if err := r.calls().Invoke(within10s(t), recognize, &in, &out); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("%v", err)
	}
	if o := r.record(0); o.Outcome != classifier.Expired || o.Error != "queue_timeout" {
		t.Errorf("record %+v", o)
	}
}

func TestACallWhoseDeadlinePassesInTheQueueEndsThere(t *testing.T) {
	r, release := occupied(t, 1, 0)
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	in, out := []byte("x"), []byte(nil)
	if err := r.calls().Invoke(ctx, recognize, &in, &out); status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("%v", err)
	}
	o := r.record(0)
	if o.Outcome != classifier.Expired && o.Outcome != classifier.Canceled || !o.Dequeued.IsZero() { // its client hangs up at the same moment
		t.Errorf("record %+v", o)
	}
	if g := r.Gate.State(); g.Waiting != 0 || g.Inflight != 1 {
		t.Errorf("gate %+v", g)
	}
}

// A client that does not hang up by itself gets the status from weir: one
// call's deadline passes in the server, the other's in the queue behind it.
func TestWeirEndsCallsWhoseDeadlineHasPassed(t *testing.T) {
	ended := make(chan http2.ErrCode, 1)
	r := newRig(t, serveFrames(t, func(f *h2frames) {
		_, _ = f.nextHeaders()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if rst, ok := frame.(*http2.RSTStreamFrame); ok {
				ended <- rst.ErrCode
				return
			}
		}
	}))
	r.Gate.SetLimits(Limits{MaxConcurrency: 1, MaxQueueSize: 1}, nil)
	c := r.dial()
	c.send("%s", preface)
	f := newFrames(t, c.Conn, c.Reader)
	_ = f.WriteSettings()
	for i, timeout := range []string{"700m", "100m"} {
		f.headers(uint32(2*i+1), false, ":method", "POST", ":scheme", "http", ":authority", "h", ":path", recognize, "content-type", "application/grpc", "te", "trailers", "grpc-timeout", timeout)
		r.eventually(func() bool { g := r.Gate.State(); return g.Inflight == 1 && g.Waiting == i }, "call %d is there", i)
	}
	for _, id := range []uint32{3, 1} {
		if h := f.answer(id); h["grpc-status"] != "4" || h[":status"] != "200" || h["content-type"] != "application/grpc" || !strings.Contains(h["grpc-message"], "weir: grpc-timeout") {
			t.Errorf("stream %d: %v", id, h)
		}
	}
	if a, b := r.record(0), r.record(1); a.Outcome != classifier.Expired || b.Outcome != classifier.Canceled || a.Error != deadlinePassed || b.Error != deadlinePassed || b.Deadline != 700*time.Millisecond {
		t.Errorf("records %+v and %+v", a, b)
	}
	if code := <-ended; code != http2.ErrCodeCancel {
		t.Errorf("the server's stream was reset with %v", code)
	}
}

func TestARequestThatTheServerRefusesToBeginIsSentAgain(t *testing.T) {
	var came atomic.Int64
	r := newRig(t, serveFrames(t, func(f *h2frames) {
		for {
			id, ok := f.nextHeaders()
			if !ok {
				return
			}
			if came.Add(1) < 3 {
				f.reset(id, 0x7) // REFUSED_STREAM
				continue
			}
			f.headers(id, true, ":status", "204")
		}
	}), func(s *settings) { s.serverProtocol = "h2" })
	if res, _ := r.do(r.h2Client(), "GET", "/", nil); res.StatusCode != 204 || came.Load() != 3 {
		t.Errorf("%v after %d tries", res.Status, came.Load())
	}
	came.Store(-100) // it never begins
	if res, _ := r.do(r.h2Client(), "GET", "/", nil); res.StatusCode != 502 || came.Load() != -97 {
		t.Errorf("%v after %d tries", res.Status, came.Load()+100)
	}
}

func TestTheServerIsToldWhatIsLeftOfTheDeadline(t *testing.T) {
	r, release := occupied(t, 1, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	time.AfterFunc(300*time.Millisecond, release)
	var trailer metadata.MD
	in, out := []byte("x"), []byte(nil)
	if err := r.calls().Invoke(ctx, recognize, &in, &out, grpc.Trailer(&trailer)); err != nil {
		t.Fatal(err)
	}
	left, err := time.ParseDuration(trailer["x-left"][0])
	if err != nil || left > 29750*time.Millisecond || left < 20*time.Second {
		t.Errorf("the server has %v left of 30s, %v", left, err)
	}
}

func TestAClientThatLeavesTheQueueIsNeverSentToTheServer(t *testing.T) {
	r, release := occupied(t, 1, 0)
	ctx, cancel := context.WithCancel(within10s(t))
	s := r.open(ctx, recognize)
	_ = send(s, "x")
	r.eventually(func() bool { return r.Gate.State().Waiting == 1 }, "it waits")
	cancel()
	r.eventually(func() bool { return r.Gate.State().Waiting == 0 }, "it has left the queue")
	if o := r.record(0); o.Outcome != classifier.Canceled || o.Error != "client_gone" || !o.Dequeued.IsZero() {
		t.Errorf("record %+v", o)
	}
	release()
	r.eventually(func() bool { return r.Gate.State().Inflight == 0 }, "the place is free")
	if got := r.Gate.State().Admitted; got != 1 {
		t.Errorf("%d were admitted", got)
	}
}

func TestADrainingWeirIsUnavailable(t *testing.T) {
	r := newRig(t, serveCalls(t, echo))
	r.Gate.Drain()
	in, out := []byte("x"), []byte(nil)
	err := r.calls().Invoke(within10s(t), recognize, &in, &out)
	if st := status.Convert(err); st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "shutting down") {
		t.Fatalf("%v", err)
	}
}

func TestShutdownLetsCallsEndAndTellsClients(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	r := newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error {
		close(begun)
		<-end
		return echo("", s)
	}))
	s := r.open(within10s(t), asStream)
	_ = send(s, "x")
	<-begun
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(within10s(t)) }()
	r.eventually(r.draining, "weir drains")
	close(end)
	_ = s.CloseSend()
	if got, err := receive(s); got != "x" || err != nil {
		t.Errorf("%q, %v: a call in flight was cut", got, err)
	}
	if _, err := receive(s); err != io.EOF {
		t.Errorf("%v, want the end of the call", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A reader that does not read slows its sender, and weir holds no more than
// its windows; both ways.
func TestASlowReaderSlowsItsSenderAndMemoryStaysFlat(t *testing.T) {
	for name, test := range map[string]func(*testing.T){"the client does not read": testSlowClient, "the server does not read": testSlowServer} {
		t.Run(name, test)
	}
}

const flood = 24 << 20

// pushAll sends much more than all windows together hold.
func pushAll(s interface{ SendMsg(any) error }, sent *atomic.Int64) error {
	b := make([]byte, 32<<10)
	for sent.Load() < flood {
		if err := s.SendMsg(&b); err != nil {
			return err
		}
		sent.Add(int64(len(b)))
	}
	return nil
}

func testSlowClient(t *testing.T) {
	var sent atomic.Int64
	r := newRig(t, serveCalls(t, func(_ string, s grpc.ServerStream) error { return pushAll(s, &sent) }))
	s := r.open(within10s(t), asStream)
	standsStill(t, &sent)
	n := 0
	for {
		text, err := receive(s)
		if err != nil {
			break
		}
		n += len(text)
	}
	if n < flood {
		t.Errorf("%d bytes came once the client read, want %d", n, flood)
	}
}

func testSlowServer(t *testing.T) {
	var sent atomic.Int64
	stop := make(chan struct{})
	r := newRig(t, serveCalls(t, func(string, grpc.ServerStream) error { <-stop; return nil }))
	s := r.open(within10s(t), asStream)
	done := make(chan error, 1)
	go func() { done <- pushAll(s, &sent) }()
	standsStill(t, &sent)
	close(stop)
	if err := <-done; err != io.EOF {
		t.Errorf("%v, want io.EOF from a call that has ended", err)
	}
}

// standsStill waits until the sender is held up, and checks what that took.
func standsStill(t *testing.T, sent *atomic.Int64) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	last := int64(-1)
	for range 100 {
		time.Sleep(50 * time.Millisecond)
		if n := sent.Load(); n == last && n > 0 {
			break
		}
		last = sent.Load()
	}
	runtime.ReadMemStats(&after)
	if last >= flood/4 {
		t.Errorf("%d bytes were sent to a reader that reads none", last)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 24<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	t.Logf("%d KiB on the way, heap %+d KiB", last>>10, (int64(after.HeapAlloc)-int64(before.HeapAlloc))>>10)
}

func TestAServerThatSendsItsClientsAwayCostsNoCall(t *testing.T) {
	var conns atomic.Int64
	r := newRig(t, serveCalls(t, echo, grpc.StatsHandler(connCount{&conns}),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 30 * time.Millisecond, MaxConnectionAgeGrace: 5 * time.Second})))
	c := r.calls()
	for i := range 200 {
		in, out := []byte("x"), []byte(nil)
		if err := c.Invoke(within10s(t), recognize, &in, &out); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		time.Sleep(time.Millisecond)
	}
	if n := conns.Load(); n < 3 {
		t.Errorf("%d connections to the server: it sent none away", n)
	}
}

func TestManyCallsOfOneClientShareOneConnectionToTheServer(t *testing.T) {
	var conns atomic.Int64
	r := newRig(t, serveCalls(t, echo, grpc.StatsHandler(connCount{&conns})))
	c := r.calls()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			in, out := []byte("x"), []byte(nil)
			if err := c.Invoke(within10s(t), recognize, &in, &out); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections to the server, want 1", n)
	}
}

func TestGRPCTimeouts(t *testing.T) {
	for in, want := range map[string]time.Duration{"1H": time.Hour, "2M": 2 * time.Minute, "3S": 3 * time.Second, "4m": 4 * time.Millisecond, "5u": 5 * time.Microsecond,
		"6n": 6, "99999999n": 99999999, "99999999H": 1<<63 - 1, "0S": 0} {
		if got, ok := parseGRPCTimeout(in); !ok || got != want {
			t.Errorf("%q: %v, %v, want %v", in, got, ok, want)
		}
	}
	for _, in := range []string{"", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", "1 S", "0x1S"} {
		if got, ok := parseGRPCTimeout(in); ok {
			t.Errorf("%q is read as %v", in, got)
		}
	}
	for in, want := range map[time.Duration]string{0: "0n", 1: "1n", time.Second: "1000000u", 99999999: "99999999n", 100000000: "100000u", 100000001: "100001u",
		time.Hour: "3600000m", 1<<63 - 1: "99999999H", -time.Second: "0n"} {
		if got := formatGRPCTimeout(in); got != want {
			t.Errorf("%v: %q, want %q", in, got, want)
		}
	}
}

func FuzzGRPCTimeout(f *testing.F) {
	for _, s := range []string{"1H", "99999999n", "0S", "", "5x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, ok := parseGRPCTimeout(s)
		if !ok {
			return
		}
		back, ok := parseGRPCTimeout(formatGRPCTimeout(d))
		if !ok || back < d {
			t.Errorf("%q is %v, which is written %q", s, d, formatGRPCTimeout(d))
		}
	})
}

func FuzzMessageCount(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 1, 7, 1, 0, 0, 0, 0}, uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, cut uint8) {
		var whole, parts messageCount
		whole.add(b)
		for len(b) > 0 {
			n := min(len(b), int(cut)+1)
			parts.add(b[:n])
			b = b[n:]
		}
		if whole != parts {
			t.Errorf("at once %+v, in parts %+v", whole, parts)
		}
	})
}

func TestMessagesAreCounted(t *testing.T) {
	var m messageCount
	for range 3 {
		m.add(append([]byte{0, 0, 0, 1, 0}, make([]byte, 256)...))
		m.add([]byte{1, 0, 0, 0, 0})
	}
	if m.n != 6 {
		t.Errorf("%d messages, want 6", m.n)
	}
}

func TestLargeAndManyMessagesPassUnchanged(t *testing.T) {
	r := newRig(t, serveCalls(t, echo))
	for name, c := range map[string]struct{ size, n int }{"1 MiB": {1 << 20, 5}, "empty": {0, 5000}, "tiny": {3, 10_000}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the race detector has much to look at
			defer cancel()
			s := r.open(ctx, asStream)
			want := strings.Repeat("x", c.size)
			go func() {
				for range c.n {
					if send(s, want) != nil {
						return
					}
				}
				_ = s.CloseSend()
			}()
			for i := range c.n {
				if got, err := receive(s); got != want || err != nil {
					t.Fatalf("message %d: %d bytes, %v", i, len(got), err)
				}
			}
			if _, err := receive(s); err != io.EOF {
				t.Errorf("%v at the end", err)
			}
		})
	}
}

func TestAServerThatIsGoneInTheMiddleOfACallIsUnavailable(t *testing.T) {
	for _, begin := range []bool{false, true} {
		t.Run(fmt.Sprint("begun ", begin), func(t *testing.T) {
			r := newRig(t, script(t, func(_ int, c net.Conn, b *bufio.Reader) {
				_, _ = b.Discard(len(preface))
				f := newFrames(t, c, b)
				_ = f.WriteSettings()
				if id, ok := f.nextHeaders(); ok && begin {
					f.headers(id, false, ":status", "200", "content-type", "application/grpc")
				}
			}))
			r.Gate.SetLimits(Limits{MaxConcurrency: 1}, nil)
			s := r.open(within10s(t), asStream)
			_ = send(s, "x")
			if _, err := receive(s); status.Code(err) != codes.Unavailable {
				t.Errorf("%v", err)
			}
			o := r.record(0)
			if o.Outcome != classifier.Failed || o.Error != "server_reset" || o.RPCStatus != "UNAVAILABLE" {
				t.Errorf("record %+v", o)
			}
			if g := r.Gate.State(); g.Inflight != 0 {
				t.Errorf("gate %+v", g)
			}
		})
	}
}

// Whatever becomes of calls, all that weir held for them is given back.
func TestNothingIsLeftOfCallsThatEndInAnyWay(t *testing.T) {
	address := serveCalls(t, func(_ string, s grpc.ServerStream) error {
		text, err := receive(s)
		switch {
		case err != nil:
			return err
		case text == "hang":
			<-s.Context().Done()
			return s.Context().Err()
		case text == "fail":
			return status.Error(codes.Internal, "failed")
		}
		if err := send(s, text); err != nil {
			return err
		}
		return echo("", s)
	})
	r := newRig(t, address)
	r.Gate.SetLimits(Limits{MaxConcurrency: 4, MaxQueueSize: 8}, nil)
	c := r.calls()
	_ = c.Invoke(within10s(t), recognize, new([]byte), new([]byte)) // so that the connections are there
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(within10s(t), time.Duration(20+i)*time.Millisecond)
			defer cancel()
			s, err := c.NewStream(ctx, both, asStream)
			if err != nil {
				return
			}
			_ = send(s, []string{"hang", "fail", "echo"}[i%3])
			if i%2 == 0 {
				_ = s.CloseSend()
			}
			for err == nil {
				_, err = receive(s)
			}
		})
	}
	wg.Wait()
	r.eventually(func() bool { g := r.Gate.State(); return g.Inflight == 0 && g.Waiting == 0 }, "all places are free")
	r.eventually(func() bool { return runtime.NumGoroutine() <= before+2 }, "all goroutines have ended")
	in, out := []byte("still there"), []byte(nil)
	if err := c.Invoke(within10s(t), recognize, &in, &out); err != nil {
		t.Error(err)
	}
	if n := r.Gate.State().Inflight; n != 0 {
		t.Errorf("%d in the server", n)
	}
}
