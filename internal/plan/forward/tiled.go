package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// tiled runs a feed-forward network on one tile of the sequence after the other, as axolotl's TiledMLP does
// (src/axolotl/monkeypatch/tiled_mlp/base.py). The backward pass runs each tile again, and adds its gradients of the
// weights up beside those of the tile. The tape has one tile, as large as each, with the results of all.
func (p *pass) tiled(f *model.FeedForward, x *autograd.Tensor) *autograd.Tensor {
	if p.Tiles == 0 {
		return p.dense(f, x)
	}
	return p.Checkpoint(autograd.Checkpoint{Reentrant: true}, x, func(x *autograd.Tensor) *autograd.Tensor {
		r := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: (x.Elements + p.Tiles - 1) / p.Tiles, DType: x.DType, View: true},
				{Elements: p.gradientBytes(f) + x.Bytes(), DType: dtype.U8, Saved: true}}}) // the sums
		p.Drop(r[1])
		y := p.dense(f, r[0])
		return p.follow(y, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{y}, // the tiles are there, too
			Scratch: x.Elements*y.DType.Size() - y.Bytes(),
			Outputs: []autograd.Output{{Elements: x.Elements, DType: y.DType}}})[0])
	})
}

// gradientBytes returns the bytes of the gradients of a feed-forward network.
func (p *pass) gradientBytes(f *model.FeedForward) (bytes int64) {
	for _, path := range []string{f.Gate, f.Up, f.GateUp, f.Down} {
		if w := p.parameter(path + ".weight"); w != nil && w.Trainable {
			bytes += w.Elements * w.DType.Size()
		}
	}
	return bytes
}
