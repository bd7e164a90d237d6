package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/forward"
)

// parallel sets the degrees of tensor, context and expert parallelism.
func (r *resolver) parallel() error {
	j := r.job
	j.Parallel.Tensor, j.Parallel.Context = int64(max(1, r.TensorParallel)), int64(max(1, r.ContextParallel))
	j.Parallel.Expert = int64(max(1, r.ExpertParallel))
	if d := j.DeepSpeed; d != nil && r.TensorParallel == 0 {
		j.Parallel.Tensor = int64(max(1, d.TensorParallel))
	}
	if n := r.sequenceRanks(); n > 1 {
		j.Parallel.Context, j.Parallel.DeepSpeedUlysses = int64(n), true
	}
	if f := r.Inputs.framework; f != nil && r.ExpertParallel == 0 {
		j.Parallel.Expert = int64(max(1, f.Experts))
	}
	if p, file := r.divided(); p != nil {
		if ranks := p.Ranks() * int(j.Stages()); ranks != j.World {
			return fault.File(file).Inputf("parallelism_config makes %d ranks, but the job has %d", ranks, j.World).
				WithHint("change --gpus, --nodes or one of the sizes")
		}
		j.Parallel.Tensor, j.Parallel.Context = int64(p.Tensor), int64(p.Context*max(1, p.Sequence))
		if p.Ulysses && p.Context > 1 {
			j.Parallel.Ulysses = true
			if err := r.exchange(file); err != nil {
				return err
			}
		}
	}
	if each := j.Parallel.Tensor * j.Parallel.Context * j.Stages(); j.World%int(each) != 0 {
		stages := ""
		if j.Pipeline != nil {
			stages = fmt.Sprintf(" x pipeline stages %d", j.Stages())
		}
		return fault.Inputf("the number of ranks is %d: expected a multiple of tensor parallelism %d x context "+
			"parallelism %d%s", j.World, j.Parallel.Tensor, j.Parallel.Context, stages).
			WithHint(fmt.Sprintf("give a number of GPUs that is a multiple of %d", each))
	}
	if j.Parallel.Context > 1 && j.Model.Network.Recurrent() {
		return fault.Inputf("%s has layers that pass a state from token to token, which is not planned for sequences "+
			"that ranks divide", j.Model.Name).WithHint("leave context parallelism out")
	}
	if j.Sequence%j.Parallel.Context != 0 || j.UsualSequence%j.Parallel.Context != 0 {
		return fault.Inputf("sequences of %d tokens cannot be divided among %d ranks", j.Sequence, j.Parallel.Context)
	}
	return nil
}

// exchange refuses what LLaMA-Factory's Ulysses does not do (apply_sequence_parallel in
// v1/plugins/model_plugins/parallelization/sequence_parallel.py).
func (r *resolver) exchange(file string) error {
	j := r.job
	n := j.Parallel.Context
	for _, b := range j.Model.Network.Blocks() {
		if a := b.Attention; a.Heads%n != 0 || a.KeyValueHeads%n != 0 {
			return fault.File(file).Inputf("Ulysses divides heads among %d ranks, but there are %d of queries and "+
				"%d of keys", n, a.Heads, a.KeyValueHeads).WithHint("give a divisor of both as their number")
		}
	}
	if j.Attention != forward.Flash {
		return fault.File(file).Inputf("sequence parallelism requires flash attention").
			WithHint("set flash_attn: flash_attention_2")
	}
	return nil
}

// sharding sets how the parameters are sharded.
func (r *resolver) sharding() error {
	j := r.job
	switch {
	case r.Request.FSDP == "":
	case slices.Contains(FSDPVersions, r.Request.FSDP):
		if j.FSDP != nil {
			return fault.Inputf("--fsdp is given, but a file configures FSDP already").WithHint("leave --fsdp out")
		}
		j.FSDP = &recipe.FSDP{Version: int(r.Request.FSDP[0] - '0'), Strategy: "full_shard",
			WrapPolicy: "transformer_based_wrap", UseOrigParams: true,
			BackwardPrefetch: "backward_pre", OffloadParameters: r.OffloadParameters}
		if j.OfTransformers() {
			j.FSDP.StateDictType = recipe.UsualStateDict(j.FSDP.Version)
		}
		j.ReduceType = dtype.F32
	default:
		return fault.Inputf("--fsdp is %q, expected the version of FSDP: %s",
			r.Request.FSDP, fault.OneOf(FSDPVersions...)).
			WithHint("both shard parameters, gradients and states (FULL_SHARD); for another strategy give " +
				"accelerate's file")
	}
	if j.FSDP != nil && r.OffloadParameters {
		offloaded := *j.FSDP
		offloaded.OffloadParameters = true
		j.FSDP = &offloaded
	}
	j.Parallel.Shard = int64(j.World) / j.Parallel.Tensor / j.Stages()
	whole := ledger.Bytes(j.Model.Elements() * j.ParameterType.Size())
	// For an unknown GPU, 80 GiB of memory are assumed.
	j.SplitsDecay = r.training != nil
	r.replicated()
	j.SyncEachBatch = r.training != nil && r.training.SyncEachBatch
	j.WrapsTrained = j.Adapter != nil && j.FSDP != nil && (r.training != nil || !j.FSDP.UseOrigParams)
	// Published runs of Trainers whose DeepSpeed configuration stands elsewhere loaded the model in full.
	byTrainer := r.training != nil && r.training.DeepSpeed != nil
	j.ZeROInit = byTrainer || r.launch != nil && r.launch.ZeRO3Init || whole > cmp.Or(j.GPU.Memory, 80*ledger.GiB)
	if j.DeepSpeed != nil {
		j.DeepSpeed = j.DeepSpeed.ResolveSizes(j.Model.Network.Hidden)
	}
	if err := r.shardingOfZeRO3(byTrainer); err != nil {
		return err
	}
	if j.FSDP == nil {
		return nil
	}
	if oldest := (version.Version{Minor: 43}); j.Quantization != nil && !j.Versions.BitsAndBytes.AtLeast(0, 43, 0) {
		if r.BitsAndBytes != "" {
			return fault.Inputf("FSDP of quantized weights needs bitsandbytes 0.43 or later, but the job has %v",
				j.Versions.BitsAndBytes).WithHint("give a later --bitsandbytes")
		}
		j.Versions.BitsAndBytes = oldest
	}
	if j.FSDP.Strategy == "no_shard" {
		j.Parallel.Shard = 1
	}
	if strings.HasPrefix(j.FSDP.Strategy, "hybrid") {
		j.Parallel.Shard = int64(j.RanksPerNode)
	}
	if p, _ := r.divided(); p != nil {
		j.Parallel.Shard = int64(p.Shard * p.Context)
	}
	j.Optimizer.Ranks = j.Parallel.Shard
	// FSDP casts the parameters itself. Accelerate has gradients reduced in
	// the same type.
	if j.AutocastType != dtype.Invalid {
		j.CastType, j.AutocastType = j.AutocastType, dtype.Invalid
	}
	r.unitsAtEnds()
	r.assumeLoading()
	r.sayPadding()
	if j.ReduceType == dtype.Invalid || j.CastType == dtype.Invalid && j.ParameterType != dtype.F32 {
		j.ReduceType = j.ComputeType()
	}
	return nil
}

// unitsAtEnds says which units FSDP2 has beside the blocks and the root.
func (r *resolver) unitsAtEnds() {
	j, both := r.job, recipe.UnitsAtEnds{Embedding: true, Tail: true}
	switch f := r.Inputs.framework; {
	case f != nil && f.UnitsAtEnds != nil:
		j.UnitsAtEnds = *f.UnitsAtEnds
	case r.preparedByAccelerate() && j.Versions.Accelerate.AtLeast(1, 14, 0):
		j.UnitsAtEnds = both
	case j.Modules == "torchtitan" && j.FSDP.Version == 2 && j.Versions.Torch.AtLeast(2, 9, 0):
		// apply_fsdp in torchtitan's models/llama3 since July 2025; torchtitan is developed with the torch of its day.
		j.UnitsAtEnds = both
	}
}

// preparedByAccelerate reports whether accelerate divides the model into units of FSDP2 (fsdp2_prepare_model in its
// utils/fsdp_utils.py).
func (r *resolver) preparedByAccelerate() bool {
	replaced := r.Inputs.framework != nil && r.Inputs.framework.UnitsAtEnds != nil
	return r.fsdpVersion() == 2 && (r.Modules == "" || r.Modules == transformersModules) && !replaced
}

// fsdpVersion returns the version of FSDP that a file or the request asks for, 0 for none.
func (r *resolver) fsdpVersion() int {
	if r.job.FSDP != nil {
		return r.job.FSDP.Version
	}
	return slices.Index(FSDPVersions, r.Request.FSDP) + 1
}

// shardingOfZeRO3 sets the ranks that ZeRO-3 shards the model among, and says how the model is loaded.
func (r *resolver) shardingOfZeRO3(byTrainer bool) error {
	j := r.job
	d := j.DeepSpeed
	if d == nil || d.ZeROStage != 3 {
		return nil
	}
	switch n := d.Sizes.Group; {
	case n > 0 && int64(j.World)%n != 0:
		return fault.File(d.File).Inputf("%d ranks cannot be divided into groups of mics_shard_size %d", j.World, n).
			WithHint(fmt.Sprintf("give a number of GPUs that is a multiple of %d", n))
	case n > 0:
		j.Parallel.Shard, j.ZeROInit = n, false
		r.assume("MiCS shards the model after it is created in full: parameters of zero.Init lack its groups of ranks")
	case r.launch != nil:
	case byTrainer:
		r.assume("zero.Init shards the parameters while the model is created: TrainingArguments name DeepSpeed's " +
			"configuration and are made first, as in transformers' examples; a model made before loads in full")
	case j.ZeROInit:
		r.assume("zero.Init shards the parameters while the model is created: the full model would " +
			"not fit on a GPU")
	default:
		r.assume("DeepSpeed shards the model after it is created in full: with zero.Init (accelerate's " +
			"zero3_init_flag, or a Trainer created before the model) the load takes less memory")
	}
	return nil
}

// sayPadding notes if padding makes FSDP2 gather at least a quarter more than
// the model. FSDP2 shards the rows of every parameter, and pads a rank that has
// fewer rows (_init_sharded_param in _fsdp_param.py).
func (r *resolver) sayPadding() {
	j := r.job
	if j.FSDP.Version != 2 {
		return
	}
	fused := j.FusedExperts()
	var whole, padded, most, rows int64
	var name string
	var among int64
	for _, p := range j.Model.Parameters {
		if p.TiedTo != "" || len(p.Shape) == 0 {
			continue
		}
		first, ranks := p.Shape[0], j.Parallel.Shard
		if fused[p.Name] {
			first, ranks = max(1, first/j.Parallel.Expert), max(1, ranks/j.Parallel.Expert)
			if j.Modules == "torchtitan" && j.Parallel.Expert > 1 && ranks > first { // which shares the rows of each
				continue
			}
		}
		all := (first + ranks - 1) / ranks * ranks * (p.Elements() / p.Shape[0])
		own := first * (p.Elements() / p.Shape[0])
		whole, padded = whole+own, padded+all
		if all-own > most {
			most, name, rows, among = all-own, p.Name, first, ranks
		}
	}
	if padded < whole*5/4 {
		return
	}
	r.assume("FSDP2 divides the %d rows of %s among %d ranks and pads every rank to a full row, so all ranks "+
		"together gather %.1f times the model: shard it among fewer ranks (accelerate's dp_shard_size and "+
		"dp_replicate_size), give --expert-parallel, or shard another dimension (fully_shard's shard_placement_fn, "+
		"not planned yet)",
		rows, name, among, float64(padded)/float64(whole))
}

// replicated sets what DDP is told.
func (r *resolver) replicated() {
	if t := r.training; t != nil {
		r.job.DDPBucketMiB, r.job.UnusedGiven = t.DDPBucketMiB, t.FindsUnused
	}
}
