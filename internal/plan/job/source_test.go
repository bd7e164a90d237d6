package job

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
)

// decideUnsloth decides a job of a source that finetunes a model by Unsloth.
func decideUnsloth(t *testing.T, name, loading string) (*Job, error) {
	t.Helper()
	return decideUnslothWith(t, Request{}, name, loading)
}

// decideUnslothWith is decideUnsloth with other settings of the request.
func decideUnslothWith(t *testing.T, q Request, name, loading string) (*Job, error) {
	t.Helper()
	t.Setenv("HF_HOME", t.TempDir())
	path := filestest.InNewFolder(t)("train.py", fmt.Sprintf(`from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("%s"%s)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2)).train()
`, name, loading))
	q.Configs = []string{path}
	return q.Resolve()
}

// TestUnsloth plans Unsloth's models as far as their modules are those of transformers.
func TestUnsloth(t *testing.T) {
	j, err := decideUnsloth(t, "unsloth/Qwen3-8B-unsloth-bnb-4bit", ", max_seq_length=512")
	if err != nil {
		t.Fatal(err)
	}
	if j.Model.Name != "qwen3-8b" || j.Quantization == nil || j.Quantization.Bits != 4 || j.Sequence != 512 ||
		j.OffloadActivations == nil || j.MicroBatch != 2 {
		t.Errorf("got %+v", j)
	}
	if j, err = decideUnsloth(t, "unsloth/Qwen3-8B", ", load_in_4bit=False"); err != nil || j.Quantization != nil ||
		j.Sequence != 2048 {
		t.Errorf("16 bits: %+v, %v", j, err)
	}
	for name, says := range map[string]string{"unsloth/gpt-oss-20b": "quantizes in modules of its own",
		"unsloth/Phi-4": "phi-4 has no module q_proj"} {
		if _, err := decideUnsloth(t, name, ""); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", name, err, says)
		}
	}
}

// TestSequenceLabels gives a model a head with the classes of a sequence, which an adapter trains, too.
func TestSequenceLabels(t *testing.T) {
	path := filestest.InNewFolder(t)("train.sh", "swift sft --model qwen2.5-0.5b --torch_dtype bfloat16 "+
		"--max_length 128 --task_type seq_cls --num_labels 3\n")
	j, err := Request{Configs: []string{path}}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	if j.Model.Architecture != "Qwen2ForSequenceClassification" || j.Model.Network.Head.Outputs != 3 || j.Pairs {
		t.Errorf("%s with %d outputs", j.Model.Architecture, j.Model.Network.Head.Outputs)
	}
}
