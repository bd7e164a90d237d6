package recipe

import (
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// shell reads a script as Bash runs it, without running a program: assignments, arrays and conditions. Loops and cases
// are left out. A variable that the script does not set is empty in conditions, and stays as it is in commands.
type shell struct {
	values   map[string]word
	lists    map[string][]word
	branches []branch // of the conditions around the current command
	commands [][]word
	unset    []string // variables that conditions ask for and the script does not set
	loops    int      // around the current command, with cases
	looped   []string // variables that loops and cases set
	list     string   // the array that is being read
}

// branch is a condition around a command: which part runs.
type branch struct{ runs, ran bool }

// longestValue is the limit of a variable's value, and mostWords that of a command's words.
const longestValue, mostWords = 1 << 16, 1 << 14

var (
	assigned = lazyregexp.New(`^([A-Za-z_]\w*)(\+?)=`)
	joined   = lazyregexp.New(`\$\{(\w+)\[[@*]\]\}`)
	asked    = lazyregexp.New(`\$\{?(\w+)`)
	whole    = lazyregexp.New(`^\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))$`)
)

// run reads a script. Its commands are in s.commands then, with the values of its variables.
func (s *shell) run(text string) {
	list := shellStatements(text, true)
	for i := 0; i < len(list); i++ {
		words := list[i].words
		switch first := words[0].text; {
		case s.list != "":
			s.addToList(words)
		case slices.ContainsFunc(words, startsArray) && !s.runs():
			s.leaveOut(words)
			i += arrayLength(list[i:]) - 1
		case first == "if" || first == "elif":
			n := conditionLength(list[i:])
			s.condition(first == "elif", list[i:i+n])
			i += n - 1
		case first == "else" && len(s.branches) > 0:
			b := &s.branches[len(s.branches)-1]
			b.runs, b.ran = !b.ran, true
			s.command(words[1:])
		case first == "fi" && len(s.branches) > 0:
			s.branches = s.branches[:len(s.branches)-1]
		case slices.Contains([]string{"for", "while", "until", "case", "select"}, first):
			s.loops++
		case first == "done" || first == "esac":
			s.loops = max(0, s.loops-1)
		case slices.Contains([]string{"then", "do", "{", "}", "export", "local", "readonly"}, first):
			s.command(words[1:])
		case first == "[" || first == "[[" || first == "test":
			if holds := s.test(words); list[i].end == '&' && !holds || list[i].end == '|' && holds {
				i++
			}
		default:
			s.command(words)
		}
	}
}

// startsArray reports whether a word begins an array.
func startsArray(w word) bool {
	return !w.quoted && strings.HasSuffix(w.text, "=(") && assigned.MatchString(w.text)
}

// arrayLength returns how many statements an array has.
func arrayLength(list []statement) int {
	for i, c := range list {
		if slices.ContainsFunc(c.words, func(w word) bool { return w.text == ")" && !w.quoted }) {
			return i + 1
		}
	}
	return len(list)
}

// conditionLength returns how many statements a condition has, which are joined by && and ||.
func conditionLength(list []statement) int {
	n := 1
	for n < len(list) && (list[n-1].end == '&' || list[n-1].end == '|') {
		n++
	}
	return n
}

func (s *shell) runs() bool {
	return s.loops == 0 && !slices.ContainsFunc(s.branches, func(b branch) bool { return !b.runs })
}

// condition begins a part of an if.
func (s *shell) condition(again bool, list []statement) {
	holds := true
	for i, c := range list {
		words := c.words
		if i == 0 {
			words = words[1:]
		}
		switch test := s.test(words); {
		case i > 0 && list[i-1].end == '|':
			holds = holds || test
		default:
			holds = holds && test
		}
	}
	if !again || len(s.branches) == 0 {
		s.branches = append(s.branches, branch{holds, holds})
		return
	}
	b := &s.branches[len(s.branches)-1]
	b.runs, b.ran = !b.ran && holds, b.ran || holds
}

// test evaluates a condition. Those about files do not hold.
func (s *shell) test(words []word) bool {
	var operands []string
	for _, w := range words {
		if !w.quoted && slices.Contains([]string{"[", "[[", "]", "]]", "test"}, w.text) {
			continue
		}
		operands = append(operands, s.known(w.text))
	}
	if len(operands) > 0 && operands[0] == "!" {
		return len(operands) > 1 && !compare(operands[1:])
	}
	return compare(operands)
}

// known returns a text with the values of its variables, and nothing for those that the script does not set.
func (s *shell) known(text string) string {
	text = s.expand(text)
	for _, found := range variable.FindAllStringSubmatch(text, -1) {
		if name := found[1] + found[3]; !slices.Contains(s.unset, name) {
			s.unset = append(s.unset, name)
		}
	}
	text = variable.ReplaceAllString(text, "")
	return strings.ReplaceAll(text, "$#", "0")
}

func compare(operands []string) bool {
	switch len(operands) {
	case 1:
		return operands[0] != "" && operands[0] != "-n"
	case 2:
		return operands[0] == "-n" && operands[1] != "" || operands[0] == "-z" && operands[1] == ""
	case 3:
	default:
		return false
	}
	a, relation, b := operands[0], operands[1], operands[2]
	x, err := strconv.ParseInt(a, 10, 64)
	y, err2 := strconv.ParseInt(b, 10, 64)
	numbers := err == nil && err2 == nil
	switch relation {
	case "=", "==":
		return a == b
	case "!=":
		return a != b
	case "-eq":
		return numbers && x == y
	case "-ne":
		return numbers && x != y
	case "-gt":
		return numbers && x > y
	case "-ge":
		return numbers && x >= y
	case "-lt":
		return numbers && x < y
	case "-le":
		return numbers && x <= y
	}
	return false
}

// expand puts in the values of variables.
func (s *shell) expand(text string) string {
	if !strings.Contains(text, "$") {
		return text
	}
	text = joined.ReplaceAllStringFunc(text, func(found string) string {
		list, is := s.lists[joined.FindStringSubmatch(found)[1]]
		if !is || len(list)*8 > longestValue {
			return found
		}
		var words []string
		for _, w := range list {
			words = append(words, w.text)
		}
		return strings.Join(words, " ")
	})
	values := map[string]string{}
	for _, found := range asked.FindAllStringSubmatch(text, -1) {
		if is, known := s.values[found[1]]; known {
			values[found[1]] = is.text
		}
	}
	return expandWithin(longestValue, text, values)
}

// command reads assignments, and a command after them.
func (s *shell) command(words []word) {
	if !s.runs() {
		s.leaveOut(words)
		return
	}
	for i, w := range words {
		name := assigned.FindStringSubmatch(w.text)
		if name == nil {
			s.launch(s.split(words[i:]))
			return
		}
		rest := word{strings.TrimPrefix(w.text, name[0]), w.at + int64(len(name[0])), w.quoted}
		if rest.text == "(" && !w.quoted {
			if s.list = name[1]; name[2] == "" {
				s.lists[s.list] = nil
			}
			s.addToList(words[i+1:])
			return
		}
		rest.text = s.expand(rest.text)
		if name[2] != "" {
			rest.text = s.values[name[1]].text + rest.text
		}
		delete(s.lists, name[1])
		s.values[name[1]] = rest
	}
}

// leaveOut notes what a command in a loop or a case sets.
func (s *shell) leaveOut(words []word) {
	for _, w := range words {
		name := assigned.FindStringSubmatch(w.text)
		if s.loops > 0 && name != nil && !slices.Contains(s.looped, name[1]) {
			s.looped = append(s.looped, name[1])
		}
	}
}

// launch adds a command, and those inside: bash -c "torchrun ..." and eval "torchrun ...".
func (s *shell) launch(command []word) {
	inside := ""
	for i, w := range command {
		if i > 0 && w.quoted && strings.HasPrefix(command[i-1].text, "-") && strings.HasSuffix(command[i-1].text, "c") {
			inside = w.text
		}
	}
	if len(command) > 0 && command[0].text == "eval" {
		for _, w := range command[1:] {
			inside += " " + w.text
		}
	}
	if inside == "" {
		s.commands = append(s.commands, command)
		return
	}
	for _, words := range shellCommands(strings.ReplaceAll(inside, "\n ", " ")) {
		for i := range words {
			words[i].at = command[0].at
		}
		s.commands = append(s.commands, words)
	}
}

// addToList adds words to the array that is being read, up to its end.
func (s *shell) addToList(words []word) {
	for _, w := range words {
		if w.text == ")" && !w.quoted {
			s.list = ""
			return
		}
		if len(s.lists[s.list]) < mostWords {
			s.lists[s.list] = append(s.lists[s.list], s.split([]word{w})...)
		}
	}
}

// split puts in the values of variables as Bash does: arrays become their elements, and what has no quotes is split.
func (s *shell) split(words []word) []word {
	var list []word
	for _, w := range words {
		if len(list) > mostWords {
			return list
		}
		if name := whole.FindStringSubmatch(w.text); name != nil {
			if elements, is := s.lists[name[1]+name[2]]; is {
				for _, e := range elements {
					list = append(list, fields(e, !w.quoted && e.quoted)...)
				}
				continue
			}
			if value, is := s.values[name[1]+name[2]]; is {
				list = append(list, fields(value, !w.quoted)...)
				continue
			}
		}
		text := s.expand(w.text)
		list = append(list, fields(word{text, w.at, w.quoted}, text != w.text && !w.quoted)...)
	}
	return list
}

// fields splits a value at its spaces, if it is to be split.
func fields(w word, splits bool) []word {
	if !splits {
		return []word{w}
	}
	var list []word
	for part := range strings.FieldsSeq(w.text) {
		list = append(list, word{part, w.at, false})
	}
	return list
}
