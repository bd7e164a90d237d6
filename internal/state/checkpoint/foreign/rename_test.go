//go:build linux

package foreign

import (
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
)

// fusedKeys map the layer norms of Megatron to the names of their modules.
const fusedKeys = `{
"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.*.input_layernorm.weight",
"decoder.layers.*.self_attention.linear_qkv.layer_norm_bias": "decoder.layers.*.input_layernorm.bias",
"decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "decoder.layers.*.pre_mlp_layernorm.weight",
"decoder.layers.*.mlp.linear_fc1.layer_norm_bias": "decoder.layers.*.pre_mlp_layernorm.bias"}`

// renamesOf reads rules in a file.
func renamesOf(t *testing.T, text string) []checkpoint.Rename {
	t.Helper()
	path := filepath.Join(t.TempDir(), "names")
	write(t, path, text)
	rules, err := checkpoint.ReadRenames([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

// TestRenameLayers gives the parameters of Megatron's example the names of their modules, by an object in a file.
func TestRenameLayers(t *testing.T) {
	local, err := OpenMegatron(t.Context(), filepath.Join("../../../..", "examples", "megatron"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := local.Rename(renamesOf(t, fusedKeys)); err != nil {
		t.Fatal(err)
	}
	own := reopened(t, local, checkpoint.Conversion{Ranks: 3})
	for _, layer := range []string{"0.input_layernorm.bias", "1.pre_mlp_layernorm.weight"} {
		name := "decoder.layers." + layer
		if _, ok := own.Piece(name); !ok {
			t.Errorf("%s is not in %q", name, own.Names())
		}
	}
}

// expertNorms map the layer norm before experts of Megatron's own layers to that of Transformer Engine's.
const expertNorms = `# layer norms

decoder.layers.*.mlp.linear_fc1.layer_norm_weight = decoder.layers.*.pre_mlp_layernorm.weight
decoder.layers.*.mlp.linear_fc1.layer_norm_bias = decoder.layers.*.pre_mlp_layernorm.bias
`

// TestRenameMegatron fills a template of Transformer Engine's names from a checkpoint of Megatron's own layers with
// experts. Megatron-core has written both. The layer norm before experts is the only one that has two names.
func TestRenameMegatron(t *testing.T) {
	open := func(path string) *checkpoint.Checkpoint {
		t.Helper()
		c, err := OpenMegatron(t.Context(), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	states := filepath.Join("testdata", "megatron")
	like, out := filepath.Join(states, "fused_experts"), t.TempDir()
	own, fused := open(filepath.Join(states, "own_experts")), open(like)
	shardtest.MustSay(t, WriteMegatron(t.Context(), own, out, like, nil), "which the checkpoint", "does not have",
		"=decoder.layers.0.pre_mlp_layernorm.bias")
	if err := own.Rename(renamesOf(t, expertNorms)); err != nil {
		t.Fatal(err)
	}
	if err := WriteMegatron(t.Context(), own, out, like, nil); err != nil {
		t.Fatal(err)
	}
	got, before := open(out), open(filepath.Join(states, "own_experts"))
	if len(got.Names()) != len(before.Names()) || len(got.Names()) != len(fused.Names()) {
		t.Fatal(got.Names())
	}
	for _, name := range got.Names() {
		of := strings.Replace(name, ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_", 1)
		for component, role := range componentRoles {
			want := digestOf(t, before, of, role)
			if digestOf(t, got, name, role) != want {
				t.Errorf("%s of %s has other numbers than %s", component, name, of)
			}
			if digestOf(t, fused, name, role) == want {
				t.Errorf("%s of %s has had these numbers before: the test cannot fail", component, name)
			}
		}
	}
}
