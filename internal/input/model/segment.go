package model

import (
	"slices"
	"strings"
)

// Segment is a range of the blocks of a model with one stack, as a pipeline stage has it.
type Segment struct {
	First, Blocks   int
	Embedding, Head bool // the segment begins with the embeddings, or ends with the last norm and the head
}

// Segments returns a model that consists of segments of m, and the network of each segment. It returns nil for a model
// that cannot be cut: one with several stacks, with towers, or with unknown operations.
func (m *Model) Segments(segments []Segment) (*Model, []*Network) {
	if !m.IsCuttable() {
		return nil, nil
	}
	n := m.Network
	stack := n.Stacks[0]
	var networks []*Network
	var all []Block
	var embedding, head bool
	for _, segment := range segments {
		blocks := stack.Blocks[segment.First : segment.First+segment.Blocks]
		networks = append(networks, n.with(blocks, segment.Head))
		all = append(all, blocks...)
		embedding, head = embedding || segment.Embedding, head || segment.Head
	}
	cut := *m
	cut.Network = n.with(all, head)
	of, kept := n.blockOf(), map[int]bool{}
	for _, segment := range segments {
		for i := range segment.Blocks {
			kept[segment.First+i] = true
		}
	}
	cut.Parameters = nil
	for _, p := range m.Parameters {
		keeps := embedding
		if block := of(&p); block >= 0 {
			keeps = kept[block]
		} else if n.isBehind(p.Name) {
			keeps = head
		}
		if keeps {
			cut.Parameters = append(cut.Parameters, p)
		}
	}
	cut.untie()
	return &cut, networks
}

// untie gives a parameter storage of its own where the one it shares storage with is in another stage.
func (m *Model) untie() {
	here := map[string]bool{}
	for _, p := range m.Parameters {
		here[p.Name] = true
	}
	for i, p := range m.Parameters {
		if !here[p.TiedTo] {
			m.Parameters[i].TiedTo = ""
		}
	}
}

// IsCuttable reports whether Segments knows where the model is cut.
func (m *Model) IsCuttable() bool {
	n := m.Network
	return n != nil && len(n.Stacks) == 1 && len(n.Towers) == 0 && n.Opaque == nil
}

// blockOf returns what finds the block of a parameter, -1 outside of all. A parameter's own number counts blocks of the
// whole model.
func (n *Network) blockOf() func(*Parameter) int {
	blocks := n.Stacks[0].Blocks
	under := func(p *Parameter, i int) bool {
		path := blocks[i].Path
		return len(p.Name) > len(path) && p.Name[len(path)] == '.' && strings.HasPrefix(p.Name, path)
	}
	return func(p *Parameter) int {
		if p.Block >= 0 && p.Block < len(blocks) && under(p, p.Block) {
			return p.Block
		}
		for i := range blocks {
			if under(p, i) {
				return i
			}
		}
		return -1
	}
}

// with returns the network with these blocks, with or without what comes behind them.
func (n *Network) with(blocks []Block, head bool) *Network {
	cut, stack := *n, *n.Stacks[0]
	stack.Blocks = blocks
	if !head {
		stack.FinalNorm, stack.ProjectOut, cut.Head = Norm{}, "", Head{}
	}
	cut.Stacks = []*Stack{&stack}
	return &cut
}

// isBehind reports whether a parameter is of a module behind the blocks.
func (n *Network) isBehind(parameter string) bool {
	stack, head := n.Stacks[0], n.Head
	modules := []string{stack.FinalNorm.Path, stack.ProjectOut, head.Projection, head.Dense, head.Norm.Path,
		head.Pooler, head.Value}
	return slices.ContainsFunc(modules, func(path string) bool {
		return path != "" && strings.HasPrefix(parameter, path+".")
	})
}
