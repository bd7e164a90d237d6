package job

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
)

// unplannedOptimizers are optimizers with states of their own, by the start of their names without separators.
var unplannedOptimizers = []struct{ start, why string }{
	{"qgalore", "Q-GaLore keeps moments of gradients that it projects to a low rank, and decomposes gradients"},
	{"muon", "Muon keeps a momentum of matrices, and AdamW the moments of the other parameters"},
	{"grokadamw", "GrokAdamW keeps an average of the gradient beside AdamW's moments"},
	{"stableadamw", "StableAdamW of optimi keeps compensations of rounding beside the moments"},
	{"muadam", "mup builds its groups of parameters, one for each width"},
	{"musgd", "mup builds its groups of parameters, one for each width"},
	{"shampoo", "Shampoo keeps factors of each dimension and their inverse roots"},
	{"distributedshampoo", "Shampoo keeps factors of each dimension and their inverse roots"},
	{"dion", "Dion keeps a momentum of matrices and a factor of low rank"},
}

// otherOptimizers are names of optimizers near to those that are planned: none of them is a misspelling.
var otherOptimizers = strings.Fields(`adan adamax nadam radam adamp adabelief adabound sparseadam rprop asgd lars
	adadelta sam qlion prodigy came tiger mars
	sophia nadamw`)

// unplannedOptimizer is the error for an optimizer that cannot be planned.
func unplannedOptimizer(where fault.Position, name string) error {
	plain := separators.ReplaceAllString(strings.ToLower(name), "")
	for _, u := range unplannedOptimizers {
		if strings.HasPrefix(plain, u.start) {
			return where.Inputf("plimsoll cannot plan the optimizer %q yet: %s", name, u.why).
				WithHint("plan the job with --optimizer adamw, and expect its memory to differ")
		}
	}
	hint := "plimsoll plans " + strings.Join(Optimizers(), ", ")
	if near := meantOptimizer(plain); near != "" {
		hint = fmt.Sprintf("did you mean %q? %s", near, hint)
	}
	return where.Inputf("plimsoll cannot plan the optimizer %q", name).WithHint(hint)
}

var (
	separators = regexp.MustCompile(`[-_ /]`)
	digits     = regexp.MustCompile(`[0-9]+`)
)

// meantOptimizer returns the name that another one misspells, or "". Another number of bits is another optimizer.
func meantOptimizer(plain string) string {
	if slices.Contains(otherOptimizers, plain) {
		return ""
	}
	var candidates []string
	for _, known := range Optimizers() {
		if slices.Equal(digits.FindAllString(known, -1), digits.FindAllString(plain, -1)) {
			candidates = append(candidates, known)
		}
	}
	return fault.Nearest(plain, candidates)
}
