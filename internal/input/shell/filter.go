package shell

import (
	"path"
	"slices"
	"strconv"
	"strings"
)

// filter returns what a small command prints, as scripts count devices with: echo $X | tr ',' '\n' | wc -l.
func filter(words []Word, input string) (string, bool) {
	name, arguments := words[0].Text, make([]string, len(words)-1)
	for i, w := range words[1:] {
		arguments[i] = w.Text
	}
	line := strings.Join(arguments, " ")
	switch {
	case name == "echo":
		if len(arguments) > 0 && (arguments[0] == "-n" || arguments[0] == "-e") {
			return strings.Join(arguments[1:], " "), !strings.Contains(line, `\`)
		}
		return line + "\n", true
	case name == "printf":
		return formatted(words[1:])
	case name == "expr":
		return calculated(arguments)
	case name == "tr" && len(arguments) == 2 && len(arguments[0]) == 1:
		return strings.ReplaceAll(input, arguments[0], strings.ReplaceAll(arguments[1], `\n`, "\n")), true
	case name == "tr" && len(arguments) == 2 && arguments[0] == "-d":
		return strings.ReplaceAll(input, arguments[1], ""), true
	case line == "-l" && name == "wc":
		return strconv.Itoa(strings.Count(input, "\n")), true
	case line == "-w" && name == "wc":
		return strconv.Itoa(len(strings.Fields(input))), true
	case name == "grep" && len(arguments) == 2 && arguments[0] == "-o" && len(arguments[1]) == 1:
		return strings.Repeat(arguments[1]+"\n", strings.Count(input, arguments[1])), true
	case name == "awk":
		return fieldsOf(arguments, input)
	case name == "basename" && len(arguments) == 1:
		line = strings.TrimRight(line, "/")
		return line[strings.LastIndexByte(line, '/')+1:], true
	case name == "dirname" && len(withoutDashes(arguments)) == 1:
		return path.Dir(withoutDashes(arguments)[0]), true
	case (name == "realpath" || name == "readlink") && len(withoutDashes(arguments)) == 1:
		return path.Clean(withoutDashes(arguments)[0]), true
	case name == "seq":
		return sequence(arguments)
	}
	return "", false
}

// formatted returns what printf makes of a format with %s and \n, and as many words.
func formatted(words []Word) (string, bool) {
	if len(words) == 0 {
		return "", false
	}
	format := strings.ReplaceAll(words[0].Text, `\n`, "\n")
	parts := strings.Split(format, "%s")
	if len(parts) != len(words) || strings.ContainsAny(strings.Join(parts, ""), `%\`) {
		return "", false
	}
	var out strings.Builder
	for i, part := range parts {
		if i > 0 {
			out.WriteString(words[i].Text)
		}
		out.WriteString(part)
	}
	return out.String(), true
}

// withoutDashes returns arguments without flags. Those of realpath, readlink and dirname change no path that exists.
func withoutDashes(arguments []string) []string {
	return slices.DeleteFunc(slices.Clone(arguments), func(a string) bool { return strings.HasPrefix(a, "-") })
}

// fieldsOf returns the number of fields as awk counts them: awk -F, '{print NF}'.
func fieldsOf(arguments []string, input string) (string, bool) {
	program := arguments[len(arguments)-1]
	if strings.Join(strings.Fields(strings.Trim(program, "{}; ")), " ") != "print NF" {
		return "", false
	}
	separator := strings.TrimPrefix(strings.Join(arguments[:len(arguments)-1], ""), "-F")
	if separator == "" {
		return strconv.Itoa(len(strings.Fields(input))), true
	}
	return strconv.Itoa(len(strings.Split(strings.TrimRight(input, "\n"), separator))), len(separator) == 1
}

// sequence returns the numbers of seq.
func sequence(arguments []string) (string, bool) {
	first, step, last := 1, 1, 0
	var err error
	if len(arguments) > 1 {
		first, err = strconv.Atoi(arguments[0])
	}
	if len(arguments) == 3 && err == nil {
		step, err = strconv.Atoi(arguments[1])
	}
	if err != nil || len(arguments) == 0 || len(arguments) > 3 || step < 1 {
		return "", false
	}
	if last, err = strconv.Atoi(arguments[len(arguments)-1]); err != nil || (last-first)/step > mostTurns {
		return "", false
	}
	var out strings.Builder
	for ; first <= last; first += step {
		out.WriteString(strconv.Itoa(first) + "\n")
	}
	return out.String(), true
}

// calculated returns the result of expr, which works from left to right in * and /, and then in + and -.
func calculated(words []string) (string, bool) {
	if len(words)%2 == 0 {
		return "", false
	}
	var sum, term int64
	sign := int64(1)
	for i := 0; i < len(words); i += 2 {
		n, err := strconv.ParseInt(words[i], 10, 32)
		operator := "+"
		if i > 0 {
			operator = words[i-1]
		}
		switch {
		case err != nil || n == 0 && (operator == "/" || operator == "%"):
			return "", false
		case operator == "+" || operator == "-":
			sum, term, sign = sum+sign*term, n, map[string]int64{"+": 1, "-": -1}[operator]
		case operator == "*":
			term *= n
		case operator == "/":
			term /= n
		case operator == "%":
			term %= n
		default:
			return "", false
		}
	}
	return strconv.FormatInt(sum+sign*term, 10), true
}
