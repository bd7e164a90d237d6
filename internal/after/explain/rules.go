package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// claim is a cause that a fact speaks for.
type claim struct {
	resource Resource
	detail   string
	sure     Confidence
	text     string // completes "Rank 3 ..."
	at       evidence.Finding
}

// row is a row of a decision table for facts of one type. The first row whose condition holds decides.
type row[F evidence.Fact] struct {
	holds    func(s *scene, f F) bool // nil: always
	resource Resource
	detail   string
	sure     Confidence
	text     func(f F) string // completes "Rank 3 ..."
}

// table makes a rule of a decision table.
func table[F evidence.Fact](rows ...row[F]) rule {
	return func(s *scene, at evidence.Finding) (claim, bool) {
		fact, ok := at.Fact.(F)
		if !ok {
			return claim{}, false
		}
		for _, r := range rows {
			if r.holds == nil || r.holds(s, fact) {
				return claim{r.resource, r.detail, r.sure, r.text(fact), at}, true
			}
		}
		return claim{}, false
	}
}

// rule makes a claim of a finding, if the finding is of the rule's type.
type rule func(*scene, evidence.Finding) (claim, bool)

// says returns the same text for every fact.
func says[F evidence.Fact](text string) func(F) string { return func(F) string { return text } }

// rules are the decision tables. Of claims that are equally sure, that of the first table counts.
var rules = []rule{
	table(
		row[evidence.KernelKill]{inGroup, CGroup, "", Certain, groupText},
		row[evidence.KernelKill]{onNodes, NUMANode, "", Certain, nodeText},
		row[evidence.KernelKill]{func(_ *scene, k evidence.KernelKill) bool { return k.Constraint != "" },
			Host, "", Certain, hostText},
		row[evidence.KernelKill]{nil, Host, "", Likely, hostText},
	),
	table(
		row[oomCounts]{func(_ *scene, o oomCounts) bool { return o.kills() > 0 && o.atLimit() != nil && o.compared },
			CGroup, "", Certain, limitText},
		row[oomCounts]{func(_ *scene, o oomCounts) bool { return o.kills() > 0 && o.atLimit() != nil },
			CGroup, "", Likely, limitText},
		row[oomCounts]{func(s *scene, o oomCounts) bool { return o.kills() > 0 && s.levels.exhaustedNode() != nil },
			NUMANode, "", Likely, says[oomCounts]("was killed by the kernel while one NUMA node had no free memory, " +
				"and the host had plenty")},
		row[oomCounts]{func(s *scene, o oomCounts) bool {
			return o.kills() > 0 && s.plentyFree() && s.boundNodes() != nil
		}, NUMANode, "", Likely, says[oomCounts]("was killed by the kernel while the host had free memory: its " +
			"memory policy leaves it the memory of its own NUMA node only")},
		row[oomCounts]{func(s *scene, o oomCounts) bool { return o.kills() > 0 && s.stayedFree() },
			Undetermined, "", Unknown, says[oomCounts]("was killed by the kernel's OOM killer while the host had " +
				"free memory, and no limit that is visible here was reached")},
		row[oomCounts]{func(_ *scene, o oomCounts) bool { return o.kills() > 0 && !o.groups() && !o.complete },
			Undetermined, "", Unknown, says[oomCounts]("was killed by the kernel's OOM killer: the host was out of " +
				"memory, or a cgroup at its limit, whose counters are not here")},
		row[oomCounts]{func(_ *scene, o oomCounts) bool { return o.kills() > 0 }, Host, "", Likely,
			says[oomCounts]("was killed by the kernel's OOM killer, and no cgroup's limit was reached: the host ran " +
				"out of memory")},
		row[oomCounts]{nil, NotMemory, "", Likely, says[oomCounts]("was not killed by the kernel's OOM killer, whose " +
			"counters did not move: the program itself, a person or a batch system ended it")},
	),
	table(
		row[evidence.BatchKill]{byLimit, CGroup, "", Likely, batchText},
		row[evidence.BatchKill]{nil, Host, "", Likely, batchText},
	),
	table(
		row[evidence.GPUOutOfMemory]{func(_ *scene, f evidence.GPUOutOfMemory) bool { return f.Requested.Beyond },
			NotMemory, broken, Likely, says[evidence.GPUOutOfMemory](brokenText)},
		row[evidence.GPUOutOfMemory]{capped, GPU, "fraction cap", Certain, gpuText(
			"set_per_process_memory_fraction allows this process %v of the GPU", allowed)},
		row[evidence.GPUOutOfMemory]{aboveCard, GPU, "capacity", Certain, aboveCardText},
		row[evidence.GPUOutOfMemory]{fragmented, GPU, "fragmentation", Certain, gpuText(
			"PyTorch held %v of reserved memory that no tensor used, in pieces that were too small", slack)},
		row[evidence.GPUOutOfMemory]{besideOthers, GPU, "another process", Certain, gpuText(
			"other processes held %v of the same GPU", others)},
		row[evidence.GPUOutOfMemory]{func(s *scene, f evidence.GPUOutOfMemory) bool {
			return onMetal(s, f) && outsidePyTorch(s, f)
		}, GPU, "memory outside PyTorch", Certain, gpuText("this process held %v of Metal's memory outside of "+
			"PyTorch's allocator", outside)},
		row[evidence.GPUOutOfMemory]{outsidePyTorch, GPU, "memory outside PyTorch", Certain, gpuText(
			"this process held %v outside of PyTorch's allocator, as NCCL, cuDNN and CUDA graphs do", outside)},
		row[evidence.GPUOutOfMemory]{besideUnlisted, GPU, "another process", Likely, gpuText(
			"%v of the GPU were in use and not PyTorch's, by other processes or by this one's libraries", unlisted)},
		row[evidence.GPUOutOfMemory]{func(s *scene, f evidence.GPUOutOfMemory) bool {
			return onMetal(s, f) && enoughFree(s, f)
		}, GPU, "", Likely, gpuText("Metal refused it with %v left of PyTorch's limit, as it does in a virtual "+
			"machine without a GPU, or where other programs hold the memory", free)},
		row[evidence.GPUOutOfMemory]{enoughFree, GPU, "free memory at the failure", Likely, gpuText(
			"%v were free when PyTorch looked: another process may have freed them in between, or a limit holds",
			free)},
		row[evidence.GPUOutOfMemory]{func(_ *scene, f evidence.GPUOutOfMemory) bool { return f.Allocated.Known },
			GPU, "capacity", Certain, gpuText("tensors held %v", allocated)},
		row[evidence.GPUOutOfMemory]{func(_ *scene, f evidence.GPUOutOfMemory) bool { return f.Requested.Known }, GPU,
			"",
			Certain, says[evidence.GPUOutOfMemory]("ran out of GPU memory")},
		row[evidence.GPUOutOfMemory]{nil, GPU, "", Likely, says[evidence.GPUOutOfMemory]("ran out of GPU memory")},
	),
	table(
		row[evidence.DriverOutOfMemory]{func(_ *scene, f evidence.DriverOutOfMemory) bool { return f.Waking }, GPU,
			waking, Likely, says[evidence.DriverOutOfMemory]("ran out of GPU memory: the rollout engine maps again " +
				"what it gave back when it slept, and the trainer holds a part of that")},
		row[evidence.DriverOutOfMemory]{func(_ *scene, f evidence.DriverOutOfMemory) bool { return f.Pinning },
			Host, pinned, Likely, says[evidence.DriverOutOfMemory]("could not pin host memory: the error reads " +
				"\"out of " +
				"memory\" of CUDA, but pinned memory comes from the host")},
		row[evidence.DriverOutOfMemory]{func(s *scene, _ evidence.DriverOutOfMemory) bool { return s.gpuMostlyFree() },
			Host, pinned, Likely, says[evidence.DriverOutOfMemory]("got \"out of memory\" from CUDA with a GPU that " +
				"was mostly free, so the memory to pin was missing on the host")},
		row[evidence.DriverOutOfMemory]{nil, GPU, "", Likely, says[evidence.DriverOutOfMemory]("ran out of GPU " +
			"memory outside of PyTorch's allocator")},
	),
	table(
		row[evidence.LibraryFailed]{func(_ *scene, f evidence.LibraryFailed) bool { return f.Library == triton },
			NotMemory, "shared memory of a GPU's multiprocessor", Certain, says[evidence.LibraryFailed]("asked for " +
				"more shared memory of a multiprocessor than the GPU has: a kernel's block sizes are too large, and " +
				"no " +
				"memory of the GPU or the host is missing")},
		row[evidence.LibraryFailed]{func(_ *scene, f evidence.LibraryFailed) bool { return f.Library == driver },
			NotMemory, "", Likely, func(f evidence.LibraryFailed) string {
				return fmt.Sprintf("failed in %s (%s): a fault of the GPU or of a kernel that ran on it, and no "+
					"missing memory", f.Library, f.Status)
			}},
		row[evidence.LibraryFailed]{func(s *scene,
			f evidence.LibraryFailed) bool {
			return f.Memory && s.gpuMostlyFree()
		},
			Undetermined, "", Unknown, func(f evidence.LibraryFailed) string {
				return fmt.Sprintf("got \"out of memory\" from %s with a GPU that was mostly free: memory of "+
					"the host that "+
					"the GPU can reach was missing, or a limit holds", f.Library)
			}},
		row[evidence.LibraryFailed]{func(_ *scene, f evidence.LibraryFailed) bool { return f.Memory }, GPU, "", Likely,
			func(f evidence.LibraryFailed) string {
				return fmt.Sprintf("ran out of GPU memory in %s, which allocates outside of PyTorch", f.Library)
			}},
		row[evidence.LibraryFailed]{nil, Undetermined, "", Unknown, func(f evidence.LibraryFailed) string {
			return fmt.Sprintf("failed in %s (%s), which may hide missing memory or not", f.Library, f.Status)
		}},
	),
	table(
		row[evidence.HostAllocationFailed]{func(_ *scene, f evidence.HostAllocationFailed) bool {
			return f.Requested.Beyond
		}, NotMemory, broken, Likely, says[evidence.HostAllocationFailed](brokenText)},
		row[evidence.HostAllocationFailed]{overAddressSpace, AddressSpace, "", Certain, addressText},
		row[evidence.HostAllocationFailed]{func(_ *scene, f evidence.HostAllocationFailed) bool {
			return f.By == evidence.SegmentAddresses
		}, AddressSpace, segmentAddresses, Likely, says[evidence.HostAllocationFailed]("found no addresses for " +
			"another expandable segment: the process may have reserved all that a limit allows, and no memory is " +
			"missing")},
		row[evidence.HostAllocationFailed]{func(s *scene, _ evidence.HostAllocationFailed) bool {
			return s.addressSpaceLimit() > 0
		}, AddressSpace, "", Likely, addressText},
		row[evidence.HostAllocationFailed]{func(_ *scene, f evidence.HostAllocationFailed) bool {
			return f.By == evidence.Loader
		}, Undetermined, "", Unknown, says[evidence.HostAllocationFailed]("could not map a library into its memory: " +
			"its addresses are limited (ulimit -v, -d), or the file system of the library is mounted noexec")},
		row[evidence.HostAllocationFailed]{overCommit, Host, "overcommit", Likely, refusedText(
			"vm.overcommit_memory is 2 and CommitLimit is reached")},
		row[evidence.HostAllocationFailed]{aboveHost, Host, "capacity", Likely, refusedText(
			"the host does not have that much")},
		row[evidence.HostAllocationFailed]{func(s *scene, f evidence.HostAllocationFailed) bool {
			return f.Requested.Known && s.available() > 2*f.Requested.Bytes
		}, AddressSpace, "", Likely, refusedText("memory was free, so a limit of the process was reached")},
		row[evidence.HostAllocationFailed]{func(s *scene, f evidence.HostAllocationFailed) bool {
			return !f.Requested.Known && s.plentyFree()
		}, Undetermined, "", Unknown, refusedText("the host had free memory, so a limit of the process was reached, " +
			"or the program asked for more than the host has")},
		row[evidence.HostAllocationFailed]{func(s *scene, _ evidence.HostAllocationFailed) bool {
			return s.levels == nil
		}, Host, "", Likely, refusedText("the host or its cgroup had none left, or a limit of the process was " +
			"reached (ulimit -v)")},
		row[evidence.HostAllocationFailed]{nil, Host, "", Likely, refusedText("the kernel had none left to promise")},
	),
	table(
		row[evidence.LockFailed]{func(_ *scene, f evidence.LockFailed) bool { return f.By == "cudaHostRegister" },
			Host, pinned, Likely, lockText},
		row[evidence.LockFailed]{func(s *scene, f evidence.LockFailed) bool {
			limit, known := s.lockedLimit()
			return known && limit >= 0
		}, LockedMemory, "", Certain, lockText},
		row[evidence.LockFailed]{func(s *scene, _ evidence.LockFailed) bool {
			limit, known := s.lockedLimit()
			return known && limit < 0
		}, Host, pinned, Likely, lockText},
		row[evidence.LockFailed]{nil, LockedMemory, "", Likely, lockText},
	),
	table(
		row[evidence.SharedMemoryFull]{func(s *scene, f evidence.SharedMemoryFull) bool {
			return f.By == evidence.RayStore && !s.sharedMemoryFull()
		}, SharedMemory, evidence.RayStore, Likely, storeText},
		row[evidence.SharedMemoryFull]{func(s *scene, _ evidence.SharedMemoryFull) bool { return s.sharedMemoryFull() },
			SharedMemory, "", Certain, says[evidence.SharedMemoryFull](sharedText)},
		row[evidence.SharedMemoryFull]{func(_ *scene,
			f evidence.SharedMemoryFull) bool {
			return inSharedMemory(f.Path)
		},
			SharedMemory, "", Certain, says[evidence.SharedMemoryFull](sharedText)},
		row[evidence.SharedMemoryFull]{nil, SharedMemory, "", Likely, says[evidence.SharedMemoryFull](sharedText)},
	),
	table(
		row[evidence.DiskFull]{func(_ *scene, f evidence.DiskFull) bool {
			return strings.HasPrefix(f.Path, "/dev/shm")
		},
			SharedMemory, "", Certain, says[evidence.DiskFull](sharedText)},
		row[evidence.DiskFull]{func(_ *scene, f evidence.DiskFull) bool { return f.Quota }, Disk, "quota", Certain,
			says[evidence.DiskFull]("reached its disk quota")},
		row[evidence.DiskFull]{func(s *scene, f evidence.DiskFull) bool {
			return (f.TooLarge || f.Assumed) && s.limitsFiles()
		}, Disk, fileSize, Likely, says[evidence.DiskFull](limitedFileText)},
		row[evidence.DiskFull]{func(_ *scene, f evidence.DiskFull) bool { return f.TooLarge }, Disk, fileSize, Likely,
			says[evidence.DiskFull]("could not write a file: it would be larger than a limit (RLIMIT_FSIZE, ulimit " +
				"-f) or its file system allows")},
		row[evidence.DiskFull]{func(_ *scene, f evidence.DiskFull) bool { return f.Assumed }, Disk, "", Likely,
			says[evidence.DiskFull]("could not write a file: most likely the disk is full")},
		row[evidence.DiskFull]{func(_ *scene, f evidence.DiskFull) bool { return f.Path != "" }, Disk, "", Certain,
			says[evidence.DiskFull]("ran out of disk space")},
		row[evidence.DiskFull]{nil, Disk, "", Likely, says[evidence.DiskFull]("ran out of disk space")},
	),
	table(
		row[evidence.TooManyProcesses]{func(_ *scene, f evidence.TooManyProcesses) bool { return f.Group != "" },
			Processes, "", Likely, processText},
		row[evidence.TooManyProcesses]{func(s *scene, f evidence.TooManyProcesses) bool {
			return f.By == "thread" && s.addressSpaceLimit() > 0
		}, AddressSpace, "", Likely, says[evidence.TooManyProcesses]("could not start another thread: its stack " +
			"needs addresses, and the address space is limited (RLIMIT_AS, ulimit -v)")},
		row[evidence.TooManyProcesses]{func(_ *scene, f evidence.TooManyProcesses) bool {
			return strings.Contains(f.By, "fork") || strings.Contains(f.By, "clone")
		}, Processes, "", Certain, processText},
		row[evidence.TooManyProcesses]{nil, Processes, "", Likely, processText},
	),
	table(row[evidence.TooManyFiles]{nil, NotMemory, "file descriptors", Likely,
		says[evidence.TooManyFiles]("has too " +
			"many open files: their number is limited (RLIMIT_NOFILE, ulimit -n), and no memory is missing")}),
	table(
		row[evidence.WorkerEnded]{func(s *scene, f evidence.WorkerEnded) bool {
			return mannerOfWorker(f.Signal) == faulted && !s.sharedMemoryFree()
		}, SharedMemory, "", Likely, says[evidence.WorkerEnded](busText)},
		row[evidence.WorkerEnded]{func(_ *scene, f evidence.WorkerEnded) bool {
			return mannerOfWorker(f.Signal) == faulted
		}, Undetermined, "", Unknown, says[evidence.WorkerEnded]("lost a worker of its data loader by SIGBUS, and " +
			"/dev/shm had free memory when it was looked at")},
		row[evidence.WorkerEnded]{func(_ *scene, f evidence.WorkerEnded) bool { return f.Of != "" }, Undetermined, "",
			Unknown, func(f evidence.WorkerEnded) string {
				return fmt.Sprintf("lost a worker of %s, and nothing here says what ended that process", f.Of)
			}},
		row[evidence.WorkerEnded]{func(_ *scene, f evidence.WorkerEnded) bool {
			return workerFault.MatchString(f.Signal)
		}, NotMemory, "", Likely, func(f evidence.WorkerEnded) string {
			return fmt.Sprintf("lost a worker of its data loader, which crashed (%s): an error of the program or of a "+
				"library, and not of memory", strings.ToLower(f.Signal))
		}},
		row[evidence.WorkerEnded]{func(_ *scene, f evidence.WorkerEnded) bool {
			return mannerOfWorker(f.Signal) == killed
		}, Undetermined, "", Unknown, says[evidence.WorkerEnded]("lost a worker of its data loader, which was killed " +
			"by SIGKILL, and nothing here says by whom")},
		row[evidence.WorkerEnded]{nil, Undetermined, "", Unknown, says[evidence.WorkerEnded]("lost a worker of its " +
			"data loader, and nothing here says what killed the worker")},
	),
	table(
		row[evidence.HardwareFailed]{nil, NotMemory, "", Certain, says[evidence.HardwareFailed]("got SIGBUS: a " +
			"memory module has an error that cannot be corrected")},
	),
	table(
		row[evidence.BusError]{func(s *scene, _ evidence.BusError) bool { return s.sharedMemoryFull() },
			SharedMemory, "", Certain, says[evidence.BusError](busText)},
		row[evidence.BusError]{func(s *scene, _ evidence.BusError) bool { return s.sharedMemoryFree() },
			Undetermined, "", Unknown, says[evidence.BusError]("got SIGBUS while /dev/shm had free memory")},
		row[evidence.BusError]{func(s *scene, _ evidence.BusError) bool { return s.readsFiles() }, NotMemory, mapped,
			Likely, says[evidence.BusError](readingText)},
		row[evidence.BusError]{func(s *scene, _ evidence.BusError) bool { return s.loadsWeights() }, Undetermined,
			mapped, Unknown, says[evidence.BusError](loadingText)},
		row[evidence.BusError]{nil, SharedMemory, "", Likely, says[evidence.BusError](bareBusText)},
	),
	table(
		row[evidence.BatchEnd]{inMemoryVolume, SharedMemory, "", Likely, says[evidence.BatchEnd]("was evicted, " +
			"because its volume in memory, /dev/shm, was full")},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool { return reasonHas(f, "the volume") }, Disk, "",
			Likely, says[evidence.BatchEnd]("was evicted, because a volume of it reached its limit on the disk")},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool { return f.Reason == "evicted" }, Undetermined,
			"", Unknown, says[evidence.BatchEnd]("was evicted, and nothing here says what its node lacked")},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool { return reasonHas(f, "memory") }, Host, "",
			Likely, says[evidence.BatchEnd]("was evicted, because the node ran low on memory")},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool { return reasonHas(f, "storage", "disk") },
			Disk, "", Likely, says[evidence.BatchEnd]("was evicted, because the node ran low on disk space")},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool { return reasonHas(f, "time", "preempt") },
			NotMemory, "", Certain, endText},
		row[evidence.BatchEnd]{func(_ *scene, f evidence.BatchEnd) bool {
			return f.Reason == "signal 1" || f.Reason == "signal SIGHUP"
		}, NotMemory, "", Likely, says[evidence.BatchEnd](hangUp)},
		row[evidence.BatchEnd]{func(s *scene, f evidence.BatchEnd) bool {
			return reasonHas(f, "signal", "died") || reasonHas(f, "cancel") && s.witness != nil
		}, Undetermined, "", Unknown, func(f evidence.BatchEnd) string {
			return endText(f) + ", and nothing here says why"
		}},
		row[evidence.BatchEnd]{nil, NotMemory, "", Likely, endText},
	),
	table(
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return mannerOfProcess(f) == killed && s.fullHost() != nil
		}, Host, "", Likely, says[evidence.ProcessEnded]("was killed by SIGKILL with the memory of the host almost " +
			"full, " +
			"as the kernel's OOM killer does")},
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return mannerOfProcess(f) == faulted && s.sharedMemoryFull()
		}, SharedMemory, "", Certain, says[evidence.ProcessEnded](busText)},
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return mannerOfProcess(f) == faulted && s.readsFiles()
		}, NotMemory, mapped, Likely, says[evidence.ProcessEnded](readingText)},
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return mannerOfProcess(f) == faulted && s.loadsWeights()
		}, Undetermined, mapped, Unknown, says[evidence.ProcessEnded](loadingText)},
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return mannerOfProcess(f) == faulted && !s.sharedMemoryFree()
		}, SharedMemory, "", Likely, says[evidence.ProcessEnded](bareBusText)},
		row[evidence.ProcessEnded]{func(s *scene, f evidence.ProcessEnded) bool {
			return isFault(f) && s.killBesideCrash() != nil
		}, Undetermined, "", Unknown, func(f evidence.ProcessEnded) string {
			return faultText(f) + ", beside a kill of the kernel for memory, and nothing here says which came first"
		}},
		row[evidence.ProcessEnded]{func(_ *scene, f evidence.ProcessEnded) bool { return isFault(f) }, NotMemory, "",
			Likely, faultText},
		row[evidence.ProcessEnded]{func(_ *scene, f evidence.ProcessEnded) bool {
			return f.Signal == evidence.SIGHUP || f.ExitCode == 128+evidence.SIGHUP
		}, NotMemory, "", Likely, says[evidence.ProcessEnded](hangUp)},
		row[evidence.ProcessEnded]{func(_ *scene, f evidence.ProcessEnded) bool {
			return f.Signal == evidence.SIGXFSZ || f.ExitCode == 128+evidence.SIGXFSZ
		},
			Disk, fileSize, Certain, says[evidence.ProcessEnded](limitedFileText)},
		row[evidence.ProcessEnded]{func(_ *scene, f evidence.ProcessEnded) bool { return f.Signal == evidence.SIGTERM },
			Undetermined, "", Unknown, says[evidence.ProcessEnded]("was asked to end by SIGTERM, and nothing here " +
				"says by whom: a person, a batch system, or a service that frees memory, such as earlyoom")},
		row[evidence.ProcessEnded]{nil, Undetermined, "", Unknown, endedText},
	),
	table(
		row[evidence.Exception]{func(_ *scene, e evidence.Exception) bool {
			return e.Type == evidence.RemoteOutOfMemory
		}, GPU, "", Likely, says[evidence.Exception]("ran out of GPU memory in a task of Ray: its error is " +
			"PyTorch's, and the lines with the sizes are not here")},
		row[evidence.Exception]{func(_ *scene, e evidence.Exception) bool {
			return lackText.MatchString(e.Message) || lackClass.MatchString(e.Type)
		}, Undetermined, "", Unknown, func(e evidence.Exception) string {
			return fmt.Sprintf("ended with %s, whose text speaks of missing memory and not of which", e.Type)
		}},
		row[evidence.Exception]{nil, NotMemory, "", Likely, func(e evidence.Exception) string {
			return fmt.Sprintf("ended with %s, an error of the program and not of memory", e.Type)
		}},
	),
}

const (
	triton = "Triton"
	driver = "the NVIDIA driver"
	pinned = "pinned memory"
	waking = "the rollout engine wakes"
	broken = "a broken size"
	// segmentAddresses are reserved anew for each stream.
	segmentAddresses = "addresses of expandable segments"
	brokenText       = "asked for more memory at once than any machine has: a shape, an index or an overflow in the " +
		"program is wrong, and no memory is missing"
	fileSize        = "file size"
	limitedFileText = "could not write a file: the size of its files is limited (RLIMIT_FSIZE, ulimit -f)"
	sharedText      = "ran out of shared memory: /dev/shm is full"
	// bareBusText is for a process of which nothing says what it had mapped.
	bareBusText = "got SIGBUS: a mapped page was missing, most likely of shared memory, as /dev/shm was full; " +
		"a pool of huge pages or a mapped file that was cut are rarer reasons"
	mapped = "a mapped file"
	// mappedText is why a page of a file cannot be had.
	mappedText = "the file was cut or changed meanwhile, its disk is full or fails, or its network file system did " +
		"not answer"
	readingText = "got SIGBUS while it read a mapped file, as its stack shows: " + mappedText
	loadingText = "got SIGBUS while it loaded weights from mapped files: " + mappedText + "; shared memory may have " +
		"been full, too (/dev/shm)"
	busText = "got SIGBUS: a page of shared memory could not be allocated, as /dev/shm was full"
)

// lackText is what an exception says that lacks memory of some kind.
var lackText = lazyregexp.New(`(?i)\b(?:out of|(?:not enough|insufficient)(?: \w+)?) memory\b|` +
	`memory exhausted|RESOURCE_EXHAUSTED|` +
	`\b(?:failed|unable|could not|cannot) (?:to )?allocate\b`)

// lackClass is how classes of exceptions are called that lack memory of some kind.
var lackClass = lazyregexp.New(`(?i)out_?of_?memory|memoryerror$|resourceexhausted`)

// judge returns the claims of the scene, the strongest first.
func (s *scene) judge() []claim {
	var claims []claim
	rank := map[int]int{}
	for _, f := range s.testimony() {
		for i, r := range rules {
			if c, ok := r(s, f); ok {
				rank[len(claims)] = i
				claims = append(claims, c)
			}
		}
	}
	order := make([]int, len(claims))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(strength[claims[b].sure], strength[claims[a].sure]), cmp.Compare(rank[a], rank[b]))
	})
	sorted := make([]claim, len(claims))
	for i, place := range order {
		sorted[i] = claims[place]
	}
	return sorted
}

var strength = map[Confidence]int{Unknown: 0, Likely: 1, Certain: 2}

// testimony returns the findings that may tell the cause of the first end.
func (s *scene) testimony() []evidence.Finding {
	w := s.witness
	if w != nil && (w.how == lacked || w.how == raised && !s.killedForMemory()) {
		return w.says[:1] // the error itself tells the cause
	}
	var found []evidence.Finding
	if w != nil {
		found = append(found, w.says[:1]...)
	}
	if len(s.kills) > 0 {
		found = append(found, s.kills[0])
	}
	for _, f := range s.findings {
		switch fact := f.Fact.(type) {
		case evidence.BatchKill:
			found = append(found, f)
		case evidence.HardwareFailed:
			if s.gotSIGBUS(fact) {
				found = append(found, f)
			}
		case evidence.TooManyProcesses:
			if w == nil && fact.Group != "" && !s.index.trainerLog {
				found = append(found, f)
			}
		case evidence.BatchEnd:
			// A job that hangs after a kill reaches its time limit later. Slurm cancels a step when a task of it has
			// crashed.
			crash := w != nil && w.how == crashed && reasonHas(fact, "cancel")
			// Kubernetes tries again to pull an image, and starts a container again.
			overcome := reasonHas(fact, "image", "probe") && s.index.completed[fact.By]
			orderly := fact.Orderly && w == nil && s.peersOnly() == nil
			if !s.killedForMemory() && !crash && !overcome && !orderly {
				found = append(found, f)
			}
		case oomCounts:
			if w != nil && w.how == killed && !s.killedByBatch() || fact.kills() > 0 {
				found = append(found, f)
			}
		}
	}
	return found
}

// killedForMemory reports whether the kernel or a batch system has killed a process of the job.
func (s *scene) killedForMemory() bool {
	return len(s.kills) > 0 || slices.ContainsFunc(s.words, func(f evidence.Finding) bool {
		o, counts := f.Fact.(oomCounts)
		_, batch := f.Fact.(evidence.BatchKill)
		return batch || counts && o.kills() > 0
	})
}

// killedByBatch reports whether a batch system, and not the kernel, has killed a process of the job for its memory.
func (s *scene) killedByBatch() bool {
	return slices.ContainsFunc(s.words, func(f evidence.Finding) bool {
		_, batch := f.Fact.(evidence.BatchKill)
		return batch
	})
}

func endedText(f evidence.ProcessEnded) string {
	switch {
	case mannerOfProcess(f) == killed:
		return "was killed by SIGKILL, and nothing here says by whom"
	case f.Signal != 0:
		return fmt.Sprintf("was ended by signal %d (%s), and nothing here says why", f.Signal,
			evidence.SignalName(f.Signal))
	}
	return fmt.Sprintf("ended with exit code %d, and nothing here says why", f.ExitCode)
}

// workerFault are the signals of a worker that has crashed by an instruction that it could not execute.
var workerFault = lazyregexp.New(`(?i)segmentation fault|illegal instruction|floating point`)

// isFault reports whether a process has crashed by an instruction that it could not execute.
func isFault(f evidence.ProcessEnded) bool {
	switch f.Signal {
	case evidence.SIGSEGV, evidence.SIGILL, evidence.SIGFPE:
		return true
	}
	return false
}

func faultText(f evidence.ProcessEnded) string {
	return fmt.Sprintf("crashed by signal %d (%s): a fault of native code", f.Signal, evidence.SignalName(f.Signal))
}

func endText(f evidence.BatchEnd) string {
	if strings.HasPrefix(f.Reason, "signal ") { // somebody else has sent it
		return fmt.Sprintf("was asked to end: %s got %s", f.By, f.Reason)
	}
	return fmt.Sprintf("was ended by %s: %s", f.By, f.Reason)
}

// storeText says that a store was full that has a budget of its own within shared memory.
func storeText(f evidence.SharedMemoryFull) string {
	asked := ""
	if f.Requested.Known {
		asked = fmt.Sprintf(" for an object of %v", f.Requested.Bytes)
	}
	return fmt.Sprintf("found no room%s in %s, which has a budget of its own (--object-store-memory)", asked, f.By)
}

func inSharedMemory(path string) bool { return strings.HasPrefix(path, "/dev/shm") }

func reasonHas(f evidence.BatchEnd, words ...string) bool {
	return slices.ContainsFunc(words, func(word string) bool { return strings.Contains(f.Reason, word) })
}

// inMemoryVolume reports whether a pod was evicted for a volume that is in memory, by its name or its limit.
func inMemoryVolume(s *scene, f evidence.BatchEnd) bool {
	return reasonHas(f, "the volume") && (reasonHas(f, "shm") ||
		slices.ContainsFunc(all[evidence.Limit](s.findings), func(l seen[evidence.Limit]) bool {
			return l.fact.Name == "/dev/shm" && strings.HasSuffix(f.Reason, " "+l.fact.Bytes.Bytes.String())
		}))
}

func processText(f evidence.TooManyProcesses) string {
	return fmt.Sprintf("could not start another process or thread (%s): their number is limited", f.By)
}

func lockText(f evidence.LockFailed) string {
	if f.By == "cudaHostRegister" {
		return fmt.Sprintf("could not pin %shost memory", amount(f.Requested.Bytes))
	}
	return fmt.Sprintf("could not lock %smemory (%s)", amount(f.Requested.Bytes), f.By)
}

func refusedText(why string) func(evidence.HostAllocationFailed) string {
	return func(f evidence.HostAllocationFailed) string {
		return fmt.Sprintf("was refused %shost memory: %s", amount(f.Requested.Bytes), why)
	}
}

func addressText(f evidence.HostAllocationFailed) string {
	return fmt.Sprintf("was refused %smemory: its address space is limited (RLIMIT_AS, ulimit -v)",
		amount(f.Requested.Bytes))
}

// gpuText says that GPU memory ran out, and why. The format has a %v for a figure.
func gpuText(why string, figure func(evidence.GPUOutOfMemory) ledger.Bytes) func(evidence.GPUOutOfMemory) string {
	return func(f evidence.GPUOutOfMemory) string {
		text := "ran out of GPU memory: "
		if f.Requested.Known {
			text += fmt.Sprintf("it asked for %v, ", f.Requested.Bytes)
		}
		return text + fmt.Sprintf(why, figure(f))
	}
}
