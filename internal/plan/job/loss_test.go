package job

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/forward"
)

// TestLossOfReleases tests which loss a model has by the release of transformers. torchtune has a loss of its own.
func TestLossOfReleases(t *testing.T) {
	tune := filestest.InNewFolder(t)("tune.yaml", `model: {_component_: torchtune.models.qwen2.qwen2_0_5b}
tokenizer: {_component_: torchtune.models.qwen2.qwen2_tokenizer, path: vocab.json, max_seq_len: 64}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 0.00002}
loss: {_component_: torch.nn.CrossEntropyLoss}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: model}
batch_size: 2
epochs: 1
gradient_accumulation_steps: 1
enable_activation_checkpointing: False
dtype: bf16
device: cuda
`)
	for _, c := range []struct {
		model, transformers string
		configs             []string
		want                forward.LossKind
	}{
		{"qwen2.5-0.5b", "4.40.0", nil, forward.ShiftLogits},
		{"qwen2.5-0.5b", "4.48.3", nil, forward.ShiftLogits},
		{"qwen2.5-0.5b", "4.49.0", nil, forward.ShiftLabels},
		{"opt-1.3b", "4.48.3", nil, forward.ShiftNarrow},
		{"opt-1.3b", "4.49.0", nil, forward.ShiftLabels},
		{"", "4.48.3", []string{tune}, forward.ShiftLabels},
	} {
		q := Request{Model: c.model, Configs: c.configs, Precision: "bf16", Sequence: 64, Transformers: c.transformers}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if j.Loss != c.want {
			t.Errorf("%+v: loss %d, expected %d", c, j.Loss, c.want)
		}
	}
}
