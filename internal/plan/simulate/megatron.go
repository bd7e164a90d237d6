package simulate

import (
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/origin"
)

// RunLast simulates the last pipeline stage of a job of Megatron-LM.
func RunLast(j *job.Job, limit Limit) ([]RankClass, error) {
	return runMegatron(j, []int64{j.Megatron.Degrees.Pipeline - 1}, limit)
}

func everyStage(m *megatron.Job) (stages []int64) {
	for stage := range m.Degrees.Pipeline {
		stages = append(stages, stage)
	}
	return stages
}

// heaviestOfMegatron leaves out stages that hold no more than one before. The last one has the logits.
func heaviestOfMegatron(m *megatron.Job) (list []int64) {
	last := m.Degrees.Pipeline - 1
	for stage := range last {
		if !slices.ContainsFunc(list, func(before int64) bool { return hasLayersOf(m, before, stage) }) {
			list = append(list, stage)
		}
	}
	return append(list, last)
}

// hasLayersOf reports whether a stage has at least the layers of another in each chunk, and as many mixtures.
func hasLayersOf(m *megatron.Job, stage, other int64) bool {
	count := func(c parallel.Chunk) (all, mixtures int) {
		for _, layer := range m.OnStage(c) {
			all++
			if layer.Mixture {
				mixtures++
			}
		}
		return all, mixtures
	}
	for i, c := range m.Table[other] {
		all, mixtures := count(c)
		has, mixed := count(m.Table[stage][i])
		if has < all || mixed < mixtures {
			return false
		}
	}
	return true
}

// runMegatron simulates the last rank of each of these pipeline stages of Megatron-LM.
func runMegatron(j *job.Job, stages []int64, limit Limit) (classes []RankClass, err error) {
	each := j.World / int(j.Stages())
	for _, stage := range stages {
		class, err := runMegatronStage(j, stage, limit)
		if err != nil {
			return nil, err
		}
		class.First, class.Ranks = int(stage)*each, each
		classes = append(classes, class)
	}
	return classes, nil
}

func runMegatronStage(j *job.Job, stage int64, limit Limit) (class RankClass, err error) {
	cache, err := newCache(j, limit)
	if err != nil {
		return class, err
	}
	host, m := newTrace(&heap{Glibc: allocator.NewGlibc()}), j.Megatron
	s := &megatronRank{Job: m, gpu: newTrace(cache), stage: stage, host: host,
		pinned: newPinnedMemory(j, host)}
	for _, chunk := range m.Table[stage] {
		s.chunks = append(s.chunks, &modelChunk{Chunk: chunk, parameters: m.Parameters(chunk)})
	}
	if s.rollout, err = newRollout(j, s.gpu, host); err != nil {
		return class, err
	}
	s.run()
	for _, t := range []*trace{s.gpu, host} {
		if err := t.failure(limit); err != nil {
			return class, err
		}
	}
	return RankClass{RanksPerNode: j.RanksPerNode, Engine: origin.Megatron, Trained: s.trained(),
		Pinned: s.pinnedInSteps, Earlier: s.rollout.earlier(),
		GPU:  &Memory{Phases: s.gpu.phases(), Outside: outside(j)},
		Host: Memory{Phases: host.phases(), Outside: processes(j)}}, nil
}

// modelChunk is a chunk of layers with its parameters.
type modelChunk struct {
	parallel.Chunk
	parameters []megatron.Parameter
	// last are the last input and its gradient: the model keeps both until it gets the next input (set_input_tensor).
	last []int
}

// keep keeps an input of so many bytes and its gradient.
func (c *modelChunk) keep(s *megatronRank, bytes int64) {
	for range 2 {
		c.last = append(c.last, s.hold(bytes, ledger.ResidualActivations, whyResidual))
	}
}

// release frees the last input and its gradient.
func (c *modelChunk) release(s *megatronRank) {
	for _, id := range c.last {
		s.gpu.Free(id)
	}
	c.last = nil
}

func whyResidual() string {
	return "the residual stream between layers, and masks of dropout; each chunk keeps its last input and the " +
		"input's gradient"
}

// megatronRank is the training of one rank.
type megatronRank struct {
	*megatron.Job
	gpu           *trace
	stage         int64
	chunks        []*modelChunk
	holdsWork     [2]bool // the workspaces of the forward and the backward thread exist
	scores        int64   // elements of the buffer of attention scores
	scoresBuffer  int
	gatheredBytes int64 // of the buffer of gathered activations
	gatherBuffer  int
	holdsEngine   bool // the workspaces of Transformer Engine exist
	states        []optimizerState
	host          *trace
	pinned        *pinnedMemory
	pinnedInSteps ledger.Bytes // at most, without a checkpoint
	chunked       []int64      // bytes of the moments of each parameter that chunked offload has on the host
	rollout       *rolloutEngine
	grads32       []int // fp32 copies of 16-bit gradients, until the next step
}

func (s *megatronRank) hold(bytes int64, component ledger.Component, why func() string) int {
	return s.gpu.Allocate(ledger.Bytes(bytes), component, why)
}

// run makes the model and its optimizer, and runs two optimizer steps.
func (s *megatronRank) run() {
	var buffers []gradientBuffer
	s.both(ledger.Load, ledger.Once, func() {
		for _, c := range s.chunks {
			buffers = append(buffers, s.buffersOf(c)...)
		}
		s.makeParameters(buffers)
	})
	s.both(ledger.Initialize, ledger.Once, func() {
		s.makeOptimizer(buffers)
		s.copyParameters()
		s.rollout.start()
	})
	for _, iteration := range []ledger.Iteration{ledger.First, ledger.Steady} {
		for _, id := range s.grads32 {
			s.gpu.Free(id)
		}
		s.grads32 = nil
		s.offload()
		s.generate(iteration)
		s.passes(iteration)
		s.both(ledger.Step, iteration, func() { s.step(buffers, iteration) })
	}
	s.pinnedInSteps = s.pinned.allocator.Statistics().Pinned.Peak
	s.both(ledger.Checkpoint, ledger.Once, func() { s.save(buffers) })
	s.gpu.emptyCache()
	s.pinned.restart()
	s.both(ledger.Resume, ledger.Once, func() {})
}

// gradientBuffer is a contiguous buffer of gradients of Megatron's DistributedDataParallel: parameters in reverse
// order, in buckets (param_and_grad_buffer.py).
type gradientBuffer struct {
	parameters []megatron.Parameter // in the order of the buffer
	pieces     []int64              // what the rank has of each parameter in the distributed optimizer; 0 without
	elements   int64                // with padding
}

// buffersOf returns the buffers of a chunk: one of dense parameters and one of experts.
func (s *megatronRank) buffersOf(c *modelChunk) []gradientBuffer {
	var list []gradientBuffer
	for _, expert := range []bool{false, true} {
		var b gradientBuffer
		for _, p := range slices.Backward(c.parameters) {
			if p.Expert == expert && !p.Frozen {
				b.parameters = append(b.parameters, p)
			}
		}
		if len(b.parameters) == 0 {
			continue
		}
		shards := s.Degrees.Data * s.Degrees.Context
		if expert {
			shards = s.Degrees.ExpertData
		}
		s.place(&b, max(1, shards/s.Instances))
		list = append(list, b)
	}
	return list
}

// place lays parameters out in buckets. With the distributed optimizer a parameter begins at a multiple of 64 elements,
// a bucket ends at a multiple of the ranks and of 128, and the last rank has the last part of each bucket.
func (s *megatronRank) place(b *gradientBuffer, shards int64) {
	limit := int64(1) << 62
	if s.OverlapGradients {
		limit = max(40_000_000, 1_000_000*shards)
		switch {
		case s.Buckets > 0:
			limit = s.elements() / s.Buckets
		case s.BucketSize > 0:
			limit = s.BucketSize
		}
	}
	up := func(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
	unit := leastMultiple(shards, 128)
	if s.WideBuckets {
		unit = leastMultiple(unit, 1<<16)
	}
	b.pieces = make([]int64, len(b.parameters))
	starts := make([]int64, len(b.parameters))
	first, begin, at := 0, int64(0), int64(0)
	end := func(next int) {
		if s.Distributed {
			at = up(at, unit)
		}
		mine := at - (at-begin)/shards
		for i := first; i < next; i++ {
			b.pieces[i] = max(0, starts[i]+b.parameters[i].Elements-max(starts[i], mine))
		}
		first, begin = next, at
	}
	for i, p := range b.parameters {
		if s.Distributed {
			at = up(at, 64)
		}
		if p.Shared && s.Distributed && i > first {
			end(i) // shared embeddings have a bucket of their own
		}
		starts[i] = at
		at += p.Elements
		if at-begin >= limit || p.Shared && s.Distributed {
			end(i + 1)
		}
	}
	if first < len(b.parameters) {
		end(len(b.parameters))
	}
	b.elements = at
}

// elements returns the number of parameters of the rank.
func (s *megatronRank) elements() int64 {
	var sum int64
	for _, c := range s.chunks {
		for _, p := range c.parameters {
			sum += p.Elements
		}
	}
	return sum
}

// trained returns the number of parameters of the rank that are trained.
func (s *megatronRank) trained() (sum int64) {
	for _, c := range s.chunks {
		for _, p := range c.parameters {
			if !p.Frozen {
				sum += p.Elements
			}
		}
	}
	return sum
}

func leastMultiple(a, b int64) int64 {
	x, y := a, b
	for y > 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// makeParameters allocates parameters and gradient buffers. The distributed optimizer moves parameters into buffers,
// too.
func (s *megatronRank) makeParameters(buffers []gradientBuffer) {
	elements := s.elements()
	why := because("%s parameters of pipeline stage %d in %v", ledger.Count(elements), s.stage, s.ParameterType)
	for _, c := range s.chunks {
		for _, p := range c.parameters {
			if p.Frozen { // buffers have trained parameters only
				s.hold(p.Elements*s.ParameterType.Size(), ledger.Parameters, why)
			}
		}
	}
	for _, b := range buffers {
		if s.Distributed {
			s.hold(s.storedBytes(b), ledger.Parameters, why)
			continue
		}
		for _, p := range b.parameters {
			s.hold(p.Elements*s.ParameterType.Size(), ledger.Parameters, why)
		}
	}
	if s.Reference {
		s.hold(elements*s.ParameterType.Size(), ledger.ReferenceModel, because("%s parameters of the model that DPO "+
			"compares with, on every rank in %v: they have no gradients", ledger.Count(elements), s.ParameterType))
	}
	grads := because("gradient buffers in %v (param_and_grad_buffer.py)", s.GradientType)
	for _, b := range buffers {
		s.hold(b.elements*s.GradientType.Size(), ledger.Gradients, grads)
		s.holdFP8(b)
	}
}

// isFP8 reports whether a parameter is the matrix of a layer that computes in fp8. Embedding and head do not.
func (s *megatronRank) isFP8(p megatron.Parameter) bool {
	return s.FP8 != "" && p.Weight && !strings.Contains(p.Name, "word_embeddings") && p.Name != "output_layer.weight"
}

// storedBytes returns the size of the parameters of a buffer.
func (s *megatronRank) storedBytes(b gradientBuffer) int64 {
	bytes := b.elements * s.ParameterType.Size()
	for _, p := range b.parameters {
		if s.FP8Gather && s.isFP8(p) {
			bytes -= p.Elements
		}
	}
	return bytes
}

// holdFP8 allocates the fp8 copies of a buffer's weights, which all micro batches use: one as they are, unless the
// parameters are fp8 themselves, and a transposed one. From Blackwell on only scales of blocks need the transposed one.
func (s *megatronRank) holdFP8(b gradientBuffer) {
	var copies int64
	if !s.FP8Gather {
		copies++
	}
	if s.GPU.Capability < 100 || s.FP8Recipe == "mxfp8" || s.FP8Recipe == "blockwise" {
		copies++
	}
	for _, p := range b.parameters {
		if copies > 0 && s.isFP8(p) {
			s.hold(copies*p.Elements, ledger.AutocastWeights, reasonOf("fp8 copies of the weights for all micro "+
				"batches, as they are and transposed"))
		}
		if s.FP8Recipe == "mxfp8" && s.isFP8(p) {
			s.hold(2*p.Elements/mxBlock, ledger.AutocastWeights, reasonOf("scales of weights in mxfp8, one byte for "+
				"each block of 32, as they are and transposed"))
		}
	}
}

// mxBlock is the number of elements that have a scale of one byte in mxfp8.
const mxBlock = 32

func (s *megatronRank) whyMaster() string {
	if s.Distributed {
		return "master weights in fp32 of the rank's part of each bucket (distrib_optimizer.py)"
	}
	return "master weights in fp32 of all parameters (Float16OptimizerWithFloat16Params)"
}

// each calls body for what the optimizer of the rank updates of every parameter.
func (s *megatronRank) each(buffers []gradientBuffer, body func(elements int64)) {
	for _, b := range buffers {
		for i, p := range b.parameters {
			elements := p.Elements
			if s.Distributed {
				elements = b.pieces[i]
			}
			if elements > 0 {
				body(elements)
			}
		}
	}
}

// step makes the moments in the first step, and what 16-bit gradients need.
func (s *megatronRank) step(buffers []gradientBuffer, iteration ledger.Iteration) {
	s.reload()
	defer s.window(iteration)()
	if s.GradientType == dtype.F16 {
		s.each(buffers, func(elements int64) {
			s.grads32 = append(s.grads32, s.hold(4*elements, ledger.MasterGradients, func() string {
				return "gradients of the master weights in fp32, until zero_grad of the next step"
			}))
		})
	}
	if iteration == ledger.First {
		s.makeMoments(buffers)
	}
}

// stateSizes returns the bytes of an element of each state.
func (s *megatronRank) stateSizes() []int64 {
	if !s.PrecisionAware {
		return []int64{4, 4}
	}
	size := func(name string) int64 {
		switch name {
		case "fp32":
			return 4
		case "fp8":
			return 1
		}
		return 2
	}
	master := size(s.MainParams)
	if s.MainParams == "fp32" && s.ParameterType == dtype.BF16 {
		master = 2 // store_param_remainders: the low half of fp32
	}
	return []int64{master, size(s.ExpAvg), size(s.ExpAvgSq)}
}

// passes runs the micro batches of an optimizer step in the order of the pipeline's schedule.
func (s *megatronRank) passes(iteration ledger.Iteration) {
	type flight struct {
		tape   *autograd.Tape
		output *autograd.Tensor
	}
	flights := map[[2]int]flight{}
	// All groups of micro batches after the second are alike.
	micros := min(s.Micros, 2*s.Group*int(s.Degrees.Virtual)+2*int(s.Degrees.Pipeline))
	if s.Degrees.Virtual > 1 {
		micros = min(s.Micros, max(2*s.Group, 2*int(s.Degrees.Pipeline)))
	}
	for _, p := range parallel.Schedule(s.Degrees, s.stage, micros, s.Group) {
		key := [2]int{p.Chunk, p.Micro}
		if !p.Backward {
			s.gpu.phase(ledger.Forward, iteration, func() {
				pass := s.newPass(s.chunks[p.Chunk])
				flights[key] = flight{pass.tape, pass.forward()}
			})
			continue
		}
		s.gpu.phase(ledger.Backward, iteration, func() {
			f := flights[key]
			delete(flights, key)
			if s.usesTorchProducts(s.chunks[p.Chunk]) {
				s.workspace(1)
			}
			f.tape.Backward(f.output)
			f.tape.Drop(f.output)
			if c := s.chunks[p.Chunk]; !c.Embedding {
				c.release(s)
				c.keep(s, s.local()*s.Hidden*s.ParameterType.Size())
			}
		})
	}
}

// usesTorchProducts reports whether the passes of a chunk call torch's matrix products: the head does, and attention
// that is not fused.
func (s *megatronRank) usesTorchProducts(c *modelChunk) bool {
	return c.Loss || !s.TransformerEngine() || s.Attention == "unfused" || s.Experts > 0
}

// DeterministicWorkspace is that of a handle of cuBLAS with CUBLAS_WORKSPACE_CONFIG=:4096:8.
const DeterministicWorkspace = 32 * ledger.MiB

// workspace allocates the workspace of cuBLAS for a thread: 0 for the forward pass, 1 for the backward pass.
func (s *megatronRank) workspace(thread int) {
	if s.holdsWork[thread] {
		return
	}
	s.holdsWork[thread] = true
	bytes := s.GPU.Workspace()
	if s.Deterministic {
		bytes = DeterministicWorkspace
	}
	s.hold(int64(bytes), ledger.MatmulWorkspaces, s.whyWorkspace)
}

func (s *megatronRank) whyWorkspace() string {
	return "cuBLAS: one for each thread; Transformer Engine: 4 MiB, from Hopper on 32 MiB, and four of them for " +
		"grouped products"
}

// full returns the tokens of a micro batch on a rank, local those between the parallel parts of layers.
func (s *megatronRank) full() int64 { return s.Sequence / s.Degrees.Context * s.Sequences() }
func (s *megatronRank) local() int64 {
	if s.SequenceSplit {
		return s.full() / s.Degrees.Tensor
	}
	return s.full()
}

// gather takes Megatron-LM's global buffer of gathered activations, which is as large as its largest use.
func (s *megatronRank) gather(bytes int64) {
	if bytes <= s.gatheredBytes {
		return
	}
	if s.gatheredBytes > 0 {
		s.gpu.Free(s.gatherBuffer)
	}
	s.gatheredBytes = bytes
	s.gatherBuffer = s.hold(bytes, ledger.GatheredActivations, reasonOf("Megatron-LM's global buffer for activations "+
		"that sequence or expert parallel ranks gather (GlobalMemoryBuffer)"))
}

// engineWorkspaces allocates the workspaces of Transformer Engine.
func (s *megatronRank) engineWorkspaces() {
	bytes := 4 * ledger.MiB
	if s.GPU.Capability >= 90 {
		bytes = 32 * ledger.MiB
	}
	s.hold(int64(bytes), ledger.MatmulWorkspaces, s.whyWorkspace)
	if s.GroupedGEMM && s.Experts > 0 {
		for range 4 {
			s.hold(int64(bytes), ledger.MatmulWorkspaces, s.whyWorkspace)
		}
	}
}

// reasonOf returns a function with a fixed text.
func reasonOf(what string) func() string { return func() string { return what } }
