package plimsoll

import (
	"go/ast"
	"go/token"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	widestLine      = 120 // columns, with tabs of four
	longestFunction = 80  // lines
)

// longFunctions are the functions over longestFunction lines that stay so: tables
// of flags or cases that would not be clearer in parts.
var longFunctions = map[string]string{
	"internal/machine/binding/roles.go assign": "one case for each way to divide cores, in order",
	"internal/run/launch/launch.go watch":      "the loop over everything that can happen to a job",
	"internal/run/launch/plan.go NewLaunch":    "one step after the other, each of which can refuse",
}

// TestLinesFitTheScreen and functions fit one, too. Generated files, URLs and raw
// strings are excepted; tests may have long functions.
func TestLinesFitTheScreen(t *testing.T) {
	unused := map[string]bool{}
	for name := range longFunctions {
		unused[name] = true
	}
	for _, source := range goFiles(t) {
		name, file := source.name, source.tree
		if strings.Contains(name, "/_") { // modules of their own
			continue
		}
		if ast.IsGenerated(file) {
			continue
		}
		raw := rawLines(positions, file)
		for i, line := range strings.Split(source.text, "\n") {
			width := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
			if width > widestLine && !raw[i+1] && !strings.Contains(line, "://") {
				t.Errorf("%s:%d has %d columns, expected at most %d", name, i+1, width, widestLine)
			}
		}
		if source.isTest() {
			continue
		}
		for _, declaration := range file.Decls {
			f, isFunction := declaration.(*ast.FuncDecl)
			if !isFunction {
				continue
			}
			lines := positions.Position(f.End()).Line - positions.Position(f.Pos()).Line + 1
			if key := name + " " + f.Name.Name; lines > longestFunction {
				if longFunctions[key] == "" {
					t.Errorf("%s: %s has %d lines, expected at most %d", name, f.Name.Name, lines, longestFunction)
				}
				delete(unused, key)
			}
		}
	}
	for name := range unused {
		t.Errorf("%s is no long function any more: take it off the list", name)
	}
}

// rawLines are the lines of a file that a raw string touches: a line break in one
// would change it.
func rawLines(positions *token.FileSet, file *ast.File) map[int]bool {
	lines := map[int]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if literal, isLiteral := n.(*ast.BasicLit); isLiteral && strings.HasPrefix(literal.Value, "`") {
			for line := positions.Position(literal.Pos()).Line; line <= positions.Position(literal.End()).Line; line++ {
				lines[line] = true
			}
		}
		return true
	})
	return lines
}
