//go:build !linux

package torchtest

import (
	"errors"
	"testing"
)

// Forks runs Python programs in forks of one interpreter that has imported modules, on Linux.
type Forks struct{}

// Imported skips the test.
func Imported(t testing.TB, _ ...string) *Forks {
	t.Helper()
	t.Skip("Python programs are run in forks of an interpreter on Linux alone")
	return nil
}

// Output is not called.
func (*Forks) Output(...string) ([]byte, error) { return nil, errors.ErrUnsupported }
