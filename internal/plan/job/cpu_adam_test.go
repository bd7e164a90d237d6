package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
)

// TestOffloadedOptimizers: accelerate puts DeepSpeed's own optimizers of the CPU in the place of others that DeepSpeed
// offloads, and says so of a training that it makes another. The states of 8-bit optimizers are then in fp32.
func TestOffloadedOptimizers(t *testing.T) {
	for _, c := range []struct {
		optim, device, forced, want string
		says                        bool
	}{
		{"adamw_bnb_8bit", "cpu", "", "adam", true},
		{"adafactor", "cpu", "", "adam", true},
		{"sgd", "cpu", "", "adam", true},
		{"paged_adamw_32bit", "cpu", "", "adamw", false},
		{"lion_32bit", "cpu", "", "lion", false},
		{"adamw_torch_fused", "cpu", "", "adamw", false},
		{"adagrad", "cpu", "", "adagrad", false},
		{"adamw_bnb_8bit", "none", "", "adamw-8bit", false},
		{"adamw_bnb_8bit", "cpu", `"zero_force_ds_cpu_optimizer": false, `, "adamw-8bit", false},
	} {
		file := filestest.InNewFolder(t)
		ds := file("ds.json", `{"bf16": {"enabled": true}, `+c.forced+
			`"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "`+c.device+`"}}}`)
		args := file("args.json", `{"output_dir": "o", "bf16": true, "optim": "`+c.optim+`"}`)
		j, err := Request{Model: "gpt2", Configs: []string{args, ds}}.Resolve()
		if err != nil {
			t.Errorf("%s: %v", c.optim, err)
			continue
		}
		said := strings.Contains(strings.Join(j.Assumptions, "\n"), "in place of "+c.optim)
		if j.Optimizer.Name != c.want || said != c.says {
			t.Errorf("%s on %s, %s: %s, expected %s; %q", c.optim, c.device, c.forced, j.Optimizer.Name, c.want,
				j.Assumptions)
		}
	}
}
