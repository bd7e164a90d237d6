package plan

import (
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// TestVerdictIsPyTorchs: a plan lacks memory where PyTorch's allocator runs out of it under the GPU's capacity, after
// it has freed its cache. A GPU that has what the plan takes of memory is enough.
func TestVerdictIsPyTorchs(t *testing.T) {
	for _, q := range []job.Request{
		{Model: "qwen2.5-0.5b", GPU: "RTX-3060-12GB", Precision: "bf16", Sequence: 512},
		{Model: "qwen2.5-1.5b", GPU: "RTX-4090", Precision: "bf16", Sequence: 1024},
		{Model: "qwen2.5-1.5b", GPU: "RTX-3060-12GB", Precision: "bf16", Sequence: 1024, Recompute: "full",
			Allocator: "expandable_segments:True"},
		{Model: "llama-3-8b", GPU: "A100-40GB", GPUs: 8, Precision: "bf16", Sequence: 4096,
			Shorthand: job.Shorthand{ZeRO: "2", ZeROOffload: []string{"optimizer"}}},
		{Model: "llama-3-8b", GPU: "RTX-4090", GPUs: 8, FSDP: "2", Precision: "amp-bf16", Sequence: 2048},
	} {
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p := planOf(t, j)
		within, err := Within(j)
		if err != nil {
			t.Fatal(err)
		}
		gpu := &p.Devices[0]
		lacks := gpu.Peak().PeakUsed > gpu.Capacity
		if lacks == (within != nil) {
			t.Errorf("%s on %s: %v of %v, though PyTorch's allocator says otherwise", q.Model, q.GPU,
				gpu.Peak().PeakUsed, gpu.Capacity)
		}
		if lacks != (p.Verdict.Lacks() > 0) || lacks != (p.Verdict.Stops != nil) {
			t.Errorf("%s on %s: the verdict is %+v", q.Model, q.GPU, p.Verdict)
		}
		enough := gpu.Peak().PeakUsed + gpu.Peak().PeakUsed/50
		if _, err := newWithin(j, simulate.Limit{Capacity: enough}, simulate.Run); err != nil {
			t.Errorf("%s on %s: %v is not enough, though the plan takes %v: %v", q.Model, q.GPU, enough,
				gpu.Peak().PeakUsed, err)
		}
	}
}

// TestResults: a device fits by the upper end of its interval, and does not fit by the lower end. What is between is
// tight, on either side of the middle.
func TestResults(t *testing.T) {
	const gib = ledger.GiB
	for capacity, want := range map[ledger.Bytes]struct {
		result Result
		lacks  ledger.Bytes
	}{13 * gib: {Fits, 0}, 11 * gib: {Tight, 0}, 9 * gib: {Tight, gib}, 7 * gib: {DoesNotFit, 3 * gib}} {
		v := Judge([]ledger.Device{{Kind: ledger.GPU, Capacity: capacity,
			Phases: []ledger.Phase{{Name: ledger.Load, PeakUsed: 8 * gib},
				{Name: ledger.Backward, PeakUsed: 10 * gib}},
			Interval: ledger.Interval{Lower: 8 * gib, Upper: 12 * gib}}})
		if v.Result != want.result || v.Lacks() != want.lacks {
			t.Errorf("%v: %s, lacks %v, expected %+v", capacity, v.Result, v.Lacks(), want)
		}
		if stops := v.Stops != nil && v.Stops.Name == ledger.Backward; stops != (capacity == 9*gib) {
			t.Errorf("%v: a run stops in %+v", capacity, v.Stops)
		}
	}
}
