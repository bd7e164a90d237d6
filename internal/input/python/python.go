// Package python reads sources of Python, and notebooks, without running them: the values of assignments and the
// arguments of calls, as far as the source says them. It follows names, attributes, conditions and functions of the
// source. What only a run can tell is named.
package python

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"slices"
	"sort"
	"strings"
)

// Source is a source of Python, read.
type Source struct {
	// Calls are the calls of names of other modules, in their order.
	Calls []*Value
	// Names are the names that the source binds.
	Names map[string]*Value
	// Touched are the attributes that the source sets and the methods that it calls, of whatever object, with a place.
	Touched map[string]int
	// Environment are the variables that the source sets for its process, in their order.
	Environment []Setting
	// Unread are the offsets of statements that are not read.
	Unread []int
	// Functions are the functions of the source, in their order.
	Functions []string

	// AsksBF16 says that the source asks whether the GPU computes in bf16: the answer is that of GPUs since Ampere.
	AsksBF16 bool

	evaluator *evaluator
	file      *file
}

// Opener returns the text of a module that a source imports, and its path. Only modules of the same project are here.
type Opener func(module string) (text []byte, path string, err error)

// file is a source, and where its bytes are in the file on disk.
type file struct {
	path  string
	text  string
	cells []cell // of a notebook, nil for a source
	main  bool   // it is the file that is read, not one that it imports
}

// cell is a line of a notebook's source: its offset there, and in the file.
type cell struct{ source, document int }

// Read reads the source of a file. Opener may be nil. Packages of the list are not opened, though they may be here:
// what they have is known by its name. A source that takes very long to follow is an error: what it says in its end may
// decide everything.
func Read(path string, content []byte, open Opener, known ...string) (*Source, error) {
	return ReadStarted(path, content, nil, open, known...)
}

// ReadStarted is like Read, for a source whose command line is known unless command is nil.
func ReadStarted(path string, content []byte, command []Argument, open Opener, known ...string) (*Source, error) {
	f := &file{path: path, text: string(content), main: true}
	if IsNotebook(content) {
		var err error
		if f, err = notebook(path, content); err != nil {
			return nil, err
		}
	}
	e := &evaluator{open: open, known: known, touched: map[string]int{}, modules: map[string]map[string]*Value{},
		exported: f.magics(), command: command}
	s := &Source{evaluator: e, file: f}
	scope := e.module(f, "__main__")
	s.AsksBF16, s.Touched, s.Environment = e.asked, e.touched, e.exported
	s.Calls, s.Names, s.Unread, s.Functions = e.calls, scope, e.unread, e.functions
	if e.isSpent() {
		return nil, errSpent
	}
	return s, nil
}

// Call calls a function of the source without arguments. It returns what the function returns, or nil if the source has
// no such function.
func (s *Source) Call(function string) *Value {
	of := s.Names[function]
	if of != nil { // it may be a function of another module under a name of its own
		of = (&block{evaluator: s.evaluator}).resolved(of)
	}
	if of == nil || of.Kind != Function {
		return nil
	}
	s.evaluator.steps = 0
	made := (&block{evaluator: s.evaluator}).invoke(of, nil, nil, of.At)
	if s.evaluator.isSpent() {
		return &Value{Kind: Unknown, Text: function + "(), which takes very long to follow", At: of.At}
	}
	return made
}

// Defined returns the name under which a function is defined that a source has under a name.
func (s *Source) Defined(function string) string {
	of := s.Names[function]
	if of == nil {
		return function
	}
	if of = (&block{evaluator: s.evaluator}).resolved(of); of.Kind == Function {
		return of.Text
	}
	return function
}

// IsSource reports whether the name of a file is one of a source or of a notebook.
func IsSource(file string) bool {
	return slices.Contains([]string{".py", ".ipynb"}, filepath.Ext(file))
}

// IsNotebook reports whether a text is a Jupyter notebook.
func IsNotebook(content []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(content), []byte{'{'}) && bytes.Contains(content, []byte(`"nbformat"`)) &&
		bytes.Contains(content, []byte(`"cells"`))
}

// notebook returns the cells of code of a notebook as one source.
func notebook(path string, content []byte) (*file, error) {
	var document struct {
		Cells []struct {
			Type   string          `json:"cell_type"`
			Source json.RawMessage `json:"source"`
		} `json:"cells"`
	}
	if err := json.Unmarshal(content, &document); err != nil {
		return nil, err
	}
	f := &file{path: path, main: true}
	var source strings.Builder
	from := 0
	for _, c := range document.Cells {
		var lines []string
		var whole string
		if json.Unmarshal(c.Source, &whole) == nil {
			lines = strings.SplitAfter(whole, "\n")
		} else if err := json.Unmarshal(c.Source, &lines); err != nil {
			return nil, err
		}
		start := from
		if at := bytes.Index(content[from:], c.Source); at >= 0 {
			start = from + at
			from = start + len(c.Source)
		}
		if c.Type != "code" || len(lines) > 0 && isOther(lines[0]) {
			continue
		}
		for _, line := range lines {
			at := start
			if quoted, err := json.Marshal(strings.TrimSuffix(line, "\n")); err == nil && len(quoted) > 2 {
				if found := bytes.Index(content[start:from], quoted[1:len(quoted)-1]); found >= 0 {
					at = start + found
					start = at
				}
			}
			f.cells = append(f.cells, cell{source.Len(), at})
			source.WriteString(line)
		}
		source.WriteString("\n")
	}
	f.text = source.String()
	return f, nil
}

// isOther reports whether the first line of a cell hands the cell to another program or writes it into a file: %%bash.
func isOther(line string) bool {
	magic, is := strings.CutPrefix(line, "%%")
	word, _, _ := strings.Cut(strings.TrimSpace(magic), " ")
	return is && !slices.Contains([]string{"time", "timeit", "capture", "prun", "memit", "mprun", "snakeviz"}, word)
}

// position returns the offset in the file of an offset in the source.
func (f *file) position(at int) int {
	switch {
	case !f.main:
		return -1
	case f.cells == nil:
		return at
	}
	i := sort.Search(len(f.cells), func(i int) bool { return f.cells[i].source > at })
	if i == 0 {
		return 0
	}
	c := f.cells[i-1]
	return c.document + at - c.source
}

// modulePaths returns where a module may be that a source imports: beside it, or in a folder above that holds the first
// package of its name.
func modulePaths(source, module string) (paths []string) {
	dots := len(module) - len(strings.TrimLeft(module, "."))
	below := filepath.Join(strings.Split(module[dots:], ".")...)
	folder := filepath.Dir(source)
	if dots > 0 {
		for range dots - 1 {
			folder = filepath.Join(folder, "..")
		}
		return endings(filepath.Join(folder, below))
	}
	for range 12 {
		paths = append(paths, endings(filepath.Join(folder, below))...)
		folder = filepath.Join(folder, "..")
	}
	return paths
}

// endings returns the files of a module: a source, or the folder of a package.
func endings(path string) []string { return []string{path + ".py", filepath.Join(path, "__init__.py")} }
