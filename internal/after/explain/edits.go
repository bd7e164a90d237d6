package explain

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// allocConf is PyTorch's variable for its allocator.
const allocConf = "PYTORCH_CUDA_ALLOC_CONF"

// mostEdits is how many changes an explanation offers.
const mostEdits = 6

// edits returns the changes that suit the cause, the one that frees most first. Where the job can be planned, only
// changes whose effect is known are offered for a full device.
func (s *scene) edits(top claim, phase *ledger.PhaseName) []Edit {
	list := s.plannedEdits(top, phase)
	if top.resource != GPU || top.detail != "capacity" || len(list) == 0 {
		list = append(list, s.fixedEdits(top)...)
	}
	return ranked(list)
}

// ranked returns the changes that free most, the first one most, and one of each key.
func ranked(list []Edit) []Edit {
	slices.SortStableFunc(list, func(a, b Edit) int { return cmp.Compare(b.Frees, a.Frees) })
	best := []Edit{}
	for _, e := range list {
		if !slices.ContainsFunc(best, func(other Edit) bool { return other.File == e.File && other.Key == e.Key }) {
			best = append(best, e)
		}
	}
	return best[:min(len(best), mostEdits)]
}

// fixedEdits are the changes that a cause has by itself, without a plan.
func (s *scene) fixedEdits(top claim) []Edit {
	switch top.resource {
	case GPU:
		return gpuEdits(top)
	case Host:
		return hostEdits(top)
	case CGroup:
		return s.groupEdits(top)
	case SharedMemory:
		return []Edit{
			{Key: "--shm-size", From: "64m", To: "16g", Why: "docker run gives a container 64 MiB of /dev/shm; in " +
				"Kubernetes mount an emptyDir of medium Memory at /dev/shm"},
			{Key: "num_workers", To: "fewer", Why: "every worker of a DataLoader keeps its batches in /dev/shm"},
		}
	case LockedMemory:
		return []Edit{
			{Key: "ulimit -l", To: "unlimited", Why: "RLIMIT_MEMLOCK limits mlock, io_uring and RDMA; for containers " +
				"docker run --ulimit memlock=-1, for services LimitMEMLOCK=infinity"},
		}
	case AddressSpace:
		return []Edit{{Key: "ulimit -v", To: "unlimited", Why: "CUDA and large mappings reserve far more addresses " +
			"than memory, so a limit of addresses stops jobs whose memory would fit"}}
	case NUMANode:
		return []Edit{
			{Key: "--memory-policy", From: "bind", To: "preferred", Why: "plimsoll run --memory-policy preferred, or " +
				"numactl --preferred: the kernel then takes memory of other nodes when one is full"},
			{Key: "numactl --membind", To: "numactl --interleave", Why: "memory then comes from all nodes in turn"},
		}
	case Processes:
		return []Edit{
			{Key: "ulimit -u", To: "higher", Why: "RLIMIT_NPROC counts all threads of the user; in containers " +
				"docker run --pids-limit, in services TasksMax"},
			{Key: "OMP_NUM_THREADS", To: "fewer", Why: "every rank and every worker starts that many threads"},
		}
	case Disk:
		return []Edit{{Key: "save_total_limit", To: "fewer", Why: "older checkpoints are then deleted; or save to a " +
			"file system with more space"}}
	}
	return nil
}

func gpuEdits(top claim) []Edit {
	f, _ := top.at.Fact.(evidence.GPUOutOfMemory)
	expandable := Edit{Key: allocConf, To: "expandable_segments:True", Why: "the allocator then grows segments in " +
		"place, so that reserved memory does not break into pieces"}
	switch top.detail {
	case "fragmentation":
		expandable.Frees = slack(f)
		return []Edit{expandable}
	case "fraction cap":
		return []Edit{{Key: "torch.cuda.set_per_process_memory_fraction", To: "1.0", Frees: max(f.Free.Bytes, 0),
			From: fmt.Sprintf("%.2f", float64(f.Allowed.Bytes)/float64(max(f.Total.Bytes, 1))),
			Why:  "the process may then use all of the GPU"}}
	case "another process":
		return []Edit{{Key: "CUDA_VISIBLE_DEVICES", To: "a GPU without other processes", Frees: others(f),
			Why: "or end the other processes, which the error lists by their PIDs"}}
	case "memory outside PyTorch":
		return []Edit{{Key: "NCCL_BUFFSIZE", From: "4194304", To: "1048576", Why: "NCCL's buffers lie outside of " +
			"PyTorch, and every communicator has its own"}}
	case "capacity":
		return []Edit{
			{Key: "micro batch", To: "half, with twice the accumulation steps",
				Why: "activations shrink with it, and " +
					"the global batch stays"},
			{Key: "gradient_checkpointing", From: "false", To: "true",
				Why: "the backward pass recomputes activations " +
					"instead of keeping them"},
		}
	}
	return nil
}

func hostEdits(top claim) []Edit {
	switch top.detail {
	case pinned:
		return []Edit{
			{Key: "pin_memory", From: "true", To: "false", Why: "PyTorch rounds pinned blocks up to powers of two, " +
				"and pinned memory cannot be swapped"},
		}
	case "overcommit":
		return []Edit{{Key: "vm.overcommit_memory", From: "2", To: "0", Why: "the kernel then promises memory beyond " +
			"CommitLimit, as CUDA and PyTorch expect (sysctl)"}}
	}
	return []Edit{
		{Key: "num_workers", To: "fewer", Why: "every worker of a DataLoader is a process of its own"},
		{Key: "low_cpu_mem_usage", From: "false", To: "true", Why: "a rank then loads the weights once, not twice"},
	}
}

// groupEdits raises the limit to what was needed at least. The kernel had stopped the job at its limit, so that what
// it needs in all is not known.
func (s *scene) groupEdits(top claim) []Edit {
	limit := ledger.Bytes(0)
	switch f := top.at.Fact.(type) {
	case evidence.KernelKill:
		limit = f.Limit.Bytes
	case oomCounts:
		if at := f.atLimit(); at != nil {
			limit = at.limit
		}
	case evidence.BatchKill:
		limit = f.Limit.Bytes
	}
	from, to := "", "more"
	if limit > 0 {
		from, to = limit.String(), "more than "+limit.String()
	}
	key, why := "memory.max", "of the cgroup, if the host has more memory"
	switch {
	case s.by("Slurm"), s.killedBy("Slurm"):
		key, why = "#SBATCH --mem", "Slurm limits the memory of a job's cgroup to what it asked for"
	case s.by("Kubernetes"), s.killedBy("Kubernetes"):
		key, why = "resources.limits.memory", "Kubernetes limits the container's cgroup to it"
	case s.killedBy("Docker"):
		key, why = "docker run --memory", "Docker limits the container's cgroup to it"
	}
	return append([]Edit{{Key: key, From: from, To: to, Why: why}}, hostEdits(claim{})...)
}

func (s *scene) killedBy(name string) bool {
	return slices.ContainsFunc(all[evidence.BatchKill](s.findings), func(f seen[evidence.BatchKill]) bool {
		return f.fact.By == name
	})
}
