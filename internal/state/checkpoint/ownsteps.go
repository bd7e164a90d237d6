package checkpoint

import (
	"maps"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/shard"
)

// Parameters that some steps have left alone, because they had no gradients, have had fewer steps than the state.

// ownSteps returns the steps that parameters of a shard have had, where they are not those of the state.
func ownSteps(s Shard) map[string]int64 {
	own, last := map[string]int64{}, s.State.Steps()
	had := s.State.OwnSteps()
	for _, p := range s.Pieces {
		if p.Count == 0 {
			continue // and is no section
		}
		if had[0] != last {
			own[p.Name] = had[0]
		}
		had = had[1:]
	}
	return own
}

// setSteps sets the steps of a shard that was loaded.
func (c *Checkpoint) setSteps(s Shard) error {
	s.State.SetSteps(c.step)
	if len(c.ownSteps) == 0 {
		return nil
	}
	var had []int64
	for _, p := range s.Pieces {
		if p.Count > 0 {
			had = append(had, c.StepOf(p.Name))
		}
	}
	return s.State.SetOwnSteps(0, had)
}

// StepOf returns how many steps a parameter has had.
func (c *Checkpoint) StepOf(name string) int64 {
	if had, ok := c.ownSteps[name]; ok {
		return had
	}
	return c.step
}

// ownStepsOf returns what a checkpoint has of the steps of pieces.
func ownStepsOf(all map[string]int64, pieces []shard.Piece) map[string]int64 {
	own := map[string]int64{}
	for _, p := range pieces {
		if had, ok := all[p.Name]; ok {
			own[p.Name] = had
		}
	}
	return own
}

// addSteps adds the steps of the parameters of a file, which must be those of other files.
func (c *Checkpoint) addSteps(f *file) error {
	for _, p := range f.layout.pieces {
		had, ok := f.manifest.OwnSteps[p.Name]
		if !ok {
			had = c.step
		}
		if known := c.parameters[p.Name]; len(known.sources) > 1 && c.StepOf(p.Name) != had {
			return Broken(f.path, "parameter %q has had %d steps here, and %d in an earlier file", p.Name, had,
				c.StepOf(p.Name))
		}
		if ok {
			c.ownSteps[p.Name] = had
		}
	}
	return nil
}

// OneStep refuses a state whose parameters have had different numbers of steps, for a format that has one for all.
func (c *Checkpoint) OneStep(format string) error {
	if len(c.ownSteps) == 0 {
		return nil
	}
	name := slices.Min(slices.Collect(maps.Keys(c.ownSteps)))
	return fault.File(c.path).Inputf("parameter %q has had %d steps, and the state %d, as it had no gradient in the "+
		"others: checkpoints of %s have one number of steps for all parameters", name, c.ownSteps[name], c.step,
		format).
		WithHint("use --to torch or --to dcp, which have one for each")
}
