package shell

import (
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// reading is how read takes its input.
type reading struct {
	names  []string
	isList bool // -a: into the elements of an array
	whole  bool // -d '': up to the end of the input
	other  bool // it has flags that are not followed
}

// reads follows read NAME... <<EOF and read -a NAME <<< TEXT. It is false for other statements.
func (r *runner) reads(s *syntax.Stmt) bool {
	c, isCall := s.Cmd.(*syntax.CallExpr)
	if !isCall || len(c.Args) < 2 || c.Args[0].Lit() != "read" || len(s.Redirs) != 1 {
		return false
	}
	how := r.readingOf(c.Args[1:])
	var input Word
	switch d := s.Redirs[0]; {
	case len(how.names) == 0 || how.other:
		return false
	case d.Op == syntax.Hdoc || d.Op == syntax.DashHdoc:
		input = r.document(d.Hdoc)
	case d.Op == syntax.WordHdoc:
		input = r.value(d.Word)
	default:
		return false
	}
	if !how.whole {
		input.Text, _, _ = strings.Cut(input.Text, "\n")
	}
	separators := " \t\n"
	if value, is := r.values["IFS"]; is {
		separators = value.word.Text
	}
	for _, a := range c.Assigns {
		if a.Name != nil && a.Name.Value == "IFS" {
			separators = r.value(a.Value).Text
		}
	}
	r.divides(how, input, separators, c)
	return true
}

func (r *runner) readingOf(words []*syntax.Word) (how reading) {
	for i := 0; i < len(words); i++ {
		word := r.value(words[i])
		flags, isFlag := strings.CutPrefix(word.Text, "-")
		if !isFlag {
			how.other = how.other || !syntax.ValidName(word.Text)
			how.names = append(how.names, word.Text)
			continue
		}
		for at, flag := range flags {
			switch flag {
			case 'r', 'e', 's':
			case 'a':
				how.isList = true
			case 'd':
				how.whole = at+1 == len(flags) && i+1 < len(words) && r.value(words[i+1]).Text == ""
				how.other = how.other || !how.whole
				i++
			default:
				how.other = true
			}
		}
	}
	return how
}

// divides gives variables the fields of an input.
func (r *runner) divides(how reading, input Word, separators string, c *syntax.CallExpr) {
	white := func(x rune) bool { return strings.ContainsRune(separators, x) && strings.ContainsRune(" \t\n", x) }
	input.Text = strings.TrimFunc(input.Text, white)
	if !how.isList && len(how.names) == 1 {
		r.set(how.names[0], variable{word: input, at: r.at(c)})
		return
	}
	if len(input.Unknown) > 0 {
		for _, name := range how.names {
			r.undecided(name, r.at(c))
		}
		return
	}
	fields := divided(input.Text, separators, white)
	word := func(text string) Word { return Word{Text: text, At: input.At, Quoted: true} }
	if how.isList {
		list := variable{isList: true, at: r.at(c)}
		for _, f := range fields {
			list.list = append(list.list, word(f))
		}
		r.set(how.names[0], list)
		return
	}
	rest := input.Text
	for i, name := range how.names {
		value := rest
		if i < len(how.names)-1 {
			at := strings.IndexFunc(rest, func(x rune) bool { return strings.ContainsRune(separators, x) })
			value, rest = rest, ""
			if at >= 0 {
				value, rest = value[:at], strings.TrimLeftFunc(value[at+1:], white)
			}
		}
		r.set(name, variable{word: word(strings.TrimRightFunc(value, white)), at: r.at(c)})
	}
}

// divided returns the fields of a text. Blanks beside each other are one separator, and others are one each.
func divided(text, separators string, white func(rune) bool) (fields []string) {
	if strings.TrimFunc(separators, white) == "" {
		if separators == "" {
			return []string{text}
		}
		return strings.FieldsFunc(text, white)
	}
	start := 0
	for i, x := range text {
		if strings.ContainsRune(separators, x) {
			fields = append(fields, strings.TrimFunc(text[start:i], white))
			start = i + len(string(x))
		}
	}
	if start < len(text) {
		fields = append(fields, strings.TrimFunc(text[start:], white))
	}
	return fields
}
