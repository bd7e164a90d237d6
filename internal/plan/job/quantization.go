package job

import (
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
)

// quantization sets how the weights are stored.
func (r *resolver) quantization() error {
	q := r.Inputs.quantization
	if m := r.job.Model; m.Quantized && m.Source != r.Quantization && r.Quantization != "" {
		r.assume("--quantization has no effect: transformers takes the quantization_config of %s", m.Source)
	}
	if f := r.Inputs.framework; f != nil && f.Packed != "" && (q == nil || q.Method != f.Packed) {
		return fault.File(f.File).Inputf("%s is true, but %s has no weights in %s", f.Packed, r.job.Model.Name,
			strings.ToUpper(f.Packed)).WithHint("add --quantization " + f.Packed + ", or remove the key")
	}
	if err := r.namesake(); q == nil || err != nil {
		return err
	}
	r.note(q.Notes)
	if q.Bits == 8 && q.FP16Weights {
		return fault.File(q.File).Inputf("llm_int8_has_fp16_weight is true: bitsandbytes then keeps 16-bit weights " +
			"beside the 8-bit ones, which is not planned yet").WithHint("set it to false, or plan without quantization")
	}
	r.job.Quantization = q
	if q.Method != "" {
		r.packed(q)
	}
	f := r.Inputs.framework
	if r.job.QuantizesExperts = f != nil && f.QuantizesExperts; r.job.QuantizesExperts {
		return nil
	}
	if f != nil && f.OwnExperts && len(r.job.FusedExperts()) > 0 {
		return fault.File(f.File).Inputf("the model is a mixture of experts, which Unsloth quantizes in modules of " +
			"its own: these are not planned yet").
			WithHint("set load_in_4bit to False to plan weights in 16 bits, for an upper bound")
	}
	if q.Bits > 0 && len(r.job.FusedExperts()) > 0 {
		r.assume("expert weights stay in %v: bitsandbytes quantizes only linear modules, and transformers 5 keeps "+
			"the experts of a layer in one parameter", r.job.ParameterType)
	}
	return nil
}

// packed notes what is assumed of weights that were quantized before the training.
func (r *resolver) packed(q *recipe.Quantization) {
	how := "the backward pass of every layer needs the weight in 16 bits, which the forward pass has made " +
		"(TorchLinear of GPTQModel)"
	if q.Method == "awq" {
		how = "both passes make the weight in 16 bits, the backward pass a copy for each sequence (AwqGEMMLinear of " +
			"GPTQModel)"
	}
	if q.Method == recipe.CompressedTensors {
		r.assume("compressed-tensors in %d bits, with a scale for %d inputs (0: all): the first forward pass makes "+
			"ordinary weights of them, which stay; %s", q.Bits, q.Group, map[bool]string{
			true:  "they replace the packed ones (compressed-tensors 0.15, which this transformers needs)",
			false: "the packed ones stay, too, as with compressed-tensors before 0.15 (CompressedLinear)",
		}[r.job.ReplacesPacked()])
		return
	}
	if q.Method == "aqlm" {
		r.assume("AQLM in %d bits: %d codes of %d bits for %d inputs; both passes make the weight in 16 bits "+
			"(code%[2]dx%[3]d_matmat_dequant of aqlm 1.1.7); its memory was not measured on a GPU", q.Bits, q.Codebooks,
			q.CodeBits, q.Group)
		return
	}
	r.assume("%s in %d bits, with a scale for %d inputs (0: all): %s; its memory was not measured on a GPU",
		strings.ToUpper(q.Method), q.Bits, q.Group, how)
	if method := r.job.UnreadPacking(); method != "" {
		r.assume("weights packed as %s packs them, which a flag or a name alone says: compressed-tensors would make "+
			"ordinary ones of them", strings.ToUpper(method))
	}
}

// UnreadPacking returns the quantization, "gptq" or "awq", that only a flag or a name says. Names with these words also
// stand for weights that llm-compressor has quantized by the same algorithm, and stores by compressed-tensors.
func (j *Job) UnreadPacking() string {
	if q := j.Quantization; q != nil && q.File == "" && (q.Method == "gptq" || q.Method == "awq") {
		return q.Method
	}
	return ""
}

// ReplacesPacked reports whether the release of compressed-tensors that goes with that of transformers frees packed
// weights once it has made ordinary ones of them. transformers 5.14 needs 0.15, which does.
func (j *Job) ReplacesPacked() bool { return j.Versions.Transformers.AtLeast(5, 14, 0) }

// refusePacked refuses engines that cannot shard integers.
func (j *Job) refusePacked() error {
	q := j.Quantization
	if q == nil || q.Method == "" {
		return nil
	}
	return refuse(
		contradiction{j.FSDP != nil || j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3 || j.Parallel.Tensor > 1,
			strings.ToUpper(q.Method) + "'s integers are not sharded: transformers' trainers refuse ZeRO-3 and FSDP " +
				"with weights that were quantized before",
			"use ZeRO-2 or less, or DDP"},
		contradiction{len(j.Model.Network.Towers) > 0, "models that read images are not planned in " +
			strings.ToUpper(q.Method), "plan them with --quantization nf4"},
		contradiction{len(j.FusedExperts()) > 0,
			"experts in one parameter are not planned in " + strings.ToUpper(q.Method),
			"give the job's version of transformers, such as --transformers 4.57"},
		contradiction{j.Adapter != nil && j.Adapter.DoRA, "DoRA is not compatible with weights in " +
			strings.ToUpper(q.Method), "leave use_dora out"},
	)
}

// namesake tells what a model's name alone was the source of.
func (r *resolver) namesake() error {
	c, q := r.job.Model.Namesake, r.Inputs.quantization
	switch {
	case c == nil:
		return nil
	case !c.NF4:
		r.assume("the sizes of %s, which %s names: its own config.json was not read, and may have more tokens",
			r.job.Model.Name, c.Name)
		return nil
	case q.Bits != 4 || q.Kind != "nf4":
		return fault.Inputf("%s names weights in NF4, and the job has them in another form", c.Name).
			WithHint("leave the quantization out, or name the model with 16-bit weights: --model " + r.job.Model.Name)
	}
	r.assume("the sizes of %s, which %s names, in NF4 (with constants that are quantized, too, if nothing says "+
		"otherwise), quantized while they load: weights that are stored so take less then", r.job.Model.Name, c.Name)
	return nil
}
