package job

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// Companion is a model beside the policy of a training on answers, with a job of its own.
type Companion struct {
	Role recipe.Role
	Job  *Job
	// Judged are the sequences of a pass without gradients, and JudgedSequence is their length.
	Judged, JudgedSequence int64
	// Backups say what leaves the GPU between its passes.
	Backups rollout.Backups
	Apart   bool // it has a process of its own on each GPU
}

// Trains reports whether the companion is trained.
func (c *Companion) Trains() bool { return c.Role == recipe.Critic }

// companionModel is the model of a companion. Tied is whether the published model has tied embeddings.
type companionModel struct {
	*model.Model
	tied bool
}

// companions makes a job of each companion, from that of the policy.
func (r *resolver) companions() error {
	f := r.Inputs.framework
	if f == nil || f.Generation == nil {
		return nil
	}
	for i, c := range f.Generation.Companions {
		of := r.Inputs.companions[i]
		j, err := r.job.beside(&c, of, f.LoadsOnFirst)
		if err != nil {
			return err
		}
		judged := c.JudgedSequence
		if judged == 0 {
			judged = c.Sequence
		}
		r.job.Companions = append(r.job.Companions, Companion{Role: c.Role, Job: j, Judged: max(1, c.Judged),
			JudgedSequence: multiple(judged, c.Context), Backups: c.Backups, Apart: c.Apart})
	}
	return nil
}

// beside returns the job of a companion of the policy.
func (j *Job) beside(c *recipe.Companion, of companionModel, loadsOnFirst bool) (*Job, error) {
	with := *j
	with.Model, with.Reference, with.Answers, with.Rollout, with.Companions = of.Model, nil, nil, nil, nil
	with.Adapter, with.Quantization, with.Offload, with.QAT, with.Unfrozen = nil, nil, nil, nil, nil
	with.HostExperts, with.OffloadActivations, with.Evaluation = nil, nil, nil
	with.Images = forward.Images{}
	with.MicroBatch, with.Accumulation = max(1, c.MicroBatch), max(1, c.Accumulation)
	with.Sequence, with.UsualSequence, with.ShortestSequence = c.Sequence, 0, 0
	with.Loss, with.LossTwice, with.Liger = forward.ShiftLabels, false, c.Liger
	if c.Attention != "" {
		with.Attention = forward.AttentionKind(c.Attention)
	}
	if t, known := precisions[c.Weights]; known {
		with.ParameterType = t.weights
	}
	with.SyncEachBatch = !c.AccumulatesWhole
	with.LoadsOnFirst = loadsOnFirst && !of.tied
	with.Recompute, with.RecomputeEvery = nil, 0
	if c.Recomputes {
		with.Recompute = &autograd.Checkpoint{}
	}
	with.Sequence = multiple(c.Sequence, c.Context)
	if n := max(1, c.Context); n != with.Parallel.Context { // the ranks of all groups share the parameters
		with.Parallel.Context, with.Parallel.Ulysses = n, n > 1
	}
	if s := c.Strategy; s != nil && j.FSDP != nil {
		sharding := *j.FSDP
		sharding.Version, sharding.Strategy = s.Version, "full_shard"
		if !s.Reshards {
			sharding.Strategy = "shard_grad_op"
		}
		with.FSDP = &sharding
	}
	if with.ParameterType == dtype.Invalid {
		return nil, fault.Inputf("the %s has weights in %q, expected fp32, bf16 or fp16", c.Role, c.Weights)
	}
	with.Settle()
	return &with, nil
}

// multiple rounds tokens up to a multiple of the ranks that share a sequence: programs pad the last one.
func multiple(tokens, ranks int64) int64 {
	ranks = max(1, ranks)
	return (tokens + ranks - 1) / ranks * ranks
}
