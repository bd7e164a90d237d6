package recipe

import (
	"testing"

	"plimsoll/internal/input/recipe/recipetest"

	"github.com/google/go-cmp/cmp"
)

// TestAnswers reads what each program trains on answers.
func TestAnswers(t *testing.T) {
	pairs := func(change func(*Answers)) *Answers {
		a := &Answers{Pairs: true, Reference: true}
		change(a)
		return a
	}
	ofTRL := func(a *Answers) { a.Selected, a.LogsEntropy = true, a.Reference }
	without := func(a *Answers) { a.Reference = false }
	mismatched := &Answers{Reference: true, Mismatched: true, Selected: true, LogsEntropy: true}
	for text, want := range map[string]*Answers{
		factoryText:                  nil,
		factoryText + "stage: dpo\n": pairs(func(*Answers) {}),
		factoryText + "stage: dpo\nref_model: org/x\n":   pairs(func(a *Answers) { a.Model = "org/x" }),
		factoryText + "stage: dpo\npref_loss: orpo\n":    pairs(without),
		factoryText + "stage: kto\n":                     {Reference: true, Mismatched: true},
		factoryText + "stage: rm\n":                      nil,
		trlText + "beta: 0.1\n":                          pairs(ofTRL),
		trlText + "loss_type: [sigmoid, sft]\nbeta: 1\n": pairs(func(a *Answers) { ofTRL(a); a.CrossEntropy = true }),
		trlText + "beta: 0.1\nprecompute_ref_log_probs: true\n": pairs(func(a *Answers) {
			ofTRL(a)
			a.Reference = false
		}),
		trlText + "loss_type: simpo\ncpo_alpha: 0\n": {Pairs: true, Selected: true},
		trlText + "desirable_weight: 1\n":            mismatched,
		trlText + "loss_type: apo_zero_unpaired\n":   {Reference: true, Selected: true, LogsEntropy: true},
		trlText + "center_rewards_coefficient: 1\n":  nil,
		axolotlText + "rl: ipo\n":                    pairs(ofTRL),
		axolotlText + "rl: kto\n":                    mismatched,
		axolotlText + "rl: orpo\n":                   {Pairs: true, CrossEntropy: true, Selected: true},
		swiftText + "rlhf_type: dpo\n": pairs(func(a *Answers) {
			a.Selected, a.DropsLogits = true, true
		}),
		"swift rlhf --model x --rlhf_type simpo --cpo_alpha 0\n": {Pairs: true, Selected: true},
		"trl dpo --model_name_or_path x --dataset_name y\n":      pairs(ofTRL),
	} {
		f, err := read(t, text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if diff := cmp.Diff(want, f.Answers); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

// TestFreeze compares the trained parameters with those that LLaMA-Factory leaves with a gradient: the layer's index
// may stand anywhere in a name.
func TestFreeze(t *testing.T) {
	names := []string{"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight",
		"model.layers.1.mlp.up_proj.weight",
		"model.layers.2.mlp.experts.1.up_proj.weight", "model.layers.3.self_attn.q_proj.weight",
		"model.layers.3.mlp.up_proj.weight", "lm_head.weight"}
	for _, c := range []struct {
		freeze Freeze
		want   []bool
	}{
		{Freeze{Layers: 1, Modules: []string{"all"}}, []bool{false, false, false, false, true, true, false}},
		{Freeze{Layers: -2, Modules: []string{"mlp"}}, []bool{false, true, true, false, false, false, false}},
		{Freeze{Layers: -2, Modules: []string{"all"}}, []bool{false, true, true, true, false, false, false}},
		{Freeze{Layers: 2, Spread: true, Modules: []string{"all"}, Extra: []string{"embed_tokens"}},
			[]bool{true, false, true, true, true, true, false}},
	} {
		got, err := c.freeze.Trained(names, 4)
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%+v: %v (-want +got):\n%s", c.freeze, err, diff)
		}
	}
	for _, bad := range []Freeze{{Layers: 3, Spread: true}, {Layers: 1, Modules: []string{"mpl"}},
		{Layers: 1, Extra: []string{"head"}}} {
		if got, err := bad.Trained(names, 4); err == nil {
			t.Errorf("%+v is accepted: %v", bad, got)
		} else {
			recipetest.RequireInput(t, err)
		}
	}
}
