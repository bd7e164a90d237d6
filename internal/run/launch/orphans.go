//go:build linux

package launch

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
)

// adoptOrphans makes this process, instead of init, the parent of every descendant
// whose parent has ended.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl(PR_SET_CHILD_SUBREAPER): %w", err)
	}
	return nil
}

// endOrphans ends the processes that the ranks started and left behind, which are now
// children of this process. They may take as long as the ranks. It spares one child:
// the optimizer service, if the ranks are restarted.
func endOrphans(patience time.Duration, spared int, logf func(string, ...any)) {
	ended := map[int]bool{}
	for begin := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		left := slices.DeleteFunc(children(os.Getpid()), func(pid int) bool { return pid == spared })
		if len(left) == 0 {
			break
		}
		s := syscall.SIGTERM
		if time.Since(begin) >= patience {
			s = syscall.SIGKILL
		}
		for _, pid := range left {
			if !ended[pid] || s == syscall.SIGKILL {
				_ = syscall.Kill(pid, s)
			}
			ended[pid] = true
			var status syscall.WaitStatus
			_, _ = syscall.Wait4(pid, &status, syscall.WNOHANG, nil)
		}
	}
	if len(ended) > 0 {
		logf("ended %s that the ranks had left behind", ledger.Plural(len(ended), "process"))
	}
}

// children returns the processes with a given parent.
func children(parent int) []int { return processes(parentField, parent) }

// Fields of /proc/PID/stat behind the name.
const (
	parentField = 1
	groupField  = 2
)

// processes returns the processes whose status has a number in a field.
func processes(field, number int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var found []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if statOf(pid, field) == number {
			found = append(found, pid)
		}
	}
	return found
}

// statOf returns a number from the status of a process, or -1 if there is no such
// process.
func statOf(pid, field int) int {
	stat, err := files.ReadKernel("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return -1
	}
	return statField(string(stat), field)
}

// statField returns a number from /proc/PID/stat, or -1 if there is none. The second
// field is a name in parentheses that may hold anything; fields count from behind it.
func statField(stat string, field int) int {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) <= field {
		return -1
	}
	number, err := strconv.Atoi(fields[field])
	if err != nil {
		return -1
	}
	return number
}
