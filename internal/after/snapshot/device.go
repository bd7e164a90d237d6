package snapshot

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// Device is what a snapshot says of one GPU.
type Device struct {
	Number   int
	Segments []*Segment
	// Reserved, Allocated and Requested are at the dump: memory of the driver, blocks of the program, and what the
	// program asked for.
	Reserved, Allocated, Requested ledger.Bytes
	// Start is before the first entry of the trace, Peak when the program held most, and Dump at the end.
	Start, Peak, Dump Moment
	PeakReserved      ledger.Bytes
	// Contradictions counts entries that do not fit the blocks: a free of a block that stays, or two allocations in
	// one place.
	Contradictions int

	snapshot *Snapshot
	trace    rows
	release  Action // the entry that ends an allocation
	initial  map[uint64]holding
	classes  *classifier
	fates    []fate                   // by event, of allocations in the backward pass
	hasStack bool                     // the trace has Python frames
	told     map[int]ledger.Component // by event
}

// Moment is a time of the trace: after an entry.
type Moment struct {
	Entry     int // its number, from 0; -1 before the first
	Time      int64
	Requested ledger.Bytes
	Reserved  ledger.Bytes
}

// holding is an allocation that the program holds.
type holding struct {
	size  ledger.Bytes
	stack uint32
	entry int // that allocated it; before for one that is older than the trace
}

const before = -1

// Devices returns the devices that have segments or a trace, by number.
func (s *Snapshot) Devices() ([]*Device, error) {
	byNumber := map[int]*Device{}
	device := func(n int) *Device {
		if byNumber[n] == nil {
			byNumber[n] = &Device{Number: n, snapshot: s}
		}
		return byNumber[n]
	}
	for i := range s.segments {
		g := &s.segments[i]
		d := device(g.Device)
		d.Segments = append(d.Segments, g)
	}
	for n, trace := range s.traces {
		if trace.first < trace.last {
			device(n).trace = trace
		}
	}
	devices := slices.SortedFunc(maps.Values(byNumber), func(a, b *Device) int {
		return cmp.Compare(a.Number, b.Number)
	})
	classes := newClassifier(s.records)
	for _, d := range devices {
		d.classes = classes
		if err := d.rewind(); err != nil {
			return nil, err
		}
		d.judge()
	}
	return devices, nil
}

// Entries is the number of entries of the trace.
func (d *Device) Entries() int { return int(d.trace.last - d.trace.first) }

func (d *Device) event(i int) *Event { return d.snapshot.events.at(d.trace.first + uint32(i)) }

// change returns the bytes that an entry adds to the memory that the allocator has from the driver.
func (e *Event) change() ledger.Bytes {
	switch e.Action {
	case SegmentAlloc, SegmentMap:
		return e.Size
	case SegmentFree, SegmentUnmap:
		return -e.Size
	}
	return 0
}

// rewind walks the trace backwards from the blocks at the dump. The blocks are exact there, and the trace may have lost
// its first entries: PyTorch keeps the latest max_entries.
func (d *Device) rewind() error {
	live := map[uint64]holding{}
	for _, g := range d.Segments {
		d.Reserved += g.Size
		for b := range d.snapshot.Blocks(g) {
			if b.State == Allocated {
				live[b.Address] = holding{b.Requested, b.stack, before}
				d.Allocated, d.Requested = d.Allocated+b.Size, d.Requested+b.Requested
			}
		}
	}
	d.Dump = Moment{Entry: d.Entries() - 1, Requested: d.Requested, Reserved: d.Reserved}
	d.release = d.releasing()
	now := d.Dump
	d.Peak, d.PeakReserved = now, now.Reserved
	for i := d.Entries() - 1; i >= 0; i-- {
		e := d.event(i)
		now.Entry, now.Time = i, e.Time
		if i == d.Dump.Entry {
			d.Dump.Time, d.Peak.Time = e.Time, e.Time
		}
		if now.Requested > d.Peak.Requested {
			d.Peak = now
		}
		d.PeakReserved = max(d.PeakReserved, now.Reserved)
		d.undo(e, live, &now)
		if max(now.Requested, now.Reserved, -now.Requested, -now.Reserved) > math.MaxInt64/4 {
			return fault.Inputf("the entries of the trace of device %d add up to more than any device has", d.Number)
		}
	}
	now.Entry = before
	d.Start, d.initial = now, live
	if d.Entries() > 0 && now.Requested > d.Peak.Requested {
		d.Peak = now
	}
	return nil
}

// releasing returns the action that ends allocations. PyTorch can leave the requests out of a trace: then an allocation
// of the trace ends without one. The end alone may be that of a request before the first entry.
func (d *Device) releasing() Action {
	inTrace, completed := map[uint64]bool{}, false
	for i := range d.Entries() {
		switch e := d.event(i); e.Action {
		case FreeRequested:
			return FreeRequested
		case Alloc:
			inTrace[e.Address] = true
		case FreeCompleted:
			completed = completed || inTrace[e.Address]
		}
	}
	if completed {
		return FreeCompleted
	}
	return FreeRequested
}

// undo takes an entry back.
func (d *Device) undo(e *Event, live map[uint64]holding, now *Moment) {
	now.Reserved -= e.change()
	h, held := live[e.Address]
	switch {
	case e.Action == Alloc && held:
		delete(live, e.Address)
		now.Requested -= h.size
	case e.Action == Alloc, e.Action == d.release && held:
		d.Contradictions++
	case e.Action == d.release:
		live[e.Address] = holding{e.Size, noStack, before}
		now.Requested += e.Size
	}
}

// apply does what an entry says, and returns the allocation that it ended.
func (d *Device) apply(i int, live map[uint64]holding) (ended holding, any bool) {
	e := d.event(i)
	switch e.Action {
	case Alloc:
		live[e.Address] = holding{e.Size, e.stack, i}
	case d.release:
		ended, any = live[e.Address]
		delete(live, e.Address)
	}
	return ended, any
}

// At returns the moment after an entry.
func (d *Device) At(entry int) Moment {
	m := d.Start
	live := maps.Clone(d.initial)
	for i := 0; i <= entry; i++ {
		e := d.event(i)
		m.Entry, m.Time = i, e.Time
		m.Reserved += e.change()
		d.apply(i, live)
	}
	m.Requested = 0
	for _, h := range live {
		m.Requested += h.size
	}
	return m
}

// held returns the allocations after an entry.
func (d *Device) held(entry int) map[uint64]holding {
	live := maps.Clone(d.initial)
	for i := 0; i <= entry; i++ {
		d.apply(i, live)
	}
	return live
}
