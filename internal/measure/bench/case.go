//go:build linux

package bench

import (
	"fmt"
	"math"
	"slices"
	"sort"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Case is one measurement: a format, a size and a number of workers.
type Case struct {
	Name      string // of the optimizer
	Optimizer optim.Optimizer
	Shards    []engine.ShardConfig // of the ranks on this host
	// Parameters are those of the whole job, which has WorldSize ranks. Held are those of the ranks on this host.
	Parameters, Held int64
	WorldSize        int
	// Divided reports that the time of the job's step was asked for. SharedCores: ranks take turns on a core.
	Divided, SharedCores bool
	// InCore reports whether every worker's streams stay in the cache of its core.
	InCore bool
	// Place is the nearest memory that holds all streams: "L2", "L3" or "DRAM".
	Place     string
	Peer      string // measured in the same rounds; empty for none
	Journaled bool   // also measure updates with an undo log
	Checks    bool   // also look for stops of the world and slow numbers
	// Needed is the host memory that the case takes.
	Needed ledger.Bytes
}

// Format returns the format of all shards.
func (c Case) Format() kernel.Format { return c.Shards[0].Format }

// Pages returns the kind of the memory's pages.
func (c Case) Pages() arena.Pages { return c.Shards[0].Pages }

// CPUs returns the CPU of each worker.
func (c Case) CPUs() []int {
	var cpus []int
	for _, s := range c.Shards {
		cpus = append(cpus, s.CPUs...)
	}
	return cpus
}

// StateBytes returns the size of all streams.
func (c Case) StateBytes() ledger.Bytes {
	var sum ledger.Bytes
	for _, s := range c.Shards {
		sum += s.StateBytes()
	}
	return sum
}

// TrafficBytes returns how many bytes an update reads and writes.
func (c Case) TrafficBytes() ledger.Bytes {
	var sum ledger.Bytes
	for _, s := range c.Shards {
		sum += s.TrafficBytes()
	}
	return sum
}

// Scale is what the times of the ranks on this host are multiplied by, for the time in which this host would update
// all parameters of the job.
func (c Case) Scale() float64 { return float64(c.Parameters) / float64(c.Held) }

func (c Case) String() string {
	size := Count(c.Held) + " parameters"
	if c.Held != c.Parameters {
		size = fmt.Sprintf("%s of %s parameters", Count(c.Held), Count(c.Parameters))
	}
	ranks := ""
	if c.Divided {
		ranks = ledger.Plural(len(c.Shards), "rank") + ", "
	}
	return fmt.Sprintf("%s, state %v, moments %v, %s, %s%s", c.Name, c.Format().State, c.Format().Moments, size, ranks,
		ledger.Plural(len(c.CPUs()), "worker"))
}

// DoesNotFit is the error for what needs more memory than the host has.
type DoesNotFit struct {
	What              string // with its verb: "64Mi parameters need"
	Needed, Available ledger.Bytes
	LimitedBy         string
	Hint              string
	// WorldSize is the least number of ranks among which the job must be divided for the ranks on this host to fit. 0
	// where none is enough.
	WorldSize int
}

func (e *DoesNotFit) Error() string {
	return fmt.Sprintf("DOES NOT FIT: %s %v, %v is left (%s)\n  hint: %s",
		e.What, e.Needed, e.Available, e.LimitedBy, e.Hint)
}

// Fits returns a DoesNotFit where a host has too little memory.
func Fits(m host.Memory, needed ledger.Bytes, what, hint string) error {
	available, counter := Headroom(m)
	if needed <= available {
		return nil
	}
	return &DoesNotFit{What: what, Needed: needed, Available: available, LimitedBy: counter, Hint: hint}
}

// Headroom returns the memory that is left, and what limits it. Where that is unknown, all fits.
func Headroom(m host.Memory) (ledger.Bytes, string) {
	available, counter := m.Headroom()
	if counter == "" {
		available = math.MaxInt64
	}
	return available, counter
}

// mostRanks is more than any job has. It bounds the list of their parts.
const mostRanks = 1 << 16

// corePart is a number of parameters per worker. Its streams, at most 18 bytes a parameter, fit the L2 cache of a
// core: 512 KiB or more on every server processor since 2017.
const corePart = 16 << 10

// defaultSizes returns sizes from a core's cache to memory, far beyond the caches that all cores share. Steps of a
// divided job say nothing about a core's cache.
func (r Request) defaultSizes(c cores) []int64 {
	sizes := []int64{int64(len(c.all())) * corePart, 16 << 20, 256 << 20}
	if r.divided() {
		return sizes[1:]
	}
	return sizes
}

// job is what a case shall measure.
type job struct {
	name       string // of the optimizer
	format     kernel.Format
	parameters int64
	world      int // ranks of the whole job, the first of which are on this host
	cores      cores
	divided    bool
	journal    bool
	peer       string
}

func (p *Suite) newCase(j job) (Case, error) {
	cpus := j.cores.all()
	c := Case{
		Name: j.name, Parameters: j.parameters, WorldSize: j.world, Divided: j.divided, SharedCores: j.cores.shared,
		InCore: j.parameters <= int64(len(cpus))*corePart && !j.divided,
	}
	c.Journaled = j.journal && !c.InCore
	rule, err := optim.ParseRule(j.name)
	if err != nil {
		return c, err
	}
	c.Optimizer = rule.Typical
	if c.Name == peerOptimizer && !c.InCore {
		c.Peer = j.peer
	}
	if err := p.lay(&c, j); err != nil {
		return c, err
	}
	place := placeOf(p.Host, cpus, c.StateBytes())
	c.Place = place
	if c.InCore {
		c.Place = "L2"
	}
	all := ledger.Bytes(float64(c.StateBytes()) * c.Scale())
	if whole := placeOf(p.Host, cpus, all); whole != place {
		return c, fault.Inputf("--world-size is %d: the parts of this host fit %s, and all %s parameters fit only %s: "+
			"their time says nothing about all", j.world, place, Count(j.parameters), whole).
			WithHint("a smaller --world-size")
	}
	c.Needed = c.arenaBytes() + c.peerBytes()
	return c, nil
}

// lay lays out the shards of the ranks on this host.
func (p *Suite) lay(c *Case, j job) error {
	parts, err := shard.ZeRO(j.parameters, j.world)
	if err != nil {
		return err
	}
	for rank, cpus := range j.cores.ranks {
		elements := parts[rank].Count
		if elements == 0 {
			return fault.Inputf("--parameters %s: there are none for rank %d of %d", Count(j.parameters), rank,
				j.world).WithHint("fewer ranks")
		}
		chunk := int64(shard.DefaultChunk)
		if c.InCore {
			// One chunk for each worker, in whole blocks of the kernels.
			part := (elements + int64(len(cpus)) - 1) / int64(len(cpus))
			chunk = (part + kernel.Block - 1) / kernel.Block * kernel.Block
		}
		layout, err := shard.NewLayout(j.format, chunk, shard.Uniform(j.format, elements))
		if err != nil {
			return err
		}
		c.Held += elements
		c.Shards = append(c.Shards, engine.ShardConfig{Rank: rank, Layout: layout, Kernel: p.Kernel, CPUs: cpus})
	}
	pages := engine.ChoosePages(p.Host, engine.ArenasOf(c.Shards))
	for i := range c.Shards {
		c.Shards[i].Pages = pages
	}
	return nil
}

// arenaBytes returns the memory of the arenas and of their page tables.
func (c Case) arenaBytes() (sum ledger.Bytes) {
	if c.Pages() == arena.HugetlbPages { // the pool of huge pages serves arenas only
		return 0
	}
	for _, s := range c.Shards {
		for _, a := range s.Arenas() {
			mapped := s.Pages.Round(a.Size)
			sum += mapped + 8*(mapped/s.Pages.Size())
		}
	}
	return sum
}

// placeOf returns the nearest memory of some CPUs that holds a number of bytes.
func placeOf(h *host.Host, cpus []int, bytes ledger.Bytes) string {
	var size ledger.Bytes
	for _, cache := range h.Caches {
		if slices.ContainsFunc(cpus, cache.CPUs.Contains) {
			size += cache.Size
			if bytes <= size {
				return fmt.Sprintf("L%d", cache.Level)
			}
		}
	}
	return "DRAM"
}

// fits returns a DoesNotFit where the host has too little memory for a case.
func (p *Suite) fits(j job, c Case) error {
	available, counter := Headroom(p.Host.Memory)
	if c.Needed <= available {
		return nil
	}
	// Smaller parts that have no meaning are errors of newCase.
	of := func(world int) (Case, error) {
		j.world = world
		return p.newCase(j)
	}
	world := sort.Search(mostRanks, func(world int) bool {
		if world <= c.WorldSize {
			return false
		}
		smaller, err := of(world)
		return err != nil || smaller.Needed <= available
	})
	hint := "give smaller sizes with --parameters"
	if smaller, err := of(world); err != nil || smaller.Needed > available {
		world = 0
	} else if world > 0 {
		hint += fmt.Sprintf(", or measure %d of %d parts and see how long all would take: "+
			"--ranks %[1]d --world-size %[2]d", len(c.Shards), world)
	}
	return &DoesNotFit{c.String() + " needs", c.Needed, available, counter, hint, world}
}
