package plan

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// smallGPT has what most of Megatron-LM's functional tests of GPT have in common.
const smallGPT = `--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024
	--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --bf16 --deterministic-mode
	--no-gradient-accumulation-fusion `

func megatronJob(t *testing.T, arguments string, q megatron.Request) *job.Job {
	t.Helper()
	m, err := recipe.ReadMegatron(strings.ReplaceAll(arguments, "\n", " "), nil)
	if err != nil {
		t.Fatal(err)
	}
	j, err := megatron.Decide(m, q)
	if err != nil {
		t.Fatal(err)
	}
	return job.OfMegatron(j)
}

func planOf(t *testing.T, j *job.Job) *Plan {
	t.Helper()
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func lastStage(t *testing.T, j *job.Job) (allocated, peak ledger.Bytes) {
	t.Helper()
	of, err := LastStage(j)
	if err != nil {
		t.Fatal(err)
	}
	d := of.Devices[0]
	for _, p := range d.Phases {
		peak = max(peak, p.PeakAllocated)
	}
	return d.Phases[len(d.Phases)-1].EndAllocated, peak
}

// TestMegatronGoldenValues compares with bytes that NVIDIA's CI logged on the last of 8 ranks
// (tests/functional_tests/test_cases of Megatron-LM, golden_values_dev_dgx_*.json).
func TestMegatronGoldenValues(t *testing.T) {
	for _, c := range []struct {
		arguments       string
		gpu             string
		allocated, peak float64
	}{
		{"--use-distributed-optimizer", "A100-80GB", 552128512, 2711714304},
		{"--use-distributed-optimizer", "H100-80GB", 581489664, 2691792384},
		{"--pipeline-model-parallel-size 4 --attention-backend unfused --disable-bias-linear", "A100-80GB", 718931456,
			2685510144},
		{"--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1", "A100-80GB", 733860352,
			2651687936},
		{"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "A100-80GB", 487096832, 1409821184},
		{"--tensor-model-parallel-size 4 --transformer-impl local", "A100-80GB", 382956544, 1628741632},
		{`--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
		--expert-tensor-parallel-size 2 --sequence-parallel --use-distributed-optimizer --disable-bias-linear
		--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 512
		--moe-grouped-gemm --moe-token-dispatcher-type alltoall`, "H100-80GB", 628064768, 1149626368},
	} {
		g, err := gpu.Find(c.gpu)
		if err != nil {
			t.Fatal(err)
		}
		allocated, peak := lastStage(t, megatronJob(t, smallGPT+c.arguments, megatron.Request{World: 8, GPU: g}))
		if e := float64(allocated)/c.allocated - 1; math.Abs(e) > 0.02 {
			t.Errorf("%s on %s: %d bytes allocated, measured %.0f (%+.1f %%)", c.arguments, c.gpu, allocated,
				c.allocated, 100*e)
		}
		if e := float64(peak)/c.peak - 1; math.Abs(e) > 0.04 {
			t.Errorf("%s on %s: %d bytes at the peak, measured %.0f (%+.1f %%)", c.arguments, c.gpu, peak, c.peak,
				100*e)
		}
	}
}

// TestMegatronSavings: arguments that save memory do so, and by about what they say.
func TestMegatronSavings(t *testing.T) {
	const base = smallGPT + "--use-distributed-optimizer --tensor-model-parallel-size 2 "
	const mixture = "--sequence-parallel --num-experts 4 --disable-bias-linear --moe-grouped-gemm "
	for _, c := range []struct {
		arguments         string
		allocated, atPeak bool // which of the two gets smaller
	}{
		{"--sequence-parallel", false, true},
		{"--recompute-granularity selective --attention-backend unfused", false, true},
		{"--recompute-granularity selective --recompute-modules mlp", false, true},
		{mixture + "--recompute-granularity selective --recompute-modules moe_act", false, true},
		{mixture + "--recompute-granularity selective --recompute-modules layernorm", false, true},
		{mixture + "--recompute-granularity selective --recompute-modules moe", false, true},
		{"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", false, true},
		{"--recompute-granularity full --recompute-method block --recompute-num-layers 6", false, true},
		{"--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", true, true},
		{"--use-precision-aware-optimizer --main-grads-dtype bf16", true, true},
		{"--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5", true, true},
		{"--offload-optimizer-states", false, true},
		{"--chunked-optimizer-state-offload --optimizer-state-offload-chunk-size-mb 16", true, true},
		{"--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5", true, true},
		{"--grad-reduce-in-bf16", true, true},
		{"--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", false, true},
		{"--context-parallel-size 2 --attention-backend flash", false, true},
	} {
		without := base
		if strings.HasPrefix(c.arguments, mixture) {
			without += mixture
		}
		before, peak := lastStage(t, megatronJob(t, without, megatron.Request{World: 8}))
		after, peakAfter := lastStage(t, megatronJob(t, base+c.arguments, megatron.Request{World: 8}))
		if (after < before-before/100) != c.allocated {
			t.Errorf("%s: %v allocated, without it %v", c.arguments, after, before)
		}
		if (peakAfter < peak-peak/100) != c.atPeak {
			t.Errorf("%s: %v at the peak, without it %v", c.arguments, peakAfter, peak)
		}
	}
}

// TestMegatronHost: states on the host have a device of their own. A host below the interval does not fit, and one
// within it is tight and lacks memory by the plan.
func TestMegatronHost(t *testing.T) {
	g, err := gpu.Find("H100-80GB")
	if err != nil {
		t.Fatal(err)
	}
	const base = smallGPT + "--use-distributed-optimizer "
	for arguments, perElement := range map[string]float64{
		"--offload-optimizer-states":                                                  12,
		"--chunked-optimizer-state-offload":                                           12,
		"--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5":    6,
		"--use-precision-aware-optimizer --optimizer-cpu-offload --no-pin-cpu-params": 16,
	} {
		for _, memory := range []ledger.Bytes{0, 1 << 40, 18 << 30, 4 << 30} {
			j := megatronJob(t, base+arguments, megatron.Request{World: 8, GPU: g})
			j.HostMemory = memory
			p := planOf(t, j)
			devices := p.Devices
			if len(devices) != 2 || devices[1].Kind != ledger.Host {
				t.Fatalf("%s: %d devices", arguments, len(devices))
			}
			end := devices[1].Phases[len(devices[1].Phases)-1].EndRequested
			want := perElement * float64(p.Elements)
			if got := float64(end); got < 0.98*want || got > 1.5*want {
				t.Errorf("%s: %v on the host, expected about %.0f", arguments, end, want)
			}
			result := map[ledger.Bytes]Result{0: Fits, 1 << 40: Fits, 18 << 30: Tight, 4 << 30: DoesNotFit}[memory]
			lacks := memory == 18<<30 || memory == 4<<30
			if p.Verdict.Result != result || p.Verdict.Lacks() > 0 != lacks {
				t.Errorf("%s with %v: %s, expected %s", arguments, memory, p.Verdict.Result, result)
			}
		}
	}
}

// TestMegatronMask: the mask of the data loader is a byte for each pair of tokens.
func TestMegatronMask(t *testing.T) {
	const long = smallGPT + "--seq-length 16384 --max-position-embeddings 16384 --tensor-model-parallel-size 8 " +
		"--position-embedding-type rope --attention-backend flash "
	_, with := lastStage(t, megatronJob(t, long, megatron.Request{World: 8}))
	_, without := lastStage(t, megatronJob(t, long+"--no-create-attention-mask-in-dataloader",
		megatron.Request{World: 8}))
	if got := with - without; got < 900*ledger.MiB || got > 1100*ledger.MiB {
		t.Errorf("%v with a mask, %v without", with, without)
	}
}

// TestMegatronStages: the first stage of a pipeline holds the activations of more micro batches than the last.
func TestMegatronStages(t *testing.T) {
	j := megatronJob(t, smallGPT+"--pipeline-model-parallel-size 4", megatron.Request{World: 4})
	p := planOf(t, j)
	devices := p.Devices
	if len(devices) != 5 || devices[4].Kind != ledger.Host || p.Verdict.Result != Unknown {
		t.Fatalf("%d devices, %+v", len(devices), p.Verdict)
	}
	activations := func(d ledger.Device) ledger.Bytes {
		var sum ledger.Bytes
		for _, h := range d.Peak().Components {
			if h.Component == ledger.FeedForwardActivations {
				sum += h.Bytes
			}
		}
		return sum
	}
	for stage, want := range []ledger.Bytes{4, 3, 2, 1} {
		if got := activations(devices[stage]) / activations(devices[3]); got != want {
			t.Errorf("stage %d has activations of %d micro batches, expected %d", stage, got, want)
		}
	}
}

// TestMegatronRandomJobs plans what random arguments decide: every stage ends with less than its peak, and a plan is
// the same every time.
func TestMegatronRandomJobs(t *testing.T) {
	choices := []string{"--sequence-parallel", "--swiglu", "--disable-bias-linear", "--bf16", "--fp16",
		"--use-distributed-optimizer", "--overlap-grad-reduce", "--num-experts 4", "--moe-grouped-gemm",
		"--moe-token-dispatcher-type alltoall", "--moe-router-topk 1", "--moe-layer-freq 2",
		"--moe-shared-expert-intermediate-size 64", "--moe-expert-capacity-factor 1", "--expert-model-parallel-size 2",
		"--expert-tensor-parallel-size 1", "--multi-latent-attention", "--q-lora-rank 32", "--qk-layernorm",
		"--mtp-num-layers 1", "--recompute-granularity selective",
		"--recompute-modules moe_act layernorm mla_up_proj mlp shared_experts", "--attention-backend unfused",
		"--attention-backend flash", "--transformer-impl local", "--position-embedding-type rope",
		"--group-query-attention --num-query-groups 2", "--cross-entropy-loss-fusion", "--fp8-format hybrid",
		"--use-precision-aware-optimizer", "--offload-optimizer-states",
		"--chunked-optimizer-state-offload", "--optimizer-cpu-offload", "--optimizer-offload-fraction 0.3",
		"--num-virtual-stages-per-pipeline-rank 2",
		"--pipeline-model-parallel-layout 'Ettt|tt||tttL'",
		"--hidden-dropout 0", "--untie-embeddings-and-output-weights",
		"--encoder-seq-length 64 --decoder-seq-length 32"}
	count := 0
	rapid.Check(t, func(t *rapid.T) {
		arguments := "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --vocab-size 512 " +
			"--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 "
		for _, degree := range []string{"tensor", "pipeline"} {
			arguments += "--" + degree + "-model-parallel-size " +
				rapid.SampledFrom([]string{"1", "2"}).Draw(t, degree) + " "
		}
		arguments += "--context-parallel-size " + rapid.SampledFrom([]string{"1", "2"}).Draw(t, "context") + " "
		arguments += strings.Join(rapid.SliceOfNDistinct(rapid.SampledFrom(choices), 0, 12, rapid.ID[string]).
			Draw(t, "choices"), " ")
		m, err := recipe.ReadMegatron(arguments, nil)
		if err != nil {
			return
		}
		decided, err := megatron.Decide(m, megatron.Request{World: 8, Imbalance: 1.5})
		if err != nil {
			return
		}
		count++
		j := job.OfMegatron(decided)
		p, err := New(j)
		if err != nil {
			t.Fatal(err)
		}
		again, err := New(j)
		if err != nil || len(p.Devices) != int(j.Stages())+1 {
			t.Fatalf("%d devices, %v", len(p.Devices), err)
		}
		for i, d := range p.Devices[:j.Stages()] {
			if d.Peak().PeakAllocated < d.Peak().EndAllocated || d.Peak().PeakUsed != again.Devices[i].Peak().PeakUsed {
				t.Errorf("stage %d: %+v, then %+v", i, d.Peak(), again.Devices[i].Peak())
			}
			// Behind the steady step are the checkpoint and the resumption.
			last := d.Phases[len(d.Phases)-3]
			if first := d.Phases[len(d.Phases)-6]; last.EndRequested != first.EndRequested {
				t.Errorf("stage %d ends the first step with %v and the next with %v", i, first.EndRequested,
					last.EndRequested)
			}
		}
	})
	if count < 5 {
		t.Errorf("%d random jobs were planned", count)
	}
}

// TestMegatronHybridAgainstMegatronCore compares what --optimizer-cpu-offload holds on the GPU and on the host with
// megatron-core's class.
func TestMegatronHybridAgainstMegatronCore(t *testing.T) {
	of := func(fraction float64) *job.Job {
		return megatronJob(t, smallGPT+fmt.Sprintf("--use-distributed-optimizer --use-precision-aware-optimizer "+
			"--optimizer-cpu-offload --optimizer-offload-fraction %v --no-pin-cpu-params --no-pin-cpu-grads", fraction),
			megatron.Request{World: 1})
	}
	fractions := []float64{1, 0.3}
	arguments := []string{"../../../scripts/measure/hybrid.py", "--fractions", "1", "0.3", "--sizes"}
	var largest int64
	for _, p := range of(1).Megatron.Parameters(of(1).Megatron.Table[0][0]) {
		arguments, largest = append(arguments, fmt.Sprint(p.Elements)), max(largest, p.Elements)
	}
	type held struct{ CUDA, CPU int64 }
	measured := torchtest.Answer[[]held](t, torchtest.Forked("torch", "megatron.core"), arguments...)
	if len(measured) != len(fractions) {
		t.Fatalf("%v of %v", measured, fractions)
	}
	for i, fraction := range fractions {
		devices := planOf(t, of(fraction)).Devices
		held := func(d *ledger.Device) (sum ledger.Bytes) {
			last := d.Phases[len(d.Phases)-1]
			for _, x := range last.End {
				if x.Component == ledger.MasterWeights || x.Component == ledger.OptimizerStates ||
					d.Kind == ledger.Host && x.Component == ledger.MasterGradients {
					sum += x.Bytes
				}
			}
			return sum
		}
		// The host takes whole tensors, in the order of the optimizer's groups.
		margin := 16 * largest
		if fraction == 1 {
			margin = 0
		}
		for n, d := range devices[:2] {
			want := []int64{measured[i].CUDA, measured[i].CPU}[n]
			if got := int64(held(&d)); got < want-margin || got > want+margin {
				t.Errorf("%v on the host, %s: %d bytes, megatron-core has %d", fraction, d.Kind, got, want)
			}
		}
	}
}
