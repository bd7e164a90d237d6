//go:build linux

package simulation

import (
	"fmt"
	"path"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/tier"
)

// flipBit flips a bit of an arena or of a file, and says which. It leaves out what docs/service.md lists as bytes
// without sums: what the trainer maps, undo logs, and sums of squares.
func (j *job) flipBit() string {
	paths := j.disk.Paths()
	if len(paths) > 0 && j.chance(0.5) {
		name := paths[j.random.IntN(len(paths))]
		bit := j.random.Int64N(8 * j.disk.Size(name))
		j.disk.Flip(name, bit)
		return fmt.Sprintf("bit %d of %s", bit, name)
	}
	r := j.ranks[j.random.IntN(len(j.ranks))]
	if r.shard == nil {
		return "nothing: there is no memory"
	}
	type part struct {
		arena *arena.Arena
		shard.Range
	}
	var parts []part
	for _, a := range r.shard.Arenas() {
		for _, summed := range r.summed(a) {
			parts = append(parts, part{a, summed})
		}
	}
	chosen := parts[j.random.IntN(len(parts))]
	bit := j.random.Int64N(8 * chosen.Count)
	chosen.arena.Bytes()[chosen.First+bit/8] ^= 1 << (bit % 8)
	return fmt.Sprintf("bit %d of byte %d of %s", bit%8, chosen.First+bit/8, chosen.arena.Name())
}

// summed returns the ranges of an arena whose bits are verified.
func (r *rank) summed(a *arena.Arena) []shard.Range {
	config := r.shard.Config()
	all := shard.Range{Count: int64(a.Size())}
	mapped := []ledger.Component{ledger.Gradients, ledger.GradientNormSums, ledger.Parameters}
	if r.shard.Arena(ledger.Parameters) == nil {
		mapped = append(mapped, ledger.MasterWeights)
	}
	switch component := ledger.Component(path.Base(a.Name())); {
	case slices.Contains(mapped, component):
		return nil
	case component == ledger.StepJournal:
		undo := 0
		for section := range config.Sections() {
			undo = max(undo, config.FormatOf(section).UndoBytes())
		}
		all.Count -= int64(min(config.Chunks, 256) * (64 + undo))
	case component == ledger.TierWindow:
		return windowStates(config.TierPlan(), config.Tier.Window)
	}
	return []shard.Range{all}
}

// windowStates returns where the state of chunks is in a window, without their parameters: in the lanes, and then that
// of chunks that are kept.
func windowStates(plan tier.Plan, window engine.Window) (states []shard.Range) {
	var widest [tier.Parts]int64
	for chunk := range plan.Chunks {
		for part, size := range plan.Sizes(chunk) {
			widest[part] = max(widest[part], size)
		}
	}
	first := plan.AreaBytes()
	for range window.Lanes + 1 {
		states = append(states, shard.Range{First: first, Count: widest[tier.State]})
		first += widest[tier.State] + widest[tier.Parameters]
	}
	for range window.Kept {
		states = append(states, shard.Range{First: first, Count: widest[tier.State]})
		first += widest[tier.State]
	}
	return states
}
