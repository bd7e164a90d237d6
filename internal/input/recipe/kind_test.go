package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/recipetest"
)

// loaders are the functions that read the files of each flag.
var loaders = map[string]func(string) error{
	"--deepspeed":     func(path string) error { _, err := LoadDeepSpeed(path, Source{}); return err },
	"--accelerate":    func(path string) error { _, err := LoadAccelerate(path, Source{}); return err },
	"--training-args": func(path string) error { _, err := LoadTraining(path, Source{}); return err },
	"--adapter":       func(path string) error { _, err := LoadAdapter(path); return err },
	"--quantization":  func(path string) error { _, err := LoadQuantization(path); return err },
}

// TestKinds gives each flag files of other kinds. Each is refused with its
// probable kind and the flag for it.
func TestKinds(t *testing.T) {
	const training = `{"per_device_train_batch_size": 4, "num_train_epochs": 3, "bf16": true}`
	for _, c := range []struct{ name, text, kind string }{
		{"ds.json", `{"train_batch_size": 8, "zero_optimization": {"stage": 2}}`, "--deepspeed"},
		{"launch.yaml", "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 4\n", "--accelerate"},
		{"args.json", training, "--training-args"},
		{"args.yaml", "learning_rate: 1.0e-5\nper_device_train_batch_size: 4\n", "--training-args"},
		{"sft.json", `{"learning_rate": 1.0e-5, "max_length": 1024, "packing": true, "bf16": true}`, "--training-args"},
		{"lora.json", `{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}`, "--adapter"},
		{"bnb.json", `{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}`, "--quantization"},
		{"config.json",
			`{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "quantization_config": {"load_in_8bit": true}}`,
			"--quantization"},
		{"qlora.yml",
			"base_model: mistralai/Mistral-7B-v0.1\nload_in_4bit: true\nadapter: qlora\nsequence_len: " +
				"8192\nmicro_batch_size: 2\nlearning_rate: 0.0002\nbf16: true\n", "axolotl"},
		{"factory.yaml",
			"model_name_or_path: x\nstage: sft\nfinetuning_type: lora\nlora_target: " +
				"all\nper_device_train_batch_size: 1\nbf16: true\n", "LLaMA-Factory"},
		{"trl.yaml", "model_name_or_path: x\nuse_peft: true\nper_device_train_batch_size: 1\nbf16: true\n",
			"training script"},
		{"_config.yml", "title: A site\nbaseurl: /docs\nmarkdown: kramdown\nplugins:\n  - jekyll-feed\n", ""},
		{"package.json", `{"name": "site", "version": "1.0.0", "private": true}`, ""},
		{"one.json", `{"bf16": true, "widgets": 3, "colour": "blue"}`, ""},
	} {
		path := filepath.Join(t.TempDir(), c.name)
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		for flag, load := range loaders {
			err := load(path)
			switch {
			case flag == c.kind && err != nil:
				t.Errorf("%s refuses %s: %v", flag, c.name, err)
			case flag != c.kind && err == nil:
				t.Errorf("%s accepts %s", flag, c.name)
			case flag != c.kind && c.name != "config.json" && !strings.Contains(err.Error(), c.kind):
				t.Errorf("%s does not say of %s that it is of the kind %s: %v", flag, c.name, c.kind, err)
			}
			if err != nil {
				recipetest.RequireInput(t, err)
			}
		}
		if err := Misplaced(path); (err == nil) != (c.kind == "" || c.name == "config.json") {
			t.Errorf("as a model, %s: %v", c.name, err)
		}
	}
}

// TestKindsOfPublicFiles gives some hundred configurations from public
// repositories to every flag. Only the flag of its kind accepts a file.
func TestKindsOfPublicFiles(t *testing.T) {
	// These files of other kinds hold only fields of TrainingArguments.
	fields := []string{"fsdp", "fsdp_config"}
	files := filestest.PublicConfigs(t, "../../../../shared/data/configs")
	for _, c := range files {
		path := c.Path
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		d := parseAny(path, text)
		isFields := d != nil && d.Root.Kind == '{' && len(d.Root.Members) == len(fields)
		for _, name := range fields {
			isFields = isFields && d.Root.Member(name) != nil
		}
		for flag, load := range loaders {
			// accelerate's configuration in a file of another program
			launch := d != nil && d.Root.Member("distributed_type") != nil
			if load(path) == nil && flag != "--"+c.Kind && !(isFields && flag == "--training-args") &&
				!(launch && flag == "--accelerate") {
				t.Errorf("%s accepts %s, of the kind %s", flag, c.Name, c.Kind)
			}
		}
		if d != nil {
			if kind, _ := recognized(d.Root); kind != nil && c.Kind != "other" && kind.Flag != "--"+c.Kind {
				t.Errorf("%s, of the kind %s, is taken for a %v", c.Name, c.Kind, kind)
			}
		}
	}
	if len(files) < 200 {
		t.Errorf("only %d files", len(files))
	}
}

func TestAdapterBad(t *testing.T) { recipetest.Refused(t, "adapter", 50, LoadAdapter) }

// ranks is the number of ranks for the files of testdata/bad.
const ranks = 8

func TestDeepSpeedBad(t *testing.T) {
	recipetest.Refused(t, "deepspeed", 105, func(path string) (*deepspeed.Config, error) {
		d, err := LoadDeepSpeed(path, Source{})
		if err == nil {
			_, err = d.ResolveBatch(ranks)
		}
		return d, err
	})
}

// newest returns a function that loads what the newest release of DeepSpeed reads.
func newest[T any](load func(string, Source) (*T, error)) func(string) (*T, error) {
	return func(path string) (*T, error) { return load(path, Source{}) }
}

// defaults is the meaning of an empty configuration of DeepSpeed, without the notes.
func defaults() deepspeed.Config {
	d, err := deepspeed.Parse("", []byte("{}"), version.Version{})
	if err != nil {
		panic(err)
	}
	d.File, d.Notes = "", nil
	return *d
}
