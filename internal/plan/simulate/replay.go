package simulate

import (
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
)

// replayed is the caching allocator that a GPU's trace is replayed on.
type replayed struct {
	*allocator.CUDA
	blocks blocks[allocator.Block]
}

// blocks are the allocated blocks of an allocator, by the ids of the trace.
type blocks[B any] []B

func (list *blocks[B]) set(id int, b B) {
	if id == len(*list) {
		*list = append(*list, b)
	} else {
		(*list)[id] = b
	}
}

// Limit is the memory of a GPU in a simulation. A capacity of 0 is no limit.
type Limit struct {
	Capacity ledger.Bytes
	// Grows has a GPU that is too small get what it lacks, where a run would stop.
	Grows bool
}

// newCache returns PyTorch's allocator for an empty GPU with a limit, less the memory outside the allocator.
func newCache(j *job.Job, limit Limit) (replayer, error) {
	c, err := allocator.ParseConfiguration(j.Allocator, j.Versions.Torch)
	if err != nil {
		return nil, &fault.Input{What: "--alloc-conf", Err: err}
	}
	if c.MallocAsync {
		return nil, fault.Inputf("--alloc-conf asks for the backend cudaMallocAsync, which is CUDA's own and not " +
			"modelled").WithHint("leave it out for an estimate with PyTorch's allocator")
	}
	capacity := limit.Capacity
	if capacity > 0 {
		for _, held := range outside(j) {
			capacity -= held.Bytes
		}
		capacity = max(capacity, 1)
	}
	if limit.Grows {
		return &replayed{CUDA: allocator.NewGrowingCUDA(c, capacity)}, nil
	}
	return &replayed{CUDA: allocator.NewCUDA(c, capacity)}, nil
}

func (r *replayed) Allocate(id int, bytes ledger.Bytes, stream int) error {
	b, err := r.CUDA.Allocate(bytes, stream)
	r.blocks.set(id, b)
	return err
}

func (r *replayed) Free(id int) error { return r.CUDA.Free(r.blocks[id]) }

func (r *replayed) Use() usage {
	s := r.Statistics()
	return usage{s.Allocated.Now, s.Reserved.Now, s.Allocated.Peak, s.Reserved.Peak}
}

// heap is the malloc that a host's trace is replayed on.
type heap struct {
	*allocator.Glibc
	blocks blocks[*allocator.GlibcBlock]
}

func (h *heap) Allocate(id int, bytes ledger.Bytes, _ int) error {
	h.blocks.set(id, h.Glibc.Allocate(bytes))
	return nil
}

func (h *heap) Free(id int) error {
	h.Glibc.Free(h.blocks[id])
	return nil
}

// EmptyCache does nothing: torch does not ask malloc to return memory.
func (h *heap) EmptyCache() {}

func (h *heap) Use() usage {
	s := h.Statistics()
	return usage{s.Used, s.Resident, s.PeakUsed, s.PeakResident}
}
