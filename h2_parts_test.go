//go:build parts

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"encoding/xml"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// interopCases are the cases of grpc-go's interop client that need no
// credentials of a cloud. The three that its server does not pass without
// flags of its own (pick_first_unary and the two of ORCA) are not among them.
var interopCases = []string{
	"empty_unary", "large_unary", "client_streaming", "server_streaming", "ping_pong", "empty_stream",
	"timeout_on_sleeping_server", "cancel_after_begin", "cancel_after_first_response", "status_code_and_message",
	"special_status_message", "custom_metadata", "unimplemented_method", "unimplemented_service", "rpc_soak", "channel_soak",
}

func TestEveryInteropCaseOfGRPCPassesThroughWeir(t *testing.T) {
	bin := filepath.Join(partsFolder(t), "bin")
	host, port := split(t, free(t, 1)[0])
	begin(t, nil, filepath.Join(bin, "grpc-interop-server"), "-port", port)
	eventually(t, 10*time.Second, "the interop server listens", func() bool { return answers(net.JoinHostPort(host, port)) })
	cert, key := certificate(t)
	plain := beginWeir(t, "http://"+net.JoinHostPort(host, port), nil)
	secure := beginWeir(t, "http://"+net.JoinHostPort(host, port), nil, "--tls-cert", cert, "--tls-key", key)
	for name, w := range map[string]struct {
		url   string
		flags []string
	}{"h2c": {plain.url, nil}, "TLS": {secure.url, []string{"-use_tls", "-use_test_ca", "-ca_file", cert, "-server_host_override", "weir.test"}}} {
		for _, one := range interopCases {
			t.Run(name+"/"+one, func(t *testing.T) {
				host, port := split(t, strings.TrimPrefix(w.url, "http://"))
				args := append([]string{"-server_host", host, "-server_port", port, "-test_case", one, "-soak_iterations", "20"}, w.flags...)
				if out, err := exec.Command(filepath.Join(bin, "grpc-interop-client"), args...).CombinedOutput(); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}

// What h2spec finds, and why it stays: by its number, in the words of RFC 7540.
var h2specKnown = map[string]string{
	"http2/3.5/2":     "weir speaks HTTP/1.1 on the same port: a wrong preface is answered 400 in HTTP/1.1 before the connection is closed",
	"http2/6.5.3/1":   "net/http closes the connection when one SETTINGS frame has a setting twice",
	"http2/8.1.2.2/1": "net/http answers 400 where a connection-specific field comes, not RST_STREAM; nothing is forwarded",
	"http2/8.1.2.2/2": "net/http answers 400 where TE is not trailers, not RST_STREAM; nothing is forwarded",
}

func TestH2specFindsNothingNew(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "an answer with a body")
	}))
	t.Cleanup(s.Close)
	cert, key := certificate(t)
	plain := beginWeir(t, s.URL, nil)
	secure := beginWeir(t, s.URL, nil, "--tls-cert", cert, "--tls-key", key)
	t.Run("h2c", func(t *testing.T) { h2spec(t, plain.url, h2specKnown) })
	t.Run("TLS", func(t *testing.T) { h2spec(t, secure.url, h2specKnown, "-t", "-k") })
}

func h2spec(t *testing.T, url string, known map[string]string, flags ...string) {
	host, port := split(t, strings.TrimPrefix(url, "http://"))
	report := filepath.Join(t.TempDir(), "report.xml")
	args := append([]string{"-h", host, "-p", port, "-o", "3", "-j", report}, flags...)
	out, err := exec.Command(filepath.Join(partsFolder(t), "bin", "h2spec"), args...).CombinedOutput() // exits with 1 where anything fails
	text, readErr := os.ReadFile(report)
	if readErr != nil {
		t.Fatalf("%v, %v\n%s", err, readErr, out)
	}
	var result struct {
		Suites []struct {
			Package string `xml:"package,attr"`
			ID      string `xml:"id,attr"`
			Cases   []struct {
				Name    string  `xml:"classname,attr"`
				Failure *string `xml:"failure"`
				Error   *string `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(text, &result); err != nil {
		t.Fatal(err)
	}
	passed := 0
	var failed []string
	for _, suite := range result.Suites {
		for i, one := range suite.Cases {
			id := suite.Package + "/" + string(rune('1'+i))
			if one.Failure == nil && one.Error == nil {
				passed++
				continue
			}
			failed = append(failed, id)
			if known[id] == "" {
				t.Errorf("%s: %s", id, one.Name)
			}
		}
	}
	t.Logf("%d passed, %d failed: %v", passed, len(failed), failed)
	if passed < 130 {
		t.Errorf("only %d cases passed\n%s", passed, out)
	}
}

func split(t *testing.T, address string) (host, port string) {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}

func answers(address string) bool {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// certificate makes one for weir.test and loopback that is its own authority.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"weir.test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for name, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}
