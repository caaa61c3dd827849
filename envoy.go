package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"weir/proxy"
	"weir/proxy/envoy"
)

const envoyUsage = `weir envoy stands beside an Envoy that is in front of the ASR server.

  weir envoy                              gRPC services on 127.0.0.1:9465
  weir envoy --envoy-listen unix:/run/weir.sock --envoy-admin http://127.0.0.1:9901

Envoy's configuration chooses what it uses of them: its access log (passive),
the external processor (a queue before the server), runtime keys (limits).
deploy/envoy has a configuration for each. weir envoy is weir serve with
--listen=none; weir serve with --envoy-listen does both. The rest is as there:

`

func serveEnvoy(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	if slices.ContainsFunc(args, func(a string) bool { return a == "--help" || a == "-help" || a == "-h" }) {
		fmt.Fprint(stdout, envoyUsage)
	}
	return serve(ctx, append([]string{"--listen=" + proxy.NoListen}, args...), getenv, stdout, stderr)
}

// announce adds what is for an Envoy, and logs where weir stands.
func announce(s *proxy.Sidecar, cfg proxy.Config, logger *slog.Logger) error {
	e, err := envoy.New(s, cfg)
	if err != nil {
		return err
	}
	page := "http://" + s.AdminAddr() + "/"
	if s.Addr() != "" {
		logger.Info("weir is in front of the server", "listen", s.Addr(), "server", cfg.Server, "page", page, "version", version())
	}
	if e != nil {
		logger.Info("weir is beside an Envoy", "envoy_listen", e.Addr(), "envoy_runtime", cfg.EnvoyRuntime, "page", page, "version", version())
	}
	return nil
}
