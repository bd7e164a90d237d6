package megatron

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
)

// slimeText is a command of slime. Arguments are added behind it.
const slimeText = "ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 4 --colocate " +
	"--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32000 --position-embedding-type rope " +
	"--tensor-model-parallel-size 2 --context-parallel-size 2 --rollout-batch-size 16 --n-samples-per-prompt 8 " +
	"--global-batch-size 64 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-max-context-len 4096 " +
	"--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6"

// ofSlime decides a command of slime with further arguments.
func ofSlime(t *testing.T, more string) (*Job, error) {
	t.Helper()
	return ofScript(t, slimeText+" "+more+"\n")
}

// TestSlime holds what a command of slime means: of its batches, its copies of the parameters, its loss and its engine.
func TestSlime(t *testing.T) {
	batch := func(j *Job) string {
		return fmt.Sprintf("%d ranks, %d a node, %d tokens, %d micros, data %d", j.Degrees.World(), j.RanksPerNode,
			j.Sequence, j.Micros, j.Degrees.Data)
	}
	copies := func(j *Job) string { return fmt.Sprint(j.Policy.Copies, j.Policy.Reference, j.Policy.Judges) }
	loss := func(j *Job) string {
		l := j.Policy.Loss
		return fmt.Sprintf("scaled %t, entropy %t, masked %t, chunk %d", l.Scaled, l.TrainsEntropy, l.Masked, l.Chunk)
	}
	engine := func(j *Job) string {
		e := j.Policy.Engine
		if e == nil {
			return "none"
		}
		return fmt.Sprintf("%s %g of %d, sleep %d, server %t, backups %q, dropped %q, copies %d, reference %t", e.Name,
			e.Fraction, e.Tensor, e.Sleep, e.Server, e.Backups, e.Dropped, e.Copies, e.HostReference)
	}
	for _, tt := range []struct {
		more string
		of   func(*Job) string
		want string
	}{
		{"", batch, "8 ranks, 4 a node, 8192 tokens, 16 micros, data 2"},
		{"--rollout-max-context-len 16384", batch, "8 ranks, 4 a node, 16384 tokens, 32 micros, data 2"},
		{"--num-steps-per-rollout 2", batch, "8 ranks, 4 a node, 8192 tokens, 16 micros, data 2"},
		{"--max-tokens-per-gpu 1000 --rollout-max-context-len 100", batch,
			"8 ranks, 4 a node, 2048 tokens, 2 micros, data 2"},
		{"--actor-num-nodes $NODES", batch, "4 ranks, 4 a node, 8192 tokens, 32 micros, data 1"},
		{"", copies, "[actor] false true"},
		{"--global-batch-size 128", copies, "[actor] false false"}, // the loss has the log-probabilities
		{"--global-batch-size 128 --advantage-estimator gspo", copies, "[actor] false true"},
		{"--use-kl-loss", copies, "[actor] true true"},
		{"--kl-coef 0.1", copies, "[actor] true true"},
		{"--keep-old-actor", copies, "[actor old actor rollout actor] false true"},
		{"--keep-old-actor --update-weights-interval 2", copies, "[actor old actor] false true"},
		{"--use-opd --opd-type megatron --opd-teacher-load x", copies, "[actor teacher] false true"},
		{"--use-kl-loss --disable-compute-advantages-and-returns", copies, "[actor] true false"},
		{"", loss, "scaled false, entropy false, masked false, chunk 0"},
		{"--rollout-temperature 0.8 --entropy-coef 0.01 --rollout-top-p 0.9 --log-probs-chunk-size 512", loss,
			"scaled true, entropy true, masked true, chunk 512"},
		{"--loss-type sft_loss --entropy-coef 0.01", loss, "scaled false, entropy false, masked false, chunk 0"},
		{"--use-kl-loss", engine, `sglang 0.6 of 2, sleep 2, server false, backups "all", ` +
			`dropped "parameters+gradients", copies 1, reference true`},
		{"--no-offload-train --no-offload-rollout", engine,
			`sglang 0.6 of 2, sleep 0, server false, backups "", dropped "", copies 1, reference false`},
		{"--no-colocate --rollout-num-gpus 8", engine,
			`sglang 0.6 of 2, sleep 0, server true, backups "", dropped "", copies 1, reference false`},
		{"--vllm-gpu-memory-utilization 0.7", engine, `vllm 0.7 of 2, sleep 1, server false, backups "all", ` +
			`dropped "parameters+gradients", copies 1, reference false`},
		{"--vllm-max-num-seqs 64", engine, `vllm 0.92 of 2, sleep 1, server false, backups "all", ` +
			`dropped "parameters+gradients", copies 1, reference false`},
		{"--debug-train-only", engine, "none"},
		{"--load-debug-rollout-data x", engine, "none"},
	} {
		j, err := ofSlime(t, tt.more)
		if err != nil {
			t.Errorf("%s: %v", tt.more, err)
		} else if is := tt.of(j); is != tt.want {
			t.Errorf("%s: %s, want %s", tt.more, is, tt.want)
		}
	}
}

// TestSlimeSamples holds how long samples may be beyond what arguments say, and whether an earlier release may run.
func TestSlimeSamples(t *testing.T) {
	unbounded := strings.Replace(slimeText, "--rollout-max-context-len 4096", "--rollout-max-response-len 2048", 1)
	for _, tt := range []struct {
		more    string
		earlier bool
		longest int64
		leftOut int
	}{
		{"", true, 0, 0},
		{"--no-colocate", false, 0, 0},
		{"--rollout-max-response-len 90000", true, 0, 1}, // prompts make the longest sample longer
		{"--custom-generate-function-path a.b", true, rollout.NoContext, 0},
		{"--custom-generate-function-path a.b --rollout-max-context-len 4096", true, 0, 0},
		{"--custom-generate-function-path a.b --sglang-context-length 9000", true, 9000, 0},
		{"--custom-generate-function-path a.b --vllm-max-model-len 9001", true, 9001, 0},
	} {
		j, err := ofScript(t, unbounded+" "+tt.more+"\n")
		if err != nil {
			t.Errorf("%s: %v", tt.more, err)
			continue
		}
		p := j.Policy
		if e := p.Engine; e.Earlier != tt.earlier || e.LongestSample != tt.longest || len(p.LeftOut) != tt.leftOut {
			t.Errorf("%s: earlier %t, longest %d, left out %q", tt.more, e.Earlier, e.LongestSample, p.LeftOut)
		}
	}
}

// TestSlimeRefuses: what is not planned ends with a reason, at its place, and what is ignored is noted.
func TestSlimeRefuses(t *testing.T) {
	for more, why := range map[string]string{
		"--advantage-estimator ppo":                "a critic is trained beside the actor",
		"--train-backend fsdp":                     "FSDP trains",
		"--only-train-params-name-list experts":    "a part of the parameters",
		"--lora-rank 8":                            "adapters",
		"--update-weight-mode delta":               "keeps what it has sent",
		"--spec a b":                               "spec is not planned yet",
		"--loss-type custom_loss":                  "a loss of the user's own",
		"--sglang-pp-size 2":                       "divides the layers of the engine",
		"--vllm-data-parallel-size 2":              "divides the engine",
		"--vllm-config x.yaml":                     "divides the engine",
		"--num-experts 8 --moe-layer-freq $NOBODY": "plimsoll cannot evaluate",
	} {
		_, err := ofSlime(t, more)
		var wrong *fault.Input
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want %q", more, err, why)
		}
	}
	for more, note := range map[string]string{
		"--max-token-per-gpu 64":          "did you mean --max-tokens-per-gpu?",
		"--sglang-enable-torch-compile":   "--sglang-enable-torch-compile is SGLang's",
		"--vllm-quantization fp8":         "--vllm-quantization is vLLM's",
		"--custom-config-path x.yaml":     "a file whose keys go before arguments",
		"--actor-num-gpus-per-node $GPUS": "which the script does not set: 8 counts",
	} {
		j, err := ofSlime(t, more)
		if err != nil {
			t.Errorf("%s: %v", more, err)
		} else if !strings.Contains(strings.Join(j.Assumptions, "\n"), note) {
			t.Errorf("%s: no note says %q: %q", more, note, j.Assumptions)
		}
	}
}

// TestSlimeHiddenArguments: a command prints the arguments of the model. It is not run, and slime and miles demand
// those of the checkpoint.
func TestSlimeHiddenArguments(t *testing.T) {
	of := func(more string) (*Job, error) {
		text := "python3 train.py --actor-num-gpus-per-node 4 --use-dynamic-batch-size --max-tokens-per-gpu 4096 " +
			"--rollout-batch-size 8 --rollout-max-context-len 4096 --colocate $(python3 sizes.py) " + more + "\n"
		return ofScript(t, text)
	}
	j, err := of("--hf-checkpoint models/Qwen3-4B/")
	if err != nil {
		t.Fatal(err)
	}
	if says := strings.Join(j.Assumptions, "\n"); j.Hidden != 2560 || len(j.Layers) != 36 || j.Policy.Engine.Server ||
		!strings.Contains(says, "the sizes are those of Qwen3-4B") {
		t.Errorf("%d layers of %d, engine %+v, %s", len(j.Layers), j.Hidden, j.Policy.Engine, says)
	}
	if _, err := of("--hf-checkpoint models/no-such-model"); err == nil {
		t.Error("a model that nobody knows is planned")
	}
	if _, err := of(""); err == nil || !strings.Contains(err.Error(), "plimsoll does not run it") {
		t.Errorf("%v, want the command that is not run", err)
	}
}

// TestOtherTrainScripts: a script of the same name that another program has is none of slime.
func TestOtherTrainScripts(t *testing.T) {
	_, err := recipe.ReadMegatron("train.sh", files.Texts{"train.sh": []byte("torchrun train.py --num-layers 2 " +
		"--hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 " +
		"--max-position-embeddings 512\n")})
	if err != nil {
		t.Error(err)
	}
}
