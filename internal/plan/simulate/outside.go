package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/plan/job"
)

// process returns what a rank holds on the host before the first tensor. It
// counts shared file pages once per rank, as resident memory does.
func process(j *job.Job) ledger.Holding {
	if h, learned := j.Learned[ledger.PythonProcess]; learned {
		return h
	}
	if j.OnCPU {
		return ledger.Holding{Component: ledger.PythonProcess, Bytes: cpuProcessBytes,
			Why: "a process that has imported torch and transformers and not used CUDA: 723 MiB resident with torch " +
				"2.15 and transformers 5.23"}
	}
	return usualProcess
}

// asMeasured returns holdings whose bytes are measured figures, with that as their formula.
func asMeasured(list ...ledger.Holding) []ledger.Holding {
	for i := range list {
		list[i].Formula = ledger.Formula{{ledger.Of(int64(list[i].Bytes), "B, as measured")}}
	}
	return list
}

// usualProcess is a process that trains on a GPU.
var usualProcess = ledger.Holding{Component: ledger.PythonProcess, Bytes: processBytes,
	Why: "a process that has imported torch and transformers and used CUDA: 2.96 GB resident, as PEFT's authors " +
		"measured (README of PEFT 0.2)"}

// Process returns what a process that trains on a GPU holds, if Python and what it has imported and read take so many
// bytes where there is no GPU.
func Process(without ledger.Bytes) ledger.Holding {
	const more = processBytes - cpuProcessBytes
	return ledger.Holding{Component: ledger.PythonProcess, Bytes: without + more,
		Why: fmt.Sprintf("%v here, with what the program has read, and %v that CUDA's libraries take: 2.96 GB were "+
			"measured with CUDA (README of PEFT 0.2), and 723 MiB without", without, more)}
}

const (
	secondGroup     = 544 * ledger.MiB  // a communicator of 2 ranks (github.com/NVIDIA/nccl issue 964)
	firstBarrier    = 1485 * ledger.MiB // of 2 ranks
	processBytes    = 2960 * 1000 * 1000 * ledger.Bytes(1)
	cpuProcessBytes = 723 * ledger.MiB
)

// outside returns what a GPU holds outside torch's allocator.
func outside(j *job.Job) []ledger.Holding {
	list := Outside(j.Versions.Torch, j.GPU.Capability, j.World)
	if h, learned := j.Learned[ledger.OutsideAllocator]; learned {
		list = asMeasured(h)
	}
	return append(list, outsideOfRollout(j)...)
}

// Outside returns what a GPU of a compute capability holds outside torch's allocator, in a job of so many ranks.
func Outside(torch version.Version, capability, ranks int) []ledger.Holding {
	list := []ledger.Holding{contextOf(torch, capability)}
	if ranks > 1 {
		list = append(list, ncclOf(ranks))
	}
	return asMeasured(list...)
}

// Apart returns how far memory outside the allocator was from the plan where others measured it, and why.
func Apart(h ledger.Holding) (below, above ledger.Bytes, why string) {
	switch h.Component {
	case ledger.CUDAContext:
		least, most := 426*ledger.MiB, 922*ledger.MiB // kernels that are loaded when they are used
		if h.Bytes > most {
			least, most = 1343*ledger.MiB, 1823*ledger.MiB
		}
		return h.Bytes - least, most - h.Bytes, fmt.Sprintf("contexts of other GPUs, drivers and versions of torch, "+
			"measured from %v to %v", least, most)
	case ledger.NCCL:
		return firstBarrier - secondGroup, secondGroup, "the first communicator of 2 ranks took 544 MiB " +
			"(github.com/NVIDIA/nccl issue 964) or 1.45 GiB, kernels included; a further group of ranks has buffers " +
			"of its own"
	case ledger.PythonProcess:
		const most = processBytes
		if h.Bytes < most {
			return 0, most - h.Bytes, "processes that import more libraries: up to 2.96 GB were measured"
		}
		return most - cpuProcessBytes, cpuProcessBytes, "723 MiB are resident with torch and transformers alone; " +
			"a worker of a DataLoader that imports them takes as much again"
	}
	return 0, 0, ""
}

// ncclOf returns the memory of one communicator with the kernels of NCCL, from the
// first collective on. Torch's own data-parallel wrappers use one communicator; jobs
// with several process groups use several.
func ncclOf(ranks int) ledger.Holding {
	const moreRanks = 144 * ledger.MiB
	const source = "what the first barrier of 2 A100 took (mem_get_info); other topologies take other amounts"
	if ranks == 2 {
		return ledger.Holding{Component: ledger.NCCL, Bytes: firstBarrier,
			Why: "kernels, buffers and channels of one communicator of 2 ranks: " + source}
	}
	return ledger.Holding{Component: ledger.NCCL, Bytes: firstBarrier + moreRanks,
		Why: "kernels, buffers and channels of one communicator of more than 2 ranks: " + source +
			", and 144 MiB that 4 took more (github.com/NVIDIA/nccl issue 964)"}
}

// contextOf returns the CUDA context with the loaded kernels. Before torch 1.13
// all kernels were loaded at the start; since CUDA 11.7 they are loaded on first
// use. An A100 takes more than older GPUs, and an unknown GPU counts as one.
func contextOf(torch version.Version, capability int) ledger.Holding {
	const ofA100 = "measured on an A100 (mem_get_info, torch 1.10, 1.13 and 2.1)"
	context := func(bytes ledger.Bytes, why string) ledger.Holding {
		return ledger.Holding{Component: ledger.CUDAContext, Bytes: bytes, Why: why}
	}
	old := capability > 0 && capability < 80
	switch {
	case !torch.AtLeast(1, 13, 0) && old:
		return context(1343*ledger.MiB, "measured by transformers' authors: nvidia-smi after torch.ones(1).cuda() on "+
			"a V100 (perf_train_gpu_one, torch 1.10, CUDA 11.2)")
	case !torch.AtLeast(1, 13, 0):
		return context(1823*ledger.MiB, ofA100+"; all kernels are loaded at the start")
	case !torch.AtLeast(2, 1, 0):
		return context(922*ledger.MiB, ofA100)
	case old || capability > 80:
		return context(426*ledger.MiB, "nvidia-smi after torch.cuda.mem_get_info on an RTX 6000 Ada (torch 2.10, CUDA "+
			"13.0; github.com/unslothai/unsloth-zoo pull request 1053); kernels are loaded when they are used, and "+
			"come on top")
	}
	return context(481*ledger.MiB, ofA100+"; kernels are loaded when they are used, and come on top")
}
