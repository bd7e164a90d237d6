package simulate

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestRewardModel compares axolotl's training of a reward model with that of a config.json for one label, with micro
// batches of twice as many sequences.
func TestRewardModel(t *testing.T) {
	const sizes = `"vocab_size": 32000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
		"num_attention_heads": 4, "dtype": "bfloat16"}`
	file := filestest.InNewFolder(t)
	llama := file("llama.json", `{"architectures": ["LlamaForCausalLM"], `+sizes)
	const text = "base_model: x\nsequence_len: 512\nattn_implementation: flash_attention_2\ndatasets: []\n" +
		"bf16: true\ngradient_checkpointing: true\nmicro_batch_size: "
	phases := map[string][]ledger.Phase{}
	for name, q := range map[string]job.Request{
		"pairs": {Configs: []string{file("pairs.yaml", text+"2\nreward_model: true\nnum_labels: 1\n")}, Model: llama},
		"rewards": {Configs: []string{file("four.yaml", text+"4\n")}, Model: file("reward.json",
			`{"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, `+sizes)},
		"language model": {Configs: []string{file("six.yaml", text+"4\n")}, Model: llama},
	} {
		q.GPUs, q.GPU = 2, "H100-80GB"
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		classes, err := Run(j, Limit{})
		if err != nil {
			t.Fatal(err)
		}
		phases[name] = classes[0].GPU.Phases
	}
	if diff := cmp.Diff(phases["rewards"], phases["pairs"]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if cmp.Equal(phases["language model"], phases["pairs"]) {
		t.Error("a reward model takes what a language model takes")
	}
}
