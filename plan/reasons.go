package plan

import (
	"fmt"
	"maps"

	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/version"
)

// process returns what the ranks of a node hold before the first tensor. It
// counts shared file pages once per rank, as resident memory does.
func (s *simulation) process() ledger.Holding {
	each := processBytes
	why := "a process that has imported torch and transformers and used CUDA: 2.96 GB resident, as PEFT's authors " +
		"measured (README of PEFT 0.2)"
	if s.OnCPU {
		each, why = cpuProcessBytes, "a process that has imported torch and transformers and not used CUDA: 723 MiB "+
			"resident with torch 2.15 and transformers 5.23"
	}
	return ledger.Holding{Component: ledger.PythonProcess, Bytes: each * ledger.Bytes(s.RanksPerNode),
		Why: fmt.Sprintf("%d x %s", s.RanksPerNode, why)}
}

const (
	processBytes    = 2960 * 1000 * 1000 * ledger.Bytes(1)
	cpuProcessBytes = 723 * ledger.MiB
)

// outside returns what a GPU holds outside torch's allocator.
func (j *Job) outside() []ledger.Holding {
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

// reasonsOf returns why the components of a device are as large as they are.
func (s *simulation) reasonsOf(device ledger.Kind) map[ledger.Component]string {
	tokens := s.MicroBatch * s.Sequence
	batch := fmt.Sprintf("%d x %s tokens", s.MicroBatch, ledger.Count(s.Sequence))
	kept := "kept for the backward pass"
	if s.Recompute != nil {
		kept = "of the block that is recomputed"
	}
	compute := s.compute()
	if s.Autocast != dtype.Invalid {
		compute = s.Autocast
	}
	hidden := s.Model.Network.Hidden
	n := s.Model.Network
	blocks := len(n.Blocks())
	r := map[ledger.Component]string{
		ledger.Batch:                fmt.Sprintf("token ids, labels and mask in int64: %s x 3 x 8 B", batch),
		ledger.EmbeddingActivations: fmt.Sprintf("looked-up embeddings: %s x %d", batch, hidden),
		ledger.NormActivations: fmt.Sprintf("%s x %d, input, upcast copy and result of every norm as its kind "+
			"saves them (transformers' modules)", batch, hidden),
		ledger.AttentionActivations: fmt.Sprintf("queries, keys, values and outputs of %d blocks in %v: %s, %s",
			blocks, compute, batch, kept),
		ledger.AttentionScores: fmt.Sprintf("scores of every pair of %s tokens for every head, %s: eager "+
			"attention", ledger.Count(s.Sequence), kept),
		ledger.FeedForwardActivations: fmt.Sprintf("projections, activation and product of the feed-forward networks "+
			"of %d blocks in %v: %s, %s", blocks, compute, batch, kept),
		ledger.ResidualActivations: fmt.Sprintf("the residual stream: %s tokens x %d, for every block that keeps "+
			"or recomputes from it", ledger.Count(tokens), hidden),
		ledger.AdapterActivations: fmt.Sprintf("inputs of the adapters, cast to %v, dropout masks and products",
			s.AdapterType),
		ledger.LogitsAndLoss: fmt.Sprintf("%s tokens x %s words: logits, their fp32 copy, and the "+
			"logarithms that the loss saves (transformers/loss/loss_utils.py)", ledger.Count(tokens),
			ledger.Count(n.Head.Outputs)),
		ledger.AutocastWeights: fmt.Sprintf("autocast keeps a %v copy of every fp32 weight until the forward "+
			"pass ends, and the backward pass needs it (torch/amp/autocast_mode.py)", s.Autocast),
		ledger.Gradients: fmt.Sprintf("%s trained parameters, gradients of their type",
			ledger.Count(s.trainedElements())),
		ledger.ActivationGradients: "gradients between operations of the backward pass, until both of their uses " +
			"are done",
		ledger.OperationScratch: "what kernels need beside their results: expanded weights, partial sums of " +
			"attention",
		ledger.RecomputedActivations: "activations of one block, computed again from its input " +
			"(torch.utils.checkpoint)",
		ledger.MatmulWorkspaces: fmt.Sprintf("cuBLAS: %v for each handle; the backward pass has a thread, and "+
			"so a handle, of its own (CublasHandlePool.cpp)", s.GPU.Workspace()),
		ledger.OptimizerStates: fmt.Sprintf("%s: %s, made in the first step", s.Optimizer.Name, s.stateText()),
		ledger.ManagedOptimizerStates: fmt.Sprintf("%s, paged: in CUDA's managed memory, on the host unless the step "+
			"needs it", s.Optimizer.Name),
		ledger.OptimizerTemporaries: s.Optimizer.copiesText(),
	}
	if s.OnCPU {
		r[ledger.MatmulWorkspaces] = "buffers of MKL and oneDNN, from the first product of matrices on"
	}
	maps.Copy(r, s.engine.reasons())
	return r
}

// stateText describes the optimizer states.
func (s *simulation) stateText() string {
	if len(s.trained) == 0 {
		return "nothing is trained"
	}
	text := ""
	for i, state := range s.Optimizer.states(s.trained[0]) {
		if i > 0 {
			text += " + "
		}
		text += state.name
	}
	if text == "" {
		return "no state"
	}
	return text + fmt.Sprintf(" of %s parameters", ledger.Count(s.trainedElements()))
}

// copiesText describes the temporaries of an optimizer step.
func (o *optimizer) copiesText() string {
	if o.Variant == Foreach && o.copies > 0 {
		return o.copiesWhy
	}
	return fmt.Sprintf("temporaries of the step over one parameter at a time (%s)", o.Variant)
}
