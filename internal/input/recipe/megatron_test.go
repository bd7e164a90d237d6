package recipe

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

const megatronScript = `#!/bin/bash
LAYERS=12
MODEL=(
    --num-layers $LAYERS --hidden-size 512  # a comment
    --num-attention-heads 8
    --recompute-modules moe_act mlp
    --bf16)
torchrun --nproc_per_node 8 examples/pretrain_bert.py ${MODEL[@]} --seq-length=1024 \
    --micro-batch-size 2 --micro-batch-size 4
`

const megatronTest = `ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --recompute-modules: "[moe_act mlp]"
  --bf16: true
  --seq-length: 1024
  --micro-batch-size: 4
  --lr: 1.0e-5
`

func TestReadMegatron(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{"train.sh": megatronScript, "model_config.yaml": megatronTest,
		"args.yaml": "num_layers: 12\nhidden_size: 512\nnum_attention_heads: 8\nbf16: true\nseq_length: 1024\n" +
			"micro_batch_size: 4\nrecompute_modules: [moe_act, mlp]\n",
		"": "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --bf16 --seq-length 1024 --micro-batch-size 4 " +
			"--recompute-modules moe_act mlp"} {
		arguments := text
		if name != "" {
			arguments = filepath.Join(folder, name)
			if err := os.WriteFile(arguments, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m, err := ReadMegatron(arguments, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if m.Layers != 12 || m.Hidden != 512 || m.Heads != 8 || !m.BF16 || m.Sequence != 1024 || m.MicroBatch != 4 {
			t.Errorf("%s: %+v", name, m)
		}
		if got := strings.Join(m.RecomputeModules, " "); got != "moe_act mlp" {
			t.Errorf("%s: modules %q", name, got)
		}
		if m.TopK != 2 || m.AttentionDrop != 0.1 || m.Implement != "transformer_engine" || m.VocabularyUnits != 128 {
			t.Errorf("%s: the defaults are not those of Megatron-LM: %+v", name, m)
		}
		if want := map[bool]string{true: "pretrain_bert"}[name == "train.sh"]; m.Script != want {
			t.Errorf("%s: script %q, expected %q", name, m.Script, want)
		}
	}
}

const megatronJobScript = `#!/bin/bash
GPUS=${GPUS_PER_NODE:-4}
NODES=2; SIZE=7B
FP8=false
[ -z "$TP" ] && TP=2
[[ $SIZE == 7B ]] || LAYERS=99
if [ $SIZE = 7B ]; then
  LAYERS=12
  model=" --hidden-size 512 \
    --num-attention-heads 8 "
elif [ $SIZE = 70B ]; then
  LAYERS=80
else
  LAYERS=1
fi
ARGS=(
  --num-layers ${LAYERS} # a comment
  --moe-layer-freq "'([0]*3+[1]*9)'"
)
if [[ "$FP8" == "true" || $FP8 -eq 1 ]]; then
  ARGS+=(--fp8-format hybrid
    --fp8-param-gather)
fi
MORE=("--seq-length 1024" "--micro-batch-size 4")
ARGS+=("${MORE[@]}")
while read -r line; do
  ARGS+=(--fp16)
done
run="torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py ${ARGS[@]} $model"
echo $run
srun -N $NODES bash -c "echo start; torchrun --nproc_per_node=$GPUS --nnodes=$NODES pretrain_gpt.py \
  --tensor-model-parallel-size $TP ${ARGS[*]} $model --bf16 --recompute-modules moe_act mlp"
`

// TestReadMegatronScript: conditions, arrays, variables and the launcher of a script are read as Bash runs them.
func TestReadMegatronScript(t *testing.T) {
	file := filepath.Join(t.TempDir(), "train.sh")
	for script, want := range map[string]string{
		megatronJobScript: "",
		"python pretrain_gpt.py --num-layers 2\npython pretrain_gpt.py --num-layers 4\n": "starts 2 trainings",
		"A=(--num-layers 2\n": "no script that Bash reads",
		// A program of its own is named in place of its arguments.
		"torchrun --nproc_per_node 2 own/train.py --num-layers 2 --hidden-size 8 --use-te": "the script starts " +
			"own/train.py, a program with arguments that Megatron-LM does not have, such as --use-te",
		"if [ -z $A ]; then echo; fi; fi\n": "no script that Bash reads",
		"if [ -z $A ]; then echo; fi\n":     "no arguments",
	} {
		if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := ReadMegatron(file, nil)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, expected %q", script, err, want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", script, err)
			continue
		}
		if script != megatronJobScript {
			continue
		}
		if m.Layers != 12 || m.Hidden != 512 || m.Sequence != 1024 || m.MicroBatch != 4 || m.Tensor != 2 || m.FP16 ||
			m.FP8 != "" || !m.BF16 || m.LayerFrequency != "([0]*3+[1]*9)" || m.Ranks != 8 ||
			m.Script != "pretrain_gpt" ||
			strings.Join(m.Unset, " ") != "TP" || strings.Join(m.Looped, " ") != "ARGS" {
			t.Errorf("%+v", m)
		}
	}
}

func TestReadMegatronRefuses(t *testing.T) {
	for arguments, want := range map[string]string{
		"--num-layer 12 --hidden-size 512":          `did you mean "num_layers"`,
		"--num-layers many --hidden-size 512":       "a whole number",
		"--optimizer adamw --num-layers 2":          `one of "adam"`,
		"/nowhere/train.sh":                         "there is no such file",
		"--hidden-size 512 --attention-dropout 1.5": "from 0 to 1",
	} {
		_, err := ReadMegatron(arguments, nil)
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, expected %q", arguments, err, want)
		}
	}
}

func TestTokensIn(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{"vocab.json": `{"a": 0, "b": 1, "c": 2}`, "vocab.txt": "a\nb\nc\n"} {
		file := filepath.Join(folder, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := tokensIn(file); got != 3 || err != nil {
			t.Errorf("%s: %d tokens, %v", name, got, err)
		}
	}
}

// FuzzMegatron: arguments are read or refused as bad input.
func FuzzMegatron(f *testing.F) {
	f.Add("nemo.yaml", []byte(nemoText))
	f.Add("bridge.yaml", []byte(bridgeText))
	f.Add("train.sh", []byte(megatronScript))
	f.Add("model_config.yaml", []byte(megatronTest))
	f.Add("job.sh", []byte(megatronJobScript))
	f.Add("a", []byte("--num-layers 1 --moe-layer-freq '([0]*3+[1]*11)' --split 1,2 'x"))
	f.Fuzz(func(t *testing.T, name string, text []byte) {
		d, _, err := parseMegatron(name, text)
		known := megatronSchema().Keys()
		isUnknown := func(m strict.Member) bool { _, is := known[m.Name]; return !is }
		if err == nil && !slices.ContainsFunc(d.Root.Members, isUnknown) { // advice on unknown names takes long
			_, err = megatronSchema().Read(d)
		}
		var input *fault.Input
		if err != nil && !errors.As(err, &input) {
			t.Errorf("%v is no fault of the input", err)
		}
	})
}
