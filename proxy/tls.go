package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// TLSConfig is the part of [Config] that says who proves to whom who he is.
type TLSConfig struct {
	TLSCert     string `yaml:"tls_cert" restart:"yes" group:"TLS" help:"Certificate of weir, with its chain, in PEM: clients then speak TLS to listen, and HTTP/2 where they offer it. Files are read again when they change."`
	TLSKey      string `yaml:"tls_key" restart:"yes" help:"Private key of tls_cert, in PEM."`
	TLSClientCA string `yaml:"tls_client_ca" restart:"yes" help:"Authorities, in PEM, one of which must have signed the certificate that each client then has to show."`

	ServerCA       string `yaml:"server_ca" restart:"yes" help:"Authorities, in PEM, one of which must have signed the certificate of an https server. Default: those of the system."`
	ServerName     string `yaml:"server_name" restart:"yes" help:"Name that an https server is asked for (SNI) and that its certificate must have. Default: the host in server."`
	ServerCert     string `yaml:"server_cert" restart:"yes" help:"Certificate, with its chain, in PEM, that weir shows to an https server."`
	ServerKey      string `yaml:"server_key" restart:"yes" help:"Private key of server_cert, in PEM."`
	ServerInsecure bool   `yaml:"server_insecure" restart:"yes" help:"Take any certificate of the server: whoever is on the way to it can read and change all."`
	ServerProtocol string `yaml:"server_protocol" help:"What requests that came by HTTP/2 are sent to the server by. auto: what an https server chooses; to others gRPC by h2, all else by http1. http1 or h2: that for all. What comes by HTTP/1.1 stays so."`
}

func (l *loader) checkTLS() {
	c := &l.cfg
	l.oneOf("server_protocol", c.ServerProtocol, "auto", "http1", "h2")
	l.together("tls_cert", c.TLSCert, "tls_key", c.TLSKey)
	l.together("server_cert", c.ServerCert, "server_key", c.ServerKey)
	if c.TLSClientCA != "" && c.TLSCert == "" {
		l.fault("tls_client_ca", "value %.200q asks clients for certificates, but they speak no TLS; set tls_cert and tls_key too", c.TLSClientCA)
	}
	if strings.HasPrefix(c.Server, "https://") || l.faulty("server") {
		return
	}
	for _, one := range []struct {
		key string
		set bool
	}{{"server_ca", c.ServerCA != ""}, {"server_name", c.ServerName != ""}, {"server_cert", c.ServerCert != ""}, {"server_insecure", c.ServerInsecure}} {
		if one.set {
			l.fault(one.key, "is for servers that speak TLS, and server %.200q does not; write https://, or leave it out", c.Server)
		}
	}
}

func (l *loader) together(a, one, b, two string) {
	switch {
	case one != "" && two == "":
		l.fault(a, "value %.200q has no key; set %s too", one, b)
	case one == "" && two != "":
		l.fault(b, "value %.200q has no certificate; set %s too", two, a)
	}
}

// listenTLS is the TLS of the listening side; nil if clients speak none.
func (c Config) listenTLS(logger *slog.Logger) (*tls.Config, error) {
	if c.TLSCert == "" {
		return nil, nil
	}
	pair, err := newPair("tls_cert", c.TLSCert, c.TLSKey, logger)
	if err != nil {
		return nil, err
	}
	t := &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair.get(), nil },
	}
	if c.TLSClientCA == "" {
		return t, nil
	}
	roots, err := newRoots("tls_client_ca", c.TLSClientCA, logger)
	if err != nil {
		return nil, err
	}
	t.ClientAuth = tls.RequireAndVerifyClientCert
	t.ClientCAs = roots.get()
	t.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if now := roots.get(); now != t.ClientCAs {
			renewed := t.Clone()
			renewed.ClientCAs = now
			return renewed, nil
		}
		return nil, nil
	}
	return t, nil
}

// serverTLS returns how TLS to the server is made, anew for each connection;
// nil if it speaks none.
func (c Config) serverTLS(logger *slog.Logger) (func() *tls.Config, error) {
	if !strings.HasPrefix(c.Server, "https://") {
		return nil, nil
	}
	_, address := c.ServerAddress()
	host, _, _ := net.SplitHostPort(address)
	base := tls.Config{MinVersion: tls.VersionTLS12, ServerName: cmp.Or(c.ServerName, host), InsecureSkipVerify: c.ServerInsecure}
	roots := func() *x509.CertPool { return nil }
	if c.ServerCA != "" {
		f, err := newRoots("server_ca", c.ServerCA, logger)
		if err != nil {
			return nil, err
		}
		roots = f.get
	}
	if c.ServerCert != "" {
		pair, err := newPair("server_cert", c.ServerCert, c.ServerKey, logger)
		if err != nil {
			return nil, err
		}
		base.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair.get(), nil }
	}
	return func() *tls.Config {
		t := base.Clone()
		t.RootCAs = roots()
		return t
	}, nil
}

func newPair(key, cert, private string, logger *slog.Logger) (*fresh[*tls.Certificate], error) {
	return newFresh(logger, func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(cert, private)
		if err != nil {
			return nil, fmt.Errorf("%s %q and its key: %w; give a certificate and its private key, both in PEM", key, cert, err)
		}
		return &pair, nil
	}, cert, private)
}

func newRoots(key, file string, logger *slog.Logger) (*fresh[*x509.CertPool], error) {
	return newFresh(logger, func() (*x509.CertPool, error) {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("%s: %w; name a file that weir may read", key, err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s %q holds no certificate; give certificates in PEM", key, file)
		}
		return pool, nil
	}, file)
}

// fresh is a value that was read from files and is read again when they
// change. Files that cannot be read, or do not belong together yet, leave the
// old value in force.
type fresh[T any] struct {
	load   func() (T, error)
	files  []string
	logger *slog.Logger

	mu     sync.Mutex
	value  T
	stamps []stamp
	next   time.Time // when to look at the files again
}

type stamp struct {
	modified time.Time
	size     int64
}

// freshPeriod is how often the files of a busy weir are looked at.
const freshPeriod = time.Second

func newFresh[T any](logger *slog.Logger, load func() (T, error), files ...string) (*fresh[T], error) {
	f := &fresh[T]{load: load, files: files, logger: logger}
	f.stamps, f.next = f.look(), time.Now().Add(freshPeriod)
	var err error
	f.value, err = load()
	return f, err
}

func (f *fresh[T]) look() []stamp {
	stamps := make([]stamp, len(f.files))
	for i, name := range f.files {
		if info, err := os.Stat(name); err == nil {
			stamps[i] = stamp{info.ModTime(), info.Size()}
		}
	}
	return stamps
}

func (f *fresh[T]) get() T {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if now.Before(f.next) {
		return f.value
	}
	f.next = now.Add(freshPeriod)
	stamps := f.look()
	if slices.Equal(stamps, f.stamps) {
		return f.value
	}
	f.stamps = stamps
	value, err := f.load()
	if err != nil {
		f.logger.Error("files of TLS have changed and cannot be used; the old ones stay in force", "error", err)
		return f.value
	}
	f.logger.Info("files of TLS have changed and were read again", "files", strings.Join(f.files, ", "))
	f.value = value
	return value
}

// secured puts TLS around a client's connection, where clients speak it.
func (s *Server) secured(nc net.Conn) net.Conn {
	if s.listenTLS == nil {
		return nc
	}
	return tls.Server(&handoff{Conn: nc, closed: make(chan struct{})}, s.listenTLS)
}

// secureServer puts TLS around a new connection to the server.
func (s *Server) secureServer(ctx context.Context, nc net.Conn, protocols ...string) (net.Conn, error) {
	config := s.serverTLS()
	config.NextProtos = protocols
	t := tls.Client(nc, config)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return t, nil
}

// shake does the client's TLS handshake; it tells whether HTTP/2 was agreed
// on. Who speaks plain HTTP is told so in plain HTTP.
func (c *conn) shake(t *tls.Conn) (h2 bool, err error) {
	ctx := context.Background()
	if limit := c.srv.settings().headTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	err = t.HandshakeContext(ctx)
	var plain tls.RecordHeaderError
	if errors.As(err, &plain) && plain.Conn != nil {
		c.client.Conn = t.NetConn()
		c.notTLS()
	}
	if err != nil {
		c.srv.Logger.Debug("a TLS handshake failed", "client", c.addr, "error", err)
	}
	return t.ConnectionState().NegotiatedProtocol == "h2", err
}

func (c *conn) notTLS() {
	c.client.borrowWriter()
	c.req.minor = '1'
	c.reply(fault{status: 400, word: "bad_request", text: "this port speaks TLS; write https://"}, false)
}

// isTLS tells whether bytes that came are a TLS handshake.
func isTLS(first byte) bool { return first == 0x16 }

// rawConn is the connection under TLS, if there is any.
func rawConn(nc net.Conn) net.Conn {
	for {
		switch c := nc.(type) {
		case *tls.Conn:
			nc = c.NetConn()
		case *handoff:
			nc = c.Conn
		default:
			return nc
		}
	}
}

// unreachable says why no connection to the server could be had, as far as
// that can be mended here. No byte that the server sent is part of it.
func unreachable(server string, err error) string {
	var (
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		invalid   x509.CertificateInvalidError
		record    tls.RecordHeaderError
		refused   *net.OpError
	)
	what := "cannot connect to " + server
	switch {
	case errors.As(err, &authority):
		return what + ": its certificate is signed by an authority that weir does not know; name the authority's certificate in server_ca"
	case errors.As(err, &name):
		return what + ": its certificate is for another name; set server_name to a name that it has"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return what + ": its certificate has expired or is not valid yet; renew it"
	case errors.As(err, &invalid):
		return what + ": its certificate cannot be used for a server; make another"
	case errors.As(err, &record):
		return what + ": it does not speak TLS; write http:// in server"
	case errors.As(err, &refused) && refused.Op == "remote error":
		return what + ": it refused the TLS handshake; if it wants a certificate of its clients, set server_cert and server_key"
	}
	return what + "; check that the server runs and listens there"
}

// scheme is what a client's connection speaks: "https", or "" for http.
func (c *conn) scheme() string {
	if _, ok := c.client.Conn.(*tls.Conn); ok {
		return "https"
	}
	return ""
}
