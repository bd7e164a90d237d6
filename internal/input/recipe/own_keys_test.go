package recipe

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/recipe/strict"
)

// A program's own keys are in testdata/keys, made from its source by scripts/program-keys. Each has to change what is
// read, be refused or be noted, or stand with a reason in a list of keys that change no memory. A key that is accepted
// and ignored in silence is the worst mistake that a reader can make: the plan is of another training.

// ownKey is a key of a program, and texts of values that it takes.
type ownKey struct {
	name, kind, usual, releases string
	isPast                      bool // the newest release of the list has it no more
	isOpen                      bool // a note that the program does not know it counts: readers of verl lack keys yet
}

// values returns values of the key, as YAML has them, other than its default.
func (k ownKey) values() []string {
	var list []string
	for kind := range strings.FieldsSeq(k.kind) {
		switch kind {
		case "bool":
			list = append(list, "true", "false")
		case "int":
			list = append(list, "2", "64", "1", "0")
		case "float":
			list = append(list, "0.25", "2.0", "1.0", "0")
		case "text":
			list = append(list, "bfloat16", "float32", "x", "other/model", "true")
		case "list":
			list = append(list, "[x]", "[q_proj, lm_head]", "[1, 2]")
		case "object":
			list = append(list, "{x: 1}", "{}")
		case "any":
			list = append(list, "true", "2", "x", "{x: 1}", "[x]")
		default:
			list = append(list, strings.Split(kind, "|")...)
		}
	}
	return slices.DeleteFunc(list, func(value string) bool { return strings.EqualFold(value, k.usual) })
}

// ownKeysOf reads the list of a program's keys.
func ownKeysOf(t *testing.T, program string) (keys []ownKey) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "keys", program+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(parts) != 4 {
			t.Fatalf("%s: %q is no line of a key", program, line)
		}
		keys = append(keys, ownKey{name: parts[0], kind: parts[1], usual: parts[2], releases: parts[3]})
	}
	heading, _, _ := strings.Cut(string(text), "\n") // it ends with the newest release
	newest := strings.TrimSuffix(heading[strings.LastIndexByte(heading, ' ')+1:], ".")
	for i, k := range keys {
		keys[i].isOpen = strings.HasPrefix(program, "verl")
		keys[i].isPast = keys[i].isOpen || k.releases != newest && !strings.HasSuffix(k.releases, " "+newest)
	}
	return keys
}

// with returns a text in YAML with one more value. A key with dots is in sections, which the text may have on lines of
// their own.
func with(text, key, value string) string {
	d, err := strict.ParseYAML("train.yaml", []byte(text))
	if err != nil {
		panic(err)
	}
	v, err := strict.ParseYAML("value.yaml", []byte("x: "+value))
	if err != nil {
		panic(err)
	}
	r, err := d.Revise(key, v.Root.Find("x"))
	if err != nil {
		return within(text, strings.Split(key, "."), "", value)
	}
	return string(r.Text)
}

// in returns a text with a value of the key.
func (k ownKey) in(text, value string) string {
	made := with(text, k.name, value)
	if d, err := strict.ParseYAML("train.yaml", []byte(text)); k.isOpen && err == nil && strings.Contains(k.name, ".") {
		if v, err := strict.ParseYAML("value.yaml", []byte("x: "+value)); err == nil {
			if _, err = d.Revise(k.name, v.Root.Find("x")); err != nil {
				return text + k.name + ": " + value + "\n"
			}
		}
	}
	return made
}

// within returns a text in YAML with a value that Revise cannot put there: in the sections that it has, or new ones.
func within(text string, path []string, indent, value string) string {
	if len(path) == 1 {
		return text + indent + path[0] + ": " + value + "\n"
	}
	heading := indent + path[0] + ":\n"
	before, after, has := strings.Cut("\n"+text, "\n"+heading)
	if !has {
		return text + heading + within("", path[1:], indent+"  ", value)
	}
	return strings.TrimPrefix(before+"\n", "\n") + heading + within("", path[1:], indent+"  ", value) + after
}

// said is what a file was read as, without places and notes.
func said(x any) string {
	var b strings.Builder
	say(&b, reflect.ValueOf(x))
	return b.String()
}

func say(b *strings.Builder, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if re, is := regexpOf(v); is {
			b.WriteString(re)
		} else if !v.IsNil() {
			b.WriteByte('&')
			say(b, v.Elem())
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[fault.Position]() {
			return
		}
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; name != "Notes" && name != "document" && !v.Field(i).IsZero() {
				fmt.Fprintf(b, "%s:", name)
				say(b, v.Field(i))
			}
		}
		b.WriteByte(';')
	case reflect.Slice:
		for i := range v.Len() {
			say(b, v.Index(i))
			b.WriteByte(',')
		}
	case reflect.Map:
		for _, key := range slices.SortedFunc(slices.Values(v.MapKeys()), func(x, y reflect.Value) int {
			return strings.Compare(x.String(), y.String())
		}) {
			fmt.Fprintf(b, "%v=", key)
			say(b, v.MapIndex(key))
		}
	default:
		fmt.Fprintf(b, "%v ", v)
	}
}

// regexpOf returns a regular expression as it was written.
func regexpOf(v reflect.Value) (string, bool) {
	if v.Type() != reflect.TypeFor[*regexp.Regexp]() || v.IsNil() {
		return "", false
	}
	return v.Elem().FieldByName("expr").String(), true
}

// read of a program: what a text in YAML is read as, and the notes about it.
type ownReading func(text string) (read any, notes []Note, err error)

func readsFramework(text string) (any, []Note, error) {
	f, err := ParseFramework("train.yaml", []byte(text), Source{})
	if err != nil {
		return nil, nil, err
	}
	if f == nil {
		return nil, nil, fmt.Errorf("no program has %q", text)
	}
	return f, f.Notes, nil
}

// readsArguments reads the arguments of a program that makes those of Megatron-LM of them.
func readsArguments(mark string) ownReading {
	return func(text string) (any, []Note, error) {
		d, err := strict.ParseYAML("train.yaml", []byte(text))
		if err != nil {
			return nil, nil, err
		}
		at := slices.IndexFunc(kinds, func(k *Kind) bool { return k.Marks == mark })
		made, err := kinds[at].Arguments(d)
		if err != nil {
			return nil, nil, err
		}
		arguments := map[string]string{}
		for _, m := range made.Root.Members {
			arguments[m.Name] = m.Value.String()
		}
		return []any{made.Reference, made.Policy, made.Nodes, made.PerNode, arguments}, made.Notes, nil
	}
}

func readsTraining(text string) (any, []Note, error) {
	r, err := ParseTraining("train.yaml", []byte(text), Source{})
	if err != nil {
		return nil, nil, err
	}
	return r, r.Notes, nil
}

func readsAdapter(text string) (any, []Note, error) {
	d, err := strict.ParseYAML("adapter.yaml", []byte(text))
	if err != nil {
		return nil, nil, err
	}
	a, err := peft.Read(d)
	if err != nil {
		return nil, nil, err
	}
	return a, a.Notes, nil
}

// ownKeys are the programs with the files that a key is added to, and further values of keys whose kind does not tell
// them. One file where the key has an effect is enough.
var ownKeys = map[string]struct {
	reads  ownReading
	lists  []string // files with the keys that change no memory
	texts  []string
	values map[string]string
}{
	"trl": {readsFramework, []string{"trl/ignored.txt"}, []string{
		trlText, trlText + "use_peft: true\nlora_r: 16\n", trlText + "load_in_4bit: true\nuse_peft: true\n",
		trlText + "trl_dpo: true\nuse_peft: true\n", trlText + "trl_grpo: true\nuse_vllm: true\n",
		trlText + "trl_kto: true\n", trlText + "cpo_alpha: 1\n", trlText + "trl_reward: true\nuse_peft: true\n",
	}, map[string]string{"model_init_kwargs": "{dtype: bfloat16}", "loss_type": "sft", "lora_task_type": "SEQ_CLS",
		"pad_to_multiple_of": "1000"}},
	"axolotl": {readsFramework, []string{"axolotl/ignored.txt"}, []string{
		axolotlText, ownQLoRA, axolotlText + "adapter: lora\nlora_target_linear: true\nlora_r: 8\n",
		"base_model: x\nsequence_len: 512\n",
		"base_model: x\nsequence_len: 512\nbf16: false\nadapter: lora\nlora_target_linear: true\n",
		axolotlText + "rl: dpo\n", axolotlText + "rl: simpo\n", axolotlText + "rl: kto\n",
		axolotlText + "fsdp_version: 2\nfsdp_config: {offload_params: false}\n",
		ownKernels, ownKernels + "use_scattermoe: true\n",
		axolotlText + "optimizer: galore_adamw\noptim_target_modules: [attn]\n",
		axolotlText + "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n",
		axolotlText + "reward_model: true\n", axolotlText + "gradient_checkpointing: true\n",
		axolotlText + "tiled_mlp: true\n", axolotlText + "val_set_size: 0.1\n",
	}, map[string]string{"dpo_loss_type": "[sigmoid, sft]", "eval_strategy": `"no"`, "bnb_config_kwargs": "{bnb_4bit_use_double_quant: false}",
		"experts_implementation": "batched_mm", "expert_backend": "scattermoe", "optim_args": "rank=64",
		"model_quantization_config_kwargs": "{weight_block_size: [64, 64]}", "overrides_of_model_config": "{x: 1}",
		"device_map": "auto", "eval_sequence_len": "100000", "pad_to_multiple_of": "1000",
		"adapter": "lora", "fsdp_config": "{offload_params: true}", "rl": "orpo"}},
	"llamafactory": {readsFramework, []string{"llamafactory/ignored.txt"}, []string{
		factoryText, factoryText + "quantization_bit: 4\nbf16: true\n",
		ownFull + "bf16: true\n", ownFull + "use_galore: true\n",
		ownFull + "use_apollo: true\n", ownFull + "use_badam: true\noptim: adamw_torch\n", factoryText + "stage: dpo\n",
		"model_name_or_path: x\nfinetuning_type: freeze\n", "model_name_or_path: x\nfinetuning_type: oft\n",
		factoryText + "use_kt: true\n", factoryText + "stage: rm\n",
	}, nil},
	"ms-swift": {readsFramework, []string{"swift/ignored.txt"}, []string{
		swiftText, swiftText + "quant_method: bnb\nquant_bits: 4\n", "model: x\ntuner_type: full\n",
		"model: x\nattn_impl: sdpa\n", "model: x\nsplit_dataset_ratio: 0\ntuner_type: full\nfsdp: full_shard\n",
		swiftText + "rlhf_type: dpo\n", swiftText + "rlhf_type: cpo\n", swiftText + "rlhf_type: rm\n",
		swiftText + "rlhf_type: grpo\nuse_vllm: true\nvllm_mode: colocate\n", swiftText +
			"rlhf_type: grpo\nuse_vllm: true\nvllm_mode: colocate\nmax_length: 512\n",
		swiftText + "task_type: seq_cls\nnum_labels: 2\n",
		swiftText + "packing: true\n", swiftText + "packing_length: 4096\nmax_length: 512\n",
	}, map[string]string{"gradient_checkpointing_kwargs": "{use_reentrant: true}", "train_type": "full",
		"sft_type": "full", "use_vllm": "false", "fsdp_config": "{fsdp_version: 2}", "init_weights": "lora-ga",
		"loss_type": "[sft]"}},
	"torchtune": {readsFramework, []string{"torchtune/ignored.txt"}, []string{ownTune, ownTuneLoRA},
		map[string]string{"fsdp_reshard_after_forward": "false",
			"loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}},
	"litgpt": {readsFramework, []string{"litgpt/ignored.txt"}, []string{ownLit, ownLit + "lora_r: 8\n"}, nil},
	"torchtitan": {readsFramework, []string{"torchtitan/ignored.txt"}, []string{ownTitan, ownTitan +
		"parallelism:\n  pipeline_parallel_degree: 2\n  tensor_parallel_degree: 2\n",
		strings.Replace(ownTitan, "mode: none", "mode: selective", 1), ownTitan + "compile:\n  enable: true\n",
	}, map[string]string{"parallelism.module_fqns_per_model_part": "[[layers.0], [layers.1]]"}},
	"verl": {readsFramework, []string{"verl/ignored.txt", "verl/fsdp_ignored.txt"}, []string{ownVerl,
		strings.Replace(ownVerl, "    path: x\n", "    path: x\n    lora_rank: 8\n", 1),
		strings.Replace(ownVerl, "_micro_batch_size_per_gpu: 1",
			"_max_token_len_per_gpu: 4096\n    use_dynamic_bsz: true", 1),
		ownVerl + ownCritic + "  ppo_micro_batch_size_per_gpu: 1\n  model:\n    path: x\n",
		ownVerl + ownCritic + "  ppo_micro_batch_size: 8\n  model:\n    path: x\n",
		ownVerl + ownCritic + "  use_dynamic_bsz: true\n  model:\n    path: x\n",
	}, map[string]string{
		"actor_rollout_ref.rollout.name": "sglang", "algorithm.adv_estimator": "gae",
		"critic.model.override_config": "{attn_implementation: sdpa}",
		"critic.ppo_mini_batch_size":   "64", "critic.forward_max_token_len_per_gpu": "512",
		"critic.forward_micro_batch_size": "16", "critic.forward_micro_batch_size_per_gpu": "4",
		"critic.ppo_micro_batch_size_per_gpu":    "4",
		"actor_rollout_ref.model.target_modules": "[q_proj]"}},
	"verl-megatron": {readsArguments("verl_megatron"), []string{"verl/ignored.txt", "verl/megatron_ignored.txt"},
		[]string{ownVerlMegatron, strings.Replace(ownVerlMegatron, "_micro_batch_size_per_gpu: 1",
			"_max_token_len_per_gpu: 4096\n    use_dynamic_bsz: true", 1),
			strings.Replace(ownVerlMegatron, "    use_kl_loss: true\n", "    optim:\n      "+
				"use_precision_aware_optimizer: true\n", 1)}, map[string]string{
			"actor_rollout_ref.rollout.name": "sglang", "algorithm.adv_estimator": "gae",
			"actor_rollout_ref.actor.megatron.dtype": "float16", "actor_rollout_ref.actor.optim.exp_avg_dtype": "bf16",
			"actor_rollout_ref.actor.optim.exp_avg_sq_dtype": "bf16",
			"actor_rollout_ref.actor.optim.main_grads_dtype": "bf16"}},
	"openrlhf": {readsFramework, []string{"openrlhf/ignored.txt"}, []string{ownOpenRLHF,
		ownOpenRLHF + "colocate_all_models: true\nvllm_enable_sleep: true\nadvantage_estimator: rloo\n",
		ownOpenRLHF + "colocate_all_models: true\nvllm_enable_sleep: true\n",
		ownOpenRLHF + "colocate_actor_ref: true\nlora_rank: 8\n",
		ownOpenRLHF + "use_dynamic_batch: true\n", ownOpenRLHF + "gradient_checkpointing: true\n",
		"openrlhf_ppo: true\npretrain: x\nvllm_num_engines: 1\nzero_stage: 2\n"}, map[string]string{
		"attn_implementation": "sdpa", "param_dtype": "fp16",
		"grad_accum_dtype": "fp32"}},
	"slime": {readsArguments("slime_train"), []string{"slime/ignored.txt"}, ownSlime, ownSlimeValues},
	"miles": {readsArguments("slime_train"), []string{"slime/ignored.txt"}, ownSlime, ownSlimeValues},
	"transformers": {readsTraining, []string{"testdata/keys/transformers-ignored.txt"}, []string{
		"per_device_train_batch_size: 1\n", "per_device_train_batch_size: 1\nfsdp: full_shard\n",
		"per_device_train_batch_size: 1\nfsdp: full_shard auto_wrap\n",
		"per_device_train_batch_size: 1\noptim: galore_adamw\noptim_target_modules: [attn]\n",
		"per_device_train_batch_size: 1\nuse_liger_kernel: true\n",
		"per_device_train_batch_size: 1\neval_strategy: steps\n",
	}, map[string]string{"optim_args": "rank=64", "mp_parameters": "\"{p: 2}\"", "liger_kernel_config": "{rope: false}",
		"optim_target_modules": "[mlp]", "fp16_backend": "apex"}},
	"peft": {readsAdapter, []string{"testdata/keys/peft-ignored.txt"}, []string{
		"peft_type: LORA\ntarget_modules: [q_proj]\n"}, map[string]string{"layer_replication": "[[0, 2]]",
		"alora_invocation_tokens": "[1]"}},
}

const (
	ownQLoRA   = axolotlText + "adapter: qlora\nload_in_4bit: true\nlora_target_linear: true\nlora_r: 8\n"
	ownKernels = axolotlText + "plugins: [axolotl.integrations.kernels.KernelsPlugin]\n"
	ownFull    = "model_name_or_path: x\nfinetuning_type: full\n"
	ownTune    = "tokenizer:\n  max_seq_len: 512\nmodel:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n" +
		"checkpointer:\n  _component_: x\noptimizer:\n  _component_: torch.optim.AdamW\ndtype: bf16\n"
	ownTuneLoRA = "tokenizer:\n  max_seq_len: 512\nmodel:\n  _component_: torchtune.models.llama3_1." +
		"lora_llama3_1_8b\n" +
		"  lora_attn_modules: [q_proj]\n" +
		"checkpointer:\n  _component_: x\noptimizer:\n  _component_: torch.optim.AdamW\ndtype: bf16\n"
	ownLit = "checkpoint_dir: checkpoints/x/y\nlogger_name: csv\nprecision: bf16-true\ntrain:\n" +
		"  max_seq_length: 512\n"
	ownTitan = "model:\n  name: llama3\n  flavor: 8B\ntraining:\n  seq_len: 512\nactivation_checkpoint:\n" +
		"  mode: none\n"
	ownOpenRLHF = "openrlhf_ppo: true\npretrain: x\nvllm_num_engines: 1\nzero_stage: 3\n"
	ownCritic   = "critic:\n  enable: true\n"
	ownVerl     = "algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  actor:\n" +
		"    ppo_micro_batch_size_per_gpu: 1\n" +
		"    strategy: fsdp2\n  model:\n    path: x\n  rollout:\n    name: vllm\n"
)

var ownSlime = []string{
	"rollout_batch_size: 8\nrollout_max_context_len: 512\nuse_dynamic_batch_size: true\nmax_tokens_per_gpu: 256\n" +
		"colocate: true\n",
	"rollout_batch_size: 8\nmicro_batch_size: 2\nseq_length: 512\nglobal_batch_size: 4\ncolocate: true\n",
	"rollout_batch_size: 8\nseq_length: 512\nuse_opd: true\ncolocate: true\n",
	"rollout_batch_size: 8\nseq_length: 512\nkeep_old_actor: true\n",
	"rollout_batch_size: 8\nseq_length: 512\ncolocate: true\nuse_rollout_logprobs: true\n",
	"rollout_batch_size: 8\nseq_length: 512\ncolocate: true\nuse_routing_replay: true\n",
}

var ownSlimeValues = map[string]string{"opd_type": "megatron", "train_backend": "fsdp",
	"data_pad_size_multiplier": "1000"}

const ownVerlMegatron = "algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  actor:\n" +
	"    ppo_micro_batch_size_per_gpu: 1\n    strategy: megatron\n    use_kl_loss: true\n    megatron:\n" +
	"      param_offload: false\n      tensor_model_parallel_size: 2\n      pipeline_model_parallel_size: 2\n" +
	"  model:\n    path: qwen2.5-0.5b\n  rollout:\n    name: vllm\n"

// TestOwnKeys tries every key that a program has.
func TestOwnKeys(t *testing.T) {
	for program, p := range ownKeys {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			reasons := reasonsOf(t, p.lists)
			if !slices.Contains([]string{"transformers", "peft", "slime", "miles", "verl-megatron"}, program) {
				for key, why := range reasonsOf(t, ownKeys["transformers"].lists) {
					if reasons[key] == "" {
						reasons[key] = why
					}
				}
			}
			for _, key := range ownKeysOf(t, program) {
				why := reasonOf(reasons, key.name)
				values := key.values()
				if more := p.values[key.name]; more != "" {
					values = append(values, more)
				}
				effect := effectOf(t, key, values, p.reads, p.texts, why == "")
				switch {
				case effect == "" && why == "":
					t.Errorf("%s (%s, default %s, %s) is accepted and changes nothing", key.name, key.kind, key.usual,
						key.releases)
				case effect == "changed" && why != "":
					t.Errorf("%s changes what is read, and is listed without memory: %s", key.name, why)
				}
			}
		})
	}
}

// effectOf returns what a key does to one of the texts: "refused", "noted" or "changed", or "" if it does nothing. The
// first effect is enough for a key that is sought to have one.
func effectOf(t *testing.T, key ownKey, values []string, reads ownReading, texts []string, sought bool) (
	effect string) {
	t.Helper()
	if !sought && testing.Short() {
		texts = texts[:1]
	}
	for _, text := range texts {
		before, known, err := reads(text)
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		was, tried := said(before), slices.Clone(values)
		for i := 0; i < len(tried) && (sought || i < 1); i++ {
			after, notes, err := reads(key.in(text, tried[i]))
			switch {
			case err != nil && !strings.Contains(err.Error(), ", expected "):
				effect = "refused"
			case err != nil: // a value of another kind
				if _, words, is := strings.Cut(err.Error(), ", expected one of "); is {
					for _, word := range quotedWord.FindAllStringSubmatch(words, -1) {
						if !slices.Contains(tried, word[1]) && word[1] != key.usual {
							tried = append(tried, word[1])
						}
					}
				}
			case was != said(after):
				return "changed"
			case notesOn(key.name, key.isPast, known, notes):
				effect = "noted"
			}
			if effect != "" && sought {
				return effect
			}
		}
	}
	return effect
}

// notesOn reports whether a key makes notes on it appear or vanish. That the program does not know it is one only for a
// key that its newest release has no more.
func notesOn(key string, isPast bool, before, after []Note) bool {
	last := regexp.MustCompile(`\b` + regexp.QuoteMeta(key[strings.LastIndexByte(key, '.')+1:]) + `\b`)
	differs := func(notes, others []Note) bool {
		return slices.ContainsFunc(notes, func(n Note) bool {
			return last.MatchString(n.What) && (!strings.Contains(n.What, " knows no key ") || isPast) &&
				!slices.ContainsFunc(others, func(o Note) bool { return o.What == n.What })
		})
	}
	return differs(after, before) || differs(before, after)
}

var quotedWord = regexp.MustCompile(`"([^"]+)"`)

// reasonOf returns the reason of a key, by its name or by a pattern: *.end, begin.*, or both.
func reasonOf(reasons map[string]string, key string) string {
	if why := reasons[key]; why != "" {
		return why
	}
	for pattern, why := range reasons {
		begin, isBegin := strings.CutSuffix(pattern, ".*")
		end, isEnd := strings.CutPrefix(begin, "*.")
		inside := "." + key + "."
		switch {
		case isBegin && isEnd && strings.Contains(inside, "."+end+"."),
			isBegin && !isEnd && strings.HasPrefix(key, begin+"."),
			!isBegin && isEnd && strings.HasSuffix(key, "."+end):
			return why
		}
	}
	return ""
}

// reasonsOf returns the reasons of the keys that change no memory: the heading above them in a list.
func reasonsOf(t *testing.T, lists []string) map[string]string {
	t.Helper()
	reasons := map[string]string{}
	for _, name := range lists {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		why := ""
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			heading, is := strings.CutPrefix(line, "## ")
			switch {
			case is:
				why = heading
			case line == "" || strings.HasPrefix(line, "#"):
			case why == "":
				t.Errorf("%s: %s has no reason above it", name, line)
			default:
				reasons[line] = why
			}
		}
	}
	return reasons
}
