package evidence

import (
	"cmp"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"sync"

	ahocorasick "github.com/petar-dambovaliev/aho-corasick"

	"plimsoll/internal/base/ledger"
)

// pattern is a text that programs print, and the fact that it tells.
type pattern struct {
	name string
	// literals are strings of which every such text has one. They are looked for in all lines at once, and the
	// expression only in lines that have one.
	literals   []string
	expression string
	kind       Kind // of a file with such a text
	// wrapped is set if the text is long, so that loggers and terminals break it into several lines.
	wrapped bool
	// picky is set if a text without a fact is none of the pattern's, and others may match it.
	picky bool
	// sign is set if the text only speaks of a failure. It counts where the line has no other fact.
	sign bool
	// handled is set if the text says that an error was dealt with, which may stand in the same line.
	handled bool
	// fact returns what the text says, or nil for nothing after all.
	fact func(m *match) Fact
	// take is instead of fact for texts that change what the reader knows, or begin a block of lines.
	take func(r *reader, m *match)

	compiled *regexp.Regexp
	required []string       // texts that every match of the expression has
	closed   bool           // every match ends with the last of them
	joined   *regexp.Regexp // the same without spaces, for lines that are joined
	groups   []string
}

// match is a text in which a pattern was found.
type match struct {
	text
	pattern *pattern
	indices []int
	whole   string // which may join several lines
	stream  *stream
}

// get returns the text of a group, or "" if the group has matched nothing.
func (m *match) get(group string) string {
	for i, name := range m.pattern.groups {
		if name == group && m.indices[2*i] >= 0 {
			return m.whole[m.indices[2*i]:m.indices[2*i+1]]
		}
	}
	return ""
}

// integer returns the number of a group, or missing.
func (m *match) integer(group string, missing int) int {
	if n, err := strconv.Atoi(strings.ReplaceAll(m.get(group), ",", "")); err == nil {
		return n
	}
	return missing
}

// size returns the size of a group. The unit is for numbers without one.
func (m *match) size(group string, unit ledger.Bytes) Size { return sizeOf(m.get(group), unit) }

// noSize is from where on a size is a driver's word for "not available": 2^64 - 1.
const noSize = float64(1 << 60)

// beyond is from where on a size is more than any machine has: 1 PiB.
const beyond = float64(1 << 50)

// moreThan is how PyTorch names the size of a request that it does not even try.
const moreThan = "more than 1EB memory"

// sizeOf reads a size. GB means GiB, as in PyTorch, DeepSpeed and the kernel.
func sizeOf(s string, unit ledger.Bytes) Size {
	const spaces = " \t\n\f\r"
	s = strings.Trim(s, spaces)
	if s == moreThan {
		return Size{Beyond: true}
	}
	word := strings.TrimLeft(s, "0123456789.,")
	value, err := strconv.ParseFloat(strings.ReplaceAll(s[:len(s)-len(word)], ",", ""), 64)
	if err != nil {
		return Size{}
	}
	word = strings.ToLower(strings.TrimLeft(word, spaces))
	if word != "" {
		if power := strings.IndexByte("kmgtpe", word[0]); power >= 0 {
			unit, word = ledger.Bytes(1)<<(10*(1+power)), word[1:]
		}
	}
	switch word {
	case "", "b", "byte", "bytes", "i", "ib", "ibyte", "ibytes", "igabytes":
	default:
		return Size{}
	}
	bytes := value * float64(unit)
	if bytes >= 0 && bytes < noSize {
		return Size{Bytes: ledger.Bytes(bytes + 0.5), Known: true, Beyond: bytes >= beyond}
	}
	return Size{Beyond: bytes >= beyond}
}

// unspaced returns an expression that also matches texts that lack spaces.
func unspaced(expression string) string {
	return strings.NewReplacer(" ", " ?", `\s+`, `\s*`).Replace(expression)
}

// requiredTexts returns texts that every match of an expression has, one after the other, and whether a match ends with
// the last. Most lines that have a literal of a pattern lack one of these texts, and to look for them takes a small
// part of the time of the expression.
func requiredTexts(expression string) (texts []string, closed bool) {
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		panic(err) // an expression of a table, which is compiled, too
	}
	last := parsed
	if parsed.Op == syntax.OpConcat {
		last = parsed.Sub[len(parsed.Sub)-1]
	}
	return requiredBy(parsed), last.Op == syntax.OpLiteral && len(requiredBy(last)) > 0
}

func requiredBy(e *syntax.Regexp) (texts []string) {
	switch {
	case e.Op == syntax.OpLiteral && e.Flags&syntax.FoldCase == 0:
		return []string{string(e.Rune)}
	case e.Op == syntax.OpCapture, e.Op == syntax.OpPlus, e.Op == syntax.OpRepeat && e.Min > 0:
		return requiredBy(e.Sub[0])
	case e.Op == syntax.OpConcat:
		for _, part := range e.Sub {
			texts = append(texts, requiredBy(part)...)
		}
	}
	return texts
}

// find returns where the expression matches, as regexp does. It shows the expression no more of the text than a match
// may have: a short text takes it a quarter of the time.
func (p *pattern) find(s string) []int {
	rest := s
	for _, required := range p.required {
		_, after, found := strings.Cut(rest, required)
		if !found {
			return nil
		}
		rest = after
	}
	if p.closed {
		last := p.required[len(p.required)-1]
		s = s[:strings.LastIndex(s, last)+len(last)]
	}
	return p.compiled.FindStringSubmatchIndex(s)
}

// index finds the patterns whose literals a line has.
type index struct {
	patterns []*pattern
	owner    [][]int // of each literal: the patterns that have it
	shortest int     // literal, in bytes
	signs    int     // the place of the first pattern that is a sign
	machine  ahocorasick.AhoCorasick
}

// patternIndex returns the index of all patterns.
var patternIndex = sync.OnceValue(func() *index {
	x := &index{}
	places := map[string]int{}
	literals := []string{}
	for t, table := range tables {
		for i := range table {
			p := &table[i]
			p.compiled = regexp.MustCompile(p.expression)
			p.groups = p.compiled.SubexpNames()
			p.required, p.closed = requiredTexts(p.expression)
			p.sign = t >= firstSign
			if p.wrapped {
				p.joined = regexp.MustCompile(unspaced(p.expression))
			}
			for _, literal := range p.literals {
				place, known := places[literal]
				if !known {
					place = len(literals)
					places[literal] = place
					literals = append(literals, literal)
					x.owner = append(x.owner, nil)
				}
				x.owner[place] = append(x.owner[place], len(x.patterns))
			}
			if !p.sign {
				x.signs = len(x.patterns) + 1
			}
			x.patterns = append(x.patterns, p)
		}
	}
	x.shortest = len(slices.MinFunc(literals, func(a, b string) int { return cmp.Compare(len(a), len(b)) }))
	builder := ahocorasick.NewAhoCorasickBuilder(ahocorasick.Opts{DFA: true, MatchKind: ahocorasick.StandardMatch})
	x.machine = builder.Build(literals)
	return x
})
