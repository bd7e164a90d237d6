package gpu

import (
	"errors"
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
	} {
		if m, err := Find(name); err != nil || m.Name != want {
			t.Errorf("%q is %q (%v), want %q", name, m.Name, err, want)
		}
	}
	for _, name := range []string{"", "H1000", "banana", "A100-20GB", "GPU", "RTX", "80GB", "A100 H100",
		// The same words, and another memory.
		"RTX 6000", "Quadro RTX 6000", "RTX 4070", "RTX 2080", "RTX 3080 Ti", "RTX 3080 12GB", "RTX 4070 Ti SUPER",
		"RTX 5090 D V2", "A800-SXM4-40GB", "RTX 5060 Ti 8GB", "H20-3e 141GB", "NVL", "480GB", "A100 NVL",
		"NVIDIA GH200 144G HBM3e", "NVIDIA H100 NVL MIG 1g.12gb",
		"NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"} {
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
