// Package simulate runs the training of a rank without the bytes: it replays the
// allocations and frees of the loop and its engine in their order.
package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// sharding is an engine that shards, moves and updates the parameters of a
// rank. A simulation calls it as a training loop calls the real engine.
type sharding interface {
	forward.Hooks
	// load puts the parameters in their places once the model has been made.
	load()
	// initialize allocates what the engine makes before the first batch.
	initialize()
	// gradient follows the completion of a parameter's gradient.
	gradient(p *autograd.Parameter)
	// whyGradients returns the reason for the size of the gradients: the tape allocates them, and the engine decides
	// how long they live.
	whyGradients() string
	// endForward follows every run of the model, with its loss.
	endForward()
	// endBackward follows the backward pass of every micro batch. An optimizer
	// step follows if it is the last.
	endBackward(last bool)
	step()
	// zeroGradients follows the step and precedes the next forward pass.
	zeroGradients()
	// save writes a checkpoint.
	save()
	// resume reads a checkpoint in a job that has just begun. It leaves what a step leaves.
	resume()
}

// simulation is the training of one rank, on its GPU and its host.
type simulation struct {
	*job.Job
	gpu, host     *trace
	tape          *autograd.Tape
	parameters    []*autograd.Parameter
	trained       []*autograd.Parameter
	modules       forward.Parameters
	engine        sharding
	stepped       bool // the optimizer states exist
	workspaces    int
	micro, micros int   // index of the micro batch, and their number
	sequence      int64 // tokens of a sequence in this micro batch
	lengths       lengths
	held          forward.Result // outputs of the previous step that the loop holds
	offloaded     offloadedActivations
	pipeline      pipeline
	states        *heldStates  // nil where the optimizer's states stay where it makes them
	experts       *hostExperts // nil where the experts are a part of the model
	decompressed  []hold       // ordinary weights that compressed-tensors has made of packed ones
	reference     *simulation  // of the frozen model beside the trained one; nil without
	frozen        bool         // this is such a model
	companions    []*companion
	rollout       *rolloutEngine
	single        ledger.PhaseName // of all passes and steps of a companion; "" for a policy
}

// newSimulation makes the parameters of a rank. The engine gives them storage
// when it loads them.
func newSimulation(j *job.Job, gpu, host *trace) *simulation {
	s := &simulation{Job: j, gpu: gpu, host: host}
	s.tape = autograd.NewTape(gpu, func() string { return s.engine.whyGradients() })
	s.makeParameters()
	if j.OffloadActivations != nil {
		s.offloaded = offloadedActivations{gpu: gpu, pinned: newPinnedMemory(j, host)}
	}
	s.chooseEngine()
	s.experts = newHostExperts(s)
	if j.Reference != nil {
		s.reference = newReference(s)
	}
	for i := range j.Companions {
		s.companions = append(s.companions, newCompanion(s, &j.Companions[i]))
	}
	return s
}

// makeParameters makes the parameters of the model.
func (s *simulation) makeParameters() {
	s.modules, s.parameters = makeParameters(s.Job)
	onGradient := func(p *autograd.Parameter) { s.engine.gradient(p) }
	for i, p := range s.parameters {
		p.Index, p.OnGradient = i, onGradient
		if p.Trainable {
			s.trained = append(s.trained, p)
		}
	}
}

// chooseEngine makes the engine of the job.
func (s *simulation) chooseEngine() {
	switch {
	case s.Job.FSDP != nil:
		s.engine = newFSDP(s)
	case s.Job.DeepSpeed != nil:
		s.engine = newDeepSpeed(s)
	default:
		s.engine = &ddp{simulation: s}
	}
}

// weights returns the component of the model's weights.
func (s *simulation) weights() ledger.Component {
	if s.frozen {
		return ledger.ReferenceModel
	}
	return ledger.Parameters
}

// options returns the options of a forward pass.
func (s *simulation) options() forward.Options {
	sequence := s.sequence
	if s.Adapter != nil {
		sequence += int64(s.Adapter.VirtualTokens)
	}
	return forward.Options{Batch: s.Sequences(), Sequence: sequence, Images: s.Images, WeightType: s.ComputeType(),
		Autocast: s.AutocastType, Passes: s.Passes, Parallel: s.Parallel.Degrees, Tiles: s.Tiles(s.sequence),
		HostRanks: s.hostRanks(), WideLogits: (s.Answers != nil || s.diverges()) && s.casts(),
		JudgedType: s.judgedType(), OffloadMemory: s.offloaded, Hooks: s.engine, HasLogits: func() {}}
}

// hostRanks returns the number of ranks whose tokens the experts on the host take.
func (s *simulation) hostRanks() int64 {
	if s.HostExperts == nil {
		return 0
	}
	return int64(s.World)
}

// phase runs body as a phase of both devices.
func (s *simulation) phase(name ledger.PhaseName, iteration ledger.Iteration, body func()) {
	if s.single != "" {
		name = s.single
	}
	if s.OnCPU {
		s.host.phase(name, iteration, body)
		return
	}
	s.host.phase(name, iteration, func() { s.gpu.phase(name, iteration, body) })
}

// run runs the job. It runs two steps: the first, and one that stands for all others, or several where lengths vary.
func (s *simulation) run() {
	s.phase(ledger.Load, ledger.Once, func() {
		s.experts.load()
		s.engine.load()
		s.gpu.hold(s.Model.Network.Masks, ledger.Buffers, because("masks that modules keep: a byte for each pair of "+
			"positions that the model knows, never sharded"))
		if s.reference != nil {
			s.reference.loadFrozen()
		}
		for _, c := range s.companions {
			c.load()
		}
	})
	s.phase(ledger.Initialize, ledger.Once, func() {
		s.engine.initialize()
		s.experts.initialize()
		for _, c := range s.companions {
			c.initialize()
		}
		s.rollout.start()
	})
	s.iterate(ledger.First)
	s.steady()
	s.evaluate()
	s.phase(ledger.Checkpoint, ledger.Once, func() {
		s.engine.save()
		s.experts.save()
		for _, c := range s.companions {
			c.save()
		}
	})
	s.drop(s.held)
	s.held = forward.Result{}
	for i := range s.decompressed {
		s.decompressed[i].free()
	}
	s.gpu.emptyCache()
	s.phase(ledger.Resume, ledger.Once, func() {
		s.engine.resume()
		for _, c := range s.companions {
			c.resume()
		}
	})
}

// iterate runs the micro batches of one optimizer step. It leaves out those that are like others in memory: the first
// makes gradients, others add to them, and after the last one FSDP reduces what it has kept full until then.
func (s *simulation) iterate(iteration ledger.Iteration) {
	s.decompress()
	s.generate(iteration)
	if s.Stage != nil {
		s.iteratePipeline(iteration)
		return
	}
	most := 2
	if s.FSDP != nil && !s.SyncEachBatch {
		most = 3
	}
	micros := min(max(s.Accumulation, 1), most)
	for micro := range micros {
		s.micro, s.micros, s.sequence = micro, micros, s.length(micro, iteration)
		batch := s.gpu.Allocate(ledger.Bytes(s.BatchTensors*8*s.Sequences()*s.sequence+s.pixelBytes()), ledger.Batch,
			s.whyBatch)
		if s.Parallel.DeepSpeedUlysses { // the batches of all ranks that share a sequence (UlyssesSPDataLoaderAdapter)
			s.gpu.briefly(s.Parallel.Context*s.BatchTensors*8*s.Sequences()*s.sequence, ledger.Batch, s.whyBatch)
		}
		var result forward.Result
		s.phase(ledger.Forward, iteration, func() {
			s.workspace()
			s.experts.beforeForward()
			if s.OffloadActivations != nil && s.OffloadActivations.Tracks && s.Quantization != nil {
				s.gpu.emptyCache() // OffloadActivations.__enter__ of TRL, where bitsandbytes is loaded
			}
			options := s.options()
			options.HasLogits = func() {
				s.drop(s.held)
				s.held = forward.Result{}
			}
			result = s.passes(options)
			options.HasLogits() // for passes without logits, which do not call it
			if d, is := s.engine.(*ddp); is {
				d.clones(result.Logits).free()
			}
			switch {
			case s.HoldsOutputs:
				s.held = result
			case s.Loss == forward.WideKernelLoss: // until the pass of the micro batch returns
				s.held = forward.Result{Logits: result.Logits}
			default:
				s.drop(forward.Result{Logits: result.Logits, RouterLogits: result.RouterLogits})
			}
		})
		s.states.left()
		s.phase(ledger.Backward, iteration, func() {
			if micro == micros-1 {
				s.states.prefetch()
			}
			s.workspace()
			s.experts.beforeBackward()
			s.tape.Backward(result.Loss)
			s.engine.endBackward(micro == micros-1)
			s.experts.endBackward()
		})
		if !s.HoldsOutputs {
			s.drop(s.held)
			s.held = forward.Result{}
			s.tape.Drop(result.Loss)
		}
		s.gpu.Free(batch)
	}
	s.phase(ledger.Step, iteration, func() {
		s.engine.step()
		s.experts.step(iteration == ledger.First)
	})
	s.engine.zeroGradients()
}

func (s *simulation) whyBatch() string {
	what := map[int64]string{1: "labels", 2: "token ids and mask", 3: "token ids, labels and mask",
		6: "token ids, labels and mask of answers and of mismatched answers"}[s.BatchTensors]
	if s.Model.Network.OnlyImages() {
		return fmt.Sprintf("pixels of %d images of %d x %d in fp32", s.Images.Count, s.Images.Height, s.Images.Width)
	}
	images := ""
	if s.Images.Count > 0 {
		images = fmt.Sprintf("; pixels of %d images in fp32", s.Images.Count)
	}
	if h := s.Model.Network.Sound(); h != nil {
		images = fmt.Sprintf("; spectra of %s frames x %d in fp32", ledger.Count(h.Frames()), h.Bins)
	}
	return fmt.Sprintf("%s in int64: %d x %s tokens x %d x 8 B%s", what, s.Sequences(), ledger.Count(s.Sequence),
		s.BatchTensors, images)
}

// pixelBytes returns the size of the images or the sound of a micro batch, in fp32.
func (s *simulation) pixelBytes() int64 {
	var sum int64
	if h := s.Model.Network.Sound(); h != nil {
		sum = 4 * s.Sequences() * h.Bins * h.Frames()
	}
	for _, t := range s.Model.Network.Towers {
		sum += 4 * s.Images.Pixels(t)
	}
	return sum
}

// drop releases the outputs of a forward pass that the training loop holds.
func (s *simulation) drop(r forward.Result) {
	if r.Loss != nil {
		s.tape.Drop(r.Loss)
	}
	if r.Logits != nil {
		s.tape.Drop(r.Logits)
	}
	s.tape.Drop(r.RouterLogits...)
}

// allocate allocates a block that is never freed.
func allocate(t *trace, bytes int64, component ledger.Component, why func() string) {
	t.Allocate(ledger.Bytes(bytes), component, why)
}

// bytesOf returns the size of parameters in a type.
func bytesOf(parameters []*autograd.Parameter, t dtype.Type) int64 {
	var sum int64
	for _, p := range parameters {
		sum += p.Elements * t.Size()
	}
	return sum
}

// trainedElements returns the number of trainable elements.
func (s *simulation) trainedElements() int64 {
	var sum int64
	for _, p := range s.trained {
		sum += p.Elements
	}
	return sum
}

// trainedCount returns the number of trainable elements as text.
func (s *simulation) trainedCount() string { return ledger.Count(s.trainedElements()) }

// storedBytes returns the size of all parameters.
func (s *simulation) storedBytes() int64 {
	var sum int64
	for _, p := range s.parameters {
		sum += p.Bytes()
	}
	return sum
}

// cpuWorkspace is the memory that MKL and oneDNN hold after their first matmul,
// measured with torch 2.15 on two cores.
const cpuWorkspace = 64 * ledger.MiB

// workspace allocates the workspace of matmuls. cuBLAS takes one from torch's
// allocator for every thread, and the backward pass has a thread of its own. Since torch 2.15 each product takes its
// own.
func (s *simulation) workspace() {
	switch {
	case s.OnCPU && s.workspaces < 1:
		allocate(s.host, int64(cpuWorkspace), ledger.MatmulWorkspaces,
			because("buffers of MKL and oneDNN, from the first product of matrices on"))
	case s.OnCPU || s.ProductWorkspace > 0 || s.workspaces == 2:
		return
	default:
		allocate(s.gpu, int64(s.GPU.Workspace()), ledger.MatmulWorkspaces,
			because("cuBLAS: %v for each handle; the backward pass has a thread, and so a handle, of its own "+
				"(CublasHandlePool.cpp)", s.GPU.Workspace()))
	}
	s.workspaces++
}
