//go:build unix

package ladder

import (
	"os/exec"
	"syscall"
)

// ownGroup puts a process and its children into a group, so that they can be
// ended together, and a Ctrl-C at the terminal reaches only weir.
func ownGroup(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func endGroup(c *exec.Cmd, now bool) {
	sig := syscall.SIGTERM
	if now {
		sig = syscall.SIGKILL
	}
	_ = syscall.Kill(-c.Process.Pid, sig)
}
