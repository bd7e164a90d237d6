package evidence

import (
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// atoi returns the number of a text of digits, or 0.
func atoi(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// pids returns the numbers in a list.
func pids(s string) (list []int) {
	for _, field := range strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
		list = append(list, atoi(field))
	}
	return list
}

const cpuAllocator = `DefaultCPUAllocator: (?:not enough memory|can't allocate memory): you tried to allocate ` +
	`(?P<req>\d+) bytes`

func cpuAllocatorFailed(m *match) Fact {
	return HostAllocationFailed{By: "DefaultCPUAllocator", Requested: m.size("req", 1), Errno: m.integer("errno", 0)}
}

// hostPatterns are the texts of memory, processes and disks of the host.
var hostPatterns = []pattern{
	{ // c10/core/impl/alloc_cpu.cpp
		name:       "DefaultCPUAllocator",
		literals:   []string{"DefaultCPUAllocator", "you tried to allocate"},
		expression: cpuAllocator + `\. ?Error code (?P<errno>\d+) \((?P<err>[^)]*)\)`,
		kind:       TrainerLog, wrapped: true, fact: cpuAllocatorFailed,
	},
	{ // c10/core/impl/alloc_cpu.cpp, on Windows and in old releases
		name:       "DefaultCPUAllocator without a code",
		literals:   []string{"DefaultCPUAllocator"},
		expression: cpuAllocator,
		kind:       TrainerLog, fact: cpuAllocatorFailed,
	},
	{ // aten/src/ATen/MapAllocator.cpp: shared memory of torch
		name: "shared memory of torch",
		literals: []string{
			"unable to allocate shared memory", "unable to write to file", "unable to resize file",
			"unable to open shared memory object",
		},
		expression: `unable to (?:allocate shared memory ?\(shm\) for|write to|resize|open shared memory object)(?: file)? ` +
			`<(?P<file>[^>]*)>(?:[^:]*: (?P<err>.+) \((?P<errno>\d+)\))?`,
		kind: TrainerLog, fact: torchSharedMemory,
	},
	{ // aten/src/ATen/MapAllocator.cpp
		name:       "mmap failed",
		literals:   []string{"unable to mmap"},
		expression: `unable to mmap (?P<req>\d+) bytes(?: from file <(?P<file>[^>]*)>)?: (?P<err>.+) \((?P<errno>\d+)\)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return HostAllocationFailed{
				By: "mmap", Requested: m.size("req", 1), Errno: m.integer("errno", 0), File: m.get("file"),
			}
		},
	},
	{ // torch/utils/data/_utils/signal_handling.py, torch/csrc/DataLoader.cpp
		name:     "data loader worker ended",
		literals: []string{"DataLoader worker (pid"},
		expression: `DataLoader worker \(pid\(?s?\)?:? (?P<pids>[\d, ]+)\) (?:is killed by signal: (?P<sig>[^.]+)|` +
			`exited unexpectedly(?: with exit code (?P<code>\d+))?)`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return WorkerEnded{PIDs: pids(m.get("pids")), Signal: strings.TrimSpace(m.get("sig"))}
		},
	},
	{ // datasets/utils/py_utils.py; CPython: Lib/concurrent/futures/process.py; batchgenerators and nnU-Net
		name: "worker of a pool ended",
		literals: []string{"subprocesses has abruptly died", "process pool was terminated abruptly",
			"workers are no longer alive"},
		expression: `One of the subprocesses has abruptly died during map operation|` +
			`A process in the process pool was terminated abruptly|\bbackground workers are no longer alive`,
		kind: TrainerLog,
		fact: func(*match) Fact { return WorkerEnded{Of: "a pool of processes"} },
	},
	{ // torch/csrc/DataLoader.cpp
		name:       "bus error of a data loader",
		literals:   []string{"insufficient shared memory"},
		expression: `(?:Unexpected bus error encountered in worker\. )?This might be caused by insufficient shared memory \(shm\)`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return SharedMemoryFull{By: "DataLoader"} },
	},
	{ // NCCL: src/misc/shmutils.cc
		name: "NCCL's shared memory",
		literals: []string{
			"rror while creating shared memory segment", "failed to extend /dev/shm", "Call to posix_fallocate failed",
		},
		expression: `(?:[Ee]rror while creating shared memory segment|failed to extend) (?P<path>/dev/shm/\S*)|` +
			`NCCL WARN Call to posix_fallocate failed ?: No space left on device`,
		kind: TrainerLog,
		fact: func(m *match) Fact { return SharedMemoryFull{By: "NCCL", Path: m.get("path")} },
	},
	{ // Python, glibc: strerror(ENOSPC), strerror(EDQUOT)
		name: "no space left",
		literals: []string{
			"No space left on device", "no space left on device", "Disk quota exceeded", "disk quota exceeded",
			"[Errno 28]", "[Errno 122]",
		},
		// In other languages the number is all that is known. Go writes small letters.
		expression: `(?:(?P<quota>\[Errno 122\] [^:]+|[Dd]isk quota exceeded)|[Nn]o space left on device|` +
			`\[Errno 28\] [^:]*)(?: \(os error \d+\))?(?:[^'"]*: ?\\?['"](?P<path>[^'"]+)['"])?`,
		kind: TrainerLog, fact: noSpace,
	},
	{ // Python, glibc: strerror(EFBIG)
		name:       "file too large",
		literals:   []string{"File too large", "[Errno 27]"},
		expression: `(?:\[Errno 27\] [^:]+|\bFile too large\b)(?: \(os error \d+\))?(?:: ?'(?P<path>[^']+)')?$`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return DiskFull{Path: m.get("path"), TooLarge: true} },
	},
	{ // glibc: elf/dl-load.c
		name:       "library not mapped",
		literals:   []string{"failed to map segment from shared object"},
		expression: `failed to map segment from shared object(?P<denied>: Operation not permitted)?`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			if m.get("denied") != "" {
				return Exception{Type: "ImportError", Message: m.whole[m.indices[0]:m.indices[1]]}
			}
			return HostAllocationFailed{By: Loader}
		},
	},
	{ // datasets/builder.py; Azure Machine Learning
		name:       "too little disk space",
		literals:   []string{"Not enough disk space. Needed:", "disk is full", "DiskFullError"},
		expression: `Not enough disk space\. Needed:|\b(?:database or )?disk is full\b|^DiskFullError: `,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return DiskFull{} },
	},
	{ // caffe2/serialize/inline_container.cc
		name:       "archive writer failed",
		literals:   []string{"PytorchStreamWriter failed", "] . unexpected pos", ". unexpected pos "},
		expression: `PytorchStreamWriter failed writing (?:file|central directory)[^:]*:? ?(?P<path>\S*)|unexpected pos \d+ vs \d+`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return DiskFull{Assumed: true} },
	},
	{ // numpy/_core/src/multiarray/alloc.cpp and numpy/core/_exceptions.py
		name:     "numpy",
		literals: []string{"Unable to allocate", "for an array with shape", "_ArrayMemoryError"},
		expression: `Unable to allocate (?P<sz>[\d.]+ (?:bytes|[KMGTPE]iB)) for an array with shape (?P<shape>\([^)]*\)) ` +
			`and data type (?P<dtype>\S+)`,
		kind: TrainerLog, wrapped: true,
		fact: func(m *match) Fact { return HostAllocationFailed{By: "numpy", Requested: m.size("sz", 1)} },
	},
	{ // arrow: cpp/src/arrow/memory_pool.cc
		name:       "Arrow",
		literals:   []string{"malloc of size"},
		expression: `(?:malloc|realloc) of size (?P<req>\d+) failed`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return HostAllocationFailed{By: "Arrow", Requested: m.size("req", 1)} },
	},
	{ // ERROR_DISK_FULL of Windows
		name:       "Windows: disk full",
		literals:   []string{"[WinError 112]", "[WinError 39]", "There is not enough space on the disk"},
		expression: `\[WinError (?:39|112)\](?:[^'"]*: ?'(?P<path>[^']+)')?|There is not enough space on the disk`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return DiskFull{Path: m.get("path")} },
	},
	{ // ERROR_COMMITMENT_LIMIT, _NOT_ENOUGH_MEMORY, _OUTOFMEMORY, _NO_SYSTEM_RESOURCES; the text is of any language
		name: "Windows cannot commit",
		literals: []string{"[WinError 1455]", "[WinError 8]", "[WinError 14]", "[WinError 1450]", "(os error 1455)",
			"paging file is too small", "GetLastError() = "},
		expression: `\[WinError (?:8|14|1450|1455)\]|\(os error 1455\)|The paging file is too small for this operation|` +
			`\bGetLastError\(\) = (?:8|14|1450|1455)\b`,
		kind: TrainerLog,
		fact: func(*match) Fact { return HostAllocationFailed{By: "Windows"} },
	},
	{ // CPython
		name:       "MemoryError",
		literals:   []string{"MemoryError"},
		expression: `^(?:[\w.]+\.)?_?(?:Array)?MemoryError\b`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			if poolOfGPU.MatchString(m.whole) {
				return LibraryFailed{Library: "RMM", Status: "out_of_memory", Memory: true}
			}
			return HostAllocationFailed{By: "Python"}
		},
	},
	{ // libstdc++
		name:       "std::bad_alloc",
		literals:   []string{"bad_alloc", "bad_array_new_length"},
		expression: `std::bad_(?:alloc|array_new_length)`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return HostAllocationFailed{By: "std::bad_alloc"} },
	},
	{ // CPython: Modules/_threadmodule.c; libgomp; OpenBLAS
		name: "no new thread",
		literals: []string{
			"can't start new thread", "Thread creation failed", "pthread_create failed", "OMP: Error #34",
			"unable to create native thread", "unable to create new native thread",
		},
		expression: `(?:can't start new thread|unable to create (?:new )?native thread|(?P<gomp>libgomp): Thread creation failed|(?P<omp>OMP): Error #34|` +
			`(?P<blas>OpenBLAS) blas_thread_init: pthread_create failed)`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			by := "thread"
			if other := m.get("gomp") + m.get("omp") + m.get("blas"); other != "" {
				by = other
			}
			return TooManyProcesses{By: by}
		},
	},
	{ // strerror(EAGAIN) of fork and clone: bash, Python
		name:     "fork: try again",
		literals: []string{"Resource temporarily unavailable"},
		expression: `(?:(?:fork|[Tt]hread|clone|pthread_create)[^:]*: (?:retry: )?(?:Resource temporarily unavailable)|` +
			`Resource temporarily unavailable \[system:11\]|what\(\): +Resource temporarily unavailable|` +
			`RuntimeError: Resource temporarily unavailable$|` +
			`BlockingIOError: \[Errno 11\] Resource temporarily unavailable)`,
		kind: TrainerLog,
		fact: func(*match) Fact { return TooManyProcesses{By: "fork"} },
	},
	{ // strerror(EMFILE), strerror(ENFILE); what torch says where a descriptor could not be sent
		name:       "too many open files",
		literals:   []string{"oo many open files", "items of ancdata", "[Errno 24]"},
		expression: `[Tt]oo many open files|received 0 items of ancdata|\[Errno 24\]`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return TooManyFiles{} },
	},
	{ // python/plimsoll/torch/transfer.py
		name:       "plimsoll: an arena could not be pinned",
		literals:   []string{"the CUDA driver cannot pin arena"},
		expression: `the CUDA driver cannot pin arena .+ of (?P<req>\d+) bytes: .*\(cudaHostRegister`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return LockFailed{By: "cudaHostRegister", Requested: m.size("req", 1)} },
	},
	{ // mlock(2), io_uring, libibverbs as NCCL and UCX call it, libfabric as NCCL's plugin calls it, CUDA
		name: "memory could not be locked",
		literals: []string{"mlock", "io_uring", "ibv_", "NET/OFI Unable to register memory", "cudaHostRegister",
			"fi_mr_reg"},
		expression: `(?P<by>mlock|io_uring|ibv|NET/OFI Unable to register memory|fi_mr_reg|cudaHostRegister).*(?:Cannot allocate memory|cannot allocate memory|` +
			`Resource temporarily unavailable|Operation not permitted|ENOMEM|out of memory|failed to (?:allocate|lock))`,
		kind: TrainerLog, fact: lockFailed,
	},
	{ // Open MPI: opal/mca/btl/openib/help-mpi-btl-openib.txt
		name:       "Open MPI: memory could not be locked",
		literals:   []string{"memlock limits are set too low"},
		expression: `memlock limits are set too low`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return LockFailed{By: "Open MPI"} },
	},
	{ // Open MPI: opal/mca/btl/openib/help-mpi-btl-openib.txt
		name:       "Open MPI: limit of locked memory",
		literals:   []string{"Memlock limit:"},
		expression: `^\s*Memlock limit:\s+(?P<limit>\d+)$`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return Limit{Name: "RLIMIT_MEMLOCK", Bytes: m.size("limit", 1)} },
	},
	{ // strerror(ENOMEM) of Python, of fork and of others
		name:       "cannot allocate memory",
		literals:   []string{"Cannot allocate memory"},
		expression: `(?:(?P<fork>fork)\b.*?)?(?:\[Errno (?P<errno>12)\] )?Cannot allocate memory`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			by := ""
			switch {
			case m.get("fork") != "" || m.stream.trace != nil && m.stream.trace.forked:
				by = "fork"
			case m.get("errno") != "":
				by = "Python"
			}
			return HostAllocationFailed{By: by, Errno: enomem}
		},
	},
	{ // CPython: Modules/faulthandler.c; the stacks of all threads follow
		name:       "bus error of Python",
		literals:   []string{"Fatal Python error: Bus error"},
		expression: `Fatal Python error: Bus error`,
		kind:       TrainerLog,
		take:       func(r *reader, m *match) { r.begin(m.stream, &threadDump{at: m.text}) },
	},
	{ // bash, glibc
		name:       "bus error",
		literals:   []string{"Bus error", "SIGBUS", "bus error"},
		expression: `(?:(?P<pid>\d+) Bus error|\bSIGBUS\b.*?(?:PID (?P<other>\d+))?$|\bBus error\b)`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return BusError{PID: m.integer("pid", m.integer("other", 0))} },
	},
	{ // Ray: python/ray/exceptions.py
		name:       "Ray: object store full",
		literals:   []string{"ObjectStoreFullError", "object store because it is full"},
		expression: `\bObjectStoreFullError\b|\bin object store because it is full\b`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f := SharedMemoryFull{By: RayStore}
			if groups := objectSize.FindStringSubmatch(m.whole); groups != nil {
				f.Requested = sizeOf(groups[1], 1)
			}
			return f
		},
	},
	{ // CPython: Python/errors.c writes it of destructors and at exit, and goes on
		name:       "exception ignored",
		literals:   []string{"Exception ignored "},
		expression: `^Exception ignored (?:in|while|on)\b`,
		kind:       TrainerLog, take: beginIgnored,
	},
	{ // CPython
		name:       "traceback",
		literals:   []string{tracebackHeader},
		expression: `Traceback \(most recent call last\)`,
		kind:       TrainerLog, take: beginTrace,
	},
	{ // CPython: the first line may be cut off
		name:       "call in a traceback",
		literals:   []string{"\", line ", "│ ❱ "},
		expression: `^\s+File "[^"]+", line \d+, in |^\s*│ ❱ +\d+ `,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			if m.stream.trace == nil {
				beginTrace(r, m)
				m.stream.trace.headless = true
			}
		},
	},
}

// poolOfGPU names RMM, which gives memory of a GPU to cuDF and others, in Python's class of errors of the host.
var poolOfGPU = lazyregexp.New(`\bRMM failure\b|/rmm/|\bcudaErrorMemoryAllocation\b`)

// objectSize is the size of an object that Ray's store has no room for.
var objectSize = lazyregexp.New(`\bObject size is (\d+) bytes`)

var bytesText = lazyregexp.New(`(\d+) bytes`)

func lockFailed(m *match) Fact {
	f := LockFailed{By: m.get("by")}
	if strings.HasPrefix(f.By, "NET/OFI") || f.By == "fi_mr_reg" {
		f.By = "libfabric"
	}
	if f.By == "ibv" {
		f.By = "ibverbs"
	}
	if groups := bytesText.FindStringSubmatch(m.whole); groups != nil {
		f.Requested = sizeOf(groups[1], 1)
	}
	return f
}

// Loader maps libraries. It does not say why it cannot: for want of memory or addresses, or as nothing may be executed
// there.
const Loader = "the dynamic loader"

// Error numbers of Linux, whatever system reads about them.
const (
	enomem = 12
	enfile = 23
	emfile = 24
	enospc = 28
)

func torchSharedMemory(m *match) Fact {
	file := m.get("file")
	errno := m.integer("errno", 0)
	switch errno {
	case enospc:
		return SharedMemoryFull{By: "torch", Path: file}
	case enomem:
		return HostAllocationFailed{By: "mmap", Errno: errno, File: file}
	case enfile, emfile:
		return TooManyFiles{}
	}
	if errno == 0 && strings.HasPrefix(file, "/torch_") { // PyTorch 1.x says no more
		if strings.Contains(m.whole[m.indices[0]:m.indices[1]], "open shared memory object") { // it needs no space
			return TooManyFiles{}
		}
		return SharedMemoryFull{By: "torch"}
	}
	return Exception{Type: "RuntimeError", Message: m.whole[m.indices[0]:m.indices[1]]}
}

// noSpaceCode is the type of an exception that is no Python exception.
const noSpaceCode = "ENOSPC"

// notOfDisk are the things of the kernel whose number is limited, and for which ENOSPC speaks of no disk.
var notOfDisk = lazyregexp.New(`\w[\w ]*namespace|unshare|inotify|/sys/fs/cgroup|(?:shm|sem|msg)get`)

func noSpace(m *match) Fact {
	path := m.get("path")
	said, _, _ := strings.Cut(m.whole[m.indices[0]:], ": ") // behind a colon stands the name of a file
	if counted := notOfDisk.FindString(m.whole[:m.indices[0]] + said); counted != "" {
		return Exception{Type: noSpaceCode, Message: counted}
	}
	if strings.HasPrefix(path, "/dev/shm") || strings.Contains(m.whole, "/dev/shm") {
		return SharedMemoryFull{Path: path}
	}
	return DiskFull{Path: path, Quota: m.get("quota") != "" || strings.Contains(m.whole, "os error 122")}
}
