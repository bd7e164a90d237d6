package job

import (
	"fmt"

	"plimsoll/internal/base/fault"
)

// batch sets the micro batch, the sequence length and the accumulation.
func (r *resolver) batch() error {
	j := r.job
	for _, n := range []struct {
		flag  string
		value int
	}{{"--seq-len", r.Sequence}, {"--usual-seq-len", r.UsualSequence},
		{"--shortest-seq-len", r.ShortestSequence}, {"--micro-batch", r.MicroBatch},
		{"--grad-accum", r.Accumulation}} {
		if n.value < 0 || n.value > 1<<26 {
			return fault.Inputf("%s is %d, expected a number from 1 to %d", n.flag, n.value, 1<<26)
		}
	}
	j.Sequence, j.MicroBatch, j.Accumulation = int64(r.Sequence), int64(r.MicroBatch), r.Accumulation
	if t := r.training; t != nil {
		if j.MicroBatch == 0 {
			j.MicroBatch = int64(t.MicroBatch)
		}
		if j.Accumulation == 0 {
			j.Accumulation = t.GradientAccumulation
		}
	}
	if d := j.DeepSpeed; d != nil && (d.Batch.Micro > 0 || d.Batch.Train > 0) {
		if j.MicroBatch == 0 || j.Accumulation == 0 {
			n := r.sequenceRanks() * max(1, r.PipelineParallel) // they share a micro batch
			if j.World%n != 0 {
				shared := "a sequence"
				if r.PipelineParallel > 1 {
					shared = "micro batches"
				}
				return fault.File(d.File).Inputf("%d ranks cannot be divided into groups of %d that share %s",
					j.World, n, shared).WithHint(fmt.Sprintf("give a number of GPUs that is a multiple of %d", n))
			}
			b, err := d.ResolveBatch(j.World / n)
			if err != nil {
				return err
			}
			if j.MicroBatch == 0 {
				j.MicroBatch = int64(b.Micro)
			}
			if j.Accumulation == 0 {
				j.Accumulation = b.Accumulation
			}
		}
	}
	if err := r.globalBatch(); err != nil {
		return err
	}
	if err := r.length(); err != nil {
		return err
	}
	if j.MicroBatch == 0 {
		j.MicroBatch = 1
		what := "sequence"
		if j.Model.Network.OnlyImages() {
			what = "image"
		}
		if !r.anyMicroBatch {
			r.assume("a micro batch of 1 %s: --micro-batch was not given", what)
		}
	}
	j.Accumulation = max(1, j.Accumulation)
	if err := r.shortest(); err != nil {
		return err
	}
	j.UsualSequence = int64(r.UsualSequence)
	if j.UsualSequence > j.Sequence {
		return fault.Inputf("--usual-seq-len is %d, but the first and longest sequences have %d tokens",
			j.UsualSequence, j.Sequence).WithHint("give the longest length as --seq-len")
	}
	return nil
}

// shortest sets the length that lengths vary from.
func (r *resolver) shortest() error {
	j := r.job
	j.ShortestSequence = int64(r.ShortestSequence)
	switch {
	case j.ShortestSequence == 0:
		return nil
	case j.ShortestSequence > j.Sequence:
		return fault.Inputf("--shortest-seq-len is %d, but the longest sequences have %d tokens", j.ShortestSequence,
			j.Sequence).WithHint("give the longest length as --seq-len")
	case r.UsualSequence > 0:
		return fault.Inputf("--shortest-seq-len and --usual-seq-len both say how long sequences are that are not the " +
			"longest").WithHint("give one of them")
	case r.PipelineParallel > 1 || r.Inputs.framework != nil && r.Inputs.framework.Stages() > 1:
		return fault.Inputf("--shortest-seq-len: lengths that vary are not planned yet with pipeline stages").
			WithHint("leave it out to plan the longest everywhere")
	}
	return nil
}

// globalBatch sets the accumulation from the batch of all ranks, as torchtitan (train.py) and LLaMA-Factory's trainer
// v1 do (core/utils/batching.py).
func (r *resolver) globalBatch() error {
	j := r.job
	f := r.Inputs.framework
	if f == nil || f.GlobalBatch == nil || r.Accumulation > 0 || r.MicroBatch > 0 && f.Pipeline != nil {
		return nil
	}
	ranks := j.World / max(1, r.PipelineParallel, f.Stages())
	if p := f.Parallelism; p != nil {
		ranks /= p.Tensor * p.Context
	}
	each := int(j.MicroBatch) * max(1, ranks)
	if f.GlobalBatch.Sequences%each != 0 {
		return f.GlobalBatch.Place.Inputf("global_batch_size is %d, expected a multiple of %d: %d sequences on each "+
			"of %d ranks", f.GlobalBatch.Sequences, each, j.MicroBatch, ranks).
			WithHint("change --gpus, or one of the sizes")
	}
	j.Accumulation = f.GlobalBatch.Sequences / each
	return nil
}

// length sets the length of sequences that a file or a flag leaves open.
func (r *resolver) length() error {
	j := r.job
	n := j.Model.Network
	what := "sequences"
	switch {
	case n.OnlyImages():
		if r.Sequence > 0 || r.UsualSequence > 0 || r.ShortestSequence > 0 {
			return fault.Inputf("--seq-len, --usual-seq-len and --shortest-seq-len are for models that read tokens, "+
				"but %s reads images only", j.Model.Name).
				WithHint("leave them out; --image-size is for models that read images of any size")
		}
		j.Sequence = 1 // images sets it
	case n.Sound() != nil:
		what = "labels"
	case n.Head.Contrast != nil:
		what = "texts"
	}
	if j.Sequence == 0 {
		j.Sequence = 2048
		if longest := positions(n, j.Model.Parameters); longest > 0 {
			j.Sequence = min(j.Sequence, longest)
		}
		r.assume("%s of %d tokens: --seq-len was not given", what, j.Sequence)
	}
	if h := n.Sound(); h != nil {
		r.assume("every spectrum has %d frames, which the encoder reads however short the sound is", h.Frames())
		if r.compiled() {
			r.assume("a compiled encoder of sound was not compared with PyTorch")
		}
	}
	return nil
}
