package job

import (
	"fmt"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/forward"
)

// sequenceRanks returns the number of ranks that share a sequence by exchanging heads, as accelerate's sp_size or
// DeepSpeed's sequence_parallel_size says.
func (r *resolver) sequenceRanks() int {
	n := 1
	if d := r.job.DeepSpeed; d != nil {
		n = max(n, d.SequenceParallel)
	}
	if p, _ := r.divided(); p != nil {
		n = max(n, p.Sequence)
	}
	return n
}

// exchangesHeads refuses what UlyssesSPAttentionHF of DeepSpeed refuses (runtime/sequence_parallel/ulysses_sp.py).
func (r *resolver) exchangesHeads() error {
	j := r.job
	if !j.Parallel.DeepSpeedUlysses {
		return nil
	}
	n := j.Parallel.Context
	list := []contradiction{
		{j.DeepSpeed == nil, "sequences are divided by DeepSpeed, but the job has none", "add --deepspeed"},
		{j.Attention == forward.Eager,
			"ranks that share a sequence cannot have eager attention, whose mask would be of all pairs of tokens",
			"use --attention sdpa or flash"},
		{j.Model.Network != nil && len(j.Model.Network.Stacks) > 1,
			"ranks that share a sequence are planned for decoders only, as DeepSpeed has them", "leave sp_size out"},
	}
	for _, b := range j.Model.Network.Blocks() {
		a := &b.Attention
		if a.Heads == 0 || a.Delta != nil {
			return fault.Inputf("%s has layers that pass a state from token to token: accelerate refuses to divide "+
				"sequences there", j.Model.Name).WithHint("leave sp_size out")
		}
		list = append(list,
			contradiction{a.Heads%n != 0,
				fmt.Sprintf("%s has %d heads, which cannot be divided among the %d ranks that share a sequence",
					j.Model.Name, a.Heads, n), "give an sp_size that divides them"},
			contradiction{a.KeyValueHeads > 0 && a.KeyValueHeads%n != 0 && n%a.KeyValueHeads != 0,
				fmt.Sprintf("%s has %d key and value heads: neither they nor the %d ranks that share a sequence "+
					"divide the other", j.Model.Name, a.KeyValueHeads, n), "give another sp_size"},
			contradiction{a.Width != a.ValueWidth, fmt.Sprintf("%s has values of another width than keys: DeepSpeed "+
				"exchanges only heads of one width", j.Model.Name), "leave sp_size out"})
	}
	return refuse(list...)
}
