package ladder

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"weir/classifier"
)

// ears is a gRPC service that takes audio: whole, or as a stream.
type ears struct {
	pb.UnimplementedTestServiceServer
	heard  chan []byte
	refuse codes.Code
}

func (e *ears) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	if e.refuse != codes.OK {
		return nil, status.Error(e.refuse, "no")
	}
	md, _ := metadata.FromIncomingContext(ctx)
	_ = grpc.SetTrailer(ctx, metadata.Pairs("server-timing", "queue;dur=1, forward;dur=2;batch=3"))
	e.heard <- r.GetPayload().GetBody()
	return &pb.SimpleResponse{Username: "ten", OauthScope: strings.Join(md.Get("x-key"), "")}, nil
}

func (e *ears) StreamingInputCall(s pb.TestService_StreamingInputCallServer) error {
	var all []byte
	n := 0
	for ; ; n++ {
		r, err := s.Recv()
		if err != nil {
			break
		}
		all = append(all, r.GetPayload().GetBody()...)
	}
	e.heard <- all
	return s.SendAndClose(&pb.StreamingInputCallResponse{AggregatedPayloadSize: int32(n)})
}

// serveGRPC returns the URL of the service's methods.
func serveGRPC(t *testing.T, e *ears, reflect bool) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	pb.RegisterTestServiceServer(s, e)
	if reflect {
		reflection.Register(s)
	}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return "http://" + l.Addr().String() + "/grpc.testing.TestService/"
}

func callOnce(t *testing.T, target Target) (classifier.Observation, *Client) {
	t.Helper()
	target.Shape = GRPC
	if target.Timeout == 0 {
		target.Timeout = 20 * time.Second
	}
	c := socketClient(t, target)
	t.Cleanup(c.Close)
	return c.send(t.Context(), 0, time.Now(), 1), c
}

const payload = `{"payload":{"body":"{audio}"}}`

// descriptorFile holds the service's types, as protoc would write them.
func descriptorFile(t *testing.T) string {
	t.Helper()
	set := &descriptorpb.FileDescriptorSet{}
	for _, d := range []protoreflect.FileDescriptor{pb.File_grpc_testing_empty_proto, pb.File_grpc_testing_messages_proto, pb.File_grpc_testing_test_proto} {
		set.File = append(set.File, protodesc.ToFileDescriptorProto(d))
	}
	b, err := proto.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "types.pb")
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestAGRPCServerIsCalledByReflectionAndByDescriptor(t *testing.T) {
	for _, c := range []struct {
		name       string
		reflect    bool
		descriptor string
	}{{"reflection", true, ""}, {"descriptor", false, descriptorFile(t)}} {
		e := &ears{heard: make(chan []byte, 1)}
		url := serveGRPC(t, e, c.reflect)
		o, _ := callOnce(t, Target{URL: url + "UnaryCall", Template: payload, Descriptor: c.descriptor, Expect: "/oauthScope=^k$", Headers: []Field{{"X-Key", "k"}}})
		if failure(&o) != "" || !bytes.Equal(<-e.heard, pcmClip().Data) {
			t.Fatalf("%s: %q", c.name, failure(&o))
		}
		if f, _ := o.In(classifier.StageForward); f != 2*time.Millisecond || o.BatchSize != 3 || o.Protocol != "grpc" {
			t.Errorf("%s: forward %v, batch %d", c.name, f, o.BatchSize)
		}
		o, _ = callOnce(t, Target{URL: url + "StreamingInputCall", Template: `[{"expectCompressed":{}},` + payload + `]`, Descriptor: c.descriptor, Expect: "/aggregatedPayloadSize=^7$"})
		if failure(&o) != "" || !bytes.Equal(<-e.heard, pcmClip().Data) {
			t.Errorf("%s, stream: %q", c.name, failure(&o))
		}
	}
}

func TestAGRPCCallsFailuresHaveTheirWords(t *testing.T) {
	good := serveGRPC(t, &ears{heard: make(chan []byte, 9)}, true)
	mute := serveGRPC(t, &ears{heard: make(chan []byte, 9)}, false)
	full := serveGRPC(t, &ears{refuse: codes.ResourceExhausted}, true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	for _, c := range []struct{ url, template, want, message string }{
		{full + "UnaryCall", payload, "grpc_ResourceExhausted", ""},
		{"http://" + l.Addr().String() + "/a.B/C", payload, "connection_refused", ""},
		{good + "NoCall", payload, "no_such_method", "there is no method NoCall"},
		{strings.Replace(good, "TestService", "Nobody", 1) + "UnaryCall", payload, "no_such_method", "is the service in --url right"},
		{good + "UnaryCall", `{"audio":"{audio}"}`, "no_such_method", "--template is no grpc.testing.SimpleRequest"},
		{good + "UnaryCall", "[" + payload + "," + payload + "]", "no_such_method", "takes one message"},
		{mute + "UnaryCall", payload, "no_such_method", "the server has no reflection: give its types with --descriptor"},
	} {
		o, client := callOnce(t, Target{URL: c.url, Template: c.template})
		if failure(&o) != c.want {
			t.Errorf("%s: %q, want %q", c.url, failure(&o), c.want)
		}
		err := (&Runner{Client: client}).Warm(t.Context())
		if err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%s: %v, want %q", c.url, err, c.message)
		}
	}
}
