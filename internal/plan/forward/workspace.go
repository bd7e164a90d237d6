package forward

import (
	"math/bits"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// addedWorkspace is what cuBLASLt gets to work in where a product adds a bias (getCUDABlasLtWorkspaceSize in
// CublasHandlePool.cpp).
const addedWorkspace = 1 << 20

// works gives a product what its kernels work in. Columns are those of the result if a third input
// may be a bias, else 0.
func (p *pass) works(o *autograd.Operation, columns int64) {
	product := autograd.Workspace{Bytes: p.ProductWorkspace, Component: ledger.MatmulWorkspaces, Why: whyProduct}
	o.Workspace, o.GradientWorkspaces = product, make([]autograd.Workspace, len(o.Inputs))
	for i := range o.GradientWorkspaces {
		o.GradientWorkspaces[i] = product
	}
	if columns > 0 && len(o.Inputs) > 2 {
		if columns > 1 { // torch gives no single column to cuBLASLt
			o.Workspace.Bytes = min(addedWorkspace, p.ProductWorkspace)
		}
		o.GradientWorkspaces[2] = p.columnSums(o.Outputs[0].Elements/columns, columns)
	}
}

func whyProduct() string {
	return "what cuBLAS works in, which torch takes for each product and gives back since 2.15 " +
		"(CublasHandlePool.cpp, TORCH_CUBLAS_WORKSPACE_CACHE)"
}

// columnSums returns what torch's kernel works in that adds up the rows of a matrix in 16 or 32 bits. Blocks of threads
// divide the rows until the GPU is full, and each leaves its sums, in fp32, to the last one (setReduceConfig in
// Reduce.cuh). There are none where one block adds up all rows.
func (p *pass) columnSums(rows, columns int64) autograd.Workspace {
	const warp, mostThreads, fewestValues, mostValues, accumulated = 32, 512, 16, 256, 4
	if p.Processors == 0 || rows <= 0 || columns <= 0 {
		return autograd.Workspace{}
	}
	vector := int64(4) // columns of a thread
	for columns%vector != 0 {
		vector /= 2
	}
	threads := mostThreads / vector
	across, down := min(powerOf2(columns/vector), threads), min(powerOf2(rows), threads)
	width := min(across, warp)
	height := min(down, threads/width)
	width = min(across, threads/height)
	values, grid := ceilOf(rows, height), ceilOf(columns/vector, width)
	full := p.Processors * (p.Threads / (width * height)) // blocks that run at a time
	if rows < min(height*fewestValues, mostValues) || values < mostValues || grid > full {
		return autograd.Workspace{}
	}
	blocks := max(min(ceilOf(full, grid), ceilOf(values, fewestValues)), ceilOf(values, mostValues))
	return autograd.Workspace{Bytes: accumulated * columns * blocks * width * vector,
		Component: ledger.OperationScratch, Why: autograd.WhyScratch}
}

// powerOf2 returns the largest power of two up to n, which is at least 1.
func powerOf2(n int64) int64 { return 1 << (bits.Len64(uint64(max(1, n))) - 1) }

// ceilOf divides and rounds up.
func ceilOf(n, by int64) int64 { return (n + by - 1) / by }
