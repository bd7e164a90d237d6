package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// offloadedActivations is where activations are that the job moves to the host.
type offloadedActivations struct {
	gpu    *trace
	pinned *pinnedMemory
}

// offloadStream is the stream that activations come back on.
const offloadStream = 3

// Keep implements autograd.OffloadMemory.
func (o offloadedActivations) Keep(bytes int64) (free func()) {
	return o.pinned.allocate(bytes, ledger.OffloadedActivations, autograd.WhyOffloaded).free
}

// Restore implements autograd.OffloadMemory.
func (o offloadedActivations) Restore(bytes int64, streams bool) (id int) {
	stream := o.gpu.stream
	if streams {
		stream = offloadStream
	}
	o.gpu.on(stream, func() {
		id = o.gpu.Allocate(ledger.Bytes(bytes), ledger.OffloadedActivations, autograd.WhyRestored)
	})
	return id
}
