package shell

import (
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"

	"plimsoll/internal/base/lazyregexp"
)

// Get and Each make the values an environment for package expand.
func (r *runner) Get(name string) expand.Variable {
	switch v, is := r.values[name]; {
	case is && v.isList:
		list := make([]string, len(v.list))
		for i, w := range v.list {
			list[i] = w.Text
		}
		return expand.Variable{Set: true, Kind: expand.Indexed, List: list}
	case is:
		return expand.Variable{Set: true, Kind: expand.String, Str: v.word.Text}
	case name == "BASH_SOURCE" && r.file != "":
		return expand.Variable{Set: true, Kind: expand.Indexed, List: []string{r.file}}
	case name == "0" && r.file != "" && len(r.prefix) == 0:
		return expand.Variable{Set: true, Kind: expand.String, Str: r.file}
	case name == "#":
		if r.level == 0 && r.demanded["#"] {
			return expand.Variable{}
		}
		if r.level == 0 { // arguments of the script itself
			r.asked = append(r.asked, name)
		}
		return expand.Variable{Set: true, Kind: expand.String, Str: strconv.Itoa(len(r.arguments))}
	case name == "@" || name == "*":
		var list []string
		for _, w := range r.arguments {
			list = append(list, w.Text)
		}
		return expand.Variable{Set: true, Kind: expand.Indexed, List: list}
	}
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= len(r.arguments) {
		return expand.Variable{Set: true, Kind: expand.String, Str: r.arguments[n-1].Text}
	}
	return expand.Variable{}
}

// Each is for names with a prefix, which no script of a training needs.
func (r *runner) Each(func(string, expand.Variable) bool) {}

// isKnown reports whether the script says the value of a parameter.
func (r *runner) isKnown(name string) bool { return r.Get(name).Set }

func (r *runner) config() *expand.Config {
	return &expand.Config{Env: r, CmdSubst: func(to io.Writer, c *syntax.CmdSubst) error {
		_, err := io.WriteString(to, r.outputs[c])
		return err
	}}
}

// words returns the words of a command with the values of their parts. A word may become several, or none.
func (r *runner) words(list []*syntax.Word) (words []Word) {
	for _, w := range list {
		if len(words) > mostWords || r.steps < 0 {
			return words
		}
		r.steps--
		if elements, is := r.elements(w); is {
			words = append(words, elements...)
			continue
		}
		settled, unknown := r.settled(w)
		fields, err := expand.Fields(r.config(), settled)
		if err != nil {
			fields, unknown = []string{r.source(w)}, append(unknown, r.source(w))
		}
		quoted := isQuoted(w)
		for _, text := range fields {
			words = append(words, r.word(text, r.at(w), quoted, unknown))
		}
		r.steps -= len(fields)
	}
	return words
}

// word returns a word with what of it is unknown.
func (r *runner) word(text string, at int64, quoted bool, unknown []string) Word {
	if len(text) > longestValue {
		text = text[:longestValue]
		r.steps = -1
	}
	r.steps -= len(text) / 1024
	w := Word{Text: text, At: at, Quoted: quoted}
	if strings.ContainsAny(text, "$`") {
		w.Unknown = unknown
	}
	return w
}

// elements returns the elements of an array where a word is all of one: "${NAME[@]}".
func (r *runner) elements(w *syntax.Word) ([]Word, bool) {
	if len(w.Parts) != 1 {
		return nil, false
	}
	part, quoted := w.Parts[0], false
	if q, is := part.(*syntax.DblQuoted); is && len(q.Parts) == 1 {
		part, quoted = q.Parts[0], true
	}
	p, is := part.(*syntax.ParamExp)
	if !is || p.Exp != nil || p.Slice != nil || p.Repl != nil || p.Length || p.Excl || p.Names != 0 || p.Param == nil {
		return nil, false
	}
	list, isList := r.values[p.Param.Value].list, r.values[p.Param.Value].isList
	index, _ := p.Index.(*syntax.Word)
	switch {
	case p.Param.Value == "@" || p.Param.Value == "*" && !quoted:
		list = r.arguments
	case !isList || index == nil || index.Lit() != "@" && (index.Lit() != "*" || quoted):
		return nil, false
	}
	r.steps -= len(list)
	if quoted {
		return list, true
	}
	var split []Word
	for _, e := range list {
		for field := range strings.FieldsSeq(e.Text) {
			split = append(split, Word{Text: field, At: e.At, Unknown: e.Unknown})
		}
	}
	return split, true
}

// value returns the value of a word that is not split: of an assignment.
func (r *runner) value(w *syntax.Word) Word {
	if w == nil || len(w.Parts) == 0 {
		return Word{}
	}
	settled, unknown := r.settled(w)
	text, err := expand.Literal(r.config(), settled)
	if err != nil {
		text, unknown = r.source(w), append(unknown, r.source(w))
	}
	return r.word(text, r.at(w), isQuoted(w), unknown)
}

// document returns the text of a document in a script.
func (r *runner) document(w *syntax.Word) Word {
	settled, unknown := r.settled(w)
	text, err := expand.Document(r.config(), settled)
	if err != nil {
		text = r.source(w)
	}
	return r.word(text, r.at(w), true, unknown)
}

func isQuoted(w *syntax.Word) bool {
	return slices.ContainsFunc(w.Parts, func(p syntax.WordPart) bool {
		switch p.(type) {
		case *syntax.SglQuoted, *syntax.DblQuoted:
			return true
		}
		return false
	})
}

// settled returns a word whose unknown parts are texts, as they are written, with their names.
func (r *runner) settled(w *syntax.Word) (*syntax.Word, []string) {
	var unknown []string
	return &syntax.Word{Parts: r.parts(w.Parts, false, &unknown)}, unknown
}

func (r *runner) parts(list []syntax.WordPart, quoted bool, unknown *[]string) []syntax.WordPart {
	var parts []syntax.WordPart
	asText := func(n syntax.Node, name string) {
		*unknown = append(*unknown, name)
		parts = append(parts, r.asText(n, quoted))
	}
	for i, part := range list {
		switch p := part.(type) {
		case *syntax.Lit:
			if isTilde := i == 0 && strings.HasPrefix(p.Value, "~"); !quoted && (isTilde || growsByBraces(p.Value)) {
				parts = append(parts, &syntax.SglQuoted{Value: p.Value})
				continue
			}
			parts = append(parts, p)
		case *syntax.DblQuoted:
			inside := *p
			inside.Parts = r.parts(p.Parts, true, unknown)
			parts = append(parts, &inside)
		case *syntax.ParamExp:
			if settled, is := r.parameter(p, quoted, unknown); is {
				parts = append(parts, settled...)
			} else {
				asText(p, r.source(p))
			}
		case *syntax.ArithmExp:
			if r.computes(p.X, unknown) {
				parts = append(parts, p)
			} else {
				r.unsettle(p.X, p)
				asText(p, r.source(p))
			}
		case *syntax.CmdSubst:
			if out, is := r.output(p); is {
				r.outputs[p] = out
				parts = append(parts, p)
			} else {
				asText(p, r.source(p))
			}
		case *syntax.ProcSubst, *syntax.ExtGlob:
			parts = append(parts, r.asText(p, quoted))
		default:
			parts = append(parts, p)
		}
	}
	return parts
}

// growsByBraces reports whether braces may make many words of a text.
func growsByBraces(text string) bool {
	if m := smallRange.FindStringSubmatch(text); m != nil && strings.Count(text, "{") == 1 {
		from, err := strconv.Atoi(m[1])
		to, err2 := strconv.Atoi(m[2])
		return err != nil || err2 != nil || max(from-to, to-from) > mostTurns
	}
	return strings.Contains(text, "..") || strings.Count(text, "{") > 2
}

// smallRange matches a range of numbers.
var smallRange = lazyregexp.New(`\{(-?[0-9]{1,6})\.\.(-?[0-9]{1,6})\}`)

// blank stands for a space in a text that is not known: such a text is one word, wherever it stands.
const blank = "\ue000"

var fromBlanks = strings.NewReplacer(blank, " ", bracket, "[")

var toBlanks = strings.NewReplacer(" ", blank, "\t", blank, "\n", blank)

// asText returns a part as it is written.
func (r *runner) asText(n syntax.Node, quoted bool) syntax.WordPart {
	text := toBlanks.Replace(r.source(n))
	if !quoted {
		return &syntax.SglQuoted{Value: text}
	}
	escape := strings.NewReplacer(`\`, `\\`, "`", "\\`", "$", `\$`, `"`, `\"`)
	return &syntax.Lit{Value: escape.Replace(text)}
}

// shown returns words as they are written.
func shown(words []Word) []Word {
	for i, w := range words {
		if strings.Contains(w.Text, blank) || strings.Contains(w.Text, bracket) {
			words[i].Text = fromBlanks.Replace(w.Text)
		}
	}
	return words
}

// parameter returns the parts that stand for a parameter: itself if its value is known, or its default. It is false for
// one that is not known.
func (r *runner) parameter(p *syntax.ParamExp, quoted bool, unknown *[]string) ([]syntax.WordPart, bool) {
	if p.Param == nil || p.Excl || p.Names != 0 {
		return nil, false
	}
	known := r.isKnown(p.Param.Value)
	if r.open[p.Param.Value] || isBeyond(p) {
		return nil, false
	}
	if known && p.Index != nil && !isEvery(p.Index) && !r.computes(p.Index, unknown) {
		return nil, false
	}
	if p.Exp == nil {
		if known {
			*unknown = append(*unknown, r.values[p.Param.Value].word.Unknown...)
			return []syntax.WordPart{p}, true
		}
		return nil, false
	}
	var inside []syntax.WordPart
	if p.Exp.Word != nil {
		inside = r.parts(p.Exp.Word.Parts, quoted, unknown)
		if !quoted {
			inside = r.splits(inside)
		}
	}
	isEmpty := known && !r.values[p.Param.Value].isList && r.Get(p.Param.Value).Str == ""
	switch op := p.Exp.Op; {
	case !known && (op == syntax.DefaultUnset || op == syntax.AssignUnset), (!known || isEmpty) &&
		(op == syntax.DefaultUnsetOrNull || op == syntax.AssignUnsetOrNull):
		if op == syntax.AssignUnset || op == syntax.AssignUnsetOrNull {
			r.set(p.Param.Value, variable{word: r.value(&syntax.Word{Parts: inside}), at: r.at(p)})
		}
		return inside, true
	case !known && (op == syntax.AlternateUnset || op == syntax.AlternateUnsetOrNull):
		return nil, true
	case !known:
		if op == syntax.ErrorUnset || op == syntax.ErrorUnsetOrNull { // ${1:?usage}
			r.demanded[p.Param.Value] = true
		}
		return nil, false
	}
	*unknown = append(*unknown, r.values[p.Param.Value].word.Unknown...)
	with := *p
	if p.Exp.Word != nil {
		with.Exp = &syntax.Expansion{Op: p.Exp.Op, Word: &syntax.Word{Parts: inside}}
	}
	return []syntax.WordPart{&with}, true
}

// isBeyond reports whether an expansion is of a form that package expand does not have: ${A[@]/#/x}, ${A@Q}.
func isBeyond(p *syntax.ParamExp) bool {
	if p.Repl != nil && p.Repl.Orig != nil {
		first := p.Repl.Orig.Lit()
		return first == "" && len(p.Repl.Orig.Parts) == 0 || strings.HasPrefix(first, "#") ||
			strings.HasPrefix(first, "%") || strings.ContainsAny(first, "(")
	}
	if p.Exp == nil || p.Exp.Word == nil {
		return false
	}
	if p.Exp.Op == syntax.OtherParamOps {
		return !slices.Contains([]string{"U", "L", "u"}, p.Exp.Word.Lit())
	}
	return slices.ContainsFunc(p.Exp.Word.Parts, func(part syntax.WordPart) bool {
		text, is := part.(*syntax.Lit)
		_, isPattern := part.(*syntax.ExtGlob)
		return isPattern || is && extended.MatchString(text.Value)
	})
}

// extended matches a pattern that only Bash's extglob has.
var extended = lazyregexp.New(`[?*+@!]\(`)

// splits has texts with blanks be outputs of commands, which become several words: ${X:-a b}.
func (r *runner) splits(parts []syntax.WordPart) []syntax.WordPart {
	for i, part := range parts {
		if text, is := part.(*syntax.Lit); is && strings.ContainsAny(text.Value, " \t\n") {
			out := &syntax.CmdSubst{Left: text.Pos()}
			r.outputs[out] = text.Value
			parts[i] = out
		}
	}
	return parts
}

// isEvery reports whether an index is @ or *.
func isEvery(index syntax.ArithmExpr) bool {
	w, is := index.(*syntax.Word)
	return is && (w.Lit() == "@" || w.Lit() == "*")
}

// computes reports whether the values of an expression are numbers that the script says.
func (r *runner) computes(x syntax.ArithmExpr, unknown *[]string) bool {
	known := true
	check := func(name string) {
		if value := r.Get(name); !value.Set || !isNumber(value.String()) {
			known = false
			*unknown = append(*unknown, "$"+name)
		}
	}
	syntax.Walk(x, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.Word:
			if name := n.Lit(); syntax.ValidName(name) {
				check(name)
			}
		case *syntax.ParamExp:
			if n.Param != nil && n.Exp == nil && !n.Length {
				check(n.Param.Value)
			}
			return false
		case *syntax.CmdSubst:
			out, is := r.output(n)
			known = known && is && isNumber(strings.TrimSpace(out))
			r.outputs[n] = out
			return false
		case *syntax.BinaryArithm:
			if n.Op == syntax.Assgn && assignee(n) != "" { // what is set needs no value
				known = known && r.computes(n.Y, unknown)
				return false
			}
		}
		return known
	})
	return known
}

func isNumber(text string) bool {
	_, err := strconv.ParseInt(text, 10, 64)
	return err == nil
}

// output returns what a command prints, where it is one that only works on its words.
func (r *runner) output(c *syntax.CmdSubst) (string, bool) {
	if len(c.Stmts) == 0 || r.depth > mostDepth {
		return "", false
	}
	r.depth++
	defer func() { r.depth-- }()
	last := len(c.Stmts) - 1
	if last > 0 {
		defer r.restore(r.copied())
	}
	for _, s := range c.Stmts[:last] { // IFS=,; echo "${LIST[*]}"
		call, is := s.Cmd.(*syntax.CallExpr)
		if !is || len(call.Args) > 0 {
			return "", false
		}
		r.call(call)
	}
	out, known := r.prints(c.Stmts[last], "")
	return strings.TrimRight(out, "\n"), known
}

// prints returns what a statement prints for an input.
func (r *runner) prints(s *syntax.Stmt, input string) (string, bool) {
	for _, d := range s.Redirs {
		if d.Op != syntax.WordHdoc {
			continue
		}
		given := r.value(d.Word)
		if len(given.Unknown) > 0 {
			return "", false
		}
		input = given.Text + "\n"
	}
	switch c := s.Cmd.(type) {
	case *syntax.BinaryCmd:
		switch c.Op {
		case syntax.AndStmt:
			return r.printsThere(c)
		case syntax.OrStmt:
			return r.printsElse(c, input)
		}
		if c.Op != syntax.Pipe {
			return "", false
		}
		out, known := r.prints(c.X, input)
		if !known {
			return "", false
		}
		return r.prints(c.Y, out)
	case *syntax.CallExpr:
		words := r.words(c.Args)
		if len(words) == 0 || slices.ContainsFunc(words, func(w Word) bool { return len(w.Unknown) > 0 }) {
			return "", false
		}
		return filter(words, input)
	}
	return "", false
}

// printsElse returns what A && echo X || Y prints, where A looks for a module of devices that are no GPUs of NVIDIA.
// The plan is of these, and the module is not there.
func (r *runner) printsElse(c *syntax.BinaryCmd, input string) (string, bool) {
	both, is := c.X.Cmd.(*syntax.BinaryCmd)
	if !is || both.Op != syntax.AndStmt {
		return "", false
	}
	call, is := both.X.Cmd.(*syntax.CallExpr)
	if !is {
		return "", false
	}
	words := r.words(call.Args)
	if len(words) != 3 || !strings.HasPrefix(path.Base(words[0].Text), "python") || words[1].Text != "-c" ||
		!otherDevices.MatchString(words[2].Text) {
		return "", false
	}
	if at := r.at(c); !slices.ContainsFunc(r.out.Probes, func(w Word) bool { return w.At == at }) {
		r.out.Probes = append(r.out.Probes, Word{Text: words[2].Text, At: at})
	}
	return r.prints(c.Y, input)
}

// otherDevices matches a program of Python that imports a module of devices of Ascend, Intel, Google or Moore Threads.
var otherDevices = lazyregexp.New(
	`^import (torch_npu|habana_frameworks|intel_extension_for_pytorch|torch_xla|torch_musa)$`)

// printsThere returns what cd FOLDER && pwd prints, as scripts find their own folder. The path is as it was given.
func (r *runner) printsThere(c *syntax.BinaryCmd) (string, bool) {
	first, isCall := c.X.Cmd.(*syntax.CallExpr)
	then, isCall2 := c.Y.Cmd.(*syntax.CallExpr)
	if !isCall || !isCall2 || len(then.Args) == 0 || then.Args[0].Lit() != "pwd" {
		return "", false
	}
	words := r.words(first.Args)
	words = slices.DeleteFunc(words, func(w Word) bool { return w.Text == "--" || w.Text == "-P" || w.Text == "-L" })
	if len(words) != 2 || words[0].Text != "cd" || len(words[1].Unknown) > 0 {
		return "", false
	}
	return path.Clean(words[1].Text), true
}
