//go:build !linux

package arena

import (
	"errors"
	"os"

	"plimsoll/internal/base/ledger"
)

// Arenas are files in memory of Linux. Elsewhere there are none: memfd fails, and nothing calls the rest.

func memfd(string, Pages) (*os.File, error)        { return nil, errors.ErrUnsupported }
func fixSize(*os.File) error                       { return errors.ErrUnsupported }
func hasFixedSize(*os.File) (bool, error)          { return false, errors.ErrUnsupported }
func allocate(*os.File, int64) error               { return errors.ErrUnsupported }
func askForHugePages([]byte) error                 { return errors.ErrUnsupported }
func collapse([]byte) error                        { return errors.ErrUnsupported }
func residentBytes(*os.File) (ledger.Bytes, error) { return 0, errors.ErrUnsupported }
func unmap([]byte) error                           { return errors.ErrUnsupported }
func (a *Arena) mapAt(size, behind uintptr) error  { return errors.ErrUnsupported }
