package job

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files"
)

// TestEnvironment: an environment says releases, flags go before it, and a range is no release.
func TestEnvironment(t *testing.T) {
	texts := files.Texts{"requirements.txt": []byte("torch==2.6.0+cu124\ntransformers==4.51.3\naccelerate>=1.0\n" +
		"trl==0.19.1\n"), "sft.yaml": []byte("model_name_or_path: qwen3-4b\ndataset_name: x\nmax_length: 1024\n" +
		"dataset_text_field: text\nassistant_only_loss: true\npacking: true\n")}
	q := Request{Model: "qwen3-4b", Recorded: Recorded{Environment: "requirements.txt"}, Texts: texts,
		GPUs: 2, FSDP: "2", Configs: []string{"sft.yaml"}}
	for transformers, want := range map[string]string{"": "4.51.3", "4.40.0": "4.40"} {
		q.Transformers = transformers
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if v := j.Versions; v.Torch.String() != "2.6" || v.Transformers.String() != want {
			t.Errorf("%+v", v)
		}
		said := strings.Join(j.Assumptions, "\n")
		for _, line := range []string{"torch 2.6.0+cu124: requirements.txt:1", "trl 0.19.1: requirements.txt:4",
			`accelerate: requirements.txt:3:1 says no one release (">=1.0")`, "transformers " + transformers} {
			if !strings.Contains(said, line) {
				t.Errorf("%q is not said:\n%s", line, said)
			}
		}
	}
	texts["prose.txt"] = []byte("A page\nof words\n")
	for _, path := range []string{"none.txt", "prose.txt"} {
		q.Environment = path
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestReleaseOfPEFT: before 0.21 PEFT made in full what it adds to parameters.
func TestReleaseOfPEFT(t *testing.T) {
	adapter := filepath.Join(t.TempDir(), "adapter_config.json")
	err := os.WriteFile(adapter, []byte(`{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"],
		"target_parameters": ["mlp.experts.gate_up_proj"], "lora_dropout": 0.0}`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for release, want := range map[string]bool{"0.20.0": true, "0.21.0": false} {
		q := Request{Model: "qwen3-30b-a3b", Adapter: adapter, Recorded: Recorded{Environment: "freeze.txt"}, GPUs: 1,
			Texts: files.Texts{"freeze.txt": []byte("torch==2.13.0\npeft==" + release + "\n")}}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if j.AddsInFull != want || !strings.Contains(strings.Join(j.Assumptions, "\n"), "peft "+release) {
			t.Errorf("%s: %v, %v", release, j.AddsInFull, j.Assumptions)
		}
	}
}
