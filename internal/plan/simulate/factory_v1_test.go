package simulate

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

const trainedLlama = `{"architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 256,
	"intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": false,
	"torch_dtype": "bfloat16"}`

// mostOf returns the most bytes of a component in a phase of the first GPU.
func mostOf(t *testing.T, text string, gpus int, name ledger.PhaseName, component ledger.Component) ledger.Bytes {
	t.Helper()
	file := filestest.InNewFolder(t)
	q := job.Request{Configs: []string{file("train.yaml", text)}, GPUs: gpus, GPU: "H100-80GB",
		Model: file("llama.json", trainedLlama)}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	most := ledger.Bytes(0)
	for _, p := range classes[0].GPU.Phases {
		for _, h := range p.Components {
			if p.Name == name && h.Component == component {
				most = max(most, h.Bytes)
			}
		}
	}
	return most
}

const trainerV1 = "model: x\ntrain_dataset: y\ndist_config: {name: fsdp2}\nflash_attn: flash_attention_2\n" +
	"enable_activation_checkpointing: false\ncutoff_len: 512\n"

// TestFrozenBesideWide holds the shards of frozen parameters in bf16 beside those of trained ones in fp32, as FSDP2
// keeps them (torch 2.15, over gloo), with moments of the trained ones only.
func TestFrozenBesideWide(t *testing.T) {
	const layer = 4*256*256 + 3*256*512 + 2*256
	const outside = 2*1024*256 + 256
	text := trainerV1 + "peft_config: {name: freeze, freeze_trainable_layers: 1}\n"
	if got, want := mostOf(t, text, 2, ledger.Step, ledger.Parameters),
		ledger.Bytes((2*(3*layer+outside)+4*layer)/2); got != want {
		t.Errorf("parameters of %v, want %v", got.Exact(), want.Exact())
	}
	if got, want := mostOf(t, text, 2, ledger.Step, ledger.OptimizerStates), ledger.Bytes(2*4*layer/2); got != want {
		t.Errorf("states of %v, want %v", got.Exact(), want.Exact())
	}
	kept := strings.Replace(text, "layers: 1", "layers: 1, cast_trainable_params_to_fp32: false", 1)
	if got, want := mostOf(t, kept, 2, ledger.Step, ledger.Parameters),
		ledger.Bytes(2*(4*layer+outside)/2); got != want {
		t.Errorf("parameters of %v without the cast, want %v", got.Exact(), want.Exact())
	}
}

// TestUlysses divides a sequence among two ranks. Each of them keeps half of what a rank alone keeps, and the result of
// attention once more: before and behind the exchange.
func TestUlysses(t *testing.T) {
	alone := mostOf(t, trainerV1, 2, ledger.Forward, ledger.AttentionActivations)
	divided := mostOf(t, trainerV1+"cp_size: 2\n", 2, ledger.Forward, ledger.AttentionActivations)
	const copies = 4 * 256 * 256 * 2 // layers, tokens of a rank, hidden size, bf16
	if more := divided - alone/2; more < copies || more > copies*5/4 {
		t.Errorf("attention keeps %v, and %v divided: %v more than half, expected about %v", alone.Exact(),
			divided.Exact(), more.Exact(), ledger.Bytes(copies).Exact())
	}
}
