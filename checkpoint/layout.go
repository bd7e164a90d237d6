package checkpoint

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"unsafe"

	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/optim/kernel"
)

// layout is where the elements of a shard lie in its file: one stream after the other,
// each in the order of its arena. So a chunk of the shard is one contiguous range of
// each stream.
type layout struct {
	format   kernel.Format // of the shard; sections may have other moments
	chunk    int64         // elements that are written together and share a checksum
	pieces   []Piece
	sections []section
	streams  []stream
	chunks   int   // of all sections
	elements int64 // of the shard
	data     int64 // bytes of all streams
}

// section is a range of the shard whose moments have one type.
type section struct {
	engine.Section
	first        int64 // element of the shard
	momentsFirst int64 // place in the moment streams of its type
	headersFirst int64 // place in the stream of their headers
	chunk        int64 // elements of a chunk
	chunksFirst  int   // number of its first chunk in the shard
	sumsFirst    int   // its number among the chunks whose moments have that type
}

func (s section) chunks() int { return int((s.Elements + s.chunk - 1) / s.chunk) }

// stream is a stream of the file.
type stream struct {
	kernel.Stream
	name    string            // of its arena in the ledger
	moments kernel.MomentType // of its sections, if it is a stream of moments
	offset  int64             // in the data
	bytes   int64
	sums    int // number of checksums: one for each chunk
}

// ofMoments reports whether the stream holds the moments of one type. All other
// streams hold all sections.
func (s stream) ofMoments() bool {
	return s.Role == kernel.FirstMomentRole || s.Role == kernel.SecondMomentRole || s.Role == kernel.HeaderRole
}

// newLayout returns the layout of a shard. The sections must match the pieces.
func newLayout(format kernel.Format, chunk int64, sections []engine.Section, pieces []Piece) (*layout, error) {
	l := &layout{format: format, chunk: chunk, pieces: pieces}
	if err := format.Validate(); err != nil {
		return nil, err
	}
	if chunk < 1 || chunk > maxElements {
		return nil, fmt.Errorf("chunks of %d elements", chunk)
	}
	if err := l.addSections(sections); err != nil {
		return nil, err
	}
	if err := l.checkPieces(); err != nil {
		return nil, err
	}
	l.addStreams()
	return l, nil
}

func (l *layout) addSections(sections []engine.Section) error {
	type count struct {
		elements, blocks int64
		chunks           int
	}
	counts := map[kernel.MomentType]*count{}
	for _, config := range sections {
		if config.Elements < 0 || config.Elements > maxElements-l.elements ||
			config.Group < 0 || config.Group > maxGroups {
			return fmt.Errorf("a section of %d elements in parameter group %d after %d elements",
				config.Elements, config.Group, l.elements)
		}
		format := l.format
		format.Moments = config.Moments
		if err := format.Validate(); err != nil {
			return err
		}
		if config.Elements == 0 {
			continue
		}
		own := counts[config.Moments]
		if own == nil {
			own = &count{}
			counts[config.Moments] = own
		}
		s := section{
			Section: config, first: l.elements, momentsFirst: own.elements, headersFirst: own.blocks,
			chunk: l.chunk, chunksFirst: l.chunks, sumsFirst: own.chunks,
		}
		if config.Moments == kernel.MomentsInt8 {
			s.chunk = blocks(s.chunk) * kernel.Block
		}
		own.elements += s.Elements
		own.blocks += blocks(s.Elements)
		own.chunks += s.chunks()
		l.chunks += s.chunks()
		l.elements += s.Elements
		l.sections = append(l.sections, s)
	}
	return nil
}

// share returns the layout of a replica's share of the shard, and the first element of
// the share. A share is full chunks, so that blocks of int8 moments are not cut. With
// more replicas than chunks some shares are empty.
func (l *layout) share(replica, replicas int) (*layout, int64, error) {
	replicas = max(1, replicas)
	if replica < 0 || replica >= replicas || replicas > maxRanks {
		return nil, 0, fmt.Errorf("replica %d of %d, expected 0 to %d of at most %d",
			replica, replicas, replicas-1, maxRanks)
	}
	first, end := l.begin(l.chunks*replica/replicas), l.begin(l.chunks*(replica+1)/replicas)
	var sections []engine.Section
	for _, s := range l.sections {
		own := s.Section
		own.Elements = min(end, s.first+s.Elements) - max(first, s.first)
		if own.Elements > 0 {
			sections = append(sections, own)
		}
	}
	share, err := newLayout(l.format, l.chunk, sections, cut(l.pieces, first, end))
	return share, first, err
}

// begin returns the first element of a chunk. For the chunk after the last, it returns
// the number of elements.
func (l *layout) begin(chunk int) int64 {
	if chunk == l.chunks {
		return l.elements
	}
	first, _ := l.extent(chunk)
	return first
}

// blocks returns the number of blocks of int8 moments; the last may be short.
func blocks(elements int64) int64 { return (elements + kernel.Block - 1) / kernel.Block }

// checkPieces checks the pieces against the sections.
func (l *layout) checkPieces() error {
	first, names := int64(0), map[string]bool{}
	for _, p := range l.pieces {
		if err := p.validate(); err != nil {
			return err
		}
		if p.Count > l.elements-first {
			return fmt.Errorf("parameter %q: the ranges have more elements than the shard, %d",
				p.Name, l.elements)
		}
		if names[p.Name] {
			return fmt.Errorf("parameter %q is listed twice: a shard has one range of a parameter", p.Name)
		}
		names[p.Name] = true
		s := l.sectionAt(first)
		if first+p.Count > s.first+s.Elements || p.Group != s.Group || p.Moments != s.Moments {
			return fmt.Errorf("parameter %q: %d elements of group %d with %v moments do not match the section of the "+
				"state: %d elements of group %d with %v moments",
				p.Name, p.Count, p.Group, p.Moments, s.Elements, s.Group, s.Moments)
		}
		first += p.Count
	}
	if first != l.elements {
		return fmt.Errorf("the ranges have %d elements, but the shard has %d", first, l.elements)
	}
	return nil
}

// addStreams adds the streams, the widest elements first. So all numbers are aligned,
// as safetensors requires.
func (l *layout) addStreams() {
	for _, s := range l.format.Streams() {
		if l.format.State == kernel.FP32 && s.Role == kernel.ParameterRole || s.Role == kernel.GradientRole {
			continue // parameters are the master, rounded
		}
		if ofMoments := (stream{Stream: s}).ofMoments(); !ofMoments {
			l.streams = append(l.streams, stream{
				Stream: s, name: string(s.Component), bytes: s.Bytes(l.elements), sums: l.chunks,
			})
		}
	}
	for _, moments := range l.momentTypes() {
		format := l.format
		format.Moments = moments
		for _, s := range format.MomentStreams() {
			own := stream{Stream: s, name: string(s.Component), moments: moments}
			if moments != l.format.Moments {
				own.name += "_" + moments.String()
			}
			for _, section := range l.sections {
				if section.Moments == moments {
					own.bytes += s.Bytes(section.Elements)
					own.sums += section.chunks()
				}
			}
			l.streams = append(l.streams, own)
		}
	}
	slices.SortStableFunc(l.streams, func(a, b stream) int { return cmp.Compare(b.Type.Size(), a.Type.Size()) })
	for i := range l.streams {
		l.streams[i].offset = l.data
		l.data += l.streams[i].bytes
	}
}

// momentTypes returns the types of the sections' moments. The type of the format is
// first.
func (l *layout) momentTypes() []kernel.MomentType {
	var types []kernel.MomentType
	for _, moments := range []kernel.MomentType{
		l.format.Moments, kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8,
	} {
		held := func(s section) bool { return s.Moments == moments }
		if slices.ContainsFunc(l.sections, held) && !slices.Contains(types, moments) {
			types = append(types, moments)
		}
	}
	return types
}

// sectionAt returns the section of an element of the shard.
func (l *layout) sectionAt(element int64) section {
	return l.sections[sort.Search(len(l.sections), func(i int) bool { return l.sections[i].first > element })-1]
}

// chunkAt returns the number of the chunk of an element of the shard.
func (l *layout) chunkAt(element int64) int {
	s := l.sectionAt(element)
	return s.chunksFirst + int((element-s.first)/s.chunk)
}

// sectionOf returns the section of a chunk.
func (l *layout) sectionOf(chunk int) section {
	return l.sections[sort.Search(len(l.sections), func(i int) bool { return l.sections[i].chunksFirst > chunk })-1]
}

// extent returns the elements of the shard that a chunk holds.
func (l *layout) extent(chunk int) (first, count int64) {
	s := l.sectionOf(chunk)
	from := int64(chunk-s.chunksFirst) * s.chunk
	return s.first + from, min(s.chunk, s.Elements-from)
}

// region is a chunk of a stream: a range of the data with a checksum.
type region struct {
	stream        int
	sum           int // number of the checksum
	offset, bytes int64
}

// regions returns the regions of a chunk in all its streams.
func (l *layout) regions(chunk int) []region {
	var regions []region
	s := l.sectionOf(chunk)
	first, count := l.extent(chunk)
	for i, stream := range l.streams {
		r := region{stream: i, sum: chunk, bytes: stream.Bytes(count)}
		at := first
		if stream.ofMoments() {
			if stream.moments != s.Moments {
				continue
			}
			r.sum = s.sumsFirst + chunk - s.chunksFirst
			at = s.momentsFirst + first - s.first
			if stream.Role == kernel.HeaderRole {
				at = s.headersFirst + (first-s.first)/kernel.Block
			}
		}
		r.offset = stream.offset + at*stream.Type.Size()
		regions = append(regions, r)
	}
	return regions
}

// bytesOf returns the bytes of a stream of a chunk.
func bytesOf(c kernel.Chunk, role kernel.Role) []byte {
	switch role {
	case kernel.ParameterRole:
		return raw(c.Parameter)
	case kernel.LowRole:
		return raw(c.Low)
	case kernel.MasterRole:
		return raw(c.Master)
	case kernel.FirstMomentRole:
		return c.Moments[0].Data
	case kernel.SecondMomentRole:
		return c.Moments[1].Data
	case kernel.HeaderRole:
		return raw(c.Headers)
	}
	return nil
}

func raw[T uint16 | float32](s []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t)))
}

// tensor is an entry of the header of a safetensors file.
type tensor struct {
	name        string
	Type        string   `json:"dtype"`
	Shape       []int64  `json:"shape"`
	DataOffsets [2]int64 `json:"data_offsets"`
}

// tensors returns the streams, cut into the pieces, in the order of the data.
func (l *layout) tensors() []tensor {
	var tensors []tensor
	for _, stream := range l.streams {
		if stream.Role == kernel.HeaderRole { // two pieces may share a block
			tensors = append(tensors, tensor{
				stream.name, "U16", []int64{stream.bytes / 2},
				[2]int64{stream.offset, stream.offset + stream.bytes},
			})
			continue
		}
		at := stream.offset
		for _, p := range l.pieces {
			if stream.ofMoments() && p.Moments != stream.moments {
				continue
			}
			end := at + p.Count*stream.Type.Size()
			t := tensor{tensorName(p, stream), safetensorsName(stream.Type), []int64{p.Count}, [2]int64{at, end}}
			if p.whole() {
				t.Shape = append([]int64{}, p.Shape...)
			}
			tensors = append(tensors, t)
			at = end
		}
	}
	return tensors
}

// tensorName returns the name of a piece's tensor. The parameters that the trainer uses
// have the parameter's name. All other streams append their component.
func tensorName(p Piece, s stream) string {
	if s.Role == kernel.ParameterRole {
		return p.String()
	}
	return p.String() + "/" + string(s.Component)
}

func safetensorsName(t dtype.Type) string {
	return map[dtype.Type]string{
		dtype.F32: "F32", dtype.BF16: "BF16", dtype.F16: "F16", dtype.U16: "U16", dtype.U8: "U8",
	}[t]
}

// pageSize is the alignment of the data, so that chunks are full pages of the file if
// their sizes allow it.
const pageSize = 4096

// maxHeader is the limit of the reference implementation of safetensors.
const maxHeader = 100_000_000

// header returns everything before the data: the length of the header, the header, and
// blanks up to a full page.
func (l *layout) header(step int64) ([]byte, error) {
	const metadata = "__metadata__" // the one entry that is no tensor
	text := []byte(fmt.Sprintf(`{%q:{"format":"pt","schema":%q,"step":"%d"}`, metadata, ShardSchema, step))
	names := map[string]bool{metadata: true}
	for _, t := range l.tensors() {
		if names[t.name] {
			return nil, fmt.Errorf("two tensors would have the name %q: a parameter is named like a stream of "+
				"another, or like an entry that is no parameter", t.name)
		}
		names[t.name] = true
		name, err := json.Marshal(t.name)
		if err != nil {
			return nil, err
		}
		entry, err := json.Marshal(t)
		if err != nil {
			return nil, err
		}
		text = append(append(append(append(text, ','), name...), ':'), entry...)
	}
	text = append(text, '}')
	for (8+len(text))%pageSize != 0 {
		text = append(text, ' ')
	}
	if len(text) > maxHeader {
		return nil, fmt.Errorf("the header of the safetensors file would have %d bytes, and at most %d are allowed",
			len(text), maxHeader)
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), nil
}
