package model

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNamesOfTheHub(t *testing.T) {
	t.Setenv("HF_HOME", t.TempDir())
	for name, want := range map[string]string{
		"Qwen/Qwen2.5-7B-Instruct":                                     "qwen2.5-7b",
		"Qwen/Qwen3-8B-Base":                                           "qwen3-8b",
		"meta-llama/Llama-2-7b-chat-hf":                                "llama-2-7b",
		"meta-llama/Meta-Llama-3-8B-Instruct":                          "llama-3-8b",
		"meta-llama/Llama-3.1-8B":                                      "llama-3.1-8b",
		"Llama-3.1-8B-Instruct":                                        "llama-3.1-8b",
		"mistralai/Mistral-7B-v0.1":                                    "mistral-7b",
		"mistralai/Mixtral-8x7B-Instruct-v0.1":                         "mixtral-8x7b",
		"google/gemma-2-9b-it":                                         "gemma-2-9b",
		"EleutherAI/pythia-1.4b-deduped":                               "pythia-1.4b",
		"microsoft/phi-1_5":                                            "phi-1.5",
		"microsoft/Phi-3-mini-4k-instruct":                             "phi-3-mini",
		"TinyLlama/TinyLlama-1.1B-Chat-v1.0":                           "tinyllama-1.1b",
		"openai-community/gpt2":                                        "gpt2",
		"deepseek-ai/DeepSeek-V2-Lite-Chat":                            "deepseek-v2-lite",
		"somebody/Llama-3.1-8B-Instruct":                               "llama-3.1-8b",
		"somebody/New-Llama-3.1-8B":                                    "", // may be any
		"somebody/Llama-3.1":                                           "", // of any size
		"mistral-community/Mixtral-8x22B-v0.1":                         "mixtral-8x22b",
		"mistral-community/pixtral-12b":                                "pixtral-12b",
		"mistralai/Pixtral-12B-2409":                                   "pixtral-12b",
		"mistralai/Voxtral-Mini-3B-2507":                               "voxtral-mini-3b-2507",
		"google/gemma-4-31B-it":                                        "gemma-4-31b",
		"Qwen/Qwen3.6-27B":                                             "qwen3.5-27b",
		"Qwen/Qwen3.5-35B-A3B-Base":                                    "qwen3.5-35b-a3b",
		"alpindale/Llama-3.2-11B-Vision-Instruct":                      "llama-3.2-11b-vision",
		"meta-llama/Llama-4-Scout-17B-16E-Instruct":                    "llama-4-scout-17b-16e",
		"axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16": "llama-4-scout-17b-16e",
		"deepcogito/cogito-v1-preview-qwen-14B":                        "qwen2.5-14b",
		"PaddlePaddle/PaddleOCR-VL-1.6":                                "paddleocr-vl",
		"axolotl-ai-co/Mistral-Small-4-119B-2603-BF16":                 "mistral-small-4-119b-2603",
		"HuggingFaceTB/SmolVLM2-2.2B-Instruct":                         "smolvlm2-2.2b",
		"casperhansen/llama-3-70b-fp16":                                "llama-3-70b",
		"axolotl-ai-co/gpt-oss-120b-dequantized":                       "gpt-oss-120b",
		"unsloth/Qwen3-VL-8B-Instruct-bnb-4bit":                        "qwen3-vl-8b",
		"HuggingFaceTB/SmolLM3-3B-checkpoints":                         "smollm3-3b",
		"alignment-handbook/zephyr-7b-sft-full":                        "mistral-7b",
		"alignment-handbook/zephyr-7b-sft-qlora":                       "", // an adapter
		"open-r1/Qwen2.5-Math-7B-RoPE-300k":                            "qwen2.5-7b",
		"Llama3.1-8B":                                                  "llama-3.1-8b",
		"Qwen/Qwen-2.5-7B":                                             "qwen2.5-7b",
		"Qwen/Qwen2.5-Math-1.5B-Instruct":                              "qwen2.5-1.5b",
		"Qwen/Qwen2.5-Math-PRM-7B":                                     "",
		"mistralai/Ministral-3-3B-Reasoning-2512":                      "ministral-3-3b",
		"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16":                   "nemotron-3-nano-30b-a3b",
		"mistralai/Mistral-7B-Instruct-v0.3":                           "mistral-7b-v0.3",
		"NousResearch/Meta-Llama-3-8B":                                 "llama-3-8b",
		"Qwen/Qwen2.5-Coder-7B-Instruct":                               "qwen2.5-7b",
		"Qwen/Qwen3-4B-Thinking-2507":                                  "qwen3-4b",
		"codellama/CodeLlama-7b-Python-hf":                             "", // has fewer tokens
		"Qwen/Qwen2.5-7B-Instruct-AWQ":                                 "",
		"meta-llama/Llama-3.1-8B-Instruct-Chat":                        "llama-3.1-8b",
		"Qwen/Qwen2-7B":                                                "qwen2-7b",
	} {
		m, err := Load(name)
		got := ""
		if err == nil {
			got = m.Name
		}
		if got != want {
			t.Errorf("%s: got %q (%v), want %q", name, got, err, want)
		}
	}
}

func TestBeforeQuantization(t *testing.T) {
	for _, test := range []struct{ name, quantization, want string }{
		{"TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ", "gptq", "llama-3-8b"},
		{"TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "gptq", "TechxGenus/Meta-Llama-3-8B-Instruct-AWQ"},
		{"Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ", "qwen2.5-7b"}, {"llama-3-8b", "gptq", "llama-3-8b"},
		{"x/secret-13b-awq", "awq", "x/secret-13b-awq"},
	} {
		if got := Before(test.name, test.quantization); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
	}
}

// TestNamesakes tells other owners' names from those of the authors.
func TestNamesakes(t *testing.T) {
	t.Setenv("HF_HOME", t.TempDir())
	for name, want := range map[string]*Namesake{
		"Qwen/Qwen2.5-7B-Instruct":    nil,
		"unsloth/Qwen2.5-7B-Instruct": {Name: "unsloth/Qwen2.5-7B-Instruct"},
		"unsloth/Qwen2.5-7B-bnb-4bit": {Name: "unsloth/Qwen2.5-7B-bnb-4bit", NF4: true},
		"hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16": {
			Name: "hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", NF4: true},
		"somebody/Llama-4-Scout-17B-16E-Linearized": {
			Name: "somebody/Llama-4-Scout-17B-16E-Linearized", Linearized: true},
	} {
		m, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, m.Namesake); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestHintsOfUnknownNames(t *testing.T) {
	t.Setenv("HF_HOME", t.TempDir())
	for _, test := range []struct{ name, what, hint string }{
		{"lama-3.1-8b", "unknown model", `did you mean "llama-3.1-8b"?`},
		{"gema-2-9b", "unknown model", `did you mean "gemma-2-9b"?`},
		{"somebody/Lama-3.1-8B", "unknown model", `did you mean "llama-3.1-8b"? --online asks`},
		{"unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "quantized (BNB-4BIT)",
			"--model llama-3.1-8b --quantization nf4"},
		{"Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "quantized (GPTQ)", "--model qwen2.5-7b --quantization gptq"},
		{"ISTA-DASLab/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16", "quantized (AQLM)", "--quantization aqlm"},
		{"TheBloke/Llama-2-7B-Chat-GGUF", "quantized (GGUF)", "--model llama-2-7b"},
		{"somebody/secret-13b-awq", "quantized (AWQ)", "before quantization"},
	} {
		_, err := Load(test.name)
		checkFault(t, test.name, err, test.what, test.hint)
	}
	for _, name := range []string{"qwen2.5-0.6b", "qwen2.5-8b", "Qwen/Qwen2-9B", "mixtral-7b", "opt-7b", "gpt-2-xxl",
		"phi-5", "qwen3-7b"} {
		if _, err := Load(name); err == nil || strings.Contains(err.Error(), "did you mean") {
			t.Errorf("%s: another size or family is suggested: %v", name, err)
		}
	}
}

func TestCacheAndHub(t *testing.T) {
	caches := t.TempDir()
	t.Setenv("HF_HUB_CACHE", caches)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HF_HUB_OFFLINE", "")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(small))
	}))
	defer server.Close()
	t.Setenv("HF_ENDPOINT", server.URL)

	_, err := Load("some/model-1b")
	checkFault(t, "neither", err, `unknown model "some/model-1b"`, "--online asks the Hugging Face hub")
	m, err := LoadOnline("some/model-1b")
	if err != nil || m.Name != "model-1b" || m.Architecture != "LlamaForCausalLM" {
		t.Errorf("from the hub: got %v, %v", m, err)
	}
	tokenizer := filepath.Join(caches, "models--some--tokenized", "snapshots", "abc", "tokenizer.json")
	if err := os.MkdirAll(filepath.Dir(tokenizer), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, tokenizer, "{}")
	_, err = Load("some/tokenized")
	checkFault(t, "a tokenizer in the cache", err, `unknown model "some/tokenized"`, "--online asks")
	if _, err = LoadOnline("some/tokenized"); err != nil {
		t.Errorf("a tokenizer in the cache, from the hub: %v", err)
	}
	snapshot := filepath.Join(caches, "models--some--model-1b", "snapshots", "abc")
	if err := os.MkdirAll(snapshot, 0o755); err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(caches, "models--some--model-1b", "blob")
	write(t, blob, small)
	if err := os.Symlink("../../blob", filepath.Join(snapshot, configName)); err != nil { // as huggingface_hub does
		t.Fatal(err)
	}
	m, err = Load("some/model-1b")
	if err != nil || m.Name != "model-1b" || m.Source != filepath.Join(snapshot, configName) {
		t.Errorf("from the cache: got %v, %v", m, err)
	}
}

// TestUsualPacking: a name that tells an unusual form, or none, tells no quantization.
func TestUsualPacking(t *testing.T) {
	for name, want := range map[string]string{
		"TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ": "gptq", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": "gptq",
		"owner/model-AWQ": "awq", "owner/model-GPTQ-4bit-128g": "gptq", "owner/model-AQLM-2Bit-1x16": "aqlm",
		"owner/model-AQLM-2Bit-1x16-hf": "aqlm",
		"owner/model-AQLM-2Bit-2x8":     "", "owner/model-AQLM": "", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": "",
		"owner/model-GPTQ-3bit": "", "owner/model-GPTQ-4bit-32g": "", "owner/model-GGUF": "", "model-GPTQ": "", "": "",
	} {
		if got := UsualPacking(name); got != want {
			t.Errorf("%q has %q, want %q", name, got, want)
		}
	}
}
