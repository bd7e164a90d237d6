package fit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/steptime"
)

// Question is what is asked.
type Question struct {
	Request job.Request
	States  job.Offload // how states would rest on the host
	Machine steptime.Machine
	// Batch is the number of sequences of an optimizer step on all ranks; 0 is any. Accumulation follows from it.
	Batch int
	// FewerGPUs also tries half of the GPUs, a quarter and so on.
	FewerGPUs bool
	Tight     bool // recipes whose upper end does not fit count, too
	// AnyMoments tries every type that moments can have on the host, also those that round.
	AnyMoments bool
}

// torchSearch is the search for recipes of a job.
type torchSearch struct {
	*Question
	search
	in   *job.Inputs
	base *job.Job
}

// Search answers a question. Every error is a *fault.Input.
func Search(q Question) (*Answer, error) {
	s, err := newTorchSearch(q)
	if err != nil {
		return nil, err
	}
	if err := s.run(); err != nil {
		return nil, err
	}
	s.answer.Assumed = s.assumed()
	if s.answer.Candidates == 0 && (len(s.answer.Left) == 0 || s.base.Megatron != nil) {
		return nil, s.nothing()
	}
	if s.answer.Fastest == nil {
		if err := s.asked(); err != nil {
			return s.answer, err
		}
		if err := s.tryDisks(); err != nil || s.answer.Fastest == nil {
			return s.answer, err
		}
	}
	s.answer.Assumed = append(s.answer.Assumed, s.assumedDisks()...)
	if s.answer.Untimed {
		return s.answer, nil
	}
	return s.answer, s.longest()
}

// tryDisks searches recipes with states on a disk, where nothing else of the same training fits the memory of a host
// that is known. A disk makes steps slow, so what fits without one is the better answer.
func (s *torchSearch) tryDisks() error {
	a := s.answer
	withoutDisk := a.Ladder.Fits() && !a.Ladder.Trains() && a.Ladder.All.Request.Offload.Tier.Disks == 0
	if withoutDisk || a.Says || s.base.HostMemory == 0 || s.base.Megatron != nil || s.States.Tier.Disks > 0 ||
		a.Asked != nil && a.Asked.Verdict.Result == plan.Fits {
		return nil
	}
	var err error
	if s.variants, err = s.withRecomputing(s.onDisks(plainVariant(s.base), s.base)); err != nil {
		return err
	}
	closest := a.Closest
	if err := s.run(); err != nil {
		return err
	}
	if a.Fastest != nil {
		a.Asked, a.Ladder, a.Closest = nil, nil, nil
	} else if closest != nil {
		a.Closest = closest
	}
	return nil
}

// assumedDisks says the rate of disks that nobody gives, where a recipe of the answer has states on them.
func (s *torchSearch) assumedDisks() (list []string) {
	for _, r := range s.answer.Front {
		if r.Overrides.Tier.Disks > 0 && s.machine.Disk == 0 {
			const gigabyte = 1e9
			return []string{fmt.Sprintf("%g GB/s that each disk reads and writes, %g to %g in the interval: assumed, "+
				"as SSDs for PCIe 4 do; set yours with --disk-bandwidth", roads.AssumedDisk[0]/gigabyte,
				roads.AssumedDisk[1]/gigabyte, roads.AssumedDisk[2]/gigabyte)}
		}
	}
	return nil
}

// asked plans the job as it was asked, where no recipe of the search fits: what makes it fit may be none of a recipe.
func (s *torchSearch) asked() error {
	q := s.Request
	if q.MicroBatch == 0 && s.Batch == 0 && len(s.base.Files) == 0 && s.base.Megatron == nil {
		q.MicroBatch = 1
	}
	j, err := q.Resolve()
	if err != nil {
		if s.answer.Candidates > 0 {
			return nil // recipes are what the search has to say
		}
		return leftOut(s.answer.Left)
	}
	p, err := plan.New(j)
	if err != nil {
		return err
	}
	s.answer.Asked = p
	if need := lever.NeedOf(p); need == lever.GPUMemory || need == lever.HostMemory {
		s.answer.Ladder, err = lever.Climb(lever.Question{Need: need, Request: q, Plan: p, Machine: s.machine})
	}
	return err
}

func newTorchSearch(q Question) (*torchSearch, error) {
	if rest := (job.Offload{Master: q.States.Master, Tier: q.States.Tier}); !q.rests() && q.States != rest {
		return nil, fault.Inputf("flags say how states rest on the host, but --master does not say who has the " +
			"master weights").WithHint("add --master split or --master fp32, or leave the other flags out")
	}
	if q.AnyMoments && q.States.Moments != "" {
		return nil, fault.Inputf("--offload-moments is %s, and --any-moments tries every type", q.States.Moments).
			WithHint("leave one of the two out")
	}
	if err := q.States.CheckChoices(); err != nil {
		return nil, err
	}
	if q.States.Tier.Memory > 0 && q.States.Tier.Disks == 0 {
		return nil, fault.Inputf("--memory says how much memory a --tier has, and there is none").
			WithHint("for the memory of the host give --host-memory; for a tier add --tier with a folder on each disk")
	}
	in, err := job.Read(q.Request)
	if err != nil {
		return nil, err
	}
	base, err := job.Decide(in, job.Overrides{AnyMicroBatch: true})
	if err != nil {
		return nil, err
	}
	if base.GPU.Memory == 0 {
		return nil, fault.Inputf("a recipe fits a GPU, and none is given").WithHint("add --gpu, or --gpu-memory")
	}
	if q.Batch == 0 {
		if q.Batch, err = givenBatch(base); err != nil {
			return nil, err
		}
	}
	s := &torchSearch{Question: &q, in: in, base: base}
	s.search = search{machine: q.Machine, tight: q.Tight, answer: &Answer{Base: base, Left: map[string]int{}}}
	s.space = space{micros: microBatches, anyMicro: q.Request.MicroBatch == 0 && q.Batch == 0, decide: s.decided}
	if q.Request.MicroBatch > 0 {
		s.micros = []int{q.Request.MicroBatch}
	}
	if base.Megatron != nil {
		m, err := newMegatronSearch(s)
		if err != nil {
			return nil, err
		}
		return m.torchSearch, nil
	}
	s.variants, err = s.listVariants()
	isOnDisk := func(v variant) bool { return v.overrides.Tier.Disks > 0 }
	if err == nil && q.States.Tier.Disks > 0 && !slices.ContainsFunc(s.variants, isOnDisk) {
		return nil, fault.Inputf("--tier is for states of plimsoll.torch.AdamW, and no recipe of this job has them").
			WithHint("leave out --tier, or the optimizer, adapter or files that say another")
	}
	return s, err
}

// nothing says why there is no recipe to search.
func (s *torchSearch) nothing() error {
	if len(s.answer.Left) == 0 {
		return fault.Inputf("no micro batch that is tried makes a batch of %d sequences on %d ranks", s.Batch,
			s.base.DataRanks()).WithHint("give --batch a multiple of the ranks, and of --micro-batch")
	}
	return leftOut(s.answer.Left)
}

// leftOut refuses a search that left all variants out.
func leftOut(left map[string]int) error {
	why := slices.MaxFunc(slices.Sorted(maps.Keys(left)), func(a, b string) int {
		return cmp.Compare(left[a], left[b])
	})
	return fault.Inputf("there is no recipe to compare: %s", why).WithHint("plimsoll plan says more of one job")
}

// givenBatch returns the sequences of an optimizer step if files of the user say them: another batch trains otherwise.
func givenBatch(base *job.Job) (int, error) {
	for _, file := range base.Files {
		s, err := recipe.LoadSettings(file, nil)
		if err != nil {
			return 0, err
		}
		if s != nil && (s.Gives(recipe.MicroBatch) || s.Gives(recipe.TrainBatch) || s.Gives(recipe.Accumulation)) {
			return int(base.MicroBatch) * base.Micros() * base.DataRanks(), nil
		}
	}
	return 0, nil
}

// stepsPerStage is how many micro batches a pipeline has for each of its stages, where any batch will do.
const stepsPerStage = 4

// decided returns the job of a variant with a micro batch, or nil if the batch is no multiple of it.
func (s *torchSearch) decided(v *variant, micro int) (decided, error) {
	o := v.overrides
	base := s.base
	stages := int(base.Stages())
	if o.PipelineParallel > 0 {
		stages = o.PipelineParallel
	}
	share := int(cmp.Or(int64(o.TensorParallel), base.Parallel.Tensor)*
		cmp.Or(int64(o.ContextParallel), base.Parallel.Context)) * stages
	o.MicroBatch, o.Accumulation = micro, max(1, base.Micros())
	switch ranks := max(1, o.GPUs*o.Nodes/share); {
	case s.Batch > 0 && s.Batch%(micro*ranks) != 0:
		return nil, nil
	case s.Batch > 0:
		o.Accumulation = s.Batch / (micro * ranks)
	case stages > 1 && base.Pipeline == nil:
		o.Accumulation = stepsPerStage * stages
	case stages == 1 && base.Pipeline != nil:
		o.Accumulation = 1
	}
	in := s.in
	if v.inputs != nil {
		in = v.inputs
	}
	j, err := job.Decide(in, o)
	if err != nil {
		return nil, err
	}
	s.assumeSpeed(j)
	return &torchJob{j}, steptime.Refusal(j, s.machine)
}

// assumedNetwork is one port of 100 Gb/s for each GPU, in bytes a second.
const assumedNetwork = 12.5e9

// assumeSpeed gives a job the rates that nobody knows of its machine. Recipes are then compared by them, and whether
// they fit does not depend on them.
func (s *torchSearch) assumeSpeed(j *job.Job) {
	if j.GPU.Speed.Half == 0 || j.GPU.Bandwidth == 0 {
		like := gpu.Alike(j.GPU)
		j.GPU.Speed, j.GPU.Bandwidth = like.Speed, like.Bandwidth
	}
	if j.Nodes > 1 && s.machine.Network == 0 && j.GPU.Speed.Network == 0 {
		j.GPU.Speed.Network = assumedNetwork / 1e9
	}
}

// assumed says the rates that assumeSpeed sets.
func (s *torchSearch) assumed() (list []string) {
	j := s.base
	if j.Megatron != nil || j.OnCPU {
		return nil
	}
	if j.GPU.Speed.Half == 0 || j.GPU.Bandwidth == 0 {
		list = append(list, fmt.Sprintf("speed of the GPU: that of %s is not known, and those of %s, whose memory is "+
			"nearest, are assumed; they rank recipes, and change no byte", j.GPU.Name, gpu.Alike(j.GPU).Name))
	}
	if j.Nodes > 1 && s.machine.Network == 0 && j.GPU.Speed.Network == 0 {
		list = append(list, fmt.Sprintf("%.3g GB/s between nodes for each GPU: assumed, a port of 100 Gb/s; set "+
			"yours with --network", assumedNetwork/1e9))
	}
	return list
}

// torchJob is a job that PyTorch runs.
type torchJob struct{ *job.Job }

func (j *torchJob) within() (*plan.Plan, error) { return plan.Within(j.Job) }

func (j *torchJob) plan() (*plan.Plan, error) { return plan.New(j.Job) }

func (j *torchJob) timedByPlan() bool { return j.Offload != nil || j.Adapter != nil }

func (j *torchJob) time(of *plan.Plan, m steptime.Machine) (*steptime.Step, error) {
	if of != nil {
		return of.TimeOf(j.Job, m)
	}
	return steptime.Predict(j.Job, m, j.Model.Elements(), nil)
}

func (j *torchJob) size() Size {
	return Size{Ranks: j.World, MicroBatch: j.MicroBatch, Accumulation: j.Micros(), Sequence: j.Sequence,
		Tensor: j.Parallel.Tensor, Context: j.Parallel.Context, Pipeline: j.Stages(), DataRanks: int64(j.DataRanks())}
}

// sequenceStep is the step of the search for the longest sequence.
const sequenceStep = 256

// longest finds the longest sequence that the recipe with least memory takes, with a micro batch of one sequence.
func (s *torchSearch) longest() error {
	least := s.answer.Front[len(s.answer.Front)-1]
	var best *member
	fits := func(steps int) (bool, error) {
		m, err := s.ofLength(least, steps*sequenceStep)
		if err != nil || m == nil || !s.fits(m) {
			return false, err
		}
		best = m
		return true, nil
	}
	low, high := int(s.base.Sequence)/sequenceStep, 0
	for step := max(1, low); high == 0; step *= 2 {
		fit, err := fits(step)
		switch {
		case err != nil:
			return err
		case !fit || step > 1<<16:
			high = step
		default:
			low = step
		}
	}
	for low+max(1, low/64) < high {
		middle := (low + high) / 2
		fit, err := fits(middle)
		switch {
		case err != nil:
			return err
		case !fit:
			high = middle
		default:
			low = middle
		}
	}
	var err error
	s.answer.Longest, err = s.settled(best, least)
	return err
}

// ofLength plans a recipe with one sequence of a length, or returns nil if the model has no positions for it.
func (s *torchSearch) ofLength(r *Recipe, sequence int) (*member, error) {
	v := s.variants[slices.IndexFunc(s.variants, func(v variant) bool { return v.name == r.Name })]
	v.overrides = r.Overrides
	v.overrides.MicroBatch, v.overrides.Sequence = 1, sequence
	j, err := job.Decide(cmp.Or(v.inputs, s.in), v.overrides)
	if err != nil {
		return nil, nil
	}
	m := &member{group: &group{variant: v}, micro: 1, job: &torchJob{j}}
	s.answer.Candidates++
	return m, s.planned(m)
}
