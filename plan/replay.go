package plan

import (
	"plimsoll/allocator"
	"plimsoll/fault"
	"plimsoll/ledger"
)

// replayed is the caching allocator that a GPU's trace goes through.
type replayed struct{ *allocator.CUDA }

// allocator is PyTorch's of an empty GPU that has no limit: the verdict
// compares what it would like to have with what there is.
func (j *Job) allocator() (Allocator, error) {
	c, err := allocator.ParseConfiguration(j.Allocator, j.Versions.Torch)
	if err != nil {
		return nil, &fault.Input{What: "--alloc-conf", Err: err}
	}
	return replayed{allocator.NewCUDA(c, 0)}, nil
}

func (r replayed) Allocate(bytes ledger.Bytes, stream int) (Handle, error) {
	b, err := r.CUDA.Allocate(bytes, stream)
	if b == nil {
		return nil, err
	}
	return b, err
}

func (r replayed) Free(h Handle) { r.CUDA.Free(h.(*allocator.Block)) }

func (r replayed) Use() Use {
	s := r.Statistics()
	return Use{s.Allocated, s.Reserved, s.PeakAllocated, s.PeakReserved}
}

// heap is the host's malloc below a trace.
type heap struct{ *allocator.Glibc }

func (h heap) Allocate(bytes ledger.Bytes, _ int) (Handle, error) {
	if b := h.Glibc.Allocate(bytes); b != nil {
		return b, nil
	}
	return nil, nil
}

func (h heap) Free(b Handle) { h.Glibc.Free(b.(*allocator.GlibcBlock)) }

func (h heap) Use() Use {
	s := h.Statistics()
	return Use{s.Used, s.Resident, s.PeakUsed, s.PeakResident}
}
