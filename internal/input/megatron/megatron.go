// Package megatron decides a training job of Megatron-LM: from its arguments to the layers, parameters and micro
// batches of every rank.
package megatron

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/input/recipe"
	_ "plimsoll/internal/input/recipe/programs" // recognizes files
)

// Kind is the kind of model that a script of Megatron-LM trains.
type Kind string

// The kinds of models.
const (
	GPT  Kind = "gpt"
	BERT Kind = "bert"
	T5   Kind = "t5"
)

// Request is what the arguments of Megatron-LM leave open.
type Request struct {
	Kind       Kind // empty: as the script's name says, or gpt
	World      int64
	PerNode    int64 // ranks of a node; 0: as the launcher says, or 8
	GPU        gpu.Model
	Vocabulary int64   // tokens before padding; 0: as the arguments say
	Imbalance  float64 // tokens of the fullest rank of experts by the mean; 0 is 1
	Torch      version.Version
}

// Job is a training with Megatron-LM with every setting decided.
type Job struct {
	*recipe.Megatron
	Kind         Kind
	GPU          gpu.Model
	Degrees      parallel.Degrees
	Table        parallel.Table
	Group        int // micro batches that the interleaved schedule runs through a chunk at a time
	Micros       int // micro batches of an optimizer step
	Vocabulary   int64
	Imbalance    float64
	Torch        version.Version
	RanksPerNode int64
	// ParameterType is the type of parameters, GradientType that of the gradient buffers.
	ParameterType, GradientType dtype.Type
	Layers                      []Layer // of the model, in the order of the pipeline
	Attention                   string  // flash, fused, unfused or local
	Assumptions                 []string
	LeftOut                     []string // what the job has beside what is planned
}

// Layer is a layer of the model.
type Layer struct {
	Mixture    bool // the feed-forward layer is a mixture of experts
	Bidirected bool // attention has no causal mask
	Cross      bool // the layer has cross attention, too
	Encoder    bool // the layer is of the encoder of an encoder-decoder
}

// TransformerEngine reports whether layers are those of Transformer Engine.
func (j *Job) TransformerEngine() bool { return j.Implement == "transformer_engine" }

// Decide decides what the arguments leave open. Every error is a *fault.Input.
func Decide(m *recipe.Megatron, q Request) (*Job, error) {
	c := *m
	j := &Job{Megatron: &c, Kind: q.Kind, GPU: q.GPU, Imbalance: max(q.Imbalance, 1), Torch: q.Torch}
	for _, n := range m.Notes {
		j.assume("%v", n)
	}
	if len(m.Unset) > 0 {
		j.assume("%s empty in conditions: the script does not set them", strings.Join(m.Unset, ", "))
	}
	if len(m.Looped) > 0 {
		j.assume("%s as before the loops and cases of the script, which are left out", strings.Join(m.Looped, ", "))
	}
	degrees, vocabulary := func() error { return j.degrees(q) }, func() error { return j.vocabulary(q) }
	for _, step := range []func() error{j.kind, j.aliases, j.effects, j.unplanned, j.sizes, j.precision, degrees,
		j.stages, j.batch, j.experts, vocabulary, j.attention, j.contradictions, j.adapters} {
		if err := step(); err != nil {
			return nil, withMissing(err, m.Missing)
		}
	}
	return j, nil
}

// withMissing returns an error with the files that a script runs as a part of itself and that are not here: they may
// have what lacks.
func withMissing(err error, missing []string) error {
	var wrong *fault.Input
	if len(missing) == 0 || !errors.As(err, &wrong) {
		return err
	}
	more := *wrong
	more.Hint = strings.TrimPrefix(more.Hint+"; ", "; ") + "the script has " + strings.Join(missing, ", ") +
		" as a part of itself, and that is not here"
	return &more
}

func (j *Job) assume(format string, values ...any) {
	j.Assumptions = append(j.Assumptions, fmt.Sprintf(format, values...))
}

// kind decides the model by the script and the arguments that only one kind has.
func (j *Job) kind() error {
	switch {
	case j.Kind != "":
	case j.Script == "pretrain_bert":
		j.Kind = BERT
	case j.Script == "pretrain_t5" || j.EncoderSequence > 0 && j.DecoderSequence > 0:
		j.Kind = T5
	case j.Script == "" || j.Script == "pretrain_gpt":
		j.Kind = GPT
	default:
		return fault.Inputf("the script %s.py is not planned yet", j.Script).
			WithHint("plimsoll plans pretrain_gpt.py, pretrain_bert.py and pretrain_t5.py")
	}
	return nil
}

// sizes completes the sizes of layers, as validate_args and core_transformer_config_from_args do.
func (j *Job) sizes() error {
	if j.Kind == T5 {
		return j.sizesOfT5()
	}
	for _, need := range []struct {
		key string
		is  *int64
	}{{"num_layers", &j.Megatron.Layers}, {"hidden_size", &j.Hidden}, {"num_attention_heads", &j.Heads},
		{"micro_batch_size", &j.MicroBatch}, {"seq_length", &j.Sequence}} {
		if need.is == &j.Sequence && j.EncoderSequence > 0 {
			j.Sequence = j.EncoderSequence
		}
		if *need.is == 0 {
			return fault.Inputf("Megatron-LM needs --%s", dashed(need.key)).WithHint("add it to the arguments")
		}
	}
	return j.widths()
}

func (j *Job) sizesOfT5() error {
	if j.EncoderLayers == 0 {
		j.EncoderLayers = j.Megatron.Layers
	}
	if j.DecoderLayers == 0 {
		j.DecoderLayers = j.EncoderLayers
	}
	if j.EncoderSequence == 0 {
		j.EncoderSequence = j.Sequence
	}
	j.Sequence = j.EncoderSequence
	if j.EncoderLayers*j.Hidden*j.Heads*j.MicroBatch*j.EncoderSequence*j.DecoderSequence == 0 {
		return fault.Inputf("a T5 needs --encoder-num-layers, --hidden-size, --num-attention-heads, " +
			"--micro-batch-size, --encoder-seq-length and --decoder-seq-length").WithHint("add what is missing")
	}
	return j.widths()
}

// widths completes the widths of attention and of the feed-forward layer.
func (j *Job) widths() error {
	if j.HeadSize == 0 {
		if j.Hidden%j.Heads != 0 {
			return j.Fault("hidden_size", fmt.Sprintf("is %d, no multiple of %d attention heads", j.Hidden, j.Heads),
				"give --kv-channels")
		}
		j.HeadSize = j.Hidden / j.Heads
	}
	if j.FeedForward == 0 {
		j.FeedForward = 4 * j.Hidden
		if j.SwiGLU { // reduce the size for the doubled projection
			j.FeedForward = j.Hidden * 4 * 2 / 3 / 64 * 64
		}
	}
	if !j.GroupedQuery {
		j.QueryGroups = j.Heads
	}
	if j.ExpertHidden == 0 {
		j.ExpertHidden = j.FeedForward
	}
	if j.Positions == 0 {
		return fault.Inputf("Megatron-LM needs --max-position-embeddings").WithHint("add it to the arguments")
	}
	if j.PositionType == "learned_absolute" && j.Positions < max(j.Sequence, j.DecoderSequence) {
		return j.Fault("max_position_embeddings", fmt.Sprintf("is %d, but a sequence has %d tokens", j.Positions,
			max(j.Sequence, j.DecoderSequence)), "Megatron-LM asserts that it is at least --seq-length")
	}
	return nil
}

// precision decides the types of parameters and gradient buffers.
func (j *Job) precision() error {
	j.ParameterType, j.GradientType = dtype.F32, dtype.F32
	switch {
	case j.BF16 && j.FP16:
		return j.Fault("fp16", "is given beside --bf16", "Megatron-LM asserts that only one of the two is given")
	case j.BF16:
		j.ParameterType = dtype.BF16
		if j.Reduce16 || j.PrecisionAware && j.MainGradients == "bf16" {
			j.GradientType = dtype.BF16
		}
	case j.FP16:
		j.ParameterType, j.GradientType = dtype.F16, dtype.F16
		if j.Accumulate32 {
			j.GradientType = dtype.F32
		}
	}
	return nil
}

// degrees decides how ranks share the work.
func (j *Job) degrees(q Request) error {
	d := parallel.Degrees{Tensor: j.Tensor, Pipeline: j.Pipeline, Context: j.Context, Expert: j.Expert,
		ExpertTensor: j.ExpertTensor, Virtual: 1}
	if d.ExpertTensor == 0 {
		d.ExpertTensor = d.Tensor
	}
	world := q.World
	fewest := d.Pipeline * max(d.Tensor*d.Context, d.ExpertTensor*d.Expert)
	switch {
	case world > 0:
	case j.Ranks >= fewest:
		world = j.Ranks
		j.assume("%d ranks: as many as the launcher starts", world)
	case j.Ranks > 0:
		return fault.Inputf("the launcher starts %d ranks, and these degrees need %d: pipeline %d x the larger of "+
			"tensor %d x context %d and expert tensor %d x expert %d", j.Ranks, fewest, d.Pipeline, d.Tensor, d.Context,
			d.ExpertTensor, d.Expert).WithHint("give --gpus and --nodes")
	default:
		world = fewest
		j.assume("%d ranks: the fewest with these degrees (give --gpus and --nodes)", world)
	}
	if j.Experts == 0 {
		d.Expert, d.ExpertTensor = 1, d.Tensor
	}
	const usual = 8 // GPUs of a node
	j.RanksPerNode = min(world, cmp.Or(q.PerNode, j.Megatron.RanksPerNode, usual))
	var err error
	j.Degrees, err = parallel.NewDegrees(d, world)
	return err
}

// batch decides the number of micro batches.
func (j *Job) batch() error {
	each := j.MicroBatch * j.Degrees.Data
	if j.GlobalBatch == 0 {
		j.GlobalBatch = each
		j.assume("--global-batch-size %d: one micro batch on every rank, as Megatron-LM does", each)
	}
	if j.GlobalBatch%each != 0 {
		return fault.Inputf("the global batch of %d is no multiple of %d: micro batch %d x data parallel %d",
			j.GlobalBatch, each, j.MicroBatch, j.Degrees.Data).
			WithHint("change --global-batch-size or the number of GPUs")
	}
	j.Micros = int(j.GlobalBatch / each)
	j.Group = int(j.Degrees.Pipeline)
	if j.VirtualGroup > 0 {
		j.Group = int(j.VirtualGroup)
	}
	rest := j.Micros % j.Group
	if j.Degrees.Virtual > 1 && (rest > 0 && rest < int(j.Degrees.Pipeline) || j.Micros < j.Group) {
		return fault.Inputf("the interleaved schedule takes %d micro batches in groups of %d, and the last group has "+
			"fewer than the %d pipeline stages", j.Micros, j.Group, j.Degrees.Pipeline).
			WithHint("change --global-batch-size or --microbatch-group-size-per-virtual-pipeline-stage")
	}
	return nil
}
