package evidence

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"

	"plimsoll/fault"
	"plimsoll/ledger"
)

// Source is a file that was read.
type Source struct {
	Name     string
	Kind     Kind
	Lines    int
	Findings []Finding // in the order of the file
}

// Kind is the kind of a file as its content says.
type Kind string

// The kinds of files.
const (
	Unknown       Kind = "" // nothing in it is known
	TrainerLog    Kind = "trainer log"
	KernelLog     Kind = "kernel log"
	CgroupCounter Kind = "cgroup counters"
	HostCounter   Kind = "counters of the host"
	Kubernetes    Kind = "Kubernetes document"
	SystemdLog    Kind = "systemd journal"
)

// maxFindings bounds the memory of a reading. A long log repeats its progress and its memory, so these are thinned out.
const maxFindings = 100_000

// Read reads a file. Its name is for findings and errors. Errors are *fault.Input or those of the reader.
func Read(name string, from io.Reader) (*Source, error) {
	text, err := open(from)
	if err != nil {
		return nil, err
	}
	r := &reader{
		source: &Source{Name: name}, index: patternIndex(), streams: map[string]*stream{},
		kinds: map[Kind]int{}, kernels: map[string]*kernelLog{},
	}
	if _, err := text.Peek(1); errors.Is(err, io.EOF) {
		return nil, fault.File(name).Inputf("the file is empty")
	}
	lines := newLineReader(text)
	for {
		line, number, err := lines.next()
		switch {
		case errors.Is(err, io.EOF):
			r.end()
			return r.source, nil
		case err != nil:
			return nil, err
		}
		r.source.Lines = number
		r.line(line, number)
	}
}

// reader collects the findings of one file.
type reader struct {
	source  *Source
	index   *index
	kinds   map[Kind]int // how many texts of each kind there were
	streams map[string]*stream
	active  int // streams in which a line may count that has no literal of a pattern
	last    [4]lastLine
	kernels map[string]*kernelLog
	hits    []int
	thin    int // every so many repetitive findings count
}

// lastLine is a line as it was read, for texts that began in it.
type lastLine struct {
	number int
	line   string
}

// stream is what one process, or whatever else has its own label, has written.
type stream struct {
	active   bool
	block    block
	foreign  int // lines since the last one of the block
	wrapped  *wrapped
	trace    *trace
	previous text
}

// block reads lines that belong together.
type block interface {
	// line returns whether the line is part of the block.
	line(r *reader, t *text) bool
	// end is called after the last line.
	end(r *reader)
}

// mostStreams bounds the memory for labels that change all the time.
const mostStreams = 4096

func (r *reader) stream(name string) *stream {
	s := r.streams[name]
	if s == nil {
		if len(r.streams) >= mostStreams {
			name = ""
			if s = r.streams[name]; s != nil {
				return s
			}
		}
		s = &stream{}
		r.streams[strings.Clone(name)] = s
	}
	return s
}

// line reads a line of the file.
func (r *reader) line(line []byte, number int) {
	odd := bytes.IndexByte(line, 0x1b) >= 0 || bytes.HasPrefix(bytes.TrimLeft(line, " "), []byte{'{'})
	r.index.find(line, &r.hits)
	if len(r.hits) == 0 && !odd && r.active == 0 {
		r.last[number%len(r.last)].keep(line, number)
		return
	}
	for _, t := range unpack(clean(string(line), number)) {
		if odd {
			r.index.find([]byte(t.string), &r.hits)
		}
		r.text(&t)
	}
	r.last[number%len(r.last)].keep(line, number)
}

func (l *lastLine) keep(line []byte, number int) {
	l.number = number
	l.line = string(line[:min(len(line), 512)])
}

// text reads a text with its hits.
func (r *reader) text(t *text) {
	s := r.stream(t.stream)
	if s.block != nil {
		switch {
		case s.block.line(r, t):
			s.foreign = 0
			r.settle(s)
			return
		case s.foreign < mostForeign:
			s.foreign++
		default:
			s.block.end(r)
			s.block = nil
		}
	}
	joined := s.wrapped != nil && r.join(s, t)
	if !joined {
		found := r.find(s, t)
		r.trace(s, t, found)
	}
	r.settle(s)
}

// mostForeign is how many lines of others may stand between two lines of a block.
const mostForeign = 100

// settle notes whether lines without literals count in the stream.
func (r *reader) settle(s *stream) {
	active := s.block != nil || s.wrapped != nil || s.trace != nil
	if active != s.active {
		s.active = active
		if active {
			r.active++
		} else {
			r.active--
		}
	}
}

// find looks for patterns in the text. It returns whether there is one.
func (r *reader) find(s *stream, t *text) bool {
	var broken []*pattern
	var first *match
	for _, hit := range r.hits {
		p := r.index.patterns[hit]
		m := p.in(t.string)
		if m == nil {
			if p.wrapped {
				broken = append(broken, p)
			}
			continue
		}
		m.text, m.stream = *t, s
		first = m
		break
	}
	switch {
	case len(broken) > 0 && s.wrapped == nil && (first == nil || !first.pattern.wrapped):
		s.wrapped = r.newWrapped(broken, t, first)
		return true
	case first != nil:
		r.take(first)
		return true
	}
	return false
}

// in returns the match of the pattern in a text, or nil.
func (p *pattern) in(s string) *match {
	if indices := p.compiled.FindStringSubmatchIndex(s); indices != nil {
		return &match{pattern: p, indices: indices, whole: s}
	}
	return nil
}

// take counts a match.
func (r *reader) take(m *match) {
	r.kinds[m.pattern.kind]++
	if m.pattern.take != nil {
		m.pattern.take(r, m)
		return
	}
	if fact := m.pattern.fact(m); fact != nil {
		r.emit(m, fact)
	}
}

// emit adds a finding.
func (r *reader) emit(m *match, fact Fact) {
	if m.rank == NoRank {
		m.rank = m.integer("rank", NoRank)
	}
	r.add(&m.text, fact)
}

// add adds a finding that the text tells.
func (r *reader) add(t *text, fact Fact) {
	if len(r.source.Findings) >= maxFindings && repetitive(fact) {
		if r.thin++; r.thin%64 != 0 || len(r.source.Findings) >= 2*maxFindings {
			return
		}
	}
	if len(r.source.Findings) >= 3*maxFindings {
		return
	}
	r.source.Findings = append(r.source.Findings, Finding{
		Line: Line{File: r.source.Name, Number: t.number, Text: t.shown()},
		Rank: t.rank, Time: t.time, Uptime: t.uptime, Fact: fact,
	})
}

// repetitive returns whether the fact is one of many that a long log has.
func repetitive(fact Fact) bool {
	switch fact.(type) {
	case Progress, MemoryUsage, AllocationRetried, CacheFlushed:
		return true
	}
	return false
}

// end ends all that is not complete, and decides the kind of the file.
func (r *reader) end() {
	for _, s := range r.streams {
		if s.block != nil {
			s.block.end(r)
		}
		if s.wrapped != nil {
			r.giveUp(s)
		}
	}
	for _, k := range r.kernels {
		k.end(r)
	}
	slices.SortStableFunc(r.source.Findings, func(a, b Finding) int { return cmp.Compare(a.Number, b.Number) })
	most := 0
	for kind, count := range r.kinds {
		if count > most || count == most && kind < r.source.Kind {
			r.source.Kind, most = kind, count
		}
	}
}

// find sets hits to the patterns of which the line has a literal, in the order of the table.
func (x *index) find(line []byte, hits *[]int) {
	*hits = (*hits)[:0]
	for i := x.machine.IterOverlappingByte(line); ; {
		m := i.Next()
		if m == nil {
			break
		}
		*hits = append(*hits, x.owner[m.Pattern()]...)
	}
	if len(*hits) > 1 {
		slices.Sort(*hits)
		*hits = slices.Compact(*hits)
	}
}

// wrapped is a text that goes on in the next lines.
type wrapped struct {
	patterns []*pattern
	lines    []text
	weaker   *match // what the first line says by itself, or nil
}

// mostWrapped is over how many lines a logger may break a text.
const mostWrapped = 10

// newWrapped begins with the line before, as a text may begin there.
func (r *reader) newWrapped(patterns []*pattern, t *text, weaker *match) *wrapped {
	w := &wrapped{patterns: patterns, weaker: weaker}
	if before := r.before(t); before != nil {
		w.lines = append(w.lines, *before)
	}
	w.lines = append(w.lines, *t)
	return w
}

// before returns the last line of the same stream if it is among the last ones, or nil.
func (r *reader) before(t *text) *text {
	for back := 1; back < len(r.last); back++ {
		l := &r.last[(t.number-back+len(r.last))%len(r.last)]
		if l.number == 0 || l.number != t.number-back {
			continue
		}
		for _, before := range unpack(clean(l.line, l.number)) {
			if before.stream == t.stream {
				return &before
			}
		}
	}
	return nil
}

// join adds a line to the wrapped text of a stream. It returns whether the line is part of it.
func (r *reader) join(s *stream, t *text) bool {
	w := s.wrapped
	w.lines = append(w.lines, *t)
	for _, between := range []string{" ", ""} {
		whole, starts := w.joined(between)
		for _, p := range w.patterns {
			if m := p.in(whole); m != nil {
				m.stream, s.wrapped = s, nil
				m.text = w.lines[0]
				for i, start := range starts {
					if start <= m.indices[0] {
						m.text = w.lines[i]
					}
				}
				m.text.string = whole[m.indices[0]:m.indices[1]]
				r.take(m)
				return true
			}
		}
	}
	if len(w.lines) >= mostWrapped {
		r.giveUp(s)
	}
	return false
}

// joined returns the lines as one text, and where each begins in it.
func (w *wrapped) joined(between string) (string, []int) {
	var b strings.Builder
	starts := make([]int, len(w.lines))
	for i := range w.lines {
		if i > 0 {
			b.WriteString(between)
		}
		starts[i] = b.Len()
		b.WriteString(strings.TrimSpace(w.lines[i].string))
	}
	return b.String(), starts
}

// giveUp takes what the first line of a wrapped text says by itself.
func (r *reader) giveUp(s *stream) {
	if weaker := s.wrapped.weaker; weaker != nil {
		r.take(weaker)
	}
	s.wrapped = nil
}

// pageSize is that of most hosts, in bytes.
const pageSize ledger.Bytes = 4096
