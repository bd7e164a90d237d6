package main

import (
	"cmp"
	"fmt"
	"log"
	"os"
	"slices"
	"text/tabwriter"

	"plimsoll/internal/base/ledger"
)

// detail plans recorded jobs in both ways again and prints what components hold at the peak of each phase.
func (c command) detail(path string) {
	list, err := readRecorded(path)
	if err != nil {
		log.Fatal(err)
	}
	for _, line := range list {
		r, number := line.Job, line.Number
		if !c.chosen(r) {
			continue
		}
		_, hand, err := c.byHand(r)
		if err != nil {
			fmt.Println(number, r.Name, r.Model, err)
			continue
		}
		program, err := c.play(r)
		if err != nil {
			fmt.Println(number, r.Name, r.Model, err)
			continue
		}
		fmt.Println(number, r.Name, r.Model, r.Sequence)
		sideBySide(hand.Devices[0].Phases, program.Phases)
	}
}

// sideBySide prints the components of phases that two plans have, those that differ most first.
func sideBySide(hand, program []ledger.Phase) {
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer table.Flush()
	for _, of := range hand {
		at := slices.IndexFunc(program, func(p ledger.Phase) bool {
			return p.Name == of.Name && p.Iteration == of.Iteration
		})
		if at < 0 {
			continue
		}
		beside := program[at]
		fmt.Fprintf(table, "%s %s\tallocated\t%d\t%d\t%d\t\n", of.Iteration, of.Name, of.PeakAllocated,
			beside.PeakAllocated, of.PeakAllocated-beside.PeakAllocated)
		fmt.Fprintf(table, "\treserved\t%d\t%d\t%d\t\n", of.PeakReserved, beside.PeakReserved,
			of.PeakReserved-beside.PeakReserved)
		bytes := map[ledger.Component][2]ledger.Bytes{}
		for side, list := range [][]ledger.Holding{of.Components, beside.Components} {
			for _, held := range list {
				both := bytes[held.Component]
				both[side] += held.Bytes
				bytes[held.Component] = both
			}
		}
		var components []ledger.Component
		for component := range bytes {
			components = append(components, component)
		}
		slices.SortFunc(components, func(a, b ledger.Component) int {
			return cmp.Or(cmp.Compare(difference(bytes[b]), difference(bytes[a])), cmp.Compare(a, b))
		})
		for _, component := range components {
			both := bytes[component]
			fmt.Fprintf(table, "\t%s\t%d\t%d\t%d\t\n", component, both[0], both[1], both[0]-both[1])
		}
	}
}

// difference returns how far apart two sizes are.
func difference(both [2]ledger.Bytes) ledger.Bytes { return max(both[0]-both[1], both[1]-both[0]) }
