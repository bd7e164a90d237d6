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
