package recipe

import (
	"go/ast"
	"go/constant"
	"go/types"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"

	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/recipe/strict"
)

// paths adds the dotted paths of all keys of a rule, and their ends, which are
// the paths in sections.
func paths(known map[string]bool, rule strict.Rule, above []string) {
	for key, rule := range rule.Keys() {
		full := append(slices.Clone(above), key)
		for i := range full {
			known[strings.Join(full[i:], ".")] = true
		}
		paths(known, rule, full)
	}
}

// TestPathsAreInASchema checks every path that is written in this package and those of programs, also where no test
// calls the getter.
func TestPathsAreInASchema(t *testing.T) {
	known := map[string]bool{"": true, "peft_type": true}
	rules := []strict.Rule{accelerateSchema.Rule, trainingSchema.Rule, bitsAndBytesRule, packedRule,
		additiveRule, compressedRule, megatronSchema().Rule}
	rules = slices.AppendSeq(rules, maps.Values(peft.Rules()))
	for _, k := range kinds {
		if k.Program != nil {
			rules = append(rules, strict.Object(k.Program.Keys))
		}
		if k.Arguments != nil && k.Known != nil {
			rules = append(rules, *k.Known)
		}
	}
	rules = append(rules, deepspeed.Rules()...)
	for _, rule := range rules {
		paths(known, rule, nil)
	}
	const mode = packages.NeedName | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo |
		packages.NeedImports
	loaded, err := packages.Load(&packages.Config{Mode: mode}, "./...")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, p := range loaded {
		if len(p.Errors) > 0 {
			t.Fatal(p.Errors)
		}
		if !strings.HasSuffix(p.PkgPath, "/strict") {
			checked += checkPaths(t, p, known)
		}
	}
	if checked < 250 {
		t.Errorf("only %d paths were found", checked)
	}
}

// checkPaths checks the paths in a package, and returns their number.
func checkPaths(t *testing.T, p *packages.Package, known map[string]bool) (checked int) {
	check := func(e ast.Expr) {
		path, is := constantEnd(p.TypesInfo, e)
		if !is {
			return // a variable: its values are in a table, or in another call
		}
		checked++
		if !known[path] {
			t.Errorf("%v: no schema has %q", p.Fset.Position(e.Pos()), path)
		}
	}
	for _, file := range p.Syntax {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if takesPath(p.TypesInfo, n) {
					check(n.Args[0])
				}
			case *ast.CompositeLit:
				if alias, is := p.TypesInfo.Types[n].Type.(*types.Alias); is &&
					alias.Obj().Name() == "Conflict" && len(n.Elts) > 1 {
					check(n.Elts[1])
				}
			}
			return true
		})
	}
	return checked
}

// takesPath reports whether a call is of a method of strict.Reader whose first
// parameter is a path.
func takesPath(info *types.Info, call *ast.CallExpr) bool {
	selector, is := call.Fun.(*ast.SelectorExpr)
	if !is || len(call.Args) == 0 {
		return false
	}
	method, is := info.Uses[selector.Sel].(*types.Func)
	if !is || method.Pkg().Path() != "plimsoll/internal/input/recipe/strict" {
		return false
	}
	receiver := method.Signature().Recv()
	return receiver != nil && strings.HasSuffix(receiver.Type().String(), ".Reader") &&
		method.Signature().Params().At(0).Name() == "path"
}

// constantEnd returns a constant path, or the constant names that one ends in.
func constantEnd(info *types.Info, e ast.Expr) (string, bool) {
	if value := info.Types[e].Value; value != nil {
		return constant.StringVal(value), true
	}
	if sum, is := e.(*ast.BinaryExpr); is {
		end, _ := constantEnd(info, sum.Y)
		return strings.CutPrefix(end, ".")
	}
	return "", false
}
