package main

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/model"
)

// families derive the architecture from the name of a model; the first match counts. config makes the fields that
// differ between families.
var families = []struct {
	pattern, architecture string
	config                func(m sizes, c object)
}{
	{"falcon", "FalconForCausalLM", func(m sizes, c object) {
		c["multi_query"], c["parallel_attn"], c["bias"], c["alibi"], c["new_decoder_architecture"] = true, true,
			false, false, false
	}},
	{"mistral", "MistralForCausalLM", nil},
	{"gemma", "GemmaForCausalLM", nil},
	{"phi", "PhiForCausalLM", nil},
	{"stablelm-base-alpha|pythia|neox", "GPTNeoXForCausalLM", nil},
	{"qwen2-moe", "Qwen2MoeForCausalLM", nil},
	{"llama|yi-", "LlamaForCausalLM", nil},
	{`opt-`, "OPTForCausalLM", func(m sizes, c object) {
		c["ffn_dim"], c["max_position_embeddings"] = m.Inner, 2048
		if width := m.Note.find(`word_embed_proj_dim (\d+)`); width != "" {
			c["word_embed_proj_dim"] = jsonNumber(width)
		}
		c["do_layer_norm_before"] = !m.Note.has("post-LN")
	}},
	{"bert", "BertForPreTraining", func(m sizes, c object) {
		c["max_position_embeddings"], c["type_vocab_size"] = 512, 2
		if m.Note.has("sequence classification") {
			c["architectures"] = []string{"BertForSequenceClassification"}
		}
	}},
	{`t0|t5`, "T5ForConditionalGeneration", func(m sizes, c object) {
		c["d_model"], c["d_ff"], c["num_layers"], c["num_heads"], c["d_kv"] = m.Hidden, m.Inner, m.Layers, m.Heads, 64
		if m.Tied != nil && !*m.Tied { // T5 1.1 has both
			c["feed_forward_proj"] = "gated-gelu"
		}
	}},
	{`gpt-?2|learned pos`, "GPT2LMHeadModel", func(m sizes, c object) {
		c["n_embd"], c["n_layer"], c["n_head"], c["n_inner"], c["n_positions"] = m.Hidden, m.Layers, m.Heads, m.Inner,
			1024
		if positions := text(m.Name).find(`learned pos (\d+)`); positions != "" {
			c["n_positions"] = jsonNumber(positions)
		}
	}},
}

func jsonNumber(digits string) (n int) {
	fmt.Sscan(digits, &n)
	return n
}

// chooseModel takes the model of that name from the catalog if its sizes match the row's. Otherwise it writes a
// config.json with the row's sizes.
func (e *expression) chooseModel() error {
	m := e.Model
	_, name, _ := strings.Cut(strings.ToLower(m.Name), "/")
	for _, known := range slices.Backward(model.Catalog()) {
		if !strings.Contains(name, known) {
			continue
		}
		loaded, err := model.Load(known)
		if err == nil && loaded.Elements() == int64(m.Elements) && loaded.Network.Head.Outputs == int64(m.Vocabulary) {
			e.request.Model, e.model = known, loaded
			return nil
		}
	}
	for _, f := range families {
		if !text(m.Name).has(f.pattern) {
			continue
		}
		if m.Layers == 0 || m.Hidden == 0 || m.Heads == 0 || m.Inner == 0 || m.Vocabulary == 0 {
			return fmt.Errorf("the sizes of %s are not known", m.Name)
		}
		c := object{
			"architectures":       []string{f.architecture},
			"hidden_size":         m.Hidden,
			"num_hidden_layers":   m.Layers,
			"num_attention_heads": m.Heads,
			"intermediate_size":   m.Inner,
			"vocab_size":          m.Vocabulary,
			"torch_dtype":         "float32",
		}
		if m.KeyHeads > 0 {
			c["num_key_value_heads"] = m.KeyHeads
		}
		if m.HeadWidth > 0 {
			c["head_dim"] = m.HeadWidth
		}
		if m.Tied != nil {
			c["tie_word_embeddings"] = *m.Tied
		}
		if f.config != nil {
			f.config(m, c)
		}
		if positions, ok := c["n_positions"].(int); ok {
			c["n_positions"] = max(positions, int(e.Sequence))
		}
		path, err := e.write("config.json", c)
		if err != nil {
			return err
		}
		e.request.Model = path
		e.model, err = model.Load(path)
		return err
	}
	return fmt.Errorf("%s is not of an architecture that Plimsoll describes", m.Name)
}
