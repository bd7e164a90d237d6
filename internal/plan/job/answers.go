package job

import (
	"cmp"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/forward"
)

// Answers is a training on answers to prompts: the loss compares their log-probabilities, mostly with those that a
// frozen model gives them.
type Answers struct {
	// BaseIsReference means that the trained model without its adapter is the frozen model.
	BaseIsReference bool
	// Mismatched says when passes without gradients run on answers to other prompts, as KTO has them.
	Mismatched Order
	HalfLoss   bool // ORPO and CPO add the cross entropy of the chosen answers
	// NoDropout means that the program turns dropout off.
	NoDropout   bool
	DropsLogits bool // before another pass
	LogsEntropy bool // TRL does, from a copy of the logits
}

// Order is the place of a pass among others.
type Order int

// The places.
const (
	Never Order = iota
	Before
	After
)

// answers sets the passes of a training on answers, and the type of a frozen model.
func (r *resolver) answers() error {
	j := r.job
	j.BatchTensors = 3
	if j.Reference != nil {
		j.ReferenceType = j.ComputeType()
		if f := r.Inputs.framework; f != nil {
			name := cmp.Or(f.Weights, publishedTypeOf(j.Reference))
			j.ReferenceType = cmp.Or(precisions[strings.ToLower(name)].weights, j.ReferenceType)
		}
	}
	if j.Model.Network.Sound() != nil {
		j.BatchTensors = 1
	}
	if j.Model.Network.OnlyImages() {
		j.BatchTensors = 0
	} else if j.Model.Network.Head.PerSequence || j.Model.Network.Head.Contrast != nil {
		j.BatchTensors = 2 // labels are one number a sequence, or none
	}
	a := r.Inputs.answers()
	if a == nil {
		return nil
	}
	if j.Compile {
		return fault.File(r.Inputs.framework.File).Inputf("torch.compile is on: compiled training on answers is not " +
			"planned yet").WithHint("turn it off to plan the job without it")
	}
	j.Answers = &Answers{NoDropout: true, HalfLoss: a.CrossEntropy, LogsEntropy: a.LogsEntropy,
		DropsLogits:     a.DropsLogits,
		BaseIsReference: a.Reference && j.Reference == nil}
	j.Loss = forward.LogProbabilities
	if a.Selected {
		j.Loss = forward.SelectedLogProbabilities
	}
	if f := r.Inputs.framework; f != nil && f.Chunks == recipe.InTiles {
		j.Loss, j.Answers.HalfLoss, j.Answers.LogsEntropy = forward.TiledLoss, false, false // of the log-probabilities
	}
	if a.Mismatched {
		j.BatchTensors = 6
		j.Answers.Mismatched = After
		if a.Selected {
			j.Answers.Mismatched = Before
		}
	}
	return nil
}
