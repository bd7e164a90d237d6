// Package gpu has the models of GPUs with the facts that a plan needs: the memory
// that PyTorch can use, and the memory that is taken before the first tensor.
package gpu

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
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

// gib converts a size as PyTorch prints it, in GiB.
func gib(x float64) ledger.Bytes { return ledger.Bytes(x * float64(ledger.GiB)) }

// models are in the order of the help. PyTorch printed these capacities in
// out-of-memory messages of public issues. Capacities that stand in no table of
// NVIDIA's are from: A800 hahnyuan/PB-LLM 3, L20 Tencent-Hunyuan/HunyuanCustom 36,
// L40 QwenLM/Qwen3-VL 2097, A30 LHRLAB/ChatKBQA 2, A4000 DengKaiCQ/VGGT-Long 6,
// RTX 6000 Ada (with ECC) DINGYANB/MTVCrafter 21, RTX 8000
// Victarry/stable-dreambooth 8, RTX 4070 Ti
// OpenLMLab/LOMO 17, RTX 3080 zai-org/CogVideo 34, RTX 3070 meta-llama/codellama 82,
// RTX 3060 TencentARC/PhotoMaker 47, RTX 2080 Ti JDAI-CV/image-captioning 11, RTX
// 4060 longxiang-ai/TSGS 6, RTX PRO 6000 antirez/ds4 431, RTX 5060 Ti
// Luce-Org/lucebox 407, MI355X ROCm/TheRock 2118. H800 and H20 are those of H100
// with as much memory, RTX 3090 Ti is that of RTX 3090, and MI325X lacks the 16 MiB
// that MI300X and MI355X lack.
//
// Speeds are those of the vendors' data sheets, of SXM modules where there are
// several: NVIDIA's for its data center and professional GPUs, its architecture
// papers for GeForce (Blackwell, Ada, Ampere, Turing), AMD's for Instinct.
// Data sheets of NVIDIA give twice the speed for sparse matrices (A40: 149.7 and
// 299.4, H100: 989 and 1979), and links in both directions together (A40: PCIe
// 64 GB/s). Half is with sums in fp32: GeForce multiplies twice as fast with
// sums in fp16, which training does not use. Speeds that no such paper has are 0.
// Networks are those of DGX B200, H200, H100, A100, DGX-1V, and of MI300X
// platforms: one 400 Gb/s port for each GPU, and one of 200 with A100. A DGX-1V
// has four ports of 100 Gb/s for eight V100.
var models = []Model{
	{"B200", gib(178.35), "", 100, 7700, Speed{2250, 75, 900, 64, 50}},
	{"H200", gib(139.81), "", 90, 4800, Speed{989, 67, 450, 64, 50}},
	{"H100-80GB", gib(79.11), "", 90, 3350, Speed{989, 67, 450, 64, 50}},
	{"H100-96GB", gib(95.00), "", 90, 0, Speed{}},
	{"H100-94GB", gib(93.00), "H100 NVL", 90, 3938, Speed{835, 60, 64, 64, 0}},
	{"H800-80GB", gib(79.11), "", 90, 3350, Speed{989, 67, 200, 64, 0}},
	{"H20-96GB", gib(95.00), "", 90, 4000, Speed{148, 44, 450, 64, 0}},
	// The name gives the 480 GB of the CPU, not the memory of the GPU.
	{"GH200-96GB", gib(94.50), "GH200 480GB", 90, 4000, Speed{989, 67, 450, 450, 50}},
	{"A100-80GB", gib(79.15), "", 80, 2039, Speed{312, 19.5, 300, 32, 25}},
	{"A100-40GB", gib(39.39), "", 80, 1555, Speed{312, 19.5, 300, 32, 25}},
	{"A800-80GB", gib(79.33), "", 80, 2039, Speed{312, 19.5, 200, 32, 0}},
	{"A30", gib(23.50), "", 80, 933, Speed{165, 10.3, 32, 32, 0}},
	{"L40S", gib(44.40), "", 89, 864, Speed{362, 91.6, 32, 32, 0}},
	{"L40", gib(44.40), "", 89, 864, Speed{181, 90.5, 32, 32, 0}},
	{"L20", gib(44.53), "", 89, 864, Speed{119.5, 59.8, 32, 32, 0}},
	{"L4", gib(21.95), "", 89, 300, Speed{121, 30.3, 32, 32, 0}},
	{"A40", gib(44.42), "", 86, 696, Speed{149.7, 37.4, 32, 32, 0}},
	{"A10G", gib(21.98), "", 86, 600, Speed{70, 31.2, 32, 32, 0}},
	{"RTX-PRO-6000", gib(94.97), "", 120, 1792, Speed{503.8, 125, 64, 64, 0}},
	{"RTX-6000-Ada", gib(44.43), "", 89, 960, Speed{364.2, 91.1, 32, 32, 0}},
	{"A6000", gib(47.54), "", 86, 768, Speed{154.8, 38.7, 32, 32, 0}},
	{"A4000", gib(15.61), "", 86, 448, Speed{76.7, 19.2, 32, 32, 0}},
	{"V100-32GB", gib(31.74), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"V100-16GB", gib(15.77), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"T4", gib(14.58), "", 75, 320, Speed{65, 8.1, 16, 16, 0}},
	{"RTX-8000", gib(47.46), "Quadro RTX 8000", 75, 672, Speed{130.5, 16.3, 16, 16, 0}},
	{"RTX-5090", gib(31.36), "", 120, 1792, Speed{209.5, 104.8, 64, 64, 0}},
	{"RTX-5060-Ti-16GB", gib(15.45), "", 120, 0, Speed{}},
	{"RTX-4090", gib(23.64), "", 89, 1008, Speed{165.2, 82.6, 32, 32, 0}},
	{"RTX-4070-Ti", gib(11.73), "", 89, 0, Speed{}},
	{"RTX-4060", gib(7.72), "", 89, 0, Speed{}},
	{"RTX-3090", gib(23.69), "", 86, 936, Speed{71, 35.6, 32, 32, 0}},
	{"RTX-3090-Ti", gib(23.69), "", 86, 1008, Speed{80, 40, 32, 32, 0}},
	{"RTX-3080-10GB", gib(9.78), "", 86, 760, Speed{59.5, 29.8, 32, 32, 0}},
	{"RTX-3070", gib(7.78), "", 86, 448, Speed{40.6, 20.3, 32, 32, 0}},
	{"RTX-3060-12GB", gib(11.76), "", 86, 0, Speed{}},
	{"RTX-2080-Ti", gib(10.76), "", 75, 616, Speed{53.8, 13.4, 16, 16, 0}},
	{"MI355X", gib(287.98), "", 0, 8000, Speed{2517, 157.3, 538, 64, 0}},
	{"MI325X", gib(255.98), "", 0, 6000, Speed{1307, 163.4, 448, 64, 0}},
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
		if !slices.Contains(words(m.Name+" "+m.Alias), w) && !isMemory(w) {
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
		if named := contains(wanted, have) && !isVariant(wanted, have); whole && (named || isShort(wanted, have)) {
			return m.named(wanted, isCard), nil
		}
		if alias := words(m.Alias); whole && len(alias) > 0 && contains(wanted, alias) {
			return m.named(wanted, isCard), nil
		}
	}
	if number := countedAfter.FindStringSubmatch(name); number != nil {
		return Model{}, fault.Inputf("%q is a number of GPUs, expected the name of one", name).
			WithHint(fmt.Sprintf("give --gpus %s and --gpu %s", number[2], number[1]))
	}
	if number := counted.FindStringSubmatch(name); number != nil {
		return Model{}, fault.Inputf("%q is a number of GPUs, expected the name of one", name).
			WithHint(fmt.Sprintf("give --gpus %s and --gpu %s", number[1], number[2]))
	}
	hint := `"plimsoll models --gpus" lists those that are known; for any other, give --gpu-memory`
	if near := nearest(name); near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return Model{}, fault.Inputf("unknown GPU %q", name).WithHint(hint)
}

// Alike returns the model with known rates whose memory is nearest to that of a model, of its own generation if there
// is one.
func Alike(m Model) Model {
	best, distance := m, 0.0
	for _, other := range models {
		if other.Speed.Half == 0 || other.Bandwidth == 0 {
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

// Named returns the models whose names have all words of a text: RTX-6000-Ada and RTX-PRO-6000 for "6000".
func Named(text string) []string {
	wanted := words(text)
	return slices.DeleteFunc(Names(), func(name string) bool {
		return len(wanted) == 0 || !contains(words(name), wanted)
	})
}

// isShort reports whether a name is that of a model without its memory: H100 is H100-80GB.
func isShort(wanted, have []string) bool {
	return len(wanted) > 0 && contains(have, wanted) && wanted[0] == have[0] &&
		!slices.ContainsFunc(have, func(w string) bool { return !slices.Contains(wanted, w) && !isMemory(w) })
}

// isVariant reports whether a name has a word more than a model that often means another memory: an RTX 3080 has 10 GB
// and an RTX 3080 Ti 12.
func isVariant(wanted, have []string) bool {
	return slices.ContainsFunc(wanted, func(w string) bool {
		return !slices.Contains(have, w) && (slices.Contains([]string{"TI", "SUPER", "V2"}, w) || isMemory(w) &&
			slices.ContainsFunc(have, isMemory))
	})
}

// isMemory reports whether a word of a name is a size.
func isMemory(word string) bool { return strings.HasSuffix(word, "GB") }

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

// counted is a name with a number of GPUs before it: 8xH100, 8 x H100. Or the number stands behind it: H100x8.
var (
	counted      = regexp.MustCompile(`^(\d+) ?[xX*] ?(\S.*)$`)
	countedAfter = regexp.MustCompile(`^(\S.*?) ?[xX*] ?(\d{1,3})$`)
)

// Counted returns the number of GPUs that stands before a name, such as 8xH100, and the name behind it. It is false for
// a name without one, and for one of more than four digits.
func Counted(text string) (number int, name string, is bool) {
	found := counted.FindStringSubmatch(text)
	if found == nil || len(found[1]) > 4 {
		return 0, text, false
	}
	number, err := strconv.Atoi(found[1])
	return number, found[2], err == nil
}

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
			"QUADRO", "GENERATION", "BLACKWELL", "WORKSTATION", "SERVER", "EDITION",
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

// processors are the streaming multiprocessors of each model, by data sheets and architecture papers. Kernels size
// their buffers by them.
var processors = map[string]int{
	"B200": 148, "H200": 132, "H100-80GB": 132, "H100-96GB": 132, "H100-94GB": 132, "H800-80GB": 132, "H20-96GB": 78,
	"GH200-96GB": 132, "A100-80GB": 108, "A100-40GB": 108, "A800-80GB": 108, "A30": 56, "L40S": 142, "L40": 142,
	"L20": 92, "L4": 58, "A40": 84, "A10G": 80, "RTX-PRO-6000": 188, "RTX-6000-Ada": 142, "A6000": 84, "A4000": 48,
	"V100-32GB": 80, "V100-16GB": 80, "T4": 40, "RTX-8000": 72, "RTX-5090": 170, "RTX-5060-Ti-16GB": 36,
	"RTX-4090": 128, "RTX-4070-Ti": 60, "RTX-4060": 24, "RTX-3090": 82, "RTX-3090-Ti": 84, "RTX-3080-10GB": 68,
	"RTX-3070": 46, "RTX-3060-12GB": 28, "RTX-2080-Ti": 68,
}

// Processors returns the streaming multiprocessors of a model. Of one that is not known they are those of an H100.
func (m Model) Processors() int {
	if n, ok := processors[m.Name]; ok {
		return n
	}
	return processors["H100-80GB"]
}
