// Package evidence reads what people have after a failure: logs of trainers, launchers and kernels, counters, and
// documents of batch systems. It tells the kinds of files apart by their content, and makes typed facts of their lines.
// It draws no conclusion; package explain does.
package evidence

import (
	"time"

	"plimsoll/internal/base/ledger"
)

// Line is a line of a file.
type Line struct {
	File   string
	Number int    // from 1; 0 for a file without lines
	Text   string // without colours and labels, shortened
}

// NoRank is the rank of a finding whose line does not name one.
const NoRank = -1

// Finding is one thing that a file says. Findings of a file are in its order.
type Finding struct {
	Line
	Rank int // NoRank if unknown
	// Process is the label in front of the line that tells processes of one file apart, such as a container's or Ray's.
	Process string
	// Left is how many lines its file, or the output of its process, goes on for.
	Left int
	// Time is when it happened, or zero. Kernel logs count from the boot: Uptime.
	Time   time.Time
	Uptime time.Duration
	Fact   Fact
}

// Fact is what a line, or several, say. It is one of the types of this file.
type Fact interface {
	// Says is the fact in one sentence without its period, in the field's words.
	Says() string
}

// What a program did beside training when memory ran out.
const (
	Evaluation = "evaluation"
	Generation = "generation"
)

// Unlimited is the value of a counter that is no limit: "max".
const Unlimited = -1

// Size is a number of bytes that a text may leave out, or round. PyTorch prints GiB with two decimals.
type Size struct {
	Bytes ledger.Bytes
	Known bool
	// Beyond is set if no machine has that much: a product of broken factors, or a driver's "not available".
	Beyond bool
}

// Facts of trainers.
type (
	// GPUOutOfMemory is PyTorch's error of its caching allocator.
	GPUOutOfMemory struct {
		Backend   string // CUDA, HIP, XPU, NPU, MPS
		Device    int
		Requested Size // the size of the segment, not of the tensor
		Total     Size
		Free      Size // on the device, for everyone
		Allowed   Size // by set_per_process_memory_fraction
		Allocated Size
		Reserved  Size // allocated and cached
		Pools     Size // the part of Allocated in private pools, such as those of CUDA graphs
		Self      Size // all that this process holds, context and libraries included
		Others    []GPUProcess
		Within    string // Evaluation or Generation, as the traceback tells; else empty
	}

	// AllocationRetried is a warning: the allocator failed once, and frees its cache before it tries again.
	AllocationRetried struct {
		Device          int
		Requested, Free Size
		Total           Size
	}

	// CacheFlushed is DeepSpeed's warning that the allocator has flushed its cache.
	CacheFlushed struct{ Times int }

	// DriverOutOfMemory is an error of the CUDA runtime or driver. It comes from GPU memory or, when memory is pinned,
	// from the host.
	DriverOutOfMemory struct {
		Call    string // as far as the text says
		Pinning bool   // the traceback or the text names pinned memory
		Waking  bool   // a rollout engine maps its memory again after it slept
	}

	// LibraryFailed is an error of a CUDA library that may come from missing memory.
	LibraryFailed struct {
		Library string // cuBLAS, cuDNN, NCCL, Triton
		Status  string
		Memory  bool // the text says that memory was missing
	}

	// HostAllocationFailed is an allocation of host memory that the kernel has refused.
	HostAllocationFailed struct {
		By        string // DefaultCPUAllocator, mmap, numpy, Python, malloc, fork, std::bad_alloc, [SegmentAddresses]
		Requested Size
		Errno     int // 0 if unknown
		File      string
	}

	// LockFailed is memory that could not be locked or pinned.
	LockFailed struct {
		By        string // mlock, io_uring, ibverbs, cudaHostRegister
		Requested Size
	}

	// SharedMemoryFull is a full /dev/shm, or a full part of it such as [RayStore].
	SharedMemoryFull struct {
		By, Path  string
		Requested Size
	}

	// BusError is SIGBUS: a page of a mapped file could not be had.
	BusError struct {
		PID   int
		Reads string // the call that read a file, where the process tells what it was doing; else empty
	}

	// DiskFull is ENOSPC, EDQUOT or EFBIG.
	DiskFull struct {
		Path  string
		Quota bool
		// TooLarge is set if the file alone is larger than a limit of the process or of the file system allows.
		TooLarge bool
		// Assumed is set if the text says only that writing has failed.
		Assumed bool
	}

	// TooManyProcesses is EAGAIN from fork or clone, or "can't start new thread".
	TooManyProcesses struct {
		By    string
		Group string // a cgroup whose limit of processes the kernel has named in its log
	}

	// WorkerEnded is a data loader's worker that has ended before its rank.
	WorkerEnded struct {
		PIDs   []int
		Signal string // as the text names it; empty if it does not
		Of     string // whose worker, where not a data loader's: a pool of processes, as of datasets' map, or Ray's
	}

	// Exception is a Python exception that says nothing of memory, the last one of a traceback.
	Exception struct{ Type, Message string }

	// CollectiveFailed is a collective whose peer is gone, or that has timed out: a victim of another rank.
	CollectiveFailed struct{ By, What string }

	// MemoryUsage is a line with memory that a framework prints.
	MemoryUsage struct {
		By                                               string // the framework
		Tag                                              string
		Allocated, PeakAllocated, Reserved, PeakReserved Size
		HostUsed                                         Size // of the whole node
		HostPercent                                      float64
		Pinned                                           Size
	}

	// EngineSlept is a rollout engine that went to sleep: what it gave back of its GPU, and what stayed in use there.
	EngineSlept struct{ Freed, Left Size }

	// Estimate is a line of a framework's own estimate.
	Estimate struct {
		By               string
		WeightsAndStates Size
		Activations      Size
		Host, GPU        Size
		Options          string
	}

	// Setting is a switch that the log shows, or a release.
	Setting struct{ Name, Value string }

	// TrainedParameters is a trainer's word on how many parameters it trains.
	TrainedParameters struct{ Number int64 }

	// Progress is a line that tells where the training loop is.
	Progress struct {
		Phase  ledger.PhaseName // empty if the line tells only a step
		Step   int64            // -1 if the line does not tell
		Of     int64            // the last step; 0 if the line does not tell
		Begins bool             // a trainer says so before its first step
		Bar    bool             // it is a bar, which a program writes again until the last step
		// Epoch is set if Step counts epochs, and Metrics if the line has metrics of a step and not its number.
		Epoch, Metrics bool
	}
)

// GPUProcess is another process on a GPU.
type GPUProcess struct {
	PID  int // in the namespace of the host
	Used Size
}

// Facts of launchers and batch systems.
type (
	// ProcessEnded is the end of a process.
	ProcessEnded struct {
		By        string // torchrun, DeepSpeed, Slurm, Kubernetes, plimsoll, shell, systemd
		Rank      int    // NoRank if unknown
		LocalRank int    // NoRank if unknown
		PID       int    // 0 if unknown
		ExitCode  int    // 128 + n for a shell's report of signal n
		Signal    int    // 0 for none
		// Victim is set if the text says that another had ended it: SIGTERM from the launcher.
		Victim bool
		// First is set if the launcher says that this was the first process to end.
		First bool
	}

	// BatchKill is a batch system's or a container runtime's word that memory ran out.
	BatchKill struct {
		By    string // Slurm, Kubernetes, Docker, systemd, systemd-oomd, earlyoom, Ray
		What  string // the step, the container, the unit
		PID   int    // 0 if unknown
		Count int
		Limit Size
		Used  Size // of the memory that Limit is the size of
	}

	// Restarted is a launcher's word that it starts the ranks again. What failed before has been dealt with.
	Restarted struct{ By string }

	// Started is a command of a session, or a trainer, that begins again. A session may show several runs.
	Started struct{ What string }

	// BatchEnd is an end that a batch system wanted: a time limit, preemption, a cancellation.
	BatchEnd struct {
		By, Reason string // "time limit", "preempted", "cancelled", "node failure", "evicted"
		// Orderly is set for a server that ends whenever it is asked to. That alone is no failure.
		Orderly bool
	}
)

// Statistics of a kill that have no name of the kernel's: the pools of huge pages of all nodes.
const (
	HugePages     = "hugetlb_total"
	FreeHugePages = "hugetlb_free"
)

// Facts of kernels and cgroups.
type (
	// KernelKill is a kill of the kernel's OOM killer, with what the kernel has printed before it.
	KernelKill struct {
		Trigger     string // the process that asked for memory
		Flags       string // gfp_mask
		Order       int
		Constraint  string // CONSTRAINT_NONE, _MEMCG, _CPUSET or _MEMORY_POLICY; empty if unknown
		NodeMask    string
		MemsAllowed string
		Group       string // the cgroup whose limit was reached
		TaskGroup   string
		Usage       Size
		Limit       Size
		PID         int
		Name        string // at most 15 characters
		VirtualSize Size
		Anonymous   Size
		File        Size
		Shared      Size
		PageTables  Size
		Score       int
		// Processes is the kernel's table, and Stats the statistics of the cgroup or of the host's nodes, in bytes.
		Processes []KernelProcess
		Stats     map[string]ledger.Bytes
		Nodes     []NUMANode
		// WholeGroup is set if memory.oom.group killed all processes of the cgroup.
		WholeGroup bool
	}

	// HardwareFailed is an error of a memory module that the kernel could not correct. The process that used it got
	// SIGBUS.
	HardwareFailed struct {
		PID  int
		Name string
	}

	// KernelReason is the line of a kill that says why the memory of the whole host could not be used.
	KernelReason struct {
		Constraint string // CONSTRAINT_MEMCG, _CPUSET or _MEMORY_POLICY
	}

	// KernelProcess is a row of the kernel's table.
	KernelProcess struct {
		PID                               int
		Name                              string
		Resident, Anonymous, File, Shared ledger.Bytes
		Swap                              ledger.Bytes
		Score                             int
	}

	// NUMANode is the free memory of a node as the kernel has printed it.
	NUMANode struct {
		Node       int
		Free, Size Size
	}

	// Counters are those of a cgroup or of the host: memory.events, memory.stat, memory.current, /proc/meminfo.
	Counters struct {
		Group  string           // empty if the file does not name one
		File   string           // memory.events, memory.stat, ...
		Values map[string]int64 // in bytes where the kernel counts memory; Unlimited for "max"
	}

	// Limit is a limit that a file states.
	Limit struct {
		Name  string // RLIMIT_AS, RLIMIT_MEMLOCK, memory.max, /dev/shm, overcommit
		Group string // the cgroup, the container or the job that it is for; empty if the file does not name one
		Bytes Size   // unknown: unlimited
	}

	// MemoryList is who holds memory of a host, as a program lists it.
	MemoryList struct {
		By      string // Ray, ps, top, docker stats, kubectl top, the kubelet
		Holders []MemoryHolder
	}

	// MemoryHolder is a process, a container or a pod in a list.
	MemoryHolder struct {
		PID   int // 0 for what is no process
		Name  string
		Bytes ledger.Bytes
	}

	// PoolUsage is how full a memory is that has a budget of its own within that of the host.
	PoolUsage struct {
		By         string // whose it is
		Used, Size Size
		Waiting    Size           // what waits for room
		Parts      []MemoryHolder // what is in it
	}

	// FileSystem is a file system as df shows it.
	FileSystem struct {
		Mount            string
		Size, Used, Free Size
	}

	// GPUUsage is the memory of a GPU as nvidia-smi shows it.
	GPUUsage struct {
		Device            int // NoRank if the text does not tell
		Name              string
		Total, Used, Free Size
		Processes         []GPUProcess
	}
)
