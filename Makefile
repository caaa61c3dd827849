# make test is what .ci/run runs; make help lists the rest.
SHELL    := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo 0.1.0-dev)
FUZZTIME ?= 10s
BENCH    ?= .
BUILDAH  := buildah --storage-driver vfs
PYTHON   := /usr/bin/python3

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0

.PHONY: help build test parts vet unit python helpers manifests rules parts-test bench fuzz demo image image-test lint

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r t d; do printf '%-12s %s\n' "$$t" "$$d"; done

build: ## the static binary, as bin/weir
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.linkedVersion=$(VERSION)' -o bin/weir .

test: parts vet unit python helpers manifests rules parts-test ## everything: install the parts, vet, race tests, tests against real programs

parts: ## install or build the programs that the tests drive
	@deploy/parts

vet: ## go vet, with and without the tests that need parts
	go vet ./...
	go vet -tags parts ./...

unit: vet ## every test that needs no part, as it is and under the race detector, which some cannot bear
	go test ./...
	go test -race ./...

python: parts ## the Python helper's tests
	cd examples/pocketsphinx && $(PYTHON) -m unittest
	cd examples/helpers/python && $(PYTHON) -m unittest

helpers: parts ## the tests of the helpers for other languages
	cd examples/helpers/node && node --test
	cd examples/helpers/cpp && c++ -std=c++11 -Wall -Wextra -Werror -pthread stages_test.cpp -o stages_test.out && ./stages_test.out

# -count=1: Go's test cache does not see files outside of the check's module, and all that it reads lies outside.
manifests: ## strict decoding of what is under deploy/, and that it agrees with weir; UPDATE=1 renews monitoring.yaml
	cd deploy/kubernetes/check && go vet ./... && go test -count=1 ./...

rules: parts ## the alerting rules, their tests, and compose's Prometheus configuration
	promtool check rules --lint=all --lint-fatal deploy/prometheus/weir.rules.yaml
	promtool test rules deploy/prometheus/weir_test.yaml
	sed 's|/etc/prometheus/|$(CURDIR)/deploy/prometheus/|' deploy/prometheus/prometheus.yml | promtool check config /dev/stdin

# Only the tests of the files that carry the tag: the others ran under the race detector already.
parts-test: parts unit ## tests against Prometheus, Jaeger, Chromium, nginx and the real recogniser
	@files=$$(grep -rlE --include='*_test.go' '^//go:build parts$$' .); \
	names=$$(sed -nE 's/^func (Test[A-Za-z0-9_]*)\(.*/\1/p' $$files | grep -v '^TestMain$$' | sort -u | paste -sd '|'); \
	packages=$$(dirname $$files | sort -u); \
	set -x; go test -count=1 -tags parts -run "^($$names)\$$" $$packages

bench: parts ## beside nginx, a ReverseProxy and nothing; then each package's own, BENCH=regexp for some
	go run ./examples/bench
	go test -tags parts -run '^$$' -bench '$(BENCH)' -benchmem ./...

fuzz: ## each fuzz target in turn for FUZZTIME
	@for p in $$(go list ./...); do \
	  for f in $$(go test -list '^Fuzz' "$$p" | grep '^Fuzz' || true); do \
	    echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) "$$p"; \
	  done; \
	done

demo: ## simulated server, weir, load and page, on loopback
	go run . demo

image: ## the container image, with docker
	docker build --build-arg VERSION=$(VERSION) -t weir:$(VERSION) .

image-test: ## build the Dockerfile with buildah and run what it made; needs no registry
	@deploy/parts image
	@BUILDAH="$(BUILDAH)" VERSION="$(VERSION)" deploy/image-test

lint: ## staticcheck and govulncheck, fetched at their pinned versions
	go run $(STATICCHECK) ./...
	go run $(GOVULNCHECK) ./...
