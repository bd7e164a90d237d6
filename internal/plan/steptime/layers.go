package steptime

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/overlap"
)

// Layers returns the layers of the model for the law of overlap: embeddings, blocks, and what is outside of both.
// A layer's share of a pass is that of the parameters that a token is multiplied by.
func Layers(j *job.Job) []overlap.Layer {
	layers := []overlap.Layer{{Name: "embedding"}}
	compute := []float64{0}
	grow := func(at int) {
		for len(layers) <= at {
			layers, compute = append(layers, overlap.Layer{}), append(compute, 0)
		}
	}
	blocks := len(j.Model.Network.Blocks())
	share, _ := Active(j)
	var all, passed float64
	for _, p := range j.Model.Parameters {
		at := p.Block + 1
		if p.Block < 0 && !p.IsEmbedding() || p.TiedTo != "" {
			at = blocks + 1 // the head
		}
		grow(at)
		if p.TiedTo == "" {
			layers[at].Update += float64(p.Elements())
			all += float64(p.Elements())
		}
		compute[at] += float64(p.Elements()) * share(p)
	}
	var sum float64
	for _, c := range compute {
		sum += c
	}
	for i := range layers {
		layers[i].Update /= all
		layers[i].Needed = passed / max(sum, 1)
		layers[i].Final = 1 - layers[i].Needed
		passed += compute[i]
	}
	return layers
}

// sample returns a matrix of so many elements, to ask an optimizer for its states.
func sample(elements int64, stored dtype.Type) *autograd.Parameter {
	return &autograd.Parameter{Elements: elements, Rows: elements >> 10, DType: stored, Trainable: true}
}
