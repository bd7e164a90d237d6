package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// named returns the model with the speed of the product that these words of a name mean. Another product, such as a
// card of less power, has the memory and an unknown speed.
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

// Find returns a model by its name. The spelling may differ: "NVIDIA H100 80GB HBM3" is H100-80GB, and "H100 PCIe" is
// H100-80GB with the speed of the card. A name without its memory means the usual one, and a name for which none is
// usual is asked back. "h100:3g.40gb" is an instance of a divided GPU.
func Find(name string) (Model, error) {
	if base, profile, is := dividedName(name); is {
		return findInstance(name, base, profile)
	}
	wanted := words(name)
	isCard := strings.Contains(strings.ToUpper(name), "PCIE")
	for _, m := range models {
		have := words(m.Name)
		alias := words(m.Alias)
		switch {
		case slices.Contains(wanted, "MIG"):
		case contains(wanted, have) && m.allows(wanted, have):
			return m.named(wanted, isCard), nil
		case len(alias) > 0 && contains(wanted, alias) && m.allows(without(wanted, alias), have):
			return m.named(wanted, isCard), nil
		case isShort(wanted, have):
			if sold := sizes[family(m.Name)]; len(sold) > 0 && sold[0] == "" {
				return Model{}, severalSizes(name, m.Name, sold[1:])
			}
			return m.named(wanted, isCard), nil
		}
	}
	return Model{}, unknown(name)
}

// products are words that name another product with the memory of the model: cards for China, of less power, or a part
// that a virtual machine sees.
var products = []string{"D", "NVL", "VF"}

// Means reports whether a text is meant as a GPU: a model, one whose memory is open, a memory, or the accelerator of
// another maker.
func Means(text string) bool {
	said := words(text)
	_, _, isAccelerator := accelerator(text)
	_, err := Find(text)
	return err == nil || isAccelerator || len(said) == 1 && isMemory(said[0]) || len(said) > 0 && slices.ContainsFunc(
		models, func(m Model) bool { return isShort(said, words(m.Name)) })
}

// allows reports whether the words that a model's name lacks can belong to it. Any other word may be that of another
// model, or a misspelt one: RTX 4070 T is no RTX 4070.
func (m Model) allows(wanted, have []string) bool {
	for _, w := range wanted {
		switch {
		case slices.Contains(have, w):
		case isMemory(w):
			if slices.ContainsFunc(have, isMemory) || !m.isSoldAs(w) {
				return false
			}
		case slices.Contains(have, "PRO") && (w == "MAX" || w == "Q"):
		case !slices.Contains(products, w):
			return false
		}
	}
	return true
}

// isSoldAs reports whether a size is that on the box of a model: what PyTorch can use is up to a tenth less.
func (m Model) isSoldAs(size string) bool {
	gigabytes, err := strconv.ParseFloat(strings.TrimSuffix(size, "GB"), 64)
	part := float64(max(m.Memory, m.Shared())) / (gigabytes * float64(ledger.GiB))
	return err == nil && part > 0.9 && part <= 1.001
}

// severalSizes asks for the memory of a GPU that is sold with several.
func severalSizes(text, name string, sold []string) error {
	short := strings.TrimSuffix(name, "-"+sold[0])
	var full []string
	for _, size := range sold {
		full = append(full, short+"-"+size)
	}
	return fault.Inputf("%q does not say its memory: there are %s", text, strings.Join(full, " and ")).
		WithHint("give one of them, or the memory with --gpu-memory")
}

// family is the name of a model without its memory.
func family(name string) string {
	parts := strings.Split(strings.ToUpper(name), "-")
	return strings.Join(slices.DeleteFunc(parts, isMemory), "-")
}

// Notes says what a plan takes for granted of a GPU that a text names: which of several sizes it is, and that other
// makers' accelerators are no GPUs of CUDA.
func (m Model) Notes(text string) []string {
	var said []string
	sold := sizes[family(m.Name)]
	isOpen := isShort(words(text), words(m.Name)) && !slices.ContainsFunc(words(text), isMemory)
	if len(sold) > 1 && isOpen && slices.ContainsFunc(models, m.is) {
		said = append(said, fmt.Sprintf("%s is %s, as most are: there is one with %s, too", text, m.Name,
			fault.OneOf(sold[1:]...)))
	}
	if note := notes[m.Name]; note != "" {
		said = append(said, fmt.Sprintf("%s: %s", m.Name, note))
	}
	if m.Shared() > 0 {
		said = append(said, fmt.Sprintf("%s: GPU and host have one memory of %v, and the plan holds the sum of both "+
			"to it", m.Name, m.Shared()))
	}
	if name, _, is := accelerator(text); is {
		said = append(said, fmt.Sprintf("%s: planned as a GPU of CUDA with that much memory, as nothing is known of "+
			"what its own libraries take", name))
	}
	return said
}

// is reports whether a model is another one, with the memory that this one has.
func (m Model) is(other Model) bool { return other.Name == m.Name && other.Memory == m.Memory }

// accelerator returns the name and memory of another maker's accelerator, as people call it.
func accelerator(text string) (name, memory string, is bool) {
	joined := strings.Join(words(text), "-")
	for _, a := range accelerators {
		if a.pattern.MatchString(joined) {
			return a.name, a.memory, true
		}
	}
	return "", "", false
}

// unknown is the error for a name that is no model's.
func unknown(name string) error {
	if number := countedAfter.FindStringSubmatch(name); number != nil {
		if _, err := Find(number[1]); err != nil {
			return err
		}
		return fault.Inputf("%q is a number of GPUs, expected the name of one", name).
			WithHint(fmt.Sprintf("give --gpus %s and --gpu %s", number[2], number[1]))
	}
	if number := counted.FindStringSubmatch(name); number != nil {
		if _, err := Find(number[2]); err != nil {
			return err
		}
		return fault.Inputf("%q is a number of GPUs, expected the name of one", name).
			WithHint(fmt.Sprintf("give --gpus %s and --gpu %s", number[1], number[2]))
	}
	if size := words(name); len(size) == 1 && isMemory(size[0]) {
		return fault.Inputf("%q is a memory, expected the name of a GPU", name).
			WithHint("give --gpu-memory " + size[0])
	}
	if other, memory, is := accelerator(name); is {
		e := fault.Inputf("%q is a %s: plans are of PyTorch on CUDA and ROCm, and nothing is known of what other "+
			"libraries take", name, other)
		hint := "give --gpu-memory for a plan as if it were a GPU of CUDA"
		if memory != "" {
			hint += "; its memory is " + memory
		}
		return e.WithHint(hint)
	}
	hint := `"plimsoll models --gpus" lists those that are known; for any other, give --gpu-memory`
	if near := suggestion(name); near != "" {
		hint = strings.Replace(near+"; ", "?;", "?", 1) + hint
	}
	return fault.Inputf("unknown GPU %q", name).WithHint(hint)
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

// isMemory reports whether a word of a name is a size.
func isMemory(word string) bool {
	return strings.HasSuffix(word, "GB") && word[0] >= '0' && word[0] <= '9'
}

// product is the part of a name that says the maker's line and generation: letters, then a number.
var product = lazyregexp.New(`[A-Z]*\d+`)

// suggestion says the known names that a misspelt one may mean. Names with another number are other GPUs, and it says
// so: an H100 is no misspelt H1000.
func suggestion(name string) string {
	joined := strings.Join(words(name), "-")
	key := product.FindString(joined)
	var alike []string
	for _, known := range Names() {
		if key != "" && product.FindString(strings.Join(words(known), "-")) == key {
			alike = append(alike, known)
		}
	}
	same := slices.DeleteFunc(slices.Clone(alike), func(known string) bool {
		return !slices.Equal(numbers.FindAllString(strings.ToUpper(name), -1), numbers.FindAllString(known, -1))
	})
	if len(same) > 0 {
		return fmt.Sprintf("did you mean %s?", fault.OneOf(same...))
	}
	if len(alike) > 0 {
		return fmt.Sprintf("of that name are known: %s", strings.Join(alike, ", "))
	}
	if near := nearest(name); near != "" {
		return fmt.Sprintf("the nearest known name is %s, another GPU", near)
	}
	return ""
}

var numbers = lazyregexp.New(`\d+`)

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

// divided is an instance of a divided GPU in a name: "h100:3g.40gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
var divided = lazyregexp.New(`(?i)^(.*?)[ :_-]*(?:MIG[ :_-]*)?\b(\d+g\.\d+gb)(?:\+\S+)?$`)

// dividedName returns the GPU and the profile of an instance's name.
func dividedName(name string) (base, profile string, is bool) {
	found := divided.FindStringSubmatch(strings.TrimSpace(name))
	if found == nil {
		return "", "", false
	}
	return found[1], strings.ToLower(found[2]), true
}

// findInstance returns an instance of a divided GPU: its memory and multiprocessors. Its speed is published nowhere.
func findInstance(name, base, profile string) (Model, error) {
	var found []Model
	for _, m := range models {
		part, is := instances[m.Name][profile]
		if full, err := Find(base); is && (isShort(words(base), words(m.Name)) || err == nil && full.Name == m.Name) {
			m.Name, m.Memory, m.Bandwidth, m.Speed = m.Name+":"+profile, part.memory, 0, Speed{}
			found = append(found, m)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Model{}, fault.Inputf("%q: the memory of such an instance is not known", name).
			WithHint(`give the GiB that "nvidia-smi mig -lgip" shows of it: --gpu-memory 19.5GiB, for one`)
	}
	return Model{}, fault.Inputf("%q may be %s or %s", name, found[0].Name, found[1].Name).WithHint("give one of them")
}

// counted is a name with a number of GPUs before it: 8xH100, 8 x H100. Or the number stands behind it: H100x8.
var (
	counted      = lazyregexp.New(`^(\d+) ?[xX*] ?(\S.*)$`)
	countedAfter = lazyregexp.New(`^(\S.*?) ?[xX*] ?(\d{1,3})$`)
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

// LooksNamed reports whether a number is one that GeForce cards are named by: 4090, 5070.
func LooksNamed(number string) bool { return geforce.MatchString(number) }

var geforce = lazyregexp.New(`^(?:10|16|20|30|40|50)[5-9]0$`)

// ignored are words of names that tell no models apart.
var ignored = []string{
	"NVIDIA", "AMD", "TESLA", "GEFORCE", "RTX", "INSTINCT", "QUADRO", "GENERATION", "BLACKWELL", "GRACE", "WORKSTATION",
	"SERVER", "EDITION", "SXM", "SXM2", "SXM4", "SXM5", "SXM6", "AC", "PCIE", "HBM2", "HBM2E", "HBM3", "HBM3E", "HBM4",
	"GPU", "NVL72", "NVL36", "NVL16", "NVL8", "NVL4",
}

// asSize is a size in a name, however it is written.
var asSize = lazyregexp.New(`^(\d+)(?:G|GB|GIB)$`)

// words returns the words of a name that distinguish models.
func words(name string) []string {
	fields := strings.FieldsFunc(strings.ToUpper(name), func(r rune) bool { return strings.ContainsRune(" -_/", r) })
	var kept []string
	for _, f := range fields {
		if digits := strings.TrimPrefix(f, "RTX"); digits != "" && digits[0] <= '9' {
			f = digits // RTX4090
		}
		if size := asSize.FindStringSubmatch(f); size != nil {
			f = size[1] + "GB"
		}
		if f == "MOBILE" {
			f = "LAPTOP"
		}
		if !slices.Contains(ignored, f) {
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

// without returns the words that are not among others.
func without(all, some []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(w string) bool { return slices.Contains(some, w) })
}
