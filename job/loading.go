package job

// Loader says which processes hold the model on a host before FSDP shards it.
type Loader int

const (
	// LoadedByNobody: the model is made on the meta device, as torchtitan and litgpt do.
	// Every shard is read by itself.
	LoadedByNobody Loader = iota
	// LoadedByEveryRank: every rank has a copy of its own.
	LoadedByEveryRank
	// LoadedByFirstRank: the first rank of every node reads the weights and broadcasts
	// them.
	LoadedByFirstRank
	// LoadedAsPageCache: the ranks of a node share one copy. Safetensors maps the files,
	// and nothing converts the weights.
	LoadedAsPageCache
	// LoadedOnGPU: every rank has a copy on its GPU.
	LoadedOnGPU
)

// Loader returns which processes load the model. Since 4.50 from_pretrained makes
// models on the meta device; weights without conversion are views of the mapped
// files. Before 5.0 all ranks but the first skip the weights (is_fsdp_enabled).
// Since then every rank loads, whatever cpu_ram_efficient_loading says.
func (j *Job) Loader() Loader {
	v := j.Versions.Transformers
	quantized := j.Quantization != nil && (j.Quantization.Bits > 0 || j.Quantization.Dequantized)
	switch {
	case j.LoadsOnGPU:
		return LoadedOnGPU
	case !j.OfTransformers():
		return LoadedByNobody
	case !quantized && j.Model.Parameters[0].DType == j.ParameterType && v.AtLeast(4, 50, 0):
		return LoadedAsPageCache
	case j.FSDP.RAMEfficientLoading && !v.AtLeast(5, 0, 0):
		return LoadedByFirstRank
	}
	return LoadedByEveryRank
}

// assumeLoading notes that every rank of a node loads the model, if it does.
func (r *resolver) assumeLoading() {
	if r.job.Loader() != LoadedByEveryRank || r.job.RanksPerNode == 1 {
		return
	}
	r.assume("each of %d ranks of a node loads the full model on the host before FSDP shards it", r.job.RanksPerNode)
}
