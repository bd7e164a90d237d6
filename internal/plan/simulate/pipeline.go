package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// pipeline is what a stage of torch.distributed.pipelining holds beside the passes (stage.py and schedules.py).
type pipeline struct {
	underWay map[parallel.Pass]*microBatch
	// buffers for the tensors of all micro batches that are not under way, which stages before 2.15 keep.
	buffers []hold
	outputs []*microBatch // whose outputs the schedule keeps for its caller
	inputs  []hold        // of the last chunk
	sent    []hold        // gradients of inputs; torch since 2.10 keeps the last one only, until it has been sent
	engine  pipelineEngine
	left    int                    // micro batches that are not simulated, as they hold no more than those before
	divided map[parallel.Pass]bool // micro batches whose backward pass is divided
	over    *autograd.Tape         // of a micro batch whose passes are over, for the next one
}

// microBatch is a micro batch on its way through a chunk.
type microBatch struct {
	tape     *autograd.Tape
	result   forward.Result
	divided  *autograd.Divided // its backward pass has run for the input
	received hold              // the gradient that the first chunk keeps until it runs both halves at once
}

// iteratePipeline runs the passes of an optimizer step in the order of the schedule.
func (s *simulation) iteratePipeline(iteration ledger.Iteration) {
	s.micro, s.micros, s.sequence = 0, 1, s.Sequence
	if s.UsualSequence > 0 && iteration == ledger.Steady {
		s.sequence = s.UsualSequence
	}
	if s.DeepSpeed != nil {
		s.iterateEngine(iteration)
		return
	}
	s.clearPipeline()
	tokens := int64(s.Pipeline.Micros) * s.Sequences() * s.sequence
	batch := s.gpu.Allocate(ledger.Bytes(s.BatchTensors*8*tokens), ledger.Batch, s.whyBatch)
	micros := s.simulatedMicros()
	passes := s.Pipeline.Passes(s.Stage.Index, micros)
	s.pipeline.left = s.Pipeline.Micros - micros
	if iteration == ledger.First {
		s.phase(ledger.Forward, iteration, func() { s.makeBuffers(passes) })
	}
	s.pipeline.divided = map[parallel.Pass]bool{}
	for _, pass := range passes {
		if pass.Half == parallel.InputHalf && s.Stage.Chunks[pass.Chunk].Receives {
			s.pipeline.divided[keyOf(pass)] = true
		}
	}
	for _, pass := range passes {
		chunk, name := &s.Stage.Chunks[pass.Chunk], ledger.Forward
		if pass.Backward {
			name = ledger.Backward
		}
		s.phase(name, iteration, func() { s.runPass(chunk, pass) })
	}
	s.phase(ledger.Backward, iteration, func() {
		s.engine.endBackward(true)
		dropAll(&s.pipeline.inputs)
		if s.Versions.Torch.AtLeast(2, 10, 0) {
			dropAll(&s.pipeline.sent)
		}
		if s.mergesOutputs() {
			s.gpu.briefly(s.keptBytes(), ledger.LogitsAndLoss, s.whyOutputs)
		}
	})
	s.gpu.Free(batch)
	s.phase(ledger.Step, iteration, s.engine.step)
	s.engine.zeroGradients()
}

// keyOf returns a pass that stands for the micro batch in its chunk.
func keyOf(p parallel.Pass) parallel.Pass { return parallel.Pass{Chunk: p.Chunk, Micro: p.Micro} }

func (s *simulation) runPass(c *job.Chunk, pass parallel.Pass) {
	key := keyOf(pass)
	switch {
	case !pass.Backward:
		s.forwardThrough(c, key)
	case pass.Half == parallel.InputHalf:
		s.backwardForInput(c, s.pipeline.underWay[key])
	default:
		s.backwardThrough(c, key)
	}
}

// backwardForInput runs the half of a backward pass that makes the gradient to send. The first chunk sends none: it
// keeps what has come until it runs both halves at once (backward_one_chunk in torch/distributed/pipelining/stage.py).
func (s *simulation) backwardForInput(c *job.Chunk, m *microBatch) {
	s.workspace()
	if !c.Receives {
		m.received = s.message()
		return
	}
	m.divided = m.tape.BackwardInput(m.result.Loss, m.result.Received, c.Sends)
	s.engine.endBackward(false)
	s.releaseOutput(m)
}

// forwardThrough runs the forward pass of a micro batch through a chunk.
func (s *simulation) forwardThrough(c *job.Chunk, key parallel.Pass) {
	s.workspace()
	m := &microBatch{tape: autograd.NewTape(s.gpu, s.engine.whyGradients)}
	if over := s.pipeline.over; over != nil {
		m.tape.Reuse(over)
		s.pipeline.over = nil
	}
	options := s.options()
	options.Receives, options.Sends = c.Receives, c.Sends
	options.DividesBackward = s.pipeline.divided[key]
	m.result = s.forward(m.tape, c.Network, s.modules, options)
	s.pipeline.underWay[key] = m
	if c.Sends && len(s.Stage.Chunks) == 1 && s.Versions.Torch.AtLeast(2, 15, 0) {
		s.releaseOutputs() // the output before has been sent
		s.pipeline.outputs = append(s.pipeline.outputs, m)
	}
}

// backwardThrough runs its backward pass.
func (s *simulation) backwardThrough(c *job.Chunk, key parallel.Pass) {
	s.workspace()
	m := s.pipeline.underWay[key]
	delete(s.pipeline.underWay, key)
	m.received.free()
	if m.divided != nil {
		m.divided.Weights()
	} else {
		m.tape.Backward(m.result.Loss)
		s.engine.endBackward(false)
	}
	m.tape.Drop(m.result.RouterLogits...)
	if s.keepsOutput(c) {
		s.pipeline.outputs = append(s.pipeline.outputs, m)
	} else {
		s.releaseOutput(m)
	}
	s.pipeline.over = m.tape
	if !c.Receives {
		return
	}
	if s.Versions.Torch.AtLeast(2, 10, 0) {
		dropAll(&s.pipeline.sent)
	}
	s.pipeline.sent = append(s.pipeline.sent, s.message())
	// Losses keep their graphs until the step ends, and these the inputs (AccumulateGrad). Two halves detach the loss.
	if !c.Sends && m.divided == nil {
		for range 1 + s.pipeline.left {
			s.pipeline.inputs = append(s.pipeline.inputs, s.message())
		}
		s.pipeline.left = 0
	}
}

// simulatedMicros returns how many micro batches are run. Before torch 2.10 a step keeps something of each.
func (s *simulation) simulatedMicros() int {
	if !s.Versions.Torch.AtLeast(2, 10, 0) {
		return s.Pipeline.Micros
	}
	return s.Pipeline.Simulated()
}

// message allocates a buffer for the hidden states of a micro batch.
func (s *simulation) message() hold {
	return s.gpu.hold(s.messageBytes(), ledger.PipelineBuffers, s.whyBuffers)
}

func dropAll(list *[]hold) {
	for _, h := range *list {
		h.free()
	}
	*list = nil
}

// keepsOutput reports whether the schedule keeps the output of a chunk until the next step: before torch 2.8 that of
// every chunk, and before 2.10 the logits.
func (s *simulation) keepsOutput(c *job.Chunk) bool {
	if c.Sends {
		return !s.Versions.Torch.AtLeast(2, 8, 0)
	}
	return !s.Versions.Torch.AtLeast(2, 10, 0)
}

// releaseOutput releases the output of a chunk, and its loss.
func (s *simulation) releaseOutput(m *microBatch) {
	m.tape.Drop(m.result.Loss)
	if m.result.Logits != nil {
		m.tape.Drop(m.result.Logits)
	}
}

func (s *simulation) releaseOutputs() {
	for _, m := range s.pipeline.outputs {
		s.releaseOutput(m)
	}
	s.pipeline.outputs = nil
}

// clearPipeline drops what the schedule keeps of the step before (clear_runtime_states).
func (s *simulation) clearPipeline() {
	s.releaseOutputs()
	dropAll(&s.pipeline.sent)
	s.pipeline.underWay = map[parallel.Pass]*microBatch{}
}

// makeBuffers makes the buffers of a stage before torch 2.15: one for every tensor that it receives in a step. Those
// of micro batches under way are tensors of the passes.
func (s *simulation) makeBuffers(passes []parallel.Pass) {
	if s.Versions.Torch.AtLeast(2, 15, 0) {
		return
	}
	var spare int
	for i, c := range s.Stage.Chunks {
		if c.Receives {
			spare += s.Pipeline.Micros - mostUnderWay(passes, i)
		}
		if c.Sends { // the gradient of its output comes back
			spare += s.Pipeline.Micros - 1
		}
	}
	for range spare {
		s.pipeline.buffers = append(s.pipeline.buffers, s.message())
	}
}

// mostUnderWay returns how many micro batches are between their passes through a chunk at most.
func mostUnderWay(passes []parallel.Pass, chunk int) int {
	most, now := 0, 0
	for _, p := range passes {
		if p.Chunk == chunk {
			now += p.Begun()
			most = max(most, now)
		}
	}
	return most
}

// messageBytes returns the size of the hidden states of a micro batch, which stages send.
func (s *simulation) messageBytes() int64 {
	size := s.ComputeType().Size()
	if s.AutocastType != 0 {
		size = s.AutocastType.Size()
	}
	return s.Sequences() * s.sequence / s.Parallel.Context / s.Parallel.Tensor * s.Model.Network.Hidden * size
}

func (s *simulation) whyBuffers() string {
	if s.DeepSpeed != nil {
		return fmt.Sprintf("hidden states and their gradients between pipeline stages: %v each, received into one "+
			"buffer and copied into one of %d pipe buffers (deepspeed/runtime/pipe/engine.py)",
			ledger.Bytes(s.messageBytes()), len(s.pipeline.engine.buffers))
	}
	return fmt.Sprintf("hidden states and their gradients on their way between pipeline stages: %v for each of %d "+
		"micro batches (torch/distributed/pipelining/stage.py)", ledger.Bytes(s.messageBytes()), s.Pipeline.Micros)
}

// mergesOutputs reports whether the schedule concatenates the logits of all micro batches, for a caller that did not
// ask for them: before torch 2.10.
func (s *simulation) mergesOutputs() bool {
	last := s.Stage.Chunks[len(s.Stage.Chunks)-1]
	return !last.Sends && s.keepsOutput(&last)
}

// keptBytes returns the size of the logits that the schedule keeps.
func (s *simulation) keptBytes() int64 {
	var sum int64
	for _, m := range s.pipeline.outputs {
		if m.result.Logits != nil {
			sum += m.result.Logits.Bytes()
		}
	}
	return sum
}

func (s *simulation) whyOutputs() string {
	return fmt.Sprintf("logits of all %d micro batches of the pipeline: the schedule keeps and concatenates them "+
		"(_merge_outputs in torch/distributed/pipelining/schedules.py)", s.Pipeline.Micros)
}
