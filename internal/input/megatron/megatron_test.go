package megatron

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/input/recipe"
)

// small are arguments of a small model.
const small = `--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
	--micro-batch-size 1 --vocab-size 1024 --make-vocab-size-divisible-by 1`

func decide(t *testing.T, arguments string, world int64) (*Job, error) {
	t.Helper()
	m, err := recipe.ReadMegatron(strings.ReplaceAll(arguments, "\n", " "), nil)
	if err != nil {
		t.Fatal(err)
	}
	return Decide(m, Request{World: world, GPU: gpu.Model{Capability: 90}})
}

// TestElements compares with what megatron-core's GPTModel has (main of August 2026, local layers on the CPU).
func TestElements(t *testing.T) {
	const untied = "--untie-embeddings-and-output-weights "
	for arguments, want := range map[string]int64{
		untied: 3716608, "": 3716608 - 1024*256,
		`--disable-bias-linear --swiglu --ffn-hidden-size 704 --group-query-attention --num-query-groups 2
		--normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope`: 3344640,
		untied + "--qk-layernorm": 3717120, untied + "--disable-bias-linear --add-qkv-bias": 3710464,
		untied + "--kv-channels 64": 4768256,
		untied + "--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 512": 10007040,
		untied + `--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 512
		--moe-shared-expert-intermediate-size 384`: 10793472,
	} {
		j, err := decide(t, small+" "+arguments, 1)
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		if got := j.Model().Elements(); got != want {
			t.Errorf("%s: %d parameters, expected %d", arguments, got, want)
		}
	}
	j, err := decide(t, small, 1)
	if err != nil {
		t.Fatal(err)
	}
	for chunk, want := range map[parallel.Chunk]int64{{Layers: 4}: 3159040, {Layers: 4, Loss: true}: 3421696} {
		var got int64
		for _, p := range j.Parameters(chunk) {
			got += p.Elements
		}
		if got != want {
			t.Errorf("%+v: %d parameters, expected %d", chunk, got, want)
		}
	}
}

// TestShardsAddUp: tensor parallel ranks and pipeline stages together have the whole model.
func TestShardsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tensor := rapid.SampledFrom([]string{"1", "2", "4"}).Draw(t, "tensor")
		pipeline := rapid.SampledFrom([]string{"1", "2", "4"}).Draw(t, "pipeline")
		m, err := recipe.ReadMegatron(strings.ReplaceAll(small, "\n", " ")+" --disable-bias-linear --bf16 "+
			"--untie-embeddings-and-output-weights --position-embedding-type rope --tensor-model-parallel-size "+
			tensor+" --pipeline-model-parallel-size "+pipeline, nil)
		if err != nil {
			t.Fatal(err)
		}
		j, err := Decide(m, Request{})
		if err != nil {
			t.Fatal(err)
		}
		var weights, norms int64
		for _, stage := range j.Table {
			for _, c := range stage {
				for _, p := range j.Parameters(c) {
					if p.Weight {
						weights += p.Elements * j.Degrees.Tensor
					} else {
						norms += p.Elements
					}
				}
			}
		}
		if weights+norms != j.Model().Elements() {
			t.Errorf("%d parameters on all ranks, the model has %d", weights+norms, j.Model().Elements())
		}
	})
}

func TestStages(t *testing.T) {
	for arguments, want := range map[string]string{
		"--num-layers 8 --pipeline-model-parallel-size 2":                                           "4|4",
		"--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2": "2,2|2,2",
		`--num-layers 12 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2
		--decoder-last-pipeline-num-layers 2`: "2|4|4|2",
		`--num-layers 6 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
		--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split`: "1,2|2,1",
		`--num-layers 8 --pipeline-model-parallel-size 2
		--pipeline-model-parallel-layout 'Et*3|t|(tt|)*1,ttL'`: "3,2|1,2",
		`--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
		--pipeline-model-parallel-layout 'Et*3|t|(tt|)*1,ttL'`: "3,2|1,2",
		`--num-layers 3 --mtp-num-layers 1 --pipeline-model-parallel-size 2
		--pipeline-model-parallel-layout 'Ettt|mL'`: "3|0",
	} {
		j, err := decide(t, small+" --global-batch-size 2 "+arguments, 0)
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		var stages []string
		for _, stage := range j.Table {
			var chunks []string
			for _, c := range stage {
				chunks = append(chunks, string(rune('0'+c.Layers)))
			}
			stages = append(stages, strings.Join(chunks, ","))
		}
		if got := strings.Join(stages, "|"); got != want {
			t.Errorf("%s: %s, expected %s", arguments, got, want)
		}
	}
}

func TestPatterns(t *testing.T) {
	for frequency, want := range map[string]string{
		"1": "1111", "2": "1010", "([0]*1+[1]*3)": "0111", "[0,1,1,0]": "0110", "([0,1]*2)": "0101",
	} {
		m, err := recipe.ReadMegatron(strings.ReplaceAll(small, "\n", " ")+" --num-experts 2 --moe-layer-freq '"+
			frequency+"'", nil)
		if err != nil {
			t.Fatal(err)
		}
		j, err := Decide(m, Request{})
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, l := range j.Layers {
			got += map[bool]string{true: "1", false: "0"}[l.Mixture]
		}
		if got != want {
			t.Errorf("%s: %s, expected %s", frequency, got, want)
		}
	}
}

// TestAssertions: what Megatron-LM asserts is refused with its reason.
func TestAssertions(t *testing.T) {
	for arguments, want := range map[string]string{
		"--bf16 --fp16":                                  "fp16 is given beside --bf16",
		"--tensor-model-parallel-size 3":                 "no multiple of tensor parallel 3",
		"--pipeline-model-parallel-size 3":               "no multiple of 3 pipeline stages",
		"--overlap-param-gather":                         "without --use-distributed-optimizer",
		"--use-precision-aware-optimizer":                "without --use-distributed-optimizer",
		"--recompute-granularity full":                   "full without --recompute-method",
		"--expert-model-parallel-size 2":                 "above 1 without --num-experts",
		"--optimizer muon":                               "not planned yet",
		"--use-megatron-fsdp":                            "not planned yet",
		"--num-layers-per-virtual-pipeline-stage 1":      "without pipeline stages",
		"--max-position-embeddings 64":                   "a sequence has 128 tokens",
		"--num-experts 4 --tensor-model-parallel-size 2": "has --sequence-parallel",
		"--context-parallel-size 3":                      "no multiple of 2 x context parallel 3",
		"--fp8-param-gather":                             "without --fp8-format",
		"--pipeline-model-parallel-layout 'Ettt|L'":      "has 3 layers, but the model has 4",
		"--pipeline-model-parallel-layout 'Etxt|ttL'":    "its letters are E, t, m and L",
		"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|mtt|L|'": "begin with E and end with L",
		"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout " +
			"'Ett|ttL'": "has 2 parts for 2 pipeline stages, but there are 2 virtual stages on each",
	} {
		_, err := decide(t, small+" "+arguments, 0)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, expected %q", arguments, err, want)
		}
	}
	if _, err := decide(t, small+" --global-batch-size 3", 2); err == nil {
		t.Error("a global batch that is no multiple of the ranks is accepted")
	}
}

// TestArgumentsHaveOneEffect: no argument is in two lists, and all are Megatron-LM's.
func TestArgumentsHaveOneEffect(t *testing.T) {
	m, err := recipe.ReadMegatron(strings.ReplaceAll(small, "\n", " "), nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for f := range reflect.TypeFor[recipe.Megatron]().Fields() {
		seen[f.Tag.Get("key")] = true
	}
	lists := [][]string{notPlanned, elsewhere, slices.Collect(maps.Keys(gone)), slices.Collect(maps.Keys(noted)),
		strings.Fields(silentArguments)}
	for _, key := range slices.Concat(lists...) {
		m.Gives(key) // panics if the schema does not have it
		if seen[key] {
			t.Errorf("%s is in two lists", key)
		}
		seen[key] = true
	}
}

// TestEffects: an argument that the plan does not have is refused, noted, or known to change nothing.
func TestEffects(t *testing.T) {
	const mxfp8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather"
	for arguments, want := range map[string]string{
		"--lr 1e-4 --log-interval 10 --save x": "", "--first-last-layers-bf16 false": "",
		"--moe-router-dtype fp32":                          "--moe-router-dtype: the scores",
		"--softmax-type learnable":                         "--softmax-type: planned as",
		"--overlap-param-gather-with-optimizer-step":       "are planned as one",
		mxfp8 + " --reuse-grad-buf-for-mxfp8-param-ag":     "",
		"--moe-token-dispatcher-type flex --num-experts 2": "without buffers of its own",
	} {
		j, err := decide(t, small+" --global-batch-size 1 --bf16 "+arguments, 1)
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		got := strings.Join(j.Assumptions, "\n")
		if want == "" && strings.Contains(got, "--") && !strings.Contains(got, "fused attention") ||
			!strings.Contains(got, want) {
			t.Errorf("%s: %q, expected %q", arguments, got, want)
		}
	}
	for arguments, want := range map[string]string{
		"--tp-comm-overlap": "not planned yet", "--yaml-cfg x.yaml": "from another place",
		"--batch-size 4": "give --micro-batch-size", "--no-position-embedding": "without rotary positions",
		"--cpu-offloading-num-layers 2":                         "not planned yet",
		"--reuse-grad-buf-for-mxfp8-param-ag":                   "without --fp8-param-gather",
		"--fp8-format e4m3 --reuse-grad-buf-for-mxfp8-param-ag": "without --fp8-param-gather",
	} {
		if _, err := decide(t, small+" "+arguments, 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, expected %q", arguments, err, want)
		}
	}
}

// TestAliases: older names of arguments mean what Megatron-LM takes them for.
func TestAliases(t *testing.T) {
	j, err := decide(t, small+" --use-rotary-position-embeddings --no-position-embedding --recompute-activations"+
		" --quick-geglu --padded-vocab-size 1030", 1)
	if err != nil {
		t.Fatal(err)
	}
	if j.PositionType != "rope" || j.Recompute != "selective" || j.Gates() != 2 || j.Vocabulary != 1030 {
		t.Errorf("%s, %s, %d gates, %d tokens", j.PositionType, j.Recompute, j.Gates(), j.Vocabulary)
	}
	j, err = decide(t, small+" --moe-layer-recompute --num-experts 2", 1)
	if err != nil || strings.Join(j.RecomputeModules, " ") != "core_attn moe" {
		t.Errorf("%v, %v", j, err)
	}
}
