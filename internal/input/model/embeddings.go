package model

import "strings"

// IsEmbedding reports whether the parameter is the table of an embedding. A
// step uses only the rows of the tokens that it sees. The name decides, as all
// sources of a model have it.
func (p Parameter) IsEmbedding() bool {
	module, ok := strings.CutSuffix(p.Name, ".weight")
	if !ok || len(p.Shape) != 2 {
		return false
	}
	name := module[strings.LastIndexByte(module, '.')+1:]
	switch name {
	case "wte", "wpe", "shared", "embed_tokens", "embed_positions", "embed_in", "pos_embed", "relative_attention_bias",
		"embedding", "embed_tokens_per_layer", "audio_bos_eos_token",
		"embeddings": // Mamba, Nemotron-H and RWKV
		return true
	}
	return strings.HasSuffix(name, "_embedding") || strings.HasSuffix(name, "_embeddings")
}

// smallTensor is a number of elements. A smaller tensor keeps its moments in fp32 where other tensors hold them in
// int8: for norms and biases that costs next to nothing. Embeddings keep fp32 moments too, unless asked not to: their
// gradients differ most from row to row. T. Dettmers et al. found that both matter ("8-bit Optimizers via Block-wise
// Quantization", arXiv 2110.02861).
const smallTensor = 4096

// IsSmall reports whether the parameter keeps its moments in fp32 beside moments in int8, whatever it is.
func (p Parameter) IsSmall() bool { return p.Elements() < smallTensor }
