package trl

import (
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
)

// The losses of TRL's trainers, beside those of DPO.
var (
	unpairedLosses = strings.Fields("kto apo_zero_unpaired")
	cpoLosses      = strings.Fields("simpo alphapo")
)

// answers reads what a script trains on answers. The file does not name its trainer, so the keys tell: TRL of 2026
// has DPOTrainer, KTOTrainer and RewardTrainer, and in trl/experimental CPOTrainer and ORPOTrainer.
func (r *reader) answers() {
	losses := r.List("loss_type")
	has := func(list []string) bool {
		return slices.ContainsFunc(losses, func(loss string) bool { return slices.Contains(list, loss) })
	}
	key := r.firstGiven(unpairedKeys, cpoKeys, rewardKeys, pairKeys)
	switch {
	case slices.Contains(strings.Fields(unpairedKeys), key) || has(unpairedLosses):
		r.To.Answers = &recipe.Answers{Reference: true, Mismatched: !slices.Contains(losses, "apo_zero_unpaired")}
	case slices.Contains(strings.Fields(cpoKeys), key) || has(cpoLosses):
		alpha := r.Find("cpo_alpha")
		r.To.Answers = &recipe.Answers{Pairs: true, CrossEntropy: alpha == nil || recipe.On(alpha)}
	case slices.Contains(strings.Fields(rewardKeys), key):
		r.reward(key)
		return
	case key != "":
		r.To.Answers = &recipe.Answers{Pairs: true, Reference: true,
			CrossEntropy: r.Number("rpo_alpha") > 0 || slices.Contains(losses, "sft")}
		if slices.Equal(r.given(pairKeys), []string{"beta"}) || !r.Gives("loss_type") && !r.Gives("trl_dpo") {
			r.Note(key, "is given, as for DPO, which is planned; ORPO has the same keys and no reference model, so it "+
				"takes less memory, and KTO has passes over other answers")
		}
	default:
		return
	}
	a := r.To.Answers
	a.Selected, a.LogsEntropy, a.Model = true, a.Reference, r.Word("ref_model")
	if r.Truth("reference_free") || r.Truth("precompute_ref_log_probs") {
		a.Reference = false
	}
	if m := r.Arguments.Member("use_liger_kernel"); m != nil && recipe.On(m.Value) && !r.Since(1, 15) {
		r.Note("use_liger_kernel", "is true: TRL then computes the loss of answers without their logits, which takes "+
			"less memory than the plan says")
	}
	if r.Truth("force_use_ref_model") && a.Reference && a.Model == "" { // also with an adapter
		a.Model = r.To.Model
	}
	if r.Gives("precompute_ref_batch_size") {
		r.Note("precompute_ref_batch_size", "is of the passes before the first step, which are not planned")
	}
	if r.Gives("generate_during_eval") {
		r.Note("generate_during_eval", "is of evaluation: what the model generates there is not planned")
	}
	if key == "" {
		key = "loss_type"
	}
	r.NoteAnswers(key)
}

// firstGiven returns the first key of the lists that the file gives.
func (r *reader) firstGiven(lists ...string) string {
	for _, list := range lists {
		if given := r.given(list); len(given) > 0 {
			return given[0]
		}
	}
	return ""
}

// given returns those of the keys that the file gives.
func (r *reader) given(list string) []string {
	return slices.DeleteFunc(strings.Fields(list), func(key string) bool { return !r.Gives(key) })
}

// reward reads the training of a reward model.
func (r *reader) reward(key string) {
	if r.Truth("use_peft") && r.Word("lora_task_type") != "SEQ_CLS" {
		r.Note("use_peft", "is true without lora_task_type SEQ_CLS, which trains the head: the plan has it trained")
	}
	r.To.Rewards = true
	r.Note(key, "is of a reward model: the head has one label, and passes have two sequences for each of a micro batch")
}
