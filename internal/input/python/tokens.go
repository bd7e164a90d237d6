package python

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// tokenKind is the kind of a token.
type tokenKind byte

// The kinds of tokens. An operator is any other sign.
const (
	end      tokenKind = iota
	newline            // the end of a logical line
	indent             // a block begins
	dedent             // a block ends
	name               // a name or a keyword
	number             // as it is written
	text               // the content of a string without escapes
	format             // the content of an f-string
	octets             // the content of bytes
	operator           // one or more signs
)

// token is a token of a source with the offset of its first byte.
type token struct {
	kind tokenKind
	text string
	at   int
}

// scanner splits a source into tokens, as Python's tokenizer does.
type scanner struct {
	source  string
	at      int
	depth   int   // of open brackets
	columns []int // of the blocks around
	tokens  []token
}

// operators are the operators of more than one sign, longer ones first.
var operators = strings.Fields("**= //= >>= <<= ... ** // -> := == != <= >= += -= *= /= %= |= &= ^= @= << >>")

// scan returns the tokens of a source. The last one is an end.
func scan(source string) []token {
	s := &scanner{source: source, columns: []int{0}}
	for s.at < len(source) {
		s.line()
	}
	s.add(newline, "", len(source))
	for range s.columns[1:] {
		s.add(dedent, "", len(source))
	}
	s.add(end, "", len(source))
	return s.tokens
}

func (s *scanner) add(kind tokenKind, of string, at int) {
	s.tokens = append(s.tokens, token{kind, of, at})
}

// line reads a logical line. Lines with nothing but a comment are none, and lines of IPython's commands are left out.
func (s *scanner) line() {
	column, start := 0, s.at
	for ; s.at < len(s.source) && strings.IndexByte(" \t\f", s.source[s.at]) >= 0; s.at++ {
		if column++; s.source[s.at] == '\t' {
			column = (column + 7) / 8 * 8
		}
	}
	rest := s.source[s.at:]
	switch {
	case rest == "":
		return
	case strings.IndexByte("\r\n#!%?", rest[0]) >= 0:
		s.skipLine()
		return
	}
	s.block(column, start)
	for s.at < len(s.source) {
		if done := s.token(); done {
			return
		}
	}
}

// block begins and ends blocks where a line has another indentation.
func (s *scanner) block(column, at int) {
	top := len(s.columns) - 1
	if column > s.columns[top] {
		s.columns = append(s.columns, column)
		s.add(indent, "", at)
		return
	}
	for ; top > 0 && column < s.columns[top]; top-- {
		s.columns = s.columns[:top]
		s.add(dedent, "", at)
	}
}

// skipLine goes to the next line, behind those that a backslash joins.
func (s *scanner) skipLine() {
	for s.at < len(s.source) {
		before := byte(0)
		if s.at > 0 {
			before = s.source[s.at-1]
		}
		s.at++
		if s.source[s.at-1] == '\n' && before != '\\' {
			return
		}
	}
}

// token reads a token, and reports whether it ends the line.
func (s *scanner) token() (ended bool) {
	c, at := s.source[s.at], s.at
	switch {
	case c == '\n':
		s.at++
		if s.depth == 0 {
			s.add(newline, "", at)
			return true
		}
	case c == '#':
		for s.at < len(s.source) && s.source[s.at] != '\n' {
			s.at++
		}
	case c == '\\' || c == ' ' || c == '\t' || c == '\r' || c == '\f':
		s.at++
		if c == '\\' && s.at < len(s.source) && s.source[s.at] == '\n' {
			s.at++
		}
	case c >= '0' && c <= '9' || c == '.' && s.at+1 < len(s.source) && isDigit(s.source[s.at+1]):
		s.number()
	case c == '"' || c == '\'':
		s.string("")
	default:
		s.word()
	}
	return false
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func (s *scanner) number() {
	at := s.at
	for ; s.at < len(s.source); s.at++ {
		c := s.source[s.at]
		signed := (c == '+' || c == '-') && strings.IndexByte("eE", s.source[s.at-1]) >= 0 &&
			!strings.HasPrefix(s.source[at:], "0x")
		if !isDigit(c) && c != '.' && c != '_' && !(c|0x20 >= 'a' && c|0x20 <= 'z') && !signed {
			break
		}
	}
	s.add(number, strings.ReplaceAll(s.source[at:s.at], "_", ""), at)
}

// word reads a name, a string with a prefix, or an operator.
func (s *scanner) word() {
	at := s.at
	for s.at < len(s.source) {
		r, size := utf8.DecodeRuneInString(s.source[s.at:])
		if r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) {
			break
		}
		s.at += size
	}
	if s.at > at {
		word := s.source[at:s.at]
		prefix := strings.ToLower(word)
		quoted := s.at < len(s.source) && strings.IndexByte(`"'`, s.source[s.at]) >= 0
		if quoted && len(word) <= 2 && strings.Trim(prefix, "rbfut") == "" {
			s.string(prefix)
			return
		}
		s.add(name, word, at)
		return
	}
	s.operator()
}

func (s *scanner) operator() {
	at, rest := s.at, s.source[s.at:]
	for _, o := range operators {
		if strings.HasPrefix(rest, o) {
			s.at += len(o)
			s.add(operator, o, at)
			return
		}
	}
	_, size := utf8.DecodeRuneInString(rest)
	s.at += size
	switch rest[0] {
	case '(', '[', '{':
		s.depth++
	case ')', ']', '}':
		s.depth = max(0, s.depth-1)
	}
	s.add(operator, rest[:size], at)
}

// string reads a string whose prefix has been read.
func (s *scanner) string(prefix string) {
	at, quote := s.at-len(prefix), s.source[s.at:s.at+1]
	if long := strings.Repeat(quote, 3); strings.HasPrefix(s.source[s.at:], long) {
		quote = long
	}
	s.at += len(quote)
	var content strings.Builder
	for s.at < len(s.source) && !strings.HasPrefix(s.source[s.at:], quote) {
		c := s.source[s.at]
		if c == '\n' && len(quote) == 1 {
			break // not closed
		}
		s.at++
		if c != '\\' || s.at == len(s.source) || strings.Contains(prefix, "r") {
			content.WriteByte(c)
			continue
		}
		s.escape(&content)
	}
	s.at = min(len(s.source), s.at+len(quote))
	kind := text
	if strings.Contains(prefix, "b") {
		kind = octets
	}
	if strings.Contains(prefix, "f") || strings.Contains(prefix, "t") {
		kind = format
	}
	s.add(kind, content.String(), at)
}

// escape reads what stands behind a backslash.
func (s *scanner) escape(to *strings.Builder) {
	c := s.source[s.at]
	s.at++
	digits := map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
	if number := s.source[s.at:min(len(s.source), s.at+digits)]; digits > 0 {
		if r, err := strconv.ParseUint(number, 16, 32); err == nil && len(number) == digits {
			to.WriteRune(rune(r))
			s.at += digits
			return
		}
	}
	switch c {
	case 'n':
		to.WriteByte('\n')
	case 't':
		to.WriteByte('\t')
	case '\n':
	case '\\', '\'', '"':
		to.WriteByte(c)
	default:
		to.WriteByte('\\')
		to.WriteByte(c)
	}
}
