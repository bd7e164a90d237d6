package snapshot

import (
	"fmt"

	"plimsoll/internal/base/ledger"
)

// Failure is an allocation that failed.
type Failure struct {
	Moment
	Wanted    ledger.Bytes // rounded by the allocator
	Free      ledger.Bytes // on the device, for everyone
	Place     string
	Component ledger.Component
	// Why says why no free block served it. It is empty if the trace goes on: then the blocks at the dump are others.
	Why string
}

// Failures returns the allocations of the trace that failed.
func (d *Device) Failures() []Failure {
	var all []Failure
	last := before // entry that changed blocks
	for i := range d.Entries() {
		if a := d.event(i).Action; a != OOM && a != noAction && a != otherAction {
			last = i
		}
	}
	for i := range d.Entries() {
		e := d.event(i)
		if e.Action != OOM {
			continue
		}
		f := Failure{Moment: d.At(i), Wanted: e.Size, Free: ledger.Bytes(min(e.Address, mostBytes)),
			Place: d.snapshot.place(e.stack), Component: d.class(e.stack, e.backward)}
		if i > last {
			f.Why = d.whyNot(e)
		}
		all = append(all, f)
	}
	return all
}

// Fragmentation is what of the reserved memory the program does not hold.
type Fragmentation struct {
	Free     ledger.Bytes // in blocks that a request may take
	Blocks   int
	Largest  ledger.Bytes // of these blocks
	Pending  ledger.Bytes // freed, and a stream may still use it
	Rounding ledger.Bytes // blocks of the program beyond its requests
	Unused   ledger.Bytes // in segments that are free as a whole: torch.cuda.empty_cache() returns these
	Private  ledger.Bytes // reserved by private pools, such as those of CUDA graphs
}

// Fragmentation looks at the blocks at the dump.
func (d *Device) Fragmentation() Fragmentation {
	var f Fragmentation
	for _, g := range d.Segments {
		free := ledger.Bytes(0)
		for b := range d.snapshot.Blocks(g) {
			switch b.State {
			case Inactive:
				free += b.Size
				f.Blocks++
				f.Largest = max(f.Largest, b.Size)
			case PendingFree:
				f.Pending += b.Size
			case Allocated:
				f.Rounding += b.Size - b.Requested
			}
		}
		if f.Free += free; free == g.Size {
			f.Unused += free
		}
		if g.Pool != (Pool{}) {
			f.Private += g.Size
		}
	}
	return f
}

// smallRequest is the largest request that the allocator serves from small segments.
const smallRequest = ledger.MiB

// whyNot says why no block at the dump served a request.
func (d *Device) whyNot(e *Event) string {
	all := d.Fragmentation()
	stream := d.snapshot.streams.all
	var usable ledger.Bytes
	for _, g := range d.Segments {
		if g.Large != (e.Size > smallRequest) || len(stream) > 0 && g.Stream != stream[e.stream] || g.Pool != (Pool{}) {
			continue
		}
		for b := range d.snapshot.Blocks(g) {
			if b.State == Inactive {
				usable = max(usable, b.Size)
			}
		}
	}
	switch {
	case all.Free+all.Pending < e.Size:
		return fmt.Sprintf("all free blocks together have %v", all.Free+all.Pending)
	case usable >= e.Size:
		return fmt.Sprintf("a free block of %v is in the dump: the program freed it after the failure", usable)
	case all.Largest >= e.Size:
		return fmt.Sprintf("the largest free block has %v and belongs to another stream or pool; the largest that "+
			"the request may take has %v", all.Largest, usable)
	}
	return fmt.Sprintf("%v are free, in %d blocks of which the largest has %v", all.Free, all.Blocks, all.Largest)
}
