package job

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
)

// precision sets the type of the weights and of autocast.
func (r *resolver) precision() error {
	j := r.job
	mixed := recipe.Unmixed
	if r.launch != nil && r.launch.Precision != "" {
		mixed = r.launch.Precision
	}
	if t := r.training; t != nil && t.Precision != recipe.Unmixed && t.Precision != "" {
		mixed = t.Precision
	}
	named, known := precisions[strings.ToLower(cmp.Or(r.Precision, r.loadedAs()))]
	switch {
	case r.Precision != "" && !known:
		hint := "expected one of " + strings.Join(Precisions, ", ") + "; those with amp- are autocast over fp32 weights"
		if near := fault.Nearest(r.Precision, Precisions); near != "" {
			hint = fmt.Sprintf("did you mean %q? %s", near, hint)
		}
		return fault.Inputf("unknown precision %q", r.Precision).WithHint(hint)
	case known:
		j.ParameterType = named.weights
		if named.autocast != recipe.Unmixed {
			mixed = named.autocast
		}
		if d := j.DeepSpeed; d != nil && d.Precision != dtype.Invalid && d.Precision != j.ParameterType {
			return fault.File(d.File).Inputf("DeepSpeed trains in %v, but --precision is %s", d.Precision, r.Precision).
				WithHint("leave --precision out, or change the file")
		} else if d != nil && r.Precision != "" && named.autocast != recipe.Unmixed && d.Autocast == dtype.Invalid {
			hint := fmt.Sprintf("set it or %v in the file, and leave --precision out", mixedType(named.autocast))
			if r.ZeRO != "" {
				hint = fmt.Sprintf("give --precision %v: DeepSpeed then keeps master weights in fp32",
					mixedType(named.autocast))
			}
			return fault.Inputf("--precision %s is autocast, which DeepSpeed does not do unless its file sets "+
				"torch_autocast", r.Precision).WithHint(hint)
		}
	case j.DeepSpeed != nil && j.DeepSpeed.Precision != dtype.Invalid:
		j.ParameterType = j.DeepSpeed.Precision
	case j.DeepSpeed != nil && mixed != recipe.Unmixed:
		j.ParameterType = mixedType(mixed)
	case mixed != recipe.Unmixed && r.loadsAsPublished():
		j.ParameterType = j.Model.Parameters[0].DType
		r.assume("weights in %v, as the model was published, under autocast to %s: transformers loads them so since "+
			"5.0 unless the program says dtype; --precision was not given", j.ParameterType, mixed)
	case mixed != recipe.Unmixed:
		j.ParameterType, j.WidensShards = dtype.F32, r.widensShards()
		r.assume("weights in fp32 under autocast to %s: --precision was not given", mixed)
	default:
		j.ParameterType = j.Model.Parameters[0].DType
		r.assume("weights in %v, as the model was published: --precision was not given", j.ParameterType)
	}
	if mixed != recipe.Unmixed && j.DeepSpeed == nil {
		j.AutocastType = mixedType(mixed)
	}
	if d := j.DeepSpeed; d != nil && d.Autocast != dtype.Invalid {
		j.AutocastType = d.Autocast
	}
	return nil
}

// loadsAsPublished reports whether from_pretrained leaves weights in the type that they were published in, where a
// program does not say. accelerate has FSDP train in fp32 under autocast, whatever the weights were. For FSDP2 it does
// so since 1.14: before, it widens copies that nothing takes (fsdp2_prepare_model in utils/fsdp_utils.py).
func (r *resolver) loadsAsPublished() bool {
	if !r.job.OfTransformers() || !r.job.Versions.Transformers.AtLeast(5, 0, 0) {
		return false
	}
	return r.fsdpVersion() == 0 || r.preparedByAccelerate() && !r.job.Versions.Accelerate.AtLeast(1, 14, 0)
}

// widensShards reports whether accelerate converts weights to fp32 once FSDP1 has sharded them (prepare_model in its
// accelerator.py). Those of FSDP2 it converts before.
func (r *resolver) widensShards() bool {
	return r.job.OfTransformers() && r.job.Versions.Transformers.AtLeast(5, 0, 0) && r.fsdpVersion() == 1
}

// precisions maps the names of precisions, Lightning's spellings included, to
// the type of the weights and to autocast.
var precisions = func() map[string]struct {
	weights  dtype.Type
	autocast recipe.Precision
} {
	type precision = struct {
		weights  dtype.Type
		autocast recipe.Precision
	}
	m := map[string]precision{}
	for names, p := range map[string]precision{
		"fp32 float32 32 32-true":                 {dtype.F32, recipe.Unmixed},
		"bf16 bfloat16 bf16-true":                 {dtype.BF16, recipe.Unmixed},
		"fp16 float16 16-true":                    {dtype.F16, recipe.Unmixed},
		"amp-bf16 bf16-amp bf16-mixed mixed-bf16": {dtype.F32, recipe.MixedBF16},
		"amp-fp16 fp16-amp 16-mixed mixed-fp16":   {dtype.F32, recipe.MixedF16},
	} {
		for name := range strings.FieldsSeq(names) {
			m[name] = p
		}
	}
	return m
}()

func mixedType(p recipe.Precision) dtype.Type {
	switch p {
	case recipe.MixedF16:
		return dtype.F16
	case recipe.Unmixed:
		return dtype.Invalid
	}
	return dtype.BF16
}
