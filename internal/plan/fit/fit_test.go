package fit

import (
	"errors"
	"flag"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/steptime"
)

const small = `{"model_type": "llama", "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 512,
	"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 100000}`

// cuttable is a model for pipelines, which has more parameters than activations.
const cuttable = `{"model_type": "llama", "vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 4096,
	"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 100000,
	"tie_word_embeddings": false}`

var fast = steptime.Machine{Rates: roads.Rates{Host: 490e9}}

// TestExhaustive compares the search with all recipes of a small space, each of them planned. With -short it leaves
// out large ones.
func TestExhaustive(t *testing.T) {
	file := filestest.InNewFolder(t)
	config := file("config.json", small)
	zero := file("ds.json", `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
		"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6, "allgather_bucket_size": 1e6}}`)
	for _, test := range []struct {
		gpus, batch          int
		memory               ledger.Bytes
		fewer, tight, stages bool
		model                string // "" is small
		large                bool
	}{
		{gpus: 1, memory: 1600}, {gpus: 1, memory: 2000, batch: 24, tight: true}, {gpus: 1, memory: 500},
		{gpus: 2, memory: 3300, fewer: true, batch: 8}, {gpus: 2, memory: 3500, stages: true, batch: 24},
		{gpus: 4, memory: 3300, stages: true, batch: 24}, {gpus: 4, memory: 3200, batch: 16, model: cuttable},
		{gpus: 2, memory: 3400, large: true}, {gpus: 4, memory: 3300, fewer: true, batch: 24, large: true},
		{gpus: 4, memory: 3200, model: cuttable, large: true},
	} {
		if test.large && testing.Short() {
			continue
		}
		config := config
		if test.model != "" {
			config = file("cuttable.json", test.model)
		}
		q := Question{Request: job.Request{Model: config, GPU: "H100-80GB", Precision: "bf16", Sequence: 512,
			GPUs: test.gpus, GPUMemory: test.memory * ledger.MiB}, Machine: fast, Batch: test.batch,
			FewerGPUs: test.fewer, Tight: test.tight}
		if test.stages {
			q.Request.DeepSpeed, q.Request.Precision = zero, ""
		}
		a, err := Search(q)
		if err != nil {
			t.Fatal(err)
		}
		best := exhaustive(t, q)
		speed := 0.0
		if a.Fastest != nil {
			speed = a.Fastest.Speed()
		}
		test.model = ""
		if speed != best {
			t.Errorf("%+v: %g tokens a second were found, but one makes %g", test, speed, best)
		}
		t.Logf("%+v: %g tokens a second, %d of %d planned", test, speed, a.Planned, a.Candidates)
		for i, r := range a.Front {
			if i > 0 && (r.Peak() >= a.Front[i-1].Peak() || r.Speed() > a.Front[i-1].Speed()) {
				t.Errorf("%+v does not belong behind %+v", r, a.Front[i-1])
			}
		}
	}
}

// exhaustive returns the speed of the fastest recipe that fits, of all; 0 if none does.
func exhaustive(t *testing.T, q Question) (best float64) {
	s, err := newTorchSearch(q)
	if err != nil {
		t.Fatal(err)
	}
	return fastestOfAll(t, &s.search)
}

// fastestOfAll plans every member of a space.
func fastestOfAll(t *testing.T, s *search) (best float64) {
	err := each(s.decideAll(), func(g *group) error {
		for _, m := range g.members {
			if err := s.planned(m); err != nil {
				return err
			}
			if s.fits(m) {
				s.keep(m)
			}
			m.plan = nil // there may be thousands
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range s.known {
		best = max(best, r.Speed())
	}
	return best
}

// TestReportedPipelinesAreWhole: the search leaves stages out that hold no more than others, and an answer has all.
func TestReportedPipelinesAreWhole(t *testing.T) {
	config := filestest.InNewFolder(t)("config.json", cuttable)
	q := Question{Request: job.Request{Model: config, GPU: "H100-80GB", GPUs: 4, PipelineParallel: 4, Accumulation: 8,
		Precision: "bf16", Sequence: 512, GPUMemory: 3200 * ledger.MiB}, Machine: fast}
	for _, memory := range []ledger.Bytes{3200 * ledger.MiB, 600 * ledger.MiB} { // none fits the second
		q.Request.GPUMemory = memory
		a, err := Search(q)
		if err != nil || (a.Fastest == nil) != (memory < ledger.GiB) {
			t.Fatalf("%v: %+v, %v", memory, a, err)
		}
		reported := a.Front
		if a.Fastest == nil {
			reported = []*Recipe{a.Closest}
		} else {
			reported = append(reported, a.LargestBatch, a.Longest)
		}
		for _, r := range reported {
			stages := 0
			for i := range r.Plan.Devices {
				if r.Plan.Devices[i].Kind == ledger.GPU {
					stages++
				}
			}
			if stages != 4 {
				t.Errorf("%v, %s: %d of 4 stages are in the plan", memory, r.Name, stages)
			}
		}
	}
}

// countedJob notes that it was planned, by whatever stages.
type countedJob struct {
	decided
	planned *atomic.Int64 // jobs that were planned
	once    *sync.Once
}

func (j countedJob) within() (*plan.Plan, error) {
	j.once.Do(func() { j.planned.Add(1) })
	return j.decided.within()
}

func (j countedJob) plan() (*plan.Plan, error) {
	j.once.Do(func() { j.planned.Add(1) })
	return j.decided.plan()
}

// TestPlannedCountsRecipes: an answer says how many recipes were planned, also those that are planned a second time
// with all stages, and those that are planned only because none fits.
func TestPlannedCountsRecipes(t *testing.T) {
	config := filestest.InNewFolder(t)("config.json", cuttable)
	for _, memory := range []ledger.Bytes{3200 * ledger.MiB, 600 * ledger.MiB} { // none fits the second
		s, err := newTorchSearch(Question{Request: job.Request{Model: config, GPU: "H100-80GB", GPUs: 4,
			Accumulation: 8, Precision: "bf16", Sequence: 512, GPUMemory: memory}, Machine: fast})
		if err != nil {
			t.Fatal(err)
		}
		var planned atomic.Int64
		decide := s.decide
		s.decide = func(v *variant, micro int) (decided, error) {
			j, err := decide(v, micro)
			if j == nil || err != nil {
				return nil, err
			}
			return countedJob{j, &planned, &sync.Once{}}, nil
		}
		if err := s.run(); err != nil || (s.answer.Fastest == nil) != (memory < ledger.GiB) {
			t.Fatalf("%v: %+v, %v", memory, s.answer, err)
		}
		if int64(s.answer.Planned) != planned.Load() {
			t.Errorf("%v: the answer says that %d recipes were planned, but %d were", memory, s.answer.Planned,
				planned.Load())
		}
	}
}

// TestFewPlans: of thousands of recipes a search plans few.
func TestFewPlans(t *testing.T) {
	config := filestest.InNewFolder(t)("config.json", cuttable)
	q := Question{Request: job.Request{Model: config, GPU: "H100-80GB", GPUs: 8, Nodes: 4,
		Precision: "bf16", Sequence: 2048, GPUMemory: 3500 * ledger.MiB}, Machine: fast, Batch: 384}
	a, err := Search(q)
	if err != nil || a.Fastest == nil {
		t.Fatalf("%+v, %v", a, err)
	}
	t.Logf("%d of %d planned, the fastest is %s", a.Planned, a.Candidates, a.Fastest.Name)
	if a.Candidates < 1000 || a.Planned > a.Candidates*3/10 {
		t.Errorf("%d of %d recipes were planned", a.Planned, a.Candidates)
	}
}

// questions are three questions of people.
var questions = map[string]Question{
	"one consumer GPU": {Request: job.Request{Model: "qwen2.5-3b", GPU: "RTX-4090", HostMemory: 64 * ledger.GiB,
		Sequence: 1024, Precision: "bf16", Optimizer: "adamw/fused"}, States: job.Offload{Master: "split"},
		Machine: steptime.Machine{Rates: roads.Rates{Host: 71e9}}},
	"8 x 80 GB": {Request: job.Request{Model: "llama-3-8b", GPU: "H100-80GB", GPUs: 8, Sequence: 4096,
		Precision: "amp-bf16", HostMemory: ledger.TiB}, Machine: fast, Batch: 64},
	"64 GPUs": {Request: job.Request{Model: "llama-3-70b", GPU: "H100-80GB", GPUs: 8, Nodes: 8, Sequence: 8192,
		Precision: "amp-bf16", Optimizer: "adamw/fused", HostMemory: 2 * ledger.TiB, Recompute: "full"},
		Machine: fast},
}

// TestQuestions: each question has a recipe, and plimsoll plan of it says that it fits. With -short there is the
// question of one GPU.
func TestQuestions(t *testing.T) {
	for name, q := range questions {
		if q.Request.GPUs > 1 && testing.Short() {
			continue
		}
		a, err := Search(q)
		if err != nil {
			t.Fatal(err)
		}
		if a.Fastest == nil {
			t.Errorf("%s: no recipe", name)
			continue
		}
		for _, r := range append(a.Front, a.LargestBatch, a.Longest) {
			checkRecipe(t, q.Request, r)
		}
	}
}

var planAll = flag.Bool("exhaustive", false, "plan every recipe of the three questions")

// TestExhaustiveQuestions plans every recipe of the questions. None that fits is faster than what the search finds.
func TestExhaustiveQuestions(t *testing.T) {
	if !*planAll {
		t.Skip("takes 5 minutes: make exhaustive")
	}
	for name, q := range questions {
		t.Run(name, func(t *testing.T) {
			a, err := Search(q)
			if err != nil {
				t.Fatal(err)
			}
			s, err := newTorchSearch(q)
			if err != nil {
				t.Fatal(err)
			}
			best := fastestOfAll(t, &s.search)
			t.Logf("%d recipes, %d of them fit; the search planned %d, and found %.0f tokens/s: %s", s.answer.Planned,
				len(s.known), a.Planned, a.Fastest.Speed(), a.Fastest.Name)
			if best != a.Fastest.Speed() {
				t.Errorf("one makes %.0f tokens/s", best)
			}
		})
	}
}

func planOf(q job.Request) (*plan.Plan, error) {
	j, err := q.Resolve()
	if err != nil {
		return nil, err
	}
	return plan.New(j)
}

// checkRecipe plans what a user would plan.
func checkRecipe(t *testing.T, q job.Request, r *Recipe) {
	t.Helper()
	config, err := r.NewConfig()
	if err != nil {
		t.Fatal(err)
	}
	request := r.Request(q)
	request.Texts = files.Texts{ConfigFile: config}
	planned, err := planOf(request)
	if err != nil {
		t.Errorf("%s: %v", r.Name, err)
	} else if planned.Verdict != r.Plan.Verdict || planned.Verdict.Result != plan.Fits {
		t.Errorf("%s: %+v, but plan says %+v", r.Name, r.Plan.Verdict, planned.Verdict)
	}
}

// TestAmend: the user's own files with a recipe's settings plan what the search has planned.
func TestAmend(t *testing.T) {
	file := filestest.InNewFolder(t)
	q := Question{Request: job.Request{Model: file("config.json", small), GPU: "H100-80GB", GPUs: 2, Sequence: 512,
		GPUMemory: 3500 * ledger.MiB,
		DeepSpeed: file("ds.json", `{
  "train_batch_size": 4,
  "bf16": {"enabled": true}, // half
  "zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}
}`)}, Machine: fast}
	a, err := Search(q)
	if err != nil || a.Fastest == nil {
		t.Fatalf("%+v, %v", a, err)
	}
	made, err := a.Amend(a.Fastest)
	if err != nil || len(made.Edits) == 0 {
		t.Fatalf("%+v, %v", made, err)
	}
	request := q.Request // what no file says is a flag
	request.Texts = made.Texts
	for _, rest := range made.Rest {
		if rest.Name == "gradient checkpointing" {
			request.Recompute = a.Fastest.Overrides.Recompute
		}
	}
	p, err := planOf(request)
	if err != nil {
		t.Errorf("%s\n%v", made.Texts[q.Request.DeepSpeed], err)
	} else if p.Verdict != a.Fastest.Plan.Verdict {
		t.Errorf("%+v, but the edited files plan %+v", a.Fastest.Plan.Verdict, p.Verdict)
	}
}

// TestNewConfig: a recipe whose settings are those of the new configuration has that configuration.
func TestNewConfig(t *testing.T) {
	r := &Recipe{Config: "{\n  \"zero_optimization\": {\"stage\": 1}\n}\n", Size: Size{DataRanks: 1}}
	if text, err := r.NewConfig(); err != nil || string(text) == "" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestBatchOfPipeline: a search keeps the batch of a file whose pipeline takes several passes to it.
func TestBatchOfPipeline(t *testing.T) {
	path := filestest.InNewFolder(t)("train.toml", `[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "none"
`)
	s, err := newTorchSearch(Question{Request: job.Request{Configs: []string{path}, GPUs: 8, GPU: "H100-80GB"}})
	if err != nil || s.Batch != 64 {
		t.Errorf("the batch is %d, %v: expected the 64 sequences of the file", s.Batch, err)
	}
}

// TestZeRO: a job whose stage of ZeRO is a flag gets a configuration, which plans as the recipe does.
func TestZeRO(t *testing.T) {
	q := job.Request{Model: "qwen2.5-0.5b", GPU: "A100-80GB", GPUs: 2, Precision: "bf16", Sequence: 2048,
		HostMemory: 256 * ledger.GiB, Shorthand: job.Shorthand{ZeRO: "1"}}
	a, err := Search(Question{Request: q})
	if err != nil {
		t.Fatal(err)
	}
	text, err := a.Fastest.NewConfig()
	if err != nil || text == nil {
		t.Fatalf("%s, %v", text, err)
	}
	written := a.Fastest.Request(q)
	written.Texts = files.Texts{ConfigFile: text}
	p, err := planOf(written)
	if err != nil {
		t.Fatal(err)
	}
	if p.Verdict != a.Fastest.Plan.Verdict || written.ZeRO != "" {
		t.Errorf("%+v, but its configuration plans %+v", a.Fastest.Plan.Verdict, p.Verdict)
	}
}

// TestAnyMoments: where host memory decides, moments of bf16 make a recipe fit that does not fit with fp32.
func TestAnyMoments(t *testing.T) {
	q := Question{Request: job.Request{Model: "qwen2.5-3b", GPU: "RTX-4090", HostMemory: 44 * ledger.GiB, Sequence: 512,
		Precision: "bf16", Optimizer: "adamw/fused", Recompute: "full"}, States: job.Offload{Master: "split"},
		Machine: steptime.Machine{Rates: roads.Rates{Host: 71e9}}}
	given, err := Search(q)
	if err != nil || given.Fastest != nil {
		t.Fatalf("%+v fits with fp32 moments, %v", given, err)
	}
	q.AnyMoments = true
	a, err := Search(q)
	if err != nil || a.Fastest == nil {
		t.Fatalf("nothing fits, %v", err)
	}
	if format := a.Fastest.Request(q.Request).Offload.Moments; format != "bf16" {
		t.Errorf("%s has moments of %s", a.Fastest.Name, format)
	}
	q.States.Moments = "fp32"
	if _, err := Search(q); !errors.As(err, new(*fault.Input)) {
		t.Errorf("%v, though the moments are given", err)
	}
}

// TestUpdateOnTheHost: plimsoll.torch.AdamW is a recipe like others. It plans as its flags do. Who names an optimizer
// gets no other.
func TestUpdateOnTheHost(t *testing.T) {
	q := job.Request{Model: "qwen3-1.7b", GPU: "RTX-4090", HostMemory: 64 * ledger.GiB, Precision: "bf16",
		Sequence: 2048}
	for optimizer, want := range map[string]bool{"": true, "adamw/fused": false} {
		q.Optimizer = optimizer
		a, err := Search(Question{Request: q, Machine: fast})
		if err != nil || a.Fastest == nil {
			t.Fatalf("nothing fits: %v", err)
		}
		i := slices.IndexFunc(a.Front, func(r *Recipe) bool { return r.Overrides.Optimizer != "" })
		if (i >= 0) != want {
			t.Fatalf("with --optimizer %q the update on the host is recipe %d of %d", optimizer, i, len(a.Front))
		}
		if !want {
			continue
		}
		r := a.Front[i]
		p, err := planOf(r.Request(q))
		if err != nil || p.Verdict != r.Plan.Verdict || p.Job.Offload.Format == nil {
			t.Errorf("%s: %+v, but its flags plan %+v, %v", r.Name, r.Plan.Verdict, p.Verdict, err)
		}
		if r.Step.Total.Expected <= 0 {
			t.Errorf("%s takes %v of a step", r.Name, r.Step.Total.Expected)
		}
	}
	q.Optimizer = ""
	a, err := Search(Question{Request: q, Machine: fast, AnyMoments: true})
	if err != nil {
		t.Fatal(err)
	}
	least := a.Front[len(a.Front)-1]
	if least.Overrides.Optimizer == "" {
		t.Errorf("%s takes least of a GPU", least.Name)
	}
}

// TestNothing: a question without a recipe to search is refused with the reason, as it is no answer that none fits.
func TestNothing(t *testing.T) {
	for says, q := range map[string]Question{
		"makes a batch of 7 sequences on 3 ranks": {Request: job.Request{Model: "qwen2.5-0.5b",
			GPU: "H100-80GB", GPUs: 3, Precision: "bf16"}, Batch: 7},
		"without the speed of the GPU": {Request: job.Request{Model: "qwen2.5-0.5b", GPUMemory: 24 * ledger.GiB}},
	} {
		if _, err := Search(q); !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}

// TestDisks: a recipe has its states on a disk where nothing else of the same training fits a host whose memory is
// known, and says what rate it assumes. Who names disks gets recipes with so many.
func TestDisks(t *testing.T) {
	q := Question{Request: job.Request{Model: "qwen2.5-3b", GPU: "RTX-4090", HostMemory: 24 * ledger.GiB,
		Sequence: 512}, Machine: fast}
	isAssumed := func(a *Answer) bool {
		return slices.ContainsFunc(a.Assumed, func(s string) bool { return strings.Contains(s, "--disk-bandwidth") })
	}
	a, err := Search(q)
	if err != nil || a.Fastest == nil || a.Ladder != nil {
		t.Fatalf("%+v, %v", a, err)
	}
	if a.Fastest.Overrides.Tier.Disks != 1 || !isAssumed(a) {
		t.Errorf("%s on %+v, assuming %q", a.Fastest.Name, a.Fastest.Overrides.Tier, a.Assumed)
	}
	for _, r := range append(a.Front, a.LargestBatch, a.Longest) {
		checkRecipe(t, q.Request, r)
	}
	// A step reads less with more memory. So the fastest recipe has as much as fits beside all else.
	q.States.Tier = job.Tier{Disks: 1, Memory: ledger.GiB}
	less, err := Search(q)
	if err != nil || a.Fastest.Overrides.Tier.Memory < 2*ledger.GiB || less.Fastest.Speed() >= a.Fastest.Speed() {
		t.Errorf("%v of memory make %f tokens/s, and 1 GiB %f, %v", a.Fastest.Overrides.Tier.Memory, a.Fastest.Speed(),
			less.Fastest.Speed(), err)
	}
	q.States.Tier, q.Machine.Disk = job.Tier{}, 12e9
	quick, err := Search(q)
	if err != nil || isAssumed(quick) || quick.Fastest.Speed() <= a.Fastest.Speed() {
		t.Errorf("12 GB/s of a disk make %f tokens/s of %f, assuming %q, %v", quick.Fastest.Speed(), a.Fastest.Speed(),
			quick.Assumed, err)
	}
	q.Request.HostMemory = 64 * ledger.GiB
	if roomy, err := Search(q); err != nil || roomy.Fastest == nil || roomy.Fastest.Overrides.Tier.Disks > 0 {
		t.Errorf("with 64 GiB: %+v, %v", roomy.Fastest, err)
	}
	q.Request.HostMemory, q.States.Tier.Disks = 24*ledger.GiB, 2
	if two, err := Search(q); err != nil || two.Fastest == nil || two.Fastest.Overrides.Tier.Disks != 2 {
		t.Errorf("with two disks: %+v, %v", two.Fastest, err)
	}
	q.Request.Optimizer = "adamw/fused"
	if _, err := Search(q); !errors.As(err, new(*fault.Input)) {
		t.Errorf("disks for another optimizer: %v", err)
	}
	q.States.Tier = job.Tier{Memory: ledger.GiB}
	if _, err := Search(q); !errors.As(err, new(*fault.Input)) {
		t.Errorf("memory without a disk: %v", err)
	}
}
