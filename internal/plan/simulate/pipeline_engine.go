package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

// pipelineEngine is what a stage of DeepSpeed's PipelineEngine holds beside the passes (pipe/engine.py).
type pipelineEngine struct {
	buffers  []pipeBuffer // pipe_buffers: micro batches take turns
	received hold         // what hidden states are received into
	gradient hold         // what gradients are received into, if that is other memory
	loss     *microBatch  // of the last forward pass
}

// pipeBuffer has what a stage keeps of a micro batch.
type pipeBuffer struct {
	input, labels, gradient hold
	output                  *microBatch
	// kept are the input and its gradient of a micro batch that was sent back: the graph of the last stage's output
	// holds them (AccumulateGrad).
	kept []hold
}

// iterateEngine runs the passes of an optimizer step as TrainSchedule orders them.
func (s *simulation) iterateEngine(iteration ledger.Iteration) {
	passes := s.Pipeline.Passes(s.Stage.Index, s.Pipeline.Micros)
	e := &s.pipeline.engine
	if e.buffers == nil { // num_pipe_buffers of TrainSchedule
		e.buffers = make([]pipeBuffer, max(2, min(s.Stages()-s.Stage.Index, int64(s.Pipeline.Micros))))
	}
	chunk := &s.Stage.Chunks[0]
	for _, pass := range passes {
		buffer := &e.buffers[pass.Micro%len(e.buffers)]
		if pass.Backward {
			s.phase(ledger.Backward, iteration, func() { s.engineBackward(chunk, buffer) })
		} else {
			s.phase(ledger.Forward, iteration, func() { s.engineForward(chunk, buffer) })
		}
	}
	s.phase(ledger.Backward, iteration, func() {
		s.sendGradients()
		s.engine.endBackward(true)
	})
	s.phase(ledger.Step, iteration, s.engine.step)
	s.engine.zeroGradients()
}

// engineForward receives or loads a micro batch and runs its forward pass.
func (s *simulation) engineForward(c *job.Chunk, b *pipeBuffer) {
	s.workspace()
	s.sendGradients()
	e := &s.pipeline.engine
	if c.Receives {
		if e.received == (hold{}) {
			e.received = s.message()
		}
		b.input = s.message()
	} else {
		b.input = s.replaced(b.input)
	}
	if !c.Sends {
		b.labels = s.replaced(b.labels)
	}
	m := &microBatch{tape: autograd.NewTape(s.gpu, s.engine.whyGradients)}
	options := s.options()
	options.Receives, options.Sends = c.Receives, c.Sends
	options.HasLogits = func() { // they replace those of the micro batch before in the buffer
		if b.output != nil {
			b.output.tape.Drop(b.output.result.Logits)
		}
		dropAll(&b.kept)
	}
	m.result = s.forward(m.tape, c.Network, s.modules, options)
	b.output = m
	if !c.Sends {
		if e.loss != nil {
			e.loss.tape.Drop(e.loss.result.Loss)
		}
		e.loss = m
	}
}

// engineBackward receives the gradient of a micro batch's output and runs its backward pass.
func (s *simulation) engineBackward(c *job.Chunk, b *pipeBuffer) {
	s.workspace()
	m := b.output
	if c.Sends { // the gradient on the tape stands for the memory that it was received into
		received := s.receivesGradients(c)
		drop(received)
		m.tape.Backward(m.result.Loss)
		*received = s.message()
		m.tape.Drop(m.result.Loss)
		b.output = nil
	} else {
		m.tape.Backward(m.result.Loss)
	}
	m.tape.Drop(m.result.RouterLogits...)
	s.engine.endBackward(false)
	if c.Receives {
		b.gradient = s.message()
		if !c.Sends {
			b.kept = []hold{b.input, b.gradient}
			b.input, b.gradient = hold{}, hold{}
		}
	}
}

// receivesGradients returns the memory that gradients are received into. Since 0.15.0 it is that of hidden states
// (_allocate_or_extend_buffers, DeepSpeed #5481).
func (s *simulation) receivesGradients(c *job.Chunk) *hold {
	release := s.Versions.DeepSpeed
	if c.Receives && (release.IsZero() || release.AtLeast(0, 15, 0)) {
		return &s.pipeline.engine.received
	}
	return &s.pipeline.engine.gradient
}

// sendGradients sends the gradient of a micro batch's input, and frees both.
func (s *simulation) sendGradients() {
	for i := range s.pipeline.engine.buffers {
		if b := &s.pipeline.engine.buffers[i]; b.gradient.held() {
			drop(&b.gradient)
			drop(&b.input)
		}
	}
}

// replaced loads token ids in the place of those of an earlier micro batch.
func (s *simulation) replaced(before hold) hold {
	tokens := s.Sequences() * s.sequence
	made := s.gpu.hold(8*tokens, ledger.Batch, func() string {
		return fmt.Sprintf("token ids or labels in int64: %s x 8 B for each of %d pipe buffers",
			ledger.Count(tokens), len(s.pipeline.engine.buffers))
	})
	before.free()
	return made
}
