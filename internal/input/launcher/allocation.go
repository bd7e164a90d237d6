package launcher

import (
	"bufio"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/shell"
)

// Allocation is what a batch system or a cluster gives a job.
type Allocation struct {
	Nodes, GPUs, Tasks, TasksPerNode *Count // GPUs are those of a node
	Memory                           *Memory
	// Spawns says that the system starts a rank in each pod, where no launcher does.
	Spawns bool
}

// Headers reads the lines of a script that say its allocation: #SBATCH and #PBS.
func Headers(script string) Allocation {
	var a Allocation
	at := int64(0)
	lines := bufio.NewScanner(strings.NewReader(script))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if text, is := strings.CutPrefix(line, "#SBATCH"); is {
			a.slurm(fieldsAt(text, at+int64(len("#SBATCH"))))
		} else if text, is := strings.CutPrefix(line, "#PBS"); is {
			a.pbs(fieldsAt(text, at+int64(len("#PBS"))))
		}
		at += int64(len(line)) + 1
	}
	return a
}

// fieldsAt returns the words of a line up to a comment.
func fieldsAt(text string, at int64) (list []shell.Word) {
	for rest := text; ; {
		start := len(rest) - len(strings.TrimLeft(rest, " \t"))
		word := strings.Fields(rest[start:])
		if len(word) == 0 || strings.HasPrefix(word[0], "#") {
			return list
		}
		list = append(list, shell.Word{Text: word[0], At: at + int64(len(text)-len(rest)+start)})
		rest = rest[start+len(word[0]):]
	}
}

var slurmFlags = tool{alone: srunAlone, attached: true}

// slurm reads flags of sbatch and srun.
func (a *Allocation) slurm(words []shell.Word) { a.slurmOptions(slurmFlags.options(words)) }

func (a *Allocation) slurmOptions(o options) {
	set := func(to **Count, flags ...string) {
		if w, flag, is := o.first(flags...); is {
			*to = nil
			if n, err := strconv.Atoi(w.Text); err == nil && n > 0 {
				*to = &Count{w.At, flag, n}
			}
		}
	}
	set(&a.Nodes, "nodes", "N")
	set(&a.Tasks, "ntasks", "n")
	set(&a.TasksPerNode, "ntasks_per_node", "tasks_per_node")
	if w, flag, is := o.first("gpus_per_node", "gres"); is {
		parts := strings.Split(w.Text, ":") // gpu:a100:8, gpu:8, a100:8 or 8
		if n, err := strconv.Atoi(parts[len(parts)-1]); err == nil && n > 0 && (flag != "gres" || parts[0] == "gpu") {
			a.GPUs = &Count{w.At, flag, n}
		}
	}
	if w, flag, is := o.first("gpus", "G"); is && a.GPUs == nil {
		parts := strings.Split(w.Text, ":")
		nodes := 1
		if a.Nodes != nil {
			nodes = a.Nodes.Is
		}
		if n, err := strconv.Atoi(parts[len(parts)-1]); err == nil && n > 0 && n%nodes == 0 {
			a.GPUs = &Count{w.At, flag, n / nodes}
		}
	}
	if w, flag, is := o.first("mem"); is {
		if n, is := size(w.Text, ledger.MiB); is {
			a.Memory = &Memory{w.At, flag, n}
		}
	}
}

// pbs reads -l select=2:ncpus=8:ngpus=4:mem=512gb, and nodes=2:ppn=4:gpus=4.
func (a *Allocation) pbs(words []shell.Word) {
	for i, w := range words {
		if i == 0 || words[i-1].Text != "-l" {
			continue
		}
		for _, resource := range strings.FieldsFunc(w.Text, func(c rune) bool { return c == ':' || c == ',' }) {
			name, value, _ := strings.Cut(resource, "=")
			n, err := strconv.Atoi(value)
			c := &Count{w.At, name, n}
			switch {
			case name == "mem":
				if n, is := size(value, 1); is {
					a.Memory = &Memory{w.At, name, n}
				}
			case err != nil || n < 1:
			case name == "select" || name == "nodes":
				a.Nodes = c
			case name == "ngpus" || name == "gpus":
				a.GPUs = c
			case name == "mpiprocs":
				a.TasksPerNode = c
			}
		}
	}
}

// Environment returns the variables that the batch system sets, as far as the allocation says them.
func (a *Allocation) Environment() map[string]shell.Word {
	list := map[string]shell.Word{}
	set := func(c *Count, names ...string) {
		for _, name := range names {
			if c != nil {
				list[name] = shell.Word{Text: strconv.Itoa(c.Is), At: c.At}
			}
		}
	}
	set(a.Nodes, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
	set(a.GPUs, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
	set(a.TasksPerNode, "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
	if all := a.tasks(); all != nil {
		set(all, "SLURM_NTASKS", "SLURM_NPROCS")
	}
	return list
}

// tasks returns the tasks of all nodes, nil where the allocation does not say them.
func (a *Allocation) tasks() *Count {
	switch {
	case a.Tasks != nil:
		return a.Tasks
	case a.TasksPerNode != nil && a.Nodes != nil:
		return &Count{a.TasksPerNode.At, a.TasksPerNode.Name, a.TasksPerNode.Is * a.Nodes.Is}
	case a.TasksPerNode != nil:
		return a.TasksPerNode
	}
	return a.Nodes // a task a node
}

// srun starts the tasks of its step. A launcher inside starts the ranks in their place.
func srun(l *Line, name shell.Word, o options) {
	step := l.in
	step.slurmOptions(o)
	if _, _, is := o.first("gpus_per_task"); is && step.GPUs == nil && step.TasksPerNode != nil {
		step.GPUs = step.TasksPerNode
	}
	l.in = step
	if step.Memory != nil {
		l.HostMemory = step.Memory
	}
	l.starts("srun", name.At)
	for _, flags := range [][]string{{"nodes", "N"}, {"ntasks", "n"}, {"ntasks_per_node"}} {
		if w, flag, is := o.first(flags...); is && len(w.Unknown) > 0 {
			l.Unknown = append(l.Unknown, Count{At: w.At, Name: flag})
		}
	}
	l.Nodes, l.PerNode = step.Nodes, step.TasksPerNode
	if all := step.tasks(); l.PerNode == nil && all != nil {
		nodes := 1
		if l.Nodes != nil {
			nodes = l.Nodes.Is
		}
		if all.Is%nodes == 0 {
			l.PerNode = &Count{all.At, all.Name, all.Is / nodes}
		}
	}
	if l.PerNode == nil && len(l.Unknown) == 0 {
		l.Unknown = append(l.Unknown, Count{At: name.At, Name: "ntasks"})
	}
	if l.Nodes == nil && len(l.Unknown) == 0 && step.Tasks == nil {
		l.Unknown = append(l.Unknown, Count{At: name.At, Name: "nodes"})
	}
}
