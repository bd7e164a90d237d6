//go:build !linux

package tier

import (
	"errors"

	"plimsoll/internal/base/ledger"
)

// HostDisk is the file systems of this host. A tier needs Linux.
type HostDisk struct{}

var errNoTier = errors.New("a tier on disk needs Linux")

// Create is not supported.
func (HostDisk) Create(string, int64) (File, error) { return nil, errNoTier }

// Open is not supported.
func (HostDisk) Open(string) (File, int64, error) { return nil, 0, errNoTier }

// Rename is not supported.
func (HostDisk) Rename(string, string) error { return errNoTier }

// Remove is not supported.
func (HostDisk) Remove(string) error { return errNoTier }

// SyncFolder is not supported.
func (HostDisk) SyncFolder(string) error { return errNoTier }

// Room is not supported.
func (HostDisk) Room(string) (ledger.Bytes, uint64, error) { return 0, 0, errNoTier }
