package recipe

import (
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
)

// Variable is a variable of the environment that a script or a source sets for its training, and that changes what the
// training holds.
type Variable struct {
	Name, Value string
	Place       fault.Position
	Unknown     bool // only a run can tell the value
}

// The variables that change what a training holds, by the names that PyTorch reads.
const (
	AllocatorVariable = "PYTORCH_CUDA_ALLOC_CONF"
	// LaterAllocatorVariable goes before the other one from torch 2.9 on.
	LaterAllocatorVariable = "PYTORCH_ALLOC_CONF"
	UncachedVariable       = "PYTORCH_NO_CUDA_MEMORY_CACHING"
	VisibleVariable        = "CUDA_VISIBLE_DEVICES"
)

// memoryVariables are these variables.
var memoryVariables = []string{AllocatorVariable, LaterAllocatorVariable, UncachedVariable, VisibleVariable}

// environmentOf returns the variables that the training of a line sees.
func environmentOf(d *strict.Document, line *launcher.Line) (list []Variable) {
	for _, name := range memoryVariables {
		w, at, set := line.Variable(name)
		if set {
			list = append(list, Variable{Name: name, Value: w.Text, Place: d.Position(at), Unknown: len(w.Unknown) > 0})
		}
	}
	return list
}

// environment is the key of the variables that a source sets.
const environment = "os_environ"

// exported gives a document the variables that a source sets. The last value of each counts.
func exported(root *strict.Value, source *python.Source) {
	object := &strict.Value{Kind: '{', At: root.At}
	for _, s := range slices.Backward(source.Environment) {
		if slices.Contains(memoryVariables, s.Name) && object.Member(s.Name) == nil {
			Give(object, s.Name, int64(max(0, s.At)), Literal(s.Is, s.At))
		}
	}
	if len(object.Members) > 0 {
		Give(root, environment, object.Members[0].At, object)
	}
}

// readEnvironment reads the variables that a source sets.
func (r *Reader) readEnvironment() {
	v := r.Find(environment)
	if v == nil {
		return
	}
	for _, m := range v.Members {
		is := Variable{Name: m.Name, Value: m.Value.Text, Place: r.Position(m.At), Unknown: isComputed(m.Value)}
		is.Value = strings.TrimPrefix(is.Value, computed)
		r.To.Environment = append(r.To.Environment, is)
	}
}
