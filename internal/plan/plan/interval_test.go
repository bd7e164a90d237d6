package plan

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// intervalRequests draws jobs of many kinds.
var intervalRequests = rapid.Custom(func(t *rapid.T) job.Request {
	q := job.Request{Model: "qwen2.5-0.5b", GPU: "H100-80GB", GPUs: rapid.IntRange(1, 3).Draw(t, "gpus"),
		Precision:  rapid.SampledFrom([]string{"fp32", "bf16", "amp-bf16"}).Draw(t, "precision"),
		Attention:  rapid.SampledFrom([]string{"eager", "sdpa"}).Draw(t, "attention"),
		Recompute:  rapid.SampledFrom([]string{"none", "full"}).Draw(t, "recompute"),
		Sequence:   rapid.IntRange(1, 600).Draw(t, "sequence"),
		MicroBatch: rapid.IntRange(1, 3).Draw(t, "batch"),
		Compile:    rapid.Bool().Draw(t, "compile"),
		HostMemory: ledger.TiB,
		Allocator:  rapid.SampledFrom([]string{"", "expandable_segments:True"}).Draw(t, "allocator"),
	}
	if q.GPUs > 1 {
		q.FSDP = rapid.SampledFrom([]string{"", "1", "2"}).Draw(t, "fsdp")
	}
	if q.Sequence > 1 {
		q.UsualSequence = rapid.IntRange(0, q.Sequence).Draw(t, "usual")
	}
	return q
})

// TestInterval: the planned peak of every device is in its interval, whose ends follow from its sources. A larger GPU
// never has a worse verdict, and one that fits has room for the upper end.
func TestInterval(t *testing.T) {
	rank := map[Result]int{DoesNotFit: 0, Tight: 1, Fits: 2}
	rapid.Check(t, func(t *rapid.T) {
		q := intervalRequests.Draw(t, "request")
		q.GPUMemory = 500 * ledger.GiB
		peak := drawnPlan(t, q).Devices[0].Peak().PeakUsed
		worst := 0
		for share := ledger.Bytes(14); share < 32; share += 3 {
			q.GPUMemory = peak * share / 20
			p := drawnPlan(t, q)
			for i := range p.Devices {
				checkInterval(t, &p.Devices[i], p.Verdict)
			}
			if got := rank[p.Verdict.Result]; got < worst {
				t.Fatalf("%v on %v, but not on a smaller GPU", p.Verdict, q.GPUMemory)
			} else {
				worst = got
			}
		}
	})
}

func drawnPlan(t *rapid.T, q job.Request) *Plan {
	j, err := q.Resolve()
	if err != nil {
		t.Skip(err)
	}
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func checkInterval(t *rapid.T, d *ledger.Device, v Verdict) {
	i, peak := d.Interval, d.Peak().PeakUsed
	if i.Lower > peak || peak > i.Upper || i.Confidence != ledger.Confidence || len(i.Sources) == 0 {
		t.Fatalf("%s: %v is not between %v and %v", d.Kind, peak, i.Lower, i.Upper)
	}
	below, above := ledger.Spread(i.Sources)
	if i.Upper-peak > above+1 || peak-i.Lower > max(below, peak) {
		t.Fatalf("%s: %v to %v, but the sources make %v less and %v more", d.Kind, i.Lower, i.Upper, below, above)
	}
	for k, s := range i.Sources {
		if s.Below < 0 || s.Above < 0 || s.Reason == "" || k > 0 && s.Above > i.Sources[k-1].Above {
			t.Fatalf("%+v", i.Sources)
		}
	}
	if v.Result == Fits && i.Upper > d.Capacity {
		t.Fatalf("%s: %+v, but the upper end is %v", d.Kind, v, i.Upper)
	}
}

// TestFragments: planned again with other lengths and another allocator, a job reserves no more than the allocated
// blocks and twice the fragments of the first plan.
func TestFragments(t *testing.T) {
	for _, q := range []job.Request{
		{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 768, MicroBatch: 4, GPUMemory: 200 * ledger.GiB},
		{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 512, MicroBatch: 8, GPUs: 2, FSDP: "1",
			GPUMemory: 200 * ledger.GiB},
	} {
		reserved := map[string]ledger.Bytes{}
		var interval ledger.Interval
		for _, variant := range []struct {
			tokens    int
			allocator string
		}{{0, ""}, {-1, ""}, {1, ""}, {3, ""}, {0, "expandable_segments:True"}} {
			changed := q
			changed.Sequence, changed.Allocator = q.Sequence+variant.tokens, variant.allocator
			j, err := changed.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			p, err := New(j)
			if err != nil {
				t.Fatal(err)
			}
			d := &p.Devices[0]
			last := d.Peak().PeakReserved
			if len(reserved) == 0 {
				interval = p.Spread.Reserved(d.Kind, last, d.Phases)
			}
			reserved[fmt.Sprint(variant)] = last
			if last < interval.Lower || last > interval.Upper {
				t.Errorf("%v reserves %v, outside of %v to %v", variant, last, interval.Lower, interval.Upper)
			}
		}
		t.Logf("%v in %v to %v", reserved, interval.Lower, interval.Upper)
	}
}

// TestSpreadOfStages: a compiled stage keeps one tensor more or fewer in its own blocks only, for each micro batch that
// is under way, and the last stage has the logits.
func TestSpreadOfStages(t *testing.T) {
	q := job.Request{Model: "llama-3-8b", GPU: "H100-80GB", GPUs: 4, Precision: "bf16", Sequence: 1024, Compile: true,
		PipelineParallel: 4, Accumulation: 8}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	for stage := range 4 {
		s := spreadOf(j, simulate.RankClass{First: stage, Ranks: 1})
		blocks := j.Pipeline.Table[stage][0].Layers
		if want := ledger.Bytes(2 * 1024 * 4096 * blocks * int64(4-stage)); s.compiled != want {
			t.Errorf("stage %d of %d blocks: %v, want %v", stage, blocks, s.compiled, want)
		}
		if isLast := stage == 3; isLast != (s.logits > 0) {
			t.Errorf("stage %d: logits of %v", stage, s.logits)
		}
	}
}
