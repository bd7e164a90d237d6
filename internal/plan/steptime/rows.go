package steptime

import (
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// rows are what the blocks of a stack work on in a pass: the rows of a rank, their width, and the length of the
// sequences that they attend to, also to those of an encoder.
type rows struct {
	all              float64
	hidden           int64
	sequence, across float64
}

// stackOf returns the rows of a stack. An encoder of sound has as many for each sequence as its spectrum has.
func stackOf(j *job.Job, at int, tokens float64) rows {
	n := j.Model.Network
	of := rows{all: tokens, hidden: n.Hidden, sequence: float64(sequenceOf(j)), across: float64(sequenceOf(j))}
	if sound := n.Sound(); sound != nil {
		of.across = float64(sound.Rows)
		if at == 0 {
			of.all, of.sequence = float64(j.Sequences()*sound.Rows), float64(sound.Rows)
		}
	}
	return of
}

// rowsOf returns how many rows each parameter is multiplied by. Those of encoders of images have patches, and those of
// an encoder of sound its spectrum.
func rowsOf(j *job.Job, tokens float64) func(model.Parameter) float64 {
	n := j.Model.Network
	encoder := 0
	if n.Sound() != nil {
		encoder = len(n.Stacks[0].Blocks)
	}
	return func(p model.Parameter) float64 {
		for _, t := range n.Towers {
			if strings.HasPrefix(p.Name, t.Path+".") {
				return patchesOf(j, t)
			}
			if t.Projector != "" && strings.HasPrefix(p.Name, t.Projector+".") {
				return float64(j.Images.Count * max(1, j.Images.Tokens))
			}
		}
		if p.Block >= 0 && p.Block < encoder {
			return stackOf(j, 0, tokens).all
		}
		return tokens
	}
}

// patchesOf returns the patches of all images of a pass.
func patchesOf(j *job.Job, t *model.Tower) float64 {
	i := j.Images
	if i.Count == 0 || t.Image.Patch == 0 {
		return 0
	}
	return float64(i.Count * (t.Image.Patches(i.Height, i.Width) + t.Image.Class))
}

// addTowers adds attention and the operations between products of encoders of images. Each image attends to itself.
func (w *work) addTowers(j *job.Job) {
	for _, t := range j.Model.Network.Towers {
		patches := patchesOf(j, t)
		if patches == 0 || t.Network == nil {
			continue
		}
		each := patches / float64(j.Images.Count)
		of := rows{all: patches, hidden: t.Network.Hidden, sequence: each, across: each}
		for _, s := range t.Network.Stacks {
			for i := range s.Blocks {
				w.addBlock(j, of, s, &s.Blocks[i])
			}
		}
	}
}

// The guesses for a model whose operations are unknown: what they move for an element of each matrix' input and result,
// and how many there are for a matrix.
const opaqueBytes, opaqueKernels = 8, 7

// addOpaque adds what a model whose operations are unknown does beside its products: those of a decoder whose width is
// that of most of its matrices.
func (w *work) addOpaque(j *job.Job, tokens float64) {
	count := map[int64]int{}
	blocks := 0
	for _, p := range j.Model.Parameters {
		if p.Block < 0 || len(p.Shape) < 2 {
			continue
		}
		in, out := p.Shape[len(p.Shape)-1], p.Shape[0]
		count[in]++
		count[out]++
		blocks = max(blocks, p.Block+1)
		w.traffic += tokens * float64(in+out) * opaqueBytes * float64(j.ComputeType().Size()) / 2
		w.kernels += opaqueKernels
	}
	var width int64
	for d, n := range count {
		if n > count[width] || n == count[width] && d > width {
			width = d
		}
	}
	sequence := float64(sequenceOf(j))
	operations := float64(blocks) * 2 * tokens * sequence * float64(width)
	w.attention += operations
	w.begun += operations * flashStart(j) / sequence
}

// activationsOf returns the bytes that the backward pass of a rank needs of a micro batch, where they wait on the host:
// the inputs of blocks if these are recomputed, and else what products and norms keep.
func activationsOf(j *job.Job) (bytes float64) {
	tokens := float64(j.Sequences()*sequenceOf(j)) / float64(j.Parallel.Context)
	hidden := float64(j.Model.Network.Hidden)
	inputsOnly := j.Recompute != nil || j.OffloadActivations.InputsOnly
	for _, b := range j.Model.Network.Blocks() {
		if inputsOnly {
			bytes += tokens * hidden
			continue
		}
		a := &b.Attention
		bytes += tokens * (6*hidden + float64((2*a.Heads+2*a.KeyValueHeads)*a.Width) + 4*float64(b.FeedForward.Inner)) /
			float64(j.Parallel.Tensor)
	}
	return bytes * float64(j.ComputeType().Size())
}

// moduleName returns the name of the module that a parameter is the weight of.
func moduleName(p model.Parameter) string { return strings.TrimSuffix(p.Name, ".weight") }
