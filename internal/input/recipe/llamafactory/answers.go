package llamafactory

import "plimsoll/internal/input/recipe"

// answers reads what stages train on answers: src/llamafactory/train, and create_ref_model in
// train/trainer_utils.py.
func (r *reader) answers() {
	switch r.Word("stage") {
	case "rm":
		r.To.ValueHead = true
		r.Note("stage", "is rm: a head with one output for every token stands beside the language model's, and passes "+
			"have two sequences for each of a micro batch")
		return
	case "dpo":
		loss := r.Word("pref_loss")
		r.To.Answers = &recipe.Answers{Pairs: true, Reference: loss != "orpo" && loss != "simpo"}
	case "kto":
		r.To.Answers = &recipe.Answers{Reference: true, Mismatched: true}
	default:
		return
	}
	r.To.Answers.Model = r.Word("ref_model")
	r.NoteAnswers("stage")
}

// ownLoss reports whether LLaMA-Factory gives the Trainer a loss of its own: src/llamafactory/train/sft/trainer.py.
func (r *reader) ownLoss() bool {
	return r.Word("stage") == "sft" &&
		(r.Truth("use_dft_loss") || r.Truth("use_eaft_loss") || r.Truth("use_asft_loss"))
}

// loss reads that loss, in its order. DFT's takes what the model's takes.
func (r *reader) loss() error {
	const key = "use_asft_loss"
	switch {
	case !r.ownLoss() || r.Truth("use_dft_loss") && !r.Truth(key):
	case !r.Truth(key):
		r.To.WeighsEntropy = true
		r.Note("use_eaft_loss", "is true: the plan has labels for all tokens, of whose logits the loss has a copy")
	case r.Truth("use_dft_loss") || r.Truth("use_eaft_loss"):
		return r.Fault(key, "is true beside another loss, which takes no logits of a reference model",
			"remove one of the two")
	case r.Word("finetuning_type") == "lora" && r.Word("ref_model") == "":
		return r.Fault(key, "is true, but LLaMA-Factory makes no reference model for LoRA", "add ref_model")
	case r.Truth("enable_liger_kernel"):
		return r.Fault(key, "is true beside enable_liger_kernel, whose model returns no logits",
			"remove one of the two")
	default:
		r.To.Diverges, r.To.Judge = true, r.Word("ref_model")
		r.Note(key, "is true: a frozen model is loaded, and its logits stay until the loss is computed")
	}
	return nil
}
