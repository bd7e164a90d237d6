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
