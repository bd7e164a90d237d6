package axolotl

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
)

// answers reads what the key rl trains on answers: TRL's trainers (src/axolotl/core/builders/rl.py).
func (r *reader) answers() error {
	stage := r.Find("rl")
	if !recipe.On(stage) {
		return nil
	}
	switch stage.Text {
	case "dpo", "ipo":
		r.To.Answers = &recipe.Answers{Pairs: true, Reference: true, LogsEntropy: true,
			CrossEntropy: slices.Contains(r.List("dpo_loss_type"), "sft")}
	case "kto":
		r.To.Answers = &recipe.Answers{Reference: true, Mismatched: true, LogsEntropy: true}
	case "orpo":
		r.To.Answers = &recipe.Answers{Pairs: true, CrossEntropy: true}
	case "simpo": // CPOTrainer, with cpo_alpha of 1 unless it is given
		alpha := r.Find("cpo_alpha")
		r.To.Answers = &recipe.Answers{Pairs: true, CrossEntropy: alpha == nil || recipe.On(alpha)}
	default:
		return r.Fault("rl", fmt.Sprintf("is %s: it generates answers, which is not planned yet", stage), "")
	}
	if err := r.Unplanned("it changes the passes over answers", unplannedAnswers); err != nil {
		return err
	}
	if !r.Gives("adapter") && (stage.Text == "kto" || stage.Text == "simpo") {
		r.Note("rl", "is given without an adapter: axolotl then loads a copy of the model for no trainer, "+
			"which is not planned")
	}
	r.To.Answers.Selected = true
	if r.Truth("precompute_ref_log_probs") {
		r.To.Answers.Reference = false
	}
	if r.Truth("liger_fused_linear_cross_entropy") || r.pluginNamed("CutCrossEntropyPlugin") {
		r.Note("rl", "is given: the fused cross entropy is not used, as the loss needs the logits")
	}
	r.NoteAnswers("rl")
	return nil
}

// steps reads a process reward model: TRL's PRMTrainer, which turns the dropout of the head off.
func (r *reader) steps(labels int64, class string) error {
	const tokens = "AutoModelForTokenClassification"
	switch {
	case r.To.Rewards:
		return r.Fault("process_reward_model", "is true beside reward_model: they train other heads",
			"remove one of them")
	case class != "" && class != tokens:
		return r.Fault("model_type", fmt.Sprintf("is %q, which has no label of a token", class), "set it to "+tokens)
	case r.Word("adapter") != "":
		return r.Fault("adapter", "is given beside process_reward_model, which is not planned yet",
			"remove one of them")
	}
	r.To.TokenLabels = cmp.Or(labels, 2)
	r.Note("process_reward_model",
		fmt.Sprintf("is true: the head has %d labels for every token, and its dropout is off", r.To.TokenLabels))
	return nil
}

// reward reads whether a reward model is trained: TRL's RewardTrainer.
func (r *reader) reward() error {
	r.To.Rewards = r.Truth("reward_model")
	labels, class := r.Integer("num_labels"), r.Word("model_type")
	if r.Truth("process_reward_model") {
		return r.steps(labels, class)
	}
	const (
		sequences  = "AutoModelForSequenceClassification"
		classifies = "a classifier is trained, which is not planned yet"
	)
	switch {
	case !r.To.Rewards && labels > 0:
		return r.Fault("num_labels", fmt.Sprintf("is %d: %s", labels, classifies), "")
	case !r.To.Rewards && strings.HasSuffix(class, "Classification"):
		return r.Fault("model_type", fmt.Sprintf("is %q: %s", class, classifies), "")
	case !r.To.Rewards:
		return nil
	case labels > 1:
		return r.Fault("num_labels", fmt.Sprintf("is %d, but a reward model has one label", labels), "remove the key")
	case class != "" && class != sequences:
		return r.Fault("model_type", fmt.Sprintf("is %q, which has no reward: this is not planned yet", class),
			"set it to "+sequences)
	}
	r.Note("reward_model",
		"is true: the head has one label, and passes have two sequences for each of a micro batch")
	return nil
}
