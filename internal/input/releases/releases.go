// Package releases reads which releases of programs a job runs on: requirements, lock files and environments of Python.
package releases

import (
	"cmp"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/strict"
)

// Release is a release of a program, and the place that says it.
type Release struct {
	Version string
	Place   fault.Position
}

// Found are the releases in a file or a folder, by the names of packages as PyPI normalizes them.
type Found struct {
	Path string
	// Open are packages that are named without one release: a range, or several of them.
	Open map[string]Release
	All  map[string]Release
}

// largest is the limit of a file: locks of large projects have a few megabytes.
const largest = 32 << 20

// Read reads a file of requirements, a lock file of uv, Poetry or PDM, or the folder of an environment. Texts may stand
// for files.
func Read(path string, texts files.Texts) (*Found, error) {
	f := &Found{Path: path, All: map[string]Release{}, Open: map[string]Release{}}
	if info, err := os.Stat(path); err == nil && info.IsDir() && texts[path] == nil {
		f.folder(path)
		return f, f.check("no *.dist-info of Python's packages",
			"name the folder of an environment, such as .venv, or its site-packages")
	}
	text, err := texts.Read(path, largest)
	if err != nil {
		return nil, &fault.Input{Where: fault.Position{File: path}, What: "cannot be read", Err: err}
	}
	if strings.Contains(string(text), "[[package]]") {
		if err := f.lock(path, text); err != nil {
			return nil, err
		}
	} else {
		f.requirements(path, string(text))
	}
	return f, f.check("no release of a package", "name requirements with lines such as torch==2.9.0, the output of "+
		"pip freeze, uv.lock, poetry.lock, or the folder of an environment")
}

// check refuses what names no package.
func (f *Found) check(what, hint string) error {
	if len(f.All)+len(f.Open) > 0 {
		return nil
	}
	return fault.File(f.Path).Inputf("there is %s", what).WithHint(hint)
}

// Of returns the release of a package, and whether there is one.
func (f *Found) Of(name string) (Release, bool) {
	if f == nil {
		return Release{}, false
	}
	r, is := f.All[name]
	return r, is
}

// OpenOf returns what is said of a package that has no one release.
func (f *Found) OpenOf(name string) (Release, bool) {
	if f == nil {
		return Release{}, false
	}
	r, is := f.Open[name]
	return r, is
}

// Names returns the names of the packages with a release.
func (f *Found) Names() []string { return slices.Sorted(maps.Keys(f.All)) }

// add adds a release. Where there are two, markers choose, and none counts.
func (f *Found) add(name, text string, place fault.Position) {
	name = Normalized(name)
	before, again := f.All[name]
	open, isOpen := f.Open[name]
	switch _, err := version.Parse(text); {
	case err != nil:
		f.Open[name] = Release{text, place}
	case again && before.Version != text:
		delete(f.All, name)
		f.Open[name] = Release{before.Version + " and " + text, before.Place}
	case isOpen && strings.Contains(open.Version, " and "):
	default:
		f.All[name] = Release{text, place}
	}
}

// Normalized is a name as PyPI compares it. conda calls PyTorch pytorch.
func Normalized(name string) string {
	name = strings.Trim(separators.ReplaceAllString(strings.ToLower(name), "-"), "-")
	return cmp.Or(map[string]string{"pytorch": "torch"}[name], name)
}

var separators = lazyregexp.New(`[-_.]+`)

// folder reads the names of the packages that are installed in an environment.
func (f *Found) folder(path string) {
	for _, below := range []string{".", "lib/python3*/site-packages", "lib64/python3*/site-packages",
		"Lib/site-packages"} {
		found, err := filepath.Glob(filepath.Join(path, below, "*.dist-info"))
		if err != nil {
			return // the pattern is one of a glob's: the folder's name has brackets
		}
		for _, name := range found {
			base := strings.TrimSuffix(filepath.Base(name), ".dist-info")
			if project, release, is := strings.Cut(base, "-"); is {
				f.add(project, release, fault.Position{File: name})
			}
		}
	}
}

// lock reads the packages of uv.lock, poetry.lock or pdm.lock.
func (f *Found) lock(path string, text []byte) error {
	d, err := strict.ParseTOML(path, text)
	if err != nil {
		return err
	}
	list := d.Root.Member("package")
	if list == nil {
		return nil
	}
	for _, p := range list.Value.Elements {
		name, release := p.Member("name"), p.Member("version")
		if name != nil && release != nil {
			f.add(name.Value.Text, release.Value.Text, d.Position(release.Value.At))
		}
	}
	return nil
}

var (
	// pinned is a line of requirements or of pip freeze, and of conda list --export.
	pinned = lazyregexp.New(`^([A-Za-z][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(?:={1,3})\s*([^\s;,=*]+)(?:=\S*)?\s*(?:$|[;\\])`)
	// listed is a line of pip list, or of conda list.
	listed = lazyregexp.New(`^([A-Za-z][A-Za-z0-9._-]*)\s+(\d[^\s]*)(?:\s|$)`)
	// ranged is a line with other releases than one.
	ranged = lazyregexp.New(`^([A-Za-z][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*([<>=!~@ ].*?)?\s*(?:$|[;\\])`)
	dashed = lazyregexp.New(`^\s*-\s+`) // environment.yml of conda
	remark = lazyregexp.New(`(?:^|\s)#.*`)
)

// requirements reads lines with packages: requirements, pip freeze, pip list, or conda's environments.
func (f *Found) requirements(path, text string) {
	number := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimSpace(dashed.ReplaceAllString(remark.ReplaceAllString(line, ""), ""))
		place := fault.Position{File: path, Line: number, Column: 1}
		if found := pinned.FindStringSubmatch(line); found != nil {
			f.add(found[1], found[2], place)
		} else if found := listed.FindStringSubmatch(line); found != nil {
			f.add(found[1], found[2], place)
		} else if found := ranged.FindStringSubmatch(line); found != nil {
			if _, is := f.All[Normalized(found[1])]; !is {
				f.Open[Normalized(found[1])] = Release{strings.TrimSpace(found[2]), place}
			}
		}
	}
}
