package plimsoll

import (
	"go/ast"
	"go/token"
	"strings"
	"testing"
	"unicode/utf8"
)

const widestLine = 120 // columns, with tabs of four

// TestLinesFitTheScreen: generated files, URLs and raw strings are excepted.
func TestLinesFitTheScreen(t *testing.T) {
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
