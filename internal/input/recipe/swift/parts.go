package swift

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
)

// length reads the tokens of a pass. Packed samples are as long as packing_length says.
func (r *reader) length() {
	const packed = "packing_length"
	switch {
	case r.Truth("packing") && r.Gives(packed):
		r.To.Sequence = int(r.Integer(packed))
		r.Note(packed, fmt.Sprintf("is %d: samples are packed to so many tokens", r.To.Sequence))
	case r.Gives("max_length"):
		r.Longest("max_length")
	default:
		r.Note("max_length", "is not given: ms-swift cuts samples only where the model ends, so give --seq-len")
	}
}

// parts reads which parts of a multimodal model are trained, and how large images are: _init_multimodal_full in
// swift/arguments/tuner_args.py, and get_target_modules in swift/pipelines/train/tuner.py.
func (r *reader) parts(tuner string) {
	targets := recipe.AsList(r.Find("target_modules"))
	all := targets == nil || slices.Contains(targets.Texts(), "all-linear")
	if tuner == "full" || all && !r.Gives("target_regex") {
		frozen := r.Since(3, 0) // 2.6 trained all parts by default
		r.To.Freezes = &recipe.Freezes{Vision: r.frozen("freeze_vit", frozen), Projector: r.frozen("freeze_aligner",
			frozen), Language: r.Truth("freeze_llm")}
	}
	r.To.MostPixels = r.Integer("max_pixels")
	if recipe.On(r.Find("model_kwargs")) {
		r.Note("model_kwargs", "is not read: images are planned as large as the model has them, or --image-size says")
	}
	if v := r.Find("vit_gradient_checkpointing"); v != nil && recipe.On(v) != r.Truth("gradient_checkpointing") {
		r.Note("vit_gradient_checkpointing", "differs from gradient_checkpointing, which the encoder is planned with, "+
			"too")
	}
	if r.Truth("use_logits_to_keep") {
		r.Note("use_logits_to_keep", "is true: no logits are made of tokens without a label, and the plan has all "+
			"tokens with a label")
	}
	if name := r.Word("experts_impl"); name != "" && !strings.HasPrefix(name, "grouped") {
		r.Note("experts_impl", "is "+name+": experts are planned as grouped products")
	}
}

func (r *reader) frozen(key string, usually bool) bool {
	if r.Gives(key) {
		return r.Truth(key)
	}
	return usually
}

// scoresAnswers reports whether DPO has the cross entropy of the chosen answers, too. It was so by default in 2.6.
func (r *reader) scoresAnswers() bool {
	losses := recipe.AsList(r.Find("loss_type"))
	return r.Gives("rpo_alpha") || losses != nil && slices.Contains(losses.Texts(), "sft") || !r.Since(3, 0)
}
