package tier

import (
	"fmt"
	"path/filepath"
)

// layout is where everything lies in the files.
//
// Chunk n is in data file n modulo their number. It has the slots of its state, and then those of its parameters. The
// index file has a head, the label, and two copies of each of the two areas.
type layout struct {
	files   int
	offsets []int64 // by chunk, in its file
	sizes   []int64 // of the data files
	parts   func(chunk int) [Parts]int64
	label   int64 // bytes, in full blocks
	areas   int64 // bytes of each area
}

func newLayout(p *Plan) layout {
	l := layout{files: len(p.Folders), parts: p.Sizes, offsets: make([]int64, p.Chunks),
		sizes: make([]int64, len(p.Folders)), label: Round(int64(len(p.Label))), areas: p.AreaBytes()}
	for i := range l.sizes {
		l.sizes[i] = Block // the head
	}
	for chunk := range l.offsets {
		size := &l.sizes[l.file(chunk)]
		l.offsets[chunk] = *size
		parts := l.parts(chunk)
		*size += 2 * (parts[State] + parts[Parameters])
	}
	return l
}

func (l *layout) file(chunk int) int { return chunk % l.files }

// offset returns where a slot begins in its file.
func (l *layout) offset(chunk int, part Part, slot int) int64 {
	parts := l.parts(chunk)
	offset := l.offsets[chunk] + int64(slot)*parts[part]
	if part == Parameters {
		offset += 2 * parts[State]
	}
	return offset
}

// areaCopies is how many copies each area has. A flipped bit spoils one of them.
const areaCopies = 2

// area returns where a copy of the area of a commit begins in the index file.
func (l *layout) area(generation uint64, number int) int64 {
	return Block + l.label + (areaCopies*int64(generation%2)+int64(number))*l.areas
}

func (l *layout) indexBytes() int64 { return Block + l.label + 2*areaCopies*l.areas }

// AreaBytes returns the size of the index of a commit.
func (p *Plan) AreaBytes() int64 {
	return Round(areaHeadSize + 8*int64(p.Sections+p.EntryCount()+p.Sums))
}

// indexPath returns the path of the index file. It is made last: with it the files are complete.
func (p *Plan) indexPath() string { return filepath.Join(p.Folders[0], p.Name+".index") }

// dataPath returns the path of a data file.
func (p *Plan) dataPath(file int) string {
	return filepath.Join(p.Folders[file], fmt.Sprintf("%s.%d-of-%d.data", p.Name, file+1, len(p.Folders)))
}
