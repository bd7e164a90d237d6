package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// evaluate runs a batch of an evaluation. The longest sequences of the evaluation are as long as those of the training.
// Nothing is kept for a backward pass, so that the logits decide what it takes.
func (s *simulation) evaluate() {
	if s.Job.Evaluation == nil {
		return
	}
	s.drop(s.held)
	s.held = forward.Result{}
	for r := s; r != nil; r = r.reference {
		training := r.Job
		r.Job = evaluating(training, s.Job.Evaluation)
		defer func() { r.Job = training }()
	}
	s.Job.Loss = s.Job.Evaluation.Loss
	s.sequence = s.Sequence
	s.phase(ledger.Evaluation, ledger.Once, func() {
		batch := s.gpu.Allocate(ledger.Bytes(s.BatchTensors*8*s.Sequences()*s.sequence+s.pixelBytes()), ledger.Batch,
			s.whyBatch)
		s.tape.WithoutGradients(func() { s.drop(s.passes(s.options())) })
		if z, shards := s.engine.(*zero3); shards {
			z.coordinator.reset()
		}
		s.gpu.Free(batch)
	})
}

// evaluating returns a job with the batches of an evaluation.
func evaluating(j *job.Job, e *job.Evaluation) *job.Job {
	evaluated := *j
	evaluated.Images.Count = j.Images.Count / max(1, j.MicroBatch) * e.MicroBatch
	evaluated.Images.Tokens = j.Images.Tokens / max(1, j.MicroBatch) * e.MicroBatch
	evaluated.MicroBatch = e.MicroBatch
	evaluated.OffloadActivations = nil // of a training step alone
	return &evaluated
}
