//go:build linux

package watch

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// localHost returns the machine that this process runs on.
func localHost() samples.Host {
	h := samples.Host{PageSize: ledger.Bytes(os.Getpagesize()), CPUs: runtime.NumCPU()}
	h.Name, _ = os.Hostname()
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		h.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		h.Memory = ledger.Bytes(info.Totalram) * ledger.Bytes(info.Unit)
	}
	return h
}

// OwnLimits returns the limits of this process, which the processes that it starts inherit.
func OwnLimits() *samples.Limits {
	limit := func(resource int) int64 {
		var l unix.Rlimit
		if unix.Getrlimit(resource, &l) != nil || l.Cur > 1<<62 {
			return -1
		}
		return int64(l.Cur)
	}
	return &samples.Limits{AddressSpace: ledger.Bytes(limit(unix.RLIMIT_AS)),
		Locked: ledger.Bytes(limit(unix.RLIMIT_MEMLOCK)), FileSize: ledger.Bytes(limit(unix.RLIMIT_FSIZE)),
		Processes: limit(unix.RLIMIT_NPROC)}
}
