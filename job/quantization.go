package job

import "plimsoll/fault"

// quantization sets how the weights are stored.
func (r *resolver) quantization() error {
	q := r.Inputs.quantization
	if m := r.job.Model; m.Quantized && m.Source != r.Quantization && r.Quantization != "" {
		r.assume("--quantization has no effect: transformers takes the quantization_config of %s", m.Source)
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
