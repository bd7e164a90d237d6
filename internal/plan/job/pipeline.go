package job

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/parallel"
	"plimsoll/internal/input/recipe"
)

// Pipeline says how pipeline stages share the blocks of a model and the micro batches of a step
// (torch.distributed.pipelining, or DeepSpeed's PipelineEngine).
type Pipeline struct {
	Degree   int64  // ranks that a micro batch goes through
	Schedule string // one of PipelineSchedules
	Micros   int    // micro batches of a step
	Table    parallel.Table
}

// PipelineSchedules are the schedules that are planned, as torch.distributed.pipelining names them.
var PipelineSchedules = []string{"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
	"ZBVZeroBubble", "DualPipeV"}

// IsV reports whether the chunks of a schedule go down the ranks and come back, two on each.
func (p *Pipeline) IsV() bool { return isV(p.Schedule) }

func isV(schedule string) bool { return schedule == "ZBVZeroBubble" || schedule == "DualPipeV" }

// isLooped reports whether a schedule has several chunks on a rank.
func isLooped(schedule string) bool {
	return isV(schedule) || slices.Contains([]string{"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}, schedule)
}

// mostMicros is far above what pipelines have. Their schedules are lists of all passes.
const mostMicros = 1 << 13

// Divides reports whether a schedule divides backward passes into the half of the input and that of the weights.
func (p *Pipeline) Divides() bool { return divides(p.Schedule) }

func divides(schedule string) bool { return isV(schedule) || schedule == "InterleavedZeroBubble" }

// Passes returns the passes of a stage in their order, for so many micro batches.
func (p *Pipeline) Passes(stage int64, micros int) []parallel.Pass {
	chunks := len(p.Table[stage])
	switch p.Schedule {
	case "GPipe":
		return parallel.GPipe(chunks, micros)
	case "LoopedBFS":
		return parallel.LoopedBFS(chunks, micros)
	case "ZBVZeroBubble":
		return parallel.ZBV(int(p.Degree), int(stage), micros)
	case "DualPipeV":
		return parallel.DualPipeV(int(p.Degree), int(stage), micros)
	}
	degrees := parallel.Degrees{Pipeline: p.Degree, Virtual: int64(chunks)}
	if p.Schedule == "InterleavedZeroBubble" {
		return parallel.ZeroBubble(degrees, stage, micros, p.group())
	}
	return parallel.Schedule(degrees, stage, micros, p.group())
}

// group returns how many micro batches go through a chunk before the next chunk has its turn.
func (p *Pipeline) group() int { return p.Micros / max(1, p.Micros/int(p.Degree)) }

// Stage is what a pipeline stage runs.
type Stage struct {
	Index  int64
	Chunks []Chunk
	// Replicated are the parameters that another stage has, too: the head's weight that is the embedding's.
	Replicated []string
}

// Chunk is a range of blocks that a stage runs at a time.
type Chunk struct {
	Network         *model.Network
	Receives, Sends bool // from the stage before, to the stage behind
}

// OfStage returns the job of the ranks of one pipeline stage.
func (j *Job) OfStage(index int64) *Job {
	var segments []model.Segment
	for _, c := range j.Pipeline.Table[index] {
		segments = append(segments, model.Segment{First: int(c.First), Blocks: int(c.Layers), Embedding: c.Embedding,
			Head: c.Loss})
	}
	of := *j
	var networks []*model.Network
	of.Model, networks = j.Model.Segments(segments)
	of.Stage = &Stage{Index: index}
	for i, n := range networks {
		of.Stage.Chunks = append(of.Stage.Chunks, Chunk{n, !segments[i].Embedding, !segments[i].Head})
	}
	kept := map[string]bool{}
	for _, p := range of.Model.Parameters {
		kept[p.Name] = p.TiedTo == ""
	}
	for _, p := range j.Model.Parameters {
		if p.TiedTo != "" && kept[p.Name] {
			of.Stage.Replicated = append(of.Stage.Replicated, p.Name)
		}
	}
	of.Settle()
	return &of
}

// OfChunk returns the job of one chunk of a pipeline stage.
func (j *Job) OfChunk(stage int64, chunk int) *Job {
	c := j.Pipeline.Table[stage][chunk]
	of := *j
	of.Model, _ = j.Model.Segments([]model.Segment{{First: int(c.First), Blocks: int(c.Layers), Embedding: c.Embedding,
		Head: c.Loss}})
	of.Stage = &Stage{Index: stage}
	of.Settle()
	return &of
}

// pipeline divides the model among pipeline stages.
func (r *resolver) pipeline() error {
	j := r.job
	asked := r.askedPipeline()
	if r.PipelineSchedule != "" && r.PipelineParallel == 0 {
		return fault.Inputf("--pipeline-schedule is %q, but no --pipeline-parallel says how many stages there are",
			r.PipelineSchedule).WithHint("give --pipeline-parallel, too")
	}
	if r.PipelinePartition != "" && asked == nil {
		return fault.Inputf("--pipeline-partition is %q, but no --pipeline-parallel says how many stages there are",
			r.PipelinePartition).WithHint("give --pipeline-parallel, too")
	}
	if asked == nil || asked.Degree == 1 {
		return nil
	}
	for _, known := range PipelineSchedules {
		if strings.EqualFold(known, asked.Schedule) { // as get_schedule_class compares
			named := *asked
			named.Schedule, asked = known, &named
		}
	}
	p := &Pipeline{Degree: int64(asked.Degree), Schedule: asked.Schedule}
	where := asked.Place
	if err := cmp.Or(r.pipelineContradictions(asked), r.pipelineMicros(p, asked)); err != nil {
		return err
	}
	counts, err := layersOfStages(asked, len(j.Model.Network.Blocks()))
	if j.DeepSpeed != nil {
		counts, err = r.layersOfModule(asked.Degree)
	}
	if err != nil {
		return where.Inputf("%v", err).WithHint("change the number of stages or of layers in a stage")
	}
	p.Table = parallel.NewTable(p.Degree, counts)
	chunks := len(p.Table[0])
	rounds := max(1, p.Micros/int(p.Degree))
	switch looped := isLooped(p.Schedule); {
	case p.IsV() && chunks != 2:
		return where.Inputf("the schedule %s has two stages on a rank, and this model is cut into %d a rank",
			p.Schedule, chunks).WithHint("cut it into two stages a rank, or take Interleaved1F1B")
	case looped && chunks < 2:
		return where.Inputf("the schedule %s has several stages on a rank, and this model is cut into one a rank",
			p.Schedule).WithHint("cut it into more stages, or take 1F1B")
	case !looped && chunks > 1:
		return where.Inputf("the schedule %s has one stage on a rank, and this model is cut into %d a rank", p.Schedule,
			chunks).WithHint("cut it into fewer stages, or take Interleaved1F1B")
	case p.Micros > mostMicros:
		return where.Inputf("a pipeline of %d micro batches in a step is not planned, and at most %d are", p.Micros,
			mostMicros).WithHint("make the micro batches larger, or the batch smaller")
	case p.Schedule == "1F1B" && p.Micros < int(p.Degree) && j.DeepSpeed == nil:
		return where.Inputf("1F1B needs at least as many micro batches as stages, %d, and a step has %d", p.Degree,
			p.Micros).WithHint("make the batch larger or its micro batches smaller, or give --grad-accum beside " +
			"--pipeline-parallel")
	case p.Schedule == "DualPipeV" && p.Micros < 2*int(p.Degree):
		return where.Inputf("DualPipeV needs at least as many micro batches as stages, %d, and a step has %d",
			2*p.Degree, p.Micros).WithHint("make the batch larger or its micro batches smaller")
	case strings.HasPrefix(p.Schedule, "Interleaved") && p.Micros%rounds != 0:
		return where.Inputf("%s cannot divide %d micro batches into %d rounds", p.Schedule, p.Micros, rounds).
			WithHint(fmt.Sprintf("give a multiple of %d micro batches", p.Degree))
	}
	if p.IsV() {
		p.Table = parallel.NewVee(p.Degree, counts)
	}
	j.Pipeline = p
	return nil
}

// UnderWay returns how many micro batches a stage has between their passes at most, counted in full stages: of a stage
// with two chunks, one in one of them is a half.
func (p *Pipeline) UnderWay(stage int64) float64 {
	most, now := 0, 0
	for _, pass := range p.Passes(stage, p.Simulated()) {
		now += pass.Begun()
		most = max(most, now)
	}
	return float64(most) / float64(len(p.Table[stage]))
}

// Simulated returns how many micro batches show what a stage holds. All but GPipe and LoopedBFS repeat themselves once
// all stages have work.
func (p *Pipeline) Simulated() int {
	chunks, enough := len(p.Table[0]), p.Micros
	switch p.Schedule {
	case "1F1B":
		enough = int(p.Degree) + 2
	case "ZBVZeroBubble", "DualPipeV":
		enough = 4 * int(p.Degree)
	case "Interleaved1F1B", "InterleavedZeroBubble":
		group := p.group()
		enough = (2*chunks*group + 2*int(p.Degree) + group - 1) / group * group
	}
	return min(p.Micros, enough)
}

// askedPipeline returns the pipeline of the flags or of a file, or nil.
func (r *resolver) askedPipeline() *recipe.Pipeline {
	if r.PipelineParallel != 0 {
		schedule := r.PipelineSchedule
		if schedule == "" {
			schedule = "1F1B"
		}
		return &recipe.Pipeline{Degree: r.PipelineParallel, Schedule: schedule, LayersLess: [2]int{1, 1}}
	}
	if f := r.Inputs.framework; f != nil {
		return f.Pipeline
	}
	return nil
}

// pipelineContradictions refuses what a pipeline is not planned with.
func (r *resolver) pipelineContradictions(p *recipe.Pipeline) error {
	j := r.job
	if err := refuse(r.againstPipelineEngine(p.Schedule)...); err != nil {
		return err
	}
	tied := slices.ContainsFunc(j.Model.Parameters, func(p model.Parameter) bool { return p.TiedTo != "" })
	return refuse(
		contradiction{p.Degree < 1, fmt.Sprintf("--pipeline-parallel is %d, expected 1 or more", p.Degree), ""},
		contradiction{!slices.Contains(PipelineSchedules, p.Schedule), fmt.Sprintf("the pipeline schedule %q is not "+
			"planned yet, expected %s", p.Schedule, fault.OneOf(PipelineSchedules...)), ""},
		contradiction{!j.Model.IsCuttable(), fmt.Sprintf("plimsoll does not know where %s is cut into pipeline stages",
			j.Model.Name), "plimsoll cuts models that consist of one stack of blocks"},
		contradiction{tied && j.DeepSpeed == nil, fmt.Sprintf("%s uses its embedding in the head again, so a pipeline "+
			"cannot have them in different stages", j.Model.Name), "torchtitan refuses it, too"},
		contradiction{j.OnCPU, "a pipeline on CPUs is not planned", ""},
		contradiction{j.StepsInBackward, "a pipeline whose optimizer steps in the backward pass is not planned yet",
			""},
	)
}

// besidePipeline refuses what else a pipeline is not planned with. It runs when all other settings are decided.
func (r *resolver) besidePipeline() error {
	j := r.job
	if j.Pipeline == nil {
		return nil
	}
	return refuse(
		contradiction{j.Answers != nil || j.Reference != nil, "a pipeline with a reference model is not planned yet",
			""},
		contradiction{j.DeepSpeed != nil && j.Parallel.Tensor*j.Parallel.Context*j.Parallel.Expert > 1, "DeepSpeed's " +
			"pipeline engine with tensor, sequence or expert parallelism is not planned yet", ""},
		contradiction{j.Offload != nil, "states that come from the host are not planned with a pipeline yet", ""},
		contradiction{j.FSDP != nil && j.FSDP.Version == 1, "a pipeline whose stages FSDP1 shards is not planned yet",
			"PyTorch's pipelines go with FSDP2"},
		contradiction{j.OffloadActivations != nil, "a pipeline with activations on the host is not planned yet", ""},
	)
}

// besideDivided refuses what PyTorch cannot do in a backward pass of two halves, and what is not planned with one.
func (r *resolver) besideDivided() error {
	j := r.job
	if j.Pipeline == nil || !j.Pipeline.Divides() {
		return nil
	}
	name := j.Pipeline.Schedule
	takes := "take Interleaved1F1B"
	return refuse(
		contradiction{j.Recompute != nil && j.Recompute.Selective > 0, fmt.Sprintf("PyTorch's selective checkpoints "+
			"allow one backward pass, and %s divides it into two (\"Trying to backward an extra time\")", name),
			"recompute whole blocks or nothing, or " + takes},
		contradiction{j.Recompute != nil && j.Recompute.Reentrant, fmt.Sprintf("PyTorch refuses reentrant checkpoints "+
			"in %s, which calls torch.autograd.grad", name), "set use_reentrant to false, or " + takes},
		contradiction{j.TilesMLP != nil, fmt.Sprintf("PyTorch refuses tiled feed-forward networks in %s, which calls "+
			"torch.autograd.grad: their checkpoints are reentrant", name), takes},
		contradiction{j.Compile, fmt.Sprintf("PyTorch refuses compiled stages in %s", name), "leave out the " +
			"compilation, or " + takes},
		contradiction{j.FSDP == nil && j.World > int(j.Pipeline.Degree), fmt.Sprintf("%s with DistributedDataParallel "+
			"is not planned: its hooks see no gradient that the half for the weights makes", name), "take FSDP2"},
		contradiction{j.Adapter != nil || j.Quantization != nil, fmt.Sprintf("%s with adapters or quantized weights "+
			"is not planned yet", name), takes},
	)
}

// pipelineMicros divides the batch of a rank into the micro batches of the pipeline.
func (r *resolver) pipelineMicros(p *Pipeline, asked *recipe.Pipeline) error {
	j := r.job
	if asked.MicroBatch == 0 { // of flags: the passes between two optimizer steps are those of a pipeline
		p.Micros, j.Accumulation = j.Accumulation, 1
		return nil
	}
	all, each := int(j.MicroBatch), asked.MicroBatch
	if r.MicroBatch > 0 { // flags say micro batches of the pipeline
		each = r.MicroBatch
		if t := r.training; t != nil {
			all = t.MicroBatch
		}
		if r.Accumulation > 0 {
			all, j.Accumulation = each*r.Accumulation, 1
		}
	}
	if all%each != 0 {
		return asked.Place.Inputf("a batch of %d sequences cannot be divided into micro batches of %d", all, each).
			WithHint("change one of the two")
	}
	p.Micros, j.MicroBatch, j.DividesBatch = all/each, int64(each), r.MicroBatch == 0
	return nil
}

// layersOfStages returns the number of blocks of each stage, rank by rank: _generate_llm_fqn_per_model_part and
// _get_pipeline_metadata of torchtitan (torchtitan/distributed/pipeline_parallel.py).
func layersOfStages(p *recipe.Pipeline, layers int) ([]int64, error) {
	if p.Layers != nil {
		sum := 0
		counts := make([]int64, len(p.Layers))
		for i, n := range p.Layers {
			sum, counts[i] = sum+n, int64(n)
		}
		if sum != layers || len(counts)%p.Degree != 0 {
			return nil, fmt.Errorf("the %d parts of the model have %d layers, expected %d layers in a multiple of %d "+
				"parts", len(counts), sum, layers, p.Degree)
		}
		return counts, nil
	}
	first, last := p.LayersLess[0], p.LayersLess[1]
	all, stages := layers+first+last, p.Degree
	switch {
	case p.LayersEach > 0:
		stages = int(math.Ceil(float64(all) / float64(p.LayersEach)))
	case isLooped(p.Schedule):
		stages = 2 * p.Degree
	}
	each, more := all/stages, all%stages
	if stages%p.Degree != 0 || first > each || last > each || each == 0 {
		return nil, fmt.Errorf("%d layers cannot be cut into %d stages on %d ranks, where the first has %d fewer and "+
			"the last %d fewer", layers, stages, p.Degree, first, last)
	}
	counts := make([]int64, stages)
	for i := range counts {
		counts[i] = int64(each)
		if i < more {
			counts[i]++
		}
	}
	counts[0] -= int64(first)
	counts[stages-1] -= int64(last)
	return counts, nil
}
