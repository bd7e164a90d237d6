package steptime

import (
	"errors"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// TestRefusal: without a basis nothing is said of time, and the message names what is missing.
func TestRefusal(t *testing.T) {
	llama := job.Request{Model: "llama-3.2-1b", GPU: "H100-80GB", Precision: "bf16", Sequence: 512}
	float8 := filestest.InNewFolder(t)("train.toml", "[model]\nname = \"llama3\"\nflavor = \"8B\"\n"+
		"converters = [\"float8\"]\n[training]\nseq_len = 512\n[activation_checkpoint]\nmode = \"none\"\n")
	for _, test := range []struct {
		change func(*job.Request)
		says   string
	}{
		{func(q *job.Request) { *q = job.Request{Configs: []string{float8}, GPU: "A100-80GB"} }, "fp8"},
		{func(q *job.Request) { q.GPU = "" }, "the speed of the GPU"},
		{func(q *job.Request) { q.GPU, q.CPU = "", true }, "passes on GPUs only"},
		{func(q *job.Request) { q.GPU = "GB10" }, "the speed of the GPU"},
		{func(q *job.Request) { q.Offload.What = job.OffloadStates }, "--host-bandwidth"},
		{func(q *job.Request) { q.DeepSpeed, q.GPUs = "testdata/zo_config.json", 2 }, "--host-bandwidth"},
	} {
		q := llama
		test.change(&q)
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		_, err = Predict(j, Machine{}, j.Model.Elements(), nil)
		if !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %q", q, err, test.says)
		}
	}
}

// TestOperations: a Llama without recomputation takes 6 operations a token and parameter, and attention.
func TestOperations(t *testing.T) {
	q := job.Request{Model: "llama-3-8b", GPU: "H100-80GB", Precision: "bf16", Sequence: 4096, Attention: "flash"}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	w := workOf(j)
	const active = 8030261248 - 128256*4096 - 65*4096 // without the embedding and the norms
	if want := 2.0 * 4096 * active; w.dense != want {
		t.Errorf("products with weights take %g operations, want %g", w.dense, want)
	}
	if want := 32 * 2.0 * 4096 * 4096 * 4096; w.attention != want { // 32 blocks, causal
		t.Errorf("attention takes %g operations, want %g", w.attention, want)
	}
	s, err := Predict(j, Machine{Rates: roads.Rates{FLOPS: 400e12}}, j.Model.Elements(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := (w.dense + w.attention) / 400e12; s.Forward.Expected.Seconds()/want-1 > 1e-6 {
		t.Errorf("forward takes %v, want %g s", s.Forward.Expected, want)
	}
}

// TestMixture: a token is multiplied by the chosen experts only.
func TestMixture(t *testing.T) {
	q := job.Request{Model: "qwen3-30b-a3b", GPU: "H200", Precision: "bf16", Sequence: 1024}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	if _, active := Active(j); active < 2.9e9 || active > 3.2e9 { // 3.3 billion with the embedding
		t.Errorf("a token is multiplied by %g parameters", active)
	}
}

// TestMonotone: more tokens, more micro batches and recomputed blocks never take less time, and the ends of an
// interval enclose what is expected.
func TestMonotone(t *testing.T) {
	predict := func(t *rapid.T, q job.Request) *Step {
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		s, err := Predict(j, Machine{}, j.Model.Elements(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []Time{s.Forward, s.Backward, s.Communication, s.Optimizer, s.Total} {
			if p.Least > p.Expected || p.Expected > p.Most {
				t.Fatalf("%+v", s)
			}
		}
		return s
	}
	rapid.Check(t, func(t *rapid.T) {
		choose := func(name string, from ...string) string { return rapid.SampledFrom(from).Draw(t, name) }
		upTo := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
		q := job.Request{Model: "qwen2.5-0.5b", GPU: choose("gpu", "H100-80GB", "RTX-4090", "A100-40GB"),
			GPUs: upTo("gpus", 8), Precision: "bf16", Sequence: 128 * upTo("sequence", 32),
			MicroBatch: upTo("micro batch", 8), Accumulation: upTo("steps", 4), FSDP: choose("fsdp", "", "2"),
			Recompute: choose("recompute", "none", "selective")}
		base := predict(t, q)
		for name, change := range map[string]func(*job.Request){
			"sequence":    func(q *job.Request) { q.Sequence += 128 },
			"micro batch": func(q *job.Request) { q.MicroBatch++ },
			"steps":       func(q *job.Request) { q.Accumulation++ },
			"recompute":   func(q *job.Request) { q.Recompute = "full" },
		} {
			more := q
			change(&more)
			if s := predict(t, more); s.Total.Expected < base.Total.Expected {
				t.Errorf("more %s: %v instead of %v", name, s.Total, base.Total)
			}
		}
	})
}

// predicted returns the predictor of a job at the expected end, and its work.
func predicted(t *testing.T, q job.Request) (*predictor, work) {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	w := workOf(j)
	p := &predictor{job: j, rates: ratesAt(j, Machine{}, expected), trained: float64(j.Model.Elements())}
	p.predict(w)
	return p, w
}

// TestPorts: each rank of a node sends by a port of its own, so a ring over nodes has the speed of all of them.
func TestPorts(t *testing.T) {
	p, _ := predicted(t, job.Request{Model: "llama-3-8b", GPU: "A100-80GB", GPUs: 8, Nodes: 4, FSDP: "2",
		Precision: "bf16", Sequence: 512})
	for _, test := range []struct {
		ranks, inNode int64
		want          float64
	}{{8, 8, p.rates.peer}, {32, 8, 8 * p.rates.network}, {4, 1, p.rates.network}, {8, 2, 2 * p.rates.network}} {
		if got := p.rates.group(test.ranks, test.inNode); got != test.want {
			t.Errorf("%d ranks, %d in a node: %g B/s, want %g", test.ranks, test.inNode, got, test.want)
		}
	}
}

// TestExpertsOfARankAreGathered: under expert parallelism FSDP gathers only the rank's experts, among the ranks that
// have the same ones.
func TestExpertsOfARankAreGathered(t *testing.T) {
	q := job.Request{Model: "qwen3-30b-a3b", GPU: "H100-80GB", GPUs: 8, FSDP: "2", Precision: "bf16", Sequence: 512}
	alone, _ := predicted(t, q)
	whole := alone.gatherModel(1e9, 1)
	q.ExpertParallel = 8
	p, _ := predicted(t, q)
	others := 1e9 * (1 - expertPart(p.job))
	if got, want := p.gatherModel(1e9, 1), p.gather(others, 8, 1); math.Abs(got/want-1) > 1e-9 {
		t.Errorf("8 ranks with experts of their own gather for %g s, without experts %g s", got, want)
	}
	q.ExpertParallel = 2
	p, _ = predicted(t, q)
	if got := p.gatherModel(1e9, 1); got >= whole*2/3 || got <= whole/3 {
		t.Errorf("with half of the experts on a rank, it gathers for %g s, with all for %g s", got, whole)
	}
	if part := expertPart(p.job); part < 0.9 || part > 1 {
		t.Errorf("%.3f of the model are experts", part)
	}
}

// TestParts: what a pass takes beside its products.
func TestParts(t *testing.T) {
	q := job.Request{Model: "qwen2.5-0.5b", GPU: "A100-80GB", Precision: "bf16", Sequence: 2048, MicroBatch: 4}
	base, w := predicted(t, q)
	again := q
	again.Recompute = "full"
	p, _ := predicted(t, again)
	blocks := base.forward - w.head/base.rates.dense - w.loss/base.rates.Device
	if got := p.backward - base.backward; got < 0.999*blocks || got > 1.001*blocks || w.head < 0.1*w.dense {
		t.Errorf("recomputation takes %g s, want %g: without the head", got, blocks)
	}
	few := q
	few.Model, few.Sequence, few.MicroBatch = "llama-3-8b", 16, 1
	if p, w := predicted(t, few); p.forward < w.read/p.rates.Device {
		t.Errorf("a pass over few tokens takes %g s, but it reads %g bytes of weights", p.forward, w.read)
	}
	more := q
	more.Accumulation = 3
	p, _ = predicted(t, more)
	if got := p.total().backward; got < 3*base.backward+2*3*2*base.trained/base.rates.Device*0.999 {
		t.Errorf("three micro batches take %g s backward, and one %g", got, base.backward)
	}
}

// TestFrozen: a backward pass ends at the lowest block that is trained, and a frozen model runs forward, too.
func TestFrozen(t *testing.T) {
	file := filestest.InNewFolder(t)
	const text = "stage: sft\nbf16: true\ncutoff_len: 1024\nper_device_train_batch_size: 4\n" +
		"disable_gradient_checkpointing: true\n"
	q := job.Request{Model: "llama-3.2-1b", GPU: "A100-80GB", Configs: []string{file("full.yaml", text+
		"finetuning_type: full\n")}}
	whole, _ := predicted(t, q)
	q.Configs = []string{file("freeze.yaml", text+"finetuning_type: freeze\nfreeze_trainable_layers: 2\n")}
	p, w := predicted(t, q)
	if share := p.backward / whole.backward; w.reach != 2.0/16 || share > 0.4 || share < 0.1 {
		t.Errorf("2 of 16 blocks are trained: the backward pass goes through %g and takes %g s, and %g s if all are",
			w.reach, p.backward, whole.backward)
	}
	q = job.Request{Model: "llama-3.2-1b", GPU: "A100-80GB", Precision: "bf16", Sequence: 1024}
	alone, _ := predicted(t, q)
	q.Reference = "llama-3.2-1b"
	if p, _ := predicted(t, q); p.forward < 1.99*alone.forward || p.backward != alone.backward {
		t.Errorf("a frozen model beside it: %g s forward, %g s alone", p.forward, alone.forward)
	}
}
