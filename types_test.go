package plimsoll

import (
	"go/ast"
	"go/types"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/tools/go/packages"
)

var loadTypes = sync.OnceValues(func() ([]*packages.Package, error) {
	const mode = packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes |
		packages.NeedTypesInfo | packages.NeedImports | packages.NeedDeps
	return packages.Load(&packages.Config{Mode: mode}, "./...")
})

// typedPackages returns the packages of the module with syntax and types, tests excluded.
func typedPackages(t *testing.T) []*packages.Package {
	t.Helper()
	loaded, err := loadTypes()
	if err != nil {
		t.Fatal(err)
	}
	if len(loaded) < 20 {
		t.Fatalf("only %d packages were found", len(loaded))
	}
	return loaded
}

// TestComponentsAreTheLedgers: every component must be a constant of package ledger. Tables cannot be joined on a
// name that another package makes up.
func TestComponentsAreTheLedgers(t *testing.T) {
	for _, p := range typedPackages(t) {
		if p.PkgPath == "plimsoll/ledger" {
			continue
		}
		for expression, value := range p.TypesInfo.Types {
			literal, isLiteral := expression.(*ast.BasicLit)
			if isLiteral && literal.Value != `""` && types.TypeString(value.Type, nil) == "plimsoll/ledger.Component" {
				t.Errorf("%v: %s is no constant of package ledger", p.Fset.Position(literal.Pos()), literal.Value)
			}
		}
	}
}

// TestOnlyReadReadsFiles: a job is decided without a look at any file, so that its variants are decided at once, and
// from the same inputs.
func TestOnlyReadReadsFiles(t *testing.T) {
	reads := 0
	for _, p := range typedPackages(t) {
		if p.PkgPath != "plimsoll/job" {
			continue
		}
		for id, object := range p.TypesInfo.Uses {
			from := object.Pkg()
			if _, isFunction := object.(*types.Func); !isFunction || from == nil || from == p.Types ||
				from.Path() != "os" && !strings.HasPrefix(object.Name(), "Load") {
				continue
			}
			reads++
			if where := p.Fset.Position(id.Pos()); filepath.Base(where.Filename) != "inputs.go" {
				t.Errorf("%v: %s is called outside of job/inputs.go", where, object.Name())
			}
		}
	}
	if reads == 0 {
		t.Error("job reads no files at all")
	}
}
