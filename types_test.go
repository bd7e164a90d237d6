package plimsoll

import (
	"go/ast"
	"go/types"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/tools/go/packages"
)

var loadTypes = sync.OnceValues(func() ([]*packages.Package, error) {
	const mode = packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes |
		packages.NeedTypesInfo | packages.NeedImports
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
	for _, p := range loaded {
		for _, fault := range p.Errors {
			t.Fatal(fault)
		}
	}
	return loaded
}

// TestComponentsAreTheLedgers: every component must be a constant of package ledger. Tables cannot be joined on a
// name that another package makes up.
func TestComponentsAreTheLedgers(t *testing.T) {
	for _, p := range typedPackages(t) {
		if p.PkgPath == "plimsoll/internal/base/ledger" {
			continue
		}
		for expression, value := range p.TypesInfo.Types {
			literal, isLiteral := expression.(*ast.BasicLit)
			if isLiteral && literal.Value != `""` && types.TypeString(value.Type, nil) == "plimsoll/internal/base/ledger.Component" {
				t.Errorf("%v: %s is no constant of package ledger", p.Fset.Position(literal.Pos()), literal.Value)
			}
		}
	}
}

// ownRanges are the structs that may have a range of their own, with the reason.
var ownRanges = map[string]string{
	"plimsoll/internal/state/shard.Range":     "it is the type that others are to use",
	"plimsoll/internal/state/checkpoint.walk": "bytes of a file, not elements",
}

// TestRangesAreTheShards: consecutive elements of a shard are a [shard.Range]. A struct with fields such as first and
// count of its own would need methods of its own. Documents and bodies of requests have what their format says.
func TestRangesAreTheShards(t *testing.T) {
	begins := []string{"first", "begin", "start", "from", "offset"}
	ends := []string{"count", "end", "last", "to", "length"}
	holders := []string{"shard", "engine", "checkpoint", "service", "rehearse", "bench"} // of shards
	used := map[string]bool{}
	for _, p := range typedPackages(t) {
		if !slices.Contains(holders, path.Base(p.PkgPath)) {
			continue
		}
		for _, name := range p.Types.Scope().Names() {
			structure, ok := p.Types.Scope().Lookup(name).Type().Underlying().(*types.Struct)
			if !ok {
				continue
			}
			has := func(names []string) bool {
				for i := range structure.NumFields() {
					field := structure.Field(i)
					if slices.Contains(names, strings.ToLower(field.Name())) && structure.Tag(i) == "" &&
						types.Identical(field.Type(), types.Typ[types.Int64]) {
						return true
					}
				}
				return false
			}
			if own := p.PkgPath + "." + name; has(begins) && has(ends) {
				used[own] = true
				if ownRanges[own] == "" {
					t.Errorf("%s has a range of its own: use shard.Range", own)
				}
			}
		}
	}
	for name := range ownRanges {
		if !used[name] {
			t.Errorf("%s has no range of its own: take it off the list", name)
		}
	}
}

// TestOnlyReadReadsFiles: a job is decided without a look at any file, so that its variants are decided at once, and
// from the same inputs.
func TestOnlyReadReadsFiles(t *testing.T) {
	reads := 0
	for _, p := range typedPackages(t) {
		if p.PkgPath != "plimsoll/internal/plan/job" {
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
				t.Errorf("%v: %s is called outside of internal/plan/job/inputs.go", where, object.Name())
			}
		}
	}
	if reads == 0 {
		t.Error("job reads no files at all")
	}
}
