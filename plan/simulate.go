package plan

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/forward"
	"plimsoll/ledger"
)

// sharding is who shards, moves and updates the parameters of a rank. A
// simulation calls it as the training loop calls the real one.
type sharding interface {
	forward.Hooks
	// load puts the parameters where they are when the model has been made.
	load()
	// initialize is what follows before the first batch.
	initialize()
	// gradient is called when the gradient of a parameter is complete.
	gradient(p *autograd.Parameter)
	// endBackward follows the backward pass of every micro batch; last says
	// that an optimizer step follows.
	endBackward(last bool)
	step()
	// zeroGradients follows the step, before the next forward pass.
	zeroGradients()
	// save writes a checkpoint.
	save()
	// reasons say why components are as large as they are.
	reasons() map[ledger.Component]string
}

// simulation is a rank that trains: the device and the host that it does so on.
type simulation struct {
	*Job
	gpu, host     *trace
	tape          *autograd.Tape
	parameters    []*autograd.Parameter
	trained       []*autograd.Parameter
	modules       forward.Parameters
	engine        sharding
	stepped       bool // the optimizer has its states
	workspaces    int
	micro, micros int            // the micro batch of the step, and how many there are
	held          forward.Result // what the loop holds of the step before
}

// newSimulation makes the parameters of a rank. They have no storage before the
// engine loads them.
func newSimulation(j *Job, gpu, host *trace) *simulation {
	s := &simulation{Job: j, gpu: gpu, host: host, tape: autograd.NewTape(gpu)}
	s.modules, s.parameters = j.makeParameters()
	onGradient := func(p *autograd.Parameter) { s.engine.gradient(p) }
	for i, p := range s.parameters {
		p.Index, p.OnGradient = i, onGradient
		if p.Trainable {
			s.trained = append(s.trained, p)
		}
	}
	switch {
	case j.FSDP != nil:
		s.engine = newSharded(s)
	case j.DeepSpeed != nil:
		s.engine = newDeepSpeed(s)
	default:
		s.engine = &plain{simulation: s}
	}
	return s
}

// options are those of a forward pass.
func (s *simulation) options() forward.Options {
	return forward.Options{
		Batch:               s.MicroBatch,
		Sequence:            s.Sequence,
		Attention:           s.Attention,
		FusesBias:           s.Versions.Transformers.AtLeast(5, 0, 0),
		Autocast:            s.Autocast,
		Recompute:           s.Recompute,
		Loss:                s.Loss,
		FusedActivations:    s.FusedActivations,
		JoinsProjections:    s.JoinsProjections,
		RecomputeEvery:      s.RecomputeEvery,
		RecomputeFirst:      s.RecomputeFirst,
		FusesPointwise:      s.Compile,
		SavesSoftmaxInput:   !s.Versions.Torch.AtLeast(1, 11, 0),
		SavesQuantizedInput: !s.Versions.BitsAndBytes.AtLeast(0, 43, 2),
		InputGradients:      s.Adapter != nil && s.Recompute != nil,
		SplitSequence:       max(1, s.SplitSequence),
		SplitWidth:          max(1, s.SplitWidth),
		Hooks:               s.engine,
	}
}

// phase opens a phase on both devices.
func (s *simulation) phase(name ledger.PhaseName, iteration ledger.Iteration, body func()) {
	if s.OnCPU {
		s.host.phase(name, iteration, body)
		return
	}
	s.host.phase(name, iteration, func() { s.gpu.phase(name, iteration, body) })
}

// run goes through the job: two steps show the first and the steady state.
func (s *simulation) run() {
	s.phase(ledger.Load, ledger.Once, s.engine.load)
	s.phase(ledger.Initialize, ledger.Once, s.engine.initialize)
	s.iterate(ledger.First)
	s.iterate(ledger.Steady)
	s.phase(ledger.Checkpoint, ledger.Once, s.engine.save)
}

// iterate runs the micro batches of one optimizer step. Of several, two are
// run: those between are like the last.
func (s *simulation) iterate(iteration ledger.Iteration) {
	micros := min(max(s.Accumulation, 1), 2)
	for micro := range micros {
		s.micro, s.micros = micro, micros
		batch := s.gpu.Allocate(ledger.Bytes(3*8*s.MicroBatch*s.Sequence), ledger.Batch)
		var result forward.Result
		s.phase(ledger.Forward, iteration, func() {
			s.workspace()
			options := s.options()
			options.HasLogits = func() {
				s.drop(s.held)
				s.held = forward.Result{}
			}
			result = forward.Run(s.tape, s.Model.Network, s.modules, options)
			options.HasLogits() // where there are none
			if s.HoldsOutputs {
				s.held = result
			} else if result.Logits != nil {
				s.tape.Drop(result.Logits)
			}
		})
		s.phase(ledger.Backward, iteration, func() {
			s.workspace()
			s.tape.Backward(result.Loss)
			s.engine.endBackward(micro == micros-1)
		})
		if !s.HoldsOutputs {
			s.tape.Drop(result.Loss)
		}
		s.gpu.Free(batch)
	}
	s.phase(ledger.Step, iteration, s.engine.step)
	s.engine.zeroGradients()
}

// drop lets go of what the training loop holds of a forward pass.
func (s *simulation) drop(r forward.Result) {
	if r.Loss != nil {
		s.tape.Drop(r.Loss)
	}
	if r.Logits != nil {
		s.tape.Drop(r.Logits)
	}
}

// allocate puts a block into a trace for good.
func allocate(t *trace, bytes int64, component ledger.Component) int {
	return t.Allocate(ledger.Bytes(bytes), component)
}

// bytesOf is the size of a list of parameters in a type.
func bytesOf(parameters []*autograd.Parameter, t dtype.Type) int64 {
	var sum int64
	for _, p := range parameters {
		sum += p.Elements * t.Size()
	}
	return sum
}
