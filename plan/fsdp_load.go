package plan

import (
	"fmt"

	"plimsoll/autograd"
	"plimsoll/ledger"
)

// This file plans what FSDP holds while a model is loaded: the model on the host,
// and one unsharded unit at a time on the GPU.

// loader says which processes hold the model on a host before FSDP shards it.
type loader int

const (
	// nobody: the model is made on the meta device, as torchtitan and litgpt do.
	// Every shard is read by itself.
	nobody loader = iota
	// everyRank: every rank has a copy of its own.
	everyRank
	// firstRank: the first rank of every node reads the weights and broadcasts
	// them.
	firstRank
	// pageCache: the ranks of a node share one copy. Safetensors maps the files,
	// and nothing converts the weights.
	pageCache
)

// loader returns which processes load the model. Since 4.50 from_pretrained makes
// models on the meta device; weights without conversion are views of the mapped
// files. Before 5.0 all ranks but the first skip the weights (is_fsdp_enabled).
// Since then every rank loads, whatever cpu_ram_efficient_loading says.
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

// loadedBytes returns the size of a parameter before it is sharded.
func (e *sharded) loadedBytes(p *autograd.Parameter) int64 {
	if p.Quantized != autograd.Unquantized {
		return p.Bytes()
	}
	return p.Elements * e.Weights.Size()
}

// perNode returns a rank's share of memory that a node has once.
func (j *Job) perNode(bytes int64) int64 {
	ranks := int64(max(1, j.RanksPerNode))
	return (bytes + ranks - 1) / ranks
}

// load shards the model, unit after unit. With FSDP2, accelerate keeps the loaded
// model until all units are sharded (original_sd in fsdp2_prepare_model).
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

// divide makes the rank's shard of a unit. Before that the unsharded unit is on
// the GPU. FSDP1 copies its parameters into one flat tensor (_flat_param.py).
// FSDP2 has the parameters only, one at a time if the first rank broadcasts them
// (fsdp2_load_full_state_dict).
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

// explainLoading returns the reasons for the memory that loading takes.
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

// assumeLoading notes that every rank of a node loads the model, if it does.
func (r *resolver) assumeLoading() {
	if r.job.loader() != everyRank || r.job.RanksPerNode == 1 {
		return
	}
	r.assume("each of %d ranks of a node loads the whole model on the host before FSDP divides it", r.job.RanksPerNode)
}
