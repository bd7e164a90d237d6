package simulate

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// rolloutEngine is an engine that generates answers on the GPU of a rank. A nil one does nothing.
type rolloutEngine struct {
	*rollout.Engine
	share     *rollout.Share
	job       *job.Job
	gpu, host *trace
	pinned    *pinnedMemory // of vLLM, for weights that sleep
	weights   []hold
	cache     hold
	asleep    []tensor     // copies of the weights
	trainer   moved        // what of the trainer is on the host
	optimizer moved        // the same, until the update
	reference moved        // the frozen model
	dropped   ledger.Bytes // of the trainer, at most: it leaves the GPU without a copy
}

// moved is memory of a GPU that waits on the host.
type moved struct {
	ids  []int
	copy hold
}

// engineStream keeps blocks of the engine apart from those of the trainer: they have pools of their own.
const engineStream = 9

// newRollout returns the engine of a job, or nil without one.
func newRollout(j *job.Job, gpu, host *trace) (*rolloutEngine, error) {
	if j.Rollout == nil {
		return nil, nil
	}
	e := &rolloutEngine{Engine: j.Rollout, job: j, gpu: gpu, host: host, pinned: newPinnedMemory(j, host)}
	if e.Server {
		return e, nil
	}
	var before ledger.Bytes // vLLM counts what it adds itself, once it has a context and communicators
	for _, h := range outside(j) {
		if e.Name == rollout.SGLang && h.Component != ledger.RolloutGraphs {
			before += h.Bytes
		}
	}
	share, err := e.ShareOf(j.Model, j.RolloutType(), j.GPU.Memory, before)
	if m := j.Megatron; err == nil && m != nil && !m.LatentAttention {
		heads := max(1, m.QueryGroups/e.Tensor)
		share.TokenBytes = 2 * heads * m.HeadSize * int64(len(m.Layers)) * j.RolloutType().Size()
	}
	e.share = share
	return e, err
}

// outsideOfRollout returns what an engine holds of a GPU outside of all pools, asleep or not.
func outsideOfRollout(j *job.Job) (list []ledger.Holding) {
	e := j.Rollout
	if e == nil {
		return nil
	}
	for range e.Apart {
		for _, h := range Outside(j.Versions.Torch, j.GPU.Capability, j.World) {
			h.Why = "of the process that has the frozen model: " + h.Why
			list = append(list, h)
		}
	}
	if e.Server {
		return asMeasured(list...)
	}
	context := ledger.Holding{Component: ledger.RolloutContext}
	if !e.SharesProcess {
		h := contextOf(j.Versions.Torch, j.GPU.Capability)
		context.Bytes, context.Why = h.Bytes, "the engine is a process of its own: "+h.Why
	}
	if e.Tensor > 1 {
		context.Bytes += secondGroup
		context.Why = strings.TrimPrefix(context.Why+fmt.Sprintf("; its communicator takes %v", secondGroup), "; ")
	}
	if context.Bytes > 0 {
		list = append(list, context)
	}
	if e.Graphs {
		list = append(list, ledger.Holding{Component: ledger.RolloutGraphs, Bytes: rollout.UsualGraphs,
			Why: "logs have from 0.07 to 1.93 GiB, by batch sizes and layers; the graphs stay while the engine sleeps"})
	}
	return asMeasured(list...)
}

// processes returns the processes of a rank on the host.
func processes(j *job.Job) []ledger.Holding {
	list := []ledger.Holding{process(j)}
	if e := j.Rollout; e != nil && e.Apart > 0 {
		h := process(j)
		h.Bytes *= ledger.Bytes(e.Apart)
		h.Why = "the process that has the frozen model: " + h.Why
		list = append(list, h)
	}
	if e := j.Rollout; e != nil && !e.Server && !e.SharesProcess {
		list = append(list, ledger.Holding{Component: ledger.RolloutProcess, Bytes: processBytes,
			Why: "the engine's process of each GPU, as large as one that trains: " + usualProcess.Why})
	}
	return asMeasured(list...)
}

// start makes the engine. Where the trainer stays on the GPU, the engine takes its share beside it. Then it falls
// asleep.
func (e *rolloutEngine) start() {
	if e == nil {
		return
	}
	if store := e.ObjectStoreOf(e.job.HostMemory); store > 0 {
		ranks := ledger.Bytes(max(1, e.job.RanksPerNode))
		e.host.hold(int64((store+ranks-1)/ranks), ledger.ObjectStore, because("up to %v in /dev/shm, here a part of "+
			"each rank", store))
	}
	if e.Server {
		return
	}
	if !e.Backups.Any() {
		e.wakeWeights()
		e.wakeCache()
	}
	e.sleep()
}

// wakeWeights brings the weights to the GPU.
func (e *rolloutEngine) wakeWeights() {
	if len(e.weights) > 0 || e.Server {
		return
	}
	e.gpu.emptyCache()
	e.gpu.on(engineStream, func() {
		for _, bytes := range e.share.Blocks {
			e.weights = append(e.weights, e.gpu.hold(bytes, ledger.RolloutWeights, e.whyWeights))
		}
	})
	if e.Name == rollout.SGLang { // PyTorch's allocator keeps what vLLM frees for the next sleep
		for _, t := range e.asleep {
			t.free()
		}
		e.asleep = nil
	}
}

func (e *rolloutEngine) whyWeights() string {
	return fmt.Sprintf("%s parameters in %v, shared among %d GPUs", ledger.Count(e.job.Model.Elements()),
		e.job.RolloutType(), e.Tensor)
}

// wakeCache makes the KV cache.
func (e *rolloutEngine) wakeCache() {
	if e.cache.held() || e.Server {
		return
	}
	e.gpu.emptyCache()
	e.gpu.on(engineStream, func() {
		e.cache = e.gpu.hold(int64(e.share.Cache), ledger.RolloutCache, e.whyCache)
	})
}

func (e *rolloutEngine) whyCache() string {
	room := ""
	if n := e.share.Tokens(); n > 0 {
		room = fmt.Sprintf("; room for %s tokens of %s B", ledger.Count(n), ledger.Count(e.share.TokenBytes))
	}
	if e.Name == rollout.VLLM {
		return fmt.Sprintf("gpu_memory_utilization %.4g x %v, less weights, activations and what is outside of torch "+
			"(determine_available_memory in vllm/v1/worker/gpu_worker.py)%s", e.Fraction, e.job.GPU.Memory, room)
	}
	return fmt.Sprintf("mem_fraction_static %.4g of what is free before the weights, less the weights "+
		"(profile_max_num_token in sglang/srt/model_executor)%s", e.Fraction, room)
}

// sleep frees what the engine does not hold while the trainer works.
func (e *rolloutEngine) sleep() {
	if e.Server {
		return
	}
	if e.Sleep > 0 || e.FreesCache {
		drop(&e.cache)
	}
	if e.Sleep > 0 {
		for i := range e.weights {
			e.weights[i].free()
		}
		e.weights = nil
	}
	if e.Sleep == 1 && e.asleep == nil {
		for _, bytes := range e.share.Blocks {
			e.asleep = append(e.asleep, e.onHost(bytes))
		}
	}
	e.gpu.emptyCache()
}

// onHost makes the copy of a parameter that sleeps. vLLM takes pinned memory from PyTorch's allocator, and
// torch_memory_saver from CUDA.
func (e *rolloutEngine) onHost(bytes int64) tensor {
	if e.Name == rollout.VLLM {
		return e.pinned.allocate(bytes, ledger.RolloutBackup, e.whyAsleep)
	}
	return tensor{hold: e.host.hold(bytes, ledger.RolloutBackup, e.whyAsleep)}
}

func (e *rolloutEngine) whyAsleep() string {
	if e.Name == rollout.VLLM {
		return "sleep level 1: weights wait in pinned memory, a block for each (vllm/device_allocator/cumem.py)"
	}
	return "weights wait in pinned memory (torch_memory_saver with a backup on the host)"
}

// ofOthers are what a trainer that moves everything leaves on the GPU: it is the engine's, or that of other models.
var ofOthers = []ledger.Component{ledger.RolloutWeights, ledger.RolloutCache, ledger.ReferenceModel, ledger.RewardModel,
	ledger.CriticParameters, ledger.CriticGradients, ledger.CriticStates}

// moves returns the components of what a trainer moves to the host.
func moves(b rollout.Backups) func(ledger.Component) bool {
	of := map[ledger.Component]bool{
		ledger.Parameters: b.Parameters, ledger.SecondaryParameters: b.Parameters,
		ledger.Gradients: b.Gradients, ledger.AccumulatedGradients: b.Gradients, ledger.MasterGradients: b.Gradients,
		ledger.OptimizerStates: b.Optimizer, ledger.MasterWeights: b.Optimizer, ledger.ExpAvg: b.Optimizer,
		ledger.ExpAvgSq: b.Optimizer,
	}
	return func(c ledger.Component) bool {
		return of[c] || b.All() && !slices.Contains(ofOthers, c)
	}
}

// move takes memory of the trainer to the host.
func (e *rolloutEngine) move(to *moved, goes func(ledger.Component) bool, component ledger.Component,
	why func() string) {
	drops := func(c ledger.Component) bool {
		return component == ledger.TrainerBackup && goes(c) && moves(e.Dropped)(c)
	}
	dropped, bytes := e.gpu.evict(drops)
	e.dropped = max(e.dropped, bytes)
	ids, moving := e.gpu.evict(func(c ledger.Component) bool { return goes(c) && !drops(c) })
	*to = moved{slices.Concat(dropped, ids), e.host.hold(int64(moving), component, why)}
}

// earlier returns what an earlier release of the program moves to the host in place of dropping it.
func (e *rolloutEngine) earlier() ledger.Bytes {
	if e == nil || !e.Earlier {
		return 0
	}
	return e.dropped
}

// back brings it back.
func (e *rolloutEngine) back(from *moved) {
	e.gpu.restore(from.ids)
	drop(&from.copy)
	from.ids = nil
}

func (e *rolloutEngine) whyMoved() string {
	why := "what the trainer moves to the host while the engine is awake (backups): " + e.Backups.String()
	if e.Dropped.Any() {
		why += "; " + e.Dropped.String() + " leave without a copy"
	}
	return why
}

// generate runs the phases of the engine. A bucket has so many bytes.
func (e *rolloutEngine) generate(phase func(ledger.PhaseName, func()), bucket int64) {
	first, then := e.Backups, rollout.Backups{}
	if !first.All() || e.SyncsFromGPU { // the weights are read from the GPU
		first.Parameters, then.Parameters = false, first.Parameters
	}
	if first.All() {
		e.move(&e.trainer, moves(first), ledger.TrainerBackup, e.whyMoved)
	} else if first.Any() {
		e.move(&e.optimizer, moves(first), ledger.TrainerBackup, e.whyMoved)
	}
	phase(ledger.WeightSync, func() {
		e.wakeWeights()
		e.gpu.briefly(bucket, ledger.SyncBuffers, e.whySync)
	})
	if then.Any() {
		e.move(&e.trainer, moves(then), ledger.TrainerBackup, e.whyMoved)
	}
	if !e.Server {
		phase(ledger.Wake, e.wakeCache)
		phase(ledger.Rollout, func() {
			e.gpu.on(engineStream, func() {
				e.gpu.briefly(int64(e.share.Activations), ledger.RolloutActivations, e.whyActivations)
			})
		})
		e.sleep()
	}
	e.back(&e.trainer)
}

func (e *rolloutEngine) whyActivations() string {
	return fmt.Sprintf("a pass of %s tokens, or the sampler of %s sequences", ledger.Count(e.BatchTokens),
		ledger.Count(e.Sequences))
}

func (e *rolloutEngine) whySync() string {
	switch {
	case e.Sync == rollout.WholeModel:
		return "all weights are gathered before the engine takes them (sync=full)"
	case e.Sync == rollout.GatheredModel:
		return fmt.Sprintf("sharded weights are gathered, in %d parts, before the engine takes them (sync=gathered)",
			max(1, e.SyncParts))
	case e.Sync > 0:
		return fmt.Sprintf("a bucket of %v of gathered weights on their way to the engine", e.Sync)
	}
	return "the largest parameter, gathered on its way to the engine"
}

// bucket returns what a weight sync gathers at a time, of parameters of these sizes. Ranks that hold all of them gather
// none.
func (e *rolloutEngine) bucket(all, largest int64, sharded bool) int64 {
	switch {
	case e.Sync == rollout.WholeModel:
		return all
	case e.Sync == rollout.GatheredModel && sharded:
		return all / max(1, e.SyncParts)
	case e.Sync > 0:
		return int64(e.Sync)
	case e.Sync == 0 && sharded:
		return largest
	}
	return 0
}

// generate runs the engine, and the passes that judge its answers.
func (s *simulation) generate(iteration ledger.Iteration) {
	e := s.rollout
	if e == nil {
		return
	}
	size, n := s.RolloutType().Size(), s.sharded().parameters
	e.generate(func(name ledger.PhaseName, body func()) { s.phase(name, iteration, body) },
		e.bucket(elementsOf(s.parameters)*size, largestOf(s.parameters)*size, n > 1))
	s.phase(ledger.LogProbs, iteration, func() {
		s.sequence = s.Sequence
		s.workspace()
		s.drop(s.score(s))
		s.judgeAnswers()
		for _, c := range s.companions {
			c.judge()
		}
	})
	s.updateCompanions(iteration)
	e.back(&e.optimizer)
}

// judgeAnswers runs the frozen model over the answers. It may wait on the host before and after.
func (s *simulation) judgeAnswers() {
	r, e := s.reference, s.rollout
	if r == nil {
		return
	}
	s.bringReference()
	s.drop(s.score(r))
	if e.HostReference {
		e.move(&s.rollout.reference, func(c ledger.Component) bool { return c == ledger.ReferenceModel },
			ledger.ReferenceModel, whyHostReference)
	}
}

func (s *simulation) bringReference() { s.rollout.back(&s.rollout.reference) }

func whyHostReference() string { return "the frozen model waits on the host between its passes" }

// score runs a pass without gradients that gives the log-probabilities of answers.
func (s *simulation) score(r *simulation) (result forward.Result) {
	options := r.options()
	options.Sequence, options.OffloadActivations = s.sequence, nil
	options.Loss, options.LossTwice, options.HalfLoss = forward.LogProbabilities, false, false
	if n := s.rollout.LogProbsBatch; n > 0 {
		options.Batch = n
	}
	switch {
	case s.Loss == forward.TiledLoss || s.Loss == forward.KernelLoss || s.Loss == forward.WideKernelLoss:
		options.Loss = s.Loss
	case s.rollout.ChunkedLogProbs:
		options.Loss = forward.FusedLoss
	}
	r.withoutGradients(func() { result = r.forward(s.tape, r.Model.Network, r.modules, options) })
	return result
}

// withoutGradients runs a pass without gradients, beside those of the update.
func (s *simulation) withoutGradients(body func()) {
	pass := func() { s.tape.WithoutGradients(body) }
	z, shards := s.engine.(*zero3)
	switch {
	case shards && s.frozen:
		pass()
		z.coordinator.reset()
	case shards:
		z.coordinator.apart(pass)
	default:
		pass()
	}
}

// copyParameters makes the copies of parameters that a trainer with Megatron-LM has on the host: that of the frozen
// model, which takes the place of the trained one for its passes, and further ones.
func (s *megatronRank) copyParameters() {
	e := s.rollout
	if e == nil && s.Policy == nil {
		return
	}
	hasReference, further := false, int64(0)
	if s.Policy != nil {
		hasReference, further = s.Policy.Reference, int64(len(s.Policy.Copies))
	}
	if e != nil {
		hasReference, further = e.HostReference, e.Copies
	}
	copies := func(n int64, component ledger.Component, why string) {
		for range n {
			for _, elements := range s.copiedSizes() {
				s.pinned.allocate(elements*s.ParameterType.Size(), component, reasonOf(why))
			}
		}
	}
	if s.Policy != nil && s.Policy.Apart && hasReference {
		s.host.hold(s.elements()*s.ParameterType.Size(), ledger.ReferenceModel, whyHostReference)
	} else if s.Policy != nil && s.Policy.Apart && s.Policy.Reference {
		s.hold(s.elements()*s.ParameterType.Size(), ledger.ReferenceModel, s.whyApart)
	} else if hasReference {
		copies(1, ledger.ReferenceModel, "the frozen model waits in pinned memory, and takes the place of the trained "+
			"one for its passes")
	}
	copies(further, ledger.ParameterCopies, s.whyParameterCopies())
}

// copiedSizes returns the elements of each block of a copy of the parameters.
func (s *megatronRank) copiedSizes() (list []int64) {
	for _, c := range s.chunks {
		var buffers [2]int64
		for _, p := range c.parameters {
			list = append(list, p.Elements)
			if p.Expert {
				buffers[1] += p.Elements
			} else {
				buffers[0] += p.Elements
			}
		}
		if s.Policy != nil && s.Policy.InBuffers {
			list = list[:len(list)-len(c.parameters)]
			for _, elements := range buffers {
				if elements > 0 {
					list = append(list, elements)
				}
			}
		}
	}
	return list
}

func (s *megatronRank) whyApart() string {
	return fmt.Sprintf("%s parameters of the frozen model that judges answers, in %v", ledger.Count(s.elements()),
		s.ParameterType)
}

func (s *megatronRank) whyParameterCopies() string {
	if s.Policy != nil && len(s.Policy.Copies) > 0 {
		return "copies of the rank's parameters in pinned memory: " + strings.Join(s.Policy.Copies, ", ")
	}
	return "further copies of the rank's parameters in pinned memory (copies)"
}

// generate runs the engine, and a pass without gradients over its answers.
func (s *megatronRank) generate(iteration ledger.Iteration) {
	if s.rollout != nil {
		s.runEngine(iteration)
	}
	if s.Policy == nil && s.rollout != nil || s.Policy != nil && s.Policy.Judges {
		s.both(ledger.LogProbs, iteration, s.judgeAnswers)
	}
	if s.rollout != nil {
		s.rollout.back(&s.rollout.optimizer)
	}
}

// judgeAnswers runs a pass without gradients.
func (s *megatronRank) judgeAnswers() {
	if e := s.rollout; e != nil && e.HostReference && s.Policy != nil && s.Policy.Apart {
		defer s.gpu.hold(s.elements()*s.ParameterType.Size(), ledger.ReferenceModel, s.whyApart).free()
	}
	for _, c := range s.chunks {
		pass := s.newPass(c)
		pass.tape.WithoutGradients(func() { pass.tape.Drop(pass.forward()) })
		c.release(s)
	}
}

// runEngine has the engine generate answers.
func (s *megatronRank) runEngine(iteration ledger.Iteration) {
	e := s.rollout
	var all, largest int64
	for _, c := range s.chunks {
		for _, p := range c.parameters {
			bytes := p.Elements * s.ParameterType.Size()
			all, largest = all+bytes, max(largest, bytes)
		}
	}
	e.generate(func(name ledger.PhaseName, body func()) { s.both(name, iteration, body) },
		e.bucket(all*s.Degrees.Tensor, largest*s.Degrees.Tensor, s.Degrees.Tensor > 1))
}
