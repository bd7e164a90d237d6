package foreign

import (
	"cmp"
	"fmt"
	"slices"
	"sort"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
)

// grid is the numbers of a tensor, in row-major order. The tensor is cut into blocks: along
// its first dimension, each part along the second one, and so on.
type grid struct {
	shape []int64
	root  *cut
	of    dtype.Type
}

// cut is a part of a tensor that is cut along a dimension. Behind the last dimension it is
// a block.
type cut struct {
	starts []int64
	parts  []*cut
	block  *block
}

// block is a block of a tensor. Its numbers, in row-major order, lie in one or more parts.
type block struct {
	offsets, sizes []int64
	starts         []int64 // number of the block at which each part begins
	places         []checkpoint.Location
	end            int64 // numbers of all parts
}

// newGrid checks that the blocks are all of the tensor, each number once.
func newGrid(shape []int64, blocks []*block) (grid, error) {
	for _, b := range blocks {
		if len(b.offsets) != len(shape) || len(b.sizes) != len(shape) {
			return grid{}, fmt.Errorf("a chunk at %v of %v in the shape %v", b.offsets, b.sizes, shape)
		}
	}
	root, err := cutAlong(shape, blocks, 0)
	return grid{shape, root, dtype.F32}, err
}

func cutAlong(shape []int64, blocks []*block, dimension int) (*cut, error) {
	if dimension == len(shape) {
		if len(blocks) != 1 {
			return nil, fmt.Errorf("%d chunks at one place, expected 1", len(blocks))
		}
		return &cut{block: blocks[0]}, nil
	}
	slices.SortStableFunc(blocks, func(a, b *block) int {
		return cmp.Compare(a.offsets[dimension], b.offsets[dimension])
	})
	c, end := &cut{}, int64(0)
	for len(blocks) > 0 {
		first, size := blocks[0].offsets[dimension], blocks[0].sizes[dimension]
		if first != end || size < 1 || size > shape[dimension]-end {
			break
		}
		count := slices.IndexFunc(blocks, func(b *block) bool { return b.offsets[dimension] != first })
		if count < 0 {
			count = len(blocks)
		}
		own := blocks[:count:count]
		if slices.ContainsFunc(own, func(b *block) bool { return b.sizes[dimension] != size }) {
			return nil, fmt.Errorf("chunks at %d of dimension %d have different sizes", first, dimension)
		}
		part, err := cutAlong(shape, own, dimension+1)
		if err != nil {
			return nil, err
		}
		c.starts, c.parts = append(c.starts, first), append(c.parts, part)
		blocks, end = blocks[count:], end+size
	}
	if len(blocks) > 0 || end != shape[dimension] {
		return nil, fmt.Errorf("its chunks are not all of dimension %d of the shape %v, each part once", dimension,
			shape)
	}
	return c, nil
}

// lastAt returns the last start that is not behind a number.
func lastAt(starts []int64, number int64) int {
	return sort.Search(len(starts), func(i int) bool { return starts[i] > number }) - 1
}

func (g grid) Read(open checkpoint.Opener, first int64, b []byte) error {
	return g.Spans(first, int64(len(b))/4, func(at checkpoint.Location, count int64) error {
		own := b[:4*count]
		b = b[4*count:]
		return at.Read(open, 0, own)
	})
}

func (g grid) Spans(first, count int64, use func(at checkpoint.Location, count int64) error) error {
	for count > 0 {
		at, follow := g.run(first)
		n := min(count, follow)
		if err := use(at, n); err != nil {
			return err
		}
		first += n
		count -= n
	}
	return nil
}

// run returns where a number is, and how many numbers lie there one after the other.
func (g grid) run(number int64) (checkpoint.Location, int64) {
	var index [pickle.MaxDimensions]int64
	for i := len(g.shape) - 1; i >= 0; i-- {
		index[i], number = number%g.shape[i], number/g.shape[i]
	}
	c := g.root
	for i := range g.shape {
		c = c.parts[lastAt(c.starts, index[i])]
	}
	b := c.block
	inBlock, inner, follow, full := int64(0), int64(1), int64(1), true
	for i := len(g.shape) - 1; i >= 0; i-- {
		own := index[i] - b.offsets[i]
		inBlock += own * inner
		inner *= b.sizes[i]
		if full {
			follow = inner - inBlock
		}
		full = full && b.sizes[i] == g.shape[i]
	}
	part := lastAt(b.starts, inBlock)
	if part+1 < len(b.starts) {
		follow = min(follow, b.starts[part+1]-inBlock)
	}
	at := b.places[part]
	at.Offset += g.of.Size() * (inBlock - b.starts[part])
	return at, follow
}
