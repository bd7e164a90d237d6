package forward

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// Images are what the encoder reads in a micro batch, all of the same size in pixels: images or their tiles. Tokens
// are those of all sequences.
type Images struct{ Count, Height, Width, Tokens int64 }

// Pixels returns the number of values that the encoder reads.
func (i Images) Pixels(t *model.Tower) int64 {
	of := t.Image
	return i.Count * of.Patches(i.Height, i.Width) * of.Patch * of.Patch * of.Channels * of.Frames
}

// In is like autograd's. In an encoder of images all activations are one component.
func (p *pass) In(component ledger.Component, why func() string) (leave func()) {
	if p.tower != nil && component != ledger.AdapterActivations && component != ledger.AutocastWeights {
		component, why = ledger.VisionActivations, p.whyTower
	}
	return p.Tape.In(component, why)
}

func (p *pass) whyTower() string {
	i := p.Images
	if p.tower.Projector == "" {
		return fmt.Sprintf("the encoder of %d images of %d x %d pixels: %s rows", i.Count, i.Height, i.Width,
			ledger.Count(p.tokens()))
	}
	return fmt.Sprintf("the encoder and the projector of %d images of %d x %d pixels: %s tokens of the sequences",
		i.Count, i.Height, i.Width, ledger.Count(i.Tokens))
}

// withImages puts the results of the encoders in the place of embeddings of tokens.
func (p *pass) withImages(x *autograd.Tensor) *autograd.Tensor {
	for _, t := range p.network.Towers {
		if p.Images.Count == 0 || p.network.Head.Contrast != nil {
			break
		}
		features := p.encode(t)
		tokens := p.New(p.tokens(), dtype.Bool) // where they go
		merged := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x, features}, Saved: []*autograd.Tensor{tokens},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}})[0]
		p.Drop(tokens)
		p.Hold(features) // the program returns them with the logits
		p.outputs = append(p.outputs, features)
		x = p.follow(x, merged)
	}
	if p.network.HoldsEmbeddings {
		p.outputs = append(p.outputs, p.Escape(x))
	}
	return x
}

// encode runs an encoder of images and its projector.
func (p *pass) encode(t *model.Tower) *autograd.Tensor {
	v := *p
	v.network, v.tower = t.Network, t
	v.Parallel.Context, v.Parallel.Tensor = 1, 1
	v.Batch, v.Sequence = p.Images.Count, t.Image.Patches(p.Images.Height, p.Images.Width)+t.Image.Class
	v.mask, v.masked, v.blocks = nil, false, 0
	if t.OneSequence {
		v.Batch, v.Sequence = 1, v.Batch*v.Sequence
	}
	v.HooksImages = p.HooksImages && t.Hooked
	if !v.HooksImages && !p.trainsTower(t) {
		v.Recompute = nil // a checkpoint keeps nothing where no gradient is needed
	}
	defer v.In(ledger.VisionActivations, v.whyTower)()
	features := p.Scope(func() *autograd.Tensor {
		if t.MasksImages && p.Attention == SDPA {
			v.mask = p.New(v.Sequence*v.Sequence, p.compute())
		}
		blocks := t.Network.Blocks()
		if a := &blocks[0].Attention; a.Rotary > 0 && !t.AnglesKept {
			v.angles = p.New(2*v.tokens()*a.Width, v.angleType(a))
		}
		x := v.steps(t.Before, nil)
		for i := range len(blocks) - t.Unread {
			x = v.follow(x, v.block(t.Network.Stacks[0], &blocks[i], x))
			for _, deep := range t.Deep {
				if deep.Block == i {
					made := v.steps(deep.Steps, x)
					v.Hold(made)
					p.deep = append(p.deep, made)
				}
			}
		}
		return v.follow(x, v.steps(t.After, x))
	})
	return features
}

// angleType returns the type of the cosines and sines of an encoder.
func (p *pass) angleType(a *model.Attention) dtype.Type {
	if a.WideRotary || p.Autocast != dtype.Invalid {
		return dtype.F32
	}
	return p.compute()
}

// trainsTower reports whether a parameter or an adapter of an encoder is trained, without its projector.
func (p *pass) trainsTower(t *model.Tower) bool {
	inside := func(name string) bool {
		return (t.Path == "" || strings.HasPrefix(name, t.Path+".")) && !strings.HasPrefix(name, t.Projector+".")
	}
	for name, parameter := range p.parameters.ByName {
		if parameter.Trainable && inside(name) {
			return true
		}
	}
	for module := range p.parameters.Adapters {
		if inside(module) {
			return true
		}
	}
	return false
}

// steps runs the steps between pixels, blocks and embeddings. It does not drop x.
func (p *pass) steps(list []model.Step, x *autograd.Tensor) *autograd.Tensor {
	first := x
	for i := range list {
		made := p.step(&list[i], x)
		if x != first && made != x {
			p.Drop(x)
		}
		x = made
	}
	return x
}

func (p *pass) step(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	switch s.Kind {
	case model.Convolve:
		return p.convolve(s)
	case model.Project:
		return p.linear(s.Path, x, s.Width)
	case model.Multiply:
		w := p.parameter(s.Path)
		return p.hooked(parent(s.Path), func() *autograd.Tensor {
			return p.matmul(x, w.Tensor(), x.Elements/(w.Elements/s.Width)*s.Width)
		})
	case model.Normalize:
		return p.norm(s.Norm, x)
	case model.Activate:
		return p.activate(s.Function, x)
	case model.Prepend:
		return p.prepend(s, x)
	case model.Position, model.Resample:
		return p.position(s, x)
	case model.Locate:
		return p.hooked(parent(s.Path), func() *autograd.Tensor { return p.locate(s, x) })
	case model.First:
		return p.view(x, p.Batch*p.network.Hidden)
	case model.Pool:
		return p.pool(s, x)
	case model.Dropout:
		return p.dropout(x, s.Share)
	case model.Average:
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: x.Elements / s.Rows, DType: x.DType}}})[0]
	case model.Reorder:
		return p.indexed(x, p.New(p.tokens()/(p.tower.Image.Merged*p.tower.Image.Merged), dtype.I64), x.Elements)
	case model.Copy:
		return p.unary(x, x.DType, saveNothing)
	case model.Crop:
		rows := p.tokens() - p.Batch*p.tower.Image.Class
		return p.view(x, x.Elements/p.tokens()*rows)
	case model.Unfold:
		return p.unfold(s)
	case model.Interpolate:
		return p.interpolate(s, x)
	case model.Downsample:
		return p.downsample(s, x)
	case model.Gate:
		return p.dense(s.FeedForward, x)
	case model.Pack:
		return p.pack(s, x)
	default: // Merge
		return p.view(x, x.Elements)
	}
}

// prepend puts parameters before the rows of every image.
func (p *pass) prepend(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	return p.hooked(parent(s.Path), func() *autograd.Tensor {
		inputs, rows := []*autograd.Tensor{x, p.parameter(s.Path).Tensor()}, int64(1)
		if s.Second != "" {
			inputs, rows = append(inputs, p.parameter(s.Second).Tensor()), 2
		}
		result := inputs[0].DType
		for _, input := range inputs {
			result = promoted(result, input.DType)
		}
		return p.Do(autograd.Operation{Inputs: inputs,
			Outputs: []autograd.Output{{Elements: x.Elements + rows*p.Batch*p.network.Hidden, DType: result}}})[0]
	})
}

// locate adds positions. Those of images of another size lie between the ones that the model has: they are computed
// in fp32 (bicubic interpolation).
func (p *pass) locate(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	table := p.parameter(s.Path).Tensor()
	if s.Rows == 0 || s.Rows == p.Sequence {
		return p.add(x, table)
	}
	return p.Scope(func() *autograd.Tensor {
		wide := p.cast(table, dtype.F32)
		between := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{wide},
			Outputs: []autograd.Output{{Elements: p.Sequence * p.network.Hidden, DType: dtype.F32}}})[0]
		joined := p.unary(p.cast(between, table.DType), table.DType, saveNothing) // with those of the first rows
		return p.add(x, joined)
	})
}

// view returns a view of so many elements.
func (p *pass) view(x *autograd.Tensor, elements int64) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Shared: []bool{elements == x.Elements},
		Outputs: []autograd.Output{{Elements: elements, DType: x.DType, View: true}}})[0]
}

// convolve runs the convolution that makes rows of patches. The pixels are in fp32.
func (p *pass) convolve(s *model.Step) *autograd.Tensor {
	return p.hooked(s.Path, func() *autograd.Tensor {
		pixels := p.pixels()
		rows := p.convolution(s.Path, pixels, p.patches()*s.Width)
		p.Drop(pixels)
		if p.HooksImages {
			p.RequireGradient(rows)
		}
		return rows
	})
}

// pixels returns the images in the type that the convolution computes in. In fp32 they are the batch itself.
func (p *pass) pixels() *autograd.Tensor {
	if p.compute() == dtype.F32 {
		batch := p.New(0, dtype.F32)
		batch.Elements = p.Images.Pixels(p.tower)
		return batch
	}
	return p.New(p.Images.Pixels(p.tower), p.compute())
}

// unfold copies the pixels of every patch into a row, and runs a linear module.
func (p *pass) unfold(s *model.Step) *autograd.Tensor {
	pixels := p.pixels()
	rows := p.follow(pixels, p.linear(s.Path, pixels, s.Width))
	if p.HooksImages {
		p.RequireGradient(rows)
	}
	return rows
}

// interpolate adds rows between those of a table, which it copies in fp32 (grid_sample).
func (p *pass) interpolate(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		var wide *autograd.Tensor
		sampled := p.hooked(s.Path, func() *autograd.Tensor {
			table := p.parameter(s.Path + ".weight").Tensor()
			wide = p.cast(table, dtype.F32)
			grid := p.New(2*p.tokens(), dtype.F32)
			defer p.Drop(grid)
			return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{wide}, Saved: []*autograd.Tensor{wide, grid},
				Outputs: []autograd.Output{{Elements: x.Elements, DType: dtype.F32}}})[0]
		})
		return p.add(x, p.follow(sampled, p.cast(sampled, x.DType)))
	})
}

// downsample runs a convolution that makes one row of several.
func (p *pass) downsample(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	return p.hooked(s.Path, func() *autograd.Tensor {
		input := p.cast(x, p.compute())
		y := p.convolution(s.Path, input, x.Elements/p.network.Hidden/s.Rows*s.Width)
		p.dropCasts(x, input)
		return y
	})
}

// pack puts the rows of the tiles of an image side by side, and a parameter behind each row of the image.
func (p *pass) pack(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	return p.hooked(parent(s.Path), func() *autograd.Tensor {
		w := p.parameter(s.Path)
		ordered := p.unary(x, x.DType, saveNothing)
		packed := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{ordered, w.Tensor()},
			Outputs: []autograd.Output{{Elements: p.Images.Tokens * w.Elements, DType: x.DType}}})[0]
		p.Drop(ordered)
		return p.follow(packed, p.unary(packed, packed.DType, saveNothing))
	})
}

// patches returns the number of patches of all images.
func (p *pass) patches() int64 {
	return p.Images.Count * p.tower.Image.Patches(p.Images.Height, p.Images.Width)
}

// position adds rows of a table. Resampled, each is a weighted sum of four.
func (p *pass) position(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	if s.Kind == model.Resample {
		return p.Scope(func() *autograd.Tensor {
			near := p.lookUp(s.Path, 4*x.Elements)
			weights := p.New(4*p.tokens(), dtype.F32)
			weighed := p.product(near, weights, near.Elements, dtype.F32)
			p.Drop(near, weights)
			sum := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{weighed},
				Outputs: []autograd.Output{{Elements: x.Elements, DType: dtype.F32}}})[0]
			p.Drop(weighed)
			return p.add(x, p.follow(sum, p.cast(sum, x.DType)))
		})
	}
	rows := s.Rows
	if rows == 0 {
		rows = p.tokens()
	}
	positions := p.lookUp(s.Path, rows*p.network.Hidden)
	sum := p.add(x, positions)
	p.Drop(positions)
	return sum
}

// makeMasks makes the masks that let the tokens of an image attend to each other: one for blocks with a window, one
// for others.
func (p *pass) makeMasks(s *model.Stack) {
	if !p.masked || p.Attention == Flash {
		return
	}
	windows := map[bool]bool{}
	for i := range s.Blocks {
		windows[s.Blocks[i].Attention.Window > 0] = true
	}
	for range windows {
		p.masks = append(p.masks, p.New(p.Batch*p.Sequence*p.Sequence, dtype.Bool))
	}
}

// deepen adds the results of an encoder after a block to the tokens of images.
func (p *pass) deepen(x *autograd.Tensor, index int) *autograd.Tensor {
	if index >= len(p.deep) {
		return x
	}
	features := p.deep[index]
	copied := p.unary(x, x.DType, saveNothing)
	rows := p.New(2*features.Elements/p.network.Hidden, dtype.I64)
	taken := p.indexed(copied, rows, features.Elements)
	sum := p.add(taken, features)
	p.Drop(taken)
	put := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{copied, sum}, Saved: []*autograd.Tensor{rows},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType, View: true}}})[0]
	p.Drop(copied, sum, rows)
	return put
}

func parent(path string) string { return path[:strings.LastIndexByte(path, '.')] }
