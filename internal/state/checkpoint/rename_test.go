//go:build linux

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// localLayers returns a checkpoint of two layers. A weight of the first has had a step less.
func localLayers(t *testing.T) *Checkpoint {
	t.Helper()
	model := []shardtest.Tensor{{"decoder.final_layernorm.weight", []int64{8}, 0},
		{"output_layer.weight", []int64{16, 8}, 0}}
	for layer := range 2 {
		of := fmt.Sprintf("decoder.layers.%d.", layer)
		model = append(model, shardtest.Tensor{of + "input_layernorm.weight", []int64{8}, 0},
			shardtest.Tensor{of + "input_layernorm.bias", []int64{8},
				0}, shardtest.Tensor{of + "mlp.linear_fc2.weight", []int64{8, 32}, 0})
	}
	job := newJob(t, shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsFP32, dtype.F32), 0,
		shardtest.CutModel(model, shardtest.Alike(kernel.MomentsFP32), 200))
	train(t, job, 1, 1)
	leaveAlone(t, job, "decoder.layers.0.mlp.linear_fc2.weight")
	c, err := Open(save(t, t.TempDir(), job, ""))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// masterOf returns the master weights of a parameter.
func masterOf(t *testing.T, c *Checkpoint, name string) string {
	t.Helper()
	var text strings.Builder
	p, _ := c.Piece(name)
	if err := c.Export(t.Context(), p, kernel.MasterRole, &text, nil); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// TestRenameExchanges: all rules go by the names before, and steps of a parameter stay its own.
func TestRenameExchanges(t *testing.T) {
	local := localLayers(t)
	first, second := "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"
	digests := [2]string{masterOf(t, local, first), masterOf(t, local, second)}
	rules, err := ReadRenames([]string{first + "=" + second, second + "=" + first})
	if err == nil {
		err = local.Rename(rules)
	}
	if err != nil {
		t.Fatal(err)
	}
	if digests[0] == digests[1] || masterOf(t, local, second) != digests[0] ||
		masterOf(t, local, first) != digests[1] {
		t.Error("the numbers have not changed places")
	}
	if local.StepOf(second) != 1 || local.StepOf(first) != 2 {
		t.Errorf("steps %v", local.ownSteps)
	}
}

// TestRenameRefused: what a rule leaves open is refused, with the rule, and names stay as they were.
func TestRenameRefused(t *testing.T) {
	local := localLayers(t)
	before := slices.Clone(local.Names())
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
			shardtest.MustSay(t, err, test.says...)
			if !slices.Equal(local.Names(), before) {
				t.Error("names have changed")
			}
		})
	}
	for text, says := range map[string]string{
		"# none\n": "it has no rules", "\n  a=b=c\n": "names:2:3: the rule of --rename", `{"a": 1}`: "JSON object",
		`{"a": "b", "a": "c"}`: "JSON object", `{"a": "*"}`: "FROM has 0 *", `{}`: "it has no rules",
	} {
		path := filepath.Join(t.TempDir(), "names")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadRenames([]string{path})
		shardtest.MustSay(t, err, says)
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
