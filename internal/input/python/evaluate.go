package python

import (
	"embed"
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// evaluator evaluates the statements of a source and of the modules that it imports.
type evaluator struct {
	open      Opener
	known     []string
	modules   map[string]map[string]*Value
	calls     []*Value
	unread    []int
	functions []string
	asked     bool
	touched   map[string]int
	exported  []Setting  // variables of the environment
	command   []Argument // nil where nothing is known of the command line
	steps     int
	depth     int // of calls of functions
	returned  *Value
	leaving   *Value              // what the function may have returned before, by a condition that only a run can tell
	handed    map[*statement]bool // functions that other code may call
}

// Limits of an evaluation. No configuration comes near them.
const (
	mostSteps   = 400_000
	longest     = 1 << 14 // of a text or a list that is put together
	deepestCall = 24
)

// block is where statements run: the names that they bind and those that they see.
type block struct {
	*evaluator
	file   *file
	local  map[string]*Value
	around []map[string]*Value // the names of the functions around, the innermost first
	global map[string]*Value
	bound  map[string]map[string]*Value // where global and nonlocal bind a name
	class  bool                         // the statements are the body of a class
	inside bool                         // of a function

	unsure string // the condition that only a run can tell, "" for statements that run
	branch string // that condition, if it stands in the function itself
	since  int    // the step at which the statements of that condition begin
}

// Reasons why statements may not run that leave the training of a source the one that is planned.
const (
	looped = "a loop"
	early  = "a return before it"

	exception = "an exception"
)

// isSpent reports whether the evaluator has taken so many steps that it follows nothing more.
func (e *evaluator) isSpent() bool { return e.steps > mostSteps }

// errSpent is the error of a source that is not followed to its end.
var errSpent = errors.New("the source takes very long to follow")

// module evaluates a source, and returns the names that it binds.
func (e *evaluator) module(f *file, name string) map[string]*Value {
	scope := map[string]*Value{"__name__": {Kind: Text, Text: name, At: -1}}
	b := &block{evaluator: e, file: f, local: scope, global: scope}
	before, leaving := e.returned, e.leaving
	e.returned, e.leaving = nil, nil
	b.run(parse(f.text))
	e.returned, e.leaving = before, leaving
	return scope
}

// run runs statements, until one returns. Those behind a return that only a run can tell may not run.
func (b *block) run(list []*statement) {
	for i, s := range list {
		if b.steps++; b.returned != nil || b.isSpent() {
			return
		}
		if b.leaving != nil && b.branch == "" {
			b.perhaps(list[i:], early)
			return
		}
		b.statement(s)
	}
}

func (b *block) statement(s *statement) {
	switch s.kind {
	case unread:
		if b.file.main {
			b.unread = append(b.unread, b.file.position(s.at))
		}
		for _, name := range s.names {
			b.bind(&expression{kind: nameOf, at: s.at, text: name}, b.unknown("a statement that is not read", s.at))
		}
	case evaluates:
		b.value(s.value)
	case assigns:
		b.assign(s)
	case ifs:
		b.condition(s)
	case loops:
		b.value(s.value)
		b.perhaps(s.body, looped, s.targets...)
		b.perhaps(s.otherwise, looped)
	case withs:
		value := b.value(s.value)
		for _, t := range s.targets {
			b.bind(t, value)
		}
		b.run(s.body)
	case tries:
		b.try(s)
	case matches:
		b.value(s.value)
		b.perhaps(s.body, s.value.String())
	case deletes:
		for _, t := range s.targets {
			b.remove(t)
		}
	case scopes:
		b.declare(s)
	case defines:
		b.define(s)
	case classes:
		b.classOf(s)
	case returns:
		is := &Value{Kind: None, At: b.file.position(s.at)}
		if s.value != nil {
			is = b.value(s.value)
		}
		if b.returned = is; b.branch != "" {
			b.returned = b.unknown(b.branch, s.at)
		}
	case importing:
		b.imports(s)
	case raises:
		if b.branch == "" && b.depth > 0 {
			b.returned = b.unknown("a function that raises", s.at)
		}
	}
}

func (b *block) unknown(why string, at int) *Value {
	return &Value{Kind: Unknown, Text: why, At: b.file.position(at)}
}

func (b *block) define(s *statement) {
	f := &Value{Kind: Function, Text: s.name, At: b.file.position(s.at), function: s, scope: b.global, around: b.around,
		file: b.file}
	if b.inside {
		f.around = append([]map[string]*Value{b.local}, b.around...)
	}
	f.usual = b.defaults(s.parameters)
	made := f
	for _, d := range slices.Backward(s.decorators) { // one of the source may enter the function into a table
		if of := b.value(d); of.Kind == Function && b.invoke(of, []*Value{made}, nil, made.At) != made {
			f = b.unknown(s.name+", which a function of the source decorates", s.at)
		}
	}
	b.bind(&expression{kind: nameOf, at: s.at, text: s.name}, f)
	if b.file.main && b.depth == 0 && !b.class {
		b.functions = append(b.functions, s.name)
	}
}

// defaults returns the defaults of parameters, which Python evaluates where it defines the function.
func (b *block) defaults(list []parameter) map[string]*Value {
	usual := map[string]*Value{}
	for _, q := range list {
		if q.usual != nil {
			usual[q.name] = b.value(q.usual)
		}
	}
	return usual
}

// condition runs the branch that a condition chooses. If only a run can tell, what both branches bind is unknown.
func (b *block) condition(s *statement) {
	v := b.value(s.value)
	is, known := v.truth()
	switch {
	case known && is:
		b.run(s.body)
	case known:
		b.run(s.otherwise)
	default:
		b.perhaps(s.body, s.value.String())
		b.perhaps(s.otherwise, s.value.String())
	}
}

// perhaps runs statements that may not run. The names that they bind become unknown.
func (b *block) perhaps(list []*statement, why string, targets ...*expression) {
	inner := *b
	inner.since = b.steps
	if inner.unsure == "" {
		inner.unsure = why
	}
	if inner.branch == "" {
		inner.branch = why
	}
	before := maps.Clone(b.local)
	for _, t := range targets {
		inner.bind(t, b.unknown(why, t.at))
	}
	calls := len(b.calls)
	inner.run(list)
	for _, c := range b.calls[calls:] {
		c.Partial = c.Partial || why != looped && why != early
	}
	if b.returned != nil {
		if b.inside {
			b.leaving = b.unknown(why, 0)
		}
		b.returned = nil
	}
	if why == early {
		return
	}
	for name, is := range b.local {
		switch was := before[name]; {
		case was == is || was == nil && (is.Kind == Function || is.Kind == Symbol):
		case was != nil && isSame(was, is):
			b.local[name] = was
		default:
			b.local[name] = b.unknown(inner.unsure, 0)
		}
	}
}

// imports binds the names of an import. Modules of the same project are evaluated; names of others are symbols.
func (b *block) imports(s *statement) {
	for _, i := range s.imports {
		symbol := &Value{Kind: Symbol, Text: strings.TrimLeft(i.module+"."+i.name, "."), At: b.file.position(s.at)}
		switch {
		case i.as == "*":
			maps.Copy(b.local, b.imported(i.module))
		case i.name == "":
			symbol.Text = i.module
			b.local[i.as] = symbol
		default:
			symbol.resolve = func() *Value {
				if is := b.imported(i.module)[i.name]; is != nil && is != symbol {
					return is
				}
				return b.submodule(symbol, i.module, i.name)
			}
			b.local[i.as] = symbol
		}
	}
}

// submodule returns a module that stands in a package without being a name of it, as a symbol with the module's names.
// It returns nil for what is no module of the same project.
func (b *block) submodule(symbol *Value, module, name string) *Value {
	if module == "" || strings.Trim(module, ".") == "" {
		return nil
	}
	scope := b.imported(module + "." + name)
	if scope == nil {
		return nil
	}
	return &Value{Kind: Symbol, Text: symbol.Text, At: symbol.At, names: scope}
}

// imported returns the names of a module of the same project, or nil.
func (b *block) imported(module string) map[string]*Value {
	if scope := b.ofLibrary(module); scope != nil {
		return scope
	}
	if b.open == nil || b.depth > deepestCall || slices.ContainsFunc(b.known, func(known string) bool {
		return strings.HasPrefix(module+".", known+".")
	}) {
		return nil
	}
	for _, path := range modulePaths(b.file.path, module) {
		if scope, is := b.modules[path]; is {
			return scope
		}
		content, found, err := b.open(path)
		if err != nil {
			continue
		}
		b.modules[path] = map[string]*Value{} // a circle of imports
		b.depth++
		scope := b.module(&file{path: found, text: string(content)}, module)
		b.depth--
		b.modules[path] = scope
		return scope
	}
	return nil
}

//go:embed libraries/*.py
var libraries embed.FS

// ofLibrary returns what a library has that sources of its users take apart: nil for other libraries. What else it has
// is known by its names.
func (b *block) ofLibrary(module string) map[string]*Value {
	text, err := libraries.ReadFile("libraries/" + module + ".py")
	if err != nil || !slices.Contains(b.known, module) {
		return nil
	}
	if _, is := b.modules[module]; !is {
		b.modules[module] = map[string]*Value{}
		b.modules[module] = b.module(&file{path: module + ".py", text: string(text)}, module)
	}
	return b.modules[module]
}

// assign runs an assignment to all of its targets.
func (b *block) assign(s *statement) {
	value := b.value(s.value)
	if s.name != "=" {
		value = b.changed(b.value(s.targets[0]), strings.TrimSuffix(s.name, "="), value, s.at)
	}
	for _, t := range s.targets {
		b.bind(t, value)
	}
}

// bind gives a target a value: a name, an attribute, an item, or several of them.
func (b *block) bind(t *expression, value *Value) {
	switch t.kind {
	case nameOf:
		b.bindName(t, value)
	case attribute:
		b.bindAttribute(t, value)
	case item:
		b.bindItem(t, value)
	case tupleOf, listOf:
		for i, part := range t.parts {
			if value.Kind == List && len(value.Elements) == len(t.parts) {
				b.bind(part, value.Elements[i])
			} else {
				b.bind(part, b.part(value, i, part.at))
			}
		}
	}
}

// touch notes an attribute that the source sets, or a method that it calls.
func (b *block) touch(name string, at int) {
	if _, is := b.touched[name]; !is && b.file.main {
		b.touched[name] = b.file.position(at)
	}
}

// part returns an element of what a call returns, such as the model of a model with its tokenizer.
func (b *block) part(of *Value, i, at int) *Value {
	if of.Kind == Object && i == 0 {
		return of
	}
	return b.unknown("a part of "+of.String(), at)
}

// value evaluates an expression.
func (b *block) value(e *expression) *Value {
	if b.steps++; e == nil || b.isSpent() {
		return &Value{Kind: Unknown, Text: "an expression", At: -1}
	}
	at := b.file.position(e.at)
	switch e.kind {
	case nameOf:
		return b.name(e)
	case numberOf:
		return numberFrom(e.text, at)
	case textOf:
		return &Value{Kind: Text, Text: e.text, At: at}
	case formatted:
		return b.format(e)
	case joined:
		return b.join(e)
	case attribute:
		return b.attribute(e)
	case call:
		return b.call(e)
	case item:
		return b.item(e)
	case listOf, tupleOf:
		return b.list(e)
	case dictOf:
		return b.dict(e)
	case unary:
		return b.unary(e)
	case binary:
		return b.operation(e.text, b.value(e.parts[0]), b.value(e.parts[1]), e.at)
	case comparison:
		return b.compare(e)
	case both, either:
		return b.logical(e)
	case choice:
		return b.choose(e)
	case assigned:
		v := b.value(e.parts[0])
		b.bind(&expression{kind: nameOf, at: e.at, text: e.text}, v)
		return v
	case lambda:
		return &Value{Kind: Function, Text: "lambda", At: at, function: e.function, scope: b.global, file: b.file,
			around: append([]map[string]*Value{b.local}, b.around...), usual: b.defaults(e.function.parameters)}
	case comprehends:
		if e.over != nil {
			if list := b.each(e); list != nil {
				return list
			}
		}
		b.comprehend(e)
	}
	return b.unknown(e.String(), e.at)
}

func numberFrom(text string, at int) *Value {
	v := &Value{Kind: Number, At: at}
	if n, err := strconv.ParseInt(text, 0, 64); err == nil && max(n, -n) <= 1<<53 {
		v.Number, v.Whole = float64(n), true
		return v
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || strings.Trim(text, "0123456789") == "" {
		return &Value{Kind: Unknown, Text: text, At: at}
	}
	v.Number = n
	return v
}

// name returns the value of a name. Names of Python itself are symbols.
func (b *block) name(e *expression) *Value {
	at := b.file.position(e.at)
	switch e.text {
	case "None":
		return &Value{Kind: None, At: at}
	case "True", "False":
		return &Value{Kind: Bool, Truth: e.text == "True", At: at}
	}
	for _, scope := range b.sees(e.text) {
		if v := scope[e.text]; v != nil {
			return b.resolved(v)
		}
	}
	return &Value{Kind: Symbol, Text: e.text, At: at}
}

// resolved returns a name of another module: its value, if the module is one of the same project.
func (b *block) resolved(v *Value) *Value {
	if v.resolve == nil {
		return v
	}
	resolve := v.resolve
	v.resolve = nil
	if is := resolve(); is != nil && is != v {
		is = b.resolved(is)
		v.resolve = func() *Value { return is }
		return is
	}
	return v
}

// format evaluates a string with values in it, where they are names or attributes.
func (b *block) format(e *expression) *Value {
	var all strings.Builder
	for rest := e.text; rest != "" && all.Len() < longest; {
		before, inner, found := strings.Cut(rest, "{")
		if all.WriteString(strings.ReplaceAll(before, "}}", "}")); !found {
			break
		}
		if after, escaped := strings.CutPrefix(inner, "{"); escaped {
			all.WriteString("{")
			rest = after
			continue
		}
		source, after, closed := strings.Cut(inner, "}")
		parts := parse(source + "\n")
		if !closed || len(parts) != 1 || parts[0].kind != evaluates {
			return b.unknown("a string with "+source, e.at)
		}
		here := *b
		here.file = &file{}
		v := here.value(parts[0].value)
		switch v.Kind {
		case Text:
			all.WriteString(v.Text)
		case Number, Bool, None:
			all.WriteString(v.String())
		default:
			return b.unknown("a string with "+source, e.at)
		}
		rest = after
	}
	return &Value{Kind: Text, Text: all.String(), At: b.file.position(e.at)}
}

func (b *block) join(e *expression) *Value {
	all := &Value{Kind: Text, At: b.file.position(e.at)}
	for _, part := range e.parts {
		v := b.value(part)
		if v.Kind != Text {
			return v
		}
		all.Text += v.Text
	}
	return all
}

func (b *block) attribute(e *expression) *Value {
	return b.attributeOf(b.value(e.parts[0]), e)
}

func (b *block) attributeOf(of *Value, e *expression) *Value {
	switch of.Kind {
	case Symbol:
		if is := of.Attribute(e.text); is != nil {
			return is
		}
		if is := of.names[e.text]; is != nil {
			return b.resolved(is)
		}
		return &Value{Kind: Symbol, Text: of.Text + "." + e.text, At: b.file.position(e.at)}
	case Object:
		if is := of.Attribute(e.text); is != nil {
			return is
		}
		if is := of.of.Attribute(e.text); is != nil {
			if of.of.fields && (is.Kind == List || is.Kind == Dict) { // each object has its own
				is = b.clone(is)
				of.set(e.text, is.At, is)
			}
			return is
		}
		return &Value{Kind: Unknown, Text: e.String(), At: b.file.position(e.at), From: of}
	case Unknown:
		return &Value{Kind: Unknown, Text: e.String(), At: b.file.position(e.at), From: of.From}
	case Function:
		if e.text == "__name__" {
			return &Value{Kind: Text, Text: of.Text, At: b.file.position(e.at)}
		}
	}
	return b.unknown(e.String(), e.at)
}

func (b *block) item(e *expression) *Value {
	of, key := b.value(e.parts[0]), b.value(e.parts[1])
	name, isKey := keyOf(key)
	switch {
	case isEnvironment(of) && isKey:
		if is := b.variable(name); is != nil {
			return is
		}
	case of.Kind == Dict && isKey:
		if is := of.Attribute(name); is != nil {
			return is
		}
	case of.Kind == List && key.Kind == Number:
		if i, is := of.index(key); is {
			return of.Elements[i]
		}
	}
	is := b.unknown(e.String(), e.at)
	if of.Kind == Unknown {
		is.From = of.From
	}
	return is
}

func (b *block) list(e *expression) *Value {
	list := &Value{Kind: List, At: b.file.position(e.at), born: b.steps, tuple: e.kind == tupleOf}
	for _, part := range e.parts {
		if part.kind != starred {
			list.Elements = append(list.Elements, b.value(part))
			continue
		}
		spread := b.value(part.parts[0])
		if spread.Kind != List {
			return b.unknown(part.parts[0].String(), e.at)
		}
		list.Elements = append(list.Elements, spread.Elements...)
	}
	if e.text == "{" {
		return list.distinct()
	}
	return list
}

// each evaluates a comprehension over a list, or returns nil where the list is not known.
func (b *block) each(e *expression) *Value {
	over := b.value(e.over[1])
	if over.Kind != List || len(over.Elements) > longest {
		return nil
	}
	inner := *b
	inner.around = append([]map[string]*Value{b.local}, b.around...)
	inner.local = map[string]*Value{}
	list := &Value{Kind: List, At: b.file.position(e.at), born: b.steps}
	for _, element := range over.Elements {
		inner.bind(e.over[0], element)
		list.Elements = append(list.Elements, inner.value(e.parts[0]))
	}
	return list
}

// keyOf returns the key of a dict as a text: that of a number, or of a tuple of plain values, is as it is written.
func keyOf(v *Value) (key string, known bool) {
	switch v.Kind {
	case Text:
		return v.Text, true
	case Number, None, Bool:
		return v.String(), true
	case List:
		var parts []string
		for _, part := range v.Elements {
			if part.Kind != Text && part.Kind != Number && part.Kind != None && part.Kind != Bool {
				return "", false
			}
			parts = append(parts, part.String())
		}
		return "(" + strings.Join(parts, ", ") + ")", true
	}
	return "", false
}

// dict evaluates a dict whose keys are plain values.
func (b *block) dict(e *expression) *Value {
	all := &Value{Kind: Dict, At: b.file.position(e.at), born: b.steps}
	for i := 0; i+1 < len(e.parts); i += 2 {
		value := b.value(e.parts[i+1])
		if e.parts[i] == nil {
			if value.Kind != Dict {
				return b.unknown(e.parts[i+1].String(), e.at)
			}
			for _, m := range value.Members {
				all.set(m.Name, m.At, m.Is)
			}
			continue
		}
		key := b.value(e.parts[i])
		name, is := keyOf(key)
		if !is {
			return b.unknown(e.parts[i].String(), e.at)
		}
		all.set(name, key.At, value)
	}
	return all
}

func (b *block) unary(e *expression) *Value {
	v := b.value(e.parts[0])
	at := b.file.position(e.at)
	switch is, known := v.truth(); {
	case e.text == "not" && known:
		return &Value{Kind: Bool, Truth: !is, At: at}
	case e.text == "-" && v.Kind == Number:
		return &Value{Kind: Number, Number: -v.Number, Whole: v.Whole, At: at}
	case e.text == "+" && v.Kind == Number:
		return v
	}
	return b.unknown(reason(v, e), e.at)
}

// reason returns why a value is not known: what it depends on.
func reason(v *Value, e *expression) string {
	if v.Kind == Unknown || v.Kind == Symbol {
		return v.Text
	}
	return e.String()
}

// operation computes numbers, and joins texts, lists and dicts.
func (b *block) operation(operator string, x, y *Value, at int) *Value {
	place := b.file.position(at)
	switch {
	case x.Kind == Number && y.Kind == Number:
		if v := arithmetic(operator, x, y); v != nil {
			v.At = place
			return v
		}
	case len(x.Text)+len(y.Text) > longest || len(x.Elements)+len(y.Elements) > longest:
	case operator == "+" && x.Kind == Text && y.Kind == Text:
		return &Value{Kind: Text, Text: x.Text + y.Text, At: place}
	case operator == "+" && x.Kind == List && y.Kind == List:
		return &Value{Kind: List, Elements: slices.Concat(x.Elements, y.Elements), At: place, born: b.steps}
	case operator == "*" && x.Kind == List && y.Kind == Number && y.Number*float64(len(x.Elements)) < longest:
		return &Value{Kind: List, Elements: slices.Repeat(x.Elements, max(0, int(y.Number))), At: place, born: b.steps}
	case operator == "|" && x.Kind == Dict && y.Kind == Dict:
		all := &Value{Kind: Dict, At: place, Members: slices.Clone(x.Members), born: b.steps}
		for _, m := range y.Members {
			all.set(m.Name, m.At, m.Is)
		}
		return all
	}
	for _, v := range []*Value{x, y} {
		if v.Kind == Unknown {
			return b.unknown(v.Text, at)
		}
	}
	return b.unknown(x.String()+" "+operator+" "+y.String(), at)
}

// arithmetic returns nil where Python raises, and for numbers that are too large.
func arithmetic(operator string, x, y *Value) *Value {
	v := &Value{Kind: Number, Whole: x.Whole && y.Whole}
	switch {
	case operator == "+":
		v.Number = x.Number + y.Number
	case operator == "-":
		v.Number = x.Number - y.Number
	case operator == "*":
		v.Number = x.Number * y.Number
	case operator == "**":
		v.Number = math.Pow(x.Number, y.Number)
		v.Whole = v.Whole && y.Number >= 0
	case operator == "/" && y.Number != 0:
		v.Number, v.Whole = x.Number/y.Number, false
	case operator == "//" && y.Number != 0:
		v.Number = math.Floor(x.Number / y.Number)
	case operator == "%" && y.Number != 0:
		v.Number = x.Number - y.Number*math.Floor(x.Number/y.Number)
	default:
		return nil
	}
	if math.Abs(v.Number) > 1<<53 || math.IsNaN(v.Number) {
		return nil
	}
	return v
}

func (b *block) compare(e *expression) *Value {
	x, y := b.value(e.parts[0]), b.value(e.parts[1])
	is, known := false, false
	switch e.text {
	case "==", "is":
		is, known = x.equal(y)
	case "!=", "is not":
		is, known = x.equal(y)
		is = !is
	case "in", "not in":
		is, known = contains(y, x)
		is = is == (e.text == "in")
	default:
		if x.Kind == Number && y.Kind == Number {
			known = true
			is = map[string]bool{"<": x.Number < y.Number, ">": x.Number > y.Number, "<=": x.Number <= y.Number,
				">=": x.Number >= y.Number}[e.text]
		}
	}
	made := []Kind{Object, List, Dict, Function}
	if something := slices.Contains(made, x.Kind) && y.Kind == None || slices.Contains(made, y.Kind) &&
		x.Kind == None; something && strings.HasPrefix(e.text, "is") {
		is, known = e.text == "is not", true
	}
	if !known {
		return b.unknown(reason(x, e), e.at)
	}
	return &Value{Kind: Bool, Truth: is, At: b.file.position(e.at)}
}

// contains reports whether a list, a dict or a text has a value.
func contains(all, x *Value) (is, known bool) {
	switch all.Kind {
	case List:
		for _, element := range all.Elements {
			same, sure := element.equal(x)
			if !sure {
				return false, false
			}
			is = is || same
		}
		return is, true
	case Dict:
		name, known := keyOf(x)
		return all.Attribute(name) != nil, known
	case Text:
		return strings.Contains(all.Text, x.Text), x.Kind == Text
	}
	return false, false
}

// logical evaluates and and or: the operand that decides.
func (b *block) logical(e *expression) *Value {
	x := b.value(e.parts[0])
	is, known := x.truth()
	if x.Kind == Object {
		is, known = true, true
	}
	switch {
	case !known:
		y := b.value(e.parts[1])
		if other, sure := y.truth(); sure && other == (e.kind == either) && y.Kind == Bool {
			return y // whatever the first one is
		}
		return b.unknown(reason(x, e), e.at)
	case is == (e.kind == either):
		return x
	}
	return b.value(e.parts[1])
}

// choose evaluates the value that a condition chooses.
func (b *block) choose(e *expression) *Value {
	v := b.value(e.parts[0])
	is, known := v.truth()
	switch {
	case !known:
		x, y := b.value(e.parts[1]), b.value(e.parts[2])
		if same, sure := x.equal(y); sure && same {
			return x
		}
		return b.unknown(reason(v, e.parts[0]), e.at)
	case is:
		return b.value(e.parts[1])
	}
	return b.value(e.parts[2])
}
