// Package shell reads scripts of Bash without running a program: which commands a script runs, and the values of their
// words. It follows assignments, arrays, conditions, loops and functions. What only a run can tell is named.
package shell

import (
	"errors"
	"maps"
	"path"
	"slices"
	"sort"
	"strings"

	"mvdan.cc/sh/v3/syntax"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// Word is a word of a command as the command gets it.
type Word struct {
	Text   string // what is not known stands as it is written, such as $OUT
	At     int64  // the offset in the script
	Quoted bool   // it has quotes
	// Unknown are variables and commands whose values the script does not say.
	Unknown []string
}

// Command is a command that a script runs, with variables that stand before it.
type Command struct {
	Words []Word
	// Unsure says why the command may not run, or more than once: a condition or a loop; "" for a command that runs.
	Unsure string
	Often  int // how often a loop runs it, 0 and 1 for once

	own    []setting
	script *Script
	when   int
}

// setting is a value that a variable gets.
type setting struct {
	name     string
	value    Word
	at       int64 // of the name
	when     int
	exported bool
}

// Script is what a script runs.
type Script struct {
	Commands []*Command
	Lists    map[string][]Word // arrays, at the end
	// Unset are variables that conditions ask for and the script does not set: they count as empty. Looped are those
	// that loops set which may run any number of times: these loops count as left out. Undecided are those that a
	// condition sets which only a run can tell, each with the place of the condition.
	Unset, Looped []string
	Undecided     []Undecided
	// Written are files that the script writes itself, by their names.
	Written map[string]string
	// Sourced are the files that the script runs as a part of itself, in its order.
	Sourced []Sourced

	// Probes are programs that look for a module of other devices than NVIDIA's GPUs. The script goes on as without it.
	Probes []Word

	settings map[string][]setting
}

// Sourced is a file that a script runs as a part of itself: source FILE. What it sets and runs stands at that command.
type Sourced struct {
	Name string // as it is written; Path is where it was found, or empty
	Path string
	At   int64
}

// Opener returns the text of a file that a script runs as a part of itself, and where it was found.
type Opener func(name string) (text []byte, path string, err error)

// Undecided is a variable whose value depends on a condition that only a run can tell.
type Undecided struct {
	Name      string
	At        int64
	Condition string   // as it is written; "" for a variable that a command sets, such as read
	Values    []string // that the ways of the condition give it
}

// Decided returns the variable that a word depends on and that only a run can tell, or nil.
func (s *Script) Decided(w Word) *Undecided {
	for _, unknown := range w.Unknown {
		for i := range s.Undecided {
			if m := variableText.FindStringSubmatch(unknown); m != nil && m[1]+m[2] == s.Undecided[i].Name ||
				strings.HasPrefix(unknown, "${"+s.Undecided[i].Name+"[") {
				return &s.Undecided[i]
			}
		}
	}
	return nil
}

// Variable returns the value of a variable of the environment of a command, the offset of its name, and whether it is
// set. A variable of the shell that is not exported is none of the environment: exported is false for it.
func (c *Command) Variable(name string) (value Word, at int64, exported, set bool) {
	for _, s := range c.own {
		if s.name == name {
			return s.value, s.at, true, true
		}
	}
	list := c.script.settings[name]
	n := sort.Search(len(list), func(i int) bool { return list[i].when > c.when })
	if n == 0 || list[n-1].at < 0 {
		return Word{}, 0, false, false
	}
	s := list[n-1]
	return s.value, s.at, s.exported, true
}

// Environment returns the names of the variables of the environment of a command, as the script sets them.
func (c *Command) Environment() []string {
	names := map[string]bool{}
	for _, s := range c.own {
		names[s.name] = true
	}
	for name := range c.script.settings {
		if _, _, exported, set := c.Variable(name); exported && set {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// Text returns the words of a command with spaces between them.
func (c *Command) Text() string {
	texts := make([]string, len(c.Words))
	for i, w := range c.Words {
		texts[i] = w.Text
	}
	return strings.Join(texts, " ")
}

// Limits of what a script may be. No real script comes near them.
const (
	longestValue = 1 << 16 // bytes of a value
	mostWords    = 1 << 14 // of a command or an array
	mostSteps    = 1 << 18 // statements and values that are looked at
	mostDepth    = 32      // of calls of functions and of commands inside others
	mostTurns    = 256     // of a loop
)

// Read reads a script. Variables are those of its environment. Open may be nil: then no file is a part of the script.
// Every error is a *fault.Input.
func Read(file string, text []byte, variables map[string]Word, open Opener) (*Script, error) {
	parsed, err := parse(string(text))
	var wrong syntax.ParseError
	if errors.As(err, &wrong) {
		at := fault.Position{File: file, Line: int(wrong.Pos.Line()), Column: int(wrong.Pos.Col())}
		return nil, at.Inputf("this is no script that Bash reads: %s", wrong.Text).
			WithHint("run 'bash -n' on it, and mend what that finds; a text such as <path> is to be filled in")
	}
	if err != nil {
		return nil, &fault.Input{Where: fault.Position{File: file}, What: "this is no script that Bash reads", Err: err}
	}
	r := newRunner(string(text), variables)
	r.file, r.opener, r.around = file, open, []string{path.Clean(file)}
	r.run(parsed.Stmts)
	return r.finish(file)
}

// ReadWords reads a command that no shell has read, such as that of a container. It may run a shell itself.
func ReadWords(file string, words []Word, variables map[string]Word) (*Script, error) {
	r := newRunner("", variables)
	r.command(words, nil)
	return r.finish(file)
}

func newRunner(text string, variables map[string]Word) *runner {
	r := &runner{text: text, values: map[string]variable{}, functions: map[string]function{}, steps: mostSteps,
		flow: &flow{}, open: map[string]bool{}, demanded: map[string]bool{},
		outputs: map[*syntax.CmdSubst]string{},
		out:     &Script{Lists: map[string][]Word{}, Written: map[string]string{}, settings: map[string][]setting{}}}
	for name, value := range variables {
		r.set(name, variable{word: value, at: value.At, exported: true})
	}
	return r
}

// finish returns what the script runs.
func (r *runner) finish(file string) (*Script, error) {
	if r.steps < 0 {
		return nil, fault.File(file).Inputf("the script has more than %d commands and values: expected a script that "+
			"starts a training", mostSteps).WithHint("give the command that trains in a script of its own")
	}
	for name, v := range r.values {
		if v.isList {
			r.out.Lists[name] = shown(slices.Clone(v.list))
		}
	}
	slices.Sort(r.out.Looped)
	return r.out, nil
}

// commentBehind matches a line that ends with a backslash, before a comment: the comment ends the command. The parser
// reads on behind it.
var commentBehind = lazyregexp.New(`\\\r?\n([ \t]*#)`)

// bracket stands for a [ that begins an element of an array: the parser takes it for an index.
const bracket = "\x01"

func parse(text string) (*syntax.File, error) {
	text = commentBehind.ReplaceAllStringFunc(text, func(found string) string { return " " + found[1:] })
	for range mostTurns {
		parsed, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(text), "")
		var wrong syntax.ParseError
		if !errors.As(err, &wrong) || !strings.Contains(wrong.Text, "`[x]`") {
			return parsed, err
		}
		line := strings.LastIndexByte(text[:min(len(text), int(wrong.Pos.Offset()))], '\n') + 1
		at := line + strings.LastIndexByte(text[line:min(len(text), int(wrong.Pos.Offset())+1)], '[')
		if at < line {
			return parsed, err
		}
		text = text[:at] + bracket + text[at+1:]
	}
	return nil, errors.New("it has too many elements of arrays that begin with [")
}
