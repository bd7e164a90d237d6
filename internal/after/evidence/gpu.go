package evidence

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// SegmentAddresses are addresses that PyTorch's allocator sets apart for an expandable segment: more than the GPU has,
// and of no memory.
const SegmentAddresses = "PyTorch's expandable segments"

// sz is a size as PyTorch prints it.
const sz = `\d[\d.]* (?:bytes|[KMG]iB)`

// outOfMemory are the beginnings of PyTorch's errors. The sizes may be on the next lines.
var outOfMemory = []string{"CUDA out of memory", "HIP out of memory", "XPU out of memory", "NPU out of memory"}

// mpsSize is a size as the allocator of MPS prints it.
const mpsSize = `[\d.]+ (?:bytes|[KMG]i?B)`

const mpsError = `MPS backend out of memory \(MPS allocated: (?P<alloc>` + mpsSize + `)(?:, other allocations: (?P<other>` +
	mpsSize + `))?, max allowed: (?P<allowed>` + mpsSize + `)\)`

// gpuPatterns are the texts of memory on GPUs. The texts without sizes come after those with sizes, as a cut line has
// no more.
var gpuPatterns = []pattern{
	{ // c10/cuda/CUDACachingAllocator.cpp up to PyTorch 2.0; up to 1.3 "cached"
		name:     "out of memory, up to PyTorch 2.0",
		literals: append([]string{"Tried to allocate", "total capacity;", "already allocated;"}, outOfMemory...),
		expression: `(?P<backend>[A-Z]{2,8}) out of memory\. Tried to allocate (?P<req>` + sz + `) ` +
			`\((?:[A-Z]{2,8}|device) (?P<dev>\d+); (?P<total>` + sz + `) total capacity; (?P<alloc>` + sz +
			`) already allocated; (?:(?P<current>` + sz + `) current active; )?(?P<free>` + sz + `) free; (?:(?P<allowed>` + sz +
			`) allowed; )?(?P<resv>` + sz + `) (?:reserved in total by PyTorch|cached)\)`,
		kind: TrainerLog, wrapped: true, fact: gpuOutOfMemory,
	},
	{ // c10/cuda/CUDACachingAllocator.cpp from PyTorch 2.1; 2.1 writes capacty
		name:     "out of memory, from PyTorch 2.1",
		literals: append([]string{"Tried to allocate", "has a total capac", "is allocated by PyTorch"}, outOfMemory...),
		expression: `(?P<backend>[A-Z]{2,8}) out of memory\. Tried to allocate (?P<req>` + sz + `)\. ` +
			`[A-Z]{2,8} (?P<dev>\d*) ?has a total capaci?ty of (?P<total>` + sz + `)(?: of which (?P<free>` + sz +
			`) is free)?\. (?P<procs>(?:(?:Process \d+|Including non-PyTorch memory, this process) has ` + sz +
			` memory in use\. )*)(?:(?P<allowed>` + sz + `) allowed; )?Of the allocated memory (?P<alloc>` + sz +
			`) is allocated by PyTorch, (?:with (?P<pools>` + sz + `) allocated in private pools \(e\.g\., (?:CUDA|HIP) Graphs\), )?` +
			`and (?P<slack>` + sz + `) is reserved by PyTorch but unallocated`,
		kind: TrainerLog, wrapped: true, fact: gpuOutOfMemory,
	},
	{ // c10/cuda/CUDAMallocAsyncAllocator.cpp
		name:     "out of memory of cudaMallocAsync",
		literals: []string{"would exceed allowed memory", "Free (according to CUDA)"},
		expression: `Allocation on device (?P<dev>\d+) would exceed allowed memory\. \(out of memory\)\s+Currently allocated\s*: ` +
			`(?P<alloc>` + sz + `)\s+Requested\s*: (?P<req>` + sz + `)\s+Device limit\s*: (?P<total>` + sz +
			`)\s+Free \(according to CUDA\)\s*: (?P<free>` + sz + `)`,
		kind: TrainerLog, wrapped: true,
		fact: func(m *match) Fact {
			f, _ := gpuOutOfMemory(m).(GPUOutOfMemory)
			f.Backend = "CUDA"
			return f
		},
	},
	{ // aten/src/ATen/mps/MPSAllocator.mm
		name:       "out of memory of MPS",
		literals:   []string{"MPS backend out of memory", "max allowed:"},
		expression: mpsError + `\. Tried to allocate (?P<req>` + mpsSize + `)`,
		kind:       TrainerLog, wrapped: true, fact: gpuOutOfMemory,
	},
	{ // aten/src/ATen/mps/MPSAllocator.mm, cut
		name:       "out of memory of MPS without the request",
		literals:   []string{"MPS backend out of memory"},
		expression: mpsError,
		kind:       TrainerLog, fact: gpuOutOfMemory,
	},
	{ // c10/cuda/CUDACachingAllocator.cpp from PyTorch 2.13: a warning for each cudaMalloc or cuMemCreate that failed
		name:     "allocation retried",
		literals: []string{"memory allocation failed with OOM on device", "memory mapping failed with OOM on device"},
		expression: `memory (?:allocation|mapping) failed with OOM on device (?P<dev>\d+) while trying to ` +
			`(?:allocate|map) (?P<req>\d+) bytes(?: \(free: (?P<free>\d+), total: (?P<total>\d+)\))?`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return AllocationRetried{
				Device: m.integer("dev", 0), Requested: m.size("req", 1), Free: m.size("free", 1),
				Total: m.size("total", 1),
			}
		},
	},
	{ // c10/cuda/CUDACachingAllocator.cpp from PyTorch 2.15
		name:       "addresses of expandable segments",
		literals:   []string{"[ExpandableSegmentVA] Failed to reserve"},
		expression: `\[ExpandableSegmentVA\] Failed to reserve (?P<req>\d+)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return HostAllocationFailed{By: SegmentAddresses, Requested: m.size("req", 1)}
		},
	},
	{ // deepspeed/runtime/zero/stage3.py, stage_1_and_2.py
		name:       "cache flushed",
		literals:   []string{"pytorch allocator cache flushes since last step"},
		expression: `(?P<n>\d+) pytorch allocator cache flushes since last step`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return CacheFlushed{Times: m.integer("n", 1)} },
	},
	{ // NCCL: src/include/checks.h, alloc.h
		name:     "NCCL out of memory",
		literals: []string{"Cuda failure", "cuda failure", "CUDA failure"},
		expression: `NCCL WARN (?:\[.*\] )?(?i:cuda failure)(?: \d+)?:? '?(?P<status>out of memory)'?|` +
			`(?i:cuda failure)(?: \d+)? '(?P<status2>out of memory)'`,
		kind: TrainerLog,
		fact: func(*match) Fact { return LibraryFailed{Library: "NCCL", Status: "out of memory", Memory: true} },
	},
	{ // aten/src/ATen/cuda/Exceptions.cpp
		name:     "cuBLAS failed",
		literals: []string{"CUBLAS_STATUS_"},
		expression: `(?P<status>CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|` +
			`NOT_SUPPORTED))`,
		kind: TrainerLog,
		fact: library("cuBLAS"),
	},
	{ // aten/src/ATen/cudnn/Exceptions.h
		name:     "cuDNN failed",
		literals: []string{"CUDNN_STATUS_"},
		expression: `(?P<status>CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR\w*|NOT_INITIALIZED|` +
			`EXECUTION_FAILED\w*|NOT_SUPPORTED\w*))`,
		kind: TrainerLog,
		fact: library("cuDNN"),
	},
	{ // tensorflow/core/framework/op_kernel.cc
		name:       "TensorFlow out of memory",
		literals:   []string{"OOM when allocating tensor"},
		expression: `(?P<status>OOM when allocating tensor with shape\S+) .*by allocator (?:GPU|DML|XPU)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{Library: "TensorFlow", Status: m.get("status"), Memory: true}
		},
	},
	{ // the same on the CPU
		name:       "TensorFlow out of host memory",
		literals:   []string{"OOM when allocating tensor"},
		expression: `OOM when allocating tensor with shape\S+ .*by allocator (?:cpu|mklcpu)`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return HostAllocationFailed{By: "TensorFlow"} },
	},
	{ // TensorFlow's class of errors, of the host's memory too
		name:       "TensorFlow: resource exhausted",
		literals:   []string{"ResourceExhaustedError"},
		expression: `\.(?P<status>ResourceExhaustedError):`,
		kind:       TrainerLog,
		fact:       library("TensorFlow"),
	},
	{ // Level Zero and SYCL: codes of Unified Runtime and of its predecessor, which had no code for a device's memory
		name:       "Level Zero out of memory",
		literals:   []string{"_ERROR_OUT_OF_DEVICE_MEMORY", "_ERROR_OUT_OF_RESOURCES"},
		expression: `(?P<status>(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES))`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			status := m.get("status")
			return LibraryFailed{Library: "Level Zero", Status: status,
				Memory: status != "UR_RESULT_ERROR_OUT_OF_RESOURCES"}
		},
	},
	{ // MindSpore: mindspore/ccsrc/runtime/device, with sizes in bytes
		name:       "MindSpore out of memory",
		literals:   []string{"Out of Memory!!!"},
		expression: `Out of Memory!!! total\[(?P<total>\d+)\].* malloc\[(?P<req>\d+)\] failed`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return GPUOutOfMemory{Backend: "NPU", Device: -1, Requested: m.size("req", 1), Total: m.size("total", 1)}
		},
	},
	{ // the Neuron runtime: nrt/nrt_status.h
		name:       "Neuron out of memory",
		literals:   []string{"NRT_RESOURCE"},
		expression: `\b(?P<status>NRT_RESOURCE(?: in \w+\(\))?)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{Library: "the Neuron runtime", Status: m.get("status"), Memory: true}
		},
	},
	{ // the bridge of PyTorch for Gaudi
		name:       "Gaudi out of memory",
		literals:   []string{"Allocation failed for size::", "workspace Allocation of size ::"},
		expression: `MODULE:\w+ (?:Allocation failed for size::|workspace Allocation of size ::)(?P<req>\d+)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return GPUOutOfMemory{Backend: "HPU", Device: -1, Requested: m.size("req", 1)}
		},
	},
	{ // xla/service/gpu, as JAX shows it
		name:     "XLA out of memory",
		literals: []string{"RESOURCE_EXHAUSTED: ", "Resource exhausted: ", "That was not possible"},
		expression: `(?P<status>RESOURCE_EXHAUSTED|Resource exhausted): (?:(?:Out of memory while trying|` +
			`Failed) to allocate|.*Ran out of memory in memory space hbm)|` +
			`(?P<reserve>Attempting to (?:allocate|reserve) [\d.]+[KMGT]?i?B?\b)[^.]*\. That was not possible`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{Library: "XLA", Status: m.get("status") + m.get("reserve"), Memory: true}
		},
	},
	{ // aten/src/ATen/native/cudnn/MHA.cpp
		name:       "cuDNN attention failed",
		literals:   []string{"is_good() to be true"},
		expression: `Expected (?P<status>mha_graph\S*execute\(.*)\.is_good\(\) to be true`,
		kind:       TrainerLog,
		fact:       library("cuDNN"),
	},
	{ // cusolver, cuSPARSE, cuFFT: aten/src/ATen/cuda/Exceptions.h
		name:     "CUDA library failed",
		literals: []string{"CUSOLVER_STATUS_", "CUSPARSE_STATUS_", "CUFFT_ALLOC_FAILED"},
		expression: `(?P<status>(?:CUSOLVER|CUSPARSE)_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|` +
			`INSUFFICIENT_RESOURCES)|CUFFT_ALLOC_FAILED)`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			names := map[string]string{"CUSOLV": "cuSOLVER", "CUSPAR": "cuSPARSE", "CUFFT_": "cuFFT"}
			return library(names[m.get("status")[:6]])(m)
		},
	},
	{ // triton/runtime/errors.py: the shared memory of a multiprocessor, not the GPU's memory
		name:       "Triton out of resources",
		literals:   []string{"out of resource", ", Required: "},
		expression: `out of resources?: (?P<what>[\w ]+), Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)\.`,
		kind:       TrainerLog, wrapped: true,
		fact: func(m *match) Fact {
			return LibraryFailed{
				Library: "Triton",
				Status:  "it needs " + m.get("required") + " bytes of " + m.get("what") + ", of " + m.get("limit"),
			}
		},
	},
	{ // nccl: src/include/alloc.h
		name:       "NCCL cannot allocate",
		literals:   []string{"Failed to CUDA calloc", "Failed to CUDA malloc"},
		expression: `Failed to CUDA (?P<status>[cm]alloc(?: async)? \d+ bytes)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{Library: "NCCL", Status: m.get("status"), Memory: true}
		},
	},
	{ // torch/csrc/distributed/c10d/NCCLUtils.hpp
		name:       "NCCL failed in CUDA",
		literals:   []string{"ncclUnhandledCudaError"},
		expression: `ncclUnhandledCudaError(?P<rest>.*)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{
				Library: "NCCL", Status: "ncclUnhandledCudaError",
				Memory: strings.Contains(m.get("rest"), "out of memory"),
			}
		},
	},
	{ // c10/cuda/CUDAException.cpp; aten/src/ATen/cuda/Exceptions.h for the driver; HIP says HIP
		name: "driver out of memory",
		literals: []string{
			"rror: out of memory", "error: memory allocation", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY",
			"CUresult error", "hipError_t error", "cudaError error",
			"hipErrorOutOfMemory", "cuda runtime error (2)", "CUresult error: 2", "rror [CUDA]: out of " +
				"memory", "rror [HIP]: out of memory",
		},
		expression: `(?:(?P<call>(?:CUDA|HIP) (?:driver )?[Ee]rror|Triton Error \[(?:CUDA|` +
			`HIP)\]): (?:out of memory|memory allocation)|` +
			`cuda runtime error \(2\) : out of memory|` +
			`(?:CUresult|hipError_t|cudaError) error:? +(?:result=)?2\b|` +
			`(?P<code>cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory))`,
		kind: TrainerLog, fact: driverOutOfMemory,
	},
	{ // bitsandbytes: csrc/pythonInterface.cpp, as it gets managed memory
		name:       "bitsandbytes out of memory",
		literals:   []string{"Error out of memory at line"},
		expression: `\bError (?P<call>out of memory) at line \d+ in file `,
		kind:       TrainerLog, fact: driverOutOfMemory,
	},
	{ // bitsandbytes: csrc/ops.cu, any other error of CUDA
		name:       "bitsandbytes failed",
		literals:   []string{" at line "},
		expression: `\bError (?P<what>[a-z][\w -]{3,80}) at line \d+ in file \S+csrc`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return Exception{Type: "an error of CUDA", Message: m.get("what")} },
	},
	{ // torch/distributed/_state_dict_utils.py, torch/distributed/checkpoint
		name:       "pinning failed",
		literals:   []string{"Pinning shared memory failed"},
		expression: `Pinning shared memory failed with error-code`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return LockFailed{By: "cudaHostRegister"} },
	},
	{ // PyTorch, cut or shortened by the program that has printed it
		name:     "out of memory without sizes",
		literals: []string{"out of memory"},
		expression: `(?:^|[:\]] |Error\(['"])(?P<backend>CUDA|HIP|XPU|NPU|MPS backend) out of memory` +
			`(?:\. Tried to allocate (?P<req>` + sz + `|` + moreThan + `)|[.'"]|\s*$)`,
		kind: TrainerLog, fact: gpuOutOfMemory,
	},
	{ // PyTorch's class with another message: CUDAMallocAsyncAllocator.cpp, ComfyUI
		name:       "class of out of memory",
		literals:   []string{"OutOfMemoryError"},
		expression: `^torch\.(?:cuda\.)?OutOfMemoryError(?:$|: *(?P<message>.*))`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			if strings.HasPrefix(m.get("message"), "Caught ") { // in a thread, whose message follows
				return nil
			}
			return GPUOutOfMemory{Backend: "CUDA", Device: -1}
		},
	},
	{ // paddle/phi/core/memory/allocation/cuda_allocator.cc
		name:       "Paddle out of memory",
		literals:   []string{"Out of memory error on GPU"},
		expression: `(?P<status>Out of memory error on GPU \d+)\. Cannot allocate`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return LibraryFailed{Library: "Paddle", Status: m.get("status"), Memory: true}
		},
	},
	{ // sglang/srt/model_executor/model_runner.py
		name:       "SGLang: no memory for its pools",
		literals:   []string{"Please try to increase --mem-fraction-static"},
		expression: `Not enough memory\. Please try to increase --mem-fraction-static`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return GPUOutOfMemory{Backend: "CUDA", Device: -1} },
	},
	{ // vllm/v1/core/kv_cache_utils.py
		name:     "vLLM: cache too small",
		literals: []string{"larger than the available KV cache memory"},
		expression: `\((?P<req>[\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory ` +
			`\((?P<free>[\d.]+) GiB\)`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return GPUOutOfMemory{
				Backend: "CUDA", Device: -1, Requested: m.size("req", ledger.GiB), Free: m.size("free", ledger.GiB),
			}
		},
	},
	{ // vllm/v1/core/kv_cache_utils.py
		name:       "vLLM: no memory for the cache",
		literals:   []string{"No available memory for the cache blocks"},
		expression: `No available memory for the cache blocks`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return GPUOutOfMemory{Backend: "CUDA", Device: -1} },
	},
	{ // accelerate/utils/memory.py
		name:       "no batch size fits",
		literals:   []string{"No executable batch size found"},
		expression: `No executable batch size found, reached zero`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return GPUOutOfMemory{Backend: "CUDA", Device: -1} },
	},
}

// library returns the fact of a library that has failed.
func library(name string) func(*match) Fact {
	return func(m *match) Fact {
		status := m.get("status")
		return LibraryFailed{Library: name, Status: status, Memory: strings.Contains(status, "ALLOC_FAILED")}
	}
}

var neighbour = lazyregexp.New(unspaced(`(?:Process (\d+)|(Including non-PyTorch memory, this process)) has (` + sz +
	`) memory in use`))

func gpuOutOfMemory(m *match) Fact {
	f := GPUOutOfMemory{
		Backend: strings.TrimSuffix(m.get("backend"), " backend"), Device: m.integer("dev", -1),
		Requested: m.size("req", 1), Total: m.size("total", 1), Free: m.size("free", 1), Allowed: m.size("allowed", 1),
		Allocated: m.size("alloc", 1), Reserved: m.size("resv", 1), Pools: m.size("pools", 1),
	}
	if f.Backend == "" {
		f.Backend = "MPS"
	}
	if m.stream.trace != nil {
		f.Within = m.stream.trace.within
	}
	if other := m.size("other", 1); other.Known { // what Metal has allocated for this process beside PyTorch
		f.Reserved, f.Self = f.Allocated, Size{Bytes: f.Allocated.Bytes + other.Bytes, Known: true}
		// Sizes are rounded, to a hundredth of a GB. Metal refuses below its limit where a virtual machine has no GPU.
		if room := f.Allowed.Bytes - f.Self.Bytes; f.Requested.Known && room > f.Requested.Bytes+f.Allowed.Bytes/100 {
			f.Free = Size{Bytes: room, Known: true}
		}
	}
	if slack := m.size("slack", 1); slack.Known && f.Allocated.Known {
		f.Reserved = Size{Bytes: f.Allocated.Bytes + slack.Bytes, Known: true}
	}
	for _, groups := range neighbour.FindAllStringSubmatch(m.get("procs"), -1) {
		used := sizeOf(groups[3], 1)
		if groups[2] != "" {
			f.Self = used
			continue
		}
		process := GPUProcess{Used: used}
		process.PID = atoi(groups[1])
		f.Others = append(f.Others, process)
	}
	if strings.Contains(m.whole[:m.indices[0]], "Warning: ") { // FSDP's: it goes on without a copy
		return AllocationRetried{Device: f.Device, Requested: f.Requested, Free: f.Free, Total: f.Total}
	}
	return f
}

// mayBeNone is what an allocator says of an error after which its caller tries again.
var mayBeNone = lazyregexp.New(`may not be an issue|will (?:free|retry|try again)`)

func driverOutOfMemory(m *match) Fact {
	if mayBeNone.MatchString(m.whole) {
		return AllocationRetried{}
	}
	t := m.stream.trace
	return DriverOutOfMemory{Call: m.get("call") + m.get("code"),
		Pinning: t != nil && t.pinned || pinnedText.MatchString(m.whole),
		Waking:  t != nil && t.phase == ledger.Wake || wakingText.MatchString(m.whole)}
}

// wakingText names the allocators of engines that sleep: csrc/cumem_allocator.cpp of vLLM, and torch_memory_saver.
var wakingText = lazyregexp.New(`\bcumem_allocator\b|\btorch_memory_saver\b|\bwake_up\b`)
