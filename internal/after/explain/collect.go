package explain

import (
	"slices"

	"plimsoll/internal/after/evidence"
)

// Commands that find evidence.
var (
	collectKernel = Collect{`journalctl -k --since "1 hour ago" | grep -iE -A40 "oom|killed process"`,
		"the kernel names the process that it killed, and the limit that was reached"}
	collectCounters = Collect{"cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/memory.events",
		"oom and oom_kill count what the kernel did at the cgroup's limit; read it before the job and after"}
	collectRecording = Collect{"plimsoll run --record run.jsonl -- COMMAND",
		"the recording has the memory of every rank, the counters, and the order in which ranks ended"}
	collectRanks = Collect{"torchrun --log-dir logs --tee 3 ...",
		"the log of each rank in a file of its own shows which rank failed first"}
	collectRay = Collect{`grep -iE "killed|signal|exit|memory" /tmp/ray/session_latest/logs/raylet.*`,
		"Ray's log says how the process ended; worker-*.err beside it has what the process printed"}
	collectStore  = Collect{"ray memory", "who refers to the objects of the store, and how full it is"}
	collectStacks = Collect{"py-spy dump --pid PID",
		"the stack of each rank, while the job hangs: the rank that stands elsewhere than the others is the one"}
	collectSlurm = Collect{"sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS,ReqMem,Timelimit",
		"Slurm says whether it ended the job, and why"}
	collectMessages = Collect{`journalctl --since "1 hour ago" | grep -iE "earlyoom|oomd|killed|terminat"`,
		"services that free memory say whom they ended"}
	collectSnapshot = Collect{"python -c 'import torch; torch.cuda.memory._record_memory_history(); ...; " +
		"torch.cuda.memory._dump_snapshot(\"oom.pickle\")'",
		"a snapshot has every block with its stack: call both in the training script, then plimsoll explain oom.pickle"}
	collectGPU = Collect{"nvidia-smi --query-gpu=index,memory.total,memory.used,memory.free --format=csv",
		"it shows whether the GPU is full, also by other processes"}
	collectLimits = Collect{"ulimit -a; cat /proc/sys/vm/overcommit_memory; grep -E 'Mem|Commit' /proc/meminfo",
		"limits of the process and of the host on memory that is only promised"}
	collectHolders = Collect{"ps aux --sort=-rss | head -20; cat /proc/meminfo; df -h /dev/shm",
		"who holds memory of the host, while the job runs: plimsoll explain reads all three"}
	collectShared  = Collect{"df -h /dev/shm", "its size and what is in use"}
	collectBacks   = Collect{"PYTHONFAULTHANDLER=1 COMMAND", "Python then prints where it was when the signal came"}
	collectThreads = Collect{"ulimit -u; cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/pids.*",
		"the limits of the number of processes"}
	collectFiles = Collect{`ls -l FILES; df -h; journalctl -k --since "1 hour ago" | grep -iE "I/O error|nfs|lustre|ceph"`,
		"whether the files that were read are whole, and what their disk or network file system said"}
	collectTask = Collect{`grep -rlE "out of memory" /tmp/ray/session_latest/logs/worker-*`,
		"the log of the task has PyTorch's error with its sizes"}
	collectDisk = Collect{"df -h .; df -i .; quota -s", "space, inodes and quota of the file system"}
)

// collect returns the commands that would make an explanation surer, or find the holders.
func (s *scene) collect(top claim, e *Explanation) []Collect {
	var list []Collect
	if e.Confidence == Certain {
		if top.resource == GPU && top.detail == "capacity" && len(s.Plans) == 0 && s.shot == nil {
			list = append(list, collectSnapshot)
		}
		return list
	}
	if top.detail == mapped {
		list = append(list, collectFiles)
	}
	switch top.resource {
	case GPU:
		if e, ok := top.at.Fact.(evidence.Exception); ok && e.Type == evidence.RemoteOutOfMemory {
			list = append(list, collectTask)
		}
		list = append(list, collectGPU)
		if s.shot == nil {
			list = append(list, collectSnapshot)
		}
	case Host, AddressSpace, NUMANode:
		if _, killed := top.at.Fact.(evidence.BatchKill); killed {
			list = append(list, collectHolders, collectKernel)
		} else {
			list = append(list, collectLimits, collectKernel)
		}
	case CGroup:
		list = append(list, collectKernel)
		if len(all[oomCounts](s.findings)) == 0 {
			list = append(list, collectCounters)
		}
	case SharedMemory:
		if top.detail == evidence.RayStore {
			list = append(list, collectStore)
		}
		list = append(list, collectShared)
	case LockedMemory:
		list = append(list, Collect{"ulimit -l", "the limit of locked memory; it is inherited from the shell or the " +
			"container"})
	case Processes:
		list = append(list, collectThreads)
	case Disk:
		list = append(list, collectDisk)
	case Undetermined:
		list = append(list, s.collectUndetermined()...)
	}
	if len(s.Recordings) == 0 && top.resource != NotMemory && top.resource != Disk {
		list = append(list, collectRecording)
	}
	return list
}

// collectUndetermined returns what would tell the cause of an end that nothing explains yet.
func (s *scene) collectUndetermined() []Collect {
	if s.witness == nil || s.witness.how == killed {
		list := []Collect{collectKernel, collectCounters}
		if s.by("Slurm") {
			list = append(list, collectSlurm)
		}
		return list
	}
	switch s.witness.how {
	case lacked:
		return []Collect{collectLimits}
	case faulted:
		return []Collect{collectShared, collectBacks}
	case crashed:
		if s.askedToEnd() {
			return []Collect{collectSlurm, collectMessages, collectRanks}
		}
		return []Collect{collectBacks, collectRanks}
	}
	if w, ok := s.witness.says[0].Fact.(evidence.WorkerEnded); ok && w.Of == "Ray" {
		return []Collect{collectRay, collectKernel}
	}
	return []Collect{collectRanks, collectKernel}
}

// askedToEnd reports whether the first end is that of SIGTERM.
func (s *scene) askedToEnd() bool {
	return slices.ContainsFunc(all[evidence.ProcessEnded](s.witness.says), func(f seen[evidence.ProcessEnded]) bool {
		return f.fact.Signal == evidence.SIGTERM
	})
}

// by reports whether a batch system or launcher has a word in the files.
func (s *scene) by(name string) bool {
	for _, f := range s.findings {
		switch fact := f.Fact.(type) {
		case evidence.ProcessEnded:
			if fact.By == name {
				return true
			}
		case evidence.BatchEnd:
			if fact.By == name {
				return true
			}
		}
	}
	return false
}
