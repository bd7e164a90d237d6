//go:build linux

package rehearse

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/shard"
)

// modelLayer is a part of the model that the paced trainer computes at a time.
type modelLayer struct {
	name    string
	ranges  []shard.Range // of the flat parameters
	compute int64         // parameters that a token is multiplied by: the time of a pass
}

// plainLayers is the number of layers of a model whose tensors do not tell.
const plainLayers = 32

// layers returns the layers of the model in the order of the forward pass: embeddings, blocks, and the head with all
// that stands outside of the blocks. If count is positive, all but the embeddings is divided into that many layers.
func (j *Job) layers(count int) []modelLayer {
	embedding, head := modelLayer{name: "embedding"}, modelLayer{name: "head"}
	var blocks []modelLayer
	at := int64(0) // of the flat parameters
	for _, p := range j.Model.Parameters {
		elements := p.Elements()
		if p.TiedTo != "" { // its parameters are another's, but a token is multiplied by them
			head.compute += elements
			continue
		}
		own := shard.Range{First: at, Count: elements}
		at += elements
		switch {
		case p.IsEmbedding():
			embedding.add(own, 0)
		case p.Block < 0:
			head.add(own, elements)
		default:
			for len(blocks) <= p.Block {
				blocks = append(blocks, modelLayer{name: fmt.Sprint("block ", len(blocks))})
			}
			blocks[p.Block].add(own, elements)
		}
	}
	layers := append(blocks, head)
	if len(blocks) == 0 || count > 0 {
		layers = divided(layers, cmp.Or(count, plainLayers))
	}
	layers = slices.Insert(layers, 0, embedding)
	return slices.DeleteFunc(layers, func(l modelLayer) bool { return len(l.ranges) == 0 && l.compute == 0 })
}

func (l *modelLayer) add(r shard.Range, compute int64) {
	l.compute += compute
	if r.Count == 0 {
		return
	}
	if n := len(l.ranges); n > 0 && l.ranges[n-1].End() == r.First {
		l.ranges[n-1].Count += r.Count
		return
	}
	l.ranges = append(l.ranges, r)
}

// divided divides the parameters of layers into a number of equal layers.
func divided(layers []modelLayer, count int) []modelLayer {
	var all modelLayer
	for _, l := range layers {
		for _, r := range l.ranges {
			all.add(r, r.Count)
		}
	}
	equal := make([]modelLayer, count)
	for i := range equal {
		equal[i].name = fmt.Sprint("layer ", i)
		own := shard.Range{Count: all.compute}.Share(i, count)
		before := int64(0)
		for _, r := range all.ranges {
			part := shard.Range{First: before, Count: r.Count}.Intersect(own)
			equal[i].add(part.Shift(r.First-before), part.Count)
			before += r.Count
		}
	}
	return equal
}

// pacedLayer is a layer as the trainer and one shard see it.
type pacedLayer struct {
	overlap.Layer
	ranges []shard.Range // of the shard; none if other ranks hold the layer
}

// pacedLayers returns the layers for a shard. A layer takes a share of a pass by the parameters that a token is
// multiplied by, and a share of the update by the bytes that the update moves.
func (j *Job) pacedLayers(layers []modelLayer, own shard.Partition) []pacedLayer {
	compute := int64(0)
	for _, l := range layers {
		compute += l.compute
	}
	paced, before, traffic := make([]pacedLayer, len(layers)), int64(0), int64(0)
	for i, l := range layers {
		p := &paced[i]
		p.Name = l.name
		if compute > 0 {
			p.Needed = float64(before) / float64(compute)
		}
		p.Final = 1 - p.Needed
		before += l.compute
		for _, r := range l.ranges {
			if held := r.Intersect(own.Range); held.Count > 0 {
				p.ranges = append(p.ranges, held.Shift(-own.First))
			}
		}
		bytes := j.traffic(l.ranges, own.Range)
		p.Update = float64(bytes)
		traffic += bytes
	}
	for i := range paced {
		paced[i].Update /= float64(max(traffic, 1))
	}
	if own.Padding > 0 { // it is updated, too
		last := &paced[len(paced)-1]
		last.ranges = append(last.ranges, shard.Range{First: own.Count, Count: own.Padding})
	}
	return paced
}

// LawLayers returns the layers of the model as the first rank has them. It is the first one to be late.
func (p *Placement) LawLayers() ([]overlap.Layer, error) {
	parts, err := shard.ZeRO(p.Model.Elements(), p.WorldSize)
	if err != nil {
		return nil, err
	}
	var layers []overlap.Layer
	for _, l := range p.pacedLayers(p.layers(0), parts[0]) {
		layers = append(layers, l.Layer)
	}
	return layers, nil
}

// traffic returns the bytes that an update moves for those of the ranges that a rank holds.
func (j *Job) traffic(ranges []shard.Range, own shard.Range) int64 {
	bytes := int64(0)
	for _, r := range ranges {
		for _, p := range shard.Cut(j.pieces(), r.Intersect(own)) {
			f := j.Format
			f.Moments = p.Moments
			bytes += f.TrafficBytes(p.Count)
		}
	}
	return bytes
}
