package shell

import (
	"slices"
	"strconv"

	"mvdan.cc/sh/v3/syntax"
)

// way is how a statement leaves the statements around it.
type way int

const (
	goesOn    way = iota
	breaks        // break and continue leave a loop
	continues     //
	returns       // of a function or a sourced file
	exits         // the shell ends
)

// flow is how statements go on. It is the same for all commands of a function.
type flow struct {
	way    way
	levels int    // of loops that break and continue leave
	status answer // that return and exit give
	// perhaps says that statements may have left a function or a loop before, and that only a run can tell.
	perhaps bool
	loose   bool // statements that may not run for this reason are being followed
}

// run follows statements. Those behind a return that only a run can tell may not run: what they set is unknown.
func (r *runner) run(list []*syntax.Stmt) {
	for i, s := range list {
		if r.flow.way != goesOn {
			return
		}
		if r.flow.perhaps && !r.flow.loose {
			r.loosely(s, func() { r.run(list[i:]) })
			return
		}
		r.statement(s)
	}
}

// loosely follows statements that may not run.
func (r *runner) loosely(at syntax.Node, follow func()) {
	before := r.copied()
	r.flow.loose = true
	follow()
	r.flow.loose = false
	for name, v := range r.copied() {
		if was, is := before[name]; !is || !was.same(v) {
			r.undecided(name, r.at(at))
		}
	}
}

// leaves follows break, continue, return and exit. It is false for other commands.
func (r *runner) leaves(words []Word) bool {
	ways := map[string]way{"break": breaks, "continue": continues, "return": returns, "exit": exits, "exec": exits}
	to, is := ways[words[0].Text]
	switch {
	case !is || words[0].Text == "exec" && len(words) == 1:
		return false
	case to == returns && r.level == 0, to < returns && r.loops == 0:
		return true // outside of all, where Bash only says so
	}
	number := 1
	r.flow.way, r.flow.status = to, yes
	if len(words) > 1 && words[0].Text != "exec" {
		n, err := strconv.Atoi(words[1].Text)
		switch {
		case err != nil || len(words[1].Unknown) > 0:
			r.flow.status = unsure
		case n != 0:
			r.flow.status, number = no, n
		}
	}
	r.flow.levels = number
	return true
}

// unlessDemanded follows statements behind a condition. If it asks for variables that the script does not set or leaves
// empty, and the statements end the script with an error, the script demands these variables: whoever starts it sets
// them, and these statements do not run. Conditions behind them that ask for these variables have no answer.
// It reports whether the script demands variables.
func (r *runner) unlessDemanded(from int, follow func()) bool {
	before, arguments, commands := r.copied(), r.arguments, len(r.out.Commands)
	names := slices.Clone(r.asked[from:])
	follow()
	if len(names) == 0 || r.flow.way != exits || r.flow.status != no {
		return false
	}
	r.out.Commands = r.out.Commands[:commands]
	r.restore(before)
	r.arguments, r.flow.way = arguments, goesOn
	for _, name := range names {
		r.demanded[name] = true
		r.forget(name)
	}
	return true
}

// apart follows statements that another process runs: what they set is lost, and an exit ends only that process.
func (r *runner) apart(follow func()) {
	before, arguments := r.copied(), r.arguments
	follow()
	r.restore(before)
	r.arguments, r.flow.way = arguments, goesOn
}

// turn follows a turn of a loop, and reports whether another one follows.
func (r *runner) turn(body []*syntax.Stmt) bool {
	r.loops++
	r.run(body)
	r.loops--
	switch r.flow.way {
	case goesOn:
		return true
	case breaks, continues:
		again := r.flow.way == continues
		if r.flow.levels--; r.flow.levels > 0 {
			return false
		}
		r.flow.way = goesOn
		return again
	}
	return false
}

// looping follows a loop, and forgets behind it whether a turn may have left it.
func (r *runner) looping(follow func()) {
	perhaps := r.flow.perhaps
	follow()
	if r.flow.way == goesOn && r.level == 0 {
		r.flow.perhaps = perhaps
	}
}

// while follows a loop turn by turn as long as the script says its condition. It is false for a loop whose turns only a
// run can tell, or that has too many.
func (r *runner) while(c *syntax.WhileClause) bool {
	before, commands, steps := r.copied(), len(r.out.Commands), r.steps
	quiet := r.quiet
	defer r.keepsHere()()
	defer func() { r.quiet = quiet }()
	for turn := range mostTurns {
		r.run(c.Cond[:len(c.Cond)-1])
		holds := r.condition(c.Cond[len(c.Cond)-1])
		if c.Until {
			holds = holds.not()
		}
		if holds == no || r.steps < 0 {
			return true
		}
		if holds == unsure {
			break
		}
		r.quiet = quiet || turn > 0
		if !r.turn(c.Do) {
			return true
		}
	}
	r.out.Commands = r.out.Commands[:commands]
	r.restore(before)
	r.steps = min(steps, r.steps+mostSteps/8)
	return false
}

// invoke follows the call of a function, and says whether it succeeds.
func (r *runner) invoke(f function, arguments []Word) answer {
	inner := *r
	inner.file, inner.text, inner.shift, inner.inner = f.file, f.text, f.shift, f.inner
	inner.arguments, inner.locals = arguments, map[string]*variable{}
	inner.flow, inner.loops, inner.level = &flow{}, 0, r.level+1
	holds := inner.lastly(f.body)
	r.steps, r.when = inner.steps, inner.when
	switch inner.flow.way {
	case exits:
		r.flow.way = exits
	case returns:
		holds = inner.flow.status
	}
	for name, was := range inner.locals {
		if was == nil {
			r.forget(name)
		} else {
			r.set(name, *was)
		}
	}
	if inner.flow.perhaps {
		return unsure
	}
	return holds
}

// lastly follows the body of a function, and says whether its last statement succeeds, where that is a test.
func (r *runner) lastly(body *syntax.Stmt) answer {
	block, is := body.Cmd.(*syntax.Block)
	if !is || len(block.Stmts) == 0 || len(body.Redirs) > 0 {
		r.statement(body)
		return unsure
	}
	last := len(block.Stmts) - 1
	r.run(block.Stmts[:last])
	s := block.Stmts[last]
	switch s.Cmd.(type) {
	case *syntax.CallExpr, *syntax.TestClause, *syntax.ArithmCmd:
		if r.flow.way == goesOn && !r.flow.perhaps {
			return r.condition(s)
		}
	}
	r.run(block.Stmts[last:])
	return unsure
}

// localize has a variable be one of the function that runs.
func (r *runner) localize(name string) {
	if r.locals == nil {
		return
	}
	if _, is := r.locals[name]; is {
		return
	}
	r.locals[name] = nil
	if was, is := r.values[name]; is {
		r.locals[name] = &was
	}
}

// queries are commands that answer whether something is so: only a run can tell.
var queries = []string{"grep", "egrep", "fgrep", "zgrep", "which", "command", "type", "hash", "pgrep", "diff", "cmp",
	"mountpoint", "getent", "ping", "systemctl", "pip", "conda"}

// succeeds reports whether a command that stands before && or || is taken to do what it is for.
func (r *runner) succeeds(s *syntax.Stmt) bool {
	c, isCall := s.Cmd.(*syntax.CallExpr)
	if !isCall || s.Negated || isTest(c) || len(c.Args) == 0 {
		return isCall && !s.Negated && len(c.Args) == 0
	}
	name := c.Args[0].Lit()
	_, isFunction := r.functions[name]
	return name != "" && !isFunction && !slices.Contains(queries, name)
}
