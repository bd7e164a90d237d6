// Package gpu has the models of GPUs with the facts that a plan needs: the memory
// that PyTorch can use, and the memory that is taken before the first tensor.
package gpu

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/fault"
	"plimsoll/ledger"
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
}

// gib converts a size as PyTorch prints it, in GiB.
func gib(x float64) ledger.Bytes { return ledger.Bytes(x * float64(ledger.GiB)) }

// models are in the order of the help. PyTorch printed these capacities in
// out-of-memory messages of public issues.
var models = []Model{
	{"B200", gib(178.35), "", 100, 7700},
	{"H200", gib(139.81), "", 90, 4800},
	{"H100-80GB", gib(79.11), "", 90, 3350},
	{"H100-96GB", gib(95.00), "", 90, 0},
	{"H100-94GB", gib(93.00), "H100 NVL", 90, 3938},
	// The name gives the 480 GB of the CPU, not the memory of the GPU.
	{"GH200-96GB", gib(94.50), "GH200 480GB", 90, 4000},
	{"A100-80GB", gib(79.15), "", 80, 2039},
	{"A100-40GB", gib(39.39), "", 80, 1555},
	{"L40S", gib(44.40), "", 89, 864},
	{"L4", gib(21.95), "", 89, 300},
	{"A40", gib(44.42), "", 86, 696},
	{"A10G", gib(21.98), "", 86, 600},
	{"A6000", gib(47.54), "", 86, 768},
	{"V100-32GB", gib(31.74), "", 70, 900},
	{"V100-16GB", gib(15.77), "", 70, 900},
	{"T4", gib(14.58), "", 75, 320},
	{"RTX-5090", gib(31.36), "", 120, 1792},
	{"RTX-4090", gib(23.64), "", 89, 1008},
	{"RTX-3090", gib(23.69), "", 86, 936},
	{"MI300X", gib(191.98), "", 0, 5300},
}

// Names returns the names of the models.
func Names() []string {
	names := make([]string, len(models))
	for i, m := range models {
		names[i] = m.Name
	}
	return names
}

// Find returns a model by its name. The spelling may differ: "NVIDIA H100 80GB
// HBM3" is H100-80GB, and "a100" is the larger of the two. It does not find
// laptop GPUs and MIG instances, which have less memory.
func Find(name string) (Model, error) {
	wanted := words(name)
	whole := !slices.Contains(wanted, "LAPTOP") && !slices.Contains(wanted, "MIG")
	for _, m := range models {
		have := words(m.Name)
		if whole && slices.Contains(wanted, have[0]) && (contains(wanted, have) || contains(have, wanted)) {
			return m, nil
		}
		if alias := words(m.Alias); whole && len(alias) > 0 && contains(wanted, alias) {
			return m, nil
		}
	}
	hint := "known GPUs: " + strings.Join(Names(), ", ") + "; for any other, give --gpu-memory"
	if near := fault.Nearest(strings.ToUpper(name), Names()); near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return Model{}, fault.Inputf("unknown GPU %q", name).WithHint(hint)
}

// words returns the words of a name that distinguish models.
func words(name string) []string {
	fields := strings.FieldsFunc(strings.ToUpper(name), func(r rune) bool { return strings.ContainsRune(" -_/", r) })
	var kept []string
	for _, f := range fields {
		if !slices.Contains([]string{
			"NVIDIA", "AMD", "TESLA", "GEFORCE", "RTX", "INSTINCT",
			"SXM", "SXM2", "SXM4", "SXM5", "PCIE", "HBM2", "HBM2E", "HBM3", "HBM3E", "GPU",
		}, f) {
			kept = append(kept, f)
		}
	}
	return kept
}

func contains(all, some []string) bool {
	for _, w := range some {
		if !slices.Contains(all, w) {
			return false
		}
	}
	return true
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
