package plan

import (
	"plimsoll/allocator"
	"plimsoll/fault"
	"plimsoll/ledger"
)

// replayed is the caching allocator that a GPU's trace goes through.
type replayed struct{ *allocator.CUDA }

// allocator is PyTorch's of an empty GPU of this capacity, 0 for any. What is
// outside of the allocator is taken off.
func (j *Job) allocator(capacity ledger.Bytes) (Allocator, error) {
	c, err := allocator.ParseConfiguration(j.Allocator, j.Versions.Torch)
	if err != nil {
		return nil, &fault.Input{What: "--alloc-conf", Err: err}
	}
	if c.MallocAsync {
		return nil, &fault.Input{What: "--alloc-conf asks for the backend cudaMallocAsync, which is CUDA's own and not modelled", Mend: "leave it out for an estimate with PyTorch's allocator"}
	}
	if capacity > 0 {
		for _, outside := range j.outside() {
			capacity -= outside.Bytes
		}
		capacity = max(capacity, 1)
	}
	return replayed{allocator.NewCUDA(c, capacity)}, nil
}

func (r replayed) Allocate(bytes ledger.Bytes, stream int) (Handle, error) {
	return r.CUDA.Allocate(bytes, stream)
}

func (r replayed) Free(h Handle) error { return r.CUDA.Free(h.(allocator.Block)) }

func (r replayed) Use() Use {
	s := r.Statistics()
	return Use{s.Allocated.Now, s.Reserved.Now, s.Allocated.Peak, s.Reserved.Peak}
}

// heap is the host's malloc below a trace.
type heap struct{ *allocator.Glibc }

func (h heap) Allocate(bytes ledger.Bytes, _ int) (Handle, error) {
	if b := h.Glibc.Allocate(bytes); b != nil {
		return b, nil
	}
	return nil, nil
}

func (h heap) Free(b Handle) error {
	h.Glibc.Free(b.(*allocator.GlibcBlock))
	return nil
}

func (h heap) Use() Use {
	s := h.Statistics()
	return Use{s.Used, s.Resident, s.PeakUsed, s.PeakResident}
}
