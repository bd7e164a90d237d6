package rehearse

import (
	"plimsoll/engine"
	"plimsoll/model"
	"plimsoll/optim/kernel"
	"plimsoll/partition"
)

// smallTensor is a number of elements. A smaller tensor keeps its moments in fp32 where other tensors hold them in
// int8: for norms and biases that costs next to nothing. Embeddings keep fp32 moments too, unless asked not to: their
// gradients differ most from row to row. T. Dettmers et al. found that both matter ("8-bit Optimizers via Block-wise
// Quantization", arXiv 2110.02861).
const smallTensor = 4096

// momentsOf returns the type of a tensor's moments.
func (j *Job) momentsOf(t model.Parameter) kernel.MomentType {
	switch {
	case j.Format.Moments != kernel.MomentsInt8:
		return j.Format.Moments
	case t.Elements() < smallTensor:
		return kernel.MomentsFP32
	case t.IsEmbedding():
		return j.EmbeddingMoments
	}
	return kernel.MomentsInt8
}

// sections divides a rank's shard into ranges whose moments have one type. A tensor may begin on one rank and end on
// another.
func (j *Job) sections(part partition.Range) []engine.Section {
	var sections []engine.Section
	add := func(elements int64, moments kernel.MomentType) {
		if last := len(sections) - 1; last >= 0 && sections[last].Moments == moments {
			sections[last].Elements += elements
		} else if elements > 0 {
			sections = append(sections, engine.Section{Elements: elements, Moments: moments})
		}
	}
	first := int64(0) // offset of the tensor in the flat parameters
	for _, t := range j.Model.Parameters {
		if t.TiedTo != "" {
			continue
		}
		end := first + t.Elements()
		add(max(0, min(end, part.First+part.Count)-max(first, part.First)), j.momentsOf(t))
		first = end
	}
	add(part.Padding, j.Format.Moments)
	return sections
}

// ParametersByMoments returns the number of parameters, padding included, for each type of moments.
func (p *Placement) ParametersByMoments() map[kernel.MomentType]int64 {
	held := map[kernel.MomentType]int64{}
	for _, shard := range p.Shards {
		for _, s := range shard.Sections {
			held[s.Moments] += s.Elements
		}
	}
	return held
}
