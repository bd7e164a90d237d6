package recipe

import (
	"maps"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// A script of a shell may start a training whose arguments are all on its command line. Such a command is read as a
// document with a member for each argument. Its first member is the name of the command, with underscores.

// several is the name of a script with more than one training.
const several = "several_trainings"

// word is a word of a command and its offset.
type word struct {
	text   string
	at     int64
	quoted bool // it has quotes
}

// parseCommand returns the training that a script starts, or nil if there is none.
func parseCommand(file string, text []byte) *strict.Document {
	found, _ := readCommand(file, text)
	return found
}

// readCommand returns the training that a script starts, and the line that starts it.
func readCommand(file string, text []byte) (found *strict.Document, launch *launchLine) {
	variables, places := map[string]string{}, map[string]int64{}
	for _, line := range shellCommands(string(text)) {
		if len(line) > 0 && line[0].text == "export" {
			line = line[1:]
		}
		for len(line) > 0 && assignment.MatchString(line[0].text) {
			name, is, _ := strings.Cut(line[0].text, "=")
			variables[name] = expand(is, variables)
			places[name] = line[0].at
			line = line[1:]
		}
		name, arguments, kind := trains(line)
		switch {
		case name == "":
		case found != nil:
			found.Root.Members = []strict.Member{{Name: several, At: line[0].at, Value: strict.Of(true)}}
			return found, nil
		default:
			launch = &launchLine{line, maps.Clone(variables), maps.Clone(places), kind.LaunchVariables}
			root := &strict.Value{Kind: '{', At: line[0].at}
			root.Members = append(commandMembers(arguments, variables), strict.Member{Name: name, At: line[0].at,
				Value: strict.Of(true)})
			found = &strict.Document{File: file, Text: text, Root: root}
		}
	}
	return found, launch
}

var assignment = lazyregexp.New(`^[A-Za-z_]\w*=`)

// trains returns the name of a command, its arguments and its kind. A launcher may come first, such as torchrun.
func trains(line []word) (name string, arguments []word, kind *Kind) {
	for i := range line {
		for _, k := range kinds {
			for words, mark := range k.Commands {
				first, second, two := strings.Cut(words, " ")
				switch {
				case two && line[i].text == first && i+1 < len(line) && line[i+1].text == second:
					return mark, line[i+2:], k
				case !two && strings.HasSuffix(line[i].text, first):
					return mark, line[i+1:], k
				}
			}
		}
	}
	return "", nil, nil
}

// commandMembers returns a member for each argument. The last of several with one name counts.
func commandMembers(words []word, variables map[string]string) []strict.Member {
	var members []strict.Member
	places := map[string]int{}
	for i := 0; i < len(words); {
		flag := words[i]
		i++
		name, is, given := strings.Cut(strings.TrimPrefix(flag.text, "--"), "=")
		if !strings.HasPrefix(flag.text, "--") || name == "" {
			continue
		}
		var values []*strict.Value
		if given {
			values = append(values, argument(word{is, flag.at + int64(len(name)) + 3, false}, variables))
		}
		for ; !given && i < len(words) && !strings.HasPrefix(words[i].text, "--"); i++ {
			values = append(values, argument(words[i], variables))
		}
		value := &strict.Value{Kind: '[', At: flag.at, Elements: values}
		switch len(values) {
		case 0:
			value = strict.Of(true)
			value.At = flag.at
		case 1:
			value = values[0]
		}
		name = strings.ReplaceAll(name, "-", "_")
		if place, again := places[name]; again {
			members[place].Value = value
			continue
		}
		places[name] = len(members)
		members = append(members, strict.Member{Name: name, At: flag.at, Value: value})
	}
	return members
}

// argument returns the value of a word: JSON, or a word as in YAML.
func argument(w word, variables map[string]string) *strict.Value {
	text := expand(w.text, variables)
	if strings.HasPrefix(text, "{") && !strings.Contains(text, "$") {
		if d, err := strict.ParseJSON("", []byte(text)); err == nil {
			return placed(d.Root, w.at)
		}
	}
	return strict.Bare(text, w.at)
}

// placed moves a value and all inside it to an offset.
func placed(v *strict.Value, at int64) *strict.Value {
	v.At = at
	for _, e := range v.Elements {
		placed(e, at)
	}
	for i := range v.Members {
		v.Members[i].At = at
		placed(v.Members[i].Value, at)
	}
	return v
}

var (
	variable   = lazyregexp.New(`\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))`)
	expression = lazyregexp.New(`\$\((?:expr|\()((?: *[-+*/]? *\d+)+) *\)?\)`)
	operand    = lazyregexp.New(`([-+*/]?) *(\d+)`)
)

// expand puts in the values of variables, or their defaults, and computes. What it does not know, it leaves.
func expand(text string, variables map[string]string) string {
	return expandWithin(512, text, variables)
}

// expandWithin has a limit of the length, so that no variable grows without end.
func expandWithin(longest int, text string, variables map[string]string) string {
	if len(text) > longest {
		return text
	}
	long := text
	text = variable.ReplaceAllStringFunc(text, func(found string) string {
		parts := variable.FindStringSubmatch(found)
		if is, known := variables[parts[1]+parts[3]]; known {
			return is
		}
		if parts[2] != "" {
			return parts[2]
		}
		return found
	})
	if len(text) > longest {
		return long
	}
	return expression.ReplaceAllStringFunc(text, func(found string) string {
		var sum int64
		for _, part := range operand.FindAllStringSubmatch(expression.FindStringSubmatch(found)[1], -1) {
			n, err := strconv.ParseInt(part[2], 10, 32)
			switch {
			case err != nil || part[1] == "/" && n == 0:
				return found
			case part[1] == "-":
				sum -= n
			case part[1] == "*":
				sum *= n
			case part[1] == "/":
				sum /= n
			default:
				sum += n
			}
		}
		return strconv.FormatInt(sum, 10)
	})
}

// shellCommands returns the words of each command of a script. A substitution, $(...), is kept as it is.
func shellCommands(text string) [][]word {
	var list [][]word
	for _, c := range shellStatements(text, false) {
		list = append(list, c.words)
	}
	return list
}

// statement is a command of a script.
type statement struct {
	words []word
	end   byte // what follows: the end of the line, ';', '&' or '|'
}

// shellStatements reads the commands of a script. With arrays, the parentheses of an array are words: "NAME=(" and ")".
func shellStatements(text string, arrays bool) []statement {
	var list []statement
	var line []word
	scan := shellScanner{text: text, arrays: arrays}
	for {
		w, more := scan.next()
		if w.text != "" || w.quoted {
			line = append(line, w)
		}
		if (scan.ended || !more) && len(line) > 0 {
			end := byte('\n')
			if scan.ended {
				end = text[scan.at-1]
			}
			list = append(list, statement{line, end})
			line = nil
		}
		if !more {
			return list
		}
	}
}

// shellScanner reads the words of a script.
type shellScanner struct {
	text    string
	at      int
	ended   bool // a command ends with the last word
	quoted  bool // the last word has quotes
	arrays  bool // parentheses of arrays are words
	inArray bool
	inTest  bool     // between [[ and ]], where < and > compare
	here    []string // ends of documents that begin behind this line
}

// next returns the next word, which may be empty at the end of a command, and whether the text goes on.
func (s *shellScanner) next() (word, bool) {
	w, more := s.word()
	switch {
	case w.text == "[[" && !w.quoted:
		s.inTest = true
	case w.text == "]]" && !w.quoted, s.ended && s.text[s.at-1] == '\n':
		s.inTest = false
	}
	if s.ended && s.text[s.at-1] == '\n' {
		s.skipDocuments()
	}
	return w, more
}

// blanks skips spaces, and ends of lines behind a backslash.
func (s *shellScanner) blanks() {
	for s.at < len(s.text) && (s.text[s.at] == ' ' || s.text[s.at] == '\t' ||
		strings.HasPrefix(s.text[s.at:], "\\\n")) {
		s.at++
		if s.text[s.at-1] == '\\' {
			s.at++
		}
	}
}

// word reads a word. Redirections are no words.
func (s *shellScanner) word() (word, bool) {
	s.ended, s.quoted = false, false
	s.blanks()
	if s.at < len(s.text) && s.text[s.at] == '#' {
		for s.at < len(s.text) && s.text[s.at] != '\n' {
			s.at++
		}
	}
	start := s.at
	var out strings.Builder
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == ' ' || c == '\t':
			return word{out.String(), int64(start), s.quoted}, true
		case s.redirects():
			if descriptor := out.String(); s.quoted || strings.Trim(descriptor, "0123456789") != "" {
				return word{descriptor, int64(start), s.quoted}, true
			}
			s.redirection()
			s.blanks()
			out.Reset()
			s.quoted, start = false, s.at
		case c == '\n' || c == ';' || c == '&' || c == '|':
			s.at++
			s.ended = true
			return word{out.String(), int64(start), s.quoted}, true
		case c == '\'' || c == '"':
			s.quote(&out, c)
		case c == '\\':
			s.escape(&out)
		case s.arrays && (s.inArray && c == ')' || c == '(' && strings.HasSuffix(out.String(), "=")):
			if out.Len() == 0 || c == '(' {
				s.inArray = c == '('
				out.WriteByte(c)
				s.at++
			}
			return word{out.String(), int64(start), s.quoted}, true
		case strings.HasPrefix(s.text[s.at:], "$("):
			s.substitution(&out)
		default:
			out.WriteByte(c)
			s.at++
		}
	}
	return word{out.String(), int64(start), s.quoted}, false
}

// redirects reports whether a redirection is next.
func (s *shellScanner) redirects() bool {
	rest := s.text[s.at:]
	return !s.inTest && (rest[0] == '<' || rest[0] == '>' || strings.HasPrefix(rest, "&>"))
}

// redirection skips a redirection with its file, and notes the end of a document that it begins.
func (s *shellScanner) redirection() {
	start := s.at
	for s.at < len(s.text) && strings.IndexByte("<>&|", s.text[s.at]) >= 0 {
		s.at++
	}
	operator := s.text[start:s.at]
	document := operator == "<<"
	if document && s.at < len(s.text) && s.text[s.at] == '-' {
		s.at++
	}
	s.blanks()
	if s.at < len(s.text) && s.text[s.at] == '(' { // of a process
		s.substitution(&strings.Builder{})
		return
	}
	var target strings.Builder
	for s.at < len(s.text) && strings.IndexByte(" \t\n;&|<>", s.text[s.at]) < 0 {
		switch c := s.text[s.at]; {
		case c == '\'' || c == '"':
			s.quote(&target, c)
		case c == '\\':
			s.escape(&target)
		case strings.HasPrefix(s.text[s.at:], "$("):
			s.substitution(&target)
		default:
			target.WriteByte(c)
			s.at++
		}
	}
	if document {
		s.here = append(s.here, target.String())
	}
}

// skipDocuments skips the documents that begin on this line, each up to the line that ends it.
func (s *shellScanner) skipDocuments() {
	for _, end := range s.here {
		for s.at < len(s.text) {
			line, _, _ := strings.Cut(s.text[s.at:], "\n")
			s.at = min(s.at+len(line)+1, len(s.text))
			if strings.TrimLeft(line, "\t") == end {
				break
			}
		}
	}
	s.here = nil
}

// quote reads a text in quotes.
func (s *shellScanner) quote(out *strings.Builder, mark byte) {
	s.quoted = true
	for s.at++; s.at < len(s.text) && s.text[s.at] != mark; {
		if mark == '"' && s.text[s.at] == '\\' {
			s.escape(out)
			continue
		}
		out.WriteByte(s.text[s.at])
		s.at++
	}
	s.at++
	s.at = min(s.at, len(s.text))
}

// escape reads a character after a backslash. A line goes on after a backslash at its end.
func (s *shellScanner) escape(out *strings.Builder) {
	if s.at++; s.at < len(s.text) && s.text[s.at] != '\n' {
		out.WriteByte(s.text[s.at])
	}
	s.at = min(s.at+1, len(s.text))
}

// substitution reads $(...) with what is inside.
func (s *shellScanner) substitution(out *strings.Builder) {
	depth := 0
	for s.at < len(s.text) {
		c := s.text[s.at]
		out.WriteByte(c)
		s.at++
		if c == '(' {
			depth++
		}
		if c == ')' {
			if depth--; depth == 0 {
				return
			}
		}
	}
}
