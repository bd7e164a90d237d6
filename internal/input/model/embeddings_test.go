package model

import "testing"

func TestIsEmbedding(t *testing.T) {
	table := []int64{1000, 64}
	for _, test := range []struct {
		name  string
		shape []int64
		want  bool
	}{
		{"model.embed_tokens.weight", table, true},
		{"transformer.wpe.weight", table, true},
		{"shared.weight", table, true},
		{"bert.embeddings.token_type_embeddings.weight", table, true},
		{"tok_embeddings.weight", table, true},
		{"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", table, true},
		{"lm_head.weight", table, false},
		{"embed_out.weight", table, false},
		{"transformer.word_embeddings_layernorm.weight", table[1:], false},
		{"vision_model.embeddings.patch_embedding.weight", []int64{64, 3, 16, 16}, false},
		{"model.layers.0.mlp.shared.bias", table, false},
	} {
		if got := (Parameter{Name: test.name, Shape: test.shape}).IsEmbedding(); got != test.want {
			t.Errorf("%s %v: %v", test.name, test.shape, got)
		}
	}
	for _, name := range Catalog() {
		m, err := loaded(name)
		if err != nil {
			t.Fatal(err)
		}
		embedded := int64(0)
		for _, p := range m.Parameters {
			if p.IsEmbedding() && p.TiedTo == "" {
				embedded += p.Elements()
			}
		}
		if n := m.Network; n != nil && n.OnlyImages() { // no tokens
			continue
		}
		if share := float64(embedded) / float64(m.Elements()); share == 0 || share > 0.65 {
			t.Errorf("%s: embeddings are %.2f of the parameters", name, share)
		}
	}
}
