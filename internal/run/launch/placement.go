//go:build linux

package launch

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/host"
)

// Placement is the place that another launcher gave this process: one rank of a job.
type Placement struct {
	Launcher                  string // its common name
	Rank, WorldSize           int
	LocalRank, LocalWorldSize int // on this host
	// Masks are the affinity masks of all ranks on this host, in the order of local
	// ranks, if the launcher tells them.
	Masks []cpuset.CPUSet
	// Bound is set if the launcher gives each rank CPUs of its own whenever it gives a
	// rank less than all.
	Bound bool
	// MasterAddress is a host that every rank can reach; empty if unknown. MasterPort
	// is the same number for every rank; 0 if there is none.
	MasterAddress string
	MasterPort    int
}

// Environment looks up a variable.
type Environment func(name string) (value string, set bool)

// launchers are the launchers whose variables are known. A launcher that starts inside
// of another comes first: mpirun starts its helpers on other hosts with srun, and its
// ranks have the variables of both.
var launchers = []struct {
	name                           string
	rank, world, local, localWorld string // the last two are empty for a launcher with one rank per host
	// present reports whether the launcher started the process, if its variables alone
	// do not tell.
	present func(Environment) bool
	finish  func(*Placement, Environment) error
	// shell is set if the launcher's only task is often a shell, from which another
	// launcher may start ranks.
	shell bool
}{
	{name: "torchrun", rank: "RANK", world: "WORLD_SIZE", local: "LOCAL_RANK", localWorld: "LOCAL_WORLD_SIZE",
		present: has("LOCAL_WORLD_SIZE")},
	{name: "DeepSpeed", rank: "RANK", world: "WORLD_SIZE", local: "LOCAL_RANK", localWorld: "LOCAL_SIZE",
		present: has("LOCAL_SIZE")},
	{
		name: "Open MPI", rank: "OMPI_COMM_WORLD_RANK", world: "OMPI_COMM_WORLD_SIZE",
		local: "OMPI_COMM_WORLD_LOCAL_RANK", localWorld: "OMPI_COMM_WORLD_LOCAL_SIZE", finish: finishMPI,
	},
	{name: "MVAPICH", rank: "MVP_COMM_WORLD_RANK", world: "MVP_COMM_WORLD_SIZE", local: "MVP_COMM_WORLD_LOCAL_RANK",
		localWorld: "MVP_COMM_WORLD_LOCAL_SIZE", finish: finishMPI},
	{name: "MVAPICH", rank: "MV2_COMM_WORLD_RANK", world: "MV2_COMM_WORLD_SIZE", local: "MV2_COMM_WORLD_LOCAL_RANK",
		localWorld: "MV2_COMM_WORLD_LOCAL_SIZE", finish: finishMPI},
	{name: "MPI", rank: "PMI_RANK", world: "PMI_SIZE", local: "MPI_LOCALRANKID", localWorld: "MPI_LOCALNRANKS",
		finish: finishMPI},
	{
		name: "jsrun", rank: "JSM_NAMESPACE_RANK", world: "JSM_NAMESPACE_SIZE", local: "JSM_NAMESPACE_LOCAL_RANK",
		localWorld: "JSM_NAMESPACE_LOCAL_SIZE", finish: finishMPI,
	},
	{name: "horovodrun", rank: "HOROVOD_RANK", world: "HOROVOD_SIZE", local: "HOROVOD_LOCAL_RANK",
		localWorld: "HOROVOD_LOCAL_SIZE"},
	{name: "Flux", rank: "FLUX_TASK_RANK", world: "FLUX_JOB_SIZE", local: "FLUX_TASK_LOCAL_ID", finish: finishFlux},
	// The number of tasks of the step comes first. Slurm's interactive step has one task, and
	// SLURM_NTASKS is the number that the job asked for.
	{name: "Slurm", rank: "SLURM_PROCID", world: "SLURM_STEP_NUM_TASKS", local: "SLURM_LOCALID", present: inSlurmStep,
		finish: finishSlurm, shell: true},
	{name: "Slurm", rank: "SLURM_PROCID", world: "SLURM_NTASKS", local: "SLURM_LOCALID", present: inOldSlurmStep,
		finish: finishSlurm, shell: true},
	// Slurm sets some of these variables, too, and says more.
	{name: "PALS", rank: "PALS_RANKID", world: "PMI_SIZE", local: "PALS_LOCAL_RANKID", localWorld: "PALS_LOCAL_SIZE",
		finish: finishMPI},
	{name: "MPI", rank: "PMI_RANK", world: "PMI_SIZE", local: "PMI_LOCAL_RANK", localWorld: "PMI_LOCAL_SIZE",
		finish: finishMPI},
	// Scripts that set these by hand must set the last one, too.
	{name: "torchrun", rank: "RANK", world: "WORLD_SIZE", local: "LOCAL_RANK", localWorld: "LOCAL_WORLD_SIZE"},
	// The training operators of Kubernetes start one process in each pod.
	{name: "Kubernetes", rank: "RANK", world: "WORLD_SIZE", present: has("WORLD_SIZE")},
}

func has(name string) func(Environment) bool {
	return func(environment Environment) bool {
		_, set := environment(name)
		return set
	}
}

// FindPlacement returns the place that the environment names, or nil if no launcher
// gave one.
func FindPlacement(environment Environment) (*Placement, error) {
	var alone *Placement
	for _, l := range launchers {
		if l.present != nil && !l.present(environment) {
			continue
		}
		if !has(l.rank)(environment) {
			continue
		}
		if l.local != "" && !has(l.local)(environment) {
			continue
		}
		p := &Placement{Launcher: l.name}
		var err error
		number := func(name string, least, most int) int {
			n, e := integer(environment, name, least, most)
			if err == nil {
				err = e
			}
			return n
		}
		p.WorldSize = number(l.world, 1, mostRanks)
		p.Rank = number(l.rank, 0, p.WorldSize-1)
		p.LocalWorldSize = p.WorldSize
		if l.localWorld != "" {
			p.LocalWorldSize = number(l.localWorld, 1, p.WorldSize)
		}
		if err == nil && l.finish != nil {
			err = l.finish(p, environment)
		}
		if l.local != "" {
			p.LocalRank = number(l.local, 0, p.LocalWorldSize-1)
		} else {
			p.LocalWorldSize = 1
		}
		if err != nil {
			return nil, err
		}
		if l.shell && p.WorldSize == 1 {
			alone = p
			continue
		}
		if p.WorldSize > 1 || alone == nil {
			return p, nil
		}
	}
	return alone, refuseUnknown(environment, alone != nil)
}

// unknownLaunchers are variables that mark a process as a rank. Their launchers do not
// say which of how many ranks it is on this host.
var unknownLaunchers = []struct{ rank, world string }{
	{"PMI_RANK", "PMI_SIZE"},
	{"PMIX_RANK", "PMIX_SIZE"},
	{"PALS_RANKID", "PMI_SIZE"},
	{"ALPS_APP_PE", "ALPS_APP_SIZE"},
	{"MPT_LRANK", "MPT_SIZE"},
}

// refuseUnknown refuses to start a job in a process that may be one of many ranks: each
// rank would become a job of its own. It accepts a process that a known launcher
// started alone, which may have inherited the variables.
func refuseUnknown(environment Environment, alone bool) error {
	for _, l := range unknownLaunchers {
		rank, isRank := environment(l.rank)
		size, isSize := environment(l.world)
		if !isRank || isSize && size == "1" || alone && (rank == "0" && !isSize) {
			continue
		}
		what := fmt.Sprintf("the environment variable %s is %s", l.rank, rank)
		if isSize {
			what += fmt.Sprintf(" and %s is %s", l.world, size)
		}
		return fault.Inputf("%s: another launcher has started this process as a rank, but plimsoll cannot tell which "+
			"rank of this host it is", what).
			WithHint("set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each rank; to start a job of its own " +
				"here, unset the variable (env -u " + l.rank + ")")
	}
	return nil
}

const mostRanks = 1 << 24

// integer returns the number in a variable.
func integer(environment Environment, name string, least, most int) (int, error) {
	text, set := environment(name)
	n, err := strconv.Atoi(text)
	if err == nil && n >= least && n <= most {
		return n, nil
	}
	what := fmt.Sprintf("the environment variable %s is %q: expected a number from %d to %d", name, text, least, most)
	if !set {
		what = fmt.Sprintf("the environment variable %s is not set, but other variables of its launcher are", name)
	}
	return 0, fault.Inputf("%s", what).
		WithHint("start plimsoll run from the launcher itself, or without its variables (env -u " + name + ")")
}

// inSlurmStep tells a task of srun from a batch script, which is no rank but has most
// of the same variables.
func inSlurmStep(environment Environment) bool {
	return has("SLURM_STEP_ID")(environment) && has("SLURM_STEP_NUM_TASKS")(environment)
}

// inOldSlurmStep is inSlurmStep for steps that do not say how many tasks they have.
func inOldSlurmStep(environment Environment) bool {
	return has("SLURM_STEP_ID")(environment) && !has("SLURM_STEP_NUM_TASKS")(environment)
}

func finishSlurm(p *Placement, environment Environment) error {
	node, err := integer(environment, "SLURM_NODEID", 0, mostRanks)
	if err != nil {
		return err
	}
	name := "SLURM_STEP_TASKS_PER_NODE"
	tasks, set := environment(name)
	if !set {
		name = "SLURM_TASKS_PER_NODE"
		tasks, _ = environment(name)
	}
	if p.LocalWorldSize, err = TasksOfNode(tasks, node); err != nil {
		return &fault.Input{What: "the environment variable " + name, Err: err}
	}
	if kind, _ := environment("SLURM_CPU_BIND_TYPE"); strings.HasPrefix(kind, "mask_cpu") {
		list, _ := environment("SLURM_CPU_BIND_LIST")
		masks, err := ParseMasks(list)
		if err != nil {
			return &fault.Input{What: "the environment variable SLURM_CPU_BIND_LIST", Err: err}
		}
		if len(masks) == p.LocalWorldSize {
			p.Masks = masks
		}
	}
	nodes, set := environment("SLURM_STEP_NODELIST")
	if set {
		if p.MasterAddress, err = FirstHost(nodes); err != nil {
			return &fault.Input{What: "the environment variable SLURM_STEP_NODELIST", Err: err}
		}
	}
	// Steps of a job may run side by side, and so may jobs on a node.
	job, _ := environment("SLURM_JOB_ID")
	step, _ := environment("SLURM_STEP_ID")
	p.MasterPort = portFor(job + "." + step)
	return nil
}

// finishFlux finds how many ranks of a Flux job are on this host, if that follows from
// the number of hosts. Flux itself does not say.
func finishFlux(p *Placement, environment Environment) error {
	hosts, err := integer(environment, "FLUX_JOB_NNODES", 1, p.WorldSize)
	if err != nil {
		return err
	}
	_, told := environment("LOCAL_WORLD_SIZE")
	switch {
	case told:
		p.LocalWorldSize, err = integer(environment, "LOCAL_WORLD_SIZE", 1, p.WorldSize)
	case hosts == 1:
		p.MasterAddress = "127.0.0.1"
	case hosts == p.WorldSize:
		p.LocalWorldSize = 1
	default:
		err = fault.Inputf("Flux started %d ranks on %d hosts, and does not say how many are on this host", p.WorldSize,
			hosts).
			WithHint("set LOCAL_WORLD_SIZE to the number of ranks on this host (flux run --env=LOCAL_WORLD_SIZE=N)")
	}
	job, _ := environment("FLUX_JOB_ID")
	p.MasterPort = portFor(job)
	return err
}

func finishMPI(p *Placement, environment Environment) error {
	p.Bound = true
	if p.LocalWorldSize == p.WorldSize {
		// All ranks are here, and children of one process.
		p.MasterAddress = "127.0.0.1"
		p.MasterPort = portFor(strconv.Itoa(os.Getppid()))
	}
	return nil
}

// portFor returns a port that all ranks derive from what they have in common. It is
// below the ports that the system assigns itself.
func portFor(job string) int {
	hash := uint32(2166136261) // FNV-1a
	for _, b := range []byte(job) {
		hash = (hash ^ uint32(b)) * 16777619
	}
	return 10000 + int(hash%20000)
}

var repeated = regexp.MustCompile(`^([0-9]+)(?:\(x([0-9]+)\))?$`)

// TasksOfNode returns the number of tasks of a node from Slurm's list of all nodes:
// "2(x3),1" is three nodes with two tasks each, then one with one.
func TasksOfNode(list string, node int) (int, error) {
	first := 0
	for _, part := range strings.Split(list, ",") {
		fields := repeated.FindStringSubmatch(part)
		if fields == nil {
			return 0, fmt.Errorf("%q: expected numbers of tasks such as 2(x3),1", list)
		}
		times := "1"
		if fields[2] != "" {
			times = fields[2]
		}
		tasks, err1 := strconv.Atoi(fields[1])
		nodes, err2 := strconv.Atoi(times)
		if err1 != nil || err2 != nil || tasks < 1 || tasks > mostRanks || nodes < 1 || nodes > mostRanks {
			return 0, fmt.Errorf("%q: %q is out of range", list, part)
		}
		if first += nodes; node < first {
			return tasks, nil
		}
	}
	return 0, fmt.Errorf("%q has %d nodes, and this is node %d", list, first, node)
}

// ParseMasks parses hexadecimal CPU masks: "0x3,0xc".
func ParseMasks(list string) ([]cpuset.CPUSet, error) {
	var masks []cpuset.CPUSet
	for _, text := range strings.Split(list, ",") {
		mask, err := host.ParseMask(strings.TrimPrefix(text, "0x"))
		if err != nil {
			return nil, err
		}
		if mask.IsEmpty() {
			return nil, fmt.Errorf("%q: the mask %q has no CPU", list, text)
		}
		masks = append(masks, mask)
	}
	return masks, nil
}

// FirstHost returns the first host of a list in Slurm's notation: "node[03-07,12],gpu1"
// begins with node03.
func FirstHost(list string) (string, error) {
	head, rest, bracket := strings.Cut(list, "[")
	if name, _, more := strings.Cut(head, ","); more || !bracket {
		head, rest, bracket = name, "", false
	}
	if !bracket {
		if head == "" {
			return "", fmt.Errorf("%q names no host", list)
		}
		return head, nil
	}
	numbers, tail, closed := strings.Cut(rest, "]")
	end := strings.IndexFunc(numbers, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(numbers)
	}
	if !closed || end == 0 || end < len(numbers) && numbers[end] != '-' && numbers[end] != ',' {
		return "", fmt.Errorf("%q: expected a list of hosts such as node[03-07,12]", list)
	}
	// Text after the brackets belongs to the name as well, and may have brackets of its
	// own.
	after, _, _ := strings.Cut(tail, ",")
	if strings.Contains(after, "[") {
		var err error
		if after, err = FirstHost(tail); err != nil {
			return "", err
		}
	}
	return head + numbers[:end] + after, nil
}
