package launcher

import (
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/shell"
)

// tool is a command that runs another one: a wrapper or a launcher.
type tool struct {
	name string // its words; a|b are names of one
	// alone are flags without a value, or else valued are all flags that have one.
	alone, valued string
	attached      bool           // a number may stand in the word of a short flag: -N2
	more          map[string]int // flags with more values than one: how many more
	skips         int            // words before the command: the image of a container
	read          func(l *Line, name shell.Word, o options)
	keeps         bool // its words are a part of the program
	modules       bool // -m names a module of Python, whose own flags follow
}

// moduleFlag is Python's flag for a module.
const moduleFlag = "m"

// moduleOption is the option of a launcher that runs a module.
const moduleOption = "module"

var python = tool{name: "python", valued: "X W m c Q", modules: true}

// launcherModules are modules that are launchers, with their commands.
var launcherModules = map[string]string{"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
	"accelerate.commands.launch": "accelerate-launch", "deepspeed.launcher.runner": "deepspeed",
	"accelerate.commands.accelerate_cli": "accelerate"}

// tools are all tools. A launcher sets the ranks; where several stand in a line, the last one counts.
var tools = []tool{
	{name: "nohup|exec|command|setsid|unbuffer|builtin"},
	{name: "time", alone: "p v"},
	{name: "env", valued: "u S C unset chdir"},
	{name: "sudo", valued: "u g h"},
	{name: "nice", valued: "n adjustment"}, {name: "ionice", valued: "c n p"},
	{name: "timeout", valued: "k s kill_after signal", skips: 1},
	{name: "stdbuf", valued: "i o e"},
	{name: "taskset", valued: "c"},
	{name: "numactl", valued: "N m C i p cpunodebind membind physcpubind interleave preferred"},
	{name: "nsys profile", valued: "o t s w f e output trace sample stats force_overwrite capture_range delay " +
		"duration capture_range_end cuda_memory_usage python_sampling gpu_metrics_device gpu_metrics_devices kill"},
	{name: "ncu", valued: "o c s k export set launch_count launch_skip kernel_name"},
	{name: "py-spy record", valued: "o r f d output rate format duration"},
	{name: "scalene"}, {name: "coverage run"}, {name: "kernprof", alone: "l v"},
	{name: "uv run", valued: "with p python extra group package project directory env_file with_requirements index " +
		"with_editable no_group only_group refresh_package C index_url extra_index_url m module", modules: true},
	{name: "poetry|pipenv|pdm|hatch|pixi|rye run", valued: "e environment manifest_path"},
	{name: "conda|mamba|micromamba run", valued: "n p name prefix cwd"},
	{name: "ray job submit", valued: "address working_dir runtime_env runtime_env_json submission_id " +
		"entrypoint_num_gpus entrypoint_num_cpus metadata_json"},
	{name: "docker|podman|nerdctl run", alone: "d i t it ti rm detach interactive tty privileged init read_only " +
		"oom_kill_disable no_healthcheck", skips: 1, read: container},
	{name: "docker|podman exec", alone: "d i t it ti detach interactive tty privileged", skips: 1, read: container},
	{name: "apptainer|singularity exec|run", skips: 1, read: container, valued: "B bind env H home pwd W workdir o " +
		"overlay S scratch env_file mount net network app"},
	{name: "enroot start", valued: "e env m mount c conf", skips: 1, read: container},
	{name: "srun", alone: srunAlone, attached: true, read: srun},
	{name: "mpirun|mpiexec|mpirun.openmpi|orterun|prterun", attached: true, read: mpirun,
		alone: "allow_run_as_root oversubscribe v verbose q quiet report_bindings display_map tag_output " +
			"nooversubscribe use_hwthread_cpus bind_to_core bynode bycore display_allocation l prepend_rank",
		more: map[string]int{"mca": 1, "gmca": 1, "genv": 1, "env": 1}},
	{name: "horovodrun", alone: "verbose", attached: true, read: mpirun},
	{name: "torchrun|torchrun.py", alone: torchrunAlone, read: torchrun},
	{name: "accelerate launch", alone: accelerateAlone, read: accelerate},
	{name: "accelerate-launch", alone: accelerateAlone, read: accelerate},
	{name: "deepspeed|ds", alone: deepspeedAlone, read: deepspeed},
	{name: "colossalai run", alone: "m", read: torchrun},
	{name: "tune run", alone: torchrunAlone, read: torchrun, keeps: true},
	{name: "plimsoll run", alone: "quiet", read: torchrun},
}

const (
	torchrunAlone = "standalone no_python m module run_path use_env use_local_rank signals_to_handle " +
		"virtual_local_rank"
	deepspeedAlone = "no_local_rank no_python module force_multi save_pid no_ssh no_ssh_check bind_cores_to_rank " +
		"enable_each_rank_log m"
	srunAlone = "exclusive l label u unbuffered pty overlap O overcommit s oversubscribe K Q quiet v verbose E " +
		"preserve_env no_container_mount_home container_mount_home container_writable multi_prog X disable_status " +
		"H Z no_allocate contiguous container_remap_root no_container_remap_root kill_on_bad_exit no_kill k " +
		"use_min_nodes"
	accelerateAlone = "q quiet cpu multi_gpu tpu ipex use_mps_device use_deepspeed use_fsdp use_parallelism_config " +
		"use_megatron_lm use_xpu module m no_python debug enable_cpu_affinity same_network dynamo_use_fullgraph " +
		"dynamo_use_dynamic dynamo_use_regional_compilation tpu_cluster no_tpu_cluster downcast_bf16 standalone"
)

// memory notes the memory of a host.
func (l *Line) memory(name string, w shell.Word, unit ledger.Bytes) {
	if n, is := size(w.Text, unit); is {
		l.HostMemory = &Memory{w.At, name, n}
	}
}

// Size reads a size as containers have it: 64g, 512Gi or bytes.
func Size(text string) (ledger.Bytes, bool) { return size(text, 1) }

// size reads a size with a letter for its unit: 64g, 512G, 1TB. Without one it counts units.
func size(text string, unit ledger.Bytes) (ledger.Bytes, bool) {
	number := strings.TrimRight(text, "bBiIkKmMgGtTpP")
	letters := strings.ToLower(strings.TrimRight(text[len(number):], "bBiI"))
	units := map[string]ledger.Bytes{"": unit, "k": ledger.KiB, "m": ledger.MiB, "g": ledger.GiB, "t": ledger.TiB}
	n, err := strconv.ParseFloat(number, 64)
	of, is := units[letters]
	if err != nil || !is || n <= 0 || n*float64(of) > 1<<60 {
		return 0, false
	}
	return ledger.Bytes(n * float64(of)), true
}

// container reads docker run, and what is like it.
func container(l *Line, _ shell.Word, o options) {
	if w, name, is := o.first("memory", "m"); is {
		l.memory(name, w, 1)
	}
	if w, name, is := o.first("gpus"); is {
		text := strings.Trim(w.Text, `"'`)
		if list, is := strings.CutPrefix(text, "device="); is {
			l.in.GPUs = &Count{w.At, name, len(strings.Split(list, ","))}
		} else if n, err := strconv.Atoi(text); err == nil && n > 0 {
			l.in.GPUs = &Count{w.At, name, n}
		}
	}
	for _, flag := range o.list {
		if flag.name != "e" && flag.name != "env" {
			continue
		}
		parts := strings.Split(flag.value.Text, ",")
		if slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(p, "=") }) {
			parts = []string{flag.value.Text} // the commas are those of one value
		}
		for _, part := range parts {
			word := shell.Word{Text: part, At: flag.value.At, Unknown: flag.value.Unknown}
			if name, value, is := assignment(word); is {
				l.own = append(l.own, setting{name, value})
			}
		}
	}
}

// starts sets the launcher of a line. One inside another counts alone.
func (l *Line) starts(by string, at int64) {
	l.By, l.At, l.EveryDevice = by, at, false
	l.PerNode, l.Nodes, l.Total, l.Unknown = nil, nil, nil, nil
}

// torchrun starts one rank where nothing says how many.
func torchrun(l *Line, name shell.Word, o options) {
	l.starts("torchrun", name.At)
	l.Nodes, l.PerNode = l.said(o, "PET_NNODES", "nnodes", "num_nodes", "N"), nil
	w, flag, is := o.first("nproc_per_node", "nproc")
	if value, at, set := l.Variable("PET_NPROC_PER_NODE"); !is && set {
		w, flag, is = shell.Word{Text: value.Text, At: at, Unknown: value.Unknown}, "PET_NPROC_PER_NODE", true
	}
	switch {
	case !is && o.hidden == nil:
		l.PerNode = &Count{name.At, "torchrun without --nproc_per_node", 1}
	case slices.Contains([]string{"gpu", "auto", "cuda", "npu", "xpu"}, w.Text):
		l.EveryDevice = true
	case is:
		l.PerNode = l.count(flag, w)
	}
	if w, is := o.given["nnodes"]; is { // elastic: from so many to so many
		if low, high, ranged := strings.Cut(w.Text, ":"); ranged && low == high {
			l.Unknown = slices.DeleteFunc(l.Unknown, func(c Count) bool { return c.Name == "nnodes" })
			l.Nodes = l.count("nnodes", shell.Word{Text: low, At: w.At})
		}
	}
	l.keep(o)
}

// said returns the number of the first of these flags, or of a variable.
func (l *Line) said(o options, variable string, flags ...string) *Count {
	if w, flag, is := o.first(flags...); is {
		return l.count(flag, w)
	}
	if variable == "" {
		return nil
	}
	return l.variable(variable)
}

// keep keeps the options of a launcher.
func (l *Line) keep(o options) {
	for name, w := range o.given {
		l.Options[name] = w
	}
	if _, is := o.given[moduleFlag]; is {
		l.Options[moduleOption] = shell.Word{Text: "true"}
	}
	if o.hidden != nil && l.PerNode == nil && l.Total == nil {
		l.Unknown = append(l.Unknown, Count{At: o.hidden.At, Name: o.hidden.Text})
	}
}

// accelerate starts a rank on every device where neither flags nor its configuration say how many.
func accelerate(l *Line, name shell.Word, o options) {
	l.starts("accelerate launch", name.At)
	l.EveryDevice = true
	l.Nodes = l.said(o, "", "num_machines")
	l.Total = l.said(o, "", "num_processes", "n")
	if ids, is := o.given["gpu_ids"]; is && ids.Text != "all" && l.Total == nil {
		l.PerNode = &Count{ids.At, "gpu_ids", len(strings.Split(ids.Text, ","))}
	}
	if _, cpu := o.given["cpu"]; cpu && l.Total == nil {
		l.PerNode = &Count{name.At, "cpu", 1}
	}
	l.keep(o)
}

// deepspeed starts a rank on every device where nothing says how many.
func deepspeed(l *Line, name shell.Word, o options) {
	l.starts("deepspeed", name.At)
	l.EveryDevice = true
	l.Nodes = l.said(o, "", "num_nodes")
	l.PerNode = l.said(o, "", "num_gpus")
	if w, flag, is := o.first("include", "i"); is {
		l.included(w, flag)
	}
	if w, flag, is := o.first("exclude", "e"); is { // nodes have different numbers of ranks
		l.Unknown = append(l.Unknown, Count{At: w.At, Name: flag})
	}
	l.keep(o)
}

// included reads deepspeed --include: worker-0:0,2@worker-1:0,2. Without devices, a host has all.
func (l *Line) included(w shell.Word, flag string) {
	hosts := strings.Split(w.Text, "@")
	if len(w.Unknown) > 0 {
		l.Unknown = append(l.Unknown, Count{At: w.At, Name: flag})
		return
	}
	if len(hosts) > 1 {
		l.Nodes = &Count{w.At, flag, len(hosts)}
	}
	counts := map[int]bool{}
	for _, host := range hosts {
		_, slots, is := strings.Cut(host, ":")
		n := len(strings.Split(slots, ","))
		if !is {
			n = 0 // all
		} else {
			l.PerNode = &Count{w.At, flag, n}
		}
		counts[n] = true
	}
	if len(counts) > 1 { // nodes have different numbers of ranks
		l.PerNode = nil
		l.Unknown = append(l.Unknown, Count{At: w.At, Name: flag})
	}
}

// mpirun starts -np ranks, on all hosts.
func mpirun(l *Line, name shell.Word, o options) {
	l.starts(name.Text, name.At)
	l.Total = l.said(o, "", "np", "n", "c")
	l.PerNode = l.said(o, "", "N", "npernode", "ppn", "perhost")
	if w, is := o.given["map_by"]; is {
		if parts := strings.Split(w.Text, ":"); len(parts) > 2 && parts[0] == "ppr" {
			l.PerNode = l.count("map_by", shell.Word{Text: parts[1], At: w.At})
		}
	}
	if w, flag, is := o.first("H", "host", "hosts"); is && len(w.Unknown) == 0 {
		l.Nodes = &Count{w.At, flag, len(strings.Split(w.Text, ","))}
	}
	if l.Nodes == nil {
		l.Nodes = l.in.Nodes
	}
	switch {
	case l.Total != nil && l.PerNode != nil && l.Nodes == nil && l.Total.Is%l.PerNode.Is == 0:
		l.Nodes = &Count{l.Total.At, l.Total.Name, l.Total.Is / l.PerNode.Is}
	case l.Total == nil && l.PerNode == nil && len(l.Unknown) == 0:
		l.Unknown = append(l.Unknown, Count{At: name.At, Name: "np"})
	}
	l.keep(o)
}
