package plan

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestCopyOfLogits: DDP copies what the model returns, in fp32, where it looks for parameters without a gradient.
func TestCopyOfLogits(t *testing.T) {
	file := filestest.InNewFolder(t)
	held := func(looks bool) (most ledger.Bytes) {
		arguments := file(fmt.Sprintf("%v.json", looks), fmt.Sprintf(
			`{"bf16": true, "ddp_find_unused_parameters": %v, "per_device_train_batch_size": 4}`, looks))
		p := planned(t, job.Request{Model: "gpt2", GPU: "H100-80GB", GPUs: 2, Sequence: 1024, TrainingArgs: arguments})
		for _, phase := range p.Devices[0].Phases {
			if phase.Name == ledger.Forward && phase.Iteration == ledger.Steady {
				for _, c := range phase.Components {
					if c.Component == ledger.LogitsAndLoss {
						most = c.Bytes
					}
				}
			}
		}
		return most
	}
	// What the loss has saved, the fp32 logits that accelerate returns, and DDP's copy of them. Without the copy, most
	// are the logits in bf16 and the two others.
	const logits = 4 * 1024 * 50257 * 4
	without, with := held(false), held(true)
	if with < 3*logits || without < 2*logits || without >= 3*logits {
		t.Errorf("logits and loss hold %v with the copy and %v without, expected three and two times %v", with,
			without, ledger.Bytes(logits))
	}
}
