package megatron

import (
	"fmt"
	"path/filepath"
	"strings"

	"plimsoll/internal/base/fault"
)

func dashed(key string) string { return strings.ReplaceAll(key, "_", "-") }

// contradictions are assertions of Megatron-LM.
func (j *Job) contradictions() error {
	d := j.Degrees
	for _, rule := range []struct {
		broken    bool
		key, what string
		reason    string
	}{
		{j.Heads%d.Tensor != 0, "num_attention_heads", fmt.Sprintf("is %d, no multiple of tensor parallel %d", j.Heads,
			d.Tensor), "Megatron-LM asserts this: every rank has the same number of heads"},
		{j.FeedForward%d.Tensor != 0, "ffn_hidden_size", fmt.Sprintf("is %d, no multiple of tensor parallel %d",
			j.FeedForward, d.Tensor), "Megatron-LM asserts this: every rank has an equal part"},
		{j.Experts > 0 && j.ExpertHidden%d.ExpertTensor != 0, "moe_ffn_hidden_size", fmt.Sprintf(
			"is %d, no multiple of expert tensor parallel %d", j.ExpertHidden, d.ExpertTensor),
			"Megatron-LM asserts this: every rank has an equal part"},
		{j.SharedExpert%d.Tensor != 0, "moe_shared_expert_intermediate_size", fmt.Sprintf(
			"is %d, no multiple of tensor parallel %d", j.SharedExpert, d.Tensor),
			"Megatron-LM asserts this: every rank has an equal part"},
		{j.SequenceSplit && (j.Sequence%d.Tensor != 0 || j.DecoderSequence%d.Tensor != 0), "seq_length", fmt.Sprintf(
			"is %d, no multiple of tensor parallel %d", j.Sequence, d.Tensor),
			"sequence parallelism gives every rank an equal part"},
		{j.Predictions > 0 && j.Hidden%d.Tensor != 0, "hidden_size", fmt.Sprintf(
			"is %d, no multiple of tensor parallel %d", j.Hidden, d.Tensor), "Megatron-LM asserts this"},
		{j.QueryGroups%d.Tensor != 0 && d.Tensor%j.QueryGroups != 0, "num_query_groups", fmt.Sprintf(
			"is %d, and tensor parallel is %d", j.QueryGroups, d.Tensor), "one must be a multiple of the other"},
		{d.Context > 1 && j.Sequence%(2*d.Context) != 0, "seq_length", fmt.Sprintf("is %d, no multiple of 2 x context "+
			"parallel %d", j.Sequence, d.Context), "Megatron-LM asserts this: causal ranks take two pieces each"},
		{j.OverlapParams && !j.Distributed, "overlap_param_gather", "is given without --use-distributed-optimizer",
			"Megatron-LM asserts this: only the distributed optimizer gathers parameters"},
		{j.OverlapParams && !j.OverlapGradients, "overlap_param_gather", "is given without --overlap-grad-reduce",
			"Megatron-LM asserts this"},
		{j.PrecisionAware && !j.Distributed, "use_precision_aware_optimizer",
			"is given without --use-distributed-optimizer", "Megatron-LM asserts this"},
		{j.CPUOffload && !j.PrecisionAware, "optimizer_cpu_offload",
			"is given without --use-precision-aware-optimizer", "Megatron-LM asserts this"},
		{j.OffloadStates && !j.Distributed, "offload_optimizer_states", "is given without --use-distributed-optimizer",
			"Megatron-LM asserts this"},
		{j.ChunkedOffload && (!j.Distributed || j.CPUOffload || j.OffloadStates), "chunked_optimizer_state_offload",
			"is given without --use-distributed-optimizer or beside another way to offload states",
			"Megatron-LM asserts this"},
		{j.ChunkedOffload && j.PrecisionAware && (j.MainParams != "fp32" || !wide(j.ExpAvg) || !wide(j.ExpAvgSq)),
			"chunked_optimizer_state_offload", "is given with states of another type than fp32 and bf16",
			"Megatron-LM asserts this: master weights in fp32, moments in fp32 or bf16"},
		{j.FP8Gather && j.FP8 == "", "fp8_param_gather", "is given without --fp8-format",
			"parameters stay in 16 bits without fp8"},
		{j.FP8 != "" && !j.TransformerEngine(), "fp8_format", "needs --transformer-impl transformer_engine", ""},
		{j.Accumulate32 && j.Reduce16, "grad_reduce_in_bf16", "is given beside --accumulate-allreduce-grads-in-fp32",
			"Megatron-LM accepts one of the two"},
		{j.Expert > 1 && j.Experts == 0, "expert_model_parallel_size", "is above 1 without --num-experts",
			"Megatron-LM asserts this"},
		{j.Recompute == "full" && j.RecomputeMethod == "", "recompute_granularity",
			"is full without --recompute-method", "Megatron-LM asserts this: uniform or block"},
		{j.Recompute == "selective" && j.RecomputeMethod != "", "recompute_method",
			"is given with selective recomputation", "Megatron-LM asserts that only full has a method"},
		{j.LatentAttention && j.GroupedQuery, "group_query_attention", "is given with --multi-latent-attention",
			"Megatron-LM asserts that only one of the two is given"},
		{j.Kind == GPT && j.SquaredReLU && j.SwiGLU, "squared_relu", "is given beside --swiglu", "give one of the two"},
		{j.QuickGeGLU && j.SwiGLU, "quick_geglu", "is given beside --swiglu", "Megatron-LM asserts this"},
		{j.PadsToCapacity && j.Capacity == 0, "moe_pad_expert_input_to_capacity",
			"is given without --moe-expert-capacity-factor", "Megatron-LM asserts this"},
	} {
		if rule.broken {
			return j.Fault(rule.key, rule.what, rule.reason)
		}
	}
	return nil
}

// experts completes the settings of a mixture of experts.
func (j *Job) experts() error {
	if j.Experts == 0 {
		return nil
	}
	if !patterns.MatchString(j.frequency()) {
		return j.Fault("moe_layer_freq", fmt.Sprintf("is %s, which plimsoll cannot evaluate", j.LayerFrequency),
			"give a number, or a list such as [0]*3+[1]*45")
	}
	d := j.Degrees
	if j.Experts%d.Expert != 0 {
		return j.Fault("num_experts", fmt.Sprintf("is %d, no multiple of expert parallel %d", j.Experts, d.Expert),
			"Megatron-LM asserts this: every rank has the same number of experts")
	}
	if d.Tensor > 1 && !j.SequenceSplit {
		return j.Fault("sequence_parallel", "is not given, with experts and tensor parallelism",
			"Megatron-LM asserts that a mixture of experts with tensor parallelism has --sequence-parallel")
	}
	if j.Imbalance == 1 {
		j.assume("experts of every rank get the same number of tokens (give --expert-imbalance)")
	}
	return nil
}

// words are the sizes of vocabularies that tokenizers of Megatron-LM always have.
var words = map[string]int64{
	"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996, "Llama2Tokenizer": 32000,
}

// vocabulary decides the number of rows of the embedding (tokenizer.py, _vocab_size_with_padding).
func (j *Job) vocabulary(q Request) error {
	tokenizer := j.TokenizerType
	if tokenizer == "" { // the default of each script
		tokenizer = map[Kind]string{GPT: "GPT2BPETokenizer", BERT: "BertWordPieceLowerCase",
			T5: "BertWordPieceLowerCase"}[j.Kind]
	}
	size := q.Vocabulary
	switch {
	case j.Padded > 0 && size == 0:
		j.Vocabulary = j.Padded
		return nil
	case size > 0:
	case j.VocabularySize > 0:
		size = j.VocabularySize
	case j.FileTokens > 0:
		size = j.FileTokens
	case words[tokenizer] > 0:
		size = words[tokenizer]
		j.assume("a vocabulary of %d tokens: %s", size, tokenizer)
	case tokenizer == "TikTokenizer":
		size = 1 << 17
		j.assume("a vocabulary of %d tokens: the default of %s", size, tokenizer)
	default:
		return fault.Inputf("the vocabulary of %s (%s) is unknown", tokenizer, filepath.Base(j.TokenizerModel)).
			WithHint("give --vocabulary with its number of tokens")
	}
	if j.Kind == T5 || j.Kind == BERT {
		size += j.ExtraIDs
	}
	unit := j.VocabularyUnits * j.Degrees.Tensor
	if j.Unpadded {
		unit = 1
	}
	j.Vocabulary = (size + unit - 1) / unit * unit
	return nil
}

// attention decides which implementation of attention runs.
func (j *Job) attention() error {
	name := j.Megatron.Attention
	switch {
	case !j.TransformerEngine():
		j.Attention = "local"
		if j.Flash {
			j.Attention = "flash"
		}
		return nil
	case name == "auto" && j.GPU.Capability >= 90:
		name = "fused"
		j.assume("fused attention of cuDNN: Transformer Engine prefers it from Hopper on")
	case name == "auto":
		name = "flash"
		j.assume("flash attention: Transformer Engine prefers it before Hopper")
	}
	j.Attention = name
	return nil
}

func wide(name string) bool { return name == "fp32" || name == "bf16" }
