package engine

import (
	"errors"
	"sort"

	"plimsoll/arena"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// memory is the arenas of a shard, and how they are divided into sections and
// chunks. It ends with the shard: slices of a closed shard point to unmapped pages.
type memory struct {
	config   ShardConfig
	arenas   []*arena.Arena
	sections []section
	chunks   []chunk      // of all sections, in order
	gradient kernel.Array // of all sections
	sums     []float64    // of squares, one for each norm block
}

// section is a Section with its state.
type section struct {
	number       int // in the configuration
	first        int // element of the shard
	momentsFirst int // element among those whose moments have that type
	group        int
	format       kernel.Format
	state        kernel.Chunk // all of every stream
}

// chunk is what a worker takes at a time.
type chunk struct {
	section    *section
	first, end int // elements of the section
}

func (c chunk) state() kernel.Chunk { return c.section.state.Slice(c.first, c.end) }

// streams are the arenas as kernels read them: everything but the moments as one
// chunk, and the moments of each type as another.
type streams struct {
	whole   kernel.Chunk
	moments map[kernel.MomentType]*kernel.Chunk
}

// add adds an arena to the streams.
func (m *memory) add(s *streams, plan ArenaPlan, a *arena.Arena) {
	m.arenas = append(m.arenas, a)
	if s.moments[plan.moments] == nil {
		s.moments[plan.moments] = &kernel.Chunk{}
	}
	switch numbers := (kernel.Array{Type: plan.elements, Data: a.Bytes()}); plan.role {
	case kernel.ParameterRole:
		s.whole.Parameter = arena.View[uint16](a)
	case kernel.LowRole:
		s.whole.Low = arena.View[uint16](a)
	case kernel.MasterRole:
		s.whole.Master = arena.View[float32](a)
	case kernel.FirstMomentRole:
		s.moments[plan.moments].Moments[0] = numbers
	case kernel.SecondMomentRole:
		s.moments[plan.moments].Moments[1] = numbers
	case kernel.HeaderRole:
		s.moments[plan.moments].Headers = arena.View[uint16](a)
	case kernel.GradientRole:
		s.whole.Gradient = numbers
	case normRole:
		m.sums = arena.View[float64](a)
	}
}

// divide divides the state into sections, and the sections into chunks.
func (m *memory) divide(streams streams) {
	m.gradient = streams.whole.Gradient
	first, momentsFirst := 0, map[kernel.MomentType]int{}
	for number, config := range m.config.sections() {
		n := int(config.Elements)
		if n == 0 {
			continue
		}
		state, own := streams.whole.Slice(first, first+n), streams.moments[config.Moments]
		for i, all := range own.Moments {
			end := min(n, all.Len())
			state.Moments[i], own.Moments[i] = all.Slice(0, end), all.Slice(end, all.Len())
		}
		if config.Moments == kernel.MomentsInt8 {
			// The sections of int8 moments number their blocks in one sequence.
			blocks := (n + kernel.Block - 1) / kernel.Block
			state.First = own.First
			state.Headers, own.Headers = own.Headers[:blocks], own.Headers[blocks:]
			own.First += int64(blocks) * kernel.Block
		}
		m.sections = append(m.sections, section{
			number: number, first: first, momentsFirst: momentsFirst[config.Moments],
			group: config.Group, format: m.config.formatOf(config), state: state,
		})
		first += n
		momentsFirst[config.Moments] += n
	}
	for i := range m.sections {
		section := &m.sections[i]
		size, n := m.config.chunkOf(m.config.sections()[section.number]), section.state.Len()
		for from := 0; from < n; from += size {
			m.chunks = append(m.chunks, chunk{section, from, min(from+size, n)})
		}
	}
}

// chunkAt returns the number of the chunk that holds an element of the shard.
func (m *memory) chunkAt(element int) int {
	return sort.Search(len(m.chunks), func(i int) bool { return m.chunks[i].section.first+m.chunks[i].end > element })
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

// unit returns a chunk as a snapshot shows it.
func (m *memory) unit(number int) Unit {
	c := m.chunks[number]
	return Unit{
		First:        int64(c.section.first + c.first),
		Section:      c.section.number,
		MomentsFirst: int64(c.section.momentsFirst + c.first),
		Moments:      c.section.format.Moments,
		State:        c.state(),
	}
}
