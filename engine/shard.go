package engine

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sort"
	"sync/atomic"

	"plimsoll/arena"
	"plimsoll/optim/kernel"
)

// Shard is one rank's part of the optimizer state, and the workers that update
// it. One goroutine at a time may use it, but for [Shard.Steps], [Shard.Wait],
// [Shard.WaitRange] and [Snapshot.Run], which others may call meanwhile.
type Shard struct {
	config   ShardConfig
	workers  *Workers
	arenas   []*arena.Arena
	sections []section
	chunks   []chunk      // of all sections, in order
	gradient kernel.Array // of all sections
	sums     []float64    // of squares, one a norm block
	summed   []bool       // norm blocks whose gradients arrived and were added up before the step

	// Updates, and additions to the gradients; with a journal, they are in it.
	*counters
	additions *additions
	constants []kernel.Constants // of each parameter group, in the update begun last
	trial     kernel.Constants   // of a step that may not begin: the journal has only those that do
	done      []atomic.Uint32    // by chunk: the mark of the update or the addition that it had last
	slots     []slot             // of each worker; none without a journal
	writing   *atomic.Bool       // whether they are the logs of a write
	// underway is the update that this process is making or has made last.
	underway atomic.Uint64
	left     atomic.Int64 // chunks of it that are to be done
	then     func()       // what the worker calls that does the last, if anything
	watchers watchers
	awaited  []atomic.Bool // by chunk: whether somebody sleeps until it is done
	snapshot atomic.Pointer[Snapshot]

	// The pass that is under way.
	steal   bool
	body    func(worker, unit int)
	cursors []cursor
	// Bound once: a step allocates nothing.
	walk                             func(worker int)
	updateChunk, sumBlock, moveChunk func(worker, unit int)
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

// cursor hands out the units of work of one worker's own range. Each is on a
// cache line of its own.
type cursor struct {
	next atomic.Int64
	end  int64
	_    [48]byte
}

// NewShard maps the arenas and starts the workers. No page is touched yet, but
// for those of the journal.
func NewShard(c ShardConfig) (*Shard, error) {
	return open(c, func(plan ArenaPlan) (*arena.Arena, error) {
		return arena.New(plan.Name, plan.Size, c.Pages)
	}, func(head *journalHead, bytes []byte) error {
		clear(bytes)
		head.init(c)
		return nil
	})
}

// AttachShard maps the arenas of a shard that another process has made, from
// their files by name, and starts workers, of which the number may be another.
// The files stay the caller's until [Shard.Adopt]. With a journal, [Shard.Finish]
// must come next.
func AttachShard(c ShardConfig, files map[string]*os.File) (*Shard, error) {
	return open(c, func(plan ArenaPlan) (*arena.Arena, error) {
		file := files[plan.Name]
		if file == nil {
			return nil, fmt.Errorf("arena %s of %v: there is no file of that name", plan.Name, plan.Size)
		}
		return arena.Attach(plan.Name, plan.Size, c.Pages, file)
	}, func(head *journalHead, _ []byte) error { return head.check(c) })
}

// Adopt makes the files of an attached shard its own: Close closes them.
func (s *Shard) Adopt() {
	for _, a := range s.arenas {
		a.Adopt()
	}
}

// open makes a shard of arenas that come from somewhere, and of a journal that
// has to be looked at before anything is believed.
func open(c ShardConfig, arenaOf func(ArenaPlan) (*arena.Arena, error), journal func(*journalHead, []byte) error) (*Shard, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	c.Chunk = cmp.Or(c.Chunk, DefaultChunk)
	s := &Shard{config: c}
	s.walk = s.walkUnits
	s.updateChunk, s.sumBlock, s.moveChunk = s.updateUnit, s.sumSquaresOfBlock, s.moveUnit
	s.watchers.moved.L = &s.watchers.mutex
	if err := s.open(arenaOf, journal); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open(arenaOf func(ArenaPlan) (*arena.Arena, error), journal func(*journalHead, []byte) error) error {
	// The state as a whole, but for moments; and the moments of each type.
	var whole kernel.Chunk
	moments := map[kernel.MomentType]*kernel.Chunk{}
	for _, plan := range s.config.Arenas() {
		a, err := arenaOf(plan)
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
		case journalRole:
			if err := journal(s.openJournal(a), a.Bytes()); err != nil {
				return fmt.Errorf("arena %s: %w", a.Name(), err)
			}
		}
	}
	if !s.config.Journal {
		s.counters, s.additions = &counters{}, &additions{}
		s.constants = make([]kernel.Constants, s.config.groups())
		s.done = make([]atomic.Uint32, s.config.chunks())
	}
	s.awaited = make([]atomic.Bool, len(s.done))
	s.underway.Store(s.finished.Load())
	s.gradient = whole.Gradient
	s.summed = make([]bool, len(s.sums))
	s.cut(whole, moments)
	cpus := s.config.CPUs
	if s.config.Journal {
		cpus = cpus[:min(len(cpus), len(s.slots))]
	}
	s.cursors = make([]cursor, len(cpus))
	var err error
	s.workers, err = NewWorkers(cpus)
	return err
}

// cut cuts the state into sections, and these into chunks.
func (s *Shard) cut(whole kernel.Chunk, moments map[kernel.MomentType]*kernel.Chunk) {
	first, momentsFirst := 0, map[kernel.MomentType]int{}
	for number, config := range s.config.sections() {
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
		s.sections = append(s.sections, section{
			number: number, first: first, momentsFirst: momentsFirst[config.Moments],
			group: config.Group, format: s.config.formatOf(config), state: state,
		})
		first += n
		momentsFirst[config.Moments] += n
	}
	for i := range s.sections {
		section := &s.sections[i]
		size, n := s.config.chunkOf(s.config.sections()[section.number]), section.state.Len()
		for from := 0; from < n; from += size {
			s.chunks = append(s.chunks, chunk{section, from, min(from+size, n)})
		}
	}
}

// chunkAt is the number of the chunk that an element of the shard is in.
func (s *Shard) chunkAt(element int) int {
	return sort.Search(len(s.chunks), func(i int) bool { return s.chunks[i].section.first+s.chunks[i].end > element })
}

// Arenas are those of the configuration, in its order.
func (s *Shard) Arenas() []*arena.Arena { return s.arenas }

// Arena is the arena of a component, nil where there is none.
func (s *Shard) Arena(component string) *arena.Arena {
	for i, plan := range s.config.Arenas() {
		if plan.Component == component {
			return s.arenas[i]
		}
	}
	return nil
}

// Config is what the shard was made from, with the number of elements of a
// chunk.
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
	// What follows is unmapped.
	s.arenas, s.sections, s.chunks, s.gradient, s.sums = nil, nil, nil, kernel.Array{}, nil
	s.counters, s.additions, s.constants, s.done, s.slots = nil, nil, nil, nil, nil
	return err
}

// sumSquaresOfBlock adds up the squares of a norm block, unless that was done
// when its gradients arrived.
func (s *Shard) sumSquaresOfBlock(_, block int) {
	if !s.summed[block] {
		from := block * normBlock
		s.sums[block] = s.config.Kernel.SumSquares(s.gradient.Slice(from, min(from+normBlock, s.gradient.Len())))
	}
}

// GradientsArrived says that the gradients of a stretch of the shard are final
// until the next step, also where they had arrived before and have changed. The
// norm blocks that lie wholly within it are added up now, so that the step need
// not. It returns when they are.
func (s *Shard) GradientsArrived(first, count int64) {
	clear(s.summed[first/normBlock : (first+count+normBlock-1)/normBlock])
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

// moveUnit moves what an update of a chunk moves.
func (s *Shard) moveUnit(_, unit int) {
	c := s.chunks[unit]
	s.config.Kernel.Traffic(c.section.format, c.state())
}

// startChunks begins a pass over all chunks.
func (s *Shard) startChunks(steal bool, body func(worker, unit int)) {
	s.start(0, int64(len(s.chunks)), steal, body)
}

// start begins a pass over units of work. A worker walks its own range, a
// contiguous part of them, and then, if it may, helps the others with theirs.
func (s *Shard) start(from, end int64, steal bool, body func(worker, unit int)) {
	s.wait()
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
			s.body(worker, int(unit))
		}
	}
}

// Each calls body for every chunk of the shard, from the workers, each chunk
// from the worker in whose range it lies. Written that way the first time,
// every page is on the NUMA node of the worker that will update it.
func (s *Shard) Each(body func(first int64, c kernel.Chunk)) {
	s.startChunks(false, func(_, unit int) {
		c := s.chunks[unit]
		body(int64(c.section.first+c.first), c.state())
	})
	s.wait()
}

// SumSquares is the sum of the squares of all gradients as they lie in their
// arena. What arrived was added up then, and is not read again.
func (s *Shard) SumSquares() float64 {
	s.startNorm()
	return s.sumOfBlocks()
}

func (s *Shard) startNorm() { s.start(0, s.config.normBlocks(), true, s.sumBlock) }

// ForgetArrived says that all gradients may change again, as after a step.
func (s *Shard) ForgetArrived() { clear(s.summed) }

// sumOfBlocks waits for the norm pass, and adds its sums up in order.
func (s *Shard) sumOfBlocks() float64 {
	s.wait()
	sum := 0.0
	for _, x := range s.sums {
		sum += x
	}
	return sum
}
