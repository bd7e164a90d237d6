// Package allocator models PyTorch's CUDA caching allocator, its pinned host
// allocator, and glibc's malloc. A plan replays its allocations and frees through
// them to learn what a program reserves, not only what it requests. Rounding,
// segments, fragmentation and pages that are never returned are bytes, too.
//
// The policies come from PyTorch's c10/cuda/CUDACachingAllocator.cpp and
// aten/src/ATen/core/CachingHostAllocator.h; names follow these files. Not
// modelled: private pools (CUDA graphs, torch.cuda.MemPool) and the backend
// cudaMallocAsync.
package allocator

import "plimsoll/internal/base/ledger"

// Gauge is a level and its peak.
type Gauge[T ledger.Bytes | int] struct{ Now, Peak T }

func (g *Gauge[T]) add(change T) {
	g.Now += change
	g.Peak = max(g.Peak, g.Now)
}

func (g *Gauge[T]) reset() { g.Peak = g.Now }

// Block names an allocated block. A request for 0 bytes gets the zero Block.
type Block struct{ index, generation uint32 }

// roundUp rounds size up to a multiple of step.
func roundUp(size, step ledger.Bytes) ledger.Bytes { return (size + step - 1) / step * step }
