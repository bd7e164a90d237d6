package job

import "plimsoll/internal/plan/forward"

// Evaluation is what an evaluation between two steps has otherwise than the training.
type Evaluation struct {
	MicroBatch int64
	Loss       forward.LossKind
}

// evaluation decides how the Trainer evaluates. Liger's fused loss is one of the training alone: in an evaluation the
// model returns all logits (skip_logits in liger_kernel/transformers/model).
func (r *resolver) evaluation() error {
	j, t := r.job, r.training
	if t == nil || !t.Evaluation.Enabled || j.Rollout != nil || j.Pipeline != nil || j.Megatron != nil {
		return nil
	}
	j.Evaluation = &Evaluation{MicroBatch: int64(t.Evaluation.MicroBatch), Loss: j.Loss}
	if e := j.Evaluation; e.MicroBatch > j.MicroBatch {
		r.assume("evaluation in batches of %d, as long as those of the training, which has %d", e.MicroBatch,
			j.MicroBatch)
	}
	f := r.Inputs.framework
	ofLiger := t.UseLigerKernel && j.Liger && r.Loss == "" || f != nil && f.FusedInTraining
	if j.Loss == forward.FusedLoss && ofLiger {
		j.Evaluation.Loss = r.defaultLoss()
	}
	return nil
}
