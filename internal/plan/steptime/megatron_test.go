package steptime

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/job"
)

// megatronRun is a published run of Megatron-LM.
type megatronRun struct {
	row                             string
	layers, hidden, heads           int
	groups, inner, vocabulary       int // 0 for GPT-3: as many groups as heads, four times as wide, 51,200 tokens
	sequence, micro, global         int
	tensor, pipeline, virtual, with int // with is the degree of context parallelism
	gpu                             string
	gpus                            int
	more                            string
	seconds                         float64 // of a step
}

// arguments are those of the run.
func (r megatronRun) arguments() string {
	a := fmt.Sprintf("--num-layers %d --hidden-size %d --num-attention-heads %d --seq-length %d "+
		"--max-position-embeddings %d --micro-batch-size %d --global-batch-size %d --tensor-model-parallel-size %d "+
		"--pipeline-model-parallel-size %d --context-parallel-size %d --use-distributed-optimizer "+
		"--make-vocab-size-divisible-by 1 ", r.layers, r.hidden, r.heads, r.sequence, r.sequence, r.micro, r.global,
		r.tensor, r.pipeline, max(1, r.with))
	if r.groups > 0 {
		a += fmt.Sprintf("--group-query-attention --num-query-groups %d --ffn-hidden-size %d --vocab-size %d --swiglu "+
			"--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "+
			"--position-embedding-type rope ", r.groups, r.inner, r.vocabulary)
	} else {
		a += "--vocab-size 51200 "
	}
	if r.virtual > 1 {
		a += fmt.Sprintf("--num-virtual-stages-per-pipeline-rank %d ", r.virtual)
	}
	return a + r.more
}

func (r megatronRun) predict(t *testing.T) *Step {
	t.Helper()
	return resolved(t, job.Request{MegatronArguments: job.MegatronArguments{Megatron: r.arguments()}, GPU: r.gpu,
		GPUs: min(8, r.gpus), Nodes: max(1, r.gpus/8)}, Machine{})
}

// of2022 are the runs of arXiv 2205.05198, table 5: without and with full recomputation.
func of2022() (runs []megatronRun) {
	for _, r := range []struct {
		name                  string
		layers, hidden, heads int
		micro, global         int
		pipeline, virtual     int
		selective, full       float64
	}{
		{"22B", 48, 6144, 64, 4, 4, 1, 1, 1.10, 1.42}, {"175B", 96, 12288, 96, 1, 64, 8, 3, 13.75, 18.13},
		{"530B", 105, 20480, 128, 1, 280, 35, 3, 37.83, 49.05}, {"1T", 128, 25600, 160, 1, 512, 64, 1, 71.49, 94.42},
	} {
		run := megatronRun{row: r.name + ", selective", layers: r.layers, hidden: r.hidden, heads: r.heads,
			sequence: 2048, micro: r.micro, global: r.global, tensor: 8, pipeline: r.pipeline, virtual: r.virtual,
			gpu: "A100-80GB", gpus: 8 * r.pipeline, seconds: r.selective,
			more: "--fp16 --attention-backend unfused --sequence-parallel --recompute-granularity selective"}
		runs = append(runs, run)
		run.row, run.seconds = r.name+", full recomputation", r.full
		run.more = "--fp16 --attention-backend unfused --recompute-granularity full --recompute-method uniform " +
			"--recompute-num-layers 1"
		runs = append(runs, run)
	}
	return runs
}

// ofNVIDIA are runs in fp8 of NVIDIA's pages of performance. Rate is tokens a second and GPU.
func ofNVIDIA() (runs []megatronRun) {
	const ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
	for _, r := range []struct {
		run  megatronRun
		rate float64
	}{
		{megatronRun{row: "GPT-3 5B", layers: 24, hidden: 4096, heads: 32, sequence: 2048, micro: 4, global: 2048,
			tensor: 1, pipeline: 1, gpus: 64}, 22521},
		{megatronRun{row: "GPT-3 20B", layers: 44, hidden: 6144, heads: 48, sequence: 2048, micro: 2, global: 256,
			tensor: 2, pipeline: 1, gpus: 64}, 5851},
		{megatronRun{row: "GPT-3 175B, batch of 256", layers: 96, hidden: 12288, heads: 96, sequence: 2048, micro: 1,
			global: 256, tensor: 4, pipeline: 8, virtual: 6, gpus: 128}, 726},
		{megatronRun{row: "GPT-3 175B, batch of 2,048", layers: 96, hidden: 12288, heads: 96, sequence: 2048, micro: 2,
			global: 2048, tensor: 4, pipeline: 8, virtual: 6, gpus: 512}, 782},
		{megatronRun{row: "Llama 2 7B", layers: 32, hidden: 4096, heads: 32, groups: 32, inner: 11008,
			vocabulary: 32000, sequence: 4096, micro: 1, global: 128, tensor: 1, pipeline: 1, gpus: 8}, 16847},
		{megatronRun{row: "Llama 2 13B", layers: 40, hidden: 5120, heads: 40, groups: 40, inner: 13824,
			vocabulary: 32000, sequence: 4096, micro: 1, global: 128, tensor: 1, pipeline: 4, virtual: 10,
			gpus: 16}, 8646},
		{megatronRun{row: "Llama 2 70B", layers: 80, hidden: 8192, heads: 64, groups: 8, inner: 28672,
			vocabulary: 32000, sequence: 4096, micro: 1, global: 128, tensor: 4, pipeline: 4, virtual: 20,
			gpus: 64}, 1707},
		{megatronRun{row: "Llama 3 8B", layers: 32, hidden: 4096, heads: 32, groups: 8, inner: 14336,
			vocabulary: 128256, sequence: 8192, micro: 1, global: 128, tensor: 1, pipeline: 1, with: 2,
			gpus: 8}, 12036},
		{megatronRun{row: "Llama 3 70B", layers: 80, hidden: 8192, heads: 64, groups: 8, inner: 28672,
			vocabulary: 128256, sequence: 8192, micro: 1, global: 128, tensor: 4, pipeline: 4, virtual: 5, with: 2,
			gpus: 64}, 1533},
		{megatronRun{row: "Llama 3 70B, 26.02", layers: 80, hidden: 8192, heads: 64, groups: 8, inner: 28672,
			vocabulary: 128256, sequence: 8192, micro: 1, global: 256, tensor: 4, pipeline: 8, virtual: 5,
			gpus: 64}, 1621},
		{megatronRun{row: "Llama 3.1 405B, 25.11", layers: 126, hidden: 16384, heads: 128, groups: 8, inner: 53248,
			vocabulary: 128256, sequence: 8192, micro: 1, global: 512, tensor: 8, pipeline: 8, virtual: 8, with: 2,
			gpus: 1024, more: ends}, 292},
		{megatronRun{row: "Llama 3.1 405B, 26.02", layers: 126, hidden: 16384, heads: 128, groups: 8, inner: 53248,
			vocabulary: 128256, sequence: 8192, micro: 1, global: 1536, tensor: 8, pipeline: 8, virtual: 8, with: 2,
			gpus: 1024, more: ends}, 311},
		{megatronRun{row: "Llama 3 8B, B200, 25.11", layers: 32, hidden: 4096, heads: 32, groups: 8, inner: 14336,
			vocabulary: 128256, sequence: 8192, micro: 2, global: 128, tensor: 1, pipeline: 1, gpu: "B200",
			gpus: 8}, 30624},
		{megatronRun{row: "Llama 3.1 405B, B200, 25.11", layers: 126, hidden: 16384, heads: 128, groups: 8,
			inner: 53248, vocabulary: 128256, sequence: 8192, micro: 1, global: 64, tensor: 4, pipeline: 8, virtual: 8,
			with: 2, gpu: "B200", gpus: 128, more: ends}, 661},
	} {
		run := r.run
		if run.gpu == "" {
			run.gpu = "H100-80GB"
		}
		if run.tensor > 1 {
			run.more += " --sequence-parallel"
		}
		run.more += " --bf16 --fp8-format hybrid --attention-backend fused --overlap-grad-reduce " +
			"--overlap-param-gather --cross-entropy-loss-fusion"
		run.seconds = float64(run.global*run.sequence) / float64(run.gpus) / r.rate
		runs = append(runs, run)
	}
	return runs
}

// TestMegatron compares the table of docs/step-time.md with what is predicted.
func TestMegatron(t *testing.T) {
	text, err := os.ReadFile("../../../docs/step-time.md")
	if err != nil {
		t.Fatal(err)
	}
	runs, inside := append(of2022(), ofNVIDIA()...), 0
	for _, r := range runs {
		s := r.predict(t)
		if tokens := int64(r.global * r.sequence); s.Tokens != tokens {
			t.Errorf("%s: a step has %d tokens, expected %d", r.row, s.Tokens, tokens)
		}
		if s.Total.Least.Seconds() <= r.seconds && r.seconds <= s.Total.Most.Seconds() {
			inside++
		}
		row := fmt.Sprintf("| %s | %d | %.3g s | %.3g s | %.3g to %.3g | %+.0f %% |", r.row, r.gpus, r.seconds,
			s.Total.Expected.Seconds(), s.Total.Least.Seconds(), s.Total.Most.Seconds(),
			100*(s.Total.Expected.Seconds()/r.seconds-1))
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/step-time.md lacks the row\n%s", row)
		}
	}
	checkInside(t, text, inside, len(runs))
}

// TestMegatronParts changes one argument of a run at a time, and compares what must follow.
func TestMegatronParts(t *testing.T) {
	base := megatronRun{layers: 16, hidden: 4096, heads: 32, sequence: 2048, micro: 1, global: 64, tensor: 1,
		pipeline: 1, gpu: "H100-80GB", gpus: 8, more: "--bf16 --attention-backend flash"}
	with := func(change func(*megatronRun)) *Step {
		r := base
		change(&r)
		return r.predict(t)
	}
	near := func(what string, have, want Time) {
		t.Helper()
		if ratio := have.Expected.Seconds() / want.Expected.Seconds(); math.Abs(ratio-1) > 0.005 {
			t.Errorf("%s: %v, expected %v", what, have.Expected, want.Expected)
		}
	}
	plain := with(func(*megatronRun) {})
	twice := with(func(r *megatronRun) { r.global *= 2 })
	near("twice the micro batches", twice.Forward, Time{Expected: 2 * plain.Forward.Expected})
	again := with(func(r *megatronRun) {
		r.more += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
	})
	half := with(func(r *megatronRun) {
		r.more += " --recompute-granularity full --recompute-method block --recompute-num-layers 8"
	})
	more, less := again.Backward.Expected-plain.Backward.Expected, half.Backward.Expected-plain.Backward.Expected
	near("half of the layers recomputed", Time{Expected: 2 * less}, Time{Expected: more})
	if more <= 0 || more >= plain.Forward.Expected { // the head is not recomputed
		t.Errorf("recomputation takes %v, and the forward pass %v", more, plain.Forward.Expected)
	}
	attention := with(func(r *megatronRun) { r.more += " --recompute-granularity selective" })
	if added := attention.Backward.Expected - plain.Backward.Expected; added <= 0 || added >= more/2 {
		t.Errorf("attention takes %v once more, and all layers %v", added, more)
	}
	stages := with(func(r *megatronRun) { r.pipeline, r.global = 8, 8 })
	if busy := stages.Forward.Expected + stages.Backward.Expected; stages.Pipeline.Expected < busy/2 {
		t.Errorf("8 micro batches in 8 stages: %v of waiting, and %v of work", stages.Pipeline.Expected, busy)
	}
	chunks := with(func(r *megatronRun) { r.pipeline, r.global, r.virtual = 8, 8, 2 })
	if chunks.Pipeline.Expected > stages.Pipeline.Expected*6/10 {
		t.Errorf("two chunks of each stage wait %v, one waits %v", chunks.Pipeline.Expected, stages.Pipeline.Expected)
	}
	exchanged := with(func(r *megatronRun) { r.tensor, r.global = 8, 8 })
	if exchanged.Communication.Expected <= plain.Communication.Expected ||
		exchanged.Forward.Expected >= plain.Forward.Expected {
		t.Errorf("tensor parallel ranks exchange %v; alone %v", exchanged.Communication, plain.Communication)
	}
	hidden := with(func(r *megatronRun) { r.more += " --overlap-grad-reduce" })
	if hidden.Communication.Expected >= plain.Communication.Expected/2 {
		t.Errorf("gradients take %v behind the backward pass, and %v after it", hidden.Communication.Expected,
			plain.Communication.Expected)
	}
}

// TestMegatronRefused names what the model of Megatron-LM has no basis for.
func TestMegatronRefused(t *testing.T) {
	for more, what := range map[string]string{
		"--fp8-format hybrid": "fp8",
	} {
		r := megatronRun{layers: 16, hidden: 4096, heads: 32, sequence: 2048, micro: 1, global: 8, tensor: 1,
			pipeline: 1, more: "--bf16 " + more}
		j, err := job.Request{MegatronArguments: job.MegatronArguments{Megatron: r.arguments()}, GPU: "A100-80GB",
			GPUs: 8}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		var input *fault.Input
		if err := Refusal(j, Machine{}); !errors.As(err, &input) || !strings.Contains(input.What, what) {
			t.Errorf("%s: %v", more, err)
		}
	}
}
