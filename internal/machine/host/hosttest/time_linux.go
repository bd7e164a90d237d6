package hosttest

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time that this process has taken. Other programs affect it less than wall time.
func CPUTime(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
