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

// KernelKills returns the lines of the kernel's log about kills of these processes by the OOM killer, or at the limit
// of these cgroups, after a time of [KernelLogEnd]. It returns nothing where this process may not read the log: with
// kernel.dmesg_restrict the log needs CAP_SYSLOG. In a PID namespace a process has another number in the log, and in a
// namespace of cgroups a cgroup has another name: neither is found.
func KernelKills(pids []int, groups []string, after time.Duration) []string {
	return killsIn(kernelLog(), pids, groups, after)
}

// kernelLog returns the lines of the kernel's log that this process may read.
func kernelLog() []string {
	return strings.Split(strings.TrimSuffix(string(readKernelLog()), "\n"), "\n")
}

var (
	logTime   = regexp.MustCompile(`^<\d+>\[ *(\d+\.\d{6})\]`)
	killBegin = "invoked oom-killer:"
	killOf    = regexp.MustCompile(`Killed process (\d+) \(`)
	// limitOf names the cgroup whose limit was reached: before Linux 4.20 in a sentence.
	limitOf = regexp.MustCompile(`\boom_memcg=([^,]+),|killed as a result of limit of (\S+)`)
)

// mostKillLines bounds what one kill may have in the log: a row for each process of the host.
const mostKillLines = 5000

// killsIn returns the lines of a log from the beginning of each kill of one of the processes, or at the limit of one of
// the cgroups, to its end. A log without times tells nothing, as processes of the past may have had the same numbers.
func killsIn(lines []string, pids []int, groups []string, after time.Duration) []string {
	var found []string
	begin, atLimit := 0, false
	for i, line := range lines {
		if strings.Contains(line, killBegin) {
			begin, atLimit = i, false
		}
		if of := limitOf.FindStringSubmatch(line); of != nil {
			atLimit = slices.Contains(groups, of[1]+of[2])
		}
		kill := killOf.FindStringSubmatch(line)
		if kill == nil {
			continue
		}
		pid, err := strconv.Atoi(kill[1])
		if at := timeOf(line); err == nil && at > after && i-begin <= mostKillLines &&
			(atLimit || slices.Contains(pids, pid)) {
			found = append(found, lines[begin:i+1]...)
		}
		begin, atLimit = i+1, false
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
