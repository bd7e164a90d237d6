package recipe

// Answers says how a program trains on answers to prompts, as DPO does. Every program's reader may set it:
// package job plans the passes.
type Answers struct {
	// Pairs says that each of a micro batch is a chosen and a rejected answer, which make one pass.
	Pairs bool
	// Reference says that a frozen model judges the answers: the trained model without its adapter, if it has one and
	// Model is empty.
	Reference bool
	Model     string // the name of the frozen model, "" for that of the trained one
	// Mismatched says that passes without gradients run on answers to other prompts, as KTO estimates a divergence.
	Mismatched   bool
	CrossEntropy bool // the loss has the cross entropy of the chosen answers, too
	// Selected says that TRL computes the log-probabilities, one sequence after the other. LogsEntropy says that it
	// logs the entropy of the logits.
	Selected, LogsEntropy bool
	// DropsLogits says that the program holds no logits while another pass runs.
	DropsLogits bool
}

// noteAnswers notes the passes of a training on answers, at the key that asks for it.
func (r *frameworkReader) noteAnswers(key string) {
	a := r.to.Answers
	what := "the training is on answers: "
	if a.Pairs {
		what += "passes have two sequences for each of a micro batch, "
	}
	if a.Mismatched {
		what += "another pass has answers to other prompts, "
	}
	switch {
	case !a.Reference:
		what += "and there is no reference model"
	case a.Model != "":
		what += "and " + a.Model + " is the reference"
	default:
		what += "and the reference is the model as it was loaded: a second copy of it, or the model without its adapter"
	}
	r.Notes = append(r.Notes, Note{Where: r.Place(key), What: what})
}
