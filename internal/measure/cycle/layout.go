//go:build linux

package cycle

import (
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/states"
)

// tensor is what a rank has of a parameter.
type tensor struct {
	shard.Piece
	matrix bool // Muon orthogonalizes its momentum
}

// tensors returns the parameters that are trained, in the order of the model.
func (j *Job) tensors() []tensor {
	var all []tensor
	head := "lm_head"
	if n := j.Model.Network; n != nil {
		head = n.Head.Projection
	}
	for _, p := range j.Model.Parameters {
		if p.TiedTo == "" {
			all = append(all, tensor{shard.Piece{Name: p.Name, Shape: p.Shape,
				Range: shard.Range{Count: p.Elements()}}, j.Muon && isMatrix(p, head)})
		}
	}
	return all
}

// isMatrix reports whether Muon updates a parameter: a matrix of a hidden layer. All else is left to AdamW: embeddings,
// the output head, and what is no matrix (plimsoll.torch.muon_groups).
func isMatrix(p model.Parameter, head string) bool {
	return len(p.Shape) == 2 && !p.IsEmbedding() && !strings.Contains(p.Name, "embed") && p.Name != head+".weight"
}

// keys returns the state tensors of a parameter, with their types.
func (j *Job) keys(t tensor) []kernel.Stream {
	f := j.Format
	if t.matrix {
		f.Algorithm = kernel.SGD // the same state: one momentum
	}
	return f.MomentStreams()
}

// The names of what stands beside the states, as the client has them.
const (
	parameterKey = "parameter"
	hasStateKey  = "has_state"
	stepKey      = "step"
)

// layout divides what a rank has of the parameters into chunks.
func (j *Job) layout(all []tensor, number int) Rank {
	rank := Rank{Number: number}
	var held []tensor
	var parameters []roads.Parameter
	for _, t := range all {
		if t.Range = rows(t.Shape, number, j.WorldSize); t.Count > 0 {
			held = append(held, t)
			parameters = append(parameters, j.parameter(t))
			rank.Parameters += t.Count
		}
	}
	l := roads.NewLayout(parameters, j.Settings)
	d := &states.Description{Recovery: l.Gradients() > 0, GradientBytes: int64(l.Gradients())}
	for _, c := range l.Chunks {
		d.Chunks = append(d.Chunks, j.describe(held[c.First:c.End], l.Recovery))
	}
	d.SettingsBytes = int64(l.Control()) - d.ControlBytes()
	rank.Layout, rank.Description = l, d
	return rank
}

// rows returns the elements of a parameter that a rank has. FSDP2 divides the first dimension into equal parts, of
// which the last may be short or empty (torch.chunk).
func rows(shape []int64, rank, ranks int) shard.Range {
	count, each := int64(1), int64(1) // of rows, and of elements in a row
	if len(shape) > 0 {
		count = shape[0]
		for _, n := range shape[1:] {
			each *= n
		}
	}
	part := (count + int64(ranks) - 1) / int64(ranks)
	own := shard.Between(min(int64(rank)*part, count), min(int64(rank+1)*part, count))
	return shard.Range{First: own.First * each, Count: own.Count * each}
}

// parameter returns the sizes of a tensor.
func (j *Job) parameter(t tensor) roads.Parameter {
	p := roads.Parameter{Elements: t.Count, Master: t.Count * j.masterBytes(), Own: t.Count * j.Format.Parameter.Size(),
		Gradient: t.Count * j.Format.Gradient.Size()}
	for _, k := range j.keys(t) {
		p.States = append(p.States, t.Count*k.Type.Size())
	}
	p.Scalars = len(j.scalars(t))
	p.Temporary = j.temporary(p)
	if t.matrix {
		p.Operations = roads.NewtonSchulz(1, t.Shape[0], t.Shape[1])
	}
	return p
}

// temporary returns what an update holds beside the slot: moments in fp32, and for master weights the gradient in fp32
// and the weight that two halves make.
func (j *Job) temporary(p roads.Parameter) (bytes int64) {
	single := roads.Allocated(p.Elements * dtype.F32.Size())
	if j.Format.Moments == kernel.MomentsBF16 {
		bytes += int64(len(p.States)) * single
	}
	switch j.masterBytes() {
	case dtype.BF16.Size():
		bytes += 2 * single
	case dtype.F32.Size():
		bytes += single
	}
	return bytes
}

// scalars returns the names of a parameter's states that are one number.
func (j *Job) scalars(t tensor) []string {
	if !t.matrix && (j.Format.Algorithm == kernel.Adam || j.Format.Algorithm == kernel.Adagrad) {
		return []string{stepKey}
	}
	return nil
}

// describe returns the region of a chunk, tensor by tensor: states and master weights, and then the parameters.
func (j *Job) describe(held []tensor, recovery bool) (c states.Chunk) {
	add := func(t tensor, key string, of dtype.Type) {
		at := states.Tensor{Name: t.String(), Key: key, Type: of, Shape: []int64{t.Count}, Offset: c.Bytes}
		c.Tensors = append(c.Tensors, at)
		c.Bytes += (at.Bytes() + states.Alignment - 1) / states.Alignment * states.Alignment
	}
	for _, t := range held {
		for _, k := range j.keys(t) {
			add(t, string(k.Component), k.Type)
		}
		switch j.masterBytes() {
		case dtype.BF16.Size():
			add(t, string(ledger.MasterWeightsLow), dtype.BF16)
		case dtype.F32.Size():
			add(t, string(ledger.MasterWeights), dtype.F32)
		}
		c.Scalars = append(c.Scalars, states.Scalar{Name: t.String(), Key: hasStateKey, Type: dtype.I64})
		for _, key := range j.scalars(t) {
			c.Scalars = append(c.Scalars, states.Scalar{Name: t.String(), Key: key, Type: dtype.F32})
		}
	}
	if recovery {
		for _, t := range held {
			add(t, parameterKey, j.Format.Parameter)
		}
	}
	return c
}
