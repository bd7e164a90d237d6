package fit

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
)

// asker is a kind of people who ask "this model on this machine: how?".
type asker struct {
	machines []machine
	models   []string
	ways     []string
	lengths  []int
}

// machine is where somebody wants to train.
type machine struct {
	gpu         string
	gpus, nodes int
	host        ledger.Bytes // of a node, in GiB
}

var askers = []asker{
	{ // consumer cards
		[]machine{{"RTX-3060-12GB", 1, 1, 32}, {"RTX-4070-Ti-SUPER", 1, 1, 64}, {"RTX-4090", 1, 1, 64},
			{"RTX-4090", 2, 1, 128}, {"RTX-5090", 1, 1, 96}},
		[]string{"llama-3.2-1b", "qwen3-1.7b", "qwen2.5-3b", "gemma-3-4b", "qwen3-8b", "qwen2.5-14b", "gpt-oss-20b"},
		[]string{"full", "batch", "8bit", "lora", "qlora", "fp32"}, []int{1024, 2048, 4096}},
	{ // workstations
		[]machine{{"A6000", 1, 1, 128}, {"RTX-PRO-6000", 1, 1, 256}, {"A6000", 4, 1, 256}, {"L40S", 2, 1, 128}},
		[]string{"qwen2.5-7b", "gemma-2-9b", "qwen2.5-14b", "mistral-small-24b-2501", "qwen2.5-32b", "llama-3-70b"},
		[]string{"full", "batch", "lora", "qlora", "mixed", "fp32"}, []int{2048, 4096, 8192}},
	{ // a server of 8 GPUs with 80 GB each
		[]machine{{"A100-80GB", 8, 1, 1024}, {"H100-80GB", 8, 1, 2048}},
		[]string{"llama-3-8b", "qwen2.5-32b", "mixtral-8x7b", "llama-3-70b", "glm-4.5-air", "llama-3.1-405b"},
		[]string{"full", "batch", "lora", "qlora", "mixed"}, []int{2048, 4096, 8192}},
	{ // GB200
		[]machine{{"GB200", 4, 1, 960}, {"GB200", 4, 2, 960}, {"GB200", 4, 18, 960}},
		[]string{"qwen2.5-14b", "qwen2.5-32b", "llama-3-70b", "qwen2.5-72b", "llama-3.1-405b"},
		[]string{"full", "batch", "lora", "mixed"}, []int{4096, 8192}},
}

// ofEach is how many questions each kind of people asks.
const ofEach = 15

// asked are the questions, drawn from all that each kind of people may ask.
func asked(seed uint64) (list []job.Request) {
	draws := rand.New(rand.NewPCG(seed, 40))
	for _, a := range askers {
		var all []job.Request
		for _, m := range a.machines {
			for _, name := range a.models {
				for _, way := range a.ways {
					for _, length := range a.lengths {
						all = append(all, m.request(name, way, length))
					}
				}
			}
		}
		draws.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
		list = append(list, all[:ofEach]...)
	}
	return list
}

// request is a model on the machine, trained in a way.
func (m machine) request(name, way string, length int) job.Request {
	q := job.Request{Model: name, GPU: m.gpu, GPUs: m.gpus, Nodes: m.nodes, HostMemory: m.host * ledger.GiB,
		Sequence: length}
	switch way {
	case "batch":
		q.MicroBatch = 8
	case "8bit":
		q.Optimizer = "adamw_bnb_8bit"
	case "lora":
		q.LoRA, q.LoRATargets = 16, []string{"all-linear"}
	case "qlora":
		q.QLoRA = 16
	case "mixed":
		q.Precision = "amp-bf16"
	case "fp32":
		q.Precision = "fp32"
	}
	return q
}

func questionOf(q job.Request) string {
	return fmt.Sprintf("%s on %d x %d %s, %d tokens, lora %d, qlora %d, micro batch %d, %s %s", q.Model, q.Nodes,
		q.GPUs, q.GPU, q.Sequence, q.LoRA, q.QLoRA, q.MicroBatch, q.Precision, q.Optimizer)
}

// departure is how far an answer departs from the training that was asked for.
type departure int

const (
	same      departure = iota
	otherwise           // passes in 16 bits, 8-bit states, an adapter, an adapter of weights of 4 bits
	shorter             // sequences
	none                // no answer
)

var departures = []string{"the same training", "another training", "shorter sequences", "nothing"}

func (d departure) String() string { return departures[d] }

// departureOf returns how far a request departs from another.
func departureOf(asked, answer job.Request) departure {
	switch {
	case answer.Sequence < asked.Sequence:
		return shorter
	case asked.Precision != "" && answer.Precision != asked.Precision,
		answer.Quantization != asked.Quantization, answer.LoRA != asked.LoRA, answer.QLoRA != asked.QLoRA,
		strings.Contains(answer.Optimizer, "8bit") && asked.Optimizer != answer.Optimizer:
		return otherwise
	}
	return same
}

// nearer returns a combination of levers that fits and departs less than an answer, or nil.
func nearer(q job.Request, than departure) *job.Request {
	for d := same; d < than; d++ {
		for _, base := range departed(q, d) {
			for _, c := range combined(base) {
				if departureOf(q, c) <= d && fitsAs(c) {
					return &c
				}
			}
		}
	}
	return nil
}

// fitsAs reports whether a request fits by a plan of its own.
func fitsAs(q job.Request) bool {
	j, err := q.Resolve()
	if err != nil {
		return false
	}
	p, err := plan.Within(j)
	return err == nil && p != nil && p.Verdict.Result == plan.Fits
}

// departed returns the requests of a departure.
func departed(q job.Request, d departure) (list []job.Request) {
	if d == same {
		return []job.Request{q}
	}
	if d == shorter {
		q.Sequence = 256
		list = append(list, q)
	}
	if q.Precision == "fp32" {
		half := q
		half.Precision = "amp-bf16"
		list = append(list, half)
	}
	eightBit, adapter := q, q
	eightBit.Optimizer = "adamw_bnb_8bit"
	if q.QLoRA == 0 {
		adapter.LoRA, adapter.LoRATargets = 16, []string{"all-linear"}
		quantized := adapter
		quantized.Quantization = "nf4"
		list = append(list, adapter, quantized)
	}
	return append(list, eightBit)
}

// combined returns the request with what levers say of the same training, in all combinations. Levers that never take
// more memory of any device have the value that takes least.
func combined(q job.Request) (list []job.Request) {
	q.Allocator, q.Recompute = "expandable_segments:True", "full"
	if q.MicroBatch > 1 {
		q.Accumulation, q.MicroBatch = q.MicroBatch, 1
	}
	losses := []string{""}
	if j, err := q.Resolve(); err == nil && job.HasLiger(j.Model) {
		losses = []string{"fused", ""}
	}
	for _, sharding := range []string{"", "fsdp", "fsdp offload", "zero1", "zero2", "zero3", "zero1 optimizer",
		"zero2 optimizer", "zero3 optimizer", "zero3 all"} {
		for _, states := range []string{"", "fused", "states", "split", "int8", "split24", "tier"} {
			for _, activations := range []bool{false, true} {
				for _, loss := range losses {
					c := q
					c.Loss, c.OffloadsActivations = loss, activations
					if c, ok := withSharding(c, sharding); ok {
						if c, ok = withStates(c, states); ok {
							list = append(list, c)
						}
					}
				}
			}
		}
	}
	return list
}

func withSharding(q job.Request, sharding string) (job.Request, bool) {
	kind, offload, _ := strings.Cut(sharding, " ")
	switch {
	case kind == "fsdp":
		q.FSDP, q.OffloadParameters = "2", offload != ""
		return q, q.GPUs*max(1, q.Nodes) > 1
	case kind != "":
		q.ZeRO = strings.TrimPrefix(kind, "zero")
		j, err := q.Resolve()
		if err == nil && q.Precision == "" && j.ParameterType == dtype.BF16 { // DeepSpeed trains in fp32 otherwise
			q.Precision = "bf16"
		}
		q.Precision = strings.TrimPrefix(q.Precision, "amp-") // master weights in fp32 are DeepSpeed's own
		switch offload {
		case "optimizer":
			q.ZeROOffload = []string{job.OffloadedOptimizer}
		case "all":
			q.ZeROOffload = job.ZeROOffloads
		}
	}
	return q, true
}

func withStates(q job.Request, states string) (job.Request, bool) {
	switch states {
	case "fused":
		q.Optimizer = "adamw/fused"
	case "states":
		q.Offload.What = job.OffloadStates
	case "split", "int8", "split24":
		q.Optimizer = job.ServiceOptimizer + "/" + states
	case "tier":
		q.Optimizer, q.Offload.Tier.Disks = job.ServiceOptimizer+"/split", 1
	}
	return q, states == "" || states == "states" || q.Optimizer != "adamw_bnb_8bit"
}

// answered is what came of questions.
type answered struct{ asked, fit, ladders, recipes, nearer, none int }

// TestAnswers: fit and the ladder of a plan answer every question that any combination of the same levers answers, and
// depart no further from the training that was asked for. What they say fits, fits by a plan of its own. With -short
// there are the questions on small models.
func TestAnswers(t *testing.T) {
	var n answered
	for i, q := range asked(*questionsSeed) {
		if testing.Short() && !slices.Contains([]string{"llama-3.2-1b", "qwen3-1.7b", "qwen2.5-3b"}, q.Model) {
			continue
		}
		n.ask(t, fmt.Sprintf("%d: %s", i, questionOf(q)), q)
	}
	t.Logf("%d questions: %d fit as they are, %d have a ladder that fits and %d a recipe, %d nothing that fits; for "+
		"%d there was a better answer", n.asked, n.fit, n.ladders, n.recipes, n.none, n.nearer)
	if n.ladders == 0 || n.recipes == 0 && !testing.Short() {
		t.Error("no ladder or no recipe fits")
	}
}

// ask asks one question.
func (n *answered) ask(t *testing.T, name string, q job.Request) {
	t.Helper()
	n.asked++
	p, err := planOf(q)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if p.Verdict.Result == plan.Fits {
		n.fit++
		return
	}
	l, err := lever.Climb(lever.Question{Need: lever.NeedOf(p), Request: q, Plan: p})
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	climbed, found := n.ofLadder(t, name, q, l), n.ofFit(t, name, q)
	t.Logf("%s: the ladder has %v, fit has %v", name, climbed, found)
	better := nearer(q, max(climbed, found))
	switch {
	case better != nil:
		n.nearer++
		t.Errorf("%s: the ladder has %v and fit has %v, but this fits: %+v", name, climbed, found, *better)
	case climbed == none:
		n.none++
	}
}

// ofLadder returns how far a ladder departs.
func (n *answered) ofLadder(t *testing.T, name string, q job.Request, l *lever.Ladder) departure {
	t.Helper()
	if !l.Fits() {
		return none
	}
	n.ladders++
	if p, err := planOf(l.All.Request); err != nil || p.Verdict.Result != plan.Fits {
		t.Errorf("%s: the ladder %v says that it fits, and its plan does not, %v", name, l.All.Flags, err)
	}
	return departureOf(q, l.All.Request)
}

// ofFit returns how far the answer of fit departs.
func (n *answered) ofFit(t *testing.T, name string, q job.Request) departure {
	t.Helper()
	a, err := Search(Question{Request: q})
	switch {
	case err != nil:
		t.Errorf("%s: %v", name, err)
	case a.Fastest != nil:
		n.recipes++
		checkRecipe(t, q, a.Fastest)
		return same
	case a.Asked != nil && a.Asked.Verdict.Result == plan.Fits:
		return same
	case a.Ladder.Fits():
		return departureOf(q, a.Ladder.All.Request)
	}
	return none
}

var questionsSeed = flag.Uint64("seed", 1, "draws other questions")
