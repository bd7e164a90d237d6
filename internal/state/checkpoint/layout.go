package checkpoint

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// layout is where the elements of a shard lie in its file: one stream after the other, the streams with the widest
// elements first. So all numbers are aligned, as safetensors requires.
type layout struct {
	*shard.Layout
	pieces []shard.Piece
	saved  []stream
	data   int64 // bytes of all streams
}

// stream is a stream of the file.
type stream struct {
	shard.Stream
	offset int64 // in the data
}

func (s stream) end() int64 { return s.offset + s.Size() }

// newLayout returns the layout of the file of a shard. The shard's sections must match the pieces.
func newLayout(of *shard.Layout, pieces []shard.Piece) (*layout, error) {
	l := &layout{Layout: of, pieces: pieces}
	if err := l.checkPieces(); err != nil {
		return nil, err
	}
	for _, s := range of.Streams {
		if of.Format.State == kernel.FP32 && s.Role == kernel.ParameterRole || s.Role == kernel.GradientRole {
			continue // parameters are the master, rounded
		}
		l.saved = append(l.saved, stream{Stream: s})
	}
	slices.SortStableFunc(l.saved, func(a, b stream) int { return cmp.Compare(b.Type.Size(), a.Type.Size()) })
	for i := range l.saved {
		l.saved[i].offset = l.data
		l.data = l.saved[i].end()
	}
	return l, nil
}

// layoutOfPieces returns the layout of the file of a shard that no process holds.
func layoutOfPieces(format kernel.Format, pieces []shard.Piece) (*layout, error) {
	of, err := shard.NewLayout(format, shard.DefaultChunk, shard.Sections(pieces))
	if err != nil {
		return nil, err
	}
	return newLayout(of, pieces)
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
	of, elements, err := l.Cut(shard.Range{Count: int64(l.Chunks)}.Share(replica, replicas))
	if err != nil {
		return nil, 0, err
	}
	share, err := newLayout(of, shard.Cut(l.pieces, elements))
	return share, elements.First, err
}

// checkPieces checks the pieces against the sections.
func (l *layout) checkPieces() error {
	own, names, sections := shard.Range{}, map[string]bool{}, l.Sections()
	for _, p := range l.pieces {
		if err := p.Validate(); err != nil {
			return err
		}
		if p.Count > l.Elements-own.End() {
			return fmt.Errorf("parameter %q: the ranges have more elements than the shard, %d",
				p.Name, l.Elements)
		}
		if names[p.Name] {
			return fmt.Errorf("parameter %q is listed twice: a shard has one range of a parameter", p.Name)
		}
		names[p.Name] = true
		own = shard.Range{First: own.End(), Count: p.Count}
		number := l.SectionAt(own.First)
		s := sections[number]
		if own.Intersect(l.Section(number).Range) != own || p.Group != s.Group || p.Moments != s.Moments {
			return fmt.Errorf("parameter %q: %d elements of group %d with %v moments do not match the section of the "+
				"state: %d elements of group %d with %v moments",
				p.Name, p.Count, p.Group, p.Moments, s.Elements, s.Group, s.Moments)
		}
	}
	if own.End() != l.Elements {
		return fmt.Errorf("the ranges have %d elements, but the shard has %d", own.End(), l.Elements)
	}
	return nil
}

// region is a chunk of a stream: a range of the data with a checksum.
type region struct {
	stream        int
	sum           int // number of the checksum
	offset, bytes int64
}

// regions returns the regions of a chunk in all streams that have it.
func (l *layout) regions(chunk int) []region {
	var regions []region
	c := l.Chunk(chunk)
	for i := range l.saved {
		stream := &l.saved[i]
		if at, sum, ok := l.In(&stream.Stream, c); ok {
			regions = append(regions, region{
				stream: i, sum: sum, offset: stream.offset + at.First*stream.Type.Size(),
				bytes: stream.BytesOf(at),
			})
		}
	}
	return regions
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
	for _, stream := range l.saved {
		if stream.Role == kernel.HeaderRole { // two pieces may share a block
			tensors = append(tensors, tensor{
				string(stream.Arena), "U16", []int64{stream.Length}, [2]int64{stream.offset, stream.end()},
			})
			continue
		}
		at := stream.offset
		for _, p := range l.pieces {
			if stream.Role.OfMoments() && p.Moments != stream.Moments {
				continue
			}
			end := at + p.Count*stream.Type.Size()
			t := tensor{tensorName(p, stream), safetensorsName(stream.Type), []int64{p.Count}, [2]int64{at, end}}
			if p.IsFull() {
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
func tensorName(p shard.Piece, s stream) string {
	if s.Role == kernel.ParameterRole {
		return p.String()
	}
	return p.String() + "/" + string(s.Component)
}

func safetensorsName(t dtype.Type) string { return safetensorsNames[t] }

var safetensorsNames = map[dtype.Type]string{
	dtype.Bool: "BOOL", dtype.U8: "U8", dtype.I8: "I8", dtype.F8E4M3: "F8_E4M3", dtype.F8E5M2: "F8_E5M2",
	dtype.U16: "U16", dtype.I16: "I16", dtype.F16: "F16", dtype.BF16: "BF16", dtype.U32: "U32", dtype.I32: "I32",
	dtype.F32: "F32", dtype.U64: "U64", dtype.I64: "I64", dtype.F64: "F64",
}

// pageSize is the alignment of the data, so that chunks are full pages of the file if
// their sizes allow it.
const pageSize = 4096

// maxHeader is the limit of the reference implementation of safetensors.
const maxHeader = 100_000_000

// safetensorsHeader returns everything before the data: the length of the header, the header, and
// blanks up to a full page.
func safetensorsHeader(schema string, step int64, tensors []tensor) ([]byte, error) {
	const metadata = "__metadata__" // the one entry that is no tensor
	text := []byte(fmt.Sprintf(`{%q:{"format":"pt","schema":%q,"step":"%d"}`, metadata, schema, step))
	names := map[string]bool{metadata: true}
	for _, t := range tensors {
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
