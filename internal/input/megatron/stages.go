package megatron

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"plimsoll/internal/input/parallel"
)

// stages deals the layers out to pipeline stages (transformer_block.py, get_num_layers_to_build).
func (j *Job) stages() error {
	j.layers()
	if len(j.Layers) == 0 {
		return nil
	}
	stages := j.Degrees.Pipeline
	layers := int64(len(j.Layers))
	if j.Kind == T5 && stages > 1 {
		return j.Fault("pipeline_model_parallel_size", fmt.Sprintf("is %d, but a T5 has one stage", stages),
			"Megatron-LM has pipeline stages for decoders only")
	}
	if j.Layout != "" {
		return j.layout()
	}
	if j.FirstLayers > 0 || j.LastLayers > 0 {
		return j.unevenStages(stages, layers)
	}
	if j.CountsEmbed {
		layers++
	}
	if j.CountsLoss {
		layers++
	}
	if layers%stages != 0 {
		return j.Fault("num_layers", fmt.Sprintf("is %d, no multiple of %d pipeline stages", layers, stages),
			"Megatron-LM asserts this: give --decoder-first-pipeline-num-layers or "+
				"--decoder-last-pipeline-num-layers")
	}
	if err := j.virtual(layers / stages); err != nil {
		return err
	}
	counts := make([]int64, stages*j.Degrees.Virtual)
	for i := range counts {
		counts[i] = layers / stages / j.Degrees.Virtual
	}
	if j.CountsEmbed {
		counts[0]--
	}
	if j.CountsLoss {
		counts[len(counts)-1]--
	}
	j.Table = parallel.NewTable(stages, counts)
	return nil
}

// virtual decides the number of chunks of a stage with so many layers.
func (j *Job) virtual(layers int64) error {
	virtual, key := int64(1), "num_virtual_stages_per_pipeline_rank"
	switch {
	case j.VirtualStages > 0 && j.VirtualLayers > 0:
		return j.Fault("num_layers_per_virtual_pipeline_stage",
			"is given beside --num-virtual-stages-per-pipeline-rank", "Megatron-LM accepts one of the two")
	case j.VirtualStages > 0:
		virtual = j.VirtualStages
	case j.VirtualLayers > 0:
		key = "num_layers_per_virtual_pipeline_stage"
		if layers%j.VirtualLayers != 0 {
			return j.Fault(key, fmt.Sprintf("is %d, but a pipeline stage has %d layers", j.VirtualLayers, layers),
				"Megatron-LM asserts that it divides the layers of a stage")
		}
		virtual = layers / j.VirtualLayers
	}
	if virtual > 1 && j.Degrees.Pipeline == 1 {
		return j.Fault(key, "is given without pipeline stages",
			"Megatron-LM asserts that interleaving has more than one stage")
	}
	if layers%virtual != 0 {
		return j.Fault(key, fmt.Sprintf("is %d, but a pipeline stage has %d layers", virtual, layers),
			"Megatron-LM asserts that it divides the layers of a stage")
	}
	j.Degrees.Virtual = virtual
	return nil
}

// unevenStages gives the first and the last stage as many layers as the arguments say.
func (j *Job) unevenStages(stages, layers int64) error {
	rest, between := layers, stages
	if j.FirstLayers > 0 {
		rest, between = rest-j.FirstLayers, between-1
	}
	if j.LastLayers > 0 {
		rest, between = rest-j.LastLayers, between-1
	}
	if stages == 1 || rest < 0 || between > 0 && rest%between != 0 || between == 0 && rest > 0 {
		return j.Fault("num_layers", fmt.Sprintf("is %d, and %d layers are left for %d stages between the first "+
			"and the last", layers, rest, between),
			"Megatron-LM asserts that these stages have the same number of layers")
	}
	if j.VirtualLayers > 0 {
		return j.Fault("num_layers_per_virtual_pipeline_stage", "is given with a first or last stage of its own size",
			"give --num-virtual-stages-per-pipeline-rank")
	}
	virtual := max(j.VirtualStages, 1)
	j.Degrees.Virtual = virtual
	counts := make([]int64, stages*virtual)
	for i := range counts {
		stage := int64(i) % stages
		n := int64(0)
		switch {
		case stage == 0 && j.FirstLayers > 0:
			n = j.FirstLayers
		case stage == stages-1 && j.LastLayers > 0:
			n = j.LastLayers
		default:
			n = rest / between
		}
		if n%virtual != 0 {
			return j.Fault("num_virtual_stages_per_pipeline_rank", fmt.Sprintf("is %d, but a stage has %d layers",
				virtual, n), "Megatron-LM asserts that it divides the layers of every stage")
		}
		counts[i] = n / virtual
	}
	j.Table = parallel.NewTable(stages, counts)
	return nil
}

// layers lists the layers of the model.
func (j *Job) layers() {
	if j.Kind == T5 {
		for range j.EncoderLayers {
			j.Layers = append(j.Layers, Layer{Bidirected: true, Encoder: true})
		}
		for range j.DecoderLayers {
			j.Layers = append(j.Layers, Layer{Cross: true})
		}
		return
	}
	for i := range j.Megatron.Layers {
		j.Layers = append(j.Layers, Layer{Bidirected: j.Kind == BERT, Mixture: j.Experts > 0 && j.isMixture(i)})
	}
}

var (
	product  = regexp.MustCompile(`\[([\d, ]+)\]\s*\*\s*(\d+)`)
	literal  = regexp.MustCompile(`^\[[\d, ]+\]$`)
	patterns = regexp.MustCompile(`^(?:\d*|\[[\d, ]+\]|\[[\d, ]+\]\s*\*\s*\d+(?:\s*\+\s*\[[\d, ]+\]\s*\*\s*\d+)*)$`)
)

// frequency returns which layers have experts as the argument says it, without brackets around it.
func (j *Job) frequency() string {
	return strings.TrimSpace(strings.Trim(strings.TrimSpace(j.LayerFrequency), "()"))
}

// isMixture reports whether a layer has experts: one of so many layers, or by a pattern such as ([0]*3+[1]*11).
func (j *Job) isMixture(layer int64) bool {
	frequency := j.frequency()
	if frequency == "" {
		return true
	}
	if n, err := strconv.ParseInt(frequency, 10, 64); err == nil {
		return layer%max(n, 1) == 0
	}
	var pattern []string
	if literal.MatchString(frequency) {
		frequency += "*1"
	}
	for _, part := range product.FindAllStringSubmatch(frequency, -1) {
		times, err := strconv.Atoi(part[2])
		if err != nil || times > 10_000 {
			return true
		}
		for range times {
			pattern = append(pattern, strings.FieldsFunc(part[1], func(r rune) bool { return r == ',' || r == ' ' })...)
		}
	}
	return layer < int64(len(pattern)) && pattern[layer] == "1"
}

// OnStage returns the layers of a chunk.
func (j *Job) OnStage(c parallel.Chunk) []Layer { return j.Layers[c.First : c.First+c.Layers] }
