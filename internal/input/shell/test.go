package shell

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/pattern"
	"mvdan.cc/sh/v3/syntax"

	"plimsoll/internal/base/lazyregexp"
)

// answer is what a condition says: only a run can tell some.
type answer int

const (
	no answer = iota
	yes
	unsure
)

func (a answer) not() answer {
	switch a {
	case yes:
		return no
	case no:
		return yes
	}
	return unsure
}

func (a answer) and(b answer) answer {
	switch {
	case a == no || b == no:
		return no
	case a == yes && b == yes:
		return yes
	}
	return unsure
}

func isTrue(is bool) answer {
	if is {
		return yes
	}
	return no
}

// condition follows a statement and says whether it succeeds.
func (r *runner) condition(s *syntax.Stmt) answer {
	holds := unsure
	switch c := s.Cmd.(type) {
	case *syntax.CallExpr:
		holds = r.tested(s, c)
	case *syntax.TestClause:
		holds = r.expression(c.X)
	case *syntax.ArithmCmd:
		holds = r.calculates(c.X, c)
	case *syntax.BinaryCmd:
		if c.Op != syntax.AndStmt && c.Op != syntax.OrStmt {
			r.statement(s)
			break
		}
		x := r.condition(c.X)
		switch {
		case c.Op == syntax.AndStmt && x != no:
			holds = x.and(r.condition(c.Y))
		case c.Op == syntax.OrStmt && x != yes:
			holds = x.not().and(r.condition(c.Y).not()).not()
		default:
			holds = x
		}
	case *syntax.Block:
		holds = r.lastOf(c.Stmts)
	default:
		r.statement(s)
	}
	if s.Negated {
		return holds.not()
	}
	return holds
}

// lastOf follows the statements of a group in braces, and says whether the last one succeeds.
func (r *runner) lastOf(list []*syntax.Stmt) (holds answer) {
	holds = yes
	for _, s := range list {
		holds = r.condition(s)
	}
	return holds
}

// tested follows a command of a condition.
func (r *runner) tested(s *syntax.Stmt, c *syntax.CallExpr) answer {
	name := ""
	if len(c.Args) > 0 {
		name = c.Args[0].Lit()
	}
	if len(c.Args) == 1 && name == "" { // if $DEBUG
		if text, known := r.known(c.Args[0]); known {
			name = text
		}
	}
	switch name {
	case "[", "test":
		words := c.Args[1:]
		if name == "[" && len(words) > 0 {
			words = words[:len(words)-1]
		}
		return r.operands(words)
	case "true", ":":
		return yes
	case "false":
		return no
	}
	r.status = unsure
	r.statement(s)
	if _, is := r.functions[name]; is {
		return r.status
	}
	return unsure
}

// isTest reports whether a command is [ or test.
func isTest(c *syntax.CallExpr) bool {
	return len(c.Args) > 0 && (c.Args[0].Lit() == "[" || c.Args[0].Lit() == "test")
}

// operands evaluates the words of a test.
func (r *runner) operands(list []*syntax.Word) answer {
	for i, w := range list {
		if operator := w.Lit(); i > 0 && (operator == "-o" || operator == "-a") {
			x, y := r.operands(list[:i]), r.operands(list[i+1:])
			if operator == "-o" {
				return x.not().and(y.not()).not()
			}
			return x.and(y)
		}
	}
	if len(list) > 1 && list[0].Lit() == "!" {
		return r.operands(list[1:]).not()
	}
	switch len(list) {
	case 1:
		return r.unary("-n", list[0])
	case 2:
		return r.unary(list[0].Lit(), list[1])
	case 3:
		operator := list[1].Lit()
		if operator == "=" || operator == "==" || operator == "!=" { // no pattern
			a, known := r.known(list[0])
			b, both := r.known(list[2])
			if !known || !both {
				return unsure
			}
			return isTrue((a == b) == (operator != "!="))
		}
		return r.binary(list[0], operator, list[2], "")
	}
	return unsure
}

// expression evaluates what stands between [[ and ]].
func (r *runner) expression(x syntax.TestExpr) answer {
	switch x := x.(type) {
	case *syntax.Word:
		return r.unary("-n", x)
	case *syntax.ParenTest:
		return r.expression(x.X)
	case *syntax.UnaryTest:
		if x.Op == syntax.TsNot {
			return r.expression(x.X).not()
		}
		if w, is := x.X.(*syntax.Word); is {
			return r.unary(x.Op.String(), w)
		}
	case *syntax.BinaryTest:
		switch x.Op {
		case syntax.AndTest:
			return r.expression(x.X).and(r.expression(x.Y))
		case syntax.OrTest:
			return r.expression(x.X).not().and(r.expression(x.Y).not()).not()
		}
		a, isWord := x.X.(*syntax.Word)
		b, areWords := x.Y.(*syntax.Word)
		if isWord && areWords {
			return r.binary(a, x.Op.String(), b, "0")
		}
	}
	return unsure
}

// unary evaluates a test of one word. Only a run can tell those of files.
func (r *runner) unary(operator string, w *syntax.Word) answer {
	text, known := r.known(w)
	switch {
	case operator == "-v":
		return isTrue(r.isKnown(text))
	case !known:
		return unsure
	case operator == "-n":
		return isTrue(text != "")
	case operator == "-z":
		return isTrue(text == "")
	}
	return unsure
}

// binary evaluates a test of two words. Empty words are a number between [[ and ]], and none between [ and ].
func (r *runner) binary(x *syntax.Word, operator string, y *syntax.Word, empty string) answer {
	a, known := r.known(x)
	if operator == "=" || operator == "==" || operator == "!=" {
		matches := r.matches(a, y)
		if !known || matches == unsure {
			return unsure
		}
		if operator == "!=" {
			return matches.not()
		}
		return matches
	}
	b, both := r.known(y)
	if !known || !both {
		return unsure
	}
	m, err := strconv.ParseInt(r.number(a, empty), 10, 64)
	n, err2 := strconv.ParseInt(r.number(b, empty), 10, 64)
	numbers := err == nil && err2 == nil
	switch operator {
	case "-eq", "-ne", "-gt", "-ge", "-lt", "-le":
		if !numbers && empty != "" {
			return unsure // arithmetic
		}
	}
	switch operator {
	case "-eq":
		return isTrue(numbers && m == n)
	case "-ne":
		return isTrue(numbers && m != n)
	case "-gt":
		return isTrue(numbers && m > n)
	case "-ge":
		return isTrue(numbers && m >= n)
	case "-lt":
		return isTrue(numbers && m < n)
	case "-le":
		return isTrue(numbers && m <= n)
	case "<":
		return isTrue(a < b)
	case ">":
		return isTrue(a > b)
	case "=~":
		if expression, err := regexp.Compile(b); err == nil && len(a) < 1024 && len(b) < 1024 {
			return isTrue(expression.MatchString(a))
		}
	}
	return unsure
}

// number returns the text of a number that a test compares. Between [[ and ]] it may be the name of a variable, which
// counts as 0 without a value.
func (r *runner) number(text, empty string) string {
	text = cmp.Or(strings.TrimSpace(text), empty)
	if empty == "" || !syntax.ValidName(text) || r.open[text] {
		return text
	}
	return cmp.Or(strings.TrimSpace(r.Get(text).Str), empty)
}

// matches reports whether a text matches a pattern of Bash.
func (r *runner) matches(text string, w *syntax.Word) answer {
	if _, known := r.known(w); !known {
		return unsure
	}
	settled, _ := r.settled(w)
	glob, err := expand.Pattern(r.config(), settled)
	if err != nil || len(glob) > 1024 || len(text) > 1024 {
		return unsure
	}
	expression, err := pattern.Regexp(glob, pattern.EntireString)
	if err != nil {
		return unsure
	}
	compiled, err := regexp.Compile(expression)
	if err != nil {
		return unsure
	}
	return isTrue(compiled.MatchString(stripped(text)))
}

var variableText = lazyregexp.New(`\$(?:\{(\w+)[^{}]*\}|(\w+)|[@*#])`)

// stripped returns a text without variables that are not set.
func stripped(text string) string { return variableText.ReplaceAllString(text, "") }

// known returns a word of a condition. A variable that the script never sets is empty, and noted. It is false for a
// word that depends on what only a run can tell.
func (r *runner) known(w *syntax.Word) (string, bool) {
	word := r.value(w)
	if name := r.blank(w); name != "" {
		r.asked = append(r.asked, name)
	}
	for _, u := range word.Unknown {
		name := variableText.FindStringSubmatch(u)
		if name == nil || variableText.ReplaceAllString(u, "") != "" {
			return word.Text, false
		}
		plain := name[1] + name[2]
		if len(r.out.settings[plain]) > 0 { // a condition or a loop sets it
			return word.Text, false
		}
		if r.demanded[plain] || r.demanded["#"] && strings.Trim(plain, "0123456789") == "" {
			return word.Text, false
		}
		r.asked = append(r.asked, plain)
		if plain != "" && !slices.Contains(r.out.Unset, plain) {
			r.out.Unset = append(r.out.Unset, plain)
		}
	}
	return stripped(word.Text), true
}

// blank returns the variable that a word is, if the script leaves it empty for whoever starts it to fill in: N="".
func (r *runner) blank(w *syntax.Word) string {
	parts := w.Parts
	if len(parts) == 1 {
		if quoted, is := parts[0].(*syntax.DblQuoted); is {
			parts = quoted.Parts
		}
	}
	if len(parts) != 1 {
		return ""
	}
	p, is := parts[0].(*syntax.ParamExp)
	if !is || p.Param == nil {
		return ""
	}
	if v, set := r.values[p.Param.Value]; !set || v.isList || v.word.Text != "" || len(v.word.Unknown) > 0 {
		return ""
	}
	return p.Param.Value
}

// nonzero evaluates an arithmetic condition.
func (r *runner) nonzero(x syntax.ArithmExpr) answer {
	var unknown []string
	if !r.computes(x, &unknown) {
		return unsure
	}
	n, err := expand.Arithm(r.config(), x)
	if err != nil {
		return unsure
	}
	return isTrue(n != 0)
}

// choose follows an if.
func (r *runner) choose(c *syntax.IfClause) {
	if len(c.Cond) == 0 { // else
		r.run(c.Then)
		return
	}
	r.run(c.Cond[:len(c.Cond)-1])
	last, asked := c.Cond[len(c.Cond)-1], len(r.asked)
	otherwise := func() {
		if c.Else != nil {
			r.choose(c.Else)
		}
	}
	switch r.condition(last) {
	case yes:
		r.unlessDemanded(asked, func() { r.run(c.Then) })
	case no:
		otherwise()
	case unsure:
		r.branches(last, func() { r.run(c.Then) }, otherwise)
	}
}

// cases follows a case.
func (r *runner) cases(c *syntax.CaseClause) {
	asked := len(r.asked)
	text, known := r.known(c.Word)
	var open []*syntax.CaseItem
	through := false
	for _, item := range c.Items {
		holds := no
		for _, p := range item.Patterns {
			if known && holds != yes {
				holds = holds.not().and(r.matches(text, p).not()).not()
			}
		}
		if (holds == yes || through) && len(open) == 0 {
			if r.unlessDemanded(asked, func() { r.run(item.Stmts) }) {
				r.cases(c)
				return
			}
			if through = item.Op == syntax.Fallthrough; !through && item.Op != syntax.Resume {
				return
			}
			continue
		}
		if holds != no || !known {
			open = append(open, item)
		}
	}
	if len(open) == 0 {
		return
	}
	ways := []func(){func() {}}
	for _, item := range open {
		ways = append(ways, func() { r.run(item.Stmts) })
	}
	r.branches(c.Word, ways...)
}
