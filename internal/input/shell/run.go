package shell

import (
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// runner follows a script.
type runner struct {
	file      string   // with the commands
	opener    Opener   // nil if files that they name are not read
	around    []string // files that are being read as a part of the script: none is a part of itself
	text      string   // that the nodes are of
	shift     int64    // where the command stands whose argument the text is
	inner     bool     // the text is an argument of another command
	out       *Script
	values    map[string]variable
	functions map[string]function
	outputs   map[*syntax.CmdSubst]string // of commands whose output is known
	arguments []Word                      // of the function that runs
	prefix    []Word                      // of the command that runs an inner text
	before    []setting                   // variables that stand before that command
	unsure    []string                    // the conditions and loops around
	often     int                         // how often a loop runs its commands
	quiet     bool                        // commands that are kept are not kept again: a later turn of a loop
	kept      map[commandOf]bool          // commands that a turn of the loop has kept
	node      commandOf                   // the command that is followed
	outside   commandOf                   // the command that runs an inner text
	calls     int                         // commands of the inner text so far
	flow      *flow
	status    answer               // of the function that ran last
	loops     int                  // around, in the function
	level     int                  // of functions and sourced files around
	locals    map[string]*variable // of the function that runs: values before it; nil outside of functions
	open      map[string]bool      // variables whose values only a run can tell
	asked     []string             // variables that the script does not set and conditions have asked for, each time
	demanded  map[string]bool      // those without which the script ends with an error: only a run can tell them
	exportAll bool                 // set -a
	reading   int64                // where arithmetic stands that sets a variable
	depth     int
	steps     int // that are left
	when      int
}

// commandOf tells a command from others in every turn of a loop. Those of an inner text, which is another one in each
// turn, are told by the command that runs the text and by their number.
type commandOf struct {
	node   syntax.Node
	number int
}

// function is a function of the shell, with the text that it stands in.
type function struct {
	body       *syntax.Stmt
	file, text string
	shift      int64
	inner      bool
}

// variable is the value of a variable: a word or an array.
type variable struct {
	word     Word
	list     []Word
	isList   bool
	isNumber bool  // declare -i: values are computed
	at       int64 // of its name
	exported bool
}

// same reports whether two values are equal.
func (v variable) same(w variable) bool {
	equal := func(a, b Word) bool { return a.Text == b.Text }
	return v.isList == w.isList && v.word.Text == w.word.Text && slices.EqualFunc(v.list, w.list, equal)
}

// at returns the offset of a node in the script.
func (r *runner) at(n syntax.Node) int64 {
	if r.inner {
		return r.shift
	}
	return int64(n.Pos().Offset())
}

// source returns a node as it is written.
func (r *runner) source(n syntax.Node) string {
	from, to := int(n.Pos().Offset()), int(n.End().Offset())
	if from > to || to > len(r.text) {
		return ""
	}
	return r.text[from:to]
}

func (r *runner) set(name string, v variable) {
	r.steps -= 1 + len(v.list)
	r.when++
	v.exported = v.exported || r.exportAll
	r.values[name] = v
	delete(r.open, name)
	s := setting{name, v.word, v.at, r.when, v.exported}
	s.value.Text = fromBlanks.Replace(s.value.Text)
	r.out.settings[name] = append(r.out.settings[name], s)
}

// forget has a variable be unknown.
func (r *runner) forget(name string) {
	r.when++
	delete(r.values, name)
	r.out.settings[name] = append(r.out.settings[name], setting{name: name, at: -1, when: r.when})
}

// statement follows a statement.
func (r *runner) statement(s *syntax.Stmt) {
	if r.steps--; r.steps < 0 || r.depth > mostDepth {
		return
	}
	if r.flow.way != goesOn {
		return
	}
	r.depth++
	defer func() { r.depth-- }()
	r.redirect(s)
	if r.reads(s) {
		return
	}
	if s.Background {
		r.apart(func() { r.compound(s) })
		return
	}
	r.compound(s)
}

// compound follows what a statement runs.
func (r *runner) compound(s *syntax.Stmt) {
	switch c := s.Cmd.(type) {
	case *syntax.CallExpr:
		r.call(c)
	case *syntax.DeclClause:
		r.declare(c)
	case *syntax.BinaryCmd:
		r.both(c)
	case *syntax.IfClause:
		r.choose(c)
	case *syntax.CaseClause:
		r.cases(c)
	case *syntax.ForClause:
		r.looping(func() { r.repeat(c) })
	case *syntax.WhileClause:
		r.looping(func() {
			if !r.while(c) {
				r.loop(c, "a loop", func() { r.turn(c.Do) })
			}
		})
	case *syntax.ArithmCmd:
		r.calculates(c.X, c)
	case *syntax.LetClause:
		for _, x := range c.Exprs {
			if w, is := x.(*syntax.Word); is && isQuoted(w) { // let "X -= 1"
				r.within(Word{Text: "((" + r.value(w).Text + "))", At: r.at(c)}, nil, nil)
				continue
			}
			r.calculates(x, c)
		}
	case *syntax.Block:
		r.run(c.Stmts)
	case *syntax.Subshell:
		r.apart(func() { r.run(c.Stmts) })
	case *syntax.TimeClause:
		if c.Stmt != nil {
			r.statement(c.Stmt)
		}
	case *syntax.FuncDecl:
		if c.Name != nil {
			r.functions[c.Name.Value] = function{c.Body, r.file, r.text, r.shift, r.inner}
		}
	}
}

// copied returns the values as they are.
func (r *runner) copied() map[string]variable {
	r.steps -= len(r.values)
	return maps.Clone(r.values)
}

// restore sets the values as they were.
func (r *runner) restore(before map[string]variable) {
	for name, v := range r.values {
		if was, is := before[name]; !is {
			r.forget(name)
		} else if !was.same(v) || was.exported != v.exported {
			r.set(name, was)
		}
	}
	for name, was := range before {
		if _, is := r.values[name]; !is {
			r.set(name, was)
		}
	}
}

// both follows a && b, a || b and a | b.
func (r *runner) both(c *syntax.BinaryCmd) {
	if c.Op != syntax.AndStmt && c.Op != syntax.OrStmt {
		r.apart(func() { r.statement(c.X) })
		r.apart(func() { r.statement(c.Y) })
		return
	}
	asked := len(r.asked)
	holds := r.condition(c.X)
	if holds == unsure && r.succeeds(c.X) {
		holds = yes // a command does what it is for
	}
	if r.flow.way != goesOn {
		return
	}
	if c.Op == syntax.OrStmt {
		holds = holds.not()
	}
	switch holds {
	case yes:
		r.unlessDemanded(asked, func() { r.statement(c.Y) })
	case unsure:
		r.branches(c.X, func() { r.statement(c.Y) }, func() {})
	}
}

// branches follows the ways that a script may take where only a run can tell which. What they set differently is
// unknown from there on.
func (r *runner) branches(condition syntax.Node, ways ...func()) {
	before, arguments := r.copied(), r.arguments
	r.unsure = append(r.unsure, "the condition "+shortened(r.source(condition)))
	var ends []map[string]variable
	for _, way := range ways {
		way()
		if r.flow.way != exits { // a way that ends the script leads nowhere
			ends = append(ends, r.copied())
		}
		r.flow.perhaps = r.flow.perhaps || r.flow.way != goesOn && r.flow.way != exits
		r.flow.way = goesOn
		r.restore(before)
	}
	r.unsure, r.arguments = r.unsure[:len(r.unsure)-1], arguments
	if len(ends) == 0 {
		r.flow.way, r.flow.status = exits, unsure
	}
	for _, end := range ends {
		for name, v := range end {
			r.settle(name, v, ends, r.at(condition))
		}
	}
	for name := range before {
		if slices.ContainsFunc(ends, func(end map[string]variable) bool { _, is := end[name]; return !is }) {
			r.undecided(name, r.at(condition))
		}
	}
	for i, u := range r.out.Undecided {
		if !r.open[u.Name] || u.At != r.at(condition) || u.Condition != "" {
			continue
		}
		r.out.Undecided[i].Condition = shortened(r.source(condition))
		for _, end := range ends {
			if v, is := end[u.Name]; is {
				value := joined(append(slices.Clip(v.list), v.word))
				r.out.Undecided[i].Values = append(r.out.Undecided[i].Values, value)
			}
		}
	}
}

// settle sets a variable to the value that all ways give it.
func (r *runner) settle(name string, v variable, ends []map[string]variable, at int64) {
	for _, end := range ends {
		if other, is := end[name]; !is || !other.same(v) {
			r.undecided(name, at)
			return
		}
	}
	if was, is := r.values[name]; !is || !was.same(v) || was.exported != v.exported {
		r.set(name, v)
	}
}

// undecided has a variable be unknown for a condition.
func (r *runner) undecided(name string, at int64) {
	if _, is := r.values[name]; is {
		r.forget(name)
	}
	r.open[name] = true
	if !slices.ContainsFunc(r.out.Undecided, func(u Undecided) bool { return u.Name == name }) {
		r.out.Undecided = append(r.out.Undecided, Undecided{Name: name, At: at})
	}
}

// shortened returns the start of a text, on one line.
func shortened(text string) string {
	const most = 60
	text = strings.TrimRight(strings.Join(strings.Fields(text), " "), "; ")
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "..."
	}
	return text
}

// loop follows the body of a loop that may run any number of times. What it sets stays as it was before.
func (r *runner) loop(n syntax.Node, what string, body func()) {
	before, arguments := r.copied(), r.arguments
	r.unsure = append(r.unsure, what)
	body()
	r.unsure, r.arguments, r.flow.way = r.unsure[:len(r.unsure)-1], arguments, goesOn
	for name, v := range r.values {
		if was, is := before[name]; (!is || !was.same(v)) && !slices.Contains(r.out.Looped, name) {
			r.out.Looped = append(r.out.Looped, name)
		}
	}
	r.restore(before)
}

// repeat follows a loop over words. The commands of the first turn are kept, with the number of turns.
func (r *runner) repeat(c *syntax.ForClause) {
	if counts, is := c.Loop.(*syntax.CStyleLoop); is && r.counts(counts, c.Do) {
		return
	}
	items, isWords := c.Loop.(*syntax.WordIter)
	if !isWords || c.Select {
		r.loop(c, "a loop", func() { r.turn(c.Do) })
		return
	}
	list := r.words(items.Items)
	if !items.InPos.IsValid() {
		list = r.arguments
	}
	isUnknown := func(w Word) bool { return len(w.Unknown) > 0 || strings.ContainsAny(w.Text, "*?") && !w.Quoted }
	if len(list) > mostTurns || slices.ContainsFunc(list, isUnknown) {
		r.loop(c, "the loop over "+items.Name.Value, func() {
			r.undecided(items.Name.Value, r.at(c))
			r.turn(c.Do)
		})
		return
	}
	quiet, often := r.quiet, r.often
	defer r.keepsHere()()
	r.often = max(1, r.often) * len(list)
	for i, w := range list {
		r.quiet = quiet || i > 0
		r.set(items.Name.Value, variable{word: w, at: r.at(c)})
		if !r.turn(c.Do) {
			break
		}
	}
	r.quiet, r.often = quiet, often
}

// keepsHere has a loop tell which commands its turns have kept, and the loop around it too once it has ended.
func (r *runner) keepsHere() (ends func()) {
	around := r.kept
	r.kept = maps.Clone(around)
	if r.kept == nil {
		r.kept = map[commandOf]bool{}
	}
	return func() {
		if around != nil {
			maps.Copy(around, r.kept)
		}
		r.kept = around
	}
}

// declare follows export, local, declare and readonly.
func (r *runner) declare(c *syntax.DeclClause) {
	exports := c.Variant.Value == "export"
	flags := ""
	for _, a := range c.Args {
		if a.Naked && a.Name == nil && a.Value != nil {
			if strings.HasPrefix(a.Value.Lit(), "-") {
				flags += a.Value.Lit()
			}
			exports = exports || strings.Contains(flags, "x")
			continue
		}
		if a.Name == nil {
			continue
		}
		if !exports && c.Variant.Value != "readonly" && !strings.Contains(flags, "g") {
			r.localize(a.Name.Value)
		}
		switch {
		case strings.ContainsAny(flags, "nulA"): // another name, other letters, or keys
			r.undecided(a.Name.Value, r.at(a))
			if strings.Contains(flags, "n") && a.Value != nil && syntax.ValidName(a.Value.Lit()) {
				r.undecided(a.Value.Lit(), r.at(a))
			}
			continue
		case strings.Contains(flags, "i"):
			was := r.values[a.Name.Value]
			was.isNumber = true
			r.values[a.Name.Value] = was
		}
		if !a.Naked {
			r.assign(a)
		}
		if v, is := r.values[a.Name.Value]; is && exports && !v.exported {
			v.exported = true
			r.set(a.Name.Value, v)
		}
	}
}

// assign follows an assignment.
func (r *runner) assign(a *syntax.Assign) {
	name := a.Name.Value
	was := r.values[name]
	v := variable{at: r.at(a), exported: was.exported, isNumber: was.isNumber}
	isIndexed := func(e *syntax.ArrayElem) bool { return e.Index != nil }
	switch {
	case a.Index != nil || a.Array != nil && slices.ContainsFunc(a.Array.Elems, isIndexed): // of one element
		r.undecided(name, r.at(a))
		return
	case a.Append && r.open[name]:
		return
	case v.isNumber && (a.Append || !isNumber(r.value(a.Value).Text)):
		r.undecided(name, r.at(a))
		return
	case a.Array != nil:
		v.isList = true
		if a.Append {
			v.list = slices.Clip(was.list)
		}
		for _, e := range a.Array.Elems {
			if e.Value != nil && len(v.list) < mostWords {
				v.list = append(v.list, r.words([]*syntax.Word{e.Value})...)
			}
		}
	case a.Append && was.isList:
		v.isList, v.list = true, append(slices.Clip(was.list), r.value(a.Value))
	default:
		v.word = r.value(a.Value)
		if a.Append {
			v.word.Text = was.word.Text + v.word.Text
			v.word.Unknown = append(slices.Clip(was.word.Unknown), v.word.Unknown...)
		}
	}
	if len(v.word.Text) <= longestValue {
		r.set(name, v)
	}
}

// call follows a command, or an assignment.
func (r *runner) call(c *syntax.CallExpr) {
	if len(c.Args) == 0 {
		for _, a := range c.Assigns {
			r.assign(a)
		}
		return
	}
	var own []setting
	for _, a := range c.Assigns {
		if a.Name != nil && a.Array == nil && a.Index == nil {
			own = append(own, setting{name: a.Name.Value, value: r.value(a.Value), at: r.at(a)})
		}
	}
	words := r.words(c.Args)
	if len(words) == 0 {
		return
	}
	r.node = commandOf{node: c}
	if r.outside.node != nil {
		r.calls++
		r.node = commandOf{r.outside.node, r.outside.number<<8 + r.calls}
	}
	if f, is := r.functions[words[0].Text]; is {
		r.status = r.invoke(f, words[1:])
		return
	}
	r.command(words, own)
}

// command follows a command, and what commands such as bash -c run.
func (r *runner) command(words []Word, own []setting) {
	switch words[0].Text {
	case "eval":
		r.within(Word{Text: joined(words[1:]), At: words[0].At}, nil, own)
		return
	case "read", "mapfile", "readarray", "unset":
		r.unset(words)
		return
	case "set":
		r.options(words[1:])
		return
	case "shift":
		r.shifts(words)
		return
	case "break", "continue", "return", "exit":
		r.leaves(words)
		return
	case "source", ".":
		r.sourced(words, own)
		return
	case "printf":
		if len(words) > 2 && words[1].Text == "-v" {
			r.printsTo(words)
			return
		}
	}
	for i, w := range words {
		isFlag := func(w Word) bool { return strings.HasPrefix(w.Text, "-") && strings.HasSuffix(w.Text, "c") }
		if !slices.Contains([]string{"bash", "sh", "zsh"}, path.Base(w.Text)) {
			continue
		}
		for j := i + 1; j+1 < len(words) && strings.HasPrefix(words[j].Text, "-"); j++ {
			if !isFlag(words[j]) {
				continue
			}
			isScript := false
			r.apart(func() { isScript = r.within(words[j+1], words[:i], own) })
			if isScript {
				return
			}
		}
	}
	if r.quiet && r.kept[r.node] {
		return
	}
	if r.kept != nil {
		r.kept[r.node] = true
	}
	r.steps -= len(words)
	r.when++
	full := shown(slices.Concat(r.prefix, words))
	r.out.Commands = append(r.out.Commands, &Command{Words: full, Unsure: strings.Join(r.unsure, ", "),
		Often: r.often, own: append(slices.Clip(r.before), own...), script: r.out, when: r.when})
	r.leaves(words) // exec
}

// unset follows unset, and read from an input that the script does not say.
func (r *runner) unset(words []Word) {
	for _, w := range words[1:] {
		name, _, isElement := strings.Cut(w.Text, "[")
		switch {
		case !syntax.ValidName(name):
		case words[0].Text != "unset" || isElement:
			r.undecided(name, w.At)
		default:
			r.forget(name)
			delete(r.open, name)
		}
	}
}

// options follows set: with words behind -- these are the arguments, and -a exports all variables from there on.
func (r *runner) options(words []Word) {
	for i, w := range words {
		switch {
		case w.Text == "--":
			r.arguments = words[i+1:]
			return
		case w.Text == "-a" || w.Text == "allexport" && i > 0 && words[i-1].Text == "-o":
			r.exportAll = true
		case w.Text == "+a" || w.Text == "+o":
			r.exportAll = false
		case !strings.HasPrefix(w.Text, "-") && !strings.HasPrefix(w.Text, "+") && i == 0:
			r.arguments = words
			return
		}
	}
}

// shifts follows shift.
func (r *runner) shifts(words []Word) {
	n := 1
	if len(words) > 1 {
		var err error
		if n, err = strconv.Atoi(words[1].Text); err != nil {
			return
		}
	}
	if n >= 0 && n <= len(r.arguments) {
		r.arguments = r.arguments[n:]
	}
}

// printsTo follows printf -v NAME FORMAT WORD...
func (r *runner) printsTo(words []Word) {
	name := words[2].Text
	isUnknown := func(w Word) bool { return len(w.Unknown) > 0 }
	out, known := "", false
	if !slices.ContainsFunc(words, isUnknown) {
		out, known = formatted(words[3:])
	}
	switch {
	case !syntax.ValidName(name):
	case known:
		r.set(name, variable{word: Word{Text: out, At: words[0].At, Quoted: true}, at: words[0].At})
	default:
		r.undecided(name, words[0].At)
	}
}

// sourced follows the commands of a file as a part of the script.
func (r *runner) sourced(words []Word, own []setting) {
	if len(words) < 2 || len(r.out.Sourced) >= mostTurns {
		return
	}
	s := Sourced{Name: words[1].Text, At: words[0].At}
	if r.opener != nil && len(words[1].Unknown) == 0 {
		if text, found, err := r.opener(words[1].Text); err == nil && !slices.Contains(r.around, found) {
			inner := *r
			inner.level++
			inner.file, inner.around = found, append(slices.Clip(r.around), found)
			if len(words) > 2 {
				inner.arguments = words[2:]
			}
			if inner.within(Word{Text: string(text), At: words[0].At}, nil, own) {
				s.Path = found
			}
			r.steps, r.when = inner.steps, inner.when
			if r.flow.way == returns {
				r.flow.way = goesOn
			}
		}
	}
	s.Name = fromBlanks.Replace(s.Name)
	r.out.Sourced = append(r.out.Sourced, s)
}

// within follows a text that a command runs. It reports whether the text is a script.
func (r *runner) within(text Word, prefix []Word, own []setting) bool {
	parsed, err := parse(text.Text)
	if err != nil || r.depth > mostDepth {
		return false
	}
	inner := *r
	inner.text, inner.shift, inner.inner, inner.depth = text.Text, text.At, true, r.depth+1
	inner.outside, inner.calls = r.node, 0
	inner.prefix = append(slices.Clip(r.prefix), prefix...)
	inner.before = append(slices.Clip(r.before), own...)
	inner.run(parsed.Stmts)
	r.arguments, r.exportAll = inner.arguments, inner.exportAll
	r.steps, r.when = inner.steps, inner.when
	return true
}

func joined(words []Word) string {
	var texts []string
	for _, w := range words {
		texts = append(texts, w.Text)
	}
	return strings.Join(texts, " ")
}

// redirect keeps the files that a statement writes: cat > file <<EOF.
func (r *runner) redirect(s *syntax.Stmt) {
	var to, what *syntax.Word
	for _, d := range s.Redirs {
		switch d.Op {
		case syntax.RdrOut, syntax.RdrClob:
			to = d.Word
		case syntax.Hdoc, syntax.DashHdoc:
			what = d.Hdoc
		}
	}
	c, isCall := s.Cmd.(*syntax.CallExpr)
	if !isCall || len(c.Args) == 0 || r.quiet {
		return
	}
	name := c.Args[0].Lit()
	if name == "tee" && len(c.Args) == 2 && to == nil {
		to = c.Args[1]
	}
	if to == nil || what == nil || name != "cat" && name != "tee" {
		return
	}
	file, text := r.value(to), r.document(what)
	if len(file.Unknown) == 0 && len(r.out.Written) < mostTurns {
		r.out.Written[file.Text] = text.Text
	}
}
