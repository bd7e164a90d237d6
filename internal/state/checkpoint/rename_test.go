//go:build linux

package checkpoint

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fusedKeys map the layer norms of Megatron to the names of their modules.
const fusedKeys = `{
"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.*.input_layernorm.weight",
"decoder.layers.*.self_attention.linear_qkv.layer_norm_bias": "decoder.layers.*.input_layernorm.bias",
"decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "decoder.layers.*.pre_mlp_layernorm.weight",
"decoder.layers.*.mlp.linear_fc1.layer_norm_bias": "decoder.layers.*.pre_mlp_layernorm.bias"}`

// renamesOf reads rules in a file.
func renamesOf(t *testing.T, text string) []Rename {
	t.Helper()
	path := filepath.Join(t.TempDir(), "names")
	write(t, path, text)
	rules, err := ReadRenames([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

// localLayers returns the example of Megatron with the names of modules, as a folder of three ranks.
func localLayers(t *testing.T) *Checkpoint {
	t.Helper()
	local, err := OpenMegatron(t.Context(), filepath.Join("../../..", "examples", "megatron"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := local.Rename(renamesOf(t, fusedKeys)); err != nil {
		t.Fatal(err)
	}
	return reopened(t, local, Conversion{Ranks: 3})
}

// expertNorms map the layer norm before experts of Megatron's own layers to that of Transformer Engine's.
const expertNorms = `# layer norms

decoder.layers.*.mlp.linear_fc1.layer_norm_weight = decoder.layers.*.pre_mlp_layernorm.weight
decoder.layers.*.mlp.linear_fc1.layer_norm_bias = decoder.layers.*.pre_mlp_layernorm.bias
`

// TestRenameMegatron fills a template of Transformer Engine's names from a checkpoint of Megatron's own layers with
// experts. Megatron-core has written both. The layer norm before experts is the only one that has two names.
func TestRenameMegatron(t *testing.T) {
	open := func(path string) *Checkpoint {
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
	mustSay(t, own.WriteMegatron(t.Context(), out, like, nil), "which the checkpoint", "does not have",
		"=decoder.layers.0.pre_mlp_layernorm.bias")
	if err := own.Rename(renamesOf(t, expertNorms)); err != nil {
		t.Fatal(err)
	}
	if err := own.WriteMegatron(t.Context(), out, like, nil); err != nil {
		t.Fatal(err)
	}
	got, before := open(out), open(filepath.Join(states, "own_experts"))
	if len(got.names) != len(before.names) || len(got.names) != len(fused.names) {
		t.Fatal(got.names)
	}
	for _, name := range got.names {
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

// TestRenameExchanges: all rules go by the names before, and steps of a parameter stay its own.
func TestRenameExchanges(t *testing.T) {
	local := localLayers(t)
	first, second := "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"
	digests := [2]string{digestOf(t, local, first, componentRoles["master"]),
		digestOf(t, local, second, componentRoles["master"])}
	local.ownSteps[first] = 2
	rules, err := ReadRenames([]string{first + "=" + second, second + "=" + first})
	if err == nil {
		err = local.Rename(rules)
	}
	if err != nil {
		t.Fatal(err)
	}
	if digests[0] == digests[1] || digestOf(t, local, second, componentRoles["master"]) != digests[0] ||
		digestOf(t, local, first, componentRoles["master"]) != digests[1] {
		t.Error("the numbers have not changed places")
	}
	if local.stepOf(second) != 2 || local.stepOf(first) != 3 {
		t.Errorf("steps %v", local.ownSteps)
	}
}

// TestRenameRefused: what a rule leaves open is refused, with the rule, and names stay as they were.
func TestRenameRefused(t *testing.T) {
	local := localLayers(t)
	before := slices.Clone(local.names)
	for name, test := range map[string]struct {
		rules []string
		says  []string
	}{
		"unused": {[]string{"decoder.layers.*.input_layernorm.wieght=decoder.layers.*.norm"},
			[]string{`"decoder.layers.*.input_layernorm.wieght=decoder.layers.*.norm"`, "no parameter of"}},
		"misspelled": {[]string{"decoder.layers.1.input_layernorm.wieght=a"},
			[]string{"no parameter of", `it has "decoder.layers.1.input_layernorm.weight"`}},
		"two rules": {[]string{"output_layer.weight=head", "*.weight=*.w"},
			[]string{`"*.weight=*.w"`, `"output_layer.weight" of`, `another rule, "output_layer.weight=head"`}},
		"one name": {[]string{"output_layer.weight=decoder.final_layernorm.weight"},
			[]string{`"output_layer.weight"`, `have the name "decoder.final_layernorm.weight"`}},
		"a rule twice":   {[]string{"output_layer.weight=a", "output_layer.weight=b"}, []string{"has another rule"}},
		"no TO":          {[]string{"output_layer.weight="}, []string{"expected FROM=TO"}},
		"two =":          {[]string{"a=b=c"}, []string{"expected FROM=TO", "JSON"}},
		"no file":        {[]string{"/nonexistent/names"}, []string{"/nonexistent/names", "FROM=TO"}},
		"more * in TO":   {[]string{"a.*=b.*.*"}, []string{"FROM has 1 *, and TO has 2"}},
		"part of a part": {[]string{"a.fc*.b=a.*"}, []string{`"fc*" has more than the *`, "whole part"}},
	} {
		t.Run(name, func(t *testing.T) {
			rules, err := ReadRenames(test.rules)
			if err == nil {
				err = local.Rename(rules)
			}
			mustSay(t, err, test.says...)
			if !slices.Equal(local.names, before) {
				t.Error("names have changed")
			}
		})
	}
	for text, says := range map[string]string{
		"# none\n": "it has no rules", "\n  a=b=c\n": "names:2:3: the rule of --rename", `{"a": 1}`: "JSON object",
		`{"a": "b", "a": "c"}`: "JSON object", `{"a": "*"}`: "FROM has 0 *", `{}`: "it has no rules",
	} {
		path := filepath.Join(t.TempDir(), "names")
		write(t, path, text)
		_, err := ReadRenames([]string{path})
		mustSay(t, err, says)
	}
}

// TestHintsKeepLayers: the hint at a parameter that is not there is never one of another layer.
func TestHintsKeepLayers(t *testing.T) {
	local := localLayers(t)
	for _, name := range []string{"decoder.layers.11.input_layernorm.bias", "decoder.layers.2.input_layernorm.bias"} {
		if err := local.lacks(name); strings.Contains(err.Error(), "decoder.layers.1.") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := local.lacks("decoder.layers.1.input_layernorm.bais"); !strings.Contains(err.Error(),
		`it has "decoder.layers.1.input_layernorm.bias"`) {
		t.Error(err)
	}
}
