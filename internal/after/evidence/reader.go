package evidence

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// Source is a file that was read.
type Source struct {
	Name     string
	Kind     Kind
	Flag     string    // of plimsoll plan, for a configuration of a trainer; empty for all others
	Lines    int       // 0 for a file that was not read line by line
	Cut      bool      // the file is compressed and damaged, or has more findings than are kept: the rest is missing
	Findings []Finding // in the order of the file
	// Signs are lines that speak of a failure in words that no finding explains, after the last steps of a training.
	Signs []Finding
}

// Kind is the kind of a file as its content says.
type Kind string

// The kinds of files. Configurations have the name that package recipe gives them.
const (
	Unknown        Kind = "" // nothing in it is known
	TrainerLog     Kind = "trainer log"
	KernelLog      Kind = "kernel log"
	CgroupCounter  Kind = "cgroup counters"
	HostCounter    Kind = "counters of the host"
	ProcessCounter Kind = "counters of a process"
	LimitList      Kind = "limits of processes"
	DiskList       Kind = "list of file systems"
	GPUList        Kind = "output of nvidia-smi"
	Slurm          Kind = "Slurm's account of jobs"
	Kubernetes     Kind = "Kubernetes document"
	Docker         Kind = "Docker document"
	SystemdLog     Kind = "systemd journal"
	ExitCode       Kind = "exit code"
	Recording      Kind = "recording of plimsoll"
	Plan           Kind = "plan of plimsoll"
	Explanation    Kind = "explanation of plimsoll"
	Snapshot       Kind = "memory snapshot"
	Binary         Kind = "binary file"
	Trace          Kind = "Chrome trace"
	Timeline       Kind = "memory timeline"
	ArchiveFile    Kind = "archive"
)

// maxFindings bounds the memory of a reading. A long log repeats its progress and its memory, so these are thinned out.
const maxFindings = 100_000

// longestMatched is how much of a text is looked at, in bytes: the messages of a JSON line are texts of their own.
const longestMatched = 16 << 10

// mostHeld bounds the lines of all findings, in bytes.
const mostHeld = 256 << 20

// IsRead reports whether facts are made of files of the kind. The others are only recognized.
func (k Kind) IsRead() bool {
	return k != Binary && k != Trace && k != Timeline && k != Explanation && k != ArchiveFile
}

// Read reads a file. Its name is for findings and errors. Errors are *fault.Input or those of the reader.
func Read(name string, from io.Reader) (*Source, error) {
	text, err := Open(name, from)
	if err != nil {
		return nil, err
	}
	return text.Source()
}

// Source reads what the text says. Errors are *fault.Input or those of the reader.
func (t *Text) Source() (*Source, error) {
	s, err := t.read()
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(s.Findings, func(a, b Finding) int { return cmp.Compare(a.Number, b.Number) })
	return s, nil
}

func (t *Text) read() (*Source, error) {
	source := t.source
	if t.Archive != NoArchive {
		source.Kind = ArchiveFile
		return source, nil
	}
	r := &reader{
		source: source, index: patternIndex(), streams: map[string]*stream{},
		kinds: map[Kind]int{}, kernels: map[string]*kernelLog{}, killed: map[int]bool{},
		calls: map[wording]*call{},
	}
	if _, err := t.Peek(1); errors.Is(err, io.EOF) {
		if source.Cut {
			return nil, fault.File(source.Name).Inputf("the file is compressed, and damaged or cut at its beginning")
		}
		return nil, fault.File(source.Name).Inputf("the file is empty")
	}
	text, err := r.document(t.Reader)
	if text == nil || err != nil {
		return r.source, err
	}
	lines := newLineReader(text)
	for {
		line, number, err := lines.next()
		switch {
		case errors.Is(err, io.EOF) || r.full:
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
	last    [16]lastLine
	kernels map[string]*kernelLog
	killed  map[int]bool // PIDs that the kernel has killed
	rows    int          // of the kernel's tables of processes
	hits    []int
	said    int  // how many matches had a meaning
	thin    int  // every so many repetitive findings count
	held    int  // bytes of the lines of all findings
	full    bool // there are more findings than are kept: the rest is not read
	binary  bool // the beginning of the file is no text
	signs   heldSigns
	repeats repeats
	metrics metrics
	calls   map[wording]*call
}

// lastLine is a line as it was read, for texts that began in it.
type lastLine struct {
	number int
	line   []byte
}

// stream is what one process, or whatever else has its own label, has written.
type stream struct {
	active   bool
	block    block
	foreign  int // lines since the last one of the block
	wrapped  *wrapped
	trace    *trace
	headline int      // the place among the findings, from 1, of an exception whose text goes on; or 0
	progress Progress // the last one
	rank     int      // whose lines these are if no label says so, or NoRank
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
		s = &stream{progress: Progress{Step: -1}, rank: NoRank}
		r.streams[strings.Clone(name)] = s
	}
	return s
}

// line reads a line of the file.
func (r *reader) line(line []byte, number int) {
	hidden := hides(line)
	r.index.find(line, &r.hits)
	if len(r.hits) == 0 && !hidden && r.active == 0 {
		r.last[number%len(r.last)].keep(line, number)
		return
	}
	if n := len(r.hits); n > 0 && r.hits[n-1] >= r.index.signs && r.signs.delays(line, number) {
		if !hidden && r.active == 0 && r.hits[0] >= r.index.signs {
			r.last[number%len(r.last)].keep(line, number)
			return
		}
	}
	idle, look := r.active == 0, wording(0)
	if idle {
		if look = wordingOf(line); r.repeats.skips(look, line, number, r.signs.step) {
			r.last[number%len(r.last)].keep(line, number)
			return
		}
	}
	said, kept, dropped := r.said, len(r.source.Findings), r.repeats.dropped
	odd := hidden || bytes.IndexByte(line, '{') >= 0
	for _, t := range unglued(unpack(clean(string(line), number), 0)) {
		t.string = t.string[:min(len(t.string), longestMatched)]
		if odd || t.glued {
			r.index.find([]byte(t.string), &r.hits)
		}
		r.text(&t)
	}
	switch {
	case !idle || r.active > 0:
	case said == r.said:
		r.repeats.saysNothing(look)
	case dropped < r.repeats.dropped && kept == len(r.source.Findings):
		r.repeats.saysTheSame(look)
	}
	r.last[number%len(r.last)].keep(line, number)
}

// hides returns whether a literal of a pattern may be in the line in another spelling: coloured, or escaped in JSON.
func hides(line []byte) bool {
	if bytes.IndexByte(line, 0x1b) >= 0 {
		return true
	}
	for rest := line; ; {
		i := bytes.IndexByte(rest, '\\')
		if i < 0 || i+1 >= len(rest) {
			return false
		}
		if next := rest[i+1]; next == 'u' || next == '/' || next == 't' {
			return true
		}
		rest = rest[i+2:]
	}
}

func (l *lastLine) keep(line []byte, number int) {
	l.number = number
	l.line = append(l.line[:0], line[:min(len(line), 512)]...)
}

// text reads a text with its hits.
func (r *reader) text(t *text) {
	s := r.stream(t.stream)
	if t.rank == NoRank {
		t.rank = s.rank
	}
	r.complete(s, t)
	if s.block != nil {
		switch {
		case s.block.line(r, t):
			s.foreign = 0
			r.settle(s)
			return
		case s.foreign < mostForeign:
			s.foreign++
		default:
			r.finish(s)
		}
	}
	joined := s.wrapped != nil && r.join(s, t)
	if !joined {
		before, inTrace := len(r.source.Findings), s.trace != nil
		ignored := inTrace && s.trace.ignored
		found := r.find(s, t)
		r.trace(s, t, found, before)
		quiet := ignored || inTrace && strings.HasPrefix(t.string, " ") || len(r.source.Findings) > before
		begins := s.wrapped != nil && s.wrapped.first.number == t.number
		if !quiet && r.signs.looked <= eagerSigns && (!found || begins) {
			r.notice(s, t, found)
		}
	}
	r.settle(s)
}

// begin makes the block read the next lines of the stream.
func (r *reader) begin(s *stream, b block) {
	r.finish(s)
	s.block, s.foreign = b, 0
}

// finish ends the block of the stream.
func (r *reader) finish(s *stream) {
	if s.block != nil {
		s.block.end(r)
		s.block = nil
	}
}

// mostForeign is how many lines of others may stand between two lines of a block.
const mostForeign = 100

// settle notes whether lines without literals count in the stream.
func (r *reader) settle(s *stream) {
	active := s.block != nil || s.wrapped != nil || s.trace != nil || s.headline > 0
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
	var first, handled *match
	for _, hit := range r.hits {
		p := r.index.patterns[hit]
		if p.sign || first != nil && !p.handled {
			continue
		}
		m := p.in(t.string)
		if m == nil {
			if p.wrapped {
				broken = append(broken, p)
			}
			continue
		}
		m.text, m.stream = *t, s
		switch {
		case p.picky && p.fact(m) == nil:
		case first == nil:
			first = m
		default: // an error, and in the same line that it was dealt with
			handled = m
		}
	}
	switch {
	case len(broken) > 0 && s.wrapped == nil && (first == nil || !first.pattern.wrapped):
		s.wrapped = r.newWrapped(broken, t, first)
		return true
	case first != nil:
		r.take(first)
		if handled != nil {
			r.take(handled)
		}
		return true
	}
	return false
}

// in returns the match of the pattern in a text, or nil.
func (p *pattern) in(s string) *match {
	if indices := p.find(s); indices != nil {
		return &match{pattern: p, indices: indices, whole: s}
	}
	return nil
}

// take counts a match.
func (r *reader) take(m *match) {
	r.said++
	if m.pattern.kind != Unknown {
		r.kinds[m.pattern.kind]++
	}
	if m.pattern.take != nil {
		m.pattern.take(r, m)
		return
	}
	fact := m.pattern.fact(m)
	if progress, ok := fact.(Progress); ok {
		if progress == m.stream.progress && !progress.Begins && !progress.Metrics { // a bar that is written again
			return
		}
		m.stream.progress = progress
		r.signs.step++
	}
	if _, ok := fact.(Handled); ok {
		r.signs.handled(m.number)
	}
	if fact != nil {
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
	r.said++
	if len(r.source.Findings) >= maxFindings && repetitive(fact) {
		if r.thin++; r.thin%64 != 0 || len(r.source.Findings) >= 2*maxFindings {
			return
		}
	}
	if !r.metrics.keeps(fact) {
		return
	}
	f := Finding{
		Line: Line{File: r.source.Name, Number: t.number, Text: t.shown()},
		Rank: t.rank, Process: t.stream, Time: t.when(), Uptime: t.uptime, Fact: fact,
	}
	if !r.repeats.keeps(&f, t.string) {
		return
	}
	if r.held += len(t.string); len(r.source.Findings) >= 3*maxFindings || r.held > mostHeld {
		r.source.Cut, r.full = true, true
		return
	}
	r.source.Findings = append(r.source.Findings, f)
}

// repetitive returns whether the fact is one of many that a long log has.
func repetitive(fact Fact) bool {
	switch fact.(type) {
	case Progress, MemoryUsage, AllocationRetried, CacheFlushed, Handled, EngineSlept:
		return true
	}
	return false
}

// end ends all that is not complete, and decides the kind of the file.
func (r *reader) end() {
	for _, s := range r.streams {
		r.finish(s)
		if s.wrapped != nil {
			r.giveUp(s)
		}
	}
	for _, k := range r.kernels {
		k.end(r)
	}
	most := 0
	for kind, count := range r.kinds {
		if count > most || count == most && kind < r.source.Kind {
			r.source.Kind, most = kind, count
		}
	}
	if most == 0 && r.binary {
		r.source.Kind = Binary
	}
	r.delayed()
	r.lookAgain()
	r.source.Findings = append(r.source.Findings, r.repeats.rest()...)
	r.signs.drop(r.source.Lines)
	if r.source.Kind != Binary && r.source.Kind != Recording {
		r.source.Signs = r.signs.list
	}
}

// find sets hits to the patterns of which the line has a literal, in the order of the table.
func (x *index) find(line []byte, hits *[]int) {
	*hits = (*hits)[:0]
	if len(line) < x.shortest {
		return
	}
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
	first    text
	sign     *match // what the first line speaks of if no pattern matches in the end, or nil
	// exception is what the first line is if no pattern matches in the end, or nil.
	exception Fact
}

// mostWrapped is over how many lines a logger may break a text.
const mostWrapped = 12

// newWrapped begins with the line before, as a text may begin there.
func (r *reader) newWrapped(patterns []*pattern, t *text, weaker *match) *wrapped {
	w := &wrapped{patterns: patterns, weaker: weaker, first: *t}
	if before := r.before(t); before != nil {
		w.add(before)
	}
	w.add(t)
	return w
}

// before returns the last line of the same stream if it is among the last ones, or nil.
func (r *reader) before(t *text) *text {
	for back := 1; back < len(r.last); back++ {
		l := &r.last[(t.number-back+len(r.last))%len(r.last)]
		if l.number == 0 || l.number != t.number-back {
			continue
		}
		for _, before := range unpack(clean(string(l.line), l.number), 0) {
			if before.stream == t.stream {
				return &before
			}
		}
	}
	return nil
}

// add adds a line, and of a long one its beginning.
func (w *wrapped) add(t *text) {
	w.lines = append(w.lines, *t)
	w.lines[len(w.lines)-1].string = t.shown()
}

// join adds a line to the wrapped text of a stream. It returns whether the line is part of it.
func (r *reader) join(s *stream, t *text) bool {
	w := s.wrapped
	w.add(t)
	whole, starts := w.joined()
	for _, p := range w.patterns {
		indices := p.joined.FindStringSubmatchIndex(whole)
		if indices == nil {
			continue
		}
		first := 0
		for i, start := range starts {
			if start <= indices[0] {
				first = i
			}
		}
		m := &match{pattern: p, indices: indices, whole: whole, stream: s, text: w.lines[first]}
		for _, line := range w.lines[first+1:] {
			m.text.string = strings.TrimSpace(m.text.string) + " " + strings.TrimSpace(line.string)
		}
		s.wrapped = nil
		r.take(m)
		return true
	}
	if len(w.lines) >= mostWrapped {
		r.giveUp(s)
	}
	return false
}

// joined returns the lines as one text, and where each begins in it. Whether a space was between two lines is gone.
func (w *wrapped) joined() (string, []int) {
	var b strings.Builder
	starts := make([]int, len(w.lines))
	for i := range w.lines {
		starts[i] = b.Len()
		b.WriteString(strings.TrimSpace(w.lines[i].string))
	}
	return b.String(), starts
}

// giveUp takes what the first line of a wrapped text says by itself.
func (r *reader) giveUp(s *stream) {
	if weaker := s.wrapped.weaker; weaker != nil {
		r.take(weaker)
	} else if e := s.wrapped.exception; e != nil {
		r.kinds[TrainerLog]++
		r.add(&s.wrapped.first, e)
	} else if sign := s.wrapped.sign; sign != nil {
		r.sign(&s.wrapped.first, sign)
	}
	s.wrapped = nil
}

// pageSize is that of most hosts, in bytes.
const pageSize ledger.Bytes = 4096
