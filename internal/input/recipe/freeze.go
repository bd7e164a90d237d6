package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// Freeze says which parameters of a model LLaMA-Factory trains, by their names (_setup_freeze_tuning in
// model/adapter.py).
type Freeze struct {
	Layers  int      // the last ones, or the first ones if it is negative
	Spread  bool     // LLaMA Pro: so many layers, at equal distances
	Modules []string // of these layers, "all" for all of them
	Extra   []string // outside the layers
	// Widens says that trained parameters are converted to fp32.
	Widens bool
	// BeforeSharding says that FSDP2 divides the model after that, so that the shards of trained parameters are fp32.
	BeforeSharding bool

	Place fault.Position
}

// Trained returns which of the parameters are trained. The error is a *fault.Input.
func (f *Freeze) Trained(names []string, layers int) ([]bool, error) {
	inside, outside := map[string]bool{"all": true}, map[string]bool{}
	for _, name := range names {
		for _, index := range []string{".0.", ".1."} {
			if _, rest, found := cutLast(name, index); found {
				module, _, _ := strings.Cut(rest, ".")
				inside[module] = true
				break
			}
		}
		if parts := strings.Split(name, "."); !indexed.MatchString(name) && len(parts) > 1 {
			outside[parts[len(parts)-2]] = true
		}
	}
	patterns := slices.Clone(f.Extra)
	for _, module := range f.Extra {
		if !outside[module] {
			return nil, f.Place.Inputf("the model has no module %s outside its layers", module)
		}
	}
	indexes, err := f.indexes(layers)
	if err != nil {
		return nil, err
	}
	for _, module := range f.Modules {
		if !inside[module] {
			return nil, f.Place.Inputf("the layers of the model have no module %s", module)
		}
		for _, index := range indexes {
			patterns = append(patterns, fmt.Sprintf(".%d.%s", index, strings.Replace(module, "all", "", 1)))
		}
	}
	trained := make([]bool, len(names))
	for i, name := range names {
		trained[i] = slices.ContainsFunc(patterns, func(pattern string) bool { return strings.Contains(name, pattern) })
	}
	return trained, nil
}

// indexes returns the indexes of the trained layers.
func (f *Freeze) indexes(layers int) ([]int, error) {
	var list []int
	switch n := f.Layers; {
	case f.Spread && (n <= 0 || layers%n != 0):
		return nil, f.Place.Inputf("freeze_trainable_layers is %d, but LLaMA Pro needs a divisor of the %d layers", n,
			layers)
	case f.Spread:
		for at := layers/n - 1; at < layers; at += layers / n {
			list = append(list, at)
		}
	case n > 0:
		for at := max(0, layers-n); at < layers; at++ {
			list = append(list, at)
		}
	default:
		for at := range min(-n, layers) {
			list = append(list, at)
		}
	}
	return list, nil
}

var indexed = lazyregexp.New(`\.\d+\.`)

// cutLast cuts a text around the last separator.
func cutLast(text, separator string) (before, after string, found bool) {
	at := strings.LastIndex(text, separator)
	if at < 0 {
		return text, "", false
	}
	return text[:at], text[at+len(separator):], true
}
