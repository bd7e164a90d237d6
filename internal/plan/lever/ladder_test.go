package lever

import (
	"fmt"
	"slices"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// machine is where somebody wants to train.
type machine struct {
	gpu  string
	gpus int
	host ledger.Bytes
}

var (
	consumer = []machine{{"RTX-3060-12GB", 1, 32 * ledger.GiB}, {"RTX-4090", 1, 64 * ledger.GiB},
		{"RTX-4090", 2, 128 * ledger.GiB}}
	workstation = []machine{{"A6000", 1, 128 * ledger.GiB}, {"RTX-PRO-6000", 1, 256 * ledger.GiB},
		{"A6000", 4, 256 * ledger.GiB}}
	servers = []machine{{"H100-80GB", 8, 1024 * ledger.GiB}, {"A100-80GB", 8, 2048 * ledger.GiB}}
)

// questions ask "this model on this machine: how?", from models of 1B to 400B, with all of them trained, an adapter,
// and an adapter of a quantized model.
func questions() (list []job.Request) {
	add := func(models []string, machines []machine, ways ...func(*job.Request)) {
		for _, name := range models {
			for _, m := range machines {
				for _, way := range ways {
					q := job.Request{Model: name, GPU: m.gpu, GPUs: m.gpus, HostMemory: m.host, Sequence: 2048}
					way(&q)
					list = append(list, q)
				}
			}
		}
	}
	full := func(*job.Request) {}
	lora := func(q *job.Request) { q.LoRA, q.LoRATargets = 16, []string{"all-linear"} }
	qlora := func(q *job.Request) { q.QLoRA = 16 }
	batch := func(q *job.Request) { q.MicroBatch = 8 }
	add([]string{"llama-3.2-1b", "qwen2.5-3b", "qwen3-8b"}, consumer, full, batch)
	add([]string{"qwen2.5-7b", "qwen2.5-14b"}, workstation, full, lora)
	add([]string{"qwen2.5-32b", "llama-3-70b"}, workstation, lora, qlora)
	add([]string{"llama-3-8b", "qwen2.5-32b", "llama-3-70b", "llama-3.1-405b"}, servers, full, lora)
	add([]string{"qwen2.5-14b", "llama-3.1-405b"}, consumer[:1], full, qlora)
	add([]string{"llama-3.2-1b", "qwen2.5-3b"}, consumer, func(q *job.Request) { q.Precision = "fp32" })
	return list
}

func named(q job.Request) string {
	return fmt.Sprintf("%s on %d %s, lora %d, qlora %d, micro batch %d", q.Model, q.GPUs, q.GPU, q.LoRA, q.QLoRA,
		q.MicroBatch)
}

// TestLadders: every question has an answer. Rungs come in the order of their costs, each changes the plan as it
// promises, and with all of them the job fits. Where it does not, nothing that the levers can say fits either, and a
// machine is named that the changed job fits.
func TestLadders(t *testing.T) {
	asked, lacking, fitting, named := questions(), 0, 0, named
	for i, q := range asked {
		if testing.Short() && i%6 != 0 {
			continue
		}
		p := planned(t, q)
		if p.Verdict.Result == plan.Fits {
			continue
		}
		lacking++
		l, err := Climb(Question{Need: NeedOf(p), Request: q, Plan: p})
		if err != nil {
			t.Fatal(err)
		}
		if l == nil {
			t.Errorf("%s: no ladder", named(q))
			continue
		}
		checkRungs(t, named(q), q, l)
		if l.Fits() {
			fitting++
			continue
		}
		if by := exhaustively(q); by != "" {
			t.Errorf("%s: the ladder does not fit, but this does: %s", named(q), by)
		}
		if l.All.Verdict == plan.DoesNotFit && l.Machine == nil {
			t.Errorf("%s: nothing fits, and no machine is named", named(q))
		}
	}
	t.Logf("%d questions, %d lack memory, %d of them have a ladder that fits", len(asked), lacking, fitting)
	if fitting == 0 {
		t.Error("no ladder fits")
	}
}

// TestLadderToDisk: where the optimizer service lacks memory in every format, a disk holds its states, and the job
// fits.
func TestLadderToDisk(t *testing.T) {
	q := job.Request{Model: "llama-3.2-1b", GPU: "H100-80GB", Precision: "bf16", Sequence: 512,
		Optimizer: job.ServiceOptimizer, HostMemory: 11 * ledger.GiB}
	l, err := Climb(Question{Need: NeedOf(planned(t, q)), Request: q, Plan: planned(t, q)})
	if err != nil {
		t.Fatal(err)
	}
	if !l.Fits() || !slices.ContainsFunc(l.Rungs, func(r Rung) bool { return r.Says() == "--tier /mnt/nvme" }) {
		t.Errorf("the ladder is %+v", l)
	}
	checkRungs(t, "a disk", q, l)
	if q.Offload.Tier.Disks = 1; planned(t, q).Verdict.Result == plan.DoesNotFit {
		t.Error("with a disk the job does not fit")
	}
}

// TestLaddersOfSmallHosts: the update on the host comes before another training, in a smaller format or with a disk
// where the host lacks memory, and also behind a fused step, whose setting has the same name. A model that reads images
// has Liger's loss, too.
func TestLaddersOfSmallHosts(t *testing.T) {
	update := func(format string) []string { return []string{"--optimizer plimsoll/" + format} }
	lora := job.Request{Model: "gemma-3-4b", GPU: "RTX-3060-12GB", HostMemory: 32 * ledger.GiB, Sequence: 4096}
	lora.LoRA, lora.LoRATargets = 16, []string{"all-linear"}
	for _, c := range []struct {
		request job.Request
		want    []string
	}{
		{job.Request{Model: "qwen2.5-3b", GPU: "RTX-4090", HostMemory: 32 * ledger.GiB, Sequence: 1024},
			update("split24")},
		{job.Request{Model: "qwen2.5-3b", GPU: "RTX-4090", HostMemory: 24 * ledger.GiB, Sequence: 1024},
			append(update("split"), "--tier /mnt/nvme")},
		{lora, []string{"--loss fused"}},
	} {
		l, err := Climb(Question{Need: GPUMemory, Request: c.request, Plan: planned(t, c.request)})
		if err != nil {
			t.Fatal(err)
		}
		if !l.Fits() || l.Trains() {
			t.Errorf("%s with %v: the ladder says %v: %s", named(c.request), c.request.HostMemory, l.All.Flags,
				l.All.Verdict)
			continue
		}
		for _, want := range c.want {
			if !slices.Contains(l.All.Flags, want) {
				t.Errorf("%s with %v: %v lacks %s", named(c.request), c.request.HostMemory, l.All.Flags, want)
			}
		}
		checkRungs(t, named(c.request), c.request, l)
	}
}

// TestLadderTo16Bits: a job in fp32 that no change of the same training makes fit computes in 16 bits, in the type that
// its GPU has. Where ZeRO keeps the master weights on the host, the precision is DeepSpeed's own.
func TestLadderTo16Bits(t *testing.T) {
	for _, c := range []struct {
		gpu    string
		host   ledger.Bytes
		tokens int
		want   []string
	}{
		{"A10", 12, 24576, []string{"--precision amp-bf16"}},
		{"V100-32GB", 24, 65536, []string{"--precision amp-fp16"}},
		{"RTX-3060-12GB", 64, 2048, []string{"--precision bf16", "--zero 3"}},
	} {
		q := job.Request{Model: "llama-3.2-1b", GPU: c.gpu, HostMemory: c.host * ledger.GiB, Sequence: c.tokens,
			Precision: "fp32"}
		l, err := Climb(Question{Need: GPUMemory, Request: q, Plan: planned(t, q)})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range c.want {
			if !l.Fits() || !slices.Contains(l.All.Flags, want) {
				t.Errorf("%s: the ladder says %v, %s, and lacks %s", c.gpu, l.All.Flags, l.All.Verdict, want)
			}
		}
		checkRungs(t, c.gpu, q, l)
	}
}

// TestLadderOfVaryingLengths: with lengths that vary the rungs promise what plans with such lengths say.
func TestLadderOfVaryingLengths(t *testing.T) {
	if testing.Short() {
		t.Skip("plans dozens of steps")
	}
	q := job.Request{Model: "qwen2.5-0.5b", GPU: "RTX-3060-12GB", Sequence: 2048, MicroBatch: 4}
	q.ShortestSequence = 256
	l, err := Climb(Question{Need: GPUMemory, Request: q, Plan: planned(t, q)})
	if err != nil {
		t.Fatal(err)
	}
	if !l.Fits() || l.All.Request.ShortestSequence != 256 {
		t.Errorf("the ladder is %+v", l.All)
	}
	checkRungs(t, "varying lengths", q, l)
}

// checkRungs plans a job with its rungs, one more each time.
func checkRungs(t *testing.T, name string, q job.Request, l *Ladder) {
	t.Helper()
	if !slices.IsSortedFunc(l.Rungs, func(a, b Rung) int { return int(a.Cost) - int(b.Cost) }) {
		t.Errorf("%s: the rungs are not in the order of their costs", name)
	}
	before := planned(t, q)
	device := NeedOf(before).Device()
	settings := l.Rungs[0].settings[:0:0]
	for i := range l.Rungs {
		r := &l.Rungs[i]
		if r.Says() == "" || r.Cost == Hardware {
			t.Errorf("%s: rung %d is %+v", name, i, r)
		}
		settings = with(settings, r.settings)
		applied, err := Apply(q, before.Job.Files, settings)
		if err != nil || applied == nil {
			t.Fatalf("%s: %v, %v", name, applied, err)
		}
		after, err := applied.planned()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		was, _ := before.Held(device, nil)
		is, _ := after.Held(device, nil)
		if was-is != r.Frees || after.Verdict.Result != r.Verdict || after.Verdict.Lacks() != r.Lacks {
			t.Errorf("%s: %s promises %v, %s, lacks %v; it is %v, %s, %v", name, r.Says(), r.Frees, r.Verdict, r.Lacks,
				was-is, after.Verdict.Result, after.Verdict.Lacks())
		}
		before = after
	}
	checkApplied(t, name, l.All)
}

// combinations are values of the levers that flags say.
func combinations(q job.Request) (list []job.Request) {
	for _, loss := range []string{"", "fused"} {
		for _, optimizer := range []string{"", "adamw/fused", "adamw_bnb_8bit", "plimsoll/split", "plimsoll/split24"} {
			for _, sharding := range []string{"", "fsdp", "fsdp offload", "zero", "states", "activations", "both"} {
				for _, adapter := range []string{"", "lora", "nf4"} {
					q := combined(q, sharding, adapter)
					q.Loss, q.Optimizer, q.Recompute = loss, optimizer, "full"
					list = append(list, q)
				}
			}
		}
	}
	return list
}

// exhaustively plans what flags can say of a job with short sequences, and returns the request of a job that fits.
func exhaustively(q job.Request) string {
	for _, with := range combinations(q) {
		j, err := with.Resolve()
		if err != nil {
			continue
		}
		if p, err := plan.Within(j); err == nil && p != nil && p.Verdict.Result == plan.Fits {
			return fmt.Sprintf("%+v", with)
		}
	}
	return ""
}

// combined returns a request with the least that all levers leave, and values of two of them.
func combined(q job.Request, sharding, adapter string) job.Request {
	q.Sequence, q.MicroBatch, q.Allocator = 256, 1, "expandable_segments:True"
	switch sharding {
	case "fsdp", "fsdp offload":
		q.FSDP, q.OffloadParameters = "2", sharding == "fsdp offload"
	case "zero":
		q.ZeRO, q.ZeROOffload, q.Precision = "3", job.ZeROOffloads, "bf16"
	case "states", "both":
		q.Offload.What = job.OffloadStates
	}
	q.OffloadsActivations = sharding == "activations" || sharding == "both"
	switch adapter {
	case "lora":
		if q.QLoRA == 0 {
			q.LoRA, q.LoRATargets = 16, []string{"all-linear"}
		}
	case "nf4":
		q.LoRA, q.LoRATargets, q.QLoRA = 0, nil, 16
	}
	return q
}
