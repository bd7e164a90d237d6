// Package plimsoll holds the rules of the repository, as tests.
package plimsoll

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
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
	"sync"
	"testing"
)

// pkg is a package in the output of "go list".
type pkg struct {
	ImportPath, Dir               string
	GoFiles, TestGoFiles, Imports []string
}

var list = sync.OnceValues(func() (all []pkg, err error) {
	command := exec.Command("go", "list", "-json", "./...")
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		return nil, err
	}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
})

// listed returns the packages of the module.
func listed(t *testing.T) []pkg {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	return all
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

// TestImportsPointDownwards compares the imports with the lists of packages in docs/architecture.md, one for each wing.
// Packages for tests are imported by tests only.
func TestImportsPointDownwards(t *testing.T) {
	level := map[string]int{}
	wings := regexp.MustCompile("(?s)```packages (\\S+)\n(.*?)\n```").
		FindAllStringSubmatch(read(t, "docs/architecture.md"), -1)
	for _, wing := range wings {
		for line := range strings.Lines(wing[2]) {
			level["plimsoll/"+wing[1]+"/"+strings.Fields(line)[0]] = len(level)
		}
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
	for _, source := range goFiles(t) {
		file := source.tree
		inPackage := func(name *ast.Ident) string {
			return filepath.Dir(positions.Position(file.Pos()).Filename) + " " + file.Name.Name + "." + name.Name
		}
		ofTest := source.isTest()
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
	"internal/base/files/files.go":          "it is the package that others are to use",
	"internal/base/files/system_linux.go":   "it is a part of that package",
	"internal/run/launch/placementcheck.go": "it reads /proc/PID/numa_maps line by line",
	"internal/state/checkpoint/writer.go":   "it opens folders",
	"internal/base/files/sync.go":           "it opens folders",
	"internal/state/service/keeper.go":      "it opens the folder of the socket, to lock it",
	"internal/state/service/folders.go":     "it opens the folder of the state, to lock it",
	"internal/state/service/protocol/pipes": "it opens named pipes, and waits for none",
	"internal/state/tier/disk_linux.go":     "it opens folders, to lock them",
	"internal/after/view/program.go":        "it opens the terminal",
	"cmd/plimsoll/create.go":                "it opens what is written, which may be a pipe",
	"cmd/plimsoll/view.go":                  "it opens /dev/null",
	"cmd/accuracy/":                         "it is not a part of the program",
	"cmd/rows/":                             "it is not a part of the program",
	"cmd/ci/":                               "it is not a part of the program",
	"cmd/page/":                             "it is not a part of the program",
	"experiments/":                          "it is not a part of the program",
	"internal/machine/host/hosttest/":       "it is for tests, and reads their data",
	"internal/base/files/filestest/":        "it is for tests",
	"internal/base/torchtest/":              "it is for tests, and reads their data",
	"internal/base/goldentest/":             "it is for tests, and reads their data",
	"internal/input/recipe/recipetest/":     "it is for tests, and reads their data",
	"internal/state/optim/kernel/_asm/":     "it is not a part of the program",
	"packaging/":                            "it is not a part of the program",
	"scripts/":                              "it is not a part of the program",
}

// TestFilesAreOpenedByOnePackage: only package files opens files. It neither waits for a pipe nor reads a device
// without end.
func TestFilesAreOpenedByOnePackage(t *testing.T) {
	used := map[string]bool{}
	for _, source := range goFiles(t) {
		if source.isTest() {
			continue
		}
		name := source.name
		excepted := ""
		for place := range mayOpen {
			if strings.HasPrefix(name, place) {
				excepted = place
			}
		}
		for number, line := range strings.Split(source.text, "\n") {
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

var listFiles = sync.OnceValues(func() ([]byte, error) {
	return exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard").Output()
})

// tracked lists the files of the repository. In an export without git it skips the test.
func tracked(t *testing.T) []string {
	t.Helper()
	out, err := listFiles()
	if err != nil {
		t.Skip("not a git checkout: ", err)
	}
	return strings.Fields(string(out))
}

// goFile is a file of Go, parsed once for all tests.
type goFile struct {
	name, text string
	tree       *ast.File
}

func (f goFile) isTest() bool { return strings.HasSuffix(f.name, "_test.go") }

var (
	positions = token.NewFileSet() // of goFiles
	sources   []goFile
)

// goFiles returns the files of Go in the repository.
func goFiles(t *testing.T) []goFile {
	t.Helper()
	if sources != nil {
		return sources
	}
	for _, name := range tracked(t) {
		if filepath.Ext(name) != ".go" {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			continue // deleted and not yet committed
		}
		tree, err := parser.ParseFile(positions, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		sources = append(sources, goFile{name, string(text), tree})
	}
	return sources
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

// TestGeneratedKernels checks that neither the generator of the kernels nor its output has changed since its last run,
// which has written their checksums. A test of the generator, internal/state/optim/kernel/_asm, runs it again.
func TestGeneratedKernels(t *testing.T) {
	const folder = "internal/state/optim/kernel"
	recorded := map[string]string{}
	for line := range strings.Lines(read(t, filepath.Join(folder, "kernel_amd64.sha256"))) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		recorded[name] = sum
	}
	for _, pattern := range []string{"_asm/*.go", "_asm/go.mod", "_asm/go.sum", "abi/*.go", "kernel*_amd64.s",
		"kernel_amd64.go"} {
		found, err := filepath.Glob(filepath.Join(folder, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s has no %s (%v)", folder, pattern, err)
		}
		for _, path := range found {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			name := strings.TrimPrefix(filepath.ToSlash(path), folder+"/")
			if sum := fmt.Sprintf("%x", sha256.Sum256([]byte(read(t, path)))); recorded[name] != sum {
				t.Errorf("%s has changed since the kernels were generated: run make generate", path)
			}
			delete(recorded, name)
		}
	}
	for name := range recorded {
		t.Errorf("%s is gone since the kernels were generated: run make generate", name)
	}
}
