//go:build linux && cgo && nvml

package evidence

import (
	"context"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// NVML is the address of the driver's own library.
const NVML = "nvml"

// openNVML loads the library on first use. It stays loaded: the driver comes
// and goes with the machine.
var openNVML = sync.OnceValues(func() (nvml.Interface, error) {
	lib := nvml.New()
	if code := lib.Init(); code != nvml.SUCCESS {
		return nil, fmt.Errorf("NVML cannot be used: %s; weir needs the NVIDIA driver's libnvidia-ml.so.1 (in a container the capability utility), or name DCGM's exporter", nvmlText(lib, code))
	}
	return lib, nil
})

// nvmlText is the library's word for an error, or weir's where there is no
// library to ask.
func nvmlText(lib nvml.Interface, code nvml.Return) string {
	if code == nvml.ERROR_LIBRARY_NOT_FOUND {
		return "the library is not there"
	}
	return lib.ErrorString(code)
}

// askNVML reads all devices that this process may see: the busiest one's share
// and everybody's memory and bytes.
func askNVML(_ context.Context, _ *Collector) (r reading, err error) {
	lib, err := openNVML()
	if err != nil {
		return r, err
	}
	n, code := lib.DeviceGetCount()
	if code != nvml.SUCCESS || n == 0 {
		return r, fmt.Errorf("NVML shows no device: %s", nvmlText(lib, code))
	}
	for i := range n {
		d, code := lib.DeviceGetHandleByIndex(i)
		if code != nvml.SUCCESS {
			return r, fmt.Errorf("NVML device %d: %s", i, nvmlText(lib, code))
		}
		readNVML(d, &r)
	}
	r.server = "NVML"
	return r, nil
}

// readNVML takes what the device tells; vGPUs and some consumer cards tell
// less.
func readNVML(d nvml.Device, r *reading) {
	if u, code := d.GetUtilizationRates(); code == nvml.SUCCESS {
		b := &r.numbers[fBusy]
		b.sum, b.told = max(b.sum, float64(u.Gpu)/100), true
	}
	if m, code := d.GetMemoryInfo(); code == nvml.SUCCESS {
		r.add(fMemory, float64(m.Used), 0)
		r.add(fMemoryTotal, float64(m.Total), 0)
	}
	for _, way := range []nvml.PcieUtilCounter{nvml.PCIE_UTIL_RX_BYTES, nvml.PCIE_UTIL_TX_BYTES} {
		if kb, code := d.GetPcieThroughput(way); code == nvml.SUCCESS { // KB/s, over the last 20 ms
			r.add(fPCIe, float64(kb)*1000, 0)
		}
	}
}
