package engine

import (
	"errors"
	"fmt"
	"sync/atomic"

	"plimsoll/arena"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// DefaultChunk is the number of elements that a worker takes at a time. A chunk
// lasts some tens of microseconds: short beside a stop of the world, which has
// to wait for it, and long beside the work of taking it.
const DefaultChunk = 64 << 10

// normBlock is the number of gradient elements whose squares are added up in
// one go. It does not follow the chunk size, so that the norm depends on the
// gradients alone.
const normBlock = 64 << 10

// ShardConfig says what one rank holds.
type ShardConfig struct {
	Rank     int
	Elements int64 // of the rank's part of the flat parameters
	Format   kernel.Format
	Kernel   kernel.Set
	Pages    arena.Pages
	CPUs     []int // one worker on each
	Chunk    int   // elements; 0 is DefaultChunk
}

// ArenaPlan is an arena before it is mapped.
type ArenaPlan struct {
	Name      string // of the arena
	Component string // in the ledger
	Size      ledger.Bytes
	Why       string
}

// ComponentNorm is the ledger's name of the sums of squares.
const ComponentNorm = "gradient_norm_sums"

// Arenas lists every byte that the shard maps. The plan and the shard are made
// from this one list.
func (c ShardConfig) Arenas() []ArenaPlan {
	var plans []ArenaPlan
	for _, s := range c.Format.Streams() {
		plans = append(plans, ArenaPlan{
			Component: s.Component,
			Size:      ledger.Bytes(s.Size * c.Elements),
			Why:       fmt.Sprintf("%d B x %s parameters: %s", s.Size, ledger.Count(c.Elements), s.Why),
		})
	}
	blocks := c.normBlocks()
	plans = append(plans, ArenaPlan{
		Component: ComponentNorm,
		Size:      ledger.Bytes(8 * blocks),
		Why:       fmt.Sprintf("8 B x %s blocks of %s gradients: float64 sums of squares, so that the norm is the same for any number of workers", ledger.Count(blocks), ledger.Count(normBlock)),
	})
	for i := range plans {
		plans[i].Name = fmt.Sprintf("rank%d/%s", c.Rank, plans[i].Component)
	}
	return plans
}

func (c ShardConfig) normBlocks() int64 { return (c.Elements + normBlock - 1) / normBlock }

func (c ShardConfig) validate() error {
	if c.Elements <= 0 {
		return fmt.Errorf("rank %d: %d parameters", c.Rank, c.Elements)
	}
	if c.Chunk < 0 {
		return fmt.Errorf("rank %d: chunks of %d parameters", c.Rank, c.Chunk)
	}
	return c.Format.Validate()
}

// Shard is one rank's part of the optimizer state, and the workers that update
// it.
type Shard struct {
	config ShardConfig
	group  *Group
	arenas []*arena.Arena
	whole  kernel.Chunk // all of every stream
	sums   []float64    // of squares, one a norm block
	adam   kernel.Adam

	// The pass that is under way.
	unit    int
	steal   bool
	body    func(first, count int)
	cursors []cursor
	// Bound once: a step allocates nothing.
	walk                              func(worker int)
	updateUnit, normUnit, trafficUnit func(first, count int)
}

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
	s.updateUnit = func(first, count int) { c.Kernel.Adam(c.Format, &s.adam, s.chunk(first, count)) }
	s.normUnit = func(first, count int) {
		s.sums[first/normBlock] = c.Kernel.SumSquares(s.chunk(first, count).Gradient)
	}
	s.trafficUnit = func(first, count int) { c.Kernel.Traffic(c.Format, s.chunk(first, count)) }
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open() error {
	s.whole.Gradient.Type = s.config.Format.Gradient
	for _, plan := range s.config.Arenas() {
		a, err := arena.New(plan.Name, plan.Size, s.config.Pages)
		if err != nil {
			return err
		}
		s.arenas = append(s.arenas, a)
		switch plan.Component {
		case kernel.ComponentParameter:
			s.whole.Parameter = arena.View[uint16](a)
		case kernel.ComponentLow:
			s.whole.Low = arena.View[uint16](a)
		case kernel.ComponentMaster:
			s.whole.Master = arena.View[float32](a)
		case kernel.ComponentExpAvg:
			s.whole.ExpAvg = arena.View[float32](a)
		case kernel.ComponentExpAvgSq:
			s.whole.ExpAvgSq = arena.View[float32](a)
		case kernel.ComponentGradient:
			s.whole.Gradient.Data = a.Bytes()
		case ComponentNorm:
			s.sums = arena.View[float64](a)
		}
	}
	group, err := NewGroup(s.config.CPUs)
	s.group = group
	return err
}

// Config is what the shard was made from.
func (s *Shard) Config() ShardConfig { return s.config }

// Close ends the workers and gives the memory back.
func (s *Shard) Close() error {
	if s.group != nil {
		s.group.Close()
	}
	var err error
	for _, a := range s.arenas {
		err = errors.Join(err, a.Close())
	}
	s.arenas, s.whole, s.sums = nil, kernel.Chunk{}, nil
	return err
}

// chunk is a stretch of every stream.
func (s *Shard) chunk(first, count int) kernel.Chunk {
	end, size := first+count, int(s.config.Format.Gradient.Size())
	return kernel.Chunk{
		Parameter: part(s.whole.Parameter, first, end),
		Low:       part(s.whole.Low, first, end),
		Master:    part(s.whole.Master, first, end),
		ExpAvg:    s.whole.ExpAvg[first:end],
		ExpAvgSq:  s.whole.ExpAvgSq[first:end],
		Gradient:  kernel.Gradient{Type: s.config.Format.Gradient, Data: s.whole.Gradient.Data[first*size : end*size]},
	}
}

// part is a stretch of a stream that the format may not have.
func part[T any](stream []T, first, end int) []T {
	if stream == nil {
		return nil
	}
	return stream[first:end]
}

// start begins a pass over the shard in units of some number of elements. A
// worker walks its own range, a contiguous part of the shard, and then, if it
// may, helps the others with theirs.
func (s *Shard) start(unit int, steal bool, body func(first, count int)) {
	s.unit, s.steal, s.body = unit, steal, body
	units, workers := (s.config.Elements+int64(unit)-1)/int64(unit), int64(s.group.Workers())
	for w := range workers {
		s.cursors[w].next.Store(w * units / workers)
		s.cursors[w].end = (w + 1) * units / workers
	}
	s.group.Start(s.walk)
}

// wait returns when the pass is done.
func (s *Shard) wait() { s.group.Wait() }

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
			first := int(unit) * s.unit
			s.body(first, min(s.unit, int(s.config.Elements)-first))
		}
	}
}

// Each calls body for every chunk of the shard, from the workers, each chunk
// from the worker in whose range it lies. Written that way the first time,
// every page is on the NUMA node of the worker that will update it.
func (s *Shard) Each(body func(first int64, c kernel.Chunk)) {
	s.start(s.config.Chunk, false, func(first, count int) { body(int64(first), s.chunk(first, count)) })
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
