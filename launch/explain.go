package launch

import (
	"fmt"
	"os"
	"syscall"

	"plimsoll/host"
)

// readKills are the counts of the kernel's out-of-memory kills.
func readKills() []host.MemoryCounter { return host.MemoryCounters(os.DirFS("/")) }

// explain says what an exit code means that programs do not choose; nothing
// where it means nothing by itself.
func explain(code int, before, after []host.MemoryCounter) string {
	switch code {
	case exitSignal + int(syscall.SIGKILL):
		return "exit code 137: " + explainKill(before, after)
	case exitSignal + int(syscall.SIGSEGV):
		return "exit code 139: a segmentation fault, an error in native code (a driver, an extension) or a stack that was too small; PYTHONFAULTHANDLER=1 shows where Python was"
	case exitSignal + int(syscall.SIGBUS):
		return "exit code 135: memory behind a mapping could not be had (SIGBUS); most often /dev/shm or a pool of huge pages is full"
	}
	return ""
}

// explainKill says whether it was the kernel, and which limit was in the way.
// The group in which a process was killed need not be the one with the limit.
func explainKill(before, after []host.MemoryCounter) string {
	known := map[string]host.MemoryCounter{}
	for _, counter := range before {
		known[counter.Name] = counter
	}
	kills, limit := "", "no limit that can be seen here was in the way, so the host itself was full"
	for i := range after { // from the outermost group, so that the innermost counts
		counter := after[len(after)-1-i]
		was := known[counter.Name]
		if counter.Kills > was.Kills {
			kills = fmt.Sprintf("%s has counted %d more such kills", counter.Name, counter.Kills-was.Kills)
		}
		if counter.Limit > 0 && counter.Reached > was.Reached {
			limit = fmt.Sprintf("the limit of %v of %s was reached", counter.Limit, counter.Group)
		}
	}
	switch {
	case len(after) == 0:
		return "killed by SIGKILL, often by the kernel for want of memory; this host shows no counter of such kills"
	case kills == "":
		return "killed by SIGKILL, but not for want of memory: the kernel counted no such kill; a batch system or a person did it"
	}
	return fmt.Sprintf("the kernel killed it for want of memory (%s); %s", kills, limit)
}
