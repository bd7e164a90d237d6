package plan

import (
	"encoding/json"
	"fmt"
	"math"
	"os/exec"
	"strings"
	"testing"

	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/optim/optimtest"
)

// TestPipelineAgainstPyTorch compares plans of pipeline stages with torch.distributed.pipelining, which
// scripts/measure/pipeline.py runs on tensors without memory.
func TestPipelineAgainstPyTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Python for half a minute")
	}
	python := optimtest.Python(t)
	for _, c := range []struct {
		schedule                      string
		stages, stage, chunks, micros int
		flags, recompute              string
		tolerance                     float64
	}{
		{"1F1B", 4, 0, 1, 8, "", "none", 0.005},
		{"1F1B", 4, 1, 1, 8, "--gradient-checkpointing", "full", 0.005},
		{"1F1B", 4, 3, 1, 8, "", "none", 0.005},
		{"GPipe", 4, 3, 1, 4, "", "none", 0.005},
		// The schedules of several chunks receive some micro batches before they run them.
		{"Interleaved1F1B", 2, 1, 2, 4, "", "none", 0.015},
		{"LoopedBFS", 2, 0, 2, 4, "", "none", 0.005},
	} {
		t.Run(fmt.Sprintf("%s of %d, stage %d", c.schedule, c.stages, c.stage), func(t *testing.T) {
			t.Parallel()
			const layers, length = 10, 512
			arguments := fmt.Sprintf("../scripts/measure/pipeline.py --config ../model/catalog/smollm2-135m.json "+
				"--untied --layers %d --stages %d --stage %d --chunks %d --micros %d --schedule %s --seq-len %d %s",
				layers, c.stages, c.stage, c.chunks, c.micros, c.schedule, length, c.flags)
			command := exec.Command(python, strings.Fields(arguments)...)
			command.Stderr = new(strings.Builder)
			out, err := command.Output()
			if err != nil {
				t.Fatalf("%v: %v\n%v", command, err, command.Stderr)
			}
			var m measurement
			if err := json.Unmarshal(out, &m); err != nil {
				t.Fatal(err)
			}
			planned := trial{config: "smollm2-135m", layers: layers, batch: 1, length: length, untied: true,
				request: job.Request{GPUs: c.stages, PipelineParallel: c.stages, PipelineSchedule: c.schedule,
					Accumulation: c.micros, Precision: "bf16", Recompute: c.recompute, Clip: new(float64)}}.
				plan(t, m.Versions["torch"], m.Versions["transformers"])
			for _, seen := range m.Phases[1:] {
				iteration := map[int]ledger.Iteration{1: ledger.First, 2: ledger.Steady}[seen.Step]
				var peak ledger.Bytes
				for i := range planned.Devices[c.stage].Phases {
					p := &planned.Devices[c.stage].Phases[i]
					if p.Iteration == iteration && (p.Name == ledger.Step) == (seen.Phase == "step") {
						most, _ := without(p, ledger.MatmulWorkspaces)
						peak = max(peak, most)
					}
				}
				if off := float64(peak)/float64(seen.Peak) - 1; math.Abs(off) > c.tolerance {
					t.Errorf("%s of step %d: planned %v, measured %v: %.2f %% off", seen.Phase, seen.Step, peak,
						seen.Peak, 100*off)
				}
			}
		})
	}
}

// TestStagesHoldTheModel: the stages of a pipeline have every parameter once.
func TestStagesHoldTheModel(t *testing.T) {
	for _, c := range []struct {
		model, schedule string
		stages          int
	}{{"llama-3-8b", "1F1B", 4}, {"mixtral-8x7b", "GPipe", 8}, {"gpt2", "", 3}, {"qwen3-8b", "Interleaved1F1B", 4}} {
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
