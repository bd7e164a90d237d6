package launch

import (
	"syscall"

	"plimsoll/host"
)

// readKills are the counts of the kernel's out-of-memory kills.
func readKills() []host.OOMKills {
	root, _, err := host.Root("")
	if err != nil {
		return nil
	}
	return host.ReadOOMKills(root)
}

// explain says what an exit code means that programs do not choose.
func explain(say func(string, ...any), code int, before []host.OOMKills) {
	switch code {
	case exitSignal + int(syscall.SIGKILL):
		after := readKills()
		for i, k := range before {
			if i < len(after) && after[i].Count > k.Count {
				say("exit code 137: the kernel killed it for want of memory (%s has counted %d more such kills)", k.Name, after[i].Count-k.Count)
				return
			}
		}
		if len(before) == 0 {
			say("exit code 137: killed by SIGKILL, often by the kernel for want of memory; this host shows no counter of such kills")
			return
		}
		say("exit code 137: killed by SIGKILL, but not for want of memory: the kernel counted no such kill; a batch system or a person did it")
	case exitSignal + int(syscall.SIGSEGV):
		say("exit code 139: a segmentation fault, an error in native code (a driver, an extension) or a stack that was too small; PYTHONFAULTHANDLER=1 shows where Python was")
	}
}
