//go:build linux

package ghost

import (
	"slices"
	"strconv"
	"testing"

	"plimsoll/ledger"
	"plimsoll/plan"
)

func TestParseVariation(t *testing.T) {
	for text, want := range map[string]Variation{
		"batch=1,2,4": {Name: "batch", Values: []string{"1", "2", "4"}},
		"optim=sgd":   {Name: "optim", Values: []string{"sgd"}},
		"n=1..64":     {Name: "n", Values: []string{"1", "64"}, Range: true},
	} {
		if got, err := ParseVariation(text); err != nil || got.Name != want.Name || got.Range != want.Range ||
			!slices.Equal(got.Values, want.Values) {
			t.Errorf("%s is %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "batch", "=1,2", "batch=", "batch=1,,2", "n=2..1", "n=0..4", "n=a..b", "{n}=1"} {
		if got, err := ParseVariation(text); err == nil {
			t.Errorf("%q is %+v", text, got)
		}
	}
}

// TestBetween looks for the largest value that fits, where memory is a parabola of the value, in steps.
func TestBetween(t *testing.T) {
	const capacity = 1000
	need := func(n int) ledger.Bytes { return ledger.Bytes(10+3*n+n*n/10) / 64 * 64 }
	played := func(n int) Varied {
		o := Varied{Value: strconv.Itoa(n), Verdict: plan.Fits, Devices: []ledger.Device{{Capacity: capacity,
			Interval: ledger.Interval{Upper: need(n)}}}}
		if need(n) > capacity {
			o.Verdict = plan.DoesNotFit
		}
		return o
	}
	for _, ends := range [][2]int{{1, 200}, {1, 87}, {80, 512}} {
		all := []Varied{played(ends[0]), played((ends[0] + ends[1]) / 2), played(ends[1])}
		for {
			value, found := between(all)
			if !found {
				break
			}
			if slices.ContainsFunc(all, func(o Varied) bool { return o.number() == value }) || len(all) > 20 {
				t.Fatalf("%v: plays %d again, or too many: %d", ends, value, len(all))
			}
			all = append(all, played(value))
		}
		largest := 0
		for _, o := range all {
			if o.Verdict == plan.Fits {
				largest = max(largest, o.number())
			}
		}
		want := 0
		for n := ends[0]; n <= ends[1] && need(n) <= capacity; n++ {
			want = n
		}
		if largest != want {
			t.Errorf("%v: %d fits, want %d", ends, largest, want)
		}
	}
	if value, found := between([]Varied{played(500), played(600)}); found {
		t.Errorf("nothing fits, and %d is played", value)
	}
}
