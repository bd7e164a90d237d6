package host

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Actions of syslog(2).
const (
	readWholeLog = 3
	sizeOfLog    = 10
)

// KernelClock is the time on the clock of the kernel's log.
func KernelClock() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// KernelKills returns the lines of the kernel's log about kills of these processes by the OOM killer, from a time of
// [KernelClock] on. It returns nothing where this process may not read the log: with kernel.dmesg_restrict the log
// needs CAP_SYSLOG. In a PID namespace of its own a process has another number in the log, and is not found.
func KernelKills(pids []int, since time.Duration) []string {
	size, err := unix.Klogctl(sizeOfLog, nil)
	if err != nil || size <= 0 {
		return nil
	}
	log := make([]byte, size)
	n, err := unix.Klogctl(readWholeLog, log)
	if err != nil {
		return nil
	}
	return killsIn(string(log[:n]), pids, since)
}

var (
	logTime   = regexp.MustCompile(`^<\d+>\[ *(\d+)\.(\d{6})\]`)
	killBegin = "invoked oom-killer:"
	killOf    = regexp.MustCompile(`Killed process (\d+) \(`)
)

// mostKillLines bounds what one kill may have in the log: a row for each process of the host.
const mostKillLines = 5000

// killsIn returns the lines of a log from the beginning of each kill of one of the processes to its end. A log without
// times tells nothing, as processes of the past may have had the same numbers.
func killsIn(log string, pids []int, since time.Duration) []string {
	lines := strings.Split(strings.TrimSuffix(log, "\n"), "\n")
	var found []string
	begin := 0
	for i, line := range lines {
		if strings.Contains(line, killBegin) {
			begin = i
		}
		groups := killOf.FindStringSubmatch(line)
		if groups == nil || i-begin > mostKillLines || !isSince(line, since) {
			continue
		}
		if pid, err := strconv.Atoi(groups[1]); err == nil && slices.Contains(pids, pid) {
			found = append(found, lines[begin:i+1]...)
		}
		begin = i + 1
	}
	return found
}

func isSince(line string, since time.Duration) bool {
	groups := logTime.FindStringSubmatch(line)
	if groups == nil {
		return false
	}
	seconds, err := strconv.ParseInt(groups[1], 10, 64)
	return err == nil && time.Duration(seconds+1)*time.Second >= since
}
