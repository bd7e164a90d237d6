package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/amend"
)

// allocConf is PyTorch's variable for its allocator.
const allocConf = "PYTORCH_CUDA_ALLOC_CONF"

// edits returns the changes that suit the cause. Where the job can be planned, only changes whose effect is known are
// offered for a full device.
func (s *scene) edits(top claim, phase *ledger.PhaseName) []Edit {
	var list []Edit
	if f, ok := top.at.Fact.(evidence.GPUOutOfMemory); !ok || f.Within == "" { // plans are of training
		list = s.plannedEdits(top, phase)
	}
	if top.resource != GPU || top.detail != "capacity" || len(list) == 0 {
		list = append(list, s.fixedEdits(top, phase)...)
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
func (s *scene) fixedEdits(top claim, phase *ledger.PhaseName) []Edit {
	switch top.resource {
	case GPU:
		return s.gpuEdits(top, phase)
	case Host:
		return s.hostEdits(top, phase)
	case CGroup:
		return s.groupEdits(top, phase)
	case SharedMemory:
		return s.sharedEdits(top)
	case LockedMemory:
		return []Edit{
			edit("ulimit -l", "", "unlimited",
				"RLIMIT_MEMLOCK limits mlock, io_uring and RDMA; for containers docker run --ulimit memlock=-1, "+
					"for services LimitMEMLOCK=infinity"),
		}
	case AddressSpace:
		unlimited := edit("ulimit -v", "", "unlimited", "CUDA and large mappings reserve far more addresses than "+
			"memory, so a limit of addresses stops jobs whose memory would fit")
		if top.detail == segmentAddresses {
			return []Edit{unlimited, edit("expandable_segments_reserve", "", "fewer bytes", "of "+
				"PYTORCH_CUDA_ALLOC_CONF: every stream sets apart addresses for 9/8 of the GPU's memory")}
		}
		return []Edit{unlimited}
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
		if top.detail == fileSize {
			return []Edit{edit("ulimit -f", "", "unlimited", "RLIMIT_FSIZE limits each file that a process writes")}
		}
		return []Edit{edit("save_total_limit", "", "fewer",
			"older checkpoints are then deleted; or save to a file system with more space")}
	}
	return nil
}

func (s *scene) sharedEdits(top claim) []Edit {
	full, _ := top.at.Fact.(evidence.SharedMemoryFull)
	if top.detail == evidence.RayStore {
		from := ""
		if p := s.pool(top); p != nil && p.fact.Size.Known {
			from = p.fact.Size.String()
		}
		return []Edit{
			edit("--object-store-memory", from, "more", "ray start and ray.init (object_store_memory) set the store's "+
				"budget apart from shared memory; by default it is 30 % of the node"),
			edit("objects that are held", "", "fewer", "the store cannot spill an object that a task uses or a "+
				"variable refers to"),
		}
	}
	from, to := "", "16g"
	if _, size := s.sharedMemory(); size > 0 {
		from = size.String()
		if size >= 16*ledger.GiB {
			to = "more"
		}
	}
	list := []Edit{edit("--shm-size", from, to, "docker run gives a container 64 MiB of /dev/shm; in Kubernetes "+
		"mount an emptyDir of medium Memory at /dev/shm")}
	if full.By != "NCCL" || s.hasLoaders() {
		list = append(list, edit("num_workers", "", "fewer", "every worker of a DataLoader keeps its batches in "+
			"/dev/shm"))
	}
	return list
}

func (s *scene) gpuEdits(top claim, phase *ledger.PhaseName) []Edit {
	f, _ := top.at.Fact.(evidence.GPUOutOfMemory)
	expandable := edit(allocConf, "", "expandable_segments:True",
		"the allocator then grows segments in place, so that reserved memory does not break into pieces")
	switch top.detail {
	case "fragmentation":
		expandable.Frees = slack(f)
		switch {
		case s.shows(evidence.SleepMode, "true"):
			return []Edit{edit("gpu_memory_utilization", "", "lower", "the engine that sleeps cannot wake up beside "+
				"memory in pieces, and its allocator refuses expandable_segments: empty PyTorch's "+
				"cache before it wakes up")}
		case s.shows(evidence.ExpandableSegments, "true"):
			return []Edit{edit("torch.cuda.empty_cache", "", "between phases of training",
				"expandable_segments is on, and pieces are left all the same")}
		}
		return []Edit{expandable}
	case "fraction cap":
		return []Edit{edit("torch.cuda.set_per_process_memory_fraction",
			fmt.Sprintf("%.2f", float64(f.Allowed.Bytes)/float64(max(f.Total.Bytes, 1))), "1.0",
			"the process may then use all of the GPU").freeing(max(f.Free.Bytes, 0))}
	case waking:
		return []Edit{
			edit("gpu_memory_utilization", "", "lower", "the engine then maps less when it wakes; mem_fraction_static "+
				"of SGLang"),
			edit("the trainer's parameters and optimizer states", "on the GPU", "on the host while the engine is awake",
				"param_offload and optimizer_offload of verl; the engine and the trainer need the GPU in turns"),
			edit("torch.cuda.empty_cache", "", "before the engine wakes",
				"PyTorch then gives back what it has reserved and no tensor uses"),
		}
	case "another process":
		return []Edit{edit("CUDA_VISIBLE_DEVICES", "", "a GPU without other processes",
			"or end the other processes, which the error lists by their PIDs").freeing(others(f))}
	case "memory outside PyTorch":
		return []Edit{edit("NCCL_BUFFSIZE", "4194304", "1048576",
			"NCCL's buffers lie outside of PyTorch, and every communicator has its own")}
	case "capacity":
		return s.capacityEdits(f, phase)
	}
	return nil
}

// capacityEdits suit what the program did: a smaller micro batch frees nothing while a checkpoint is saved.
func (s *scene) capacityEdits(f evidence.GPUOutOfMemory, phase *ledger.PhaseName) []Edit {
	switch {
	case f.Within == evidence.Generation:
		return []Edit{edit("sequences generated at once", "", "fewer, or shorter ones",
			"every token that is generated keeps its keys and values")}
	case f.Within == evidence.Evaluation:
		return []Edit{
			edit("per_device_eval_batch_size", "", "fewer", "an evaluation has a batch size of its own"),
			edit("eval_accumulation_steps", "", "1", "predictions then go to the host, and do not stay on the GPU"),
		}
	case phase != nil && *phase == ledger.Checkpoint:
		return []Edit{edit("the state that is saved", "full", "sharded, or on the CPU",
			"a full state is gathered on one GPU before it is written")}
	case phase != nil && *phase == ledger.Load:
		return []Edit{edit("the load", "", "on the CPU, in shards or in 16 bit",
			"the weights then are not on the GPU twice")}
	}
	if phase != nil && *phase == ledger.Step {
		return []Edit{
			edit("optimizer", "", "of 8 bits, with states on the host, or divided among ranks (ZeRO, FSDP)",
				"no activation is held in the optimizer's step, so that a smaller micro batch frees nothing there"),
			edit("foreach", "", "False, or fused=True",
				"the step then has no temporary tensors of all parameters at once"),
		}
	}
	list := []Edit{edit("micro batch", "", "half, with twice the accumulation steps",
		"activations shrink with it, and the global batch stays")}
	if !s.shows("gradient_checkpointing", "true") {
		list = append(list, edit("gradient_checkpointing", "false", "true",
			"the backward pass recomputes activations instead of keeping them"))
	}
	return list
}

// shows reports whether the log shows a setting with a value.
func (s *scene) shows(name, value string) bool {
	return slices.ContainsFunc(all[evidence.Setting](s.findings), func(f seen[evidence.Setting]) bool {
		return f.fact.Name == name && f.fact.Value == value
	})
}

// hasLoaders reports whether a file shows that workers load data.
func (s *scene) hasLoaders() bool {
	for _, f := range s.findings {
		switch fact := f.Fact.(type) {
		case evidence.WorkerEnded:
			if fact.Of == "" {
				return true
			}
		case evidence.SharedMemoryFull:
			if fact.By == "DataLoader" {
				return true
			}
		case evidence.Setting:
			if fact.Name == evidence.Workers && fact.Value != "0" {
				return true
			}
		}
	}
	return false
}

func (s *scene) hostEdits(top claim, phase *ledger.PhaseName) []Edit {
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
	var list []Edit
	if unused := s.unusedHugePages(top); unused > 0 && top.resource == Host {
		list = append(list, edit("vm.nr_hugepages", "", "fewer", "the pools of huge pages hold memory that nobody "+
			"uses, and nothing else can use it (sysctl)").freeing(unused))
	}
	if kill, ok := top.at.Fact.(evidence.BatchKill); ok && kill.By == "Ray" && kill.Limit.Known &&
		kill.Used.Bytes < kill.Limit.Bytes/10*9 {
		list = append(list, edit("RAY_memory_usage_threshold",
			fmt.Sprintf("%.2f or less", float64(kill.Used.Bytes)/float64(kill.Limit.Bytes)), "0.95",
			"Ray ends workers from that share of the memory on, and the node had more"))
	}
	if s.hasLoaders() {
		list = append(list, edit("num_workers", "", "fewer", "every worker of a DataLoader is a process of its own"))
	}
	if phase != nil && *phase == ledger.Load && !s.hasNewTransformers() {
		list = append(list, edit("low_cpu_mem_usage", "false", "true", "a rank then loads the weights once, not twice"))
	}
	if len(list) == 0 {
		list = append(list, edit("ranks on a node", "", "fewer, or a node with more memory",
			"every rank has its own copies on the host"))
	}
	return list
}

// hasNewTransformers reports whether the log shows a release that loads weights once whatever the flag says.
func (s *scene) hasNewTransformers() bool {
	return slices.ContainsFunc(all[evidence.Setting](s.findings), func(f seen[evidence.Setting]) bool {
		major, err := strconv.Atoi(f.fact.Value)
		return f.fact.Name == evidence.TransformersMajor && err == nil && major >= 5
	})
}

// groupEdits raises the limit to what was needed at least. The kernel had stopped the job at its limit, so that what
// it needs in all is not known.
func (s *scene) groupEdits(top claim, phase *ledger.PhaseName) []Edit {
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
	return append([]Edit{edit(key, from, to, why)}, s.hostEdits(claim{}, phase)...)
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
