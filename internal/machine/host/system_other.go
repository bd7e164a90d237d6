//go:build !linux

package host

import (
	"runtime"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
)

// Affinity refuses: what a process may use is in files that only Linux has.
func Affinity(int) (cpuset.CPUSet, error) {
	return cpuset.New(), fault.Inputf("plimsoll reads the machine under it on Linux only, and this is %s",
		runtime.GOOS).WithHint("record a Linux machine with plimsoll topology --record, and give the file as --fsroot")
}

func readKernelLog() []byte { return nil }
