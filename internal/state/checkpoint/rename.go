package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/shard"
)

// Rename is a rule that gives parameters of a checkpoint other names. A * in From stands for one part of a name,
// between its dots. The first * in To is the part that the first * in From has found, and so on: layers keep their
// numbers.
type Rename struct {
	From, To string
	where    fault.Position // where it was read, if it was in a file
}

func (r Rename) String() string { return r.From + "=" + r.To }

// anyPart stands for any part of a name, and partEnd is between two parts.
const anyPart, partEnd = "*", "."

// maxRules is far above the size of a file of rules.
const maxRules = 64 << 20

// ReadRenames reads rules. Each text is FROM=TO, or the name of a file of rules: a JSON object, or lines of FROM=TO.
func ReadRenames(texts []string) ([]Rename, error) {
	var rules []Rename
	for _, text := range texts {
		read := renamesIn
		if strings.Contains(text, "=") {
			read = func(rule string) ([]Rename, error) { return appendRule(nil, fault.Position{}, rule) }
		}
		own, err := read(text)
		if err != nil {
			return nil, err
		}
		rules = append(rules, own...)
	}
	return rules, nil
}

// renamesIn reads the rules in a file.
func renamesIn(path string) ([]Rename, error) {
	text, err := files.Read(path, maxRules)
	if err != nil {
		return nil, &fault.Input{
			Where: fault.File(path), What: "the rules of --rename cannot be read", Err: errors.Unwrap(err),
			Hint: "a rule that is no file is FROM=TO",
		}
	}
	var rules []Rename
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte{'{'}) {
		rules, err = objectRules(path, text)
	} else {
		rules, err = lineRules(path, text)
	}
	if err == nil && len(rules) == 0 {
		err = fault.File(path).Inputf("it has no rules: expected lines of FROM=TO, or a JSON object")
	}
	return rules, err
}

// objectRules reads a JSON object whose keys are the former names. It refuses a key that is there twice.
func objectRules(path string, text []byte) ([]Rename, error) {
	var object map[string]string
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, &fault.Input{
			Where: fault.File(path), What: `expected a JSON object of names, such as {"a.weight": "b.weight"}`, Err: err,
		}
	}
	var rules []Rename
	for from, to := range object {
		rule := Rename{from, to, fault.File(path)}
		if err := rule.validate(); err != nil {
			return nil, err
		}
		rules = append(rules, rule)
	}
	slices.SortFunc(rules, func(a, b Rename) int { return strings.Compare(a.From, b.From) })
	return rules, nil
}

// lineRules reads a rule a line. Lines may be empty, or comments that begin with #.
func lineRules(path string, text []byte) (rules []Rename, err error) {
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		rule := strings.TrimSpace(line)
		if rule == "" || strings.HasPrefix(rule, "#") {
			continue
		}
		where := fault.Position{File: path, Line: number, Column: 1 + strings.Index(line, rule)}
		if rules, err = appendRule(rules, where, rule); err != nil {
			return nil, err
		}
	}
	return rules, nil
}

// appendRule appends the rule of a text FROM=TO.
func appendRule(rules []Rename, where fault.Position, text string) ([]Rename, error) {
	from, to, _ := strings.Cut(text, "=")
	rule := Rename{strings.TrimSpace(from), strings.TrimSpace(to), where}
	if rule.From == "" || rule.To == "" || strings.Contains(rule.To, "=") {
		return nil, where.Inputf("the rule of --rename is %q, expected FROM=TO", text).
			WithHint("names with an = go into a JSON object in a file")
	}
	return append(rules, rule), rule.validate()
}

// validate refuses a rule that leaves open what a name becomes.
func (r Rename) validate() error {
	counts := [2]int{}
	for i, side := range []string{r.From, r.To} {
		for _, part := range strings.Split(side, partEnd) {
			if part == anyPart {
				counts[i]++
			} else if strings.Contains(part, anyPart) {
				return r.wrong("%q has more than the *", part).
					WithHint("a * stands for a whole part of a name, between its dots: layers.*.weight")
			}
		}
	}
	if counts[0] != counts[1] {
		return r.wrong("FROM has %d *, and TO has %d", counts[0], counts[1]).
			WithHint("give both as many: each * of TO is the * of FROM at the same place")
	}
	return nil
}

func (r Rename) wrong(format string, values ...any) *fault.Input {
	return r.where.Inputf("the rule %q of --rename: %s", r.String(), fmt.Sprintf(format, values...))
}

// apply returns the other name of a parameter, if the rule is for it.
func (r Rename) apply(name string) (renamed string, ok bool) {
	parts, from, to := strings.Split(name, partEnd), strings.Split(r.From, partEnd), strings.Split(r.To, partEnd)
	if len(parts) != len(from) {
		return "", false
	}
	next := 0 // part of to
	for i, part := range parts {
		if from[i] != anyPart {
			if from[i] != part {
				return "", false
			}
			continue
		}
		next += slices.Index(to[next:], anyPart) // was validated
		to[next] = part
		next++
	}
	return strings.Join(to, partEnd), true
}

// Rename gives parameters other names. All rules go by the names in the checkpoint, so two parameters may exchange
// theirs. A rule that no parameter needs is refused, and so is a parameter with two rules, or a name of two parameters.
func (c *Checkpoint) Rename(rules []Rename) error {
	if len(rules) == 0 {
		return nil
	}
	names, err := c.renamed(rules)
	if err != nil {
		return err
	}
	parameters, steps := map[string]*parameter{}, map[string]int64{}
	for i, name := range c.names {
		p := c.parameters[name]
		p.Name = names[name]
		parameters[p.Name], c.names[i] = p, p.Name
		if had, ok := c.ownSteps[name]; ok {
			steps[p.Name] = had
		}
	}
	c.parameters, c.ownSteps = parameters, steps
	for _, f := range c.files {
		own := *f.layout
		own.pieces = slices.Clone(own.pieces)
		for i, p := range own.pieces {
			own.pieces[i].Name = names[p.Name]
		}
		f.layout = &own
	}
	return nil
}

// renamed returns the new name of every parameter.
func (c *Checkpoint) renamed(rules []Rename) (map[string]string, error) {
	names, taken, used := map[string]string{}, map[string]string{}, make([]bool, len(rules))
	for _, name := range c.names {
		renamed, by := name, -1
		for i, r := range rules {
			to, ok := r.apply(name)
			if !ok {
				continue
			}
			if by >= 0 {
				return nil, r.wrong("parameter %q of %s has another rule, %q", name, c.path, rules[by]).
					WithHint("leave one of them out")
			}
			renamed, by, used[i] = to, i, true
		}
		if other, twice := taken[renamed]; twice {
			return nil, fault.File(c.path).Inputf("with --rename both %q and %q have the name %q", other, name,
				renamed).WithHint("give each parameter a name of its own")
		}
		if err := (shard.Piece{Name: renamed, Range: shard.Range{Count: 1}}).Validate(); err != nil {
			return nil, fault.File(c.path).Inputf("with --rename %v", err)
		}
		names[name], taken[renamed] = renamed, name
	}
	if i := slices.Index(used, false); i >= 0 {
		return nil, c.unused(rules[i])
	}
	return names, nil
}

// unused returns the error for a rule that no parameter needs.
func (c *Checkpoint) unused(r Rename) error {
	e := r.wrong("no parameter of %s has the name %q", c.path, r.From)
	if nearest := fault.NearestParameter(r.From, c.names); nearest != "" {
		return e.WithHint(fmt.Sprintf("it has %q", nearest))
	}
	return e.WithHint("plimsoll checkpoint inspect shows its names: FROM is a name there, and TO the one it gets")
}

// Absent is the error for a parameter of a template that the checkpoint does not have. A parameter that is in the
// template, too, is not the absent one by another name.
func (c *Checkpoint) Absent(template, name string, isInTemplate func(string) bool) error {
	left := slices.DeleteFunc(slices.Clone(c.names), isInTemplate)
	e := fault.File(template).Inputf("it has the parameter %q, which the checkpoint %s does not have", name, c.path)
	if nearest := fault.NearestParameter(name, left); nearest != "" {
		return e.WithHint(fmt.Sprintf("the checkpoint has %q: if that is the same parameter, give --rename %s",
			nearest, Rename{From: nearest, To: name}))
	}
	if len(left) == 0 {
		return e.WithHint("convert the checkpoint of a job that trains it")
	}
	return e.WithHint(fmt.Sprintf("if the checkpoint has it by another name, give --rename FROM=%s with that name",
		name))
}
