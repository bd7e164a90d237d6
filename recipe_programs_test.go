package plimsoll

import (
	"go/ast"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const recipeFolder = "internal/input/recipe"

// programsOfRecipe returns the folders of the programs that package programs lists, by the names that a program may
// have in Go. Libraries that these programs use have folders, too, and files that many functions ask for.
func programsOfRecipe(t *testing.T) map[string]string {
	t.Helper()
	folders := map[string]string{"factory": "llamafactory", "llama-factory": "llamafactory", "ms-swift": "swift"}
	for _, source := range filesOfRecipe(t) {
		if source.name != recipeFolder+"/programs/programs.go" {
			continue
		}
		for _, imported := range source.tree.Imports {
			if name, below := strings.CutPrefix(strings.Trim(imported.Path.Value, `"`),
				"plimsoll/"+recipeFolder+"/"); below {
				folders[name] = name
			}
		}
	}
	if len(folders) < 9 {
		t.Fatalf("only %d names of programs were found", len(folders))
	}
	return folders
}

// filesOfRecipe returns the files of package recipe and of those below it, without tests.
func filesOfRecipe(t *testing.T) []goFile {
	t.Helper()
	return slices.DeleteFunc(slices.Clone(goFiles(t)), func(f goFile) bool {
		return f.isTest() || !strings.HasPrefix(f.name, recipeFolder+"/")
	})
}

// TestProgramsHavePackages: what recipe does for one program stands in the package of that program. So no function
// elsewhere has the program as the end of its name, and no switch asks for its name.
func TestProgramsHavePackages(t *testing.T) {
	folders := programsOfRecipe(t)
	for _, source := range filesOfRecipe(t) {
		refuse := func(n ast.Node, name string, is func(name, program string) bool) {
			for program, folder := range folders {
				if is(strings.ToLower(name), program) && folder != filepath.Base(filepath.Dir(source.name)) {
					t.Errorf("%s: %s is of one program: move it to %s/%s", positions.Position(n.Pos()), name,
						recipeFolder, folder)
				}
			}
		}
		ast.Inspect(source.tree, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				refuse(n, n.Name.Name, strings.HasSuffix)
			case *ast.CaseClause:
				for _, e := range n.List {
					if literal, is := e.(*ast.BasicLit); is && literal.Kind == token.STRING {
						refuse(e, strings.Trim(literal.Value, "`\""), strings.EqualFold)
					}
				}
			}
			return true
		})
	}
}
