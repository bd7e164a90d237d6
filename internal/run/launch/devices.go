//go:build linux

package launch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// Vendors whose GPUs can be hidden or reordered by variables.
const (
	nvidia = "10de"
	amd    = "1002"
)

// visible are the GPUs that a program sees, in the order in which it numbers them.
type visible struct {
	variable string // the variable that selects them; empty for none, and then nothing is known
	gpus     []host.Device
	why      string // why the GPUs cannot be told; empty if they can
}

// visibleGPUs reads the variables that hide and reorder GPUs.
func visibleGPUs(h *host.Host, lookup Environment) visible {
	all := gpusOf(h, nvidia)
	variables := []string{"CUDA_VISIBLE_DEVICES"}
	if len(all) == 0 {
		// AMD's runtime selects first, and its HIP layer selects from the rest. HIP
		// uses CUDA's variable if its own is not set.
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

// gpusOf returns the GPUs of a vendor in bus order. If the driver lists its GPUs,
// others are left out.
func gpusOf(h *host.Host, vendor string) []host.Device {
	all := slices.DeleteFunc(slices.Clone(h.GPUs), func(d host.Device) bool { return d.Vendor != vendor })
	if driven := slices.DeleteFunc(slices.Clone(all), func(d host.Device) bool { return !d.Driven }); len(driven) > 0 {
		return driven
	}
	return all
}

// choose selects the GPUs that the value of a variable names. Like CUDA, it stops at
// the first number that no GPU has.
func (v *visible) choose(value string, lookup Environment) {
	all, chosen := v.gpus, []host.Device{}
	v.gpus = nil
	value = strings.TrimSpace(value)
	if value == "" || value == "NoDevFiles" { // Slurm's name for none
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
					v.why = "CUDA numbers GPUs of different models by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID"
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

// renumbered returns the numbers of the entries on the host, and -1 for other entries.
// If Slurm confines a step to some GPUs, the step numbers those from 0.
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
		v.why = "it has neither the numbers of the step's GPUs in Slurm (" + list + ") nor numbers from 0"
	}
	return numbers
}

// different reports whether the GPUs are of several models.
func different(gpus []host.Device) bool {
	return slices.ContainsFunc(gpus, func(d host.Device) bool { return d.Product != gpus[0].Product })
}

// named returns the GPU with a UUID, which may be abbreviated. For an instance it
// returns the GPU that the instance is a part of.
func named(entry string, all []host.Device) (gpu host.Device, why string) {
	matches := all
	uuid, instance := strings.CutPrefix(entry, "MIG-")
	switch {
	case !instance || strings.HasPrefix(uuid, "GPU-"): // older names of instances include the name of the GPU
		uuid, _, _ = strings.Cut(uuid, "/")
		matches = matching(all, func(d host.Device) bool {
			return uuid != "" && len(d.UUID) >= len(uuid) && strings.EqualFold(d.UUID[:len(uuid)], uuid)
		})
	case len(all) > 1:
		matches = matching(all, func(d host.Device) bool { return d.Divided })
	}
	if len(matches) != 1 {
		return gpu, fmt.Sprintf("its entry %s matches %s", strconv.Quote(entry), ledger.Plural(len(matches), "GPU"))
	}
	return matches[0], ""
}

func matching(gpus []host.Device, is func(host.Device) bool) []host.Device {
	return slices.DeleteFunc(slices.Clone(gpus), func(d host.Device) bool { return !is(d) })
}

// gpusOfRanks returns the PCI addresses of the GPUs of all ranks on this host: for each
// rank the only GPU that it sees, or the one with its number.
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
		case len(seen) == 1: // one process with several GPUs, or the ranks of another launcher
			return []string{""}, ""
		default:
			return nil, fmt.Sprintf("it names %s for %s", ledger.Plural(len(v.gpus), "GPU"), ranks(len(seen)))
		}
	}
	for i, address := range addresses {
		if address != "" && slices.Contains(addresses[:i], address) && len(seen[i].gpus) == 1 &&
			!seen[i].gpus[0].Divided {
			return nil, "several ranks name the same GPU, but may see different ones"
		}
	}
	return addresses, ""
}
