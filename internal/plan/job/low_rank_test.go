package job

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
)

// lowRankMeasured are the bytes of the storages in the state of one matrix behind two steps on the CPU: optimizer,
// rows, columns, type, proj_type, rank and bytes, of galore_torch 1.0 and apollo_torch 1.0.3 with torch 2.15.
const lowRankMeasured = `
galore 96 64 float32 std 8 22528
adafactor 96 64 float32 std 8 16804
apollo 96 64 float32 std 8 8196
apollo-svd 96 64 float32 std 8 22532
galore 96 64 float32 std 100 65536
adafactor 96 64 float32 std 100 17028
apollo 96 64 float32 std 100 102404
apollo-svd 96 64 float32 std 100 65540
galore 96 64 float32 reverse_std 8 28672
adafactor 96 64 float32 reverse_std 8 24868
galore 96 64 float32 right 8 22528
adafactor 96 64 float32 right 8 16804
apollo 96 64 float32 right 8 8196
galore 96 64 float32 left 8 28672
adafactor 96 64 float32 left 8 24868
galore 96 64 float32 full 8 41472
adafactor 96 64 float32 full 8 41028
galore 96 64 bfloat16 std 8 4096
adafactor 96 64 bfloat16 std 8 16804
apollo 96 64 bfloat16 std 8 4098
apollo-svd 96 64 bfloat16 std 8 4098
galore 96 64 bfloat16 std 100 32768
adafactor 96 64 bfloat16 std 100 17028
apollo 96 64 bfloat16 std 100 51202
apollo-svd 96 64 bfloat16 std 100 32770
galore 96 64 bfloat16 reverse_std 8 3584
adafactor 96 64 bfloat16 reverse_std 8 24868
galore 96 64 bfloat16 right 8 4096
adafactor 96 64 bfloat16 right 8 16804
apollo 96 64 bfloat16 right 8 4098
galore 96 64 bfloat16 left 8 3584
adafactor 96 64 bfloat16 left 8 24868
galore 96 64 bfloat16 full 8 2816
adafactor 96 64 bfloat16 full 8 41028
galore 64 96 float32 std 8 22528
adafactor 64 96 float32 std 8 16804
apollo 64 96 float32 std 8 8196
apollo-svd 64 96 float32 std 8 22532
galore 64 96 float32 std 100 65536
adafactor 64 96 float32 std 100 17028
apollo 64 96 float32 std 100 102404
apollo-svd 64 96 float32 std 100 65540
galore 64 96 float32 reverse_std 8 28672
adafactor 64 96 float32 reverse_std 8 24868
galore 64 96 float32 right 8 28672
adafactor 64 96 float32 right 8 24868
galore 64 96 float32 left 8 22528
adafactor 64 96 float32 left 8 16804
apollo 64 96 float32 left 8 8196
galore 64 96 float32 full 8 41472
adafactor 64 96 float32 full 8 41028
galore 64 96 bfloat16 std 8 4096
adafactor 64 96 bfloat16 std 8 16804
apollo 64 96 bfloat16 std 8 4098
apollo-svd 64 96 bfloat16 std 8 4098
galore 64 96 bfloat16 std 100 32768
adafactor 64 96 bfloat16 std 100 17028
apollo 64 96 bfloat16 std 100 51202
apollo-svd 64 96 bfloat16 std 100 32770
galore 64 96 bfloat16 reverse_std 8 3584
adafactor 64 96 bfloat16 reverse_std 8 24868
galore 64 96 bfloat16 right 8 3584
adafactor 64 96 bfloat16 right 8 24868
galore 64 96 bfloat16 left 8 4096
adafactor 64 96 bfloat16 left 8 16804
apollo 64 96 bfloat16 left 8 4098
galore 64 96 bfloat16 full 8 2816
adafactor 64 96 bfloat16 full 8 41028
`

func TestStatesOfLowRank(t *testing.T) {
	count := 0
	for line := range strings.Lines(strings.TrimSpace(lowRankMeasured)) {
		var name, of, projection string
		var rows, columns, rank, want int64
		if _, err := fmt.Sscan(line, &name, &rows, &columns, &of, &projection, &rank, &want); err != nil {
			t.Fatal(err)
		}
		kind := map[string]string{"galore": "galore-adamw", "adafactor": "galore-adafactor", "apollo": "apollo-adamw",
			"apollo-svd": "apollo-adamw"}[name]
		size, _ := dtype.Parse(map[string]string{"float32": "fp32", "bfloat16": "bf16"}[of])
		l := lowRank{kind: kind, targets: map[string]bool{"w": true}, LowRank: &recipe.LowRank{Rank: int(rank),
			Projection: projection, Random: name == "apollo"}}
		got := int64(0)
		for _, s := range l.states(&autograd.Parameter{Name: "w", Elements: rows * columns, Rows: rows, DType: size}) {
			got += s.Bytes
		}
		if count++; got != want {
			t.Errorf("%s: got %d", strings.TrimSpace(line), got)
		}
	}
	if count < 30 {
		t.Errorf("only %d measurements", count)
	}
}

// TestTemporariesOfLowRank compares the temporaries with those that a dispatch mode saw on the CPU. Of singular vectors
// it saw no copy of the matrix and no workspace, which are three matrices in fp32.
func TestTemporariesOfLowRank(t *testing.T) {
	const matrix = 96 * 64
	for _, test := range []struct {
		kind      string
		of        dtype.Type
		random    bool
		back      ledger.Bytes // when the update is in full size again
		projector ledger.Bytes // when the projector is made, 0 for less
	}{
		{"galore-adamw", dtype.F32, false, 80896 - 16384 - 2*3072, 24576 + 16384 + 3072},
		{"galore-adamw", dtype.BF16, false, 33280 - 1024 - 2*1536, 82176 - 12288 - 1024 - 256},
		{"galore-adafactor", dtype.BF16, false, 96676 - 384 - 16384 - 4 - 32, 24576 + 24576 + 16384 + 3072},
		{"apollo-adamw", dtype.F32, true, 66952 - 2048 - 2*3072 - 8, 0},
		{"apollo-adamw", dtype.BF16, true, 33476 - 1024 - 2*1536 - 4, 24576 + 2*2048},
	} {
		l := lowRank{kind: test.kind, targets: map[string]bool{"w": true}, LowRank: &recipe.LowRank{Rank: 8,
			Projection: "std", Random: test.random, ByChannel: test.random}}
		p := &autograd.Parameter{Name: "w", Elements: matrix, Rows: 96, DType: test.of}
		var got [2]ledger.Bytes
		for i, list := range l.updating(p) {
			for _, bytes := range list {
				got[i] += bytes
			}
		}
		if !test.random {
			got[1] -= 3 * 4 * matrix
		}
		if test.projector == 0 {
			got[1] = 0
		}
		if got != [2]ledger.Bytes{test.back, test.projector} {
			t.Errorf("%s in %v: got %v, want %v and %v", test.kind, test.of, got, test.back, test.projector)
		}
	}
}

// tinyLlama has two layers, and heads whose queries and keys Adam-mini finds.
const tinyLlama = `{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
	"intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
	"vocab_size": 320, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu",
	"tie_word_embeddings": false, "torch_dtype": "bfloat16"}`

// TestStatesByName compares the states of a model with the bytes of the storages that the programs' optimizers hold
// behind two steps on the CPU: adam_mini 1.1.1 and badam 1.4 over torch 2.15 and transformers 5.23.
func TestStatesByName(t *testing.T) {
	tied := strings.NewReplacer("LlamaForCausalLM", "Qwen2ForCausalLM", `"llama"`, `"qwen2"`,
		`embeddings": false`, `embeddings": true`).Replace(tinyLlama)
	for _, test := range []struct {
		optimizer, config, precision string
		want                         int64
	}{
		{"adam-mini", tinyLlama, "fp32", 540484}, {"adam-mini", tinyLlama, "bf16", 270242},
		{"adam-mini", tied, "fp32", 459332}, {"adam-mini", tied, "bf16", 229666},
		{"badam", tinyLlama, "bf16", 369700 + 184832 - 9*4}, // without counters of steps
	} {
		file := filestest.InNewFolder(t)("config.json", test.config)
		j, err := Request{Model: file, Optimizer: test.optimizer, Precision: test.precision}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		got := int64(0)
		for _, p := range j.Model.Parameters {
			if p.TiedTo != "" || p.Frozen {
				continue
			}
			for _, s := range j.Optimizer.States(&autograd.Parameter{Name: p.Name, Elements: p.Elements(),
				DType: j.ParameterType}) {
				got += s.Bytes
			}
		}
		if got != test.want {
			t.Errorf("%s in %s: %d bytes, want %d", test.optimizer, test.precision, got, test.want)
		}
	}
}

// TestChosenByFiles reads optimizers as trainers name them.
func TestChosenByFiles(t *testing.T) {
	const factory = "stage: sft\ndo_train: true\noutput_dir: x\ntemplate: llama3\nfinetuning_type: full\n"
	const axolotl = "sequence_len: 512\nmicro_batch_size: 1\ndatasets:\n  - path: x\nbf16: true\n"
	for _, test := range []struct {
		name, text, refused string
		request             Request
		kind                string
		rank, targets       int
		inBackward          bool
	}{
		{name: "LLaMA-Factory's GaLore", text: factory + "use_galore: true\n", kind: "galore-adamw", rank: 16,
			targets: 14},
		{name: "some modules", text: factory + "use_galore: true\ngalore_target: q_proj,mlp\ngalore_rank: 4\n" +
			"galore_layerwise: true\noptim: adamw_8bit\n", kind: "galore-adamw-8bit", rank: 4, targets: 8,
			inBackward: true},
		{name: "LLaMA-Factory's APOLLO", text: factory + "use_apollo: true\n", kind: "apollo-adamw", rank: 16,
			targets: 14},
		{name: "another optimizer", text: factory + "use_apollo: true\noptim: lion_8bit\n",
			refused: "no such optimizer"},
		{name: "the wrong side", text: factory + "use_apollo: true\napollo_proj_type: left\n", refused: "std"},
		{name: "several ranks", text: factory + "use_galore: true\ngalore_layerwise: true\n", request: Request{GPUs: 2},
			refused: "one GPU only"},
		{name: "in the forward pass", text: factory + "use_galore: true\n", request: Request{GPUs: 2, FSDP: "2"},
			refused: "full tensors"},
		{name: "BAdam", text: factory + "use_badam: true\n", kind: "badam"},
		{name: "BAdam on several GPUs", text: factory + "use_badam: true\n", request: Request{GPUs: 2},
			refused: "one GPU only"},
		{name: "BAdam by ratio", text: factory + "use_badam: true\nbadam_mode: ratio\n", refused: "badam_mode"},
		{name: "Adam-mini", text: factory + "use_adam_mini: true\n", kind: "adam-mini"},
		{name: "axolotl's GPTQ", text: axolotl + "gptq: true\n", refused: "add --quantization gptq"},
		{name: "axolotl's GPTQ with a flag", text: axolotl + "gptq: true\nadapter: lora\nlora_r: 8\n" +
			"lora_target_linear: true\n", request: Request{Quantization: "gptq"}, kind: "adamw"},
		{name: "axolotl", text: axolotl + "optimizer: galore_adamw\noptim_args:\n  rank: 32\n" +
			"optim_target_modules:\n  - self_attn\n  - .*up_proj\n", kind: "galore-adamw", rank: 32, targets: 10},
		{name: "axolotl, layer by layer", text: axolotl + "optimizer: apollo_adamw_layerwise\n" +
			"optim_target_modules: all-linear\n", kind: "apollo-adamw", rank: 128, targets: 15, inBackward: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			add := filestest.InNewFolder(t)
			q := test.request
			q.Model = add("config.json", tinyLlama)
			text := "model_name_or_path: x\n" + test.text
			if strings.HasPrefix(test.text, axolotl) {
				text = "base_model: x\n" + test.text
			}
			q.Configs = []string{add("train.yaml", text)}
			j, err := q.Resolve()
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("got %v, want %q", err, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if j.Optimizer.Name != test.kind || j.StepsInBackward != test.inBackward {
				t.Errorf("got %s, in the backward pass: %v", j.Optimizer.Name, j.StepsInBackward)
			}
			if l := j.Optimizer.lowRank; test.rank > 0 && (l.Rank != test.rank || len(l.targets) != test.targets) {
				t.Errorf("got rank %d and %d targets, want %d and %d", l.Rank, len(l.targets), test.rank, test.targets)
			}
		})
	}
}
