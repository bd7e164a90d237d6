package plimsoll

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"testing"
)

// TestFaultLiterals: fault.Inputf says what, where and the hint in the order in which they are printed. Only bad input
// with a cause is a literal.
func TestFaultLiterals(t *testing.T) {
	for _, source := range goFiles(t) {
		if source.isTest() {
			continue
		}
		for _, line := range literalsWithoutCause(positions, source.tree) {
			t.Errorf("%s:%d: use fault.Inputf where there is no cause", source.name, line)
		}
	}
}

// literalsWithoutCause returns the lines of literals of fault.Input that set no Err.
func literalsWithoutCause(positions *token.FileSet, file *ast.File) (lines []int) {
	ast.Inspect(file, func(n ast.Node) bool {
		literal, ok := n.(*ast.CompositeLit)
		if !ok {
			return true
		}
		name, ok := literal.Type.(*ast.SelectorExpr)
		if !ok || name.Sel.Name != "Input" {
			return true
		}
		if of, ok := name.X.(*ast.Ident); !ok || of.Name != "fault" {
			return true
		}
		if !slices.ContainsFunc(literal.Elts, func(e ast.Expr) bool {
			field, ok := e.(*ast.KeyValueExpr)
			return ok && field.Key.(*ast.Ident).Name == "Err"
		}) {
			lines = append(lines, positions.Position(literal.Pos()).Line)
		}
		return true
	})
	return lines
}

func TestLiteralsWithoutCause(t *testing.T) {
	positions := token.NewFileSet()
	file, err := parser.ParseFile(positions, "a.go", `package a
var a = &fault.Input{What: "no cause"}
var b = &fault.Input{What: "a cause", Err: err}
var c = fault.Input{}
var d, e = Input{}, recipe.Input{}
`, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := literalsWithoutCause(positions, file); !slices.Equal(got, []int{2, 4}) {
		t.Errorf("found lines %d", got)
	}
}
