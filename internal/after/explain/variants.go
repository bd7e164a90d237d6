package explain

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// variant is a change of the job that a plan can weigh.
type variant struct {
	edit     Edit
	override job.Overrides
	request  func(*job.Request) // changes the request; nil for none
}

// plannedEdits plans variants of the user's job, and returns those that free memory of the resource, in the phase of
// the failure. A note says what the plan of the job itself has there.
func (s *scene) plannedEdits(top claim, phase *ledger.PhaseName) []Edit {
	kind := ledger.Host
	switch top.resource {
	case GPU:
		kind = ledger.GPU
	case Host, CGroup, NUMANode:
	default:
		return nil
	}
	if s.Request == nil || s.Request.Model == "" {
		return nil
	}
	q := s.sized(*s.Request)
	var base *job.Job
	in, err := job.Read(q)
	if err == nil {
		base, err = job.Decide(in, job.Overrides{})
	}
	if err != nil {
		what, _, _ := strings.Cut(err.Error(), "\n") // a hint may follow
		s.planNote = "No change was planned, as plimsoll cannot plan the job: " + what + "."
		return nil
	}
	held, ok := peakOf(base, kind, phase)
	if !ok {
		return nil
	}
	s.planNote = fmt.Sprintf("The changes were planned for %s, with micro batches of %d x %s tokens on each rank. "+
		"The plan then holds %v at its peak%s: if that is far from what you see, give the flags of your job.",
		base.EngineName(),
		base.MicroBatch, ledger.Count(base.Sequence), held, wordsOf(phase))
	var list []Edit
	for _, v := range variantsOf(base, q, kind) {
		j, err := v.decide(in, q)
		if err != nil {
			continue // not a job that the engine accepts
		}
		left, ok := peakOf(j, kind, phase)
		if v.edit.Frees = held - left; ok && v.edit.Frees > held/1000 {
			list = append(list, v.edit)
		}
	}
	return list
}

func wordsOf(phase *ledger.PhaseName) string {
	if phase == nil {
		return ""
	}
	return phaseWords[*phase]
}

// sized returns the request with as many GPUs as the files name ranks, unless it names a number itself.
func (s *scene) sized(q job.Request) job.Request {
	if q.GPUs > 0 || q.Nodes > 0 || q.Accelerate != "" || q.CPU {
		return q
	}
	for _, f := range s.findings {
		q.GPUs = max(q.GPUs, s.rankOf(f)+1)
	}
	return q
}

// decide returns the job with the change.
func (v *variant) decide(in *job.Inputs, q job.Request) (*job.Job, error) {
	if v.request != nil {
		v.request(&q)
		var err error
		if in, err = job.Read(q); err != nil {
			return nil, err
		}
	}
	return job.Decide(in, v.override)
}

// peakOf returns what the fullest device of a kind holds in a phase, or at its peak. The cache of PyTorch's allocator
// does not count: the allocator frees it before it runs out.
func peakOf(j *job.Job, kind ledger.Kind, phase *ledger.PhaseName) (most ledger.Bytes, ok bool) {
	p, err := plan.New(j)
	if err != nil {
		return 0, false
	}
	for i := range p.Devices {
		if p.Devices[i].Kind != kind {
			continue
		}
		for _, at := range p.Devices[i].Phases {
			if phase == nil || at.Name == *phase {
				most, ok = max(most, at.PeakUsed-at.PeakReserved+at.PeakAllocated), true
			}
		}
	}
	return most, ok
}

// variantsOf lists the changes that a job allows.
func variantsOf(j *job.Job, q job.Request, kind ledger.Kind) []variant {
	list := []variant{}
	add := func(edit Edit, override job.Overrides) { list = append(list, variant{edit: edit, override: override}) }
	if kind == ledger.Host {
		if d := j.DeepSpeed; d != nil && d.OffloadOptimizer.Device == "cpu" {
			add(Edit{File: d.File, Key: "zero_optimization.offload_optimizer.device", From: "cpu", To: "none",
				Why: "optimizer states then stay on the GPUs, which need room for them"},
				job.Overrides{OffloadOptimizer: "none"})
			if d.OffloadParameters.Device == "cpu" {
				add(Edit{File: d.File, Key: "zero_optimization.offload_param.device", From: "cpu", To: "none",
					Why: "parameters then stay on the GPUs, which need room for them"},
					job.Overrides{OffloadParameters: "none"})
			}
		}
		if j.World > 1 || j.DeepSpeed != nil {
			add(Edit{Key: "nodes", From: fmt.Sprint(j.Nodes), To: fmt.Sprint(2 * j.Nodes),
				Why: "each node then holds half of what is sharded"}, job.Overrides{Nodes: 2 * j.Nodes})
		}
		return list
	}
	if j.MicroBatch > 1 {
		half := int(j.MicroBatch) / 2
		add(Edit{File: batchFile(q), Key: batchKey(q), From: fmt.Sprint(j.MicroBatch), To: fmt.Sprint(half),
			Why: "activations shrink with it; twice the gradient accumulation steps keep the global batch"},
			job.Overrides{MicroBatch: half, Accumulation: 2 * j.Accumulation})
	}
	if j.Recompute == nil {
		add(Edit{File: q.TrainingArgs, Key: "gradient_checkpointing", From: "false", To: "true",
			Why: "the backward pass recomputes activations instead of keeping them"}, job.Overrides{Recompute: "full"})
	}
	if d := j.DeepSpeed; d != nil {
		for stage := d.ZeROStage + 1; stage <= 3; stage++ {
			add(Edit{File: d.File, Key: "zero_optimization.stage", From: fmt.Sprint(d.ZeROStage), To: fmt.Sprint(stage),
				Why: "ranks then hold a shard each of what they all hold in full now"},
				job.Overrides{ZeROStage: &stage})
		}
		if d.ZeROStage > 0 && d.OffloadOptimizer.Device != "cpu" {
			add(Edit{File: d.File, Key: "zero_optimization.offload_optimizer.device",
				From: cmp.Or(string(d.OffloadOptimizer.Device), "none"), To: "cpu",
				Why: "optimizer states and master weights then lie in host memory"},
				job.Overrides{OffloadOptimizer: "cpu"})
		}
		if d.ZeROStage == 3 && d.OffloadParameters.Device != "cpu" {
			add(Edit{File: d.File, Key: "zero_optimization.offload_param.device",
				From: cmp.Or(string(d.OffloadParameters.Device), "none"), To: "cpu",
				Why: "parameters then lie in host memory while they are not used"},
				job.Overrides{OffloadParameters: "cpu"})
		}
	}
	return append(list, programVariants(j, q)...)
}

// programVariants are changes of the training program that the request names.
func programVariants(j *job.Job, q job.Request) []variant {
	var list []variant
	if name, implementation, _ := strings.Cut(j.OptimizerName(), "/"); implementation == "foreach" {
		list = append(list, variant{edit: Edit{File: q.TrainingArgs, Key: "optim", From: j.OptimizerName(),
			To: name + "/fused", Why: "the fused step keeps no temporaries of the size of the parameters: " +
				"fused=True of torch.optim, or optim adamw_torch_fused of the Trainer"},
			request: func(q *job.Request) { q.Optimizer = name + "/fused" }})
	}
	return list
}

// batchFile and batchKey name where the micro batch is set.
func batchFile(q job.Request) string { return cmp.Or(q.TrainingArgs, q.DeepSpeed) }

func batchKey(q job.Request) string {
	switch {
	case q.TrainingArgs != "":
		return "per_device_train_batch_size"
	case q.DeepSpeed != "":
		return "train_micro_batch_size_per_gpu"
	}
	return "micro batch"
}
