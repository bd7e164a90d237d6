//go:build linux

package rehearse

import (
	"plimsoll/internal/input/model"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// momentsOf returns the type of a tensor's moments.
func (j *Job) momentsOf(t model.Parameter) kernel.MomentType {
	switch {
	case j.Format.Moments != kernel.MomentsInt8:
		return j.Format.Moments
	case t.IsSmall():
		return kernel.MomentsFP32
	case t.IsEmbedding():
		return j.EmbeddingMoments
	}
	return kernel.MomentsInt8
}

// pieces returns the parameters that are trained, in the order of the flat parameters.
func (j *Job) pieces() []shard.Piece {
	var pieces []shard.Piece
	for _, t := range j.Model.Parameters {
		if t.TiedTo == "" {
			pieces = append(pieces, shard.Piece{Name: t.Name, Shape: t.Shape, Range: shard.Range{Count: t.Elements()},
				Moments: j.momentsOf(t)})
		}
	}
	return pieces
}

// layout lays out a rank's shard. A tensor may begin on one rank and end on another.
func (j *Job) layout(pieces []shard.Piece, own shard.Partition) (*shard.Layout, error) {
	held := append(shard.Cut(pieces, own.Range), shard.Piece{
		Name: "padding", Range: shard.Range{Count: own.Padding}, Moments: j.Format.Moments,
	})
	return shard.NewLayout(j.Format, shard.DefaultChunk, shard.Sections(held))
}

// importantLayout lays out the shard of a rank's important columns: of a matrix the given share of its columns, of
// anything else all elements.
func (j *Job) importantLayout(pieces []shard.Piece, own shard.Partition) (*shard.Layout, error) {
	held := shard.Cut(pieces, own.Range)
	for i, p := range held {
		if len(p.Shape) > 1 {
			columns := max(1, product(p.Shape[1:]))
			held[i].Count = max(1, p.Count*max(1, int64(j.Pace.TopKRatio*float64(columns)))/columns)
		}
	}
	return shard.NewLayout(j.Format, shard.DefaultChunk, shard.Sections(held))
}

// ParametersByMoments returns the number of parameters, padding included, for each type of moments.
func (p *Placement) ParametersByMoments() map[kernel.MomentType]int64 {
	held := map[kernel.MomentType]int64{}
	for _, config := range p.Shards {
		for _, s := range config.Sections() {
			held[s.Moments] += s.Elements
		}
	}
	return held
}

func product(numbers []int64) int64 {
	all := int64(1)
	for _, n := range numbers {
		all *= n
	}
	return all
}
