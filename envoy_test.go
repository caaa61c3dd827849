package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestWeirEnvoyRunsBesideAnEnvoyAndEndsWithZero(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "weir.sock")
	for _, c := range []struct {
		name, address string
		args          []string
	}{
		{"port", "127.0.0.1:", []string{"envoy", "--envoy-listen=127.0.0.1:0"}},
		{"socket", socket, []string{"envoy", "--envoy-listen", "unix:" + socket, "--envoy-runtime=dry_run", "--envoy-cluster=asr", "--max-concurrency=4"}},
	} {
		p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], append(c.args, "--admin=127.0.0.1:0")...)
		m := p.says(`beside an Envoy" envoy_listen=(\S+) .*page=http://([^/\s]+)/`)
		if !strings.HasPrefix(m[1], c.address) {
			t.Errorf("%s: listens on %s", c.name, m[1])
		}
		if code, body := get(t, "http://"+m[2]+"/api/envoy"); code != 200 || !strings.Contains(body, `"ext_proc"`) {
			t.Errorf("%s: /api/envoy is %d %s", c.name, code, body)
		}
		if code := p.end(syscall.SIGTERM); code != exitOK {
			t.Errorf("%s: exit code %d", c.name, code)
		}
	}
}

func TestServeAndEnvoyInOneProcess(t *testing.T) {
	server, _, _ := slowServer(t)
	p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "serve", "--server", server, "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--envoy-listen=127.0.0.1:0")
	p.says(`in front of the server" listen=127\.0\.0\.1:\d+`)
	p.says(`beside an Envoy" envoy_listen=127\.0\.0\.1:\d+`)
	if code := p.end(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestWeirEnvoyNamesMistakes(t *testing.T) {
	p := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "envoy", "--envoy-runtime=apply")
	p.says(`needs the name of Envoy's cluster; set envoy_cluster`)
	<-p.done
	if code := p.cmd.ProcessState.ExitCode(); code != exitUsage {
		t.Errorf("exit code %d, want %d", code, exitUsage)
	}
	h := begin(t, []string{"WEIR_TEST_MAIN=1"}, os.Args[0], "envoy", "--help")
	h.says(`weir envoy stands beside an Envoy[\s\S]*--envoy-listen`)
	<-h.done
	if code := h.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Errorf("--help: exit code %d", code)
	}
}
