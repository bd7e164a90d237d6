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

// drawnPlace is where foot has the tables of drawn jobs.
const drawnPlace = "DRAWN\n"

// page writes the table for the docs.
func page(done []compared, drawn []outcome) string {
	var b strings.Builder
	b.WriteString(head)
	var differences [2][]float64
	for _, c := range done {
		if c.failed != "" {
			fmt.Fprintf(&b, "| %s | %s | %s | | | | | |\n", c.Name, c.Model, c.failed)
			continue
		}
		fmt.Fprintf(&b, "| %s | %s |", c.Name, c.Model)
		for level := range levels {
			hand, program := c.hand.peak(level), c.program.peak(level)
			differences[level] = append(differences[level], math.Abs(apart(hand, program)))
			fmt.Fprintf(&b, " %v | %v | %+.1f %% |", hand, program, apart(hand, program))
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nOf %d jobs, allocated bytes are within 2 %% for %d, and reserved bytes for %d; half are within "+
		"%.1f %% and %.1f %%.\n", len(done), within(differences[allocated], 2), within(differences[reserved], 2),
		median(differences[allocated]), median(differences[reserved]))
	b.WriteString(strings.Replace(foot, drawnPlace, drawnPage(drawn), 1))
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
