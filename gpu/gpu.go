// Package gpu has the models of GPUs with the facts that a plan needs: the memory
// that PyTorch can use, and the memory that is taken before the first tensor.
package gpu

import (
	"fmt"
	"regexp"
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

// gib converts a size as PyTorch prints it, in GiB.
func gib(x float64) ledger.Bytes { return ledger.Bytes(x * float64(ledger.GiB)) }

// models are in the order of the help. PyTorch printed these capacities in
// out-of-memory messages of public issues. Speeds are those of the vendors' data
// sheets, of SXM modules where there are several: NVIDIA's for B200 (HGX), H200,
// H100, H100 NVL, GH200, A100, L40S, L4, A40, A10G, RTX A6000, V100 and T4, its
// architecture papers for GeForce (Ada, Ampere, Blackwell), AMD's for MI300X.
// Data sheets of NVIDIA give twice the speed for sparse matrices (A40: 149.7 and
// 299.4, H100: 989 and 1979), and links in both directions together (A40: PCIe
// 64 GB/s). Half is with sums in fp32: GeForce multiplies twice as fast with
// sums in fp16, which training does not use.
// Networks are those of DGX B200, H200, H100, A100, DGX-1V, and of MI300X
// platforms: one 400 Gb/s port for each GPU, and one of 200 with A100. A DGX-1V
// has four ports of 100 Gb/s for eight V100.
var models = []Model{
	{"B200", gib(178.35), "", 100, 7700, Speed{2250, 75, 900, 64, 50}},
	{"H200", gib(139.81), "", 90, 4800, Speed{989, 67, 450, 64, 50}},
	{"H100-80GB", gib(79.11), "", 90, 3350, Speed{989, 67, 450, 64, 50}},
	{"H100-96GB", gib(95.00), "", 90, 0, Speed{}},
	{"H100-94GB", gib(93.00), "H100 NVL", 90, 3938, Speed{835, 60, 64, 64, 0}},
	// The name gives the 480 GB of the CPU, not the memory of the GPU.
	{"GH200-96GB", gib(94.50), "GH200 480GB", 90, 4000, Speed{989, 67, 450, 450, 50}},
	{"A100-80GB", gib(79.15), "", 80, 2039, Speed{312, 19.5, 300, 32, 25}},
	{"A100-40GB", gib(39.39), "", 80, 1555, Speed{312, 19.5, 300, 32, 25}},
	{"L40S", gib(44.40), "", 89, 864, Speed{362, 91.6, 32, 32, 0}},
	{"L4", gib(21.95), "", 89, 300, Speed{121, 30.3, 32, 32, 0}},
	{"A40", gib(44.42), "", 86, 696, Speed{149.7, 37.4, 32, 32, 0}},
	{"A10G", gib(21.98), "", 86, 600, Speed{70, 31.2, 32, 32, 0}},
	{"A6000", gib(47.54), "", 86, 768, Speed{154.8, 38.7, 32, 32, 0}},
	{"V100-32GB", gib(31.74), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"V100-16GB", gib(15.77), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"T4", gib(14.58), "", 75, 320, Speed{65, 8.1, 16, 16, 0}},
	{"RTX-5090", gib(31.36), "", 120, 1792, Speed{209.5, 104.8, 64, 64, 0}},
	{"RTX-4090", gib(23.64), "", 89, 1008, Speed{165.2, 82.6, 32, 32, 0}},
	{"RTX-3090", gib(23.69), "", 86, 936, Speed{71, 35.6, 32, 32, 0}},
	{"MI300X", gib(191.98), "", 0, 5300, Speed{1307, 163.4, 448, 64, 50}},
}

// cards are PCIe cards of models that are SXM modules above, by their data sheets: slower, and without NVLink.
var cards = map[string]struct {
	bandwidth float64
	Speed
}{
	"H200":      {4800, Speed{835, 60, 64, 64, 0}},
	"H100-80GB": {2039, Speed{756, 51, 64, 64, 0}},
	"A100-80GB": {1935, Speed{312, 19.5, 32, 32, 0}},
	"A100-40GB": {1555, Speed{312, 19.5, 32, 32, 0}},
	"V100-32GB": {900, Speed{112, 14, 16, 16, 0}},
	"V100-16GB": {900, Speed{112, 14, 16, 16, 0}},
}

// named returns the model with the speed of the product that these words of a name mean. Another product, such as a Ti,
// has the memory and an unknown speed.
func (m Model) named(wanted []string, isCard bool) Model {
	if card, found := cards[m.Name]; found && (isCard || slices.Contains(wanted, "NVL")) {
		m.Bandwidth, m.Speed = card.bandwidth, card.Speed
		return m
	}
	for _, w := range wanted {
		if !slices.Contains(words(m.Name+" "+m.Alias), w) && !strings.HasSuffix(w, "GB") {
			m.Bandwidth, m.Speed = 0, Speed{}
		}
	}
	return m
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
// HBM3" is H100-80GB, and "a100" is the larger of the two. "H100 PCIe" is
// H100-80GB with the speed of the card. It does not find laptop GPUs and MIG
// instances, which have less memory.
func Find(name string) (Model, error) {
	wanted := words(name)
	isCard := strings.Contains(strings.ToUpper(name), "PCIE")
	whole := !slices.Contains(wanted, "LAPTOP") && !slices.Contains(wanted, "MIG")
	for _, m := range models {
		have := words(m.Name)
		if whole && slices.Contains(wanted, have[0]) && (contains(wanted, have) || contains(have, wanted)) {
			return m.named(wanted, isCard), nil
		}
		if alias := words(m.Alias); whole && len(alias) > 0 && contains(wanted, alias) {
			return m.named(wanted, isCard), nil
		}
	}
	if number := counted.FindStringSubmatch(name); number != nil {
		return Model{}, fault.Inputf("%q is a number of GPUs, expected the name of one", name).
			WithHint(fmt.Sprintf("give --gpus %s and --gpu %s", number[1], number[2]))
	}
	hint := "known GPUs: " + strings.Join(Names(), ", ") + "; for any other, give --gpu-memory"
	if near := nearest(name); near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return Model{}, fault.Inputf("unknown GPU %q", name).WithHint(hint)
}

// nearest returns the name that is written most alike, also without the memory behind it: H1000 is near H100-80GB.
func nearest(name string) string {
	if near := fault.Nearest(name, Names()); near != "" && strings.ContainsRune(name, '-') {
		return near
	}
	var short []string
	for _, full := range Names() {
		first, _, _ := strings.Cut(full, "-")
		short = append(short, first)
	}
	if at := slices.Index(short, fault.Nearest(name, short)); at >= 0 {
		return Names()[at]
	}
	return fault.Nearest(name, Names())
}

// counted is a name with a number of GPUs before it: 8xH100, 8 x H100.
var counted = regexp.MustCompile(`^(\d+) ?[xX*] ?(\S.*)$`)

// words returns the words of a name that distinguish models.
func words(name string) []string {
	fields := strings.FieldsFunc(strings.ToUpper(name), func(r rune) bool { return strings.ContainsRune(" -_/", r) })
	var kept []string
	for _, f := range fields {
		if digits := strings.TrimPrefix(f, "RTX"); digits != "" && digits[0] <= '9' {
			f = digits // RTX4090
		}
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
