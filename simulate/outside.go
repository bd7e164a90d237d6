package simulate

import (
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/version"
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
	return ledger.Holding{Component: ledger.PythonProcess, Bytes: processBytes,
		Why: "a process that has imported torch and transformers and used CUDA: 2.96 GB resident, as PEFT's authors " +
			"measured (README of PEFT 0.2)"}
}

const (
	processBytes    = 2960 * 1000 * 1000 * ledger.Bytes(1)
	cpuProcessBytes = 723 * ledger.MiB
)

// outside returns what a GPU holds outside torch's allocator.
func outside(j *job.Job) []ledger.Holding {
	if h, learned := j.Learned[ledger.OutsideAllocator]; learned {
		return []ledger.Holding{h}
	}
	list := []ledger.Holding{contextOf(j.Versions.Torch)}
	if j.World > 1 {
		list = append(list, ncclOf(j.World))
	}
	return list
}

// ncclOf returns the memory of one communicator. Torch's own data-parallel
// wrappers use one; jobs with several process groups use several.
func ncclOf(ranks int) ledger.Holding {
	const source = "what an all-reduce over the GPUs of a node with 4 A100 and NVLink took (github.com/NVIDIA/nccl " +
		"issue 964); other topologies take other amounts"
	if ranks == 2 {
		return ledger.Holding{Component: ledger.NCCL, Bytes: 544 * ledger.MiB,
			Why: "buffers and channels of one communicator of 2 ranks: " + source}
	}
	return ledger.Holding{Component: ledger.NCCL, Bytes: 688 * ledger.MiB,
		Why: "buffers and channels of one communicator of more than 2 ranks: " + source}
}

// contextOf returns the CUDA context with the loaded kernels. Before torch 2.0
// all kernels were loaded at the start; since CUDA 11.7 they are loaded on first
// use.
func contextOf(torch version.Version) ledger.Holding {
	switch {
	case !torch.AtLeast(1, 13, 0):
		return ledger.Holding{Component: ledger.CUDAContext, Bytes: 1343 * ledger.MiB,
			Why: "measured by transformers' authors: nvidia-smi after torch.ones(1).cuda() on a V100 " +
				"(perf_train_gpu_one, torch 1.10, CUDA 11.2)"}
	case !torch.AtLeast(2, 1, 0):
		return ledger.Holding{Component: ledger.CUDAContext, Bytes: 900 * 1000 * 1000,
			Why: "900 MB in nvidia-smi for context and kernels on an A100, as a user of the PyTorch forum " +
				"found in 2023"}
	}
	return ledger.Holding{Component: ledger.CUDAContext, Bytes: 426 * ledger.MiB,
		Why: "nvidia-smi after torch.cuda.mem_get_info on an RTX 6000 Ada (torch 2.10, CUDA 13.0; " +
			"github.com/unslothai/unsloth-zoo pull request 1053); kernels are loaded when they are used, and " +
			"come on top"}
}
