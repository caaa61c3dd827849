package evidence

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// SMI is the address of the driver's command line tool, which is there wherever
// a container has the utility capability.
const SMI = "nvidia-smi"

var smiColumns = []string{"utilization.gpu", "memory.used", "memory.total"}

// askSMI runs the tool once. It takes tens of milliseconds of CPU time, and
// nothing of the device's.
func askSMI(ctx context.Context, _ *Collector) (r reading, err error) {
	cmd := exec.CommandContext(ctx, SMI, "--query-gpu="+strings.Join(smiColumns, ","), "--format=csv,noheader,nounits")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return r, fmt.Errorf("there is no %s; in a container the NVIDIA runtime brings it (NVIDIA_DRIVER_CAPABILITIES=utility), or name a DCGM exporter", SMI)
	case errors.As(err, &exit):
		return r, fmt.Errorf("%s failed: %w: %.200s", SMI, err, bytes.TrimSpace(append(out, exit.Stderr...)))
	case err != nil:
		return r, err
	}
	r.server = SMI
	return r, readSMI(out, &r)
}

// readSMI reads one line a device: percent, MiB, MiB. A device that cannot
// tell one of them says [N/A] or [Not Supported].
func readSMI(out []byte, r *reading) error {
	lines, err := csv.NewReader(bytes.NewReader(out)).ReadAll()
	if err != nil || len(lines) == 0 || len(lines[0]) != len(smiColumns) {
		return fmt.Errorf("%s answered %.100q, which is no table of %s", SMI, out, strings.Join(smiColumns, ", "))
	}
	for _, line := range lines {
		for i, f := range []field{fBusy, fMemory, fMemoryTotal} {
			v, err := strconv.ParseFloat(strings.TrimSpace(line[i]), 64)
			if err != nil || !(v >= 0 && v < 1e9) {
				continue
			}
			if f == fBusy {
				b := &r.numbers[fBusy]
				b.sum, b.told = max(b.sum, v/100), true
				continue
			}
			r.add(f, v*mebi, 0)
		}
	}
	return nil
}
