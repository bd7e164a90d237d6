package simulate

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// evaluated returns the most that a GPU of a job allocates in its evaluation, and in its training.
func evaluated(t *testing.T, q job.Request) (evaluation, training ledger.Bytes) {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range classes[0].GPU.Phases {
		switch p.Name {
		case ledger.Evaluation:
			evaluation = max(evaluation, p.PeakAllocated)
		case ledger.Forward, ledger.Backward, ledger.Step:
			training = max(training, p.PeakAllocated)
		}
	}
	return evaluation, training
}

// TestEvaluation holds batches of an evaluation against the Trainer of transformers 5.24 with torch 2.15, on a GPU that
// was not there: 33.166 GiB were allocated in the evaluation behind the first step.
func TestEvaluation(t *testing.T) {
	write := filestest.InNewFolder(t)
	arguments := func(name, more string) job.Request {
		return job.Request{Model: "deepseek-r1-distill-qwen-1.5b", Sequence: 2048, GPU: "H100-80GB", Precision: "bf16",
			Torch: "2.15.0", TrainingArgs: write(name+".yaml", "per_device_train_batch_size: 1\nbf16: true\n"+
				"gradient_checkpointing: true\noptim: adamw_torch_fused\n"+more)}
	}
	const measured = 33.166 * float64(ledger.GiB)
	usual, training := evaluated(t, arguments("usual", "eval_strategy: steps\n"))
	if off := float64(usual)/measured - 1; off < -0.002 || off > 0.002 {
		t.Errorf("batches of 8: %v, which is %.2f %% from what was measured", usual, 100*off)
	}
	if usual < 2*training {
		t.Errorf("batches of 8 take %v, and the training %v", usual, training)
	}
	one, _ := evaluated(t, arguments("one", "eval_strategy: steps\nper_device_eval_batch_size: 1\n"))
	if one > training {
		t.Errorf("batches of 1 take %v, and the training %v", one, training)
	}
	if none, _ := evaluated(t, arguments("none", "")); none != 0 {
		t.Errorf("without a strategy there is an evaluation of %v", none)
	}
	fused, lower := evaluated(t, arguments("liger", "eval_strategy: steps\nper_device_eval_batch_size: 1\n"+
		"use_liger_kernel: true\n"))
	if logits := ledger.Bytes(6 * 2048 * 151936); fused < logits || lower >= training {
		t.Errorf("with Liger's loss an evaluation takes %v, without its logits of %v; the training takes %v", fused,
			logits, lower)
	}
}

// TestEvaluationOfShards tests that an evaluation leaves nothing behind. DeepSpeed alone keeps parameters that its next
// pass uses soon: all of so small a model.
func TestEvaluationOfShards(t *testing.T) {
	write := filestest.InNewFolder(t)
	arguments := write("arguments.yaml", "per_device_train_batch_size: 1\nbf16: true\neval_strategy: epoch\n")
	for name, q := range map[string]job.Request{
		"ZeRO-3": {Shorthand: job.Shorthand{ZeRO: "3"}, Precision: "bf16"},
		"ZeRO-2": {Shorthand: job.Shorthand{ZeRO: "2"}, Precision: "bf16"},
		"FSDP1":  {FSDP: "1"}, "FSDP2": {FSDP: "2"},
	} {
		q.Model, q.Sequence, q.GPU, q.GPUs, q.TrainingArgs = "qwen2.5-0.5b", 512, "A100-40GB", 4, arguments
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		classes, err := Run(j, Limit{})
		if err != nil {
			t.Fatal(err)
		}
		ends := map[ledger.PhaseName]ledger.Bytes{}
		for _, p := range classes[0].GPU.Phases {
			ends[p.Name] = p.EndAllocated
		}
		left := ends[ledger.Step]
		if j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3 {
			left += ledger.Bytes(2*j.Model.Elements()) + 64*ledger.MiB // rounded up to blocks
		}
		if ends[ledger.Evaluation] == 0 || ends[ledger.Evaluation] > left {
			t.Errorf("%s: %v are allocated behind an evaluation, and %v before it", name, ends[ledger.Evaluation],
				ends[ledger.Step])
		}
	}
}
