package engine

import (
	"errors"
	"fmt"
	"path"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// normBlock is the number of gradient elements whose squares make one sum. It is
// independent of the chunk size, so that the norm depends on the gradients alone.
const normBlock = 64 << 10

// ShardConfig says what one rank holds, and who updates it.
type ShardConfig struct {
	Rank int
	// Part tells the shards of a rank apart in the names of their arenas. It is
	// empty if the rank has one shard.
	Part string
	*shard.Layout
	Kernel kernel.Set
	Pages  arena.Pages
	Place  arena.Place
	CPUs   []int // one worker on each
	// Journal lets another process finish a step that this process has begun.
	// It costs an arena, and some time of every step.
	Journal bool
	// Sums has a sum of every stream of every chunk that the trainer does not map. Every step verifies and renews
	// them.
	Sums bool
	// Tier has what the trainer does not map in files, and a window of it in memory. Nil: all of it is in memory.
	Tier *Tier
	// Retracts has a log with which an update can be retracted that was made before it was known whether it counts
	// ([Update.Speculates]). It takes a byte a parameter.
	Retracts bool
	// Observe is called by a worker after each chunk that it has updated and each norm
	// block that it has read, with the time when it began. It may be nil.
	Observe func(worker int, work Work, began time.Time)
}

// Work is what a worker does at a time.
type Work struct {
	Elements shard.Range
	Norm     bool // it adds up the squares of the gradients, else it updates
}

// begin returns when a worker begins its work, if anybody observes it.
func (c *ShardConfig) begin() (began time.Time) {
	if c.Observe != nil {
		began = time.Now()
	}
	return began
}

// observe tells of work that began at a time.
func (c *ShardConfig) observe(worker int, work Work, began time.Time) {
	if c.Observe != nil {
		c.Observe(worker, work, began)
	}
}

// Arenas returns every arena that the shard maps: those of the layout's streams, in
// their order, and then those that no kernel walks. The plan and the shard are made
// from this one list.
func (c ShardConfig) Arenas() []arena.Plan {
	var plans []arena.Plan
	for _, stream := range c.Streams {
		if !c.onTier(stream) {
			plans = append(plans, arenaOf(stream))
		}
	}
	if c.Tier != nil {
		plans = append(plans, c.windowArena())
	}
	blocks := c.normBlocks()
	plans = append(plans, arena.Plan{
		Component: ledger.GradientNormSums,
		Size:      ledger.Bytes(8 * blocks),
		Why: fmt.Sprintf("8 B x %s blocks of %s gradients: float64 sums of squares, "+
			"so that the norm is the same for any number of workers", ledger.Count(blocks), ledger.Count(normBlock)),
	})
	if c.Retracts {
		plans = append(plans, c.retractionArena())
	}
	if c.Journal {
		plans = append(plans, c.journalArena())
	}
	for i := range plans {
		plans[i].Name = path.Join(fmt.Sprintf("rank%d", c.Rank), c.Part, string(plans[i].Component))
	}
	return plans
}

// arenaOf returns the arena of a stream.
func arenaOf(stream shard.Stream) arena.Plan {
	what := fmt.Sprintf("%s parameters", ledger.Count(stream.Parameters))
	if stream.Length != stream.Parameters {
		what = fmt.Sprintf("%s for %s", ledger.Count(stream.Length), what)
	}
	return arena.Plan{
		Component: stream.Arena, Size: ledger.Bytes(stream.Size()),
		Why: fmt.Sprintf("%d B x %s: %s", stream.Type.Size(), what, stream.Why),
	}
}

func (c ShardConfig) normBlocks() int64 { return (c.Elements + normBlock - 1) / normBlock }

func (c ShardConfig) validate() error {
	if c.Layout == nil || c.Elements == 0 {
		return errors.New("a shard without parameters")
	}
	if c.Tier != nil && c.Tier.Lanes < 1 {
		return errors.New("a tier with a window of no chunk")
	}
	if c.Retracts {
		return c.MayRetract()
	}
	return nil
}
