package engine

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// bindThread binds the calling thread to one CPU and reads the binding back.
func bindThread(cpu int) error {
	set := unix.NewCPUSet(cpu + 1)
	set.Set(cpu)
	if err := unix.SchedSetaffinityDynamic(0, set); err != nil {
		return fmt.Errorf("%w to CPU %d: %w", ErrBinding, cpu, err)
	}
	now := unix.NewCPUSet(max(cpu+1, 8192))
	if err := unix.SchedGetaffinityDynamic(0, now); err != nil {
		return fmt.Errorf("reading the binding of a worker back: %w", err)
	}
	if now.Count() != 1 || !now.IsSet(cpu) {
		return fmt.Errorf("a worker was bound to CPU %d, but may run on %d CPUs", cpu, now.Count())
	}
	return nil
}
