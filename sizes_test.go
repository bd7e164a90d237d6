package plimsoll

import (
	"go/ast"
	"maps"
	"slices"
	"strings"
	"testing"
)

// mostLines is how long a function may be, and mostFields how many fields a struct of partedPackages may have.
const mostLines, mostFields = 80, 25

var partedPackages = []string{
	recipeFolder + "/", "internal/plan/job/", "internal/plan/forward/", "internal/plan/simulate/",
}

// larger are functions and structs that are larger, with their size: it may shrink, and not grow.
var larger = map[string]int{
	"internal/input/recipe/megatron.go Megatron":         116, // the arguments of one program, by their names
	"internal/plan/job/request.go Request":               52,
	"internal/state/optim/kernel/kernel_amd64.go update": 168, // one case for each kernel
}

// TestFunctionsAndStructsAreInParts: a function, and a struct that a job is made of, fits a screen.
func TestFunctionsAndStructsAreInParts(t *testing.T) {
	left := maps.Clone(larger)
	check := func(name string, n ast.Node, size, most int, of string) {
		delete(left, name)
		if size > max(most, larger[name]) {
			t.Errorf("line %d of %s has %d %s, expected at most %d: take parts out of it",
				positions.Position(n.Pos()).Line, name, size, of, max(most, larger[name]))
		}
		if allowed, ok := larger[name]; ok && (size <= most || size < allowed) {
			t.Errorf("%s has %d %s now: correct it in larger", name, size, of)
		}
	}
	for _, source := range goFiles(t) {
		if source.isTest() || strings.Contains(source.name, "/_asm/") {
			continue
		}
		inParts := slices.ContainsFunc(partedPackages, func(p string) bool { return strings.HasPrefix(source.name, p) })
		ast.Inspect(source.tree, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				lines := positions.Position(n.End()).Line - positions.Position(n.Pos()).Line + 1
				check(source.name+" "+n.Name.Name, n, lines, mostLines, "lines")
			case *ast.TypeSpec:
				if s, isStruct := n.Type.(*ast.StructType); isStruct && inParts {
					check(source.name+" "+n.Name.Name, n, s.Fields.NumFields(), mostFields, "fields")
				}
			}
			return true
		})
	}
	for name := range left {
		t.Errorf("%s is not there any more: take it out of larger", name)
	}
}
