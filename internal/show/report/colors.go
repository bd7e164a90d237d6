package report

import (
	"slices"

	"plimsoll/internal/base/ledger"
)

// steadyColors are the components whose color is the same in all pages for browsers, in the order of the page's colors.
var steadyColors = []ledger.Component{ledger.Parameters, ledger.Activations, ledger.LogitsAndLoss, ledger.Gradients,
	ledger.OptimizerStates, ledger.OptimizerTemporaries, ledger.GatheredParameters, ledger.CommunicationBuckets,
	ledger.MasterWeights, ledger.OutsideAllocator}

// otherColor is the class of what has no color of its own.
const otherColor = "other"

// colorClasses returns the classes that components have in a page. A part of a component has the color of the whole
// where no other part has it. A component without a color of its own takes one that no other component of the page
// needs, the last first. What is left, and memory that nobody has counted, is grey.
func colorClasses(components []ledger.Component) map[ledger.Component]string {
	classes := map[ledger.Component]string{}
	taken := make([]bool, len(steadyColors))
	for _, c := range components {
		if own := slices.Index(steadyColors, wholeOf(c)); own >= 0 && !taken[own] {
			classes[c], taken[own] = colorClass(own), true
		}
	}
	for _, c := range components {
		if _, has := classes[c]; has {
			continue
		}
		free := len(taken) - 1
		for free >= 0 && taken[free] {
			free--
		}
		if free < 0 || wholeOf(c) == ledger.Unexplained || c == "" {
			classes[c] = otherColor
			continue
		}
		classes[c], taken[free] = colorClass(free), true
	}
	return classes
}

func colorClass(i int) string { return "c" + string(rune('0'+i)) }
