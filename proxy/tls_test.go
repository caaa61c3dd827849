package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"weir/classifier"
)

// A signer is an authority, or a certificate that one has signed.
type signer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	der  []byte
}

// sign makes a certificate for name and loopback, signed by s; by itself if s
// is nil.
func (s *signer) sign(t *testing.T, name string, change ...func(*x509.Certificate)) *signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
	c := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: s == nil, BasicConstraintsValid: true,
	}
	for _, f := range change {
		f(c)
	}
	by := s
	if by == nil {
		by = &signer{cert: c, key: key}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by.cert, key.Public(), by.key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &signer{parsed, key, der}
}

func (s *signer) pair() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{s.der}, PrivateKey: s.key}
}

func (s *signer) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(s.cert)
	return p
}

// files writes the certificate and its key into dir.
func (s *signer) files(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	pkcs8, err := x509.MarshalPKCS8PrivateKey(s.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for name, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: s.der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// beginSidecar runs a whole weir until the test ends.
func beginSidecar(t *testing.T, change func(*Config)) *Sidecar {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Listen, cfg.Admin = "127.0.0.1:0", "127.0.0.1:0"
	change(&cfg)
	s, err := NewSidecar(t.Context(), cfg, SidecarOptions{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// last waits for a record.
func (s *Sidecar) lastRecord(t *testing.T) classifier.Observation {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if o := s.watch.last(1); len(o) == 1 {
			return o[0]
		}
	}
	t.Fatal("no record")
	return classifier.Observation{}
}

func secureClient(t *testing.T, config *tls.Config, protocols ...string) *http.Client {
	tr := &http.Transport{TLSClientConfig: config, Protocols: new(http.Protocols)}
	for _, p := range protocols {
		if p == "h2" {
			tr.Protocols.SetHTTP2(true)
		} else {
			tr.Protocols.SetHTTP1(true)
		}
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func okServer(t *testing.T) string {
	return "http://" + serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "ok")
	})
}

func postSecure(t *testing.T, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	res, err := c.Post(url, "audio/wav", bytes.NewReader(make([]byte, 100_000)))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(b)
}

func TestClientsOfTLSChooseTheirProtocol(t *testing.T) {
	ca := (*signer)(nil).sign(t, "weir.test")
	cert, key := ca.files(t, t.TempDir())
	for _, protocol := range []string{"h2", "http/1.1"} {
		t.Run(protocol, func(t *testing.T) {
			s := beginSidecar(t, func(c *Config) { c.Server, c.TLSCert, c.TLSKey = okServer(t), cert, key })
			c := secureClient(t, &tls.Config{RootCAs: ca.pool()}, protocol)
			for range 3 {
				if res, text := postSecure(t, c, "https://"+s.Addr()+"/asr"); res.StatusCode != 200 || text != "ok" {
					t.Fatalf("%v %q", res.Status, text)
				}
			}
			if o := s.lastRecord(t); o.Protocol != protocol || o.Scheme != "https" || o.BytesIn != 100_000 || o.Class != "POST /asr" {
				t.Errorf("record %+v", o)
			}
		})
	}
}

func TestWhoSpeaksTheWrongOneOfTLSAndPlainIsToldSo(t *testing.T) {
	cert, key := (*signer)(nil).sign(t, "weir.test").files(t, t.TempDir())
	secure := beginSidecar(t, func(c *Config) { c.Server, c.TLSCert, c.TLSKey = okServer(t), cert, key })
	plain := dialRaw(t, secure.Addr())
	plain.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if got := plain.rest(); !strings.HasPrefix(got, "HTTP/1.1 400 ") || !strings.Contains(got, "this port speaks TLS; write https://") {
		t.Errorf("%q", got)
	}
	open := beginSidecar(t, func(c *Config) { c.Server = okServer(t) })
	if _, err := tls.Dial("tcp", open.Addr(), &tls.Config{InsecureSkipVerify: true}); err == nil || !strings.Contains(err.Error(), "does not look like a TLS handshake") {
		t.Errorf("%v", err)
	}
}

func TestClientsMustShowACertificateWhereAnAuthorityIsNamed(t *testing.T) {
	ca, clients, others := (*signer)(nil).sign(t, "weir.test"), (*signer)(nil).sign(t, "clients"), (*signer)(nil).sign(t, "others")
	cert, key := ca.files(t, t.TempDir())
	clientCA, _ := clients.files(t, t.TempDir())
	s := beginSidecar(t, func(c *Config) { c.Server, c.TLSCert, c.TLSKey, c.TLSClientCA = okServer(t), cert, key, clientCA })
	for _, c := range []struct {
		name string
		by   *signer
		ok   bool
	}{{"none", nil, false}, {"of another", others, false}, {"of the authority", clients, true}} {
		config := &tls.Config{RootCAs: ca.pool()}
		if c.by != nil {
			config.Certificates = []tls.Certificate{c.by.sign(t, "client").pair()}
		}
		res, err := secureClient(t, config, "h2").Get("https://" + s.Addr() + "/")
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		if err == nil {
			res.Body.Close()
		}
	}
}

func TestANewCertificateIsServedWithoutARestart(t *testing.T) {
	dir := t.TempDir()
	old := (*signer)(nil).sign(t, "old.test")
	cert, key := old.files(t, dir)
	s := beginSidecar(t, func(c *Config) { c.Server, c.TLSCert, c.TLSKey = okServer(t), cert, key })
	served := func() string {
		c, err := tls.Dial("tcp", s.Addr(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := served(); got != "old.test" {
		t.Fatal(got)
	}
	if err := os.WriteFile(cert, []byte("half written"), 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(freshPeriod + 50*time.Millisecond)
	if got := served(); got != "old.test" {
		t.Fatalf("%q from a file that is no certificate", got)
	}
	(*signer)(nil).sign(t, "new.test").files(t, dir)
	for end := time.Now().Add(10 * time.Second); served() != "new.test"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the new certificate is not served")
		}
	}
}

// serveSecure runs a net/http server over TLS that speaks the protocols.
func serveSecure(t *testing.T, config *tls.Config, protocols ...string) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{TLSConfig: config, Protocols: new(http.Protocols), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, r.Proto)
		})}
	for _, p := range protocols {
		s.Protocols.SetHTTP1(s.Protocols.HTTP1() || p == "http/1.1")
		s.Protocols.SetHTTP2(s.Protocols.HTTP2() || p == "h2")
	}
	go func() { _ = s.ServeTLS(l, "", "") }()
	t.Cleanup(func() { s.Close() })
	return "https://" + l.Addr().String()
}

func TestAServerOfTLSIsSpokenToAsItChooses(t *testing.T) {
	ca := (*signer)(nil).sign(t, "asr.test")
	file, _ := ca.files(t, t.TempDir())
	front := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, c := range []struct {
		name, protocols, fromH1, fromH2 string
	}{
		{"both", "h2 http/1.1", "HTTP/1.1", "HTTP/2.0"},
		{"HTTP/1.1 only", "http/1.1", "HTTP/1.1", "HTTP/1.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := serveSecure(t, &tls.Config{Certificates: []tls.Certificate{ca.pair()}}, strings.Fields(c.protocols)...)
			s := beginSidecar(t, func(cfg *Config) { cfg.Server, cfg.ServerCA = server, file })
			for range 3 {
				if res, text := postSecure(t, front, "http://"+s.Addr()+"/"); res.StatusCode != 200 || text != c.fromH1 {
					t.Errorf("by HTTP/1.1: %v %q, want %s", res.Status, text, c.fromH1)
				}
				h2 := &rig{T: t, addr: s.Addr()}
				if _, text := h2.do(h2.h2Client(), "POST", "/", strings.NewReader("x")); text != c.fromH2 {
					t.Errorf("by HTTP/2: %q, want %s", text, c.fromH2)
				}
			}
		})
	}
}

// Keep-alive to a server over TLS: the pinned connection is used again.
func TestOneTLSConnectionServesManyRequests(t *testing.T) {
	ca := (*signer)(nil).sign(t, "asr.test")
	file, _ := ca.files(t, t.TempDir())
	server := serveSecure(t, &tls.Config{Certificates: []tls.Certificate{ca.pair()}}, "http/1.1")
	s := beginSidecar(t, func(cfg *Config) { cfg.Server, cfg.ServerCA = server, file })
	c := dialRaw(t, s.Addr())
	for i := range 5 {
		c.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")
		if head := c.head(); !strings.HasPrefix(head, "HTTP/1.1 200") {
			t.Fatalf("%q", head)
		}
		c.expect("HTTP/1.1")
		time.Sleep(2 * time.Millisecond) // so that weir looks whether the idle connection is good
		_ = i
	}
	for end := time.Now().Add(10 * time.Second); len(s.watch.last(5)) < 5 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	for i, o := range s.watch.last(5) {
		if (o.Connect > 0) != (i == 0) {
			t.Errorf("request %d: %v to connect", i, o.Connect)
		}
	}
}

func TestWhyAServersCertificateIsNotTakenIsSaid(t *testing.T) {
	ca := (*signer)(nil).sign(t, "asr.test")
	file, _ := ca.files(t, t.TempDir())
	expired := ca.sign(t, "asr.test", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	named := ca.sign(t, "asr.test", func(c *x509.Certificate) { c.IPAddresses = nil })
	with := func(s *signer) string {
		return serveSecure(t, &tls.Config{Certificates: []tls.Certificate{s.pair()}}, "h2", "http/1.1")
	}
	for _, c := range []struct {
		name, server string
		change       func(*Config)
		want         string // "": it is taken
	}{
		{"unknown authority", with(ca), func(*Config) {}, "signed by an authority that weir does not know; name the authority's certificate in server_ca"},
		{"insecure", with(ca), func(c *Config) { c.ServerInsecure = true }, ""},
		{"expired", with(expired), func(c *Config) { c.ServerCA = file }, "has expired or is not valid yet"},
		{"another name", with(named), func(c *Config) { c.ServerCA = file }, "is for another name; set server_name"},
		{"named", with(named), func(c *Config) { c.ServerCA, c.ServerName = file, "asr.test" }, ""},
		{"no TLS", strings.Replace(okServer(t), "http://", "https://", 1), func(c *Config) { c.ServerCA = file }, "does not speak TLS; write http://"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := beginSidecar(t, func(cfg *Config) { cfg.Server = c.server; c.change(cfg) })
			r := &rig{T: t, addr: s.Addr()}
			for _, client := range []*http.Client{r.h2Client(), {Transport: &http.Transport{DisableKeepAlives: true}}} {
				res, text := r.do(client, "GET", "/", nil)
				if c.want == "" && res.StatusCode != 200 || c.want != "" && (res.StatusCode != 502 || !strings.Contains(text, c.want)) {
					t.Errorf("%v %q, want %q", res.Status, text, c.want)
				}
			}
			in, out := []byte("x"), []byte(nil)
			err := r.calls().Invoke(within10s(t), recognize, &in, &out)
			if c.want != "" && (status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

func TestWeirShowsItsCertificateToTheServer(t *testing.T) {
	ca, clients := (*signer)(nil).sign(t, "asr.test"), (*signer)(nil).sign(t, "clients")
	file, _ := ca.files(t, t.TempDir())
	cert, key := clients.sign(t, "weir").files(t, t.TempDir())
	config := &tls.Config{Certificates: []tls.Certificate{ca.pair()}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients.pool()}
	server := serveSecure(t, config, "h2", "http/1.1")
	s := beginSidecar(t, func(c *Config) { c.Server, c.ServerCA, c.ServerCert, c.ServerKey = server, file, cert, key })
	r := &rig{T: t, addr: s.Addr()}
	for _, client := range []*http.Client{r.h2Client(), {Transport: &http.Transport{DisableKeepAlives: true}}} {
		if res, text := r.do(client, "GET", "/", nil); res.StatusCode != 200 {
			t.Errorf("%v %q", res.Status, text)
		}
	}
}

func TestGRPCPassesOverTLSOnBothSides(t *testing.T) {
	ca := (*signer)(nil).sign(t, "weir.test")
	cert, key := ca.files(t, t.TempDir())
	pair := ca.pair()
	server := serveCalls(t, echo, grpc.Creds(credentials.NewServerTLSFromCert(&pair)))
	s := beginSidecar(t, func(c *Config) { c.Server, c.ServerCA, c.TLSCert, c.TLSKey = "https://"+server, cert, cert, key })
	r := &rig{T: t, addr: s.Addr()}
	c := r.calls(grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(ca.pool(), "weir.test")))
	in, out := []byte("hello"), []byte(nil)
	if err := c.Invoke(within10s(t), recognize, &in, &out); err != nil || string(out) != "hello" {
		t.Fatalf("%q, %v", out, err)
	}
	if o := s.lastRecord(t); o.Protocol != "grpc" || o.Scheme != "https" || o.RPCStatus != "OK" {
		t.Errorf("record %+v", o)
	}
	plain := r.calls(grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err := plain.Invoke(within10s(t), recognize, &in, &out); status.Code(err) != codes.Unavailable {
		t.Errorf("in the clear: %v", err)
	}
}

// A client that leaves is noticed under TLS as without: by the FIN or RST of
// its TCP connection.
func TestAClientOfTLSThatLeavesFreesItsPlace(t *testing.T) {
	ca := (*signer)(nil).sign(t, "weir.test")
	cert, key := ca.files(t, t.TempDir())
	begun, ended := make(chan struct{}), make(chan struct{})
	server := script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		_, _ = readHeadRaw(r)
		close(begun)
		_, _ = r.ReadByte()
		close(ended)
	})
	s := beginSidecar(t, func(c *Config) { c.Server, c.TLSCert, c.TLSKey = "http://"+server, cert, key })
	c, err := tls.Dial("tcp", s.Addr(), &tls.Config{RootCAs: ca.pool(), NextProtos: []string{"http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	<-begun
	c.Close()
	<-ended
	if o := s.lastRecord(t); o.Outcome != classifier.Canceled || o.Error != "client_gone" {
		t.Errorf("record %+v", o)
	}
}

func TestMistakesInFilesOfTLSAreSaidAtTheStart(t *testing.T) {
	cert, key := (*signer)(nil).sign(t, "a.test").files(t, t.TempDir())
	_, other := (*signer)(nil).sign(t, "b.test").files(t, t.TempDir())
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.TLSCert, c.TLSKey = "none.crt", key }, `tls_cert "none.crt" and its key: open none.crt: no such file`},
		{func(c *Config) { c.TLSCert, c.TLSKey = cert, other }, "private key does not match public key"},
		{func(c *Config) { c.TLSCert, c.TLSKey, c.TLSClientCA = cert, key, key }, "holds no certificate"},
		{func(c *Config) { c.Server, c.ServerCA = "https://h", "none.crt" }, "server_ca: open none.crt"},
	} {
		cfg := DefaultConfig()
		cfg.Listen, cfg.Admin = "127.0.0.1:0", "127.0.0.1:0"
		c.change(&cfg)
		if _, err := NewSidecar(t.Context(), cfg, SidecarOptions{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}
