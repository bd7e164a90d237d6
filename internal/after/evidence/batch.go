package evidence

import (
	"strings"

	"plimsoll/internal/base/ledger"
)

func batchEnd(by, reason string) func(*match) Fact {
	return func(*match) Fact { return BatchEnd{By: by, Reason: reason} }
}

// batchPatterns are the texts of batch systems, containers and daemons that watch memory.
var batchPatterns = []pattern{
	{ // Slurm: src/plugins/task/cgroup/task_cgroup_memory.c
		name:       "Slurm: killed for memory",
		literals:   []string{"oom_kill event", "oom-kill event"},
		expression: `Detected (?P<n>\d+) oom[_-]kill event(?:s|\(s\))? in (?:step )?(?P<step>\S+?)(?:\.| cgroup\.?)(?: |$)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return BatchKill{By: "Slurm", What: m.get("step"), Count: m.integer("n", 0)}
		},
	},
	{ // Slurm, older
		name:     "Slurm: cgroup out-of-memory handler",
		literals: []string{"by the cgroup out-of-memory handler", "Exceeded step memory", "Exceeded job memory"},
		expression: `(?:Some of your processes may have been killed by the cgroup out-of-memory handler|` +
			`Exceeded (?:step|job) memory limit\b)`,
		kind: TrainerLog, fact: batchKill("Slurm"),
	},
	{ // Slurm: src/slurmd/slurmstepd, JobAcctGatherParams=OverMemoryKill
		name:       "Slurm: memory limit exceeded",
		literals:   []string{"exceeded memory limit"},
		expression: `(?P<what>(?:Job |Step |StepId=|JobId=)[\d.]+(?:\.\w+)?) exceeded memory limit(?: \(\d+ > (?P<limit>\d+)|\b)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			unit := kb // releases that write "Job 7" count in kB, and those with "StepId=7.0" in bytes
			if strings.Contains(m.get("what"), "=") {
				unit = 1
			}
			return BatchKill{By: "Slurm", What: m.get("what"), Limit: m.size("limit", unit)}
		},
	},
	{ // Slurm: src/slurmd/slurmstepd/req.c
		name:     "Slurm: cancelled",
		literals: []string{" CANCELLED AT "},
		expression: `\*\*\* (?:JOB|STEP|TASK) \S+ (?:ON \S+ )?CANCELLED AT \S+(?: DUE (?:TO|to) (?P<why>[A-Za-z ]+?))?` +
			`(?:,.*)? \*\*\*`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			reason := strings.ToLower(m.get("why"))
			if reason == "" {
				reason = "cancelled"
			}
			return BatchEnd{By: "Slurm", Reason: strings.ReplaceAll(reason, "preemption", "preempted")}
		},
	},
	{ // Slurm: src/srun/libsrun/launch.c
		name:       "srun: tasks ran out of memory",
		literals:   []string{"Out Of Memory"},
		expression: `srun: error: \S+: tasks? (?P<rank>\d+)?(?P<what>[\d,-]*): Out Of Memory`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return BatchKill{By: "Slurm", What: "task " + m.get("rank") + m.get("what")}
		},
	},
	{ // Slurm: src/srun/libsrun/launch.c
		name:     "srun: tasks ended",
		literals: []string{"srun: error:"},
		expression: `srun: error: \S+: tasks? (?P<task>\d+)(?P<more>[\d,-]*): (?:Exited with exit code (?P<code>\d+)|` +
			`(?P<sig>Killed|Terminated|Segmentation fault|Bus error|Aborted)(?: \(core dumped\))?)`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			f, _ := ended("Slurm")(m).(ProcessEnded)
			if m.get("more") == "" {
				f.Rank = m.integer("task", NoRank)
				m.rank = f.Rank
			}
			f.Victim = f.Signal == signals["TERM"] // from srun, which ends the step
			return f
		},
	},
	{ // Kubernetes in any of its texts, where the document could not be read as a whole
		name:       "Kubernetes: killed for memory",
		literals:   []string{"OOMKilled", "OOMKilling"},
		expression: `(?:[Rr]eason"?: *"?OOMKilled|\bOOMKilled"?[:=] ?(?P<docker>true)\b|\sOOMKilling\s)`,
		kind:       Kubernetes,
		fact: func(m *match) Fact {
			if m.get("docker") != "" {
				return BatchKill{By: "Docker"}
			}
			return BatchKill{By: "Kubernetes"}
		},
	},
	{ // kubelet: pkg/kubelet/oom/oom_watcher_linux.go
		name:       "Kubernetes: system out of memory",
		literals:   []string{"System OOM encountered"},
		expression: `System OOM encountered, victim process: (?P<what>[^,]+), pid: (?P<pid>\d+)`,
		kind:       Kubernetes, fact: batchKill("the kubelet"),
	},
	{ // docker events
		name:       "Docker: out of memory",
		literals:   []string{"container oom "},
		expression: `^(?:\S+ )?container oom (?P<what>[0-9a-f]{12,64}) \(`,
		kind:       Docker, fact: batchKill("Docker"),
	},
	{ // docker events
		name:       "Docker: container died",
		literals:   []string{"container die "},
		expression: `^(?:\S+ )?container die [0-9a-f]{12,64} \(.*exitCode=(?P<code>\d+)`,
		kind:       Docker, fact: ended("Docker"),
	},
	{ // docker events: docker stop waits, and then kills
		name:       "Docker: stopped",
		literals:   []string{"container stop "},
		expression: `^(?:\S+ )?container stop [0-9a-f]{12,64} \(`,
		kind:       Docker, fact: batchEnd("Docker", "stopped (docker stop)"),
	},
	{ // Kubernetes: pkg/controller/job
		name:       "Kubernetes: deadline",
		literals:   []string{"longer than specified deadline"},
		expression: `Job was active longer than specified deadline`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "time limit"),
	},
	{ // kueue: pkg/scheduler/preemption
		name:       "Kueue: preempted",
		literals:   []string{"Preempted to accommodate a workload"},
		expression: `Preempted to accommodate a workload`,
		kind:       Kubernetes, fact: batchEnd("Kueue", "preempted"),
	},
	{ // kubelet: pkg/kubelet/nodeshutdown
		name:       "Kubernetes: node shuts down",
		literals:   []string{"imminent node shutdown"},
		expression: `terminated in response to imminent node shutdown`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "node failure"),
	},
	{ // kubelet: pkg/kubelet/eviction/helpers.go
		name: "Kubernetes: evicted",
		literals: []string{"The node was low on resource", "The node had condition: [",
			"exceeds the total limit of containers", "exceeds the limit", "local ephemeral storage limit"},
		expression: `The node was low on resource: [\w-]+|The node had condition: \[\w+Pressure\b|` +
			`ephemeral local storage usage exceeds the total limit of containers|` +
			`exceeded its local ephemeral storage limit|` +
			`(?:EmptyDir|emptyDir) volume .*exceeds the limit`,
		kind: Kubernetes,
		take: func(r *reader, m *match) {
			for _, fact := range podEnds("Evicted", m.whole) {
				r.emit(m, fact)
			}
		},
	},
	{ // kubelet: pkg/kubelet/eviction/eviction_manager.go
		name:       "kubelet: evicts",
		literals:   []string{"must evict pod(s) to reclaim"},
		expression: `must evict pod\(s\) to reclaim"? (?:resourceName=)?"?(?P<what>[\w-]+)`,
		kind:       Kubernetes,
		fact: func(m *match) Fact {
			return BatchEnd{By: "Kubernetes", Reason: "evicted: the node was low on " + m.get("what")}
		},
	},
	{ // Kubernetes: pkg/scheduler/framework/preemption
		name:       "Kubernetes: preempted",
		literals:   []string{"Preempted by", "preempting to accommodate a higher priority pod"},
		expression: `\bPreempted by (?:a )?(?:pod )?\S+ on node \S+|preempting to accommodate a higher priority pod`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "preempted"),
	},
	{ // kubelet: pkg/kubelet/images
		name:       "Kubernetes: no image",
		literals:   []string{"ErrImagePull", "ImagePullBackOff"},
		expression: `\b(?:ErrImagePull|ImagePullBackOff)\b`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "its image could not be pulled"),
	},
	{ // Kubernetes: pkg/controller/nodelifecycle
		name:       "Kubernetes: node not ready",
		literals:   []string{"Node is not ready"},
		expression: `\bNodeNotReady\b.*Node is not ready`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "node failure"),
	},
	{ // Kubernetes: pkg/controller/job
		name:       "Kubernetes: backoff limit",
		literals:   []string{"reached the specified backoff limit"},
		expression: `Job has reached the specified backoff limit`,
		kind:       Kubernetes, fact: batchEnd("Kubernetes", "its pods have died too often"),
	},
	{ // Google Cloud Batch
		name:       "cloud: preempted",
		literals:   []string{"VM preemption"},
		expression: `due to (?:Spot )?VM preemption`,
		kind:       TrainerLog, fact: batchEnd("the cloud", "preempted"),
	},
	{ // kubelet: pkg/kubelet/kuberuntime/kuberuntime_manager.go
		name:       "Kubernetes: probe failed",
		literals:   []string{"probe, will be restarted"},
		expression: `Container \S+ failed (?P<probe>liveness|startup) probe, will be restarted`,
		kind:       Kubernetes,
		fact: func(m *match) Fact {
			return BatchEnd{By: "Kubernetes", Reason: "its " + m.get("probe") + " probe failed"}
		},
	},
	{ // systemd: src/core/service.c, src/core/unit.c
		name:     "systemd: killed for memory",
		literals: []string{"killed by the OOM killer", "oom-kill"},
		expression: `(?:(?P<what>\S+): )?(?:A process of this unit has been killed by the OOM killer|` +
			`Failed with result 'oom-kill'|.*\(Result: oom-kill\)|^Result=oom-kill|` +
			`The kernel OOM killer killed some processes in this unit)`,
		kind: SystemdLog, fact: batchKill("systemd"),
	},
	{ // systemctl show
		name:       "systemd: limit",
		literals:   []string{"MemoryMax="},
		expression: `^MemoryMax=(?P<max>\d{1,18})$`,
		kind:       SystemdLog,
		fact:       func(m *match) Fact { return Limit{Name: "memory.max", Bytes: m.size("max", 1)} },
	},
	{ // systemctl show
		name:       "systemd: peak",
		literals:   []string{"MemoryPeak="},
		expression: `^MemoryPeak=(?P<peak>\d{1,18})$`,
		kind:       SystemdLog,
		fact: func(m *match) Fact {
			return Counters{File: "memory.peak", Values: map[string]int64{"memory.peak": int64(m.integer("peak", 0))}}
		},
	},
	{ // systemd: src/core/service.c, systemctl status
		name:     "systemd: main process ended",
		literals: []string{"code=killed", "code=exited", "code=dumped"},
		expression: `(?:(?P<pid>\d+) )?.*?code=(?:(?:killed|dumped), (?:status=(?P<sig>\d+)/\w+|signal=(?P<signame>\w+))|` +
			`exited, status=(?P<code>\d+))`,
		kind: SystemdLog,
		fact: func(m *match) Fact {
			f, _ := ended("systemd")(m).(ProcessEnded)
			if f.Signal == 0 {
				f.Signal = signalOf(m.get("signame"))
			}
			f.PID = 0
			return f
		},
	},
	{ // systemd: src/coredump/coredump.c
		name:       "systemd-coredump",
		literals:   []string{"terminated abnormally with signal"},
		expression: `Process (?P<pid>\d+) \(.*\) .*terminated abnormally with signal (?P<sig>\d+)/`,
		kind:       SystemdLog, fact: ended("systemd-coredump"),
	},
	{ // systemd: src/oom/oomd-manager.c, src/core/unit.c
		name:     "systemd-oomd killed",
		literals: []string{"due to memory pressure for", "due to memory used", "systemd-oomd killed"},
		expression: `(?:Killed (?P<what>\S+) due to memory (?:pressure for|used)|systemd-oomd killed (?P<n>\d+) process|` +
			`systemd-oomd killed some process)`,
		kind: SystemdLog, fact: batchKill("systemd-oomd"),
	},
	{ // earlyoom: kill.c
		name:     "earlyoom killed",
		literals: []string{"sending SIGTERM to process", "sending SIGKILL to process", "with signal "},
		expression: `(?:sending (?P<sig>SIGTERM|SIGKILL) to|killing) process (?P<what>(?P<pid>\d+) (?:uid \d+ )?"[^"]*")` +
			`(?: with signal \d+: badness|: )`,
		kind: SystemdLog, fact: batchKill("earlyoom"),
	},
	{ // OOM killers of user space in any words: Talos, nohang, oomd of others
		name:     "user space: killed for memory",
		literals: []string{"OOMController", "nohang", "oomd", "oom-killer", "lmkd"},
		expression: `(?:OOMController|\bnohang\b|\boomd\b|\boom-killer\b|\blmkd\b).*\b(?:SIGKILL|[Kk]ill(?:ed|ing))\b|` +
			`\b(?:SIGKILL|[Kk]ill(?:ed|ing))\b.*(?:OOMController|\bnohang\b|\boomd\b|\blmkd\b)`,
		kind: SystemdLog, fact: batchKill(UserSpace),
	},
	{ // Ray: src/ray/gcs, src/ray/raylet. Ends of other types were wanted, or have lines of their own.
		name:       "Ray: worker died",
		literals:   []string{"Worker exit type: SYSTEM_ERROR"},
		expression: `(?:\b(?:Worker PID|pid): (?P<pid>\d+).*)?\bWorker exit type: SYSTEM_ERROR\b`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return WorkerEnded{Of: "Ray", PIDs: pids(m.get("pid"))}
		},
	},
	{ // Ray: src/ray/raylet, python/ray/exceptions.py
		name: "Ray: killed for memory",
		literals: []string{
			"running low on memory", "killed due to memory pressure (OOM)", "exceeds the memory usage threshold",
			"of the memory on node",
		},
		expression: `(?:(?P<n>\d+) Workers \(tasks / actors\) killed due to memory pressure|` +
			`was (?P<used>[\d.]+GB) / (?P<limit>[\d.]+GB) \([\d.]+\), which exceeds the memory usage threshold|` +
			`[Mm]ore than \d+% of the memory on node(?: \S+ is used \((?P<old>[\d.]+) / (?P<size>[\d.]+) GB\))?|` +
			`(?:(?P<count>\d+) worker\(s\) were )?(?:killed|died) due to the node running low on memory(?:\. Memory on ` +
			`the node \([^)]*\) was (?P<now>[\d.]+GB)(?: used)? / (?P<of>[\d.]+GB)(?: limit| \())?)`, // the latter from 2.56
		kind: TrainerLog,
		fact: func(m *match) Fact {
			if m.get("n") == "0" {
				return nil
			}
			kill := BatchKill{By: "Ray", Count: m.integer("n", 0), Limit: m.size("limit", 1), Used: m.size("used", 1)}
			switch {
			case m.get("old") != "":
				kill.Used, kill.Limit = m.size("old", ledger.GiB), m.size("size", ledger.GiB)
			case m.get("of") != "":
				kill.Count, kill.Used, kill.Limit = m.integer("count", 0), m.size("now", 1), m.size("of", 1)
			}
			return kill
		},
	},
	{ // other batch systems: LSF, PBS, HTCondor, SGE
		name: "batch system: memory limit",
		literals: []string{"TERM_MEMLIMIT", "exceeded limit", "memory usage exceeded", "memory limit of",
			"exceeds job hard limit", "exceeds job soft limit", "Cgroup mem"},
		expression: `(?:(?P<lsf>TERM_MEMLIMIT)|=>> PBS: job killed: (?:mem|vmem) \d+\w* exceeded limit|` +
			`Job was held\. .*memory usage exceeded|Job has gone over (?:cgroup )?memory limit of \d+ megabytes|` +
			`Cgroup mem(?:sw)? limit exceeded|` +
			`exceeds job (?:hard|soft) limit "[hs]_(?:vmem|rss|data)")`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			if m.get("lsf") != "" {
				return BatchKill{By: "LSF"}
			}
			return BatchKill{By: "batch system"}
		},
	},
	{ // runc, Nomad, Amazon ECS, Flux, YARN, hosting services: the words in which any of them may say it
		name: "a container or a job was killed for memory",
		literals: []string{"OOM Killed", "OOM-killed", "OOM killed", "oom-killed", "killed due to memory usage",
			"Memory cgroup out of memory: killed", "beyond the 'PHYSICAL' memory limit", "erminated due to OOM",
			"OOMKilled: ", "for exceeding memory limits", "ontainer exceeded", "ontainer has exceeded"},
		expression: `\b(?:OOM|oom)[- ][Kk]illed\b|[Cc]ontainer killed due to memory usage|\b[Tt]erminated due to OOM\b|` +
			`\bOOMKilled: [A-Z]|[Cc]ontainer killed by YARN for exceeding memory limits|` +
			`\b[Cc]ontainer (?:has )?exceeded (?:its |the )?memory limit\b|` +
			`Memory cgroup out of memory: killed \d+ task|beyond the 'PHYSICAL' memory limit`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			if strings.Contains(m.whole, "kill event") { // Slurm's, which names the step
				return nil
			}
			return BatchKill{By: "batch system"}
		},
	},
	{ // Ray: python/ray/exceptions.py. Where Ray itself has ended a worker for memory, a line of its own says so.
		name:       "Ray: a task ran out of memory",
		literals:   []string{"RayTaskError(OutOfMemoryError)"},
		expression: `\bRayTaskError\(OutOfMemoryError\)(?:: (?P<task>ray::\S+))?`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return Exception{Type: RemoteOutOfMemory, Message: m.get("task")} },
	},
	{ // what the sites of notebooks and of services show, and SageMaker's reason of a failure
		name: "hosted machine: out of memory",
		literals: []string{
			"after using all available RAM", "more memory than is available. It has restarted",
			"instance type with more memory", "Memory limit exceeded (", "Ran out of memory (used over", "Error R15 (",
		},
		expression: `^Memory limit exceeded \(\d+[KMGT]i?\)|\bRan out of memory \(used over |\bError R15 \(Memory quota|` +
			`Your session crashed after using all available RAM|` +
			`Your notebook tried to allocate more memory than is available\. It has restarted|` +
			`Please use an instance type with more memory`,
		kind: TrainerLog, fact: batchKill("the hosting service"),
	},
	{ // jupyter_client/ioloop/restarter.py, and what JupyterLab shows
		name:       "Jupyter: kernel restarted",
		literals:   []string{"KernelRestarter: restarting kernel", "appears to have died. It will restart"},
		expression: `KernelRestarter: restarting kernel|The kernel (?:for .* )?appears to have died\. It will restart`,
		kind:       TrainerLog, fact: batchEnd("Jupyter", "its kernel has died and starts again"),
	},
	{ // Grid Engine: qacct
		name:       "qacct: exit status",
		literals:   []string{"exit_status"},
		expression: `^exit_status\s+(?P<code>\d+)\b`,
		kind:       TrainerLog, fact: ended("Grid Engine"),
	},
	{ // OpenPBS: src/resmom/mom_main.c
		name:       "PBS: time limit",
		literals:   []string{"=>> PBS: job killed:"},
		expression: `=>> PBS: job killed: (?:walltime|cput|pcput) \d+ exceeded limit`,
		kind:       TrainerLog, fact: batchEnd("PBS", "time limit"),
	},
	{
		name:       "LSF: time limit",
		literals:   []string{"TERM_RUNLIMIT"},
		expression: `TERM_RUNLIMIT`,
		kind:       TrainerLog, fact: batchEnd("LSF", "time limit"),
	},
}

// RemoteOutOfMemory is the type of the exception that shows an error of PyTorch in a task of Ray.
const RemoteOutOfMemory = "RayTaskError(OutOfMemoryError)"

// UserSpace is an OOM killer that is a program and not the kernel's.
const UserSpace = "an OOM killer in user space"
