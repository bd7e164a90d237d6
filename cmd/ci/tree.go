package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pelletier/go-toml/v2"
)

const (
	partsFile  = ".ci/parts.toml"
	recordFile = ".ci/record.tsv"
	week       = 7 * 24 * time.Hour
)

// When a part runs.
const (
	always  = "always"  // for every change
	changed = "changed" // where its inputs have changed
	nightly = "nightly" // when somebody runs make nightly
)

// part is a target of make that tests something.
type part struct {
	Target string
	When   string
	Cores  int      // that it keeps busy; 0 is all, and parts that keep fewer busy run side by side
	Inputs []string // files and folders from the root that a changed part tests or needs, beside its recipe
	Waits  string   // what its seconds are spent on
	Proves string   // what nothing else shows
}

// shared are inputs of every changed part.
var shared = []string{"go.mod", "go.sum"}

// note says of a package or a Python file that takes long what its seconds are spent on, and what it proves.
type note struct{ Name, Waits, Proves string }

// How a part ended.
const (
	passed = "passed"
	failed = "failed"
)

// record is the last run of a part.
type record struct {
	Part, Result string
	Seconds, CPU float64
	Date, Commit string
}

// tree is a checkout with its parts and their records.
type tree struct {
	root    string
	parts   []part
	notes   []note
	records map[string]record // by target
	ran     []record          // by this process, also where the tree has changes
	turn    sync.Mutex        // of what parts that run side by side write: output, ran and records
}

func read(root string) (*tree, error) {
	t := &tree{root: root, records: map[string]record{}}
	text, err := os.ReadFile(filepath.Join(root, partsFile))
	if err != nil {
		return nil, err
	}
	var document struct {
		Part []part
		Note []note
	}
	if err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&document); err != nil {
		return nil, fmt.Errorf("%s: %w", partsFile, err)
	}
	t.parts, t.notes = document.Part, document.Note
	for _, p := range t.parts {
		if err := t.check(p); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", partsFile, p.Target, err)
		}
	}
	return t, t.readRecords()
}

// check holds a part to what it must say.
func (t *tree) check(p part) error {
	if !slices.Contains([]string{always, changed, nightly}, p.When) {
		return fmt.Errorf("when is %q, expected %s, %s or %s", p.When, always, changed, nightly)
	}
	if (p.When == changed) != (len(p.Inputs) > 0) {
		return fmt.Errorf("parts that run where inputs have changed have inputs, others have none")
	}
	if p.Waits == "" || p.Proves == "" {
		return errors.New("expected what it waits for and what it proves")
	}
	for _, input := range p.Inputs {
		if _, err := os.Stat(filepath.Join(t.root, input)); err != nil {
			return err
		}
	}
	return nil
}

// named returns the parts with names, or all that run at one of the times where there are no names.
func (t *tree) named(names []string, when ...string) (parts []part, err error) {
	if len(names) == 0 {
		for _, p := range t.parts {
			if slices.Contains(when, p.When) {
				parts = append(parts, p)
			}
		}
		return parts, nil
	}
	for _, name := range names {
		i := slices.IndexFunc(t.parts, func(p part) bool { return p.Target == name })
		if i < 0 {
			return nil, fmt.Errorf("found %q, expected a part of %s", name, partsFile)
		}
		parts = append(parts, t.parts[i])
	}
	return parts, nil
}

// readRecords reads the last runs. A file of records that does not exist has none.
func (t *tree) readRecords() error {
	file, err := os.Open(filepath.Join(t.root, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	reader := csv.NewReader(file)
	reader.Comma = '\t'
	rows, err := reader.ReadAll()
	if err != nil {
		return fmt.Errorf("%s: %w", recordFile, err)
	}
	for _, row := range rows[min(1, len(rows)):] {
		r := record{Part: row[0], Result: row[1], Date: row[4], Commit: row[5]}
		if r.Seconds, err = strconv.ParseFloat(row[2], 64); err == nil {
			r.CPU, err = strconv.ParseFloat(row[3], 64)
		}
		if err != nil {
			return fmt.Errorf("%s: %s: %w", recordFile, r.Part, err)
		}
		t.records[r.Part] = r
	}
	return nil
}

// writeRecords writes the last runs, in the order of the parts. Runs of parts that are gone go with them.
func (t *tree) writeRecords() error {
	var text bytes.Buffer
	writer := csv.NewWriter(&text)
	writer.Comma = '\t'
	rows := [][]string{{"part", "result", "seconds", "cpu_seconds", "date", "commit"}}
	for _, p := range t.parts {
		if r, found := t.records[p.Target]; found {
			rows = append(rows, []string{r.Part, r.Result, strconv.FormatFloat(r.Seconds, 'f', 0, 64),
				strconv.FormatFloat(r.CPU, 'f', 0, 64), r.Date, r.Commit})
		}
	}
	if err := writer.WriteAll(rows); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(t.root, recordFile), text.Bytes(), 0o644)
}

// holds reports whether a part passed at a commit whose inputs are those of the checkout. What git cannot compare does
// not hold: a commit that this clone lacks, or files that it does not track.
func (t *tree) holds(p part) (record, bool) {
	last, found := t.records[p.Target]
	if !found || last.Result != passed || p.When != changed {
		return last, false
	}
	inputs := slices.Concat(shared, p.Inputs)
	if _, err := t.git(append([]string{"diff", "--quiet", last.Commit, "--"}, inputs...)...); err != nil {
		return last, false
	}
	untracked, err := t.git(append([]string{"ls-files", "--others", "--exclude-standard", "--"}, inputs...)...)
	if err != nil || untracked != "" {
		return last, false
	}
	before, err := t.git("show", last.Commit+":Makefile")
	if err != nil {
		return last, false
	}
	now, err := os.ReadFile(filepath.Join(t.root, "Makefile"))
	return last, err == nil && recipe(before, p.Target) == recipe(string(now), p.Target)
}

// recipe returns the lines of a target of a Makefile, up to an empty one. A target that a Makefile lacks has none.
func recipe(makefile, target string) string {
	return regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(target) + `:(?:.*\n)(?:.+\n)*`).FindString(makefile)
}

// cleanCommit returns the commit that is checked out. A tree with changes is no commit; what this program writes itself
// is no change.
func (t *tree) cleanCommit() (string, error) {
	status, err := t.git("status", "--porcelain", "--", ".", ":!"+recordFile, ":!"+timesFile)
	if err != nil {
		return "", err
	}
	if status != "" {
		return "", fmt.Errorf("the tree has changes:\n%s", status)
	}
	commit, err := t.git("rev-parse", "--short=12", "HEAD")
	return strings.TrimSpace(commit), err
}

// age returns how much older the commit of a record is than the commit that is checked out. A commit that this clone
// lacks is as old as can be.
func (t *tree) age(r record) time.Duration {
	of := func(commit string) (time.Time, error) {
		text, err := t.git("show", "--no-patch", "--format=%cI", commit)
		if err != nil {
			return time.Time{}, err
		}
		return time.Parse(time.RFC3339, strings.TrimSpace(text))
	}
	then, err := of(r.Commit)
	if err != nil {
		return 1<<63 - 1
	}
	now, err := of("HEAD")
	if err != nil {
		return 1<<63 - 1
	}
	return now.Sub(then)
}

func (t *tree) git(arguments ...string) (string, error) {
	out, err := exec.Command("git", append([]string{"-C", t.root}, arguments...)...).Output()
	return string(out), err
}
