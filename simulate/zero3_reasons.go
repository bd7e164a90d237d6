package simulate

import (
	"plimsoll/ledger"
)

// describe sets the reasons.
func (e *zero3) describe() {
	if !e.superOffloads() {
		e.explainShared()
	}
	n, d, size := elementsOf(e.trained), e.Parallel.Shard, e.ParameterType.Size()
	shard := ledger.Count(elementsOf(e.flat))
	all := ledger.Count(elementsOf(e.parameters))
	e.explain(ledger.Parameters,
		"a part of each of %d ranks: %s parameters x %d B, page-locked in one block a group on the host with "+
			"offload_param (zero/stage3.py)", d, all, size)
	e.explain(ledger.GatheredParameters,
		"whole parameters of the modules in use, of those that prefetch_bucket_size %s sends for, of those used "+
			"again within max_reuse_distance %s, and of those up to %s elements; several are gathered in one tensor "+
			"and copied out of it (partitioned_param_coordinator.py)",
		ledger.Count(e.recipe.Sizes.PrefetchBucket), ledger.Count(e.recipe.Sizes.ReuseDistance),
		ledger.Count(e.recipe.Sizes.PersistentParameter))
	e.explain(ledger.MasterWeights, "%s parameters / %d ranks = %s x %d B (zero/stage3.py, _create_fp32_partitions)",
		ledger.Count(n), d, shard, e.master.Size())
	e.explain(ledger.AccumulatedGradients, "%s x %d B, for good (zero/stage3.py, grad_partitions_flat_buffer)",
		shard, e.accumulation().Size())
	e.explain(ledger.MasterGradients,
		"in sub-groups of %s elements: %d B, for good where the host steps, flattened and cast for the step on the "+
			"GPU (zero/stage3.py, initialize_optimizer_states)", ledger.Count(e.recipe.Sizes.SubGroup), e.master.Size())
	e.explain(ledger.OptimizerStates, "%s: %s x %d B, made in the first step (before 0.13.2 when the engine is made)",
		e.Optimizer.Name, shard, e.moments(e.flat)/max(1, elementsOf(e.flat)))
	e.explain(ledger.CommunicationBuckets, "reduce_bucket_size %s x %d B, for good (zero/stage3.py)",
		ledger.Count(e.recipe.Sizes.ReduceBucket), size)
	e.explain(ledger.BucketCopies,
		"what is in the bucket, put together by rank for the reduce-scatter (comm/coalesced_collectives.py)")
	e.explain(ledger.ReductionTemporaries,
		"of a rank's part of a gradient: on the GPU to be added up, the norm in double of up to 250,000,000 "+
			"elements, a cast to %v (zero/stage3.py, partition_grads)", e.master)
	e.explain(ledger.FlatteningCopies,
		"parts of parameters are moved to the host and back as one tensor (zero/utils.py, defragment)")
	e.explain(ledger.SwapBuffers, "offload_optimizer: buffer_count %d x the largest sub-group x %d B; offload_param: "+
		"%d x %s x %d B in one block (swap_tensor)",
		e.recipe.OffloadOptimizer.Buffers, e.master.Size(), e.recipe.OffloadParameters.Buffers,
		ledger.Count(e.recipe.OffloadParameters.BufferElements), size)
	e.explain(ledger.FullStateDict,
		"the whole model on the host of rank 0: %s parameters x %d B, here a part of each rank of its node", all, size)
	e.explain(ledger.Gradients,
		"whole gradients until they are in the bucket; one that is larger stays until it is reduced")
}
