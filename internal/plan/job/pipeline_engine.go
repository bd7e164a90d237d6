package job

import (
	"fmt"
	"math"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
)

// againstPipelineEngine returns what DeepSpeed's pipeline engine refuses, and what is not planned with it.
func (r *resolver) againstPipelineEngine(schedule string) []contradiction {
	j, d := r.job, r.job.DeepSpeed
	if d == nil {
		return []contradiction{{r.PipelinePartition != "", "--pipeline-partition is for DeepSpeed's pipeline engine, " +
			"but the job has no DeepSpeed configuration", "leave it out, or add --deepspeed"}}
	}
	return []contradiction{
		{d.ZeROStage > 1, fmt.Sprintf("the configuration has ZeRO-%d, but DeepSpeed stops: \"ZeRO-2 and ZeRO-3 are "+
			"incompatible with pipeline parallelism\"", d.ZeROStage), "use \"stage\": 1"},
		{schedule != "1F1B", fmt.Sprintf("--pipeline-schedule is %s, but DeepSpeed's pipeline engine has a schedule "+
			"of its own, which is 1F1B", schedule), "leave --pipeline-schedule out"},
		{r.training != nil, "the job has TrainingArguments, but transformers' Trainer does not run DeepSpeed's " +
			"pipeline engine", "leave --training-args out"},
		{d.OffloadOptimizer.Device != "none" || d.ZenFlow != nil,
			"DeepSpeed's pipeline engine with an offloaded optimizer is not planned yet", ""},
		{j.Adapter != nil || j.Quantization != nil,
			"DeepSpeed's pipeline engine with an adapter or a quantized model is not planned yet", ""},
		{d.PipelineCheckpoints > 1, fmt.Sprintf("activation_checkpoint_interval is %d: checkpoints of several layers "+
			"are not planned yet", d.PipelineCheckpoints), "set it to 1, which frees more"},
	}
}

// layersOfModule returns the number of blocks of each stage as PipelineModule cuts its layers
// (deepspeed/runtime/pipe/module.py, _partition_layers): the embedding, the blocks, and the last norm with the head.
func (r *resolver) layersOfModule(stages int) ([]int64, error) {
	blocks := len(r.job.Model.Network.Blocks())
	weights := make([]float64, blocks+2)
	method := r.PipelinePartition
	balances := true
	switch {
	case method == "", method == "parameters":
		for i := range weights {
			weights[i] = r.elementsOfLayer(i, blocks)
		}
	case strings.HasPrefix(method, "type:"):
		for i := range blocks {
			weights[1+i] = 1
		}
	case method == "uniform":
		balances = false
	default:
		return nil, fault.Inputf("--pipeline-partition is %q, expected a partition_method of PipelineModule: %s",
			method, fault.OneOf("parameters", "uniform", "type:REGEX"))
	}
	release := r.job.Versions.DeepSpeed
	if old := !release.IsZero() && !release.AtLeast(0, 12, 5); balances && old && len(weights) > stages {
		return nil, fault.Inputf("DeepSpeed %v does not balance layers as later releases do (#4312), which is not "+
			"planned", release).WithHint("give --pipeline-partition uniform, or a later --deepspeed-version")
	}
	parts := partitionUniform(len(weights), stages)
	if balances && len(weights) > stages {
		parts = partitionBalanced(weights, stages)
	}
	if len(weights) < stages {
		return nil, fault.Inputf("%d layers cannot be cut into %d stages", len(weights), stages)
	}
	if method == "" {
		r.assume("stages that PipelineModule balances by parameters: --pipeline-partition was not given")
	}
	r.assume("a PipelineModule of the embedding, the blocks, and the last norm with the head, each a layer that " +
		"hands on hidden states")
	counts := make([]int64, stages)
	for i := range counts {
		counts[i] = int64(parts[i+1] - parts[i])
	}
	counts[0]--
	counts[stages-1]--
	return counts, nil
}

// elementsOfLayer returns the number of trained elements of a layer of a PipelineModule.
func (r *resolver) elementsOfLayer(layer, blocks int) (sum float64) {
	segment := model.Segment{First: layer - 1, Blocks: 1}
	switch layer {
	case 0:
		segment = model.Segment{Embedding: true}
	case blocks + 1:
		segment = model.Segment{First: blocks, Head: true}
	}
	of, _ := r.job.Model.Segments([]model.Segment{segment})
	for _, p := range of.Parameters {
		if !p.Frozen && p.TiedTo == "" && r.job.Unfrozen.Has(p.Name) {
			sum += float64(p.Elements())
		}
	}
	return sum
}

// partitionUniform is partition_uniform of deepspeed/runtime/utils.py.
func partitionUniform(items, parts int) []int {
	bounds := make([]int, parts+1)
	each, more := items/parts, items%parts
	for i := range bounds {
		bounds[i] = i*each + min(i, more)
	}
	return bounds
}

// partitionBalanced is partition_balanced of deepspeed/runtime/utils.py since 0.12.5: the difference between the
// heaviest and the lightest part is least, and of equal cuts the latest wins.
func partitionBalanced(weights []float64, parts int) []int {
	type best struct {
		heaviest, lightest, cost float64
		from                     int
	}
	n := len(weights)
	sums := make([]float64, n+1)
	table := make([][]best, n+1)
	for i := range table {
		if i > 0 {
			sums[i] = sums[i-1] + weights[i-1]
		}
		table[i] = make([]best, parts+1)
		for j := range table[i] {
			table[i][j] = best{math.Inf(1), math.Inf(1), math.Inf(1), 0}
		}
	}
	table[0][0].heaviest, table[0][0].cost = 0, 0
	for i := 1; i <= n; i++ {
		for j := 1; j <= min(i, parts); j++ {
			for k := range i {
				before, last := table[k][j-1], sums[i]-sums[k]
				b := best{heaviest: max(before.heaviest, last), lightest: min(before.lightest, last), from: k}
				if b.cost = b.heaviest - b.lightest; table[i][j].cost >= b.cost {
					table[i][j] = b
				}
			}
		}
	}
	bounds := make([]int, parts+1)
	bounds[parts] = n
	for j := parts; j > 0; j-- {
		bounds[j-1] = table[bounds[j]][j].from
	}
	return bounds
}
