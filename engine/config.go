package engine

import (
	"cmp"
	"fmt"
	"path"
	"slices"

	"plimsoll/arena"
	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// DefaultChunk is the number of elements that a worker takes at a time. Updating a
// chunk takes some tens of microseconds: little beside a stop of the world, which
// has to wait for it, and much beside the work of taking the chunk.
const DefaultChunk = 64 << 10

// normBlock is the number of gradient elements whose squares make one sum. It is
// independent of the chunk size, so that the norm depends on the gradients alone.
const normBlock = 64 << 10

// ShardConfig says what one rank holds.
type ShardConfig struct {
	Rank int
	// Part tells the shards of a rank apart in the names of their arenas. It is
	// empty if the rank has one shard.
	Part     string
	Elements int64 // of the rank's range of the flat parameters
	// Sections are the ranges of the shard, in order, that differ in their
	// parameter group or in the type of their moments. They add up to Elements.
	// nil is one section of group 0 in the Format.
	Sections []Section
	Format   kernel.Format // of the shard; sections may have other moments
	Kernel   kernel.Set
	Pages    arena.Pages
	CPUs     []int // one worker on each
	// Chunk is the number of elements that a worker takes at a time; 0 is
	// DefaultChunk. Chunks of int8 moments are rounded up to full blocks.
	Chunk int
	// Journal lets another process finish a step that this process has begun.
	// It costs an arena, and some time of every step.
	Journal bool
}

// Section is a range of a shard.
type Section struct {
	Elements int64
	Group    int // number of the parameter group
	Moments  kernel.MomentType
}

// ArenaPlan is an arena before it is mapped.
type ArenaPlan struct {
	Name      string // of the arena
	Component ledger.Component
	Size      ledger.Bytes
	Why       string

	role     kernel.Role
	elements dtype.Type
	moments  kernel.MomentType // of the sections that the arena is for, if it holds moments
}

// The roles of arenas that no kernel walks.
const (
	normRole    = kernel.Role(255 - iota) // the sums of squares
	journalRole                           // the journal
)

// Arenas returns every arena that the shard maps. The plan and the shard are made
// from this one list.
func (c ShardConfig) Arenas() []ArenaPlan {
	var plans []ArenaPlan
	for _, stream := range c.Format.Streams() {
		switch stream.Role {
		case kernel.FirstMomentRole:
			for _, moments := range c.momentTypes() {
				plans = append(plans, c.momentArenas(moments)...)
			}
		case kernel.SecondMomentRole, kernel.HeaderRole: // with the first
		default:
			plans = append(plans, arenaOf(stream, stream.Bytes(c.Elements), c.Elements))
		}
	}
	blocks := c.normBlocks()
	plans = append(plans, ArenaPlan{
		Component: ledger.GradientNormSums,
		role:      normRole,
		Size:      ledger.Bytes(8 * blocks),
		Why: fmt.Sprintf("8 B x %s blocks of %s gradients: float64 sums of squares, "+
			"so that the norm is the same for any number of workers", ledger.Count(blocks), ledger.Count(normBlock)),
	})
	if c.Journal {
		plans = append(plans, c.journalArena())
	}
	for i := range plans {
		plans[i].Name = path.Join(fmt.Sprintf("rank%d", c.Rank), c.Part, string(plans[i].Component))
	}
	return plans
}

// momentTypes returns the types of the sections' moments. The type of the shard's
// format is first.
func (c ShardConfig) momentTypes() []kernel.MomentType {
	var types []kernel.MomentType
	for _, moments := range []kernel.MomentType{
		c.Format.Moments, kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8,
	} {
		held := func(s Section) bool { return s.Moments == moments && s.Elements > 0 }
		if slices.ContainsFunc(c.sections(), held) && !slices.Contains(types, moments) {
			types = append(types, moments)
		}
	}
	return types
}

// momentArenas returns the arenas of one type of moments. They hold the moments of
// all sections of that type, one after the other.
func (c ShardConfig) momentArenas(moments kernel.MomentType) []ArenaPlan {
	format := c.Format
	format.Moments = moments
	var plans []ArenaPlan
	for _, stream := range format.MomentStreams() {
		var bytes, elements int64
		for _, s := range c.sections() {
			if s.Moments == moments {
				bytes += stream.Bytes(s.Elements)
				elements += s.Elements
			}
		}
		plan := arenaOf(stream, bytes, elements)
		plan.moments = moments
		if moments != c.Format.Moments {
			plan.Component = plan.Component.InType(moments.String())
		}
		plans = append(plans, plan)
	}
	return plans
}

// arenaOf returns the arena of a stream of a number of bytes and parameters.
func arenaOf(stream kernel.Stream, bytes, parameters int64) ArenaPlan {
	what := fmt.Sprintf("%s parameters", ledger.Count(parameters))
	if numbers := bytes / stream.Type.Size(); numbers != parameters {
		what = fmt.Sprintf("%s for %s", ledger.Count(numbers), what)
	}
	return ArenaPlan{
		Component: stream.Component, role: stream.Role, elements: stream.Type, Size: ledger.Bytes(bytes),
		Why: fmt.Sprintf("%d B x %s: %s", stream.Type.Size(), what, stream.Why),
	}
}

func (c ShardConfig) normBlocks() int64 { return (c.Elements + normBlock - 1) / normBlock }

// sections returns the sections of the configuration. Without any, it returns the
// one that nil stands for.
func (c ShardConfig) sections() []Section {
	if c.Sections == nil {
		return []Section{{Elements: c.Elements, Moments: c.Format.Moments}}
	}
	return c.Sections
}

// formatOf returns the format of a section.
func (c ShardConfig) formatOf(s Section) kernel.Format {
	f := c.Format
	f.Moments = s.Moments
	return f
}

// groups returns the number of parameter groups.
func (c ShardConfig) groups() int {
	groups := 0
	for _, s := range c.sections() {
		if s.Elements > 0 {
			groups = max(groups, s.Group+1)
		}
	}
	return groups
}

// chunkOf returns the number of elements of a chunk of a section.
func (c ShardConfig) chunkOf(s Section) int {
	size := cmp.Or(c.Chunk, DefaultChunk)
	if s.Moments == kernel.MomentsInt8 {
		size = (size + kernel.Block - 1) / kernel.Block * kernel.Block
	}
	return size
}

// chunks returns the number of chunks of all sections.
func (c ShardConfig) chunks() int64 {
	var chunks int64
	for _, s := range c.sections() {
		size := int64(c.chunkOf(s))
		chunks += s.Elements/size + (s.Elements%size+size-1)/size
	}
	return chunks
}

// StateBytes returns the size of all streams.
func (c ShardConfig) StateBytes() ledger.Bytes {
	return c.sum(kernel.Format.ResidentBytes)
}

// TrafficBytes returns how many bytes an update reads and writes, added up.
func (c ShardConfig) TrafficBytes() ledger.Bytes {
	return c.sum(kernel.Format.TrafficBytes)
}

func (c ShardConfig) sum(of func(f kernel.Format, parameters int64) int64) ledger.Bytes {
	var sum ledger.Bytes
	for _, s := range c.sections() {
		sum += ledger.Bytes(of(c.formatOf(s), s.Elements))
	}
	return sum
}

func (c ShardConfig) validate() error {
	if c.Elements <= 0 {
		return fmt.Errorf("rank %d: %d parameters", c.Rank, c.Elements)
	}
	if c.Chunk < 0 {
		return fmt.Errorf("rank %d: chunks of %d parameters", c.Rank, c.Chunk)
	}
	left := c.Elements
	for i, s := range c.sections() {
		if s.Elements < 0 || s.Elements > left || s.Group < 0 {
			return fmt.Errorf("rank %d: section %d is %d parameters of group %d, and %d are left",
				c.Rank, i, s.Elements, s.Group, left)
		}
		left -= s.Elements
		if err := c.formatOf(s).Validate(); err != nil {
			return err
		}
	}
	if left != 0 {
		return fmt.Errorf("rank %d: the sections lack %d parameters of %d", c.Rank, left, c.Elements)
	}
	return c.Format.Validate()
}
