package report

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/state/engine"
)

// TierBytes is what a tier on disks takes and moves.
type TierBytes struct {
	Files  ledger.Bytes `json:"file_bytes"`
	Window ledger.Bytes `json:"window_bytes"`
	Lanes  int          `json:"lanes"` // of each rank: chunks that are read, updated or written at a time
	// Kept is the state that stays in the window from one step to the next. A step writes it, and does not read it.
	Kept ledger.Bytes `json:"kept_bytes"`
	// StepReads and StepWrites are what a step moves. The writes wear the disks.
	StepReads  ledger.Bytes `json:"step_read_bytes"`
	StepWrites ledger.Bytes `json:"step_written_bytes"`
}

func newTierBytes(b engine.TierBytes) TierBytes {
	return TierBytes{Files: b.Files, Window: b.Window, Lanes: b.Lanes, Kept: b.Kept, StepReads: b.StepReads,
		StepWrites: b.StepWrites}
}

// PlannedTier is the tier of a node.
type PlannedTier struct {
	Disks int `json:"disks"`
	TierBytes
}

func newPlannedTier(t *plan.Tier) *PlannedTier {
	if t == nil {
		return nil
	}
	return &PlannedTier{t.Disks, newTierBytes(t.TierBytes)}
}

// addTo adds the tier to facts, if there is one, and what a day of steps writes where their time is known.
func (t *PlannedTier) addTo(f *Facts, step *StepTime) {
	if t == nil {
		return
	}
	each := ""
	if step != nil && step.Refused == "" && step.Total.Expected > 0 {
		const day = 24 * 60 * 60
		each = fmt.Sprintf(", %v in a day of such steps",
			ledger.Bytes(float64(t.StepWrites)*day/step.Total.Expected))
	}
	t.TierBytes.addTo(f, "on "+counted(t.Disks, "disk")+" of each node", each)
}

func (b *TierBytes) addTo(f *Facts, place, each string) {
	stays := ""
	if b.Kept > 0 {
		stays = fmt.Sprintf(", and for %v of state that stays in memory", b.Kept)
	}
	f.add("tier", "%v of files %s; %v of memory, for %s at a time in each rank%s", b.Files, place, b.Window,
		counted(int64(b.Lanes), "chunk"), stays)
	f.add("wear", "a step reads %v from the disks and writes %v there%s", b.StepReads, b.StepWrites, each)
}
