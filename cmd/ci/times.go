package main

import (
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	timesFile = "CONTRIBUTING.md"
	// The table stands between these lines.
	tableBegin = "<!-- times: written by make test-times -->\n"
	tableEnd   = "<!-- end of times -->\n"
	// slow is from how many seconds on a package or a Python file has a row.
	slow = 5.0
)

// row is a line of the table.
type row struct {
	name         string
	seconds, cpu float64 // cpu is 0 where it was not measured
	waits        string
	proves       string
}

// writeTimes measures packages and Python files, each alone, and writes the table. Seconds of parts are those of their
// last run.
func writeTimes(out io.Writer, t *tree) error {
	packages, err := t.timePackages(out)
	if err != nil {
		return err
	}
	files, err := t.timePython(out)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(t.root, timesFile))
	if err != nil {
		return err
	}
	replaced, err := replaceTable(string(text), table(t.rowsOfParts(), slices.Concat(packages, files)))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(t.root, timesFile), []byte(replaced), 0o644)
}

func (t *tree) rowsOfParts() (rows []row) {
	for _, p := range t.parts {
		if p.When != nightly {
			r := t.records[p.Target]
			rows = append(rows, row{p.Target + " (" + p.When + ")", r.Seconds, r.CPU, p.Waits, p.Proves})
		}
	}
	return rows
}

// noted returns the row of a package or a Python file. It is false where the row took little time.
func (t *tree) noted(name string, seconds, cpu float64) (row, bool) {
	r := row{name: name, seconds: seconds, cpu: cpu, waits: "not noted", proves: "not noted in " + partsFile}
	if i := slices.IndexFunc(t.notes, func(n note) bool { return n.Name == name }); i >= 0 {
		r.waits, r.proves = t.notes[i].Waits, t.notes[i].Proves
	}
	return r, seconds > slow
}

// timePackages runs the short tests of every package alone, compiled before.
func (t *tree) timePackages(out io.Writer) (rows []row, err error) {
	const tested = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}"
	command := exec.Command("go", "list", "-f", tested, "./...")
	command.Dir = t.root
	list, err := command.Output()
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "times")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	binary := filepath.Join(folder, "package.test")
	for line := range strings.Lines(string(list)) {
		name, dir, _ := strings.Cut(strings.TrimSpace(line), "\t")
		compile := exec.Command("go", "test", "-c", "-trimpath", "-o", binary, name)
		compile.Dir = t.root
		if text, err := compile.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", name, err, text)
		}
		test := exec.Command(binary, "-test.short", "-test.timeout=20m")
		test.Dir = dir
		begin := time.Now()
		if text, err := test.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", name, err, text)
		}
		name = strings.TrimPrefix(name, "plimsoll/")
		seconds := time.Since(begin).Seconds()
		cpu := (test.ProcessState.UserTime() + test.ProcessState.SystemTime()).Seconds()
		fmt.Fprintf(out, "%-24s %6.1f s, %6.1f of CPU\n", name, seconds, cpu)
		if r, isSlow := t.noted(name, seconds, cpu); isSlow {
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// timePython runs the Python tests and adds up the seconds of every file.
func (t *tree) timePython(out io.Writer) (rows []row, err error) {
	report, err := os.CreateTemp("", "times-*.xml")
	if err != nil {
		return nil, err
	}
	defer os.Remove(report.Name())
	command := exec.Command("make", "test-python", "PYTEST_FLAGS=--quiet --junitxml="+report.Name())
	command.Dir, command.Stdout, command.Stderr = t.root, out, os.Stderr
	if err := command.Run(); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(report)
	if err = errors.Join(err, report.Close()); err != nil {
		return nil, err
	}
	seconds, err := secondsOfModules(text)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(seconds)) {
		if r, isSlow := t.noted(name, seconds[name], 0); isSlow {
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// secondsOfModules adds up the seconds of the tests of every Python file in a report in JUnit's format.
func secondsOfModules(report []byte) (map[string]float64, error) {
	var document struct {
		Suites []struct {
			Cases []struct {
				Class string  `xml:"classname,attr"`
				Time  float64 `xml:"time,attr"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(report, &document); err != nil {
		return nil, err
	}
	seconds := map[string]float64{}
	for _, suite := range document.Suites {
		for _, c := range suite.Cases {
			seconds[strings.ReplaceAll(c.Class, ".", "/")+".py"] += c.Time
		}
	}
	return seconds, nil
}

// table returns the tables of parts and of what is slow in them, in Markdown.
func table(parts, slowest []row) string {
	var text strings.Builder
	write := func(title string, rows []row) {
		fmt.Fprintf(&text, "| %s | seconds | of CPU | what they are spent on | what nothing else shows |\n", title)
		text.WriteString("|---|---|---|---|---|\n")
		for _, r := range rows {
			cpu := "-"
			if r.cpu > 0 {
				cpu = fmt.Sprintf("%.0f", r.cpu)
			}
			fmt.Fprintf(&text, "| %s | %.0f | %s | %s | %s |\n", r.name, r.seconds, cpu, r.waits, r.proves)
		}
	}
	write("part", parts)
	text.WriteString("\n")
	slices.SortStableFunc(slowest, func(a, b row) int { return cmp.Compare(b.seconds, a.seconds) })
	write("package or file", slowest)
	return text.String()
}

// replaceTable puts a table between the two lines that mark its place.
func replaceTable(text, table string) (string, error) {
	before, rest, begins := strings.Cut(text, tableBegin)
	_, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		return "", fmt.Errorf("%s has no place for the table: expected the lines %q and %q",
			timesFile, tableBegin, tableEnd)
	}
	return before + tableBegin + "\n" + table + "\n" + tableEnd + after, nil
}
