package launch

import (
	"syscall"

	"plimsoll/host"
)

// explain tells the user what an exit code means, if it has a meaning of its own. kills
// are the counters from before.
func (j *Job) explain(code int, kills []host.MemoryCounter) {
	if why := explain(code, kills, host.LocalMemoryCounters()); why != "" {
		j.Logf("%s", why)
	}
}

// explain returns the meaning of an exit code that programs do not choose themselves,
// or "".
func explain(code int, before, after []host.MemoryCounter) string {
	switch code {
	case exitSignal + int(syscall.SIGKILL):
		return "exit code 137: " + host.ExplainKill(before, after)
	case exitSignal + int(syscall.SIGSEGV):
		return "exit code 139 (SIGSEGV, a segmentation fault): an error in native code, such as a driver or an " +
			"extension, or a stack that was too small; PYTHONFAULTHANDLER=1 shows where Python was"
	case exitSignal + int(syscall.SIGBUS):
		return "exit code 135 (SIGBUS): the kernel had no memory for a mapped page; most often /dev/shm or the pool " +
			"of huge pages is full"
	}
	return ""
}
