package snapshot

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/plan/allocator"
)

// latest knows every setting of the allocator. Snapshots do not name their version of PyTorch.
var latest = version.Version{Major: 2, Minor: 15}

// ParseSettings reads a value of PYTORCH_CUDA_ALLOC_CONF.
func ParseSettings(text string) (allocator.Configuration, error) {
	return allocator.ParseConfiguration(text, latest)
}

// Configuration returns the settings that the snapshot was recorded under.
func (s *Snapshot) Configuration() (allocator.Configuration, error) {
	c, err := ParseSettings(s.Settings.Configuration)
	if err != nil || !s.Settings.Known {
		return c, err
	}
	c.Expandable, c.MaxSplit, c.GarbageCollection = s.Settings.Expandable, s.Settings.MaxSplit, s.Settings.GarbageAbove
	return c, nil
}

// Replay is what an allocator with other settings would have reserved for the same requests.
type Replay struct {
	PeakReserved ledger.Bytes
	AtPeak       ledger.Bytes // reserved when the program held most
	AtDump       ledger.Bytes
	// Failed is the entry at which the device had too little memory, or -1.
	Failed int
	// Served reports whether the request would have been served that failed in the recorded run.
	Served bool
}

// NotFailed is Replay.Failed of a replay that has served all requests.
const NotFailed = -1

// NoEmptyCache is the time of a replay that empties the cache only where the trace returned memory to the driver.
const NoEmptyCache = -1

// replayed runs the entries of a device through an allocator.
type replayed struct {
	*Device
	cuda    *allocator.CUDA
	blocks  map[uint64]allocator.Block
	reusing Action // the entry after which another request may take the block
	dropped bool   // the last entry returned memory to the driver
}

// Replay runs the trace through an allocator with these settings. Memory that is older than the trace is allocated
// first, in the order of its addresses: how it lay in its segments is not recorded. The cache is emptied where the
// trace returned memory to the driver, and after the entry emptyAt, unless that is NoEmptyCache.
func (d *Device) Replay(c allocator.Configuration, emptyAt int) (Replay, error) {
	r := replayed{Device: d, cuda: allocator.NewCUDA(c, d.Capacity()), blocks: map[uint64]allocator.Block{},
		reusing: FreeCompleted}
	if !d.has(FreeCompleted) {
		r.reusing = FreeRequested
	}
	result := Replay{Failed: NotFailed}
	oldest := slices.SortedFunc(maps.Keys(d.initial), cmp.Compare[uint64])
	streams := d.streams()
	for _, address := range oldest {
		if err := r.allocate(address, d.initial[address].size, streams[address]); err != nil {
			return result, err
		}
	}
	r.mark(&result, before)
	for i := range d.Entries() {
		err := r.step(d.event(i), &result)
		if full := (*allocator.OutOfMemory)(nil); errors.As(err, &full) {
			result.Failed = i
			break
		} else if err != nil {
			return result, err
		}
		if i == emptyAt {
			r.cuda.EmptyCache()
		}
		r.mark(&result, i)
	}
	if r.dropped && result.Failed == NotFailed {
		r.cuda.EmptyCache()
		r.mark(&result, d.Entries()-1)
	}
	return result, nil
}

func (d *Device) has(a Action) bool {
	for i := range d.Entries() {
		if d.event(i).Action == a {
			return true
		}
	}
	return false
}

// mark notes what is reserved after an entry.
func (r *replayed) mark(result *Replay, entry int) {
	reserved := r.cuda.Statistics().Reserved
	result.PeakReserved, result.AtDump = reserved.Peak, reserved.Now
	if entry == r.Peak.Entry {
		result.AtPeak = reserved.Now
	}
}

func (r *replayed) step(e *Event, result *Replay) error {
	released := e.Action == SegmentFree || e.Action == SegmentUnmap
	if r.dropped && !released {
		r.cuda.EmptyCache()
	}
	r.dropped = released
	switch e.Action {
	case Alloc:
		return r.allocate(e.Address, e.Size, int(e.stream))
	case r.reusing:
		b := r.blocks[e.Address]
		delete(r.blocks, e.Address)
		return r.cuda.Free(b)
	case OOM:
		b, err := r.cuda.Allocate(e.Size, int(e.stream))
		if err == nil {
			result.Served = true
			return r.cuda.Free(b)
		}
	}
	return nil
}

func (r *replayed) allocate(address uint64, size ledger.Bytes, stream int) error {
	if err := r.cuda.Free(r.blocks[address]); err != nil { // an entry that ended it is lost
		return err
	}
	b, err := r.cuda.Allocate(size, stream)
	r.blocks[address] = b
	return err
}

// streams returns the streams of the allocations that are older than the trace, by address, as far as the blocks at the
// dump and the entries tell.
func (d *Device) streams() map[uint64]int {
	all := map[uint64]int{}
	for i := d.Entries() - 1; i >= 0; i-- {
		if e := d.event(i); e.Action == d.release {
			all[e.Address] = int(e.stream)
		}
	}
	for _, g := range d.Segments {
		stream := int(d.snapshot.streams.numbers[g.Stream])
		for b := range d.snapshot.Blocks(g) {
			if _, ended := all[b.Address]; !ended {
				all[b.Address] = stream
			}
		}
	}
	return all
}

// Capacity returns the memory that PyTorch could have on the device: what it had reserved, and what was free when an
// allocation failed. It is 0 if none failed, which stands for no limit.
func (d *Device) Capacity() ledger.Bytes {
	reserved, capacity := d.Start.Reserved, ledger.Bytes(0)
	for i := range d.Entries() {
		e := d.event(i)
		reserved += e.change()
		if e.Action == OOM {
			capacity = max(capacity, reserved+ledger.Bytes(min(e.Address, mostBytes)), d.PeakReserved)
		}
	}
	return capacity
}
