//go:build linux

package launch

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// Request is a job as the user asks for it.
type Request struct {
	Command []string
	// Ranks is how many ranks to start here. 0 means the one that another launcher gave
	// a place, or one.
	Ranks int
	// CopyOutput is that of Job.
	CopyOutput bool
	// Binding says how to bind the ranks, but not how many there are.
	Binding binding.Request
	// TrainerCores replaces the trainer's share in Binding, once the number of ranks of
	// this host is known. It says why that is the share, and whether the user should read
	// it. It may be nil.
	TrainerCores TrainerCores
	// Peers finds the ranks of this host if their launcher does not say what it gave to
	// each: the function [Peers], or nil.
	Peers func(*Placement, Environment) []Peer
	// LauncherVariable returns a variable of the launcher's own environment: the
	// function [LauncherVariable], or nil.
	LauncherVariable func(p *Placement, name string, environment Environment) (value string, known bool)
}

// TrainerCores returns the trainer's share of the cores of each of so many ranks.
type TrainerCores func(h *host.Host, ranks int) (share binding.TrainerShare, why string, noted bool)

// Launch is what to start, and why.
type Launch struct {
	// Placement is nil if no other launcher started this process.
	Placement *Placement
	// Bound are the bindings of the ranks that are started here.
	Bound []binding.Rank
	Ranks []Rank
	// Variables are what each rank gets beside the environment of this process.
	Variables [][]string
	Notes     []string
	// Split says why the trainer has its share of the cores.
	Split string

	copyOutput   bool
	trainerCores TrainerCores
}

// NewLaunch decides what each rank gets. The environment is a list of NAME=VALUE.
func NewLaunch(h *host.Host, r Request, environment []string) (*Launch, error) {
	lookup := lookupIn(environment)
	if len(r.Command) == 0 {
		return nil, fault.Inputf("there is no command to run").WithHint("plimsoll run --nproc 2 -- python train.py")
	}
	if r.Ranks < 0 {
		return nil, fault.Inputf("--nproc is %d: expected 1 or more", r.Ranks)
	}
	placement, peers, err := r.place(h, lookup)
	if err != nil {
		return nil, err
	}
	p := &Launch{Placement: placement, copyOutput: r.CopyOutput, trainerCores: r.TrainerCores,
		Split: fmt.Sprintf("the program has %v of each rank's cores", r.Binding.TrainerCores)}
	inner := innerLauncher(r.Command)
	if inner != "" && r.Binding.MemoryPolicy == "" {
		// Each rank gets its memory near its own CPUs, not in turn on the nodes of all
		// ranks.
		r.Binding.MemoryPolicy = binding.PolicyDefault
	}
	if inner != "" {
		p.trainerCores = nil // nobody knows how many ranks there will be
	}
	if r.Binding.GPUs == nil {
		p.findGPUs(h, &r.Binding, max(1, r.Ranks), peers, lookup)
	}
	if err := p.bind(h, r, inner); err != nil {
		return nil, err
	}
	port := ""
	if inner == "" {
		if port, err = p.masterPort(lookup); err != nil {
			return nil, err
		}
	} else {
		p.noteInner(inner, lookup)
	}
	ownThreads := p.torchrunSetThreads(r, lookup)
	for i, bound := range p.Bound {
		rank := Rank{Number: i, CPUs: bound.TrainerCPUs, NUMANodes: bound.NUMANodes, MemoryPolicy: bound.MemoryPolicy}
		if placement != nil {
			rank.Number = placement.Rank
		}
		variables := p.variables(h, bound, i, inner, port, lookup)
		if inner == "" {
			variables = append(variables, p.threads(bound, ownThreads, lookup)...)
		}
		rank.Environment = append(slices.Clone(environment), variables...)
		p.Ranks, p.Variables = append(p.Ranks, rank), append(p.Variables, variables)
	}
	return p, nil
}

// lookupIn looks variables up as a program would: the last value counts.
func lookupIn(environment []string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, entry := range slices.Backward(environment) {
			if value, ok := strings.CutPrefix(entry, name+"="); ok {
				return value, true
			}
		}
		return "", false
	}
}

// place finds out which rank a launcher has started this process as, nil for none, and which are beside it.
func (r Request) place(h *host.Host, lookup func(string) (string, bool)) (*Placement, []Peer, error) {
	placement, err := FindPlacement(lookup)
	if err != nil || placement == nil {
		return nil, nil, err
	}
	if placement.WorldSize == 1 && r.Ranks > 1 {
		return nil, nil, nil // the only process of its job starts the ranks itself
	}
	var peers []Peer
	if r.Peers != nil && (placement.Masks == nil || visibleGPUs(h, lookup).variable != "") {
		peers = r.Peers(placement, lookup)
	}
	if placement.Masks == nil {
		for _, peer := range peers {
			placement.Masks = append(placement.Masks, peer.Mask)
		}
	}
	return placement, peers, nil
}

// bind gives each rank its cores. inner is a launcher in the command, "" for none.
func (p *Launch) bind(h *host.Host, r Request, inner string) (err error) {
	switch {
	case p.Placement != nil && r.Ranks > 1:
		return fault.Inputf("--nproc is %d, but %s has started this process as rank %d of %d", r.Ranks,
			p.Placement.Launcher, p.Placement.Rank, p.Placement.WorldSize).
			WithHint("leave --nproc out, and have " + p.Placement.Launcher + " start the ranks")
	case inner != "" && r.Ranks > 1:
		return fault.Inputf("--nproc is %d, but %s starts ranks itself", r.Ranks, inner).
			WithHint("give the number of ranks to " + inner + " alone")
	case p.Placement != nil:
		err = p.takePlace(h, r.Binding)
	default:
		err = p.divide(h, r.Binding, max(1, r.Ranks), 0)
	}
	if err != nil {
		return err
	}
	if slices.ContainsFunc(p.Bound, func(r binding.Rank) bool { return r.TrainerCPUs.IsEmpty() }) {
		return fault.Inputf("--trainer-cores %v leaves no CPU to the program", r.Binding.TrainerCores).
			WithHint("give the trainer a core or more, or leave --trainer-cores out")
	}
	return nil
}

// noteInner says what a launcher in the command does, which starts the ranks.
func (p *Launch) noteInner(inner string, lookup func(string) (string, bool)) {
	p.Notes = append(p.Notes, fmt.Sprintf("%s starts the ranks: they share these CPUs, and get their "+
		"variables from it", inner))
	if _, set := lookup(threadsVariable); !set && slices.Contains(torchruns, inner) {
		p.Notes = append(p.Notes, fmt.Sprintf("with several ranks, %s sets %s=1 unless it is set; set it to %d "+
			"divided by the number of ranks", inner, threadsVariable, p.Bound[0].OMPNumThreads))
	}
}

// StateCPUs returns the CPUs of the optimizer service: those that the ranks started
// here leave to it, or else all CPUs of these ranks.
func (p *Launch) StateCPUs() cpuset.CPUSet {
	left, own := cpuset.New(), cpuset.New()
	for _, bound := range p.Bound {
		left, own = left.Union(bound.OptimizerCPUs), own.Union(bound.TrainerCPUs)
	}
	if left.IsEmpty() {
		return own
	}
	return left
}

// divide binds the ranks that are started here: all ranks of this host or, if another
// launcher started this process, the rank own.
func (p *Launch) divide(h *host.Host, request binding.Request, ranks, own int) error {
	request.Ranks = ranks
	if p.trainerCores != nil {
		var noted bool
		if request.TrainerCores, p.Split, noted = p.trainerCores(h, ranks); noted {
			p.Notes = append(p.Notes, p.Split)
		}
	}
	if request.GPUs == nil {
		request.GPUs = binding.GPUsInOrder(h, ranks)
	}
	plan, err := binding.Split(h, request)
	if err != nil {
		return err
	}
	first, last := 0, ranks
	if p.Placement != nil {
		first, last = own, own+1
	}
	p.noteShared(h, plan.Ranks, first, last)
	p.Bound = plan.Ranks[first:last]
	return nil
}

// takePlace binds the one rank that another launcher started, within its share of what
// the ranks of this host have in common.
func (p *Launch) takePlace(h *host.Host, request binding.Request) error {
	place := p.Placement
	ranks, own := place.LocalWorldSize, place.LocalRank
	switch {
	case place.Masks != nil && place.Masks[own].Intersection(h.Online).Equals(h.CPUs):
		request.Peers = place.Masks
	case place.Masks != nil:
		p.Notes = append(p.Notes, fmt.Sprintf("%s gave this rank CPUs %s, but it now has %s: another program has "+
			"bound it since", place.Launcher, place.Masks[own], h.CPUs))
		ranks, own = 1, 0
	case place.Bound && !h.CPUs.Equals(h.Cpuset):
		p.Notes = append(p.Notes, fmt.Sprintf("%s has bound this rank to CPUs %s", place.Launcher, h.CPUs))
		ranks, own = 1, 0
	}
	if ranks == 1 && place.LocalWorldSize > 1 && request.Reserve > 0 {
		return fault.Inputf("--reserve is %d, but %s has bound the ranks of this host, and plimsoll cannot tell "+
			"which cores they have together", request.Reserve, place.Launcher).
			WithHint("have " + place.Launcher + " bind the ranks to fewer cores, or not bind them at all")
	}
	if ranks == 1 && len(request.GPUs) == place.LocalWorldSize && len(request.GPUs) > 1 {
		request.GPUs = request.GPUs[place.LocalRank:][:1]
	}
	return p.divide(h, request, ranks, own)
}

// findGPUs tells the binding which GPUs the ranks see, if variables hide or reorder
// them. All ranks of this host must find the same.
func (p *Launch) findGPUs(h *host.Host, request *binding.Request, ranks int, peers []Peer, lookup Environment) {
	own := visibleGPUs(h, lookup)
	if own.variable == "" || len(h.GPUs) == 0 {
		return
	}
	seen, why := slices.Repeat([]visible{own}, ranks), ""
	if p.Placement != nil && p.Placement.LocalWorldSize > 1 {
		seen = nil
		for _, peer := range peers {
			seen = append(seen, visibleGPUs(h, peer.Environment))
		}
		if len(peers) == 0 {
			why = "plimsoll cannot find out which GPUs the other ranks of this host see"
		}
	}
	if why == "" {
		request.GPUs, why = gpusOfRanks(seen)
	}
	if why != "" {
		p.Notes = append(p.Notes, fmt.Sprintf("the binding ignores GPUs: %s is set, and %s (name the GPUs with --gpus)",
			own.variable, why))
		request.GPUs = []string{}
	}
}

// innerLaunchers are programs that start ranks themselves.
var innerLaunchers = []string{"torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "srun", "horovodrun",
	"torch.distributed.run", "torch.distributed.launch"}

// innerLauncher returns the launcher that a command starts, or "".
func innerLauncher(command []string) string {
	for i, word := range command {
		if name := filepath.Base(word); i == 0 && slices.Contains(innerLaunchers, name) ||
			i > 0 && command[i-1] == "-m" && slices.Contains(innerLaunchers, word) {
			return name
		}
		// An interpreter may run the launcher: "python -u /usr/bin/torchrun".
		if name := filepath.Base(word); i > 0 && !strings.HasPrefix(word, "-") {
			if slices.Contains(innerLaunchers, name) {
				return name
			}
			break
		}
	}
	return ""
}

// masterPort returns the port at which the ranks meet, or "" if another launcher
// chooses it.
func (p *Launch) masterPort(lookup Environment) (string, error) {
	given, set := lookup("MASTER_PORT")
	if p.Placement != nil {
		if set || p.Placement.MasterPort == 0 {
			return given, nil
		}
		return strconv.Itoa(p.Placement.MasterPort), nil
	}
	if !set {
		given = "0" // any port
	}
	number, err := strconv.ParseUint(given, 10, 16)
	if err != nil || set && number == 0 { // the ranks could not know which port that is
		return "", fault.Inputf("the environment variable MASTER_PORT is %q: expected a port", given)
	}
	listener, err := net.Listen("tcp", fmt.Sprintf(":%d", number))
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return "", fault.Inputf("port %s (MASTER_PORT) is in use by another program, perhaps an earlier job",
				given).WithHint("set another MASTER_PORT, or unset it: plimsoll then finds a free port")
		}
		return "", &fault.Input{What: "the environment variable MASTER_PORT", Err: err}
	}
	defer listener.Close()
	return strconv.Itoa(listener.Addr().(*net.TCPAddr).Port), nil
}

// variables returns the variables of a rank, except for those that are set already.
func (p *Launch) variables(h *host.Host, bound binding.Rank, i int, inner, port string, lookup Environment) []string {
	var variables []string
	set := func(name, value string) { variables = append(variables, name+"="+value) }
	unset := func(name string) bool { _, is := lookup(name); return !is }
	propose := func(name, value string) {
		if unset(name) {
			set(name, value)
		}
	}
	// If another launcher is started here, all of its ranks would use the same CPUs.
	if !bound.OptimizerCPUs.IsEmpty() && inner == "" {
		set("PLIMSOLL_OPTIMIZER_CPUS", bound.OptimizerCPUs.String())
	}
	if p.Placement != nil {
		set("PLIMSOLL_LOCAL_RANKS", "1") // ranks that share an optimizer service: the others have their own
	}
	if len(bound.NUMANodes) > 0 {
		set("PLIMSOLL_NUMA_NODES", cpuset.New(bound.NUMANodes...).String())
	}
	if inner != "" {
		return variables
	}
	place := Placement{Rank: i, LocalRank: i, WorldSize: len(p.Bound), LocalWorldSize: len(p.Bound),
		MasterAddress: "127.0.0.1"}
	identify := set // overrides what another job left over
	if p.Placement != nil {
		place, identify = *p.Placement, propose
	}
	identify("RANK", strconv.Itoa(place.Rank))
	identify("LOCAL_RANK", strconv.Itoa(place.LocalRank))
	identify("WORLD_SIZE", strconv.Itoa(place.WorldSize))
	identify("LOCAL_WORLD_SIZE", strconv.Itoa(place.LocalWorldSize))
	if len(p.Bound) > 1 || p.copyOutput {
		propose("PYTHONUNBUFFERED", "1") // lines go through a pipe, and Python would hold them back
	}
	if place.MasterAddress != "" {
		propose("MASTER_ADDR", place.MasterAddress)
	}
	if port != "" {
		propose("MASTER_PORT", port)
	}
	if bound.OMPNumThreads == 0 {
		return variables
	}
	// Places would contradict a choice made by other variables. They are for users who
	// set OMP_PROC_BIND: with it the OpenMP runtime binds the main thread to the first
	// place as soon as it is loaded. Every thread and process that Python starts
	// afterwards (loaders, autograd, NCCL) inherits that one core.
	if unset("OMP_PLACES") && unset("GOMP_CPU_AFFINITY") && unset("KMP_AFFINITY") {
		set("OMP_PLACES", places(h, bound.TrainerCPUs))
		propose("OMP_PROC_BIND", "false")
	}
	return variables
}

const threadsVariable = "OMP_NUM_THREADS"

// torchruns are the commands that run torchrun.
var torchruns = []string{"torchrun", "torch.distributed.run", "torch.distributed.launch"}

// torchrunSetThreads reports whether torchrun itself chose the number of OpenMP
// threads. It gives each rank one thread unless its own environment has a number.
func (p *Launch) torchrunSetThreads(r Request, lookup Environment) bool {
	if value, _ := lookup(threadsVariable); value != "1" || p.Placement == nil || p.Placement.Launcher != "torchrun" ||
		r.LauncherVariable == nil {
		return false
	}
	given, known := r.LauncherVariable(p.Placement, threadsVariable, lookup)
	return known && given == ""
}

// threads returns the variable for the number of OpenMP threads, unless the user set
// it. It notes a number that is kept but does not match the cores.
func (p *Launch) threads(bound binding.Rank, ofTorchrun bool, lookup Environment) []string {
	cores := strconv.Itoa(bound.OMPNumThreads)
	given, set := lookup(threadsVariable)
	switch {
	case bound.OMPNumThreads == 0 || given == cores:
		return nil
	case ofTorchrun:
		p.noteOnce("torchrun has set %s to 1 by default; plimsoll sets it to %s, the number of a rank's cores",
			threadsVariable, cores)
	case set:
		p.noteOnce("%s stays %s, as it was set, although a rank has %s for its threads", threadsVariable, given,
			ledger.Plural(bound.OMPNumThreads, "core"))
		return nil
	}
	return []string{threadsVariable + "=" + cores}
}

func (p *Launch) noteOnce(format string, values ...any) {
	if note := fmt.Sprintf(format, values...); !slices.Contains(p.Notes, note) {
		p.Notes = append(p.Notes, note)
	}
}

// noteShared notes which ranks take turns on a core, of those started here: from first
// to before last.
func (p *Launch) noteShared(h *host.Host, all []binding.Rank, first, last int) {
	coreOf, users := map[int]int{}, map[int]int{}
	for i, core := range h.Cores {
		for _, cpu := range core.Siblings.UnsortedList() {
			coreOf[cpu] = i
		}
	}
	used := make([]map[int]bool, len(all)) // cores of each rank
	for i, rank := range all {
		used[i] = map[int]bool{}
		for _, cpu := range rank.TrainerCPUs.Union(rank.OptimizerCPUs).UnsortedList() {
			used[i][coreOf[cpu]] = true
		}
		for core := range used[i] {
			users[core]++
		}
	}
	between, within := []int{}, []int{}
	for i := first; i < last; i++ {
		crowded := slices.ContainsFunc(slices.Collect(maps.Keys(used[i])),
			func(core int) bool { return users[core] > 1 })
		number := i
		if p.Placement != nil {
			number = p.Placement.Rank
		}
		switch {
		case crowded:
			between = append(between, number)
		case all[i].Shared:
			within = append(within, number)
		}
	}
	if len(between) > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("%s on a core: %s for %s of this host",
			whose(between, "takes turns", "take turns"),
			ledger.Plural(len(h.UsableCores()), "usable core"), ranks(len(all))))
	}
	if len(within) > 0 {
		p.Notes = append(p.Notes, whose(within, "has", "have")+" one core for the program and the optimizer, which "+
			"take turns on it")
	}
}

// whose returns the ranks followed by a verb in the right form.
func whose(ids []int, one, several string) string {
	if len(ids) == 1 {
		return fmt.Sprintf("rank %d %s", ids[0], one)
	}
	return fmt.Sprintf("ranks %s %s", cpuset.New(ids...), several)
}

// places returns one place for each core: "{0,64},{1,65}".
func places(h *host.Host, cpus cpuset.CPUSet) string {
	var list []string
	for _, core := range h.Cores {
		if own := core.Siblings.Intersection(cpus); !own.IsEmpty() {
			var ids []string
			for _, id := range own.List() {
				ids = append(ids, strconv.Itoa(id))
			}
			list = append(list, "{"+strings.Join(ids, ",")+"}")
		}
	}
	return strings.Join(list, ",")
}
