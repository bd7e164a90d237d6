package engine

import (
	"errors"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// memory is the arenas of a shard, and the state in them. It ends with the shard:
// slices of a closed shard point to unmapped pages.
type memory struct {
	config   ShardConfig
	arenas   []*arena.Arena
	sections []section
	chunks   []shard.Chunk // by number: to find one takes longer than to read one
	gradient kernel.Array  // of all sections
	sums     []float64     // of squares, one for each norm block
	tier     *tiered       // nil: all streams are in memory
}

// section is the state of a section.
type section struct {
	first  int64 // element of the shard
	group  int
	format kernel.Format
	state  kernel.Chunk
}

// chunk is the state of a chunk.
type chunk struct {
	shard.Chunk
	section *section
}

// chunk returns a chunk of the shard.
func (m *memory) chunk(number int) chunk {
	c := m.chunks[number]
	return chunk{c, &m.sections[c.Section]}
}

// state returns the memory of the chunk, without what is on a tier.
func (c chunk) state() kernel.Chunk {
	first := int(c.First - c.section.first)
	return c.section.state.Slice(first, first+int(c.Count))
}

// divide divides the arenas, which are all mapped, into the state of the sections and chunks.
func (m *memory) divide() {
	m.gradient = kernel.Array{Type: m.config.Format.Gradient, Data: m.Arena(ledger.Gradients).Bytes()}
	m.sums = arena.View[float64](m.Arena(ledger.GradientNormSums))
	streams := make([][]byte, len(m.config.Streams))
	next := 0
	for i, stream := range m.config.Streams {
		if !m.config.onTier(stream) {
			streams[i] = m.arenas[next].Bytes()
			next++
		}
	}
	for number, config := range m.config.Sections() {
		full := m.config.Section(number)
		m.sections = append(m.sections, section{
			first: full.First, group: config.Group, format: m.config.FormatOf(number),
			state: m.config.State(full, streams),
		})
	}
	m.chunks = make([]shard.Chunk, m.config.Chunks)
	for number := range m.chunks {
		m.chunks[number] = m.config.Chunk(number)
	}
}

// Arenas returns the arenas, in the order of the configuration.
func (m *memory) Arenas() []*arena.Arena { return m.arenas }

// Arena returns the arena of a component, or nil if there is none.
func (m *memory) Arena(component ledger.Component) *arena.Arena {
	for i, plan := range m.config.Arenas() {
		if plan.Component == component {
			return m.arenas[i]
		}
	}
	return nil
}

// close unmaps the arenas.
func (m *memory) close() error {
	var err error
	for _, a := range m.arenas {
		err = errors.Join(err, a.Close())
	}
	*m = memory{config: m.config}
	return err
}
