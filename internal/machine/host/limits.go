package host

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
)

// ThreadLimit bounds the number of threads of a cgroup and all cgroups below it, or of a user. A process counts as
// its threads.
type ThreadLimit struct {
	Name  string `json:"name"` // "cgroup /a/b pids.max"
	Limit int64  `json:"limit"`
	Used  int64  `json:"used"`
}

// ThreadRoom returns how many threads may still be started, and the name of the limit that decides. An empty name
// means no limit.
func (h *Host) ThreadRoom() (room int64, name string) {
	for _, limit := range h.ThreadLimits {
		if left := max(0, limit.Limit-limit.Used); name == "" || left < room {
			room, name = left, limit.Name
		}
	}
	return room, name
}

// Shortage names the limit, other than memory, that forbids so many more threads or a file of that size, in memory or
// on disk; empty for none. Such a limit would end the program after its start.
func (h *Host) Shortage(threads int, file ledger.Bytes) string {
	if room, name := h.ThreadRoom(); name != "" && int64(threads) > room {
		return fmt.Sprintf("%d more threads are needed, but only %d may be started (%s)", threads, room, name)
	}
	if h.FileSize > 0 && file > h.FileSize {
		return fmt.Sprintf("a memory file of %v is needed, but files may have at most %v (ulimit -f, RLIMIT_FSIZE)",
			file,
			h.FileSize)
	}
	return ""
}

// Lines of /proc/self/limits.
const (
	addressSpaceLine = "Max address space"
	fileSizeLine     = "Max file size"
	processesLine    = "Max processes"
)

// resourceLimit returns the soft limit in a line of /proc/self/limits; false means no limit.
func (t tree) resourceLimit(line string) (int64, bool) {
	for text := range strings.Lines(t.text("proc/self/limits")) {
		if rest, ok := strings.CutPrefix(text, line); ok {
			fields := strings.Fields(rest)
			if len(fields) == 0 {
				return 0, false
			}
			n, err := strconv.ParseInt(fields[0], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// addressReserve is the address space to leave free beside the mappings. Placing an arena takes some, and so do the
// Go heap and the thread stacks.
const addressReserve = 512 * ledger.MiB

// addressSpace returns the limit of this process's address space (RLIMIT_AS).
func (t tree) addressSpace() (Limit, bool) {
	limit, limited := t.resourceLimit(addressSpaceLine)
	used := ParseFields(t.text("proc/self/status"))["VmSize"]
	return Limit{
		Name:  "address space: ulimit -v, RLIMIT_AS, of which the program itself needs " + addressReserve.String(),
		Limit: ledger.Bytes(limit),
		Used:  ledger.Bytes(used) + addressReserve,
	}, limited
}

// A process with one of these capabilities is not held to the limit of processes.
const (
	capabilityAdmin    = 21 // CAP_SYS_ADMIN
	capabilityResource = 24 // CAP_SYS_RESOURCE
)

// mayExceedProcesses reports whether the kernel exempts this process from its limit of processes. Root of a user
// namespace, as in a rootless container, is not exempt.
func (t tree) mayExceedProcesses(status map[string]string) bool {
	namespace := strings.Fields(t.text("proc/self/uid_map"))
	if len(namespace) > 0 && !slices.Equal(namespace, []string{"0", "0", "4294967295"}) {
		return false
	}
	effective, _ := strconv.ParseUint(status["CapEff"], 16, 64)
	return effective&(1<<capabilityAdmin|1<<capabilityResource) != 0 || realUser(status) == "0"
}

// userThreads returns the limit of this user's processes and threads (RLIMIT_NPROC). It reads the status of all
// processes, which only a live host has.
func (t tree) userThreads() (ThreadLimit, bool) {
	limit, limited := t.resourceLimit(processesLine)
	status := t.status("self")
	user := realUser(status)
	if !limited || user == "" || t.mayExceedProcesses(status) {
		return ThreadLimit{}, false
	}
	used := int64(0)
	for _, name := range t.names("proc") {
		if name[0] < '0' || name[0] > '9' {
			continue
		}
		if other := t.status(name); realUser(other) == user {
			threads, _ := strconv.ParseInt(other["Threads"], 10, 64)
			used += threads
		}
	}
	return ThreadLimit{
		Name: "ulimit -u, RLIMIT_NPROC, of user " + user, Limit: limit, Used: used,
	}, true
}

// status returns /proc/PID/status.
func (t tree) status(pid string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(t.text(path.Join("proc", pid, "status"))) {
		key, value, _ := strings.Cut(line, ":")
		fields[key] = strings.TrimSpace(value)
	}
	return fields
}

// realUser returns the real id, the first of the four ids of a user.
func realUser(status map[string]string) string {
	user, _, _ := strings.Cut(status["Uid"], "\t")
	return user
}
