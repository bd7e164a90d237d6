//go:build linux

package bench

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Request is a benchmark as a user asks for it.
type Request struct {
	Optimizer    string   // a name of optim.Rules, or "all"
	State        string   // "split", "fp32", "split24" or "all"
	Moments      string   // "fp32", "bf16", "int8" or "all"
	GradientType string   // "bf16", "fp16" or "fp32"
	Parameters   []string // sizes such as "16Mi"; empty for a range from a core's cache to memory
	Workers      []int    // of each rank; empty for two cases: one, and one for each usable core
	Ranks        int      // ranks on this host that share the parameters; 0 where the user names none
	WorldSize    int      // ranks of the whole job; 0 means Ranks
	Rounds       int
	Norm         bool
	Journal      bool
	Checks       bool
	Peer         string // "torch" or "deepspeed"; empty for none
}

// All selects every known value.
const All = "all"

// Suite is a benchmark with everything decided.
type Suite struct {
	Host   *host.Host
	Kernel kernel.Set
	Rounds int
	Norm   bool
	Python string // interpreter of the peer; empty without a peer
	Cases  []Case
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
	ranks, world, err := r.ranks()
	if err != nil {
		return nil, err
	}
	workers, err := r.workers(h, ranks)
	if err != nil {
		return nil, err
	}
	if err := r.checkPeer(names); err != nil {
		return nil, err
	}
	// One worker comes first. Its lines can be compared with each other and with those of another day, while those of
	// several depend on the mode of the memory.
	for _, cpus := range workers {
		of := sizes
		if of == nil {
			of = r.defaultSizes(cpus)
		}
		for i, f := range formats {
			for _, size := range of {
				wanted := job{name: names[i], format: f, parameters: size, world: world, cores: cpus,
					divided: r.divided(), journal: r.Journal, peer: r.Peer}
				c, err := p.newCase(wanted)
				if err != nil {
					return nil, err
				}
				if err := p.fits(wanted, c); err == nil {
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
		for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
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

// Count writes a number of parameters in the form that ParseCount reads. It has a unit where at most six digits are
// left before it: 100Ki, but 3085938688.
func Count(n int64) string {
	i, left := 0, n
	for ; i < len(units)-1 && left != 0 && left%1024 == 0; i++ {
		left /= 1024
	}
	if left >= 1e6 {
		return strconv.FormatInt(n, 10)
	}
	return strconv.FormatInt(left, 10) + units[i]
}

// ranks returns how many ranks are on this host, and how many the whole job has.
func (r Request) ranks() (here, world int, err error) {
	here = cmp.Or(r.Ranks, 1)
	world = cmp.Or(r.WorldSize, here)
	switch {
	case here < 1:
		return 0, 0, fault.Inputf("--ranks is %d: expected at least 1", here)
	case world < here || world > mostRanks:
		return 0, 0, fault.Inputf("--world-size is %d: expected %d, which is --ranks, to %d", world, here, mostRanks)
	case r.WorldSize != 0 && len(r.Parameters) == 0:
		return 0, 0, fault.Inputf("--world-size is %d, but the number of the job's parameters is not given", world).
			WithHint("for example --parameters 3085938688")
	}
	return here, world, nil
}

// divided reports whether the user asks for the step of a job that is divided among ranks.
func (r Request) divided() bool { return r.Ranks != 0 || r.WorldSize != 0 }

// cores is where the workers of a case run.
type cores struct {
	ranks  [][]int // the CPUs of each rank, one for each worker
	shared bool    // a CPU has workers of several ranks
}

func (c cores) all() []int { return slices.Concat(c.ranks...) }

// workers returns the CPUs for each number of workers.
func (r Request) workers(h *host.Host, ranks int) ([]cores, error) {
	plan, err := binding.Split(h, binding.Request{Ranks: ranks})
	if err != nil {
		return nil, err
	}
	var whole cores
	most := 0 // cores of a rank
	for _, rank := range plan.Ranks {
		whole.ranks = append(whole.ranks, rank.OptimizerCPUs.List())
		whole.shared = whole.shared || rank.Shared
		most = max(most, rank.OptimizerCPUs.Size())
	}
	counts := r.Workers
	if len(counts) == 0 {
		counts = []int{1, most}
	}
	var workers []cores
	for _, count := range slices.Compact(slices.Sorted(slices.Values(counts))) { // one worker first
		if count < 1 || count > most {
			return nil, fault.Inputf("--workers is %d: expected 1 to %d, one for each usable core of a rank (CPUs %s)",
				count, most, cpuset.New(whole.all()...)).
				WithHint("leave --workers out to measure one worker, and then one on each core")
		}
		some := cores{shared: whole.shared}
		for _, rank := range plan.Ranks {
			some.ranks = append(some.ranks, rank.Workers(h, count))
		}
		workers = append(workers, some)
	}
	return workers, nil
}

// chooseChecked selects the case to check: the largest size of the first format, with all workers. Its chunks take
// longest.
func (p *Suite) chooseChecked() {
	best := -1
	for i, c := range p.Cases {
		if c.Name == p.Cases[0].Name && c.Format() == p.Cases[0].Format() && !c.InCore &&
			(best < 0 || c.Held >= p.Cases[best].Held) {
			best = i
		}
	}
	if best >= 0 {
		p.Cases[best].Checks = true
	}
}
