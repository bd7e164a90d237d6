package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestStagesHoldTheModel: the stages of a pipeline have every parameter once.
func TestStagesHoldTheModel(t *testing.T) {
	for _, c := range []struct {
		model, schedule string
		stages          int
	}{{"llama-3-8b", "1F1B", 4}, {"mixtral-8x7b", "GPipe", 8}, {"gpt2", "", 3}, {"qwen3-8b", "Interleaved1F1B", 4},
		{"llama-3-8b", "ZBVZeroBubble", 4}} {
		q := job.Request{Model: c.model, GPUs: c.stages, PipelineParallel: c.stages, PipelineSchedule: c.schedule,
			Accumulation: 8}
		j, err := q.Resolve()
		if c.model == "gpt2" {
			if err == nil || !strings.Contains(err.Error(), "uses its embedding in the head again") {
				t.Errorf("%s: %v", c.model, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		for stage := range int64(c.stages) {
			for _, p := range j.OfStage(stage).Model.Parameters {
				seen[p.Name]++
			}
		}
		for _, p := range j.Model.Parameters {
			if seen[p.Name] != 1 {
				t.Errorf("%s: %d stages have %s", c.model, seen[p.Name], p.Name)
			}
		}
	}
}

// TestStagesKeepFullGradients: FSDP2 keeps the parameters of a stage gathered in bf16, and its full gradients in fp32,
// until the last micro batch.
func TestStagesKeepFullGradients(t *testing.T) {
	j, err := job.Request{Model: "llama-3-8b", GPUs: 8, FSDP: "2", PipelineParallel: 4, Accumulation: 8,
		Precision: "amp-bf16", Modules: "torchtitan", Recompute: "full"}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	for stage := range int64(4) {
		elements := ledger.Bytes(j.OfStage(stage).Model.Elements())
		for i := range p.Devices[stage].Phases {
			phase := &p.Devices[stage].Phases[i]
			if phase.Name != ledger.Backward || phase.Iteration != ledger.Steady {
				continue
			}
			gradients, gathered := heldAtPeak(phase, ledger.Gradients), heldAtPeak(phase, ledger.GatheredParameters)
			if gradients < 4*elements || gradients > 5*elements || gathered != 2*elements {
				t.Errorf("stage %d of %d elements: %d B of gradients, %d B gathered", stage, elements, gradients,
					gathered)
			}
		}
	}
}

// TestWithinFindsTheFullestStage: Within leaves stages of a pipeline out, and none of them holds more than those it
// plans.
func TestWithinFindsTheFullestStage(t *testing.T) {
	for _, schedule := range []string{"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"} {
		for _, stages := range []int{4, 8} {
			request := job.Request{Model: "llama-3-8b", GPUs: stages, GPU: "H100-80GB", FSDP: "2", Sequence: 512,
				PipelineParallel: stages, PipelineSchedule: schedule, Accumulation: 2 * stages, Precision: "amp-bf16"}
			j, err := request.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			whole, err := New(j)
			if err != nil {
				t.Fatal(err)
			}
			part, err := Within(j)
			if err != nil || part == nil {
				t.Fatalf("%s, %d stages: %v, %v", schedule, stages, part, err)
			}
			if got, want := fullest(part), fullest(whole); got != want || len(part.Devices) >= len(whole.Devices) {
				t.Errorf("%s: %d of %d devices were planned, the fullest with %v; of all it is %v", schedule,
					len(part.Devices), len(whole.Devices), got, want)
			}
		}
	}
}

// fullest returns the highest peak of the GPUs.
func fullest(p *Plan) (most ledger.Bytes) {
	for i := range p.Devices {
		if d := &p.Devices[i]; d.Kind == ledger.GPU {
			most = max(most, d.Peak().PeakUsed)
		}
	}
	return most
}

func heldAtPeak(p *ledger.Phase, name ledger.Component) (bytes ledger.Bytes) {
	for _, c := range p.Components {
		if c.Component == name {
			bytes += c.Bytes
		}
	}
	return bytes
}
