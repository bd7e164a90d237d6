package snapshot

import (
	"maps"
	"slices"

	"plimsoll/internal/base/ledger"
)

// Span is what a device held in a part of the trace.
type Span struct {
	Peak      int // the entry after which most bytes were requested, -1 before the first
	Requested ledger.Bytes
	Reserved  ledger.Bytes // at most, at any time
	// EndRequested and EndReserved are those at the end.
	EndRequested, EndReserved ledger.Bytes
}

// Spans cuts the trace at times, which are in order, in microseconds since 1970. The first span begins with the trace
// and ends before the first time.
func (d *Device) Spans(times []int64) []Span {
	spans := make([]Span, len(times)+1)
	live, now := maps.Clone(d.initial), d.Start
	now.Requested = 0
	for h := range maps.Values(live) {
		now.Requested += h.size
	}
	at := 0
	begin := func() {
		spans[at] = Span{Peak: now.Entry, Requested: now.Requested, Reserved: now.Reserved,
			EndRequested: now.Requested, EndReserved: now.Reserved}
	}
	begin()
	for i := range d.Entries() {
		e := d.event(i)
		for at < len(times) && e.Time >= times[at] {
			at++
			begin()
		}
		now.Entry = i
		now.Reserved += e.change()
		if e.Action == Alloc {
			now.Requested += e.Size
		}
		if ended, any := d.apply(i, live); any {
			now.Requested -= ended.size
		}
		s := &spans[at]
		if now.Requested > s.Requested {
			s.Peak, s.Requested = i, now.Requested
		}
		s.Reserved = max(s.Reserved, now.Reserved)
		s.EndRequested, s.EndReserved = now.Requested, now.Reserved
	}
	for at < len(times) {
		at++
		begin()
	}
	return slices.Clip(spans)
}
