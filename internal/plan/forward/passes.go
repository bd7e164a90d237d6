package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/plan/autograd"
)

// AttentionKind is an implementation of attention.
type AttentionKind string

// The kinds, as transformers' attn_implementation names them.
const (
	Eager AttentionKind = "eager" // materializes the scores
	SDPA  AttentionKind = "sdpa"  // torch's scaled_dot_product_attention
	Flash AttentionKind = "flash" // the flash-attn package
)

// LossKind is an implementation of the loss.
type LossKind int

// The losses.
const (
	// ShiftLabels is the loss of transformers since 4.49: it upcasts the logits
	// and shifts the labels.
	ShiftLabels LossKind = iota
	// ShiftLogits is the loss of transformers before 4.49: it copies all logits
	// but the last of each sequence, if there are several.
	ShiftLogits
	// CompiledLoss is ShiftLabels compiled. It materializes neither the upcast
	// logits nor the log-probabilities.
	CompiledLoss
	// ChunkedLoss computes the loss of 128 tokens at a time (litgpt's
	// chunked_cross_entropy). The logits are cast to fp32 when the model returns
	// them (Lightning's precision plugins).
	ChunkedLoss
	// NativeLoss is the loss of a training loop of its own: the logits stay in the
	// type of the model, and none are copied.
	NativeLoss
	// FusedLoss materializes the logits of some tokens at a time (Liger's fused
	// linear cross entropy).
	FusedLoss
	// InPlaceLoss writes the gradient of the logits over their fp32 copy (Liger's cross entropy).
	InPlaceLoss
	// SmoothedLoss is the Trainer's loss of labels that are smoothed, from the logits that the model has returned
	// (LabelSmoother in transformers/trainer_pt_utils.py).
	SmoothedLoss
	// LogProbabilities are those of the tokens of answers, from the logarithms of all
	// entries in fp32 (get_batch_logps in LLaMA-Factory's train/trainer_utils.py).
	LogProbabilities
	// SelectedLogProbabilities are the same, sequence by sequence: TRL since 0.12
	// (selective_log_softmax in trl/trainer/utils.py).
	SelectedLogProbabilities
	// NoLoss ends with the logits.
	NoLoss
	// DivergentLoss is ASFT: behind the model's own loss the program computes another, and the divergence from the
	// logits of a frozen model (asft_loss_func in LLaMA-Factory's train/trainer_utils.py).
	DivergentLoss
	// TiledLoss has log-probabilities of tokens from tiles of tokens and vocabulary, which the backward pass makes
	// again: TRL since 1.15.
	TiledLoss
	// RecomputedLoss is the loss of 256 tokens at a time, which the backward pass computes again: chunked_nll of TRL
	// before 1.15.
	RecomputedLoss
	// ChunkedOutputsLoss and LinearLoss are torchtune's losses of parts of the tokens, with the logits of all parts at
	// once or of one after the other.
	ChunkedOutputsLoss
	LinearLoss
	// KernelLoss has log-probabilities of tokens from a kernel that saves the logits and writes their gradient in
	// place: verl, by flash-attn (CrossEntropyLoss in flash_attn/ops/triton/cross_entropy.py). WideKernelLoss
	// has them from an fp32 copy that the program holds, and a gradient beside it: OpenRLHF.
	KernelLoss
	WideKernelLoss
	// ShiftNarrow is ShiftLogits in the type of the logits, as of models whose classes computed it themselves.
	ShiftNarrow
	// NarrowInPlaceLoss writes the gradient of the logits over themselves (Fast_CrossEntropyLoss in
	// unsloth/kernels/cross_entropy_loss.py).
	NarrowInPlaceLoss
)

// Options are the settings of one forward pass.
type Options struct {
	Batch, Sequence int64 // sequences of a micro batch, tokens of a sequence
	// Images of the micro batch, for models with an encoder of images.
	Images Images
	// WeightType is the type of the weights, which matmuls compute in without autocast.
	WeightType dtype.Type
	// Autocast is the type that torch.autocast computes matmuls in. It is Invalid if autocast is off.
	Autocast dtype.Type
	Passes
	Parallel Degrees
	// Tiles is the number of tiles of a sequence that feed-forward networks run on, one after the other; 0 is none.
	Tiles int64
	// HostRanks is the number of ranks whose tokens KTransformers' experts on the host take, 0 without such experts.
	HostRanks int64
	// WideLogits means that the program casts the outputs of the model to fp32 (convert_outputs_to_fp32 in accelerate).
	WideLogits bool
	// JudgedType is the type of the logits of a frozen model that DivergentLoss compares with.
	JudgedType dtype.Type
	// Receives means that the hidden states come from the pipeline stage before, Sends that they go to the stage
	// behind instead of to the head. Result.Loss is then the tensor that is sent.
	Receives, Sends bool
	// DividesBackward means that the backward pass runs in two halves. What was received is then Result.Received.
	DividesBackward bool
	OffloadMemory   autograd.OffloadMemory
	Hooks           Hooks // nil: none
	// HasLogits is called when the program replaces the logits of the step before by the new ones. It must be set.
	HasLogits func()
}

// Passes say how a program runs the passes of a model. They are those of every micro batch.
type Passes struct {
	AttentionForm
	Kernels
	LossForm
	Keeping
}

// AttentionForm says how attention is computed.
type AttentionForm struct {
	Attention AttentionKind
	// FlashVersion is that of the flash-attn package if it is 3 or 4, which keep what version 2 keeps.
	FlashVersion int
	// FusesBias uses SDPA also for attention with a bias on its scores, which is then materialized: transformers since
	// 5.0.
	FusesBias bool
	// FusedQKV is litgpt's attention. Queries, keys and values are one tensor (fused QKV), and the values stay a view
	// of it. Keys and values are copied for all heads, and the heads are then put side by side. 4-bit weights are
	// dequantized to fp16 before they are cast.
	FusedQKV bool
	// RepeatsKeys copies keys and values for all heads that share them, also before SDPA without a mask: transformers
	// 4.36 to 4.53, and torch before 2.5.
	RepeatsKeys bool
	// ContiguousHeads makes queries, keys and values contiguous before SDPA, so that its output is not in the order of
	// tokens and is copied once more: transformers 4.48 to 4.55 (integrations/sdpa_attention.py).
	ContiguousHeads bool
	// MasksCausally means that SDPA gets a mask, which one tensor holds for all blocks: transformers makes it while
	// torch.compile traces a model.
	MasksCausally bool
	// SharesWindow means that one tensor holds the mask of the window for all blocks, in the type of the weights:
	// transformers before 4.53, whose models with a window have it in every block.
	SharesWindow bool
	// SharedAttention means that a model whose attention was its own has that of all models: GPT-J since transformers
	// 5.24.
	SharedAttention bool
	// ClampsScores takes the maximum of masked scores and the least number of their type, in eager attention. It saves
	// the scores once more.
	ClampsScores bool
	// SavesSoftmaxInput is torch before 1.11: softmax and log_softmax save their input, too, for
	// _softmax_backward_data.
	SavesSoftmaxInput bool
	// HoldsCache means that the language model behind an encoder of images keeps keys and values for a generation,
	// until the outputs are released: text_config has a use_cache of its own, which the Trainer leaves on.
	HoldsCache bool
}

// Kernels says which code runs the modules of the model.
type Kernels struct {
	// FusedActivations computes every activation function in one kernel, whatever its name in the configuration.
	FusedActivations bool
	// Compile fuses the operations between matmuls (torch.compile). What they keep is what the min-cut partitioner
	// keeps: the inputs of norms and of matmuls, which it does not recompute from matrices
	// (ban_recompute_materialized_backward in torch/_functorch/partitioners.py).
	Compile bool
	// Liger replaces norms, rotary positions and gated activations by the kernels of liger-kernel (use_liger_kernel).
	Liger bool
	// ScattersExperts runs experts by axolotl's kernels of ScatterMoE.
	ScattersExperts bool
	// RoutersTogether is the loss of the load of experts before transformers 5.23: the logits of all routers are
	// joined, with a number for each token, chosen expert and expert.
	RoutersTogether bool
	// AttachesQuantizedInput is bitsandbytes before 0.43.2: matmuls with 4-bit weights keep their input, which nothing
	// needs, in an attribute of their context. Those with 8-bit weights do so to this day.
	AttachesQuantizedInput bool
	// CastsInside means that linear modules under autocast save their input and weight before the casts, and keep no
	// cast weight: ZeRO-3 with memory_efficient_linear (zero/linear.py).
	CastsInside bool
	GPU
	// NoDropout means that the program has turned dropout off.
	NoDropout bool
	// QAT fake-quantizes linear modules, nil for none.
	QAT *FakeQuantization
}

// GPU says which kernels a GPU has, and how much memory they work in. It is zero on a CPU.
type GPU struct {
	// ProductWorkspace are the bytes that cuBLAS gets for each product: torch since 2.15. It is 0 where every handle
	// keeps its own.
	ProductWorkspace int64
	// Processors are the multiprocessors, and Threads those that each of them runs at a time.
	Processors, Threads int64
	// PrefersCuDNN means that scaled dot product attention is cuDNN's where that can do it
	// (check_prefer_cudnn_attention in sdp_utils.cpp of PyTorch).
	PrefersCuDNN bool
}

// LossForm says what is made of the logits, and what the outputs of the model hold.
type LossForm struct {
	Loss LossKind
	// ChunksHead makes the logits of 128 tokens of every sequence at a time, for ChunkedLoss: litgpt's adapters
	// (lm_head_chunk_size in finetune/lora.py).
	ChunksHead bool
	// CompilesParts means that the loss of each part of the tokens is compiled, as torchtune's chunks.
	CompilesParts bool
	// CompilesLogits means that a compiled graph computes the loss and returns the logits beside it.
	CompilesLogits bool
	// Compares means that answers are compared by their log-probabilities.
	Compares bool
	// HalfLoss adds the cross entropy of the first half of the sequences, the chosen answers, to a loss of
	// log-probabilities.
	HalfLoss bool
	// LossTwice means that the program computes its own loss, from a copy of all logits but the last in fp32, once the
	// model has computed its loss. The outputs hold what that one saved.
	LossTwice bool
	// WeighsEntropy means that the loss of every token is weighted by an entropy, for which the program copies the
	// logits of all tokens with labels (eaft_loss_func).
	WeighsEntropy bool
	// KeepsHidden means that the model returns the hidden states behind all blocks.
	KeepsHidden bool
}

// Keeping says what is kept for the backward pass, what is recomputed and what waits on the host.
type Keeping struct {
	// Recompute is the checkpoint of recomputed blocks, nil without.
	Recompute *autograd.Checkpoint
	// RecomputeEvery recomputes one of so many blocks; 0 and 1 mean all. It is the last of them, as in torchtitan, or
	// the first with RecomputeFirst, as in transformers.
	RecomputeEvery int
	RecomputeFirst bool
	// OffloadActivations moves what operations save to the host, nil if it stays.
	OffloadActivations *autograd.Offload
	// InputGradients makes the output of the embeddings need a gradient, as enable_input_require_grads does.
	InputGradients bool
	// HooksImages is InputGradients for the patches of images, too.
	HooksImages bool
}

// Degrees are the numbers of ranks that share a pass. A degree is 1 if ranks share nothing.
type Degrees struct {
	Tensor  int64 // ranks that share the width of a block
	Context int64 // ranks that share a sequence
	// Ulysses means that the ranks of a sequence exchange its parts for heads around attention.
	Ulysses bool
	// DeepSpeedUlysses means that attention has full sequences of some heads, where other layers have a part of the
	// sequences (UlyssesSPAttentionHF of DeepSpeed). Without, keys and values go around.
	DeepSpeedUlysses bool
}
