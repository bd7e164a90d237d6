package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// measures are what formulas count in: the parameters of a rank, and the tokens of a pass. A formula of them is used
// where it gives the bytes that the trace has counted. Elsewhere the formula is the sum over the tensors.
type measures struct {
	tokens   int64
	types    map[ledger.Component]dtype.Type // of tensors that are listed one by one
	sums     map[ledger.Component]func() []ledger.Formula
	combined map[ledger.Component][]ledger.Formula // the results of sums
}

// measure returns what the formulas of a job count in.
func (s *simulation) measure() *measures {
	m := &measures{tokens: s.Sequences() * s.Sequence, combined: map[ledger.Component][]ledger.Formula{},
		types: map[ledger.Component]dtype.Type{ledger.GatheredParameters: s.ComputeType()}}
	ranks := s.sharded()
	// in returns the formulas of parameters in their own type, and in types of so many bytes.
	in := func(of []*autograd.Parameter, unit string, ranks int64, sizes ...int64) func() []ledger.Formula {
		return func() []ledger.Formula {
			var list []ledger.Formula
			for _, ranks := range []int64{ranks, 1} { // shards, and what is full for a while
				list = append(list, divided(stored(of), ranks), stored(of).Times(2, "copies"))
				for _, size := range sizes {
					f := ledger.Formula{{ledger.Of(elementsOf(of), unit), inType(size)}}
					list = append(list, divided(f, ranks))
				}
			}
			return list
		}
	}
	const all, trained = "parameters", "trained parameters"
	m.sums = map[ledger.Component]func() []ledger.Formula{
		ledger.Parameters:            in(s.parameters, all, ranks.parameters, s.ParameterType.Size()),
		ledger.LoadStaging:           in(s.parameters, all, 1, 4, 2),
		ledger.Gradients:             in(s.trained, trained, ranks.gradients, 2, 4),
		ledger.AccumulatedGradients:  in(s.trained, trained, ranks.gradients, 2, 4),
		ledger.MasterWeights:         in(s.trained, trained, ranks.states, 4, 2),
		ledger.MasterGradients:       in(s.trained, trained, ranks.states, 4, 2, 6, 8),
		ledger.StagingBuffers:        in(s.trained, trained, ranks.states, 2, 4),
		ledger.Bit16Staging:          in(s.trained, trained, ranks.states, 2),
		ledger.DtypeConversions:      in(s.trained, trained, ranks.states, 2, 4, 8),
		ledger.OptimizerTemporaries:  in(s.trained, trained, ranks.states, 4, 2),
		ledger.CommunicationBuckets:  s.bucketFormulas,
		ledger.AutocastWeights:       in(s.parameters, all, 1, 2),
		ledger.OptimizerStates:       func() []ledger.Formula { return s.statesFormulas(ranks.states) },
		ledger.SharedMasterWeights:   in(s.trained, trained, ranks.states, 4),
		ledger.SharedMasterGradients: in(s.trained, trained, ranks.states, 4),
	}
	if s.reference != nil {
		m.sums[ledger.ReferenceModel] = s.reference.measure().sums[ledger.Parameters]
	}
	for _, c := range s.companions {
		of := c.measure().sums
		if c.frozen {
			m.sums[ledger.RewardModel] = of[ledger.Parameters]
			continue
		}
		m.sums[ledger.CriticParameters], m.sums[ledger.CriticGradients] = of[ledger.Parameters], of[ledger.Gradients]
		m.sums[ledger.CriticStates] = of[ledger.OptimizerStates]
	}
	m.sums[ledger.ManagedOptimizerStates] = m.sums[ledger.OptimizerStates]
	return m
}

// shardedAmong is the number of ranks that share parameters, gradients and optimizer states.
type shardedAmong struct{ parameters, gradients, states int64 }

func (s *simulation) sharded() shardedAmong {
	n := max(1, s.Parallel.Shard)
	ranks := shardedAmong{1, 1, 1}
	if s.FSDP != nil {
		return shardedAmong{n, n, n}
	}
	if s.DeepSpeed != nil {
		if s.DeepSpeed.ZeROStage >= 1 {
			ranks.states = n
		}
		if s.DeepSpeed.ZeROStage >= 2 {
			ranks.gradients = n
		}
		if s.DeepSpeed.ZeROStage >= 3 {
			ranks.parameters = n
		}
	}
	return ranks
}

// bucketFormulas returns the formulas of communication buckets that have a size of their own, or that of all gradients.
func (s *simulation) bucketFormulas() []ledger.Formula {
	list := []ledger.Formula{stored(s.trained)}
	if s.DeepSpeed == nil {
		return list
	}
	bucket := ledger.Of(s.DeepSpeed.Sizes.ReduceBucket, "elements (reduce_bucket_size)")
	for _, size := range []int64{2, 4} {
		for buckets := range int64(2) {
			f := ledger.Formula{{bucket, inType(size)}}
			list = append(list, f.Times(buckets+1, "buckets"))
		}
	}
	return list
}

// stored returns the formula of parameters as they are stored: a product for each type.
func stored(parameters []*autograd.Parameter) ledger.Formula {
	elements, packed := map[dtype.Type]int64{}, int64(0)
	var types []dtype.Type
	for _, p := range parameters {
		if p.StoredBytes > 0 {
			packed += p.StoredBytes
			continue
		}
		if elements[p.DType] == 0 {
			types = append(types, p.DType)
		}
		elements[p.DType] += p.Elements
	}
	var f ledger.Formula
	for _, t := range types {
		f = append(f, ledger.Term{ledger.Of(elements[t], "parameters"),
			ledger.Of(t.Size(), fmt.Sprintf("B (%v)", t))})
	}
	if packed > 0 {
		f = append(f, ledger.Term{ledger.Of(packed, "B (quantized weights with their scales)")})
	}
	return f
}

// statesFormulas returns the formulas of the optimizer's states: of parameters in their own type, and in fp32 where the
// optimizer updates master weights or flat parameters.
func (s *simulation) statesFormulas(ranks int64) []ledger.Formula {
	own := s.statesOf(s.trained, ranks)
	wide := make([]*autograd.Parameter, len(s.trained))
	for i, p := range s.trained {
		inFull := *p
		inFull.DType = dtype.F32
		wide[i] = &inFull
	}
	list := []ledger.Formula{}
	for _, f := range []ledger.Formula{own, s.statesOf(wide, ranks)} {
		list = append(list, f)
		if counters := s.counters(); counters > 0 {
			list = append(list, append(f[:len(f):len(f)], ledger.Term{ledger.Of(counters, "step counters"),
				ledger.Of(dtype.F32.Size(), "B (fp32)")}))
		}
	}
	return list
}

// counters returns the number of parameters whose steps the optimizer counts on the GPU.
func (s *simulation) counters() (n int64) {
	for _, p := range s.trained {
		if s.Optimizer.CountsOnGPU(p) {
			n++
		}
	}
	return n
}

// statesOf returns the formula of the states of parameters, with a term for each state.
func (s *simulation) statesOf(parameters []*autograd.Parameter, ranks int64) ledger.Formula {
	bytes, elements := map[string]int64{}, map[string]int64{}
	var names []string
	for _, p := range parameters {
		for _, state := range s.Optimizer.States(p) {
			if _, known := bytes[state.Name]; !known {
				names = append(names, state.Name)
			}
			bytes[state.Name] += state.Bytes
			elements[state.Name] += p.Elements
		}
	}
	var f ledger.Formula
	for _, name := range names {
		if n := elements[name]; n > 0 && bytes[name]%n == 0 {
			f = append(f, ledger.Term{ledger.Of(n, "trained parameters"), ledger.Of(bytes[name]/n, "B ("+name+")")})
			continue
		}
		f = append(f, ledger.Term{ledger.Of(bytes[name], "B ("+name+")")})
	}
	return divided(f, ranks)
}

// divided returns the formula of one rank's share.
func divided(f ledger.Formula, ranks int64) ledger.Formula {
	if ranks == 1 {
		return f
	}
	var share ledger.Formula
	for _, t := range f {
		share = append(share, append(t[:len(t):len(t)], ledger.Per(ranks, "ranks")))
	}
	return share
}

// inType returns the factor of a size in bytes.
func inType(size int64) ledger.Factor {
	unit, known := map[int64]string{2: "B (16 bits)", 4: "B (fp32)"}[size]
	if !known {
		unit = "B"
	}
	return ledger.Of(size, unit)
}
