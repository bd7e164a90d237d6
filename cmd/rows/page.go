package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

const head = "# The planner's own model beside the program\n\n" +
	"Plimsoll plans a job in two ways: from its configuration, with a model of its own of what frameworks do, and by\n" +
	"running the program on a GPU that is not there ([plan a program](program.md)). The second needs no model. So it\n" +
	"holds the first to account: below are jobs of transformers' Trainer, planned both ways from the same files.\n" +
	"`make ghost-rows` writes this page.\n\n" +
	"The figures are the most that the GPU of rank 0 holds in the training loop, with torch 2.15, transformers 5.24,\n" +
	"accelerate 1.15, DeepSpeed 0.19.8 and PEFT 0.21. A percentage says by how much the model's figure is more.\n\n" +
	"| job | model | allocated: model | program | apart | reserved: model | program | apart |\n" +
	"| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"

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
		"%.1f %% and %.1f %%.\n", len(done), within(allocated, 2), within(reserved, 2), median(allocated), median(reserved))
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
