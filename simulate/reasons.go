package simulate

import (
	"fmt"
	"maps"

	"plimsoll/dtype"
	"plimsoll/ledger"
)

// reasonsOf returns why the components of a device are as large as they are.
func (s *simulation) reasonsOf(device ledger.Kind) map[ledger.Component]string {
	tokens := s.MicroBatch * s.Sequence
	batch := fmt.Sprintf("%d x %s tokens", s.MicroBatch, ledger.Count(s.Sequence))
	kept := "kept for the backward pass"
	if s.Recompute != nil {
		kept = "of the block that is recomputed"
	}
	compute := s.ComputeType()
	if s.AutocastType != dtype.Invalid {
		compute = s.AutocastType
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
			"pass ends, and the backward pass needs it (torch/amp/autocast_mode.py)", s.AutocastType),
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
		ledger.OptimizerTemporaries: s.Optimizer.TemporariesWhy(),
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
	for i, state := range s.Optimizer.States(s.trained[0]) {
		if i > 0 {
			text += " + "
		}
		text += state.Name
	}
	if text == "" {
		return "no state"
	}
	return text + fmt.Sprintf(" of %s parameters", ledger.Count(s.trainedElements()))
}
