package recipe

import (
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
)

// CoreAdapter says which low-rank adapters a program puts on linear layers of Megatron core. Every other parameter is
// frozen.
type CoreAdapter struct {
	At      fault.Position // that says the adapter
	Program CoreTuner
	Rank    int64
	Dropout float64
	// DropsAfter says that the dropout is behind the product, and not before it.
	DropsAfter bool
	// Canonical says that the layers that join projections have an adapter for each of these.
	Canonical bool
	// ByExpert says that every expert has an adapter of its own. Without it the experts of a rank that are joined share
	// one.
	ByExpert bool
	// AllToAll says that sequence parallel ranks exchange the result of a row parallel layer, and do not gather it.
	AllToAll bool
	// Trained are the matrices beside the layers that are trained as copies: word_embeddings and output_layer.
	Trained []string

	patterns []*regexp.Regexp
	all      bool // linear layers but the head
}

// CoreTuner is a program whose modules adapt layers of Megatron core.
type CoreTuner string

// The programs: mcore_bridge/tuners/lora.py, and megatron/bridge/peft/utils.py.
const (
	SwiftTuner  CoreTuner = "ms-swift"
	BridgeTuner CoreTuner = "Megatron-Bridge"
)

// CoreCopies are the matrices beside the layers that may be trained as copies.
var CoreCopies = []string{"word_embeddings", "output_layer"}

// Targets reports whether a linear layer is adapted, by the path of its module in the model.
func (a *CoreAdapter) Targets(path string) bool {
	return a.all || slices.ContainsFunc(a.patterns, func(p *regexp.Regexp) bool { return p.MatchString(path) })
}

// Says reports whether the targets name a module. The model need not have it, and all linear layers name none.
func (a *CoreAdapter) Says(path string) bool {
	return slices.ContainsFunc(a.patterns, func(p *regexp.Regexp) bool { return p.MatchString(path) })
}

// target adds a pattern for the path of a module.
func (a *CoreAdapter) target(pattern string) error {
	compiled, err := regexp.Compile(pattern)
	if err != nil {
		return a.At.Inputf("%q is no regular expression: %v", pattern, err)
	}
	a.patterns = append(a.patterns, compiled)
	return nil
}

// TargetNames targets modules by their names or the ends of their paths, as PEFT does. The name all-linear stands for
// every linear layer but the head.
func (a *CoreAdapter) TargetNames(names []string) error {
	for _, name := range names {
		if name == "all-linear" {
			a.all = true
			continue
		}
		if err := a.target(`\A(?:.*\.)?` + regexp.QuoteMeta(name) + `\z`); err != nil {
			return err
		}
	}
	return nil
}

// TargetPattern targets modules by a regular expression for their paths.
func (a *CoreAdapter) TargetPattern(pattern string) error { return a.target(`\A(?:` + pattern + `)\z`) }

// targetWildcards targets modules by their names, or by paths with * for anything (wildcard_match in
// megatron/bridge/peft/utils.py). All else in a path is a regular expression there.
func (a *CoreAdapter) targetWildcards(names []string) error {
	for _, name := range names {
		pattern := strings.ReplaceAll(name, "*", ".*")
		if !strings.Contains(name, ".") {
			pattern += `|.*\.` + regexp.QuoteMeta(name)
		}
		if err := a.TargetPattern(pattern); err != nil {
			return err
		}
	}
	return nil
}
