package engine

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Shard is one rank's part of the optimizer state, and the workers that update
// it.
//
// # Caveats
//
// One goroutine at a time may use a shard. [Shard.Steps], [Shard.Wait],
// [Shard.WaitRange], [Shard.MissesGradients], [Shard.Underway] and [Snapshot.Run] are
// the exceptions: any goroutine may call them at any time.
//
// Slices of an arena ([Shard.Arenas], [Shard.Each], [Snapshot]) point into mapped
// memory. After [Shard.Close] they point nowhere: reading one ends the process.
type Shard struct {
	memory            // its arenas, and the state of its sections
	progress          // how far updates and accumulations have come; in the journal, if there is one
	pass              // how workers walk over it
	queue    queue    // which chunks of an update come first
	arrivals arrivals // gradients of an update that was begun before they were there

	summed   []atomic.Bool    // norm blocks that were added up when their gradients arrived
	trial    kernel.Constants // of a step that is checked; the journal has only steps that begin
	assigned rows             // the constants of the journal, and of what they are
	current  update
	// Bound once: a step allocates nothing.
	updateChunk, sumBlock, moveChunk func(worker, unit int)
	updateHeld                       func(worker, unit int, state kernel.Chunk)
	takeUrgent                       func(unit int) bool
	walkArrived                      func(worker int)

	snapshot  atomic.Pointer[Snapshot]
	damage    atomic.Pointer[error]
	scrubbing scrubbing
	noted     noted // what steps change, if anybody wants to know

	speculation speculation
}

// update is the update that this process is making or made last.
type update struct {
	underway atomic.Uint64 // its number
	left     atomic.Int64  // chunks that are still to be done
	then     func()        // called by the worker that does the last chunk, or finds damage; may be nil
	untold   atomic.Bool   // then is still to be called
	watchers watchers
	awaited  []atomic.Bool // by chunk: whether a goroutine sleeps until it is done
}

// NewShard maps the arenas and starts the workers. It touches no page except those
// of the journal.
func NewShard(c ShardConfig) (*Shard, error) {
	return open(c, func(plan arena.Plan) (*arena.Arena, error) {
		return c.Place.New(plan.Name, plan.Size, c.Pages)
	}, func(s *Shard, head *journalHead) error {
		clear(s.journal().Bytes())
		head.init(c)
		s.progress.init()
		s.chunkSums.ofZeros()
		return nil
	}, false)
}

// AttachShard maps the arenas of a shard that another process has made, from their
// files by name, and starts workers. Their number may differ from that process's.
// The caller owns the files until [Shard.Adopt]. With a journal, it must call
// [Shard.Finish] next.
func AttachShard(c ShardConfig, files map[string]*os.File) (*Shard, error) {
	return open(c, func(plan arena.Plan) (*arena.Arena, error) {
		file := files[plan.Name]
		if file == nil {
			return nil, fmt.Errorf("arena %s of %v: there is no file of that name", plan.Name, plan.Size)
		}
		return c.Place.Attach(plan.Name, plan.Size, c.Pages, file)
	}, func(s *Shard, head *journalHead) error { return s.checkJournal(head) }, true)
}

// Adopt makes the files of an attached shard its own: Close closes them.
func (s *Shard) Adopt() {
	for _, a := range s.arenas {
		a.Adopt()
	}
}

// open makes a shard of arenas that arenaOf maps. journal writes or checks the
// journal before anything else reads it.
func open(
	c ShardConfig,
	arenaOf func(arena.Plan) (*arena.Arena, error),
	journal func(*Shard, *journalHead) error,
	attached bool,
) (*Shard, error) {
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("rank %d: %w", c.Rank, err)
	}
	s := &Shard{memory: memory{config: c}}
	s.updateChunk, s.sumBlock, s.moveChunk = s.updateNext, s.sumSquaresOfBlock, s.moveUnit
	s.takeUrgent, s.walkArrived = s.takeIfArrived, s.updateArrived
	s.updateHeld = s.updateOnTier
	s.current.watchers.moved.L = &s.current.watchers.mutex
	if err := s.open(arenaOf, journal, attached); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.openSpeculation()
	return s, nil
}

func (s *Shard) open(
	arenaOf func(arena.Plan) (*arena.Arena, error), journal func(*Shard, *journalHead) error, attached bool,
) error {
	for _, plan := range s.config.Arenas() {
		a, err := arenaOf(plan)
		if err != nil {
			return err
		}
		s.arenas = append(s.arenas, a)
		if plan.Component == ledger.StepJournal {
			if err := journal(s, s.progress.openJournal(s.config, a)); err != nil {
				return err
			}
		}
	}
	if !s.config.Journal { // after the arenas: they fail first if the size cannot be mapped
		s.progress = newProgress(s.config)
	}
	s.divide()
	s.current.awaited = make([]atomic.Bool, len(s.done))
	s.queue = newQueue(len(s.done))
	s.current.underway.Store(s.finished.Load())
	s.summed = make([]atomic.Bool, len(s.sums))
	cpus := s.config.CPUs
	if s.config.Journal {
		cpus = cpus[:min(len(cpus), len(s.slots))]
	}
	s.pass.caught = s.catch
	if err := s.pass.open(s.config.Rank, cpus); err != nil || s.config.Tier == nil {
		return err
	}
	return s.openTier(attached)
}

// Config returns the configuration that the shard was made from.
func (s *Shard) Config() ShardConfig { return s.config }

// Close ends the workers and unmaps the arenas.
func (s *Shard) Close() error {
	s.pass.close()
	err := s.tier.close()
	s.progress = progress{}
	return errors.Join(err, s.memory.close())
}

// sumSquaresOfBlock adds up the squares of a norm block. It does nothing if they
// were added up when the gradients arrived.
func (s *Shard) sumSquaresOfBlock(worker, block int) {
	if !s.summed[block].Load() {
		began := s.config.begin()
		from := block * normBlock
		to := min(from+normBlock, s.gradient.Len())
		s.sums[block] = s.config.Kernel.SumSquares(s.gradient.Slice(from, to))
		s.config.observe(worker, Work{shard.Between(int64(from), int64(to)), true}, began)
	}
}

// GradientsArrived says that the gradients of a range of the shard are final until
// the next step, even if they had arrived before and have changed. The workers add
// up the norm blocks that lie fully within the range now, so that the step need not.
// GradientsArrived returns when they are done. In a step that was begun before its
// gradients were there ([Shard.BeginArriving]) it returns at once and adds up nothing.
func (s *Shard) GradientsArrived(r shard.Range) {
	if s.isArriving() {
		s.arrive(r)
		return
	}
	for block := r.First / normBlock; block < (r.End()+normBlock-1)/normBlock; block++ {
		s.summed[block].Store(false)
	}
	from := (r.First + normBlock - 1) / normBlock
	end := r.End() / normBlock
	if r.End() == s.config.Elements {
		end = s.config.normBlocks()
	}
	if from >= end {
		return
	}
	s.start(shard.Between(from, end), helping, s.sumBlock)
	s.wait()
	for block := from; block < end; block++ {
		s.summed[block].Store(true)
	}
}

// moveUnit moves the bytes that an update of a chunk moves.
func (s *Shard) moveUnit(_, unit int) {
	c := s.chunk(unit)
	s.config.Kernel.Traffic(c.section.format, c.state())
}

// startChunks begins a pass over all chunks.
func (s *Shard) startChunks(sharing sharing, body func(worker, unit int)) {
	s.start(shard.Range{Count: int64(s.config.Chunks)}, sharing, body)
}

// Each has the workers call body for every chunk of the shard. A worker calls it for
// the chunks of its own range. If pages are first written this way, each lies on the
// NUMA node of the worker that will update it.
func (s *Shard) Each(body func(at shard.Chunk, state kernel.Chunk)) { s.EachOf(s.config.Range(), body) }

// EachOf is [Shard.Each] for the chunks with elements of a range. Sums of the chunks
// are verified before body and renewed after it.
func (s *Shard) EachOf(r shard.Range, body func(at shard.Chunk, state kernel.Chunk)) {
	defer s.scrubbing.keepOut()()
	s.noted.lose()
	s.eachState(s.config.ChunksOf(r), apart, changes, func(_, unit int, state kernel.Chunk) {
		if !s.isSound(unit, &state) {
			return
		}
		s.chunkSums.void(unit)
		body(s.chunks[unit], state)
		s.chunkSums.renew(unit, &state)
	})
}

// EachGradient has the workers call body with the gradients of every chunk, as [Shard.Each] does with its state.
func (s *Shard) EachGradient(body func(at shard.Chunk, gradient kernel.Array)) {
	s.startChunks(apart, func(_, unit int) {
		c := s.chunk(unit)
		body(c.Chunk, c.state().Gradient)
	})
	s.wait()
}

// SumSquares returns the sum of the squares of all gradients in their arena. It does
// not read norm blocks again that [Shard.GradientsArrived] has added up. In a speculated
// step all gradients have arrived.
func (s *Shard) SumSquares() float64 {
	if s.AwaitsVerdict() {
		return s.sumOfArrived()
	}
	s.startNorm()
	return s.sumOfBlocks()
}

func (s *Shard) startNorm() { s.start(shard.Range{Count: s.config.normBlocks()}, helping, s.sumBlock) }

// ForgetArrived undoes [Shard.GradientsArrived]: all gradients may change again.
func (s *Shard) ForgetArrived() {
	for block := range s.summed {
		s.summed[block].Store(false)
	}
}

// sumOfBlocks waits for the norm pass and adds up its sums in order.
func (s *Shard) sumOfBlocks() float64 {
	s.wait()
	return s.addBlocksUp()
}

func (s *Shard) addBlocksUp() (sum float64) {
	for _, x := range s.sums {
		sum += x
	}
	return sum
}
