package job

import (
	"slices"

	"plimsoll/internal/plan/forward"
)

// scores sets eager attention where a program calls scaled_dot_product_attention with enable_gqa and a mask. Before
// torch 2.15 that is PyTorch's math kernel, which makes the scores of all tokens: with torch 2.6 and 4,096 tokens of 16
// heads 4.28 GiB, and 0.19 GiB with 2.15. Releases between were not seen, and are planned like the former.
func (r *resolver) scores() {
	f := r.Inputs.framework
	if f == nil || r.Attention != "" || r.job.Versions.Torch.AtLeast(2, 15, 0) ||
		!slices.Contains(f.GroupsWithMask, r.job.Model.Type) {
		return
	}
	r.assume("Unsloth computes the attention of %s with enable_gqa and a mask: torch before 2.15 has no fused kernel "+
		"for both, so that the scores of all tokens are in memory, and planned as those of eager attention; "+
		"--attention sdpa plans fused kernels", r.job.Model.Type)
	r.Attention = string(forward.Eager)
}
