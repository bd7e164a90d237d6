// Package shard lays out the optimizer state that one rank holds. The engine maps its arenas from the layout, a
// checkpoint lays out its files from it, and the service finds what clients ask for in it.
//
// A shard is a number of elements of the model's flat parameters, in order. It is cut in three ways:
//
//   - A [Piece] is what the shard has of one parameter: a range of the flattened parameter.
//   - A [Section] is a range of the shard that a step updates with the same constants, or leaves alone. Its elements
//     have the same parameter group and the same type of moments. A piece is a section.
//   - A [Chunk] is what a worker updates at a time, and what has a checksum in a checkpoint. No chunk reaches into a
//     second section. With int8 moments, chunks are full blocks; only the end of a section may be a short block.
//
// A [Stream] is one array over the elements: master weights, a moment, gradients. It is an arena in memory, and a
// contiguous range of a file. Most streams hold all elements of the shard. The moments of different types are in
// different streams, and each holds the sections of its type, one after the other. So a chunk is a contiguous range of
// every stream that has it.
package shard

import (
	"fmt"
	"slices"
	"sort"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel"
)

// DefaultChunk is the number of elements of a chunk. Updating a chunk takes some tens of microseconds: little beside a
// stop-the-world pause, which has to wait for it, and much beside the work of taking the chunk.
const DefaultChunk = 64 << 10

// Limits that keep sums and products of sizes within 64 bits.
const (
	MaxElements = 1 << 50
	maxGroups   = 1 << 20
)

// Section is a range of a shard, described without its place.
type Section struct {
	Elements int64
	Group    int // number of the parameter group
	Moments  kernel.MomentType
}

// Uniform returns the sections of a shard whose elements are all alike: one, of group 0.
func Uniform(format kernel.Format, elements int64) []Section {
	return []Section{{Elements: elements, Moments: format.Moments}}
}

// Chunk is a range of a shard that lies in one section.
type Chunk struct {
	Range       // elements of the shard
	Number  int // in the shard
	Section int // number of its section
}

// Stream is an array over the elements of a shard.
type Stream struct {
	kernel.Stream
	// Arena is the component of the stream's arena. It includes the type of the moments if that is not the shard's.
	Arena      ledger.Component
	Moments    kernel.MomentType // of the sections that it holds, if it holds moments
	Parameters int64             // elements of the shard that it holds
	Length     int64             // elements of the stream
	Chunks     int               // that it holds
}

// Size returns the size of the stream.
func (s Stream) Size() int64 { return s.BytesOf(Range{0, s.Length}) }

// BytesOf returns the size of a range of the stream.
func (s Stream) BytesOf(r Range) int64 { return r.Count * s.Type.Size() }

// holds reports whether the stream has the elements of a section.
func (s *Stream) holds(section *placed) bool {
	return !s.Role.OfMoments() || s.Moments == section.Moments
}

// Layout is where the elements of a shard lie in its streams. It never changes.
type Layout struct {
	Format        kernel.Format // of the shard; sections may have other moments
	ChunkElements int64         // of a chunk; with int8 moments, rounded up to full blocks
	Elements      int64
	Chunks        int
	Groups        int      // 1 more than the highest number of a parameter group
	Streams       []Stream // in the order of the arenas
	sections      []placed
}

// placed is a section in its place.
type placed struct {
	Section
	first      int64 // element of the shard
	firstChunk int
	chunk      int64 // elements of a chunk
	alike      place // among the sections whose moments have its type
}

// place is the number of the first element, block and chunk of a section.
type place struct {
	element, block int64
	chunk          int
}

func (s *placed) elements() Range { return Range{s.first, s.Elements} }

func (s *placed) chunks() int { return int((s.Elements + s.chunk - 1) / s.chunk) }

// NewLayout lays out a shard of sections. It leaves out those without elements.
func NewLayout(format kernel.Format, chunk int64, sections []Section) (*Layout, error) {
	l := &Layout{Format: format, ChunkElements: chunk}
	if err := format.Validate(); err != nil {
		return nil, err
	}
	if chunk < 1 || chunk > MaxElements {
		return nil, fmt.Errorf("chunks of %d elements", chunk)
	}
	ends := map[kernel.MomentType]place{} // of the sections so far, by the type of their moments
	for _, s := range sections {
		if err := l.check(s); err != nil {
			return nil, err
		}
		if s.Elements > 0 {
			ends[s.Moments] = l.place(s, ends[s.Moments])
		}
	}
	l.addStreams()
	return l, nil
}

// check refuses a section that cannot follow the sections that were placed.
func (l *Layout) check(s Section) error {
	if s.Elements < 0 || s.Elements > MaxElements-l.Elements || s.Group < 0 || s.Group > maxGroups {
		return fmt.Errorf("a section of %d elements in parameter group %d after %d elements",
			s.Elements, s.Group, l.Elements)
	}
	return l.formatOf(s.Moments).Validate()
}

// place puts a section behind the others, and its moments behind those of its type. It returns where the next section
// of that type begins.
func (l *Layout) place(section Section, alike place) place {
	s := placed{Section: section, first: l.Elements, firstChunk: l.Chunks, chunk: l.ChunkElements, alike: alike}
	if s.Moments == kernel.MomentsInt8 {
		s.chunk = blocks(s.chunk) * kernel.Block
	}
	l.sections = append(l.sections, s)
	l.Elements += s.Elements
	l.Chunks += s.chunks()
	l.Groups = max(l.Groups, s.Group+1)
	return place{alike.element + s.Elements, alike.block + blocks(s.Elements), alike.chunk + s.chunks()}
}

// blocks returns the number of blocks of int8 moments; the last may be short.
func blocks(elements int64) int64 { return (elements + kernel.Block - 1) / kernel.Block }

// formatOf returns the format of sections with moments of a type.
func (l *Layout) formatOf(moments kernel.MomentType) kernel.Format {
	f := l.Format
	f.Moments = moments
	return f
}

// addStreams lists the streams. Streams of moments of the shard's own type come before those of other types.
func (l *Layout) addStreams() {
	for _, s := range l.Format.Streams() {
		switch s.Role {
		case kernel.FirstMomentRole:
			for _, moments := range l.momentTypes() {
				for _, s := range l.formatOf(moments).MomentStreams() {
					l.addStream(Stream{Stream: s, Moments: moments})
				}
			}
		case kernel.SecondMomentRole, kernel.HeaderRole: // with the first
		default:
			l.addStream(Stream{Stream: s})
		}
	}
}

func (l *Layout) addStream(s Stream) {
	for i := range l.sections {
		if section := &l.sections[i]; s.holds(section) {
			s.Parameters += section.Elements
			s.Length += s.Elements(section.Elements)
			s.Chunks += section.chunks()
		}
	}
	s.Arena = s.Component
	if s.Role.OfMoments() && s.Moments != l.Format.Moments {
		s.Arena = s.Component.InType(s.Moments.String())
	}
	l.Streams = append(l.Streams, s)
}

// momentTypes returns the types of the sections' moments. The type of the shard's format is first.
func (l *Layout) momentTypes() []kernel.MomentType {
	var types []kernel.MomentType
	for _, moments := range []kernel.MomentType{
		l.Format.Moments, kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8,
	} {
		held := func(s placed) bool { return s.Moments == moments }
		if slices.ContainsFunc(l.sections, held) && !slices.Contains(types, moments) {
			types = append(types, moments)
		}
	}
	return types
}

// Range returns all elements of the shard.
func (l *Layout) Range() Range { return Range{0, l.Elements} }

// Sections returns the sections.
func (l *Layout) Sections() []Section {
	sections := make([]Section, len(l.sections))
	for i, s := range l.sections {
		sections[i] = s.Section
	}
	return sections
}

// FormatOf returns the format of a section.
func (l *Layout) FormatOf(section int) kernel.Format { return l.formatOf(l.sections[section].Moments) }

// Section returns a section as one large chunk. Its number is that of its first chunk.
func (l *Layout) Section(number int) Chunk {
	s := &l.sections[number]
	return Chunk{Range: s.elements(), Number: s.firstChunk, Section: number}
}

// SectionAt returns the number of the section of an element.
func (l *Layout) SectionAt(element int64) int {
	return sort.Search(len(l.sections), func(i int) bool { return l.sections[i].first > element }) - 1
}

// ChunkAt returns the chunk of an element.
func (l *Layout) ChunkAt(element int64) Chunk {
	section := l.SectionAt(element)
	s := &l.sections[section]
	return l.chunkOf(section, int((element-s.first)/s.chunk))
}

// Chunk returns a chunk.
func (l *Layout) Chunk(number int) Chunk {
	section := sort.Search(len(l.sections), func(i int) bool { return l.sections[i].firstChunk > number }) - 1
	return l.chunkOf(section, number-l.sections[section].firstChunk)
}

// chunkOf returns a chunk of a section. Its number counts from the section's first.
func (l *Layout) chunkOf(section, number int) Chunk {
	s := &l.sections[section]
	first := int64(number) * s.chunk
	return Chunk{Range{s.first + first, min(s.chunk, s.Elements-first)}, s.firstChunk + number, section}
}

// ChunksOf returns the numbers of the chunks that have elements of a range.
func (l *Layout) ChunksOf(r Range) Range {
	if r.Count <= 0 {
		return Range{}
	}
	return Between(int64(l.ChunkAt(r.First).Number), int64(l.ChunkAt(r.End()-1).Number)+1)
}

// In returns the range of a stream that holds a chunk, and the chunk's number in the stream. The stream may not have
// the chunk.
func (l *Layout) In(s *Stream, c Chunk) (at Range, number int, ok bool) {
	section := &l.sections[c.Section]
	from := c.First - section.first
	switch {
	case !s.Role.OfMoments():
		return c.Range, c.Number, true
	case !s.holds(section):
		return Range{}, 0, false
	case s.Role == kernel.HeaderRole:
		at = Range{section.alike.block + from/kernel.Block, blocks(c.Count)}
	default:
		at = Range{section.alike.element + from, c.Count}
	}
	return at, section.alike.chunk + c.Number - section.firstChunk, true
}

// State returns the memory of a chunk, cut out of the memory of the streams. A stream without memory is left out.
func (l *Layout) State(c Chunk, streams [][]byte) kernel.Chunk {
	state := kernel.Chunk{First: c.First}
	if s := &l.sections[c.Section]; s.Moments == kernel.MomentsInt8 {
		// The sections of int8 moments number their blocks in one sequence.
		state.First = s.alike.block*kernel.Block + c.First - s.first
	}
	for i := range l.Streams {
		if at, _, ok := l.In(&l.Streams[i], c); ok && streams[i] != nil {
			size := l.Streams[i].Type.Size()
			state.Set(l.Streams[i].Stream, streams[i][at.First*size:at.End()*size])
		}
	}
	return state
}

// Cut returns the layout of some of the chunks, and the elements of the shard that it is for.
func (l *Layout) Cut(chunks Range) (*Layout, Range, error) {
	begin := func(chunk int64) int64 {
		if chunk == int64(l.Chunks) {
			return l.Elements
		}
		return l.Chunk(int(chunk)).First
	}
	elements := Between(begin(chunks.First), begin(chunks.End()))
	sections := l.Sections()
	for i := range sections {
		sections[i].Elements = l.sections[i].elements().Intersect(elements).Count
	}
	cut, err := NewLayout(l.Format, l.ChunkElements, sections)
	return cut, elements, err
}

// StateBytes returns the size of all streams.
func (l *Layout) StateBytes() ledger.Bytes {
	return l.sum(func(Stream) int64 { return 1 })
}

// TrafficBytes returns how many bytes an update reads and writes, added up.
func (l *Layout) TrafficBytes() ledger.Bytes {
	return l.sum(func(s Stream) (passes int64) {
		if s.Read {
			passes++
		}
		if s.Write {
			passes++
		}
		return passes
	})
}

// sum adds up the sizes of the streams, each as often as times says.
func (l *Layout) sum(times func(Stream) int64) ledger.Bytes {
	var sum ledger.Bytes
	for _, s := range l.Streams {
		sum += ledger.Bytes(s.Size() * times(s))
	}
	return sum
}
