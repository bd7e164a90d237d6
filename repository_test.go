// Package plimsoll holds the rules of the repository, as tests.
package plimsoll

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pkg is a package in the output of "go list".
type pkg struct {
	ImportPath, Dir               string
	GoFiles, TestGoFiles, Imports []string
}

func listed(t *testing.T) []pkg {
	command := exec.Command("go", "list", "-json", "./...")
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func read(t *testing.T, name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestEveryPackageIsDocumented(t *testing.T) {
	for _, p := range listed(t) {
		documented := false
		for _, file := range slices.Concat(p.GoFiles, p.TestGoFiles) {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil,
				parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			documented = documented || parsed.Doc != nil
		}
		if !documented {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

// TestImportsPointDownwards compares the imports with the list of packages in docs/architecture.md. Packages for tests
// are imported by tests only.
func TestImportsPointDownwards(t *testing.T) {
	_, list, found := strings.Cut(read(t, "docs/architecture.md"), "```packages\n")
	list, _, closed := strings.Cut(list, "```")
	if !found || !closed {
		t.Fatal("docs/architecture.md has no list of packages")
	}
	level := map[string]int{}
	for i, line := range strings.Split(strings.TrimSpace(list), "\n") {
		level["plimsoll/"+strings.Fields(line)[0]] = i
	}
	for _, p := range listed(t) {
		if p.ImportPath == "plimsoll" {
			continue
		}
		own, listed := level[p.ImportPath]
		if !listed {
			t.Errorf("%s is not in docs/architecture.md", p.ImportPath)
			continue
		}
		for _, imported := range p.Imports {
			if !strings.HasPrefix(imported, "plimsoll/") {
				continue
			}
			if strings.HasSuffix(imported, "test") && !strings.HasSuffix(p.ImportPath, "test") {
				t.Errorf("%s imports %s, which is for tests", p.ImportPath, imported)
			}
			if below, open := level[imported]; open && below < own {
				t.Errorf("%s imports %s, which stands above it in docs/architecture.md", p.ImportPath, imported)
			}
		}
	}
	for name := range level {
		if _, err := os.Stat(strings.TrimPrefix(name, "plimsoll/")); err != nil {
			t.Errorf("docs/architecture.md lists %s, which does not exist", name)
		}
	}
}

// TestMethodsAreDeclaredWithTheirType: a test file declares no method of a type that is not the test's own. What only
// tests do with a type is a function of the test, so that the type reads the same in both.
func TestMethodsAreDeclaredWithTheirType(t *testing.T) {
	type method struct{ position, name string }
	types, methods := map[string]bool{}, map[method]string{}
	positions := token.NewFileSet()
	for _, name := range tracked(t) {
		if !strings.HasSuffix(name, ".go") {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			continue // deleted and not yet committed
		}
		file, err := parser.ParseFile(positions, name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		inPackage := func(name *ast.Ident) string {
			return filepath.Dir(positions.Position(file.Pos()).Filename) + " " + file.Name.Name + "." + name.Name
		}
		ofTest := strings.HasSuffix(name, "_test.go")
		for _, declaration := range file.Decls {
			switch d := declaration.(type) {
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if s, isType := spec.(*ast.TypeSpec); isType && !ofTest {
						types[inPackage(s.Name)] = true
					}
				}
			case *ast.FuncDecl:
				if ofTest && d.Recv != nil {
					at := method{positions.Position(d.Pos()).String(), d.Name.Name}
					methods[at] = inPackage(receiver(d.Recv.List[0].Type))
				}
			}
		}
	}
	if len(methods) < 10 {
		t.Fatalf("only %d methods were found in tests", len(methods))
	}
	for at, of := range methods {
		if types[of] {
			t.Errorf("%s: %s is a method of a type that is no test's: make it a function", at.position, at.name)
		}
	}
}

// receiver returns the name of the type T in T, *T and *T[X].
func receiver(expression ast.Expr) *ast.Ident {
	switch e := expression.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	}
	return expression.(*ast.Ident)
}

// opensFiles matches the functions that open a file of any kind and read it whatever its length.
var opensFiles = regexp.MustCompile(`\b(os\.(Open|OpenFile|ReadFile)|txtar\.ParseFile|zip\.OpenReader|unix\.Open)\(`)

// mayOpen lists the program's files that may call them, with the reason.
var mayOpen = map[string]string{
	"files/files.go":           "it is the package that others are to use",
	"files/system_linux.go":    "it is a part of that package",
	"launch/placementcheck.go": "it reads /proc/PID/numa_maps line by line",
	"checkpoint/writer.go":     "it opens folders",
	"service/keeper.go":        "it opens the folder of the socket, to lock it",
	"view/program.go":          "it opens the terminal",
	"cmd/plimsoll/create.go":   "it opens what is written, which may be a pipe",
	"cmd/plimsoll/view.go":     "it opens /dev/null",
	"cmd/accuracy/":            "it is not a part of the program",
	"cmd/ci/":                  "it is not a part of the program",
	"cmd/page/":                "it is not a part of the program",
	"experiments/":             "it is not a part of the program",
	"host/hosttest/":           "it is for tests, and reads their data",
	"files/filestest/":         "it is for tests",
	"optim/kernel/_asm/":       "it is not a part of the program",
	"packaging/":               "it is not a part of the program",
	"scripts/":                 "it is not a part of the program",
}

// TestFilesAreOpenedByOnePackage: only package files opens files. It neither waits for a pipe nor reads a device
// without end.
func TestFilesAreOpenedByOnePackage(t *testing.T) {
	used := map[string]bool{}
	for _, name := range tracked(t) {
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			continue // deleted and not yet committed
		}
		excepted := ""
		for place := range mayOpen {
			if strings.HasPrefix(name, place) {
				excepted = place
			}
		}
		for number, line := range strings.Split(string(text), "\n") {
			code, _, _ := strings.Cut(line, "//")
			if !opensFiles.MatchString(code) {
				continue
			}
			used[excepted] = true
			if excepted == "" {
				t.Errorf("%s:%d: use the package files: %s", name, number+1, strings.TrimSpace(line))
			}
		}
	}
	for place := range mayOpen {
		if !used[place] {
			t.Errorf("%s opens no file itself: take it off the list", place)
		}
	}
}

// tracked lists the files of the repository. In an export without git it skips the test.
func tracked(t *testing.T) []string {
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Skip("not a git checkout: ", err)
	}
	return strings.Fields(string(out))
}

func TestNoFileNamesAMachine(t *testing.T) {
	// Put together here, so that this file does not match.
	machine := regexp.MustCompile(`(^|[\s"'=(` + "`" + `])/(` +
		strings.Join([]string{"home", "root", "work", "Users"}, "|") + `)/[\w.]`)
	for _, name := range tracked(t) {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // deleted and not yet committed
		}
		for number, line := range strings.Split(string(text), "\n") {
			if machine.MatchString(line) {
				t.Errorf("%s:%d names a path of one machine: %s", name, number+1, strings.TrimSpace(line))
			}
		}
	}
}

// TestEveryModuleIsVetted finds modules of their own, which ./... does not reach, in the Makefile.
func TestEveryModuleIsVetted(t *testing.T) {
	makefile := read(t, "Makefile")
	for _, name := range tracked(t) {
		folder, isModule := strings.CutSuffix(name, "/go.mod")
		if isModule && !strings.Contains(makefile, "-C "+folder+" vet ./...") {
			t.Errorf("make lint does not vet %s", folder)
		}
	}
}

func TestGoModReplacesNothing(t *testing.T) {
	for _, name := range []string{"go.mod", "tools.mod"} {
		if regexp.MustCompile(`(?m)^replace`).MatchString(read(t, name)) {
			t.Errorf("%s has a replace directive", name)
		}
	}
}

// TestDocsIndex looks for every page in the index of the docs.
func TestDocsIndex(t *testing.T) {
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	index := read(t, "docs/README.md")
	for _, page := range pages {
		if name := filepath.Base(page); name != "README.md" && !strings.Contains(index, "]("+name+")") {
			t.Errorf("docs/README.md has no link to %s", name)
		}
	}
}

// TestReadmeCommandsExist compares the two commands of the README with the Makefile.
func TestReadmeCommandsExist(t *testing.T) {
	readme, makefile, ci := read(t, "README.md"), read(t, "Makefile"), read(t, ".ci/run")
	for _, target := range []string{"demo", "test"} {
		if !strings.Contains(readme, "make "+target) || !regexp.MustCompile(`(?m)^`+target+`:`).MatchString(makefile) {
			t.Errorf("make %s is not in both README.md and Makefile", target)
		}
	}
	if !strings.Contains(ci, "make test") {
		t.Error(".ci/run does not call make test")
	}
}

// TestGeneratedKernels checks that the checked-in kernels equal the output of the generator.
func TestGeneratedKernels(t *testing.T) {
	dir := t.TempDir()
	command := exec.Command("go", "run", "-C", "optim/kernel/_asm", ".", "-out", filepath.Join(dir, "kernel_amd64.s"),
		"-dispatch", filepath.Join(dir, "kernel_amd64.go"))
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	names := func(folder string) (list []string) {
		for _, pattern := range []string{"kernel*_amd64.s", "kernel_amd64.go"} {
			found, err := filepath.Glob(filepath.Join(folder, pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range found {
				list = append(list, filepath.Base(name))
			}
		}
		return list
	}
	checkedIn := filepath.Join("optim", "kernel")
	if got, want := names(dir), names(checkedIn); !slices.Equal(got, want) {
		t.Fatalf("the generator writes %v, and %v are checked in: run make generate", got, want)
	}
	for _, name := range names(dir) {
		// The first line holds the command with its paths.
		_, want, _ := strings.Cut(read(t, filepath.Join(dir, name)), "\n")
		_, got, _ := strings.Cut(read(t, filepath.Join(checkedIn, name)), "\n")
		if got != want {
			t.Errorf("%s is not what the generator writes: run make generate", name)
		}
		if len(got) > 512<<10 {
			t.Errorf("%s has %d bytes, expected 512 KiB at most", name, len(got))
		}
	}
}
