package megatron

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Program is what trains these jobs.
const Program = "Megatron-LM"

// OptimizerName describes the optimizer.
func (j *Job) OptimizerName() string {
	if j.Distributed {
		return j.Optimizer + ", distributed"
	}
	return j.Optimizer
}

// RecomputeName describes what the backward pass recomputes.
func (j *Job) RecomputeName() string { return cmp.Or(j.Recompute, "none") }

// Recomputes reports whether selective recomputation has a module. Without a list it is the attention proper.
func (j *Job) Recomputes(module string) bool {
	if j.Recompute != "selective" {
		return false
	}
	if len(j.RecomputeModules) == 0 {
		return module == "core_attn"
	}
	return slices.Contains(strings.Fields(strings.Join(j.RecomputeModules, " ")), module)
}

// ParallelNames describes the degrees of parallelism above 1.
func (j *Job) ParallelNames() (names []string) {
	for _, d := range []struct {
		name string
		is   int64
	}{{"data parallel", j.Degrees.Data}, {"tensor parallel", j.Degrees.Tensor},
		{"pipeline parallel", j.Degrees.Pipeline}, {"chunks of a stage", j.Degrees.Virtual},
		{"context parallel", j.Degrees.Context}, {"expert parallel", j.Degrees.Expert}} {
		if d.is > 1 {
			names = append(names, fmt.Sprintf("%s %d", d.name, d.is))
		}
	}
	return names
}
