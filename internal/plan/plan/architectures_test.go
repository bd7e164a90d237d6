//go:build linux

package plan_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/plan/job"
)

const variants = "../../input/model/testdata/variants/"

// notTrained are variants that are not trained here, and why.
var notTrained = map[string]string{
	"bert-encoder": noLoss, "camembert": noLoss, "dinov2-bare": noLoss, "vit-bare": noLoss,
	"qwen3-moe-mixed": tooFew, "qwen3-next-mixed": tooFew,
	"whisper": reads, "whisper-dropped": reads, "vit": reads, "vit-dropped": reads, "deit": reads, "dinov2": reads,
	"dinov2-swiglu": reads, "clip": reads, "siglip": reads,
}

const (
	noLoss = "it has no loss of its own"
	tooFew = "tokens choose more experts than there are"
	reads  = "it reads images or sound: TestModalities trains it"
)

// missed are variants whose forward pass has more at its peak than is planned, or whose blocks keep more, as far as it
// is known why.
var missed = map[string]string{
	"deepseek-v2-biased": oddHeads, "deepseek-v3-full-queries": oddHeads, "mistral-defaults": oddHeads,
	"falcon-one-norm": unexplained, "falcon-sequential": unexplained, "mt5": unexplained, "t5-gated": unexplained,
	"bloom-aliases": unexplained, "gemma2-biased": unexplained, "gptj": earlier, "mpt": unexplained,
}

const (
	oddHeads    = "a kernel pads heads of 4 numbers, and none takes values of 10"
	earlier     = "its attention still has queries and keys from before the rotation when its last product runs"
	unexplained = "it is not known why"
)

// TestArchitectures compares plans of every architecture with what PyTorch and transformers hold.
func TestArchitectures(t *testing.T) {
	var list []training
	paths, err := filepath.Glob(variants + "*.json")
	if err != nil || len(paths) == 0 {
		t.Fatal(err)
	}
	for _, path := range paths {
		c := training{name: strings.TrimSuffix(filepath.Base(path), ".json"), model: configOf(t, path), batch: 2,
			length: 256, request: job.Request{Precision: "bf16"}}
		for _, key := range []string{"max_position_embeddings", "n_positions"} {
			if number, ok := c.model[key].(json.Number); ok {
				most, err := number.Int64()
				if err != nil {
					t.Fatal(err)
				}
				c.length = min(c.length, int(most))
			}
		}
		c.request.Model = path
		if j, err := c.request.Resolve(); err != nil {
			t.Fatal(err)
		} else if notTrained[c.name] == "" && j.Model.Network.Opaque == nil {
			list = append(list, c)
		}
	}
	compare(t, list, missed)
}

// TestRouterLossOfCheckpoints compares plans of mixtures whose blocks are recomputed, with the loss of their routers
// and without it. Its gradients wait for the second run of a block.
func TestRouterLossOfCheckpoints(t *testing.T) {
	var list []training
	for _, name := range []string{"qwen3-moe", "qwen3-moe-balanced"} {
		list = append(list, training{name: name, model: configOf(t, variants+name+".json"), batch: 2, length: 256,
			request: job.Request{Precision: "bf16", Recompute: "full"}})
	}
	compare(t, list, nil)
}

// TestRecurrentLayers compares plans of models with layers that pass a state from token to token: sequences with and
// without padding to whole chunks, batches, precisions and recomputed blocks.
func TestRecurrentLayers(t *testing.T) {
	type changes map[string]any
	of := func(name string, layers int, with changes) map[string]any {
		model := catalogued(t, name, layers)
		for key, value := range with {
			model[key] = value
		}
		return model
	}
	variant := func(name string, with changes) map[string]any {
		model := configOf(t, variants+name+".json")
		for key, value := range with {
			model[key] = value
		}
		return model
	}
	mixers := changes{"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
		"mamba_n_groups": 2}
	rule := changes{"layer_types": []string{"linear_attention", "linear_attention"}, "num_hidden_layers": 2,
		"mlp_only_layers": []int{0, 1}, "hidden_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
	bf16, recomputed := job.Request{Precision: "bf16"}, job.Request{Precision: "bf16", Recompute: "full"}
	compare(t, []training{
		{name: "lfm2", model: of("lfm2-350m", 4, changes{"full_attn_idxs": []int{2}}), batch: 2, length: 512,
			request: bf16},
		{name: "lfm2 under autocast", model: of("lfm2-350m", 4, changes{"full_attn_idxs": []int{2}}), batch: 2,
			length: 512, request: job.Request{Precision: "amp-bf16"}},
		{name: "falcon-h1", model: of("falcon-h1-0.5b", 2, nil), batch: 2, length: 512, request: bf16},
		{name: "falcon-h1 under autocast", model: of("falcon-h1-0.5b", 2, nil), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"}},
		{name: "falcon-h1, recomputed", model: of("falcon-h1-0.5b", 2, nil), batch: 2, length: 512,
			request: recomputed},
		{name: "nemotron-h", model: of("nemotron-h-8b", 4, changes{"hybrid_override_pattern": "M-M*"}), batch: 1,
			length: 512, request: bf16},
		{name: "bamba", model: variant("bamba", mixers), batch: 2, length: 600, request: bf16},
		{name: "bamba in fp32, recomputed", model: variant("bamba", mixers), batch: 2, length: 600,
			request: job.Request{Precision: "fp32", Recompute: "full"}},
		{name: "a chunk with padding", model: variant("bamba-biased", nil), batch: 3, length: 200, request: bf16},
		{name: "one chunk", model: variant("bamba-biased", nil), batch: 1, length: 256, request: bf16},
		{name: "granite", model: variant("granite-moe-hybrid", changes{"hidden_size": 256, "mamba_n_heads": 8,
			"mamba_d_head": 64, "mamba_d_state": 64}), batch: 1, length: 512, request: bf16},
		{name: "delta rule", model: variant("qwen3-next", rule), batch: 2, length: 600, request: bf16},
		{name: "delta rule, recomputed", model: variant("qwen3-next", rule), batch: 2, length: 600,
			request: recomputed},
		{name: "delta rule in fp32", model: variant("qwen3-next", rule), batch: 1, length: 512,
			request: job.Request{Precision: "fp32"}},
	}, nil)
}
