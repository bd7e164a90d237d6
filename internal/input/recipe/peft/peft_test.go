package peft

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/input/recipe/recipetest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestAdapter(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       Adapter
		notes      []string
	}{
		{"empty", `{"peft_type": "LORA"}`, Adapter{
			Type: "LORA",
			LoRA: LoRA{Rank: 8, Alpha: 8, Weights: "true"},
			Bias: "none",
		}, nil},
		{"saved", `{
			"alpha_pattern": {}, "arrow_config": null, "auto_mapping": null, "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "bias": "lora_only",
			"corda_config": null, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": "pissa_niter_4",
			"layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32, "lora_bias": false,
			"lora_dropout": 0.05, "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": ["lm_head", "embed_tokens"], "peft_type": "LORA",
			"peft_version": "0.20.1", "qalora_group_size": 16, "r": 64, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj", "v_proj"],
			"target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": [1, 2],
			"use_dora": false, "use_qalora": false, "use_rslora": true}`,
			Adapter{
				Type:            "LORA",
				LoRA:            LoRA{Rank: 64, Alpha: 32, Dropout: 0.05, Weights: "pissa_niter_4", RankScaled: true},
				Bias:            "lora_only",
				ModulesToSave:   []string{"lm_head", "embed_tokens"},
				TrainableTokens: map[string][]int{"": {1, 2}},
				BaseModel:       "meta-llama/Llama-3.1-8B",
			}, nil},
		{"parameters", `{"peft_type": "LORA", "target_parameters": ["mlp.experts.gate_up_proj"]}`,
			Adapter{
				Type:       "LORA",
				LoRA:       LoRA{Rank: 8, Alpha: 8, Weights: "true"},
				Bias:       "none",
				Parameters: []string{"mlp.experts.gate_up_proj"},
			}, nil},
		{"dora", `{"peft_type": "LORA", "use_dora": true, "init_lora_weights": false, "fan_in_fan_out": true, "task_type": "SEQ_CLS", "modules_to_save": ["x"],
			"trainable_token_indices": {"embed_tokens": [7], "lm_head": []}, "a_later_key": 1}`,
			Adapter{
				Type:            "LORA",
				LoRA:            LoRA{Rank: 8, Alpha: 8, Weights: "false", DoRA: true},
				Bias:            "none",
				FanInFanOut:     true,
				ModulesToSave:   []string{"x", "classifier", "score"},
				TrainableTokens: map[string][]int{"embed_tokens": {7}, "lm_head": {}},
			}, []string{`PEFT's LORA knows no key "a_later_key"`}},
		{"adalora",
			`{"peft_type": "ADALORA", "r": 4, "init_r": 16, "total_step": 100, "tinit": 10, "tfinal": 20, "rank_pattern": {"q_proj": [true, false]}}`,
			Adapter{
				Type: "ADALORA",
				LoRA: LoRA{Rank: 16, Alpha: 8, Weights: "true"},
				Bias: "none",
			}, []string{"r has no effect on ADALORA"}},
		{"ia3", `{"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}`,
			Adapter{Type: "IA3"}, nil},
		{"vera", `{"peft_type": "VERA", "vera_dropout": 0.1, "save_projection": false, "projection_prng_key": 3}`,
			Adapter{Type: "VERA", LoRA: LoRA{Rank: 256, Dropout: 0.1}, Bias: "none"}, nil},
		{"ln", `{"peft_type": "LN_TUNING", "target_modules": ".*norm"}`, Adapter{Type: "LN_TUNING"}, nil},
		{"prompt",
			`{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "Classify", "tokenizer_name_or_path": "gpt2"}`,
			Adapter{Type: "PROMPT_TUNING", Prompt: Prompt{VirtualTokens: 8}}, nil},
		{"prefix",
			`{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 30, "prefix_projection": true, "encoder_hidden_size": 512, "num_layers": 24, "token_dim": 1024, "num_attention_heads": 16, "num_transformer_submodules": 1}`,
			Adapter{Type: "PREFIX_TUNING", Prompt: Prompt{VirtualTokens: 30, Encoder: 512}}, nil},
		{"p", `{"peft_type": "P_TUNING", "num_virtual_tokens": 20, "encoder_hidden_size": 128}`,
			Adapter{Type: "P_TUNING", Prompt: Prompt{VirtualTokens: 20, Encoder: 128}}, nil},
		{"loha", `{"peft_type": "LOHA", "r": 4, "alpha": 2, "module_dropout": 0.5}`,
			Adapter{Type: "LOHA", LoRA: LoRA{Rank: 4, Alpha: 2}}, []string{"module_dropout leaves out parts"}},
		{"lokr", `{"peft_type": "LOKR", "decompose_both": true, "init_weights": "lycoris"}`,
			Adapter{Type: "LOKR", LoRA: LoRA{Rank: 8, Alpha: 8},
				Kronecker: Kronecker{Factor: -1, DividesFirst: true}}, nil},
		{"miss", `{"peft_type": "MISS", "init_weights": "mini", "mini_r": 16}`,
			Adapter{Type: "MISS", LoRA: LoRA{Rank: 64, Repeated: 16}, Bias: "none"}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Parse("adapter_config.json", []byte(test.text))
			if err != nil {
				t.Fatal(err)
			}
			test.want.File = "adapter_config.json"
			if diff := cmp.Diff(&test.want, got, cmpopts.IgnoreUnexported(Adapter{}),
				cmpopts.IgnoreFields(Adapter{}, "Notes")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			recipetest.RequireNotes(t, got.Notes, test.notes)
		})
	}
}

// modules are the names of the modules of a small model.
var modules = strings.Fields(`
	model.embed_tokens
	model.layers.0.self_attn.q_proj model.layers.0.self_attn.k_proj model.layers.0.mlp.gate_proj model.layers.0.mlp.down_proj model.layers.0.input_layernorm
	model.layers.11.self_attn.q_proj model.layers.11.mlp.experts.3.down_proj model.layers.11.not_q_proj
	model.vision.blocks.0.attn.q_proj model.norm lm_head`)

// TestTargets compares the result of PEFT 0.20's check_target_module_exists for
// each of these modules.
func TestTargets(t *testing.T) {
	const q0, q11, qv = "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj",
		"model.vision.blocks.0.attn.q_proj"
	const down0, down11 = "model.layers.0.mlp.down_proj", "model.layers.11.mlp.experts.3.down_proj"
	for text, want := range map[string][]string{
		`"target_modules": ["q_proj"]`: {q0, q11, qv},
		`"target_modules": ["proj", "self_attn", "model.layers.0.self_attn.q_proj"]`: {q0},
		`"target_modules": ["self_attn.q_proj"]`:                                     {q0, q11},
		`"target_modules": "q_proj"`:                                                 nil,
		`"target_modules": ".*q_proj"`: {q0, q11,
			"model.layers.11.not_q_proj", qv},
		`"target_modules": "model\\.layers\\.\\d+\\.self_attn\\.(q|v)_proj"`: {q0, q11},
		`"target_modules": "a|model.norm"`:                                   {"model.norm"},
		`"target_modules": "All-Linear", "exclude_modules": [".norm", "norm", "embed_tokens"]`: remove(modules,
			"model.norm", "model.embed_tokens", "lm_head"),
		`"target_modules": "all-linear", "exclude_modules": ".*layers.*"`: {
			"model.embed_tokens", qv, "model.norm",
		},
		`"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "vision"]`:           {q0, q11},
		`"target_modules": ["q_proj"], "layers_to_transform": [0]`:                                    {q0, qv},
		`"target_modules": ["q_proj"], "layers_to_transform": 11`:                                     {q11},
		`"target_modules": ["q_proj"], "layers_to_transform": [0, 11], "layers_pattern": "layers"`:    {q0, q11},
		`"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["x", "blocks"]`: {qv},
		// the layer, not the expert
		`"target_modules": ["down_proj"], "layers_to_transform": [3]`: nil,
		`"target_modules": ["down_proj"], "layers_to_transform": []`:  {down0, down11},
		// a full name
		`"target_modules": ["lm_head", "q_proj"], "layers_to_transform": [5]`: {"lm_head"},
		`"target_modules": null`:                         nil,
		`"target_parameters": ["mlp.experts.down_proj"]`: nil,
	} {
		a, err := Parse("a.json", []byte(`{"peft_type": "LORA", `+text+`}`))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, module := range modules {
			if a.Targets(module) {
				got = append(got, module)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

func remove(list []string, names ...string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(names, s) })
}

// TestForModel checks PEFT's defaults, and that all of them can be parsed.
func TestForModel(t *testing.T) {
	for kind, defaults := range targetDefaults {
		for modelType := range defaults {
			text := `{"peft_type": "` + kind + `", "total_step": 9, "feedforward_modules": ["x"]}`
			a, err := Parse("a.json", []byte(text))
			if err != nil {
				t.Fatal(err)
			}
			if a, err := a.ForModel(modelType); err != nil || !a.targets.given {
				t.Errorf("%s of %s: %v", kind, modelType, err)
			}
		}
	}
	for _, test := range []struct {
		kind, modelType, module string
		targets                 bool
	}{
		{"LORA", "llama", "model.layers.0.self_attn.v_proj", true},
		{"LORA", "llama", "model.layers.0.self_attn.k_proj", false},
		{"LORA", "phi", "model.layers.0.mlp.fc1", true},
		{"VERA", "phi", "model.layers.0.mlp.fc1", false},
		{"LORA", "gemma4", "model.language_model.layers.0.self_attn.q_proj", true},
		{"LORA", "gemma4", "model.vision_tower.layers.0.self_attn.q_proj", false},
		{"IA3", "llama", "model.layers.0.mlp.down_proj", true},
		{"LN_TUNING", "qwen2", "model.layers.0.post_attention_layernorm", true},
		{"PROMPT_TUNING", "wobble", "model.layers.0.self_attn.v_proj", false},
	} {
		a, err := Parse("a.json", []byte(`{"peft_type": "`+test.kind+`", "num_virtual_tokens": 8}`))
		if err != nil {
			t.Fatal(err)
		}
		if a, err = a.ForModel(test.modelType); err != nil {
			t.Fatal(err)
		}
		if got := a.Targets(test.module); got != test.targets {
			t.Errorf("%s of %s targets %s: %v", test.kind, test.modelType, test.module, got)
		}
		if a.Feedforward(test.module) != (test.kind == "IA3") {
			t.Errorf("%s of %s: feedforward", test.kind, test.modelType)
		}
	}
	for _, kind := range []string{"LORA", "IA3"} {
		a, err := Parse("a.json", []byte(`{"peft_type": "`+kind+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		_, err = a.ForModel("wobble")
		recipetest.RequireInput(t, err)
	}
}

func TestAdapterModules(t *testing.T) {
	a, err := Parse("a.json",
		[]byte(`{"peft_type": "LORA", "r": 8, "rank_pattern": {"self_attn.q_proj": 4, ".*q_proj": 2, "k_proj": 16}, "modules_to_save": ["head"]}`))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, module := range modules {
		if rank := a.RankOf(module); rank != 8 {
			got[module] = rank
		}
	}
	want := map[string]int{"model.layers.0.self_attn.q_proj": 4, "model.layers.11.self_attn.q_proj": 4,
		"model.layers.11.not_q_proj":        2,
		"model.vision.blocks.0.attn.q_proj": 2, "model.layers.0.self_attn.k_proj": 16}
	if !maps.Equal(got, want) {
		t.Errorf("ranks %v, want %v", got, want)
	}
	if !a.Saves("lm_head") || a.Saves("model.norm") {
		t.Error("modules_to_save are the ends of names")
	}
}

func FuzzParseAdapter(f *testing.F) {
	recipetest.Archived(f, "../testdata/bad/adapter.txtar", func(_ string, text []byte) {
		f.Add(text,
			"model.layers.0.q_proj")
	})
	f.Add([]byte(`{"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [0, 99999999999], "layers_pattern": ["a", ".*"]}`), "m.a.99999999999999999999.q_proj")
	f.Add([]byte(`{"peft_type": "IA3", "feedforward_modules": ".*"}`), "x")
	f.Fuzz(func(t *testing.T, text []byte, module string) {
		a, err := Parse("fuzz.json", text)
		if (a == nil) == (err == nil) {
			t.Fatalf("got %v and %v", a, err)
		}
		if err != nil {
			recipetest.RequireInput(t, err)
			return
		}
		if with, err := a.ForModel("llama"); err != nil {
			recipetest.RequireInput(t, err)
		} else {
			a = with
		}
		if a.Targets(module) && a.excluded.given && a.excluded.matches(module) {
			t.Fatalf("%q is both adapted and excluded", module)
		}
		a.Feedforward(module)
		a.Saves(module)
		if strings.HasPrefix(a.Type, "L") && a.RankOf(module) < 0 {
			t.Fatal("a negative rank")
		}
	})
}

// TestFactors compares the results of factorization in tuners/lokr/layer.py of PEFT 0.21.
func TestFactors(t *testing.T) {
	for _, test := range []struct{ width, wanted, first, second int64 }{
		{256, -1, 16, 16}, {128, -1, 8, 16}, {127, -1, 1, 127}, {128, 4, 4, 32}, {896, -1, 28, 32}, {4864, -1, 64, 76},
		{3072, 5, 4, 768}, {8, 16, 2, 4}, {1, -1, 1, 1},
	} {
		if first, second := Factors(test.width, test.wanted); first != test.first || second != test.second {
			t.Errorf("Factors(%d, %d) = %d, %d, want %d, %d", test.width, test.wanted, first, second, test.first,
				test.second)
		}
	}
}
