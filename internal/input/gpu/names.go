package gpu

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

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
