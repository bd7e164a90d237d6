package python

import (
	"fmt"
	"slices"
	"strings"
)

// expression is an expression. One of a form that is not read has the kind opaque.
type expression struct {
	kind     expressionKind
	at       int
	text     string // the name, the number, the string, the operator, or the name of an attribute
	parts    []*expression
	keywords []keyword     // of a call; the names that a comprehension binds
	over     []*expression // of a list that is made of another in full: what is bound, and the other
	function *statement    // of a lambda
}

// keyword is an argument by its name; "" for one of two stars.
type keyword struct {
	name string
	at   int
	is   *expression
}

type expressionKind byte

// The kinds of expressions, and their parts.
const (
	opaque      expressionKind = iota
	nameOf                     // text
	numberOf                   // text
	textOf                     // text
	formatted                  // text
	joined                     // strings that stand beside each other
	attribute                  // the object; text is the name
	call                       // the function and its arguments
	item                       // the object and the index
	listOf                     // elements; text is { for those of a set
	tupleOf                    // elements
	dictOf                     // keys and values in turn; a nil key is of two stars
	starred                    // what a star spreads
	unary                      // the operand; text is the operator
	binary                     // both operands
	comparison                 // both operands
	both                       // operands of and
	either                     // operands of or
	choice                     // the condition, the value if it holds, and the other
	assigned                   // the name and the value of :=
	lambda                     // the function
	comprehends                // what it makes of an element
)

// statement is a statement with the blocks in it.
type statement struct {
	kind       statementKind
	at         int
	name       string        // of a function or a class, or the operator of an assignment
	targets    []*expression // of an assignment, a loop or a with
	value      *expression   // of an assignment, a condition, a return
	body       []*statement
	otherwise  []*statement
	last       []*statement // of a try: what runs in any case
	names      []string     // of global and nonlocal, and those that a statement sets that is not read
	parameters []parameter
	decorators []*expression
	yields     bool // of a function: it is a generator
	imports    []imported
}

// parameter is a parameter of a function. Its default is nil without one.
type parameter struct {
	name  string
	star  string // "*" or "**"
	usual *expression
}

// imported is a name that an import binds.
type imported struct{ as, module, name string }

type statementKind byte

// The kinds of statements.
const (
	unread    statementKind = iota // of a form that is not read
	evaluates                      // an expression
	assigns
	ifs
	loops
	withs
	tries
	defines
	classes
	returns
	importing
	raises
	passes
	matches
	deletes
	scopes // global and nonlocal
)

// parser reads statements. What it cannot read becomes an unread statement, and it goes on behind that line.
type parser struct {
	tokens []token
	next   int
	depth  int
	yields bool // the function that is read is a generator
}

// deepest is how deep expressions and blocks may be.
const deepest = 100

// parse returns the statements of a source.
func parse(source string) []*statement {
	p := &parser{tokens: scan(source)}
	var list []*statement
	for p.peek().kind != end {
		list = append(list, p.statements()...)
		if p.peek().kind == dedent || p.peek().kind == indent {
			p.next++
		}
	}
	return list
}

// failure is what a parser panics with where a statement is of a form that it does not read.
type failure struct{}

func (p *parser) fail() { panic(failure{}) }

func (p *parser) peek() token { return p.tokens[p.next] }

func (p *parser) take() token {
	t := p.tokens[p.next]
	if t.kind != end {
		p.next++
	}
	return t
}

// is reports whether the next token is a name or an operator.
func (p *parser) is(word string) bool {
	t := p.peek()
	return (t.kind == name || t.kind == operator) && t.text == word
}

// accept takes the next token if it is the word.
func (p *parser) accept(word string) bool {
	if p.is(word) {
		p.next++
		return true
	}
	return false
}

func (p *parser) expect(word string) {
	if !p.accept(word) {
		p.fail()
	}
}

func (p *parser) word() string {
	if p.peek().kind != name {
		p.fail()
	}
	return p.take().text
}

// statements reads statements until a block ends.
func (p *parser) statements() (list []*statement) {
	for {
		switch p.peek().kind {
		case end, dedent:
			return list
		case newline:
			p.next++
		default:
			list = append(list, p.logicalLine()...)
		}
	}
}

// logicalLine reads a statement, or several with semicolons. A line that cannot be read is left out with its block.
func (p *parser) logicalLine() (list []*statement) {
	start := p.next
	defer func() {
		if r := recover(); r != nil {
			if _, is := r.(failure); !is {
				panic(r)
			}
			p.next, p.depth = start, 0
			at := p.peek().at
			p.skipStatement()
			list = []*statement{{kind: unread, at: at, names: p.assigned(start)}}
		}
	}()
	if s := p.compound(); s != nil {
		return []*statement{s}
	}
	for {
		list = append(list, p.simple())
		if !p.accept(";") || p.peek().kind == newline {
			break
		}
	}
	if k := p.peek().kind; k != newline && k != end {
		p.fail()
	}
	return list
}

// assigned returns the names that are assigned to from a token on.
func (p *parser) assigned(start int) (names []string) {
	depth := 0
	for i := start; i+1 < p.next; i++ {
		t, following := p.tokens[i], p.tokens[i+1]
		switch {
		case t.kind == operator && strings.Contains("([{", t.text):
			depth++
		case t.kind == operator && strings.Contains(")]}", t.text):
			depth = max(0, depth-1)
		case depth == 0 && t.kind == name && following.kind == operator && slices.Contains(assignments, following.text):
			names = append(names, t.text)
		}
	}
	return names
}

// skipStatement goes behind a line and the block that belongs to it.
func (p *parser) skipStatement() {
	for p.peek().kind != newline && p.peek().kind != end {
		if p.peek().kind == indent || p.peek().kind == dedent {
			break
		}
		p.next++
	}
	if p.peek().kind == newline {
		p.next++
	}
	for depth := 0; ; p.next++ {
		switch p.peek().kind {
		case indent:
			depth++
		case dedent:
			if depth == 0 {
				return
			}
			if depth--; depth == 0 {
				p.next++
				return
			}
		case end:
			return
		default:
			if depth == 0 {
				return
			}
		}
	}
}

// compound reads a statement with a block, or returns nil.
func (p *parser) compound() *statement {
	at := p.peek().at
	var decorators []*expression
	for p.accept("@") {
		decorators = append(decorators, p.expression())
		if p.take().kind != newline {
			p.fail()
		}
	}
	p.accept("async")
	s := &statement{at: at, decorators: decorators}
	switch {
	case p.accept("if"):
		p.condition(s)
	case p.accept("def"):
		p.function(s)
	case p.accept("class"):
		s.kind, s.name = classes, p.word()
		if p.accept("(") {
			above := &expression{}
			p.arguments(above)
			s.targets = above.parts
		}
		s.body = p.block()
	case p.accept("for"):
		s.kind, s.targets = loops, []*expression{p.targets()}
		p.expect("in")
		s.value = p.list()
		s.body = p.block()
		s.otherwise = p.elseBlock()
	case p.accept("while"):
		s.kind, s.value = loops, p.expression()
		s.body = p.block()
		s.otherwise = p.elseBlock()
	case p.accept("with"):
		p.with(s)
	case p.accept("try"):
		p.try(s)
	case p.isMatch():
		p.match(s)
	default:
		if len(decorators) > 0 {
			p.fail()
		}
		return nil
	}
	return s
}

// isMatch reports whether a match begins, which is a name like others elsewhere.
func (p *parser) isMatch() bool {
	if !p.is("match") {
		return false
	}
	for i := p.next + 1; i+2 < len(p.tokens); i++ {
		if p.tokens[i].kind == newline {
			return p.tokens[i-1].text == ":" && p.tokens[i+1].kind == indent && p.tokens[i+2].text == "case"
		}
	}
	return false
}

// match reads a match. Its body has the statements of all cases.
func (p *parser) match(s *statement) {
	p.next++
	s.kind, s.value = matches, p.list()
	p.expect(":")
	p.next += 2
	for p.accept("case") {
		for depth := 0; depth > 0 || !p.is(":"); p.next++ {
			switch t := p.peek(); {
			case t.kind == newline || t.kind == end:
				p.fail()
			case t.kind == operator && strings.Contains("([{", t.text):
				depth++
			case t.kind == operator && strings.Contains(")]}", t.text):
				depth--
			}
		}
		s.body = append(s.body, p.block()...)
	}
	if p.take().kind != dedent {
		p.fail()
	}
}

// condition reads what follows if or elif.
func (p *parser) condition(s *statement) {
	s.kind, s.value = ifs, p.named()
	s.body = p.block()
	if at := p.peek().at; p.accept("elif") {
		inner := &statement{at: at}
		p.condition(inner)
		s.otherwise = []*statement{inner}
		return
	}
	s.otherwise = p.elseBlock()
}

func (p *parser) elseBlock() []*statement {
	if p.accept("else") {
		return p.block()
	}
	return nil
}

// block reads a colon and the statements that belong to it.
func (p *parser) block() (list []*statement) {
	p.expect(":")
	if p.depth++; p.depth > deepest {
		p.fail()
	}
	defer func() { p.depth-- }()
	if p.peek().kind != newline {
		for {
			list = append(list, p.simple())
			if !p.accept(";") || p.peek().kind == newline {
				break
			}
		}
		if p.peek().kind == newline {
			p.next++
		}
		return list
	}
	p.next++
	if p.take().kind != indent {
		p.fail()
	}
	list = p.statements()
	if p.peek().kind == dedent {
		p.next++
	}
	return list
}

func (p *parser) function(s *statement) {
	s.kind, s.name = defines, p.word()
	p.expect("(")
	p.parameters(s, ")")
	if p.accept("->") {
		p.expression()
	}
	around := p.yields
	p.yields = false
	s.body = p.block()
	s.yields, p.yields = p.yields, around
}

// parameters reads the parameters of a function up to what closes them.
func (p *parser) parameters(s *statement, closing string) {
	for !p.accept(closing) {
		q := parameter{}
		switch {
		case p.accept("**"):
			q.star, q.name = "**", p.word()
		case p.accept("*"):
			if q.star = "*"; !p.is(",") {
				q.name = p.word()
			}
		case p.accept("/"):
		default:
			q.name = p.word()
		}
		if closing == ")" && p.accept(":") {
			p.expression()
		}
		if p.accept("=") {
			q.usual = p.expression()
		}
		if q.name != "" || q.star != "" {
			s.parameters = append(s.parameters, q)
		}
		if !p.is(closing) {
			p.expect(",")
		}
	}
}

func (p *parser) with(s *statement) {
	s.kind = withs
	bracket := p.accept("(")
	for {
		value := p.expression()
		if p.accept("as") {
			s.targets = append(s.targets, p.primary())
		}
		s.value = value
		if !p.accept(",") {
			break
		}
	}
	if bracket {
		p.expect(")")
	}
	s.body = p.block()
}

// try reads the body, and what runs only after an exception as otherwise.
func (p *parser) try(s *statement) {
	s.kind, s.body = tries, p.block()
	for p.accept("except") {
		p.accept("*")
		if !p.is(":") {
			p.list()
			if p.accept("as") {
				p.word()
			}
		}
		s.otherwise = append(s.otherwise, p.block()...)
	}
	s.body = append(s.body, p.elseBlock()...)
	if p.accept("finally") {
		s.last = p.block()
	}
}

// simple reads a statement on one line.
func (p *parser) simple() *statement {
	s := &statement{at: p.peek().at}
	switch {
	case p.accept("import"):
		s.kind = importing
		p.importNames(s)
	case p.accept("from"):
		s.kind = importing
		p.importFrom(s)
	case p.accept("return"):
		if s.kind = returns; p.peek().kind != newline && p.peek().kind != end {
			s.value = p.list()
		}
	case p.accept("pass"), p.accept("continue"), p.accept("break"):
		s.kind = passes
	case p.accept("del"):
		s.kind, s.targets = deletes, []*expression{p.list()}
	case p.is("global"), p.is("nonlocal"):
		s.kind, s.name = scopes, p.take().text
		for first := true; first || p.accept(","); first = false {
			s.names = append(s.names, p.word())
		}
	case p.accept("raise"), p.accept("assert"):
		if s.kind = raises; p.tokens[p.next-1].text != "raise" {
			s.kind = passes
		}
		for k := p.peek().kind; k != newline && k != end && !p.is(";"); k = p.peek().kind {
			p.next++
		}
	default:
		p.assignment(s)
	}
	return s
}

func (p *parser) dotted() string {
	var b strings.Builder
	for p.is(".") || p.is("...") {
		b.WriteString(p.take().text)
	}
	if p.peek().kind == name && !p.is("import") {
		b.WriteString(p.word())
		for p.accept(".") {
			b.WriteString("." + p.word())
		}
	}
	return b.String()
}

func (p *parser) importNames(s *statement) {
	for {
		module := p.dotted()
		as, _, _ := strings.Cut(module, ".")
		bound := imported{as: as, module: as}
		if p.accept("as") {
			bound = imported{as: p.word(), module: module}
		}
		s.imports = append(s.imports, bound)
		if !p.accept(",") {
			return
		}
	}
}

func (p *parser) importFrom(s *statement) {
	module := p.dotted()
	p.expect("import")
	bracket := p.accept("(")
	for !p.accept(")") {
		if p.accept("*") {
			s.imports = append(s.imports, imported{as: "*", module: module})
			return
		}
		of := p.word()
		as := of
		if p.accept("as") {
			as = p.word()
		}
		s.imports = append(s.imports, imported{as: as, module: module, name: of})
		if !p.accept(",") && !bracket {
			return
		}
	}
}

// assignments are the operators of assignments.
var assignments = strings.Fields("= += -= *= /= //= %= **= |= &= ^= >>= <<= @=")

func (p *parser) assignment(s *statement) {
	s.kind, s.value = evaluates, p.list()
	if p.accept(":") { // an annotation
		p.expression()
		if !p.is("=") {
			s.kind = passes
			return
		}
	}
	for p.peek().kind == operator && slices.Contains(assignments, p.peek().text) {
		s.kind, s.name = assigns, p.take().text
		s.targets = append(s.targets, s.value)
		s.value = p.list()
	}
}

// targets reads what a loop assigns to.
func (p *parser) targets() *expression {
	list := &expression{kind: tupleOf, at: p.peek().at}
	for {
		p.accept("*")
		list.parts = append(list.parts, p.primary())
		if !p.accept(",") || p.is("in") {
			break
		}
	}
	if len(list.parts) == 1 {
		return list.parts[0]
	}
	return list
}

// list reads an expression, or a tuple without brackets.
func (p *parser) list() *expression {
	first := p.element()
	if !p.is(",") {
		return first
	}
	tuple := &expression{kind: tupleOf, at: first.at, parts: []*expression{first}}
	for p.accept(",") {
		t := p.peek()
		if t.kind == newline || t.kind == end || t.kind == operator && slices.Contains([]string{")", "]", "}", "=", ":",
			";"}, t.text) {
			break
		}
		tuple.parts = append(tuple.parts, p.element())
	}
	return tuple
}

// element reads an expression that a star may spread.
func (p *parser) element() *expression {
	if at := p.peek().at; p.accept("*") {
		return &expression{kind: starred, at: at, parts: []*expression{p.expression()}}
	}
	return p.named()
}

// named reads an expression that := may name.
func (p *parser) named() *expression {
	e := p.expression()
	if e.kind == nameOf && p.accept(":=") {
		return &expression{kind: assigned, at: e.at, text: e.text, parts: []*expression{p.expression()}}
	}
	return e
}

// expression reads an expression with its condition.
func (p *parser) expression() *expression {
	if p.depth++; p.depth > deepest {
		p.fail()
	}
	defer func() { p.depth-- }()
	at := p.peek().at
	if p.accept("lambda") {
		f := &statement{kind: defines, at: at, name: "lambda"}
		p.parameters(f, ":")
		f.body = []*statement{{kind: returns, at: at, value: p.expression()}}
		return &expression{kind: lambda, at: at, function: f}
	}
	p.yields = p.yields || p.is("yield")
	if p.accept("await") || p.accept("yield") {
		p.accept("from")
		if k := p.peek().kind; k != newline && !p.is(")") {
			p.list()
		}
		return &expression{at: at}
	}
	e := p.operation(0)
	if p.accept("if") {
		condition := p.operation(0)
		p.expect("else")
		return &expression{kind: choice, at: e.at, parts: []*expression{condition, e, p.expression()}}
	}
	return e
}

// levels are the operators of two operands, those first that bind the least.
var levels = [][]string{{"or"}, {"and"}, {"not"}, {"in", "not in", "is", "is not", "==", "!=", "<", ">", "<=", ">="},
	{"|"}, {"^"}, {"&"}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "//", "%", "@"}}

// operation reads operations of a level and of those that bind more.
func (p *parser) operation(level int) *expression {
	if level == len(levels) {
		return p.factor()
	}
	if levels[level][0] == "not" {
		if at := p.peek().at; p.accept("not") {
			if p.depth++; p.depth > deepest {
				p.fail()
			}
			defer func() { p.depth-- }()
			return &expression{kind: unary, at: at, text: "not", parts: []*expression{p.operation(level)}}
		}
		return p.operation(level + 1)
	}
	left := p.operation(level + 1)
	for {
		o := p.operatorOf(levels[level])
		if o == "" {
			return left
		}
		e := &expression{kind: binary, at: left.at, text: o, parts: []*expression{left, p.operation(level + 1)}}
		switch {
		case o == "or":
			e.kind = either
		case o == "and":
			e.kind = both
		case level == 3:
			if e.kind = comparison; left.kind == comparison { // a < b < c
				e = &expression{at: left.at}
			}
		}
		left = e
	}
}

// operatorOf takes an operator of a level, and returns "" where none follows.
func (p *parser) operatorOf(list []string) string {
	t := p.peek()
	if t.kind != operator && t.kind != name {
		return ""
	}
	o := t.text
	following := p.tokens[min(p.next+1, len(p.tokens)-1)]
	switch {
	case o == "not" && following.text == "in", o == "is" && following.text == "not" && following.kind == name:
		o += " " + following.text
	}
	if !slices.Contains(list, o) {
		return ""
	}
	p.next += 1 + strings.Count(o, " ")
	return o
}

// factor reads a sign and a power.
func (p *parser) factor() *expression {
	at := p.peek().at
	if t := p.peek(); t.kind == operator && (t.text == "-" || t.text == "+" || t.text == "~") {
		p.next++
		if p.depth++; p.depth > deepest {
			p.fail()
		}
		defer func() { p.depth-- }()
		return &expression{kind: unary, at: at, text: t.text, parts: []*expression{p.factor()}}
	}
	base := p.primary()
	if p.accept("**") {
		return &expression{kind: binary, at: at, text: "**", parts: []*expression{base, p.factor()}}
	}
	return base
}

// primary reads an atom with its attributes, calls and items.
func (p *parser) primary() *expression {
	e := p.atom()
	for {
		at := p.peek().at
		switch {
		case p.accept("."):
			e = &expression{kind: attribute, at: e.at, text: p.word(), parts: []*expression{e}}
		case p.accept("("):
			c := &expression{kind: call, at: e.at, parts: []*expression{e}}
			p.arguments(c)
			e = c
		case p.accept("["):
			e = &expression{kind: item, at: e.at, parts: []*expression{e, p.index(at)}}
		default:
			return e
		}
	}
}

// index reads what stands in the brackets of an item. A slice is opaque.
func (p *parser) index(at int) *expression {
	slice := false
	var is *expression
	for !p.accept("]") {
		switch {
		case p.accept(":"), p.accept(","):
			slice = true
		default:
			is = p.element()
		}
	}
	if slice || is == nil {
		return &expression{at: at}
	}
	return is
}

// arguments reads the arguments of a call behind its bracket.
func (p *parser) arguments(c *expression) {
	for !p.accept(")") {
		at := p.peek().at
		following := p.tokens[min(p.next+1, len(p.tokens)-1)]
		switch {
		case p.accept("**"):
			c.keywords = append(c.keywords, keyword{at: at, is: p.expression()})
		case p.peek().kind == name && following.kind == operator && following.text == "=":
			of := p.word()
			p.next++
			c.keywords = append(c.keywords, keyword{of, at, p.expression()})
		default:
			e := p.element()
			c.parts = append(c.parts, p.comprehension(e))
		}
		if !p.is(")") {
			p.expect(",")
		}
	}
}

// comprehension goes over a comprehension up to its bracket, and returns what stands for it. Without one it returns the
// elements.
func (p *parser) comprehension(elements ...*expression) *expression {
	if !p.is("for") && !p.is("async") {
		return elements[0]
	}
	e := &expression{kind: comprehends, at: elements[0].at, parts: elements}
	binds := false
	for depth := 0; ; p.next++ {
		switch t := p.peek(); {
		case t.kind == end || t.kind == newline:
			p.fail()
		case t.kind == operator && strings.Contains("([{", t.text):
			depth++
		case t.kind == operator && strings.Contains(")]}", t.text):
			if depth == 0 {
				return e
			}
			depth--
		case p.is("for"):
			binds = true
		case p.is("in"):
			binds = false
		case binds && t.kind == name:
			e.keywords = append(e.keywords, keyword{name: t.text, at: t.at})
		}
	}
}

// atom reads a name, a literal, or what stands in brackets.
func (p *parser) atom() *expression {
	t := p.take()
	e := &expression{at: t.at, text: t.text}
	switch {
	case t.kind == name && !slices.Contains(keywords, t.text):
		e.kind = nameOf
	case t.kind == number:
		e.kind = numberOf
	case t.kind == octets:
	case t.kind == text || t.kind == format:
		return p.strings(t)
	case t.kind == operator && t.text == "(":
		return p.tuple(t.at)
	case t.kind == operator && t.text == "[":
		e.kind = listOf
		return p.elements(e, "]")
	case t.kind == operator && t.text == "{":
		e.kind = dictOf
		return p.members(e)
	case t.kind == operator && t.text == "...":
	default:
		p.fail()
	}
	return e
}

// keywords are names that no expression has alone.
var keywords = strings.Fields("and as assert async await break class continue def del elif else except finally for " +
	"from global if import in is lambda nonlocal not or pass raise return try while with yield")

// strings reads strings that stand beside each other.
func (p *parser) strings(first token) *expression {
	all := &expression{kind: joined, at: first.at}
	for t := first; ; t = p.take() {
		kind := textOf
		if t.kind == format {
			kind = formatted
		}
		all.parts = append(all.parts, &expression{kind: kind, at: t.at, text: t.text})
		if k := p.peek().kind; k != text && k != format {
			break
		}
	}
	if len(all.parts) == 1 {
		return all.parts[0]
	}
	return all
}

// tuple reads what stands in round brackets: an expression, a tuple or a generator.
func (p *parser) tuple(at int) *expression {
	e := &expression{kind: tupleOf, at: at}
	if p.accept(")") {
		return e
	}
	inner := p.comprehension(p.list())
	p.expect(")")
	return inner
}

func (p *parser) elements(e *expression, closing string) *expression {
	for !p.accept(closing) {
		is, before := p.element(), p.next
		over := p.over(closing)
		p.next = before
		if c := p.comprehension(is); c != is {
			if c.over = over; len(e.parts) > 0 {
				c.over = nil
			}
			p.expect(closing)
			return c
		}
		e.parts = append(e.parts, is)
		if !p.is(closing) {
			p.expect(",")
		}
	}
	return e
}

// over reads what a comprehension binds and goes over, up to its bracket. It returns nil for one of another form.
func (p *parser) over(closing string) []*expression {
	before := p.next
	if !p.accept("for") {
		return nil
	}
	target := p.targets()
	p.expect("in")
	if list := p.primary(); p.is(closing) {
		return []*expression{target, list}
	}
	p.next = before
	return nil
}

// members reads a dict or a set, whose elements are those of a list.
func (p *parser) members(e *expression) *expression {
	for !p.accept("}") {
		if p.accept("**") {
			e.parts = append(e.parts, nil, p.expression())
		} else {
			key := p.element()
			if p.accept(":") {
				e.parts = append(e.parts, key, p.expression())
			} else {
				e.kind = listOf
				e.parts = append(e.parts, key)
			}
		}
		if p.is("for") || p.is("async") {
			c := p.comprehension(e.parts...)
			p.expect("}")
			return c
		}
		if !p.is("}") {
			p.expect(",")
		}
	}
	return e
}

// String returns a name with dots as it is written, or what an expression is.
func (e *expression) String() string {
	switch e.kind {
	case nameOf:
		return e.text
	case attribute:
		return e.parts[0].String() + "." + e.text
	case call:
		return e.parts[0].String() + "(...)"
	case item:
		return e.parts[0].String() + "[...]"
	case textOf:
		return fmt.Sprintf("%.40q", e.text)
	case numberOf:
		return e.text
	}
	return "an expression"
}
