package model

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/recipe/strict"
)

const small = `{
  "model_type": "llama",
  "vocab_size": 100,
  "hidden_size": 12,
  "intermediate_size": 20,
  "num_hidden_layers": 2,
  "num_attention_heads": 3
}
`

func parseConfig(text []byte) (*Model, error) {
	doc, err := strict.ParseJSON("c.json", text)
	if err != nil {
		return nil, err
	}
	return fromConfig(doc, "c", "c.json")
}

func TestConfigFaults(t *testing.T) {
	edit := func(old, new string) string {
		edited := strings.Replace(small, old, new, 1)
		if edited == small {
			t.Fatalf("%s is not in the text", old)
		}
		return edited
	}
	for _, test := range []struct{ text, what, hint string }{
		{edit(`"vocab_size": 100,`, ``), "c.json:1:1: vocab_size is missing", `add "vocab_size"`},
		{edit(`hidden_size`, `hiden_size`), "c.json:1:1: hidden_size is missing", `the file says "hiden_size"`},
		{edit(`100`, `"100"`), `c.json:3:17: vocab_size is "100", expected a whole number from 1`, "without the quotes"},
		{edit(`100`, `1e2`), "c.json:3:17: vocab_size is 1e2", ""},
		{edit(`100`, `0`), "c.json:3:17: vocab_size is 0", ""},
		{edit(`100`, `-1`), "c.json:3:17: vocab_size is -1", ""},
		{edit(`100`, `9223372036854775808`), "c.json:3:17: vocab_size is 9223372036854775808", ""},
		{edit(`100`, `null`), "c.json:3:17: vocab_size is null, expected a whole number", "write the size"},
		{edit(`heads": 3`, `heads": 5`),
			"c.json:4:18: hidden_size is 12: expected a multiple of num_attention_heads, which is 5", ""},
		{edit(`heads": 3`, `heads": 3, "num_key_value_heads": 2`),
			"num_attention_heads is 3: expected a multiple of num_key_value_heads", ""},
		{edit(`heads": 3`, `heads": 3, "attention_bias": "no"`),
			`attention_bias is "no", expected true or false`, ""},
		{edit(`heads": 3`, `heads": 3, "torch_dtype": "int8"`), `torch_dtype is "int8": expected "float32"`, ""},
		{edit(`heads": 3`, `heads": 3, "hidden_size": 4`), `c.json:7:29: "hidden_size" is listed twice`, "remove one"},
		{edit(`layers": 2`, `layers": 16777216`), "model.layers has 16777216 modules, expected at most 4096", ""},
		{edit(`layers": 2`, `layers": 58000`), "model.layers has 58000 modules, expected at most 4096", ""},
		{edit(`"llama"`, `"lama"`), `c.json:2:17: unknown model_type "lama"`,
			`did you mean "llama"? Otherwise: docs/models.md lists`},
		{edit(`"llama"`, `7`), "c.json:2:17: model_type is 7, expected a string", ""},
		{edit(`"model_type"`, `"architectures": ["LlamaForCausalLm"], "model_type"`),
			`c.json:2:21: unknown architecture "LlamaForCausalLm"`, `did you mean "LlamaForCausalLM"?`},
		{edit(`"model_type"`, `"architectures": "LlamaForCausalLM", "model_type"`),
			`c.json:2:20: architectures is "LlamaForCausalLM", expected a list`, ""},
		{edit(`"model_type"`, `"architectures": [{}], "model_type"`),
			"architectures[0] is an object, expected a string", ""},
		{edit(`"model_type": "llama",`, ``), "architectures and model_type are both missing", ""},
		{edit(`"llama"`, `"gpt2", "add_cross_attention": true`), "add_cross_attention is not supported", "safetensors"},
		{edit("}\n", ""), "c.json:8:1: the file ends too early", "brace"},
		{edit(`100,`, `100`), "c.json:4:3: this is not JSON: invalid character", "commas"},
		{edit("}\n", "} {}"), "c.json:8:3: more text after the end", "one object"},
		{"", "c.json:1:1: the file is empty, expected a JSON object", ""},
		{"\n [1]", "c.json:2:2: the file holds a list of 1, expected an object", ""},
		{"version https://git-lfs.github.com/spec/v1", "this is not JSON", "quotes"},
	} {
		_, err := parseConfig([]byte(test.text))
		checkFault(t, test.text, err, test.what, test.hint)
	}
}

func TestLayerFaults(t *testing.T) {
	text, _ := catalogConfig("qwen3-next-80b-a3b")
	for fields, what := range map[string]string{
		`"layer_types": ["full_attention"]`:    "layer_types has 1 elements",
		`"layer_types": ["sliding_attention"]`: `layer_types has "sliding_attention": expected "full_attention" or "linear_attention"`,
		`"layer_types": 4`:                     "layer_types is 4, expected a list",
		`"mlp_only_layers": ["1"]`:             `mlp_only_layers has "1": expected the number of a layer`,
	} {
		edited := strings.Replace(string(text), `"mlp_only_layers": []`, fields, 1)
		_, err := parseConfig([]byte(edited))
		checkFault(t, fields, err, what, "")
	}
}

// The auxiliary loss keeps the logits of all routers. A class that keeps them without
// such a loss is refused.
func TestRouterLoss(t *testing.T) {
	for _, name := range []string{"mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"} {
		text, _ := catalogConfig(name)
		edit := func(value string) []byte {
			rest := strings.TrimPrefix(strings.ReplaceAll(string(text), `"output_router_logits"`, `"other"`), "{")
			return []byte(`{"output_router_logits": ` + value + "," + rest)
		}
		m, err := parseConfig(edit("true"))
		if name == "deepseek-v3" {
			checkFault(t, name, err, "output_router_logits is true", "set it to false")
		} else if err != nil || !m.Network.RouterLoss {
			t.Error(name, err)
		}
		if _, err := parseConfig(edit("false")); err != nil {
			t.Error(err)
		}
	}
}

// DeepSeek-V2's class has no default for the number of experts per token.
func TestChosenExperts(t *testing.T) {
	m, err := Load("deepseek-v2-lite")
	if err != nil {
		t.Fatal(err)
	}
	if chosen := m.Network.Blocks()[1].FeedForward.Mixture.Chosen; chosen != 6 {
		t.Errorf("tokens of DeepSeek-V2-Lite pass %d experts, not 6", chosen)
	}
	text, _ := catalogConfig("deepseek-v2-lite")
	edited := strings.Replace(string(text), "num_experts_per_tok", "experts_per_tok", 1)
	_, err = parseConfig([]byte(edited))
	checkFault(t, "without a number", err, "num_experts_per_tok is missing", "")
}

func TestModelTypeAlone(t *testing.T) {
	m, err := parseConfig([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	if m.Architecture != "LlamaForCausalLM" {
		t.Errorf("the architecture is %s", m.Architecture)
	}
}

func TestConfigDType(t *testing.T) {
	for field, want := range map[string]dtype.Type{
		`"dtype": "bfloat16",`:            dtype.BF16,
		`"torch_dtype": "float16",`:       dtype.F16,
		`"torch_dtype": "torch.float",`:   dtype.F32,
		`"dtype": null,`:                  dtype.F32,
		``:                                dtype.F32,
		`"quantization_config": {"a":1},`: dtype.F32,
	} {
		m, err := parseConfig([]byte(strings.Replace(small, "{", "{"+field, 1)))
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Parameters[0].DType; got != want {
			t.Errorf("%s gives %s, want %s", field, got, want)
		}
	}
}

// T5 1.1 and Flan-T5 have a head of their own: the published Flan-T5 base has
// 247,577,856 parameters.
func TestUntiedT5(t *testing.T) {
	text := `{"architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048,
		"num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false}`
	m, err := parseConfig([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if m.Elements() != 247_577_856 {
		t.Errorf("got %d", m.Elements())
	}
	_, err = parseConfig([]byte(strings.Replace(text, "gated-gelu", "gelu-gated", 1)))
	checkFault(t, "t5", err, `feed_forward_proj is "gelu-gated"`, "")
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(small))
	paths, err := filepath.Glob("testdata/variants/*.json")
	if err != nil || len(paths) == 0 {
		f.Fatalf("no seeds: %v", err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseConfig(text)
		if err != nil {
			checkFault(t, "config", err, "", "")
			return
		}
		checkModel(t, m)
	})
}

// checkModel checks properties of every model.
func checkModel(t *testing.T, m *Model) {
	t.Helper()
	shapes := map[string][]int64{}
	for _, p := range m.Parameters {
		if _, ok := shapes[p.Name]; ok {
			t.Fatalf("%s is there twice", p.Name)
		}
		shapes[p.Name] = p.Shape
		if p.DType == dtype.Invalid || p.Block < -1 || p.Elements() < 0 {
			t.Fatalf("%+v", p)
		}
	}
	for _, p := range m.Parameters {
		if p.TiedTo != "" && !slices.Equal(shapes[p.TiedTo], p.Shape) {
			t.Fatalf("%s %v is tied to %s %v", p.Name, p.Shape, p.TiedTo, shapes[p.TiedTo])
		}
	}
	if with, ok := m.WithoutOperations(); ok {
		n := with.Network
		if n.Hidden < 1 || len(n.Blocks()) != len(n.Opaque.Blocks) {
			t.Fatalf("a width of %d, %d blocks, modules of %d", n.Hidden, len(n.Blocks()), len(n.Opaque.Blocks))
		}
		for _, b := range n.Blocks() {
			if b.Path == "" {
				t.Fatal("a block without a path")
			}
		}
	}
	if total := m.Elements(); total < 0 || total > maxElements {
		t.Fatalf("%d elements", total)
	}
}
