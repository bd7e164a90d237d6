package simulate

import "plimsoll/internal/base/ledger"

// superOffloads reports whether a process steps sub-groups during the backward
// pass (runtime/superoffload).
func (e *deepSpeed) superOffloads() bool {
	return e.offloads() && e.recipe.OffloadOptimizer.SuperOffload
}

// superOffload allocates the pinned buffer that SuperOffload's process has from
// the start, for the gradients of a sub-group (superoffload_utils.py).
func (e *zero3) superOffload() {
	if !e.superOffloads() {
		return
	}
	var most int64
	for _, g := range e.subGroups {
		if !g.onGPU {
			most = max(most, g.flat.Elements)
		}
	}
	e.pinnedMemory.allocate(most*4, ledger.StagingBuffers, because("SuperOffload's process: gradients of the largest "+
		"sub-group x 4 B (superoffload_utils.py)"))
}

// moving is a tensor that the first step moves to shared memory.
type moving struct {
	from  tensor
	bytes int64
	to    ledger.Component
}

// moves notes a tensor that SuperOffload will move to shared memory.
func (e *zero3) moves(from tensor, bytes int64, to ledger.Component) {
	if e.superOffloads() && from.held() {
		e.moving = append(e.moving, moving{from, bytes, to})
	}
}

// share moves the noted tensors to shared memory, in the first step.
func (e *zero3) share() {
	why := because("what SuperOffload sends to its process goes to shared memory, where it stays; a container's " +
		"/dev/shm is 64 MB by default")
	for _, m := range e.moving {
		allocate(e.host, m.bytes, m.to, why)
		m.from.free()
	}
	e.moving = nil
}
