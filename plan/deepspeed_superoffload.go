package plan

import "plimsoll/ledger"

// superOffloads says that a process steps sub-groups while the backward pass
// goes on (runtime/superoffload).
func (e *deepSpeed) superOffloads() bool {
	return e.offloads() && e.recipe.OffloadOptimizer.SuperOffload
}

// superOffload is what that process has from the start: a page-locked buffer for
// the gradients of a sub-group (superoffload_utils.py).
func (e *divided) superOffload() {
	if !e.superOffloads() {
		return
	}
	var most int64
	for _, g := range e.subGroups {
		if !g.onGPU {
			most = max(most, g.flat.Elements)
		}
	}
	e.pins.lock(most*4, ledger.StagingBuffers)
	const sent = "what SuperOffload sends to its process goes to shared memory, where it stays; a container's " +
		"/dev/shm is 64 MB by default"
	e.explain(ledger.SharedMasterWeights, sent)
	e.explain(ledger.SharedMasterGradients, sent)
	e.explain(ledger.StagingBuffers,
		"SuperOffload's process: gradients of the largest sub-group x 4 B (superoffload_utils.py)")
}

// moving is a tensor that goes to shared memory.
type moving struct {
	from  locked
	bytes int64
	to    ledger.Component
}

// moves notes a tensor that SuperOffload will send.
func (e *divided) moves(from locked, bytes int64, to ledger.Component) {
	if e.superOffloads() && from.held() {
		e.moving = append(e.moving, moving{from, bytes, to})
	}
}

// share sends what the process steps, in the first step.
func (e *divided) share() {
	for _, m := range e.moving {
		allocate(e.host, m.bytes, m.to)
		m.from.free()
	}
	e.moving = nil
}
