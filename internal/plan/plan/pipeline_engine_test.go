package plan

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/job"
)

// TestPipelineAgainstDeepSpeed compares plans of pipeline stages with DeepSpeed's PipelineEngine, which
// scripts/measure/deepspeed_pipeline.py runs on the CPU with a process for each rank.
func TestPipelineAgainstDeepSpeed(t *testing.T) {
	for _, c := range []struct {
		name                    string
		stages, stage, ranks    int
		precision, accumulation string
		zero, layers, interval  int
		tied                    bool
	}{
		{"ZeRO-1, two ranks of the first stage", 2, 0, 2, "bf16", "", 1, 4, 0, false},
		{"ZeRO-1, the last stage, tied", 2, 1, 1, "bf16", "", 1, 4, 0, true},
		{"BF16_Optimizer, a stage between", 3, 1, 1, "bf16", "fp32", 1, 4, 1, false},
		{"without ZeRO", 2, 0, 1, "bf16", "", 0, 4, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			const length, micros = 64, 4
			arguments := fmt.Sprintf("../../../scripts/measure/deepspeed_pipeline.py --config "+
				"../../input/model/catalog/smollm2-135m.json --layers %d --stages %d --stage %d --data %d --micros %d "+
				"--zero %d --precision %s --seq-len %d --interval %d", c.layers, c.stages, c.stage, c.ranks, micros,
				c.zero, c.precision, length, c.interval)
			types := ""
			if c.accumulation != "" {
				arguments += " --accumulation " + c.accumulation
				types = fmt.Sprintf(`, "data_types": {"grad_accum_dtype": %q}`, c.accumulation)
			}
			if !c.tied {
				arguments += " --untied"
			}
			m := torchtest.Answer[measurement](t, imported, strings.Fields(arguments)...)
			config := fmt.Sprintf(`{"%s": {"enabled": true}, "zero_optimization": {"stage": %d, "reduce_bucket_size": `+
				`1000000}, "pipeline": {"activation_checkpoint_interval": %d, "use_reentrant": false}, `+
				`"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": %d%s}`, c.precision, c.zero,
				c.interval, micros, types)
			file := filepath.Join(t.TempDir(), "ds_config.json")
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
			world := c.stages * c.ranks
			planned := trial{config: "smollm2-135m", layers: c.layers, batch: 1, length: length, untied: !c.tied,
				request: job.Request{GPUs: world, PipelineParallel: c.stages, DeepSpeed: file,
					Optimizer: "adamw/foreach", DeepSpeedVersion: m.Versions["deepspeed"], Clip: new(float64)}}.
				plan(t, m.Versions["torch"], m.Versions["transformers"])
			for _, seen := range m.Phases[1:] {
				peak, end := stagePhase(&planned.Devices[c.stage], seen.Step, seen.Phase)
				for _, of := range []struct {
					what              string
					planned, measured ledger.Bytes
				}{{"peak", peak, seen.Peak}, {"end", end, seen.End}} {
					if off := float64(of.planned)/float64(of.measured) - 1; math.Abs(off) > 0.01 {
						t.Errorf("%s of %s of step %d: planned %d, measured %d: %.2f %% off", of.what, seen.Phase,
							seen.Step, of.planned, of.measured, 100*off)
					}
				}
			}
		})
	}
}

// stagePhase returns the peak and the end of what the script measures as a phase: all passes of a step, its optimizer
// step, or what comes before.
func stagePhase(d *ledger.Device, step int, name string) (peak, end ledger.Bytes) {
	iteration := map[int]ledger.Iteration{0: ledger.Once, 1: ledger.First, 2: ledger.Steady}[step]
	for i := range d.Phases {
		p := &d.Phases[i]
		passes := p.Name == ledger.Forward || p.Name == ledger.Backward
		if p.Iteration != iteration || step > 0 && passes != (name == "passes") || step == 0 && string(p.Name) != name {
			continue
		}
		most, last := without(p, ledger.MatmulWorkspaces)
		peak, end = max(peak, most), last
	}
	return peak, end
}
