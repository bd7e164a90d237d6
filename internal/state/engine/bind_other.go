//go:build !linux

package engine

import (
	"errors"
	"fmt"
)

// bindThread fails: Plimsoll binds threads on Linux only.
func bindThread(cpu int) error {
	return fmt.Errorf("%w to CPU %d: %w", ErrBinding, cpu, errors.ErrUnsupported)
}
