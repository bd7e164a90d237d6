// Package gpu has the models of GPUs with the facts that a plan needs: the memory
// that PyTorch can use, and the memory that is taken before the first tensor.
package gpu

import (
	"math"
	"strings"

	"plimsoll/internal/base/ledger"
)

// Model is a model of GPU.
type Model struct {
	Name string
	// Memory is the total capacity in PyTorch's out-of-memory messages. It is a
	// little less than the name says.
	Memory ledger.Bytes
	// Alias is another name, for models whose name in nvidia-smi lacks the memory.
	Alias string
	// Capability is the CUDA compute capability, 90 for 9.0. It is 0 for AMD and
	// unknown GPUs.
	Capability int
	// Bandwidth is that of its memory by the data sheet, in GB/s. It is 0 for unknown GPUs.
	Bandwidth float64
	Speed     Speed
}

// Speed is what the data sheet says of products of matrices and of links. It is zero where nothing is known.
type Speed struct {
	// Half and Single are TFLOP/s of dense products, without sparsity: of 16-bit matrices added up in fp32, and of fp32
	// matrices. PyTorch takes TF32 for the latter only if it is told to.
	Half, Single float64
	// Peer is the link to the other GPUs of the node, Host that to the host, and Network that of the vendor's own
	// system to other nodes. All are GB/s of one direction. Network is 0 where the vendor sells no such system. Peer of
	// cards is PCIe: an NVLink bridge joins two cards, or four, and not every system has one.
	Peer, Host, Network float64
}

// FLOPS returns the operations a second of dense products by the data sheet, for elements of so many bytes.
// Only GPUs from capability 8.0 on multiply bf16 on tensor cores. It is 0 for unknown GPUs.
func (m Model) FLOPS(bytes int64, bf16 bool) float64 {
	const tera = 1e12
	switch {
	case bytes > 2:
		return m.Speed.Single * tera
	case bf16 && m.Capability > 0 && m.Capability < 80:
		return m.Speed.Single * tera
	}
	return m.Speed.Half * tera
}

// IsGeForce reports whether a model is sold for desktops and laptops, by the number in its name: RTX-4090.
func (m Model) IsGeForce() bool {
	number, _, _ := strings.Cut(strings.TrimPrefix(m.Name, "RTX-"), "-")
	return LooksNamed(number)
}

// Workspace returns the size of the workspace that cuBLAS takes from torch's
// allocator for each handle (aten/src/ATen/cuda/CublasHandlePool.cpp,
// getChosenWorkspaceSize).
func (m Model) Workspace() ledger.Bytes {
	if m.Capability >= 90 {
		return 32 * ledger.MiB
	}
	return 8519680
}

// Processors returns the streaming multiprocessors of a model. Of one that is not known they are those of an H100.
func (m Model) Processors() int {
	if n, ok := processors[m.Name]; ok {
		return n
	}
	if full, profile, divided := strings.Cut(m.Name, ":"); divided {
		return instances[full][profile].processors
	}
	return processors["H100-80GB"]
}

// Threads returns how many threads a multiprocessor runs at a time (CUDA's programming guide, technical
// specifications by compute capability). Of a model that is not known they are those of an H100.
func (m Model) Threads() int {
	switch c := m.Capability; {
	case c == 86, c == 89, c >= 120:
		return 1536
	case c == 75:
		return 1024
	}
	return 2048
}

// Alike returns the model with known rates whose memory is nearest to that of a model, of its own generation if there
// is one. Rates that are only announced do not count.
func Alike(m Model) Model {
	best, distance := m, 0.0
	for _, other := range models {
		if other.Speed.Half == 0 || other.Bandwidth == 0 || !other.IsOffered() {
			continue
		}
		far := math.Abs(float64(other.Memory - m.Memory))
		if other.Capability/10 != m.Capability/10 {
			far *= 4
		}
		if best.Name == m.Name || far < distance {
			best, distance = other, far
		}
	}
	return best
}
