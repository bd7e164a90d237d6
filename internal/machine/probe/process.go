//go:build linux

package probe

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"syscall"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host"
)

// Identity tells a process from a later one that has its PID.
type Identity struct {
	PID       int
	StartTime uint64 // /proc/PID/stat, field 22
}

// stat is what /proc/PID/stat says of a process.
type stat struct {
	Identity
	name    string
	state   byte
	parent  int
	cpu     time.Duration
	threads int
}

// tick is the unit of times in /proc/PID/stat: Linux shows all programs 100 a second, whatever its own clock.
const tick = 10 * time.Millisecond

// hasEnded reports whether the process is a zombie or dead: it has no memory any more.
func (s stat) hasEnded() bool { return s.state == 'Z' || s.state == 'X' || s.state == 'x' }

// parseStat reads the text of /proc/PID/stat. The name may hold spaces and parentheses.
func parseStat(text string) (stat, error) {
	start, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if start < 0 || end < start {
		return stat{}, errors.New("expected the name of a process in parentheses")
	}
	fields := strings.Fields(text[end+1:]) // the first is field 3
	const last = 22
	if len(fields) < last-2 || len(fields[0]) != 1 {
		return stat{}, fmt.Errorf("expected at least %d fields", last)
	}
	s := stat{name: text[start+1 : end], state: fields[0][0]}
	var failed error
	number := func(text string, bits int) int64 {
		n, err := strconv.ParseUint(strings.TrimSpace(text), 10, bits)
		failed = errors.Join(failed, err)
		return int64(n)
	}
	field := func(i int) string { return fields[i-3] }
	s.PID, s.parent = int(number(text[:start], 31)), int(number(field(4), 31))
	s.cpu = time.Duration(number(field(14), 40)+number(field(15), 40)) * tick
	s.threads = int(number(field(20), 31))
	s.StartTime = uint64(number(field(22), 63))
	return s, failed
}

func (s *Sampler) stat(pid int) (stat, error) {
	name := procFile(pid, "stat")
	text, err := fs.ReadFile(s.root, name)
	if err != nil {
		return stat{}, err
	}
	found, err := parseStat(string(text))
	if err == nil && found.PID != pid {
		err = fmt.Errorf("it is about process %d", found.PID)
	}
	if err != nil {
		return stat{}, fmt.Errorf("/%s: %w", name, err)
	}
	return found, nil
}

func procFile(pid int, name string) string { return "proc/" + strconv.Itoa(pid) + "/" + name }

// hasGone reports whether an error says that a process has ended.
func hasGone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// setStatus fills in what /proc/PID/status says. The kernel keeps these numbers, so reading them is cheap at any size
// of the process.
func setStatus(p *samples.Process, text string) error {
	fields := host.ParseFields(text)
	size := func(name string) ledger.Bytes { return ledger.Bytes(fields[name]) }
	resident, ok := fields["VmRSS"]
	if !ok {
		return errNoMemory
	}
	p.Resident = samples.Kinds{
		Anonymous: size("RssAnon"), Shared: size("RssShmem"), File: size("RssFile"), Hugetlb: size("HugetlbPages"),
	}
	p.Locked, p.Pinned, p.Swap = size("VmLck"), size("VmPin"), size("VmSwap")
	p.PageTables, p.Virtual = size("VmPTE"), size("VmSize")
	p.Peak = size("VmHWM")
	p.Threads = int(fields["Threads"])
	if _, ok := fields["RssAnon"]; !ok {
		p.Resident.Anonymous = ledger.Bytes(resident)
		return errNoKinds
	}
	return nil
}

var (
	errNoMemory = errors.New("the process has no memory") // it ends, or it is a thread of the kernel
	errNoKinds  = errors.New("the resident memory has no kinds, as before Linux 4.5; all of it is counted as anonymous")
)

// parseResourceLimits returns the soft limits RLIMIT_AS and RLIMIT_MEMLOCK in the text of /proc/PID/limits; -1 for
// unlimited.
func parseResourceLimits(text string) (addressSpace, locked ledger.Bytes) {
	addressSpace, locked = -1, -1
	for line := range strings.Lines(text) {
		for start, limit := range map[string]*ledger.Bytes{
			"Max address space": &addressSpace, "Max locked memory": &locked,
		} {
			rest, ok := strings.CutPrefix(line, start)
			soft, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
			if n, err := strconv.ParseInt(soft, 10, 64); ok && err == nil && n >= 0 {
				*limit = ledger.Bytes(n)
			}
		}
	}
	return addressSpace, locked
}

// rollup is what the kernel finds when it walks the page tables of a process.
type rollup struct {
	proportional samples.Kinds
	huge, swap   ledger.Bytes // swap counts shared memory, too
}

// parseRollup reads the text of /proc/PID/smaps_rollup.
func parseRollup(text string) (rollup, error) {
	fields := host.ParseFields(text)
	size := func(names ...string) (sum ledger.Bytes) {
		for _, name := range names {
			sum += ledger.Bytes(fields[name])
		}
		return sum
	}
	if _, ok := fields["Rss"]; !ok {
		return rollup{}, errNoMemory
	}
	if _, ok := fields["Pss_Anon"]; !ok {
		return rollup{}, errors.New("this kernel does not divide Pss by kind")
	}
	return rollup{
		proportional: samples.Kinds{
			Anonymous: size("Pss_Anon"), Shared: size("Pss_Shmem"), File: size("Pss_File"),
			Hugetlb: size("Shared_Hugetlb", "Private_Hugetlb"),
		},
		huge: size("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"),
		swap: size("Swap"),
	}, nil
}
