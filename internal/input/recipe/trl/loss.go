package trl

import (
	"fmt"

	"plimsoll/internal/input/recipe"
)

// loss reads how the loss is computed, which depends on the release: add_fused_lm_head in trl/trainer/utils.py since
// 1.15, and chunked_nll in trl/trainer/sft_trainer.py before.
func (r *reader) loss() {
	liger := r.Arguments.Member("use_liger_kernel")
	usesLiger := liger != nil && recipe.On(liger.Value)
	trainsText := r.To.Answers == nil && !r.To.Rewards && r.To.Generation == nil
	r.routers()
	if r.tiles() {
		r.To.Chunks = recipe.InTiles
		if usesLiger { // only the kernels of layers
			r.Set("use_liger_kernel", "loss_type", false)
			r.To.LigerModules = true
		}
		if r.To.Assumed {
			r.Note("loss_type", fmt.Sprintf("is planned as TRL %v computes losses: no logits are whole; releases "+
				"before 1.15 take more, and --release trl=VERSION plans them", r.To.Release))
		}
		return
	}
	if r.Since(1, 15) && trainsText {
		r.Note("loss_type", "needs all logits, as labels are smoothed")
		return
	}
	chunked := r.Since(1, 7) && !usesLiger
	if losses := r.List("loss_type"); len(losses) > 0 {
		chunked = losses[0] == "chunked_nll"
	}
	if trainsText && chunked {
		r.To.Chunks = recipe.Recomputed
	}
	if r.To.Generation != nil {
		r.To.Chunks = recipe.BySequence
	}
}

// tiles reports whether log-probabilities come from tiles: those of all trainers but the experimental ones, and the one
// of rewards. Labels that are smoothed need the logits.
func (r *reader) tiles() bool {
	a := r.To.Answers
	smoothed := r.Arguments.Member("label_smoothing_factor")
	return r.Since(1, 15) && !r.To.Rewards && (a == nil || a.Reference || !a.Pairs) &&
		(smoothed == nil || !recipe.On(smoothed.Value))
}

// routers reads the loss of routers, which mixtures of experts have by default since 1.7.
func (r *reader) routers() {
	const key = "router_aux_loss_coef"
	if r.Gives(key) {
		r.RouterLoss(r.Find(key))
	} else if r.Since(1, 7) && !r.To.Rewards {
		r.To.RouterLoss, r.To.RouterLossAssumed = true, true
	}
}
