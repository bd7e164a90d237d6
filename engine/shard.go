package engine

import (
	"errors"
	"fmt"
	"sync/atomic"

	"plimsoll/arena"
	"plimsoll/dtype"
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
	// Groups are the elements of each parameter group in the rank's part, in
	// order. They add up to Elements; nil is one group.
	Groups []int64
	Format kernel.Format
	Kernel kernel.Set
	Pages  arena.Pages
	CPUs   []int // one worker on each
	Chunk  int   // elements; 0 is DefaultChunk
}

// ArenaPlan is an arena before it is mapped.
type ArenaPlan struct {
	Name      string // of the arena
	Component string // in the ledger
	Size      ledger.Bytes
	Why       string

	role     kernel.Role
	elements dtype.Type
}

// normRole is the role of the sums of squares, which no kernel walks.
const normRole = kernel.Role(255)

// ComponentNorm is the ledger's name of the sums of squares.
const ComponentNorm = "gradient_norm_sums"

// Arenas lists every byte that the shard maps. The plan and the shard are made
// from this one list.
func (c ShardConfig) Arenas() []ArenaPlan {
	var plans []ArenaPlan
	for _, s := range c.Format.Streams() {
		plans = append(plans, ArenaPlan{
			Component: s.Component,
			role:      s.Role,
			elements:  s.Type,
			Size:      ledger.Bytes(s.Type.Size() * c.Elements),
			Why:       fmt.Sprintf("%d B x %s parameters: %s", s.Type.Size(), ledger.Count(c.Elements), s.Why),
		})
	}
	blocks := c.normBlocks()
	plans = append(plans, ArenaPlan{
		Component: ComponentNorm,
		role:      normRole,
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
	sum := int64(0)
	for i, elements := range c.Groups {
		if elements < 0 || elements > c.Elements-sum {
			return fmt.Errorf("rank %d: group %d has %d parameters, and %d are left", c.Rank, i, elements, c.Elements-sum)
		}
		sum += elements
	}
	if c.Groups != nil && sum != c.Elements {
		return fmt.Errorf("rank %d: the groups have %d parameters of %d", c.Rank, sum, c.Elements)
	}
	return c.Format.Validate()
}

// Shard is one rank's part of the optimizer state, and the workers that update
// it.
type Shard struct {
	config  ShardConfig
	workers *Workers
	arenas  []*arena.Arena
	whole   kernel.Chunk // all of every stream
	sums    []float64    // of squares, one a norm block
	summed  []bool       // norm blocks whose gradients arrived and were added up before the step
	groups  []group

	// The pass that is under way.
	unit    int
	steal   bool
	body    func(first, count int)
	cursors []cursor
	// Bound once: a step allocates nothing.
	walk                              func(worker int)
	updateUnit, normUnit, trafficUnit func(first, count int)
}

// group is the part of a parameter group in the shard, and what its update
// needs in the step that is under way.
type group struct {
	first, end int
	constants  kernel.Constants
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
	if c.Groups == nil {
		c.Groups = []int64{c.Elements}
	}
	s := &Shard{config: c, cursors: make([]cursor, len(c.CPUs))}
	end := 0
	for _, elements := range c.Groups {
		s.groups = append(s.groups, group{first: end, end: end + int(elements)})
		end += int(elements)
	}
	s.walk = s.walkUnits
	s.updateUnit = s.updateElements
	s.normUnit = s.sumBlock
	s.trafficUnit = func(first, count int) { c.Kernel.Traffic(c.Format, s.chunk(first, count)) }
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open() error {
	for _, plan := range s.config.Arenas() {
		a, err := arena.New(plan.Name, plan.Size, s.config.Pages)
		if err != nil {
			return err
		}
		s.arenas = append(s.arenas, a)
		switch plan.role {
		case kernel.ParameterRole:
			s.whole.Parameter = arena.View[uint16](a)
		case kernel.LowRole:
			s.whole.Low = arena.View[uint16](a)
		case kernel.MasterRole:
			s.whole.Master = arena.View[float32](a)
		case kernel.FirstMomentRole:
			s.whole.Moments[0] = kernel.Array{Type: plan.elements, Data: a.Bytes()}
		case kernel.SecondMomentRole:
			s.whole.Moments[1] = kernel.Array{Type: plan.elements, Data: a.Bytes()}
		case kernel.GradientRole:
			s.whole.Gradient = kernel.Array{Type: plan.elements, Data: a.Bytes()}
		case normRole:
			s.sums = arena.View[float64](a)
		}
	}
	s.summed = make([]bool, len(s.sums))
	var err error
	s.workers, err = NewWorkers(s.config.CPUs)
	return err
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
	s.arenas, s.whole, s.sums = nil, kernel.Chunk{}, nil // unmapped
	return err
}

// chunk is a stretch of every stream.
func (s *Shard) chunk(first, count int) kernel.Chunk { return s.whole.Slice(first, first+count) }

// updateElements updates a stretch that may belong to several groups.
func (s *Shard) updateElements(first, count int) {
	for i := range s.groups {
		g := &s.groups[i]
		if from, end := max(first, g.first), min(first+count, g.end); from < end {
			s.config.Kernel.Update(s.config.Format, &g.constants, s.whole.Slice(from, end))
		}
	}
}

// sumBlock adds up the squares of a norm block, unless that was done when its
// gradients arrived.
func (s *Shard) sumBlock(first, count int) {
	if block := first / normBlock; !s.summed[block] {
		s.sums[block] = s.config.Kernel.SumSquares(s.chunk(first, count).Gradient)
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
	s.startUnits(normBlock, from, end, true, s.normUnit)
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
	s.startUnits(s.config.Chunk, first/unit, (end+unit-1)/unit, true, func(start, count int) {
		from, to := max(start, int(first)), min(start+count, int(end))
		s.config.Kernel.Accumulate(s.whole.Gradient.Slice(from, to), gradient.Slice(from-int(first), to-int(first)))
	})
	s.wait()
}

// ClearGradients sets all gradients to 0, so that others can be accumulated.
func (s *Shard) ClearGradients() {
	s.start(s.config.Chunk, true, func(first, count int) { clear(s.whole.Gradient.Slice(first, first+count).Data) })
	s.wait()
}

// start begins a pass over the shard in units of some number of elements. A
// worker walks its own range, a contiguous part of the shard, and then, if it
// may, helps the others with theirs.
func (s *Shard) start(unit int, steal bool, body func(first, count int)) {
	s.startUnits(unit, 0, (s.config.Elements+int64(unit)-1)/int64(unit), steal, body)
}

// startUnits begins a pass over some of the units.
func (s *Shard) startUnits(unit int, from, end int64, steal bool, body func(first, count int)) {
	s.unit, s.steal, s.body = unit, steal, body
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
