package megatron

import (
	"fmt"

	"plimsoll/internal/input/model"
	"plimsoll/internal/input/parallel"
)

// Parameter is a rank's part of a parameter.
type Parameter struct {
	Name     string
	Elements int64
	Expert   bool // it belongs to experts, which have a data parallel group of their own
	// Weight means that it is the matrix of a linear layer, whose gradient goes straight to the gradient buffer.
	Weight bool
	Shared bool // the embedding, which the head uses, too
	Frozen bool // only adapters are trained
}

// lister lists the parameters of a module.
type lister struct {
	*Job
	prefix  string
	list    []Parameter
	adapted []adapted
}

func (l *lister) add(name string, elements int64) {
	l.list = append(l.list, Parameter{Name: l.prefix + name, Elements: elements, Frozen: l.Adapter != nil})
}

func (l *lister) weight(name string, in, out int64) {
	l.list = append(l.list, Parameter{Name: l.prefix + name + ".weight", Elements: in * out, Weight: true,
		Frozen: l.Adapter != nil})
	l.adapt(name, in, out)
}

// linear adds a linear layer, with a bias unless the model has none.
func (l *lister) linear(name string, in, out, bias int64) {
	l.weight(name, in, out)
	if bias > 0 && !l.NoBias {
		l.add(name+".bias", bias)
	}
}

func (l *lister) norm(name string, width int64) {
	l.add(name+".weight", width)
	if l.Normalization == "LayerNorm" {
		l.add(name+".bias", width)
	}
}

// Parameters returns the parameters of a chunk on a rank, in the order in which Megatron-LM makes them.
func (j *Job) Parameters(c parallel.Chunk) []Parameter { return j.listed(c).list }

func (j *Job) listed(c parallel.Chunk) *lister {
	l := &lister{Job: j}
	if c.Embedding {
		l.weight("embedding.word_embeddings", j.Vocabulary/j.Degrees.Tensor, j.Hidden)
		l.list[0].Shared = !j.Untied
		l.copied("embedding.word_embeddings")
		if j.PositionType == "learned_absolute" {
			l.add("embedding.position_embeddings.weight", j.Positions*j.Hidden)
		}
		if j.Kind == BERT {
			l.add("embedding.tokentype_embeddings.weight", 2*j.Hidden)
		}
	}
	encoder := false
	for i, layer := range j.OnStage(c) {
		if encoder && !layer.Encoder {
			l.norm("encoder.final_layernorm", j.Hidden)
		}
		encoder = layer.Encoder
		l.prefix = fmt.Sprintf("layers.%d.", i)
		l.layer(layer)
		l.prefix = ""
	}
	if c.Loss {
		l.head(c)
	}
	return l
}

// undivided returns the job on one rank.
func (j *Job) undivided() *Job {
	whole := *j
	whole.Degrees = parallel.Degrees{Tensor: 1, Pipeline: 1, Virtual: 1, Context: 1, Data: 1, Expert: 1,
		ExpertTensor: 1, ExpertData: 1}
	return &whole
}

// Model returns the whole model without adapters. Its network is empty: Megatron-LM's layers are not those of
// transformers.
func (j *Job) Model() *model.Model {
	m := &model.Model{Name: string(j.Kind), Architecture: Program, Source: "arguments", Network: &model.Network{}}
	whole := parallel.Chunk{Layers: int64(len(j.Layers)), Embedding: true, Loss: true}
	for _, p := range j.undivided().Parameters(whole) {
		if j.Adapter != nil && !p.Frozen {
			continue
		}
		m.Parameters = append(m.Parameters, model.Parameter{Name: p.Name, Shape: []int64{p.Elements},
			DType: j.ParameterType, Block: -1})
	}
	return m
}

// layer adds a transformer layer.
func (l *lister) layer(layer Layer) {
	l.norm("input_layernorm", l.Hidden)
	if l.LatentAttention {
		l.latentAttention()
	} else {
		l.attentionOf("self_attention")
	}
	if layer.Cross {
		l.norm("pre_cross_attn_layernorm", l.Hidden)
		heads := l.Heads * l.HeadSize / l.Degrees.Tensor
		l.linear("cross_attention.linear_q", l.Hidden, heads, heads)
		l.linear("cross_attention.linear_kv", l.Hidden, 2*heads, 2*heads)
		l.linear("cross_attention.linear_proj", heads, l.Hidden, l.Hidden)
	}
	l.norm("pre_mlp_layernorm", l.Hidden)
	if layer.Mixture {
		l.mixture()
		return
	}
	l.feedForward("mlp", l.FeedForward/l.Degrees.Tensor)
}

func (l *lister) feedForward(name string, width int64) {
	l.linear(name+".linear_fc1", l.Hidden, width*l.Gates(), width*l.Gates())
	l.linear(name+".linear_fc2", width, l.Hidden, l.Hidden)
}

// Gates returns the projections of the first feed-forward matrix: two with a gate.
func (j *Job) Gates() int64 {
	if j.SwiGLU || j.QuickGeGLU {
		return 2
	}
	return 1
}

// KeyHeads returns the heads of keys on a rank, and QueryHeads those of queries.
func (j *Job) KeyHeads() int64   { return max(1, j.QueryGroups/j.Degrees.Tensor) }
func (j *Job) QueryHeads() int64 { return j.Heads / j.Degrees.Tensor }

func (l *lister) attentionOf(name string) {
	heads, width := l.QueryHeads()*l.HeadSize, (l.QueryHeads()+2*l.KeyHeads())*l.HeadSize
	l.linear(name+".linear_qkv", l.Hidden, width, width)
	if l.NoBias && l.QKVBias {
		l.add(name+".linear_qkv.bias", width)
	}
	if l.QKNorm {
		l.norm(name+".q_layernorm", l.HeadSize)
		l.norm(name+".k_layernorm", l.HeadSize)
	}
	l.linear(name+".linear_proj", heads, l.Hidden, l.Hidden)
}

// latentAttention adds the projections of DeepSeek's attention (multi_latent_attention.py). Those down are full on
// every rank.
func (l *lister) latentAttention() {
	heads, head := l.QueryHeads(), l.LatentHead+l.LatentPosition
	if l.QueryRank > 0 {
		l.weight("self_attention.linear_q_down_proj", l.Hidden, l.QueryRank)
		if l.QKNorm {
			l.norm("self_attention.q_layernorm", l.QueryRank)
		}
		l.weight("self_attention.linear_q_up_proj", l.QueryRank, heads*head)
	} else {
		l.weight("self_attention.linear_q_proj", l.Hidden, heads*head)
	}
	l.weight("self_attention.linear_kv_down_proj", l.Hidden, l.KeyRank+l.LatentPosition)
	if l.QKNorm {
		l.norm("self_attention.kv_layernorm", l.KeyRank)
	}
	l.weight("self_attention.linear_kv_up_proj", l.KeyRank, heads*(l.LatentHead+l.LatentValue))
	l.linear("self_attention.linear_proj", heads*l.LatentValue, l.Hidden, l.Hidden)
}

// mixture adds a router, the rank's experts and the shared expert.
func (l *lister) mixture() {
	l.add("mlp.router.weight", l.Experts*l.Hidden)
	if l.SharedExpert > 0 {
		l.feedForward("mlp.shared_experts", l.SharedExpert/l.Degrees.Tensor)
		if l.SharedGate {
			l.add("mlp.shared_experts.gate_weight", l.Hidden)
		}
	}
	first := len(l.list)
	for i := range l.Experts / l.Degrees.Expert {
		l.feedForward(fmt.Sprintf("mlp.experts.%d", i), l.ExpertHidden/l.Degrees.ExpertTensor)
	}
	for i := range l.list[first:] {
		l.list[first+i].Expert = true
	}
}

// head adds what follows the last layer.
func (l *lister) head(c parallel.Chunk) {
	l.norm("final_layernorm", l.Hidden)
	for i := range l.Predictions {
		l.prefix = fmt.Sprintf("mtp.%d.", i)
		l.norm("enorm", l.Hidden)
		l.norm("hnorm", l.Hidden)
		l.weight("eh_proj", 2*l.Hidden, l.Hidden/l.Degrees.Tensor)
		l.layer(l.Layers[len(l.Layers)-1])
		l.norm("final_layernorm", l.Hidden)
		l.prefix = ""
	}
	if l.Predictions > 0 && !c.Embedding {
		l.weight("embedding.word_embeddings", l.Vocabulary/l.Degrees.Tensor, l.Hidden)
	}
	switch l.Kind {
	case BERT:
		l.linear("lm_head.dense", l.Hidden, l.Hidden, l.Hidden)
		l.norm("lm_head.layer_norm", l.Hidden)
		l.add("output_layer.bias", l.Vocabulary/l.Degrees.Tensor)
		if !l.NoBinaryHead {
			l.add("pooler.dense.weight", l.Hidden*l.Hidden)
			l.add("pooler.dense.bias", l.Hidden)
			l.add("binary_head.weight", 2*l.Hidden)
			l.add("binary_head.bias", 2)
		}
	case T5:
		l.add("lm_head.output_layer.bias", l.Vocabulary/l.Degrees.Tensor)
	}
	if l.Untied && l.Kind == GPT || !c.Embedding && (l.Predictions == 0 || l.Untied) {
		l.weight("output_layer", l.Hidden, l.Vocabulary/l.Degrees.Tensor)
		l.list[len(l.list)-1].Shared = !l.Untied
		l.copied("output_layer")
	}
}
