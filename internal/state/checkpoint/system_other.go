//go:build !linux

package checkpoint

import (
	"errors"
	"os"

	"plimsoll/internal/base/ledger"
)

// Plimsoll writes checkpoints on Linux only. Elsewhere no file or folder can be locked, so no save begins; what reads
// checkpoints does without the advice to the kernel.

const together, alone, atOnce, directoryOnly, noLink = 0, 0, 0, 0, 0

func flock(*os.File, int) error                          { return errors.ErrUnsupported }
func swap(string, string) error                          { return errors.ErrUnsupported }
func removeFolder(string) error                          { return errors.ErrUnsupported }
func allocate(*os.File, int64) error                     { return errors.ErrUnsupported }
func freeBlocks(*os.File) (block, free int64, err error) { return 0, 0, errors.ErrUnsupported }
func sizeOnDisk(string) ledger.Bytes                     { return 0 }
func readSoon(*os.File, int64, int64)                    {}
func forget(*os.File, int64, int64)                      {}
func startWriting(*os.File, int64, int64) error          { return errors.ErrUnsupported }
func awaitWriting(*os.File, int64, int64) error          { return errors.ErrUnsupported }
