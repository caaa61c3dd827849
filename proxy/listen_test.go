package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestWeirListensOnASocketAndServesAServerOnOne(t *testing.T) {
	dir := t.TempDir()
	front, back := filepath.Join(dir, "weir.sock"), filepath.Join(dir, "asr.sock")
	l, err := net.Listen("unix", back)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }), Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: front, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close() // as a weir that was killed leaves it
	beginSidecar(t, func(c *Config) { c.Listen, c.Server, c.ServerProtocol = "unix:"+front, "unix:"+back, "h2" })
	for proto, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", front)
		}}
		tr.Protocols.SetHTTP1(!h2)
		tr.Protocols.SetUnencryptedHTTP2(h2)
		res, err := (&http.Client{Transport: tr}).Get("http://asr/health")
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(res.Body); res.StatusCode != 200 || string(b) != proto {
			t.Errorf("%v %q, want %s", res.Status, b, proto)
		}
		res.Body.Close()
		tr.CloseIdleConnections()
	}
	if _, err := listen("unix:" + front); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("a socket that is listened on: %v", err)
	}
}

func TestAServersSocketThatIsGoneIsUnavailable(t *testing.T) {
	r := newRig(t, filepath.Join(t.TempDir(), "none.sock"))
	in, out := []byte("x"), []byte(nil)
	if err := r.calls().Invoke(within10s(t), recognize, &in, &out); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}
