package evidence

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	ahocorasick "github.com/petar-dambovaliev/aho-corasick"

	"plimsoll/lazyregexp"
	"plimsoll/ledger"
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
	// fact returns what the text says, or nil for nothing after all.
	fact func(m *match) Fact
	// take is instead of fact for texts that change what the reader knows, or begin a block of lines.
	take func(r *reader, m *match)

	compiled *regexp.Regexp
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

var sizeText = lazyregexp.New(`^\s*([\d.,]+)\s*(?i:([KMGTPE])?(i)?(?:b|bytes?|igabytes)?)\s*$`)

// noSize is from where on a size is a driver's word for "not available": 2^64 - 1.
const noSize = float64(1 << 60)

// sizeOf reads a size. GB means GiB, as in PyTorch, DeepSpeed and the kernel.
func sizeOf(s string, unit ledger.Bytes) Size {
	groups := sizeText.FindStringSubmatch(s)
	if groups == nil {
		return Size{}
	}
	value, err := strconv.ParseFloat(strings.ReplaceAll(groups[1], ",", ""), 64)
	if err != nil {
		return Size{}
	}
	if groups[2] != "" {
		unit = ledger.Bytes(1) << (10 * (1 + strings.Index("KMGTPE", strings.ToUpper(groups[2]))))
	}
	if bytes := value * float64(unit); bytes >= 0 && bytes < noSize {
		return Size{Bytes: ledger.Bytes(bytes + 0.5), Known: true}
	}
	return Size{}
}

// unspaced returns an expression that also matches texts that lack spaces.
func unspaced(expression string) string {
	return strings.NewReplacer(" ", " ?", `\s+`, `\s*`).Replace(expression)
}

// index finds the patterns whose literals a line has.
type index struct {
	patterns []*pattern
	owner    [][]int // of each literal: the patterns that have it
	shortest int     // literal, in bytes
	machine  ahocorasick.AhoCorasick
}

// patternIndex returns the index of all patterns.
var patternIndex = sync.OnceValue(func() *index {
	x := &index{}
	places := map[string]int{}
	literals := []string{}
	for _, table := range tables {
		for i := range table {
			p := &table[i]
			p.compiled = regexp.MustCompile(p.expression)
			p.groups = p.compiled.SubexpNames()
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
			x.patterns = append(x.patterns, p)
		}
	}
	x.shortest = len(slices.MinFunc(literals, func(a, b string) int { return cmp.Compare(len(a), len(b)) }))
	builder := ahocorasick.NewAhoCorasickBuilder(ahocorasick.Opts{DFA: true, MatchKind: ahocorasick.StandardMatch})
	x.machine = builder.Build(literals)
	return x
})
