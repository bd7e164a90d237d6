// Package allocator replays allocations and frees through models of PyTorch's
// CUDA caching allocator and of its pinned host allocator, so that a plan can
// say what a program will reserve and not only what it asks for: rounding,
// segments, fragmentation and pages that never go back are bytes, too.
//
// The policies are those of c10/cuda/CUDACachingAllocator.cpp and
// aten/src/ATen/core/CachingHostAllocator.h of PyTorch. Not modelled: private
// pools (CUDA graphs, torch.cuda.MemPool) and the backend cudaMallocAsync.
package allocator

import "plimsoll/ledger"

// Gauge is a level and the highest that it has been.
type Gauge[T ledger.Bytes | int] struct{ Now, Peak T }

func (g *Gauge[T]) add(change T) {
	g.Now += change
	g.Peak = max(g.Peak, g.Now)
}

func (g *Gauge[T]) reset() { g.Peak = g.Now }

// Block is what an allocator has handed out. The zero Block is what a request
// for nothing gets.
type Block struct{ index, generation uint32 }

// roundUp is the lowest multiple of step that is not below size.
func roundUp(size, step ledger.Bytes) ledger.Bytes { return (size + step - 1) / step * step }
