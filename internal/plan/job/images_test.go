package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/forward"
)

const multimodal = "../../input/model/testdata/multimodal/"

func TestImages(t *testing.T) {
	none, two, many := 0, 2, 100
	for _, test := range []struct {
		name, file string
		request    Request
		want       forward.Images
		refused    string
	}{
		{name: "by default", file: "qwen2.5-vl",
			want: forward.Images{Count: 3, Height: 1036, Width: 1036, Tokens: 3 * 1369}},
		{name: "rounded", file: "qwen2-vl", request: Request{Images: &two, ImageSize: "100x290"},
			want: forward.Images{Count: 6, Height: 112, Width: 280, Tokens: 240}},
		{name: "scaled down", file: "mistral3", request: Request{ImageSize: "1400x700"},
			want: forward.Images{Count: 3, Height: 140, Width: 84, Tokens: 45}},
		{name: "of one size", file: "llava", want: forward.Images{Count: 3, Height: 112, Width: 112, Tokens: 192}},
		{name: "cut into tiles", file: "llava-next", request: Request{ImageSize: "50x80"}, // 16 and 8 rows of 6 and 1
			want: forward.Images{Count: 3 * 3, Height: 56, Width: 56, Tokens: 3 * (16 + 4*7)}},
		{name: "scaled down, cut into tiles", file: "llava-onevision", request: Request{ImageSize: "180x400"},
			want: forward.Images{Count: 3 * 19, Height: 56, Width: 56, Tokens: 3 * 149}},
		{name: "several are not cut", file: "llava-onevision", request: Request{Images: &two, ImageSize: "180x400"},
			want: forward.Images{Count: 6, Height: 56, Width: 56, Tokens: 6 * 17}},
		{name: "none", file: "llava", request: Request{Images: &none}},
		{name: "of another size", file: "gemma3-vision", request: Request{ImageSize: "896x896"},
			refused: "reads images of 112 x 112 pixels"},
		{name: "too many", file: "qwen3-vl", request: Request{Images: &many, ImageSize: "1024x1024"},
			refused: "tokens of a sequence"},
		{name: "no size", file: "qwen3-vl", request: Request{ImageSize: "large"}, refused: `--image-size is "large"`},
		{name: "frozen", file: "qwen3-vl", request: Request{Freeze: model.PartNames()}, refused: "every part"},
		{name: "unknown part", file: "qwen3-vl", request: Request{Freeze: []string{"tower"}}, refused: `"tower"`},
		{name: "tokens only", file: "../variants/llama-biased", request: Request{Images: &two}, refused: "reads none"},
		{name: "context parallel", file: "llava", request: Request{GPUs: 2, ContextParallel: 2},
			refused: "context parallelism"},
	} {
		t.Run(test.name, func(t *testing.T) {
			q := test.request
			q.Model, q.MicroBatch, q.Sequence, q.Precision = multimodal+test.file+".json", 3, 4096, "bf16"
			j, err := q.Resolve()
			switch {
			case test.refused != "":
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("got %v, want %q", err, test.refused)
				}
			case err != nil:
				t.Error(err)
			case j.Images != test.want:
				t.Errorf("got %+v, want %+v", j.Images, test.want)
			}
		})
	}
}

// TestPartsOfFrameworks counts the modules that frameworks adapt, and the parameters that they train, by part.
func TestPartsOfFrameworks(t *testing.T) {
	const factory = "model_name_or_path: MODEL\nstage: sft\ndo_train: true\noutput_dir: x\ntemplate: qwen3_vl\n"
	const axolotl = "base_model: MODEL\nprocessor_type: AutoProcessor\nsequence_len: 4096\nmicro_batch_size: 1\n" +
		"datasets:\n  - path: x\nadapter: lora\nlora_r: 8\n"
	const pattern = `model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj`
	for _, test := range []struct {
		name, file, text            string
		vision, projector, language int // adapted modules, or trained parameters
	}{
		{"factory adapts the language model", "qwen3-vl", factory + "finetuning_type: lora\n", 0, 0, 21},
		{"factory adapts the encoder, too", "qwen3-vl",
			factory + "finetuning_type: lora\nfreeze_vision_tower: false\n", 16 + 4, 0, 21},
		{"factory adapts what it names", "qwen3-vl",
			factory + "finetuning_type: lora\nlora_target: fc1\nfreeze_vision_tower: false\n" +
				"freeze_multi_modal_projector: false\n", 4 + 2, 1, 0},
		{"factory knows no parts", "smolvlm", factory + "finetuning_type: lora\n", 24, 1, 21},
		{"factory freezes two parts", "qwen2.5-vl", factory + "finetuning_type: full\n", 0, 0, 3*12 + 3},
		{"factory freezes one part", "qwen2.5-vl",
			factory + "finetuning_type: full\nfreeze_multi_modal_projector: false\n", 0, 5, 3*12 + 3},
		{"factory trains the last layers", "qwen2.5-vl",
			factory + "finetuning_type: freeze\nfreeze_trainable_layers: 1\n", 0, 0, 12},
		{"factory trains the projector, too", "qwen2.5-vl",
			factory + "finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_multi_modal_projector: false\n",
			0, 5, 12},
		{"factory trains what it does not name", "glm4v", factory + "finetuning_type: full\n", 5, 0, 3*13 + 3},
		{"factory freezes an encoder of unknown operations", "../ranged-multimodal/qwen2-audio",
			factory + "finetuning_type: full\n", 0, 0, 3*12 + 3},
		{"axolotl's pattern", "llava-next", axolotl + "lora_target_modules: '" + pattern + "'\n", 0, 0, 21},
		{"axolotl's pattern in blocks that attend to images", "../ranged-multimodal/mllama",
			axolotl + "lora_target_modules: '" + pattern + "'\n", 0, 0, 28},
		{"axolotl's pattern in layers without keys", "../ranged-multimodal/gemma4",
			axolotl + "lora_target_modules: '" + strings.Replace(pattern, "(mlp|cross_attn",
				"(_checkpoint_wrapped_module.)?(mlp", 1) + "'\n", 0, 0, 4*7 + 2*5},
		{"axolotl adapts every part", "llava", axolotl + "lora_target_modules: [q_proj, fc1]\n", 8, 0, 3},
		{"axolotl freezes parts", "llava", axolotl + "freeze_mm_modules: true\nlora_target_modules: [q_proj, fc1]\n",
			0, 0, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			q := Request{Configs: []string{filestest.InNewFolder(t)("train.yaml", strings.Replace(test.text, "MODEL",
				multimodal+test.file+".json", 1))}, Sequence: 4096}
			j, err := q.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			count := map[model.Part]int{}
			if j.Adapter != nil {
				for _, path := range j.Model.Network.Linears() {
					if j.Adapter.Targets(path) {
						count[j.Model.Network.PartOf(path)]++
					}
				}
			} else {
				for _, p := range j.Model.Parameters {
					if !p.Frozen {
						count[j.Model.Network.PartOf(p.Name)]++
					}
				}
			}
			want := [3]int{test.vision, test.projector, test.language}
			if got := [3]int{count[model.Vision], count[model.Projector], count[model.Language]}; got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

// TestFrozenPartsStayNarrow: LLaMA-Factory converts only what it trains to fp32 (_setup_full_tuning in
// src/llamafactory/model/adapter.py, commit ff6d4d12).
func TestFrozenPartsStayNarrow(t *testing.T) {
	const text = "model_name_or_path: " + multimodal + "qwen2.5-vl.json\nstage: sft\ndo_train: true\noutput_dir: x\n" +
		"template: qwen2_vl\nfinetuning_type: full\nbf16: true\n"
	for _, test := range []struct {
		name, more string
		request    Request
		weights    dtype.Type
		trained    bool // in fp32 where the weights are not
	}{
		{name: "frozen", weights: dtype.BF16, trained: true},
		{name: "all trained", more: "freeze_vision_tower: false\nfreeze_multi_modal_projector: false\n",
			weights: dtype.F32},
		{name: "pure bf16", more: "pure_bf16: true\n", weights: dtype.BF16},
		{name: "FSDP", request: Request{FSDP: "2", GPUs: 2}, weights: dtype.F32},
		{name: "a flag", request: Request{Precision: "bf16"}, weights: dtype.BF16},
	} {
		t.Run(test.name, func(t *testing.T) {
			q := test.request
			q.Configs, q.Sequence = []string{filestest.InNewFolder(t)("train.yaml", text+test.more)}, 4096
			j, err := q.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			if j.ParameterType != test.weights {
				t.Errorf("weights in %v, want %v", j.ParameterType, test.weights)
			}
			for _, p := range j.Model.Parameters {
				if want := test.trained && j.Model.Network.PartOf(p.Name) == model.Language; p.Wide != want {
					t.Fatalf("%s is wide: %v, want %v", p.Name, p.Wide, want)
				}
			}
		})
	}
}
