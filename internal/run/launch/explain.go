//go:build linux

package launch

import (
	"syscall"

	"plimsoll/internal/machine/host"
)

// explain tells the user what an exit code means, if it has a meaning of its own. kills
// are the counters from before. Signalled means that a signal ended the rank.
func (j *Job) explain(code int, signalled bool, kills []host.MemoryCounter) {
	if why := explain(code, signalled, kills, host.LocalMemoryCounters()); why != "" {
		j.Logf("%s", why)
	}
}

// explain returns the meaning of an exit code that programs rarely choose themselves, or "". A shell returns 137 for a
// child that SIGKILL has ended; no signal has ended the shell.
func explain(code int, signalled bool, before, after []host.MemoryCounter) string {
	switch code {
	case exitSignal + int(syscall.SIGKILL):
		if !signalled {
			return "exit code 137: the program returned it itself, as shells do for a child that SIGKILL ended. " +
				"Of such a child: " + host.ExplainKill(before, after)
		}
		return "exit code 137: " + host.ExplainKill(before, after)
	case exitSignal + int(syscall.SIGSEGV):
		return "exit code 139 (SIGSEGV, a segmentation fault): an error in native code, such as a driver or an " +
			"extension, or a stack that was too small; PYTHONFAULTHANDLER=1 shows where Python was"
	case exitSignal + int(syscall.SIGBUS):
		return "exit code 135 (SIGBUS): the kernel had no page for a mapping; most often /dev/shm or the pool of " +
			"huge pages is full, or the mapped file was made shorter"
	}
	return ""
}
