package snapshot

import (
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestTell names the component of one allocation, which no other then changes.
func TestTell(t *testing.T) {
	d, _ := opened(t, small)
	held := d.held(d.Peak.Entry)
	for address, h := range held {
		was := d.component(h)
		if h.entry == before || was == ledger.OptimizerStates {
			continue
		}
		d.Tell([]Known{
			{Component: ledger.OptimizerStates, Device: d.Number, Address: address + 1, Time: d.Peak.Time},
			{Component: ledger.OptimizerStates, Device: d.Number + 1, Address: address, Time: d.Peak.Time},
			{Component: "nonsense", Device: d.Number, Address: address, Time: d.Peak.Time},
		})
		if is := d.component(h); is != was {
			t.Errorf("%x is %s and was %s", address, is, was)
		}
		d.Tell([]Known{{Component: ledger.OptimizerStates, Device: d.Number, Address: address, Time: d.Peak.Time}})
		if is := d.component(h); is != ledger.OptimizerStates {
			t.Errorf("%x is %s and was %s", address, is, was)
		}
		return
	}
	t.Fatal("the trace holds nothing")
}

// TestAssign names an allocation by its address, its size and a time at which it is there.
func TestAssign(t *testing.T) {
	d, _ := opened(t, small)
	for address, h := range d.held(d.Peak.Entry) {
		was := d.component(h)
		if h.entry == before {
			continue
		}
		began := d.event(h.entry).Time
		d.Assign(ledger.MatmulWorkspaces, []Range{
			{address, h.size, began - 1}, {address, h.size + 1, d.Peak.Time}, {address + 1, h.size, d.Peak.Time}})
		if is := d.component(h); is != was {
			t.Errorf("%x is %s and was %s", address, is, was)
		}
		d.Assign(ledger.MatmulWorkspaces, []Range{{address, h.size, d.Peak.Time}})
		if is := d.component(h); is != ledger.MatmulWorkspaces {
			t.Errorf("%x is %s", address, is)
		}
		return
	}
	t.Fatal("the trace holds nothing")
}
