package host

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"
)

// nvidiaDirectory is where the NVIDIA driver lists its GPUs by PCI address.
const nvidiaDirectory = "proc/driver/nvidia/gpus"

// Device is a PCI function.
type Device struct {
	Address string `json:"address"`   // domain:bus:device.function
	Vendor  string `json:"vendor"`    // "10de"
	Product string `json:"product"`   // "26b5"
	Node    int    `json:"numa_node"` // -1 where the firmware gives none
	// CPUs are the online CPUs nearest to the device, possibly fewer than all of its node; empty where the nearest
	// CPUs are unknown.
	CPUs cpuset.CPUSet `json:"cpus"`
	// UUID is the NVIDIA driver's id, "GPU-8a56..."; empty where the driver gives none. It identifies the machine, so
	// no report includes it.
	UUID string `json:"-"`
	// Driven reports whether the NVIDIA driver has the device. A program does not see other devices, such as another
	// container's.
	Driven bool `json:"-"`
	// Divided reports whether the GPU is divided into instances (MIG).
	Divided bool `json:"-"`
	// Names are the kernel's names of the device: "eth0", "mlx5_0".
	Names []string `json:"names"`
}

// gpuVendors make GPUs that compute: NVIDIA, AMD, Intel. Display controllers of other vendors sit on server boards
// and show a console.
var gpuVendors = []string{"10de", "1002", "8086"}

func (t tree) devices(h *Host) (gpus, nics []Device) {
	const directory = "sys/bus/pci/devices"
	driven := t.names(nvidiaDirectory)
	for _, address := range t.names(directory) {
		file := func(name string) string { return path.Join(directory, address, name) }
		hex := func(name string) string { return strings.TrimPrefix(t.text(file(name)), "0x") }
		class, vendor := hex("class"), hex("vendor")
		isGPU := strings.HasPrefix(class, "03") && slices.Contains(gpuVendors, vendor) ||
			strings.HasPrefix(class, "12") || // processing accelerators
			slices.Contains(driven, address)
		isNIC := strings.HasPrefix(class, "0200") || strings.HasPrefix(class, "0207") // Ethernet, InfiniBand
		if !isGPU && !isNIC {
			continue
		}
		device := Device{
			Address: address,
			Vendor:  vendor,
			Product: hex("device"),
			Node:    -1,
			CPUs:    t.cpus(h.Online, file("local_cpulist"), file("local_cpus")),
			Names:   append(t.names(file("net")), t.names(file("infiniband"))...),
		}
		if node, err := strconv.Atoi(t.text(file("numa_node"))); err == nil && h.Node(node) != nil {
			device.Node = node
			if device.CPUs.IsEmpty() {
				device.CPUs = h.Node(node).CPUs
			}
		}
		if device.Driven = slices.Contains(driven, address); device.Driven {
			t.askDriver(&device)
		}
		if isGPU {
			gpus = append(gpus, device)
		} else {
			nics = append(nics, device)
		}
	}
	return gpus, nics
}

// askDriver reads what the NVIDIA driver knows about a GPU.
func (t tree) askDriver(device *Device) {
	var minor string
	for line := range strings.Lines(t.text(path.Join(nvidiaDirectory, device.Address, "information"))) {
		key, value, _ := strings.Cut(line, ":")
		switch value = strings.TrimSpace(value); key {
		case "GPU UUID":
			if !strings.Contains(value, "?") { // "?" stands there before the first use
				device.UUID = value
			}
		case "Device Minor":
			minor = value
		}
	}
	instances := t.names("proc/driver/nvidia/capabilities/gpu" + minor + "/mig")
	device.Divided = minor != "" && slices.ContainsFunc(instances,
		func(name string) bool { return strings.HasPrefix(name, "gi") })
}
