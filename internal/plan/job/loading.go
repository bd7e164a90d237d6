package job

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/version"
)

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

// loading is what from_pretrained does with weights under FSDP, from a release of transformers on.
type loading struct {
	since version.Version
	// maps means that weights without conversion are views of the mapped files.
	maps bool
	// With cpu_ram_efficient_loading, the ranks of a node but the first have a model without values:
	skips   bool // they do not load the weights
	refills bool // they write a full model of their own over what they have loaded
	beside  bool // they write it while they still hold what they have loaded
}

// loadings are _load_pretrained_model and _move_missing_keys_from_meta_to_device in modeling_utils.py of transformers.
// From 5.0 on every rank loads. Up to 5.3 the other ranks initialize empty parameters anew, 5.4 leaves these empty
// (empty_like), and from 5.6 they are zeros (zeros_like). The list of old parameters lives as long as the loop over
// them. Measured with three ranks that load 155 MiB: 155 MiB of anonymous memory on each other rank in 5.0, 5.3, 5.6,
// 5.14 and 5.22, and 1 MiB in 4.57, 5.4, 5.5 and 5.23. In fp32, 311 MiB each in 5.0 to 5.5 and 5.23, and 621 MiB in
// 5.6 and 5.22.
var loadings = []loading{
	{version.Version{Major: 4}, false, true, false, false},
	{version.Version{Major: 4, Minor: 50}, true, true, false, false},
	{version.Version{Major: 5}, true, false, true, false},
	{version.Version{Major: 5, Minor: 4}, true, false, false, false},
	{version.Version{Major: 5, Minor: 6}, true, false, true, true},
	{version.Version{Major: 5, Minor: 23}, true, false, false, false},
}

// mostLoading is the row of loadings whose ranks hold most.
const mostLoading = 4

// loading returns how the release of transformers loads. Where the release is assumed, the job may run on another one
// of the same time, so the worst row counts.
func (j *Job) loading() loading {
	if j.assumesWorstLoading() {
		return loadings[mostLoading]
	}
	last := loadings[0]
	for _, l := range loadings {
		if j.Versions.Transformers.AtLeast(l.since.Major, l.since.Minor, 0) {
			last = l
		}
	}
	return last
}

// assumesWorstLoading reports whether an unknown release of transformers decides what other ranks than the first hold.
func (j *Job) assumesWorstLoading() bool {
	return j.AssumesTransformers && j.leavesToFirst() && j.Versions.Transformers.AtLeast(5, 0, 0)
}

// leavesToFirst reports whether the weights that count are those of the first rank of a node. transformers makes no
// such difference for quantized ones.
func (j *Job) leavesToFirst() bool {
	return j.FSDP != nil && j.FSDP.RAMEfficientLoading && !j.quantizes() && j.RanksPerNode > 1
}

// quantizes reports whether weights are quantized while they are loaded.
func (j *Job) quantizes() bool {
	return j.Quantization != nil && (j.Quantization.Bits > 0 || j.Quantization.Dequantized)
}

// MapsWeights reports whether from_pretrained leaves the weights in their files, which it maps.
func (j *Job) MapsWeights() bool {
	return j.OfTransformers() && j.loading().maps && !j.quantizes() && j.Model.Parameters[0].DType == j.LoadedType()
}

// LoadedType returns the type that the program loads the weights in.
func (j *Job) LoadedType() dtype.Type {
	if j.WidensShards {
		return j.Model.Parameters[0].DType
	}
	return j.ParameterType
}

// Loader returns which processes load the model, before FSDP shards it.
func (j *Job) Loader() Loader {
	l := j.loading()
	switch {
	case j.LoadsOnGPU:
		return LoadedOnGPU
	case j.LoadsOnFirst:
		return LoadedByFirstRank
	case !j.OfTransformers():
		return LoadedByNobody
	case j.MapsWeights():
		return LoadedAsPageCache
	case j.FSDP.RAMEfficientLoading && l.skips:
		return LoadedByFirstRank
	}
	return LoadedByEveryRank
}

// Refills reports whether the ranks of a node but the first write a full model of their own in place of what they have
// loaded, and whether they hold both at once.
func (j *Job) Refills() (refills, beside bool) {
	if loader := j.Loader(); loader != LoadedAsPageCache && loader != LoadedByEveryRank || !j.leavesToFirst() {
		return false, false
	}
	l := j.loading()
	return l.refills, l.beside
}

// assumeLoading notes what the ranks of a node hold, if it is more than one copy of the model.
func (r *resolver) assumeLoading() {
	j := r.job
	if j.assumesWorstLoading() && j.OfTransformers() && !j.LoadsOnGPU {
		from, before := loadings[mostLoading].since, loadings[mostLoading+1].since
		r.assume("transformers %v to before %v for the loading, where every rank of a node but the first makes a full "+
			"model of zeros: no version was given; --transformers %v plans without", from, before, before)
	}
	if j.Loader() != LoadedByEveryRank || j.RanksPerNode == 1 {
		return
	}
	r.assume("each of %d ranks of a node loads the full model on the host before FSDP shards it", j.RanksPerNode)
}
