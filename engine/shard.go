package engine

import (
	"errors"
	"fmt"
	"sync/atomic"

	"plimsoll/arena"
	"plimsoll/optim/kernel"
)

// Shard is one rank's part of the optimizer state, and the workers that update
// it.
type Shard struct {
	config    ShardConfig
	workers   *Workers
	arenas    []*arena.Arena
	sections  []section
	chunks    []chunk            // of all sections, in order
	gradient  kernel.Array       // of all sections
	sums      []float64          // of squares, one a norm block
	summed    []bool             // norm blocks whose gradients arrived and were added up before the step
	constants []kernel.Constants // of each parameter group, in the step that is under way

	// The pass that is under way.
	steal   bool
	body    func(unit int)
	cursors []cursor
	// Bound once: a step allocates nothing.
	walk                             func(worker int)
	updateChunk, sumBlock, moveChunk func(unit int)
}

// section is a Section with its state.
type section struct {
	first  int // element of the shard
	group  int
	format kernel.Format
	state  kernel.Chunk // all of every stream
}

// chunk is what a worker takes at a time.
type chunk struct {
	section    *section
	first, end int // elements of the section
}

func (c chunk) state() kernel.Chunk { return c.section.state.Slice(c.first, c.end) }

// cursor hands out the units of work of one worker's own range. Each is on a
// cache line of its own.
type cursor struct {
	next atomic.Int64
	end  int64
	_    [48]byte
}

// NewShard maps the arenas and starts the workers. No page is touched yet.
func NewShard(c ShardConfig) (*Shard, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Chunk == 0 {
		c.Chunk = DefaultChunk
	}
	s := &Shard{config: c, cursors: make([]cursor, len(c.CPUs))}
	s.walk = s.walkUnits
	s.updateChunk = func(unit int) {
		c := s.chunks[unit]
		s.config.Kernel.Update(c.section.format, &s.constants[c.section.group], c.state())
	}
	s.moveChunk = func(unit int) {
		c := s.chunks[unit]
		s.config.Kernel.Traffic(c.section.format, c.state())
	}
	s.sumBlock = s.sumSquaresOfBlock
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open() error {
	// The state as a whole, but for moments; and the moments of each type.
	var whole kernel.Chunk
	moments := map[kernel.MomentType]*kernel.Chunk{}
	for _, plan := range s.config.Arenas() {
		a, err := arena.New(plan.Name, plan.Size, s.config.Pages)
		if err != nil {
			return err
		}
		s.arenas = append(s.arenas, a)
		if moments[plan.moments] == nil {
			moments[plan.moments] = &kernel.Chunk{}
		}
		switch numbers := (kernel.Array{Type: plan.elements, Data: a.Bytes()}); plan.role {
		case kernel.ParameterRole:
			whole.Parameter = arena.View[uint16](a)
		case kernel.LowRole:
			whole.Low = arena.View[uint16](a)
		case kernel.MasterRole:
			whole.Master = arena.View[float32](a)
		case kernel.FirstMomentRole:
			moments[plan.moments].Moments[0] = numbers
		case kernel.SecondMomentRole:
			moments[plan.moments].Moments[1] = numbers
		case kernel.HeaderRole:
			moments[plan.moments].Headers = arena.View[uint16](a)
		case kernel.GradientRole:
			whole.Gradient = numbers
		case normRole:
			s.sums = arena.View[float64](a)
		}
	}
	s.gradient = whole.Gradient
	s.summed = make([]bool, len(s.sums))
	s.cut(whole, moments)
	var err error
	s.workers, err = NewWorkers(s.config.CPUs)
	return err
}

// cut cuts the state into sections, and these into chunks.
func (s *Shard) cut(whole kernel.Chunk, moments map[kernel.MomentType]*kernel.Chunk) {
	first := 0
	for _, config := range s.config.sections() {
		n := int(config.Elements)
		if n == 0 {
			continue
		}
		state, own := whole.Slice(first, first+n), moments[config.Moments]
		for i, m := range own.Moments {
			state.Moments[i], own.Moments[i] = m.Slice(0, min(n, m.Len())), m.Slice(min(n, m.Len()), m.Len())
		}
		if config.Moments == kernel.MomentsInt8 {
			// Blocks are numbered through all sections that have them.
			blocks := (n + kernel.Block - 1) / kernel.Block
			state.First = own.First
			state.Headers, own.Headers = own.Headers[:blocks], own.Headers[blocks:]
			own.First += int64(blocks) * kernel.Block
		}
		s.sections = append(s.sections, section{first: first, group: config.Group, format: s.config.formatOf(config), state: state})
		first += n
	}
	for i := range s.sections {
		section := &s.sections[i]
		size := s.config.Chunk
		if section.format.Moments == kernel.MomentsInt8 {
			size = (size + kernel.Block - 1) / kernel.Block * kernel.Block
		}
		n := section.state.Len()
		for from := 0; from < n; from += size {
			s.chunks = append(s.chunks, chunk{section, from, min(from+size, n)})
		}
	}
}

// Config is what the shard was made from.
func (s *Shard) Config() ShardConfig { return s.config }

// Close ends the workers and gives the memory back.
func (s *Shard) Close() error {
	if s.workers != nil {
		s.workers.Close()
	}
	var err error
	for _, a := range s.arenas {
		err = errors.Join(err, a.Close())
	}
	s.arenas, s.sections, s.chunks, s.gradient, s.sums = nil, nil, nil, kernel.Array{}, nil // unmapped
	return err
}

// sumSquaresOfBlock adds up the squares of a norm block, unless that was done
// when its gradients arrived.
func (s *Shard) sumSquaresOfBlock(block int) {
	if !s.summed[block] {
		from := block * normBlock
		s.sums[block] = s.config.Kernel.SumSquares(s.gradient.Slice(from, min(from+normBlock, s.gradient.Len())))
	}
}

// GradientsArrived says that the gradients of a stretch of the shard are final
// until the next step. The norm blocks that lie wholly within it are added up
// now, so that the step need not. It returns when they are.
func (s *Shard) GradientsArrived(first, count int64) {
	from := (first + normBlock - 1) / normBlock
	end := (first + count) / normBlock
	if first+count == s.config.Elements {
		end = s.config.normBlocks()
	}
	if from >= end {
		return
	}
	s.start(from, end, true, s.sumBlock)
	s.wait()
	for block := from; block < end; block++ {
		s.summed[block] = true
	}
}

// Accumulate adds a gradient, of any type, to the gradients from element first
// on, for trainers that run several backward passes before a step.
func (s *Shard) Accumulate(first int64, gradient kernel.Array) {
	end, unit := first+int64(gradient.Len()), int64(s.config.Chunk)
	if first < 0 || end > s.config.Elements {
		panic(fmt.Sprintf("engine: gradients %d to %d of a shard of %d", first, end, s.config.Elements))
	}
	s.start(first/unit, (end+unit-1)/unit, true, func(i int) {
		from, to := max(i*s.config.Chunk, int(first)), min((i+1)*s.config.Chunk, int(end))
		s.config.Kernel.Accumulate(s.gradient.Slice(from, to), gradient.Slice(from-int(first), to-int(first)))
	})
	s.wait()
}

// ClearGradients sets all gradients to 0, so that others can be accumulated.
func (s *Shard) ClearGradients() {
	s.startChunks(true, func(unit int) { clear(s.chunks[unit].state().Gradient.Data) })
	s.wait()
}

// startChunks begins a pass over all chunks.
func (s *Shard) startChunks(steal bool, body func(unit int)) {
	s.start(0, int64(len(s.chunks)), steal, body)
}

// start begins a pass over units of work. A worker walks its own range, a
// contiguous part of them, and then, if it may, helps the others with theirs.
func (s *Shard) start(from, end int64, steal bool, body func(unit int)) {
	s.steal, s.body = steal, body
	units, workers := end-from, int64(s.workers.Count())
	for w := range workers {
		s.cursors[w].next.Store(from + w*units/workers)
		s.cursors[w].end = from + (w+1)*units/workers
	}
	s.workers.Start(s.walk)
}

// wait returns when the pass is done.
func (s *Shard) wait() { s.workers.Wait() }

func (s *Shard) walkUnits(worker int) {
	for i := range s.cursors {
		if i > 0 && !s.steal {
			return
		}
		own := &s.cursors[(worker+i)%len(s.cursors)]
		for {
			unit := own.next.Add(1) - 1
			if unit >= own.end {
				break
			}
			s.body(int(unit))
		}
	}
}

// Each calls body for every chunk of the shard, from the workers, each chunk
// from the worker in whose range it lies. Written that way the first time,
// every page is on the NUMA node of the worker that will update it.
func (s *Shard) Each(body func(first int64, c kernel.Chunk)) {
	s.startChunks(false, func(unit int) {
		c := s.chunks[unit]
		body(int64(c.section.first+c.first), c.state())
	})
	s.wait()
}

// sumSquares adds the partial sums of the last norm pass up, in order.
func (s *Shard) sumSquares() float64 {
	sum := 0.0
	for _, x := range s.sums {
		sum += x
	}
	return sum
}
