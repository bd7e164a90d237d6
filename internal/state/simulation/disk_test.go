//go:build linux

package simulation

import (
	"errors"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/tier"
	"plimsoll/internal/state/tier/tiertest"
)

// disk is what is on disks. It outlives processes.
type disk struct{ *tiertest.Disk }

// handle is a disk as one process sees it: every call waits for the scheduler.
type handle struct {
	life passer
	disk *disk
}

// passer lets a call go on, or has it fail.
type passer interface{ pass(c *call) error }

func (h handle) pass(kind kind, what string) error { return h.life.pass(&call{kind: kind, what: what}) }

func (h handle) Create(path string, size int64) (tier.File, error) {
	if err := h.pass(makeFile, path); err != nil {
		return nil, err
	}
	inner, err := h.disk.Create(path, size)
	return opened{inner, h.life}, err
}

func (h handle) Open(path string) (tier.File, int64, error) {
	if err := h.pass(openFile, path); err != nil {
		return nil, 0, err
	}
	inner, size, err := h.disk.Open(path)
	return opened{inner, h.life}, size, err
}

func (h handle) Rename(from, to string) error {
	if err := h.pass(nameFile, to); err != nil {
		return err
	}
	return h.disk.Rename(from, to)
}

func (h handle) Remove(path string) error {
	if err := h.pass(nameFile, path); err != nil {
		return err
	}
	return h.disk.Remove(path)
}

func (h handle) SyncFolder(path string) error {
	if err := h.pass(nameFile, path); err != nil {
		return err
	}
	return h.disk.SyncFolder(path)
}

func (h handle) Room(folder string) (ledger.Bytes, uint64, error) { return h.disk.Room(folder) }

// opened is an open file of a process.
type opened struct {
	tier.File
	life passer
}

func (f opened) ReadAt(p []byte, offset int64) (int, error) {
	switch err := f.life.pass(&call{kind: readFile, what: f.Name(), offset: offset}); {
	case errors.Is(err, errShort):
		return f.File.ReadAt(half(p), offset)
	case err != nil:
		return 0, err
	}
	return f.File.ReadAt(p, offset)
}

func (f opened) WriteAt(p []byte, offset int64) (int, error) {
	apply := func(part float64) {
		whole := min(1, part) * float64(len(p)/tier.Block)
		if p := p[:int(whole)*tier.Block]; len(p) > 0 {
			_, _ = f.File.WriteAt(p, offset)
		}
	}
	switch err := f.life.pass(&call{kind: writeFile, what: f.Name(), offset: offset, apply: apply}); {
	case errors.Is(err, errShort):
		return f.File.WriteAt(half(p), offset)
	case err != nil:
		return 0, err
	}
	return f.File.WriteAt(p, offset)
}

func (f opened) Sync() error {
	if err := f.life.pass(&call{kind: syncFile, what: f.Name()}); err != nil {
		return err
	}
	return f.File.Sync()
}

// half returns the first blocks of a buffer.
func half(p []byte) []byte { return p[:len(p)/2/tier.Block*tier.Block] }
