package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
)

// pinnedMemory is the pinned memory of a rank, which PyTorch's allocator takes in
// blocks.
type pinnedMemory struct {
	allocator *allocator.Pinned
	host      *trace
	rounding  hold // of the blocks, and free blocks
}

func newPinnedMemory(j *job.Job, host *trace) *pinnedMemory {
	c, err := allocator.ParseConfiguration(j.Allocator, j.Versions.Torch)
	if err != nil {
		c = allocator.Configuration{} // refused where the GPU's allocator is made
	}
	return &pinnedMemory{allocator: allocator.NewPinned(c, j.Versions.Torch), host: host}
}

// tensor is an allocated tensor. On the host it may be in pinned memory.
type tensor struct {
	hold
	pinned *pinnedMemory // nil: pageable, or on the GPU
	block  allocator.Block
}

func (p *pinnedMemory) allocate(bytes int64, component ledger.Component, why func() string) tensor {
	drop(&p.rounding)
	block, err := p.allocator.Allocate(ledger.Bytes(bytes))
	p.fail(err)
	t := tensor{p.host.hold(bytes, component, why), p, block}
	p.round()
	return t
}

// free frees the tensor. The allocator keeps a pinned block.
func (t tensor) free() {
	if t.pinned == nil {
		t.hold.free()
		return
	}
	drop(&t.pinned.rounding)
	t.hold.free()
	t.pinned.fail(t.pinned.allocator.Free(t.block))
	t.pinned.round()
}

// restart drops free blocks, which a new process does not have.
func (p *pinnedMemory) restart() {
	drop(&p.rounding)
	p.allocator.EmptyCache()
	p.round()
}

// round holds what the allocator has pinned beyond the tensors.
func (p *pinnedMemory) round() {
	s := p.allocator.Statistics()
	p.rounding = p.host.hold(int64(s.Pinned.Now-s.Requested.Now), ledger.PinnedRounding,
		because("PyTorch's allocator of pinned memory takes powers of two and keeps what is freed "+
			"(CachingHostAllocator.h, pytorch issue 95823)"))
}

// fail keeps the first error of the host.
func (p *pinnedMemory) fail(err error) {
	if p.host.failed == nil {
		p.host.failed = err
	}
}
