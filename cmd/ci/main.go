// Command ci runs the parts of the build that a change waits for, and those that a night has time for. The file
// .ci/parts.toml lists them. A part that is slow runs only where its inputs differ from those of the commit at which it
// passed last; .ci/record.tsv says which commit that was, and git compares.
//
//	ci run [-all] [PART...]    the parts that a change waits for; -all runs unchanged ones, too
//	ci nightly [PART...]       the parts of the night, each to its end
//	ci status                  the last run of every part of the night, with a warning where one is old or has failed
//	ci times                   the seconds of parts, packages and Python files, as a table of CONTRIBUTING.md
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ci:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, arguments []string) error {
	if len(arguments) == 0 {
		return fmt.Errorf("expected run, nightly, status or times")
	}
	tree, err := read(".")
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet(arguments[0], flag.ContinueOnError)
	all := flags.Bool("all", false, "run parts whose inputs have not changed, too")
	if err := flags.Parse(arguments[1:]); err != nil {
		return err
	}
	switch arguments[0] {
	case "run":
		err := runChange(out, tree, flags.Args(), *all)
		printStatus(out, tree)
		return err
	case "nightly":
		return runNight(out, tree, flags.Args())
	case "status":
		printStatus(out, tree)
		return nil
	case "times":
		return writeTimes(out, tree)
	}
	return fmt.Errorf("found %q, expected run, nightly, status or times", arguments[0])
}

// runChange runs the parts that a change waits for. Once one has failed, none is started.
func runChange(out io.Writer, t *tree, names []string, all bool) error {
	parts, err := t.named(names, always, changed)
	if err != nil {
		return err
	}
	defer printSeconds(out, t, parts, time.Now())
	var due []part
	for _, p := range parts {
		if last, holds := t.holds(p); holds && !all {
			fmt.Fprintf(out, "ci: %s: its inputs are those of commit %s, where it passed on %s in %.0f s\n",
				p.Target, last.Commit, last.Date, last.Seconds)
			continue
		}
		due = append(due, p)
	}
	return sideBySide(due, runtime.NumCPU(), func(p part) error { return t.make(out, p) })
}

// runNight runs every part of the night, also after one has failed.
func runNight(out io.Writer, t *tree, names []string) error {
	parts, err := t.named(names, nightly)
	if err != nil {
		return err
	}
	defer printSeconds(out, t, parts, time.Now())
	var failed []string
	for _, p := range parts {
		if err := t.make(out, p); err != nil {
			failed = append(failed, p.Target)
		}
	}
	if failed != nil {
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// make runs the target of a part, and records how it ended. Parts may be made side by side.
func (t *tree) make(out io.Writer, p part) error {
	lines := &prefixed{prefix: p.Target + ": ", out: out, turn: &t.turn}
	fmt.Fprintf(lines, "make %s\n", p.Target)
	command := exec.Command("make", p.Target)
	command.Dir, command.Stdout, command.Stderr = t.root, lines, lines
	command.WaitDelay = 30 * time.Second // a process that a part leaves behind holds its output, and makes it fail
	before, err := t.cleanCommit()
	begin := time.Now()
	failure := command.Run()
	r := record{Part: p.Target, Result: passed, Seconds: time.Since(begin).Seconds(), Date: begin.Format(time.DateOnly)}
	if failure != nil {
		r.Result, failure = failed, fmt.Errorf("make %s: %w", p.Target, failure)
	}
	if s := command.ProcessState; s != nil {
		r.CPU = (s.UserTime() + s.SystemTime()).Seconds()
	}
	if err == nil {
		r.Commit, err = t.cleanCommit()
	}
	if err == nil && r.Commit != before {
		err = fmt.Errorf("commit %s was checked out meanwhile, in place of %s", r.Commit, before)
	}
	if err != nil {
		fmt.Fprintf(lines, "not recorded: %v\n", err)
	}
	lines.end()
	return cmp.Or(failure, t.keep(r, err == nil))
}

// keep takes the run of a part for the table of this process, and into the file of records where its commit is known.
func (t *tree) keep(r record, recorded bool) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	t.ran = append(t.ran, r)
	if !recorded {
		return nil
	}
	t.records[r.Part] = r
	return t.writeRecords()
}

// printSeconds prints what parts have taken since the beginning.
func printSeconds(out io.Writer, t *tree, parts []part, begin time.Time) {
	fmt.Fprintf(out, "\n%-16s %8s %8s\n", "part", "seconds", "of CPU")
	for _, p := range parts {
		if i := slices.IndexFunc(t.ran, func(r record) bool { return r.Part == p.Target }); i >= 0 {
			fmt.Fprintf(out, "%-16s %8.0f %8.0f  %s\n", p.Target, t.ran[i].Seconds, t.ran[i].CPU, t.ran[i].Result)
		}
	}
	fmt.Fprintf(out, "%-16s %8.0f\n\n", "all", time.Since(begin).Seconds())
}

// printStatus prints the last run of every part of the night, and warns of each that failed, or that has not run for a
// week of commits.
func printStatus(out io.Writer, t *tree) {
	fmt.Fprintf(out, "%-22s %-8s %-11s %-13s %8s\n", "nightly part", "result", "date", "commit", "seconds")
	var warnings []string
	for _, p := range t.parts {
		if p.When != nightly {
			continue
		}
		last, found := t.records[p.Target]
		if !found {
			last.Result = "never ran"
		}
		fmt.Fprintf(out, "%-22s %-8s %-11s %-13s %8.0f\n", p.Target, last.Result, last.Date, last.Commit, last.Seconds)
		if last.Result != passed || t.age(last) > week {
			warnings = append(warnings, p.Target)
		}
	}
	if warnings != nil {
		fmt.Fprintf(out, "WARNING: these parts did not pass within the last week of commits: %s. Run make nightly.\n",
			strings.Join(warnings, ", "))
	}
}
