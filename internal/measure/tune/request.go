//go:build linux

// Package tune measures how a host's cores are best divided between the trainer and the optimizer of each rank: the
// speed of updates as a function of their cores, and the time of the trainer as a function of the others.
//
// The search ([Search]) knows nothing of hosts: it asks measuring functions for few points of two curves.
package tune

import (
	"math"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Request is what the user asks for.
type Request struct {
	Ranks []int // numbers of ranks of this host; empty for the usual ones
	// State and Moments are the format that run and serve split the cores for.
	State, Moments string
	Overlap        string
	Parameters     string // as bench.ParseCount reads it; empty for as many as caches cannot hold
	Budget         time.Duration
	ShareOfBest    float64 // that a knee reaches
	Command        []string
	// Program runs the command bound to cores: plimsoll itself.
	Program string
}

// Tuning is a request with everything decided. Nothing was measured yet.
type Tuning struct {
	Request
	Host     *host.Host
	Kernel   kernel.Set
	Elements int64           // parameters of all ranks
	formats  []kernel.Format // the one that the request names first
}

// leastBudget is enough for a few points.
const leastBudget = time.Second

// New decides what to measure. Every error is about the request, or is a bench.DoesNotFit.
func New(r Request, h *host.Host) (*Tuning, error) {
	t := &Tuning{Request: r, Host: h}
	var err error
	switch {
	case r.Budget < leastBudget:
		return nil, fault.Inputf("--budget is %v: expected %v or more", r.Budget, leastBudget)
	case !(r.ShareOfBest > 0 && r.ShareOfBest <= 1):
		return nil, fault.Inputf("--share is %g: expected a share of the best speed, above 0 and up to 1",
			r.ShareOfBest)
	case !slices.Contains(profile.Overlaps, r.Overlap):
		return nil, fault.Inputf("--overlap is %v", fault.Unknown(r.Overlap, profile.Overlaps))
	}
	if t.Kernel, err = kernel.Select(); err != nil {
		return nil, &fault.Input{Err: err}
	}
	if err := t.chooseFormats(); err != nil {
		return nil, err
	}
	if err := t.chooseRanks(); err != nil {
		return nil, err
	}
	return t, t.chooseSize()
}

// chooseRanks refuses numbers of ranks that have no core each. Without a list it is one rank; without a command it is
// also one for each NUMA node, and one for each GPU.
func (t *Tuning) chooseRanks() error {
	cores := len(t.Host.UsableCores())
	if len(t.Ranks) == 0 {
		usual := []int{1}
		if len(t.Command) == 0 {
			usual = append(usual, len(t.nodes()), len(t.Host.GPUs))
		}
		slices.Sort(usual)
		t.Ranks = slices.DeleteFunc(slices.Compact(usual), func(ranks int) bool { return ranks < 1 || ranks > cores })
	}
	for i, ranks := range t.Ranks {
		switch {
		case ranks < 1 || ranks > cores:
			return fault.Inputf("--ranks is %d: expected 1 to %d, one for each usable core", ranks, cores)
		case slices.Contains(t.Ranks[:i], ranks):
			return fault.Inputf("--ranks has %d twice", ranks)
		case len(t.Command) > 0 && len(t.Ranks) > 1:
			return fault.Inputf("--ranks has several numbers, and a command is given").
				WithHint("give the number of ranks that the command is to run with")
		}
	}
	return nil
}

// nodes returns the NUMA nodes of usable cores.
func (t *Tuning) nodes() (nodes []host.NUMANode) {
	for _, node := range t.Host.Nodes {
		if !node.CPUs.Intersection(t.Host.CPUs).IsEmpty() {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// chooseFormats lists all formats of AdamW's state, the request's own first.
func (t *Tuning) chooseFormats() error {
	own, err := kernel.ParseState(t.State)
	if err != nil {
		return fault.Inputf("--state is %v", err)
	}
	moments, err := kernel.ParseMoments(t.Moments)
	if err != nil {
		return fault.Inputf("--moments is %v", err)
	}
	for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
		for _, name := range kernel.MomentNames() {
			m, _ := kernel.ParseMoments(name)
			if state == kernel.Split24 && (state != own || m != moments) {
				continue // only where it is asked for
			}
			f := kernel.Format{Algorithm: kernel.Adam, State: state, Moments: m, Parameter: dtype.BF16,
				Gradient: dtype.BF16}
			if state == own && m == moments {
				t.formats = slices.Insert(t.formats, 0, f)
			} else {
				t.formats = append(t.formats, f)
			}
		}
	}
	return nil
}

// The parameters to update without --parameters: state of twice the size of the caches, in this range.
const (
	fewestElements = 16 << 20
	mostElements   = 256 << 20
)

// chooseSize decides how many parameters to update.
func (t *Tuning) chooseSize() error {
	available, _ := bench.Headroom(t.Host.Memory)
	if t.Parameters != "" {
		var err error
		if t.Elements, err = bench.ParseCount(t.Parameters); err != nil {
			return &fault.Input{What: "--parameters", Err: err, Hint: "for example --parameters 64Mi"}
		}
		return t.fits()
	}
	var caches ledger.Bytes
	for _, cache := range t.Host.Caches {
		caches += cache.Size
	}
	perElement, err := t.needed(fewestElements)
	if err != nil {
		return err
	}
	perElement /= fewestElements
	t.Elements = min(max(int64(2*caches/perElement), fewestElements), mostElements)
	for ; t.Elements > 1<<16; t.Elements /= 2 {
		if needed, err := t.needed(t.Elements); err != nil || needed <= available/2 {
			return err
		}
	}
	return t.fits()
}

// fits returns a bench.DoesNotFit where the host has too little memory for the parameters.
func (t *Tuning) fits() error {
	needed, err := t.needed(t.Elements)
	if err != nil {
		return err
	}
	return bench.Fits(t.Host.Memory, needed, bench.Count(t.Elements)+" parameters need", "give fewer with --parameters")
}

// needed returns the memory of the largest format.
func (t *Tuning) needed(elements int64) (most ledger.Bytes, err error) {
	for _, f := range t.formats {
		config, err := t.shard(f, elements, 0, nil)
		if err != nil {
			return 0, err
		}
		var bytes ledger.Bytes
		for _, a := range config.Arenas() {
			bytes += arena.HugetlbPages.Round(a.Size)
		}
		most = max(most, bytes)
	}
	return most, nil
}

// shard returns the shard of a rank.
func (t *Tuning) shard(f kernel.Format, elements int64, rank int, cpus []int) (engine.ShardConfig, error) {
	layout, err := shard.NewLayout(f, shard.DefaultChunk, shard.Uniform(f, elements))
	if err != nil {
		return engine.ShardConfig{}, &fault.Input{What: "--parameters", Err: err}
	}
	return engine.ShardConfig{Rank: rank, Layout: layout, Kernel: t.Kernel, CPUs: cpus}, nil
}

// coresOf returns the cores of each rank: those of the rank with the fewest, within the CPU quota.
func coresOf(h *host.Host, ranks int) (int, error) {
	plan, err := binding.Split(h, binding.Request{Ranks: ranks})
	if err != nil {
		return 0, err
	}
	least := math.MaxInt
	for _, rank := range plan.Ranks {
		least = min(least, rank.OptimizerCPUs.Size())
	}
	return least, nil
}

// commandLine writes a command as a user would.
func commandLine(command []string) string { return strings.Join(command, " ") }
