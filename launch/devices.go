package launch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/host"
)

// Vendors of GPUs that have variables which hide or reorder them.
const (
	nvidia = "10de"
	amd    = "1002"
)

// visible are the GPUs that a program sees, in its order.
type visible struct {
	variable string // that says so; empty for none, and then nothing is known
	gpus     []host.Device
	why      string // it cannot be told which they are; empty where it can
}

// visibleGPUs reads what the environment hides and reorders.
func visibleGPUs(h *host.Host, lookup Environment) visible {
	all := gpusOf(h, nvidia)
	variables := []string{"CUDA_VISIBLE_DEVICES"}
	if len(all) == 0 {
		// AMD's runtime selects first, and its HIP layer of what is left. HIP
		// heeds CUDA's variable where its own is not set.
		all, variables = gpusOf(h, amd), []string{"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
		if _, set := lookup("HIP_VISIBLE_DEVICES"); !set {
			variables[1] = "CUDA_VISIBLE_DEVICES"
		}
	}
	seen := visible{gpus: all}
	for _, variable := range variables {
		if value, set := lookup(variable); set && seen.why == "" {
			seen = visible{variable: variable, gpus: seen.gpus}
			seen.choose(value, lookup)
		}
	}
	return seen
}

// gpusOf are the GPUs of a vendor in the order of the bus: those that its driver
// has, where it says which.
func gpusOf(h *host.Host, vendor string) []host.Device {
	all := slices.DeleteFunc(slices.Clone(h.GPUs), func(d host.Device) bool { return d.Vendor != vendor })
	if driven := slices.DeleteFunc(slices.Clone(all), func(d host.Device) bool { return !d.Driven }); len(driven) > 0 {
		return driven
	}
	return all
}

// choose takes the GPUs that the value of a variable names. As CUDA does, it
// ends at the first number that is no GPU's.
func (v *visible) choose(value string, lookup Environment) {
	all, chosen := v.gpus, []host.Device{}
	v.gpus = nil
	value = strings.TrimSpace(value)
	if value == "" || value == "NoDevFiles" { // Slurm's word for none
		return
	}
	entries := strings.Split(value, ",")
	numbers := v.renumbered(entries, len(all), lookup)
	for i, entry := range entries {
		if v.why != "" {
			return
		}
		entry = strings.TrimSpace(entry)
		if _, err := strconv.Atoi(entry); err == nil {
			number := numbers[i]
			if number < 0 || number >= len(all) {
				break
			}
			if different(all) {
				if order, _ := lookup("CUDA_DEVICE_ORDER"); order != "PCI_BUS_ID" {
					v.why = "the GPUs differ, and are numbered by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID"
					return
				}
			}
			chosen = append(chosen, all[number])
			continue
		}
		gpu, why := named(entry, all)
		if v.why = why; why == "" {
			chosen = append(chosen, gpu)
		}
	}
	v.gpus = chosen
}

// renumbered are the numbers of the entries, -1 for other entries, on the whole
// host. Where Slurm confines a step to some GPUs, the step numbers those from 0.
func (v *visible) renumbered(entries []string, gpus int, lookup Environment) []int {
	numbers := []int{}
	for _, entry := range entries {
		number, err := strconv.Atoi(strings.TrimSpace(entry))
		if err != nil {
			number = -1
		}
		numbers = append(numbers, number)
	}
	list, set := lookup("SLURM_STEP_GPUS")
	if !set {
		list, set = lookup("SLURM_JOB_GPUS")
	}
	step, err := host.ParseList(list)
	ids := step.List()
	if !set || err != nil || len(ids) == 0 || len(ids) >= gpus || slices.Max(numbers) < 0 {
		return numbers
	}
	sorted := slices.Sorted(slices.Values(numbers))
	fromZero := make([]int, len(ids))
	for i := range fromZero {
		fromZero[i] = i
	}
	switch {
	case slices.Equal(sorted, ids):
	case slices.Equal(sorted, fromZero):
		for i, number := range numbers {
			numbers[i] = ids[number]
		}
	default:
		v.why = "Slurm has given the step GPUs " + list + ", and it is not known from where they are numbered"
	}
	return numbers
}

// different says that the GPUs are not all of one model.
func different(gpus []host.Device) bool {
	return slices.ContainsFunc(gpus, func(d host.Device) bool { return d.Product != gpus[0].Product })
}

// named is the GPU of a UUID or of the beginning of one, or the GPU that an
// instance of that name is a part of.
func named(entry string, all []host.Device) (gpu host.Device, why string) {
	matches := all
	uuid, instance := strings.CutPrefix(entry, "MIG-")
	switch {
	case !instance || strings.HasPrefix(uuid, "GPU-"): // the older names of instances hold that of the GPU
		uuid, _, _ = strings.Cut(uuid, "/")
		matches = matching(all, func(d host.Device) bool {
			return uuid != "" && len(d.UUID) >= len(uuid) && strings.EqualFold(d.UUID[:len(uuid)], uuid)
		})
	case len(all) > 1:
		matches = matching(all, func(d host.Device) bool { return d.Divided })
	}
	if len(matches) != 1 {
		return gpu, fmt.Sprintf("%s fits %s", strconv.Quote(entry), agree(len(matches), "GPU", "GPUs"))
	}
	return matches[0], ""
}

func matching(gpus []host.Device, is func(host.Device) bool) []host.Device {
	return slices.DeleteFunc(slices.Clone(gpus), func(d host.Device) bool { return !is(d) })
}

// gpusOfRanks are the PCI addresses of the GPUs of all ranks of this host, given
// what each of them sees: the one that it sees alone, or that of its number.
func gpusOfRanks(seen []visible) (addresses []string, why string) {
	for i, v := range seen {
		switch {
		case v.why != "":
			return nil, v.why
		case len(v.gpus) == len(seen):
			addresses = append(addresses, v.gpus[i].Address)
		case len(v.gpus) == 1:
			addresses = append(addresses, v.gpus[0].Address)
		case len(v.gpus) == 0:
			addresses = append(addresses, "")
		case len(seen) == 1: // one process with several GPUs, or ranks of another launcher
			return []string{""}, ""
		default:
			return nil, fmt.Sprintf("it names %s for %s", agree(len(v.gpus), "GPU", "GPUs"), ranks(len(seen)))
		}
	}
	for i, address := range addresses {
		if address != "" && slices.Contains(addresses[:i], address) && len(seen[i].gpus) == 1 &&
			!seen[i].gpus[0].Divided {
			return nil, "several ranks name the same GPU, which may be another for each"
		}
	}
	return addresses, ""
}
