package simulate

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// newReference returns the frozen model that answers are compared with. TRL and LLaMA-Factory shard it with ZeRO-3 and
// with FSDP as they shard the trained one; otherwise every rank has all of it (prepare_deepspeed and prepare_fsdp in
// trl/models/utils.py).
func newReference(s *simulation) *simulation {
	j := *s.Job
	j.Model, j.Reference, j.ParameterType = s.Reference, nil, s.ReferenceType
	j.Adapter, j.Quantization, j.Offload, j.QAT, j.OffloadActivations = nil, nil, nil, nil, nil
	if j.DeepSpeed != nil {
		j.ParameterType = s.ParameterType
	}
	return newFrozen(s, frozenJob(&j))
}

// frozenJob returns the job of a model that is not trained. Only ZeRO-3 shards it.
func frozenJob(of *job.Job) *job.Job {
	j := *of
	if d := j.DeepSpeed; d != nil {
		j.DeepSpeed = nil
		if d.ZeROStage == 3 {
			frozen := *d
			frozen.OffloadOptimizer.Device = "none"
			j.DeepSpeed = &frozen
		}
	}
	j.Settle()
	return &j
}

// newFrozen makes the parameters of a model that is not trained.
func newFrozen(s *simulation, j *job.Job) *simulation {
	r := &simulation{Job: j, gpu: s.gpu, host: s.host, tape: s.tape, frozen: true}
	r.modules, r.parameters = makeParameters(j)
	for i, p := range r.parameters {
		p.Index, p.Trainable = i, false
	}
	r.chooseEngine()
	return r
}

// loadFrozen loads the frozen model and shards it.
func (s *simulation) loadFrozen() {
	s.engine.load()
	if e, shards := s.engine.(*zero3); shards {
		for _, p := range s.parameters {
			if e.loaded[p.Index].held() {
				e.shard(p)
			}
		}
	}
}

// forward runs a network once.
func (s *simulation) forward(on *autograd.Tape, network *model.Network, modules forward.Parameters,
	options forward.Options) forward.Result {
	result := forward.Run(on, network, modules, options)
	s.engine.endForward()
	return result
}

// passes runs the forward passes of a micro batch. The result is that of the trained pass.
func (s *simulation) passes(options forward.Options) forward.Result {
	a := s.Answers
	if s.diverges() {
		reference := s.judge(s.reference, s.reference.modules)
		result := s.forward(s.tape, s.Model.Network, s.modules, options)
		s.drop(reference)
		return result
	}
	if a == nil {
		result := s.forward(s.tape, s.Model.Network, s.modules, options)
		if s.reference != nil && s.Rollout == nil { // with a rollout, it judges before the update
			s.drop(s.judge(s.reference, s.reference.modules))
		}
		return result
	}
	if a.Mismatched == job.Before {
		s.drop(s.judge(s, s.modules))
	}
	result := s.forward(s.tape, s.Model.Network, s.modules, options)
	if a.Mismatched == job.After {
		s.drop(s.judge(s, s.modules))
		s.separate(&result)
	}
	if a.DropsLogits {
		s.drop(forward.Result{Logits: result.Logits})
		result.Logits = nil
	}
	var reference forward.Result
	switch {
	case s.reference != nil:
		reference = s.compare(s.reference, s.reference.modules)
	case a.BaseIsReference:
		base := s.modules
		base.Adapters = nil
		reference = s.compare(s, base)
	}
	s.logAnswers(result.Logits)
	s.drop(reference)
	return result
}

// compare runs the passes of the reference. The result is that of the answers, whose logits the program holds.
func (s *simulation) compare(r *simulation, modules forward.Parameters) forward.Result {
	if s.Answers.Mismatched == job.Before {
		s.drop(s.judge(r, modules))
	}
	reference := s.judge(r, modules)
	if s.Answers.Mismatched == job.After {
		s.drop(s.judge(r, modules))
		s.separate(&reference)
	}
	return reference
}

// separate copies the logits of desirable and of undesirable answers, and drops those of all (concatenated_forward in
// LLaMA-Factory's train/kto/trainer.py).
func (s *simulation) separate(r *forward.Result) {
	defer s.tape.In(ledger.LogitsAndLoss, s.whyAnswers)()
	copied := s.tape.New(r.Logits.Elements, r.Logits.DType)
	s.tape.Hold(copied)
	s.tape.Drop(r.Logits)
	r.Logits = copied
}

// logAnswers computes what TRL logs of the logits: the entropy of 128 tokens at a time, of a copy of the logits if
// there are several sequences (entropy_from_logits in trl/trainer/utils.py).
func (s *simulation) logAnswers(logits *autograd.Tensor) {
	if !s.Answers.LogsEntropy {
		return
	}
	var copied int64
	if s.Sequences() > 1 {
		copied = logits.Bytes()
	}
	chunk := min(128, s.Sequences()*s.Sequence) * s.Model.Network.Head.Outputs * logits.DType.Size()
	s.gpu.during(copied, ledger.LogitsAndLoss, s.whyAnswers, func() {
		s.gpu.briefly(3*chunk, ledger.LogitsAndLoss, s.whyAnswers)
	})
}

func (s *simulation) whyAnswers() string {
	return forward.WhyLogits(&s.Model.Network.Head, s.options())
}

// judge runs a pass without gradients.
func (s *simulation) judge(r *simulation, modules forward.Parameters) (result forward.Result) {
	options := r.options()
	options.Sequence, options.OffloadActivations = s.sequence, nil // a pass without gradients saves nothing
	options.Loss, options.LossTwice, options.HalfLoss = forward.LogProbabilities, false, false
	switch {
	case s.Answers != nil:
		options.Loss = s.Loss
	case s.diverges():
		options.Loss = forward.NoLoss
	}
	s.tape.WithoutGradients(func() { result = r.forward(s.tape, r.Model.Network, modules, options) })
	if e, shards := r.engine.(*zero3); shards && r.frozen {
		e.coordinator.reset()
	}
	return result
}

// diverges reports whether the loss has the divergence from the frozen model.
func (s *simulation) diverges() bool { return s.Loss == forward.DivergentLoss }

// judgedType returns the type of the frozen model's logits, as the program has them.
func (s *simulation) judgedType() dtype.Type {
	r := s.reference
	switch {
	case r == nil || !s.diverges():
		return dtype.Invalid
	case r.casts():
		return dtype.F32
	case r.AutocastType != dtype.Invalid:
		return r.AutocastType
	}
	return r.ComputeType()
}

// casts reports whether accelerate casts the outputs of the model to fp32: of the trained model under autocast or
// FSDP's mixed precision, and of a frozen model that it has prepared, which is one without FSDP.
func (s *simulation) casts() bool {
	mixed := s.AutocastType
	if s.Job.FSDP != nil && !s.frozen {
		mixed = s.CastType
	}
	return mixed != dtype.Invalid
}
