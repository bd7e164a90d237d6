package origin

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"strings"
	"sync"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// Place is where a component comes from: a file of a project and a function in it. A place without a file has a note
// that says what makes the component instead.
type Place struct {
	Project  Project
	File     string
	Function string
	Since    version.Version // the first release that has the place; zero where all have it that are planned
	Until    version.Version // the first release without it; zero where the latest has it
	Note     string
}

// entry is what places are found by. A scope is what some jobs have in common, see Job.scopes.
type entry struct {
	scope     string
	component ledger.Component
}

//go:embed places.csv
var text string

// table has the places of each entry, the newest last.
var table = sync.OnceValue(func() map[entry][]Place {
	places := map[entry][]Place{}
	rows, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil {
		panic(fmt.Sprintf("places.csv: %v", err)) // the table is a part of the program
	}
	for _, row := range rows[1:] {
		p := Place{Project(row[2]), row[3], row[4], release(row[5]), release(row[6]), row[7]}
		for scope := range strings.SplitSeq(row[0], "; ") {
			for component := range strings.FieldsSeq(row[1]) {
				e := entry{scope, ledger.Component(component)}
				places[e] = append(places[e], p)
			}
		}
	}
	return places
})

// release returns the release that a cell names, zero for an empty one.
func release(cell string) version.Version {
	if cell == "" {
		return version.Version{}
	}
	v, err := version.Parse(cell)
	if err != nil {
		panic(fmt.Sprintf("places.csv: %v", err))
	}
	return v
}
