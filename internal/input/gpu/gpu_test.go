package gpu

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

func TestFind(t *testing.T) {
	for name, want := range map[string]string{
		"H100-80GB": "H100-80GB", "NVIDIA H100 80GB HBM3": "H100-80GB", "h100": "H100-80GB", "a100": "A100-80GB",
		"A100-SXM4-40GB":        "A100-40GB",
		"NVIDIA A100-PCIE-40GB": "A100-40GB", "Tesla V100-SXM2-16GB": "V100-16GB",
		"NVIDIA GeForce RTX 4090": "RTX-4090", "L4": "L4", "L40S": "L40S", "Tesla T4": "T4",
		"NVIDIA A10G": "A10G", "H200": "H200", "AMD Instinct MI300X": "MI300X", "4090": "RTX-4090",
		"NVIDIA RTX A6000":      "A6000",
		"NVIDIA A800-SXM4-80GB": "A800-80GB", "NVIDIA H800": "H800-80GB", "NVIDIA H20": "H20-96GB", "NVIDIA L20": "L20",
		"NVIDIA L40": "L40", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
		"NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000", "Quadro RTX 8000": "RTX-8000",
		"GeForce RTX 2080 Ti": "RTX-2080-Ti", "rtx3080": "RTX-3080-10GB",
		"NVIDIA GeForce RTX 4070 Ti": "RTX-4070-Ti", "RTX 3060": "RTX-3060-12GB", "AMD Instinct MI355X": "MI355X",
		"NVIDIA A100 80GB PCIe": "A100-80GB", "NVIDIA H200 NVL": "H200", "a100_40gb": "A100-40GB",
		"NVIDIA H100 NVL": "H100-94GB", "h100-nvl": "H100-94GB", "H100 94GB": "H100-94GB",
		"NVIDIA GH200 480GB": "GH200-96GB", "GH200": "GH200-96GB",
		"NVIDIA H100 PCIe": "H100-80GB", "NVIDIA L40S": "L40S", "NVIDIA B200": "B200",
		"NVIDIA GeForce RTX 4070 Ti SUPER": "RTX-4070-Ti-SUPER", "RTX 4070": "RTX-4070", "4080 super": "RTX-4080-SUPER",
		"NVIDIA GeForce RTX 4090 Laptop GPU": "RTX-4090-Laptop", "rtx 4090 mobile": "RTX-4090-Laptop",
		"NVIDIA B300 SXM6 AC": "B300", "NVIDIA GB200": "GB200", "GB300 NVL72": "GB300", "NVIDIA GB10": "GB10",
		"dgx-spark": "GB10", "DGX Spark 128GB": "GB10", "Vera Rubin NVL72": "Vera-Rubin", "rubin": "Vera-Rubin",
		"NVIDIA A10": "A10", "A10 24GB": "A10", "NVIDIA RTX A5000": "A5000", "AMD Instinct MI250X": "MI250X",
		"MI250": "MI250X", "MI300A 128GB": "MI300A", "RTX 5060 Ti 16G": "RTX-5060-Ti-16GB", "V100 16GB": "V100-16GB",
		"h100:3g.40gb": "H100-80GB:3g.40gb", "H100 MIG 3g.40gb": "H100-80GB:3g.40gb",
		"NVIDIA A100-SXM4-40GB MIG 1g.5gb": "A100-40GB:1g.5gb", "a100:3g.20gb": "A100-40GB:3g.20gb",
	} {
		if m, err := Find(name); err != nil || m.Name != want {
			t.Errorf("%q is %q (%v), want %q", name, m.Name, err, want)
		}
	}
	for _, name := range []string{"", "H1000", "banana", "A100-20GB", "GPU", "RTX", "80GB", "A100 H100",
		// The same words, and another memory.
		"RTX 6000", "Quadro RTX 6000", "RTX 2080", "RTX 3080 Ti", "RTX 3080 12GB", "RTX 4070 T", "A6000 Ada",
		"RTX 4090 48GB",
		"RTX 5090 D V2", "A800-SXM4-40GB", "RTX 5060 Ti 8GB", "H20-3e 141GB", "NVL", "480GB", "A100 NVL",
		"NVIDIA GH200 144G HBM3e", "NVIDIA H100 NVL MIG 1g.12gb",
		"NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.9gb", "H100 MIG", "a100:1g.10gb",
		// None is usual, or it is no GPU of CUDA.
		"V100", "Tesla V100", "RTX 5060 Ti", "RTX 4060 Ti", "Gaudi 3", "Ascend 910B", "M3 Max", "24GB", "GB10 64GB",
		"L4 T4", "A100-80GB H100-80GB"} {
		if m, err := Find(name); !errors.As(err, new(*fault.Input)) {
			t.Errorf("%q is %q: %v", name, m.Name, err)
		}
	}
	if _, err := Find("l40x"); !strings.Contains(err.Error(), "did you mean") {
		t.Error(err)
	}
}

func TestModels(t *testing.T) {
	for _, m := range models {
		if m.Memory <= 0 || m.Workspace() <= 0 {
			t.Errorf("%+v", m)
		}
		if _, ok := processors[m.Name]; ok != (m.Capability > 0) {
			t.Errorf("%s of capability %d has processors: %v", m.Name, m.Capability, ok)
		}
		if found, err := Find(m.Name); err != nil || found != m {
			t.Errorf("%s is found as %+v, %v", m.Name, found, err)
		}
	}
}

// TestProducts: products of one name differ in speed.
func TestProducts(t *testing.T) {
	for name, want := range map[string]struct{ half, bandwidth, peer float64 }{
		"NVIDIA H100 80GB HBM3": {989, 3350, 450}, "NVIDIA H100 PCIe": {756, 2039, 64}, "h100-pcie": {756, 2039, 64},
		"NVIDIA A100 80GB PCIe": {312, 1935, 32}, "NVIDIA A100-PCIE-40GB": {312, 1555, 32},
		"NVIDIA A100-SXM4-80GB": {312, 2039, 300}, "Tesla V100-PCIE-16GB": {112, 900, 16},
		"NVIDIA H200 NVL": {835, 4800, 64}, "NVIDIA H100 NVL": {835, 3938, 64}, "NVIDIA GH200 480GB": {989, 4000, 450},
		"NVIDIA GeForce RTX 3090": {71, 936, 32}, "NVIDIA GeForce RTX 4090 D": {},
		"NVIDIA GeForce RTX 3090 Ti": {80, 1008, 32},
		"H100-80GB SXM5":             {989, 3350, 450}, "A40-48GB": {149.7, 696, 32}, "AMD Instinct MI300X VF": {},
	} {
		m, err := Find(name)
		if err != nil || m.Speed.Half != want.half || m.Bandwidth != want.bandwidth || m.Speed.Peer != want.peer {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
}

// TestCounted takes a number of GPUs from before their name.
func TestCounted(t *testing.T) {
	for text, want := range map[string]struct {
		number int
		name   string
		is     bool
	}{
		"8xH100": {8, "H100", true}, "8 X H100-80GB": {8, "H100-80GB", true}, "0xA100": {0, "A100", true},
		"H100": {0, "H100", false}, "4090": {0, "4090", false}, "12345xH100": {0, "12345xH100", false},
	} {
		if number, name, is := Counted(text); number != want.number || name != want.name || is != want.is {
			t.Errorf("%s: %d, %q, %t", text, number, name, is)
		}
	}
}

// TestMisspelt edits every name, letter by letter and word by word. What is found then is what the text says, and a
// suggestion never has another number without saying so.
func TestMisspelt(t *testing.T) {
	for _, name := range Names() {
		for _, text := range edits(name) {
			checkMisspelt(t, name, text)
		}
		for _, other := range Names() {
			if !contains(words(name), words(other)) && !contains(words(other), words(name)) {
				both := words(name + " " + other)
				slices.Sort(both)
				m, err := Find(name + " " + other)
				if err == nil && len(words(m.Name)) != len(slices.Compact(both)) {
					t.Errorf("%s and %s together are %s", name, other, m.Name)
				}
			}
		}
	}
}

// edits returns a name without each letter, with each letter twice, with every other digit, and without each word.
func edits(name string) []string {
	var all []string
	for i := range name {
		all = append(all, name[:i]+name[i+1:], name[:i+1]+name[i:])
		for digit := '0'; digit <= '9' && name[i] >= '0' && name[i] <= '9'; digit++ {
			all = append(all, name[:i]+string(digit)+name[i+1:])
		}
	}
	parts := strings.Split(name, "-")
	for i := range parts {
		all = append(all, strings.Join(append(slices.Clone(parts[:i]), parts[i+1:]...), "-"))
	}
	return all
}

func checkMisspelt(t *testing.T, name, text string) {
	t.Helper()
	m, err := Find(text)
	if err == nil {
		said, have := words(text), words(m.Name)
		isSaid := contains(said, have) || contains(said, words(m.Alias)) && m.Alias != ""
		if !isSaid && len(m.Notes(text)) == 0 && len(sizes[family(m.Name)]) > 0 {
			t.Errorf("%s of %s is %s, and nothing says that it is", text, name, m.Name)
		}
		if !isSaid && !isShort(said, have) {
			t.Errorf("%s of %s is %s", text, name, m.Name)
		}
		return
	}
	_, suggested, asks := strings.Cut(err.(*fault.Input).Hint, "did you mean ")
	suggested, _, _ = strings.Cut(suggested, "?")
	for _, candidate := range strings.Split(strings.ReplaceAll(suggested, " or ", ", "), ", ") {
		if asks && !slices.Equal(numbers.FindAllString(text, -1), numbers.FindAllString(candidate, -1)) {
			t.Errorf("%s of %s: did you mean %s?", text, name, candidate)
		}
	}
}

// TestSuggestions: another number is another GPU.
func TestSuggestions(t *testing.T) {
	for text, want := range map[string]string{
		"H1000": "the nearest known name is H100-80GB, another GPU", "l40x": "did you mean L40S or L40?",
		"A100-20GB": "of that name are known: A100-80GB, A100-40GB",
		"B400":      "the nearest known name is B300, another GPU",
		"V100":      "give one of them", "24GB": "give --gpu-memory 24GB", "Gaudi 3": "its memory is 128 GB",
		"RTX 4070 T": "did you mean RTX-4070-Ti-SUPER, RTX-4070-Ti, RTX-4070-SUPER, ",
		"M3 Max":     "shared with the host", "h100:5g.50gb": "nvidia-smi mig -lgip",
	} {
		_, err := Find(text)
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(input.Hint, want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestNotes: a size that a text leaves open is said, and so are one memory for both and what is no GPU of CUDA.
func TestNotes(t *testing.T) {
	for text, want := range map[string]string{
		"a100": "there is one with 40GB, too", "A100-80GB": "", "h100:3g.40gb": "", "GB10": "one memory of 120 GiB",
		"MI300A": "HIP takes three quarters", "RTX 4090": "", "L4": "", "H100": "94GB or 96GB",
	} {
		m, err := Find(text)
		said := strings.Join(m.Notes(text), "; ")
		if err != nil || !strings.Contains(said, want) || want == "" && said != "" {
			t.Errorf("%s: %q, %v", text, said, err)
		}
	}
	if said := (Model{Name: "Gaudi 3"}).Notes("Gaudi 3"); len(said) != 1 {
		t.Error(said)
	}
	if m, _ := Find("h100:3g.40gb"); m.Processors() != 60 || m.Memory != gib(39.5) || m.Bandwidth != 0 {
		t.Errorf("%+v", m)
	}
}

// TestAlike: rates that are only announced rank no other GPU's recipes.
func TestAlike(t *testing.T) {
	rubin, err := Find("Vera Rubin")
	if err != nil || rubin.Speed.Half == 0 {
		t.Fatal(rubin, err)
	}
	unknown := Model{Memory: rubin.Memory, Capability: rubin.Capability}
	if like := Alike(unknown); like.Name != "B300" {
		t.Errorf("a GPU with the memory of %s is like %s, want B300", rubin.Name, like.Name)
	}
}
