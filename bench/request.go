package bench

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"

	"plimsoll/arena"
	"plimsoll/binding"
	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/ledger"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
)

// Request is a benchmark as a user asks for it.
type Request struct {
	Optimizer    string   // a name of optim.Rules, or "all"
	State        string   // "split", "fp32" or "all"
	Moments      string   // "fp32", "bf16", "int8" or "all"
	GradientType string   // "bf16", "fp16" or "fp32"
	Parameters   []string // sizes such as "16Mi"; empty for a range from a core's cache to memory
	Workers      []int    // empty for two cases: one worker, and one for each usable core
	Rounds       int
	Norm         bool
	Journal      bool
	Checks       bool
	Peer         string // "torch" or "deepspeed"; empty for none
}

// All selects every known value.
const All = "all"

// Case is one measurement: a format, a size and a number of workers.
type Case struct {
	Name      string // of the optimizer
	Optimizer optim.Optimizer
	Shard     engine.ShardConfig
	// InCore reports whether every worker's streams stay in the cache of its core.
	InCore bool
	// Place is the nearest memory that holds all streams: "L2", "L3" or "DRAM".
	Place  string
	Peer   string // measured in the same rounds; empty for none
	Checks bool   // also look for stops of the world and slow numbers
	// Needed is the host memory that the case takes.
	Needed ledger.Bytes
}

func (c Case) String() string {
	workers := "1 worker"
	if n := len(c.Shard.CPUs); n > 1 {
		workers = fmt.Sprintf("%d workers", n)
	}
	return fmt.Sprintf("%s, state %v, moments %v, %s parameters, %s", c.Name, c.Shard.Format.State,
		c.Shard.Format.Moments, Count(c.Shard.Elements), workers)
}

// Suite is a benchmark with everything decided.
type Suite struct {
	Host   *host.Host
	Kernel kernel.Set
	Rounds int
	Norm   bool
	Python string // interpreter of the peer; empty without a peer
	Cases  []Case
}

// DoesNotFit is the error for a case that needs more memory than the host has.
type DoesNotFit struct {
	Case              Case
	Needed, Available ledger.Bytes
	LimitedBy         string
}

func (e *DoesNotFit) Error() string {
	return fmt.Sprintf("DOES NOT FIT: %v needs %v, %v is left (%s)\n  hint: give smaller sizes with --parameters",
		e.Case, e.Needed, e.Available, e.LimitedBy)
}

// NewSuite decides what to measure where. Every error is about the request, or is a DoesNotFit.
func NewSuite(r Request, h *host.Host) (*Suite, error) {
	if r.Rounds < 1 {
		return nil, fault.Inputf("--rounds is %d: expected at least 1", r.Rounds)
	}
	p := &Suite{Host: h, Rounds: r.Rounds, Norm: r.Norm}
	var err error
	if p.Kernel, err = kernel.Select(); err != nil {
		return nil, &fault.Input{Err: err}
	}
	names, formats, err := r.formats()
	if err != nil {
		return nil, err
	}
	sizes, err := r.sizes()
	if err != nil {
		return nil, err
	}
	workers, err := r.workers(h)
	if err != nil {
		return nil, err
	}
	if err := r.checkPeer(names); err != nil {
		return nil, err
	}
	for i, f := range formats {
		for _, cpus := range workers {
			of := sizes
			if of == nil {
				of = defaultSizes(len(cpus))
			}
			for _, size := range of {
				c, err := newCase(names[i], f, size, cpus, r.Journal, p.Kernel, h)
				if err != nil {
					return nil, err
				}
				if c.Name == peerOptimizer && !c.InCore {
					c.Peer = r.Peer
				}
				c.Needed += c.peerBytes()
				if err := p.fits(c); err == nil {
					p.Cases = append(p.Cases, c)
				} else if sizes != nil {
					return nil, err
				}
			}
		}
	}
	if r.Checks {
		p.chooseChecked()
	}
	if r.Peer != "" {
		p.Python, err = findPeer(r.Peer)
	}
	return p, err
}

// formats returns the names of the optimizers and the formats to measure them with.
func (r Request) formats() (names []string, formats []kernel.Format, err error) {
	chosen, err := choose("--optimizer", r.Optimizer, optim.RuleNames())
	if err != nil {
		return nil, nil, err
	}
	states, err := choose("--state", r.State, kernel.StateNames())
	if err != nil {
		return nil, nil, err
	}
	moments, err := choose("--moments", r.Moments, kernel.MomentNames())
	if err != nil {
		return nil, nil, err
	}
	gradient, err := kernel.ParseNumberTypeAlias(r.GradientType)
	if err != nil {
		return nil, nil, fault.Inputf("--grad-dtype is %v", err)
	}
	for _, rule := range optim.Rules {
		if !slices.Contains(chosen, rule.Name) {
			continue
		}
		for _, state := range []kernel.State{kernel.Split, kernel.FP32} {
			for _, name := range moments {
				moment, _ := kernel.ParseMoments(name)
				if slices.Contains(states, state.String()) && moment.Suits(rule.Algorithm()) {
					names = append(names, rule.Name)
					formats = append(formats, kernel.Format{Algorithm: rule.Algorithm(), State: state,
						Moments: moment, Parameter: dtype.BF16, Gradient: gradient})
				}
			}
		}
	}
	if len(formats) == 0 {
		return nil, nil, fault.Inputf("--moments %s is for adam and adamw, but --optimizer is %s",
			r.Moments, r.Optimizer).WithHint("--moments bf16")
	}
	return names, formats, nil
}

// choose returns the requested value alone, or all known values.
func choose(flag, value string, known []string) ([]string, error) {
	if value == All {
		return known, nil
	}
	if slices.Contains(known, value) {
		return []string{value}, nil
	}
	return nil, fault.Inputf("%s is %v", flag, fault.Unknown(value, append(slices.Clone(known), All)))
}

func (r Request) sizes() ([]int64, error) {
	var sizes []int64
	for _, text := range r.Parameters {
		size, err := ParseCount(text)
		if err != nil {
			return nil, &fault.Input{What: "--parameters", Err: err, Hint: "for example --parameters 16Mi,256Mi"}
		}
		sizes = append(sizes, size)
	}
	return sizes, nil
}

var units = []string{"", "Ki", "Mi", "Gi"}

// ParseCount reads a number of parameters: digits, and Ki, Mi or Gi for 2^10, 2^20 or 2^30.
func ParseCount(text string) (int64, error) {
	parts := regexp.MustCompile(`^([0-9]+)([KMG]i)?$`).FindStringSubmatch(text)
	if parts == nil {
		return 0, fmt.Errorf("%q is no number of parameters: expected digits, with or without Ki, Mi or Gi", text)
	}
	unit := int64(1) << (10 * slices.Index(units, parts[2]))
	n, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || n < 1 || n > shard.MaxElements/unit {
		return 0, fmt.Errorf("%q parameters: expected 1 to %s", text, Count(shard.MaxElements))
	}
	return n * unit, nil
}

// Count writes a number of parameters in the form that ParseCount reads.
func Count(n int64) string {
	i := 0
	for ; i < len(units)-1 && n != 0 && n%1024 == 0; i++ {
		n /= 1024
	}
	return strconv.FormatInt(n, 10) + units[i]
}

// workers returns the CPUs for each number of workers.
func (r Request) workers(h *host.Host) ([][]int, error) {
	plan, err := binding.Split(h, binding.Request{Ranks: 1})
	if err != nil {
		return nil, err
	}
	cpus := plan.Ranks[0].OptimizerCPUs.List()
	counts := r.Workers
	if len(counts) == 0 {
		counts = slices.Compact([]int{1, len(cpus)})
	}
	var workers [][]int
	for _, count := range counts {
		if count < 1 || count > len(cpus) {
			return nil, fault.Inputf("--workers is %d: expected 1 to %d, one for each usable core (CPUs %s)", count,
				len(cpus), plan.Ranks[0].OptimizerCPUs).
				WithHint("leave --workers out to measure one worker, and then one on each core")
		}
		workers = append(workers, cpus[:count])
	}
	return workers, nil
}

// corePart is a number of parameters per worker. Its streams, at most 18 bytes a parameter, fit the L2 cache of a
// core: 512 KiB or more on every server processor since 2017.
const corePart = 16 << 10

// defaultSizes returns sizes from a core's cache to memory, far beyond the caches that all cores share.
func defaultSizes(workers int) []int64 {
	return []int64{int64(workers) * corePart, 16 << 20, 256 << 20}
}

func newCase(
	name string, f kernel.Format, size int64, cpus []int, journal bool, set kernel.Set, h *host.Host,
) (Case, error) {
	c := Case{Name: name, InCore: size <= int64(len(cpus))*corePart}
	rule, err := optim.ParseRule(name)
	if err != nil {
		return c, err
	}
	c.Optimizer = rule.Typical
	chunk := int64(shard.DefaultChunk)
	if c.InCore {
		// One chunk for each worker, in whole blocks of the kernels.
		part := (size + int64(len(cpus)) - 1) / int64(len(cpus))
		chunk = (part + kernel.Block - 1) / kernel.Block * kernel.Block
	}
	layout, err := shard.NewLayout(f, chunk, shard.Uniform(f, size))
	if err != nil {
		return c, err
	}
	c.Shard = engine.ShardConfig{Layout: layout, Kernel: set, CPUs: cpus, Journal: journal && !c.InCore}
	c.Shard.Pages = engine.ChoosePages(h, []engine.ShardConfig{c.Shard})
	c.Place = place(h, c)
	if c.Shard.Pages != arena.HugetlbPages { // the pool of huge pages serves arenas only
		tables := ledger.Bytes(1)
		if c.Shard.Journal {
			tables = 2 // the arenas are mapped a second time, without the undo log
		}
		for _, a := range c.Shard.Arenas() {
			mapped := c.Shard.Pages.Round(a.Size)
			c.Needed += mapped + tables*8*(mapped/c.Shard.Pages.Size())
		}
	}
	return c, nil
}

// place returns the nearest memory that holds all streams of a case.
func place(h *host.Host, c Case) string {
	if c.InCore {
		return "L2"
	}
	var size ledger.Bytes
	for _, cache := range h.Caches {
		if slices.ContainsFunc(c.Shard.CPUs, cache.CPUs.Contains) {
			size += cache.Size
			if c.Shard.StateBytes() <= size {
				return fmt.Sprintf("L%d", cache.Level)
			}
		}
	}
	return "DRAM"
}

func (p *Suite) fits(c Case) error {
	available, counter := p.Host.Memory.Headroom()
	if counter == "" {
		available = math.MaxInt64 // unknown
	}
	if c.Needed > available {
		return &DoesNotFit{Case: c, Needed: c.Needed, Available: available, LimitedBy: counter}
	}
	return nil
}

// chooseChecked selects the case to check: the largest size of the first format, with all workers. Its chunks take
// longest.
func (p *Suite) chooseChecked() {
	best := -1
	for i, c := range p.Cases {
		if c.Name == p.Cases[0].Name && c.Shard.Format == p.Cases[0].Shard.Format && !c.InCore &&
			(best < 0 || c.Shard.Elements >= p.Cases[best].Shard.Elements) {
			best = i
		}
	}
	if best >= 0 {
		p.Cases[best].Checks = true
	}
}
