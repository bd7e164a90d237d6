package plimsoll

import (
	"go/types"
	"path"
	"regexp"
	"strings"
	"testing"
)

// TestWaysExist holds the functions that docs/architecture.md names in its two
// ways, of a gradient and of a key, against the code.
func TestWaysExist(t *testing.T) {
	text := read(t, "docs/architecture.md")
	for _, title := range []string{"The way of one gradient", "The way of one ds_config key"} {
		_, section, found := strings.Cut(text, "## "+title+"\n")
		if !found {
			t.Fatalf("docs/architecture.md has no section %q", title)
		}
		section, _, _ = strings.Cut(section, "\n## ")
		functions := 0
		for _, span := range regexp.MustCompile("`[a-z]+(\\.\\w+)+`").FindAllString(section, -1) {
			name := strings.Trim(span, "`")
			switch {
			case notFunctions[name]:
				continue
			case strings.HasPrefix(name, "plimsoll."):
				checkPython(t, name)
			default:
				checkGo(t, name)
			}
			functions++
		}
		if functions < 10 {
			t.Errorf("%s names %d functions only", title, functions)
		}
	}
}

// notFunctions are code spans of the two ways that name something else.
var notFunctions = map[string]bool{"parameter.grad": true, "zero_optimization.reduce_bucket_size": true}

// checkGo wants package.Name or package.Type.Name, by the last element of the
// package's path.
func checkGo(t *testing.T, name string) {
	t.Helper()
	parts := strings.Split(name, ".")
	for _, p := range typedPackages(t) {
		if path.Base(p.PkgPath) != parts[0] {
			continue
		}
		object := p.Types.Scope().Lookup(parts[1])
		if object == nil {
			continue
		}
		if len(parts) == 2 {
			return
		}
		member, _, _ := types.LookupFieldOrMethod(object.Type(), true, p.Types, parts[2])
		if member != nil {
			return
		}
	}
	t.Errorf("docs/architecture.md names %s, which does not exist", name)
}

// checkPython wants plimsoll.module.Class.method.
func checkPython(t *testing.T, name string) {
	t.Helper()
	parts := strings.Split(name, ".")
	file := "python/" + strings.Join(parts[:len(parts)-2], "/") + ".py"
	_, class, found := strings.Cut(read(t, file), "class "+parts[len(parts)-2])
	class, _, _ = strings.Cut(class, "\nclass ")
	if !found || !strings.Contains(class, "    def "+parts[len(parts)-1]+"(") {
		t.Errorf("docs/architecture.md names %s, which does not exist", name)
	}
}
