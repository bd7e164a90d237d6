package recipe

import "plimsoll/internal/input/recipe/strict"

// ShardFSDP2 sets FSDP2 for every block, as a program at a key does with several ranks. It saves checkpoints as saved
// says.
func (r *Reader) ShardFSDP2(at string, reshards, offloads bool, saved string) {
	r.To.SeveralOnly = true
	r.Set("fsdp", at, "full_shard auto_wrap")
	config := &strict.Value{Kind: '{'}
	Give(config, "version", -1, strict.Of(2))
	Give(config, "auto_wrap_policy", -1, strict.Of("TRANSFORMER_BASED_WRAP"))
	Give(config, "reshard_after_forward", -1, strict.Of(reshards))
	Give(config, "cpu_offload", -1, strict.Of(offloads))
	Give(config, "state_dict_type", -1, strict.Of(saved))
	Give(r.Arguments, "fsdp_config", r.At(at), config)
}

// Dimensions reads how ranks divide the work. The ranks that are left shard the model where its key is -1.
func (r *Reader) Dimensions(replicate, shard, tensor, context string) {
	p := Parallelism{Replicate: max(1, int(r.Integer(replicate))), Shard: int(r.Integer(shard)),
		Tensor: max(1, int(r.Integer(tensor))), Context: max(1, int(r.Integer(context))), Sequence: 1}
	if p.Shard < 1 {
		p.Shard = 0
	}
	if p.Shard > 0 || p.Replicate*p.Tensor*p.Context > 1 {
		r.To.Parallelism = &p
	}
}
