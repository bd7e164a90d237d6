package model

import (
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
)

// Opaque is a network whose operations are unknown: the modules that own
// parameters, in the order of their names.
type Opaque struct {
	Before, After []OpaqueModule // outside of the blocks
	Blocks        [][]OpaqueModule
	// Encoders are those of images or sound. Their blocks are the first stack.
	Encoders []Encoder
	// Experts are the parameters that hold all experts of a layer.
	Experts []string
	// Estimated adds activations: inputs and results of all matrices in fp32.
	Estimated bool
}

// OpaqueModule is a module that owns parameters.
type OpaqueModule struct {
	Path       string
	Parameters []string
	Linear     bool  // it has a matrix and is no embedding
	Width      int64 // the sum of the matrix' inputs and outputs, or 0
}

// WithoutOperations returns the model with a network that says nothing but which
// modules own its parameters. It returns false if their types are not those of a
// training, as with quantized weights.
func (m *Model) WithoutOperations() (*Model, bool) {
	network := &Network{Hidden: 1, Opaque: &Opaque{Encoders: m.Encoders}}
	stack := &Stack{}
	var rows int64 // of the greatest table, which is that of tokens
	modules := map[string]*OpaqueModule{}
	order := []string{}
	blocks := map[string]int{} // of modules
	for _, p := range m.Parameters {
		switch p.DType {
		case dtype.F16, dtype.BF16, dtype.F32:
		default:
			return nil, false
		}
		path := p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
		x := modules[path]
		if x == nil {
			x = &OpaqueModule{Path: path}
			modules[path], blocks[path] = x, p.Block
			order = append(order, path)
		}
		x.Parameters = append(x.Parameters, p.Name)
		switch {
		case p.IsEmbedding():
			if p.Shape[0] > rows && p.Shape[1] > 0 && network.PartOf(p.Name) == Language {
				stack.TokenEmbedding, network.Hidden, rows = path, p.Shape[1], p.Shape[0]
			}
		case len(p.Shape) == 2 && strings.HasSuffix(p.Name, ".weight"):
			x.Linear = true
			if !amongOthers(p.Name) {
				x.Width = p.Shape[0] + p.Shape[1]
			}
		case len(p.Shape) == 3: // the experts of a layer
			if strings.Contains(p.Name, ".experts.") {
				network.Opaque.Experts = append(network.Opaque.Experts, p.Name)
			}
			x.Width += min(chosenExperts, p.Shape[0]) * (p.Shape[1] + p.Shape[2])
		}
	}
	o := network.Opaque
	paths := map[int]string{}
	for _, path := range order {
		x, block := *modules[path], blocks[path]
		switch {
		case path == stack.TokenEmbedding:
		case block >= 0 && network.PartOf(x.Parameters[0]) != Projector:
			for len(o.Blocks) <= block {
				o.Blocks = append(o.Blocks, nil)
			}
			o.Blocks[block] = append(o.Blocks[block], x)
			list, index := blockOf(x.Parameters[0])
			paths[block] = list + decimal(int64(index))
		case len(o.Blocks) == 0 || network.PartOf(x.Parameters[0]) != Language:
			o.Before = append(o.Before, x)
		default:
			o.After = append(o.After, x)
		}
	}
	network.stackOpaque(stack, paths)
	with := *m
	with.Network = network
	return &with, true
}

// stackOpaque adds the blocks with these paths to the stack, and those of encoders
// to a stack before it.
func (n *Network) stackOpaque(stack *Stack, paths map[int]string) {
	encoder := &Stack{}
	var first, last [][]OpaqueModule // in the order of the stacks
	for i, modules := range n.Opaque.Blocks {
		switch {
		case len(modules) == 0:
		case n.PartOf(modules[0].Parameters[0]) != Language:
			encoder.Blocks, first = append(encoder.Blocks, Block{Path: paths[i]}), append(first, modules)
		default:
			stack.Blocks, last = append(stack.Blocks, Block{Path: paths[i]}), append(last, modules)
		}
	}
	n.Opaque.Blocks, n.Stacks = append(first, last...), []*Stack{stack}
	if len(encoder.Blocks) > 0 {
		n.Stacks = []*Stack{encoder, stack}
	}
}

// chosenExperts is the number of experts per token that an estimate assumes.
const chosenExperts = 8

// amongOthers reports whether a tensor belongs to a later expert of a block than
// those that an estimate assumes for a token.
func amongOthers(name string) bool {
	list, _ := blockOf(name)
	inside := name[len(list):]
	_, inside, _ = strings.Cut(inside, ".")
	_, index := blockOf(inside)
	return index >= chosenExperts
}

// EstimatesActivations returns a model without operations with an estimate of its
// activations.
func (m *Model) EstimatesActivations() *Model {
	with, network, opaque := *m, *m.Network, *m.Network.Opaque
	opaque.Estimated = true
	network.Opaque, with.Network = &opaque, &network
	return &with
}

// linears returns the paths of the modules with matrices.
func (o *Opaque) linears() []string {
	var paths []string
	for _, list := range append([][]OpaqueModule{o.Before, o.After}, o.Blocks...) {
		for _, x := range list {
			if x.Linear {
				paths = append(paths, x.Path)
			}
		}
	}
	return slices.Clip(paths)
}
