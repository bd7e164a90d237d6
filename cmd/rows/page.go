package main

import (
	_ "embed" // of the texts around the table
	"fmt"
	"math"
	"slices"
	"strings"
)

//go:embed head.md
var head string

//go:embed foot.md
var foot string

// page writes the table for the docs.
func page(done []compared) string {
	var b strings.Builder
	b.WriteString(head)
	var allocated, reserved []float64
	for _, c := range done {
		if c.failed != "" {
			fmt.Fprintf(&b, "| %s | %s | %s | | | | | |\n", c.name, c.model, c.failed)
			continue
		}
		a, r := apart(c.hand.allocated, c.program.allocated), apart(c.hand.reserved, c.program.reserved)
		allocated, reserved = append(allocated, math.Abs(a)), append(reserved, math.Abs(r))
		fmt.Fprintf(&b, "| %s | %s | %v | %v | %+.1f %% | %v | %v | %+.1f %% |\n", c.name, c.model, c.hand.allocated,
			c.program.allocated, a, c.hand.reserved, c.program.reserved, r)
	}
	fmt.Fprintf(&b, "\nOf %d jobs, allocated bytes are within 2 %% for %d, and reserved bytes for %d; half are within "+
		"%.1f %% and %.1f %%.\n", len(done), within(allocated, 2), within(reserved, 2), median(allocated),
		median(reserved))
	b.WriteString(foot)
	return b.String()
}

// within counts the differences that are at most so many percent.
func within(differences []float64, percent float64) (count int) {
	for _, d := range differences {
		if d <= percent {
			count++
		}
	}
	return count
}

func median(differences []float64) float64 {
	if len(differences) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(differences))
	return sorted[len(sorted)/2]
}
