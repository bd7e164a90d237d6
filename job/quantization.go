package job

import "plimsoll/fault"

// quantization sets how the weights are stored.
func (r *resolver) quantization() error {
	q := r.Inputs.quantization
	if m := r.job.Model; m.Quantized && m.Source != r.Quantization && r.Quantization != "" {
		r.assume("--quantization has no effect: transformers takes the quantization_config of %s", m.Source)
	}
	if q == nil {
		return nil
	}
	r.note(q.Notes)
	if q.Bits == 8 && q.FP16Weights {
		return fault.File(q.File).Inputf("llm_int8_has_fp16_weight is true: bitsandbytes then keeps 16-bit weights " +
			"beside the 8-bit ones, which is not planned yet").WithHint("set it to false, or plan without quantization")
	}
	r.job.Quantization = q
	f := r.Inputs.framework
	if r.job.QuantizesExperts = f != nil && f.QuantizesExperts; r.job.QuantizesExperts {
		return nil
	}
	if q.Bits > 0 && len(r.job.FusedExperts()) > 0 {
		r.assume("expert weights stay in %v: bitsandbytes quantizes only linear modules, and transformers 5 keeps "+
			"the experts of a layer in one parameter", r.job.ParameterType)
	}
	return nil
}
