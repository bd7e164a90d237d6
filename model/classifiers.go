package model

import (
	"slices"
	"strings"
)

// classified are decoders that transformers has with a head for one class of a
// sequence, as for reward models: AForSequenceClassification.
var classified = []string{
	"Arcee", "Bloom", "DeepseekV2", "DeepseekV3", "Exaone4", "Falcon", "GPT2", "GPTNeoX", "Gemma", "Gemma2", "Glm",
	"Glm4", "GptOss", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "Llama", "Ministral", "Ministral3", "Mistral",
	"Mixtral", "Nemotron", "OPT",
	"Olmo", "Olmo2", "Olmo3", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SeedOss",
	"SmolLM3", "StableLm", "Starcoder2",
}

// unlabeled are those of them without a head for a class of every token, or with
// one of another kind than AForTokenClassification has elsewhere.
var unlabeled = []string{
	"Bloom", "DeepseekV2", "Falcon", "GPT2", "GPTNeoX", "HunYuanDenseV1", "HunYuanMoEV1", "OPT", "Olmo", "Olmo2",
	"Olmo3",
}

// withClassifiers returns the architectures and those that have a classifier in
// place of their language modeling head.
func withClassifiers(list []architecture) []architecture {
	all := slices.Clone(list)
	for _, a := range list {
		name := strings.TrimSuffix(strings.TrimSuffix(a.name, "ForCausalLM"), "LMHeadModel")
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
	if s.err != nil {
		return
	}
	head := s.network.Head.Projection
	s.parameters = slices.DeleteFunc(s.parameters, func(p Parameter) bool {
		gone := p.Name == head+".weight" || p.Name == head+".bias"
		if gone && p.TiedTo == "" {
			s.total -= p.Elements()
		}
		return gone
	})
	stack := s.network.Stacks[len(s.network.Stacks)-1]
	width := s.network.Hidden
	if stack.ProjectOut != "" {
		width = stack.EmbeddingWidth
	}
	labels := s.labels()
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
