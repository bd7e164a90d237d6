package fit

import (
	"fmt"
	"maps"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// degrees are numbers of ranks that share the model and its sequences, as variants have them. 0 leaves a degree to the
// job.
type degrees struct {
	tensor, context, pipeline int
	schedule                  string
}

// name says the degrees above 1.
func (d degrees) name() string {
	var parts []string
	for _, part := range []struct {
		name   string
		degree int
	}{{"tensor", d.tensor}, {"context", d.context}, {"pipeline", d.pipeline}} {
		if part.degree > 1 {
			parts = append(parts, fmt.Sprintf("%s %d", part.name, part.degree))
		}
	}
	if d.pipeline > 1 {
		parts = append(parts, d.schedule)
	}
	if len(parts) == 0 {
		return ""
	}
	return ", " + strings.Join(parts, ", ")
}

// shares reports whether ranks share the model or its sequences.
func (d degrees) shares() bool { return max(d.tensor, d.context, d.pipeline) > 1 }

// Degrees that are tried. Ranks that share the width of blocks are of one node, as they exchange activations in every
// block.
var triedDegrees = []int{1, 2, 4, 8}

// mostStages is the largest number of pipeline stages that is tried.
const mostStages = 32

// degreesOf lists the degrees for so many ranks.
func degreesOf(ranks, inNode int) []degrees {
	var list []degrees
	for _, tensor := range triedDegrees {
		for _, context := range triedDegrees {
			for pipeline := 1; pipeline <= mostStages; pipeline *= 2 {
				if tensor > inNode || ranks%(tensor*context*pipeline) != 0 {
					continue
				}
				d := degrees{tensor: tensor, context: context, pipeline: pipeline}
				if pipeline == 1 {
					list = append(list, d)
					continue
				}
				for _, d.schedule = range []string{"1F1B", "Interleaved1F1B"} {
					list = append(list, d)
				}
			}
		}
	}
	return list
}

// withDegrees adds variants whose ranks share the model, to those that FSDP2 shards. Degrees that are given stay.
func (s *torchSearch) withDegrees(engines []variant, ranks, inNode int) ([]variant, error) {
	sharing := degreesOf(ranks, inNode)
	of, searched, err := s.degreesInFile()
	if err != nil {
		return nil, err
	}
	q := &s.Request
	given := q.TensorParallel > 0 || q.ContextParallel > 0 || q.PipelineParallel > 0 || q.ExpertParallel > 0
	if given || !searched || len(sharing) == 1 {
		return engines, nil
	}
	var list []variant
	for _, v := range engines {
		if v.overrides.FSDP != "2" && of == nil || v.overrides.FSDPOffload || v.overrides.States != nil {
			list = append(list, v)
			continue
		}
		for _, d := range sharing {
			with := v
			with.name += d.name()
			o := &with.overrides
			if of == nil {
				o.TensorParallel, o.ContextParallel, o.PipelineParallel = d.tensor, d.context, d.pipeline
				o.PipelineSchedule = d.schedule
			} else if with.inputs = s.edited(d); with.inputs == nil {
				continue
			}
			with.degrees = d
			list = append(list, with)
		}
	}
	return list, nil
}

// degreesInFile returns a file of the user that can say degrees, or nil, and whether degrees are searched: files that
// cannot say them decide that there are none.
func (s *torchSearch) degreesInFile() (*recipe.Settings, bool, error) {
	for _, file := range s.base.Files {
		of, err := recipe.LoadSettings(file, s.Request.Texts)
		if err != nil {
			return nil, false, err
		}
		if of != nil && of.Key(recipe.PipelineDegree) != "" {
			return of, true, nil
		}
	}
	said, err := s.saysSettings(s.base)
	return nil, !said && s.base.Model.Network.Opaque == nil, err
}

// settings returns what a file says of the degrees. With a pipeline the batch of a rank is that of all micro batches.
func (d degrees) settings(micro, accumulation int) []amend.Setting {
	list := []amend.Setting{{Name: recipe.TensorDegree, To: d.tensor}, {Name: recipe.ContextDegree, To: d.context},
		{Name: recipe.PipelineDegree, To: d.pipeline}, {Name: recipe.ShardDegree, To: -1}}
	if d.pipeline > 1 {
		list = append(list, amend.Setting{Name: recipe.PipelineSchedule, To: d.schedule},
			amend.Setting{Name: recipe.PipelineMicroBatch, To: micro},
			amend.Setting{Name: recipe.MicroBatch, To: micro * accumulation})
	}
	return list
}

// edited reads the job again with other degrees in the user's files. It returns nil for degrees that are refused, and
// for files that cannot be edited.
func (s *torchSearch) edited(d degrees) *job.Inputs {
	made, err := amend.Apply(s.Request.Texts, s.base.Files, d.settings(1, 1))
	if err != nil {
		s.leave(err)
		return nil
	}
	q := s.Request
	q.Texts = files.Texts{}
	maps.Copy(q.Texts, s.Request.Texts)
	maps.Copy(q.Texts, made.Texts)
	in, err := job.Read(q)
	if err != nil {
		s.leave(err)
		return nil
	}
	return in
}
