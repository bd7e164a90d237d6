package deepspeed

import "plimsoll/internal/input/recipe/strict"

// beside lists what the file turns on that a plan leaves out.
func (r *reader) beside(d *Config) (list []string) {
	const zero = "zero_optimization."
	shards, quantizes := d.ZeROStage == 3, r.Find("quantize_training")
	for _, k := range []struct {
		is   bool
		what string
	}{
		{r.Truth("compile.deepcompile"),
			"compile.deepcompile: DeepCompile gathers, frees and offloads tensors by passes over the compiled graph; " +
				"the plan has ZeRO's hooks"},
		{shards && r.Truth(zero+"zero_quantized_gradients"),
			"zero_quantized_gradients: with several nodes gradients are reduced in 4 and 8 bits; the plan has the " +
				"larger copies of 16 bits"},
		{shards && r.Gives(zero+"leaf_module.classes"),
			"leaf_module: ZeRO-3 gathers all parameters of such modules at once"},
		{shards && r.Integer(zero+"stage3_module_granularity_threshold") > 0,
			"stage3_module_granularity_threshold: ZeRO-3 gathers modules with small parameters at once"},
		{r.Truth("sparse_gradients"),
			"sparse_gradients: gradients of embeddings are reduced by rows; the plan has all rows"},
		{r.Truth("progressive_layer_drop.enabled"),
			"progressive_layer_drop: models that support it leave layers out; the plan has all layers"},
		{r.Truth("data_efficiency.enabled") && r.Truth("data_efficiency.data_routing.enabled"),
			"data_efficiency.data_routing: random-LTD leaves tokens out in some layers; the plan has all tokens"},
		{r.Truth("hybrid_engine.enabled"),
			"hybrid_engine: its generations have caches and gathered weights; the plan is of training"},
		{r.Truth("compression_training.layer_reduction.enabled"),
			"compression_training.layer_reduction: the student has fewer layers; the plan has all layers"},
		{r.compresses("weight_quantization", "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"),
			"compression_training of weights: linear modules make a quantized or masked copy of their weight in " +
				"every pass"},
		{r.compresses("activation_quantization"),
			"compression_training.activation_quantization: linear modules make a quantized copy of their input"},
		{quantizes != nil && isOn(quantizes.Find("enabled")),
			"quantize_training: weights are quantized in place after steps, with temporaries"},
	} {
		if k.is {
			list = append(list, k.what)
		}
	}
	return list
}

// compresses reports whether one of these sections of compression_training is on.
func (r *reader) compresses(sections ...string) bool {
	for _, section := range sections {
		if v := r.Find("compression_training." + section); v != nil && isOn(v.Find("shared_parameters.enabled")) {
			return true
		}
	}
	return false
}

func isOn(v *strict.Value) bool { return v != nil && v.Truth }
