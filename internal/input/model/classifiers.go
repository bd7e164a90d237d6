package model

import (
	"plimsoll/internal/base/dtype"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
)

// classified are decoders that transformers has with a head for one class of a
// sequence, as for reward models: AForSequenceClassification.
var classified = []string{
	"Arcee", "Bloom", "DeepseekV2", "DeepseekV3", "Exaone4", "Falcon", "GPT2", "GPTJ", "GPTNeoX", "Gemma", "Gemma2",
	"Glm", "Glm4", "GptOss", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "Llama", "Ministral", "Ministral3",
	"Mistral", "Mistral4", "Mixtral", "Mpt", "Nemotron", "OPT",
	"Olmo", "Olmo2", "Olmo3", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SeedOss",
	"SmolLM3", "StableLm", "Starcoder2",
}

// unlabeled are those of them without a head for a class of every token, or with
// one of another kind than AForTokenClassification has elsewhere.
var unlabeled = []string{
	"Bloom", "DeepseekV2", "Falcon", "GPT2", "GPTJ", "GPTNeoX", "HunYuanDenseV1", "HunYuanMoEV1", "Mpt", "OPT", "Olmo",
	"Olmo2", "Olmo3",
}

// withClassifiers returns the architectures and those that have a classifier in
// place of their language modeling head.
func withClassifiers(list []architecture) []architecture {
	all := slices.Clone(list)
	for _, a := range list {
		name := decoderOf(a.name)
		if !slices.Contains(classified, name) {
			continue
		}
		all = append(all, architecture{name + "ForSequenceClassification", a.modelType,
			func(s scope) { a.describe(s); s.classifier(true) }})
		if !slices.Contains(unlabeled, name) {
			all = append(all, architecture{name + "ForTokenClassification", a.modelType,
				func(s scope) { a.describe(s); s.classifier(false) }})
		}
	}
	return all
}

// classifier puts a linear module "score" in place of the head: for a sequence,
// or for every token, where it has a bias and a dropout.
func (s scope) classifier(sequence bool) {
	head := s.network.Head
	s.parameters = slices.DeleteFunc(s.parameters, func(p Parameter) bool {
		gone := head.has(p)
		if gone && p.TiedTo == "" {
			s.total -= p.Elements()
		}
		return gone
	})
	width, labels := s.network.headWidth(), s.labels()
	s.network.Head = Head{Projection: s.linear("score", width, labels, !sequence), Outputs: labels,
		Classes: true, PerSequence: sequence, EveryToken: sequence}
	if !sequence {
		otherwise := 0.1
		if s.textOr("", "model_type") == "stablelm" { // its class has a hidden_dropout of 0
			otherwise = 0
		}
		s.network.Head.Dropout = s.shareOr(otherwise, "classifier_dropout", "hidden_dropout")
	}
}

// decoderOf returns the name of a class without that of its head.
func decoderOf(class string) string {
	return strings.TrimSuffix(strings.TrimSuffix(class, "ForCausalLM"), "LMHeadModel")
}

// has reports whether a parameter is one of the head's projection.
func (h Head) has(p Parameter) bool {
	return p.Name == h.Projection+".weight" || p.Name == h.Projection+".bias"
}

// headWidth returns the width of what the head reads.
func (n *Network) headWidth() int64 {
	if stack := n.Stacks[len(n.Stacks)-1]; stack.ProjectOut != "" {
		return stack.EmbeddingWidth
	}
	return n.Hidden
}

// Valued returns the model with TRL's value head beside its language model's head: a linear module in fp32, with one
// output for every token. It is trained beside an adapter, too.
func (m *Model) Valued() *Model {
	valued, network := *m, *m.Network
	valued.Parameters = slices.Clone(m.Parameters)
	network.Head.Value = "v_head.summary"
	add := func(name string, shape ...int64) {
		valued.Parameters = append(valued.Parameters, Parameter{Name: network.Head.Value + "." + name, Shape: shape,
			DType: dtype.F32, Block: -1, Wide: true, Beside: true})
	}
	add("weight", 1, network.headWidth())
	add("bias", 1)
	valued.Network = &network
	return &valued
}

// TiesEmbeddings reports whether the language model's head has the weights of the embedding.
func (m *Model) TiesEmbeddings() bool {
	if m.Network == nil {
		return false
	}
	return slices.ContainsFunc(m.Parameters, func(p Parameter) bool {
		return p.TiedTo != "" && p.Name == m.Network.Head.Projection+".weight"
	})
}

// Labeling returns the model as AutoModelForTokenClassification loads it with so many labels, without dropout.
func (m *Model) Labeling(labels int64) (*Model, error) {
	name := decoderOf(m.Architecture)
	if !slices.Contains(classified, name) || slices.Contains(unlabeled, name) {
		return nil, fault.Inputf("plimsoll knows no class with labels of tokens of %s", m.Architecture).
			WithHint(Documented)
	}
	labeling, network := *m, *m.Network
	labeling.Parameters = slices.DeleteFunc(slices.Clone(m.Parameters), network.Head.has)
	add := func(name string, shape ...int64) {
		labeling.Parameters = append(labeling.Parameters, Parameter{Name: "score." + name, Shape: shape,
			DType: m.Parameters[0].DType, Block: -1})
	}
	add("weight", labels, network.headWidth())
	add("bias", labels)
	network.Head = Head{Projection: "score", Outputs: labels, Classes: true}
	labeling.Network, labeling.Architecture = &network, name+"ForTokenClassification"
	return &labeling, nil
}

// Classifying returns the model as AutoModelForSequenceClassification loads it with so many labels: a linear module
// "score" in place of the head. Reward models have one label. The error is a *fault.Input.
func (m *Model) Classifying(labels int64) (*Model, error) {
	name := decoderOf(m.Architecture)
	switch {
	case m.Network.Head.PerSequence && m.Network.Head.Outputs == labels:
		return m, nil
	case !slices.Contains(classified, name):
		return nil, fault.Inputf("plimsoll knows no class of %s that has labels of sequences, as reward models and "+
			"classifiers have", m.Architecture).WithHint(Documented)
	}
	classifying, network := *m, *m.Network
	classifying.Parameters = slices.DeleteFunc(slices.Clone(m.Parameters), network.Head.has)
	classifying.Parameters = append(classifying.Parameters, Parameter{Name: "score.weight",
		Shape: []int64{labels, network.headWidth()}, DType: m.Parameters[0].DType, Block: -1})
	network.Head = Head{Projection: "score", Outputs: labels, Classes: true, PerSequence: true, EveryToken: true}
	classifying.Network, classifying.Architecture = &network, name+"ForSequenceClassification"
	return &classifying, nil
}
