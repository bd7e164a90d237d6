package snapshot

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// fate is what became of an allocation of the backward pass. A gradient stays until the optimizer's step, and a
// gradient of an activation or a temporary does not.
type fate uint8

const (
	undecided fate = iota
	stayed
	ended
)

// judge decides the fates.
func (d *Device) judge() {
	for i := range d.Entries() {
		if e := d.event(i); e.stack > emptyStack {
			d.hasStack = true
			break
		}
	}
	d.fates = make([]fate, d.Entries())
	live, open, steps := maps.Clone(d.initial), map[int]bool{}, d.steps()
	for i := range d.Entries() {
		e := d.event(i)
		class := d.class(e.stack, e.backward)
		began := len(steps) > 0 && e.Time > steps[0]
		if began {
			steps = steps[1:]
		}
		if began || class == ledger.OptimizerTemporaries || class == ledger.OptimizerStates {
			for entry := range open {
				d.fates[entry] = stayed
			}
			clear(open)
		}
		if class == ledger.BackwardPass && e.Action == Alloc {
			open[i] = true
		}
		if h, any := d.apply(i, live); any && open[h.entry] {
			delete(open, h.entry)
			if d.fates[h.entry] = ended; d.class(e.stack, false) == ledger.Gradients { // optimizer.zero_grad
				d.fates[h.entry] = stayed
			}
		}
	}
}

// steps returns when optimizers began their steps, as PyTorch has annotated them.
func (d *Device) steps() []int64 {
	var times []int64
	for _, a := range d.snapshot.Annotations {
		if a.Begins && a.Device == d.Number && strings.HasPrefix(a.Name, "Optimizer.step#") {
			times = append(times, a.Time)
		}
	}
	slices.Sort(times)
	return times
}

// class returns the component of a stack. Autograd's threads have no Python, so an allocation without a Python frame
// belongs to the backward pass where others have some.
func (d *Device) class(stack uint32, backward bool) ledger.Component {
	if backward || stack == emptyStack && d.hasStack {
		return ledger.BackwardPass
	}
	return d.classes.of(stack)
}

// component returns what an allocation is for.
func (d *Device) component(h holding) ledger.Component {
	if h.entry == before {
		return d.class(h.stack, false)
	}
	e := d.event(h.entry)
	if component, known := d.told[h.entry]; known {
		return component
	}
	told := categories[e.category]
	c := d.class(h.stack, e.backward)
	switch {
	case told == ledger.Parameters, told == ledger.OptimizerStates, told == ledger.Batch, told == ledger.Gradients,
		told != "" && c == ledger.Unattributed:
		return told
	case c == ledger.BackwardPass && d.fates[h.entry] == stayed:
		return ledger.Gradients
	case c == ledger.BackwardPass && d.fates[h.entry] == ended:
		return ledger.ActivationGradients
	}
	return c
}

// Holder is memory that one line of the source asked for, for one component.
type Holder struct {
	Component ledger.Component
	Place     string // "file:line function", empty in a sum over places
	Bytes     ledger.Bytes
	Count     int
}

// Holders returns who held memory after an entry, by component and line, the largest first.
func (d *Device) Holders(entry int) []Holder {
	type key struct {
		component ledger.Component
		place     string
	}
	places := map[uint32]string{}
	sums := map[key]*Holder{}
	for _, h := range d.held(entry) {
		place, known := places[h.stack]
		if !known {
			place = d.snapshot.place(h.stack)
			places[h.stack] = place
		}
		k := key{d.component(h), place}
		if sums[k] == nil {
			sums[k] = &Holder{Component: k.component, Place: place}
		}
		sums[k].Bytes += h.size
		sums[k].Count++
	}
	return sortedHolders(sums)
}

// ByComponent adds holders up.
func ByComponent(holders []Holder) []Holder {
	sums := map[ledger.Component]*Holder{}
	for _, h := range holders {
		if sums[h.Component] == nil {
			sums[h.Component] = &Holder{Component: h.Component}
		}
		sums[h.Component].Bytes += h.Bytes
		sums[h.Component].Count += h.Count
	}
	return sortedHolders(sums)
}

func sortedHolders[K comparable](sums map[K]*Holder) []Holder {
	all := []Holder{}
	for _, h := range sums {
		all = append(all, *h)
	}
	slices.SortFunc(all, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Component, b.Component),
			cmp.Compare(a.Place, b.Place))
	})
	return all
}

// Change is what a line of the source holds in one snapshot and in another.
type Change struct {
	Component     ledger.Component
	Place         string
	Before, After ledger.Bytes
}

// Changes compares two lists of holders. The largest difference comes first, and lines without one are left out.
func Changes(older, newer []Holder) []Change {
	type key struct {
		component ledger.Component
		place     string
	}
	sums := map[key]*Change{}
	of := func(h Holder) *Change {
		k := key{h.Component, h.Place}
		if sums[k] == nil {
			sums[k] = &Change{Component: h.Component, Place: h.Place}
		}
		return sums[k]
	}
	for _, h := range older {
		of(h).Before += h.Bytes
	}
	for _, h := range newer {
		of(h).After += h.Bytes
	}
	all := []Change{}
	for _, c := range sums {
		if c.Before != c.After {
			all = append(all, *c)
		}
	}
	slices.SortFunc(all, func(a, b Change) int {
		return cmp.Or(cmp.Compare(b.size(), a.size()), cmp.Compare(a.Component, b.Component),
			cmp.Compare(a.Place, b.Place))
	})
	return all
}

func (c Change) size() ledger.Bytes { return max(c.After-c.Before, c.Before-c.After) }
