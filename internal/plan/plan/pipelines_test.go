//go:build linux

package plan_test

import (
	"encoding/json"
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/job"
)

// ofRank asks a program of testdata what a rank of several holds, and returns it beside the versions.
func ofRank(t *testing.T, ranks, rank int, program string, asked map[string]any) measured {
	t.Helper()
	text, err := json.MarshalIndent(asked, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return torchtest.Answer[measured](t, onGPU(ranks, rank), "-m", "torch.distributed.run", "--nproc-per-node",
		fmt.Sprint(ranks), "testdata/"+program, filestest.InNewFolder(t)("asked.json", string(text)))
}

// duringStep returns the peak and the end of what pipelines measure as a phase: all passes of a step, its optimizer
// step, or what comes before.
func (h held) duringStep(d *ledger.Device) (peak, end ledger.Bytes) {
	iteration := map[int]ledger.Iteration{0: ledger.Once, 1: ledger.First, 2: ledger.Steady}[h.Step]
	for i := range d.Phases {
		p := &d.Phases[i]
		passes := p.Name == ledger.Forward || p.Name == ledger.Backward
		if p.Iteration != iteration || h.Step > 0 && passes != (h.Phase == "passes") ||
			h.Step == 0 && string(p.Name) != h.Phase {
			continue
		}
		peak, end = max(peak, p.PeakRequested), p.EndRequested
	}
	return peak, end
}

// TestPipelineAgainstPyTorch compares plans of pipeline stages with torch.distributed.pipelining.
func TestPipelineAgainstPyTorch(t *testing.T) {
	for _, c := range []struct {
		schedule                      string
		stages, stage, chunks, micros int
		recompute                     string
		tolerance                     float64 // in percent
	}{
		{"1F1B", 4, 0, 1, 8, "none", 0.6},
		{"1F1B", 4, 1, 1, 8, "full", 0.6},
		{"1F1B", 4, 3, 1, 14, "none", 0.6}, // of which 6 are simulated
		{"GPipe", 4, 3, 1, 4, "none", 0.6},
		// The schedules of several chunks receive some micro batches before they run them.
		{"Interleaved1F1B", 2, 1, 2, 16, "none", 3}, // of which 12 are simulated
		{"LoopedBFS", 2, 0, 2, 4, "none", 0.6},
		// The first of these divides backward passes without recomputation, the last one with it.
		{"InterleavedZeroBubble", 2, 1, 2, 6, "none", 2},
		{"ZBVZeroBubble", 2, 0, 2, 12, "none", 2}, // of which 8 are simulated
		{"DualPipeV", 2, 1, 2, 6, "full", 2},
	} {
		t.Run(fmt.Sprintf("%s of %d, stage %d", c.schedule, c.stages, c.stage), func(t *testing.T) {
			training := training{model: catalogued(t, "smollm2-135m", 5), batch: 1, length: 512,
				request: job.Request{GPUs: c.stages, PipelineParallel: c.stages, PipelineSchedule: c.schedule,
					Accumulation: c.micros, Precision: "bf16", Recompute: c.recompute, Clip: new(float64)}}
			training.model["tie_word_embeddings"] = false
			m := ofRank(t, c.stages, c.stage, "pipeline.py", map[string]any{"config": training.model,
				"chunks": c.chunks, "micros": c.micros, "schedule": c.schedule, "recompute": c.recompute == "full"})
			_, p := training.plan(t, m.Versions)
			for _, h := range m.Trainings[0][1:] {
				peak, _ := h.duringStep(&p.Devices[c.stage])
				if off := apart(peak, h.Peak); math.Abs(off) > c.tolerance {
					t.Errorf("%s of step %d: planned %v, measured %v: %.2f %% off", h.Phase, h.Step, peak.Exact(),
						h.Peak.Exact(), off)
				}
			}
		})
	}
}

// TestPipelineAgainstDeepSpeed compares plans of pipeline stages with DeepSpeed's PipelineEngine.
func TestPipelineAgainstDeepSpeed(t *testing.T) {
	for _, c := range []struct {
		name                 string
		stages, stage, ranks int // ranks are those of a stage
		zero, interval       int
		fp32Gradients, tied  bool
	}{
		{"ZeRO-1, two ranks of the first stage", 2, 0, 2, 1, 0, false, false},
		{"ZeRO-1, the last stage, tied", 2, 1, 1, 1, 0, false, true},
		{"BF16_Optimizer, a stage between", 3, 1, 1, 1, 1, true, false},
		{"without ZeRO", 2, 0, 1, 0, 0, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			settings := map[string]any{"bf16": map[string]any{"enabled": true},
				"zero_optimization": map[string]any{"stage": c.zero, "reduce_bucket_size": 1000000},
				"pipeline": map[string]any{"activation_checkpoint_interval": c.interval,
					"use_reentrant": false},
				"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
				"zero_allow_untested_optimizer": true}
			if c.fp32Gradients {
				settings["data_types"] = map[string]any{"grad_accum_dtype": "fp32"}
			}
			text, err := json.Marshal(settings)
			if err != nil {
				t.Fatal(err)
			}
			world := c.stages * c.ranks
			training := training{model: catalogued(t, "smollm2-135m", 4), batch: 1, length: 64,
				request: job.Request{GPUs: world, PipelineParallel: c.stages, Optimizer: "adamw/foreach",
					DeepSpeed: filestest.InNewFolder(t)("ds_config.json", string(text)), Clip: new(float64)}}
			training.model["tie_word_embeddings"] = c.tied
			m := ofRank(t, world, c.stage*c.ranks, "deepspeed_pipeline.py", map[string]any{"config": training.model,
				"stages": c.stages, "length": training.length, "deepspeed": settings})
			training.request.DeepSpeedVersion = m.Versions["deepspeed"]
			_, p := training.plan(t, m.Versions)
			for _, h := range m.Trainings[0] {
				peak, end := h.duringStep(&p.Devices[c.stage])
				for what, of := range map[string][2]ledger.Bytes{"peak": {peak, h.Peak}, "end": {end, h.End}} {
					if off := apart(of[0], of[1]); math.Abs(off) > 1 {
						t.Errorf("%s of %s of step %d: planned %v, measured %v: %.2f %% off", what, h.Phase, h.Step,
							of[0].Exact(), of[1].Exact(), off)
					}
				}
			}
		})
	}
}
