package fit

import (
	"cmp"
	"fmt"
	"math/bits"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// megatronSearch is the search for recipes of a job of Megatron-LM: its micro batch, its degrees and what it
// recomputes. The time of a step is not predicted, so recipes are in the order of what costs time.
type megatronSearch struct {
	*torchSearch
	ways map[string]megatronWay // of variants, by their names
}

// megatronWay is what a variant changes beside the micro batch.
type megatronWay struct {
	tensor, pipeline int
	recompute        string // one of recomputations
}

// recomputing are the settings of the ways to recompute.
var recomputing = map[string][3]any{"none": {nil, nil, nil}, "selective": {"selective", nil, nil},
	"full": {"full", "uniform", 1}}

// newMegatronSearch lists the variants of a job of Megatron-LM.
func newMegatronSearch(t *torchSearch) (*megatronSearch, error) {
	if p := t.base.Megatron.Policy; p != nil {
		return nil, fault.Inputf("fit does not search trainings of %s yet", p.Program).
			WithHint("plimsoll plan weighs changes of this job one by one")
	}
	if t.AnyMoments || t.States != (job.Offload{}) {
		return nil, fault.Inputf("flags say how states rest on the host, and arguments of Megatron-LM say it").
			WithHint("leave the flags out, or add --offload-optimizer-states to the arguments")
	}
	s := &megatronSearch{torchSearch: t, ways: map[string]megatronWay{}}
	s.answer.Untimed, s.Batch = true, cmp.Or(t.Batch, int(t.base.Megatron.GlobalBatch))
	s.micros, s.decide = microBatches, s.decided
	said, err := t.saysSettings(t.base)
	if err != nil {
		return nil, err
	}
	s.answer.Says = said
	for _, gpus := range t.gpuCounts(t.base) {
		for _, d := range degreesOf(gpus[0]*gpus[1], gpus[0]) {
			if d.context == 1 && d.schedule != "Interleaved1F1B" { // these the arguments decide
				s.list(gpus, d)
			}
		}
	}
	return s, nil
}

// list adds the variants of degrees.
func (s *megatronSearch) list(gpus [2]int, d degrees) {
	d.schedule = ""
	base := fmt.Sprintf("tensor %d, pipeline %d", d.tensor, d.pipeline)
	if s.FewerGPUs {
		base += fmt.Sprintf(", %d GPUs", gpus[0]*gpus[1])
	}
	for _, way := range []string{"none", "selective", "full"} {
		v := variant{name: base + recomputations[way], leastName: base + recomputations["full"], degrees: d}
		v.overrides.GPUs, v.overrides.Nodes = gpus[0], gpus[1]
		s.ways[v.name] = megatronWay{d.tensor, d.pipeline, way}
		s.variants = append(s.variants, v)
	}
}

// settings returns what the arguments of a variant say.
func (s *megatronSearch) settings(w megatronWay, micro int) []amend.Setting {
	to := func(name recipe.Setting, value any) amend.Setting { return amend.Setting{Name: name, To: value} }
	again := recomputing[w.recompute]
	list := []amend.Setting{to(recipe.MicroBatch, micro), to(recipe.TensorDegree, w.tensor),
		to(recipe.PipelineDegree, w.pipeline), to(recipe.RecomputeGranularity, again[0]),
		to(recipe.RecomputeMethod, again[1]), to(recipe.RecomputeLayers, again[2])}
	if w.tensor > 1 || s.base.Megatron.SequenceSplit {
		list = append(list, to(recipe.SequenceSplit, w.tensor > 1))
	}
	// With another number of ranks the batch of all ranks would be another, where no argument says it.
	return append(list, to(recipe.Accumulation, 2), to(recipe.TrainBatch, s.Batch))
}

// decided returns the job of a variant with a micro batch, or nil if the batch is no multiple of it.
func (s *megatronSearch) decided(v *variant, micro int) (decided, error) {
	w := s.ways[v.name]
	share := w.tensor * w.pipeline * int(s.base.Parallel.Context)
	if ranks := v.overrides.GPUs * v.overrides.Nodes / share; ranks == 0 || s.Batch%(micro*ranks) != 0 {
		return nil, nil
	}
	j := &megatronJob{settings: s.settings(w, micro), cost: w.cost(micro)}
	q := j.request(s.Request)
	in, err := job.Read(q)
	if err != nil {
		return nil, err
	}
	j.Job, err = job.Decide(in, job.Overrides{GPUs: v.overrides.GPUs, Nodes: v.overrides.Nodes})
	return j, err
}

// cost puts recipes in order: those that recompute nothing come first, then fewer ranks that share a layer or wait for
// one another, and then larger micro batches.
func (w megatronWay) cost(micro int) float64 {
	again := map[string]float64{"none": 1, "selective": 2, "full": 4}[w.recompute]
	shared := bits.Len(uint(w.tensor)) + bits.Len(uint(w.pipeline))
	return again * (1 + 0.02*float64(shared) + 0.01/float64(micro))
}

// megatronJob is a job that Megatron-LM runs.
type megatronJob struct {
	*job.Job
	settings []amend.Setting
	cost     float64
}

// request returns a request with the settings as arguments.
func (j *megatronJob) request(q job.Request) job.Request {
	q.Arguments = nil
	for _, s := range j.settings {
		if a := recipe.ArgumentOf(s.Name, s.To); a.Key != "" {
			q.Arguments = append(q.Arguments, a)
		}
	}
	return q
}

func (j *megatronJob) within() (*plan.Plan, error) { return plan.Within(j.Job) }
func (j *megatronJob) plan() (*plan.Plan, error)   { return plan.New(j.Job) }
func (j *megatronJob) timedByPlan() bool           { return false }
func (j *megatronJob) size() Size                  { return (&torchJob{j.Job}).size() }

// time returns no prediction: it has the order of the recipes, for the search alone.
func (j *megatronJob) time(*plan.Plan, steptime.Machine) (*steptime.Step, error) {
	return &steptime.Step{Tokens: 1, Total: steptime.Time{Expected: time.Duration(j.cost * float64(time.Second))}}, nil
}
