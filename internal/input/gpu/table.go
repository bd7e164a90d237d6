package gpu

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// gib converts a size as PyTorch prints it, in GiB.
func gib(x float64) ledger.Bytes { return ledger.Bytes(x * float64(ledger.GiB)) }

// models are in the order of the help. PyTorch printed these capacities in out-of-memory messages of public issues.
// Capacities that stand in no table of NVIDIA's are from: A800 hahnyuan/PB-LLM 3, L20 Tencent-Hunyuan/HunyuanCustom 36,
// L40 QwenLM/Qwen3-VL 2097, A30 LHRLAB/ChatKBQA 2, A4000 DengKaiCQ/VGGT-Long 6, RTX 6000 Ada (with ECC)
// DINGYANB/MTVCrafter 21, RTX 8000 Victarry/stable-dreambooth 8, RTX 4070 Ti OpenLMLab/LOMO 17, RTX 3080
// zai-org/CogVideo 34, RTX 3070 meta-llama/codellama 82, RTX 3060 TencentARC/PhotoMaker 47, RTX 2080 Ti
// JDAI-CV/image-captioning 11, RTX 4060 longxiang-ai/TSGS 6, RTX PRO 6000 antirez/ds4 431, RTX 5060 Ti Luce-Org/lucebox
// 407, MI355X ROCm/TheRock 2118, GB300 NVIDIA-NeMo/Megatron-Bridge 2221, GB200 vllm-project/vllm 52511. H800 and H20
// are those of H100 with as much memory, RTX 3090 Ti is that of RTX 3090, MI325X lacks the 16 MiB that MI300X and
// MI355X lack, and MI350X has as much memory as MI355X.
//
// Other tools printed those of GB10 (leptonai/gpud 1170; newer kernels show up to 121.69, unslothai/unsloth 10283), of
// a die of MI250X and MI210 (rocminfo, 67,092,480 KB: ROCm/rocm_smi_lib 160, openmm/openmm 3940), and of MI300A
// (rocminfo, 98,648,060 KB: ROCm/legacy-rocm-build 4273). Logs of runs without an issue have those of B300 (vLLM:
// 267.69 GiB), RTX 5080 (vLLM: 15.47), RTX 4060 Ti and the laptops 5080 and 5090 (Unsloth: 15.572, 15.471, 23.889),
// P100 (Ultralytics: 16,269 MiB) and A10 (22.06 with newer drivers; 22.18 in OpenBMB/MiniCPM-V 640).
//
// Cards whose nvidia-smi shows the same MiB have the same capacity: A5000 and RTX 4090 show 24,564; RTX 5080, 5070 Ti
// and the laptop 5080 16,303; RTX 4080, 4080 SUPER, 4070 Ti SUPER and laptop 4090 16,376 (4060 Ti 16,380); RTX 4070 Ti,
// 4070, 4070 SUPER and laptop 4080 12,282; RTX 4060, 4060 Ti and the laptops 4070 and 4060 8,188. Vera Rubin has the
// 288 GB that NVIDIA announced: no run has printed its capacity.
//
// Speeds are those of the vendors' data sheets, of SXM modules where there are several: NVIDIA's for its data center
// and professional GPUs, its architecture papers for GeForce (Blackwell, Ada, Ampere, Turing), AMD's for Instinct (CDNA
// 4 paper: 256 units at 2.2 GHz make MI350X's). Those of GB200, GB300 and Vera Rubin are NVIDIA's of racks with 72 GPUs
// (NVL72), divided by 72; those of Vera Rubin are preliminary. Data sheets of NVIDIA give twice the speed for sparse
// matrices (A40: 149.7 and 299.4, H100: 989 and 1979), and links in both directions together (A40: PCIe 64 GB/s). Two
// GPUs of GB200, GB300 and Vera Rubin share the link of one CPU, and each has half of it: nvbandwidth measured 211.5
// GB/s in and 193.5 out on GB300 (NVIDIA/Megatron-LM 6491). Half is with sums in fp32: GeForce multiplies twice as fast
// with sums in fp16, which training does not use. GeForce without these have the memory bandwidth of NVIDIA's product
// pages.
//
// GeForce without an architecture paper have the cores and the clock of NVIDIA's product pages, and tensor cores twice
// as fast, as those with a paper. Speeds of P100 are of its architecture paper, and those of MI300A, MI250X (one of the
// two dies) and MI210 of AMD's data sheets. The memory and links of H100-96GB are those that torchtitan's benchmarks
// describe (benchmarks/llama3_h100_202412_torchtitan.md), whose products are between those of SXM and of NVL: so are
// these. Speeds of laptops and GB10 depend on their power and are 0: no step time is given for them. Networks are
// those of DGX B200, H200, H100, A100, DGX-1V, of MI300X platforms and of GB200 NVL72: one 400 Gb/s port for each GPU,
// and one of 200 with A100. A DGX-1V has four ports of 100 Gb/s for eight V100. A GPU of DGX B300 and GB300 NVL72 has
// 800 Gb/s, and one of Vera Rubin NVL72 1,600.
var models = []Model{
	{"Vera-Rubin", gib(268.22), "Rubin", 107, 19200, Speed{4000, 130, 1500, 450, 200}},
	{"GB300", gib(276.50), "", 103, 8000, Speed{2500, 80, 900, 225, 100}},
	{"GB200", gib(184.31), "", 100, 8000, Speed{2500, 80, 900, 225, 50}},
	{"B300", gib(267.69), "", 103, 8000, Speed{2250, 75, 900, 64, 100}},
	{"B200", gib(178.35), "", 100, 7700, Speed{2250, 75, 900, 64, 50}},
	{"H200", gib(139.81), "", 90, 4800, Speed{989, 67, 450, 64, 50}},
	{"H100-80GB", gib(79.11), "", 90, 3350, Speed{989, 67, 450, 64, 50}},
	{"H100-96GB", gib(95.00), "", 90, 2400, Speed{912, 60, 450, 64, 50}},
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
	{"A10", gib(22.06), "", 86, 600, Speed{125, 31.2, 32, 32, 0}},
	{"A10G", gib(21.98), "", 86, 600, Speed{70, 31.2, 32, 32, 0}},
	{"RTX-PRO-6000", gib(94.97), "", 120, 1792, Speed{503.8, 125, 64, 64, 0}},
	{"RTX-6000-Ada", gib(44.43), "", 89, 960, Speed{364.2, 91.1, 32, 32, 0}},
	{"A6000", gib(47.54), "", 86, 768, Speed{154.8, 38.7, 32, 32, 0}},
	{"A5000", gib(23.64), "", 86, 768, Speed{111.1, 27.8, 32, 32, 0}},
	{"A4000", gib(15.61), "", 86, 448, Speed{76.7, 19.2, 32, 32, 0}},
	{"V100-32GB", gib(31.74), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"V100-16GB", gib(15.77), "", 70, 900, Speed{125, 15.7, 150, 16, 6.25}},
	{"P100-16GB", gib(15.89), "", 60, 732, Speed{21.2, 10.6, 80, 16, 0}},
	{"T4", gib(14.58), "", 75, 320, Speed{65, 8.1, 16, 16, 0}},
	{"RTX-8000", gib(47.46), "Quadro RTX 8000", 75, 672, Speed{130.5, 16.3, 16, 16, 0}},
	{"RTX-5090", gib(31.36), "", 120, 1792, Speed{209.5, 104.8, 64, 64, 0}},
	{"RTX-5080", gib(15.47), "", 120, 960, Speed{112.6, 56.3, 64, 64, 0}},
	{"RTX-5070-Ti", gib(15.47), "", 120, 896, Speed{87.9, 43.9, 64, 64, 0}},
	{"RTX-5060-Ti-16GB", gib(15.45), "", 120, 448, Speed{47.4, 23.7, 32, 32, 0}},
	{"RTX-4090", gib(23.64), "", 89, 1008, Speed{165.2, 82.6, 32, 32, 0}},
	{"RTX-4080-SUPER", gib(15.57), "", 89, 736, Speed{104.4, 52.2, 32, 32, 0}},
	{"RTX-4080", gib(15.57), "", 89, 717, Speed{97.5, 48.7, 32, 32, 0}},
	{"RTX-4070-Ti-SUPER", gib(15.57), "", 89, 672, Speed{88.2, 44.1, 32, 32, 0}},
	{"RTX-4070-Ti", gib(11.73), "", 89, 504, Speed{80.2, 40.1, 32, 32, 0}},
	{"RTX-4070-SUPER", gib(11.73), "", 89, 504, Speed{71, 35.5, 32, 32, 0}},
	{"RTX-4070", gib(11.73), "", 89, 504, Speed{58.3, 29.1, 32, 32, 0}},
	{"RTX-4060-Ti-16GB", gib(15.57), "", 89, 288, Speed{44.1, 22.1, 16, 16, 0}},
	{"RTX-4060-Ti-8GB", gib(7.72), "", 89, 288, Speed{44.1, 22.1, 16, 16, 0}},
	{"RTX-4060", gib(7.72), "", 89, 272, Speed{30.2, 15.1, 16, 16, 0}},
	{"RTX-3090", gib(23.69), "", 86, 936, Speed{71, 35.6, 32, 32, 0}},
	{"RTX-3090-Ti", gib(23.69), "", 86, 1008, Speed{80, 40, 32, 32, 0}},
	{"RTX-3080-10GB", gib(9.78), "", 86, 760, Speed{59.5, 29.8, 32, 32, 0}},
	{"RTX-3070", gib(7.78), "", 86, 448, Speed{40.6, 20.3, 32, 32, 0}},
	{"RTX-3060-12GB", gib(11.76), "", 86, 360, Speed{25.5, 12.7, 32, 32, 0}},
	{"RTX-2080-Ti", gib(10.76), "", 75, 616, Speed{53.8, 13.4, 16, 16, 0}},
	{"RTX-5090-Laptop", gib(23.89), "", 120, 0, Speed{}},
	{"RTX-5080-Laptop", gib(15.47), "", 120, 0, Speed{}},
	{"RTX-4090-Laptop", gib(15.57), "", 89, 0, Speed{}},
	{"RTX-4080-Laptop", gib(11.73), "", 89, 0, Speed{}},
	{"RTX-4070-Laptop", gib(7.72), "", 89, 0, Speed{}},
	{"RTX-4060-Laptop", gib(7.72), "", 89, 0, Speed{}},
	{"GB10", gib(119.68), "DGX Spark", 121, 273, Speed{}},
	{"MI355X", gib(287.98), "", 0, 8000, Speed{2517, 157.3, 538, 64, 0}},
	{"MI350X", gib(287.98), "", 0, 8000, Speed{2307, 144.2, 538, 64, 0}},
	{"MI325X", gib(255.98), "", 0, 6000, Speed{1307, 163.4, 448, 64, 0}},
	{"MI300X", gib(191.98), "", 0, 5300, Speed{1307, 163.4, 448, 64, 50}},
	{"MI300A", gib(94.08), "", 0, 5300, Speed{980.6, 122.6, 384, 64, 0}},
	{"MI250X", gib(63.98), "MI250", 0, 1638, Speed{191.5, 47.9, 100, 32, 0}},
	{"MI210", gib(63.98), "", 0, 1638, Speed{181, 45.3, 100, 32, 0}},
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

// processors are the streaming multiprocessors of each model, by data sheets and architecture papers. NVIDIA's product
// pages of GeForce and laptops give the CUDA cores: 128 make a multiprocessor. Kernels size their buffers by them.
var processors = map[string]int{
	"Vera-Rubin": 224, "GB300": 152, "GB200": 152, "B300": 148, "A10": 72, "A5000": 64, "P100-16GB": 56, "RTX-5080": 84,
	"RTX-5070-Ti": 70, "RTX-4080-SUPER": 80, "RTX-4080": 76, "RTX-4070-Ti-SUPER": 66, "RTX-4070-SUPER": 56,
	"RTX-4070": 46, "RTX-4060-Ti-16GB": 34, "RTX-4060-Ti-8GB": 34, "RTX-5090-Laptop": 82, "RTX-5080-Laptop": 60,
	"RTX-4090-Laptop": 76, "RTX-4080-Laptop": 58, "RTX-4070-Laptop": 36, "RTX-4060-Laptop": 24, "GB10": 48,
	"B200": 148, "H200": 132, "H100-80GB": 132, "H100-96GB": 132, "H100-94GB": 132, "H800-80GB": 132, "H20-96GB": 78,
	"GH200-96GB": 132, "A100-80GB": 108, "A100-40GB": 108, "A800-80GB": 108, "A30": 56, "L40S": 142, "L40": 142,
	"L20": 92, "L4": 58, "A40": 84, "A10G": 80, "RTX-PRO-6000": 188, "RTX-6000-Ada": 142, "A6000": 84, "A4000": 48,
	"V100-32GB": 80, "V100-16GB": 80, "T4": 40, "RTX-8000": 72, "RTX-5090": 170, "RTX-5060-Ti-16GB": 36,
	"RTX-4090": 128, "RTX-4070-Ti": 60, "RTX-4060": 24, "RTX-3090": 82, "RTX-3090-Ti": 84, "RTX-3080-10GB": 68,
	"RTX-3070": 46, "RTX-3060-12GB": 28, "RTX-2080-Ti": 68,
}

// shared is the memory of a system whose GPU and host have one between them. MI300A (131,809,200 KB, ROCm/ROCgdb 28)
// lets HIP take three quarters of it, unless the kernel module amdttm allows more (AMD's guide to MI300A).
var shared = map[string]ledger.Bytes{"GB10": gib(119.68), "MI300A": gib(125.70)}

// Shared returns the memory that a GPU and its host have between them, for systems with one memory. It is 0 for others.
func (m Model) Shared() ledger.Bytes { return shared[m.Name] }

// notes say what a plan of a model takes for granted.
var notes = map[string]string{
	"Vera-Rubin": "288 GB and its speeds are as NVIDIA announced them: no public run has printed what PyTorch can use",
	"MI250X":     "one of the two dies of a card: PyTorch sees each as a GPU of 64 GB, and a rank trains on each",
	"MI300A":     "HIP takes three quarters of its memory by default, 94 GiB",
}

// sizes are the memories that products of one name are sold with. The first counts where a name lacks the memory. It is
// empty where people have several, and none is usual.
var sizes = map[string][]string{
	"H100": {"80GB", "94GB", "96GB"}, "A100": {"80GB", "40GB"}, "A800": {"80GB", "40GB"}, "H20": {"96GB", "141GB"},
	"GH200": {"96GB", "144GB"}, "V100": {"", "32GB", "16GB"}, "P100": {"16GB", "12GB"},
	"RTX-5060-TI": {"", "16GB", "8GB"}, "RTX-4060-TI": {"", "16GB", "8GB"}, "RTX-3080": {"10GB", "12GB"},
	"RTX-3060": {"12GB", "8GB"},
}

// slice is an instance of a GPU that is divided (MIG): its memory and streaming multiprocessors.
type slice struct {
	memory     ledger.Bytes
	processors int
}

// instances of GPUs are those that "nvidia-smi mig -lgip" lists: of A100-40GB in NVIDIA's MIG User Guide, of the others
// in public records. Drivers differ by up to 0.25 GiB. The largest of H100 (79.25 in records) is held to the whole
// GPU's.
var instances = map[string]map[string]slice{
	"H100-80GB": {
		"1g.10gb": {gib(9.75), 16}, "1g.20gb": {gib(19.62), 26}, "2g.20gb": {gib(19.62), 32},
		"3g.40gb": {gib(39.50), 60}, "4g.40gb": {gib(39.50), 64}, "7g.80gb": {gib(79.11), 132},
	},
	"A100-80GB": {
		"1g.10gb": {gib(9.50), 14}, "1g.20gb": {gib(19.50), 14}, "2g.20gb": {gib(19.50), 28},
		"3g.40gb": {gib(39.25), 42}, "4g.40gb": {gib(39.25), 56}, "7g.80gb": {gib(78.75), 98},
	},
	"A100-40GB": {
		"1g.5gb": {gib(4.75), 14}, "1g.10gb": {gib(9.62), 14}, "2g.10gb": {gib(9.62), 28},
		"3g.20gb": {gib(19.50), 42}, "4g.20gb": {gib(19.50), 56}, "7g.40gb": {gib(39.25), 98},
	},
}

// accelerators are those of other vendors that people name, by the words of the name, with their memory.
var accelerators = []struct {
	pattern      *lazyregexp.Regexp
	name, memory string
}{
	{called(`GAUDI-?3|HL-?3\d*`), "Gaudi 3", "128 GB"}, {called(`GAUDI-?2|HL-?2\d*`), "Gaudi 2", "96 GB"},
	{called(`GAUDI`), "Gaudi", ""},
	{called(`(ASCEND-?)?910B\w*`), "Ascend 910B", "64 GB, of which torch_npu can use 60.97 GiB, or 32 GB"},
	{called(`(ASCEND-?)?910C`), "Ascend 910C", "64 GB for each of its two dies"}, {called(`ASCEND.*`), "Ascend", ""},
	{called(`(APPLE-?)?M[1-5](-?(PRO|MAX|ULTRA))?`), "processor of Apple", "shared with the host"},
	{called(`TPU.*`), "TPU", ""}, {called(`TRAINIUM.*|TRN[12].*`), "Trainium", ""},
}

// called matches an accelerator's name, with or without its maker and its memory.
func called(name string) *lazyregexp.Regexp {
	return lazyregexp.New(`^(?:INTEL-|HABANA-|HUAWEI-|GOOGLE-|AWS-)*(?:` + name + `)(?:-\d+GB)?$`)
}

// IsOffered reports whether a machine with the model can be advised: not a laptop's part, one whose memory the host has
// too, or one that is only announced.
func (m Model) IsOffered() bool {
	return m.Shared() == 0 && notes[m.Name] == "" && !strings.HasSuffix(m.Name, "-Laptop")
}
