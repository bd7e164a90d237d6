package plan

import (
	"fmt"

	"plimsoll/autograd"
	"plimsoll/ledger"
)

// This file is what FSDP holds while a model is loaded: the model on the host,
// and a unit at a time on the GPU, whole, before it is divided.

// loader is who holds the model on a host before FSDP divides it.
type loader int

const (
	// nobody: the model is made on the meta device, as torchtitan and litgpt do,
	// and its parts are read into the shards.
	nobody loader = iota
	// everyRank has a copy of its own.
	everyRank
	// firstRank of every node reads the weights and broadcasts them.
	firstRank
	// pageCache has one copy, which the ranks of a node share: safetensors maps
	// the files, and nothing converts what is read.
	pageCache
)

// loader is who loads. from_pretrained makes models on the meta device and takes
// weights that need no conversion as views of the mapped files, since 4.50. It
// has ranks other than the first skip the weights (is_fsdp_enabled) before 5.0;
// since then every rank loads, whatever cpu_ram_efficient_loading says.
func (j *Job) loader() loader {
	v := j.Versions.Transformers
	quantized := j.Quantization != nil && (j.Quantization.Bits > 0 || j.Quantization.Dequantized)
	switch {
	case j.Modules != "" && j.Modules != transformersModules:
		return nobody
	case !quantized && j.Model.Parameters[0].DType == j.Weights && v.AtLeast(4, 50, 0):
		return pageCache
	case j.FSDP.RAMEfficientLoading && !v.AtLeast(5, 0, 0):
		return firstRank
	}
	return everyRank
}

// loadedBytes is what a unit takes before it is divided.
func (e *sharded) loadedBytes(p *autograd.Parameter) int64 {
	if p.Quantized != autograd.Unquantized {
		return p.Bytes()
	}
	return p.Elements * e.Weights.Size()
}

// perNode is a rank's share of what a node has once.
func (j *Job) perNode(bytes int64) int64 {
	ranks := int64(max(1, j.RanksPerNode))
	return (bytes + ranks - 1) / ranks
}

// load divides the model, unit after unit. With FSDP2, accelerate holds what was
// loaded until all is divided (original_sd in fsdp2_prepare_model).
func (e *sharded) load() {
	units := append(e.order[:len(e.order):len(e.order)], e.root)
	loaded := make([]hold, len(units))
	for i, u := range units {
		bytes := u.elements(nil, e.loadedBytes)
		switch e.loader() {
		case nobody:
			bytes = 0
		case firstRank, pageCache:
			bytes = e.perNode(bytes)
		}
		loaded[i] = e.host.hold(bytes, ledger.LoadStaging)
	}
	for i, u := range units {
		e.divide(u)
		if e.FSDP.Version == 1 {
			drop(&loaded[i])
		}
	}
	for i := range loaded {
		drop(&loaded[i])
	}
}

// divide makes a rank's shard of a unit. The unit is on the GPU before: with
// FSDP1 as parameters, which are then joined to one flat tensor
// (_flat_param.py), with FSDP2 as parameters alone, or one at a time where they
// come from the first rank (fsdp2_load_full_state_dict).
func (e *sharded) divide(u *unit) {
	shard := func() { allocate(e.home(), e.shardedBytes(u), ledger.Parameters) }
	if e.loader() == nobody || e.ShardRanks == 1 {
		shard()
		return
	}
	var whole, largest int64
	var parameters []hold
	onDevice := e.FSDP.Version == 2 && e.FSDP.RAMEfficientLoading
	for _, p := range u.parameters {
		bytes := e.loadedBytes(p)
		whole, largest = whole+bytes, max(largest, bytes)
		if !onDevice {
			parameters = append(parameters, e.gpu.hold(bytes, ledger.UndividedUnits))
		}
	}
	release := func() {
		for i := range parameters {
			drop(&parameters[i])
		}
	}
	switch {
	case onDevice:
		e.gpu.during(ledger.Bytes(largest), ledger.UndividedUnits, shard)
	case e.FSDP.Version == 2:
		shard()
		release()
	default:
		flat := e.gpu.hold(whole, ledger.UndividedUnits)
		release()
		shard()
		flat.free()
	}
}

// explainLoading are the reasons for what is held while the model is loaded.
func (e *sharded) explainLoading() map[ledger.Component]string {
	r := map[ledger.Component]string{}
	all := fmt.Sprintf("%s parameters in %v", ledger.Count(elementsOf(e.parameters)), e.Weights)
	switch e.loader() {
	case everyRank:
		r[ledger.LoadStaging] = "from_pretrained makes the whole model in the memory of every rank, before FSDP " +
			"divides it: " + all
		if e.FSDP.RAMEfficientLoading {
			r[ledger.LoadStaging] += "; transformers 5 does not look at cpu_ram_efficient_loading while it loads " +
				"(4.57 does)"
		} else if e.RanksPerNode > 1 && !e.Versions.Transformers.AtLeast(5, 0, 0) {
			r[ledger.LoadStaging] += "; with accelerate's cpu_ram_efficient_loading only the first rank of a node does"
		}
	case firstRank:
		r[ledger.LoadStaging] = "the first rank of a node loads the whole model, and the others get their parts " +
			"from it " +
			"(cpu_ram_efficient_loading), here a part of each rank: " + all
	case pageCache:
		r[ledger.LoadStaging] = "files of weights that from_pretrained maps and does not convert: one copy a node in " +
			"the page cache, " +
			"which the kernel can take back, here a part of each rank: " + all
	}
	r[ledger.UndividedUnits] = "a unit as it was loaded, whole, before FSDP2 keeps a part of it"
	if e.FSDP.Version == 1 {
		r[ledger.UndividedUnits] = "a unit as it was loaded, whole, and again as one flat tensor, before FSDP1 keeps " +
			"a part of it " +
			"(torch/distributed/fsdp/_flat_param.py)"
	}
	r[ledger.FullStateDict] = fmt.Sprintf("the whole model on the host of the first rank: %s parameters x %d B, "+
		"here a part of each rank of its node (FULL_STATE_DICT, rank0_only)",
		ledger.Count(elementsOf(e.parameters)), e.Weights.Size())
	return r
}

// assumeLoading says who loads, where a file does not.
func (r *resolver) assumeLoading() {
	if r.job.loader() != everyRank || r.job.RanksPerNode == 1 {
		return
	}
	r.assume("each of %d ranks of a node loads the whole model on the host before FSDP divides it", r.job.RanksPerNode)
}
