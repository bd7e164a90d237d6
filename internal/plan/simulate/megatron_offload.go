package simulate

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
)

// optimizerState is a tensor of the optimizer on the GPU, which may go to the host between steps.
type optimizerState struct {
	bytes     int64
	component ledger.Component
	why       func() string
	id        int
	moves     bool // to the host
	copied    bool // the host has a buffer for it
}

// both runs a phase of the GPU and of the host.
func (s *megatronRank) both(name ledger.PhaseName, iteration ledger.Iteration, body func()) {
	s.host.phase(name, iteration, func() { s.gpu.phase(name, iteration, body) })
}

// makeOptimizer allocates master weights.
func (s *megatronRank) makeOptimizer(buffers []gradientBuffer) {
	if s.CPUOffload {
		s.makeHybrid(buffers)
		return
	}
	if s.ParameterType != dtype.F32 && !s.PrecisionAware {
		s.parts(buffers, s.ChunkFraction, func(elements int64, taken bool) {
			s.holdState(4*elements, ledger.MasterWeights, s.whyMaster, taken)
		})
	}
}

// holdState allocates a tensor of the optimizer. Chunked offload takes some.
func (s *megatronRank) holdState(bytes int64, component ledger.Component, why func() string, taken bool) {
	s.states = append(s.states, optimizerState{bytes: bytes, component: component, why: why,
		id: s.hold(bytes, component, why), moves: s.OffloadStates || s.ChunkedOffload && taken})
}

// offload moves tensors of the optimizer to pinned buffers of the host, each of which is made once.
func (s *megatronRank) offload() {
	for i := range s.states {
		x := &s.states[i]
		if !x.moves {
			continue
		}
		if s.gpu.Free(x.id); !x.copied {
			x.copied = true
			s.pinned.allocate(x.bytes, x.component, s.whyOnHost)
		}
	}
}

// reload brings tensors back. Chunked offload does so for master weights only.
func (s *megatronRank) reload() {
	for i, x := range s.states {
		if x.moves {
			s.states[i].id = s.hold(x.bytes, x.component, x.why)
		}
	}
}

func (s *megatronRank) whyOnHost() string {
	return "states of the optimizer between steps, a pinned buffer for each tensor"
}

// window holds what chunked offload has on the GPU of the moments while the optimizer updates: two slots, or all with
// no size of a chunk. The function that it returns frees it.
func (s *megatronRank) window(iteration ledger.Iteration) (free func()) {
	var all, largest int64
	for _, bytes := range s.chunked {
		all, largest = all+bytes, max(largest, bytes)
	}
	if iteration == ledger.First || all == 0 {
		return func() {}
	}
	id := s.hold(s.windowBytes(all, largest), ledger.StatesWindow, s.whyWindow)
	return func() { s.gpu.Free(id) }
}

func (s *megatronRank) windowBytes(all, largest int64) int64 {
	if s.ChunkMegabytes == 0 {
		return all
	}
	return min(all, 2*max(s.ChunkMegabytes<<20, largest))
}

func (s *megatronRank) whyWindow() string {
	return "moments on their way through the GPU: two slots of a chunk, or of the largest parameter " +
		"(chunked_optimizer_state_offload.py)"
}

// makeMoments makes the moments in the first step.
func (s *megatronRank) makeMoments(buffers []gradientBuffer) {
	if s.CPUOffload {
		s.makeHybridMoments(buffers)
		return
	}
	why := because("exp_avg in %s and exp_avg_sq in %s (FusedAdam)", s.ExpAvg, s.ExpAvgSq)
	s.parts(buffers, s.ChunkFraction, func(elements int64, taken bool) {
		sizes := s.stateSizes()
		if s.PrecisionAware && s.ChunkedOffload { // the master weight is a tensor of its own
			s.holdState(sizes[0]*elements, ledger.MasterWeights, s.whyMaster, taken)
			sizes = sizes[1:]
		}
		var sum int64
		for _, size := range sizes {
			if sum += size * elements; s.ChunkedOffload && taken {
				s.pinned.allocate(size*elements, ledger.OptimizerStates, s.whyOnHost)
			} else {
				s.holdState(size*elements, ledger.OptimizerStates, why, false)
			}
		}
		if s.ChunkedOffload && taken {
			s.chunked = append(s.chunked, sum)
		}
	})
	if len(s.chunked) > 0 {
		s.window(ledger.Steady)()
	}
}

// parts calls body for what the optimizer of the rank updates of every parameter, and says whether the host has it: it
// has the first ones, up to a fraction.
func (s *megatronRank) parts(buffers []gradientBuffer, fraction float64, body func(elements int64, onHost bool)) {
	var list []int64
	s.each(buffers, func(elements int64) { list = append(list, elements) })
	split(list, fraction, body)
}

// split calls body for each tensor, and says whether it is among the first ones, up to a fraction.
func split(sizes []int64, fraction float64, body func(elements int64, first bool)) {
	var all, taken int64
	for _, n := range sizes {
		all += n
	}
	limit := float64(all) * fraction
	for _, n := range sizes {
		first := float64(taken) < limit
		if first {
			taken += n
		}
		body(n, first)
	}
}

// makeHybrid makes the copies of parameters of --optimizer-cpu-offload. The optimizer is made of all parameters first,
// and again of the rank's parts of them; then the first one goes.
func (s *megatronRank) makeHybrid(buffers []gradientBuffer) {
	var whole, parts []int64
	for _, b := range buffers {
		for _, p := range b.parameters {
			whole = append(whole, p.Elements)
		}
	}
	s.each(buffers, func(elements int64) { parts = append(parts, elements) })
	if !s.Distributed {
		s.copies(parts)
		return
	}
	free := s.copies(whole)
	s.copies(parts)
	free()
}

// copies makes the fp32 copies of parameters on the GPU and on the host.
func (s *megatronRank) copies(sizes []int64) (free func()) {
	var onGPU []int
	var onHost []tensor
	split(sizes, s.OffloadFraction, func(elements int64, host bool) {
		switch {
		case host:
			bits16 := s.pinned.allocate(elements*s.ParameterType.Size(), ledger.MasterWeights, s.whyHybrid)
			onHost = append(onHost, s.onHost(4*elements, !s.NoPinnedParams, ledger.MasterWeights))
			bits16.free()
		case s.ParameterType != dtype.F32:
			onGPU = append(onGPU, s.hold(4*elements, ledger.MasterWeights, s.whyHybrid))
		}
	})
	return func() {
		for _, id := range onGPU {
			s.gpu.Free(id)
		}
		for _, t := range onHost {
			t.free()
		}
	}
}

func (s *megatronRank) whyHybrid() string {
	return "fp32 copies of parameters of the hybrid optimizer, which is made of whole parameters first, and then of " +
		"the rank's parts (hybrid_optimizer.py)"
}

// onHost allocates a tensor of the host, pinned or not.
func (s *megatronRank) onHost(bytes int64, isPinned bool, component ledger.Component) tensor {
	if isPinned {
		return s.pinned.allocate(bytes, component, s.whyHybrid)
	}
	return tensor{hold: s.host.hold(bytes, component, s.whyHybrid)}
}

// makeHybridMoments makes the moments of --optimizer-cpu-offload, always in fp32, and the gradients on the host.
func (s *megatronRank) makeHybridMoments(buffers []gradientBuffer) {
	why := reasonOf("exp_avg and exp_avg_sq in fp32, of the parameters that are not on the host")
	s.parts(buffers, s.OffloadFraction, func(elements int64, host bool) {
		for range 2 {
			if host {
				s.host.hold(4*elements, ledger.OptimizerStates, s.whyHostMoments)
			} else {
				s.hold(4*elements, ledger.OptimizerStates, why)
			}
		}
		if host {
			s.onHost(4*elements, !s.NoPinnedGradients, ledger.MasterGradients)
		}
	})
}

func (s *megatronRank) whyHostMoments() string {
	return "exp_avg and exp_avg_sq of torch's AdamW in fp32"
}
