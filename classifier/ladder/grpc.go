package ladder

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"weir/classifier"
)

// GRPC is the shape of a gRPC call. The URL's path is the method,
// /package.Service/Method; Template is the request in protobuf's JSON, where
// {audio} stands for the audio of a bytes field. For a method that takes a
// stream, Template may be a list of messages, and the one with {audio} is sent
// for each 100 ms of samples.
const GRPC = "grpc"

// rpc is a method whose types are known, and the connection to its server.
type rpc struct {
	conn   *grpc.ClientConn
	path   string
	method protoreflect.MethodDescriptor
	mu     sync.Mutex
	ready  map[*body][]proto.Message
}

// errMethod tells that the method's types could not be learned.
type errMethod struct{ error }

func (c *Client) connect(ctx context.Context) (*rpc, error) {
	c.rpcLock.Lock()
	defer c.rpcLock.Unlock()
	if c.rpc != nil {
		return c.rpc, nil
	}
	u, err := url.Parse(c.target.URL)
	if err != nil {
		return nil, err
	}
	var safe credentials.TransportCredentials = insecure.NewCredentials()
	if u.Scheme == "https" {
		safe = credentials.NewTLS(&tls.Config{ServerName: u.Hostname()})
	}
	conn, err := grpc.NewClient(u.Host, grpc.WithTransportCredentials(safe), grpc.WithUserAgent("weir-ladder"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAudio)), grpc.WithDisableRetry())
	if err != nil {
		return nil, err
	}
	service, name, _ := strings.Cut(strings.Trim(u.Path, "/"), "/")
	method, err := c.findMethod(ctx, conn, service, name)
	if err != nil {
		conn.Close()
		return nil, err
	}
	c.rpc = &rpc{conn: conn, path: u.Path, method: method, ready: map[*body][]proto.Message{}}
	return c.rpc, nil
}

// findMethod learns the types from a descriptor file, or from the server.
func (c *Client) findMethod(ctx context.Context, conn *grpc.ClientConn, service, name string) (protoreflect.MethodDescriptor, error) {
	set := &descriptorpb.FileDescriptorSet{}
	var err error
	if c.target.Descriptor != "" {
		var b []byte
		if b, err = os.ReadFile(c.target.Descriptor); err == nil {
			err = proto.Unmarshal(b, set)
		}
	} else {
		err = reflectFiles(ctx, conn, service, set)
	}
	if status.Code(err) == codes.Unimplemented {
		return nil, errMethod{fmt.Errorf("the server has no reflection: give its types with --descriptor (protoc --include_imports --descriptor_set_out=FILE)")}
	}
	if err != nil {
		return nil, err
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		return nil, errMethod{err}
	}
	return lookUp(files, service, name)
}

func lookUp(files *protoregistry.Files, service, name string) (protoreflect.MethodDescriptor, error) {
	d, err := files.FindDescriptorByName(protoreflect.FullName(service))
	if s, ok := d.(protoreflect.ServiceDescriptor); err == nil && ok {
		if m := s.Methods().ByName(protoreflect.Name(name)); m != nil {
			return m, nil
		}
	}
	return nil, errMethod{fmt.Errorf("there is no method %s of service %s: write --url http://host:port/package.Service/Method", name, service)}
}

// reflectFiles asks the server for the files that define a service.
func reflectFiles(ctx context.Context, conn *grpc.ClientConn, service string, set *descriptorpb.FileDescriptorSet) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	ask := func(r *grpc_reflection_v1.ServerReflectionRequest) ([]string, error) {
		if err := s.Send(r); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		answer, err := s.Recv()
		if err != nil {
			return nil, err
		}
		if e := answer.GetErrorResponse(); e != nil {
			return nil, errMethod{fmt.Errorf("the server's reflection: %s: is the service in --url right?", e.GetErrorMessage())}
		}
		return takeFiles(answer.GetFileDescriptorResponse().GetFileDescriptorProto(), seen, set)
	}
	missing, err := ask(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: service}})
	for err == nil && len(missing) > 0 {
		name := missing[0]
		missing = missing[1:]
		if seen[name] {
			continue
		}
		var more []string
		more, err = ask(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileByFilename{FileByFilename: name}})
		missing = append(missing, more...)
	}
	return err
}

// takeFiles adds the files that are new, and returns what they import.
func takeFiles(files [][]byte, seen map[string]bool, set *descriptorpb.FileDescriptorSet) (imports []string, err error) {
	for _, b := range files {
		f := &descriptorpb.FileDescriptorProto{}
		if err := proto.Unmarshal(b, f); err != nil {
			return nil, errMethod{err}
		}
		if !seen[f.GetName()] {
			seen[f.GetName()] = true
			set.File = append(set.File, f)
			imports = append(imports, f.GetDependency()...)
		}
	}
	return imports, nil
}

// messages are the requests of one call, made once for each clip.
func (r *rpc) messages(t *Target, b *body) ([]proto.Message, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if all := r.ready[b]; all != nil {
		return all, nil
	}
	texts := []json.RawMessage{json.RawMessage(t.Template)}
	if strings.HasPrefix(strings.TrimSpace(t.Template), "[") {
		if err := json.Unmarshal([]byte(t.Template), &texts); err != nil {
			return nil, errMethod{err}
		}
	}
	if len(texts) > 1 && !r.method.IsStreamingClient() {
		return nil, errMethod{fmt.Errorf("%s takes one message: give --template one, not a list", r.path)}
	}
	var all []proto.Message
	for _, text := range texts {
		for _, part := range r.parts(string(text), b) {
			m := dynamicpb.NewMessage(r.method.Input())
			filled := strings.ReplaceAll(string(text), "{audio}", base64.StdEncoding.EncodeToString(part))
			if err := protojson.Unmarshal([]byte(filled), m); err != nil {
				return nil, errMethod{fmt.Errorf("--template is no %s: %w", r.method.Input().FullName(), err)}
			}
			all = append(all, m)
		}
	}
	r.ready[b] = all
	return all, nil
}

// parts are the pieces of audio for which a message is sent.
func (r *rpc) parts(text string, b *body) [][]byte {
	if !r.method.IsStreamingClient() || !strings.Contains(text, "{audio}") {
		return [][]byte{b.content}
	}
	content := b.content
	if pcm, err := b.clip.samples(); err == nil {
		content = pcm
	}
	var all [][]byte
	for at := 0; at < len(content); at += chunkBytes {
		all = append(all, content[at:min(at+chunkBytes, len(content))])
	}
	return all
}

// call makes one gRPC call, unary or streaming, and reads all of its answers.
func (c *Client) call(ctx context.Context, b *body, o *classifier.Observation) ([]byte, error) {
	o.Protocol = "grpc"
	r, err := c.connect(ctx)
	if err != nil {
		return nil, c.grpcFailure(ctx, err, o)
	}
	messages, err := r.messages(c.target, b)
	if err != nil {
		return nil, c.grpcFailure(ctx, err, o)
	}
	s, err := r.conn.NewStream(c.metadata(ctx, o), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, r.path)
	if err != nil {
		return nil, c.grpcFailure(ctx, err, o)
	}
	began := time.Now()
	for i, m := range messages {
		if c.target.Paced && len(messages) > 1 && !sleep(ctx, time.Duration(i)*100*time.Millisecond-time.Since(began)) {
			break
		}
		if s.SendMsg(m) != nil {
			break // RecvMsg tells why
		}
	}
	_ = s.CloseSend()
	o.Sent = time.Now()
	if c.target.Paced {
		o.Enqueued, o.Dequeued = o.Sent, o.Sent
	}
	answer, err := c.receive(s, r, o)
	if err != nil {
		return nil, c.grpcFailure(ctx, err, o)
	}
	o.Status = http.StatusOK
	return answer, nil
}

func (c *Client) metadata(ctx context.Context, o *classifier.Observation) context.Context {
	md := metadata.MD{}
	for _, h := range c.target.Headers {
		md.Append(strings.ToLower(h.Name), h.Value)
	}
	if c.target.Admin != "" {
		md.Set("traceparent", "00-"+hex.EncodeToString(o.TraceID[:])+"-"+hex.EncodeToString(o.SpanID[:])+"-01")
	}
	return metadata.NewOutgoingContext(ctx, md)
}

// receive reads to the end; the last message is the answer.
func (c *Client) receive(s grpc.ClientStream, r *rpc, o *classifier.Observation) (answer []byte, err error) {
	m := dynamicpb.NewMessage(r.method.Output())
	n := 0
	for ; ; n++ {
		next := dynamicpb.NewMessage(r.method.Output())
		if err = s.RecvMsg(next); err != nil {
			break
		}
		if o.Responded.IsZero() {
			o.Responded = time.Now()
		}
		m = next
		o.BytesOut += int64(proto.Size(next))
	}
	head, _ := s.Header()
	for _, v := range head.Get("server-timing") {
		c.ingest.Header(o, []byte("server-timing"), []byte(v))
	}
	for _, v := range s.Trailer().Get("server-timing") {
		c.ingest.Trailer(o, []byte("server-timing"), []byte(v))
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	if o.Responded.IsZero() {
		o.Responded = time.Now()
	}
	return protojson.Marshal(m)
}

// grpcFailure notes what a call failed with. A refusal of the server is an
// answer; an error is returned where there was none.
func (c *Client) grpcFailure(ctx context.Context, err error, o *classifier.Observation) error {
	var method errMethod
	switch code := status.Code(err); {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &method):
		c.explain(err)
		o.Outcome, o.Error = classifier.Failed, "no_such_method"
	case code == codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case code == codes.Unavailable && strings.Contains(err.Error(), "connection refused"):
		o.Outcome, o.Error = classifier.Failed, "connection_refused"
	case code == codes.Unavailable && !o.Sent.IsZero():
		o.Status, o.Error = http.StatusServiceUnavailable, "grpc_Unavailable"
	case code == codes.ResourceExhausted:
		o.Status, o.Error = http.StatusTooManyRequests, "grpc_ResourceExhausted"
	default:
		o.Status, o.Error = http.StatusInternalServerError, "grpc_"+code.String()
	}
	return nil
}

// explain keeps the words of the first mistake in the call itself, for the
// message that ends the run.
func (c *Client) explain(err error) {
	c.mistake.CompareAndSwap(nil, &err)
}
