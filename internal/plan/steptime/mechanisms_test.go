package steptime

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// TestShares: the ends of every share enclose what is expected, and every product is of a GPU that is known.
func TestShares(t *testing.T) {
	for _, table := range []any{shares, flash, struct{ kernel, ring, network share }{
		share{1 / kernelTime[0], 1 / kernelTime[1], 1 / kernelTime[2]}, rings, assumedNetwork}} {
		v := reflect.ValueOf(table)
		for i := range v.NumField() {
			s := v.Field(i)
			if worst, best := s.Index(1).Float(), s.Index(2).Float(); worst > s.Index(expected).Float() ||
				best < s.Index(expected).Float() || worst <= 0 {
				t.Errorf("%s: %v", v.Type().Field(i).Name, s)
			}
		}
	}
	for name := range products {
		m, err := gpu.Find(name)
		if err != nil || m.Speed.Half == 0 {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	for name, want := range map[string]float64{"RTX-4080": productsOfGeForce, "L40S": productsOfCards,
		"RTX-6000-Ada": productsOfCards, "T4": productsOfCards,
		"P100-16GB": productsOfOthers, "A100-80GB": products["A100-80GB"]} {
		m, err := gpu.Find(name)
		if got := productsOf(m); err != nil || got != want {
			t.Errorf("%s: %v %v, want %v", name, got, err, want)
		}
	}
}

// TestMechanisms changes one setting of a job at a time, and says by how much a step must take longer.
func TestMechanisms(t *testing.T) {
	file := filestest.InNewFolder(t)
	titan := func(converters string) string {
		return file("t"+converters+".toml", "[model]\nname = \"llama3\"\nflavor = \"8B\"\nconverters = ["+converters+
			"]\n[training]\nlocal_batch_size = 2\nseq_len = 8192\ncompile = true\n[activation_checkpoint]\n"+
			"mode = \"none\"\n")
	}
	wide, float8 := titan(""), titan(`"float8"`)
	few := job.Request{Model: "llama-3.2-1b", GPU: "A100-80GB", Precision: "bf16", Sequence: 256, Attention: "flash"}
	long := few
	long.Sequence, long.GPU = 65536, "H200"
	many := few
	many.Sequence, many.MicroBatch, many.Model = 4096, 4, "llama-3-8b"
	for name, test := range map[string]struct {
		base        job.Request
		change      func(*job.Request)
		least, most float64 // the time with the change over that without
	}{
		"half of few tokens":            {few, func(q *job.Request) { q.Sequence = 128 }, 0.97, 1},
		"half of many tokens":           {many, func(q *job.Request) { q.MicroBatch = 2 }, 0.48, 0.55},
		"an adapter of few tokens":      {few, adapts, 1.3, 2.5},
		"an adapter of many tokens":     {many, adapts, 0.65, 0.99},
		"a compiler of few tokens":      {few, func(q *job.Request) { q.Compile = true }, 0.2, 0.75},
		"ZeRO-3's hooks":                {few, func(q *job.Request) { q.ZeRO = "3" }, 2, 6},
		"version 3 with long sequences": {long, func(q *job.Request) { q.Attention = "flash3" }, 0.5, 0.8},
		"version 3 elsewhere":           {many, func(q *job.Request) { q.Attention = "flash3" }, 1, 1.3},
		"torch 1.13":                    {many, func(q *job.Request) { q.Torch = "1.13.1" }, 1.01, 1.3},
		"every third block":             {many, thins, 1.07, 1.12},
		"fp8": {job.Request{Configs: []string{wide}, GPU: "H100-80GB"}, func(q *job.Request) { q.Configs[0] = float8 },
			0.65, 0.9},
		"weights that operations unpack": {job.Request{Model: "llama-3-8b", GPU: "A100-80GB", Precision: "bf16",
			Shorthand: job.Shorthand{LoRA: 8, LoRATargets: all}, Sequence: 1024, Quantization: "nf4"},
			func(q *job.Request) { q.Quantization = "gptq" }, 1.1, 2},
	} {
		base := resolved(t, test.base, Machine{}).Total.Expected
		test.change(&test.base)
		ratio := float64(resolved(t, test.base, Machine{}).Total.Expected) / float64(base)
		if ratio < test.least || ratio > test.most {
			t.Errorf("%s: %.3f times as long, want %g to %g", name, ratio, test.least, test.most)
		}
	}
}

var all = []string{"all-linear"}

func thins(q *job.Request) { q.Recompute = "every-3" }

func adapts(q *job.Request) { q.LoRA, q.LoRATargets = 8, all }

// TestEveryKind: models of every kind have a time, and what they read beside tokens adds to it.
func TestEveryKind(t *testing.T) {
	file := filestest.InNewFolder(t)
	const text = "bf16: true\ncutoff_len: 1024\nper_device_train_batch_size: 2\n"
	kto, sft := file("kto.yaml", "stage: kto\npref_beta: 0.1\n"+text), file("sft.yaml", "stage: sft\n"+text)
	total := func(q job.Request) time.Duration {
		q.GPU = "H100-80GB"
		return resolved(t, q, Machine{}).Total.Expected
	}
	one, none := 1, 0
	seeing := job.Request{Model: "qwen2-vl-2b", Precision: "bf16", Sequence: 2048, Images: &none}
	blind := total(seeing)
	seeing.Images = &one
	if with := total(seeing); with <= blind*101/100 || with > 3*blind {
		t.Errorf("an image: %v, without %v", with, blind)
	}
	for _, name := range []string{"qwen3-next-80b-a3b", "qwen-7b", "distil-large-v3", "mixtral-8x7b", "bert-large"} {
		q := job.Request{Model: name, Precision: "bf16", Sequence: 128}
		if took := total(q); took <= 0 {
			t.Errorf("%s: %v", name, took)
		}
	}
	dense := total(job.Request{Model: "qwen2-7b", Precision: "bf16", Sequence: 4096, MicroBatch: 2})
	unknown := total(job.Request{Model: "qwen-7b", Precision: "bf16", Sequence: 4096, MicroBatch: 2})
	if ratio := float64(unknown) / float64(dense); ratio < 0.8 || ratio > 1.4 { // an unknown architecture, and its like
		t.Errorf("Qwen 7B: %v, Qwen 2 7B: %v", unknown, dense)
	}
	plain := total(job.Request{Model: "llama-3.2-1b", Configs: []string{sft}})
	if answers := total(job.Request{Model: "llama-3.2-1b", Configs: []string{kto}}); answers <= plain*3/2 {
		t.Errorf("KTO: %v, SFT: %v", answers, plain)
	}
}

// TestActivationsOnHost: copies that wait add to the passes, and those on streams of their own hide behind them.
func TestActivationsOnHost(t *testing.T) {
	q := job.Request{Model: "llama-3-8b", GPU: "A100-80GB", Precision: "bf16", Sequence: 4096}
	plain, _ := predicted(t, q)
	q.OffloadsActivations = true
	p, _ := predicted(t, q)
	bytes, link := activationsOf(p.job), p.rates.Link
	if bytes < 5e9 || bytes > 40e9 {
		t.Errorf("%g bytes wait on the host", bytes)
	}
	for streams, want := range map[bool]float64{true: max(plain.forward, bytes/link.Out), false: plain.forward +
		bytes/link.Out} {
		p.job.OffloadActivations.Streams = streams
		p.passes(workOf(p.job))
		if ratio := p.forward / want; ratio < 0.999 || ratio > 1.001 {
			t.Errorf("streams %v: forward %g s, want %g", streams, p.forward, want)
		}
	}
	q.Recompute = "full"
	if p, _ := predicted(t, q); activationsOf(p.job) > bytes/8 {
		t.Errorf("inputs of blocks are %g bytes, all activations %g", activationsOf(p.job), bytes)
	}
}

// TestMegatronExperts: experts compute what is routed to them, and tokens that go to other nodes take longer.
func TestMegatronExperts(t *testing.T) {
	with := func(change func(*megatronRun)) *Step {
		r := megatronRun{layers: 16, hidden: 2048, heads: 16, sequence: 4096, micro: 1, global: 64, tensor: 1,
			pipeline: 1,
			gpu:      "H100-80GB", gpus: 32, more: "--bf16 --attention-backend flash --num-experts 32 " +
				"--moe-grouped-gemm --overlap-grad-reduce --expert-model-parallel-size 8"}
		change(&r)
		return r.predict(t)
	}
	more := func(text string) func(*megatronRun) { return func(r *megatronRun) { r.more += " " + text } }
	few, many := with(more("--moe-router-topk 2")), with(more("--moe-router-topk 8"))
	if many.Forward.Expected < few.Forward.Expected*5/4 {
		t.Errorf("8 experts for a token: %v, 2: %v", many.Forward, few.Forward)
	}
	r := rates{peer: 360 * giga, network: 40 * giga}
	near, far, once := r.all(giga, 8, 8, 0, 1), r.all(giga, 32, 8, 0, 1), r.all(giga, 32, 8, 0, 0.5)
	if near != 7.0/8/360 || far != 7.0/32/360+24.0/32/40 || once != 7.0/32/360+12.0/32/40 {
		t.Errorf("in a node %g s, over four nodes %g, half of it once to each node %g", near, far, once)
	}
	host := func(more string) *Step {
		r := megatronRun{layers: 16, hidden: 2048, heads: 16, sequence: 4096, micro: 1, global: 64, tensor: 1,
			pipeline: 1,
			more:     "--bf16 --use-distributed-optimizer " + more}
		return resolved(t, job.Request{MegatronArguments: job.MegatronArguments{Megatron: r.arguments()},
			GPU: "H100-80GB", GPUs: 8}, Machine{Rates: roads.Rates{Host: 164 * giga}})
	}
	base, offloaded := host(""), host("--optimizer-cpu-offload --use-precision-aware-optimizer")
	if offloaded.Optimizer.Expected < 3*base.Optimizer.Expected {
		t.Errorf("an update by the CPU: %v, on the GPU %v", offloaded.Optimizer, base.Optimizer)
	}
}

// TestDisks: a step whose states are in files takes what the disks of the node take for all its ranks, and where nobody
// says how fast they are, the step names what it assumes.
func TestDisks(t *testing.T) {
	const parameters, bytes = 1_235_814_400, 22
	q := job.Request{Model: "llama-3.2-1b", GPU: "H100-80GB", GPUs: 2, FSDP: "2", Precision: "bf16", Sequence: 512,
		Optimizer: job.ServiceOptimizer}
	step := func(disks int, rate float64) *Step {
		t.Helper()
		q.Offload.Tier = job.Tier{Disks: disks}
		if disks > 0 {
			q.Offload.Tier.Memory = 100 * ledger.MiB // which keeps next to nothing
		}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		m := Machine{Rates: roads.Rates{Host: 164e9, Disk: rate}}
		s, err := Predict(j, m, parameters, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	within := func(what string, got time.Duration, want float64) {
		t.Helper()
		if ratio := got.Seconds() / want; !(ratio > 0.99 && ratio < 1.02) {
			t.Errorf("%s: the optimizer takes %v, want %.3g s", what, got, want)
		}
	}
	memory := step(0, 0)
	given := step(1, 5e9)
	within("5 GB/s", given.Optimizer.Expected, bytes*parameters/5e9)
	if len(memory.Assumed) != 0 || len(given.Assumed) != 0 {
		t.Errorf("assumed without a disk %q, and with its rate %q", memory.Assumed, given.Assumed)
	}
	assumed := step(2, 0)
	within("two disks", assumed.Optimizer.Expected, bytes*parameters/(2*roads.AssumedDisk[0]))
	if len(assumed.Assumed) != 1 || !strings.Contains(assumed.Assumed[0], "--disk-bandwidth") {
		t.Errorf("assumed %q", assumed.Assumed)
	}
	if fast := step(1, 1e15); fast.Optimizer != memory.Optimizer {
		t.Errorf("with disks that take no time the optimizer takes %v, and in memory %v", fast.Optimizer,
			memory.Optimizer)
	}
}

// TestAssumedNetwork: a rate that nobody says is named, and only where a step waits for it.
func TestAssumedNetwork(t *testing.T) {
	spec := gpu.Model{}
	spec.Speed.Half, spec.Bandwidth, spec.Speed.Peer = 300, 800, 50
	for _, c := range []struct {
		world, node int
		network     float64
		assumed     bool
	}{{8, 8, 0, false}, {16, 8, 0, true}, {16, 8, 12e9, false}} {
		j := &job.Job{}
		j.World, j.RanksPerNode, j.GPU = c.world, c.node, spec
		if got := (Machine{Network: c.network}).assumesNetwork(j); got != c.assumed {
			t.Errorf("%d ranks, %d a node, %g B/s: assumed is %v", c.world, c.node, c.network, got)
		}
	}
	j := &job.Job{}
	j.World, j.RanksPerNode, j.GPU = 16, 8, spec
	if j.GPU.Speed.Network = 50; (Machine{}).assumesNetwork(j) {
		t.Error("the network of a data sheet is assumed")
	}
}

// TestCriticTakesPasses: a critic of the policy's size has passes as long as those of the policy.
func TestCriticTakesPasses(t *testing.T) {
	file := filestest.InNewFolder(t)
	of := func(enable string) *predictor {
		path := file("run"+enable+".sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=llama-3-8b "+
			"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 critic.model.path=llama-3-8b "+
			"critic.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 critic.enable="+enable+"\n")
		p, _ := predicted(t, job.Request{Configs: []string{path}, GPU: "H100-80GB"})
		return p
	}
	with, without := of("True"), of("False")
	if ratio := with.backward / without.backward; ratio < 1.9 || ratio > 2 { // the critic has no logits
		t.Errorf("the backward passes with a critic take %.3f times those without", ratio)
	}
}
