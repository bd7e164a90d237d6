package steptime

import (
	"cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// work is what one rank computes in a forward pass of a micro batch. The backward pass follows from it.
type work struct {
	dense, experts float64 // floating-point operations of products with weights
	fill           float64 // operations that take as long as what products of small matrices lose
	head           float64 // those of dense that are outside of all blocks
	attention      float64 // of products of activations
	traffic        float64 // bytes of GPU memory that other operations read and write
	loss           float64 // bytes that the logits move
	read, weights  float64 // bytes of weights that products of dense and of experts read
	dequantized    float64 // bytes that dequantizing all weights reads and writes
	kernels        float64 // operations that Python starts
	hooks          float64 // that no compiler fuses: those of an engine around modules, as operations
	adapter        float64 // operations of products with the matrices of an adapter
	begun          float64 // operations of attention that take as long as what short sequences lose
	frozen         float64 // share of the products with weights that no gradient needs
	reach          float64 // share of the blocks that the backward pass goes through
}

// sequenceOf returns the length of all micro batches but the first, and the mean of lengths that vary.
func sequenceOf(j *job.Job) int64 {
	if j.ShortestSequence > 0 {
		return (j.ShortestSequence + j.Sequence) / 2
	}
	return cmp.Or(j.UsualSequence, j.Sequence)
}

// chosenOf returns the share of the experts' weights that a token is multiplied by, by name.
func chosenOf(j *job.Job) map[string]float64 {
	chosen := map[string]float64{}
	for _, b := range j.Model.Network.Blocks() {
		x := b.FeedForward.Mixture
		if x == nil {
			continue
		}
		s := float64(x.Chosen) / float64(max(1, len(x.Experts)))
		if x.Routing == model.SigmoidOfChosen { // all experts compute
			s = 1
		}
		chosen[x.GateUp], chosen[x.Down] = s, s
		for _, e := range x.Experts {
			chosen[e.Gate+".weight"], chosen[e.Up+".weight"], chosen[e.Down+".weight"] = s, s, s
		}
	}
	return chosen
}

// expertPart returns the part of a model's parameters that are weights of experts.
func expertPart(j *job.Job) float64 {
	chosen, experts := chosenOf(j), int64(0)
	for _, p := range j.Model.Parameters {
		if _, expert := chosen[p.Name]; expert {
			experts += p.Elements()
		}
	}
	return float64(experts) / float64(j.Model.Elements())
}

// Active returns the share of every parameter that a token is multiplied by, and the sum over the model: 1 for most
// weights, that of the chosen experts for experts, and 0 for embeddings.
func Active(j *job.Job) (share func(p model.Parameter) float64, sum float64) {
	chosen := chosenOf(j)
	share = func(p model.Parameter) float64 {
		if p.IsEmbedding() && p.TiedTo == "" {
			return 0
		}
		if s, expert := chosen[p.Name]; expert {
			return s
		}
		return 1
	}
	for _, p := range j.Model.Parameters {
		sum += float64(p.Elements()) * share(p)
	}
	return share, sum
}

// workOf returns what a rank computes.
func workOf(j *job.Job) work {
	var w work
	network := j.Model.Network
	tokens := float64(j.Sequences()*sequenceOf(j)) / float64(j.Parallel.Context)
	share, _ := Active(j)
	var frozen float64
	lowest := len(network.Blocks())
	each := float64(j.Parallel.Tensor)
	rows := rowsOf(j, tokens)
	for _, p := range j.Model.Parameters {
		s, tokens := share(p), rows(p)
		trains := j.Adapter == nil && !p.Frozen && j.Unfrozen.Has(p.Name)
		if trains && (p.Block >= 0 || p.IsEmbedding() && p.TiedTo == "") {
			lowest = min(lowest, max(0, p.Block))
		}
		if s == 0 || len(p.Shape) < 2 {
			continue
		}
		if !trains {
			frozen += 2 * float64(p.Elements()) / each * s * tokens
		}
		elements := float64(p.Elements()) / each
		if s < 1 {
			w.experts += 2 * elements * s * tokens
			w.weights += elements * float64(j.ComputeType().Size()) / float64(j.Parallel.Expert)
		} else {
			w.dense += 2 * elements * tokens
			w.fill += 2 * elements * tokens * lostIn(p.Shape)
			w.read += elements * float64(j.ComputeType().Size())
			if p.Block < 0 {
				w.head += 2 * elements * tokens
			}
		}
		if j.AutocastType != dtype.Invalid { // which casts weights in each pass
			w.traffic += elements * float64(j.ParameterType.Size()+j.AutocastType.Size())
		}
		if j.Quantization != nil && p.Block >= 0 {
			w.dequantized += elements * dequantizedBytes(j.Quantization)
		}
		w.addModule(j, p, elements, tokens)
	}
	w.frozen, w.reach = frozen/max(1, w.dense+w.experts), 1
	if n := len(network.Blocks()); n > 0 && j.Adapter == nil && !j.UnfreezesEmbeddings() && j.Stage == nil {
		w.reach = float64(n-lowest) / float64(n)
	}
	for at, s := range network.Stacks {
		of := stackOf(j, at, tokens)
		for i := range s.Blocks {
			w.addBlock(j, of, s, &s.Blocks[i])
		}
	}
	w.addTowers(j)
	if network.Opaque != nil {
		w.addOpaque(j, tokens)
	}
	logits := float64(logitBytes)
	switch j.Loss {
	case forward.FusedLoss, forward.ChunkedLoss, forward.CompiledLoss, forward.TiledLoss, forward.RecomputedLoss:
		logits = fusedBytes
	}
	w.loss = tokens * float64(network.Head.Outputs) * logits / each
	return w
}
