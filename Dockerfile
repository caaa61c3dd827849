# The container image: one static binary and the CA certificates, nothing else. Builds for any platform of
# `docker buildx build --platform linux/amd64,linux/arm64 .` on the machine's own architecture, without emulation.
FROM --platform=$BUILDPLATFORM golang:1.26.8-bookworm AS build
ARG TARGETOS
ARG TARGETARCH
ARG VERSION=0.1.0-dev
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.linkedVersion=$VERSION" -o /out/weir .

FROM scratch
# For an OTLP backend behind TLS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/weir /weir
USER 65532:65532
EXPOSE 8080 9464
# No HEALTHCHECK: there is no shell or HTTP client here, and a command that only starts would prove nothing about the
# running proxy. Orchestrators ask /healthz and /readyz on the admin port.
ENTRYPOINT ["/weir"]
CMD ["serve"]
