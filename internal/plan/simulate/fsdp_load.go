package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

// This file plans what FSDP holds while a model is loaded: the model on the host,
// and one unsharded unit at a time on the GPU.

// loadedBytes returns the size of a parameter before it is sharded.
func (e *fsdp) loadedBytes(p *autograd.Parameter) int64 {
	if p.Quantized != autograd.Unquantized {
		return p.Bytes()
	}
	if p.Wide {
		return p.Elements * dtype.F32.Size()
	}
	return p.Elements * e.LoadedType().Size()
}

// perNode returns a rank's share of memory that a node has once.
func (s *simulation) perNode(bytes int64) int64 {
	ranks := int64(max(1, s.RanksPerNode))
	return (bytes + ranks - 1) / ranks
}

// load shards the model, unit after unit. With FSDP2, accelerate keeps the loaded
// model until all units are sharded (original_sd in fsdp2_prepare_model).
func (e *fsdp) load() {
	units := append(e.order[:len(e.order):len(e.order)], e.root)
	loaded := make([]hold, len(units))
	refills, beside := e.Refills()
	var full int64
	for i, u := range units {
		bytes := u.elements(nil, e.loadedBytes)
		full += bytes
		switch {
		case e.Loader() == job.LoadedByNobody:
			bytes = 0
		case e.Loader() == job.LoadedAsPageCache && refills: // the first rank maps its copy, and the others hold one
			bytes -= e.perNode(bytes)
		case e.Loader() == job.LoadedAsPageCache:
			bytes = 0
		case e.Loader() == job.LoadedByFirstRank:
			bytes = e.perNode(bytes)
		}
		if e.Loader() == job.LoadedOnGPU {
			loaded[i] = e.gpu.hold(bytes, ledger.UndividedUnits, e.whyUndivided)
			continue
		}
		loaded[i] = e.host.hold(bytes, ledger.LoadStaging, e.whyStaging)
	}
	if e.Loader() == job.LoadedAsPageCache {
		e.host.maps(e.perNode(full), because("%s%s parameters in %v", whyMapped,
			ledger.Count(elementsOf(e.parameters)), e.LoadedType()))
	}
	if beside && e.Loader() == job.LoadedByEveryRank {
		e.host.briefly(full-e.perNode(full), ledger.LoadStaging, e.whyStaging)
	}
	for i, u := range units {
		e.shard(u)
		if e.FSDP.Version == 1 || e.Loader() == job.LoadedOnGPU {
			drop(&loaded[i])
		}
	}
	for i := range loaded {
		drop(&loaded[i])
	}
}

const whyMapped = "files of weights that from_pretrained maps and does not convert, once on a node, here a part of " +
	"each rank: "

// refilled says where transformers makes a full model on ranks that need none.
const refilled = "(_move_missing_keys_from_meta_to_device in transformers/modeling_utils.py)"

// whyStaging is the reason for the model on the host. Some process loads it.
func (e *fsdp) whyStaging() string {
	all := fmt.Sprintf("%s parameters in %v", ledger.Count(elementsOf(e.parameters)), e.LoadedType())
	switch e.Loader() {
	case job.LoadedByFirstRank:
		by := " (cpu_ram_efficient_loading)"
		if e.LoadsOnFirst {
			by = ""
		}
		return "the first rank of a node loads the full model, and the others get their shards from it" + by +
			", here a part of each rank: " + all
	case job.LoadedAsPageCache:
		return "every rank of a node but the first makes a full model of its own, which the first rank's weights " +
			"replace " + refilled + ": " + all
	}
	why := "from_pretrained makes the full model in the memory of every rank, before FSDP shards it: " + all
	switch {
	case e.FSDP.RAMEfficientLoading:
		why += "; transformers 5 does not look at cpu_ram_efficient_loading while it loads (4.57 does)"
		if _, beside := e.Refills(); beside {
			why += ", and every rank but the first makes a model of zeros beside it " + refilled
		}
	case e.RanksPerNode > 1 && !e.Versions.Transformers.AtLeast(5, 0, 0):
		why += "; with accelerate's cpu_ram_efficient_loading only the first rank of a node does"
	}
	return why
}

// shard makes the rank's shard of a unit. The unsharded unit is on the GPU first. FSDP1 copies its parameters into
// one flat tensor (_flat_param.py). FSDP2 holds only the parameters, one at a time if the first rank broadcasts them
// (fsdp2_load_full_state_dict).
func (e *fsdp) shard(u *unit) {
	shard := func() { allocate(e.device(), e.shardedBytes(u), e.weights(), e.whyParameters) }
	if e.Loader() == job.LoadedByNobody || e.Loader() == job.LoadedOnGPU || e.Parallel.Shard == 1 {
		shard()
		return
	}
	var unsharded, largest int64
	var parameters []hold
	onDevice := e.FSDP.Version == 2 && e.FSDP.RAMEfficientLoading
	for _, p := range u.parameters {
		bytes := e.loadedBytes(p)
		unsharded, largest = unsharded+bytes, max(largest, bytes)
		if !onDevice {
			parameters = append(parameters, e.gpu.hold(bytes, ledger.UndividedUnits, e.whyUndivided))
		}
	}
	release := func() {
		for i := range parameters {
			drop(&parameters[i])
		}
	}
	switch {
	case onDevice:
		e.gpu.during(largest, ledger.UndividedUnits, e.whyUndivided, shard)
	case e.FSDP.Version == 2:
		shard()
		release()
	default:
		flat := e.gpu.hold(unsharded, ledger.UndividedUnits, e.whyUndivided)
		release()
		shard()
		flat.free()
	}
}

func (e *fsdp) whyParameters() string {
	var experts, own int64
	if e.Parallel.Expert > 1 {
		for _, p := range e.parameters {
			if p.Expert {
				experts, own = experts+p.Elements, e.sharers(p)
			}
		}
	}
	all := fmt.Sprintf("one of %d shards of %s parameters", e.Parallel.Shard,
		ledger.Count(elementsOf(e.parameters)-experts))
	if experts > 0 {
		all += fmt.Sprintf(" and one of %d of %s in the rank's experts", own, ledger.Count(experts))
	}
	return fmt.Sprintf("%s x %d B (%v)", all, e.ParameterType.Size(), e.ParameterType)
}

func (e *fsdp) whyUndivided() string {
	if e.FSDP.Version == 1 {
		return "a full unit as it was loaded, and again as one flat tensor, before FSDP1 keeps a shard of it " +
			"(torch/distributed/fsdp/_flat_param.py)"
	}
	if e.Loader() == job.LoadedOnGPU {
		return "the full model, which every rank loads on its GPU, unit after unit until FSDP2 keeps a shard of it"
	}
	return "a full unit as it was loaded, before FSDP2 keeps a shard of it"
}
