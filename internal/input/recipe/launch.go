package recipe

import (
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

// Launch is what a script says of the ranks of its training.
type Launch struct {
	PerNode, Nodes *Count // nil where the script does not say them
	// Unknown are arguments and variables whose values the script does not set.
	Unknown []Count
}

// Count is a number in a script.
type Count struct {
	Place fault.Position
	Name  string // of the argument or variable
	Is    int
}

// Launch arguments by what they count. accelerate's num_processes counts the ranks of all nodes.
var (
	perNodeArguments = strings.Fields("nproc_per_node num_gpus")
	nodesArguments   = strings.Fields("nnodes num_nodes num_machines")
)

const allRanks = "num_processes"

// launchLine is a command that starts a training, with what comes before it.
type launchLine struct {
	words     []word // of the launcher and the training
	variables map[string]string
	places    map[string]int64 // where the script sets them
	reads     []string         // variables that say the ranks of a node and the nodes, in this order
}

// launch returns what the line says of ranks, nil for nothing.
func (l *launchLine) launch(d *strict.Document) *Launch {
	of := &Launch{}
	perNode := l.count(d, of, perNodeArguments...)
	of.Nodes = l.count(d, of, nodesArguments...)
	if len(l.reads) == 2 {
		if perNode == nil {
			perNode = l.variable(d, of, l.reads[0])
		}
		if of.Nodes == nil {
			of.Nodes = l.variable(d, of, l.reads[1])
		}
	}
	if all := l.count(d, of, allRanks); perNode == nil && all != nil {
		nodes := 1
		if of.Nodes != nil {
			nodes = of.Nodes.Is
		}
		if all.Is%nodes == 0 {
			perNode = &Count{all.Place, all.Name, all.Is / nodes}
		}
	}
	if of.PerNode = perNode; of.PerNode == nil && of.Nodes == nil && of.Unknown == nil {
		return nil
	}
	return of
}

// count returns the value of the first of these arguments.
func (l *launchLine) count(d *strict.Document, of *Launch, names ...string) *Count {
	for i, w := range l.words {
		name, value, given := strings.Cut(strings.TrimLeft(w.text, "-"), "=")
		name = strings.ReplaceAll(name, "-", "_")
		if !strings.HasPrefix(w.text, "-") || !slices.Contains(names, name) {
			continue
		}
		if !given && i+1 < len(l.words) {
			value = l.words[i+1].text
		}
		return l.number(d, of, name, word{value, w.at, false})
	}
	return nil
}

// variable returns the value of a variable of the environment.
func (l *launchLine) variable(d *strict.Document, of *Launch, name string) *Count {
	value, set := l.variables[name]
	if !set {
		return nil
	}
	return l.number(d, of, name, word{value, l.places[name], false})
}

// number reads a number of ranks. A value that the script does not set is unknown.
func (l *launchLine) number(d *strict.Document, of *Launch, name string, w word) *Count {
	c := Count{Place: d.Position(w.at), Name: name}
	n, err := strconv.Atoi(expand(w.text, l.variables))
	if err != nil || n < 1 {
		of.Unknown = append(of.Unknown, c)
		return nil
	}
	c.Is = n
	return &c
}
