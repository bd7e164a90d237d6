package host

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// KernelLogEnd returns the time of the last line of the kernel's log, on the clock of the log. Other clocks drift from
// that one. It returns 0 where this process may not read the log.
func KernelLogEnd() time.Duration { return endOf(kernelLog()) }

// KernelKills returns the lines of the kernel's log about kills of these processes by the OOM killer, after a time of
// [KernelLogEnd]. It returns nothing where this process may not read the log: with kernel.dmesg_restrict the log needs
// CAP_SYSLOG. In a PID namespace of its own a process has another number in the log, and is not found.
func KernelKills(pids []int, after time.Duration) []string { return killsIn(kernelLog(), pids, after) }

// kernelLog returns the lines of the kernel's log that this process may read.
func kernelLog() []string {
	return strings.Split(strings.TrimSuffix(string(readKernelLog()), "\n"), "\n")
}

var (
	logTime   = regexp.MustCompile(`^<\d+>\[ *(\d+\.\d{6})\]`)
	killBegin = "invoked oom-killer:"
	killOf    = regexp.MustCompile(`Killed process (\d+) \(`)
)

// mostKillLines bounds what one kill may have in the log: a row for each process of the host.
const mostKillLines = 5000

// killsIn returns the lines of a log from the beginning of each kill of one of the processes to its end. A log without
// times tells nothing, as processes of the past may have had the same numbers.
func killsIn(lines []string, pids []int, after time.Duration) []string {
	var found []string
	begin := 0
	for i, line := range lines {
		if strings.Contains(line, killBegin) {
			begin = i
		}
		groups := killOf.FindStringSubmatch(line)
		if groups == nil {
			continue
		}
		pid, err := strconv.Atoi(groups[1])
		if at := timeOf(line); err == nil && at > after && i-begin <= mostKillLines && slices.Contains(pids, pid) {
			found = append(found, lines[begin:i+1]...)
		}
		begin = i + 1
	}
	return found
}

// timeOf returns the time of a line, or 0 if it has none.
func timeOf(line string) time.Duration {
	groups := logTime.FindStringSubmatch(line)
	if groups == nil {
		return 0
	}
	at, _ := time.ParseDuration(groups[1] + "s") // the pattern has it
	return at
}

// endOf returns the time of the last line of a log that has one, or 0.
func endOf(lines []string) time.Duration {
	for _, line := range slices.Backward(lines) {
		if at := timeOf(line); at > 0 {
			return at
		}
	}
	return 0
}
