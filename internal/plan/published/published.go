// Package published holds the public measurements of training runs that plans are held against, with where each was
// published. "make accuracy" writes the table.
package published

import (
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"

	"plimsoll/internal/base/ledger"
)

// Measurement is what somebody measured in a training run and published, beside its plan.
type Measurement struct {
	Run        string       `json:"run"`
	Source     string       `json:"source"`
	Engine     string       `json:"engine"`
	Device     ledger.Kind  `json:"device"`
	Parameters int64        `json:"parameters"`
	Quantity   string       `json:"quantity"`
	Measured   ledger.Bytes `json:"measured_bytes"`
	Planned    ledger.Bytes `json:"planned_bytes"`
}

// Name returns what was measured in which run.
func (m Measurement) Name() string {
	return fmt.Sprintf("%s, %s, %s parameters, %s", m.Run, m.Engine, ledger.Count(m.Parameters), m.Quantity)
}

// Figures returns the measured and the planned figure, and the error of the plan.
func (m Measurement) Figures() string {
	return fmt.Sprintf("%v measured, %v planned (%+.1f %%)", m.Measured, m.Planned,
		100*(float64(m.Planned)/float64(m.Measured)-1))
}

//go:embed measurements.tsv
var table string

var measurements = sync.OnceValue(func() []Measurement {
	var list []Measurement
	for line := range strings.Lines(table) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		var numbers [3]int64
		for i, field := range fields[5:8] {
			n, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				panic(fmt.Sprintf("measurements.tsv: %q: %v", line, err)) // the table is a part of the program
			}
			numbers[i] = n
		}
		list = append(list, Measurement{fields[0], fields[1], fields[2], ledger.Kind(fields[3]), numbers[0], fields[4],
			ledger.Bytes(numbers[1]), ledger.Bytes(numbers[2])})
	}
	return list
})

// Line returns the measurement as a line of the table.
func (m Measurement) Line() string {
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\n", m.Run, m.Source, m.Engine, m.Device, m.Quantity,
		m.Parameters, int64(m.Measured), int64(m.Planned))
}

// EngineOf returns the engine in the name of an engine and its ranks: "FSDP2" of "FSDP2 over 8 ranks".
func EngineOf(name string) string {
	engine, _, _ := strings.Cut(name, " over ")
	return engine
}

// Nearest returns the measurement nearest to a plan: of the same kind of device; then of the same engine, else of the
// same maker's, else of any; and of these the one whose number of parameters is nearest by its ratio. The first of
// equals counts. It is nil where no measurement is of the kind of device.
func Nearest(engine string, device ledger.Kind, parameters int64) *Measurement {
	var nearest *Measurement
	least := math.Inf(1)
	for _, m := range measurements() {
		if m.Device != device {
			continue
		}
		// A step between engines counts more than any ratio of sizes.
		far := 1000*float64(apart(m.Engine, engine)) + math.Abs(math.Log(float64(m.Parameters)/float64(parameters)))
		if far < least {
			nearest, least = &m, far
		}
	}
	return nearest
}

// apart returns 0 for one engine, 1 for two of a maker, and 2 for others.
func apart(a, b string) int {
	maker := func(engine string) string { return strings.TrimRight(engine, "-0123456789") }
	switch {
	case a == b:
		return 0
	case maker(a) == maker(b):
		return 1
	}
	return 2
}
