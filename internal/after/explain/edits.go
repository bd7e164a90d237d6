package explain

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
)

// allocConf is PyTorch's variable for its allocator.
const allocConf = "PYTORCH_CUDA_ALLOC_CONF"

// edits returns the changes that suit the cause. Where the job can be planned, only changes whose effect is known are
// offered for a full device.
func (s *scene) edits(top claim, phase *ledger.PhaseName) []Edit {
	list := s.plannedEdits(top, phase)
	if top.resource != GPU || top.detail != "capacity" || len(list) == 0 {
		list = append(list, s.fixedEdits(top)...)
	}
	if s.plan == nil || !s.plan.Lacks() {
		slices.SortStableFunc(list, func(a, b Edit) int { return cmp.Compare(b.Frees, a.Frees) })
	}
	return list
}

// edit is a change that is not planned.
func edit(key, from, to, why string) Edit {
	return Edit{Edit: amend.Edit{Key: key, From: from, To: to}, Why: why}
}

// freeing returns the edit with the bytes that it frees.
func (e Edit) freeing(bytes ledger.Bytes) Edit {
	e.Frees = bytes
	return e
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
			edit("--shm-size", "64m", "16g",
				"docker run gives a container 64 MiB of /dev/shm; in Kubernetes mount an emptyDir of medium "+
					"Memory at /dev/shm"),
			edit("num_workers", "", "fewer", "every worker of a DataLoader keeps its batches in /dev/shm"),
		}
	case LockedMemory:
		return []Edit{
			edit("ulimit -l", "", "unlimited",
				"RLIMIT_MEMLOCK limits mlock, io_uring and RDMA; for containers docker run --ulimit memlock=-1, "+
					"for services LimitMEMLOCK=infinity"),
		}
	case AddressSpace:
		return []Edit{edit("ulimit -v", "", "unlimited",
			"CUDA and large mappings reserve far more addresses than memory, so a limit of addresses stops jobs "+
				"whose memory would fit")}
	case NUMANode:
		return []Edit{
			edit("--memory-policy", "bind", "preferred",
				"plimsoll run --memory-policy preferred, or numactl --preferred: the kernel then takes memory of "+
					"other nodes when one is full"),
			edit("numactl --membind", "", "numactl --interleave", "memory then comes from all nodes in turn"),
		}
	case Processes:
		return []Edit{
			edit("ulimit -u", "", "higher",
				"RLIMIT_NPROC counts all threads of the user; in containers docker run --pids-limit, in services "+
					"TasksMax"),
			edit("OMP_NUM_THREADS", "", "fewer", "every rank and every worker starts that many threads"),
		}
	case NotMemory:
		if _, files := top.at.Fact.(evidence.TooManyFiles); files {
			return []Edit{
				edit("ulimit -n", "", "higher", "RLIMIT_NOFILE counts sockets and shared tensors, too"),
				edit("torch.multiprocessing.set_sharing_strategy", "file_descriptor", "file_system",
					"shared tensors then keep no descriptor open"),
			}
		}
	case Disk:
		return []Edit{edit("save_total_limit", "", "fewer",
			"older checkpoints are then deleted; or save to a file system with more space")}
	}
	return nil
}

func gpuEdits(top claim) []Edit {
	f, _ := top.at.Fact.(evidence.GPUOutOfMemory)
	expandable := edit(allocConf, "", "expandable_segments:True",
		"the allocator then grows segments in place, so that reserved memory does not break into pieces")
	switch top.detail {
	case "fragmentation":
		expandable.Frees = slack(f)
		return []Edit{expandable}
	case "fraction cap":
		return []Edit{edit("torch.cuda.set_per_process_memory_fraction",
			fmt.Sprintf("%.2f", float64(f.Allowed.Bytes)/float64(max(f.Total.Bytes, 1))), "1.0",
			"the process may then use all of the GPU").freeing(max(f.Free.Bytes, 0))}
	case "another process":
		return []Edit{edit("CUDA_VISIBLE_DEVICES", "", "a GPU without other processes",
			"or end the other processes, which the error lists by their PIDs").freeing(others(f))}
	case "memory outside PyTorch":
		return []Edit{edit("NCCL_BUFFSIZE", "4194304", "1048576",
			"NCCL's buffers lie outside of PyTorch, and every communicator has its own")}
	case "capacity":
		return []Edit{
			edit("micro batch", "", "half, with twice the accumulation steps",
				"activations shrink with it, and the global batch stays"),
			edit("gradient_checkpointing", "false", "true",
				"the backward pass recomputes activations instead of keeping them"),
		}
	}
	return nil
}

func hostEdits(top claim) []Edit {
	switch top.detail {
	case pinned:
		return []Edit{
			edit("pin_memory", "true", "false",
				"PyTorch rounds pinned blocks up to powers of two, and pinned memory cannot be swapped"),
		}
	case "overcommit":
		return []Edit{edit("vm.overcommit_memory", "2", "0",
			"the kernel then promises memory beyond CommitLimit, as CUDA and PyTorch expect (sysctl)")}
	}
	return []Edit{
		edit("num_workers", "", "fewer", "every worker of a DataLoader is a process of its own"),
		edit("low_cpu_mem_usage", "false", "true", "a rank then loads the weights once, not twice"),
	}
}

// groupEdits raises the limit to what was needed at least. The kernel had stopped the job at its limit, so that what
// it needs in all is not known.
func (s *scene) groupEdits(top claim) []Edit {
	from, to := "", "more"
	if limit := limitOf(top.at.Fact); limit > 0 {
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
	return append([]Edit{edit(key, from, to, why)}, hostEdits(claim{})...)
}

// limitOf returns the limit of the cgroup that a fact says was reached, or 0.
func limitOf(fact evidence.Fact) ledger.Bytes {
	switch f := fact.(type) {
	case evidence.KernelKill:
		return f.Limit.Bytes
	case oomCounts:
		if at := f.atLimit(); at != nil {
			return at.limit
		}
	case evidence.BatchKill:
		return f.Limit.Bytes
	}
	return 0
}

func (s *scene) killedBy(name string) bool {
	return slices.ContainsFunc(all[evidence.BatchKill](s.findings), func(f seen[evidence.BatchKill]) bool {
		return f.fact.By == name
	})
}
