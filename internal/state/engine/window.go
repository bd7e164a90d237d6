package engine

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/tier"
)

// Window is the memory of a tier. Its lanes hold chunks on their way, and what is left keeps chunks from one step to
// the next. A step verifies the state of those and writes it, and does not read it. A byte that is kept saves a byte of
// reading in each step, whichever stream it is of. So chunks are kept and not streams: all the memory is of use.
//
// The files hold what is kept, too. So which chunks are kept can change from one process to the next, and bits that
// flip in memory are mended from the files.
type Window struct {
	Lanes int // chunks that are read, updated and written at a time
	Kept  int // chunks whose state stays in memory
}

// WindowBytes returns the size of a window. One lane more is for what is read beside the passes. The index of the files
// is in memory, too.
func (c ShardConfig) WindowBytes(w Window) ledger.Bytes {
	_, sizes := c.partSizes()
	plan := tier.Plan{Chunks: c.Chunks, Sections: len(c.Sections()), Sums: c.Chunks * len(c.summed())}
	lanes := int64(w.Lanes+1) * (sizes[tier.State] + sizes[tier.Parameters])
	return ledger.Bytes(lanes + int64(w.Kept)*sizes[tier.State] + plan.AreaBytes())
}

// LeastWindow returns the size of the smallest window.
func (c ShardConfig) LeastWindow() ledger.Bytes { return c.WindowBytes(Window{Lanes: 1}) }

// WindowWithin returns the window of a size: as many lanes as help, and then chunks that are kept. It has no lane if
// there is no room for one.
func (c ShardConfig) WindowWithin(size ledger.Bytes) Window {
	_, sizes := c.partSizes()
	lane := ledger.Bytes(sizes[tier.State] + sizes[tier.Parameters])
	left := size - c.WindowBytes(Window{})
	w := Window{Lanes: int(max(0, min(mostLanes, left/lane)))}
	left -= lane * ledger.Bytes(w.Lanes)
	if w.Lanes > 0 && sizes[tier.State] > 0 {
		w.Kept = int(min(ledger.Bytes(c.Chunks), left/ledger.Bytes(sizes[tier.State])))
	}
	return w
}

// otherParts is how much of the memory of a rank is left to its other parts, at most: windows of some full of lanes.
const otherParts = 512 * ledger.MiB

// FirstWindow returns the window of a session whose rank has so much memory left. It leaves half to other parts of the
// rank, or what is enough for them, if it can. It has no lane if there is no room for one.
func (c ShardConfig) FirstWindow(left ledger.Bytes) Window {
	if w := c.WindowWithin(max(left/2, left-otherParts)); w.Lanes > 0 {
		return w
	}
	return c.WindowWithin(left)
}

// keptPlace returns the place of a chunk among those that are kept. They are spread over the order of a step, so that
// reads and writes overlap, and evenly over the disks: chunks that lie side by side on all disks are kept together.
func (c ShardConfig) keptPlace(unit int) (place int, kept bool) {
	files := max(1, len(c.Tier.Folders))
	rows := c.Chunks / files // a last row that is not full is never kept, unless all chunks are
	of := c.Tier.Kept / files
	switch {
	case c.Tier.Kept >= c.Chunks:
		return unit, true
	case unit/files >= rows:
		return 0, false
	}
	row := unit / files
	place = row * of / rows
	return place*files + unit%files, (row+1)*of/rows > place
}

// keptBytes returns the size of the state of all chunks that are kept.
func (c ShardConfig) keptBytes() (bytes ledger.Bytes) {
	sizes, _ := c.partSizes()
	for unit, size := range sizes {
		if _, kept := c.keptPlace(unit); kept {
			bytes += ledger.Bytes(size[tier.State])
		}
	}
	return bytes
}

// keptState is the state of a chunk that stays in the window.
type keptState struct {
	memory []byte
	// filled says that this process has read or written it: from then on only a flipped bit makes it differ from the
	// files.
	filled bool
}

// cutKept cuts the places of chunks that are kept off the window.
func (t *tiered) cutKept(window *[]byte) {
	c := t.shard.config
	_, sizes := c.partSizes()
	for range c.Tier.Kept {
		t.kept = append(t.kept, keptState{memory: cut(window, sizes[tier.State])})
	}
}

// keptOf returns the place in which a lane finds a chunk that is kept, or nil. What is read beside the passes is read
// from the files: a pass may be changing what is kept.
func (t *tiered) keptOf(l *lane, unit int) *keptState {
	if l == t.spare.lane {
		return nil
	}
	if place, kept := t.shard.config.keptPlace(unit); kept {
		return &t.kept[place]
	}
	return nil
}

// recall has memory hold what the files have of a chunk. It reads a chunk that was never here, and one of which a bit
// has flipped.
func (s *Shard) recall(kept *keptState, l *lane) error {
	recalled, err := s.tier.store.Recall(l.unit, tier.State, l.parts[tier.State])
	if err == nil && kept.filled && !recalled && s.config.Tier.Mended != nil {
		s.config.Tier.Mended(fmt.Sprintf("the state of chunk %d had changed in memory since step %d, and was read "+
			"from the files again", l.unit, s.Steps()))
	}
	kept.filled = err == nil
	return err
}
