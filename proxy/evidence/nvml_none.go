//go:build !linux || !cgo || !nvml

package evidence

import (
	"context"
	"errors"
)

// NVML is the address of the driver's own library.
const NVML = "nvml"

func askNVML(context.Context, *Collector) (reading, error) {
	return reading{}, errors.New("this build of weir has no NVML in it; use nvidia-smi or a DCGM exporter as the device, or build weir on Linux with CGO_ENABLED=1 and -tags nvml")
}
