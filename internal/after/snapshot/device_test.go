package snapshot

import (
	"bytes"
	"strings"
	"testing"

	"plimsoll/internal/after/snapshot/snapshottest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
)

func opened(t testing.TB, x snapshottest.Training) (*Device, snapshottest.Totals) {
	t.Helper()
	file, totals := written(t, x, snapshottest.Python4)
	s, err := Read("test.pickle", bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	devices, err := s.Devices()
	if err != nil || len(devices) != 1 {
		t.Fatalf("%d devices, %v", len(devices), err)
	}
	return devices[0], totals
}

func TestPeakOfATrace(t *testing.T) {
	d, totals := opened(t, small)
	if int64(d.Peak.Requested) != totals.PeakAllocated || int64(d.PeakReserved) != totals.PeakReserved ||
		int64(d.Dump.Requested) != totals.Allocated || int64(d.Dump.Reserved) != totals.Reserved {
		t.Errorf("peak %+v, reserved %d, dump %+v, expected %+v", d.Peak, d.PeakReserved, d.Dump, totals)
	}
	if d.Start.Requested != 0 || d.Start.Reserved != 0 || d.Contradictions != 0 {
		t.Errorf("start %+v, %d contradictions, expected none", d.Start, d.Contradictions)
	}
	if at := d.At(d.Peak.Entry); at != d.Peak {
		t.Errorf("forwards %+v, backwards %+v", at, d.Peak)
	}
}

// TestTruncatedTrace cuts the trace at every entry. The peak of the rest and the state before it are exact, because the
// blocks at the dump are.
func TestTruncatedTrace(t *testing.T) {
	full, totals := opened(t, small)
	for last := 1; last < totals.Events; last += 7 {
		x := small
		x.Last = last
		d, _ := opened(t, x)
		cut := full.At(totals.Events - last - 1)
		if d.Start.Requested != cut.Requested || d.Start.Reserved != cut.Reserved || d.Contradictions != 0 {
			t.Fatalf("last %d: start %+v, expected %+v", last, d.Start, cut)
		}
		var sum ledger.Bytes
		for _, h := range d.Holders(d.Peak.Entry) {
			sum += h.Bytes
		}
		if sum != d.Peak.Requested {
			t.Fatalf("last %d: the holders add up to %v, expected %v", last, sum, d.Peak.Requested)
		}
	}
}

func TestComponents(t *testing.T) {
	d, _ := opened(t, small)
	got := map[ledger.Component]ledger.Bytes{}
	for _, h := range ByComponent(d.Holders(d.Peak.Entry)) {
		got[h.Component] = h.Bytes
	}
	t.Log(got)
	var parameters ledger.Bytes
	for layer := range small.Layers {
		parameters += ledger.Bytes(small.Hidden + int64(layer)*4096)
	}
	for component, expected := range map[ledger.Component]ledger.Bytes{ledger.Parameters: parameters,
		ledger.OptimizerStates: 2 * parameters, ledger.LogitsAndLoss: ledger.Bytes(3 * small.Hidden),
		ledger.BackwardPass: 0, ledger.Unattributed: 0} {
		if got[component] != expected {
			t.Errorf("%s: %v, expected %v", component, got[component], expected)
		}
	}
	if got[ledger.Gradients] == 0 || got[ledger.ActivationGradients] == 0 {
		t.Errorf("the backward pass is not told apart: %v", got)
	}
}

// TestFusedSteps: a fused optimizer allocates nothing in its steps. The annotations tell when they began.
func TestFusedSteps(t *testing.T) {
	x := small
	x.Fused = true
	d, _ := opened(t, x)
	gradients := ledger.Bytes(0)
	for _, h := range d.Holders(d.Entries() - 7) { // the last gradients are about to be freed
		if h.Component == ledger.Gradients {
			gradients += h.Bytes
		}
	}
	if expected := ledger.Bytes(3*small.Hidden + 3*4096); gradients != expected {
		t.Errorf("%v of gradients, expected %v", gradients, expected)
	}
}

// TestReplayIsExact replays a whole trace under the settings that it was recorded with. The allocator of the test is
// written for itself and has no code in common with package allocator.
func TestReplayIsExact(t *testing.T) {
	for _, hidden := range []int64{300 << 10, 3 << 20, 7_654_321, 33 << 20} {
		x := small
		x.Hidden, x.EmptyCache = hidden, hidden > 5<<20
		d, totals := opened(t, x)
		c, err := d.snapshot.Configuration()
		if err != nil {
			t.Fatal(err)
		}
		r, err := d.Replay(c, NoEmptyCache)
		if err != nil || int64(r.PeakReserved) != totals.PeakReserved || int64(r.AtDump) != totals.Reserved {
			t.Errorf("hidden %d: %+v %v, expected %+v", hidden, r, err, totals)
		}
	}
}

// TestReplayOfARest replays a trace whose beginning is lost. What was allocated before counts.
func TestReplayOfARest(t *testing.T) {
	x := small
	x.Last = 40
	d, _ := opened(t, x)
	r, err := d.Replay(allocator.Configuration{}, NoEmptyCache)
	if err != nil || r.AtDump < d.Requested || r.PeakReserved < d.Peak.Requested || d.Start.Requested == 0 {
		t.Errorf("%+v %v, expected at least %v", r, err, d.Requested)
	}
}

func TestTimes(t *testing.T) {
	d, totals := opened(t, small)
	last := totals.Events - 1
	for text, expected := range map[string]int{"peak": d.Peak.Entry, "dump": last, "0": 0, "17": 17, "0s": 0, "1ms": 10,
		"1.05ms": 10, "-1ms": last - 10, "2023-11-14T22:13:20.0005Z": 5} {
		if got, err := d.Entry(text); err != nil || got != expected {
			t.Errorf("%s: %d %v, expected %d", text, got, err, expected)
		}
	}
	for _, text := range []string{"", "oom", "-1", "100000", "1h", "-1h", "2023-11-14T22:13:19Z", "soon"} {
		if got, err := d.Entry(text); err == nil {
			t.Errorf("%q: %d, expected an error", text, got)
		}
	}
}

// TestWhyNot: a request did not fit because of its size, its stream or its pool, or the program has freed memory since.
func TestWhyNot(t *testing.T) {
	d, _ := opened(t, small)
	all := d.Fragmentation()
	for _, test := range []struct {
		size     ledger.Bytes
		stream   uint64
		expected string
	}{
		{all.Free + 1, 0, "all free blocks together have"},
		{all.Largest, 0, "the program freed it after the failure"},
		{all.Largest, 7, "belongs to another stream or pool"},
		{all.Largest + 512, 0, "blocks of which the largest has"},
	} {
		stream := d.snapshot.streams.number(&budget{baseBudget}, test.stream)
		if got := d.whyNot(&Event{Size: test.size, stream: stream}); !strings.Contains(got, test.expected) {
			t.Errorf("%v on stream %d: %s, expected %q", test.size, test.stream, got, test.expected)
		}
	}
}
