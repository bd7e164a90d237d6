package snapshot

import (
	"maps"
	"slices"

	"plimsoll/internal/base/ledger"
)

// Known is what the program itself says of memory: an optimizer names its parameters, gradients and states.
type Known struct {
	Component ledger.Component `json:"component"`
	Device    int              `json:"device"`
	Address   uint64           `json:"address"` // where the memory begins
	Time      int64            `json:"time_us"` // when it was held
}

// shared are components that hold what an optimizer names, among others: a bucket holds gradients. They keep their
// names.
var shared = []ledger.Component{ledger.CommunicationBuckets, ledger.GatheredParameters, ledger.MasterWeights,
	ledger.FullStateDict}

// Tell gives allocations of the trace the components that are known. All is in order of time. Allocations that began
// elsewhere than at the address, or before the trace, stay as they are.
func (d *Device) Tell(all []Known) {
	live := maps.Clone(d.initial)
	next := 0
	for _, k := range all {
		if k.Device != d.Number {
			continue
		}
		for ; next < d.Entries() && d.event(next).Time <= k.Time; next++ {
			d.apply(next, live)
		}
		category := slices.Index(categories, k.Component)
		h, held := live[k.Address]
		if category <= 0 || !held || h.entry == before || slices.Contains(shared, d.component(h)) {
			continue
		}
		d.event(h.entry).category = uint8(category)
	}
}

// Range is memory of a device at a time: an allocation as the program asked for it.
type Range struct {
	Address uint64       `json:"address"`
	Bytes   ledger.Bytes `json:"bytes"`
	Time    int64        `json:"time_us"`
}

// Assign says what allocations are for, which stacks cannot tell: that of a workspace is the line which needed it
// first. All is in order of time.
func (d *Device) Assign(component ledger.Component, all []Range) {
	live := maps.Clone(d.initial)
	next := 0
	d.told = map[int]ledger.Component{}
	for _, r := range all {
		for ; next < d.Entries() && d.event(next).Time <= r.Time; next++ {
			d.apply(next, live)
		}
		if h, held := live[r.Address]; held && h.size == r.Bytes && h.entry != before {
			d.told[h.entry] = component
		}
	}
}
