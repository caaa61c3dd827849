//go:build !unix

package ladder

import (
	"runtime"
	"time"
)

// cpuTime is not known here: 0, so that no saturation is claimed.
func cpuTime() time.Duration { return 0 }

func cores() int { return runtime.GOMAXPROCS(0) }
