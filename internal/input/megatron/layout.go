package megatron

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"plimsoll/internal/input/parallel"
)

var (
	repeatedParts  = regexp.MustCompile(`\(([^)]+)\)\*(\d+)`)
	repeatedLetter = regexp.MustCompile(`(.)\*(\d+)`)
)

// layout deals the layers out as --pipeline-model-parallel-layout says (pipeline_parallel_layer_layout.py): a letter
// for the embedding (E), a layer (t), a layer of multi-token prediction (m) and the loss (L), and | between stages.
func (j *Job) layout() error {
	const key = "pipeline_model_parallel_layout"
	text := strings.ReplaceAll(j.Layout, ",", "")
	for _, pattern := range []*regexp.Regexp{repeatedParts, repeatedLetter} {
		text = pattern.ReplaceAllStringFunc(text, func(found string) string {
			part := pattern.FindStringSubmatch(found)
			times, err := strconv.Atoi(part[2])
			if err != nil || times*len(part[1]) > 1<<16 {
				return found
			}
			return strings.Repeat(part[1], times)
		})
	}
	if wrong := strings.Trim(text, "Etm|L"); wrong != "" {
		return j.Fault(key, fmt.Sprintf("has %.20q", wrong), "its letters are E, t, m and L, with | between stages")
	}
	chunks, stages := strings.Split(text, "|"), j.Degrees.Pipeline
	last := chunks[len(chunks)-1]
	layers, predictions := strings.Count(text, "t"), strings.Count(text, "m")
	for _, rule := range []struct {
		broken       bool
		what, reason string
	}{
		{j.VirtualLayers > 0 || j.FirstLayers > 0 || j.LastLayers > 0 || j.CountsEmbed || j.CountsLoss,
			"is given beside other arguments for the layers of stages", "Megatron-LM accepts one of the two"},
		{int64(len(chunks))%stages != 0, fmt.Sprintf("has %d parts, no multiple of %d pipeline stages", len(chunks),
			stages), "Megatron-LM asserts this"},
		// A configuration of megatron-core may say both (__post_init__ of TransformerConfig), as recipes do.
		{j.VirtualStages > 0 && j.VirtualStages*stages != int64(len(chunks)), fmt.Sprintf("has %d parts for %d "+
			"pipeline stages, but there are %d virtual stages on each", len(chunks), stages, j.VirtualStages),
			"megatron-core asserts that the layout has as many"},
		{!strings.HasPrefix(text, "E") || !strings.HasSuffix(text, "L") || strings.Count(text, "E") != 1 ||
			strings.Count(text, "L") != 1, "does not begin with E and end with L", "Megatron-LM asserts this"},
		{layers != len(j.Layers), fmt.Sprintf("has %d layers, but the model has %d", layers, len(j.Layers)),
			"Megatron-LM asserts this"},
		{int64(predictions) != j.Predictions, fmt.Sprintf("has %d layers of multi-token prediction, but "+
			"--mtp-num-layers is %d", predictions, j.Predictions), "Megatron-LM asserts this"},
		{strings.Count(last, "m") != predictions, "has multi-token prediction on another stage than the loss",
			"this is not planned yet"},
	} {
		if rule.broken {
			return j.Fault(key, rule.what, rule.reason)
		}
	}
	counts := make([]int64, len(chunks))
	for i, part := range chunks {
		counts[i] = int64(strings.Count(part, "t"))
	}
	j.Degrees.Virtual = int64(len(chunks)) / stages
	j.Table = parallel.NewTable(stages, counts)
	return nil
}
